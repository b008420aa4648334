"""Hand-off: a recording cut into parts is played, epoch after epoch, as if it were one.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from quick import examples
from strategies import apart, draw_lanes, gradients, named, recordings, some_nets, start
from throughtime import state as trees
from throughtime.carry import Carried
from throughtime.gradient import Policy

REMEMBERING = some_nets("tensor-state", "hides-layer", "learnt-start", "hides-cell", "dict-state")
Played = dict[tuple[int, int], Tensor]  # outputs by recording and first step of a part


def play(net: Carried, stream: tt.Stream, stride: int = 7) -> Played:
    """The outputs of an epoch at fixed weights, part by part."""
    rows: dict[tuple[int, int], list[Tensor]] = {}
    at: dict[int, tuple[int, int]] = {}
    for update in tt.updates(net, stream, nn.MSELoss(), gradient=tt.Truncated(stride)):
        for lane in range(stream.lanes):
            real = update.chunk.recording[:, lane] >= 0
            if real.any():
                first = (int(update.chunk.recording[0, lane]), int(update.chunk.position[0, lane]))
                rows.setdefault(at.setdefault(lane, first), []).append(update.outputs[real, lane])
    net.zero_grad()
    return {part: torch.cat(outputs) for part, outputs in rows.items()}


def unbroken(net: Carried, source: dict[str, Any]) -> Tensor:
    """The outputs of the whole recording, run at once."""
    x = torch.from_numpy(source["inputs"]).unsqueeze(1)
    with torch.no_grad():
        return net(x, start(net, x))[0][:, 0]


def by_hand(net: Carried, source: dict[str, Any], length: int, epochs: int) -> list[list[Tensor]]:
    """Outputs by epoch and part: each part starts where the one before ended an epoch ago."""
    parts = torch.from_numpy(source["inputs"]).unsqueeze(1).split(length)
    ends: list[Any] = [start(net, parts[0])] * len(parts)
    epoch_outputs: list[list[Tensor]] = []
    with torch.no_grad():
        for epoch in range(epochs):
            entering = [
                start(net, part) if i == 0 or epoch == 0 else ends[i - 1]
                for i, part in enumerate(parts)
            ]
            results = [net(part, state) for part, state in zip(parts, entering, strict=True)]
            ends = [state for _, state in results]
            epoch_outputs.append([outputs[:, 0] for outputs, _ in results])
    return epoch_outputs


def check_hand_off(net: Carried, lengths: list[int], lanes: int, epochs: int) -> None:
    """Every epoch as by hand.

    And as many epochs as a recording has parts give the outputs of one unbroken run.
    """
    sources = recordings(lengths)
    stream = tt.Stream(sources, lanes, 50, hand_off=True)
    length = stream.steps
    oracle = [by_hand(net, source, length, epochs) for source in sources]
    for epoch in range(epochs):
        results = play(net, stream)
        for i, source in enumerate(sources):
            parts = [results[i, at] for at in range(0, lengths[i], length)]
            assert (
                max(
                    float((p - q).abs().max()) for p, q in zip(parts, oracle[i][epoch], strict=True)
                )
                < 1e-12
            )
            if epoch >= len(parts) - 1:
                assert float((torch.cat(parts) - unbroken(net, source)).abs().max()) < 1e-12


@REMEMBERING
def test_as_many_epochs_as_lanes_play_the_recording_unbroken(row: Any) -> None:
    check_hand_off(row.net(), [103], 4, 5)
    net = row.net()
    stream = tt.Stream(recordings([103]), 4, 50, hand_off=True)
    cold = torch.cat([results for _, results in sorted(play(net, stream).items())])
    assert (
        float((cold - unbroken(net, recordings([103])[0])).abs().max()) > 1e-3
    )  # the mutant: a single, cold epoch


@examples(15)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3), wish=st.integers(2, 7))
def test_epochs_with_hand_off_equal_the_recording_run_by_hand(
    lengths: list[int], wish: int
) -> None:
    lanes = max(draw_lanes(lengths, wish), len(lengths) + 1) if sum(lengths) > len(lengths) else 1
    if lanes > 1:
        check_hand_off(named("hides-layer").net(), lengths, lanes, lanes + 1)


POLICIES: dict[str, Policy] = {
    "horizon": tt.Truncated(6, 15),
    "exact": tt.Exact(chunk=10),
    "segment": tt.Exact(cut_every=9, chunk=4),
    "randomized": tt.Randomized(8),
}


@pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
def test_every_policy_hands_on_the_states_in_which_lanes_ended(policy: Policy) -> None:
    net, sources = named("tensor-state").net(), recordings([59])
    stream = tt.Stream(sources, 4, 50, hand_off=True)
    x = torch.from_numpy(sources[0]["inputs"]).unsqueeze(1)
    for _ in range(4):
        run = tt.updates(net, stream, nn.MSELoss(), gradient=policy)
        for _ in run:
            net.zero_grad()
    with torch.no_grad():
        ends = [net(x[: 15 * lanes], start(net, x))[1] for lanes in (1, 2, 3)]
    for lane, end in enumerate(ends, 1):
        got = trees.select(stream._entering_state(net), [lane])
        assert apart(dict(trees.leaves(got)), dict(trees.leaves(end))) < 1e-12


@pytest.mark.parametrize(
    "policy",
    [tt.Truncated(15), tt.Exact(chunk=4), tt.Exact(cut_every=15)],
    ids=["truncated", "exact", "segment"],
)
def test_first_lane_starts_from_the_learnt_state_and_gives_it_its_gradient(policy: Policy) -> None:
    net, sources = named("learnt-start").net(), recordings([60])
    stream = tt.Stream(sources, 4, 50, hand_off=True)
    list(tt.updates(net, stream, nn.MSELoss(), gradient=policy))
    net.zero_grad()
    entering, chunk = stream._entering_state(net), stream.read(0, 15)
    next(tt.updates(net, stream, nn.MSELoss(), gradient=policy))
    got = gradients(net)
    net.zero_grad()
    first = chunk.resets.clone()
    first[:, 1:] = False  # the others go on
    y, _ = net(chunk.inputs, entering, first)
    assert chunk.targets is not None
    nn.functional.mse_loss(y.flatten(0, 1), chunk.targets.flatten(0, 1)).backward()
    expected = gradients(net)
    assert apart(got, expected) < 1e-12
    assert float(got["module.start"].norm()) > 1e-3
    net.zero_grad()
    y, _ = net(
        chunk.inputs, entering, torch.zeros_like(first)
    )  # the mutant: it goes on from the last lane of all
    nn.functional.mse_loss(y.flatten(0, 1), chunk.targets.flatten(0, 1)).backward()
    assert apart(gradients(net), expected) > 1e-3


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"warm_up": 3}, tt.Truncated(6)),
        ({"warm_up": 3}, tt.Truncated(6, 9)),
    ],
)
def test_warm_up_counts_where_a_state_is_cold_only(options: dict[str, Any], policy: Policy) -> None:
    net = named("tensor-state").net()
    stream = tt.Stream(recordings([50]), 4, 50, hand_off=True, **options)
    counted = [
        sum(update.steps for update in tt.updates(net, stream, nn.MSELoss(), gradient=policy))
        for _ in range(3)
    ]
    assert counted == [50 - 4 * 3, 50 - 3, 50 - 3]


def test_without_hand_off_every_epoch_is_as_cold_as_the_first() -> None:
    net = named("tensor-state").net()
    stream = tt.Stream(recordings([103]), 4, 50)
    first, second = play(net, stream), play(net, stream)
    assert all(torch.equal(first[part], second[part]) for part in first)


@pytest.mark.filterwarnings("ignore:lanes=4 for 1 recording")  # its parts are what is tested
def test_evaluation_with_a_handing_stream_starts_cold() -> None:
    net, source = named("tensor-state").net(), recordings([59])
    stream = tt.Stream(source, 4, 50, hand_off=True)
    cold = tt.evaluate(net, tt.Stream(source, 4, 50, hand_off=True), nn.MSELoss()).loss
    list(tt.updates(net, stream, nn.MSELoss(), gradient=tt.Truncated(6)))
    assert tt.evaluate(net, stream, nn.MSELoss()).loss == cold
    assert math.isfinite(cold)
