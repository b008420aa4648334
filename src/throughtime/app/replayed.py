"""Whether the loop of a run does what it says: some of its updates, played again by hand in plain
PyTorch, and compared.

`tt.doctor` does not look at throughtime's own loops, and could not be sure: to it, steps that come
from files are not known to follow one another. Here they are, so the comparison is with numbers. At
fixed weights, the outputs of an update are those of the layers run from the state by hand, and its
gradient is that of torch.autograd over its window. Clearing gradients and stepping, which the
optimizer does between two updates, is not part of it.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.app.config import Config
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, join
from throughtime.gradient import Exact, LossFn, Truncated, Update
from throughtime.stream import Stream
from throughtime.updates import updates

UPDATES, MOST = (
    (4, 64),
    400,
)  # updates at least and at most; steps of a segment at most, whose graph is held by hand


@dataclass(frozen=True)
class Check:
    """One law of a sound loop.

    Attributes:
        law: what must hold.
        codes: what the doctor calls its breach.
        seen: what was measured.
        holds: whether it does; `None` where the figures cannot tell.
    """

    law: str
    codes: str
    seen: str
    holds: bool | None


@dataclass(frozen=True)
class Replayed:
    """What came out.

    Attributes:
        updates: how many were played again.
        steps: of every lane.
        checks: one for each law.
    """

    updates: int
    steps: int
    checks: tuple[Check, ...]

    @classmethod
    def read(cls, content: Any) -> "Replayed":
        """What `asdict` gave, read back from JSON."""
        return cls(
            content["updates"],
            content["steps"],
            tuple(Check(**check) for check in content["checks"]),
        )


@dataclass(frozen=True, eq=False)
class Played:
    """Updates of the run, where they end, all their steps, and the gradient of the last one, which counts the steps from `counted` on."""

    updates: list[Update]
    ends: list[int]
    whole: Chunk
    start: int  # of the window of the last update
    counted: int
    gradient: list[Tensor]


def replayed(net: Carried, stream: Stream, loss_fn: LossFn, config: Config) -> Replayed | None:
    """The first updates of an epoch of the run, compared with the same by hand.

    Args:
        net: the run's model; its weights are left as they are.
        stream: as for training; it is moved.
        loss_fn: that of training.
        config: of the run: how its credit is cut.

    Returns:
        `None` for windows, which carry nothing, and where no step of these updates counts.
    """
    if config.train_on == "windows":
        return None
    stride = (
        min(config.segment or MOST, MOST, max(1, stream.steps // 2))
        if config.exact
        else config.stride
    )
    played = _played(
        net,
        stream,
        loss_fn,
        stride,
        stride if config.exact else max(stride, config.horizon or stride),
        exact=config.exact,
    )
    if played is None:
        return None
    outputs, gradient = _by_hand(net.module, played, loss_fn)
    laws = (
        _carried(net.module, played, outputs),
        _cut(played, gradient),
        _free(played),
        _in_order(played.whole),
        _once(played),
    )
    return Replayed(len(played.updates), played.whole.steps, laws)


def _played(
    net: Carried, stream: Stream, loss_fn: LossFn, stride: int, horizon: int, *, exact: bool
) -> Played | None:
    """Updates of the run's own policy, enough for a window of its whole horizon."""
    policy = Exact(segment=stride) if exact else Truncated(stride, horizon)
    device, weights = next(net.parameters()).device, list(net.parameters())
    done, ends, chunks, gradient, at = list[Update](), list[int](), list[Chunk](), list[Tensor](), 0
    count = min(UPDATES[1], max(UPDATES[0], -(-horizon // stride) + 1))
    for update in islice(updates(net, stream, loss_fn, gradient=policy), count):
        chunks.append(stream.read(at, stream.position).to(device))
        at = stream.position
        done.append(update)
        ends.append(at)
        gradient = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            for weight in weights
        ]
        net.zero_grad()
    counted = (at - 1) // stride * stride
    start = max(0, at - horizon) if horizon > stride else counted
    return Played(done, ends, join(chunks), start, counted, gradient) if done else None


def _by_hand(module: nn.Module, played: Played, loss_fn: LossFn) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all steps, and the gradient of the last update: plain PyTorch, nothing of throughtime runs."""
    whole, weights = played.whole, list(module.parameters())
    with torch.no_grad():
        before, state = _run(
            module, whole.inputs[: played.start], whole.resets[: played.start], None
        )
    after, _ = _run(module, whole.inputs[played.start :], whole.resets[played.start :], state)
    last = whole[played.counted : whole.steps]
    rows, targets = last.valid_pairs(after[played.counted - played.start :])
    gradient = torch.autograd.grad(loss_fn(rows, targets), weights, materialize_grads=True)
    return torch.cat([before, after.detach()]), list(gradient)


def _run(
    module: nn.Module, x: Tensor, resets: Tensor, state: tuple[Tensor, ...] | None
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """The layers one after another; a lane that begins a recording is given zeros."""
    parts, layer = dict(module.named_children()), module.get_submodule("recurrent")
    features, hs = parts["standardise"](x), list[Tensor]()
    edges = sorted({0, len(x), *resets.any(1).nonzero().flatten().tolist()})
    for start, stop in pairwise(edges):
        if state is not None:
            state = tuple(leaf.masked_fill(resets[start][None, :, None], 0.0) for leaf in state)
        h, after = layer(
            features[start:stop],
            state[0] if state and isinstance(layer, (nn.GRU, nn.RNN)) else state,
        )
        state = (after,) if isinstance(after, Tensor) else tuple(after)
        hs.append(h)
    y = parts["readout"](
        torch.cat(hs) if hs else features.new_zeros(0, x.shape[1], layer.hidden_size)
    )
    return parts["units"](y) if "units" in parts else y, state


def _apart(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The norm of the difference, in norms of what is expected."""
    pairs = [
        (a.double().flatten(), b.double().flatten()) for a, b in zip(found, expected, strict=True)
    ]
    size = torch.cat([b for _, b in pairs]).norm().item()
    return torch.cat([a - b for a, b in pairs]).norm().item() / size if size else float("inf")


def _room(tensor: Tensor) -> float:
    """How far two ways to compute the same may round apart."""
    return torch.finfo(tensor.dtype).eps ** 0.5


def _carried(module: nn.Module, played: Played, outputs: Tensor) -> Check:
    """Outputs of the run against those by hand.

    And how far off they would be had every update started from zero.
    """
    found, expected, cold = list[Tensor](), list[Tensor](), list[Tensor]()
    for update, end in zip(played.updates, played.ends, strict=True):
        steps = slice(end - update.chunk.steps, end)
        found.append(update.outputs)
        expected.append(outputs[steps])
        with torch.no_grad():
            cold.append(
                _run(module, played.whole.inputs[steps], played.whole.resets[steps], None)[0]
            )
    apart, zero = _apart(found, expected), _apart(cold, expected)
    told = zero > 10 * _room(outputs)
    said = (
        f"outputs differ by {apart:.2g} of their size from those of the layers run by hand; from a"
        f" zero state by {zero:.2g}"
    )
    more = "" if told else ", so that the net makes too little of its state to tell"
    law = (
        "The state is carried from update to update, lane by lane, and a recording starts from zero"
    )
    return Check(
        law,
        "TT201, TT204, TT206",
        said + more,
        apart <= _room(outputs) if told or apart > _room(outputs) else None,
    )


def _cut(played: Played, expected: Sequence[Tensor]) -> Check:
    """The gradient of the last update against autograd's own."""
    room = _room(expected[0])
    known = any(bool(gradient.any()) for gradient in expected)
    apart = _apart(played.gradient, expected)
    steps = played.whole.steps - played.start
    said = (
        f"the gradient of update {len(played.updates)} differs by {apart:.2g} of its length from"
        f" autograd's through {steps:,} steps"
    )
    law = (
        "Credit flows back through the whole window, and the loss is the mean over its valid steps"
    )
    return Check(
        law,
        "TT101, TT102, TT203, TT301",
        said if known else "the gradient is zero",
        apart <= room if known else None,
    )


def _free(played: Played) -> Check:
    leaves = [
        leaf
        for update in played.updates
        for leaf in (update.loss, update.outputs, *trees.tensors(update.state))
    ]
    hanging = sum(leaf.requires_grad for leaf in leaves)
    said = (
        f"{hanging} of {len(leaves)} tensors that {len(played.updates)} updates handed on hang on a"
        " graph"
    )
    return Check("No graph outlives its update", "TT104, TT202", said, not hanging)


def _in_order(whole: Chunk) -> Check:
    """Whether each step of a lane is the next of the same recording, but where one begins."""
    playing = (whole.recording[1:] >= 0) & ~whole.resets[1:]
    follows = (whole.recording[1:] == whole.recording[:-1]) & (
        whole.position[1:] == whole.position[:-1] + 1
    )
    breaks, starts = int((playing & ~follows).sum()), int(whole.resets.sum())
    said = (
        f"{breaks} of {int(playing.sum()):,} steps do not follow the one before; {starts}"
        " recordings or parts begin"
    )
    return Check("Steps follow one another", "TT207", said, not breaks)


def _once(played: Played) -> Check:
    counted, valid = sum(update.steps for update in played.updates), played.whole.valid
    said = f"{counted:,} steps counted, {valid:,} have a target that counts"
    return Check("Every step that counts is counted once", "TT301", said, counted == valid)
