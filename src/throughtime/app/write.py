"""Predictions of a whole recording to a file, chunk by chunk: memory does not grow with its length.

Shapes: `T` steps, `C` classes or output columns.
"""

import csv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from throughtime import state as trees
from throughtime.app.joined import joined
from throughtime.app.model import Spec
from throughtime.app.opened import composed, rates_of, table_of
from throughtime.app.rates import Rate, disagreements
from throughtime.carry.carried import Carried
from throughtime.errors import ConfigError, DataError
from throughtime.predict import predict
from throughtime.state import State
from throughtime.stream import Recording
from throughtime.stream.formats.table import Array

CHUNK = 1024


class Sink(Protocol):
    """Takes the outputs of consecutive steps: probabilities of the classes, or values."""

    def write(self, start: int, values: Array) -> None:
        """Writes `(n, C)` values of the steps from `start` on."""
        ...

    def close(self) -> None:
        """Flushes to the file."""
        ...


class NpySink:
    """A `.npy` of shape `(T, C)`, appended to; mapping it would hold its pages in memory."""

    def __init__(self, path: Path, steps: int, spec: Spec) -> None:
        self._file = path.open("wb")
        dtype = np.dtype(spec.dtype)
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (steps, spec.outputs),
        }
        np.lib.format.write_array_header_2_0(self._file, header)

    def write(self, start: int, values: Array) -> None:
        del start
        self._file.write(np.ascontiguousarray(values).tobytes())

    def close(self) -> None:
        self._file.close()


class CsvSink:
    """A `.csv` with a line per step: the step, the class if there are classes, and the outputs."""

    def __init__(self, path: Path, steps: int, spec: Spec) -> None:
        del steps
        self._spec = spec
        self._open = path.open("w", newline="", encoding="utf-8")
        self._rows = csv.writer(self._open)
        names = (
            [f"p[{name}]" for name in spec.classes]
            or [f"y[{name}]" for name in spec.targets]
            or [f"y[{i}]" for i in range(spec.outputs)]
        )
        self._rows.writerow(["step", *(["class"] if spec.classes else []), *names])

    def write(self, start: int, values: Array) -> None:
        classes = self._spec.classes
        for step, row in enumerate(values.tolist(), start):
            named = [classes[int(np.argmax(row))]] if classes else []
            self._rows.writerow([step, *named, *(f"{value:.6g}" for value in row)])

    def close(self) -> None:
        self._open.close()


_SINKS = {".npy": NpySink, ".csv": CsvSink}


class _Outputs:
    """What `predict` writes into: turns logits into probabilities on the way to the sink."""

    def __init__(self, sink: Sink, spec: Spec) -> None:
        self._sink, self._spec = sink, spec

    def __setitem__(self, steps: slice, values: Array) -> None:
        if self._spec.task == "classify":
            values = torch.from_numpy(values).softmax(dim=1).numpy()
        self._sink.write(steps.start, values)


def open_recording(
    paths: Sequence[Path], spec: Spec, static: Mapping[str, float] | None = None
) -> Recording:
    """The recording in a file, or in several side by side, with the input columns that the model
    was trained on.

    Args:
        paths: its files.
        spec: of the model.
        static: the static features of the recording, by name.

    Raises:
        DataError: a column or a static feature is missing, the rate is another one, or a file
            cannot be read.
    """
    given = {} if static is None else dict(static)
    if set(given) != set(spec.static):
        got, names = ", ".join(given) or "none", ", ".join(spec.static) or "none"
        flag = ",".join(f"{name}=NUMBER" for name in spec.static)
        raise DataError(
            f"the model was trained on the static features {names}, got {got}; "
            + (f"say --static {flag}" if flag else "leave out --static")
        )
    tables = [table_of(path, spec.form) for path in paths]
    faults = disagreements(
        ([] if spec.rate is None else [Rate("what the model was trained on", spec.rate)])
        + [*rates_of(tables)]
    )
    if faults:
        raise DataError("; ".join(faults))
    name = ";".join(path.name for path in paths)
    recording = composed(
        name, joined(name, tables), spec.form, tuple(given[feature] for feature in spec.static)
    )
    width = recording.read(0, 1).inputs.shape[1] + len(spec.static)
    if width != spec.features:
        raise DataError(
            f"{name}: has {width} input columns, the model was trained on {spec.features}"
            f" ({', '.join(spec.inputs)})"
        )
    return recording


def predict_to_file(
    net: Carried,
    spec: Spec,
    recording: Recording,
    out: Path,
    *,
    state: State = None,
    missing: Any = "error",
) -> State:
    """Runs the net over the recording and writes what comes out; returns the state after its last
    step.

    The file appears whole or not at all: it is written under another name first.

    Raises:
        ConfigError: a file name that ends in something else than `.npy` or `.csv`.
    """
    kind = _SINKS.get(out.suffix.lower())
    if kind is None:
        raise ConfigError(
            f"{out}: predictions are written as {' or '.join(_SINKS)}; got '{out.suffix}'"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.stem}.part{out.suffix}")
    with ExitStack() as stack:
        stack.callback(temporary.unlink, missing_ok=True)
        sink = kind(temporary, len(recording), spec)
        try:
            _, after = predict(
                net,
                recording,
                chunk=CHUNK,
                state=state,
                out=_Outputs(sink, spec),
                dtype=spec.torch_dtype,
                missing=missing,
            )
        finally:
            sink.close()
        temporary.replace(out)
    return after


def initial_state(net: Carried) -> State:
    """The state of one lane at the start of a recording, without a graph."""
    return trees.detach(net.initial_state(1))
