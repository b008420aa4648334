"""A finished run on recordings: metrics of a split, and predictions of a recording to a file.

Shapes: `T` steps, `C` classes or output columns.
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from throughtime import state as trees
from throughtime._files import named_errors, write_atomically
from throughtime.app.baselines import Baselines
from throughtime.app.config import Config
from throughtime.app.dataset import recordings_for
from throughtime.app.model import (
    ModelSpec,
    check_device,
    load_model,
    one_thread,
    unbroken_stream,
)
from throughtime.app.recordings import (
    DataLayout,
    OnPhase,
    concat_tables,
    input_recording,
    open_table,
    rate_faults,
    rates_of,
)
from throughtime.app.run_folder import RunFolder
from throughtime.carry.carried import Carried
from throughtime.errors import ConfigError, DataError, listed
from throughtime.predict import Evaluation, Evaluator, L, OnNaN, predict
from throughtime.state import State
from throughtime.stream import Recording
from throughtime.stream.formats.table import Array
from throughtime.stream.formats.times import time_texts
from throughtime.stream.manifest import find_recordings
from throughtime.stream.shift import later_times

_CHUNK = 1024
_LANES = 64  # recordings evaluated at the same time
_EVALUATION_CHUNK = 512
Missing: TypeAlias = Literal["error", "mask"]


class RunOnData(NamedTuple):
    """A model of a run, and recordings for it.

    Attributes:
        net: on its device.
        spec: its description.
        config: the settings of the run, those of the call over them.
        data: the path of the recordings.
        split: their split.
        recordings: all of it.
    """

    net: Carried
    spec: ModelSpec
    config: Config
    data: Path
    split: str
    recordings: list[Recording]


def open_run(
    folder: RunFolder,
    data: Path | None,
    split: str | None,
    missing: Missing | None,
    device: str = "cpu",
    on_phase: OnPhase | None = None,
) -> RunOnData:
    """Open the model and the recordings of a run, or other recordings.

    Args:
        folder: of the run.
        data: recordings; default: those of the run.
        split: which of them; default: `test` if the data have named splits; otherwise what was held
            out, or all of other data.
        missing: how to treat inputs that are not finite; default: as in training.
        device: where to compute.
        on_phase: called as recordings are opened.

    Raises:
        RunError: the folder holds no run that reached a checkpoint.
        DataError: no such split, or recordings that the model does not fit.
        ConfigError: no such device.
    """
    config = folder.read_config()
    config = replace(config, device=device, missing=missing or config.missing)
    check_device(device)
    net, spec = load_model(folder.model)
    path = data or Path(config.data)
    if split is None and any(entry.split for entry in find_recordings(path, config.static)):
        split = "test"
    split = split or ("valid" if data is None else "all")
    recordings = recordings_for(spec, path, split, config.holdout, on_phase)
    return RunOnData(net.to(device), spec, config, path, split, recordings)


def evaluate_recordings(
    evaluator: Evaluator[L],
    spec: ModelSpec,
    recordings: list[Recording],
    config: Config,
    on_phase: OnPhase | None = None,
) -> Evaluation[L]:
    """Metrics on unbroken recordings, as the model is deployed; all of them on this rank.

    Those of a forecast include a comparison with the baselines.
    """
    lanes = min(len(recordings), _LANES)
    baselines = Baselines.of_forecast(spec, recordings, config)
    played = recordings if baselines is None else baselines.recordings
    stream = unbroken_stream(played, spec, config, lanes, _EVALUATION_CHUNK)
    for chunk in stream:
        if baselines is None:
            evaluator.add(chunk)
        else:
            baselines.add(chunk, evaluator.add(baselines.own_targets(chunk)))
        if on_phase is not None:
            on_phase("evaluating", min(stream.position or stream.steps, stream.steps), stream.steps)
    result = evaluator.result(stream)
    compared = {} if baselines is None else baselines.compute()
    return replace(result, metrics=result.metrics | compared)


def evaluate_run(
    folder: RunFolder,
    data: Path | None,
    split: str | None,
    missing: Missing | None,
    on_phase: OnPhase | None = None,
) -> tuple[str, Evaluation[None]]:
    """Compute the metrics of a run on a split and write `scores-SPLIT.json`; see `open_run`.

    Returns:
        The name of the split, and the metrics.
    """
    net, spec, config, data, split, recordings = open_run(
        folder, data, split, missing, on_phase=on_phase
    )
    with one_thread(when=spec.is_small(min(len(recordings), _LANES))):
        evaluator = Evaluator(net, metrics=spec.metrics())
        scores = evaluate_recordings(evaluator, spec, recordings, config, on_phase)
    content = {
        "split": split,
        "update": spec.update,
        "data": str(data),
        "steps": scores.steps,
        "metrics": scores.metrics,
        "recordings": scores.recordings,
    }
    write_atomically(folder.scores(split), json.dumps(content, indent=1).encode())
    return split, scores


class _NpyWriter:
    """A `.npy` of shape `(T, C)`, appended to; mapping it would keep its pages in memory.

    It is the array that `predict` fills with the outputs of consecutive steps. Logits become
    probabilities.
    """

    def __init__(self, file: IO[Any], recording: Recording, spec: ModelSpec) -> None:
        self._file, self._spec, self.skipped = file, spec, 0
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(spec.dtype)),
            "fortran_order": False,
            "shape": (len(recording), spec.outputs),
        }
        np.lib.format.write_array_header_2_0(file, header)

    def __setitem__(self, steps: slice, values: Array) -> None:
        self.skipped += _without_answer(values)
        self._file.write(np.ascontiguousarray(_probabilities(values, self._spec)).tobytes())


class _CsvWriter:
    """A `.csv` with a line per step: the step, the class if there are classes, and the outputs.

    That of a forecast also has the time that it is for, or the row where there are no time stamps.
    """

    def __init__(self, file: IO[Any], recording: Recording, spec: ModelSpec) -> None:
        self._rows, self._spec, self.skipped = csv.writer(file), spec, 0
        self._recording = recording
        names = (
            [f"p[{name}]" for name in spec.classes]
            or [f"y[{name}]" for name in spec.layout.targets]
            or [f"y[{i}]" for i in range(spec.outputs)]
        )
        own = ["forecast_for"] * bool(spec.layout.ahead) + ["class"] * bool(spec.classes)
        self._rows.writerow(["step", *own, *names])

    def __setitem__(self, steps: slice, values: Array) -> None:
        self.skipped += _without_answer(values)
        classes, layout = self._spec.classes, self._spec.layout
        times = _forecast_times(self._recording, layout, steps) if layout.ahead else []
        for step, row in enumerate(_probabilities(values, self._spec).tolist(), steps.start):
            # a step that was left out has no answer, and the first NaN would be the largest
            name = "" if math.isnan(row[0]) else classes[int(np.argmax(row))] if classes else ""
            own = [times[step - steps.start]] if times else []
            own += [name] if classes else []
            self._rows.writerow([step, *own, *(f"{value:.6g}" for value in row)])


def _forecast_times(recording: Recording, layout: DataLayout, steps: slice) -> list[str]:
    """The time stamps that the forecasts of some steps are for, or the rows of the file."""
    times = later_times(recording, steps.start, steps.stop, layout.steps_ahead)
    if times is not None:
        return time_texts(times)
    last = layout.frame_size - 1  # the target of a frame is that of its last row
    rows = range(steps.start * layout.frame_size, steps.stop * layout.frame_size, last + 1)
    return [str(row + last + layout.ahead) for row in rows]


def _probabilities(outputs: Array, spec: ModelSpec) -> Array:
    """Logits `(n, C)` as probabilities; the outputs of a regression as they are."""
    return torch.from_numpy(outputs).softmax(dim=1).numpy() if spec.classes else outputs


def _without_answer(outputs: Array) -> int:
    """How many steps `(n, C)` were left out."""
    return int(np.isnan(outputs).any(axis=1).sum())


class _ProgressWriter:
    """Writes rows and reports how many are written."""

    def __init__(self, rows: _NpyWriter | _CsvWriter, steps: int, on_phase: OnPhase) -> None:
        self._rows, self._steps, self._on_phase = rows, steps, on_phase

    def __setitem__(self, steps: slice, values: Array) -> None:
        self._rows[steps] = values
        self._on_phase("predicting", min(steps.stop, self._steps), self._steps)


_TEXT = {"mode": "w", "newline": "", "encoding": "utf-8"}
_WRITERS: dict[str, tuple[type[_NpyWriter | _CsvWriter], dict[str, Any]]] = {
    ".npy": (_NpyWriter, {"mode": "wb"}),
    ".csv": (_CsvWriter, _TEXT),
}


def open_recording(
    paths: Sequence[Path], spec: ModelSpec, static: Mapping[str, float] | None = None
) -> Recording:
    """The recording in a file, or in several side by side, with the input columns of the model.

    Args:
        paths: its files.
        spec: of the model.
        static: the static features of the recording, by name.

    Raises:
        DataError: a column or a static feature is missing, the rate differs, or a file cannot be
            read.
    """
    features, expected = dict(static or {}), spec.layout.static
    if set(features) != set(expected):
        flag = ",".join(f"{name}=NUMBER" for name in expected)
        raise DataError(
            f"the model was trained on the static features {listed(expected) or 'none'}, got"
            f" {listed(features) or 'none'}; "
            + (f"write --static {flag}" if flag else "leave out --static")
        )
    tables = [open_table(path, spec.layout) for path in paths]
    faults = rate_faults(spec.layout, rates_of(tables))
    if faults:
        raise DataError("; ".join(faults))
    name = ";".join(path.name for path in paths)
    recording = input_recording(
        name, concat_tables(name, tables), spec.layout, tuple(features[f] for f in expected)
    )
    width = recording.read(0, 1).inputs.shape[1] + len(expected)
    if width != spec.features:
        raise DataError(
            f"{name}: has {width} input columns, the model was trained on {spec.features}"
            f" ({listed(spec.layout.inputs)})"
        )
    return recording


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

    The file appears whole or not at all: it is written under another name first. Memory does not
    grow with the length of the recording.

    Returns:
        The state after the last step, and the number of steps that were left out.

    Raises:
        ConfigError: a file name that ends in something else than `.npy` or `.csv`.
        DataError: inputs that are not finite.
        RunError: outputs that are NaN though the inputs are finite.
    """
    if out.suffix.lower() not in _WRITERS:
        raise ConfigError(
            f"{out}: predictions are written as {' or '.join(_WRITERS)}; got '{out.suffix}'"
        )
    writer, mode = _WRITERS[out.suffix.lower()]
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.stem}.part{out.suffix}")
    try:
        with named_errors(out), temporary.open(**mode) as file:
            rows = writer(file, recording, spec)
            shown = rows if on_phase is None else _ProgressWriter(rows, len(recording), on_phase)
            _, after = predict(
                net,
                recording,
                chunk=_CHUNK,
                state=state,
                out=shown,
                dtype=spec.torch_dtype,
                missing=missing,
                on_nan=on_nan,
            )
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return after, rows.skipped


def initial_state(net: Carried) -> State:
    """The state of one lane at the start of a recording, without a graph."""
    return trees.detach(net.initial_state(1))
