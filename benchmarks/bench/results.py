"""The rows of a run in a JSON file, written after every case."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.bench.cases import Case
from benchmarks.bench.machine import machine, peaks, with_threads
from benchmarks.bench.measure import Settings, measure

from throughtime.errors import ConfigError, RunError
from throughtime.kernels.library import level

AVX2 = "v3"
AVX2_ENVIRONMENT = {  # restricts our kernels, torch, oneDNN and MKL to AVX2
    "THROUGHTIME_LEVEL": AVX2,
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
Log = Callable[[str], None]


class Results:
    """The file of results, and what is in it.

    Args:
        path: JSON.
        add: keep what the file has, and take the place of the same case, threads and instruction
            set only.

    Raises:
        ConfigError: what is there was measured elsewhere, or is something else.
    """

    def __init__(self, path: Path, *, add: bool = False) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        self.machine, self.peaks = machine(), dict[str, Any]()
        if add and path.is_file():
            before = read(path)
            if before["machine"] != self.machine:
                raise ConfigError(
                    f"{path} was measured on {before['machine']}, this is {self.machine}: leave out"
                    " --add, or give another --out"
                )
            self.rows, self.peaks = before["rows"], before["peaks"]

    def put(self, row: dict[str, Any]) -> None:
        """Takes the row in, in place of the one before it, and writes the file."""
        kept = [
            old
            for old in self.rows
            if any(old[key] != row[key] for key in ("case", "threads", "level"))
        ]
        self.rows = [*kept, row]
        self.write()

    def write(self) -> None:
        """As it is now."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        summary = {"machine": self.machine, "peaks": self.peaks, "rows": self.rows}
        self.path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """What a file of results holds.

    Raises:
        ConfigError: it is none.
    """
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if {"machine", "peaks", "rows"} <= set(summary):
            return summary
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}. Expected a file that python -m benchmarks.bench wrote; measure"
            " first, without --show"
        ) from error
    raise ConfigError(
        f"{path}: expected a file that python -m benchmarks.bench wrote, with machine, peaks and"
        " rows; measure first, without --show"
    )


def run(
    results: Results, cases: Sequence[Case], threads: Sequence[int], settings: Settings, say: Log
) -> None:
    """Measures every case with every number of threads, in this process."""
    now = level() or "none"
    for count in threads:
        with with_threads(count):
            peak = results.peaks.setdefault(now, {})[str(count)] = peaks()
            say(
                f"{now}, {count} thread{'s' if count > 1 else ''}, GFLOP/s of large products:"
                f" {peak}"
            )
            for case in cases:
                row = measure(case, settings, peak) | {"settings": asdict(settings)}
                results.put(row)
                say(in_words(row))


def in_words(row: dict[str, Any]) -> str:
    """A row in a line."""
    implementations = "; ".join(
        f"{name} {implementation['ms'][1]:.3f} ms ({implementation['ratio'][1]:.2f})"
        for name, implementation in row["implementations"].items()
    )
    absent = "".join(f"; {name} left out: {why}" for name, why in row["absent"].items())
    return (
        f"{row['case']}, {row['runs']}: {implementations};"
        f" {next(iter(row['implementations'].values()))['ms'][1] / row['floor_ms']:.1f} times the"
        f" floor{absent}"
    )


def run_avx2(
    results: Results, cases: Sequence[Case], threads: Sequence[int], flags: Sequence[str], say: Log
) -> None:
    """Measure in a process restricted to AVX2: instruction sets are chosen once per process.

    Args:
        results: receives its rows.
        cases: to measure.
        threads: numbers of threads.
        flags: of the command, for `Settings`.
        say: is called with every line of output.

    Raises:
        RunError: it failed; with its last lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "narrow.json"
        summary = [
            "--cases",
            ",".join(case.name for case in cases),
            "--threads",
            ",".join(map(str, threads)),
            "--levels",
            "own",
        ]
        command = [
            sys.executable,
            "-m",
            "benchmarks.bench",
            *summary,
            *flags,
            "--peers",
            "none",
            "--out",
            str(path),
        ]
        last = ""
        for last in _lines(command):
            say(last)
        if not path.is_file():
            raise RunError(f"the process without AVX-512 measured nothing; it said last: {last}")
        result = read(path)
    results.peaks |= result["peaks"]
    for row in result["rows"]:
        results.put(row)


def _lines(command: Sequence[str]) -> Iterator[str]:
    with subprocess.Popen(
        command,
        env=os.environ | AVX2_ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:  # our own command
        for line in child.stdout or ():
            yield line.rstrip()
    if child.returncode:
        raise RunError(
            f"the process without AVX-512 ended with code {child.returncode}; what it said is above"
        )


def avx512() -> bool:
    """Whether there is a narrower instruction set to hold this processor to."""
    return level() == "v4" and "AVX512" in torch.backends.cpu.get_cpu_capability()
