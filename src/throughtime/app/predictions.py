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
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from throughtime import state as trees
from throughtime._files import named_errors, write_atomically
from throughtime.app.dataset import recordings_for
from throughtime.app.load import Run
from throughtime.app.model import ModelSpec, one_thread
from throughtime.app.recordings import OnPhase
from throughtime.carry.carried import Carried
from throughtime.errors import ConfigError, DataError, RunError, listed
from throughtime.predict import OnNaN, predict
from throughtime.state import State
from throughtime.stream import Recording
from throughtime.stream.formats import SUFFIXES
from throughtime.stream.formats.table import Array, is_number
from throughtime.stream.formats.times import time_texts
from throughtime.stream.manifest import find_recordings, is_folder, is_manifest
from throughtime.stream.recording import step_times
from throughtime.stream.targets import later_times

Missing: TypeAlias = Literal["error", "mask"]
Format: TypeAlias = Literal["npy", "csv", "parquet"]
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
        on_phase: called after each chunk.

    Attributes:
        skipped: the number of steps that were left out.
    """

    def __init__(
        self,
        file: BinaryIO,
        suffix: str,
        recording: Recording,
        spec: ModelSpec,
        on_phase: OnPhase | None,
    ) -> None:
        self._file, self._suffix, self._on_phase = file, suffix, on_phase
        self._recording, self._spec, self.skipped = recording, spec, 0
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
        elif self._suffix == ".csv":
            self._write_csv(self._columns(start, stop, values), heading=start == 0)
        else:
            self._write_parquet(self._columns(start, stop, values))
        if self._on_phase is not None:
            self._on_phase("predicting", stop, len(self._recording))

    def _write_csv(self, columns: dict[str, Array], *, heading: bool) -> None:
        text = io.StringIO(newline="")
        rows = csv.writer(text)
        if heading:
            rows.writerow(map(plain_text, columns))
        rows.writerows(zip(*map(_texts, columns.values()), strict=True))
        self._file.write(text.getvalue().encode())

    def _write_parquet(self, columns: dict[str, Array]) -> None:
        """A row group; a time without a value is null."""
        from pyarrow import array, parquet, table

        rows = table({name: array(values) for name, values in columns.items()})
        self._parquet = self._parquet or parquet.ParquetWriter(self._file, rows.schema)
        self._parquet.write_table(rows)

    def close(self) -> None:
        """Finish a Parquet file."""
        if self._parquet is not None:
            self._parquet.close()

    def _columns(self, start: int, stop: int, outputs: Array) -> dict[str, Array]:
        """The columns of some steps; `outputs` `(n, C)` are probabilities, or values."""
        spec, recording = self._spec, self._recording
        table: dict[str, Array] = {"step": np.arange(start, stop)}
        times = step_times(recording, start, stop)
        if times is not None:
            table["time"] = times.astype("M8[ns]")
        if len(spec.layout.steps_ahead) == 1:
            (ahead,), size = spec.layout.steps_ahead, spec.layout.frame_size
            later = later_times(recording, start, stop, ahead)
            rows = (np.arange(start, stop) + 1 + ahead) * size - 1  # the last one of a frame
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


def predict_to_file(
    net: Carried,
    spec: ModelSpec,
    recording: Recording,
    out: Path,
    *,
    state: State = None,
    missing: Missing = "error",
    on_nan: OnNaN = "raise",
    on_phase: OnPhase | None = None,
) -> tuple[State, int]:
    """Run the net over the recording and write its outputs.

    Returns:
        The state after the last step, and the number of steps that were left out.

    Raises:
        ConfigError: a file name that ends in no format of predictions.
        DataError: inputs that are not finite.
        RunError: outputs that are NaN though the inputs are finite.
    """
    suffix = out.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ConfigError(f"{out}: predictions are written as {listed(_SUFFIXES)}; got '{suffix}'")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.stem}.part{out.suffix}")
    try:
        with named_errors(out), temporary.open("wb") as file:
            outputs = PredictionWriter(file, suffix, recording, spec, on_phase)
            _, after = predict(
                net,
                recording,
                chunk=_CHUNK,
                state=state,
                out=outputs,
                dtype=spec.torch_dtype,
                missing=missing,
                on_nan=on_nan,
            )
            outputs.close()
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return after, outputs.skipped


class WrittenFile(NamedTuple):
    """The predictions of a recording: the file from the folder on, its rows, steps left out."""

    recording: str
    file: str
    steps: int
    skipped: int


def predict_to_folder(
    run: Run,
    data: Path | None,
    split: str | None,
    folder: Path,
    form: Format,
    *,
    on_phase: OnPhase | None = None,
    **how: Any,
) -> list[WrittenFile]:
    """Write the predictions of each recording to a file named after it, and a list of them.

    `predictions.json` lists the files of this call; at an error those that are whole.

    Args:
        run: its model and settings.
        data: recordings; default: those of the run.
        split: which of them; default: see `recordings_for`.
        folder: where the files go.
        form: their format.
        on_phase: called as recordings are opened and predicted.
        how: `missing` and `on_nan`, see `tt.predict`.

    Raises:
        RunError: a recording failed; the message says which files are written.
        ConfigError: a file would replace one of the recordings.
    """
    spec = run.spec
    _, recordings = recordings_for(spec, run.config, data, split, targets=False, on_phase=on_phase)
    files = file_names([recording.name for recording in recordings], form)
    entries = find_recordings(data or Path(run.config.data), spec.layout.static)
    kept = {source.resolve() for entry in entries for source in entry.inputs}
    if lost := [file for file in files if (folder / file).resolve() in kept]:
        raise ConfigError(f"{folder}: {listed(lost)} is a recording itself; choose another --out")
    done, total = list[WrittenFile](), sum(map(len, recordings))

    def advance(_: str, steps: int, __: int) -> None:
        if on_phase is not None:
            on_phase("predicting", sum(file.steps for file in done) + steps, total)

    how["on_phase"] = advance
    try:
        for recording, file in zip(recordings, files, strict=True):
            with one_thread(when=spec.is_small(lanes=1)):
                _, skipped = predict_to_file(run.net, spec, recording, folder / file, **how)
            done.append(WrittenFile(recording.name, file, len(recording), skipped))
    except (DataError, RunError) as error:
        raise type(error)(
            f"{error}; recording '{recordings[len(done)].name}' is not written, {len(done)} of"
            f" {len(recordings)} are, in {folder}"
        ) from error
    finally:
        facts = {"update": spec.update, "recordings": len(recordings)}
        content = facts | {"files": [file._asdict() for file in done]}
        write_atomically(folder / LISTING, json.dumps(content, indent=1).encode())
    return done


def output_file(
    paths: Sequence[Path], split: str | None, out: Path | None, form: Format | None
) -> Path | None:
    """The file for the predictions of a single recording; `None` where a folder is needed.

    Args:
        paths: the recording, side by side, or the data set.
        split: of a data set.
        out: the file or folder to write, if it is named.
        form: the format, if it is named.

    Raises:
        ConfigError: a file for many recordings, another format than the suffix says, or the
            recording itself.
    """
    many = split is not None or is_folder(paths[0]) or is_manifest(paths[0])
    suffix = "" if out is None or out.is_dir() else out.suffix.lower()
    if many and suffix:
        raise ConfigError(f"--out {out}: many recordings need a folder; got the suffix '{suffix}'")
    if many or (out is not None and not suffix):
        return None
    out = out or Path(f"predictions.{form or 'csv'}")
    if form is not None and suffix not in {"", f".{form}"}:
        raise ConfigError(f"--out {out} and --format {form} are both given: leave one of them out")
    if out.exists() and any(path.exists() and out.samefile(path) for path in paths):
        raise ConfigError(f"{out}: is the recording itself; choose another --out")
    return out


def file_names(names: Sequence[str], form: str) -> list[str]:
    """A file for each recording, unlike all others on any system, within the folder.

    Sub-folders stay; the suffix of a known format is replaced.

    Example:
        >>> file_names(["a/1.csv", "a/1.npy", "../x", "r.csv[80:100]"], "npy")
        ['a/1.npy', 'a/1-2.npy', '-/x.npy', 'r.csv-80-100.npy']
    """
    files = dict[str, str]()  # by what a system takes for the same name
    for name in names:
        *folders, last = (_safe(part) for part in name.split("/"))
        stem, _, suffix = last.rpartition(".")
        last = stem if stem and f".{suffix.lower()}" in SUFFIXES else last
        several = [last, *(f"{last}-{i}" for i in range(2, len(names) + 2))]
        candidates = ("/".join([*folders, f"{one}.{form}"]) for one in several)
        file = next(path for path in candidates if path.casefold() not in files)
        files[file.casefold()] = file
    return [*files.values()]


def _safe(part: str) -> str:
    """A part of a path of plain characters that names no other folder."""
    return _UNSAFE.sub("-", part).rstrip(" .-")[:_LONGEST].lstrip(" .") or "-"


def initial_state(net: Carried) -> State:
    """The state of one lane at the start of a recording, without a graph."""
    return trees.detach(net.initial_state(1))
