"""Untruncated credit on a stream without end: real-time recurrent learning, chunk by chunk, for
small states.

    S_k = ds_k/dw                                  influence of the weights on the state after chunk
    k: (n, P) for each lane
    g_k = dl_k/dw + (dl_k/ds_{k-1}) S_{k-1}        gradient of the losses of chunk k, through all of
    the past
    S_k = (ds_k/ds_{k-1}) S_{k-1} + ds_k/dw        within the chunk, both by n backward passes

At fixed weights the g_k sum to the exact gradient. Between updates S keeps what was true of earlier
weights: an error of the order of the learning rate, as in all real-time recurrent learning. Memory
n * B * P numbers, n * B backward passes per chunk: for states of some dozen numbers. To be confused
neither with `Truncated`, which forgets, nor with approximations of S (SnAp, UORO, e-prop).

References: R. J. Williams and D. Zipser, A learning algorithm for continually running fully
recurrent neural networks, Neural Computation 1 (1989); J. Schmidhuber, A fixed size storage O(n^3)
time complexity learning algorithm for fully recurrent continually running networks, Neural
Computation 4 (1992), for the chunks.

Shapes: `B` lanes, `n` numbers in one lane's state, `P` weights.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Source
from throughtime.errors import ConfigError, RunError, StateError
from throughtime.gradient import schedule
from throughtime.gradient.finite import not_finite
from throughtime.gradient.gather import Gathered, hooks_held, weights_of
from throughtime.gradient.objective import Objective
from throughtime.gradient.policy import Progress, Update, nothing
from throughtime.gradient.sweep import Piece, started
from throughtime.state import State


@dataclass(frozen=True)
class RTRL:
    """An update every `stride` steps, its credit untruncated: the whole past counts, on a stream
    without end.

    For small states: system identification, control, a GRU of some dozen units. Lanes must not
    depend on each other (as BatchNorm makes them).

    Args:
        stride: steps between two updates.
        max_state: largest number of state numbers, over all lanes, that is not refused.

    Raises:
        ConfigError: the state is larger; the message says what memory it would take.
        RunError: a gradient is not finite; `.grad` and weights are untouched.

    Cost: a forward pass and n * B + 1 backward passes per step; memory for n * B * P numbers.

    Example:
        >>> import torch, throughtime as tt
        >>> stream = tt.Stream({"inputs": torch.randn(60, 3), "targets": torch.randn(60)}, lanes=1, chunk=10)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> [update.steps for update in tt.updates(net, stream, torch.nn.MSELoss(), gradient=tt.RTRL(stride=20))]
        [20, 20, 20]

    References: Williams & Zipser (1989); Schmidhuber (1992).
    """

    stride: int
    max_state: int = 128

    def __post_init__(self) -> None:
        schedule.whole("stride", self.stride, 1)
        schedule.whole("max_state", self.max_state, 1)

    def describe(self) -> str:
        """The setting in words."""
        return f"an update every {self.stride} steps, credit back through all of the past"

    def update(
        self, net: Carried, source: Source, objective: Objective, progress: Progress
    ) -> tuple[Update | None, Progress]:
        """The next stride that has a valid step; the others carry state and influence on."""
        while (chunk := source.take(self.stride)) is not None:
            begin = source.position - chunk.steps
            named = weights_of(net, objective.loss_fn)
            weights = list(named.values())
            piece = started(net, chunk, progress.edge)
            influence = self._influence(piece.before, progress, weights)
            found = (
                self._update(piece, objective, influence, named, begin)
                if objective.counts(chunk)
                else None
            )
            after = trees.detach(piece.after)
            progress = Progress(after, after, influence=_carried_on(piece, influence, weights))
            outputs = piece.outputs.detach()
            update = nothing(objective, chunk, after, outputs)
            if found is not None:
                update = Update(*found, after, outputs, chunk, weight=objective.weight(chunk))
            if update is not None:
                return update, progress
        return None, progress

    def _influence(self, state: State, progress: Progress, weights: Sequence[Tensor]) -> Tensor:
        """`(B, n, P)`, zeros at the start of an epoch."""
        leaves = [leaf.detach() for leaf in _floating(state)]
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
        if progress.influence is not None:
            return progress.influence
        return leaves[0].new_zeros(lanes, size, count)

    @staticmethod
    def _update(
        piece: Piece,
        objective: Objective,
        influence: Tensor,
        named: Mapping[str, Tensor],
        begin: int,
    ) -> tuple[Tensor, int]:
        objective.check_weights(piece.outputs, piece.chunk)
        loss = objective.loss(piece.outputs, piece.chunk)
        gathered = Gathered(named)
        pulled = piece.pull(gathered.weights, [(objective.scaled(loss), None)], None, keep=True)
        objective.check_depends([*pulled.weights, *pulled.adjoint])
        gathered.add(pulled.weights)
        adjoint = _rows(
            [
                torch.zeros_like(leaf) if a is None else a
                for leaf, a in _pairs(piece.before, pulled.adjoint)
            ]
        )
        gathered.add(_like(gathered.weights, torch.einsum("bn,bnp->p", adjoint, influence)))
        objective.check_depends(gathered.sums)
        fault = gathered.faulty() if objective.scaler is None else None
        if fault is not None:
            raise RunError(
                not_finite(fault, begin, begin + piece.chunk.steps, piece.chunk, loss.item())
            )
        gathered.deliver()
        return loss.detach(), piece.chunk.valid


def _carried_on(piece: Piece, influence: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The influence after the chunk."""
    lanes, size = influence.shape[:2]
    unit = torch.eye(lanes * size, dtype=influence.dtype, device=influence.device).view(
        -1, lanes, size
    )
    cotangents = _leaves_like(unit, _floating(piece.after))
    by_state, by_weights = _products(piece, cotangents, weights)
    jacobian = torch.stack([by_state.view(lanes, size, lanes, size)[b, :, b] for b in range(lanes)])
    return torch.bmm(jacobian, influence) + by_weights.view(lanes, size, -1)


def _products(
    piece: Piece, cotangents: list[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """For each cotangent, its product with the derivatives by the state before, `(K, B * n)`, and by the weights, `(K, P)`."""
    after = _floating(piece.after)
    alive = [(leaf, c) for leaf, c in zip(after, cotangents, strict=True) if leaf.requires_grad]
    before = _floating(piece.before)
    wanted = [*(leaf for leaf in before if leaf.requires_grad), *weights]
    count = len(cotangents[0])
    found: list[Tensor | None] = [None] * len(wanted)
    if alive:
        with hooks_held(weights):
            found = _batched([leaf for leaf, _ in alive], wanted, [c for _, c in alive])
    rest = iter(found)
    states = [_filled(next(rest) if leaf.requires_grad else None, leaf, count) for leaf in before]
    by_weights = [
        _filled(found_, weight, count).reshape(count, -1)
        for found_, weight in zip(rest, weights, strict=True)
    ]
    rows = torch.cat([leaf.reshape(count, leaf.shape[1], -1) for leaf in states], dim=2)
    return rows.flatten(1), torch.cat(by_weights, dim=1)


def _batched(
    outputs: list[Tensor], wanted: list[Tensor], cotangents: list[Tensor]
) -> list[Tensor | None]:
    """All products in one backward pass.

    One after another where an operation of the net cannot be batched.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # torch says which operations it loops over
            return list(
                torch.autograd.grad(
                    outputs,
                    wanted,
                    cotangents,
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
            )
    except RuntimeError:
        single = [
            torch.autograd.grad(
                outputs, wanted, [c[k] for c in cotangents], retain_graph=True, allow_unused=True
            )
            for k in range(len(cotangents[0]))
        ]
        return [
            None if column[0] is None else torch.stack([g for g in column if g is not None])
            for column in zip(*single, strict=True)
        ]


def _filled(found: Tensor | None, like: Tensor, count: int) -> Tensor:
    return like.new_zeros(count, *like.shape) if found is None else found


def _floating(state: State) -> list[Tensor]:
    return [leaf for leaf in trees.tensors(state) if trees.differentiable(leaf)]


def _pairs(state: State, adjoint: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
    return [
        (leaf, a)
        for leaf, a in zip(trees.tensors(state), adjoint, strict=True)
        if trees.differentiable(leaf)
    ]


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
