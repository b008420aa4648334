"""The doctor names what a backward or a step goes wrong on: states, losses, graphs, gradients."""

import contextlib
import inspect
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import throughtime as tt
from throughtime.doctor import doctor
from throughtime.doctor.doctor import Doctor

MARK = re.compile(r"# <- (TT\d{3})")
STREAM = torch.randn(161, 2, 3, generator=torch.Generator().manual_seed(0)).cumsum(0) / 10
IDS = torch.randint(7, (161,), generator=torch.Generator().manual_seed(0))
Loop = Callable[[], object]


def examine(loop: Loop, error: str = "") -> Doctor:
    """The doctor after a loop that raises this error, if any."""
    torch.manual_seed(0)
    raises = pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext()
    with raises, doctor() as d:
        loop()
    assert d.internal_error is None
    return d


def marks(loop: Loop) -> set[tuple[str, int]]:
    lines, first = inspect.getsourcelines(loop)
    return {(m[1], first + i) for i, line in enumerate(lines) if (m := MARK.search(line))}


def models(*sizes: tuple[type[nn.Module], *tuple[int, ...]]) -> tuple[list[Any], torch.optim.Adam]:
    parts = [kind(*widths) for kind, *widths in sizes]
    return parts, torch.optim.Adam([p for part in parts for p in part.parameters()], lr=0.01)


# One graph, sent back twice.


def two_losses() -> None:
    (body, a, b), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 1), (nn.Linear, 4, 2))
    for x in STREAM.split(20):
        y, _ = body(x)
        loss1, loss2 = a(y).square().mean(), b(y).square().mean()
        optimizer.zero_grad()
        loss1.backward()
        loss2.backward()  # <- TT105
        optimizer.step()


def losses_one_by_one() -> None:
    (body, head), optimizer = models((nn.LSTM, 3, 4), (nn.Linear, 4, 1))
    y, _ = body(STREAM)
    optimizer.zero_grad()
    for step in y:
        loss = head(step).square().mean()
        loss.backward()  # <- TT105
    optimizer.step()


def one_loss_twice() -> None:
    y, _ = nn.GRU(3, 4)(STREAM)
    loss = y.square().mean()
    loss.backward()
    loss.backward()  # <- TT105


def one_loss_for_all_epochs() -> None:
    (body, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    loss = mse_loss(head(body(STREAM[:-1])[0]), STREAM[1:])
    for _ in range(3):
        optimizer.zero_grad()
        loss.backward()  # <- TT105
        optimizer.step()


def features_for_all_epochs() -> None:
    (body, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    features, _ = body(STREAM[:-1])
    for _ in range(3):
        loss = mse_loss(head(features), STREAM[1:])
        optimizer.zero_grad()
        loss.backward()  # <- TT105
        optimizer.step()


class Net(nn.Module):
    """A generator or a critic: both run the same lines."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(inputs, 5), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.rnn(x)[0]))


def critic_without_detach() -> None:
    (generator,), g_optimizer = models((Net, 3, 4))
    (critic,), c_optimizer = models((Net, 4, 1))
    fake = generator(torch.randn(12, 2, 3))
    c_loss = critic(fake).mean() - critic(torch.randn(12, 2, 4)).mean()
    c_optimizer.zero_grad()
    c_loss.backward()
    c_optimizer.step()
    g_loss = -critic(fake).mean()
    g_optimizer.zero_grad()
    g_loss.backward()  # <- TT105
    g_optimizer.step()


def critic_without_detach_through_a_function() -> None:
    (generator,), g_optimizer = models((Net, 3, 4))
    (critic,), c_optimizer = models((Net, 4, 1))

    def train(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # <- TT105
        optimizer.step()

    fake = generator(torch.randn(12, 2, 3))
    train(c_optimizer, critic(fake).mean() - critic(torch.randn(12, 2, 4)).mean())
    train(g_optimizer, -critic(fake).mean())


def step_between_two_losses() -> None:
    (body, policy, value), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 2), (nn.Linear, 4, 1))
    y, _ = body(STREAM)
    loss1, loss2 = policy(y).square().mean(), value(torch.tanh(y)).square().mean()
    loss1.backward(retain_graph=True)
    optimizer.step()
    loss2.backward()  # <- TT105


def gradient_before_backward() -> None:
    (body,), _ = models((nn.GRU, 3, 4))
    x = STREAM.clone().requires_grad_()
    y, _ = body(x)
    torch.autograd.grad(y.sum(), x)
    y.square().mean().backward()  # <- TT105


@pytest.mark.parametrize(
    ("loop", "error"),
    [
        (two_losses, "second time"),
        (losses_one_by_one, "second time"),
        (one_loss_twice, "second time"),
        (one_loss_for_all_epochs, "second time"),
        (features_for_all_epochs, "second time"),
        (critic_without_detach, "second time"),
        (critic_without_detach_through_a_function, "second time"),
        (step_between_two_losses, "inplace operation"),
        (gradient_before_backward, "second time"),
    ],
)
def test_a_graph_sent_back_twice_is_found_at_the_second_backward(loop: Loop, error: str) -> None:
    d = examine(loop, error)
    assert {(f.code, f.line) for f in d.findings} == marks(loop)


# States with the graph of an earlier chunk.


class LetterNet(nn.Module):
    """Its last hidden vector is no part of the loss: only the step changes its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 5), nn.Linear(8, 3)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((x, hidden), 1)
        return self.out(both), torch.tanh(self.hidden(both))


def stepped_under_the_state() -> None:
    (net,), optimizer = models((LetterNet,))
    hidden = torch.zeros(2, 5)
    for x, target in pairwise(STREAM[:13]):
        y, hidden = net(x, hidden)  # <- TT101
        loss = mse_loss(y, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Trainer:
    """Keeps the state of its net."""

    def __init__(self) -> None:
        (self.net,), self.optimizer = models((LetterNet,))
        self.state = torch.zeros(2, 5)

    def __call__(self, x: Tensor) -> None:
        y, self.state = self.net(x, self.state)
        self.optimizer.zero_grad()
        (mse_loss(y, x) + self.state.square().mean()).backward()
        self.optimizer.step()


def kept_by_a_trainer() -> None:
    trainer = Trainer()
    for x in STREAM:
        trainer(x)


def one_number() -> None:
    w, u = torch.tensor(0.5, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    h = torch.zeros(())
    for x in STREAM[:, 0, 0]:
        h = torch.tanh(w * x + u * h)  # <- TT101
        (h - x).square().backward()


def updated_by_hand_under_the_state() -> None:
    (net,), _ = models((LetterNet,))
    hidden = torch.zeros(2, 5)
    for x, target in pairwise(STREAM[:13]):
        y, hidden = net(x, hidden)  # <- TT101
        mse_loss(y, target).backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(0.0 if p.grad is None else 0.01 * p.grad)
                p.grad = None


def stepped_under_a_retained_state() -> None:
    (lstm, head), optimizer = models((nn.LSTM, 3, 4), (nn.Linear, 4, 3))
    state = None
    for x in STREAM.split(20):
        y, state = lstm(x, state)
        optimizer.zero_grad()
        mse_loss(head(y), x).backward(retain_graph=True)  # <- TT102
        optimizer.step()


def vector_retained() -> None:
    w, u, v = (torch.randn(n, m).requires_grad_() for n, m in ((5, 3), (5, 5), (3, 5)))
    state = torch.zeros(5)
    for t in range(40):
        state = torch.tanh(w @ STREAM[t, 0] + u @ state)
        loss = (v @ state - STREAM[t + 1, 0]).square().sum()
        loss.backward(retain_graph=True)  # <- TT102


def column_retained() -> None:
    w, u, v = (torch.randn(n, m).requires_grad_() for n, m in ((5, 3), (5, 5), (3, 5)))
    state = torch.zeros(5, 1)
    for t in range(40):
        state = torch.tanh(w @ STREAM[t, :1].t() + u @ state)
        (v @ state).square().sum().backward(retain_graph=True)  # <- TT102


class TokenNet(nn.Module):
    """A cell by hand over token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(7, 6), nn.Linear(11, 5), nn.Linear(5, 7)

    def forward(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(self.mix(torch.cat([self.table(token), state], -1)))
        return self.out(state), state


def tokens_retained() -> None:
    (net,), _ = models((TokenNet,))
    state = torch.zeros(1, 5)
    for t in range(40):
        y, state = net(IDS[t : t + 1], state)
        cross_entropy(y, IDS[t + 1 : t + 2]).backward(retain_graph=True)  # <- TT102


@pytest.mark.parametrize(
    ("loop", "error", "fix"),
    [
        (stepped_under_the_state, "inplace operation", "hidden = hidden.detach()"),
        (updated_by_hand_under_the_state, "inplace operation", "hidden = hidden.detach()"),
        (
            stepped_under_a_retained_state,
            "inplace operation",
            "state = tt.state.detach(state); and",
        ),
        (vector_retained, "", "state = state.detach(); and one backward without retain_graph=True"),
        (column_retained, "", "state = state.detach()"),
        (tokens_retained, "", "state = state.detach()"),
    ],
)
def test_a_state_with_its_graph_is_found_by_name_where_the_loop_passes_it_on(
    loop: Loop, error: str, fix: str
) -> None:
    d = examine(loop, error)
    assert {(f.code, f.line) for f in d.findings} == marks(loop)
    assert fix in d.findings[0].fix
    assert "torch.where" not in d.findings[0].fix


def test_a_state_that_an_object_keeps_is_named_where_the_object_passes_it_on() -> None:
    (finding,) = examine(kept_by_a_trainer, "second time").findings
    assert finding.line == Trainer.__call__.__code__.co_firstlineno + 1
    assert finding.fix.endswith("self.state = self.state.detach()")


def changed_before_its_backward() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in STREAM.split(40):
        loss = mse_loss(net(x), x)
        optimizer.step()  # <- TT103
        loss.backward()


def test_a_step_between_a_forward_and_its_backward_is_told_to_come_last() -> None:
    d = examine(changed_before_its_backward, "inplace operation")
    assert {(f.code, f.line) for f in d.findings} == marks(changed_before_its_backward)
    assert "loss.backward() before optimizer.step()" in d.findings[0].fix


def masked_in_place() -> None:
    (mix,), _ = models((nn.Linear, 7, 4))
    h = torch.zeros(2, 4)
    for x in STREAM[:9]:
        h = torch.tanh(mix(torch.cat([x, h], 1)))
        h *= x[:, :1] > 0  # <- TT103
    h.square().mean().backward()


def test_a_change_is_not_taken_for_that_of_a_weight_when_it_was_made() -> None:
    """In a thread of its own the graph has the first numbers, as in a script."""
    with ThreadPoolExecutor(1) as pool:
        d = pool.submit(examine, masked_in_place, "inplace operation").result()
    assert {(f.code, f.line) for f in d.findings} == marks(masked_in_place)


# Evaluations with their graphs.


def vector_evaluated() -> None:
    w, u = torch.randn(5, 3, requires_grad=True), torch.randn(5, 5, requires_grad=True)
    state = torch.zeros(5)
    for x in STREAM[:, 0]:
        state = torch.tanh(w @ x + u @ state)  # <- TT202


def tokens_written() -> None:
    (net,), optimizer = models((TokenNet,))
    for begin in (0, 120, 60):
        state, loss = torch.zeros(1, 5), torch.zeros(())
        for t in range(begin, begin + 20):
            y, state = net(IDS[t : t + 1], state)
            loss = loss + cross_entropy(y, IDS[t + 1 : t + 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    token, state = IDS[:1], torch.zeros(1, 5)
    for _ in range(100):
        y, state = net(token, state)
        token = y.argmax(-1)


def test_an_evaluation_of_a_vector_or_of_token_ids_with_its_graph_is_found() -> None:
    d = examine(vector_evaluated)
    assert {(f.code, f.line) for f in d.findings} == marks(vector_evaluated)
    d = examine(tokens_written)
    assert [f.code for f in d.findings] == ["TT202"]


# Gradients and steps.


def backward_forgotten() -> None:
    (gru, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    for x in torch.randn(4, 10, 2, 3):
        optimizer.zero_grad()
        loss = mse_loss(head(gru(x)[0]), x)
        loss.backward  # noqa: B018
        optimizer.step()  # <- TT304


@pytest.mark.parametrize(
    ("loop", "fix"),
    [
        (backward_forgotten, "loss.backward() before optimizer.step()"),
    ],
)
def test_steps_without_the_gradients_of_their_backwards_are_found(loop: Loop, fix: str) -> None:
    d = examine(loop)
    assert {(f.code, f.line) for f in d.findings} == marks(loop)
    assert fix in d.findings[0].fix


# Sound neighbours.


def adversarial() -> None:
    (generator,), g_optimizer = models((Net, 3, 4))
    (critic,), c_optimizer = models((Net, 4, 1))

    def train(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for real in torch.randn(8, 12, 2, 4):
        fake = generator(torch.randn(12, 2, 3))
        train(c_optimizer, critic(fake.detach()).mean() - critic(real).mean())
        train(g_optimizer, -critic(fake).mean())


def actor_and_critic() -> None:
    (body, actor), a_optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 2))
    (critic,), c_optimizer = models((nn.Linear, 4, 1))
    h = torch.zeros(1, 2, 4)
    for x in STREAM[:160].split(20):
        y, h = body(x, h.detach())
        value = critic(y)
        a_optimizer.zero_grad()
        c_optimizer.zero_grad()
        value.square().mean().backward(retain_graph=True)
        (actor(y).log_softmax(-1) * (1 - value).detach()).mean().backward()
        a_optimizer.step()
        c_optimizer.step()


def sharpness_aware() -> None:
    (gru, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    parameters = [*gru.parameters(), *head.parameters()]
    for x in torch.randn(6, 10, 2, 3):
        for sign in (1.0, -1.0):
            optimizer.zero_grad()
            mse_loss(head(gru(x)[0]), x).backward()
            steps = [0.01 * p.grad for p in parameters if p.grad is not None]
            with torch.no_grad():
                for p, step in zip(parameters, steps, strict=True):
                    p.add_(step, alpha=sign)
        optimizer.step()


LIBRARY = """
def ascend(parameters):
    with torch.no_grad():
        for p in parameters:
            p.add_(p.grad, alpha=0.01)
"""


def sharpness_aware_by_a_library() -> None:
    (gru, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    names: dict[str, Any] = {"torch": torch}
    exec(compile(LIBRARY, "site-packages/sharpness.py", "exec"), names)
    for x in torch.randn(6, 10, 2, 3):
        for first in (True, False):
            optimizer.zero_grad()
            mse_loss(head(gru(x)[0]), x).backward()
            if first:
                names["ascend"]([*gru.parameters(), *head.parameters()])
        optimizer.step()


def a_backward_for_each_step_of_a_chunk() -> None:
    (cell, head), optimizer = models((nn.GRUCell, 3, 4), (nn.Linear, 4, 3))
    h = torch.zeros(2, 4)
    for chunk in STREAM[:80].split(8):
        h = h.detach()
        optimizer.zero_grad()
        for t, x in enumerate(chunk):
            h = cell(x, h)
            (mse_loss(head(h), x) / 8).backward(retain_graph=t < 7)
        optimizer.step()


def gradients_of_each_part_logged() -> None:
    (net,), optimizer = models((nn.Linear, 3, 2))
    for x in torch.randn(6, 8, 3):
        y = net(x)
        for part in (y[:, 0].square().mean(), y[:, 1].abs().mean(), y.square().mean()):
            optimizer.zero_grad()
            part.backward(retain_graph=True)
        optimizer.step()


def horizon_of_three_chunks() -> None:
    (gru, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    h = torch.zeros(1, 2, 4)
    for i, x in enumerate(STREAM[:120].split(10)):
        y, h = gru(x, h)
        mse_loss(head(y), x).backward(retain_graph=True)
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            h = h.detach()


def measure_summed_for_a_log() -> None:
    (cell, head, other), optimizer = models(
        (nn.GRUCell, 3, 4), (nn.Linear, 4, 3), (nn.Linear, 4, 1)
    )
    h = torch.zeros(2, 4)
    for chunk in STREAM[:80].split(10):
        h, loss, measure = h.detach(), torch.zeros(()), torch.zeros(())
        for x in chunk:
            h = cell(x, h)
            loss = loss + mse_loss(head(h), x)
            measure = measure + other(h).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        measure.item()


def gradients_combined() -> None:
    (gru, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    parameters = [*gru.parameters(), *head.parameters()]
    for tasks in torch.randn(6, 3, 10, 2, 3):
        gathered: list[list[Tensor]] = []
        for x in tasks:
            optimizer.zero_grad()
            mse_loss(head(gru(x)[0]), x).backward()
            gathered.append([p.grad.clone() for p in parameters if p.grad is not None])
        for p, grads in zip(parameters, zip(*gathered, strict=True), strict=True):
            p.grad = torch.stack(grads).median(0).values
        optimizer.step()


def accumulated() -> None:
    (gru, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    for i, x in enumerate(torch.randn(12, 10, 2, 3)):
        (mse_loss(head(gru(x)[0]), x) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def gradients_set_by_hand() -> None:
    (net,), optimizer = models((nn.Linear, 3, 3))
    for x in STREAM[:6]:
        loss = mse_loss(net(x), x)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        for p, grad in zip(net.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()


def schedule_wound_forward() -> None:
    (gru, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(5):  # the epochs before the resumption
        optimizer.step()
        scheduler.step()
    for x in torch.randn(4, 10, 2, 3):
        optimizer.zero_grad()
        mse_loss(head(gru(x)[0]), x).backward()
        optimizer.step()


def closure() -> None:
    (gru, head), _ = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    optimizer = torch.optim.LBFGS([*gru.parameters(), *head.parameters()], max_iter=3)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(head(gru(STREAM[:-1])[0]), STREAM[1:])
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(evaluate)


def penalty() -> None:
    (gru, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    for x in torch.randn(6, 10, 2, 3):
        x.requires_grad_()
        y = head(gru(x)[0])
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (y.square().mean() + slope.square().mean()).backward()
        optimizer.step()


def losses_summed_and_sent_back() -> None:
    (cell, head), optimizer = models((nn.GRUCell, 3, 4), (nn.Linear, 4, 3))
    h = torch.zeros(2, 4)
    for chunk in STREAM[:120].split(10):
        h, losses, logged = h.detach(), list[Tensor](), torch.zeros(())
        for x in chunk:
            h = cell(x, h)
            losses.append(mse_loss(head(h), x))
            logged = logged + losses[-1]
        optimizer.zero_grad()
        (torch.stack(losses).mean() if len(losses) > 5 else sum(losses, h.new_zeros(()))).backward()
        optimizer.step()
        str(logged)


def averaged_weights() -> None:
    (gru, head), optimizer = models((nn.GRU, 3, 4), (nn.Linear, 4, 3))
    shadow = [p.detach().clone() for p in gru.parameters()]
    for x in torch.randn(8, 10, 2, 3):
        optimizer.zero_grad()
        mse_loss(head(gru(x)[0]), x).backward()
        optimizer.step()
        with torch.no_grad():
            for average, p in zip(shadow, gru.parameters(), strict=True):
                average.mul_(0.9).add_(p, alpha=0.1)


def detached_for_a_log() -> None:
    (gru,), _ = models((nn.GRU, 3, 4))
    h, log = torch.zeros(1, 2, 4), list[Tensor]()
    for x in STREAM[:160].split(20):
        y, h = gru(x, tt.state.detach(h))
        log.append(h.detach().norm())
        y.square().mean().backward()


def detached_a_second_time() -> None:
    (gru,), _ = models((nn.GRU, 3, 4))
    h = torch.zeros(1, 2, 4)
    for x in STREAM[:160].split(20):
        y, h = gru(x, h)
        y.square().mean().backward()
        h.detach()
        h = tt.state.detach(h)


@pytest.mark.parametrize(
    "loop",
    [
        detached_a_second_time,
        adversarial,
        actor_and_critic,
        sharpness_aware,
        sharpness_aware_by_a_library,
        a_backward_for_each_step_of_a_chunk,
        gradients_of_each_part_logged,
        horizon_of_three_chunks,
        measure_summed_for_a_log,
        gradients_combined,
        accumulated,
        gradients_set_by_hand,
        schedule_wound_forward,
        closure,
        penalty,
        losses_summed_and_sent_back,
        averaged_weights,
        detached_for_a_log,
    ],
)
def test_a_sound_neighbour_has_no_finding(loop: Loop) -> None:
    assert examine(loop).findings == ()
