"""Predictions of a finished run, written to files: one recording, or all of a split to a folder.

A file appears whole or not at all: it is written under another name first. Memory does not grow
with the length of a recording.

Shapes: `T` steps, `n` of a chunk, `C` classes or output columns.
"""

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from throughtime.app.config import PredictOptions
from throughtime.app.load import Run
from throughtime.errors import ConfigError, listed
from throughtime.files import named_errors, write_atomically
from throughtime.predict import predict
from throughtime.stream import Recording
from throughtime.stream.formats import SUFFIXES
from throughtime.stream.formats.table import Array, is_number
from throughtime.stream.formats.times import time_texts
from throughtime.stream.manifest import find_recordings, is_folder, is_manifest
from throughtime.stream.recording import step_times

LISTING = "predictions.json"
_SUFFIXES = (".npy", ".csv")
_CHUNK = 8192  # steps
_UNSAFE = re.compile(r"[^\w .=+@#-]+")  # characters that a system may refuse in a file name
_LONGEST = 120  # characters of a part of a path
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # the first character of one


class PredictionWriter:
    """The array that `tt.predict` fills: outputs as probabilities, counted, and written to a file.

    A `.npy` has the shape `(T, C)`. A `.csv` has a row per step: the step, its time stamp if the
    recording has some, the time or the row that a single forecast is for, the class, and a
    probability of each class or a value of each target.

    Args:
        file: open for bytes.
        suffix: of its format.
        recording: that is predicted.
        run: its model.

    Attributes:
        skipped: the number of steps that were left out.
    """

    def __init__(self, file: BinaryIO, suffix: str, recording: Recording, run: Run) -> None:
        self._file, self._suffix, self.skipped = file, suffix, 0
        self._recording, self._spec = recording, run.spec
        if suffix == ".npy":  # appended to: mapping it would keep its pages in memory
            shape, kind = (len(recording), run.spec.outputs), np.dtype(run.spec.dtype).str
            header = {"descr": kind, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(file, header)

    def __setitem__(self, steps: slice, values: Array) -> None:
        spec, start, stop = self._spec, steps.start, steps.start + len(values)
        if spec.difference:  # where the present value is missing, a change from it says nothing
            inputs = self._recording.read(start, stop).inputs.reshape(len(values), -1)
            present = inputs[:, list(spec.difference)]
            values = np.where(np.isfinite(present), values, np.nan)
        self.skipped += int(np.isnan(values).any(axis=1).sum())
        values = spec.probabilities(torch.from_numpy(values)).numpy()
        if self._suffix == ".npy":
            self._file.write(np.ascontiguousarray(values).tobytes())
        else:
            columns, text = self._columns(start, stop, values), io.StringIO(newline="")
            rows = csv.writer(text)
            if start == 0:
                rows.writerow(map(plain_text, columns))
            rows.writerows(zip(*columns.values(), strict=True))
            self._file.write(text.getvalue().encode())

    def _columns(self, start: int, stop: int, outputs: Array) -> dict[str, Sequence[Any]]:
        """The columns of some steps; `outputs` `(n, C)` are probabilities, or values."""
        spec, recording, steps = self._spec, self._recording, np.arange(start, stop)
        columns: dict[str, Sequence[Any]] = {"step": steps.tolist()}
        times = step_times(recording, start, stop)
        if times is not None:
            columns["time"] = time_texts(times.astype("M8[ns]"))
        if len(spec.layout.ahead) == 1:
            columns["forecast_for"] = (steps + spec.layout.ahead[0]).tolist()
        if spec.classes:
            names = [*map(plain_text, spec.classes), ""]  # none where a step was left out
            missing = np.isnan(outputs).any(axis=1)
            chosen = np.where(missing, -1, outputs.argmax(axis=1))
            columns["class"] = [names[i] for i in chosen.tolist()]
        sign = "p" if spec.classes or spec.is_multilabel else "y"
        for name, y in zip(spec.classes or spec.target_names, outputs.T, strict=True):
            columns[f"{sign}[{name}]"] = [f"{value:.6g}" for value in y.tolist()]
        return columns


def plain_text(text: str) -> str:
    """The text with an apostrophe before it where a spreadsheet would compute it as a formula.

    Example:
        >>> plain_text("=1+1"), plain_text("-5"), plain_text("beat")
        ("'=1+1", '-5', 'beat')
    """
    return f"'{text}" if text.startswith(_FORMULA) and not is_number(text) else text


class WrittenFile(NamedTuple):
    """The predictions of a recording: their file, its rows, and how many steps were left out."""

    path: Path
    steps: int
    skipped: int


def predict_run(run: Run, options: PredictOptions) -> list[WrittenFile]:
    """Write the predictions of each recording to a file.

    Those of a single file to one file, of others to a folder with files named after them; at an
    error the files before it are whole.

    Args:
        run: its model and settings.
        options: the recordings, default: those that `recordings_for` takes; the file or folder,
            default: predictions.csv, or the folder predictions; how to treat NaN.

    Raises:
        RunError, DataError: a recording failed.
        ConfigError: a file would replace one of the recordings, or stands for several.
    """
    data, split = options.data, options.split
    many = split is not None or data is None or is_folder(data) or is_manifest(data)
    form = options.format or "csv"
    out = options.out or Path("predictions" + f".{form}" * (not many))
    suffix = "" if out.is_dir() else out.suffix.lower()
    allowed = _SUFFIXES if options.format is None else [f".{form}"]
    if suffix and (many or suffix not in allowed):
        raise ConfigError(
            f"--out {out}: predictions are written as {listed(allowed)}, those of many recordings"
            " to a folder"
        )
    recordings = run.recordings(data, split, targets=False)
    names = file_names([recording.name for recording in recordings])
    paths = [out] if suffix else [out / f"{name}.{form}" for name in names]
    entries = find_recordings(data or Path(run.config.data), run.spec.layout.static)
    kept = {source.resolve() for entry in entries for source in entry.inputs}
    if lost := [path for path in paths if path.resolve() in kept]:
        raise ConfigError(f"{listed(lost)} is a recording itself; choose another --out")
    if not suffix:  # by it readers of a folder of recordings know this one
        write_atomically(out / LISTING, json.dumps([path.name for path in paths]).encode())
    done = list[WrittenFile]()
    for recording, path in zip(recordings, paths, strict=True):
        skipped = _write(run, recording, path, options)
        done.append(WrittenFile(path, len(recording), skipped))
    return done


def _write(run: Run, recording: Recording, out: Path, options: PredictOptions) -> int:
    """Write the predictions of a recording; return the number of steps left out."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary, dtype = out.with_name(f".{out.stem}.part{out.suffix}"), run.spec.torch_dtype
    how: Any = {"missing": options.missing, "on_nan": options.on_nan, "dtype": dtype}
    try:
        with named_errors(out), temporary.open("wb") as file:
            outputs = PredictionWriter(file, out.suffix.lower(), recording, run)
            predict(run.net, recording, chunk=_CHUNK, out=outputs, **how)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return outputs.skipped


def file_names(names: Sequence[str]) -> list[str]:
    """A file without suffix for each recording, within the folder; sub-folders stay.

    Raises:
        ConfigError: two that some system takes for the same.

    Example:
        >>> file_names(["a/1.csv", "../x", "r.csv[80:100]"])
        ['a/1', '-/x', 'r.csv-80-100']
    """
    files = dict[str, str]()  # by what a system takes for the same name
    for name in names:
        stem, dot, suffix = name.rpartition(".")
        stem = stem if stem and dot + suffix.lower() in SUFFIXES else name
        path = "/".join(map(_safe, stem.split("/")))
        if path.casefold() in files:
            raise ConfigError(f"two recordings would be written to {path}; rename one: {name}")
        files[path.casefold()] = path
    return [*files.values()]


def _safe(part: str) -> str:
    """A part of a path of plain characters that names no other folder."""
    return _UNSAFE.sub("-", part).rstrip(" .-")[:_LONGEST].lstrip(" .") or "-"
