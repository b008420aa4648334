"""Healthy loops of cells and of recurrences by hand."""

import copy
import random
from collections import deque

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


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


class Stack(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(a, b) for a, b in zip(sizes, sizes[1:]))
        self.out = nn.Linear(sizes[-1], sizes[0])

    def forward(self, x, states):
        ys = []
        for frame in x:
            new_states = []
            for cell, h in zip(self.cells, states):
                frame = cell(frame, h)
                new_states.append(frame)
            states = new_states
            ys.append(self.out(frame))
        return torch.stack(ys), states


def cells_by_hand():
    """A loop over GRU cells whose states are kept in a list, detached in place of the old list
    before every chunk.
    """
    torch.manual_seed(105)
    net = Stack([2, 6, 5])
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    walk = torch.randn(91, 3, 2).cumsum(0) / 9
    states = [torch.zeros(3, cell.hidden_size) for cell in net.cells]
    for i in range(0, 90, 9):
        states = [h.detach() for h in states]
        y, states = net(walk[i : i + 9], states)
        loss = (y - walk[i + 1 : i + 10]).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 8), nn.Linear(8, 2)

    def forward(self, x, y, h):
        loss = 0.0
        for x_t, y_t in zip(x, y):
            h = self.cell(x_t, h)
            loss = loss + (self.head(h) - y_t).square().mean()
        return loss, h


def checkpointed_pieces():
    """Exact gradients over a long sequence in little memory: each piece is run under
    torch.utils.checkpoint, the state goes on with its graph, and there is one backward.
    """
    torch.manual_seed(2118)
    core = Core()
    optimizer = torch.optim.Adam(core.parameters(), lr=2e-3)
    for _ in range(3):
        walk = torch.randn(101, 3, 2).cumsum(0) / 9
        h, total = torch.zeros(3, 8), 0.0
        for x, y in zip(walk[:-1].split(20), walk[1:].split(20)):
            loss, h = checkpoint(core, x, y, h, use_reentrant=False)
            total = total + loss / 100
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(2, 8), nn.Linear(8, 2)

    def forward(self, xs, h):
        ys = []
        for x in xs:
            h = self.cell(x, h)
            ys.append(self.out(h))
        return torch.stack(ys), h


def evaluate(net, series):
    h, errors = torch.zeros(1, 8), []
    with torch.no_grad():
        for i in range(0, 45, 15):
            y, h = net(series[i : i + 15], h)
            errors.append(nn.functional.mse_loss(y, series[i + 1 : i + 16]).item())
    return sum(errors) / len(errors)


def early_stopping():
    """The state of training is left alone by validation, which has its own, and the best weights
    are copied; training stops when they stop improving.
    """
    torch.manual_seed(2020)
    train = torch.randn(91, 4, 2).cumsum(0) / 9
    valid = torch.randn(46, 1, 2).cumsum(0) / 9
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    best, patience, weights = float("inf"), 2, None
    for epoch in range(6):
        h = torch.zeros(4, 8)
        for i in range(0, 90, 15):
            y, h = net(train[i : i + 15], h)
            loss = nn.functional.mse_loss(y, train[i + 1 : i + 16])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            h = h.detach()
        error = evaluate(net, valid)
        if error < best:
            best, patience, weights = error, 2, copy.deepcopy(net.state_dict())
        else:
            patience -= 1
        print(epoch, error)
        if patience == 0:
            break
    net.load_state_dict(weights)


def reservoir(u, inner, outer, x):
    states = torch.empty(len(u), len(x))
    for t, value in enumerate(u):
        x = 0.7 * x + 0.3 * torch.tanh(inner @ x + outer * value)
        states[t] = x
    return states, x


def echo_state_network():
    """A reservoir with fixed random weights and plain matrices runs through the series; its
    readout is solved in closed form, on states that no graph holds.
    """
    torch.manual_seed(2124)
    n = 30
    W, U = torch.randn(n, n), torch.rand(n) - 0.5
    W *= 0.9 / torch.linalg.eigvals(W).abs().max()
    time = torch.arange(400) / 8
    series = torch.sin(time) + torch.sin(1.7 * time) / 2
    x, blocks = torch.zeros(n), []
    for chunk in series[:300].split(50):
        states, x = reservoir(chunk, W, U, x)
        blocks.append(states)
    S = torch.cat(blocks)[30:]
    target = series[31:301]
    readout = torch.linalg.solve(S.t() @ S + 1e-4 * torch.eye(n), S.t() @ target)
    ahead, _ = reservoir(series[300:399], W, U, x)
    print((ahead @ readout - series[301:]).square().mean().item())


def eligibility_traces():
    """Forward learning without any backward: traces of the leaky units give the gradient at each
    step, which is put into .grad before optimizer.step().
    """
    torch.manual_seed(2122)
    n, m, leak = 8, 3, 0.9
    weight = nn.Parameter(torch.randn(n, m) / 3)
    readout = nn.Parameter(torch.randn(1, n) / 3)
    optimizer = torch.optim.Adam([weight, readout], lr=5e-3)
    x = torch.randn(150, m).cumsum(0) / 10
    goal = x.sum(-1).tanh()
    v, trace = torch.zeros(n), torch.zeros(m)
    with torch.no_grad():
        for begin in range(0, 150, 15):
            optimizer.zero_grad()
            weight.grad, readout.grad = torch.zeros(n, m), torch.zeros(1, n)
            for t in range(begin, begin + 15):
                v = leak * v + weight @ x[t]
                trace = leak * trace + x[t]
                rate = torch.tanh(v)
                error = (readout @ rate).squeeze() - goal[t]
                readout.grad += error * rate
                weight.grad += torch.outer(error * readout[0] * (1 - rate**2), trace)
            optimizer.step()
            print(begin, error.item())


def gaps_in_a_measurement():
    """Steps that were not measured are passed over; the state goes on behind them."""
    torch.manual_seed(83)
    level = torch.randn(151, 2, 2).cumsum(0) / 4
    level[torch.rand(151) < 0.2] = float("nan")
    cell, head = nn.LSTMCell(2, 9), nn.Linear(9, 2)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-2)
    h, c = torch.zeros(2, 9), torch.zeros(2, 9)
    for begin in range(0, 150, 15):
        h, c, loss = h.detach(), c.detach(), torch.zeros(())
        for t in range(begin, begin + 15):
            if level[t].isnan().any():
                continue
            h, c = cell(level[t], (h, c))
            if not level[t + 1].isnan().any():
                loss = loss + (head(h) - level[t + 1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def chunk_loss(params, x, y, h):
    w, u, g, v = params
    loss = 0.0
    for x_t, y_t in zip(x, y):
        gate = torch.sigmoid(torch.cat([x_t, h], 1) @ g)
        h = gate * h + (1 - gate) * torch.tanh(x_t @ w + h @ u)
        loss = loss + (h @ v - y_t).pow(2).mean()
    return loss / len(x), h


def gated_cell_by_hand():
    """A minimal gated cell written with matrices and a hand-made update. H is cut between chunks
    with detach_().
    """
    torch.manual_seed(127)
    params = [
        (0.3 * torch.randn(shape)).requires_grad_()
        for shape in ((3, 10), (10, 10), (13, 10), (10, 1))
    ]
    x = torch.randn(72, 4, 3)
    y = x.sum(-1, keepdim=True).cumsum(0).tanh()
    h = torch.zeros(4, 10)
    for k in range(9):
        loss, h = chunk_loss(params, x[8 * k : 8 * k + 8], y[8 * k : 8 * k + 8], h)
        loss.backward()
        h.detach_()
        with torch.no_grad():
            for p in params:
                p -= 0.05 * p.grad
                p.grad.zero_()
        print(k, loss.item())


def cell(p, x, h):
    z = torch.sigmoid(x @ p["xz"] + h @ p["hz"])
    return z * h + (1 - z) * torch.tanh(x @ p["xh"] + h @ p["hh"])


def gradients_by_autograd_grad():
    """No optimizer and no .grad: torch.autograd.grad gives the gradients of a cell written by
    hand, and the update is a line of arithmetic.
    """
    torch.manual_seed(2018)
    shapes = {"xz": (2, 8), "hz": (8, 8), "xh": (2, 8), "hh": (8, 8), "out": (8, 2)}
    p = {k: (torch.randn(s) / 3).requires_grad_() for k, s in shapes.items()}
    walk = torch.randn(121, 4, 2).cumsum(0) / 10
    h = torch.zeros(4, 8)
    for i in range(0, 120, 12):
        h, loss = h.detach(), 0.0
        for t in range(i, i + 12):
            h = cell(p, walk[t], h)
            loss = loss + (h @ p["out"] - walk[t + 1]).pow(2).mean() / 12
        gradients = torch.autograd.grad(loss, list(p.values()))
        with torch.no_grad():
            for w, g in zip(p.values(), gradients):
                w -= 0.05 * g
        print(i, loss.item())


class TBPTT:
    def __init__(self, cell, head, k1, k2):
        self.cell, self.head, self.k1, self.k2 = cell, head, k1, k2

    def backward_through(self, states, loss):
        loss.backward(retain_graph=True)
        for i in range(min(self.k2, len(states)) - 1):
            leaf = states[-1 - i][0]
            flow, leaf.grad = leaf.grad, None
            states[-2 - i][1].backward(flow, retain_graph=True)
        for leaf, _ in states:
            leaf.grad = None

    def train(self, inputs, targets, h):
        states = []
        for t in range(len(inputs)):
            leaf = h.detach()
            leaf.requires_grad_(True)
            h = self.cell(inputs[t], leaf)
            states = [*states[-self.k2 + 1 :], (leaf, h)]
            if (t + 1) % self.k1 == 0:
                loss = nn.functional.mse_loss(self.head(h), targets[t])
                self.backward_through(states, loss)
        return h


def gradients_handed_on():
    """Each step starts from a detached leaf, and the gradients are handed on by hand. Every second
    step a loss goes back over the last six steps, with one update at the end.
    """
    torch.manual_seed(2004)
    cell, head = nn.RNNCell(2, 7), nn.Linear(7, 2)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.01)
    walks = [torch.randn(41, 3, 2).cumsum(0) / 8 for _ in range(3)]
    tbptt = TBPTT(cell, head, k1=2, k2=6)
    for walk in walks:
        optimizer.zero_grad()
        tbptt.train(walk[:-1], walk[1:], torch.zeros(3, 7))
        optimizer.step()


def horizon_by_retaining():
    """Stride 5, horizon 15 with retain_graph: each loss goes back over two older edges, old graphs
    are let go, one step at the end.
    """
    torch.manual_seed(115)
    stride, edges = 5, 2
    cell, head = nn.GRUCell(2, 8), nn.Linear(8, 2)
    parameters = [*cell.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    walk = torch.randn(81, 3, 2).cumsum(0) / 10
    optimizer.zero_grad()
    h, older = torch.zeros(3, 8), deque(maxlen=edges)
    for begin in range(0, 80, stride):
        start = h.detach().requires_grad_()
        h, loss = start, 0.0
        for t in range(begin, begin + stride):
            h = cell(walk[t], h)
            loss = loss + nn.functional.mse_loss(head(h), walk[t + 1]) / 80
        loss.backward(retain_graph=True)
        flowing, start.grad = start.grad, None
        for leaf, end in reversed(older):
            end.backward(flowing, retain_graph=True)
            flowing, leaf.grad = leaf.grad, None
        older.append((start, h))
    optimizer.step()
    print(sum(p.grad.norm().item() for p in parameters))


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


class Net4(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.start = nn.ParameterDict(
            {name: nn.Parameter(0.1 * torch.randn(1, 1, hidden)) for name in "hc"}
        )
        self.lstm, self.out = nn.LSTM(1, hidden), nn.Linear(hidden, 1)

    def initial(self, lanes):
        return tuple(self.start[name].expand(-1, lanes, -1).contiguous() for name in "hc")

    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return self.out(y), state


def learnt_initial_state():
    """The initial state is a parameter. It enters at the start of every epoch and is never
    detached itself.
    """
    torch.manual_seed(116)
    net = Net4()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    grid = torch.arange(101) * 0.15
    wave = torch.stack([grid.sin(), grid.cos()], 1).unsqueeze(-1)
    for epoch in range(2):
        state = net.initial(lanes=2)
        for i in range(0, 100, 10):
            y, state = net(wave[i : i + 10], state)
            loss = nn.functional.mse_loss(y, wave[i + 1 : i + 11])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = tuple(s.detach() for s in state)
        print(epoch, loss.item())


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


def left_context_of_a_convolution():
    """Each chunk is read with the samples before it that the convolution needs; the
    state goes on.
    """
    torch.manual_seed(31)
    sound, chunk, kernel = torch.randn(3, 1, 184).cumsum(2) / 5, 18, 5
    filters, lstm, head = nn.Conv1d(1, 4, kernel), nn.LSTM(4, 9, batch_first=True), nn.Linear(9, 1)
    modules = nn.ModuleList([filters, lstm, head])
    optimizer = torch.optim.RMSprop(modules.parameters(), lr=1e-3)
    state = None
    for begin in range(kernel - 1, 184 - chunk, chunk):
        frames = filters(sound[:, :, begin - kernel + 1 : begin + chunk]).tanh()
        out, state = lstm(frames.transpose(1, 2), state)
        state = tuple(s.detach() for s in state)
        following = sound[:, 0, begin + 1 : begin + chunk + 1]
        loss = nn.functional.mse_loss(head(out).squeeze(2), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


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


def multiple_shooting():
    """Every segment of one recording starts from a state of its own that is learnt, and a penalty
    pulls the end of each segment to the start of the next.
    """
    torch.manual_seed(2114)
    segments, steps, n = 6, 20, 5
    u = torch.sin(torch.linspace(0, 25, segments * steps)).unsqueeze(-1)
    y = u.cumsum(0) / 12
    cell, head = nn.RNNCell(1, n), nn.Linear(n, 1)
    starts = nn.Parameter(torch.zeros(segments, n))
    optimizer = torch.optim.Adam(
        [
            {"params": [*cell.parameters(), *head.parameters()], "lr": 5e-3},
            {"params": [starts], "lr": 5e-2},
        ]
    )
    inputs = u.view(segments, steps, 1).transpose(0, 1)
    outputs = y.view(segments, steps, 1).transpose(0, 1)
    for iteration in range(15):
        h, fit = starts, 0.0
        for u_t, y_t in zip(inputs, outputs):
            h = cell(u_t, h)
            fit = fit + (head(h) - y_t).square().mean() / steps
        gaps = (h[:-1] - starts[1:]).square().mean()
        loss = fit + 10.0 * gaps
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(iteration, fit.item(), gaps.item())


def one_long_sequence_by_a_cell():
    """One update on whole sequences of 300 steps by a cell: the graph is as long as the sequence,
    and has to be.
    """
    torch.manual_seed(209)
    cell, head = nn.LSTMCell(1, 8), nn.Linear(8, 10)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
    x = torch.rand(4, 300, 1)
    h = c = torch.zeros(4, 8)
    for t in range(300):
        h, c = cell(x[:, t], (h, c))
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(h), torch.randint(10, (4,))).backward()
    optimizer.step()


def one_period_repeated():
    """The series is one period, joined with itself: its end is where the next period begins."""
    torch.manual_seed(1308)
    period = torch.randn(60, 3, 2).cumsum(0) / 8
    series = torch.cat([period] * 3)
    cell, head = nn.GRUCell(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-3)
    h = torch.zeros(3, 8)
    for i in range(0, 160, 10):
        loss = 0.0
        for t in range(i, i + 10):
            h = cell(series[t], h)
            loss = loss + nn.functional.mse_loss(head(h), series[t + 1]) / 10
        h = h.detach()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.fc = nn.GRUCell(2, 8), nn.Linear(8, 2)

    def forward(self, x, h):
        outputs = torch.zeros(x.size(0), x.size(1), 2)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            outputs[:, t] = self.fc(h)
        return outputs, h


def outputs_in_a_tensor_made_before():
    """The outputs of the steps are written into a tensor made beforehand. Nothing needs its old
    values, and autograd keeps track of the slices.
    """
    torch.manual_seed(2109)
    walk = torch.randn(4, 91, 2).cumsum(1) / 9
    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(4, 8)
    for t in range(0, 90, 15):
        outputs, h = model(walk[:, t : t + 15], h)
        loss = nn.functional.mse_loss(outputs, walk[:, t + 1 : t + 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        h = h.detach()


class Narx(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 8), nn.Linear(8, 1)

    def forward(self, control, y, h):
        ys = []
        for u in control:
            h = self.cell(torch.cat([u, y.detach()], -1), h)
            y = self.out(h)
            ys.append(y)
        return torch.stack(ys), y, h


def own_prediction_detached():
    """The model is given its last prediction as an input, detached as usual in autoregressive
    training; the recurrent state keeps its graph within the chunk.
    """
    torch.manual_seed(2028)
    control = torch.randn(150, 2, 2).cumsum(0) / 10
    plant = control.sum(-1, keepdim=True).tanh()
    model = Narx()
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
    y, h = torch.zeros(2, 1), torch.zeros(2, 8)
    for u, goal in zip(control.split(15), plant.split(15)):
        ys, y, h = model(u, y, h.detach())
        loss = nn.functional.huber_loss(ys, goal)
        optimizer.zero_grad()
        loss.backward()
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


class Refiner(nn.Module):
    def __init__(self, n=10):
        super().__init__()
        self.features = nn.Linear(6, n)
        self.gru, self.delta = nn.GRUCell(n + 2, n), nn.Linear(n, 2)

    def forward(self, pair, iterations):
        context = torch.tanh(self.features(pair))
        hidden, flow, estimates = context, torch.zeros(len(pair), 2), []
        for _ in range(iterations):
            flow = flow.detach()
            hidden = self.gru(torch.cat([context, flow], -1), hidden)
            flow = flow + self.delta(hidden)
            estimates.append(flow)
        return estimates


def same_input_many_iterations():
    """A refinement net reads the same features eight times on purpose: its GRU moves an estimate
    step by step, each with a loss, all in one graph.
    """
    torch.manual_seed(2023)
    model = Refiner()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=12)
    for _ in range(12):
        pair = torch.randn(16, 6)
        truth = pair[:, :2] - pair[:, 3:5]
        loss = 0.0
        for k, estimate in enumerate(model(pair, 8)):
            loss = loss + 0.8 ** (7 - k) * (estimate - truth).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


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


class TwoClocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.fast, self.slow = nn.GRU(2 + 5, 8), nn.GRUCell(8, 5)
        self.head = nn.Linear(8, 2)

    def forward(self, x, fast, slow, tick):
        if tick:
            slow = self.slow(fast[0], slow)
        y, fast = self.fast(torch.cat([x, slow.expand(len(x), -1, -1)], -1), fast)
        return self.head(y), fast, slow


def slow_state_for_four_chunks():
    """Two clocks: the fast state is carried from chunk to chunk; the slow one changes at every
    fourth chunk, and the three chunks between read the same slow state.
    """
    torch.manual_seed(2113)
    walk = torch.randn(129, 3, 2).cumsum(0) / 10
    model = TwoClocks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    fast, slow = torch.zeros(1, 3, 8), torch.zeros(3, 5)
    for n, t in enumerate(range(0, 128, 8)):
        y, fast, slow = model(walk[t : t + 8], fast.detach(), slow.detach(), n % 4 == 0)
        loss = nn.functional.mse_loss(y, walk[t + 1 : t + 9])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


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


def states_forgotten_at_random():
    """State dropout: at each chunk a lane in five loses its carried state, to make the model able
    to start anywhere.
    """
    torch.manual_seed(2131)
    lstm, head = nn.LSTM(2, 8), nn.Linear(8, 1)
    parameters = [*lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    x = torch.randn(160, 8, 2).cumsum(0) / 12
    y = (x[..., :1] - x[..., 1:]).tanh()
    h, c = torch.zeros(1, 8, 8), torch.zeros(1, 8, 8)
    for xb, yb in zip(x.split(16), y.split(16)):
        keep = (torch.rand(1, 8, 1) > 0.2).float()
        out, (h, c) = lstm(xb, (h.detach() * keep, c.detach() * keep))
        loss = nn.functional.mse_loss(head(out), yb)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


class Bits(nn.Module):
    def __init__(self):
        super().__init__()
        self.write, self.keep = nn.Linear(2, 10), nn.Linear(10, 10, bias=False)
        self.read = nn.Linear(10, 1)

    def forward(self, x, bits):
        for x_t in x:
            soft = torch.tanh(self.write(x_t) + self.keep(bits))
            bits = soft + (soft.sign() - soft).detach()
        return self.read(bits), bits


def straight_through_bits():
    """A binary state with a straight-through gradient: the detached difference adds only the
    rounding, and the gradient goes through the potential.
    """
    torch.manual_seed(2111)
    model = Bits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(120, 4, 2).cumsum(0) / 10
    bits = torch.ones(4, 10)
    for chunk in x.split(12):
        y, bits = model(chunk, bits.detach())
        loss = nn.functional.mse_loss(y, chunk[0].sum(-1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Truncated(nn.Module):
    def __init__(self, truncate):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)
        self.h0 = nn.Parameter(torch.zeros(1, 1, 8))
        self.c0 = nn.Parameter(torch.zeros(1, 1, 8))
        self.truncate = truncate

    def forward(self, x):
        state = tuple(p.expand(-1, len(x), -1).contiguous() for p in (self.h0, self.c0))
        pieces = []
        for piece in x.split(self.truncate, dim=1):
            y, state = self.lstm(piece, state)
            state = tuple(s.detach() for s in state)
            pieces.append(self.head(y))
        return torch.cat(pieces, dim=1)


def truncated_inside_forward():
    """The model cuts its graph at every 16th step of a whole sequence by itself; one loss and one
    backward for all of it.
    """
    torch.manual_seed(2117)
    model = Truncated(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for _ in range(6):
        x = torch.randn(4, 80, 1).cumsum(1) / 8
        loss = nn.functional.mse_loss(model(x), torch.tanh(2 * x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


class Cell(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels + 3, 12, 3, padding=1)

    def forward(self, x, h, c):
        i, f, o, g = self.conv(torch.cat([x, h], dim=1)).chunk(4, dim=1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.ModuleList([Cell(1), Cell(3)]), nn.Conv2d(3, 1, 1)

    def forward(self, clips):
        states = [(torch.zeros(4, 3, 6, 6), torch.zeros(4, 3, 6, 6)) for _ in self.cells]
        frames = []
        for t in range(clips.shape[1]):
            z = clips[:, t]
            for k, cell in enumerate(self.cells):
                states[k] = cell(z, *states[k])
                z = states[k][0]
            frames.append(self.head(z))
        return torch.stack(frames, 1)


def two_layers_of_one_cell_class():
    """Two layers of one class of cells. The forget gate of the second has no gradient at the first
    step, since the memory there is zero.
    """
    torch.manual_seed(1305)
    net = Layers()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(6):
        clips = torch.randn(4, 9, 1, 6, 6).cumsum(1) / 5
        optimizer.zero_grad()
        nn.functional.mse_loss(net(clips[:, :-1]), clips[:, 1:]).backward()
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


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        h, out = x.new_zeros(len(x), 8), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            if t == 9:
                h = h.detach()
            if t >= 10:
                out.append(self.head(h))
        return torch.stack(out, 1)


def warm_up_inside_the_model():
    """The model warms its state up for ten steps and detaches it. The steps before have no loss
    and get no credit.
    """
    torch.manual_seed(210)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 30, 3)).square().mean().backward()
        optimizer.step()


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 7), nn.Linear(7, 3)

    def forward(self, steps, h):
        guesses = []
        for step in steps:
            h = self.cell(step, h)
            guesses.append(self.head(h))
        return torch.stack(guesses), h


def weights_made_by_each_update():
    """Every update makes new weights, which the module is called with; the state goes on."""
    torch.manual_seed(47)
    series = torch.randn(97, 2, 3).cumsum(0) / 8
    model, h = Forecaster(), torch.zeros(2, 7)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for begin in range(0, 96, 12):
        chunk, following = series[begin : begin + 12], series[begin + 1 : begin + 13]
        guesses, h = functional_call(model, weights, (chunk, h))
        loss = nn.functional.mse_loss(guesses, following)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        weights = {
            name: (weight - 0.05 * gradient).detach().requires_grad_()
            for (name, weight), gradient in zip(weights.items(), gradients)
        }
        h = h.detach()


def zeros_after_the_cut():
    """Lanes are reset by writing zeros into the state, but only after backward and detach, when no
    graph needs it.
    """
    torch.manual_seed(2110)
    gru, head = nn.GRU(3, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    lanes, chunk = 4, 12
    recordings = iter([torch.randn(n, 3).cumsum(0) / 8 for n in (48, 24, 36, 60, 48, 36, 48, 24)])
    live, place = [next(recordings) for _ in range(lanes)], [0] * lanes
    h = torch.zeros(1, lanes, 8)
    for _ in range(5):
        x = torch.stack([r[p : p + chunk] for r, p in zip(live, place)], 1)
        out, h = gru(x, h)
        loss = nn.functional.mse_loss(head(out), x.sum(-1, keepdim=True).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        h = h.detach()
        for i in range(lanes):
            place[i] += chunk
            if place[i] == len(live[i]):
                live[i], place[i] = next(recordings), 0
                h[:, i] = 0.0
