"""Apply each mutant of `mutants.toml` to a copy of the package, and show the test that fails.

    python tests/mutants.py [WORD ...]

takes those whose name or file has one of the words. A mutant is one replacement in one file that
breaks a law. Exits with 1 if a mutant survives, or if its text no longer occurs exactly once.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = "throughtime/kernels/cpu/libthroughtime.so"
# An editable installation would import the package from where it is.
WITHOUT_EDITABLE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""


def failing_test(mutant: dict[str, str], folder: Path) -> str:
    """The line of pytest's report that names the test which notices the mutant."""
    text = (ROOT / "src/throughtime" / mutant["file"]).read_text()
    if text.count(mutant["old"]) != 1:
        return ""
    copy, report = folder / "throughtime" / mutant["file"], folder / "report"
    copy.write_text(text.replace(mutant["old"], mutant["new"]))
    if (child := os.fork()) == 0:  # PyTorch is imported once
        with report.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = pytest.main(["-qx", "-p", "no:cacheprovider", "-n0", *mutant["test"].split()])
            os._exit(code)
    _, status = os.waitpid(child, 0)
    copy.write_text(text)
    lines = [s for s in report.read_text().splitlines() if s.startswith("FAILED")]
    return lines[0][:110] if os.waitstatus_to_exitcode(status) == 1 and lines else ""


def main(words: list[str]) -> int:
    mutants = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutant"]
    survivors = 0
    import_module("torch")  # before any fork
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "src/throughtime", folder / "throughtime")
        (folder / "sitecustomize.py").write_text(WITHOUT_EDITABLE)  # of processes that tests start
        sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
        sys.path.insert(0, name)
        library = Path(sysconfig.get_path("purelib")) / LIBRARY
        os.environ.setdefault("THROUGHTIME_LIBRARY", str(library))
        os.environ["PYTHONPATH"] = os.pathsep.join([name, os.environ.get("PYTHONPATH", "")])
        os.environ["MUTANT"] = "1"
        os.chdir(ROOT)
        for mutant in mutants:
            title = f"{mutant['file']}: {mutant['name']}"
            if words and not any(word in title for word in words):
                continue
            line = failing_test(mutant, folder)
            survivors += not line
            print(f"{title}\n    {line or 'SURVIVES'}", flush=True)
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
