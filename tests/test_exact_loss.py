"""What the loss of an exact gradient may be, and where it may come from: weighted as the whole mean
is, or refused.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import throughtime as tt
from policy_data import PolicyData, deviation, exact_updates, plain, policy_gradients
from quick import examples
from strategies import apart, named, recordings, seeds
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.gradient import Objective

EXACT = 1e-10


def labelled(steps: int, lanes: int, seed: int, masked: float) -> PolicyData:
    data = PolicyData.draw(steps, lanes, seed, masked=masked)
    return PolicyData(data.x, (data.targets[:, :, 0] > 0.6).long(), data.resets, data.mask)


WEIGHTED: dict[str, Any] = {
    "cross entropy": nn.CrossEntropyLoss,
    "smoothed": partial(nn.CrossEntropyLoss, label_smoothing=0.1),
    "nll": nn.NLLLoss,
}


def weights() -> Tensor:
    return torch.tensor([0.3, 5.0], dtype=torch.float64)


@examples(15)
@given(
    steps=st.sampled_from([1, 7, 29]),
    chunk=st.sampled_from([1, 2, 3, 7, 50, None]),
    lanes=st.sampled_from([1, 2]),
    masked=st.sampled_from([0.0, 0.6]),
    seed=seeds,
)
@pytest.mark.parametrize("make", list(WEIGHTED.values()), ids=list(WEIGHTED))
def test_class_weights_give_the_gradient_of_the_whole_mean(
    make: Any, steps: int, chunk: int | None, lanes: int, masked: float, seed: int
) -> None:
    net, data = named("hides-layer").net(), labelled(steps, lanes, seed, masked)
    loss_fn = make(weight=weights())
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=chunk), loss_fn)
    assert deviation(results, plain(net, data, loss_fn=loss_fn)) < EXACT


def test_class_weights_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: segments weighted by their valid steps."""
    net, data, loss_fn = (
        named("hides-layer").net(),
        labelled(29, 2, 0, 0.3),
        nn.CrossEntropyLoss(weight=weights()),
    )
    expected = plain(net, data, loss_fn=loss_fn)
    monkeypatch.setattr(Objective, "weight", lambda _, chunk: chunk.valid_steps)
    assert (
        deviation(policy_gradients(net, [data.chunk], tt.Exact(chunk=3), loss_fn), expected) > 1e-4
    )


def test_class_of_no_weight_does_not_count() -> None:
    """Some segments have no other class, so no mean of their own."""
    net, data = named("hides-layer").net(), labelled(29, 1, 0, 0.0)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert any(not part.any() for part in data.targets.split(3))
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=3), loss_fn)
    assert deviation(results, plain(net, data, loss_fn=loss_fn)) < EXACT


def test_class_that_the_loss_ignores_does_not_count() -> None:
    net, data = named("hides-layer").net(), labelled(29, 1, 0, 0.0)
    loss_fn = nn.CrossEntropyLoss(ignore_index=1)
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=3), loss_fn)
    ((_, _, expected),) = plain(net, data, loss_fn=loss_fn)
    assert apart(results[0][2], expected) < EXACT


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


def test_frozen_net_is_refused() -> None:
    net = named("hides-layer").net().requires_grad_(requires_grad=False)
    with pytest.raises(
        ModelError, match="the loss depends on no parameter that requires a gradient"
    ):
        exact_updates(net, PolicyData.draw(23, 2, 0))


def some_chunks() -> list[Chunk]:
    return list(tt.Stream(recordings([40, 30]), lanes=2, chunk=5, seed=None))


@pytest.mark.parametrize(
    "policy",
    [tt.Exact(), tt.Exact(chunk=4), tt.Exact(cut_every=10), tt.Exact(cut_every=10, chunk=4)],
    ids=repr,
)
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (lambda: (chunk for chunk in some_chunks()), "generator"),
        (lambda: iter(some_chunks()), "list_iterator"),
        # it takes any sequence
        (lambda: DataLoader(some_chunks(), batch_size=None), "DataLoader"),  # pyright: ignore[reportArgumentType]
    ],
    ids=["generator", "iterator", "loader"],
)
def test_chunks_that_come_only_once_are_refused(
    policy: tt.Exact, source: Callable[[], Any], kind: str
) -> None:
    net = named("hides-layer").net()
    with pytest.raises(
        DataError,
        match=(
            rf"come from a {kind}, which gives each of them once: give tt\.updates a tt\.Stream, or"
            r" a list of chunks"
        ),
    ):
        list(tt.updates(net, source(), nn.MSELoss(), gradient=policy))
    assert all(p.grad is None for p in net.parameters())


def test_list_of_chunks_is_as_good_as_the_stream() -> None:
    net = named("hides-layer").net()
    for policy in (
        tt.Exact(),
        tt.Exact(chunk=4),
        tt.Exact(cut_every=10),
        tt.Exact(cut_every=10, chunk=4),
    ):
        stream = tt.Stream(recordings([40, 30]), lanes=2, chunk=5, seed=None)
        for chunks in (some_chunks(), tuple(some_chunks())):
            assert (
                deviation(
                    policy_gradients(net, chunks, policy), policy_gradients(net, stream, policy)
                )
                < EXACT
            )


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


def test_recordings_without_targets_are_refused_by_a_loss_of_targets() -> None:
    net, stream = named("hides-layer").net(), tt.Stream({"inputs": np.zeros((9, 3))}, 1, 5)
    with pytest.raises(DataError, match="have no targets"):
        next(tt.updates(net, stream, nn.MSELoss(), gradient=tt.Exact()))
