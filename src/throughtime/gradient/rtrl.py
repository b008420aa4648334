"""Real-time recurrent learning, chunk by chunk: untruncated credit on a stream without end.

    S_k = ds_k/dw                              influence of the weights on the state after chunk k,
                                               (n, P) for each lane
    g_k = dl_k/dw + (dl_k/ds_{k-1}) S_{k-1}    gradient of the losses of chunk k, through all past
    S_k = (ds_k/ds_{k-1}) S_{k-1} + ds_k/dw    within the chunk, both by n backward passes

At fixed weights the g_k sum to the exact gradient. Between updates S still belongs to the earlier
weights: an error of the order of the learning rate, as in all real-time recurrent learning. Memory
n * B * P numbers, n * B backward passes per chunk: for states of some dozen numbers. Not to be
confused with `Truncated`, which cuts credit, nor with approximations of S (SnAp, UORO, e-prop).

References: R. J. Williams and D. Zipser, A learning algorithm for continually running fully
recurrent neural networks, Neural Computation 1 (1989); J. Schmidhuber, A fixed size storage O(n^3)
time complexity learning algorithm for fully recurrent continually running networks, Neural
Computation 4 (1992), for the chunks.

Shapes: `B` lanes, `n` numbers in one lane's state, `P` weights.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Source
from throughtime.errors import ConfigError, StateError, counted
from throughtime.gradient import schedule
from throughtime.gradient._backward import (
    CreditFlow,
    GradientAccumulator,
    deliver,
    suspended_hooks,
)
from throughtime.gradient._segments import Segment, run_segment
from throughtime.gradient.objective import Objective, trainable_weights
from throughtime.gradient.policy import Update, empty_update
from throughtime.state import State


@dataclass(frozen=True, eq=False)
class RTRLState:
    """Between two updates of `RTRL`.

    Attributes:
        carried: the state after the last step.
        influence: `(B, n, P)`, its derivative by the weights; `None` for zeros.
    """

    carried: State = None
    influence: Tensor | None = None


@dataclass(frozen=True)
class RTRL:
    """An update every `stride` steps with untruncated credit, on a stream without end.

    For small states: system identification, control, a GRU of some dozen units. Lanes must not
    depend on each other (as BatchNorm makes them).

    Args:
        stride: steps between two updates.
        max_state: largest number of state numbers, over all lanes, that is not refused.

    Raises:
        ConfigError: the state is larger; the message says what memory it would take.
        RunError: a gradient is not finite; `.grad` and weights are unchanged.

    Cost: a forward pass and n * B + 1 backward passes per step; memory for n * B * P numbers.

    Example:
        >>> import torch, throughtime as tt
        >>> recording = {"inputs": torch.randn(60, 3), "targets": torch.randn(60)}
        >>> stream = tt.Stream(recording, lanes=1, chunk=10)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> run = tt.updates(net, stream, torch.nn.MSELoss(), gradient=tt.RTRL(stride=20))
        >>> [update.steps for update in run]
        [20, 20, 20]

    References: Williams & Zipser (1989); Schmidhuber (1992).
    """

    stride: int
    max_state: int = 128

    def __post_init__(self) -> None:
        schedule.check_whole("stride", self.stride, 1)
        schedule.check_whole("max_state", self.max_state, 1)

    def describe(self) -> str:
        """The setting in words."""
        every = counted(self.stride, "step")
        return f"an update every {every}, credit back through all of the past"

    def init(self, carried: State, previous: RTRLState | None) -> RTRLState:
        """The state before the first update of an epoch."""
        del previous
        return RTRLState(carried)

    def state_dict(self, state: RTRLState) -> dict[str, Any]:
        """Carried state and influence."""
        return {"carried": state.carried, "influence": state.influence}

    def load_state_dict(self, values: Mapping[str, Any], source: Source) -> RTRLState:
        """The state that `state_dict` saved."""
        del source
        return RTRLState(values["carried"], values["influence"])

    def update(
        self, net: Carried, source: Source, objective: Objective, state: RTRLState
    ) -> tuple[Update | None, RTRLState]:
        """The update of the next stride with a valid step; others carry state and influence on."""
        while (chunk := source.take(self.stride)) is not None:
            weights = trainable_weights(net, objective.loss_fn)
            segment = run_segment(net, chunk, state.carried)
            influence = self._influence(segment, state, list(weights.values()))
            loss = None
            if objective.counts(chunk):
                begin = source.position - chunk.steps
                loss = self._backward(segment, objective, influence, weights, begin)
            after, outputs = trees.detach(segment.after), segment.outputs.detach()
            state = RTRLState(after, _next_influence(segment, influence, list(weights.values())))
            if loss is None:
                update = empty_update(objective, chunk, after, outputs)
            else:
                weight = objective.rank_weight(chunk)
                update = Update(loss, chunk.valid_steps, after, outputs, chunk, weight=weight)
            if update is not None:
                return update, state
        return None, state

    def _influence(self, segment: Segment, state: RTRLState, weights: Sequence[Tensor]) -> Tensor:
        """`(B, n, P)`, zeros at the start of an epoch."""
        leaves = [leaf.detach() for leaf in _floating(segment.before)]
        if any(leaf.is_complex() for leaf in leaves):
            raise StateError(
                "tt.RTRL carries the influence on real states only; keep real and imaginary part"
                " as two leaves, or take tt.Exact"
            )
        lanes, size = len(leaves[0]), sum(leaf[0].numel() for leaf in leaves)
        count = sum(weight.numel() for weight in weights)
        if lanes * size > self.max_state:
            needed = schedule.in_bytes(lanes * size * count * leaves[0].element_size())
            raise ConfigError(
                f"the state has {size} numbers in each of {lanes} lanes, above"
                f" max_state={self.max_state}: its dependence on {count:,} weights takes {needed},"
                f" some five times that while it moves on, and {lanes * size} backward passes for"
                f" every {self.stride} steps. Take fewer lanes or a smaller net, tt.Exact or"
                f" tt.Randomized, or, if that is what you want, max_state={lanes * size}."
            )
        if state.influence is not None:
            return state.influence
        return leaves[0].new_zeros(lanes, size, count)

    @staticmethod
    def _backward(
        segment: Segment,
        objective: Objective,
        influence: Tensor,
        weights: Mapping[str, Tensor],
        begin: int,
    ) -> Tensor:
        """Add the gradient to `.grad`; returns the loss, detached."""
        objective.check_weights(segment.outputs, segment.chunk)
        loss = objective.loss(segment.outputs, segment.chunk)
        flow = CreditFlow(GradientAccumulator(weights))
        product = flow.through(segment, [(objective.scaled(loss), None)], retain=True)
        objective.check_depends([*product.weights, *product.state])
        pairs = zip(trees.tensors(segment.before), product.state, strict=True)
        cotangents = _rows(
            [
                torch.zeros_like(leaf) if a is None else a
                for leaf, a in pairs
                if trees.differentiable(leaf)
            ]
        )
        past = torch.einsum("bn,bnp->p", cotangents, influence)
        flow.grads.add(_like(flow.grads.weights, past))
        deliver(flow.grads, objective, (loss, segment.outputs), segment.chunk, begin)
        return loss.detach()


def _next_influence(segment: Segment, influence: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The influence after the chunk."""
    lanes, size = influence.shape[:2]
    unit = torch.eye(lanes * size, dtype=influence.dtype, device=influence.device)
    cotangents = _leaves_like(unit.view(-1, lanes, size), _floating(segment.after))
    by_state, by_weights = _jacobians(segment, cotangents, weights)
    by_lane = by_state.view(lanes, size, lanes, size)
    jacobian = torch.stack([by_lane[b, :, b] for b in range(lanes)])
    return torch.bmm(jacobian, influence) + by_weights.view(lanes, size, -1)


def _jacobians(
    segment: Segment, cotangents: list[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Products of K cotangents with the derivatives of the state after the segment.

    By the state before it, `(K, B * n)`, and by the weights, `(K, P)`.
    """
    after = _floating(segment.after)
    roots = [(leaf, c) for leaf, c in zip(after, cotangents, strict=True) if leaf.requires_grad]
    before = _floating(segment.before)
    targets = [*(leaf for leaf in before if leaf.requires_grad), *weights]
    count = len(cotangents[0])
    products: list[Tensor | None] = [None] * len(targets)
    if roots:
        with suspended_hooks(weights):
            products = _batched([leaf for leaf, _ in roots], targets, [c for _, c in roots])
    rest = iter(products)
    states = [_filled(next(rest) if leaf.requires_grad else None, leaf, count) for leaf in before]
    by_weights = [
        _filled(product, weight, count).reshape(count, -1)
        for product, weight in zip(rest, weights, strict=True)
    ]
    rows = torch.cat([leaf.reshape(count, leaf.shape[1], -1) for leaf in states], dim=2)
    return rows.flatten(1), torch.cat(by_weights, dim=1)


def _batched(
    outputs: list[Tensor], targets: list[Tensor], cotangents: list[Tensor]
) -> list[Tensor | None]:
    """All products in one backward pass, or one by one if an operation cannot be batched."""
    try:
        with warnings.catch_warnings():
            # torch warns about the operations it loops over
            warnings.simplefilter("ignore", UserWarning)
            return list(
                torch.autograd.grad(
                    outputs,
                    targets,
                    cotangents,
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
            )
    except RuntimeError:
        single = [
            torch.autograd.grad(
                outputs, targets, [c[k] for c in cotangents], retain_graph=True, allow_unused=True
            )
            for k in range(len(cotangents[0]))
        ]
        return [
            None if column[0] is None else torch.stack([g for g in column if g is not None])
            for column in zip(*single, strict=True)
        ]


def _filled(product: Tensor | None, like: Tensor, count: int) -> Tensor:
    return like.new_zeros(count, *like.shape) if product is None else product


def _floating(state: State) -> list[Tensor]:
    return [leaf for leaf in trees.tensors(state) if trees.differentiable(leaf)]


def _rows(leaves: Sequence[Tensor]) -> Tensor:
    """`(B, n)` from the leaves of a state."""
    return torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves], dim=1)


def _leaves_like(rows: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """`(K, B, n)` back to leaves `(K, B, ...)`."""
    parts = rows.split([leaf[0].numel() for leaf in leaves], dim=2)
    return [
        part.reshape(len(rows), *leaf.shape).to(leaf.dtype)
        for part, leaf in zip(parts, leaves, strict=True)
    ]


def _like(weights: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    parts = flat.split([weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
