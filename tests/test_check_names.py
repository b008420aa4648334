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
    return check(tmp_path)


def check(tmp_path: Path) -> tuple[int, list[str]]:
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
    assert lines[1] == "root: 35 code tokens, at most 18,000, budget 18,000"
    assert lines[2].startswith("all: 35 code tokens, budget 175,800")
    assert lines[3].startswith("1 modules")
    assert "module.py (13)" in lines[4]


def write(file: Path, tokens: int) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("a;\n" * (tokens // 2), encoding="utf-8")


def test_each_part_has_its_limit(tmp_path: Path) -> None:
    write(tmp_path / "gradient/window.py", 18_502)
    write(tmp_path / "diagnose/reach.py", 12_000)
    code, lines = check(tmp_path)
    assert code == 1
    assert lines[1] == "diagnose: 12,000 code tokens, at most 12,000, budget 12,000"
    size, modules = lines[2].split("; ")
    assert size == "gradient: 18,502 code tokens, at most 18,500: TOO MANY, budget 18,500"
    assert modules == "1 modules, at most 10"
    write(tmp_path / "gradient/window.py", 18_500)
    assert check(tmp_path)[0] == 0


def test_the_modules_of_a_part_may_have_a_limit(tmp_path: Path) -> None:
    for number in range(10):
        write(tmp_path / f"gradient/part{number}.py", 2)
    write(tmp_path / "gradient/__init__.py", 2)
    assert check(tmp_path)[0] == 0
    write(tmp_path / "gradient/part10.py", 2)
    code, lines = check(tmp_path)
    assert code == 1
    assert lines[1].endswith("11 modules, at most 10: TOO MANY")


def test_small_folders_are_counted_to_others(tmp_path: Path) -> None:
    for file in ("app/cli.py", "kernels/scan.py", "nn/layers.py", "state.py"):
        write(tmp_path / file, 10)
    code, lines = check(tmp_path)
    assert code == 0
    assert [line.split(",")[0] for line in lines[1:4]] == [
        "app: 10 code tokens",
        "kernels",
        "root: 10 code tokens",
    ]


def test_a_part_without_a_limit_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "new/module.py", 2)
    code, lines = check(tmp_path)
    assert code == 1
    assert lines[1] == "new: 2 code tokens, at most 0: TOO MANY, budget 0"
