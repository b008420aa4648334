"""Whether the loop is sound: yes for every way to train, and no as soon as the loop is not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test_run import finish, settings, write_recordings
from throughtime import state as trees
from throughtime.app import replayed as module
from throughtime.app.audit import Look, Question, look_at
from throughtime.app.replayed import Check, Replayed, replayed
from throughtime.app.report.of_replay import parts, verdict
from throughtime.app.report.page import Table
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.gradient import truncated

CARRIED, CUT, FREE, ORDER, ONCE = range(5)


def looked(place: Path, lengths: tuple[int, int] = (63, 257), **more: Any) -> Look:
    """A run on recordings that end in the middle of a stride."""
    usual = {"updates": 30, "lr": 0.02, "dtype": "float64"} | more
    values = settings(
        write_recordings(place / "data", lengths=(*lengths, 100)), place / "run", **usual
    )
    folder = finish({key: value for key, value in values.items() if value is not None})
    return look_at(folder, Question(horizons=(10,), max_lag=10), None, None, None, None)


def checks(look: Look) -> tuple[Check, ...]:
    found = replayed(look.net, look.stream, look.loss_fn, look.config)
    assert found is not None
    return found.checks


ROWS: dict[str, dict[str, Any]] = {
    "stride": {},
    "horizon": {"horizon": 35},
    "a horizon longer than what is played": {"horizon": 1000},
    "a stride of one": {"stride": 1, "horizon": 3},
    "warm-up": {"warm_up": 7},
    "weights": {"class_weights": "balanced"},
    "regress": {"task": "regress"},
    "gru": {"model": "gru", "layers": 2},
    "rnn": {"model": "rnn", "horizon": 25},
    "a reset within a stride": {"lanes": 1, "stride": 50, "lengths": (63, 63)},
    "a reset within a horizon": {"lanes": 1, "stride": 25, "horizon": 60, "lengths": (63, 63)},
    "a reset within a segment": {
        "lanes": 1,
        "lengths": (63, 70),
        "exact": True,
        "stride": None,
        "segment": 70,
    },
    "hand-off": {"lanes": 4, "hand_off": True},
    "segment": {"exact": True, "stride": None, "segment": 30},
    "exact": {"exact": True, "stride": None, "updates": 2},
}


@pytest.mark.parametrize("more", list(ROWS.values()), ids=list(ROWS))
def test_the_loop_of_every_setting_is_sound(tmp_path: Path, more: dict[str, Any]) -> None:
    look = looked(tmp_path, **more)
    assert [(check.holds, check.seen) for check in checks(look) if check.holds is not True] == []
    assert all(weight.grad is None for weight in look.net.parameters())


def test_windows_carry_nothing_and_are_not_asked(tmp_path: Path) -> None:
    look = looked(tmp_path, train_on="windows")
    assert replayed(look.net, look.stream, look.loss_fn, look.config) is None


def broken(look: Look) -> set[int]:
    return {i for i, check in enumerate(checks(look)) if check.holds is False}


REAL = truncated.run_window


def never_carried(net: Carried, chunk: Chunk, state: Any, *rest: Any) -> Any:
    return REAL(net, chunk, trees.map_leaves(torch.zeros_like, state), *rest)


def other_lanes(net: Carried, chunk: Chunk, state: Any, *rest: Any) -> Any:
    return REAL(net, chunk, trees.map_leaves(lambda leaf: leaf.flip(0), state), *rest)


def cut_in_the_middle(net: Carried, chunk: Chunk, state: Any, plan: Any) -> Any:
    run = REAL(net, chunk, state, plan)
    return run._replace(outputs=torch.cat([run.outputs[:5].detach(), run.outputs[5:]]))


def weighed_wrongly(net: Carried, chunk: Chunk, state: Any, plan: Any) -> Any:
    run = REAL(net, chunk, state, plan)
    run.outputs.register_hook(lambda gradient: 1.1 * gradient)
    return run


@pytest.mark.parametrize(
    ("mutant", "fails"),
    [
        (never_carried, {CARRIED, CUT}),
        (other_lanes, {CARRIED, CUT}),
        (cut_in_the_middle, {CUT}),
        (weighed_wrongly, {CUT}),
    ],
)
def test_a_loop_with_a_fault_is_not_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Any, fails: set[int]
) -> None:
    look = looked(tmp_path)
    assert broken(look) == set()
    monkeypatch.setattr(truncated, "whole_update", lambda *_: None)  # which runs no window
    monkeypatch.setattr(truncated, "run_window", mutant)
    assert broken(look) == fails


def test_a_recording_that_does_not_start_from_zero_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = looked(tmp_path, (63, 63), lanes=1, stride=50)
    assert checks(look)[ORDER].seen.endswith("2 recordings or parts begin")
    real = Carried.forward
    first: list[bool] = []

    def deaf(net: Carried, x: Tensor, state: Any, resets: Tensor | None = None) -> Any:
        kept, first[:] = (resets if not first else None), [True]
        return real(net, x, state, kept)

    monkeypatch.setattr(truncated, "whole_update", lambda *_: None)  # which calls no forward
    monkeypatch.setattr(Carried, "forward", deaf)
    assert CARRIED in broken(look)


def played(look: Look) -> Any:
    found = module._played(look.net, look.stream, look.loss_fn, 10, 10, exact=False)
    assert found is not None
    return found


def test_a_state_with_a_graph_is_noticed(tmp_path: Path) -> None:
    found = played(looked(tmp_path))
    found.updates[1] = replace(found.updates[1], state=torch.zeros(2, 8, requires_grad=True) * 1)
    check = module._free(found)
    assert check.holds is False
    assert check.seen.startswith("1 of ")


def test_steps_out_of_order_are_noticed() -> None:
    position = torch.tensor([[0, 5], [1, 6], [3, 7], [4, 0]])
    resets = torch.tensor([[True, False], [False, False], [False, False], [False, True]])
    chunk = Chunk.from_tensors(torch.zeros(4, 2, 1), resets=resets, position=position)
    check = module._in_order(chunk)
    assert check.seen == "1 of 5 steps do not follow the one before; 2 recordings or parts begin"
    assert check.holds is False


def test_steps_that_are_counted_twice_are_noticed(tmp_path: Path) -> None:
    found = played(looked(tmp_path))
    found.updates[0] = replace(found.updates[0], steps=found.updates[0].steps + 1)
    assert module._once(found).holds is False


def test_a_net_without_a_past_cannot_tell_whether_it_is_carried(tmp_path: Path) -> None:
    look = looked(tmp_path, model="rnn")
    with torch.no_grad():
        layer = look.net.module.get_submodule("recurrent")
        assert isinstance(layer, nn.RNN)
        layer.get_parameter("weight_hh_l0").zero_()
    check = checks(look)[CARRIED]
    assert check.holds is None
    assert "too little of its state to tell" in check.seen
    said = verdict(Replayed(1, 1, (check,)))
    assert (
        said
        == "Yes: all that was measured holds, 0 of 1. The others cannot be told by these figures."
    )


def test_what_does_not_hold_is_said_first_and_by_its_code() -> None:
    laws = (
        Check("No graph outlives its update", "TT104, TT202", "1 of 8", False),
        Check("Steps follow one another", "TT207", "0 of 3", True),
    )
    found = Replayed(4, 400, laws)
    text, table = parts(found)
    assert str(text).startswith(
        "Text(paragraphs=\"No: 'No graph outlives its update' does not hold (TT104, TT202): 1 of 8."
    )
    assert isinstance(table, Table)
    assert [row[1] for row in table.rows] == ["no", "yes"]
