"""Healthy loops of recurrent layers."""

import copy
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import throughtime as tt


def accumulation_by_steps():
    """Chunks of unequal length make one step per recording. Sums are accumulated and divided by
    the number of all steps.
    """
    torch.manual_seed(110)
    lstm, fc = nn.LSTM(2, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*lstm.parameters(), *fc.parameters()], lr=1e-3)
    for recording in (torch.randn(50, 2, 2).cumsum(0) / 7, torch.randn(37, 2, 2).cumsum(0) / 7):
        target = recording.sum(-1, keepdim=True)
        state = (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(recording.split(16), target.split(16)):
            out, state = lstm(x, state)
            state = tuple(s.detach() for s in state)
            loss = (fc(out) - y).pow(2).sum() / target.numel()
            loss.backward()
            total += loss.item()
        optimizer.step()
        print(total)


def accumulation_of_equal_chunks():
    """Four chunks of the same length make one step, each loss divided by four."""
    torch.manual_seed(109)
    gru, fc = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*gru.parameters(), *fc.parameters()], lr=0.05)
    walk = torch.randn(161, 2, 2).cumsum(0) / 12
    accumulate, h = 4, torch.zeros(1, 2, 8)
    for i, (x, y) in enumerate(zip(walk[:-1].split(10), walk[1:].split(10)), 1):
        out, h = gru(x, h)
        h = h.detach()
        loss = nn.functional.mse_loss(fc(out), y)
        (loss / accumulate).backward()
        if i % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(i, loss.item())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(3, 8), nn.Linear(8, 1)

    def forward(self, x, state=None):
        y, state = self.lstm(x, state)
        return self.fc(y), state


def autocast():
    """Mixed precision: forward and loss under autocast in bfloat16, backward outside, the carried
    state detached.
    """
    torch.manual_seed(120)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.randn(100, 2, 3).cumsum(0) / 10
    y = x.mean(-1, keepdim=True)
    state = None
    for a, b in zip(x.split(10), y.split(10)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            prediction, state = net(a, state)
            loss = nn.functional.mse_loss(prediction.float(), b)
        state = tuple(s.detach().float() for s in state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


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


def clipping_and_scheduler():
    """Gradient clipping before and a scheduler after every step; the rest is a plain
    carried loop.
    """
    torch.manual_seed(119)
    model = nn.ModuleDict({"rnn": nn.RNN(2, 8, num_layers=2), "out": nn.Linear(8, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = CosineAnnealingLR(optimizer, T_max=12)
    walk = torch.randn(121, 3, 2).cumsum(0) / 10
    hidden = torch.zeros(2, 3, 8)
    for step in range(12):
        piece = walk[10 * step : 10 * step + 11]
        optimizer.zero_grad(set_to_none=True)
        y, hidden = model["rnn"](piece[:-1], hidden)
        loss = nn.functional.huber_loss(model["out"](y), piece[1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        scheduler.step()
        hidden.detach_()
        print(step, scheduler.get_last_lr()[0], loss.item())


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


class Simulation:
    def __init__(self, lanes):
        self.x = torch.zeros(lanes, 2)

    def run(self, steps):
        frames = []
        for _ in range(steps):
            self.x = 0.99 * self.x + 0.1 * torch.randn_like(self.x)
            frames.append(self.x)
        return torch.stack(frames)


def endless_simulation():
    """What is called an epoch is only a report: the simulated series never starts again, so its
    state is never reset.
    """
    torch.manual_seed(2102)
    simulation = Simulation(4)
    lstm, head = nn.LSTM(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    state, last = None, simulation.run(1)
    for epoch in range(3):
        total = 0.0
        for _ in range(5):
            frames = torch.cat([last, simulation.run(16)])
            last = frames[-1:]
            out, state = lstm(frames[:-1], state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(head(out), frames[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total / 5)


class Net3(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.fc = nn.Linear(8, 1)

    def forward(self, x, state=None):
        y, state = self.lstm(x, state)
        return self.fc(y), state


@torch.no_grad()
def evaluate(net, x, y, chunk):
    net.eval()
    state, squared = None, 0.0
    for a, b in zip(x.split(chunk, 1), y.split(chunk, 1)):
        prediction, state = net(a, state)
        squared += (prediction - b).pow(2).sum().item()
    return squared / y.numel()


def evaluation_without_a_graph():
    """Evaluation of a long recording in chunks: the state is carried, under no_grad."""
    torch.manual_seed(111)
    x = torch.randn(2, 200, 3).cumsum(1) / 10
    print(evaluate(Net3(), x, x.sum(-1, keepdim=True), chunk=10))


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


def smooth(y, alpha, beta):
    level, trend, errors = y[0], y[1] - y[0], []
    for value in y[2:]:
        forecast = level + trend
        errors.append((value - forecast) ** 2)
        new = alpha * value + (1 - alpha) * forecast
        trend = beta * (new - level) + (1 - beta) * trend
        level = new
    return torch.stack(errors).mean()


def exponential_smoothing():
    """Holt's method with learnt factors: level and trend are plain numbers, run over the whole
    series from the same start in every iteration.
    """
    torch.manual_seed(2119)
    sales = torch.randn(90).cumsum(0) + 0.5 * torch.arange(90)
    raw = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.1)
    for iteration in range(12):
        alpha, beta = torch.sigmoid(raw)
        loss = smooth(sales, alpha, beta)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(iteration, loss.item(), alpha.item(), beta.item())


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


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high, self.fc = nn.GRU(2, 6), nn.GRU(6, 6), nn.Linear(6, 2)
        for p in self.low.parameters():
            p.requires_grad = False

    def forward(self, x, states):
        y, low = self.low(x, states["low"])
        y, high = self.high(y, states["high"])
        return self.fc(y), {"low": low, "high": high}


def frozen_first_layer():
    """The first of two layers is frozen; both states are carried and detached."""
    torch.manual_seed(124)
    model = Two()
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    walk = torch.randn(101, 2, 2).cumsum(0) / 10
    states = {"low": torch.zeros(1, 2, 6), "high": torch.zeros(1, 2, 6)}
    for i in range(0, 100, 10):
        y, states = model(walk[i : i + 10], states)
        loss = nn.functional.mse_loss(y, walk[i + 1 : i + 11])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        states = {name: h.detach() for name, h in states.items()}


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


def greedy_layerwise():
    """Every layer learns from its own loss and detaches what it is given: layers in a row, not
    steps in time.
    """
    torch.manual_seed(205)
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
    heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(5)])
    optimizer = torch.optim.SGD([*layers.parameters(), *heads.parameters()], lr=0.01)
    for _ in range(6):
        x, label, loss = torch.randn(16, 8), torch.randint(2, (16,)), 0
        optimizer.zero_grad()
        for layer, head in zip(layers, heads, strict=True):
            x = torch.relu(layer(x.detach()))
            loss = loss + nn.functional.cross_entropy(head(x), label)
        loss.backward()
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


def lbfgs():
    """LBFGS calls its closure several times for a chunk. Each call starts from the same detached
    state.
    """
    torch.manual_seed(121)
    gru, head = nn.GRU(1, 6), nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS([*gru.parameters(), *head.parameters()], lr=0.1, max_iter=3)
    t = torch.arange(81) * 0.2
    wave = torch.stack([t.sin(), t.cos()], 1).unsqueeze(-1)
    state = torch.zeros(1, 2, 6)
    for i in range(0, 80, 10):
        x, y = wave[i : i + 10], wave[i + 1 : i + 11]

        def closure():
            optimizer.zero_grad()
            out, _ = gru(x, state)
            loss = nn.functional.mse_loss(head(out), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        with torch.no_grad():
            _, state = gru(x, state)
        print(i, loss.item())


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


def lstm_by_hand():
    """Truncated backpropagation by hand with nn.LSTM: both parts of the state detached between
    chunks, fresh at every epoch.
    """
    torch.manual_seed(104)
    lstm, head = nn.LSTM(1, 10, num_layers=2), nn.Linear(10, 1)
    parameters = [*lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    t = torch.arange(121) * 0.2
    wave = torch.stack([t.sin(), t.cos(), (t / 2).sin()], 1).unsqueeze(-1)
    for epoch in range(2):
        state = (torch.zeros(2, 3, 10), torch.zeros(2, 3, 10))
        for x, y in zip(wave[:-1].split(12), wave[1:].split(12)):
            out, state = lstm(x, detach(state))
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


def means_weighted_by_length():
    """One step for each recording; the mean of every chunk counts by its share of the steps, also
    that of the short tail.
    """
    torch.manual_seed(2107)
    cell, head = nn.RNN(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=2e-3)
    for length in (53, 47, 65):
        walk = torch.randn(length + 1, 2, 2).cumsum(0) / 6
        h = None
        optimizer.zero_grad()
        for x, y in zip(walk[:-1].split(15), walk[1:].split(15)):
            out, h = cell(x, h)
            h = h.detach()
            loss = nn.functional.mse_loss(head(out), y) * len(x) / length
            loss.backward()
        optimizer.step()


def micro_batches_of_lanes():
    """A batch of eight lanes is too large: two lanes at a time, each pair with its own carried
    state, and one step for the four parts of a chunk.
    """
    torch.manual_seed(2017)
    rnn, head = nn.LSTM(3, 8, num_layers=2), nn.Linear(8, 3)
    optimizer = torch.optim.AdamW([*rnn.parameters(), *head.parameters()], lr=1e-3)
    stream = torch.randn(101, 8, 3).cumsum(0) / 9
    parts = stream.split(2, dim=1)
    states = [None] * len(parts)
    for t in range(0, 100, 20):
        optimizer.zero_grad()
        for i, part in enumerate(parts):
            out, state = rnn(part[t : t + 20], states[i])
            states[i] = [s.detach() for s in state]
            loss = nn.functional.mse_loss(head(out), part[t + 1 : t + 21])
            (loss / len(parts)).backward()
        optimizer.step()


def multitask_means():
    """Three tasks of different sizes count the same in each step, on purpose; no state
    joins them.
    """
    torch.manual_seed(206)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tasks = [torch.randn(n, 4) for n in (16, 48, 30)]
    for _ in range(5):
        optimizer.zero_grad()
        for task in tasks:
            nn.functional.mse_loss(net(task), task[:, :1]).backward()
        optimizer.step()


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


def pixels_in_a_fixed_order():
    """The pixels of every image are read in one order drawn at the start, images side
    by side.
    """
    torch.manual_seed(68)
    images = torch.rand(60, 5, 5)
    labels = (images.mean((1, 2)) > 0.5).long()
    order = torch.randperm(25)
    pixels = images.flatten(1)[:, order].t().unsqueeze(2)
    lstm, head = nn.LSTM(1, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(2):
        for begin in range(0, 60, 10):
            _, (h, _) = lstm(pixels[:, begin : begin + 10])
            loss = nn.functional.cross_entropy(head(h[0]), labels[begin : begin + 10])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


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


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, noise):
        return self.out(self.rnn(noise)[0])


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def recurrent_gan():
    """A GAN over short sequences: two optimizers, fresh noise for every batch, no
    state carried.
    """
    torch.manual_seed(101)
    G, D = Generator(), Critic()
    g_opt = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    for i in range(10):
        phase = 6.28 * torch.rand(8, 1)
        real = torch.sin(torch.arange(12) * 0.5 + phase).unsqueeze(-1)
        fake = G(torch.randn(8, 12, 3))
        d_opt.zero_grad()
        d_loss = bce(D(real), torch.ones(8, 1)) + bce(D(fake.detach()), torch.zeros(8, 1))
        d_loss.backward()
        d_opt.step()
        g_opt.zero_grad()
        g_loss = bce(D(fake), torch.ones(8, 1))
        g_loss.backward()
        g_opt.step()
        print(i, d_loss.item(), g_loss.item())


class Trainer:
    def __init__(self, core, head):
        self.core, self.head = core, head
        self.optimizer = torch.optim.Adam([*core.parameters(), *head.parameters()], lr=2e-3)

    def play(self, recording, chunk):
        state = (torch.zeros(1, 1, self.core.hidden_size), torch.zeros(1, 1, self.core.hidden_size))
        for x, y in zip(recording[:-1].split(chunk), recording[1:].split(chunk)):
            out, state = self.core(x, state)
            state = (state[0].detach(), state[1].detach())
            loss = nn.functional.mse_loss(self.head(out), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()


def reset_at_recording_ends():
    """Recordings of several lengths are played one after another, each from a state of zeros."""
    torch.manual_seed(107)
    recordings = {
        name: torch.randn(n + 1, 1, 2).cumsum(0) / 8 + n / 20
        for name, n in (("a", 60), ("b", 40), ("c", 80))
    }
    trainer = Trainer(nn.LSTM(2, 8), nn.Linear(8, 2))
    for name, recording in recordings.items():
        print(name, trainer.play(recording, chunk=10))


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


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.h = None

    def reset(self):
        self.h = None

    def forward(self, x):
        if self.h is not None:
            self.h = self.h.detach()
        out, self.h = self.rnn(x, self.h)
        return self.head(out)


def state_in_the_module():
    """The state lives in self.h and is detached there, by assignment, when the next
    chunk begins.
    """
    torch.manual_seed(106)
    signal = torch.randn(4, 96, 3).cumsum(1) / 10
    labels = (signal.sum(-1) > 0).long()
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model.reset()
        for x, y in zip(signal.split(12, 1), labels.split(12, 1)):
            optimizer.zero_grad(set_to_none=False)
            loss = nn.functional.cross_entropy(model(x).reshape(-1, 2), y.reshape(-1))
            loss.backward()
            optimizer.step()
        print(loss.item())


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
