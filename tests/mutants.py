"""Apply each mutant of `mutants.toml` to a copy of the package, and show the test that fails.

    python tests/mutants.py [WORD ...]

takes those whose name or file has one of the words. A mutant is one replacement in one file that
breaks a law. Exits with 1 if a mutant survives, or if its text no longer occurs exactly once.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = "throughtime/kernels/cpu/libthroughtime.so"
# An editable installation would import the package from where it is.
WITHOUT_EDITABLE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""


def failing_test(mutant: dict[str, str], folder: Path) -> str:
    """The line of pytest's report that names the test which notices the mutant."""
    source = ROOT / "src/throughtime" / mutant["file"]
    text = source.read_text()
    if text.count(mutant["old"]) != 1:
        return ""
    copy = folder / "throughtime" / mutant["file"]
    copy.write_text(text.replace(mutant["old"], mutant["new"]))
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
    command += mutant["test"].split()
    library = os.environ.get("THROUGHTIME_LIBRARY", Path(sysconfig.get_path("purelib")) / LIBRARY)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    own = os.environ | {"PYTHONPATH": path, "THROUGHTIME_LIBRARY": str(library)}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    copy.write_text(text)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:110] if done.returncode == 1 and failed else ""


def main(words: list[str]) -> int:
    mutants = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutant"]
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "src/throughtime", folder / "throughtime")
        (folder / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
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
