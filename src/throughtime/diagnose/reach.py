"""Reach: how far back in time the gradient of a single loss extends.

    phi(k) = mean over anchors t of  | dL_t / ds_{t-k} |          k = 1, 2, ... steps before the
    loss

One backward pass serves as many anchors as there are lanes: rows of a batch do not depend on each
other, so every lane has its loss at its own step, and the norm of each row of the credit belongs to
its anchor. Gates between the steps read the credit (`_slice.py`).

Shapes: `T` steps of a window, `B` lanes (rows of the batch). A recording is one unbroken sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime._device import real_type
from throughtime.carry.carried import Carried, device_of, pack
from throughtime.chunk import Chunk
from throughtime.diagnose._slice import CreditPass, StreamSlice, run_spans
from throughtime.errors import ConfigError, DataError
from throughtime.gradient import LossFn, Objective
from throughtime.gradient.segment import lane_norms, preserve_rng_and_buffers
from throughtime.gradient.window import Credit, check_whole
from throughtime.state import State
from throughtime.stream import Stream

_BLOCK = 1024  # steps of a forward call between two windows
SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Reach:
    """The result of `tt.reach`.

    Attributes:
        lags: 1, 2, ... steps before the loss.
        norms: phi at every lag, of the whole state.
        by_leaf: phi at every lag, of each leaf of the state by its name, so h and c of an LSTM
            apart.
        anchors: losses measured.
        shares: the lags within which 50, 90 and 99 % of the sum of phi lie.
        loss: mean loss at the anchors, with all of the past.
        contexts: mean loss at the anchors if the net starts so many steps before, from the initial
            state.
    """

    lags: tuple[int, ...]
    norms: tuple[float, ...]
    by_leaf: dict[str, tuple[float, ...]]
    anchors: int
    shares: dict[float, int]
    loss: float
    contexts: dict[int, float]

    @property
    def memory_used(self) -> bool:
        """Whether the past lowers the loss by at least 1 %."""
        single = self.contexts[1]
        return self.loss < single - 0.01 * abs(single)

    def warning(self) -> str:
        """How to interpret the result."""
        if not self.memory_used:
            return (
                "the past does not lower the loss by 1 % or more"
                f" ({self.contexts[min(self.contexts)]:.4g} from a single step, {self.loss:.4g}"
                " with all of it): the net has not learned to use it, and this reach is a lower"
                " bound of the reach that the task needs"
            )
        return (
            "this is the reach at the present weights: while the loss is on a plateau it is a lower"
            " bound of the reach that the task needs. If most of the gradient lies at the longest"
            " lags measured, pass a larger max_lag."
        )

    def __str__(self) -> str:
        """Where the gradient lies, the loss by context, and how to interpret them."""
        rows = [
            f"  {name}: {', '.join(f'{within(self.lags, norms, share):,}' for share in SHARES)}"
            for name, norms in {"whole state": self.norms, **self.by_leaf}.items()
        ]
        contexts = "  ".join(f"{k}: {loss:.4g}" for k, loss in self.contexts.items())
        return "\n".join(
            [
                f"{self.anchors} losses, back through at most {self.lags[-1]:,} steps",
                "steps back within which 50, 90 and 99 % of the gradient lie",
                *rows,
                f"loss by steps of context: {contexts}  all: {self.loss:.4g}",
                self.warning(),
            ]
        )


def reach(
    net: Carried,
    stream: Stream,
    loss_fn: LossFn,
    *,
    max_lag: int = 1000,
    anchors: int = 64,
    steps: int | None = None,
    chunk: int | None = None,
    seed: int = 0,
) -> Reach:
    """Measure how far back the gradient of a single loss extends: its norm at every lag.

    Use it beside `tt.audit`, which measures the bias of cutting that gradient.

    Args:
        net: made by `tt.carry`; it is not changed. Its lanes must not depend on each other,
            as BatchNorm makes them.
        stream: a `tt.Stream`; it is read, not moved. More lanes mean fewer backward passes.
        loss_fn: as for `tt.updates`, but no `tt.SequenceLoss`.
        max_lag: the longest lag measured.
        anchors: the number of losses, spread over the slice; each lane has its own.
        steps: the number of steps of every lane to draw from, from the start of an epoch; default:
            all.
        chunk: steps per segment, see `tt.Exact`.
        seed: draws the anchors.

    Returns:
        A `Reach`: the norm at every lag; `shares` are the lags that hold 50, 90 and 99 % of it.

    Raises:
        DataError: no valid step.

    Cost: a forward pass over the slice; for every set of `B` anchors a forward and a backward pass,
    step by step, over `max_lag` steps and a quarter more (two forward passes if that takes several
    segments), and forward passes over 2 * `max_lag` steps for the contexts, and for each of them
    over the steps between the first and the last anchor.

    Example:
        >>> import torch, throughtime as tt
        >>> data = {"inputs": torch.randn(900, 3), "targets": torch.randn(900)}
        >>> stream = tt.Stream(data, lanes=3, chunk=100)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> result = tt.reach(net, stream, torch.nn.MSELoss(), max_lag=50, anchors=9)
        >>> result.shares[0.5] <= result.shares[0.9] <= result.shares[0.99] <= 50
        True
    """
    check_whole("max_lag", max_lag, 1)
    check_whole("anchors", anchors, 1)
    objective, losses = Objective(loss_fn, split=True), list[Tensor]()
    if objective.sequences:
        raise ConfigError("tt.reach masks steps: give a loss of outputs and targets of valid steps")
    with torch.no_grad(), preserve_rng_and_buffers(net, device_of(net)):
        section = StreamSlice(net, stream, steps, objective)
        longest = max(1, min(max_lag, section.steps - 1))
        lags = torch.arange(1, longest + 1, device="cpu")
        spread = max(1, longest // 4)
        length = min(section.steps, longest + spread)
        spread = min(spread, -(-length // 2))
        contexts = [1 << k for k in range(max(1, min(length - spread, longest)).bit_length())]
        at, state, names = 0, section.state, net.leaf_names(section.state)
        sums = torch.zeros(len(lags), 1 + len(names), dtype=torch.float64, device="cpu")
        counts, rounds = torch.zeros_like(lags), -(-anchors // stream.lanes)
        for number in range(rounds):
            begin = (section.steps - length) * number // max(1, rounds - 1)
            edges = [*range(at, begin, _BLOCK), begin]
            for *_, after in run_spans(net, section.read, edges, state):
                state = after
            at, generator = begin, torch.Generator().manual_seed(seed + number)
            window = section.read(at, at + length)
            drawn = _draw(window, spread, generator)
            if drawn.numel():
                valid = lags.unsqueeze(1) <= drawn[2]
                norms, row = _measure(net, objective, window, state, drawn, lags, contexts, chunk)
                values = norms.masked_fill(~valid.unsqueeze(2), 0)
                sums += torch.cat([values.norm(dim=2, keepdim=True), values], 2).sum(1)
                counts += valid.sum(1)
                losses += [row] * drawn.shape[1]
    if not losses:
        raise DataError(
            "no step with a valid target among those drawn: there is no loss to differentiate"
        )
    if not counts.any():
        raise DataError(
            "none of the losses drawn has a past: each is at the first step of its recording"
        )
    whole, *leaves = map(tuple, (sums / counts.unsqueeze(1))[counts > 0].T.tolist())
    loss, *rest = torch.stack(losses).mean(0).tolist()
    measured = tuple(lags[counts > 0].tolist())
    return Reach(
        measured,
        whole,
        dict(zip(names, leaves, strict=True)),
        len(losses),
        {share: within(measured, whole, share) for share in SHARES},
        loss,
        dict(zip(contexts, rest, strict=True)),
    )


def _draw(window: Chunk, spread: int, generator: torch.Generator) -> Tensor:
    """Draw an anchor of each lane from the valid ones of the last `spread` steps, `(3, N)`.

    Its rows are lanes, steps, and the steps up to these before which the recording has a state.
    """
    valid, resets = window.mask[-spread:].cpu(), window.resets.cpu()
    lanes = valid.any(0).nonzero().squeeze(1)
    chosen = torch.multinomial(valid[:, lanes].T.double(), 1, generator=generator)
    steps = window.steps - spread + chosen.squeeze(1)
    times = torch.arange(window.steps, device="cpu").unsqueeze(1)
    starts = torch.where(resets[:, lanes] & (times <= steps), times, -1).amax(0)
    return torch.stack([lanes, steps, steps - starts])


def _measure(
    net: Carried,
    objective: Objective,
    window: Chunk,
    state: State,
    anchors: Tensor,
    lags: Tensor,
    contexts: Sequence[int],
    size: int | None,
) -> tuple[Tensor, Tensor]:
    """The norms of the credit by lag, anchor and leaf, and the mean losses, on the host.

    The first loss has all of the past, the others start so many steps before the anchors.
    """
    lanes, steps, pasts = anchors
    leaves, mask = trees.tensors(state), torch.zeros_like(window.mask)
    mask[steps, lanes] = True
    kept = [i for i, leaf in enumerate(leaves) if trees.differentiable(leaf)]
    shape = window.steps, window.lanes, len(leaves)
    norms = torch.zeros(shape, dtype=torch.float64, device="cpu")

    def record(step: int, credit: Credit) -> Credit:
        for i, leaf in zip(kept, credit, strict=True):
            if leaf is not None:
                sizes: Any = lane_norms([leaf.abs().to(real_type(leaf))])  # squares underflow
                norms[step, :, i] = sizes
        return credit

    def chunk_of(resets: Tensor) -> Chunk:
        return Chunk.from_tensors(window.inputs, window.targets, resets=resets, mask=mask)

    behind = steps + 1 - lags.unsqueeze(1)
    chunk, cuts = chunk_of(window.resets), behind[lags.unsqueeze(1) <= pasts].tolist()
    with torch.enable_grad():
        run = CreditPass(
            net, objective, lambda a, b: chunk[a:b], chunk.steps, state, [], cuts, chunk=size
        )
        run.gate, loss = record, run.losses.sum() / (sum(run.counts) or 1.0)
        if loss.requires_grad:
            run.gradients(loss * len(lanes))
    vars(run).clear()  # or its graph, which refers to it, would wait for the garbage collector
    losses, first = [loss], int(steps.min()) + 1
    for context in contexts:
        resets = window.resets.clone()
        resets[steps + 1 - context, lanes] = True
        rows = chunk_of(resets)[first - context :]
        start = net.initial_state(rows.lanes, like=rows.inputs)
        y = pack(net(rows.inputs, start, rows.resets)[0])
        losses.append(objective(y, rows)[0])
    return norms[behind.clamp(min=0), lanes], torch.stack(losses).detach().double().cpu()


def within(lags: Sequence[int], norms: Sequence[float], share: float) -> int:
    """The first lag up to which the share of the sum lies."""
    sums, least = accumulate(norms), share * sum(norms)
    reached = (lag for lag, part in zip(lags, sums, strict=True) if part >= least)
    return next(reached, lags[-1])
