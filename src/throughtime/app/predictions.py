"""Predictions of a finished run, written to files: one recording, or all of a split to a folder.

A file appears whole or not at all: it is written under another name first. Memory does not grow
with the length of a recording.

Shapes: `T` steps, `n` of a chunk, `C` classes or output columns.
"""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from throughtime import state as trees
from throughtime._files import named_errors, write_atomically
from throughtime.app.dataset import recordings_for
from throughtime.app.load import Run
from throughtime.app.model import ModelSpec, one_thread
from throughtime.app.prediction_table import WRITERS, PredictedSteps
from throughtime.app.recordings import OnPhase
from throughtime.carry.carried import Carried
from throughtime.errors import ConfigError, DataError, RunError, listed
from throughtime.predict import OnNaN, predict
from throughtime.state import State
from throughtime.stream import Recording
from throughtime.stream.formats import SUFFIXES
from throughtime.stream.formats.table import Array
from throughtime.stream.manifest import find_recordings, is_folder, is_manifest

Missing: TypeAlias = Literal["error", "mask"]
Format: TypeAlias = Literal["npy", "csv", "parquet"]
LISTING = "predictions.json"
_CHUNK = 8192  # steps: also of a row group of Parquet
_UNSAFE = re.compile(r"[^\w .=+@#-]+")  # characters that a system may refuse in a file name
_LONGEST = 120  # characters of a part of a path


class _Outputs:
    """The array that `predict` fills: outputs as probabilities, written and counted."""

    def __init__(self, writer: Any, table: PredictedSteps, on_phase: OnPhase | None) -> None:
        self._writer, self._table, self._on_phase, self.skipped = writer, table, on_phase, 0

    def __setitem__(self, steps: slice, values: Array) -> None:
        spec, recording = self._table.spec, self._table.recording
        if spec.difference:  # where the present value is missing, a change from it says nothing
            inputs = recording.read(steps.start, steps.start + len(values)).inputs
            present = inputs.reshape(len(values), -1)[:, list(spec.difference)]
            values = np.where(np.isfinite(present), values, np.nan)
        self.skipped += int(np.isnan(values).any(axis=1).sum())
        values = spec.probabilities(torch.from_numpy(values)).numpy()
        self._writer.write(slice(steps.start, steps.start + len(values)), values)
        if self._on_phase is not None:
            total = len(recording)
            self._on_phase("predicting", min(steps.stop, total), total)


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
    if out.suffix.lower() not in WRITERS:
        raise ConfigError(
            f"{out}: predictions are written as {listed(WRITERS)}; got '{out.suffix}'"
        )
    writer, mode = WRITERS[out.suffix.lower()]
    table = PredictedSteps(recording, spec)
    with _written(out, mode) as file:
        outputs = _Outputs(writer(file, table), table, on_phase)
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
    return after, outputs.skipped


@contextmanager
def _written(path: Path, mode: Mapping[str, Any]) -> Generator[Any]:
    """An open file that gets its name when all is written, and is removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        with named_errors(path), temporary.open(**mode) as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
    missing: Missing,
    on_nan: OnNaN,
    on_phase: OnPhase | None = None,
) -> list[WrittenFile]:
    """Write the predictions of each recording to a file named after it, and a list of them.

    `predictions.json` lists the files of this call; at an error those that are whole.

    Args:
        run: its model and settings.
        data: recordings; default: those of the run.
        split: which of them; default: see `recordings_for`.
        folder: where the files go.
        form: their format.
        missing: see `tt.predict`.
        on_nan: see `tt.predict`.
        on_phase: called as recordings are opened and predicted.

    Raises:
        RunError: a recording failed; the message says which files are written.
        ConfigError: a file would replace one of the recordings.
    """
    spec = run.spec
    _, recordings = recordings_for(spec, run.config, data, split, targets=False, on_phase=on_phase)
    files = file_names([recording.name for recording in recordings], form)
    entries = find_recordings(data or Path(run.config.data), spec.layout.static)
    kept = {source.resolve() for entry in entries for source in entry.inputs}
    lost = [file for file in files if (folder / file).resolve() in kept]
    if lost:
        raise ConfigError(f"{folder}: {listed(lost)} is a recording itself; choose another --out")
    done, total = list[WrittenFile](), sum(map(len, recordings))

    def advance(_: str, steps: int, __: int) -> None:
        if on_phase is not None:
            on_phase("predicting", sum(file.steps for file in done) + steps, total)

    try:
        for recording, file in zip(recordings, files, strict=True):
            try:
                with one_thread(when=spec.is_small(lanes=1)):
                    _, skipped = predict_to_file(
                        run.net,
                        spec,
                        recording,
                        folder / file,
                        missing=missing,
                        on_nan=on_nan,
                        on_phase=advance,
                    )
            except (DataError, RunError) as error:
                raise type(error)(
                    f"{error}; recording '{recording.name}' is not written,"
                    f" {len(done)} of {len(recordings)} are, in {folder}"
                ) from error
            done.append(WrittenFile(recording.name, file, len(recording), skipped))
    finally:
        facts = {
            "update": spec.update,
            "recordings": len(recordings),
            "files": [file._asdict() for file in done],
        }
        write_atomically(folder / LISTING, json.dumps(facts, indent=1).encode())
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
    if out is not None and not suffix and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is neither a folder nor a file of predictions")
    if many or (out is not None and not suffix):
        return None
    if out is None:
        return Path(f"predictions.{form or 'csv'}")
    if form is not None and suffix != f".{form}":
        raise ConfigError(f"--out {out} and --format {form} are both given: leave one of them out")
    if out.exists() and any(path.exists() and out.samefile(path) for path in paths):
        raise ConfigError(f"{out}: is the recording itself; choose another --out")
    return out


def file_names(names: Sequence[str], form: str) -> list[str]:
    """A file for each recording, unlike all others on any system, within the folder.

    Sub-folders stay; the suffix of a known format is replaced unless two files would then be one.

    Example:
        >>> file_names(["a/1.csv", "a/1.npy", "../x", "r.csv[80:100]"], "npy")
        ['a/1.npy', 'a/1.npy.npy', '-/x.npy', 'r.csv-80-100.npy']
    """
    used, files = set[str](), list[str]()
    for name in names:
        parts = [_safe(part) for part in name.split("/")]
        stem, dot, suffix = parts[-1].rpartition(".")
        known = dot and f".{suffix.lower()}" in SUFFIXES
        candidates = [stem] * bool(known) + [parts[-1]]
        candidates += [f"{parts[-1]}-{i}" for i in range(2, len(names) + 2)]
        paths = ("/".join([*parts[:-1], f"{last}.{form}"]) for last in candidates)
        file = next(path for path in paths if path.casefold() not in used)
        used.add(file.casefold())
        files.append(file)
    return files


def _safe(part: str) -> str:
    """A part of a path of plain characters that names no other folder."""
    text = _UNSAFE.sub("-", part).rstrip(" .-")[:_LONGEST].lstrip(" .")
    return text or "-"


def initial_state(net: Carried) -> State:
    """The state of one lane at the start of a recording, without a graph."""
    return trees.detach(net.initial_state(1))
