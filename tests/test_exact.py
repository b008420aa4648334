"""Exact gradients, chunk by chunk, against plain autograd over the whole sequence.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import (
    CreditRecorder,
    PolicyData,
    UpdateGrads,
    deviation,
    exact_updates,
    plain,
    policy_gradients,
)
from quick import examples
from strategies import (
    Rotation,
    Row,
    apart,
    few_short_recordings,
    gradients,
    named,
    recordings,
    some_nets,
    start,
    states_apart,
)
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, ModelError
from throughtime.gradient import executor, segment

EXACT = 1e-10
chunks = st.sampled_from([1, 2, 3, 7, 13, 29, 50, None])  # None: automatic
kept_lane_steps = st.sampled_from([1, 10, 100, 10_000])  # those before are read again


class EmptyLeaf(Rotation):
    """One leaf of its state has no entries, as a buffer of zero delays has."""

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        state = (
            {"h": self.zeros(x), "delays": x.new_zeros(x.shape[1], 0)} if state is None else state
        )
        y, h = self.play(x, state["h"])
        return y, {"h": h, "delays": state["delays"]}


def test_leaves_without_entries_are_carried() -> None:
    net, data = tt.carry(EmptyLeaf().double()), PolicyData.draw(29, 2, 0)
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=7))
    assert deviation(results, plain(net, data)) < EXACT


def test_update_says_what_was_run() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(23, 2, 0, masked=0.3)
    (update,) = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=5))
    y, end = net(data.x, start(net, data.x), data.resets)
    assert (update.steps, update.chunk.steps, update.chunk.valid_steps) == (
        int(data.mask.sum()),
        3,
        int(data.mask[20:].sum()),
    )
    assert (update.outputs - y[20:]).abs().max() < EXACT
    assert not update.outputs.requires_grad
    assert not update.loss.requires_grad
    assert update.weight == update.steps
    assert states_apart(update.state, end) < EXACT
    whole = next(iter(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=500))))
    assert whole.outputs.shape == y.shape


def test_chunk_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic one, which depends on the memory of a step, does not."""
    net = named("hides-layer").net()
    data = PolicyData.draw(97, 1, 5, masked=0.2)
    ((_, _, expected),) = plain(net, data)
    calls, lengths = list[int](), set[int]()
    net.module.register_forward_hook(lambda _, args, __: calls.append(len(args[0])))
    for most in (1, 30_000, 100_000, 10**9):
        monkeypatch.setattr(segment, "MOST_BYTES", most)
        exact_updates(net, data, tt.Exact())
        lengths.add(calls[-1])  # the first segment runs again last
        assert apart(gradients(net), expected) < EXACT
        net.zero_grad()
    assert len(lengths) == 4
    assert {1, 97} < lengths


@examples(15)
@given(
    lengths=few_short_recordings,
    reads=st.lists(st.sampled_from([1, 3, 7, 500]), min_size=2, max_size=2, unique=True),
    chunk=chunks,
    lanes=st.sampled_from([1, 2]),
    kept=kept_lane_steps,
)
@some_nets("hides-layer", "learnt-start")
def test_chunk_of_the_stream_changes_no_bit(
    row: Row, lengths: list[int], reads: list[int], chunk: int | None, lanes: int, kept: int
) -> None:
    lanes, policy, net = min(lanes, sum(lengths)), tt.Exact(chunk=chunk), row.net()
    results = list[UpdateGrads]()
    for read, most in zip(reads, (kept, 10_000), strict=True):
        stream = tt.Stream(recordings(lengths), lanes, read, warm_up=1)
        with mock.patch.object(executor, "KEPT_LANE_STEPS", most):
            results.append(policy_gradients(net, stream, policy))
    first, second = results
    assert deviation(first, second) == 0
    queue = list(tt.Stream(recordings(lengths), lanes, reads[0], warm_up=1))
    assert deviation(policy_gradients(net, queue, policy), first) < EXACT


def test_settings_are_described() -> None:
    assert (
        tt.Exact().describe()
        == "an update for every recording (with several lanes, where all of them start one),"
        " gradients flow back through all of it"
    )
    assert (
        tt.Exact(cut_every=500).describe()
        == "an update every 500 steps, gradients cut there: they flow back at most 500 steps"
    )


def crossing(resets: Tensor | None, mask: Tensor | None) -> dict[int, list[bool]]:
    """Which lanes hand credit back at each step between two segments of 5 steps."""
    data, recorder = PolicyData.draw(20, 2, 0), CreditRecorder(tt.Exact(chunk=5))
    chunk = Chunk.from_tensors(data.x, data.targets, resets=resets, mask=mask)
    list(tt.updates(named("hides-layer").net(), [chunk], nn.MSELoss(), gradient=recorder))
    return {step: (norms > 0).tolist() for step, norms in recorder.arriving.items()}


def test_steps_without_loss_at_the_end_hand_no_credit_back() -> None:
    mask = torch.arange(20).unsqueeze(1).expand(20, 2) < 8
    assert crossing(None, mask) == {5: [True, True]}


def test_clipping_under_a_scaler_is_that_without_one() -> None:
    data, policy = PolicyData.draw(23, 2, 0), tt.Exact(chunk=4, clip_adjoint=0.005)
    usual, scaled = named("hides-layer").net(), named("hides-layer").net()
    plain, recorder = CreditRecorder(policy), CreditRecorder(policy)
    exact_updates(usual, data, plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    exact_updates(scaled, data, recorder, scaler=scaler)
    for step, norms in plain.arriving.items():
        assert torch.allclose(recorder.arriving[step], norms, rtol=1e-9)
    assert any((norms > 0.005).any() for norms in plain.arriving.values())
    grads = {name: g / 2.0**7 for name, g in gradients(scaled).items()}
    assert apart(grads, gradients(usual)) < EXACT


def labelled(steps: int, lanes: int, seed: int, masked: float) -> PolicyData:
    data = PolicyData.draw(steps, lanes, seed, masked=masked)
    return PolicyData(data.x, (data.targets[:, :, 0] > 0.6).long(), data.resets, data.mask)


def test_class_of_no_weight_does_not_count() -> None:
    """Some segments have no other class, so no mean of their own."""
    net, data = named("hides-layer").net(), labelled(29, 1, 0, 0.0)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert any(not part.any() for part in data.targets.split(3))
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=3), loss_fn)
    assert deviation(results, plain(net, data, loss_fn=loss_fn)) < EXACT


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (nn.MSELoss(reduction="sum"), "loss_fn has reduction='sum', expected 'mean'"),
        (nn.CrossEntropyLoss(reduction="sum"), "loss_fn has reduction='sum', expected 'mean'"),
        (
            nn.MSELoss(reduction="none"),
            r"loss_fn returned a tensor of shape \(8, 2\), expected one number.*reduction='none'",
        ),
        (
            lambda y, t: (y - t).square().mean().item(),
            (
                r"loss_fn returned a float, expected one number in a tensor: the mean over its 8"
                r" rows"
            ),
        ),
        (
            lambda y, t: (y.detach() - t).square().mean(),
            "the loss depends on no parameter that requires a gradient",
        ),
    ],
    ids=["sum", "classes' sum", "none", "float", "detached"],
)
def test_loss_that_is_no_mean_is_refused(loss_fn: Any, reason: str) -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(23, 2, 0)
    with pytest.raises(ModelError, match=reason):
        exact_updates(net, data, loss_fn=loss_fn)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"chunk": 0}, "chunk=0: expected a whole number of at least 1"),
        ({"chunk": 10.0}, r"chunk=10\.0: expected a whole number"),
        ({"chunk": "all"}, "chunk='all': expected a whole number"),
        ({"cut_every": 0}, "cut_every=0: expected a whole number of at least 1"),
        ({"cut_every": True}, "cut_every=True: expected a whole number"),
        ({"clip_adjoint": 0.0, "chunk": 5}, r"clip_adjoint=0\.0: expected a norm above 0"),
        ({"clip_adjoint": float("nan"), "chunk": 5}, "clip_adjoint=nan: expected a norm above 0"),
        (
            {"clip_adjoint": 1.0},
            r"their length becomes part of the gradient: give chunk=\.\.\. too",
        ),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tt.Exact(**setting)
