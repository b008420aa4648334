"""Runs an ONNX file that `tt.export` wrote, on a live stream, with its state.

This file needs Python, numpy and onnxruntime alone: `tt.export(..., with_session=True)` copies it
beside the model, for machines without torch. Its errors are therefore those of Python.

A file says of itself, in a metadata property of JSON, what its inputs, outputs and state are, and
has a conformance vector: some steps of inputs, and the outputs and the state after them. A runtime
that computes something else is found when it loads the file.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

KEY, FORMAT = "throughtime", "throughtime.export/2"
TOLERANCE = 1e-4  # of the conformance vector, relative to values above 1
Array: TypeAlias = np.ndarray[Any, Any]
OnNaN: TypeAlias = Literal["raise", "hold", "reset"]


class Session:
    """An exported net on a live stream: takes one step or any number at a time, keeps the state.

    Needs numpy and onnxruntime alone. What the runtime computes is checked when a file is loaded.
    Each thread needs a session of its own. To save the state, write `np.savez(path,
    **session.state)`; in another process, `session.state = np.load(path)` goes on to the bit.

    Args:
        path: of a file that `tt.export` wrote; or another session, whose weights this one uses. The
            states are separate.
        lanes: B, streams side by side.
        on_nan: as for `tt.Predictor`: what to do where an input is NaN or infinite. "raise" refuses
            the call and leaves the state as it was, "hold" leaves the step out, "reset" starts the
            lane anew after it. With either, the outputs of that step are NaN.

    Attributes:
        description: what the file says of itself: inputs, outputs, classes, rate, state.
        skipped: steps left out so far, over all lanes.

    Raises:
        ImportError: onnxruntime is not installed.
        OSError: the file cannot be read.
        ValueError: no file of `tt.export`, or one of another version.
        RuntimeError: the runtime computes something else than the net that was exported.

    Example:
        >>> import tempfile, torch, throughtime as tt
        >>> path = tempfile.mkdtemp() + "/net.onnx"
        >>> net = tt.carry(torch.nn.GRU(3, 8))
        >>> written = tt.export(net, path, inputs=torch.randn(50, 3), steps=100)
        >>> session = tt.deploy.Session(path)
        >>> session(torch.zeros(5, 3).numpy()).shape  # the state is kept
        (5, 8)
    """

    def __init__(
        self,
        path: "str | Path | Session",
        lanes: int = 1,
        *,
        on_nan: OnNaN = "raise",
    ) -> None:
        if on_nan not in ("raise", "hold", "reset"):
            raise ValueError(f"on_nan={on_nan!r}: expected 'raise', 'hold', 'reset'")
        if type(lanes) is not int or lanes < 1:
            raise ValueError(f"lanes={lanes!r}: expected a whole number, at least 1")
        self.lanes, self.on_nan, self.skipped = lanes, on_nan, 0
        self._lock = threading.Lock()
        if isinstance(path, Session):
            self.path, self.description, self._runtime = path.path, path.description, path._runtime
        else:
            self.path = Path(path)
            self._runtime, self.description = _load(self.path)
        inputs = self.description["inputs"]
        kind = "int64" if inputs["indexed"] else inputs["dtype"]
        self._x = np.zeros((1, lanes, *inputs["shape"]), kind)
        self._row, self._zeros = self._x[0], np.zeros_like(self._x[0])
        self._y = np.zeros((1, lanes, *self.description["outputs"]["shape"]), inputs["dtype"])
        # two states that change places: a step reads one and writes the other
        a, b = (initial_state(self.description, lanes) for _ in range(2))
        self._turns = [(self._bound(a, b), a), (self._bound(b, a), b)]
        if not isinstance(path, Session):
            self._check_vector()

    def __call__(self, inputs: Any) -> Array:
        """Outputs `(T, B, C)` for inputs `(T, B, D)`; of a single lane also `(T, D)` to `(T, C)`.

        A net of images takes, and gives, more dimensions in place of one.

        Raises:
            ValueError: inputs of another shape or type, or NaN where `on_nan` is "raise".
        """
        x = np.asarray(inputs)
        if x.ndim == self._row.ndim and self.lanes == 1:
            return self(x[:, None])[:, 0]
        x = self._checked(x)
        finite = np.asarray(np.isfinite(x).reshape(*x.shape[:2], -1).all(axis=2))
        if finite.all():
            return self._exclusively(self._run, x)
        if self.on_nan == "raise":
            step, lane = np.argwhere(~finite)[0].tolist()
            raise ValueError(
                f"an input is NaN or infinite at step {step} of the call, lane {lane}; the state is"
                " as it was. Session(path, on_nan='hold') leaves such steps out"
            )
        return self._exclusively(self._run_around, x, finite)

    def step(self, inputs: Any) -> Array:
        """Outputs `(B, C)` for the inputs `(B, D)` of one step."""
        x, row = np.asarray(inputs), self._row
        # the product with zeros is the fastest way to see that all numbers are finite
        if x.shape == row.shape and x.dtype.kind == "f" and x.dtype == row.dtype:
            if np.vdot(x, self._zeros) == 0:
                return self._exclusively(self._step, x)
        elif x.shape != row.shape and (self.lanes > 1 or x.shape != row.shape[1:]):
            raise self._misfit(x, "")
        return self(x[None])[0]

    def reset(self, lanes: int | Sequence[int] | None = None) -> None:
        """Start some lanes anew, by number; all of them by default.

        Raises:
            ValueError: no such lane.
        """
        rows = np.atleast_1d(np.arange(self.lanes) if lanes is None else np.array(lanes))
        if rows.size and (
            rows.dtype.kind not in "iu" or not 0 <= rows.min() <= rows.max() < self.lanes
        ):
            raise ValueError(f"lanes={lanes!r}: the session has lanes 0 to {self.lanes - 1}")
        self._put(initial_state(self.description, self.lanes), rows.astype(int))

    @property
    def state(self) -> dict[str, Array]:
        """A copy of the state by the names of its leaves."""
        return {name: value.copy() for name, value in self._turns[0][1].items()}

    @state.setter
    def state(self, values: Mapping[str, Array]) -> None:
        leaves = dict(values)
        got, expected = (
            {name: (value.shape, value.dtype.name) for name, value in state.items()}
            for state in (leaves, self._turns[0][1])
        )
        if got != expected:
            raise ValueError(
                f"the state has the leaves {got}, a session of {self.path} with {self.lanes} lanes"
                f" has {expected}"
            )
        self._put(leaves, np.arange(self.lanes))

    def _exclusively(self, run: Callable[..., Array], *args: Array) -> Array:
        """Refuse a call while another thread has one: both would change the state."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another thread is calling this session; each thread needs one of its own:"
                " Session(session)"
            )
        try:
            return run(*args)
        finally:
            self._lock.release()

    def _misfit(self, x: Array, steps: str) -> ValueError:
        shape = ", ".join(map(str, self._row.shape))
        return ValueError(
            f"the inputs have shape {x.shape} and type {x.dtype}, expected ({steps}{shape})"
            f" {self._row.dtype}; a session of more lanes is Session(path, lanes=B)"
        )

    def _checked(self, x: Array) -> Array:
        inputs, row = self.description["inputs"], self._row
        kinds = "iu" if inputs["indexed"] else "fiu"
        if x.shape[1:] != row.shape or x.dtype.kind not in kinds:
            raise self._misfit(x, "T, ")
        if not len(x):
            raise ValueError(f"the inputs have shape {x.shape}: a call takes at least one step")
        if inputs["indexed"] and not 0 <= x.min() <= x.max() < inputs["width"]:
            raise ValueError(
                f"the indices are from {x.min()} to {x.max()}, expected 0 to {inputs['width'] - 1}"
            )
        with np.errstate(over="ignore"):  # infinite in the type of the net: the caller's to handle
            return np.ascontiguousarray(x, dtype=row.dtype)

    def _step(self, x: Array) -> Array:
        """One step through bound buffers, which takes half the time of a call of the runtime."""
        self._row[...] = x
        self._runtime.run_with_iobinding(self._turns[0][0])
        self._turns.reverse()
        return self._y[0].copy()

    def _run(self, x: Array) -> Array:
        if len(x) == 1:
            return self._step(x[0])[None]
        y, after = _run(self._runtime, x, self._turns[0][1])
        self._put(after, np.arange(self.lanes))
        return y

    def _run_around(self, x: Array, finite: Array) -> Array:
        """As `_run`; lanes leave out their steps that are not `finite` `(T, B)`."""
        outputs: list[Array] = []
        for row, right in zip(np.nan_to_num(x, posinf=0, neginf=0), finite, strict=True):
            before, missing = self.state, np.flatnonzero(~right)
            outputs.append(self._step(row))
            if len(missing):
                if self.on_nan == "reset":
                    before = initial_state(self.description, self.lanes)
                self._put(before, missing)
                outputs[-1][missing] = math.nan
                self.skipped += len(missing)
        return np.stack(outputs)

    def _put(self, values: Mapping[str, Array], rows: Array) -> None:
        """Copy some lanes of a state into the buffers."""
        for leaf in self.description["state"]:
            part = (*[slice(None)] * leaf["shape"].index("B"), rows)
            self._turns[0][1][leaf["name"]][part] = values[leaf["name"]][part]

    def _bound(self, before: Mapping[str, Array], after: Mapping[str, Array]) -> Any:
        binding = self._runtime.io_binding()
        entering = {"x": self._x} | {f"state.{name}": array for name, array in before.items()}
        leaving = {"y": self._y} | {f"next.{name}": array for name, array in after.items()}
        for bind, buffers in ((binding.bind_input, entering), (binding.bind_output, leaving)):
            for name, array in buffers.items():
                bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return binding

    def _check_vector(self) -> None:
        vector = self.description["conformance"]
        x = np.array(vector["inputs"], self._row.dtype)[:, None]
        y, after = _run(self._runtime, x, initial_state(self.description, 1))
        pairs = [("outputs", y[-1], vector["outputs"])]
        pairs += [(f"state '{leaf}'", after[leaf], v) for leaf, v in vector["state"].items()]
        for name, got, expected in pairs:
            reference = np.array(expected, dtype=np.float64).ravel()
            error = np.abs(got.ravel() - reference) / np.maximum(1, np.abs(reference))
            if not (error <= TOLERANCE).all():
                raise RuntimeError(
                    f"{self.path}: this runtime computes other {name} than the net that was"
                    f" exported, by {float(np.nanmax(error)):.2g} after {len(x)} steps;"
                    f" expected at most {TOLERANCE:g}. Copy the file again, try another version of"
                    " the runtime, or export again"
                )


def initial_state(description: Mapping[str, Any], lanes: int) -> dict[str, Array]:
    """The leaves of the state before the first step, for so many lanes; new arrays."""
    state: dict[str, Array] = {}
    for leaf in description["state"]:
        shape = [lanes if size == "B" else size for size in leaf["shape"]]
        state[leaf["name"]] = np.empty(shape, leaf["dtype"])
        state[leaf["name"]][...] = leaf["start"]
    return state


def _run(runtime: Any, x: Array, state: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Outputs and the state after the last step."""
    inputs = {"x": x, **{f"state.{name}": value for name, value in state.items()}}
    y, *after = runtime.run(["y", *(f"next.{name}" for name in state)], inputs)
    return y, dict(zip(state, after, strict=True))


def _load(path: Path) -> tuple[Any, dict[str, Any]]:
    """The runtime with a file, and what the file says of itself."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("Session needs onnxruntime: pip install onnxruntime") from error
    content, options = path.read_bytes(), onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        runtime = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions have no common class
        raise ValueError(
            f"{path}: onnxruntime cannot load it; copy it again, or export it again ({error})"
        ) from error
    text = runtime.get_modelmeta().custom_metadata_map.get(KEY)
    if text is None:
        raise ValueError(f"{path}: no ONNX file that tt.export wrote; export it again")
    description = json.loads(text)
    if description["format"] != FORMAT:
        raise ValueError(
            f"{path}: its format is {description['format']!r}, this version reads {FORMAT!r};"
            " export it again with this version"
        )
    return runtime, description
