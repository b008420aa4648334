"""The credit that crosses the edges of chunks: its norms, and what becomes of it if it is clipped.

Shapes: `T` steps, `B` lanes, `E` edges.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import PolicyData, data_for, exact_updates
from quick import examples
from strategies import Row, Weights, apart, gradients, named, recordings, seeds, some_nets, start
from throughtime.gradient import _backward
from throughtime.gradient._backward import VJP
from throughtime.gradient._segments import Cotangents, Segment

CLOSE = 1e-6  # norms are float32
several_leaves = some_nets("tensor-state", "lstm", "hides-two-layers", "namedtuple-state")


def norms(leaves: Sequence[Tensor]) -> Tensor:
    return torch.stack([leaf.flatten(1).square().sum(1) for leaf in leaves]).sum(0).sqrt()


def by_hand(
    net: tt.Carried, data: PolicyData, chunk: int, most: float, *, lanes_together: bool = False
) -> tuple[Weights, list[Tensor]]:
    """By hand: each chunk starts from a leaf; its clipped gradient goes to the chunk before."""
    entering, played, state = list[Any](), list[tuple[Tensor, Any]](), start(net, data.x)
    for x, resets in zip(data.x.split(chunk), data.resets.split(chunk), strict=True):
        entering.append(tt.state.map_leaves(lambda leaf: leaf.detach().requires_grad_(), state))
        y, state = net(x, entering[-1], resets)
        played.append((y, state))
    results, back = list[Tensor](), None
    for index in reversed(range(len(played))):
        y, state = played[index]
        part = slice(index * chunk, index * chunk + chunk)
        loss = (y - data.targets[part])[data.mask[part]].square().sum() / (
            int(data.mask.sum()) * y.shape[2]
        )
        torch.autograd.backward(
            [loss, *(tt.state.tensors(state) if back else [])],
            [None, *(back or [])],
            retain_graph=True,
        )
        back = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in tt.state.tensors(entering[index])
        ]
        if index:
            results.append(norms(back))
            lengths = (
                results[-1].square().sum().sqrt().expand_as(results[-1])
                if lanes_together
                else results[-1]
            )
            back = [
                leaf * (most / lengths).clamp(max=1).view(-1, *[1] * (leaf.dim() - 1))
                for leaf in back
            ]
    return gradients(net), results


@examples(15)
@given(
    steps=st.sampled_from([5, 13, 29]),
    chunk=st.sampled_from([1, 3, 7]),
    lanes=st.sampled_from([1, 3]),
    resets=st.sampled_from([0.0, 0.1]),
    masked=st.sampled_from([0.0, 0.5]),
    most=st.sampled_from([1e-4, 0.003, 0.03, 1e6]),
    seed=seeds,
)
@several_leaves
def test_clipped_gradient_is_that_of_the_loop_written_by_hand(
    row: Row,
    steps: int,
    chunk: int,
    lanes: int,
    resets: float,
    masked: float,
    most: float,
    seed: int,
) -> None:
    net = row.net()
    data = data_for(net, steps, lanes, seed, resets, masked)
    data = PolicyData(
        data.x,
        data.targets,
        data.resets & ~data.resets.all(dim=1, keepdim=True),
        data.mask | (torch.arange(steps) == steps - 1).unsqueeze(1),
    )
    expected, crossing = by_hand(net, data, chunk, most)
    net.zero_grad()
    (update,) = tt.updates(
        net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=chunk, clip_adjoint=most)
    )
    assert apart(gradients(net), expected) < CLOSE
    assert update.adjoint_stats is not None
    assert update.adjoint_stats.adjoints.shape == (len(crossing), lanes)
    for got, want in zip(update.adjoint_stats.adjoints, crossing, strict=True):
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-9)
    surely, perhaps = (
        sum(int((n > most * (1 + sign * 1e-5)).sum()) for n in crossing) for sign in (1, -1)
    )
    assert (
        surely <= update.adjoint_stats.clipped <= perhaps
    )  # a net that rotates hands on exactly the limit, again and again


def long_credit(row: Row) -> tuple[tt.Carried, PolicyData]:
    net = row.net()
    data = data_for(net, 29, 3, 4)
    return net, PolicyData(
        data.x * torch.tensor([1.0, 4.0, 0.1]).view(3, 1),
        data.targets,
        torch.zeros_like(data.resets),
        data.mask,
    )


@several_leaves
def test_no_lane_hands_on_more_than_the_limit(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = list[Tensor]()
    whole = _backward.vjp

    def product(
        segment: Segment,
        weights: Sequence[Tensor],
        roots: Any,
        cotangents: Cotangents | None,
        **options: Any,
    ) -> VJP:
        if cotangents is not None:
            crossed.append(norms([leaf for leaf in cotangents if leaf is not None]))
        return whole(segment, weights, roots, cotangents, **options)

    monkeypatch.setattr(_backward, "vjp", product)
    net, data = long_credit(row)
    (free,) = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=4))
    assert free.adjoint_stats is not None
    limit = free.adjoint_stats.adjoints.median().item()
    assert torch.stack(crossed).max() > limit * (1 + CLOSE)
    crossed.clear()
    (update,) = tt.updates(
        net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=4, clip_adjoint=limit)
    )
    assert len(crossed) == 7
    assert torch.stack(crossed).max() <= limit * (1 + CLOSE)
    assert update.adjoint_stats is not None
    assert 0 < update.adjoint_stats.clipped < 7 * 3


@several_leaves
def test_lanes_are_clipped_apart(row: Row) -> None:
    """The mutant: one norm for all lanes."""
    net, data = long_credit(row)
    limit = 0.01
    expected, _ = by_hand(net, data, 4, limit)
    net.zero_grad()
    together, _ = by_hand(net, data, 4, limit, lanes_together=True)
    net.zero_grad()
    list(
        tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=4, clip_adjoint=limit))
    )
    assert apart(gradients(net), expected) < CLOSE
    assert apart(gradients(net), together) > 100 * CLOSE


@several_leaves
def test_norms_are_those_of_plain_autograd(row: Row) -> None:
    net, data = long_credit(row)
    state, edges, losses = start(net, data.x), list[Any](), list[Tensor]()
    for x, targets in zip(data.x.split(4), data.targets.split(4), strict=True):
        edges.append(
            tt.state.map_leaves(lambda leaf: leaf + 0.0 if leaf.requires_grad else leaf, state)
        )
        y, state = net(x, edges[-1])
        losses.append((y - targets).square().sum() / data.targets.numel())
    inner = [tt.state.tensors(edge) for edge in edges[1:]]
    results = torch.autograd.grad(
        torch.stack(losses).sum(), [leaf for edge in inner for leaf in edge]
    )
    width = len(inner[0])
    expected = [norms(results[i * width : (i + 1) * width]) for i in reversed(range(len(inner)))]
    (update,) = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=4))
    assert update.adjoint_stats is not None
    assert (update.adjoint_stats.chunk, update.adjoint_stats.clipped) == (4, 0)
    assert torch.allclose(update.adjoint_stats.adjoints.double(), torch.stack(expected), rtol=1e-5)
    assert expected[0].max() > 1e-3


@pytest.mark.parametrize(
    "policy",
    [tt.Exact(chunk=5), tt.Exact(chunk=5, cut_every=20), tt.Exact(chunk=5, clip_adjoint=1e-9)],
    ids=repr,
)
@some_nets("hides-layer", "learnt-start")
def test_every_edge_between_chunks_has_a_row_of_norms_and_no_other_place_has(
    row: Row, policy: tt.Exact
) -> None:
    """What reaches the start of a stretch goes no further: it crosses nothing."""
    stream = tt.Stream(recordings([40] if policy.cut_every else [20, 20]), 1, 5, seed=None)
    shapes = list[tuple[int, ...]]()
    for update in tt.updates(row.net(), stream, nn.MSELoss(), gradient=policy):
        assert update.adjoint_stats is not None
        shapes.append(tuple(update.adjoint_stats.adjoints.shape))
        assert update.adjoint_stats.clipped == (3 if policy.clip_adjoint else 0)
    assert shapes == [(3, 1), (3, 1)]


def test_where_a_lane_resets_no_credit_crosses() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(20, 2, 0)
    resets = torch.zeros_like(data.resets)
    resets[10, 1] = True
    chunk = tt.Chunk.from_tensors(data.x, data.targets, resets=resets)
    (update,) = tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Exact(chunk=5))
    assert update.adjoint_stats is not None
    assert (update.adjoint_stats.adjoints > 0).tolist() == [
        [True, True],
        [True, False],
        [True, True],
    ]


def test_steps_without_loss_at_the_end_hand_no_credit_back_and_keep_their_rows() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(20, 2, 0)
    mask = data.mask.clone()
    mask[8:] = False
    chunk = tt.Chunk.from_tensors(data.x, data.targets, mask=mask)
    (update,) = tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Exact(chunk=5))
    assert update.adjoint_stats is not None
    assert (update.adjoint_stats.adjoints > 0).tolist() == [
        [False, False],
        [False, False],
        [True, True],
    ]


def test_clipping_under_a_scaler_is_that_without_one() -> None:
    data, policy = PolicyData.draw(23, 2, 0), tt.Exact(chunk=4, clip_adjoint=0.005)
    usual, scaled = named("hides-layer").net(), named("hides-layer").net()
    (update,) = exact_updates(usual, data, policy)
    exact_updates(scaled, data, policy, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**7))
    assert update.adjoint_stats is not None
    assert update.adjoint_stats.clipped
    assert (
        apart({name: g / 2.0**7 for name, g in gradients(scaled).items()}, gradients(usual)) < 1e-7
    )
