"""States that are not carried, cut off, or carried where they must not be."""

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from ignite.contrib.engines import Tbptt_Events, create_supervised_tbptt_trainer
from ignite.engine import Engine, Events
from ignite.metrics import MeanSquaredError
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class ConvGRU(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.zr = nn.Conv2d(channels + hidden, 2 * hidden, 3, padding=1)
        self.new = nn.Conv2d(channels + hidden, hidden, 3, padding=1)
        self.out = nn.Conv2d(hidden, channels, 1)

    def forward(self, frames, h):
        ys = []
        for x in frames:
            z, r = self.zr(torch.cat([x, h], 1)).sigmoid().chunk(2, 1)  # <- TT204
            h = (1 - z) * h + z * torch.tanh(self.new(torch.cat([x, r * h], 1)))  # <- TT204
            ys.append(self.out(h))
        return torch.stack(ys), h


def clips_run_together():
    """Every clip is a scene of its own, but the state of the convolutional cell is made once,
    before the first: each clip begins with the memory of another.
    """
    torch.manual_seed(1101)
    clips = [torch.randn(17, 1, 2, 5, 5).cumsum(0) / 5 for _ in range(4)]
    model = ConvGRU(2, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(1, 4, 5, 5)
    for clip in clips:  # <- TT204
        for t in range(0, 16, 8):
            prediction, h = model(clip[t : t + 8], h)  # <- TT204
            h = h.detach()
            loss = nn.functional.mse_loss(prediction, clip[t + 1 : t + 9])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class StepWise(nn.Module):
    def __init__(self, n_in, n_hidden, n_out):
        super().__init__()
        self.cell = nn.GRUCell(n_in, n_hidden)
        self.out = nn.Linear(n_hidden, n_out)

    def forward(self, x, h):
        ys = []
        for t in range(x.shape[1]):
            h = h.detach()  # <- TT203
            h = self.cell(x[:, t], h)
            ys.append(self.out(h))
        return torch.stack(ys, 1), h


def detached_at_every_step():
    """h is detached inside the loop over time, not between chunks: credit flows back a single
    step.
    """
    torch.manual_seed(28)
    x = torch.randn(3, 90, 2).cumsum(1) / 9
    y = x.roll(5, 1).mean(-1, keepdim=True)
    model = StepWise(2, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    h = torch.zeros(3, 8)
    for i in range(9):
        s = slice(10 * i, 10 * i + 10)
        prediction, h = model(x[:, s], h)
        loss = nn.functional.mse_loss(prediction, y[:, s])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(8, 1)

    def forward(self, x, hc=None):
        y, hc = self.lstm(x, hc)  # <- TT202
        return self.fc(self.drop(y)), hc


def evaluate(model, x, y, chunk=10):
    model.eval()
    hc, squared, count = None, 0.0, 0
    for a, b in zip(x.split(chunk, 1), y.split(chunk, 1)):
        prediction, hc = model(a, hc)  # <- TT202
        squared += (prediction - b).pow(2).sum().item()
        count += b.numel()
    return squared / count


def evaluation_with_the_graph_on():
    """model.eval() does not turn gradients off: the carried state ties the whole evaluation into
    one graph.
    """
    torch.manual_seed(25)
    x = torch.randn(2, 200, 3).cumsum(1) / 10
    print("mse", evaluate(Net(), x, x.sum(-1, keepdim=True)))


class Estimator(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.rnn = nn.RNN(inputs, units, num_layers=2, batch_first=True)
        self.fc = nn.Linear(units, 1)

    def forward(self, x, h0):
        out, hn = self.rnn(x, h0)  # <- TT201
        return self.fc(out), hn


def first_state_every_time():
    """Every chunk of the recording is started from h0; the state at its end is called hn and never
    used.
    """
    torch.manual_seed(1013)
    force = torch.randn(3, 160, 1).cumsum(1) / 12
    speed = force.cumsum(1) / 20
    model = Estimator(1, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    for epoch in range(2):
        h0 = torch.zeros(2, 3, 8)
        for k in range(0, 160, 20):
            estimate, hn = model(force[:, k : k + 20], h0)  # <- TT201
            loss = nn.functional.mse_loss(estimate, speed[:, k : k + 20])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(epoch, loss.item())


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(1, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x, h):
        ys = []
        for x_t in x:
            h = self.cell(x_t, h)  # <- TT202
            ys.append(self.out(h))
        return torch.stack(ys), h


def ignite_evaluator_with_gradients():
    """Ignite: a hand-written evaluator carries the state through a long recording with gradients
    on.
    """
    torch.manual_seed(64)
    net = Filter().eval()
    states = {}

    def evaluate(engine, batch):
        x, y = batch
        prediction, states["h"] = net(x, states["h"])  # <- TT202
        return prediction.detach(), y

    evaluator = Engine(evaluate)
    evaluator.add_event_handler(Events.STARTED, lambda engine: states.update(h=torch.zeros(2, 8)))
    MeanSquaredError().attach(evaluator, "mse")
    x = torch.randn(160, 2, 1).cumsum(0) / 12
    evaluator.run(list(zip(x[:-1].split(10)[:15], x[1:].split(10)[:15])))
    print(evaluator.state.metrics)


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(2, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, hidden=None):
        y, hidden = self.rnn(x, hidden)  # <- TT201
        return self.head(y), hidden


def ignite_trainer_fed_with_chunks():
    """Ignite's TBPTT trainer gets each chunk of a long stream as a batch of its own. It starts
    every batch without a state.
    """
    torch.manual_seed(63)
    net = Net2()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    trainer = create_supervised_tbptt_trainer(net, optimizer, nn.MSELoss(), tbtt_step=10)

    @trainer.on(Tbptt_Events.TIME_ITERATION_COMPLETED)
    def log(engine):
        print(engine.state.iteration, round(engine.state.output, 4))

    stream = torch.randn(121, 4, 2).cumsum(0) / 11
    chunks = list(zip(stream[:-1].split(10), stream[1:].split(10)))
    trainer.run(chunks, max_epochs=1)  # <- TT201


def leaky_sum_of_states():
    """A leaky cell by hand, h = 0.7 h + 0.3 new; the state of one recording enters the next."""
    torch.manual_seed(1309)
    recordings = [torch.randn(81, 3, 2).cumsum(0) / 9 for _ in range(3)]
    read, keep, head = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    modules = nn.ModuleList([read, keep, head])
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3)
    h = torch.zeros(3, 8)
    for recording in recordings:
        for i in range(0, 80, 20):
            h = h.detach()
            loss = 0.0
            for t in range(i, i + 20):
                h = 0.7 * h + 0.3 * torch.tanh(read(recording[t]) + keep(h))  # <- TT204
                loss = loss + nn.functional.mse_loss(head(h), recording[t + 1]) / 20
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Recordings(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(57)
        self.data = [
            torch.randn(n + 1, 2, generator=generator).cumsum(0) / 9 + 2 * k
            for k, n in enumerate((40, 60, 30))
        ]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, k):
        return self.data[k][:-1], self.data[k][1:]


class LitNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.gru, self.fc = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 2)
        self.hidden = torch.zeros(1, 1, 8)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for x, y in zip(batch[0].split(10, 1), batch[1].split(10, 1)):
            out, self.hidden = self.gru(x, self.hidden.detach())  # <- TT204
            loss = nn.functional.l1_loss(self.fc(out), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def lightning_recording_to_recording():
    """Lightning: each batch is a whole recording, split in training_step. Self.hidden is not reset
    when a new one starts.
    """
    L.seed_everything(57, verbose=False)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitNet(), DataLoader(Recordings(), batch_size=1))


class Shared(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
        self.hidden = None

    def on_train_epoch_start(self):
        self.hidden = None

    def step(self, batch):
        x, y = batch
        z, h = self.rnn(x, self.hidden)  # <- TT205
        self.hidden = h.detach()
        return nn.functional.mse_loss(self.out(z), y)

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))  # <- TT205

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loader_of(wave):
    return DataLoader(
        TensorDataset(wave[:-1].view(-1, 10, 1), wave[1:].view(-1, 10, 1)), batch_size=1
    )


def lightning_shared_by_validation():
    """Lightning: training_step and validation_step share self.hidden, so validation starts where
    training stopped.
    """
    L.seed_everything(58, verbose=False)
    time = torch.arange(101) * 0.1
    trainer = L.Trainer(
        max_epochs=1,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Shared(),
        loader_of(time.sin().unsqueeze(-1)),
        loader_of((3 * time[:61]).cos().unsqueeze(-1)),
    )


class Membrane(nn.Module):
    def forward(self, current, u):
        u = u.detach()  # <- TT203
        u = 0.85 * u + current
        spike = torch.sigmoid(6 * (u - 1))
        return spike, u - spike.detach()


def membranes_detached_in_the_layer():
    """Two layers of one class detach their membrane whenever they are called, which is
    every step.
    """
    torch.manual_seed(97)
    first, second, a, b = nn.Linear(6, 12), nn.Linear(12, 3), Membrane(), Membrane()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-3)
    recordings = [(torch.rand(16, 4, 6) < 0.3).float() for _ in range(6)]
    for recording in recordings:
        u, v, loss = torch.zeros(4, 12), torch.zeros(4, 3), 0.0
        labels = recording.sum((0, 2)).long() % 3
        for frame in recording:
            spikes, u = a(first(frame), u)
            _, v = b(second(spikes), v)
            loss = loss + nn.functional.cross_entropy(v, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Filter2(nn.Module):
    def __init__(self, n=6):
        super().__init__()
        self.A = nn.Parameter(0.8 * torch.eye(n))
        self.B = nn.Parameter(torch.randn(n) / n)
        self.C = nn.Parameter(torch.randn(n) / n)
        self.x = torch.zeros(n)

    def forward(self, u):
        self.x = torch.tanh(self.A @ self.x + self.B * u)  # <- TT202
        return self.C @ self.x


def online_filter_with_a_graph():
    """A trained filter runs through a live signal sample by sample, its vector of state kept in
    self.x together with its graph.
    """
    torch.manual_seed(1206)
    live = torch.sin(torch.arange(300) / 9)
    highest, model = 0.0, Filter2()
    model.eval()
    for sample in live:
        highest = max(highest, model(sample).item())  # <- TT202
    print(highest)


class Online:
    def __init__(self):
        self.lstm, self.fc = nn.LSTM(4, 8), nn.Linear(8, 3)
        self.optimizer = torch.optim.Adam([*self.lstm.parameters(), *self.fc.parameters()], lr=1e-3)
        self.cache = {"state": None}

    def learn(self, speaker, x, y):
        out, state = self.lstm(x, self.cache["state"])  # <- TT204
        self.cache["state"] = tuple(s.detach() for s in state)  # <- TT204
        loss = nn.functional.cross_entropy(self.fc(out).flatten(0, 1), y.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return f"{speaker} {loss.item():.3f}"


def speakers_share_an_entry():
    """Chunks of two speakers come in turn, and the dict of states has one entry for both: each
    goes on where the other one stopped.
    """
    torch.manual_seed(1225)
    speech = {name: torch.randn(80, 1, 4).cumsum(0) / 9 for name in ("amy", "joe")}
    labels = {name: x[..., :3].argmax(-1) for name, x in speech.items()}
    online = Online()
    for i in range(0, 80, 16):
        for name, x in speech.items():
            print(online.learn(name, x[i : i + 16], labels[name][i : i + 16]))  # <- TT204


def state_in_a_table():
    """The states of an LSTM cell are kept in lists of numbers between the steps."""
    torch.manual_seed(0)
    cell, head = nn.LSTMCell(3, 6), nn.Linear(6, 3)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-3)
    x = torch.randn(101, 2, 3).cumsum(0) / 10
    h = c = torch.zeros(2, 6)
    for i in range(0, 100, 10):
        losses = []
        for t in range(i, i + 10):
            h, c = cell(x[t], (h, c))  # <- TT203
            losses.append((head(h) - x[t + 1]).square().mean())
            h = torch.tensor(h.detach().tolist())  # <- TT203
            c = torch.tensor(c.detach().tolist())  # <- TT203
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()


def state_through_numpy():
    """The hidden states are kept in a NumPy array, and each step begins from the row before: no
    gradient comes through.
    """
    torch.manual_seed(1015)
    cell, readout = nn.RNNCell(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*cell.parameters(), *readout.parameters()], lr=0.05)
    x = torch.randn(91, 3, 2).cumsum(0) / 9
    states = np.zeros((91, 3, 8), dtype=np.float32)
    for begin in range(0, 90, 15):
        loss = 0.0
        for t in range(begin, begin + 15):
            h = cell(x[t], torch.from_numpy(states[t]))  # <- TT203
            states[t + 1] = h.detach().numpy()  # <- TT203
            loss = loss + nn.functional.mse_loss(readout(h), x[t + 1]) / 15
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(begin, loss.item())


def state_thrown_away():
    """`out, _ = lstm(x)` on consecutive pieces of one long series: the state that would go on is
    dropped.
    """
    torch.manual_seed(22)
    series = torch.randn(150, 1, 3).cumsum(0) / 6
    future = series.roll(-2, 0)
    lstm = torch.nn.LSTM(3, 7)
    dense = torch.nn.Linear(7, 3)
    weights = [*lstm.parameters(), *dense.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.05)
    for epoch in range(2):
        losses = []
        for x, y in zip(series.split(15), future.split(15)):
            out, _ = lstm(x)  # <- TT201
            loss = F.mse_loss(dense(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(epoch, sum(losses) / len(losses))


def cell(params, x, h):
    wi, wh, b = params
    return torch.tanh(F.linear(x, wi, b) + F.linear(h, wh))


def validation_from_a_copy():
    """Validation of other data starts from a copy of the training state."""
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
            own = tuple(s.clone() for s in state)
            with torch.no_grad():
                for k in range(0, 30, 10):
                    y, own = net(held_out[k : k + 10], own)  # <- TT205
                    print(nn.functional.mse_loss(head(y), held_out[k + 1 : k + 11]).item())
            net.train()


def run(net, data, h, optimizer=None):
    total = 0.0
    for i in range(0, len(data) - 1, 10):
        x, y = data[i : i + 10], data[i + 1 : i + 11]
        out, h = net["gru"](x, h)  # <- TT205
        loss = nn.functional.mse_loss(net["fc"](out), y)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        h = h.detach()
        total += loss.item()
    return total / ((len(data) - 1) // 10), h


def validation_goes_on_from_training():
    """Validation after every epoch starts with the state that training left behind."""
    torch.manual_seed(33)
    train = torch.randn(81, 2, 2).cumsum(0) / 9
    valid = torch.randn(41, 2, 2).cumsum(0) / 9 - 2
    net = nn.ModuleDict({"gru": nn.GRU(2, 8), "fc": nn.Linear(8, 2)})
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(2):
        net.train()
        loss, h = run(net, train, torch.zeros(1, 2, 8), optimizer)
        net.eval()
        with torch.no_grad():
            val_loss, _ = run(net, valid, h)  # <- TT205
        print(epoch, loss, val_loss)


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8)
        self.fc = nn.Linear(8, 1)
        self.state = None

    def forward(self, x):
        if self.state is not None:
            self.state = tuple(s.detach() for s in self.state)
        y, self.state = self.lstm(x, self.state)  # <- TT205
        return self.fc(y)


@torch.no_grad()
def validate_2(model, x, y):
    model.eval()
    losses = []
    for a, b in zip(x.split(10), y.split(10)):
        losses.append(nn.functional.mse_loss(model(a), b))  # <- TT205
    model.train()
    return torch.stack(losses).mean()


def validation_inside_the_stream():
    """Validation in the middle of an epoch runs through self.state, and training goes on from what
    validation left there.
    """
    torch.manual_seed(34)
    x, xv = torch.randn(120, 3, 2).cumsum(0) / 9, torch.randn(40, 3, 2).cumsum(0) / 9
    y, yv = x.prod(-1, keepdim=True), xv.prod(-1, keepdim=True)
    model = Stateful()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (a, b) in enumerate(zip(x.split(10), y.split(10)), 1):
        loss = nn.functional.mse_loss(model(a), b)  # <- TT205
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(step, loss.item(), validate_2(model, xv, yv).item())


class Forecaster(nn.Module):
    def __init__(self, hidden=10):
        super().__init__()
        self.hidden = hidden
        self.rnn = nn.GRU(1, hidden, num_layers=2)
        self.linear = nn.Linear(hidden, 1)

    def init_hidden(self, batch):
        return torch.zeros(2, batch, self.hidden)

    def forward(self, x, h):
        out, h = self.rnn(x, h)  # <- TT201
        return self.linear(out), h


def zeros_at_every_chunk():
    """The hidden state is set to zeros inside the loop over adjacent chunks, so no chunk knows the
    one before.
    """
    torch.manual_seed(21)
    grid = torch.arange(201) * 0.15
    waves = torch.stack(
        [torch.sin(grid), torch.sin(grid + 1), torch.sin(grid + 2)], dim=1
    ).unsqueeze(-1)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for start in range(0, 200, 20):
        h = model.init_hidden(3)
        prediction, h = model(waves[start : start + 20], h)  # <- TT201
        loss = nn.functional.mse_loss(prediction, waves[start + 1 : start + 21])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(start, loss.item())
