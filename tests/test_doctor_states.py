"""What a chunk covers of its data, and where its state comes from: loops with a fault, and sound
ones that resemble them.
"""

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from test_doctor_losses import diagnose, series

MARK = re.compile(r"# <- (TT\d{3})$", re.MULTILINE)
Loop = Callable[[], None]
FAULTS: list[Loop] = []
SOUND: list[Loop] = []


def fault(loop: Loop) -> Loop:
    FAULTS.append(loop)
    return loop


def sound(loop: Loop) -> Loop:
    SOUND.append(loop)
    return loop


def name_of(loop: Loop) -> str:
    return loop.__name__


def learn(net: nn.Module, loss: Tensor) -> None:
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.sub_(0.01 * p.grad)


def mse(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(y, target)


class Net(nn.Module):
    """A layer and a head."""

    def __init__(self, features: int = 3, outputs: int = 1, batch_first: bool = False) -> None:
        super().__init__()
        self.rnn = nn.GRU(features, 8, batch_first=batch_first)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor, h: Any = None) -> tuple[Tensor, Tensor]:
        y, h = self.rnn(x, h)
        return self.head(y), h


class Cells(nn.Module):
    """A loop over the steps of a chunk, by a cell."""

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(features, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        ys: list[Tensor] = []
        for x_t in x:
            state = self.cell(x_t, state)  # <- TT201 TT208
            ys.append(self.head(state[0]))
        return torch.stack(ys), tuple(part.detach() for part in state)


# --- what a chunk covers: strides, directions, gaps


def strided(net: nn.Module) -> None:
    x, state = series(800, 2, 3), None
    for i in range(0, 720, 80):
        y, state = net(x[i : i + 80 : 4], state)
        state = state.detach() if isinstance(state, Tensor) else state
        learn(net, mse(y, x[i + 4 : i + 84 : 4, :, :1]))


@sound
def cells_read_every_fourth_step() -> None:
    strided(Cells())


@fault
def backwards_chunk_after_chunk_forwards_inside() -> None:
    x, net, h = series(120, 2, 3), Net(), None
    for end in range(120, 0, -10):  # <- TT207
        y, h = net(x[end - 10 : end], h)  # <- TT207
        h = h.detach()
        learn(net, mse(y, x[end - 10 : end, :, :1]))


@fault
def recordings_from_their_ends_with_one_state() -> None:
    net, h = Net(), None
    for recording in [series(23, 1, 3) for _ in range(3)]:
        backwards = recording.flip(0)
        for i in range(0, 20, 10):
            y, h = net(backwards[i : i + 10], h)  # <- TT204
            h = h.detach()
            learn(net, mse(y, backwards[i + 1 : i + 11, :, :1]))


@fault
def overlapping_windows_with_the_last_state() -> None:
    x, net, h = series(160, 2, 3), Net(), None
    for i in range(0, 140, 5):  # <- TT207
        y, h = net(x[i : i + 20], h)  # <- TT207
        h = h.detach()
        learn(net, mse(y, x[i + 1 : i + 21, :, :1]))


@sound
def overlapping_windows_from_the_state_at_their_start() -> None:
    x, rnn, head, h = series(160, 2, 3), nn.GRU(3, 8), nn.Linear(8, 1), torch.zeros(1, 2, 8)
    net = nn.ModuleList([rnn, head])
    for i in range(0, 140, 5):
        y, _ = rnn(x[i : i + 20], h)
        h = y[4].detach().unsqueeze(0)
        learn(net, mse(head(y), x[i + 1 : i + 21, :, :1]))


# --- windows as samples


def windows_in_order(net: Any, read: Callable[[Tensor], Tensor]) -> None:
    x, labels = series(200, 1, 3), torch.randint(0, 2, (20,))
    head = nn.Linear(8, 2)
    for i in range(20):
        y, _ = net(x[10 * i : 10 * i + 10])
        loss = nn.functional.cross_entropy(head(read(y)), labels[i : i + 1])
        learn(nn.ModuleList([net, head]), loss)


@sound
def one_label_a_window_from_its_last_step() -> None:
    windows_in_order(nn.GRU(3, 8), lambda y: y[-1])


@sound
def one_label_a_window_from_the_mean() -> None:
    windows_in_order(nn.GRU(3, 8), lambda y: y.mean(0))


@sound
def a_shuffled_loader_of_adjacent_windows() -> None:
    x, net = series(41, 3), Net(batch_first=True)
    windows = TensorDataset(x[:40].view(4, 10, 3), x[1:, :1].reshape(4, 10, 1))
    for _ in range(12):
        for a, b in DataLoader(windows, batch_size=1, shuffle=True):
            learn(net, mse(net(a)[0], b))


# --- the same old state at every chunk


@fault
def a_leaky_sum_from_zero_at_every_chunk() -> None:
    x, enter, head = series(121, 2, 3), nn.Linear(3, 8), nn.Linear(8, 3)
    for i in range(0, 120, 10):
        h, ys = torch.zeros(2, 8), list[Tensor]()
        for t in range(i, i + 10):
            h = 0.8 * h + enter(x[t])  # <- TT201
            ys.append(head(h))
        learn(nn.ModuleList([enter, head]), mse(torch.stack(ys), x[i + 1 : i + 11]))


@fault
def the_first_state_at_every_chunk() -> None:
    x, net = series(201, 2, 3), Net()
    with torch.no_grad():
        _, start = net(x[:10])
    for i in range(10, 200, 10):
        y, _ = net(x[i : i + 10], start)  # <- TT201
        learn(net, mse(y, x[i + 1 : i + 11, :, :1]))


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 8), nn.Linear(8, 1)
        self.hidden, self.h = torch.randn(1, 2, 8), torch.zeros(1, 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.rnn(x, self.hidden)  # <- TT201
        self.h = h.detach()
        return self.head(y)


@fault
def a_state_stored_under_another_name() -> None:
    x, net = series(121, 2, 3), TwoNames()
    for i in range(0, 120, 10):
        learn(net, mse(net(x[i : i + 10]), x[i + 1 : i + 11, :, :1]))  # <- TT201


@sound
def a_buffer_that_is_updated_in_place() -> None:
    x, rnn, head = series(121, 2, 3), nn.GRU(3, 8), nn.Linear(8, 1)
    net, h = nn.ModuleList([rnn, head]), torch.zeros(1, 2, 8)
    for i in range(0, 120, 10):
        y, new = rnn(x[i : i + 10], h.clone())
        learn(net, mse(head(y), x[i + 1 : i + 11, :, :1]))
        h.data.copy_(new.data)


@sound
def a_constant_state_starts_each_recording() -> None:
    h0, net = torch.randn(1, 1, 8), Net()
    for recording in series(240, 4, 3).unbind(1):
        h = h0
        for chunk in recording.unsqueeze(1).split(20):
            y, h = net(chunk, h)
            h = h.detach()
            learn(net, mse(y, chunk[..., :1]))


# --- the end of a series enters its start


@fault
def epochs_over_one_series() -> None:
    x, net, h = series(121, 2, 3), Net(), None
    for _ in range(3):
        for i in range(0, 120, 10):
            y, h = net(x[i : i + 10], h)  # <- TT208
            h = h.detach()
            learn(net, mse(y, x[i + 1 : i + 11, :, :1]))


@fault
def epochs_over_a_loader_in_order() -> None:
    x, net, h = series(121, 3), Net(batch_first=True), None
    data = TensorDataset(x[:-1].view(12, 10, 3), x[1:].view(12, 10, 3)[..., :1])
    for _ in range(3):
        for a, b in DataLoader(data, batch_size=1, shuffle=False):
            y, h = net(a, h)  # <- TT208
            h = h.detach()
            learn(net, mse(y, b))


@fault
def epochs_over_the_training_part_by_hand() -> None:
    x, h = series(200, 2, 3)[50:81], torch.zeros(2, 4)
    w, u = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        for i in range(0, 30, 10):
            h, loss = h.detach(), torch.zeros(())
            for t in range(i, i + 10):
                h = torch.tanh(x[t] @ w + h @ u)  # <- TT208
                loss = loss + mse(h.mean(1, keepdim=True), x[t + 1, :, :1])
            loss.backward()


@sound
def one_context_at_every_step() -> None:
    context, cell, head = torch.randn(2, 3), nn.GRUCell(3, 8), nn.Linear(8, 1)
    net, h = nn.ModuleList([cell, head]), torch.zeros(2, 8)
    for _ in range(6):
        h, loss = h.detach(), torch.zeros(())
        for t in range(5):
            h = cell(context, h)
            loss = loss + (head(h) - t).square().mean()
        learn(net, loss)


@sound
def an_evaluation_of_the_same_series_in_between() -> None:
    x, net = series(121, 2, 3), Net()
    for _ in range(3):
        h = None
        for i in range(0, 120, 10):
            y, h = net(x[i : i + 10], h)
            h = h.detach()
            learn(net, mse(y, x[i + 1 : i + 11, :, :1]))
        net.eval()
        with torch.no_grad():
            state = None
            for i in range(0, 120, 10):
                _, state = net(x[i : i + 10], state)
        net.train()


# --- the same inputs at every step


@fault
def the_batch_instead_of_the_step() -> None:
    sequences, net = torch.randn(24, 6, 3), Net(batch_first=True)
    targets = torch.randn(24, 6, 6, 1)
    for i in range(0, 24, 4):
        x, h, loss = sequences[i : i + 4], None, torch.zeros(())
        for t in range(6):
            y, h = net(x, h)  # <- TT210
            loss = loss + mse(y, targets[i : i + 4, t])
        learn(net, loss)


@fault
def the_batch_instead_of_the_step_with_a_backward_each() -> None:
    data = TensorDataset(torch.randn(24, 6, 3), torch.randn(24, 6, 1))
    net = Net(batch_first=True)
    for x, target in DataLoader(data, batch_size=4, shuffle=True):
        h = None
        for t in range(x.size(1)):
            y, h = net(x, h)  # <- TT210
            h = h.detach()
            learn(net, mse(y, target[:, t : t + 1].expand(-1, 6, -1)))


@sound
def a_sequence_read_twice() -> None:
    sequences, net = torch.randn(24, 6, 3), Net(batch_first=True)
    for i in range(0, 24, 4):
        _, h = net(sequences[i : i + 4])
        y, _ = net(sequences[i : i + 4], h)
        learn(net, mse(y, torch.zeros(4, 6, 1)))


@sound
def a_cell_that_ponders_on_one_input() -> None:
    x, cell, head = torch.randn(40, 3), nn.GRUCell(3, 8), nn.Linear(8, 1)
    net = nn.ModuleList([cell, head])
    for i in range(0, 40, 4):
        h = torch.zeros(4, 8)
        for _ in range(4):
            h = cell(x[i : i + 4], h)
        learn(net, mse(head(h), x[i : i + 4, :1]))


@fault
def several_updates_on_a_batch_each_from_the_last_state() -> None:
    x, net, h = series(121, 2, 3), Net(), None
    for a, b in DataLoader(TensorDataset(x[:-1], x[1:, :, :1]), batch_size=20):
        for _ in range(2):
            y, h = net(a, h)  # <- TT210
            h = h.detach()
            learn(net, mse(y, b))


@fault
def updates_on_one_sequence_with_an_evaluation_after_each() -> None:
    x, net, h = series(31, 2, 3), Net(), None
    for _ in range(6):
        y, h = net(x[:-1], h)  # <- TT208
        h = h.detach()
        learn(net, mse(y, x[1:, :, :1]))
        net.eval()
        with torch.no_grad():
            net(x[:-1])
        net.train()


@sound
def estimates_refined_for_each_batch_and_a_look_at_the_last() -> None:
    data, net = TensorDataset(torch.randn(40, 9, 3), torch.randn(40, 1)), Net(batch_first=True)
    for x, target in DataLoader(data, batch_size=8):
        h = None
        for _ in range(3):
            y, h = net(x, h)
            h = h.detach()
            learn(net, mse(y[:, -1], target))
        with torch.no_grad():
            net(x, h)


# --- batch and time exchanged


@fault
def a_state_of_as_many_lanes_as_the_chunk_has_steps() -> None:
    x, net, h = series(121, 4, 3), Net(batch_first=True), torch.zeros(1, 4, 8)
    for i in range(0, 120, 10):
        y, h = net(x[i : i + 10], h)
        h = h.detach()
        learn(net, mse(y, x[i + 1 : i + 11, :, :1]))


@sound
def rollouts_stacked_over_time() -> None:
    net = Net()
    for _ in range(6):
        x = torch.stack([torch.randn(4, 3) for _ in range(10)])
        y, _ = net(x)
        learn(net, mse(y, torch.zeros(10, 4, 1)))


# --- lanes that differ


@fault
def a_smaller_last_batch() -> None:
    data = TensorDataset(torch.randn(18, 7, 3), torch.randn(18, 7, 1))
    net, h = Net(batch_first=True), torch.zeros(1, 4, 8)
    for x, target in DataLoader(data, batch_size=4):
        y, h = net(x, h)
        h = h.detach()
        learn(net, mse(y, target))


# --- masks, gradients by hand


@sound
def left_padding_with_a_mask_by_hand() -> None:
    w, u = torch.randn(3, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True)
    for _ in range(6):
        x, mask = torch.randn(12, 4, 3), torch.ones(12, 4, 1)
        for lane, pad in enumerate((3, 5, 4, 7)):
            mask[:pad, lane], x[:pad, lane] = 0, 0
        h = torch.zeros(4, 5)
        for x_t, m in zip(x, mask, strict=True):
            h = m * torch.tanh(x_t @ w + h @ u) + (1 - m) * h
        h.square().mean().backward()


def truncated_by_hand(pass_on: bool, k1: int = 4, k2: int = 8) -> None:
    """The gradient of a state is passed on to the step before it, `k2` steps back."""
    x, cell, head = series(81, 2, 3), nn.GRUCell(3, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.01)
    states: list[tuple[Any, Tensor]] = [(None, torch.zeros(2, 8))]
    for t in range(80):
        state = states[-1][1].detach()  # <- TT203
        state.requires_grad = True
        new = cell(x[t], state)
        states = [*states[1 - k2 :], (state, new)]
        if (t + 1) % k1 == 0:
            loss = mse(head(new), x[t + 1, :, :1])
            optimizer.zero_grad()
            loss.backward(retain_graph=pass_on)
            for i in range(k2 - 1 if pass_on else 0):
                if len(states) < i + 2 or states[-i - 2][0] is None:
                    break
                states[-i - 2][1].backward(states[-i - 1][0].grad, retain_graph=True)
            with torch.no_grad():
                for p in optimizer.param_groups[0]["params"]:
                    p.data.sub_(0.01 * p.grad)


@sound
def the_gradient_is_passed_on_by_hand() -> None:
    truncated_by_hand(pass_on=True)


# --- states by key, several nets


@fault
def states_by_key_in_another_order() -> None:
    users = {name: series(61, 3) for name in ("dora", "abe", "carl", "bea")}
    states, net = {name: torch.zeros(8) for name in users}, Net()
    for i in range(0, 60, 10):
        x = torch.stack([users[name][i : i + 11] for name in users], 1)
        h = torch.stack([states[name] for name in sorted(users)])
        y, h = net(x[:-1], h.unsqueeze(0))  # <- TT206
        states.update(zip(users, h[0].detach(), strict=True))
        learn(net, mse(y, x[1:, :, :1]))


@fault
def clips_by_a_convolutional_cell_without_a_new_state() -> None:
    net, h = nn.Conv2d(6, 4, 3, padding=1), torch.zeros(1, 4, 5, 5)
    for clip in [series(16, 1, 2, 5, 5) for _ in range(4)]:
        for t in range(0, 16, 8):
            h, loss = h.detach(), torch.zeros(())
            for x in clip[t : t + 8]:
                h = torch.tanh(net(torch.cat([x, h], 1)))  # <- TT204
                loss = loss + h.square().mean()
            learn(net, loss)


@fault
def users_in_turn_with_one_state_by_cells() -> None:
    users, cell, head = [series(61, 2, 3) for _ in range(3)], nn.GRUCell(3, 8), nn.Linear(8, 3)
    net, h = nn.ModuleList([cell, head]), torch.zeros(2, 8)
    for i in range(0, 60, 12):
        for x in users:
            h, loss = h.detach(), torch.zeros(())
            for t in range(i, i + 12):
                h = cell(x[t], h)  # <- TT204
                loss = loss + mse(head(h), x[t + 1])
            learn(net, loss)


@fault
def places_of_recordings_drawn_with_the_last_state() -> None:
    recordings, net, h = [series(25, 3) for _ in range(6)], Net(batch_first=True), None
    for _ in range(12):
        picks = torch.randint(6, (3,)).tolist()
        starts = torch.randint(1, 16, (3,)).tolist()
        x = torch.stack([recordings[k][i : i + 9] for k, i in zip(picks, starts, strict=True)])
        y, h = net(x[:, :-1], h)  # <- TT207
        h = h.detach()
        learn(net, mse(y, x[:, 1:, :1]))


@sound
def question_and_answer_of_every_chunk_with_one_state() -> None:
    questions, answers, net, h = series(120, 1, 3), series(72, 1, 3), Net(), None
    for question, answer in zip(questions.split(10), answers.split(6), strict=True):
        _, h = net(question, h)
        y, h = net(answer, h)
        learn(net, y.square().mean())
        h = h.detach()


@sound
def replayed_windows_from_stored_states() -> None:
    x, rnn, head, states = series(400, 1, 3), nn.GRU(3, 8), nn.Linear(8, 1), [torch.zeros(1, 1, 8)]
    net = nn.ModuleList([rnn, head])
    with torch.no_grad():
        for chunk in x.split(10):
            states.append(rnn(chunk, states[-1])[1])
    for _ in range(20):
        starts = torch.randint(0, 38, (4,)).tolist()
        windows = torch.cat([x[10 * i : 10 * i + 20] for i in starts], 1)
        h = torch.cat([states[i] for i in starts], 1)
        with torch.no_grad():
            _, h = rnn(windows[:5], h)
        y, _ = rnn(windows[5:], h)
        learn(net, mse(head(y), windows[5:, :, :1]))


@fault
def chunks_without_their_last_step_start_anew() -> None:
    gru = nn.GRU(3, 4)
    for x in series(60, 2, 3).split(10):
        y, _ = gru(x[:-1])  # <- TT201
        learn(gru, y.square().mean())


@sound
def events_of_one_user_in_a_table_of_all() -> None:
    cell, table, h = nn.GRUCell(3, 4), series(60, 3), torch.zeros(1, 4)
    for i in (0, 3, 4, 9, 11, 16, 18, 25):
        h = cell(table[i : i + 1], h.detach())
        learn(cell, h.square().mean())


@sound
def lanes_shuffled_together_with_their_states() -> None:
    x, net, h, order = series(120, 4, 3), Net(), torch.zeros(1, 4, 8), torch.arange(4)
    for i in range(0, 120, 10):
        permutation = torch.randperm(4)
        order, h = order[permutation], h[:, permutation]
        y, h = net(x[i : i + 10, order], h)
        h = h.detach()
        learn(net, mse(y, x[i : i + 10, order, :1]))


REFUSED = {
    "a_state_of_as_many_lanes_as_the_chunk_has_steps": "TT211",
    "a_smaller_last_batch": "TT211",
}


def expected(loop: Loop) -> str:
    """The code of a loop with a fault: marked in it, unless the call in `Net` is refused."""
    source = inspect.getsource(TwoNames if "another_name" in loop.__name__ else loop)
    marked = set(MARK.findall(source)) or {REFUSED[loop.__name__]}
    (code,) = marked
    return code


def lines_of(code: str) -> set[int]:
    """The lines of this file that are marked with a code, and the call in `Net`."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    return {
        i
        for i, line in enumerate(lines, 1)
        if ("# <-" in line and code in line) or "self.rnn(x, h)" in line
    }


@pytest.mark.parametrize("loop", FAULTS, ids=name_of)
def test_a_fault_is_named_with_its_code_at_a_line_that_is_marked(loop: Loop) -> None:
    (finding,) = diagnose(loop)
    assert finding.code == expected(loop)
    assert finding.line in lines_of(finding.code)


@pytest.mark.parametrize("loop", SOUND, ids=name_of)
def test_a_sound_loop_has_no_finding(loop: Loop) -> None:
    assert diagnose(loop) == ()
