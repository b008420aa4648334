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

from throughtime import state as trees
from throughtime.app.config import PredictOptions
from throughtime.app.dataset import recordings_for
from throughtime.app.load import Run
from throughtime.app.model import ModelSpec, one_thread
from throughtime.app.recordings import progress
from throughtime.errors import ConfigError, DataError, RunError, listed
from throughtime.files import named_errors, write_atomically
from throughtime.predict import predict
from throughtime.state import State
from throughtime.stream import Recording
from throughtime.stream.formats import SUFFIXES
from throughtime.stream.formats.table import Array, is_number
from throughtime.stream.formats.times import time_texts
from throughtime.stream.manifest import find_recordings, is_folder, is_manifest
from throughtime.stream.recording import step_times
from throughtime.stream.targets import later_times

LISTING = "predictions.json"
_SUFFIXES = (".npy", ".csv", ".parquet")
_CHUNK = 8192  # steps: also of a row group of Parquet
_UNSAFE = re.compile(r"[^\w .=+@#-]+")  # characters that a system may refuse in a file name
_LONGEST = 120  # characters of a part of a path
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # the first character of one


class PredictionWriter:
    """The array that `tt.predict` fills: outputs as probabilities, counted, and written to a file.

    A `.npy` has the shape `(T, C)`. The others have a row per step: the step, its time stamp if the
    recording has some, the time or the row that a single forecast is for, the class, and a
    probability of each class or a value of each target.

    Args:
        file: open for bytes.
        suffix: of its format.
        recording: that is predicted.
        spec: of the model.

    Attributes:
        skipped: the number of steps that were left out.
    """

    def __init__(self, file: BinaryIO, suffix: str, recording: Recording, spec: ModelSpec) -> None:
        self._file, self._suffix, self.skipped = file, suffix, 0
        self._recording, self._spec = recording, spec
        self._parquet: Any = None
        if suffix == ".npy":  # appended to: mapping it would keep its pages in memory
            shape, kind = (len(recording), spec.outputs), np.dtype(spec.dtype).str
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
            self._write(self._columns(start, stop, values), heading=start == 0)
        progress("predicting", stop, len(self._recording))

    def _write(self, columns: dict[str, Array], *, heading: bool) -> None:
        """Lines of CSV, or a row group of Parquet, where a time without a value is null."""
        if self._suffix == ".csv":
            text = io.StringIO(newline="")
            rows = csv.writer(text)
            if heading:
                rows.writerow(map(plain_text, columns))
            rows.writerows(zip(*map(_texts, columns.values()), strict=True))
            self._file.write(text.getvalue().encode())
            return
        from pyarrow import parquet, table

        group = table({**columns})
        self._parquet = self._parquet or parquet.ParquetWriter(self._file, group.schema)
        self._parquet.write_table(group)

    def close(self) -> None:
        """Finish a Parquet file."""
        if self._parquet is not None:
            self._parquet.close()

    def _columns(self, start: int, stop: int, outputs: Array) -> dict[str, Array]:
        """The columns of some steps; `outputs` `(n, C)` are probabilities, or values."""
        spec, recording, steps = self._spec, self._recording, np.arange(start, stop)
        table: dict[str, Array] = {"step": steps}
        times = step_times(recording, start, stop)
        if times is not None:
            table["time"] = times.astype("M8[ns]")
        if len(spec.layout.steps_ahead) == 1:
            (ahead,), size = spec.layout.steps_ahead, spec.layout.frame_size
            later = later_times(recording, start, stop, ahead)
            rows = (steps + 1 + ahead) * size - 1  # the last one of a frame
            table["forecast_for"] = rows if later is None else later.astype("M8[ns]")
        if spec.classes:
            classes = np.array([*spec.classes, ""])  # none where a step was left out
            missing = np.isnan(outputs).any(axis=1)
            table["class"] = classes[np.where(missing, -1, outputs.argmax(axis=1))]
        sign = "p" if spec.classes or spec.is_multilabel else "y"
        names = spec.classes or spec.target_names or range(spec.outputs)
        return table | {f"{sign}[{n}]": y for n, y in zip(names, outputs.T, strict=True)}


def _texts(values: Array) -> Sequence[Any]:
    if values.dtype.kind == "M":
        return time_texts(values)
    if values.dtype.kind == "U":
        return [plain_text(v) for v in values.tolist()]
    return [f"{v:.6g}" for v in values.tolist()] if values.dtype.kind == "f" else values.tolist()


def plain_text(text: str) -> str:
    """The text with an apostrophe before it where a spreadsheet would compute it as a formula.

    Example:
        >>> plain_text("=1+1"), plain_text("-5"), plain_text("beat")
        ("'=1+1", '-5', 'beat')
    """
    return f"'{text}" if text.startswith(_FORMULA) and not is_number(text) else text


class WrittenFile(NamedTuple):
    """The predictions of a recording: the file from the folder on, its rows, steps left out."""

    recording: str
    file: str
    steps: int
    skipped: int


def predict_run(run: Run, options: PredictOptions) -> tuple[Path, list[WrittenFile]]:
    """Write the predictions of each recording to a file; return where, and the files.

    Those of a single file to one file, of others to a folder with files named after them, which
    `predictions.json` lists; at an error those that are whole.

    Args:
        run: its model and settings.
        options: the recordings, default: those that `recordings_for` takes; the file or folder,
            default: predictions.csv, or the folder predictions; states; how to treat NaN.

    Raises:
        RunError, DataError: a recording failed; the message says which files are written.
        ConfigError: a file would replace one of the recordings, or stands for several.
    """
    spec, data, split = run.spec, options.data, options.split
    many = split is not None or data is None or is_folder(data) or is_manifest(data)
    file, done = _single_file(options.out, options.format, many=many), list[WrittenFile]()
    _, recordings = recordings_for(spec, run.config, data, split, targets=False)
    if many and (options.state_in or options.state_out):
        raise ConfigError("leave out --state-in and --state-out: for a single recording alone")
    folder = (options.out or Path("predictions")) if file is None else file.parent
    names = [recording.name for recording in recordings]
    files = file_names(names, options.format or "csv") if file is None else [file.name]
    entries = find_recordings(data or Path(run.config.data), spec.layout.static)
    kept = {source.resolve() for entry in entries for source in entry.inputs}
    if lost := [name for name in files if (folder / name).resolve() in kept]:
        raise ConfigError(f"{folder}: {listed(lost)} is a recording itself; choose another --out")
    state = after = None
    if options.state_in:
        state = trees.load(options.state_in, trees.detach(run.net.initial_state(1)))
    try:
        for recording, name in zip(recordings, files, strict=True):
            after, skipped = _write(run, recording, folder / name, state, options)
            done.append(WrittenFile(recording.name, name, len(recording), skipped))
    except (DataError, RunError) as error:
        if file is not None:
            raise
        raise type(error)(
            f"{error}; recording '{recordings[len(done)].name}' is not written, {len(done)} of"
            f" {len(recordings)} are, in {folder}"
        ) from error
    finally:
        if file is None:
            facts = {"update": spec.update, "recordings": len(recordings)}
            content = facts | {"files": [each._asdict() for each in done]}
            write_atomically(folder / LISTING, json.dumps(content, indent=1).encode())
    if options.state_out:
        trees.save(after, options.state_out)
    return file or folder, done


def _single_file(out: Path | None, form: str | None, *, many: bool) -> Path | None:
    """The file for the predictions of a single recording; `None` where a folder is meant.

    Raises:
        ConfigError: a file for many recordings, or another format than the suffix says.
    """
    suffix = "" if out is None or out.is_dir() else out.suffix.lower()
    faults = {
        f"--out {out} and --format {form} are both given: leave one of them out": (
            form and suffix not in {"", f".{form}"}
        ),
        f"{out}: predictions are written as {listed(_SUFFIXES)}; got '{suffix}'": (
            suffix not in {"", *_SUFFIXES}
        ),
        f"--out {out}: many recordings need a folder; got the suffix '{suffix}'": many and suffix,
    }
    for fault, present in faults.items():
        if present:
            raise ConfigError(fault)
    if many or (out is not None and not suffix):
        return None
    return out or Path(f"predictions.{form or 'csv'}")


def _write(
    run: Run, recording: Recording, out: Path, state: State | None, options: PredictOptions
) -> tuple[State, int]:
    """The state after the last step of a recording, and the number of steps left out."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary, spec = out.with_name(f".{out.stem}.part{out.suffix}"), run.spec
    how: Any = {"missing": options.missing, "on_nan": options.on_nan, "dtype": spec.torch_dtype}
    try:
        with named_errors(out), temporary.open("wb") as file, one_thread(spec):
            outputs = PredictionWriter(file, out.suffix.lower(), recording, spec)
            _, after = predict(run.net, recording, chunk=_CHUNK, out=outputs, state=state, **how)
            outputs.close()
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return after, outputs.skipped


def file_names(names: Sequence[str], form: str) -> list[str]:
    """A file for each recording, unlike all others on any system, within the folder.

    Sub-folders stay; the suffix of a known format is replaced.

    Example:
        >>> file_names(["a/1.csv", "a/1.npy", "../x", "r.csv[80:100]"], "npy")
        ['a/1.npy', 'a/1-2.npy', '-/x.npy', 'r.csv-80-100.npy']
    """
    files = dict[str, str]()  # by what a system takes for the same name
    for name in names:
        stem, dot, suffix = name.rpartition(".")
        stem = stem if stem and dot + suffix.lower() in SUFFIXES else name
        path = "/".join(map(_safe, stem.split("/")))
        several = [path, *(f"{path}-{i}" for i in range(2, len(names) + 2))]
        path = next(one for one in several if one.casefold() not in files)
        files[path.casefold()] = f"{path}.{form}"
    return [*files.values()]


def _safe(part: str) -> str:
    """A part of a path of plain characters that names no other folder."""
    return _UNSAFE.sub("-", part).rstrip(" .-")[:_LONGEST].lstrip(" .") or "-"
