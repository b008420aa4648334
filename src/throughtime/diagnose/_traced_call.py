"""One call of one recurrent layer, in one direction, as a node of the autograd graph.

    forward:    the results of the layer itself
    backward:   run `kernels/reference.py` on x and s_0 step by step, with a graph;
                (dx, ds_0, dW, dh_t, dc_t, dgate_t) = one vector-Jacobian product of y and s_T

Shapes: `T` steps, `B` lanes (rows of the batch), `D` input features, `H` hidden, `P` = `H` or the
size of a projection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from throughtime.diagnose._trace_record import Track, TrackRecord, is_batched
from throughtime.kernels import reference
from throughtime.kernels.cells import Cell, Weights
from throughtime.kernels.reference import States, Step


class PackedLayout:
    """Lanes of unequal length, longest first, as torch packs them.

    Attributes:
        sizes: the lanes of each step.
        order: puts lanes back into the caller's order.
        active: `(T, B)`, the lanes that each step has.
        reverse: the steps and lanes of padded data, each lane from its last step to its first.
    """

    def __init__(self, inputs: PackedSequence) -> None:
        self.sizes, self.order = inputs.batch_sizes, inputs.unsorted_indices
        lanes = torch.arange(int(self.sizes[0]), device="cpu")
        active = lanes < self.sizes.unsqueeze(1)
        steps = active.sum(0) - 1 - torch.arange(len(active), device="cpu").unsqueeze(1)
        self.active = active.to(inputs.data.device)
        self.reverse = steps % len(active), lanes

    def padded(self, data: Tensor) -> Tensor:
        """`(T, B, ...)`, zeros where a lane has ended."""
        return data.new_zeros(*self.active.shape, *data.shape[1:]).index_put((self.active,), data)

    def reversed(self, data: Tensor) -> Tensor:
        """Packed data with the steps of each lane in the opposite order."""
        return self.padded(data)[self.reverse][self.active]


@dataclass(eq=False)
class TracedCall:
    """One call of one layer in one direction.

    Attributes:
        cell: of the layer.
        track: where the call is recorded.
        packing: of packed data.
        resets: `(T, B)`, where the state entering the step becomes zeros.
        reverse: whether the data run from the last step to the first.
        products: the type to which factors of products are rounded; None: autocast's, if it is on.
    """

    cell: Cell
    track: Track
    packing: PackedLayout | None = None
    resets: Tensor | None = None
    reverse: bool = False
    products: torch.dtype | None = None

    def __call__(
        self, results: Sequence[Tensor], x: Tensor, states: States, weights: Weights
    ) -> tuple[Tensor, States]:
        """Outputs, and the states after the last step, with a graph.

        Args:
            results: the same without a graph.
            x: `(T, B, D)`, or packed.
            states: entering the first step, `(B, P)` and `(B, H)`.
            weights: of this direction.
        """
        self.start = self.track.begin(len(x if self.packing is None else self.packing.sizes))
        device, dtype = x.device.type, weights.ih.dtype
        if self.products is None and torch.is_autocast_enabled(device):
            floating = dtype in (torch.float32, torch.float16, torch.bfloat16)
            self.products = torch.get_autocast_dtype(device) if floating else None
        y, *ends = TracedSteps.apply(self, results, x, *states, *weights)
        return y, tuple(ends)

    def arguments(self, flat: Sequence[Any]) -> tuple[Tensor, States, Weights]:
        """The inputs of the node: `x`, the states and the weights."""
        end = 1 + len(self.cell.states)
        return flat[0], tuple(flat[1:end]), Weights(*flat[end:])

    def vjp(
        self,
        tensors: Sequence[Tensor | None],
        cotangents: Sequence[Tensor | None],
        needed: Sequence[bool],
        create_graph: bool,
    ) -> list[Tensor | None]:
        """The gradients of `tensors`, the inputs of the call; records those of each step."""
        leaves: list[Any] = [  # None for a weight that the layer lacks
            None
            if tensor is None
            else tensor.view_as(tensor)
            if create_graph and tensor.requires_grad
            else tensor.detach().requires_grad_(need)
            for tensor, need in zip(tensors, needed, strict=True)
        ]
        _, entering, _ = self.arguments(leaves)
        for leaf in entering:
            leaf.requires_grad_()
        steps, outputs = self._run(leaves)
        named = [
            step.gates | dict(zip(self.cell.states, step.states, strict=True)) for step in steps
        ]
        values = {leaf: [row[leaf] for row in named] for leaf in self.cell.values}
        roots = [
            (output, cotangent.to(output.dtype))
            for output, cotangent in zip(outputs, cotangents, strict=True)
            if cotangent is not None
        ]
        traced = {
            i: leaf for i, leaf in enumerate(leaves) if leaf is not None and leaf.requires_grad
        }
        gradients = iter(
            torch.autograd.grad(
                [output for output, _ in roots],
                [*chain.from_iterable(values.values()), *traced.values()],
                [cotangent for _, cotangent in roots],
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
        )
        by_step = {leaf: [next(gradients) for _ in steps] for leaf in values}
        by_input = dict(zip(traced, gradients, strict=True))
        if not is_batched(cotangents):
            states = range(1, 1 + len(entering))
            edge = {
                leaf: by_input[i].detach() for leaf, i in zip(self.cell.states, states, strict=True)
            }
            with torch.no_grad():
                self.track.record(
                    TrackRecord(
                        self.start,
                        {leaf: self._in_time_order(rows) for leaf, rows in by_step.items()},
                        {} if self.reverse else {self.start: edge},
                        [leaf.detach() for leaf in entering],
                        [leaf.detach() for leaf in outputs[1:]],
                        any(needed[i] for i in states),
                        *self._retention(steps),
                    )
                )
        return [by_input[i] if need else None for i, need in enumerate(needed)]

    def _run(self, leaves: Sequence[Tensor | None]) -> tuple[list[Step], list[Tensor]]:
        """Run the reference with a graph: its steps, and the outputs of the call."""
        wide = torch.promote_types(self.arguments(leaves)[2].ih.dtype, torch.float32)
        x, states, weights = self.arguments(
            [None if leaf is None else leaf.to(wide) for leaf in leaves]
        )
        packing, active = self.packing, None
        if packing is not None:
            x, active = packing.padded(x), packing.active
        products = None if self.products is wide else self.products
        pairs = list(reference.steps(self.cell, x, states, weights, self.resets, products, active))
        y = torch.stack([step.states[0] for step, _ in pairs])
        return [step for step, _ in pairs], [y if active is None else y[active], *pairs[-1][1]]

    def _in_time_order(self, rows: list[Tensor]) -> Tensor:
        """The gradients of one leaf, `(T, B, ...)`, lanes in the caller's order."""
        steps, packing = torch.stack(rows).detach(), self.packing
        if self.reverse:
            steps = steps.flip(0) if packing is None else steps[packing.reverse]
        return steps if packing is None or packing.order is None else steps[:, packing.order]

    def _retention(self, steps: Sequence[Step]) -> tuple[Tensor | None, int]:
        """The retention gate summed over steps and lanes, and the number of its values."""
        name = self.cell.retention_gate
        if name is None:
            return None, 0
        gates = torch.stack([step.gates[name].detach() for step in steps])
        gates = gates.flatten(0, 1) if self.packing is None else gates[self.packing.active]
        return gates.sum(0), len(gates)


class TracedSteps(torch.autograd.Function):
    """A traced call as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any, call: TracedCall, results: Sequence[Tensor], *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        tensors = ctx.saved_tensors  # read once: a checkpoint returns them once
        if all(gradient is None for gradient in grads):
            return (None,) * (2 + len(tensors))
        with torch.enable_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            return None, None, *ctx.call.vjp(tensors, grads, ctx.needs_input_grad[2:], create_graph)
