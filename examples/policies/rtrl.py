"""Real-time recurrent learning, stride by stride: untruncated credit on a stream without end.

    throughtime train DATA --gradient examples/policies/rtrl.py:RTRL --stride 20

    S_k = ds_k/dw                               influence of the weights on the state, (n, P)
    S_k = (ds_k/ds_{k-1}) S_{k-1} + ds_k/dw     both factors within stride k
    g_k = dl_k/dw + (dl_k/ds_{k-1}) S_{k-1}     gradient of the losses of stride k

At fixed weights the g_k sum to the exact gradient. Between updates S still belongs to the earlier
weights: an error of the order of the learning rate, as in all real-time recurrent learning. Memory
n * P numbers and n backward passes a stride: for states of some dozen numbers in all lanes. Not to
be confused with its approximations (SnAp, UORO, e-prop) nor with truncation, which cuts credit.

References: R. J. Williams and D. Zipser, A learning algorithm for continually running fully
recurrent neural networks, Neural Computation 1 (1989); J. Schmidhuber, A fixed size storage O(n^3)
time complexity learning algorithm, Neural Computation 4 (1992), for strides of several steps.

Shapes: `n` numbers of the state in all lanes together, `P` weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Source
from throughtime.gradient import Objective, Progress, Update


@dataclass(frozen=True)
class RTRL:
    """The exact gradient of each stride, through all steps before it.

    Args:
        stride: steps between two updates, from 1 on.

    Example:
        >>> net = tt.carry(torch.nn.GRU(3, 4))
        >>> stream = tt.Stream({"inputs": torch.randn(40, 3), "targets": torch.randn(40, 4)}, 1, 20)
        >>> updates = tt.updates(net, stream, torch.nn.MSELoss(), gradient=RTRL(stride=20))
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

        `at.memory` is the influence `(n, P)`.
        """
        chunk = source.take(self.stride)
        if chunk is None:
            return None, at._replace(memory=None)
        weights = [weight for weight in net.parameters() if weight.requires_grad]
        state = at.carried
        if state is None:
            state = net.initial_state(chunk.lanes, like=chunk.inputs)
        # a learned initial state depends on the weights, a carried one through the influence
        influence = at.memory if at.step else jacobian(tt.state.tensors(state), weights)
        entering = tt.state.map_leaves(_leaf, state)
        outputs, after = net(chunk.inputs, entering, chunk.resets)
        sources = [leaf for leaf in tt.state.tensors(entering) if leaf.requires_grad]
        size, stop = len(influence), at.step + chunk.steps
        loss, weight = objective(outputs, chunk)
        if weight:
            (row,) = jacobian([loss], [*sources, *weights])
            gradient = row[:size] @ influence + row[size:]
            if not gradient.isfinite().all():
                raise tt.errors.RunError(
                    f"the gradient of steps {at.step} to {stop - 1} of the epoch is not finite"
                )
            for w, part in zip(weights, gradient.split([w.numel() for w in weights]), strict=True):
                scaled = part if objective.scaler is None else objective.scaler.scale(part)
                w.grad = scaled.view_as(w)  # `tt.updates` adds it to what was there before
        rows = jacobian(tt.state.tensors(after), [*sources, *weights])
        influence = rows[:, :size] @ influence + rows[:, size:]
        state, valid = tt.state.detach(after), chunk.valid_steps if weight else 0
        update = Update(loss.detach(), valid, state, outputs.detach(), chunk, weight)
        return update, Progress(stop, state, stop, state, influence)


def jacobian(values: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """The derivatives of all `n` numbers of `values` by all numbers of `sources`, `(n, ...)`."""
    numbers = torch.cat([leaf.flatten() for leaf in values if tt.state.differentiable(leaf)])
    if numbers.is_complex():
        raise tt.errors.StateError(
            "RTRL carries the influence on real states only: keep real and imaginary part as two"
            " leaves, or take tt.Exact"
        )
    if not numbers.requires_grad:
        return numbers.new_zeros(len(numbers), sum(source.numel() for source in sources))
    rows = [
        torch.autograd.grad(number, sources, retain_graph=True, materialize_grads=True)
        for number in numbers
    ]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def _leaf(value: Tensor) -> Tensor:
    """Without a graph, and a source of gradients unless it counts."""
    return value.detach().requires_grad_(tt.state.differentiable(value))
