"""Predictions of a finished run, written to files: one recording, or all of a split to a folder.

A file appears whole or not at all: it is written under another name first. Memory holds the
outputs of one recording.

Shapes: `T` steps, `n` of some, `C` classes or output columns.
"""

import codecs
import csv
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from throughtime.app.load import Run
from throughtime.app.model import ModelSpec
from throughtime.app.settings import PredictOptions
from throughtime.errors import ConfigError, DataError, listed
from throughtime.files import named_errors, write_atomically
from throughtime.predict import predict
from throughtime.stream import Recording
from throughtime.stream.formats import SUFFIXES
from throughtime.stream.formats.table import Array, is_number
from throughtime.stream.formats.times import time_texts
from throughtime.stream.manifest import find_recordings
from throughtime.stream.recording import as_columns, step_times

LISTING = "predictions.json"
_CHUNK = 8192  # steps
_UNSAFE = re.compile(r"[^\w .=+@#-]+")  # characters that a system may refuse in a file name
_LONGEST = 120  # characters of a part of a path
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # the first character of one


def plain_text(text: str) -> str:
    """The text with an apostrophe before it where a spreadsheet would compute it as a formula.

    Example:
        >>> plain_text("=1+1"), plain_text("-5"), plain_text("beat")
        ("'=1+1", '-5', 'beat')
    """
    return f"'{text}" if text.startswith(_FORMULA) and not is_number(text) else text


def predict_run(run: Run, options: PredictOptions) -> list[tuple[Path, int, int]]:
    """Write the predictions of each recording to a file.

    Those of a single recording to one file, of others to a folder with files named after them; at
    an error the files before it are whole.

    Args:
        run: its model and settings.
        options: the recordings, default: those that `Run.recordings` takes; the file or folder,
            default: predictions.csv, or the folder predictions; how to treat NaN.

    Returns:
        Of each file its path, its rows, and how many steps were left out.

    Raises:
        RunError, DataError: a recording failed.
        ConfigError: a file would replace one of the recordings, or stands for several.
    """
    recordings = run.recordings(options.data, options.split, targets=False)
    many = len(recordings) > 1
    out = options.out or Path("predictions" if many else "predictions.csv")
    suffix = "" if out.is_dir() else out.suffix.lower()
    if suffix and (many or suffix not in {".npy", ".csv"}):
        raise ConfigError(
            f"--out {out}: predictions are written as .npy or .csv, those of many recordings as"
            " .csv to a folder"
        )
    names = file_names([recording.name for recording in recordings])
    paths = [out] if suffix else [out / f"{name}.csv" for name in names]
    sources = set[Path | None]()
    for data in filter(None, (options.data, run.config.data)):
        with suppress(DataError):  # what the run was trained on may be gone
            for entry in find_recordings(Path(data), run.spec.layout.static):
                sources |= {*entry.inputs, entry.targets}
    kept = {source.resolve() for source in sources if source}
    if lost := kept.intersection(path.resolve() for path in paths):
        raise ConfigError(f"{listed(lost)} is a recording itself; choose another --out")
    if not suffix:  # by it readers of a folder of recordings know this one
        write_atomically(out / LISTING, json.dumps([path.name for path in paths]).encode())
    done = list[tuple[Path, int, int]]()
    for recording, path in zip(recordings, paths, strict=True):
        how: Any = {"missing": options.missing, "on_nan": options.on_nan}
        outputs, _ = predict(run.net, recording, dtype=run.spec.torch_dtype, **how)
        values = _values(run.spec, recording, outputs)
        _write(run.spec, recording, values, path)
        done.append((path, len(values), int(np.isnan(values).any(axis=1).sum())))
    return done


def _values(spec: ModelSpec, recording: Recording, outputs: Tensor) -> Array:
    """Probabilities, or numbers, `(T, C)`; NaN where a step was left out."""
    values = spec.probabilities(outputs).cpu().numpy()
    if spec.difference:  # where the present value is missing, a change from it says nothing
        present = as_columns(recording.read(0, len(recording)).inputs)[:, list(spec.difference)]
        values[~np.isfinite(present)] = np.nan
    return values


def _write(spec: ModelSpec, recording: Recording, values: Array, out: Path) -> None:
    """Write a `.npy` file, or a `.csv` with a row per step.

    A row has the step, its time stamp if the recording has some, the class, and a probability of
    each class or a value of each target.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.stem}.part{out.suffix}")
    try:
        with named_errors(out), temporary.open("wb") as file:
            if out.suffix.lower() == ".npy":
                np.save(file, values)
            else:
                rows = csv.writer(codecs.getwriter("utf-8")(file))
                for start in range(0, len(values), _CHUNK):
                    columns = _columns(spec, recording, start, values[start : start + _CHUNK])
                    if start == 0:
                        rows.writerow(map(plain_text, columns))
                    rows.writerows(zip(*columns.values(), strict=True))
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _columns(
    spec: ModelSpec, recording: Recording, start: int, values: Array
) -> dict[str, Sequence[Any]]:
    """The columns of some steps; `values` `(n, C)`."""
    steps = range(start, start + len(values))
    columns: dict[str, Sequence[Any]] = {"step": steps}
    times = step_times(recording, start, steps.stop)
    if times is not None:
        columns["time"] = time_texts(times)
    if spec.classes:
        names = [*map(plain_text, spec.classes), ""]  # none where a step was left out
        chosen = np.where(np.isnan(values).any(axis=1), -1, values.argmax(axis=1))
        columns["class"] = [names[i] for i in chosen.tolist()]
    sign = "p" if spec.classes or spec.is_multilabel else "y"
    for name, y in zip(spec.classes or spec.target_names, values.T, strict=True):
        columns[f"{sign}[{name}]"] = [f"{value:.6g}" for value in y.tolist()]
    return columns


def file_names(names: Sequence[str]) -> list[str]:
    """A file without suffix for each recording, within the folder; sub-folders stay.

    Raises:
        ConfigError: two that some system takes for the same.

    Example:
        >>> file_names(["a/1.csv", "../x", "r.csv[80:100]"])
        ['a/1', '-/x', 'r.csv-80-100']
    """
    files = list[str]()
    for name in names:
        path = Path(name)
        stem = path.with_suffix("") if path.suffix.lower() in SUFFIXES else path
        parts = (_UNSAFE.sub("-", part)[:_LONGEST].strip(" .-") or "-" for part in stem.parts)
        files.append("/".join(parts))
    if len({file.casefold() for file in files}) < len(files):
        raise ConfigError(f"two of these would be written to one file; rename one: {listed(names)}")
    return files
