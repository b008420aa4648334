"""Runs an exported ONNX file on a live stream, with its state, without torch.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zipfile import BadZipFile

import numpy as np

from throughtime._files import write_atomically
from throughtime.deploy import metadata
from throughtime.deploy._protobuf import split_metadata
from throughtime.errors import ConfigError, DataError, MissingExtraError, ModelError, StateError

Array: TypeAlias = np.ndarray[Any, Any]
OnNaN: TypeAlias = Literal["raise", "hold", "reset"]
_STATE = "throughtime.session/1"
_FEW = 16  # numbers of a step


class Session:
    """An exported net on a live stream: takes one step or any number at a time, keeps the state.

    Needs numpy and onnxruntime alone (`pip install "throughtime[onnx]"`). The file is checked when
    it is loaded: its digest, then what the runtime computes.

    Args:
        path: of a file that `tt.export` wrote.
        lanes: B, streams side by side.
        on_nan: as for `tt.Predictor`: what to do where an input is NaN or infinite. "raise" refuses
            the call and leaves the state as it was, "hold" leaves the step out, "reset" starts the
            lane anew after it. With either, the outputs of that step are NaN.
        like: a session of the same file, whose weights this one uses; the states are separate.
        threads: of the runtime. More than one rarely helps a recurrent net.

    Attributes:
        description: what the file says of itself: inputs, outputs, classes, rate, state.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        ModelError: no file of `tt.export`, one that was changed, or a runtime that computes
            something else.

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
        path: str | Path,
        lanes: int = 1,
        *,
        on_nan: OnNaN = "raise",
        like: "Session | None" = None,
        threads: int = 1,
    ) -> None:
        if on_nan not in ("raise", "hold", "reset"):
            raise ConfigError(f"on_nan={on_nan!r}: expected 'raise', 'hold', 'reset'")
        if lanes < 1:
            raise ConfigError(f"lanes={lanes}: expected at least 1")
        self.path, self.lanes, self.on_nan = Path(path), lanes, on_nan
        if like is None:
            self._runtime, self.description = _load(self.path, threads)
        else:
            self._runtime, self.description = like._runtime, like.description
        self._leaves: Sequence[Mapping[str, Any]] = self.description["state"]
        self._width: int = self.description["inputs"]["width"]
        self._shape: tuple[int, ...] = (*self.description["inputs"]["shape"],)
        self._indexed: bool = self.description["inputs"]["indexed"]
        self._dtype = np.dtype("int64" if self._indexed else self.description["inputs"]["dtype"])
        self._single = _SingleStep(self._runtime, self.description, lanes)
        self.reset()
        if like is None:
            self._check_vector()

    def __call__(self, inputs: Any) -> Array:
        """Outputs `(T, B, C)` for inputs `(T, B, D)`; of a single lane also `(T, D)` to `(T, C)`.

        A net of images takes, and gives, more dimensions in place of one.

        Raises:
            DataError: inputs of another shape or type, or NaN where `on_nan` is "raise".
        """
        x = np.asarray(inputs)
        if x.ndim == 1 + len(self._shape) and self.lanes == 1:
            return self(x[:, None])[:, 0]
        x = self._checked(x)
        if self._indexed:
            return self._run(x)
        finite = np.asarray(np.isfinite(x).all(axis=tuple(range(2, x.ndim))))
        if finite.all():
            return self._run(x)
        if self.on_nan == "raise":
            step, lane = np.argwhere(~finite)[0].tolist()
            raise DataError(
                f"an input is NaN or infinite at step {step} of the call, lane {lane}; the state is"
                " as it was. Session(path, on_nan='hold') leaves such steps out"
            )
        return self._run_around(x, finite)

    def step(self, inputs: Any) -> Array:
        """Outputs `(B, C)` for the inputs `(B, D)` of one step."""
        y = self._single.step(inputs) if type(inputs) is np.ndarray else None
        return self(np.asarray(inputs)[None])[0] if y is None else y

    def reset(self, lanes: int | Sequence[int] | None = None) -> None:
        """Start some lanes anew, by number; all of them by default."""
        start = {leaf["name"]: metadata.start_of(leaf, self.lanes) for leaf in self._leaves}
        if lanes is None:
            self._single.set_state(start)
            return
        rows = [lanes] if isinstance(lanes, int) else list(lanes)
        if wrong := [row for row in rows if not 0 <= row < self.lanes]:
            raise StateError(
                f"lane {wrong[0]} asked for, the session has lanes 0 to {self.lanes - 1}"
            )
        state = self.state
        for leaf in self._leaves:
            part = _lanes_of(leaf, rows)
            state[leaf["name"]][part] = start[leaf["name"]][part]
        self._single.set_state(state)

    @property
    def state(self) -> dict[str, Array]:
        """A copy of the state by the names of its leaves."""
        return {name: value.copy() for name, value in self._single.state.items()}

    @state.setter
    def state(self, values: Mapping[str, Array]) -> None:
        expected = {
            leaf["name"]: (metadata.leaf_shape(leaf, self.lanes), leaf["dtype"])
            for leaf in self._leaves
        }
        got = {name: (value.shape, value.dtype.name) for name, value in values.items()}
        if got != expected:
            raise StateError(
                f"the state has the leaves {got}, a session of {self.path} with {self.lanes} lanes"
                f" has {expected}"
            )
        self._single.set_state(values)

    def save(self, path: str | Path) -> None:
        """Write the state; `load` in another process goes on to the bit."""
        buffer = io.BytesIO()
        header = np.array(json.dumps([_STATE, self.description["sha256"]]))
        leaves: dict[str, Any] = {f"leaf.{k}": v for k, v in self._single.state.items()}
        np.savez(buffer, header=header, **leaves)
        write_atomically(Path(path), buffer.getvalue())

    def load(self, path: str | Path) -> None:
        """Read a state that `save` wrote, of the same file and number of lanes.

        Raises:
            StateError: no such state, or one of another net.
        """
        try:
            with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as arrays:
                values = {name: arrays[name] for name in arrays.files}
            kind, digest = json.loads(str(values.pop("header")))
        except FileNotFoundError as error:
            raise StateError(f"{path}: no such file; session.save(path) writes one") from error
        except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile) as error:
            raise StateError(
                f"{path}: not a readable state of a session; expected a file that"
                " session.save(path) wrote"
            ) from error
        if (kind, digest) != (_STATE, self.description["sha256"]):
            raise StateError(f"{path}: the state of another net than {self.path}")
        self.state = {name.removeprefix("leaf."): value for name, value in values.items()}

    def _checked(self, x: Array) -> Array:
        kinds = "iu" if self._indexed else "fiu"
        if x.shape[1:] == (self.lanes, *self._shape) and not len(x):
            raise DataError(f"the inputs have shape {x.shape}: a call takes at least one step")
        if x.shape[1:] != (self.lanes, *self._shape) or x.dtype.kind not in kinds:
            raise DataError(
                f"the inputs have shape {x.shape} and type {x.dtype}, expected"
                f" {('T', self.lanes, *self._shape)} {self._dtype}; a session of more lanes is"
                " Session(path, lanes=B)"
            )
        if self._indexed and (x.min() < 0 or x.max() >= self._width):
            raise DataError(f"an index is {x.min()} or {x.max()}, expected 0 to {self._width - 1}")
        return np.ascontiguousarray(x, dtype=self._dtype)

    def _run(self, x: Array) -> Array:
        if len(x) == 1:
            return self._single.run(x[0])[None]
        y, after = _run(self._runtime, x, self._single.state)
        self._single.set_state(after)
        return y

    def _run_around(self, x: Array, finite: Array) -> Array:
        """Runs lanes with missing steps alone, without these; others as if there were none."""
        before = self.state
        y = self._run(np.where(finite.reshape(*finite.shape, *[1] * len(self._shape)), x, 0))
        after = self.state
        for lane in np.flatnonzero(~finite.all(axis=0)).tolist():
            state = {
                leaf["name"]: before[leaf["name"]][_lanes_of(leaf, [lane])] for leaf in self._leaves
            }
            start = {leaf["name"]: metadata.start_of(leaf, 1) for leaf in self._leaves}
            y[:, lane] = math.nan
            for first, stop in _spans(finite[:, lane], split=self.on_nan == "reset"):
                rows = np.flatnonzero(finite[first:stop, lane]) + first
                if len(rows):
                    part, state = _run(self._runtime, x[rows, lane][:, None], state)
                    y[rows, lane] = part[:, 0]
                if self.on_nan == "reset" and not finite[stop - 1, lane]:
                    state = start
            for leaf in self._leaves:
                after[leaf["name"]][_lanes_of(leaf, [lane])] = state[leaf["name"]]
        self._single.set_state(after)
        return y

    def _check_vector(self) -> None:
        start = {leaf["name"]: metadata.start_of(leaf, 1) for leaf in self._leaves}
        steps = self.description["conformance"]["steps"]
        x = metadata.vector_inputs(self.description, steps)
        y, after = _run(self._runtime, x, start)
        metadata.check_vector(self.description, y[-1], after, str(self.path))


class _SingleStep:
    """One step at a time through bound buffers: two states, which change places."""

    def __init__(self, runtime: Any, description: Mapping[str, Any], lanes: int) -> None:
        inputs, leaves = description["inputs"], description["state"]
        kind = "int64" if inputs["indexed"] else inputs["dtype"]
        self._x = np.zeros((1, lanes, *inputs["shape"]), kind)
        self._row, self._flat = self._x[0], self._x.ravel()
        self._zeros = np.zeros_like(self._flat)
        self._shape, self._dtype = () if inputs["indexed"] else self._row.shape, self._row.dtype
        self._y = np.zeros((1, lanes, *description["outputs"]["shape"]), inputs["dtype"])
        self._outputs = self._y[0]
        self._states = [
            {leaf["name"]: metadata.start_of(leaf, lanes).copy() for leaf in leaves}
            for _ in range(2)
        ]
        self._runtime = runtime
        self._bindings = [self._binding(*self._states), self._binding(*reversed(self._states))]

    @property
    def state(self) -> dict[str, Array]:
        """The state now: the buffers themselves."""
        return self._states[0]

    def set_state(self, values: Mapping[str, Array]) -> None:
        """Copy a state into the buffers."""
        for name, buffer in self.state.items():
            np.copyto(buffer, values[name])

    def step(self, x: Array) -> Array | None:
        """As `run`; None for inputs of another shape or type, indices, and what is not finite."""
        if x.shape != self._shape or x.dtype is not self._dtype:
            return None
        self._row[...] = x
        flat = self._flat
        # half a microsecond for any size; the sum of a few numbers takes a quarter of that
        finite = math.isfinite(
            sum(flat.tolist()) if flat.size <= _FEW else np.vdot(flat, self._zeros)
        )
        return self._run() if finite else None

    def run(self, x: Array) -> Array:
        """The outputs `(B, C)` of one step `(B, D)`, or of `(B,)` indices."""
        self._row[...] = x
        return self._run()

    def _run(self) -> Array:
        self._runtime.run_with_iobinding(self._bindings[0])
        self._bindings.reverse()
        self._states.reverse()
        return self._outputs.copy()

    def _binding(self, before: Mapping[str, Array], after: Mapping[str, Array]) -> Any:
        binding = self._runtime.io_binding()
        entering = {"x": self._x} | {f"state.{name}": array for name, array in before.items()}
        leaving = {"y": self._y} | {f"next.{name}": array for name, array in after.items()}
        for bind, buffers in ((binding.bind_input, entering), (binding.bind_output, leaving)):
            for name, array in buffers.items():
                bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return binding


def _spans(finite: Array, *, split: bool) -> list[tuple[int, int]]:
    """The steps up to and with each missing one, if they are `split` there; else all of them."""
    if not split:
        return [(0, len(finite))]
    stops = [*(np.flatnonzero(~finite) + 1).tolist(), len(finite)]
    return [(a, b) for a, b in zip([0, *stops], stops, strict=False) if a < b]


def _lanes_of(leaf: Mapping[str, Any], lanes: Sequence[int]) -> tuple[Any, ...]:
    """The index of some lanes in a leaf."""
    axis = leaf["shape"].index("B")
    return (*[slice(None)] * axis, list(lanes))


def _run(runtime: Any, x: Array, state: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Outputs and the state after the last step."""
    inputs = {"x": x, **{f"state.{name}": value for name, value in state.items()}}
    names = ["y", *(f"next.{name}" for name in state)]
    y, *after = runtime.run(names, inputs)
    return y, dict(zip(state, after, strict=True))


def _load(path: Path, threads: int) -> tuple[Any, dict[str, Any]]:
    """The runtime with the file, and the description in it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(
            'tt.deploy.Session needs onnxruntime: pip install "throughtime[onnx]"'
        ) from error
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    description = _description(path, content)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        ), description
    except Exception as error:  # onnxruntime's own exceptions have no common class
        raise ModelError(f"{path}: onnxruntime cannot load it ({error})") from error


def _description(path: Path, content: bytes) -> dict[str, Any]:
    """The description at the end of the file, checked against the rest of it."""
    try:
        body, text = split_metadata(content, metadata.KEY)
        description = json.loads(text)
    except ValueError as error:
        raise ModelError(
            f"{path}: no ONNX file that tt.export wrote, or one that was cut short; copy it again,"
            " or export it again"
        ) from error
    metadata.check_seal(description, body, str(path))
    return description
