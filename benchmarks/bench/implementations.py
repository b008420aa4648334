"""Ours and the loops by hand."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from benchmarks.bench.implementation import Implementation, Loop
from benchmarks.bench.workload import NORM, RATE, Net, Workload, cuts_of, detach_state
from torch import Tensor, nn

from throughtime.carry.carried import Carried, carry
from throughtime.diagnose import trace
from throughtime.gradient import Exact, Truncated
from throughtime.optim import Adam
from throughtime.stream import Stream
from throughtime.updates import updates

Make = Callable[[Workload], Implementation]
OURS, HAND = "throughtime", "by hand"
AS_CLASS, WITH_RESETS, WITH_TRACE, TORCH_WITH_RESETS = (
    "as a class",
    "with resets",
    "traced",
    "with resets, torch.nn",
)
STEP_GRAPHS, STRIDE_GRAPHS, RECOMPUTED = (
    "graphs kept, step by step",
    "graphs kept, stride by stride",
    "window run again",
)
EXACT, TRUNCATED, STRIDE = "tt.Exact", "tt.Truncated(100)", 100


def ours(
    workload: Workload,
    cuts: list[list[int]] | None = None,
    fused: bool = True,
    traced: bool = False,
    as_class: bool = False,
) -> Implementation:
    """`tt.updates` over a `tt.Stream`, with the layers of `tt.nn` and the optimizer that clips."""
    modules = workload.modules()
    net = carry(Net(modules) if as_class else nn.Sequential(*modules), fused=fused)
    stream = Stream(workload.recordings(cuts), workload.case.lanes, workload.case.steps, seed=None)
    loop = _training(net, stream, workload.case.steps)
    return Loop(net, loop, partial(trace, net)) if traced else Loop(net, loop)


def _training(net: Carried, stream: Stream, steps: int) -> Iterator[Tensor]:
    optimizer, loss_fn = Adam(net.parameters(), lr=RATE, max_norm=NORM), nn.CrossEntropyLoss()
    while True:
        for update in updates(net, stream, loss_fn, gradient=Truncated(steps)):
            optimizer.step()
            optimizer.zero_grad()
            yield update.loss


def with_resets(workload: Workload, fused: bool = True) -> Implementation:
    """The same, where one step in a hundred begins a recording."""
    return ours(workload, cuts_of(workload), fused)


def by_hand(workload: Workload) -> Implementation:
    """A loop as a careful user writes it."""
    net = Net(workload.modules())
    return Loop(net, _by_hand(net, workload))


def _by_hand(net: Net, workload: Workload) -> Iterator[Tensor]:
    optimizer, loss_fn = torch.optim.Adam(net.parameters(), lr=RATE), nn.CrossEntropyLoss()
    x, target, steps = workload.inputs, workload.targets, workload.case.steps
    while True:
        state = None
        for start in range(0, len(x), steps):
            y, state = net(x[start : start + steps], state)
            loss = loss_fn(y.flatten(0, 1), target[start : start + steps].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
            state = detach_state(state)
            yield loss.detach()


def overlapping(workload: Workload) -> Implementation:
    """Gradients of a horizon longer than the stride, by `tt.updates`; the weights stay."""
    return _unchanged(workload, Truncated(workload.case.every, workload.case.steps))


def whole_recording(workload: Workload) -> Implementation:
    """The exact gradient of the recording."""
    chunk = workload.case.chunk
    return _unchanged(workload, Exact() if chunk is None else Exact(chunk=chunk))


def strides_of(workload: Workload, stride: int = STRIDE) -> Implementation:
    """The truncated gradients of all strides of the recording; that of the last is kept."""
    return _unchanged(workload, Truncated(stride), len(workload.inputs) // stride)


def _unchanged(workload: Workload, gradient: Any, count: int = 1) -> Implementation:
    """Gradients at fixed weights; so many updates count as one."""
    case = workload.case
    net = carry(nn.Sequential(*workload.modules()), fused=case.fused)
    stream = Stream(workload.recordings(), case.lanes, min(case.steps, STRIDE), seed=None)
    return Loop(net, _last_of(count, _gradients(net, stream, gradient)))


def _gradients(net: Carried, stream: Stream, gradient: Any) -> Iterator[Tensor]:
    while True:
        for update in updates(net, stream, nn.CrossEntropyLoss(), gradient=gradient):
            yield update.loss
            net.zero_grad()


def _last_of(count: int, losses: Iterator[Tensor]) -> Iterator[Tensor]:
    while True:
        *_, last = islice(losses, count)
        yield last


def one_graph(workload: Workload) -> Implementation:
    """By hand: the gradient of the recording from one graph."""
    net = Net(workload.modules())
    return Loop(net, _one_graph(net, workload))


def _one_graph(net: Net, workload: Workload) -> Iterator[Tensor]:
    while True:
        y, _ = net(workload.inputs)
        loss = nn.functional.cross_entropy(y.flatten(0, 1), workload.targets.flatten())
        loss.backward()
        yield loss.detach()
        net.zero_grad()


def windows(workload: Workload) -> Implementation:
    """By hand: the whole window run again, with the loss of the newest stride."""
    net = Net(workload.modules())
    return Loop(net, _windows(net, workload))


def _windows(net: Net, workload: Workload) -> Iterator[Tensor]:
    x, target, loss_fn, stride, horizon = (
        workload.inputs,
        workload.targets,
        nn.CrossEntropyLoss(),
        workload.case.every,
        workload.case.steps,
    )
    while True:
        edges: deque[Any] = deque([None], maxlen=horizon // stride)
        for start in range(0, len(x), stride):
            begin = max(0, start + stride - horizon)
            with torch.no_grad():
                _, after = net(x[start : start + stride], edges[-1])
            y, _ = net(x[begin : start + stride], edges[0])
            loss = loss_fn(
                y[start - begin :].flatten(0, 1), target[start : start + stride].flatten()
            )
            loss.backward()
            edges.append(after)
            yield loss.detach()
            net.zero_grad()


class _Segment(NamedTuple):
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    loss: Tensor


def retained(workload: Workload, grain: int) -> Implementation:
    """The usual loop: keep graphs of `grain` steps and go back through them at every update.

    It raises once an optimizer changes weights that the kept graphs have saved. So no
    implementation changes the weights in this case.
    """
    net = Net(workload.modules())
    return Loop(net, _retained(net, workload, grain))


def _retained(net: Net, workload: Workload, grain: int) -> Iterator[Tensor]:
    x, target, stride, horizon = (
        workload.inputs,
        workload.targets,
        workload.case.every,
        workload.case.steps,
    )
    while True:
        zeros = torch.zeros(
            workload.case.layers,
            workload.case.lanes,
            workload.case.hidden,
            dtype=workload.case.dtype,
        )
        state = (zeros, zeros) if workload.case.cell == "LSTM" else (zeros,)
        segments: deque[_Segment] = deque(maxlen=horizon // grain)
        for start in range(0, len(x), grain):
            segments.append(
                _segment(
                    net,
                    state,
                    x[start : start + grain],
                    target[start : start + grain],
                    grain / stride,
                )
            )
            state = segments[-1].after
            if (start + grain) % stride == 0:
                _back(segments, stride // grain)
                yield torch.stack(
                    [segment.loss.detach() for segment in list(segments)[-(stride // grain) :]]
                ).sum()
                net.zero_grad()


def _segment(
    net: Net, state: tuple[Tensor, ...], x: Tensor, target: Tensor, share: float
) -> _Segment:
    before = tuple(leaf.detach().requires_grad_() for leaf in state)
    y, after = net(x, before if len(before) == 2 else before[0])
    loss = nn.functional.cross_entropy(y.flatten(0, 1), target.flatten()) * share
    return _Segment(before, after if isinstance(after, tuple) else (after,), loss)


def _back(segments: deque[_Segment], counted: int) -> None:
    """From the newest segment to the oldest.

    The losses of the newest `counted` are put in on the way.
    """
    adjoint: list[Tensor | None] = []
    for at, segment in enumerate(reversed(segments)):
        for leaf in segment.before:
            leaf.grad = None
        roots, grads = list(segment.after) if adjoint else [], [*adjoint]
        if at < counted:
            roots, grads = [*roots, segment.loss], [*grads, None]
        torch.autograd.backward(roots, grads, retain_graph=True)
        adjoint = [leaf.grad for leaf in segment.before]


def implementations_of(workload: Workload) -> dict[str, Make]:
    """What is measured of a case besides the libraries of others.

    The first is compared with the second, the others are summary.
    """
    if workload.case.kind == "train":
        return {OURS: ours, HAND: by_hand}
    if workload.case.kind == "horizon":
        stride = workload.case.every
        return {
            OURS: overlapping,
            STEP_GRAPHS: partial(retained, grain=1),
            STRIDE_GRAPHS: partial(retained, grain=stride),
            RECOMPUTED: windows,
        }
    if workload.case.kind == "resets":
        return {
            WITH_RESETS: with_resets,
            OURS: ours,
            TORCH_WITH_RESETS: partial(with_resets, fused=False),
        }
    if workload.case.kind == "exact":
        return {EXACT: whole_recording, TRUNCATED: strides_of}
    if workload.case.kind == "class":
        return {AS_CLASS: partial(ours, as_class=True), OURS: ours}
    return {WITH_TRACE: partial(ours, traced=True), OURS: ours}


def equals_of(workload: Workload, makes: Mapping[str, Make]) -> Mapping[str, Make]:
    """What must compute the same as the first, before all are measured.

    The strides of a recording have other gradients than the recording. In their place stands one
    stride as long as the recording, and one graph by hand.
    """
    if workload.case.kind != "exact":
        return makes
    whole = partial(strides_of, stride=len(workload.inputs))
    return {EXACT: whole_recording, TRUNCATED: whole, HAND: one_graph}
