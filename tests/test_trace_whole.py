"""The trace of updates in one call: what the kernels write into frames that are used again is what
a graph would show.

Shapes: `T` steps, `B` lanes.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from throughtime.gradient.whole import _forms
from throughtime.gradient.work import LISTENERS
from torch import Tensor, nn

import throughtime as tt
from processes import PATIENCE
from recurrences import needs_kernels
from test_whole import LAYERS, by_graph, calls, make, recordings
from throughtime.diagnose.trace import Pass, Trace, reel, trace
from throughtime.diagnose.trace.reel import Frame, Reel
from throughtime.errors import RunError
from throughtime.kernels import fused_step as kernel
from throughtime.kernels import recurrent

pytestmark = needs_kernels
__all__ = ["calls"]  # a fixture

EXACT = 1e-12
NETS: dict[str, Callable[[], tt.Carried]] = {name: lambda name=name: make(name) for name in LAYERS}


def stacked() -> tt.Carried:
    """Modules of one and two layers, behind one that prepares the inputs."""
    torch.manual_seed(3)
    layers = nn.Tanh(), tt.nn.LSTM(5, 7, num_layers=2), tt.nn.GRU(7, 6), nn.Linear(6, 4)
    return tt.carry(nn.Sequential(*layers).double())


def fronted() -> tt.Carried:
    """Behind a front that learns."""
    torch.manual_seed(3)
    return tt.carry(
        nn.Sequential(nn.Linear(5, 6), nn.Tanh(), tt.nn.LSTM(6, 7), nn.Linear(7, 4)).double()
    )


NETS["stacked"], NETS["behind a front"] = stacked, fronted


def updates(net: tt.Carried, policy: Any = None, *, zero: bool = True) -> Iterator[Any]:
    """An epoch, with a step of plain descent after each: recordings of several lengths, so resets, masks and a ragged end."""
    stream = tt.Stream(
        recordings(torch.float64, 4, regress=False), lanes=3, chunk=16, dtype=torch.float64
    )
    for update in tt.updates(
        net, stream, nn.CrossEntropyLoss(), gradient=policy or tt.Truncated(6)
    ):
        yield update
        with torch.no_grad():
            for weight in net.parameters():
                weight.sub_(0.05 * torch.as_tensor(weight.grad))
        if zero:
            net.zero_grad()


def train(net: tt.Carried, **options: Any) -> None:
    for _ in updates(net, **options):
        pass


def differs(one: Pass, other: Pass) -> float:
    """How far they are apart in all that a pass says."""
    assert one.names == other.names
    worst = max((one[name] - other[name]).abs().max().item() for name in one.names)
    for name in one.names:
        mine, theirs = one.edges(name), other.edges(name)
        assert mine.keys() == theirs.keys()
        worst = max(worst, *(abs(mine[at] - theirs[at]) for at in mine), 0.0)
    assert one.kept().keys() == other.kept().keys()
    return max(
        worst,
        *((one.kept()[name] - mean).abs().max().item() for name, mean in other.kept().items()),
        0.0,
    )


def check_same(told: Trace, seen: Trace) -> None:
    """Every pass of two traces, and what they say of the last."""
    assert told.count == seen.count
    assert len(told.passes) == len(seen.passes) > 0
    assert (
        max(differs(one, other) for one, other in zip(told.passes, seen.passes, strict=True))
        < EXACT
    )
    mine, theirs = told.as_dict(), seen.as_dict()
    assert mine.keys() == theirs.keys()
    assert all(mine[key] == pytest.approx(theirs[key], rel=1e-9) for key in mine)


def check_told(
    make: Callable[[], tt.Carried], made: list[int], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """An epoch in single calls is told as by graphs, where passes are kept and where the oldest are forgotten."""
    for keep in (100, 3):
        before = len(made)
        net = make()
        with trace(net, keep=keep) as told:
            train(net, **options)
        assert len(made) - before == told.count > 5
        with monkeypatch.context() as patch:
            by_graph(patch)
            net = make()
            with trace(net, keep=keep) as seen:
                train(net, **options)
        check_same(told, seen)


@pytest.mark.parametrize("kind", NETS)
def test_an_update_in_one_call_is_told_as_the_graph_shows_it(
    kind: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_told(NETS[kind], calls, monkeypatch)


def test_gradients_that_are_added_up_are_told_one_by_one(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_told(NETS["lstm"], calls, monkeypatch, zero=False)


def test_a_frame_that_is_written_to_while_it_is_kept_fails_the_law(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: one frame for all."""
    monkeypatch.setattr(Reel, "keep", lambda self: self._history().add(self._now))
    with pytest.raises(AssertionError):
        check_told(NETS["gru"], calls, monkeypatch)


def test_states_in_each_other_s_place_fail_the_law(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: the h and c that enter, exchanged, which the graph tells of in its own way."""
    plain = recurrent.Captured.of.__func__

    def turned(cls: Any, *given: Any) -> Any:
        found = plain(cls, *given)
        return found._replace(entering=found.entering.flip(1))

    monkeypatch.setattr(Frame, "read", _with(Frame.read, turned, monkeypatch))
    with pytest.raises(AssertionError):
        check_told(NETS["lstm"], calls, monkeypatch)


def _with(
    read: Callable[[Frame], Pass], of: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Frame], Pass]:
    def wrong(frame: Frame) -> Pass:
        with monkeypatch.context() as patch:
            patch.setattr(recurrent.Captured, "of", classmethod(of))
            found = read(frame)
            for name in found.names:
                found.edges(name)  # taken apart now
        return found

    return wrong


def copied(seen: Pass) -> dict[str, Tensor]:
    return {name: seen[name].clone() for name in seen.names}


def check_lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read in the midst stays what it was, and is what a graph showed there."""
    found: list[list[Pass]] = []
    for way in ("call", "graph"):
        with monkeypatch.context() as patch:
            if way == "graph":
                by_graph(patch)
            net, read, first = make("gru"), list[Pass](), list[dict[str, Tensor]]()
            with trace(net, keep=2) as told:
                for at, _ in enumerate(updates(net)):
                    if at % 2:
                        read.append(told.last)
                        first.append(copied(told.last))
        assert len(read) > 3
        assert all(
            torch.equal(seen[name], norms)
            for seen, then in zip(read, first, strict=True)
            for name, norms in then.items()
        )
        found.append(read)
    assert max(differs(one, other) for one, other in zip(*found, strict=True)) < EXACT


def test_what_was_read_stays_true(monkeypatch: pytest.MonkeyPatch) -> None:
    check_lasting(monkeypatch)


def test_reading_without_a_copy_fails_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: memory that is written to again."""
    monkeypatch.setattr(Tensor, "clone", lambda self, **_: self)
    with pytest.raises(AssertionError):
        check_lasting(monkeypatch)


@pytest.mark.parametrize("keep", [1, 4])
def test_memory_stays_as_it_is(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, rooms, made = make("lstm"), weakref.WeakSet[kernel.Room](), list[int]()

    class Counted(kernel.Room):
        def __init__(self, call: recurrent.Call) -> None:
            super().__init__(call)
            rooms.add(self)
            made.append(1)

    monkeypatch.setattr(reel, "Room", Counted)
    with trace(net, keep=keep) as told:
        for _ in range(6):
            train(net)
            assert (
                0 < len(rooms) <= keep + 4
            )  # of both sizes of update one that is written to, and one that is free
        assert told.count > 40
        assert len(made) < told.count / 3
        assert len(told.passes) == keep
    train(net)
    del told
    gc.collect()
    assert not rooms


def test_an_error_leaves_the_passes_that_were_made(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that writes to its frame and then finds no memory.

    A class that is not there; a gradient that is not finite.
    """
    net, true = make("lstm"), kernel.step
    with trace(net, keep=2) as told:
        train(net)
        count, seen = told.count, [copied(one) for one in told.passes]

        def failing(what: kernel.FusedStep) -> int:
            true(what)
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(kernel, "step", failing)
            with pytest.raises(MemoryError):
                train(net)
        net.zero_grad()
        wrong = tt.Stream(
            {"inputs": torch.randn(12, 5), "targets": torch.full((12,), 4)},
            lanes=1,
            chunk=12,
            dtype=torch.float64,
        )
        with pytest.raises(IndexError):
            next(tt.updates(net, wrong, nn.CrossEntropyLoss(), gradient=tt.Truncated(12)))
        assert told.count == count
        assert all(
            torch.equal(one[name], norms)
            for one, then in zip(told.passes, seen, strict=True)
            for name, norms in then.items()
        )
        with torch.no_grad():
            next(net.parameters())[1, 2] = torch.nan
        with pytest.raises(RunError, match="is not finite"):
            train(net)
        assert told.count == count + 1  # it was made: the trace says where it blew up
        assert not told["0.layer0.h"].isfinite().all()
    assert calls


def test_updates_and_passes_of_one_s_own_come_in_turn(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def course() -> Trace:
        net, x = (
            make("gru"),
            torch.randn(7, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
        )
        with trace(net, keep=9) as told:
            for at, _ in enumerate(updates(net)):
                if at in {2, 3}:
                    y, _ = net(x, net.initial_state(lanes=2))
                    torch.autograd.grad(y.square().sum(), list(net.parameters()))
        return told

    told = course()
    assert len(calls) == told.count - 2
    by_graph(monkeypatch)
    check_same(told, course())


def test_each_layer_may_have_a_trace_of_its_own(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def course() -> tuple[Trace, Trace]:
        net = stacked()
        _, below, above, _ = net.module.children()
        with trace(above, keep=9) as one:
            train(net)
            with trace(below, keep=9) as other:
                train(net)
        return one, other

    mine = course()
    assert len(calls) == mine[0].count == 2 * mine[1].count
    by_graph(monkeypatch)
    for one, other in zip(mine, course(), strict=True):
        check_same(one, other)


def wrap(net: tt.Carried) -> None:
    layer = next(net.module.children())
    layer.forward = partial(layer.forward)


def wrapped_before(net: tt.Carried) -> Trace:
    wrap(net)
    return trace(net, keep=9)


def wrapped_after(net: tt.Carried) -> Trace:
    found = trace(net, keep=9)
    wrap(net)
    return found


def hooked(net: tt.Carried) -> Trace:
    next(net.module.children()).register_forward_hook(lambda *_: None)
    return trace(net, keep=9)


MORE: dict[str, Callable[[tt.Carried], Trace]] = {
    "tensors": lambda net: trace(net, keep=9, tensors=True),
    "another-module": lambda net: trace(net, keep=9, names={"1": ("y",)}),
    "wrapped-before": wrapped_before,
    "wrapped-after": wrapped_after,
    "hooked": hooked,
}


@pytest.mark.parametrize("opened", MORE)
def test_a_trace_that_must_see_more_is_shown_a_graph(
    opened: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make("lstm")
    with MORE[opened](net) as told:
        train(net)
    assert not calls
    by_graph(monkeypatch)
    net = make("lstm")
    with MORE[opened](net) as seen:
        train(net)
    assert (
        max(differs(one, other) for one, other in zip(told.passes, seen.passes, strict=True))
        < EXACT
    )
    assert "1.y" in told.names or opened != "another-module"


def test_both_edges_of_a_window_that_is_cut_in_two_are_shown(calls: list[int]) -> None:
    net = make("lstm")
    with trace(net) as told:
        train(net, policy=tt.Truncated(7, horizon=20))
        edges = [told.last.edges("0.layer0.h") for _ in updates(net, tt.Truncated(7, horizon=20))]
    assert max(map(len, edges)) == 2
    assert (
        len(calls) < told.count
    )  # the first window and the last begin nowhere but at their first step


def test_a_closed_trace_is_told_no_more_and_its_memory_is_free(calls: list[int]) -> None:
    net = make("lstm")
    with trace(net) as told:
        train(net)
        seen, count = copied(told.last), told.count
        assert LISTENERS
    assert not LISTENERS
    train(net)
    assert len(calls) == 2 * count == 2 * told.count
    assert all(torch.equal(told[name], norms) for name, norms in seen.items())


def test_another_thread_reads_whole_passes() -> None:
    """What is read while updates are made is one of their passes, whichever."""
    net = make("lstm")
    with trace(net, keep=1000) as told:
        train(net)
        train(net)
    true, net, read = [copied(seen) for seen in told.passes], make("lstm"), list[Pass]()
    over, looking = threading.Event(), threading.Event()
    with trace(net) as told:

        def look() -> None:
            while not over.is_set():
                read.extend(told.passes)
                if len(read) > 1:
                    looking.set()

        reader = threading.Thread(target=look)
        reader.start()
        try:
            for update, _ in enumerate(chain(updates(net), updates(net))):
                assert update < 3 or looking.wait(PATIENCE)  # a busy machine may let it begin late
        finally:
            over.set()
            reader.join()
    assert all(
        any(all(torch.equal(seen[name], norms) for name, norms in one.items()) for one in true)
        for seen in set(read)
    )


def test_an_error_while_memory_is_laid_out_costs_that_update_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = stacked()
    seen, real = trace(net, keep=50), kernel.room_for

    def none(*_: Any) -> Any:
        monkeypatch.setattr(kernel, "room_for", real)
        raise MemoryError("once")

    monkeypatch.setattr(kernel, "room_for", none)
    with pytest.raises(MemoryError, match="once"):
        train(net)
    before, count = seen.count, sum(1 for _ in updates(net))
    assert seen.count - before == count > 2


def test_what_a_trace_has_captured_ends_with_it_although_nobody_holds_it() -> None:
    net = stacked()
    seen = trace(net)
    train(net)
    assert any(work._captures for work in works(net))
    seen.close()
    del seen
    gc.collect()
    train(net)
    assert not any(
        work._captures or any(call.squares for call in work._each) for work in works(net)
    )


def works(net: tt.Carried) -> list[Any]:
    form = _forms[net]
    assert form is not None
    return list(form._works.values())
