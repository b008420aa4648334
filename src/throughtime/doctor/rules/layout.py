"""Rules of the layout: batch and time exchanged, and a state with other lanes than the chunk.

Codes TT209 and TT211.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from throughtime.doctor._data import Root, difference, nonzero
from throughtime.doctor._frames import Instruction, current_line, line_of
from throughtime.doctor._order import ChunkOrder, lanes_of
from throughtime.doctor._records import (
    MAX_STEPS,
    BackwardCall,
    Operation,
    TensorRecord,
    UnitCall,
    lanes_and_step,
    tensors,
)
from throughtime.doctor.findings import FindingList
from throughtime.doctor.rules import Rule
from throughtime.doctor.watcher import Watcher

SMOOTHER = 0.8  # the change along time, at most, of that along lanes
CHUNKS = 2  # chunks that show exchanged dimensions before it is reported


class LayoutRule(Rule):
    """Compares the dimensions that a layer takes for time and lanes with what the data says."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        super().__init__(watcher, findings)
        self.order = ChunkOrder()
        self.evidence: dict[Instruction, tuple[UnitCall, str]] = {}  # in this chunk
        # the last call whose state ended the inputs beside its own
        self.beside: dict[Instruction, UnitCall] = {}
        # the last error over lanes, which the loop may handle, and the finding that explains it
        self.failure: tuple[BaseException, Callable[[], Any]] | None = None

    def on_operation(self, op: Operation, result: TensorRecord) -> None:
        if op.is_layer and result.source is not None:
            self._check_samples(result.source)
            self._check_chunks(op, result.source)
        elif not (op.is_recurrent or op.loop_inputs):
            for tensor, record in op.pairs():
                call = record.source if record is not None else None
                if call is not None and record is not None and _has_two_dims(call):
                    self._check_selection(tensor, record, call)
                    self._check_targets(op, call)

    def _check_samples(self, call: UnitCall) -> None:
        data, lane, time = call.data, call.lane_dim, call.time_dim
        if data is None or not _has_two_dims(call) or call.instruction in self.evidence:
            return
        stacks = [_joined_along(call, dim) for dim in (time, lane)]
        of_steps, of_lanes = (stack is not None and stack.random for stack in stacks)
        if of_steps and not of_lanes:
            detail = "The steps that the layer reads are samples that the loader drew at random."
            self.evidence[call.instruction] = call, detail

    def _check_chunks(self, op: Operation, call: UnitCall) -> None:
        """Find a state that enters the inputs beside those that it comes from.

        Targets at every step show that these inputs are no samples with a label each.
        """
        states = [r for r in op.records[1:] if r is not None and r.source is not None]
        origin = next((r.source for r in states if not r.edited and _is_whole(r)), None)
        if origin is None or origin.unit != call.unit or origin.chunk == call.chunk:
            return
        if not (_has_two_dims(call) and self.order.goes_on_along_lanes(origin, call)):
            return
        samples = _joined_along(call, call.lane_dim)
        if not samples or call.batch == origin.batch:
            self.beside[call.instruction] = call

    def _check_selection(self, tensor: Tensor, record: TensorRecord, call: UnitCall) -> None:
        """Find a result that is computed from the last lane alone, at every step."""
        lanes, index = _lanes(call), record.index
        if index is None or not tensor.dim() or len(tensor) != call.steps:
            return
        last = [(lanes - 1) * MAX_STEPS + step for step in range(call.steps)]
        if index[(slice(None), *(0,) * (index.dim() - 1))].tolist() == last:
            detail = f"The results are computed from the last of {lanes} lanes only."
            self.evidence.setdefault(call.instruction, (call, detail))

    def _check_targets(self, op: Operation, call: UnitCall) -> None:
        """Find targets that are the next rows along what the layer takes for lanes."""
        size = call.steps * _lanes(call)
        if call.instruction in self.evidence:
            return
        for tensor, record in op.pairs():
            known = record is None
            if not known or tensor.requires_grad or tensor.numel() < size:
                continue
            lanes, view = lanes_of(call), self.watcher.data.view(tensor)
            target = None if view is None else view.locate((0,) * tensor.dim())
            if len(lanes) < 2:
                return
            first, beside = lanes[:2]
            ahead: tuple[int, ...] = ()
            if target is not None and target.root is first.root:
                ahead = difference(first.first, target.at)
            if nonzero(ahead) & first.dims:
                continue
            aside = beside.root is first.root and any(ahead)
            if aside and ahead == difference(first.first, beside.first):
                detail = "The targets are the inputs of the next lane, not of the next step."
                self.evidence[call.instruction] = call, detail
            elif self.beside.get(call.instruction) is call and _changes_as_if_exchanged(call):
                detail = "Each chunk goes on where the last lane ended, not where the steps ended."
                self.evidence[call.instruction] = call, detail

    def before_backward(self, backward: BackwardCall) -> None:
        for instruction, (call, detail) in self.evidence.items():
            fix = _layout_fix(call.time_dim == 1)
            self.findings.add("TT209", line_of(instruction), detail, fix=fix, after=CHUNKS)
        self.evidence.clear()

    def on_module_error(self, module: nn.Module) -> None:
        """Compare the lanes of the state and of the inputs of a layer or cell that failed."""
        error, trace = sys.exc_info()[1:]
        values = dict[str, Any]()
        while trace is not None:
            names = trace.tb_frame.f_locals
            if names.get("self") is module and "input" in names and "hx" in names:
                values = names
            trace = trace.tb_next
        inputs, states = values.get("input"), list(tensors(values.get("hx")))
        if not isinstance(inputs, Tensor) or not states or states[0].dim() < 2:
            return
        layer, batch_first = isinstance(module, nn.RNNBase), getattr(module, "batch_first", False)
        if inputs.dim() != (3 if layer else 2):
            return
        steps = inputs.shape[int(batch_first)] if layer else 0
        lanes = inputs.shape[int(not batch_first)] if layer else len(inputs)
        carried = self.watcher.table.record_of_state(states[0]) is not None
        sizes = states[0].shape[-2], lanes, steps
        self._explain_lanes(error, sizes, batch_first, layer, carried)

    def on_operation_error(
        self, error: RuntimeError, inputs: list[Tensor], records: list[TensorRecord | None]
    ) -> None:
        """The same for an operation of a cell by hand: its state has lane 0 first."""
        pairs = [(t, r) for t, r in zip(inputs, records, strict=True) if t.dim() == 2]
        states = [t for t, r in pairs if r is not None and r.source is not None]
        others = [t for t, r in pairs if r is None or r.source is None]
        if len(states) == len(others) == 1 and not isinstance(others[0], nn.Parameter):
            self._explain_lanes(error, (len(states[0]), len(others[0]), 0))

    def _explain_lanes(
        self,
        error: BaseException | None,
        sizes: tuple[int, int, int],
        batch_first: bool = False,
        layer: bool = False,
        carried: bool = True,
    ) -> None:
        """Note an error where a state and a chunk have unequal lanes; `steps` of a layer."""
        state, lanes, steps = sizes
        loader = self.clock.loader
        if error is None or state == lanes or not re.search("match|hidden", str(error)):
            return
        if state == steps:
            detail = f"The state has {state} lanes, the layer takes {steps} for steps."
            self._hold(error, "TT209", detail, _layout_fix(batch_first))
            return
        detail, fix = f"The state has {state} lanes, the chunk has {lanes}.", ""
        if not carried:
            dim = int(layer and not batch_first)
            fix = f"where the state is made, as many lanes as the chunk has: x.size({dim})"
        elif lanes < state:
            rows, dim = ("h[:, rows]", 1) if layer else ("h[rows]", 0)
            fix = (
                f"keep h for all lanes; for rows, a tensor of the {lanes} indices of this chunk,"
                f" y, new = net(x, {rows}), then h = h.index_copy({dim}, rows, new.detach())"
            )
            if loader is not None and self.clock.batch[1]:
                detail += f" The loader at {loader} ends with a smaller batch."
                fix = "DataLoader(..., drop_last=True)"
        self._hold(error, "TT211", detail, fix)

    def _hold(self, error: BaseException, code: str, detail: str, fix: str) -> None:
        self.failure = error, partial(self.findings.add, code, current_line(), detail, fix=fix)

    def on_exit(self, error: BaseException) -> None:
        if self.failure is not None and self.failure[0] is error:
            self.failure[1]()


def _layout_fix(batch_first: bool) -> str:
    if batch_first:
        return "without batch_first=True: the inputs are (time, batch, features)"
    return "batch_first=True in the layer: the inputs are (batch, time, features)"


def _changes_as_if_exchanged(call: UnitCall) -> bool:
    """Whether the inputs change less from lane to lane than from step to step, as time does.

    Samples that are read in order also go on where the last lane ended. A layer with
    batch_first=True says that lanes come first, so the inputs must show the contrary.
    """
    data, dims = call.inputs, (call.lane_dim, call.time_dim)
    if data is None or data.is_complex():
        return False
    changes = (data.detach().double().diff(dim=dim).abs().mean() for dim in dims if dim is not None)
    lanes, steps = map(float, changes)
    return lanes < steps * (SMOOTHER if call.time_dim == 1 else 1 / SMOOTHER)


def _joined_along(call: UnitCall, dim: int | None) -> Root | None:
    """The root of samples that are joined along a dimension of the inputs."""
    data = call.data
    if data is None or dim is None or data.shape[dim] < 2 or data.root.joined is None:
        return None
    return data.root if data.root.strides[data.root.joined] == data.strides[dim] else None


def _is_whole(record: TensorRecord) -> bool:
    """Whether a state has its lanes in order."""
    rows, _ = lanes_and_step(record.index)
    return rows is None or rows == list(range(len(rows)))


def _lanes(call: UnitCall) -> int:
    return (
        call.data.shape[call.lane_dim] if call.data is not None and call.lane_dim is not None else 1
    )


def _has_two_dims(call: UnitCall) -> bool:
    """Whether a call has several steps of several lanes."""
    return call.steps > 1 and _lanes(call) > 1
