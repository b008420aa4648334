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

import torch
from torch import Tensor

from throughtime.carry.carried import Carried, device_of, pack
from throughtime.chunk import Chunk
from throughtime.diagnose._slice import CreditPass, StreamSlice, run_spans
from throughtime.diagnose.trace import vector_norms
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.gradient import LossFn, Objective
from throughtime.gradient._mean import is_additive
from throughtime.gradient.objective import pooled
from throughtime.gradient.segment import preserve_rng_and_buffers
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
        loss_fn: as for `tt.updates`; a `tt.SequenceLoss` must be additive, in steps and lanes: it
            gets each of these losses by itself, `(1, 1, ...)`.
        max_lag: the longest lag measured.
        anchors: the number of losses, spread over the slice; each lane has its own.
        steps: the number of steps of every lane to draw from, from the start of an epoch; default:
            all.
        chunk: steps per segment, see `tt.Exact`.
        seed: draws the anchors.

    Returns:
        A `Reach`: the norm at every lag; `shares` are the lags that hold 50, 90 and 99 % of it.

    Raises:
        ConfigError: a number below 1, or a loss that is not additive.
        DataError: no valid step.
        ModelError: the loss is that of its parts neither by steps nor by lanes.

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
    if objective.joins:
        raise ConfigError(
            "tt.reach takes the losses of single steps: write tt.SequenceLoss(fn, additive=True),"
            " where fn returns a sum over the steps it gets, and its weight"
        )
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
    leaves = len(net.leaf_names(state))
    norms = torch.zeros(window.steps, window.lanes, leaves, dtype=torch.float64, device="cpu")

    def record(step: int, credit: Credit) -> Credit:
        for i, leaf in enumerate(credit):
            if leaf is not None:
                norms[step, :, i] = vector_norms(leaf, 1)
        return credit

    def loss_at_anchors(outputs: Tensor, rows: Chunk) -> tuple[Tensor, float]:
        """The mean loss of the anchors among some rows of the window, and its weight.

        Each is that of its step and lane alone: a function may ignore the mask.
        """
        shift = window.start - rows.start
        own = [(step + shift, lane) for lane, step, _ in anchors.T.tolist()]
        parts = [
            objective(outputs[at : at + 1, i : i + 1], rows[at : at + 1].lane(i))
            for at, i in own
            if 0 <= at < rows.steps
        ]
        return pooled(parts, outputs)

    first, losses = int(steps.min()) + 1, list[Tensor]()
    for context in reversed(contexts):
        resets, rows = window.resets.clone(), window[first - context :]
        resets[steps + 1 - context, lanes] = True
        start = net.initial_state(rows.lanes, like=rows.inputs)
        y = pack(net(rows.inputs, start, resets[first - context :])[0])
        if context == contexts[-1]:
            objective(y, rows)  # which refuses a loss that is not that of its steps
            if objective.sequences and is_additive(objective.call, y, rows, lanes=True) is False:
                raise ModelError(
                    "tt.reach takes the loss of each lane alone, and that of all lanes together is"
                    " another: return a sum over steps and lanes, and their number"
                )
        losses.append(loss_at_anchors(y, rows)[0])
    behind = steps + 1 - lags.unsqueeze(1)
    cuts = behind[lags.unsqueeze(1) <= pasts].tolist()
    with torch.enable_grad():
        run = CreditPass(
            net,
            loss_at_anchors,
            lambda a, b: window[a:b],
            window.steps,
            state,
            [],
            cuts,
            chunk=size,
        )
        run.gate, loss = record, run.losses.sum() / (sum(run.counts.values()) or 1.0)
        if loss.requires_grad:
            run.gradients(loss * len(lanes))
    vars(run).clear()  # or its graph, which refers to it, would wait for the garbage collector
    losses = torch.stack([*losses, loss]).flip(0)
    return norms[behind.clamp(min=0), lanes], losses.detach().double().cpu()


def within(lags: Sequence[int], norms: Sequence[float], share: float) -> int:
    """The first lag up to which the share of the sum lies."""
    sums, least = accumulate(norms), share * sum(norms)
    reached = (lag for lag, part in zip(lags, sums, strict=True) if part >= least)
    return next(reached, lags[-1])
