"""Evaluation and streaming, chunk by chunk and step by step: the same numbers as one long forward,
and nothing left behind.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import copy
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from quick import examples
from strategies import (
    FEATURES,
    HidesLayer,
    Row,
    gradients,
    inputs,
    named,
    recordings,
    some_nets,
    start,
    weights,
)
from throughtime.carry import Carried
from throughtime.errors import DataError, RunError


def one_forward(net: Carried, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(x, start(net, x))[0]


@some_nets("lstm", "hides-layer")
def test_a_recording_in_parts_equals_one_forward(row: Row) -> None:
    net, x = row.net(), inputs(200, 1)
    whole, predictor = one_forward(net, x), tt.Predictor(net, 1)
    parts = [predictor(part) for part in x.split([1, 97, 64, 3, 35])]
    assert (torch.cat(parts) - whole).abs().max() <= 1e-12
    outputs, state = tt.predict(net, {"inputs": x[:, 0].numpy()}, chunk=97)
    assert (outputs - whole[:, 0]).abs().max() <= 1e-12
    assert tt.state.lanes(state) == 1
    assert not any(leaf.requires_grad for leaf in (outputs, *tt.state.tensors(state)))


def test_predict_writes_into_out(tmp_path: Path) -> None:
    net, x, path = named("hides-layer").net(), inputs(50, 1)[:, 0].numpy(), tmp_path / "out.npy"
    expected, _ = tt.predict(net, {"inputs": x})
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.float64, shape=(50, 2))
    result, _ = tt.predict(net, {"inputs": x}, chunk=7, out=mapped)
    assert result is mapped
    mapped.flush()
    assert np.abs(np.load(path) - expected.numpy()).max() < 1e-12


def test_resets_within_a_call_start_lanes_anew() -> None:
    net, x = named("hides-layer").net(), inputs(30, 2)
    resets = torch.zeros(30, 2, dtype=torch.bool)
    resets[11, 1] = True
    y = tt.Predictor(net, lanes=2)(x, resets)
    assert (y[11:, 1:] - one_forward(net, x[11:, 1:])).abs().max() < 1e-12
    assert (y[:, :1] - one_forward(net, x[:, :1])).abs().max() < 1e-12


SOURCE = recordings([30, 11], seed=9)
EVALUATIONS: dict[str, Callable[[Carried], Any]] = {
    "evaluate": lambda net: tt.evaluate(net, tt.Stream(SOURCE, 2, 7), nn.MSELoss()),
    "predict": lambda net: tt.predict(net, SOURCE[0], chunk=7),
    "Predictor": lambda net: tt.Predictor(net, lanes=2)(inputs(4, 2)),
    "settling_time": lambda net: tt.settling_time(net, SOURCE, span=9),
}


@pytest.mark.parametrize("which", EVALUATIONS)
def test_evaluation_leaves_modes_random_state_gradients_and_weights_untouched(which: str) -> None:
    net = tt.carry(nn.Sequential(HidesLayer(dropout=0.5), frozen := nn.Dropout(0.5)).double())
    net.train()
    frozen.eval()
    x = inputs(3, 1)
    net(x, net.initial_state(1, like=x))[0].sum().backward()
    before, weight, random = gradients(net), weights(net), torch.get_rng_state()
    EVALUATIONS[which](net)
    assert [name for name, m in net.named_modules() if not m.training] == ["module.1"]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], g) for name, g in gradients(net).items())
    assert all(torch.equal(weight[name], w) for name, w in weights(net).items())


def with_gaps(lengths: list[int]) -> list[dict[str, Any]]:
    """Recordings with missing targets, so that chunks differ in their number of valid steps."""
    result = recordings(lengths, seed=4)
    for recording in result:
        recording["targets"][1::3] = np.nan
        recording["targets"][:2] = np.nan
    return result


def direct(net: Carried, source: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Outputs and targets of the valid steps of one recording, alone."""
    y = one_forward(net, torch.from_numpy(source["inputs"]).unsqueeze(1))[:, 0]
    targets = torch.from_numpy(source["targets"])
    valid = ~targets.isnan().any(1)
    return y[valid], targets[valid]


@pytest.mark.parametrize("lanes", [3, None])
def test_loss_and_figures_equal_a_direct_computation(lanes: int | None) -> None:
    """On a stream, and of recordings, which are evaluated whole."""
    sources, net = with_gaps([31, 7, 20, 13]), named("hides-layer").net()
    data = sources if lanes is None else tt.Stream(sources, lanes, 5)
    result = tt.evaluate(net, data, nn.MSELoss(), metrics=tt.metrics.Regression())
    pairs = {source["name"]: direct(net, source) for source in sources}
    y, targets = (torch.cat(parts) for parts in zip(*pairs.values(), strict=True))
    assert (result.steps, type(result.loss)) == (len(targets), float)
    assert result.loss == pytest.approx((y - targets).square().mean().item(), rel=1e-12)
    assert result.metrics["rmse"] == pytest.approx(math.sqrt(result.loss), rel=1e-12)
    assert set(result.recordings) == set(pairs)
    for name, (outputs, wanted) in pairs.items():
        score = tt.metrics.Regression()
        score.update(outputs, wanted)
        assert result.recordings[name] == pytest.approx(score.compute(), rel=1e-9)


def test_without_targets_nothing_is_scored_and_nothing_valid_gives_nan() -> None:
    for data in ([], tt.Stream({"inputs": np.zeros((9, FEATURES))}, 1, 4)):
        with pytest.raises(DataError):
            tt.evaluate(named("hides-layer").net(), data, nn.MSELoss())
    net, source = named("hides-layer").net(), recordings([9])[0]
    nothing = source | {"targets": np.full((9, 2), np.nan)}
    result = tt.evaluate(net, [nothing], nn.MSELoss(), metrics=tt.metrics.Regression())
    assert (result.steps, result.recordings) == (0, {})
    assert math.isnan(result.loss)
    assert math.isnan(result.metrics["rmse"])


def streamed(lanes: int = 3) -> tuple[Carried, Tensor]:
    torch.manual_seed(0)
    net = tt.carry(nn.Sequential(nn.GRU(4, 6), nn.Linear(6, 2)))
    return net, torch.randn(12, lanes, 4)


def test_an_input_that_is_not_finite_is_refused_and_the_state_is_as_it_was() -> None:
    net, x = streamed()
    predictor, twin = tt.Predictor(net, lanes=3), tt.Predictor(net, lanes=3)
    predictor(x[:5])
    twin(x[:5])
    wrong = x[5:9].clone()
    wrong[2, 1, 3] = -math.inf
    with pytest.raises(DataError, match=r"step 2 of the call, lane 1, column 3.*on_nan='hold'"):
        predictor(wrong)
    assert torch.equal(predictor(x[5:9]), twin(x[5:9]))


def test_reset_starts_the_lane_anew_after_the_step() -> None:
    net, x = streamed()
    wrong = x.clone()
    wrong[4, 1, 0] = wrong[11, 2, 0] = math.nan
    predictor = tt.Predictor(net, lanes=3, on_nan="reset")
    y, clean = predictor(wrong), tt.Predictor(net, lanes=3)(x)
    torch.testing.assert_close(y[:, 0], clean[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(y[5:, 1], tt.Predictor(net)(x[5:, 1]), rtol=0, atol=1e-6)
    predictor.reset([0])
    later = predictor(x[:3])  # lane 2 starts anew after the step, lane 0 by its number
    fresh = tt.Predictor(net, lanes=3)(x[:3])
    torch.testing.assert_close(later[:, [0, 2]], fresh[:, [0, 2]], rtol=0, atol=1e-6)
    assert (later[:, 1] - fresh[:, 1]).abs().max() > 1e-3


@examples(20)
@given(st.data())
def test_hold_is_the_stream_without_the_step_however_it_is_cut(data: st.DataObject) -> None:
    net, x = streamed(2)
    missing = torch.tensor(data.draw(st.lists(st.booleans(), min_size=12, max_size=12)))
    wrong = x.clone()
    wrong[missing, 1] = math.nan
    predictor, start, outputs = tt.Predictor(net, 2, on_nan="hold"), 0, list[Tensor]()
    while start < 12:
        stop = start + data.draw(st.integers(1, 12 - start))
        outputs.append(predictor(wrong[start:stop]))
        start = stop
    y = torch.cat(outputs)[:, 1]
    assert y[missing].isnan().all()
    if not missing.all():
        expected = tt.Predictor(net)(x[~missing, 1])
        torch.testing.assert_close(y[~missing], expected, rtol=0, atol=1e-6)


def test_weights_and_states_that_are_not_finite_are_refused_by_name() -> None:
    net, x = streamed()
    predictor = tt.Predictor(net, lanes=3)
    predictor(x)
    state, bias = predictor.state, net.module.get_parameter("1.bias").data
    predictor.state = {"0": torch.full((3, 1, 6), math.nan), "1": ()}
    with pytest.raises(RunError, match=r"predictor\.reset\(\)"):
        predictor(x)
    predictor.state, bias[0] = state, math.nan
    for call in (lambda: predictor(x), lambda: tt.predict(net, x[:, 0])):
        with pytest.raises(RunError, match=r"the weight '1\.bias' is not finite"):
            call()


def test_a_second_thread_is_refused_and_the_first_goes_on() -> None:
    net, x = streamed()
    started, finish = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        started.set()
        finish.wait(10)

    predictor, results = tt.Predictor(net, lanes=3), list[Tensor]()
    handle = net.module.get_submodule("0").register_forward_hook(wait)
    thread = threading.Thread(target=lambda: results.append(predictor(x)))
    thread.start()
    assert started.wait(10)
    with pytest.raises(RunError, match="two threads call this predictor at once"):
        predictor(x)
    finish.set()
    thread.join()
    handle.remove()
    assert torch.equal(results[0], tt.Predictor(net, lanes=3)(x))
    predictor(x)


def test_steps_give_the_bits_of_calls() -> None:
    net, rows = streamed()
    step, call = tt.Predictor(net, 3), tt.Predictor(net, 3)
    for row in rows[:5]:
        assert torch.equal(step.step(row), call(row[None])[0])
    call = copy.deepcopy(step)
    assert all(torch.equal(step.step(row), call(row[None])[0]) for row in rows[5:])
    assert all(map(torch.equal, tt.state.tensors(step.state), tt.state.tensors(call.state)))
    assert all(module.training for module in net.modules())


def test_inputs_of_another_width_or_type_are_named_with_what_the_net_expects() -> None:
    predictor = tt.Predictor(tt.carry(nn.LSTM(1, 4)))
    with pytest.raises(RuntimeError, match="Expected 1, got 2") as caught:
        predictor.step(np.zeros(2))
    assert "the inputs are (1, 1, 2), torch.float32" in caught.value.__notes__[0]
    with pytest.raises(DataError, match=r"whole numbers \(torch.int64\)"):
        predictor.step(np.zeros((1,), int))
    tokens = tt.Predictor(tt.carry(nn.Sequential(nn.Embedding(256, 4), nn.LSTM(4, 4))))
    assert tokens(torch.tensor(list(b"text"))).shape == (4, 4)
    with pytest.raises(DataError):
        tokens.step(torch.tensor([256]))
