"""Ours and the loops by hand."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from throughtime.bench.side import Loop, Side
from throughtime.bench.work import NORM, RATE, Net, Work, cuts_of, detached
from throughtime.carry.carried import Carried, carry
from throughtime.diagnose import trace
from throughtime.gradient import Truncated
from throughtime.optim import Adam
from throughtime.stream import Stream
from throughtime.updates import updates

Make = Callable[[Work], Side]
OURS, HAND = "throughtime", "by hand"
WITH_RESETS, TRACED, UNFUSED = "with resets", "traced", "with resets, torch.nn"
STEPPED, STRIDED, WINDOWED = (
    "graphs kept, step by step",
    "graphs kept, stride by stride",
    "window run again",
)


def ours(
    work: Work, cuts: list[list[int]] | None = None, fused: bool = True, traced: bool = False
) -> Side:
    """`tt.updates` over a `tt.Stream`, with the layers of `tt.nn` and the optimizer that clips."""
    net = carry(nn.Sequential(*work.modules()), fused=fused)
    stream = Stream(work.recordings(cuts), work.case.lanes, work.case.steps, seed=None)
    loop = _training(net, stream, work.case.steps)
    return Loop(net, loop, partial(trace, net)) if traced else Loop(net, loop)


def _training(net: Carried, stream: Stream, steps: int) -> Iterator[Tensor]:
    optimizer, loss_fn = Adam(net.parameters(), lr=RATE, max_norm=NORM), nn.CrossEntropyLoss()
    while True:
        for update in updates(net, stream, loss_fn, gradient=Truncated(steps)):
            optimizer.step()
            optimizer.zero_grad()
            yield update.loss


def with_resets(work: Work, fused: bool = True) -> Side:
    """The same, where one step in a hundred begins a recording."""
    return ours(work, cuts_of(work), fused)


def by_hand(work: Work) -> Side:
    """A loop as a careful user writes it."""
    net = Net(work.modules())
    return Loop(net, _by_hand(net, work))


def _by_hand(net: Net, work: Work) -> Iterator[Tensor]:
    optimizer, loss_fn = torch.optim.Adam(net.parameters(), lr=RATE), nn.CrossEntropyLoss()
    x, target, steps = work.inputs, work.targets, work.case.steps
    while True:
        state = None
        for start in range(0, len(x), steps):
            y, state = net(x[start : start + steps], state)
            loss = loss_fn(y.flatten(0, 1), target[start : start + steps].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
            state = detached(state)
            yield loss.detach()


def overlapping(work: Work) -> Side:
    """Gradients of a horizon longer than the stride, by `tt.updates`; the weights stay."""
    net = carry(nn.Sequential(*work.modules()), fused=True)
    stream = Stream(work.recordings(), work.case.lanes, work.case.steps, seed=None)
    return Loop(net, _overlapping(net, stream, work))


def _overlapping(net: Carried, stream: Stream, work: Work) -> Iterator[Tensor]:
    gradient, loss_fn = Truncated(work.case.every, work.case.steps), nn.CrossEntropyLoss()
    while True:
        for update in updates(net, stream, loss_fn, gradient=gradient):
            yield update.loss
            net.zero_grad()


def windows(work: Work) -> Side:
    """By hand: the whole horizon run again from the state at its start, the loss that of the newest stride."""
    net = Net(work.modules())
    return Loop(net, _windows(net, work))


def _windows(net: Net, work: Work) -> Iterator[Tensor]:
    x, target, loss_fn, stride, horizon = (
        work.inputs,
        work.targets,
        nn.CrossEntropyLoss(),
        work.case.every,
        work.case.steps,
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


class _Piece(NamedTuple):
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    loss: Tensor


def kept(work: Work, grain: int) -> Side:
    """The usual loop: graphs of `grain` steps are kept, and gone back through at every update,
    piece by piece.

    It raises once an optimizer changes the weights in place that the kept graphs have saved, so the
    weights stay, for every side.
    """
    net = Net(work.modules())
    return Loop(net, _kept(net, work, grain))


def _kept(net: Net, work: Work, grain: int) -> Iterator[Tensor]:
    x, target, stride, horizon = work.inputs, work.targets, work.case.every, work.case.steps
    while True:
        zeros = torch.zeros(
            work.case.layers, work.case.lanes, work.case.hidden, dtype=work.case.dtype
        )
        state = (zeros, zeros) if work.case.cell == "LSTM" else (zeros,)
        pieces: deque[_Piece] = deque(maxlen=horizon // grain)
        for start in range(0, len(x), grain):
            pieces.append(
                _piece(
                    net,
                    state,
                    x[start : start + grain],
                    target[start : start + grain],
                    grain / stride,
                )
            )
            state = pieces[-1].after
            if (start + grain) % stride == 0:
                _back(pieces, stride // grain)
                yield torch.stack(
                    [piece.loss.detach() for piece in list(pieces)[-(stride // grain) :]]
                ).sum()
                net.zero_grad()


def _piece(net: Net, state: tuple[Tensor, ...], x: Tensor, target: Tensor, share: float) -> _Piece:
    before = tuple(leaf.detach().requires_grad_() for leaf in state)
    y, after = net(x, before if len(before) == 2 else before[0])
    loss = nn.functional.cross_entropy(y.flatten(0, 1), target.flatten()) * share
    return _Piece(before, after if isinstance(after, tuple) else (after,), loss)


def _back(pieces: deque[_Piece], counted: int) -> None:
    """From the newest piece to the oldest.

    The losses of the newest `counted` are put in on the way.
    """
    adjoint: list[Tensor | None] = []
    for at, piece in enumerate(reversed(pieces)):
        for leaf in piece.before:
            leaf.grad = None
        roots, grads = list(piece.after) if adjoint else [], [*adjoint]
        if at < counted:
            roots, grads = [*roots, piece.loss], [*grads, None]
        torch.autograd.backward(roots, grads, retain_graph=True)
        adjoint = [leaf.grad for leaf in piece.before]


def sides_of(work: Work) -> dict[str, Make]:
    """What is measured of a case besides the libraries of others.

    The first is compared with the second, the others are told.
    """
    if work.case.kind == "train":
        return {OURS: ours, HAND: by_hand}
    if work.case.kind == "horizon":
        stride = work.case.every
        return {
            OURS: overlapping,
            STEPPED: partial(kept, grain=1),
            STRIDED: partial(kept, grain=stride),
            WINDOWED: windows,
        }
    if work.case.kind == "resets":
        return {WITH_RESETS: with_resets, OURS: ours, UNFUSED: partial(with_resets, fused=False)}
    return {TRACED: partial(ours, traced=True), OURS: ours}
