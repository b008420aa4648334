"""Healthy loops of recurrent layers."""

import copy
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

import throughtime as tt


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.fc = nn.GRU(1, 8), nn.Linear(8, 1)

    def forward(self, x, h=None):
        y, h = self.gru(x, h)
        return self.fc(y), h


@torch.no_grad()
def update(average, model, decay=0.9):
    for a, p in zip(average.parameters(), model.parameters()):
        a.mul_(decay).add_(p, alpha=1 - decay)


@torch.no_grad()
def judge(model, recording):
    h, total = None, 0.0
    for i in range(0, 60, 20):
        y, h = model(recording[i : i + 20], h)
        total += nn.functional.mse_loss(y, recording[i + 1 : i + 21]).item()
    return total / 3


def averaged_weights_on_dev():
    """An exponential average of the weights is kept in place in a copy of the model; the copy is
    judged on a separate recording from a state of zeros.
    """
    torch.manual_seed(2015)
    recordings = [torch.randn(121, 2, 1).cumsum(0) / 10 for _ in range(2)]
    dev = torch.randn(61, 1, 1).cumsum(0) / 10
    model = Net2()
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for recording in recordings:
        h = None
        for i in range(0, 120, 20):
            y, h = model(recording[i : i + 20], h)
            h.detach_()
            loss = nn.functional.mse_loss(y, recording[i + 1 : i + 21])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update(average, model)
        print(judge(average, dev))


class LatencyControlled(nn.Module):
    def __init__(self):
        super().__init__()
        self.ahead, self.back = nn.GRU(3, 6), nn.GRU(3, 6)
        self.out = nn.Linear(12, 4)

    def forward(self, x, h):
        forward, h = self.ahead(x, h)
        backward, _ = self.back(x.flip(0))
        return self.out(torch.cat([forward, backward.flip(0)], -1)), h


def backwards_only_within_a_chunk():
    """A latency-controlled bidirectional net: the forward direction carries its state through the
    stream, the backward one starts anew in every chunk, as it must.
    """
    torch.manual_seed(2013)
    audio = torch.randn(200, 2, 3).cumsum(0) / 12
    phones = (audio.sum(-1) * 2).long() % 4
    net = LatencyControlled()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    h = torch.zeros(1, 2, 6)
    for x, y in zip(audio.split(20), phones.split(20)):
        logits, h = net(x, h.detach())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def bad_batches_skipped():
    """Batches with too large a gradient are left out on purpose: their gradients are cleared and
    no step uses them.
    """
    torch.manual_seed(203)
    lstm, head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 1)
    parameters = [*lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters)
    for i in range(16):
        x, y = torch.randn(8, 10, 3), torch.randn(8, 1)
        nn.functional.mse_loss(head(lstm(x)[0][:, -1]), y).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        if i in {1, 4, 6, 9}:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


def burn_in():
    """Every sampled window first warms up its state without a graph, then learns on what follows;
    nothing goes from window to window.
    """
    torch.manual_seed(128)
    series = torch.randn(400, 2).cumsum(0) / 15
    gru, head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(12):
        starts = torch.randint(0, 370, (4,)).tolist()
        window = torch.stack([series[s : s + 30] for s in starts])
        with torch.no_grad():
            _, h = gru(window[:, :15])
        out, _ = gru(window[:, 15:-1], h)
        loss = nn.functional.mse_loss(head(out), window[:, 16:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.fc = nn.GRU(3, 8), nn.Linear(8, 2)

    def forward(self, x, h):
        y, h = self.gru(x, h)
        return self.fc(y[-1]), h


def chunks_without_labels():
    """Many chunks have no label: those only move the state on, without a graph, and
    make no step.
    """
    torch.manual_seed(2133)
    x = torch.randn(240, 2, 3).cumsum(0) / 10
    labels = {3: torch.tensor([0, 1]), 4: torch.tensor([1, 1]), 9: torch.tensor([0, 0])}
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(1, 2, 8)
    for number, chunk in enumerate(x.split(20)):
        if number not in labels:
            with torch.no_grad():
                _, h = model(chunk, h)
            continue
        logits, h = model(chunk, h)
        h = h.detach()
        loss = nn.functional.cross_entropy(logits, labels[number])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def classifier_of_the_last_state():
    """Only the last state of the layer has a loss: its outputs get no gradient at all, which is no
    fault of it.
    """
    torch.manual_seed(201)
    lstm, head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()])
    for _ in range(6):
        x, label = torch.randn(4, 12, 3), torch.randint(2, (4,))
        _, (h, _) = lstm(x)
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(h[-1]), label).backward()
        optimizer.step()


def early_exits():
    """Each layer has a head of its own, and their losses go backward one by one through the one
    graph that they share.
    """
    torch.manual_seed(204)
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(9)])
    heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(9)])
    optimizer = torch.optim.SGD([*layers.parameters(), *heads.parameters()], lr=0.01)
    for _ in range(4):
        x, label = torch.randn(16, 8), torch.randint(2, (16,))
        optimizer.zero_grad()
        for i, (layer, head) in enumerate(zip(layers, heads, strict=True)):
            x = torch.relu(layer(x))
            nn.functional.cross_entropy(head(x), label).backward(retain_graph=i < 8)
        optimizer.step()


def encoder_behind_a_leaf():
    """A costly encoder is run once per recording. Its output, detached with a gradient of its own,
    collects the gradients of all chunks, which then go through the encoder in one backward.
    """
    torch.manual_seed(2005)
    encoder = nn.Sequential(nn.Conv1d(1, 6, 5, padding=2), nn.Tanh())
    decoder, head = nn.GRU(6, 8), nn.Linear(8, 1)
    modules = nn.ModuleList([encoder, decoder, head])
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3)
    recordings = [torch.randn(2, 1, 121).cumsum(-1) / 10 for _ in range(3)]
    for recording in recordings:
        optimizer.zero_grad()
        codes = encoder(recording[..., :-1]).permute(2, 0, 1)
        leaf = codes.detach().requires_grad_()
        target = recording[..., 1:].permute(2, 0, 1)
        h = None
        for x, y in zip(leaf.split(30), target.split(30)):
            out, h = decoder(x, h)
            h = h.detach()
            (nn.functional.mse_loss(head(out), y) / 4).backward()
        codes.backward(leaf.grad)
        optimizer.step()


def every_fourth_sample():
    """The signal is read at a quarter of its rate: each chunk is a strided slice, and the next
    begins where it ends.
    """
    torch.manual_seed(2001)
    signal = torch.randn(801, 2, 1).cumsum(0) / 20
    gru, head = nn.GRU(1, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    h = None
    for i in range(0, 800, 80):
        x, y = signal[i : i + 80 : 4], signal[i + 1 : i + 81 : 4]
        out, h = gru(x, h)
        h = h.detach()
        loss = nn.functional.mse_loss(head(out), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(i, loss.item())


class Hindcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 8), nn.Linear(8, 2)

    def forward(self, x, state=None):
        y, state = self.lstm(x, state)
        return self.out(y), state


def from_the_end():
    """A model of the past given the future: it reads the stream from its end to its beginning,
    chunk by chunk, each flipped, with its state carried.
    """
    torch.manual_seed(2002)
    stream = torch.randn(121, 3, 2).cumsum(0) / 10
    model = Hindcast()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        state = None
        for end in range(121, 1, -15):
            later = stream[end - 15 : end].flip(0)
            earlier = stream[end - 16 : end - 1].flip(0)
            guess, state = model(later, state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(guess, earlier)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


def frozen_core():
    """The recurrent core is frozen and runs under no_grad as a reservoir; only the
    readout learns.
    """
    torch.manual_seed(123)
    reservoir = nn.RNN(1, 20).requires_grad_(False)
    readout = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(readout.parameters(), lr=1e-2)
    t = torch.arange(121) * 0.1
    wave = (t.sin() + (3 * t).cos()).view(-1, 1, 1)
    h = torch.zeros(1, 1, 20)
    for x, y in zip(wave[:-1].split(10), wave[1:].split(10)):
        with torch.no_grad():
            features, h = reservoir(x, h)
        loss = nn.functional.mse_loss(readout(features), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())


def project(a, b):
    dot = (a * b).sum()
    return a - dot / b.pow(2).sum() * b if dot < 0 else a


def gradients_assigned_by_hand():
    """Conflicting gradients of two tasks are projected and put into .grad by hand before the step:
    no backward is called at all.
    """
    torch.manual_seed(2026)
    trunk = nn.GRU(2, 8)
    heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 1)])
    shared = list(trunk.parameters())
    optimizer = torch.optim.Adam([*shared, *heads.parameters()], lr=1e-3)
    walk = torch.randn(101, 3, 2).cumsum(0) / 10
    h = torch.zeros(1, 3, 8)
    for i in range(0, 100, 20):
        x, y = walk[i : i + 20], walk[i + 1 : i + 21]
        out, h = trunk(x, h.detach())
        losses = (
            nn.functional.mse_loss(heads[0](out), y),
            nn.functional.mse_loss(heads[1](out), y.norm(dim=-1, keepdim=True)),
        )
        rows = []
        for loss, head in zip(losses, heads):
            own = list(head.parameters())
            gradients = torch.autograd.grad(loss, shared + own, retain_graph=loss is losses[0])
            rows.append(torch.cat([g.flatten() for g in gradients[: len(shared)]]))
            for p, g in zip(own, gradients[len(shared) :]):
                p.grad = g
        merged = project(rows[0], rows[1]) + project(rows[1], rows[0])
        for p, g in zip(shared, merged.split([p.numel() for p in shared])):
            p.grad = g.view_as(p)
        optimizer.step()


def gradients_of_each_loss_logged():
    """The gradient of each part of the loss is logged before the update. Clearing it between is
    what is meant.
    """
    torch.manual_seed(211)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(8):
        z = net(torch.randn(8, 4))
        for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
            optimizer.zero_grad()
            (a * z[:, 0].square().mean() + b * z[:, 1].abs().mean()).backward(retain_graph=True)
        optimizer.step()


STRIDE, HORIZON = 5, 15


def horizon_by_recomputing():
    """Stride 5, horizon 15: every window is run again from a stored state without a graph, and
    only its last 5 steps have a loss.
    """
    torch.manual_seed(114)
    gru, head = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    walk = torch.randn(91, 3, 2).cumsum(0) / 10
    starts = deque([torch.zeros(1, 3, 8)], maxlen=HORIZON // STRIDE)
    for end in range(STRIDE, 91, STRIDE):
        begin = max(0, end - HORIZON)
        out, _ = gru(walk[begin:end], starts[0])
        loss = nn.functional.mse_loss(head(out[-STRIDE:]), walk[end - STRIDE + 1 : end + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            _, h = gru(walk[end - STRIDE : end], starts[-1])
        starts.append(h)


def inference_mode_in_place():
    """Evaluation under inference_mode changes its outputs in place, which no backward needs."""
    torch.manual_seed(208)
    gru, head = nn.GRU(3, 6), nn.Linear(6, 3)
    optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters()], lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        head(gru(torch.randn(7, 4, 3))[0]).square().mean().backward()
        optimizer.step()
        with torch.inference_mode():
            right = torch.zeros(())
            for x in torch.randn(3, 7, 4, 3):
                z = head(gru(x)[0])
                z[..., 0] = -float("inf")
                right += (z.argmax(-1) == 1).sum()
    print(int(right))


def lanes_that_end():
    """Recordings of unequal length run side by side; the state keeps the lanes of those that go
    on.
    """
    torch.manual_seed(71)
    lengths = [72, 60, 36, 24]
    recordings = [torch.randn(n + 1, 4) for n in lengths]
    gru, head = nn.GRU(4, 9), nn.Linear(9, 4)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()])
    h = torch.zeros(1, len(lengths), 9)
    for begin in range(0, 72, 12):
        running = [r for r, n in zip(recordings, lengths) if n > begin]
        x = torch.stack([r[begin : begin + 12] for r in running], dim=1)
        following = torch.stack([r[begin + 1 : begin + 13] for r in running], dim=1)
        out, h = gru(x, h[:, : len(running)].detach())
        loss = nn.functional.mse_loss(head(out), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def live_lanes_selected():
    """When recordings end, inputs and state are selected by the same indices."""
    torch.manual_seed(126)
    lengths = [30, 90, 60, 120]
    recordings = [torch.randn(n, 2).cumsum(0) / 5 for n in lengths]
    lstm, head = nn.LSTM(2, 6), nn.Linear(6, 2)
    optimizer = torch.optim.Adam(list(lstm.parameters()) + list(head.parameters()), lr=1e-3)
    alive = [0, 1, 2, 3]
    h = c = torch.zeros(1, 4, 6)
    for start in range(0, 120, 10):
        keep = [row for row, i in enumerate(alive) if lengths[i] > start]
        alive = [alive[row] for row in keep]
        x = torch.stack([recordings[i][start : start + 10] for i in alive], dim=1)
        h, c = h[:, keep].detach(), c[:, keep].detach()
        out, (h, c) = lstm(x, (h, c))
        loss = nn.functional.mse_loss(head(out[:-1]), x[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def longest_first():
    """The recordings lie in the order of their lengths, the longest first, so the lanes that go on
    are the first rows, of the inputs and of the state alike.
    """
    torch.manual_seed(2104)
    lengths = [100, 80, 80, 40, 20]
    recordings = [torch.randn(n + 1, 2).cumsum(0) / 7 for n in lengths]
    gru, head = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    h = torch.zeros(1, 5, 8)
    for t in range(0, 100, 20):
        n = sum(length >= t + 20 for length in lengths)
        chunk = torch.stack([r[t : t + 21] for r in recordings[:n]], dim=1)
        out, h = gru(chunk[:-1], h[:, :n].detach())
        loss = nn.functional.mse_loss(head(out), chunk[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(t, n, loss.item())


def detach(state):
    return tuple(s.detach() for s in state)


class Net4(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.drop, self.fc = nn.RNN(3, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x, h):
        y, h = self.rnn(x, h)
        return self.fc(self.drop(y)), h


def one_loop_for_both_phases():
    """The loop over the phases "train" and "val" has a fresh state for each phase, and gradients
    only in the first.
    """
    torch.manual_seed(2132)
    data = {
        "train": torch.randn(121, 4, 3).cumsum(0) / 10,
        "val": torch.randn(61, 2, 3).cumsum(0) / 10,
    }
    net = Net4()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(2):
        for phase, series in data.items():
            net.train(phase == "train")
            hidden, running, n = None, 0.0, 0
            for i in range(0, len(series) - 1, 20):
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    out, hidden = net(series[i : i + 20], hidden)
                    hidden = hidden.detach()
                    loss = nn.functional.mse_loss(out, series[i + 1 : i + 21])
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running, n = running + loss.item(), n + 1
            print(epoch, phase, running / n)


class Net5(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(2, 8), nn.Linear(8, 2)

    def forward(self, x, h):
        states, _ = self.gru(x, h)
        return self.head(states), states


def overlapping_chunks():
    """Chunks of 30 steps that move on by 10: the state is taken at the tenth step, where the next
    chunk begins, so the last 20 steps are read again.
    """
    torch.manual_seed(2128)
    walk = torch.randn(131, 3, 2).cumsum(0) / 10
    net = Net5()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    h = torch.zeros(1, 3, 8)
    for i in range(0, 101, 10):
        prediction, states = net(walk[i : i + 30], h)
        loss = nn.functional.mse_loss(prediction, walk[i + 1 : i + 31])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        h = states[9:10].detach()


def ragged_utterances():
    """Utterances of many lengths lie one after another in one tensor. Each is a thing of its own
    and begins from zero.
    """
    torch.manual_seed(207)
    lstm, head = nn.LSTM(5, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()])
    frames = torch.randn(200, 5).cumsum(0) / 10
    for utterance in frames.split([11, 13, 9, 20, 17, 30, 40, 60]):
        y, _ = lstm(utterance.unsqueeze(1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(y[-1]), torch.tensor([1])).backward()
        optimizer.step()


def rows_that_go_on():
    """Series of four sensors, cut into pieces and stored piece by piece, as stateful layers want
    them: row i of a batch goes on in row i of the next one.
    """
    torch.manual_seed(1307)
    series = torch.sin(torch.arange(241) * 0.2 + 6 * torch.rand(4, 1)).unsqueeze(-1)
    pieces = series[:, :-1].reshape(4, 12, 20, 1).transpose(0, 1).reshape(48, 20, 1)
    answers = series[:, 1:].square().reshape(4, 12, 20, 1).transpose(0, 1).reshape(48, 20, 1)
    net, head = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=1e-3)
    h = torch.zeros(1, 4, 8)
    for i in range(0, 48, 4):
        y, h = net(pieces[i : i + 4], h)
        h = h.detach()
        loss = nn.functional.mse_loss(head(y), answers[i : i + 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Net6(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(2, 8), nn.Linear(8, 2)

    def forward(self, x, h):
        y, h = self.gru(x, h)
        return self.out(y), h


def climb(parameters, radius):
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    moves = [p.grad * (radius / norm) for p in parameters]
    with torch.no_grad():
        for p, move in zip(parameters, moves):
            p.add_(move)
    return moves


def sharpness_aware():
    """Two passes over every chunk, both from the same state: the first finds a worse point nearby,
    the second the gradient there. One of their states is carried.
    """
    torch.manual_seed(2024)
    net = Net6()
    parameters = list(net.parameters())
    base = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    walk = torch.randn(121, 3, 2).cumsum(0) / 10
    start = torch.zeros(1, 3, 8)
    for i in range(0, 120, 15):
        x, y = walk[i : i + 15], walk[i + 1 : i + 16]
        base.zero_grad()
        nn.functional.mse_loss(net(x, start)[0], y).backward()
        moves = climb(parameters, 0.05)
        base.zero_grad()
        prediction, end = net(x, start)
        nn.functional.mse_loss(prediction, y).backward()
        with torch.no_grad():
            for p, move in zip(parameters, moves):
                p.sub_(move)
        base.step()
        start = end.detach()


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, width, batch_first=True), nn.Linear(width, 3)

    def forward(self, x, state):
        y, state = self.rnn(x, state)
        return self.head(y), state


def teacher_beside_the_student():
    """Distillation on a stream: teacher and student each carry a state of their own, the teacher's
    without a graph.
    """
    torch.manual_seed(2014)
    stream = torch.randn(3, 160, 2).cumsum(1) / 10
    labels = (stream.sum(-1).abs() * 2).long().clamp(max=2)
    teacher, student = Model(20).eval().requires_grad_(False), Model(6)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    states = {"teacher": None, "student": None}
    for t in range(0, 160, 16):
        x, y = stream[:, t : t + 16], labels[:, t : t + 16]
        soft, states["teacher"] = teacher(x, states["teacher"])
        logits, (h, c) = student(x, states["student"])
        states["student"] = (h.detach(), c.detach())
        hard = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        kl = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(soft / 2, -1), reduction="batchmean")
        optimizer.zero_grad()
        (hard + 0.1 * kl).backward()
        optimizer.step()


def throughtime_updates():
    """throughtime's own loop: stream, carried state, horizon of two strides."""
    torch.manual_seed(113)
    recordings = [
        {"inputs": torch.randn(n, 3), "targets": torch.randint(2, (n,))} for n in (90, 60, 75)
    ]
    stream = tt.Stream(recordings, lanes=2, chunk=15)
    net = tt.carry(torch.nn.Sequential(torch.nn.LSTM(3, 8), torch.nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(net.parameters())
    for update in tt.updates(
        net, stream, torch.nn.CrossEntropyLoss(), gradient=tt.Truncated(stride=15, horizon=30)
    ):
        optimizer.step()
        optimizer.zero_grad()
        print(update.loss, update.steps)


class Neurons(nn.Module):
    def __init__(self, inputs, n):
        super().__init__()
        self.synapses = nn.Linear(inputs, n)

    def forward(self, x, voltage, current):
        voltage = voltage + 0.2 * (current - voltage)
        current = 0.7 * current + self.synapses(x)
        rate = torch.sigmoid(4 * voltage - 2)
        return rate, voltage * (1 - rate), current


def two_layers_of_currents():
    """Two layers of one class carry a voltage, which reads the current of the step before."""
    torch.manual_seed(59)
    drive = torch.rand(97, 3, 4)
    first, second, readout = Neurons(4, 10), Neurons(10, 6), nn.Linear(6, 4)
    modules = nn.ModuleList([first, second, readout])
    optimizer = torch.optim.Adam(modules.parameters(), lr=5e-3)
    a, b = [torch.zeros(3, 10)] * 2, [torch.zeros(3, 6)] * 2
    for begin in range(0, 96, 12):
        loss = 0.0
        for t in range(begin, begin + 12):
            rate, *a = first(drive[t], *a)
            rate, *b = second(rate, *b)
            loss = loss + nn.functional.mse_loss(readout(rate), drive[t + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        a, b = [s.detach() for s in a], [s.detach() for s in b]


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 8)
        self.value = nn.Linear(8, 2)
        self.sign = nn.Linear(8, 2)

    def forward(self, x, h):
        y, h = self.gru(x, h)
        return self.value(y), self.sign(y), h


def two_losses_on_one_graph():
    """Two losses share one graph: retain_graph=True for the first, none for the last, and the
    state is detached.
    """
    torch.manual_seed(100)
    walk = torch.randn(121, 3, 2).cumsum(0) / 10
    net = TwoHeads()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    h = torch.zeros(1, 3, 8)
    for x, y in zip(walk[:-1].split(10), walk[1:].split(10)):
        value, sign, h = net(x, h)
        optimizer.zero_grad()
        nn.functional.mse_loss(value, y).backward(retain_graph=True)
        nn.functional.binary_cross_entropy_with_logits(sign, (y > 0).float()).backward()
        optimizer.step()
        h = h.detach()


def validation_from_a_copy():
    """Validation starts from a copy of the training state; training goes on from its own."""
    torch.manual_seed(1306)
    stream, held_out = torch.randn(201, 3, 2).cumsum(0) / 9, torch.randn(31, 3, 2).cumsum(0) / 9
    net, head = nn.LSTM(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=1e-3)
    state = torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)
    for i in range(0, 200, 10):
        y, state = net(stream[i : i + 10], state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.mse_loss(head(y), stream[i + 1 : i + 11])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i in {40, 150}:
            net.eval()
            own = tuple(s.clone() for s in state) if i == 40 else copy.deepcopy(state)
            with torch.no_grad():
                for k in range(0, 30, 10):
                    y, own = net(held_out[k : k + 10], own)
                    print(nn.functional.mse_loss(head(y), held_out[k + 1 : k + 11]).item())
            net.train()


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(2, 8), nn.Linear(8, 1)
        self.state = None

    def forward(self, x):
        if self.state is not None:
            self.state = tuple(s.detach() for s in self.state)
        y, self.state = self.lstm(x, self.state)
        return self.fc(y)


@torch.no_grad()
def validate(model, x, y):
    kept, model.state = model.state, None
    model.eval()
    losses = [nn.functional.mse_loss(model(a), b).item() for a, b in zip(x.split(10), y.split(10))]
    model.train()
    model.state = kept
    return sum(losses) / len(losses)


def validation_puts_the_state_back():
    """Validation in the middle of an epoch sets the training state aside, starts from its own, and
    puts the first one back.
    """
    torch.manual_seed(125)
    x, xv = torch.randn(120, 3, 2).cumsum(0) / 9, torch.randn(40, 3, 2).cumsum(0) / 9
    y, yv = x.prod(-1, keepdim=True), xv.prod(-1, keepdim=True)
    model = Stateful()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (a, b) in enumerate(zip(x.split(10), y.split(10)), 1):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(step, loss.item(), validate(model, xv, yv))


class Runoff(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 10), nn.Linear(10, 1)

    def forward(self, rain, state):
        y, state = self.lstm(rain, state)
        return self.head(y), state


@torch.inference_mode()
def validate_2(model, past, rain, flow):
    model.eval()
    _, state = model(past, None)
    prediction, _ = model(rain, state)
    model.train()
    return nn.functional.mse_loss(prediction, flow).item()


def warmed_up_on_the_past():
    """Validation is the year after the training years: the model first runs through those from
    zeros without gradients, and goes on from there.
    """
    torch.manual_seed(2103)
    rain = torch.randn(200, 1, 2).cumsum(0) / 10
    flow = rain.cumsum(0).mean(-1, keepdim=True) / 15
    model = Runoff()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        state = None
        for i in range(0, 150, 25):
            prediction, state = model(rain[i : i + 25], state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(prediction, flow[i : i + 25])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, validate_2(model, rain[:150], rain[150:], flow[150:]))
