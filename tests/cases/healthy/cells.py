"""Healthy loops of cells and of recurrences by hand."""

import random

import torch
from torch import nn
from torch.func import functional_call


class Amp(nn.Module):
    def __init__(self, units=8):
        super().__init__()
        self.rec, self.lin = nn.LSTM(1, units), nn.Linear(units, 1)
        self.hidden = None

    def forward(self, x):
        y, self.hidden = self.rec(x, self.hidden)
        return self.lin(y) + x

    def detach_hidden(self):
        self.hidden = tuple(h.clone().detach() for h in self.hidden)

    def reset_hidden(self):
        self.hidden = None


def esr(output, target):
    return (target - output).square().mean() / (target.square().mean() + 1e-5)


def amplifier_warmed_up():
    """Audio effects: every batch of segments begins with 40 samples without a gradient, then one
    update for each 60 samples, the state carried and cut inside the segment.
    """
    torch.manual_seed(2116)
    time = torch.arange(8 * 220) / 30
    clean = (torch.sin(time) * torch.sin(time / 9)).view(8, 220).t().unsqueeze(-1)
    wet = torch.tanh(3 * clean)
    amp = Amp()
    optimizer = torch.optim.Adam(amp.parameters(), lr=5e-4)
    for _ in range(2):
        for batch in torch.randperm(8).split(4):
            x, y = clean[:, batch], wet[:, batch]
            with torch.no_grad():
                amp(x[:40])
            for start in range(40, 220, 60):
                optimizer.zero_grad()
                loss = esr(amp(x[start : start + 60]), y[start : start + 60])
                loss.backward()
                optimizer.step()
                amp.detach_hidden()
            amp.reset_hidden()


class Diagonal(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.nu = nn.Parameter(torch.log(torch.linspace(0.01, 0.5, n)))
        self.theta = nn.Parameter(torch.linspace(0.0, 3.0, n))
        self.B = nn.Parameter(torch.randn(1, n, dtype=torch.cfloat) / n)
        self.C = nn.Parameter(torch.randn(n, 1, dtype=torch.cfloat) / n)

    def forward(self, u, state):
        steps = len(u)
        log = torch.complex(-torch.exp(self.nu), self.theta)
        powers = torch.exp(log * torch.arange(steps + 1).unsqueeze(-1))
        lag = torch.arange(steps).unsqueeze(1) - torch.arange(steps)
        kernel = powers[lag.clamp(min=0)] * (lag >= 0).unsqueeze(-1)
        driven = torch.einsum("tsn,sbn->tbn", kernel, u.to(self.B.dtype) @ self.B)
        x = driven + powers[1:].unsqueeze(1) * state
        return (x @ self.C).real, x[-1]


def diagonal_state_space():
    """A diagonal linear recurrence with complex states: each chunk is computed by powers at once,
    from the carried state, which is detached between chunks.
    """
    torch.manual_seed(2127)
    u = torch.sin(torch.linspace(0, 40, 201)).view(-1, 1, 1) + torch.randn(201, 2, 1) / 10
    model = Diagonal(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = torch.zeros(2, 6, dtype=torch.cfloat)
    for i in range(0, 200, 20):
        y, state = model(u[i : i + 20], state)
        loss = nn.functional.mse_loss(y, u[i + 1 : i + 21])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = state.detach()


def cell(p, x, h):
    z = torch.sigmoid(x @ p["xz"] + h @ p["hz"])
    return z * h + (1 - z) * torch.tanh(x @ p["xh"] + h @ p["hh"])


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.RNNCell(1, 6), nn.Linear(6, 1)

    def forward(self, x):
        h, ys = torch.zeros(x.size(1), 6), []
        for x_t in x:
            h = self.cell(x_t, h)
            ys.append(self.out(h))
        return torch.stack(ys)


def task():
    time = torch.linspace(0, 3, 13).view(-1, 1, 1)
    waves = (1 + torch.rand(1)) * torch.sin(time + 3 * torch.rand(1, 4, 1))
    return waves[:-1], waves[1:]


def inner_loop_of_second_order():
    """Meta-learning: the inner updates of a recurrent model keep their graph on purpose
    (create_graph=True), so that the outer loss can go back through them.
    """
    torch.manual_seed(2121)
    net = Net2()
    outer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(4):
        x, y = task()
        fast = dict(net.named_parameters())
        for _ in range(3):
            inner = nn.functional.mse_loss(functional_call(net, fast, (x[:, :2],)), y[:, :2])
            gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {k: p - 0.1 * g for (k, p), g in zip(fast.items(), gradients)}
        loss = nn.functional.mse_loss(functional_call(net, fast, (x[:, 2:],)), y[:, 2:])
        outer.zero_grad()
        loss.backward()
        outer.step()


class Net3(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 8), nn.Linear(8, 1)

    def forward(self, x, state):
        ys = []
        for frame in x:
            state = self.cell(frame, state)
            ys.append(self.head(state[0]))
        return torch.stack(ys), state


def lanes_and_states_shuffled_alike():
    """The lanes are put into a new order before every chunk, inputs, targets and state by the same
    permutation.
    """
    torch.manual_seed(2105)
    x = torch.randn(100, 6, 3).cumsum(0) / 8
    y = x.amax(-1, keepdim=True)
    net = Net3()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    state = (torch.zeros(6, 8), torch.zeros(6, 8))
    for t in range(0, 100, 10):
        order = torch.randperm(6)
        x, y = x[:, order], y[:, order]
        state = tuple(s[order].detach() for s in state)
        prediction, state = net(x[t : t + 10], state)
        loss = nn.functional.mse_loss(prediction, y[t : t + 10])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Proposer(nn.Module):
    def __init__(self, n=8):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(1, n), nn.Linear(n, 1)

    def forward(self, gradient, state):
        state = self.cell(gradient.unsqueeze(-1), state)
        return 0.1 * self.out(state[0]).squeeze(-1), state


def learnt_optimizer():
    """Learning to learn: an LSTM proposes the updates of another model. Its state and that model's
    weights keep their graph for five updates, then both are detached.
    """
    torch.manual_seed(2120)
    proposer = Proposer()
    meta = torch.optim.Adam(proposer.parameters(), lr=3e-3)
    for _ in range(2):
        A, b = torch.randn(6, 6), torch.randn(6)
        theta = torch.zeros(6, requires_grad=True)
        state = (torch.zeros(6, 8), torch.zeros(6, 8))
        total = 0.0
        for step in range(1, 21):
            loss = (A @ theta - b).square().mean()
            (gradient,) = torch.autograd.grad(loss, theta, retain_graph=True)
            total = total + loss
            update, state = proposer(gradient.detach(), state)
            theta = theta + update
            if step % 5 == 0:
                total = total + (A @ theta - b).square().mean()
                meta.zero_grad()
                total.backward()
                meta.step()
                theta = theta.detach().requires_grad_()
                state = tuple(s.detach() for s in state)
                total = 0.0


class NTM(nn.Module):
    def __init__(self, width=4, rows=6, n=12):
        super().__init__()
        self.controller = nn.LSTMCell(width + 1 + width, n)
        self.keys = nn.Linear(n, 2 * (width + 1))
        self.erase, self.add = nn.Linear(n, width), nn.Linear(n, width)
        self.out = nn.Linear(n + width, width)
        self.width, self.rows, self.n = width, rows, n
        self.register_buffer("bias", torch.randn(1, rows, width) * 0.1)

    def address(self, memory, key, strength):
        match = nn.functional.cosine_similarity(memory, key.unsqueeze(1), dim=-1)
        return (match * nn.functional.softplus(strength)).softmax(-1).unsqueeze(-1)

    def forward(self, inputs):
        lanes = inputs.size(1)
        memory = self.bias.expand(lanes, -1, -1)
        state = (torch.zeros(lanes, self.n), torch.zeros(lanes, self.n))
        read, outputs = torch.zeros(lanes, self.width), []
        for x in inputs:
            state = self.controller(torch.cat([x, read], -1), state)
            rk, rs, wk, ws = self.keys(state[0]).split([self.width, 1, self.width, 1], -1)
            w = self.address(memory, wk, ws)
            erase = torch.sigmoid(self.erase(state[0])).unsqueeze(1)
            memory = memory * (1 - w * erase) + w * self.add(state[0]).unsqueeze(1)
            read = (self.address(memory, rk, rs) * memory).sum(1)
            outputs.append(self.out(torch.cat([state[0], read], -1)))
        return torch.stack(outputs)


def memory_matrix():
    """A controller with an external memory that it erases and writes out of place; controller and
    memory start anew with each copy task.
    """
    torch.manual_seed(2125)
    ntm = NTM()
    optimizer = torch.optim.RMSprop(ntm.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(5):
        length = int(torch.randint(2, 6, ()))
        bits = torch.randint(2, (length, 3, 4)).float()
        inputs = torch.zeros(2 * length, 3, 5)
        inputs[:length, :, :4] = bits
        inputs[length, :, 4] = 1.0
        logits = ntm(inputs)[length:]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, bits)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(ntm.parameters(), 10.0)
        optimizer.step()


class ResetRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, first, h):
        ys = []
        for x_t, first_t in zip(x, first):
            h = torch.where(first_t.unsqueeze(-1), torch.zeros_like(h), h)
            h = self.cell(x_t, h)
            ys.append(self.head(h))
        return torch.stack(ys), h


def lane(lengths):
    pieces = [torch.randn(n, 2).cumsum(0) / 6 for n in lengths]
    first = torch.zeros(sum(lengths), dtype=torch.bool)
    first[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    return torch.cat(pieces), first


def resets_inside_a_chunk():
    """Lanes reset wherever their recordings end, also inside a chunk, by torch.where, out of
    place.
    """
    torch.manual_seed(108)
    lanes = [lane([33, 47, 20]), lane([50, 25, 25]), lane([81, 19])]
    x = torch.stack([signal for signal, _ in lanes], 1)
    first = torch.stack([flags for _, flags in lanes], 1)
    model = ResetRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(3, 8)
    for a, r in zip(x.split(10), first.split(10)):
        y, h = model(a, r, h.detach())
        loss = (y[:-1] - a[1:]).pow(2)[~r[1:]].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sampling_from_itself():
    """A cell reads the next value, or its own prediction of it, which is cut with the state."""
    random.seed(7)
    torch.manual_seed(7)
    wave = torch.sin(torch.arange(161.0) / 6).unsqueeze(1)
    cell, readout = nn.GRUCell(1, 10), nn.Linear(10, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *readout.parameters()], lr=0.05)
    h, value = torch.zeros(1, 10), wave[:1]
    for begin in range(0, 160, 16):
        error = 0.0
        for t in range(begin, begin + 16):
            h = cell(value, h)
            guess = readout(h)
            error = error + nn.functional.l1_loss(guess, wave[t + 1 : t + 2])
            value = guess if random.random() < 0.4 else wave[t + 1 : t + 2]
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        h, value = h.detach(), value.detach()


class Store:
    def __init__(self, n):
        self.n, self.rows = n, {}

    def gather(self, who):
        return torch.stack([self.rows.get(i, torch.zeros(self.n)) for i in who])

    def scatter(self, who, h):
        self.rows.update(zip(who, h.detach().unbind(0)))


def sessions_gathered_by_number():
    """A batch of sessions is put together anew at every step, and their states are gathered and
    scattered by the same numbers.
    """
    torch.manual_seed(2207)
    sessions = {i: torch.randn(41, 2).cumsum(0) / 6 for i in range(6)}
    at = dict.fromkeys(sessions, 0)
    store, cell, head = Store(8), nn.GRUCell(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(10):
        who = [i for i in torch.randperm(6).tolist() if at[i] < 40][:3]
        h, loss = store.gather(who), 0.0
        for k in range(8):
            x = torch.stack([sessions[i][at[i] + k] for i in who])
            y = torch.stack([sessions[i][at[i] + k + 1] for i in who])
            h = cell(x, h)
            loss = loss + nn.functional.mse_loss(head(h), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        store.scatter(who, h)
        for i in who:
            at[i] += 8


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8)
        self.linear = nn.Linear(8, 1)

    def forward(self, waves, future=0):
        n = len(waves)
        h1, c1, h2, c2 = (torch.zeros(n, 8) for _ in range(4))
        outputs = []
        for x in waves.split(1, dim=1):
            h1, c1 = self.first(x, (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            outputs.append(self.linear(h2))
        for _ in range(future):
            h1, c1 = self.first(outputs[-1], (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def sines_with_lbfgs():
    """Whole sine waves and LBFGS: the closure runs the two cells from zeros over all steps; the
    future is predicted without gradients.
    """
    torch.manual_seed(2019)
    phase = torch.rand(6, 1) * 6
    data = torch.sin(torch.arange(41).view(1, -1) / 4 + phase)
    model, criterion = Sequence(), nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(data[2:, :-1]), data[2:, 1:])
        loss.backward()
        return loss

    for step in range(2):
        print(step, optimizer.step(closure).item())
        with torch.no_grad():
            prediction = model(data[:2, :-1], future=10)
            print(criterion(prediction[:, :-10], data[:2, 1:]).item())


class Subspace(nn.Module):
    def __init__(self, past=10, n=6):
        super().__init__()
        self.past = past
        self.encoder = nn.Sequential(nn.Linear(2 * past, 16), nn.Tanh(), nn.Linear(16, n))
        self.f, self.g = nn.Linear(n + 1, n), nn.Linear(n, 1)

    def forward(self, u_past, y_past, u):
        x = self.encoder(torch.cat([u_past, y_past], dim=1))
        ys = []
        for u_t in u.unbind(1):
            ys.append(self.g(x).squeeze(-1))
            x = x + torch.tanh(self.f(torch.cat([x, u_t.unsqueeze(-1)], -1)))
        return torch.stack(ys, 1)


def start_estimated_from_the_past():
    """Short windows of a long measurement, drawn at random; an encoder estimates the state at the
    start of each from the ten samples before it.
    """
    torch.manual_seed(2115)
    u = torch.randn(400).cumsum(0) / 12
    y = (u.cumsum(0) / 20).tanh()
    model = Subspace()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(12):
        at = torch.randint(10, 370, (8,))
        window = at.unsqueeze(1) + torch.arange(-10, 30)
        u_w, y_w = u[window], y[window]
        prediction = model(u_w[:, :10], y_w[:, :10], u_w[:, 10:])
        loss = nn.functional.mse_loss(prediction, y_w[:, 10:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class ConvLSTMCell(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.gates = nn.Conv2d(channels + hidden, 4 * hidden, 3, padding=1)
        self.hidden = hidden

    def forward(self, x, state):
        h, c = state
        i, f, o, g = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def init_hidden(self, batch, size):
        return tuple(torch.zeros(batch, self.hidden, *size) for _ in range(2))


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([ConvLSTMCell(1, 4), ConvLSTMCell(4, 4)])
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, frames, states):
        predictions = []
        for x in frames.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = cell(x, states[i])
                x = states[i][0]
            predictions.append(self.out(x))
        return torch.stack(predictions, 1), states


def video_with_convolutional_cells():
    """A convolutional LSTM of two layers over clips: a list of pairs as the state, zero at each
    clip, detached between its chunks of frames.
    """
    torch.manual_seed(2022)
    clips = [torch.randn(2, 13, 1, 6, 6).cumsum(1) / 4 for _ in range(3)]
    model = Predictor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for clip in clips:
        states = [cell.init_hidden(2, (6, 6)) for cell in model.cells]
        for t in range(0, 12, 4):
            states = [(h.detach(), c.detach()) for h, c in states]
            prediction, states = model(clip[:, t : t + 4], states)
            loss = nn.functional.mse_loss(prediction, clip[:, t + 1 : t + 5])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
