"""Recurrent modules as their authors write them, each with an oracle in plain torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from .case import Case

CASES: list[Case] = [
    case
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem not in ("__init__", "case", "check")
    for case in import_module(f"{__name__}.{path.stem}").CASES
]
BY_NAME = {case.name: case for case in CASES}
