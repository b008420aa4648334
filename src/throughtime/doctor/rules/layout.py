"""The rule of the layout, TT209: batch and time are exchanged."""

from collections.abc import Iterator

from throughtime.doctor._data import Root, RootTable, difference, nonzero
from throughtime.doctor._frames import line_of
from throughtime.doctor._log import Backward, Fault, Log
from throughtime.doctor._order import goes_on_along_lanes, lanes_of
from throughtime.doctor._records import Operation, TensorRecord, UnitCall, lanes_and_step

SMOOTHER = 0.8  # the change along time, at most, of that along lanes
CHUNKS = 2  # chunks that show exchanged dimensions before it is reported


def exchanged(log: Log, event: Backward) -> Iterator[Fault]:
    """TT209: layers whose calls in this chunk show that batch and time are exchanged."""
    for unit in log.units:
        for call in unit.last.values():
            if call.exchanged and call.chunk == event.chunk:
                yield Fault("TT209", line_of(call.instruction), call.exchanged, after=CHUNKS)


def note_layout(data: RootTable, op: Operation, result: TensorRecord) -> None:
    """Note on a call what an operation shows of its dimensions of time and lanes."""
    if op.is_layer and result.source is not None:
        result.source.beside = _is_beside(op, result.source)
    elif not (op.is_recurrent or op.loop_inputs):
        for record in op.records:
            call = record.source if record is not None else None
            if call is not None and _has_two_dims(call) and not call.exchanged:
                call.exchanged = _shown_by_targets(data, op, call)


def _is_beside(op: Operation, call: UnitCall) -> bool:
    """Whether a state enters the inputs beside those that it comes from.

    Targets at every step show that these inputs are no samples with a label each.
    """
    states = [r for r in op.records[1:] if r is not None and r.source is not None]
    origin = next((r.source for r in states if not r.edited and _is_whole(r)), None)
    if origin is None or origin.unit != call.unit or origin.chunk == call.chunk:
        return False
    if not (_has_two_dims(call) and goes_on_along_lanes(origin, call)):
        return False
    samples = _joined_along(call, call.lane_dim)
    return not samples or call.batch == origin.batch


def _shown_by_targets(data: RootTable, op: Operation, call: UnitCall) -> str:
    """What targets show that are the next rows along what the layer takes for lanes."""
    size = call.steps * _lanes(call)
    for tensor, record in op.pairs():
        if record is not None or tensor.requires_grad or tensor.numel() < size:
            continue
        lanes, view = lanes_of(call), data.view(tensor)
        target = None if view is None else view.locate((0,) * tensor.dim())
        if len(lanes) < 2:
            break
        first, beside = lanes[:2]
        same = target is not None and target.root is first.root
        ahead = difference(first.first, target.at) if same and target is not None else ()
        if nonzero(ahead) & first.dims:
            continue
        aside = beside.root is first.root and any(ahead)
        if aside and ahead == difference(first.first, beside.first):
            return "The targets are the inputs of the next lane, not of the next step."
        if call.beside and _changes_as_if_exchanged(call):
            return "Each chunk goes on where the last lane ended, not where the steps ended."
    return ""


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
