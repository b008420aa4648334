"""The executor: a stretch of steps run forward without a graph, then piece by piece backward with
one.

    forward:    s_0 -> s_1 -> ... -> s_n          states at the edges kept, nothing else
    backward:   for i = n-1 ... 0:  run piece i again from s_i, with a graph
                (g, a_i) += vector-Jacobian products of its loss, and of s_{i+1} with the adjoint
                a_{i+1}

The adjoint a_i is the gradient of all later losses with respect to s_i. The sum of the g is the
gradient of plain autograd over the whole stretch, in the memory of one piece and the edge states.
The last piece is run once. Cost per step: two forward passes and one backward pass (4/3 of plain
autograd, if a backward costs two forwards).

References: T. Chen et al., Training deep nets with sublinear memory cost (2016); A. Gruslys et al.,
Memory-efficient backpropagation through time, NeurIPS 2016; A. Griewank and A. Walther, Revolve,
ACM TOMS 26 (2000).

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, ModelError
from throughtime.gradient.edges import Edges, Offload
from throughtime.gradient.gate import Gate
from throughtime.gradient.gather import hooks_held, wide
from throughtime.gradient.replay import Replay, generators, set_generators, unnoticed
from throughtime.state import State

Adjoint: TypeAlias = Sequence[Tensor | None]  # one for each leaf of a state
Verify: TypeAlias = Literal["first", "all", "off"]


PULLING: ContextVar[bool] = ContextVar(
    "pulling", default=False
)  # whether a backward pass is that of one piece of several


@contextmanager
def _pulled() -> Generator[None]:
    token = PULLING.set(True)
    try:
        yield
    finally:
        PULLING.reset(token)


@dataclass(frozen=True, eq=False)
class Pulled:
    """What a vector-Jacobian product gives: gradients of the weights, the adjoint of the state entering, gradient of the inputs."""

    weights: Sequence[Tensor | None]
    adjoint: Adjoint
    inputs: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Piece:
    """One piece of a sweep, with its graph.

    Attributes:
        index: its place in the sweep, from 0.
        chunk: its steps.
        inputs: their inputs, a leaf of the graph if its gradient is wanted.
        outputs: `(T, B, C)`.
        before: the state entering its first step.
        after: the state after its last step.
    """

    index: int
    chunk: Chunk
    inputs: Tensor
    outputs: Tensor
    before: State
    after: State

    def pull(
        self,
        weights: Sequence[Tensor],
        roots: Sequence[tuple[Tensor, Tensor | None]],
        adjoint: Adjoint | None,
        *,
        keep: bool = False,
    ) -> Pulled:
        """The vector-Jacobian product of `roots` (tensor, cotangent) and of the state after the
        piece with its adjoint.

        `keep` leaves the graph in place for another product.
        """
        sources = [(root, cotangent) for root, cotangent in roots if root.requires_grad]
        if adjoint is not None:
            pairs = zip(trees.tensors(self.after), adjoint, strict=True)
            sources += [(leaf, a) for leaf, a in pairs if a is not None and leaf.requires_grad]
        entering = trees.tensors(self.before)
        alive = [leaf for leaf in entering if leaf.requires_grad]
        wanted = [*weights, *alive, *([self.inputs] if self.inputs.requires_grad else [])]
        if not sources or not wanted:
            return Pulled([None] * len(weights), [None] * len(entering))
        with hooks_held(weights), no_autocast(self.inputs), _pulled():
            found = torch.autograd.grad(
                [s for s, _ in sources],
                wanted,
                [c for _, c in sources],
                retain_graph=keep,
                allow_unused=True,
            )
        rest = iter(found[len(weights) :])
        return Pulled(
            found[: len(weights)],
            [next(rest) if leaf.requires_grad else None for leaf in entering],
            next(rest, None),
        )


def started(net: Carried, chunk: Chunk, edge: State) -> Piece:
    """A piece by itself, with a graph that begins at the state `edge`, or with the net's initial state if that is `None`."""
    forget_casts(chunk.inputs)
    with torch.enable_grad():
        if edge is None:
            before = net.initial_state(chunk.lanes, like=chunk.inputs)
        else:
            before = trees.map_leaves(
                lambda leaf: leaf.detach().requires_grad_(trees.differentiable(leaf)), edge
            )
        y, after = net(chunk.inputs, before, chunk.resets if chunk.any_reset else None)
    return Piece(0, chunk, chunk.inputs, y, before, after)


class Sweep:
    """A stretch cut into pieces: `forward` once, then `backward` as often as wanted.

    Args:
        net: made by `tt.carry`.
        bounds: where pieces begin and end, as `schedule.pieces` gives them.
        read: gives the steps between two bounds once more.
        start: the state entering the first step; `None` for the net's initial state, with its
            graph.
        offload: where edge states are kept.
        verify: which of the recomputed states are compared with those of the forward pass.
        gates: places in the stretch where the adjoint is multiplied on its way back.
        to_inputs: whether gradients of the inputs are wanted.
    """

    def __init__(
        self,
        net: Carried,
        bounds: Sequence[int],
        read: Callable[[int, int], Chunk],
        start: State,
        *,
        offload: Offload = None,
        verify: Verify = "first",
        gates: Mapping[int, Gate] | None = None,
        to_inputs: bool = False,
    ) -> None:
        self.net, self.bounds, self._read, self._start = net, bounds, read, start
        self._verify, self._gates, self._to_inputs = verify, gates or {}, to_inputs
        self._places = sorted(self._gates)
        self._edges = Edges(len(bounds), offload)
        self._sums: dict[int, Tensor] = {}  # of the outputs of the pieces to be compared
        self._last: Piece | None = None
        self._replay: Replay | None = None

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def forward(
        self, chunks: Iterable[Chunk], *, graph: bool = True
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Runs every piece, the last one with its graph unless `graph` is false.

        Gives each one's chunk and outputs.
        """
        state = self._start
        for index, chunk in enumerate(chunks):
            if index == 0:
                self._replay = Replay(self.net, chunk.inputs.device)
                self._replay.note()  # before the initial state, which may be drawn
                state = trees.detach(self._initial(chunk) if state is None else state)
                self._edges.put(0, state)
            else:
                self._note(index, state)
            if graph and index == len(self) - 1:
                self._last = self._run(index, chunk)
                y, state = self._last.outputs, self._last.after
            else:
                with torch.no_grad():
                    forget_casts(chunk.inputs)
                    y, state = self._play(index, chunk, chunk.inputs, state)
                if self._verify == "all" or (self._verify == "first" and index >= len(self) - 2):
                    self._sums[index] = _total(y)
            yield chunk, y
        self._note(len(self), state)

    def gates(self, index: int) -> dict[int, Gate]:
        """The gates that stand in a piece, or at its beginning."""
        first, last = (bisect_left(self._places, bound) for bound in self.bounds[index : index + 2])
        return {place: self._gates[place] for place in self._places[first:last]}

    def _initial(self, chunk: Chunk) -> State:
        return self.net.initial_state(chunk.lanes, like=chunk.inputs)

    def _note(self, index: int, state: State) -> None:
        self._edges.put(index, state)
        self._noted.note()

    @property
    def _noted(self) -> Replay:
        if self._replay is None:
            raise RuntimeError("the sweep has not been run forward yet")
        return self._replay

    @property
    def state(self) -> State:
        """The state after the last step, detached."""
        return self._edges.get(len(self))

    def backward(self) -> Iterator[Piece]:
        """The pieces with their graphs, from the last to the first.

        Each graph must be let go before the next one is asked for.
        """
        last, self._last = self._last, None
        recomputed = len(self) if last is None else len(self) - 1
        if last is not None:
            yield last
            del last
        with unnoticed(self.net, self._noted.device):
            for index in reversed(range(recomputed)):
                self._noted.restore(index)
                piece = self._run(index, self._read(self.bounds[index], self.bounds[index + 1]))
                if self._verify == "all" or (self._verify == "first" and index == recomputed - 1):
                    self._compare(piece.index, piece.chunk, piece.outputs, piece.after)
                yield piece
                del piece

    def _run(self, index: int, chunk: Chunk) -> Piece:
        forget_casts(chunk.inputs)
        inputs = chunk.inputs.detach().requires_grad_() if self._to_inputs else chunk.inputs
        with torch.enable_grad():
            if index == 0 and self._start is None:
                before = self._initial(chunk)
            else:
                before = trees.map_leaves(
                    lambda leaf: leaf.requires_grad_(trees.differentiable(leaf)),
                    self._edges.get(index),
                )
            y, after = self._play(index, chunk, inputs, before)
        return Piece(index, chunk, inputs, y, before, after)

    def _play(self, index: int, chunk: Chunk, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Runs a piece from gate to gate.

        Without a graph too, since a net may draw random numbers once for each call.
        """
        begin, gates, entering = self.bounds[index], self.gates(index), state
        outputs: list[Tensor] = []
        for start, stop in pairwise(sorted({begin, *gates, self.bounds[index + 1]})):
            part = chunk[start - begin : stop - begin]
            state = gates[start](state) if start in gates else state
            y, state = self.net(
                inputs[start - begin : stop - begin], state, part.resets if part.any_reset else None
            )
            outputs.append(y)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), trees.arranged(
            state, entering
        )

    def _compare(self, index: int, chunk: Chunk, outputs: Tensor, after: State) -> None:
        """Refuses a forward pass that does not repeat: its gradient would belong to another
        function than its loss.

        Kernels that keep a graph may round otherwise, and a chaotic net makes much of that: what
        differs is run once more without a graph, as it was the first time.
        """
        if self._differs(index, outputs, after) is None:
            return
        now = generators(self._noted.device)
        self._noted.restore(index)
        with torch.no_grad():
            outputs, after = self._play(index, chunk, chunk.inputs, self._edges.get(index))
        set_generators(now, self._noted.device)
        found = self._differs(index, outputs, after)
        if found is not None:
            raise ModelError(_not_repeated(*found, *self.bounds[index : index + 2]))

    def _differs(self, index: int, outputs: Tensor, after: State) -> tuple[str, float] | None:
        """What is not as it was in the forward pass, and by how much."""
        outputs = outputs.detach()
        noted = self._sums.get(
            index, _total(outputs)
        )  # the last piece ran with its graph and was not noted
        apart = (_total(outputs) - noted).abs()
        room = tolerance(outputs) * wide(outputs.abs()).sum().clamp(min=1.0)
        if bool(noted.isfinite()) and not apart <= room:
            return "the sum of the outputs", apart.item()
        expected = dict(trees.leaves(self._edges.get(index + 1)))
        for name, leaf in trees.leaves(after):
            want, far = wide(expected[name].abs()), wide((leaf.detach() - expected[name]).abs())
            sound = leaf.numel() and bool(
                want.isfinite().all()
            )  # what is not finite is found in the gradient
            if sound and not far.max() <= tolerance(leaf) * want.max().clamp(min=1.0):
                return f"leaf '{name}' of the state", far.max().item()
        return None


def _total(y: Tensor) -> Tensor:
    return wide(y.detach()).sum()


def _not_repeated(what: str, apart: float, start: int, stop: int) -> str:
    return (
        f"the forward pass does not repeat: run again, steps {start} to {stop - 1} of the stretch"
        f" differ by {apart:.2g} in {what}. Something it depends on has changed in between: random"
        " numbers from Python or NumPy (draw them from torch), a counter or cache in an attribute"
        " (keep it in the state or in a buffer), data that read differently, or cuDNN's own"
        " dropout between layers (use nn.Dropout). Where the difference is meant, verify='off'."
    )


def check_verify(verify: str) -> None:
    """Refuses what is none of the three words."""
    if verify not in ("first", "all", "off"):
        raise ConfigError(f"verify={verify!r}: expected 'first', 'all' or 'off'")


def tolerance(leaf: Tensor) -> float:
    """The relative difference that rounding alone may make, of two runs of one kernel on differently aligned memory."""
    kinds = [leaf.dtype] if trees.differentiable(leaf) else [torch.float64]
    if torch.is_autocast_enabled(leaf.device.type):
        kinds.append(torch.get_autocast_dtype(leaf.device.type))
    return max(torch.finfo(kind).eps for kind in kinds) ** 0.5


def forget_casts(inputs: Tensor) -> None:
    """Empties autocast's cache of weights: it may hold those of another moment, or some made without a graph."""
    if torch.is_autocast_enabled(inputs.device.type):
        torch.clear_autocast_cache()


@contextmanager
def no_autocast(like: Tensor) -> Generator[None]:
    """A backward pass runs outside autocast, as torch recommends."""
    if torch.is_autocast_enabled(like.device.type):
        with torch.autocast(like.device.type, enabled=False):
            yield
    else:
        yield
