"""The credit that crosses from one segment to the one before, and what clipping makes of it.

Shapes: `T` steps, `B` lanes.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import CreditRecorder, PolicyData, credit_norms, data_for, exact_updates
from quick import examples
from strategies import Row, Weights, apart, gradients, named, recordings, seeds, some_nets, start
from throughtime.carry import Carried
from throughtime.chunk import Chunk

EXACT = 1e-10
several_leaves = some_nets("tensor-state", "lstm", "hides-two-layers", "namedtuple-state")


def by_hand(
    net: Carried, data: PolicyData, chunk: int, most: float, *, lanes_together: bool = False
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
            results.append(credit_norms(back))
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
    recorder = CreditRecorder(tt.Exact(chunk=chunk, clip_adjoint=most))
    exact_updates(net, data, recorder)
    assert apart(gradients(net), expected) < EXACT
    assert list(recorder.arriving) == [*reversed(range(chunk, steps, chunk))]
    for arriving, norms in zip(recorder.arriving.values(), crossing, strict=True):
        assert torch.allclose(arriving, norms, rtol=1e-9, atol=1e-12)


def long_credit(row: Row) -> tuple[Carried, PolicyData]:
    net = row.net()
    data = data_for(net, 29, 3, 4)
    return net, PolicyData(
        data.x * torch.tensor([1.0, 4.0, 0.1]).view(3, 1),
        data.targets,
        torch.zeros_like(data.resets),
        data.mask,
    )


@several_leaves
def test_no_lane_hands_on_more_than_the_limit(row: Row) -> None:
    net, data = long_credit(row)
    free = CreditRecorder(tt.Exact(chunk=4))
    exact_updates(net, data, free)
    norms = torch.stack([*free.leaving.values()])
    assert torch.equal(norms, torch.stack([*free.arriving.values()]))
    limit = norms.median().item()
    clipped = CreditRecorder(tt.Exact(chunk=4, clip_adjoint=limit))
    exact_updates(net, data, clipped)
    assert len(clipped.leaving) == 7
    assert norms.max() > 1.1 * limit >= torch.stack([*clipped.leaving.values()]).max()
    arriving = torch.stack([*clipped.arriving.values()])
    assert 0 < (arriving > limit * (1 + EXACT)).sum() < 7 * 3


@several_leaves
def test_lanes_are_clipped_apart(row: Row) -> None:
    """The mutant: one norm for all lanes."""
    net, data = long_credit(row)
    limit = 0.01
    expected, _ = by_hand(net, data, 4, limit)
    net.zero_grad()
    together, _ = by_hand(net, data, 4, limit, lanes_together=True)
    net.zero_grad()
    exact_updates(net, data, tt.Exact(chunk=4, clip_adjoint=limit))
    assert apart(gradients(net), expected) < EXACT
    assert apart(gradients(net), together) > 1e-4


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
    recorder = CreditRecorder(tt.Exact(chunk=4))
    exact_updates(net, data, recorder)
    assert list(recorder.arriving) == [28, 24, 20, 16, 12, 8, 4]
    for i, norms in enumerate(reversed(recorder.arriving.values())):
        assert torch.allclose(norms, credit_norms(results[i * width : (i + 1) * width]), rtol=1e-9)
        assert norms.max() > 1e-3


@pytest.mark.parametrize(
    "policy",
    [tt.Exact(chunk=5), tt.Exact(chunk=5, cut_every=20), tt.Exact(chunk=5, clip_adjoint=1e-9)],
    ids=repr,
)
@some_nets("hides-layer", "learnt-start")
def test_credit_crosses_between_segments_and_nowhere_else(row: Row, policy: tt.Exact) -> None:
    """The credit of the state that enters a window goes no further."""
    stream = tt.Stream(recordings([40] if policy.cut_every else [20, 20]), 1, 5, seed=None)
    recorder, steps = CreditRecorder(policy), list[list[int]]()
    for _ in tt.updates(row.net(), stream, nn.MSELoss(), gradient=recorder):
        steps.append([*recorder.arriving])
        recorder.arriving.clear()
    assert steps == [[15, 10, 5], [35, 30, 25]]


def crossing(resets: Tensor | None, mask: Tensor | None) -> dict[int, list[bool]]:
    """Which lanes hand credit back at each step between two segments of 5 steps."""
    data, recorder = PolicyData.draw(20, 2, 0), CreditRecorder(tt.Exact(chunk=5))
    chunk = Chunk.from_tensors(data.x, data.targets, resets=resets, mask=mask)
    list(tt.updates(named("hides-layer").net(), [chunk], nn.MSELoss(), gradient=recorder))
    return {step: (norms > 0).tolist() for step, norms in recorder.arriving.items()}


def test_where_a_lane_resets_no_credit_crosses() -> None:
    resets = torch.zeros(20, 2, dtype=torch.bool)
    resets[10, 1] = True
    assert crossing(resets, None) == {15: [True, True], 10: [True, False], 5: [True, True]}


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
