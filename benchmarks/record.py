"""What the benchmarks share: their options, and the file of figures that each of them writes."""

import argparse
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import throughtime as tt

RESULTS = Path(__file__).parent / "results"


def parser_of(doc: str | None, name: str, rounds: int | None = None) -> argparse.ArgumentParser:
    """The options of a benchmark: how many rounds, and the file, by default in `results`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    return parser


def write(path: Path, figures: Mapping[str, Any]) -> None:
    """Write the figures as JSON, and on what machine and with which versions they were measured."""
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "throughtime": tt.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "system": platform.platform(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **figures}, indent=1) + "\n", encoding="utf-8")
