"""The last outputs of recurrent units, by which a state without a record is identified."""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from throughtime.doctor._records import TensorRecord, Unit, UnitCall, tensors
from throughtime.doctor._torch_private import storage_of


def _equals(output: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor without a graph has the values of an output that is not all zeros."""
    return (
        not tensor.requires_grad
        and (output.shape, output.dtype, output.device)
        == (tensor.shape, tensor.dtype, tensor.device)
        and bool((output == tensor).all())
        and bool(output.any())
    )


class LayerOutputs:
    """The last outputs of each recurrent unit: they identify a state by its memory.

    A state that was passed on while the watcher was off has no record. It lies in the same memory,
    with or without its graph, as what a unit returned.
    """

    def __init__(self) -> None:
        self.latest: dict[Unit, tuple[Any, UnitCall, int]] = {}  # outputs, call, dimension of lanes
        self.detached: dict[Unit, tuple[list[Tensor], TensorRecord]] = {}

    def remember(self, outputs: Any, call: UnitCall, lane_dim: int) -> None:
        self.latest[call.unit] = outputs, call, lane_dim

    def record_of(self, tensor: Tensor) -> TensorRecord | None:
        """The record of a state that is an output: in its memory, or with its values.

        The values came back as a copy, such as one through NumPy.
        """
        if not (self.latest or self.detached) or tensor.layout is not torch.strided:
            return None
        self.release_graphs()
        storage = storage_of(tensor)
        for outputs, record in self.detached.values():
            if any(storage_of(output) == storage for output in outputs):
                return record
        for outputs, record in self.detached.values():
            if any(_equals(output, tensor) for output in outputs):
                return replace(record, copies=1)
        return None

    def release_graphs(self) -> None:
        """Keep the outputs without their graphs."""
        for unit, (tree, call, lane_dim) in self.latest.items():
            outputs = tensors(tree)
            record = TensorRecord(
                call.chunk,
                call.instruction,
                weakref.ref(outputs[0]),
                learned=True,
                source=call,
                detach=call.detach,
                lane_dim=lane_dim,
            )
            self.detached[unit] = [output.detach() for output in outputs], record
        self.latest.clear()
