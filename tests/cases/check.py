"""Run every case by itself and check its form, its ending and its error, without the doctor."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
MARK = re.compile(r"# <- (TT\d{3})\s*$")
RAISES = re.compile(r"^# raises: (.+)$", re.MULTILINE)
KINDS = {
    "second time": "RuntimeError: Trying to backward through the graph a second time",
    "in-place": "modified by an inplace operation",
    "wrong size": "size",  # "expected hidden size ...", "the size of tensor a ...", by operation
}


def marks(source: str) -> list[tuple[int, str]]:
    """Expected findings: (line, code) of every marked line."""
    matches = ((number, MARK.search(line)) for number, line in enumerate(source.splitlines(), 1))
    return [(number, match[1]) for number, match in matches if match]


def form_faults(path: Path, source: str) -> list[str]:
    """Faults of the case as a file."""
    marked, raises, tree = marks(source), RAISES.search(source), ast.parse(source)
    faults: list[str] = []
    if not (ast.get_docstring(tree) and source.startswith('"""')):
        faults.append("the first line is no docstring")
    if 'if __name__ == "__main__":\n    main()\n' not in source:
        faults.append("main() is not called under the guard")
    if path.parent.name == "broken" and len({code for _, code in marked}) != 1:
        faults.append(f"a broken case has lines marked with one code, this one has {marked}")
    if path.parent.name == "healthy" and (marked or raises):
        faults.append("a healthy case has no marked line and raises nothing")
    if raises and raises[1] not in KINDS:
        faults.append(f"unknown kind {raises[1]!r}, known are {sorted(KINDS)}")
    return faults


def run(path: Path) -> subprocess.CompletedProcess[str]:
    """Run the case in a process of its own, in an empty folder that it must leave empty."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run(
            [sys.executable, str(path)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if left := sorted(path.name for path in Path(folder).iterdir()):
            result.returncode, result.stderr = 99, f"left files behind: {left}"
    return result


def run_faults(path: Path, source: str) -> list[str]:
    """Faults of how the case ends."""
    raises, result = RAISES.search(source), run(path)
    last = result.stderr.strip().splitlines()[-1:] or [""]
    if raises is None:
        return [] if result.returncode == 0 else [f"ended with {result.returncode}: {last[0]}"]
    expected = KINDS.get(raises[1], raises[1])
    if result.returncode == 1 and "RuntimeError" in result.stderr and expected in result.stderr:
        return []
    return [f"expected {expected!r}, ended with {result.returncode}: {last[0]}"]


def check(path: Path) -> list[str]:
    """All faults of a case."""
    source = path.read_text()
    return form_faults(path, source) or run_faults(path, source)


def main() -> int:
    """Check the cases named on the command line, or all of them."""
    chosen = [Path(name).resolve() for name in sys.argv[1:]]
    paths = chosen or sorted(
        path for kind in ("broken", "healthy") for path in (HERE / kind).glob("*.py")
    )
    names = [path.stem for path in paths]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    for name in duplicates:
        print(f"{name}: two cases have this name")
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(check, paths))
    for path, faults in zip(paths, results, strict=True):
        for fault in faults:
            print(f"{path.parent.name}/{path.name}: {fault}")
    faulty = len(duplicates) + sum(map(bool, results))
    print(f"{len(paths)} cases, {faulty} with faults")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
