"""Prediction: whole recordings or live streams, state carried, without a graph.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import send
from throughtime.carry.carried import (
    Carried,
    device_of,
    dtype_of,
    pack,
    require_carried,
    running,
)
from throughtime.chunk import Chunk, Placement
from throughtime.distributed import Ranks, shards_of
from throughtime.errors import ConfigError, DataError, ModelError, RunError, StateError
from throughtime.nn.affine import (
    Affine,
    Standardise,
    WholeRecording,
    needs_whole_recordings,
    refuse_whole_recordings,
)
from throughtime.state import State
from throughtime.stream import Stream
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import standardised
from throughtime.stream.sources import Recordings, as_recording

OnNaN: TypeAlias = Literal["raise", "hold", "reset"]


def check_standardised(net: nn.Module, stream: Stream) -> None:
    """Refuse a net without the layer that the `standardise` of its stream asks for.

    Raises:
        ModelError: it has none; or it needs whole recordings, and the stream's are as they were.
    """
    how = stream.standardise
    kind = {"split": Affine, "recording": WholeRecording}.get(str(how), Standardise)
    layers = [
        part
        for part in net.modules()
        if isinstance(part, kind) and not getattr(part, "inverse", False)
    ]
    if kind is Standardise:
        layers = [part for part in layers if how == f"first:{part.steps}"]
    plain = any(r is not standardised(r) for r in stream.recordings)
    if (how and not layers) or (plain and needs_whole_recordings(net)):
        raise ModelError(
            f"the stream has standardise={how!r}, and the net has another standardisation or none:"
            " write net = tt.carry(nn.Sequential(tt.nn.Standardise.of(stream), module)), and give"
            " the streams of one net the same standardise="
        )


class ArrayWriter(Protocol):
    """Anything that takes `out[start:stop] = rows`, such as a memory-mapped array."""

    def __setitem__(self, span: slice, rows: Any, /) -> None: ...


def predict(
    net: Carried,
    recording: Recordings,
    *,
    chunk: int = 1024,
    state: State = None,
    out: ArrayWriter | None = None,
    dtype: torch.dtype | None = None,
    missing: Literal["error", "mask"] = "error",
    on_nan: OnNaN = "raise",
) -> tuple[Any, State]:
    """The outputs of a whole recording, and the state after it.

    Use `Predictor` where steps arrive one by one.

    Args:
        net: made by `tt.carry`.
        recording: as for `tt.Stream`, or its inputs alone, `(T, D)`; targets are ignored.
        chunk: steps per forward call; it changes memory and speed only.
        state: the state entering the first step; default: the initial state.
        out: where to write, anything that takes `out[start:stop] = array` of shape `(n, C)`, a
            memory-mapped array for one; default: a new tensor.
        dtype: type of the inputs; default: as they are.
        missing: as for `tt.Stream`: "mask" computes such steps with inputs of 0.
        on_nan: as for `Predictor`: "hold" and "reset" leave out steps whose inputs are not finite.

    Returns:
        `out`, or a tensor `(T, C)`; and the state, one lane. Several outputs are a tuple or a dict
        of such tensors, and lie side by side in `out`.

    Raises:
        DataError: inputs that are NaN or infinite; the row and the column are named.
        RunError: the outputs are NaN though the inputs are finite.

    Cost: one forward pass; memory for one chunk, and for the outputs unless `out` is given.

    Example:
        >>> import torch, throughtime as tt
        >>> net = tt.carry(torch.nn.GRU(3, 8))
        >>> outputs, state = tt.predict(net, {"inputs": torch.zeros(50, 3)})
        >>> outputs.shape
        torch.Size([50, 8])
    """
    if missing == "mask" and on_nan != "raise":
        raise ConfigError(
            f"missing='mask' computes steps without inputs, on_nan={on_nan!r} leaves them out;"
            " choose one of them"
        )
    if isinstance(recording, (Tensor, np.ndarray)):
        recording = {"inputs": recording}
    played = as_recording(recording)
    stream = Stream(
        [standardised(played) if needs_whole_recordings(net) else played],
        lanes=1,
        chunk=chunk,
        seed=None,
        dtype=dtype,
        missing=missing,
        rank=0,
        ranks=1,
    )
    stream._collator.keep_missing = on_nan != "raise"  # for the predictor, which leaves them out
    stream._collator.advice += "; on_nan='hold' (--on-nan hold) leaves such steps out"
    predictor = Predictor(net, lanes=1, state=state, on_nan=on_nan)
    writer: Any = out
    start = 0
    for part in stream:
        rows = predictor._call(part.inputs).squeeze(1).cpu()
        if writer is None:
            writer = rows.new_empty(stream.steps, *rows.shape[1:])
        span = slice(start, start + len(rows))
        values: Any = rows if isinstance(writer, Tensor) else rows.numpy()
        writer[span] = values
        start = span.stop
    return predictor._unpacked(writer) if out is None else out, predictor.state


class Predictor:
    """A net running on a live stream: takes one step or any number at a time, keeps the state.

    Args:
        net: made by `tt.carry`; runs in evaluation mode under `no_grad` and is put back after each
            call.
        lanes: B, streams side by side.
        state: where to start; default: the initial state.
        on_nan: what to do where an input of a step is NaN or infinite, which would make every
            later answer NaN. "raise" refuses the call and leaves the state as it was. "hold" leaves
            the step out: the lane keeps its state. "reset" starts the lane anew after the step.
            With either, the outputs of that step are NaN, and the other lanes go on.

    Attributes:
        state: the state after the last step; `None` before the first. A value: keep it, set it,
            and write it to a file with `tt.state.save`.
        skipped: steps left out so far, over all lanes.

    Several threads may share a net that is in evaluation mode already (`net.eval()`), each with a
    predictor of its own.

    Cost: one forward call per call; where inputs are not finite, one for each run of steps at which
    the same lanes have some.

    Example:
        >>> import torch, throughtime as tt
        >>> predictor = tt.Predictor(tt.carry(torch.nn.GRU(3, 8)))
        >>> predictor(torch.zeros(5, 1, 3)).shape, predictor.step(torch.zeros(1, 3)).shape
        (torch.Size([5, 1, 8]), torch.Size([1, 8]))
    """

    def __init__(
        self, net: Carried, lanes: int = 1, *, state: State = None, on_nan: OnNaN = "raise"
    ) -> None:
        require_carried(net)
        if on_nan not in ("raise", "hold", "reset"):
            raise ConfigError(f"on_nan={on_nan!r}: expected 'raise', 'hold' or 'reset'")
        self.net, self.lanes, self.on_nan, self.skipped = net, lanes, on_nan, 0
        self._state, self._dtype, self._alone = state, dtype_of(net), _OneThread()
        self._ranks = Ranks(0, 1, self.device, shards_of(net))

    @property
    def device(self) -> torch.device:
        """Where the net is; it may be moved between two calls."""
        return device_of(self.net)

    @property
    def state(self) -> State:
        """The state after the last step, where the net is; `None` before the first."""
        state, device = self._state, self.device
        if state is not None and any(leaf.device != device for leaf in trees.tensors(state)):
            self._state = trees.map_leaves(lambda leaf: leaf.to(device), state)
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state

    def __getstate__(self) -> dict[str, Any]:
        """A lock cannot be copied."""
        return {**self.__dict__, "_alone": _OneThread()}

    def __call__(self, inputs: Tensor | Array, resets: Tensor | None = None) -> Any:
        """Outputs `(T, B, C)` for inputs `(T, B, D)`, of NumPy or torch.

        `resets` `(T, B)` marks lanes that start a recording. The single lane of a predictor may
        come without its dimension, `(T, D)`. Several outputs are a tuple or a dict.

        Raises:
            DataError: an input is NaN or infinite, or the inputs have another number of lanes.
            RunError: an output is NaN though the inputs are finite, or another thread is calling.
        """
        refuse_whole_recordings(self.net)
        return self._unpacked(self._call(inputs, resets))

    def _unpacked(self, outputs: Any) -> Any:
        """The items of several outputs."""
        unpack = self.net.adapter.unpack
        return outputs if unpack is None else unpack(outputs)

    def _call(self, inputs: Tensor | Array, resets: Tensor | None = None) -> Tensor:
        """As a call; several outputs lie side by side."""
        x = self._as_tensor(inputs)
        if x.dim() == (2 if x.is_floating_point() else 1):
            marks = None if resets is None else resets.unsqueeze(1)
            return self._call(x.unsqueeze(1), marks).squeeze(1)
        if x.dim() < 2:
            raise DataError(
                f"the inputs have the shape {tuple(x.shape)}: write inputs[:, None] for"
                f" {x.numel()} steps of one feature, or predictor.step(inputs) for one step"
            )
        if x.shape[1] != self.lanes:
            raise DataError(
                f"the inputs {tuple(x.shape)} have {x.shape[1]} lanes, the predictor has"
                f" {self.lanes}: write tt.Predictor(net, lanes={x.shape[1]}), and for one step"
                " predictor.step(inputs)" + inputs_hint(self.net.module, x)
            )
        before = self.state
        with self._alone:
            outputs, self.state = self._play(x, before, resets)
            return outputs

    def _as_tensor(self, inputs: Tensor | Array) -> Tensor:
        """Floating inputs in the type of the weights; arrays become tensors of the host."""
        if isinstance(inputs, Tensor):
            inputs = inputs.reshape(1) if inputs.dim() == 0 else inputs
            return inputs.to(self._dtype) if inputs.is_floating_point() else inputs
        array = np.ascontiguousarray(inputs)  # torch takes no negative strides
        if array.dtype.kind in "SUO":
            raise DataError(
                f"the inputs are {str(array.flat[0])!r:.40}, expected numbers: a net of text takes"
                " the index of each symbol, such as list(b'text') for bytes"
            )
        weights = (p.dtype for p in self.net.parameters() if p.is_floating_point())
        dtype = torch.int64 if array.dtype.kind in "biu" else next(weights, None)
        return torch.tensor(array, dtype=dtype, device="cpu")

    def _find_missing(self, x: Tensor) -> Tensor | None:
        """`(T, B)`, on the host: the steps with an input that is not finite, if there are any.

        Raises:
            DataError: there are, and none may be left out.
        """
        if not x.is_floating_point() or bool(x.isfinite().all()):
            return None
        wrong = ~x.isfinite().flatten(2)
        if self.on_nan != "raise":
            return wrong.any(2).cpu()
        step, lane, column = wrong.nonzero()[0].tolist()
        raise DataError(
            f"{int(wrong.any(2).sum())} steps of the inputs are NaN or infinite, the first at step"
            f" {step} of the call, lane {lane}, column {column}; the state is as it was. Leave such"
            " steps out: tt.Predictor(net, on_nan='hold') keeps the lane's state, on_nan='reset'"
            " starts it anew"
        )

    def _play(self, x: Tensor, before: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """Run the net on inputs without the missing steps: its outputs, and the state after it."""
        missing = self._find_missing(x)  # before inputs of the host are sent
        x = send(x, self.device) if x.is_cpu else x
        run = self._run if missing is None else partial(self._run_around, missing)
        try:
            with self._ready():
                outputs, after = run(x, before, resets)
        except ValueError:  # of the trials at the first inputs
            self._refuse_weights("the net cannot be tried")
            raise
        nan = outputs.isnan()
        if missing is not None:
            left_out = send(missing, x.device)[(..., *[None] * (nan.dim() - 2))]
            nan, outputs = nan & ~left_out, outputs.masked_fill(left_out, math.nan)
        flags = torch.stack([nan.any(), *[leaf.isnan().any() for leaf in trees.tensors(after)]])
        if True in (wrong := flags.tolist()):
            leaves = [f"state leaf '{name}' is NaN" for name, _ in trees.leaves(after)]
            self._refuse_nan(before, ["the outputs are NaN", *leaves][wrong.index(True)])
        return outputs, after

    @contextmanager
    def _ready(self) -> Generator[None]:
        """Within it the net may run: in evaluation mode, without a graph, all weights whole."""
        with self._ranks.unsharded(self.net), running(self.net):
            yield

    def _run(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """The outputs, and the state after them; within `_ready`."""
        try:
            if state is None:
                state = self.net.initial_state(x.shape[1], like=x)
            outputs, after = self.net(x, state, resets)
            return pack(outputs), after
        except (ModelError, RuntimeError, ValueError, IndexError) as error:
            is_said = isinstance(error, (DataError, RunError, StateError))
            if not is_said and (hint := inputs_hint(self.net.module, x)):
                raise DataError(f"the net refuses the inputs {tuple(x.shape)}{hint}") from error
            raise

    def _run_around(
        self, missing: Tensor, x: Tensor, before: State, resets: Tensor | None
    ) -> tuple[Tensor, State]:
        """Outputs and state, where lanes hold their state at steps that are `missing`, `(T, B)`.

        One call for each run of steps that the same lanes miss; they get zeros, and the state from
        before them, or a new one.
        """
        self.skipped += int(missing.sum())
        start = self.net.initial_state(self.lanes, like=x)
        state, x = start if before is None else before, x.nan_to_num(0, 0, 0)
        outputs: list[Tensor] = []
        marks = torch.zeros_like(missing) if resets is None else resets.cpu()
        changes = (missing[1:] != missing[:-1]).any(1).nonzero().flatten() + 1
        for first, stop in pairwise([0, *changes.tolist(), len(x)]):
            held, run = missing[first], slice(first, stop)
            y, after = self._run(x[run], state, None if resets is None else resets[run])
            anew = held & (marks[run].any(0) | (self.on_nan == "reset"))
            state = trees.reset(trees.reset(after, state, held), start, anew)
            outputs.append(y)
        return torch.cat(outputs), state

    def _refuse_nan(self, before: State, what: str) -> None:
        """Refuse NaN that finite inputs led to; the message begins with `what` is NaN."""
        if before is not None and any(leaf.isnan().any() for leaf in trees.tensors(before)):
            raise RunError("the state of the predictor is NaN; start anew: predictor.reset()")
        self._refuse_weights(what)
        raise RunError(
            f"{what} though the inputs are finite; the net is unstable on them: are they scaled as"
            " in training?"
        )

    def _refuse_weights(self, what: str) -> None:
        """Refuse weights that are not finite; the first one is named."""
        for name, weight in self.net.module.named_parameters():
            if not bool(weight.isfinite().all()):
                raise RunError(
                    f"{what}: the weight '{name}' is not finite. The training diverged; take a"
                    " file from before that"
                )

    def _run_chunk(self, chunk: Chunk) -> Tensor:
        """Outputs `(T, B, C)` of a chunk on the device of the net; its stream checks inputs."""
        chunk = chunk.convert(Placement(self.device, self._dtype))
        resets = chunk.resets if chunk.any_reset else None
        with self._ready():
            outputs, self.state = self._run(chunk.inputs, self.state, resets)
        return outputs

    def step(self, inputs: Tensor | Array) -> Any:
        """Outputs `(B, C)` for the inputs `(B, D)` of a single step.

        Cost: that of an ordinary call. Where microseconds count, `tt.deploy.Session` plays the file
        that `tt.export` writes.
        """
        refuse_whole_recordings(self.net)
        y = self._call(self._as_tensor(inputs).unsqueeze(0))
        return self._unpacked(y.squeeze(0))

    def reset(self, lanes: int | Sequence[int] | None = None) -> None:
        """Start some lanes anew, by number; all of them by default.

        Raises:
            IndexError: no such lane.
        """
        if lanes is None or self.state is None:
            self.state = None
            return
        where = torch.zeros(self.lanes, dtype=torch.bool, device="cpu")
        where[lanes] = True
        with torch.no_grad():
            self.state = trees.reset(self.state, self.net.initial_state(self.lanes), where)


class _OneThread:
    """A context that refuses a second thread: the state has one order of steps."""

    def __init__(self) -> None:
        self._calls: dict[str, object] = {}  # a lock could not be pickled

    def __enter__(self) -> None:
        call = object()
        if self._calls.setdefault("running", call) is not call:  # one step of CPython, no race
            raise RunError(
                "two threads call this predictor at once, and its state has one order of steps;"
                " give each thread its own: tt.Predictor(net), or hold a lock around the call"
            )

    def __exit__(self, *error: object) -> None:
        self._calls.clear()


def inputs_hint(module: nn.Module, x: Tensor) -> str:
    """What to do with whole numbers, and with tokens of a net that embeds them; empty of others."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if x.is_complex() or (x.is_floating_point() and not embeddings):
        return ""
    if not embeddings:
        return (
            f"; whole numbers ({x.dtype}) are read as indexes, without a dimension of features:"
            " convert features first, such as inputs.astype(np.float32)"
        )
    if x.is_floating_point():
        return f": an embedding takes whole numbers, not {x.dtype}: write inputs.long()"
    most = min(m.num_embeddings for m in embeddings)
    if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < most:
        return (
            f": they hold the tokens {int(x.min())} to {int(x.max())}, the embedding has 0 to"
            f" {most - 1}"
        )
    return ": tokens are whole numbers of shape (T, B), those of a single step (B,)"
