"""Two losses, lost detaches, transforms: loops with a fault and sound ones beside them, and advice
that is followed by hand.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from throughtime.doctor import Finding, _events, doctor


def diagnose(loop: Callable[..., Any], *args: Any, **options: Any) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    with contextlib.suppress(RuntimeError), doctor() as d:
        loop(*args, **options)
    assert d.internal_error is None
    return d.findings


def series(steps: int, *shape: int) -> Tensor:
    return torch.randn(steps, *shape).cumsum(0) / 10


def two_heads(detach: bool, retain: bool, one_line: bool, add: bool = False) -> None:
    x, gru, heads = series(161, 2, 3), nn.GRU(3, 8), [nn.Linear(8, 3), nn.Linear(8, 1)]
    optimizer = torch.optim.SGD([*gru.parameters(), *(p for h in heads for p in h.parameters())])
    h = None
    for i in range(0, 160, 10):
        y, h = gru(x[i : i + 10], h)
        target = x[i + 1 : i + 11]
        losses = mse_loss(heads[0](y), target), mse_loss(heads[1](y), target[..., :1])
        optimizer.zero_grad()
        if add:
            (losses[0] + losses[1]).backward(retain_graph=retain)
        elif one_line:
            for loss in losses:
                loss.backward(retain_graph=True)
        else:
            losses[0].backward(retain_graph=True)
            losses[1].backward(retain_graph=retain)
        h = h.detach() if detach else h


@pytest.mark.parametrize("one_line", [False, True])
def test_a_graph_that_grows_is_found_behind_two_losses(one_line: bool) -> None:
    findings = diagnose(two_heads, detach=False, retain=True, one_line=one_line)
    (finding,) = findings
    assert finding.code == "TT102"
    assert "h = h.detach(); and one backward" in finding.fix
    assert "for the sum of the losses" in finding.fix
    assert not diagnose(two_heads, detach=True, retain=False, one_line=one_line, add=True)


@pytest.mark.parametrize("one_line", [False, True])
def test_two_losses_of_one_pass_are_no_means_over_unequal_chunks(one_line: bool) -> None:
    assert not diagnose(two_heads, detach=True, retain=False, one_line=one_line)


def sum_until_the_update(detach: bool) -> None:
    x, gru, head = series(241, 2, 3), nn.GRU(3, 8), nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters()], lr=0.01)
    h, error = torch.zeros(1, 2, 8), torch.zeros(())
    for i in range(0, 240, 10):
        y, h = gru(x[i : i + 10], h)
        error = error + mse_loss(head(y), x[i + 1 : i + 11])
        if i % 30 == 20:
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            h, error = h.detach(), error.detach() if detach else torch.zeros(())


@pytest.mark.parametrize("detach", [False, True])
def test_a_sum_that_is_detached_after_each_update_is_sound(detach: bool) -> None:
    assert not diagnose(sum_until_the_update, detach=detach)


def sum_that_is_trained_on(fix: bool) -> None:
    x, gru, head, total = series(161, 2, 3), nn.GRU(3, 8), nn.Linear(8, 3), torch.zeros(())
    h = torch.zeros(1, 2, 8)
    for i in range(0, 160, 10):
        y, h = gru(x[i : i + 10], h)
        h, loss = h.detach(), mse_loss(head(y), x[i + 1 : i + 11])
        if fix:
            loss.backward()
            total = total + loss.detach()
        else:
            total = total + loss
            total.backward(retain_graph=True)


def test_the_advice_for_a_sum_that_is_trained_on_is_a_backward_of_its_last_term() -> None:
    findings = diagnose(sum_that_is_trained_on, fix=False)
    assert "TT104" in [f.code for f in findings]
    (fix,) = {f.fix for f in findings if f.code == "TT104"}
    assert fix.startswith("loss.backward() for the loss of this chunk alone")
    assert not diagnose(sum_that_is_trained_on, fix=True)


def fixed_start(size: Callable[[Tensor], int]) -> None:
    gru = nn.GRU(3, 4)
    for x in torch.randn(11, 6, 3).split(4):
        x = x.transpose(0, 1)  # noqa: PLW2901
        gru(x, torch.zeros(1, size(x), 4))[0].square().mean().backward()


def test_a_start_of_fixed_lanes_is_to_be_made_for_those_of_the_chunk() -> None:
    (finding,) = diagnose(fixed_start, lambda _: 4)
    assert finding.code == "TT211"
    assert "x.size(1)" in finding.fix
    assert not diagnose(fixed_start, lambda x: x.size(1))


def test_vmap_and_gradients_by_function_pass_unwatched() -> None:
    x, gru, head, h = series(80, 2, 3), nn.GRU(3, 4), nn.Linear(4, 1), None
    with doctor() as d:
        for chunk in x.split(10):
            y, h = gru(chunk, h)
            h = h.detach()
            norms = torch.func.vmap(lambda row: head(row).square().mean())(y.detach())
            torch.func.grad(lambda rows: rows.square().sum())(y.detach())
            (y.square().mean() + norms.detach().mean()).backward()
    assert d.internal_error is None
    assert d.findings == ()


def test_an_input_that_does_not_move_is_no_fault_of_the_doctor() -> None:
    x, gru, h = torch.randn(1, 2, 3).expand(10, 2, 3), nn.GRU(3, 4), None
    with doctor() as d:
        for _ in range(8):
            y, h = gru(x, h)
            h = h.detach()
            y.square().mean().backward()
    assert d.internal_error is None


def test_a_sum_that_is_longer_than_what_is_recorded_is_no_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_events, "MAX_OPERATIONS", 200)

    def one_pass() -> None:
        model, h, total = nn.GRU(3, 3), torch.zeros(1, 2, 3), torch.zeros(())
        for x in series(300, 2, 3).split(1):
            y, h = model(x, h)
            total = total + (y - x).abs().square().mean()
        total.backward()

    assert not {"TT104"} & {finding.code for finding in diagnose(one_pass)}
