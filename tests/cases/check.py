"""Run every case by itself and check its form, its ending and its error, without the doctor."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
MARK = re.compile(r"# <- (TT\d{3})\s*$")
RAISES = re.compile(r"^    # raises: (.+)$", re.MULTILINE)
KINDS = {
    "second time": "RuntimeError: Trying to backward through the graph a second time",
    "in-place": "modified by an inplace operation",
    "wrong size": "size",  # "expected hidden size ...", "the size of tensor a ...", by operation
}


@dataclass(frozen=True)
class Case:
    """A function with a docstring, and what stands before it since the last one.

    Attributes:
        path: of its file.
        name: of the function.
        start: the first of its lines.
        source: its lines.
    """

    path: Path
    name: str
    start: int
    source: str

    @property
    def marks(self) -> set[tuple[str, int]]:
        """The codes and lines of all marked lines."""
        lines = enumerate(self.source.splitlines(), self.start)
        return {(mark[1], number) for number, line in lines if (mark := MARK.search(line))}

    @property
    def raises(self) -> str | None:
        """The kind of error that it raises."""
        found = RAISES.search(self.source)
        return found and found[1]

    def load(self) -> Callable[[], None]:
        """The function, in a module of its own."""
        spec = importlib.util.spec_from_file_location(f"case_{self.path.stem}", self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # of its dataclasses
        spec.loader.exec_module(module)
        return getattr(module, self.name)


@cache
def cases(group: str) -> dict[str, Case]:
    """The broken or the healthy cases, by name."""
    found: dict[str, Case] = {}
    for path in sorted((HERE / group).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines, start = text.splitlines(), 1
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                start = (node.end_lineno or 0) + 1
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                end = node.end_lineno or 0
                source = "\n".join(lines[start - 1 : end])
                assert node.name not in found, f"two cases are called {node.name}"
                found[node.name] = Case(path, node.name, start, source)
                start = end + 1
    return found


def form_faults(case: Case) -> list[str]:
    """Faults of the case as it is written."""
    faults: list[str] = []
    broken, codes = case.path.parent.name == "broken", {code for code, _ in case.marks}
    if broken and len(codes) != 1:
        faults.append(f"a broken case has lines marked with one code, this one has {codes}")
    if not broken and (codes or case.raises):
        faults.append("a healthy case has no marked line and raises nothing")
    if case.raises and case.raises not in KINDS:
        faults.append(f"unknown kind {case.raises!r}, known are {sorted(KINDS)}")
    return faults


def run_faults(case: Case) -> list[str]:
    """Faults of how the case ends, in a process and an empty folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, __file__, "--run", case.path.parent.name, case.name],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if left := sorted(path.name for path in Path(folder).iterdir()):
            return [f"left files behind: {left}"]
    last = result.stderr.strip().splitlines()[-1:] or [""]
    if case.raises is None:
        return [] if result.returncode == 0 else [f"ended with {result.returncode}: {last[0]}"]
    expected = KINDS[case.raises]
    if result.returncode == 1 and "RuntimeError" in result.stderr and expected in result.stderr:
        return []
    return [f"expected {expected!r}, ended with {result.returncode}: {last[0]}"]


def main(names: list[str]) -> int:
    """Check the cases named on the command line, or all of them."""
    every = cases("broken") | cases("healthy")
    chosen = [every[name] for name in names or every]
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(lambda case: form_faults(case) or run_faults(case), chosen))
    for case, faults in zip(chosen, results, strict=True):
        for fault in faults:
            print(f"{case.path.parent.name}/{case.path.name}: {case.name}: {fault}")
    faulty = sum(map(bool, results))
    print(f"{len(chosen)} cases, {faulty} with faults")
    return 1 if faulty else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        cases(sys.argv[2])[sys.argv[3]].load()()
    else:
        sys.exit(main(sys.argv[1:]))
