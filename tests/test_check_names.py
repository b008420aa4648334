"""`tools/check_names.py`: each kind of fault at its line, and nothing in a clean source."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parent.parent / "tools" / "check_names.py"
BROKEN = '''"""A docstring."""
from os import path as place


class Seen:
    way: int = 0


class _LaneMasked:
    def made(self, had):
        self.told = had


def count(found=lambda side: side):
    for given in ():
        pass
    class Seen:
        pass
'''
CLEAN = '''"""A docstring with found, given and made in it."""


class Truncated:
    """A policy."""


class Recording(Truncated):
    found_at: int = 0


def found_rows(match, *, path="found"):
    return match.place(given=path)  # a name of somebody else's API
'''


def run(tmp_path: Path, source: str) -> tuple[int, list[str]]:
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    words = [sys.executable, str(TOOL), str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert not result.stderr
    return result.returncode, result.stdout.replace(f"{tmp_path}/", "").splitlines()


def test_every_kind_of_fault_is_listed_with_its_line(tmp_path: Path) -> None:
    code, lines = run(tmp_path, BROKEN + "x = " + "1 + " * 25 + "1\n")
    assert code == 1
    starts = [line.split(":")[1] for line in lines if line.startswith("module.py:")]
    assert starts == ["2", "5", "6", "9", "10", "10", "11", "14", "14", "15", "17", "17", "19"]
    assert "module.py:17: class Seen is defined in module.py:5 as well" in lines
    assert "13 faults" in lines


def test_a_clean_source_passes_with_its_totals(tmp_path: Path) -> None:
    code, lines = run(tmp_path, CLEAN)
    assert code == 0
    assert lines[0] == "0 faults"
    assert lines[1].startswith("35 code tokens")
    assert lines[2].startswith("1 modules")
    assert "module.py (13)" in lines[3]
