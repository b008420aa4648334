"""Memory of a checkpointed pass: its budget, the stored states, and snapshots of random numbers.

Shapes: `T` steps, `B` lanes.
"""

import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import (
    HostCopies,
    fork_rng,
    generators,
    is_accelerator,
    pins_memory,
    send,
    set_generators,
)
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, StateError, listed
from throughtime.gradient import schedule
from throughtime.gradient.objective import Objective
from throughtime.gradient.schedule import GraphSize
from throughtime.state import State

Offload: TypeAlias = str | Path | None  # "cpu", or a folder
TRIAL_STEPS = 48  # the difference to a third of them excludes what every graph has
# What a process grows by for a node of a graph, besides the numbers in its tensors: the node, the
# objects of saved tensors, and autograd's notes on the way back. 1.1 to 1.5 kB in loops over 12
# cells, 2.2 kB in nn.RNN. A count, unlike resident memory, is the same in every run: a resumed run
# has the same segments.
NODE_BYTES = 1500
# What it grows by for a byte in saved tensors: temporaries of the backward pass add a tenth to a
# third, and glibc keeps holes as large as its largest blocks (1.3 to 2.8 in all with fused layers).
RESIDENT = 2
# and for a boundary, besides its state: the norm of its cotangents, the entry of its snapshot
BOUNDARY_BYTES = 1000


@dataclass(frozen=True)
class MemoryBudget:
    """How much memory a checkpointed pass may take, and where it stores states.

    Args:
        memory: for the graph and the stored states.
        chunk: steps per segment, or "auto".
        offload: where the states between segments are stored.
    """

    memory: str | int | float
    chunk: int | Literal["auto"]
    offload: Offload

    def check(self) -> None:
        """Refuse settings out of range."""
        schedule.bytes_in(self.memory)
        if self.offload not in (None, "cpu") and not Path(str(self.offload)).is_dir():
            raise ConfigError(
                f"offload={str(self.offload)!r}: expected None, 'cpu', or a folder that exists, for"
                " a temporary file"
            )
        if self.chunk != "auto":
            schedule.check_whole("chunk", self.chunk, 1)

    def segment_steps(
        self,
        net: Carried,
        steps: int,
        first: Callable[[int], Chunk],
        state: State,
        objective: Objective | None,
        *,
        gates: int = 0,
    ) -> int:
        """Steps per segment: as set, or the fastest that fits.

        Args:
            net: made by `tt.carry`.
            steps: of the whole pass.
            first: returns the first steps, to be measured.
            state: the state entering them; `None` for the initial state.
            objective: its loss belongs to the graph; `None` if there is none.
            gates: how often the pass is divided into calls of the net besides.
        """
        if self.chunk != "auto":
            return min(self.chunk, steps)
        size = measure_graph(net, lambda n: first(min(n, steps)), state, objective)
        size = size._replace(step=size.step + size.fixed * gates / steps)
        target = None if is_accelerator(first(1).inputs) else schedule.FASTEST_GRAPH
        return schedule.best_chunk(
            steps, size, schedule.bytes_in(self.memory), stored=self.offload is None, target=target
        )


_sizes: "WeakKeyDictionary[Carried, dict[tuple[Any, ...], GraphSize]]" = WeakKeyDictionary()


def measure_graph(
    net: Carried, first: Callable[[int], Chunk], state: State, objective: Objective | None
) -> GraphSize:
    """Bytes that a pass needs; measured once for each net, mode and shape of a step.

    Args:
        net: made by `tt.carry`.
        first: returns the first steps of the pass, as many as asked for, or all there are.
        state: the state entering them; `None` for the initial state.
        objective: its loss belongs to the graph; `None` if there is none.

    Saved tensors are counted by storage, the objects of Python and autograd by the nodes of the
    graph. Memory that a custom autograd function or a module keeps elsewhere is not counted.
    """
    # always as many steps: oneDNN caches kernels for every length that a layer is called with
    chunk = _repeat(first(TRIAL_STEPS), TRIAL_STEPS)
    autocast = torch.is_autocast_enabled(chunk.inputs.device.type)
    weights = tuple((weight.dtype, weight.requires_grad) for weight in net.parameters())
    key = (
        chunk.inputs.shape[1:],
        chunk.inputs.dtype,
        net.training,
        autocast,
        weights,
        objective is None,
    )
    sizes = _sizes.setdefault(net, {})
    if key not in sizes:
        sizes[key] = _measure(net, chunk, state, objective)
    return sizes[key]


def _repeat(chunk: Chunk, steps: int) -> Chunk:
    """The first steps of a chunk, as often as needed.

    Without metadata, which differs along the stream: a resumed run must measure the same.
    """
    rows = torch.arange(steps, device=chunk.inputs.device) % chunk.steps
    targets = None if chunk.targets is None else chunk.targets[rows]
    return Chunk.from_tensors(chunk.inputs[rows], targets)


def _measure(net: Carried, long: Chunk, state: State, objective: Objective | None) -> GraphSize:
    if state is None:
        state = trees.detach(net.initial_state(long.lanes, like=long.inputs))
    net.prepare(long.inputs)  # graphs of its trials do not count
    short = long[0 : -(-long.steps // 3)]
    with preserve_rng_and_buffers(net, short.inputs.device):
        snapshots = RngSnapshots(net, short.inputs.device)
        snapshots.take()
        less, few = _graph_bytes(net, short, state, objective)
        snapshots.take()
        edge = sum(leaf.nbytes for leaf in trees.tensors(state)) + snapshots.growth()
        more, many = _graph_bytes(net, long, state, objective)
    step = (more - less) / (long.steps - short.steps)
    return GraphSize(
        step, max(0, less - step * short.steps), edge, (many - few) / (long.steps - short.steps)
    )


def _graph_bytes(
    net: Carried, chunk: Chunk, state: State, objective: Objective | None
) -> tuple[int, int]:
    """Bytes of one forward graph, besides weights and state, and the number of its nodes."""
    entering = trees.map_leaves(
        lambda leaf: leaf.detach().requires_grad_(trees.differentiable(leaf)), state
    )
    read = [leaf for leaf in (chunk.inputs, chunk.targets) if leaf is not None]
    excluded = [*net.parameters(), *net.buffers(), *read, *trees.tensors(state)]
    ignored = {leaf.untyped_storage().data_ptr() for leaf in excluded}
    saved_bytes: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in ignored:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return saved.detach()  # a graph that held its own output would never be freed

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y, after = net(chunk.inputs, entering)
        loss = objective.loss(y, chunk) if objective is not None and chunk.valid_steps else None
    nodes = _count_nodes([y, *trees.tensors(after), *([] if loss is None else [loss])])
    # outputs themselves, their gradient, and those that an update returns
    moved = 3 * y.nbytes + (0 if objective is None else sum(leaf.nbytes for leaf in read))
    del y, after, loss
    numbers = sum(saved_bytes.values()) + moved
    return numbers * RESIDENT + nodes * NODE_BYTES, nodes


def _count_nodes(roots: Sequence[Tensor]) -> int:
    """The nodes of the graph of some tensors."""
    nodes = {root.grad_fn for root in roots}
    ahead = [node for node in nodes if node is not None]
    while ahead:
        following = {node for node, _ in ahead.pop().next_functions} - nodes
        nodes |= following
        ahead += [node for node in following if node is not None]
    return len(nodes - {None})


class BoundaryStates:
    """The states between the segments of a pass, by number.

    One tensor for each leaf, `(boundaries, B, ...)`, on its device, in CPU memory or in a file:
    written once in order, read once backwards.
    """

    def __init__(self, count: int, offload: Offload) -> None:
        self._count, self._offload = count, offload
        self._rows: list[Tensor] = []
        self._like: State = None
        self._late: tuple[int, HostCopies] | None = None  # on its way to the file

    def put(self, index: int, state: State) -> None:
        """Copy a state in."""
        if not self._rows:
            self._like = state
            self._rows = [self._allocate(leaf) for leaf in trees.tensors(state)]
        leaves = list(trees.leaves(state))
        if len(leaves) != len(self._rows):
            now = listed((name for name, _ in leaves), quoted=True)
            before = listed((name for name, _ in trees.leaves(self._like)), quoted=True)
            raise StateError(
                f"the state has the leaves {now} now and had {before} at the start: it must keep"
                " its structure from step to step"
            )
        for rows, (name, leaf) in zip(self._rows, leaves, strict=True):
            if rows.shape[1:] != leaf.shape or rows.dtype != leaf.dtype:
                raise StateError(
                    f"state leaf '{name}' is {tuple(leaf.shape)} {leaf.dtype} now and was"
                    f" {tuple(rows.shape[1:])} {rows.dtype} at the start: an exact gradient stores"
                    " states side by side, so they must not grow or change type; give the leaf its"
                    " full size from the first step on"
                )
        tensors = [leaf.detach() for _, leaf in leaves]
        if self._offload in (None, "cpu") or not pins_memory(tensors[0]):
            for rows, leaf in zip(self._rows, tensors, strict=True):
                # pinned rows are written once, and read by the device alone: nobody waits
                rows[index].copy_(leaf, non_blocking=pins_memory(leaf))
        else:
            self._finish()
            self._late = index, HostCopies(*tensors)

    def get(self, index: int) -> State:
        """A copy of a state, on the device it came from."""
        self._finish()
        rows = iter(self._rows)

        def copied(leaf: Tensor) -> Tensor:
            row = next(rows)[index]
            return row.clone() if row.device == leaf.device else send(row, leaf.device)

        return trees.map_leaves(copied, self._like)

    def _finish(self) -> None:
        """Write the state that was last copied from the device, which has computed since."""
        if self._late is not None:
            index, copies = self._late
            for rows, leaf in zip(self._rows, copies.read(), strict=True):
                rows[index].copy_(leaf)
            self._late = None

    def _allocate(self, leaf: Tensor) -> Tensor:
        shape = (self._count, *leaf.shape)
        if self._offload is None:
            return leaf.new_empty(shape)
        if self._offload == "cpu":
            return torch.empty(shape, dtype=leaf.dtype, device="cpu", pin_memory=pins_memory(leaf))
        return _map_file(Path(self._offload), shape, leaf.dtype)


def _map_file(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in an unlinked file, which the system frees together with the tensor."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="throughtime-", suffix=".edges") as file:
        size = torch.Size(shape).numel()
        if hasattr(os, "posix_fallocate"):  # a full disk raises here, not when a page is written
            os.posix_fallocate(file.fileno(), 0, max(1, size * dtype.itemsize))
        return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)


class _Snapshot(NamedTuple):
    """Random states and buffers at one boundary."""

    random: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(eq=False)
class RngSnapshots:
    """Random states and buffers at every boundary of a forward pass, so that it can be replayed.

    Covers torch's generators (dropout) and buffers (BatchNorm's running statistics, the vectors of
    spectral norm). Equal snapshots share memory: a net that draws nothing pays one comparison.
    Random numbers from elsewhere and values in attributes are not covered; comparing the replayed
    states detects them.
    """

    net: nn.Module
    device: torch.device
    snapshots: list[_Snapshot] = field(default_factory=list[_Snapshot])
    # each buffer when it was last copied or written, torch's count of its changes, and its values
    _known: dict[str, tuple[Tensor, int, Tensor]] = field(
        default_factory=dict[str, tuple[Tensor, int, Tensor]]
    )

    def take(self) -> None:
        """Append a snapshot."""
        last = self.snapshots[-1] if self.snapshots else _Snapshot({}, {})
        random = generators(self.device)
        if last.random and all(torch.equal(last.random[k], state) for k, state in random.items()):
            random = last.random
        self.snapshots.append(_Snapshot(random, dict(self._buffers())))

    def growth(self) -> int:
        """Bytes that the last snapshot added, and every later one will."""
        before, last = (
            {id(leaf): leaf.nbytes for part in snapshot for leaf in part.values()}
            for snapshot in self.snapshots[-2:]
        )
        return BOUNDARY_BYTES + sum(size for key, size in last.items() if key not in before)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of the buffers; of one that has not changed the last copy."""
        for name, buffer in self.net.named_buffers():
            values = self._unchanged(name, buffer)
            if values is None:
                values = buffer.detach().clone()
                self._known[name] = buffer, buffer._version, values
            yield name, values

    def _unchanged(self, name: str, buffer: Tensor) -> Tensor | None:
        known, version, values = self._known.get(name, (None, 0, None))
        return values if known is buffer and version == buffer._version else None

    def restore(self, index: int) -> None:
        """Return to snapshot `index`; buffers that are known to be as they were are not written."""
        snapshot = self.snapshots[index]
        set_generators(snapshot.random, self.device)
        changed: dict[str, Tensor] = {}
        for name, buffer in self.net.named_buffers():
            values = snapshot.buffers.get(name)
            if values is not None and values is not self._unchanged(name, buffer):
                changed[name] = values
                self._known[name] = buffer, buffer._version, values
        _set_buffers(self.net, changed)


def _set_buffers(net: nn.Module, values: dict[str, Tensor]) -> None:
    """Restore buffers in place.

    Without a comparison, for which the host would wait, and without counting a change, which would
    make graphs that have saved a buffer useless.
    """
    for name, buffer in net.named_buffers():
        if name in values:
            buffer.data.copy_(values[name])


@contextmanager
def preserve_rng_and_buffers(net: nn.Module, device: torch.device) -> Generator[None]:
    """Restore random generators and buffers at the end of the block.

    All of them: the kernels of BatchNorm write running statistics, and torch counts no change.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in net.named_buffers()}
    try:
        with fork_rng(device):
            yield
    finally:
        _set_buffers(net, buffers)
