"""Real-time recurrent learning at linear cost, for one layer whose units do not see each other.

    tt.updates(net, stream, loss_fn, gradient=ElementwiseRTRL(stride=20))

In minGRU, LRU and RTU, unit u has weights of its own, and its state depends on no other unit:

    S_k[u] = J_k[u] S_{k-1}[u] + dh_k[u]/dw[u]      influence of its weights on its state
    g_k    = dl_k/dw + (dl_k/dh_{k-1}) S_{k-1}      gradient of the losses of stride k

J_k[u] = dh_k[u]/dh_{k-1}[u], one number for a real state and 2 x 2 for a complex one. So the
influence has one row for each number of a unit's state instead of one for each number of the whole
state, and one backward pass computes it for all units at once. At fixed weights the g_k sum to the
exact gradient, as those of `rtrl.RTRL` do, without truncation on a stream without end.

Cost: m * B * P numbers of memory and m * B backward passes a stride. The
layers after the recurrent one are free; a second recurrent layer, or weights before it, would
influence several units, and are refused. Not to be confused with diagonal approximations of RTRL
(SnAp-1, e-prop), which are biased where units do see each other.

References: R. J. Williams and D. Zipser, Neural Computation 1 (1989); N. Zucchet et al., Online
learning of long-range dependencies, NeurIPS (2023); E. Elelimy et al., Real-time recurrent learning
using trace units in reinforcement learning, NeurIPS (2024), for RTU.

Shapes: `B` lanes, `N` units, `m` numbers in the state of a unit, `P` recurrent weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Source
from throughtime.gradient import Objective, Progress, Update


@dataclass(frozen=True)
class ElementwiseRTRL:
    """The exact gradient of each stride, through all steps before it.

    Args:
        stride: steps between two updates, from 1 on.

    Example:
        >>> class Decay(torch.nn.Module):  # h' = a h + x, a unit for each input
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a = torch.nn.Parameter(torch.full((3,), 0.9))
        ...
        ...     def forward(self, x, h):
        ...         h = tt.linear_scan(self.a.expand_as(x), x, h)
        ...         return h, h[-1]
        >>> net = tt.carry(Decay(), start=torch.zeros(3))
        >>> stream = tt.Stream({"inputs": torch.randn(40, 3), "targets": torch.randn(40, 3)}, 1, 20)
        >>> updates = tt.updates(net, stream, torch.nn.MSELoss(), gradient=ElementwiseRTRL(20))
        >>> [update.steps for update in updates]
        [20, 20]
    """

    stride: int = 1

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise tt.errors.ConfigError(f"stride={self.stride}: expected at least 1 step")

    def update(
        self, net: Carried, source: Source, objective: Objective, at: Progress
    ) -> tuple[Update | None, Progress]:
        """Run the next stride, put its gradient into `.grad`, and move the influence on.

        `at.memory` is the influence `(B, m, P)`.
        """
        chunk = source.take(self.stride)
        if chunk is None:
            return None, at._replace(memory=None)
        weights = [weight for weight in net.parameters() if weight.requires_grad]
        state = at.carried
        if state is None:
            state = net.initial_state(chunk.lanes, like=chunk.inputs)
        influence: Any = at.memory
        if not at.step:  # a learned start depends on the weights
            influence = _Recurrence(state, [], weights).influence
        entering = tt.state.map_leaves(_leaf, state)
        outputs, after = net(chunk.inputs, entering, chunk.resets)
        recurrence = _Recurrence(after, tt.state.tensors(entering), weights)
        if not at.step:
            recurrence.check()
        stop = at.step + chunk.steps
        loss, weight = objective(outputs, chunk)
        if weight:
            direct = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
            total = torch.cat([_real(part).flatten() for part in direct])
            total = total + recurrence.through(loss, influence)
            if not total.isfinite().all():
                raise tt.errors.RunError(
                    f"the gradient of steps {at.step} to {stop - 1} of the epoch is not finite"
                )
            parts = total.split([_real(w).numel() for w in weights])
            for w, part in zip(weights, parts, strict=True):
                scaled = part if objective.scaler is None else objective.scaler.scale(part)
                shaped = scaled.view_as(_real(w))
                w.grad = torch.view_as_complex(shaped) if w.is_complex() else shaped
        influence = recurrence.moved(influence)
        state, valid = tt.state.detach(after), chunk.valid_steps if weight else 0
        update = Update(loss.detach(), valid, state, outputs.detach(), chunk, weight)
        return update, Progress(stop, state, stop, state, influence)


class _Recurrence:
    """The derivatives of a state by the state `entering` a stride and by the weights, by unit.

    Attributes:
        jacobian: `(B, m, N, m)`, of number i of a unit by number j of the same unit.
        influence: `(B, m, P)`, of number i by the weights of the unit.
    """

    def __init__(self, after: Any, entering: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self._after, self._entering, self._weights = (
            _numbers(tt.state.tensors(after)),
            entering,
            weights,
        )
        lanes, units, numbers = self._after.shape
        rows = torch.eye(lanes * numbers, dtype=self._after.dtype, device=self._after.device)
        rows = rows.view(-1, lanes, 1, numbers).expand(-1, lanes, units, numbers)
        by_state, by_weights = self._vjp(self._after, rows)
        by_lane = by_state.view(lanes, numbers, *by_state.shape[1:])
        self.jacobian = by_lane.diagonal(dim1=0, dim2=2).permute(3, 0, 1, 2)
        self.influence = by_weights.view(lanes, numbers, -1)
        # the unit of each weight: rows of a weight are units, or several blocks of all units
        self._owner = torch.cat(
            [_owners(_real(w), len(w) if w.dim() else 1, units) for w in weights]
        )

    def _vjp(self, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The products of each row with the Jacobians: `(R, B, N, m)` and `(R, P)`."""
        sources = [leaf for leaf in self._entering if leaf.requires_grad]
        empty = values.new_zeros(len(rows), *self._after.shape[:2], 0)
        if not values.requires_grad:
            return empty, torch.cat(
                [empty.new_zeros(len(rows), _real(w).numel()) for w in self._weights], 1
            )
        states, by_weights = list[Tensor](), list[Tensor]()
        for row in rows:
            grads = torch.autograd.grad(
                values,
                [*sources, *self._weights],
                row,
                retain_graph=True,
                materialize_grads=True,
            )
            states.append(_numbers(grads[: len(sources)]) if sources else empty[0])
            by_weights.append(torch.cat([_real(g).flatten() for g in grads[len(sources) :]]))
        return torch.stack(states), torch.stack(by_weights)

    def through(self, loss: Tensor, influence: Tensor) -> Tensor:
        """The gradient of a loss by the weights, through the state that entered: `(P,)`."""
        by_state, _ = self._vjp(loss, torch.ones_like(loss).unsqueeze(0))
        return (by_state[0][:, self._owner].transpose(1, 2) * influence).sum((0, 1))

    def moved(self, influence: Tensor) -> Tensor:
        """The influence on the state after the stride, from that on the state before."""
        moved = torch.einsum("bipj,bjp->bip", self.jacobian[:, :, self._owner], influence)
        return moved + self.influence

    def check(self) -> None:
        """Refuse a recurrence whose units see each other, by one random product."""
        probe = torch.rand_like(self._after) + 0.5
        by_state, by_weights = self._vjp(self._after, probe.unsqueeze(0))
        expected = torch.einsum("bni,binj->bnj", probe, self.jacobian)
        own = (probe[:, self._owner].transpose(1, 2) * self.influence).sum((0, 1))
        close = torch.allclose(by_state[0], expected, 1e-3, 1e-5)
        if not (close and torch.allclose(by_weights[0], own, 1e-3, 1e-5)):
            raise tt.errors.ConfigError(
                "ElementwiseRTRL: a unit's state depends on other units or on their weights, so"
                " its gradients would be wrong. Expected one recurrent layer that reads the inputs"
                " themselves, with states (B, N) and weights whose rows are the N units; take"
                " tt.Truncated, tt.Exact or rtrl.RTRL"
            )


def _owners(weight: Tensor, rows: int, units: int) -> Tensor:
    """The unit of each number of a weight; any where rows are no units: its influence is zero."""
    owner = torch.arange(rows, device=weight.device) % units
    return owner.repeat_interleave(weight.numel() // rows)


def _numbers(leaves: Sequence[Tensor]) -> Tensor:
    """`(B, N, m)`, of leaves `(B, N, ...)`."""
    return torch.cat([_real(leaf).reshape(*leaf.shape[:2], -1) for leaf in leaves], -1)


def _real(value: Tensor) -> Tensor:
    """A complex tensor with a last dimension of two."""
    return torch.view_as_real(value) if value.is_complex() else value


def _leaf(value: Tensor) -> Tensor:
    """Without a graph, and a source of gradients unless it counts."""
    return value.detach().requires_grad_(tt.state.differentiable(value))
