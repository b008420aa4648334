"""Runs an exported ONNX file on a live stream, with its state, without torch.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import io
import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zipfile import BadZipFile

import numpy as np

from throughtime._files import write_atomically
from throughtime.deploy import metadata
from throughtime.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    ModelError,
    RunError,
    StateError,
)

Array: TypeAlias = np.ndarray[Any, Any]
OnNaN: TypeAlias = Literal["raise", "hold", "reset"]
_STATE = "throughtime.session/1"
_FEW = 16  # numbers of a step


class Session:
    """An exported net on a live stream: takes one step or any number at a time, keeps the state.

    Needs numpy and onnxruntime alone (`pip install "throughtime[onnx]"`). The file is checked when
    it is loaded: its digest, then what the runtime computes. Each thread needs a session of its
    own; a copy, by `copy` or `pickle`, reads the file again and goes on from the same state.

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
        skipped: steps left out so far, over all lanes.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        ModelError: no file of `tt.export`, one that was changed, another one than that of `like`,
            or a runtime that computes something else.

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
        for name, value in (("lanes", lanes), ("threads", threads)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r}: expected a whole number, at least 1")
        if type(like) not in (type(None), Session):
            raise ConfigError(f"like={like!r}: expected a session of the same file")
        self.path, self.lanes, self.on_nan, self.threads = Path(path), lanes, on_nan, threads
        self.skipped = 0
        content, self.description = _load(self.path)
        if like is None:
            self._runtime = _runtime(self.path, content, threads)
        elif like.description["sha256"] == self.description["sha256"]:
            self._runtime = like._runtime
        else:
            raise ModelError(
                f"{path}: another file than {like.path}, which the session of like= has loaded;"
                " leave out like="
            )
        self._single = _SingleStep(self._runtime, self.description, lanes)
        if like is None:
            self._check_vector()

    def __reduce__(self) -> tuple[Callable[..., "Session"], tuple[Any, ...]]:
        """A copy reads the file, which must not have changed, and gets the state."""
        settings = self.path, self.lanes, self.on_nan, self.threads
        return _copy, (*settings, self.description["sha256"], self.state, self.skipped)

    def __call__(self, inputs: Any) -> Array:
        """Outputs `(T, B, C)` for inputs `(T, B, D)`; of a single lane also `(T, D)` to `(T, C)`.

        A net of images takes, and gives, more dimensions in place of one.

        Raises:
            DataError: inputs of another shape or type, or NaN where `on_nan` is "raise".
        """
        x = np.asarray(inputs)
        if x.ndim == self._single.row.ndim and self.lanes == 1:
            return self(x[:, None])[:, 0]
        x = self._checked(x)
        finite = np.asarray(np.isfinite(x).reshape(*x.shape[:2], -1).all(axis=2))
        if not finite.all() and self.on_nan == "raise":
            step, lane = np.argwhere(~finite)[0].tolist()
            raise DataError(
                f"an input is NaN or infinite at step {step} of the call, lane {lane}; the state is"
                " as it was. Session(path, on_nan='hold') leaves such steps out"
            )
        with self._one_thread():
            return self._run(x) if finite.all() else self._run_around(x, finite)

    def step(self, inputs: Any) -> Array:
        """Outputs `(B, C)` for the inputs `(B, D)` of one step."""
        y = self._single.step(inputs) if type(inputs) is np.ndarray else None
        if y is not None:
            return y
        x = np.asarray(inputs)
        shape = self._single.row.shape
        if x.shape != shape and (self.lanes > 1 or x.shape != shape[1:]):
            raise self._misfit(x, "")
        return self(x[None])[0]

    def reset(self, lanes: int | Sequence[int] | None = None) -> None:
        """Start some lanes anew, by number; all of them by default.

        Raises:
            StateError: no such lane.
        """
        start = metadata.initial_state(self.description, self.lanes)
        if lanes is None:
            self._single.set_state(start)
            return
        rows = np.atleast_1d(np.array(lanes))
        if rows.size and (
            rows.dtype.kind not in "iu" or not 0 <= rows.min() <= rows.max() < self.lanes
        ):
            raise StateError(f"lanes={lanes!r}: the session has lanes 0 to {self.lanes - 1}")
        self._put(start, rows.astype(int))

    @property
    def state(self) -> dict[str, Array]:
        """A copy of the state by the names of its leaves."""
        return {name: value.copy() for name, value in self._single.state.items()}

    @state.setter
    def state(self, values: Mapping[str, Array]) -> None:
        got, expected = (
            {name: (value.shape, value.dtype.name) for name, value in leaves.items()}
            for leaves in (values, self._single.state)
        )
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

    @contextmanager
    def _one_thread(self) -> Generator[None]:
        """Refuse a call while another thread has one: both would change the state."""
        try:
            self._single.token.pop()
        except IndexError:
            raise RunError(
                "another thread is calling this session; each thread needs one of its own:"
                " Session(path, like=session)"
            ) from None
        try:
            yield
        finally:
            self._single.token.append(None)

    def _misfit(self, x: Array, steps: str) -> DataError:
        row = self._single.row
        shape = ", ".join(map(str, row.shape))
        return DataError(
            f"the inputs have shape {x.shape} and type {x.dtype}, expected ({steps}{shape})"
            f" {row.dtype}; a session of more lanes is Session(path, lanes=B)"
        )

    def _checked(self, x: Array) -> Array:
        inputs, row = self.description["inputs"], self._single.row
        kinds = "iu" if inputs["indexed"] else "fiu"
        if x.shape[1:] != row.shape or x.dtype.kind not in kinds:
            raise self._misfit(x, "T, ")
        if not len(x):
            raise DataError(f"the inputs have shape {x.shape}: a call takes at least one step")
        if inputs["indexed"] and not 0 <= x.min() <= x.max() < inputs["width"]:
            raise DataError(
                f"the indices are from {x.min()} to {x.max()}, expected 0 to {inputs['width'] - 1}"
            )
        with np.errstate(over="ignore"):  # infinite in the type of the net: the caller's to handle
            return np.ascontiguousarray(x, dtype=row.dtype)

    def _run(self, x: Array) -> Array:
        if len(x) == 1:
            return self._single.run(x[0])[None]
        y, after = _run(self._runtime, x, self._single.state)
        self._single.set_state(after)
        return y

    def _run_around(self, x: Array, finite: Array) -> Array:
        """As `_run`; lanes leave out their steps that are not `finite` `(T, B)`."""
        self.skipped += int((~finite).sum())
        cuts = np.flatnonzero(~finite.all(axis=1))
        outputs: list[Array] = []
        for rows in np.split(np.arange(len(x)), np.union1d(cuts, cuts + 1)):
            if not len(rows):
                continue
            state = self.state
            missing = ~finite[rows].all(axis=0)
            outputs.append(self._run(np.nan_to_num(x[rows], posinf=0, neginf=0)))
            if missing.any():
                outputs[-1][:, missing] = math.nan
                if self.on_nan == "reset":
                    state = metadata.initial_state(self.description, self.lanes)
                self._put(state, np.flatnonzero(missing))
        return np.concatenate(outputs)

    def _put(self, values: Mapping[str, Array], rows: Array) -> None:
        """Some lanes of a state."""
        for leaf in self.description["state"]:
            part = (*[slice(None)] * leaf["shape"].index("B"), rows)
            self._single.state[leaf["name"]][part] = values[leaf["name"]][part]

    def _check_vector(self) -> None:
        x = metadata.vector_inputs(self.description, self.description["conformance"]["steps"])
        y, after = _run(self._runtime, x, metadata.initial_state(self.description, 1))
        metadata.check_vector(self.description, y[-1], after, str(self.path))


class _SingleStep:
    """One step at a time through bound buffers: two states, which change places.

    Attributes:
        row: the inputs of the step, `(B, D)` or `(B,)` indices.
        token: taken out during a call. A list is as safe as a lock, in a tenth of the time.
    """

    def __init__(self, runtime: Any, description: Mapping[str, Any], lanes: int) -> None:
        inputs = description["inputs"]
        kind = "int64" if inputs["indexed"] else inputs["dtype"]
        self._x = np.zeros((1, lanes, *inputs["shape"]), kind)
        self.row, self._flat = self._x[0], self._x.ravel()
        self._zeros = np.zeros_like(self._flat)
        self._shape, self._dtype = () if inputs["indexed"] else self.row.shape, self.row.dtype
        self._y = np.zeros((1, lanes, *description["outputs"]["shape"]), inputs["dtype"])
        self._outputs = self._y[0]
        a, b = (metadata.initial_state(description, lanes) for _ in range(2))
        self._call, self.token = runtime.run_with_iobinding, [None]
        self._turns = [(self._binding(runtime, a, b), a), (self._binding(runtime, b, a), b)]

    @property
    def state(self) -> dict[str, Array]:
        """The state now: the buffers themselves."""
        return self._turns[0][1]

    def set_state(self, values: Mapping[str, Array]) -> None:
        """Copy a state into the buffers."""
        for name, buffer in self.state.items():
            np.copyto(buffer, values[name])

    def step(self, x: Array) -> Array | None:
        """As `run`; None for another shape or type, indices, what is not finite, during a call."""
        if x.shape != self._shape or x.dtype is not self._dtype:
            return None
        try:
            self.token.pop()
        except IndexError:
            return None
        try:  # a context manager would take half a microsecond
            self.row[...] = x
            flat = self._flat
            # half a microsecond for any size; the sum of a few numbers takes a quarter of that
            finite = math.isfinite(
                sum(flat.tolist()) if flat.size <= _FEW else np.vdot(flat, self._zeros)
            )
            return self._run() if finite else None
        finally:
            self.token.append(None)

    def run(self, x: Array) -> Array:
        """The outputs `(B, C)` of one step `(B, D)`, or of `(B,)` indices."""
        self.row[...] = x
        return self._run()

    def _run(self) -> Array:
        self._call(self._turns[0][0])
        self._turns.reverse()
        return self._outputs.copy()

    def _binding(
        self, runtime: Any, before: Mapping[str, Array], after: Mapping[str, Array]
    ) -> Any:
        binding = runtime.io_binding()
        entering = {"x": self._x} | {f"state.{name}": array for name, array in before.items()}
        leaving = {"y": self._y} | {f"next.{name}": array for name, array in after.items()}
        for bind, buffers in ((binding.bind_input, entering), (binding.bind_output, leaving)):
            for name, array in buffers.items():
                bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return binding


def _run(runtime: Any, x: Array, state: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Outputs and the state after the last step."""
    inputs = {"x": x, **{f"state.{name}": value for name, value in state.items()}}
    names = ["y", *(f"next.{name}" for name in state)]
    y, *after = runtime.run(names, inputs)
    return y, dict(zip(state, after, strict=True))


def _copy(
    path: Path, lanes: int, on_nan: OnNaN, threads: int, digest: str, *attributes: Any
) -> Session:
    """A session of the file with a digest, in a state."""
    session = Session(path, lanes, on_nan=on_nan, threads=threads)
    if session.description["sha256"] != digest:
        raise ModelError(f"{path}: the file was replaced after the session was copied")
    session.state, session.skipped = attributes
    return session


def _runtime(path: Path, content: bytes, threads: int) -> Any:
    """The runtime with a file."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(
            'tt.deploy.Session needs onnxruntime: pip install "throughtime[onnx]"'
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions have no common class
        raise ModelError(f"{path}: onnxruntime cannot load it ({error})") from error


def _load(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A file, and the description at its end, checked against the rest of it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        body, text = metadata.split_metadata(content, metadata.KEY)
        description = json.loads(text)
    except ValueError as error:
        raise ModelError(
            f"{path}: no ONNX file that tt.export wrote, or one that was cut short; copy it again,"
            " or export it again"
        ) from error
    metadata.check_seal(description, body, str(path))
    return content, description
