"""Former silent faults: a state of another net, losses of no weight, features out of range."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import DataError
from throughtime.gradient import Update

LONG = {
    "inputs": np.random.default_rng(0).normal(size=(120, 3)),
    "targets": np.random.default_rng(1).normal(size=120),
}


def net() -> Carried:
    return tt.carry(nn.Sequential(nn.GRU(3, 4), nn.Linear(4, 1))).double()


def handing() -> tt.Stream:
    return tt.Stream(LONG, lanes=3, chunk=10, hand_off=True)


def play(carried: Carried, stream: tt.Stream) -> list[Update]:
    return list(tt.updates(carried, stream, nn.MSELoss(), gradient=tt.Truncated(10)))


def test_states_are_handed_on_to_the_net_that_left_them_alone() -> None:
    stream, first, second = handing(), net(), net()
    play(first, stream)
    assert play(second, stream)[0].chunk.resets[0].all()  # cold
    play(second, stream)
    assert play(second, stream)[0].chunk.resets[0].tolist() == [True, False, False]


def test_states_of_an_epoch_that_another_loop_has_advanced_are_refused() -> None:
    stream, mine = handing(), net()
    play(mine, stream)
    with pytest.warns(UserWarning, match="cuts recordings"):  # it hands on between parts
        tt.evaluate(mine, stream, nn.MSELoss())
    with pytest.raises(
        DataError,
        match=(r"handed on are for epoch 1, and the stream is in epoch 2: .* a Stream of its own"),
    ):
        play(mine, stream)


@pytest.mark.parametrize(
    "twin",
    [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))],
    ids=["copied", "pickled"],
)
def test_a_copy_of_a_stream_starts_cold(twin: Any) -> None:
    stream, mine = handing(), net()
    play(mine, stream)
    assert play(mine, twin(stream))[0].chunk.resets[0].all()


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(ignore_index=255),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 0.0]).double()),
    ],
    ids=["ignored", "without weight"],
)
@pytest.mark.parametrize(
    "policy",
    [tt.Truncated(5), tt.Truncated(5, 12), tt.Exact(cut_every=5)],
    ids=str,
)
def test_steps_that_weigh_nothing_in_the_loss_make_no_update(
    loss_fn: nn.CrossEntropyLoss, policy: Any
) -> None:
    labels = np.full(20, 255 if loss_fn.weight is None else 2)
    labels[:5] = 1
    stream = tt.Stream({"inputs": LONG["inputs"][:20], "targets": labels}, lanes=1, chunk=5)
    carried = tt.carry(nn.Sequential(nn.GRU(3, 4), nn.Linear(4, 3))).double()
    losses = [update.loss for update in tt.updates(carried, stream, loss_fn, gradient=policy)]
    assert len(losses) == 1
    assert bool(losses[0].isfinite())


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_static_features_beside_whole_numbers_have_a_type_that_holds_both(dtype: Any) -> None:
    source = {"inputs": np.zeros((9, 2), dtype=np.int16), "static": [0.7, 2.9]}
    chunk = next(iter(tt.Stream(source, lanes=1, chunk=4, dtype=dtype)))
    expected = torch.tensor([0.0, 0.0, 0.7, 2.9], dtype=dtype or torch.float64)
    torch.testing.assert_close(chunk.inputs[0, 0], expected)


def test_a_missing_input_leaves_the_others_of_its_step() -> None:
    values = np.ones((6, 2))
    values[2, 1] = np.nan
    chunk = next(
        iter(
            tt.Stream(
                {"inputs": values, "targets": np.zeros(6), "static": [0.7]},
                lanes=1,
                chunk=6,
                missing="mask",
            )
        )
    )
    assert chunk.inputs[2, 0].tolist() == [1.0, 0.0, 0.7]
    assert chunk.mask[:, 0].tolist() == [True, True, False, True, True, True]


def test_a_recording_without_events_goes_with_those_that_have_some() -> None:
    inputs = np.zeros((4, 1))
    sources = [
        {"inputs": inputs, "intervals": ([], [], [])},
        {"inputs": inputs, "intervals": ([1], [3], [2])},
    ]
    for order in (sources, sources[::-1]):
        chunk = next(iter(tt.Stream(order, lanes=2, chunk=4, seed=None)))
        assert chunk.targets is not None
        assert chunk.targets.dtype == torch.int64
        assert chunk.valid_steps == 2
