"""Data in another order than the states: rows, chunks, dimensions, steps."""

import random

import lightning as L
import torch
from ignite.engine import Engine
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def chunks_in_random_order():
    """The chunks of a stream are visited in the order of torch.randperm, and h goes from one to
    the next as if they touched.
    """
    torch.manual_seed(40)
    stream = torch.sin(torch.arange(121) * 0.17).view(-1, 1, 1) + 0.05 * torch.randn(121, 2, 1)
    chunks = list(zip(stream[:-1].split(10), stream[1:].split(10)))
    gru = nn.GRU(1, 9)
    head = nn.Linear(9, 1)
    optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters()], lr=0.05)
    h = torch.zeros(1, 2, 9)
    for index in torch.randperm(len(chunks)).tolist():  # <- TT207
        x, y = chunks[index]
        y_hat, h = gru(x, h.detach())  # <- TT207
        loss = (head(y_hat) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(index, loss.item())


class Windows(Dataset):
    def __init__(self, series, width):
        self.series, self.width = series, width

    def __len__(self):
        return (len(self.series) - 1) // self.width

    def __getitem__(self, i):
        a = i * self.width
        return self.series[a : a + self.width], self.series[a + 1 : a + self.width + 1]


def epoch_after_epoch():
    """The state is made once, before the first epoch; from then on the end of the series goes
    before its beginning.
    """
    torch.manual_seed(1019)
    prices = torch.randn(91, 1).cumsum(0) / 10
    loader = DataLoader(Windows(prices, 15), batch_size=1, shuffle=False)
    gru, linear = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*gru.parameters(), *linear.parameters()], lr=1e-3)
    hidden = torch.zeros(1, 1, 8)  # <- TT208
    for epoch in range(4):  # <- TT208
        for x, y in loader:
            out, hidden = gru(x, hidden)  # <- TT208
            hidden = hidden.detach()
            loss = nn.functional.mse_loss(linear(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


class Windows2(Dataset):
    def __init__(self, signal, width):
        self.signal, self.width = signal, width

    def __len__(self):
        return (len(self.signal) - 1) // self.width

    def __getitem__(self, i):
        piece = self.signal[i * self.width : (i + 1) * self.width + 1]
        return piece[:-1], piece[1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2, 8)
        self.out = nn.Linear(8, 2)
        self.h = torch.zeros(1, 8)

    def forward(self, x):
        h, ys = self.h.detach(), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            ys.append(self.out(h))
        self.h = h
        return torch.stack(ys, 1)


def every_second_window():
    """A DistributedSampler gives this rank every second window of the stream, and the state is
    carried across the gaps.
    """
    torch.manual_seed(41)
    windows = Windows2(torch.randn(193, 2).cumsum(0) / 14, width=8)
    sampler = DistributedSampler(windows, num_replicas=2, rank=0, shuffle=False)
    loader = DataLoader(windows, batch_size=1, sampler=sampler)  # <- TT207
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in loader:  # <- TT207
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 10)
        self.out = nn.Linear(10, 2)

    def forward(self, x, hidden):
        y, hidden = self.gru(x, hidden)  # <- TT210
        return self.out(y), hidden


def first_frame_every_time():
    """In the loop over t the model is given the whole chunk again instead of x[t], each time with
    the state of the time before.
    """
    torch.manual_seed(1021)
    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    walk = torch.randn(61, 3, 2).cumsum(0) / 8
    hidden = torch.zeros(1, 3, 10)
    for start in range(0, 60, 10):
        x, y = walk[start : start + 10], walk[start + 1 : start + 11]
        hidden = hidden.detach()
        loss = 0.0
        for t in range(len(x)):
            prediction, hidden = model(x, hidden)  # <- TT210
            loss = loss + nn.functional.mse_loss(prediction[t], y[t])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(start, loss.item() / 10)


def first_rows_instead_of_live_rows():
    """When recordings end the live lanes are selected from the inputs, but the state keeps its
    first rows instead.
    """
    torch.manual_seed(37)
    lengths = torch.tensor([30, 90, 60, 120])
    recordings = [torch.randn(n, 2).cumsum(0) / 5 for n in lengths.tolist()]
    lstm, head = nn.LSTM(2, 6), nn.Linear(6, 2)
    optimizer = torch.optim.Adam(list(lstm.parameters()) + list(head.parameters()), lr=1e-3)
    h = c = torch.zeros(1, 4, 6)
    for start in range(0, 120, 10):
        alive = [i for i, n in enumerate(lengths.tolist()) if n > start]
        x = torch.stack([recordings[i][start : start + 10] for i in alive], dim=1)
        h, c = h[:, : len(alive)].detach(), c[:, : len(alive)].detach()
        out, (h, c) = lstm(x[:-1], (h, c))  # <- TT206
        loss = nn.functional.mse_loss(head(out), x[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(start, alive, loss.item())


class Step:
    def __init__(self):
        self.rnn, self.fc = nn.RNN(1, 10, batch_first=True), nn.Linear(10, 1)
        self.optimizer = torch.optim.RMSprop(
            [*self.rnn.parameters(), *self.fc.parameters()], lr=1e-3
        )
        self.h = torch.zeros(1, 1, 10)

    def __call__(self, engine, batch):
        x, y = batch
        out, h = self.rnn(x, self.h)
        self.h = h.detach()
        loss = nn.functional.mse_loss(self.fc(out), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def ignite_random_sampler():
    """Ignite: a RandomSampler draws the windows, and the update function carries self.h from one
    to the next.
    """
    torch.manual_seed(66)
    wave = torch.sin(torch.arange(161) * 0.11).unsqueeze(-1)
    windows = TensorDataset(wave[:-1].view(16, 10, 1), wave[1:].view(16, 10, 1))
    loader = DataLoader(windows, batch_size=1, sampler=RandomSampler(windows))  # <- TT207
    trainer = Engine(Step())
    print(trainer.run(loader, max_epochs=1).output)  # <- TT207


def lanes_fewer_than_states():
    """Two of the five recordings end earlier: their lanes are left out of the inputs, but the
    state keeps all five.
    """
    # raises: wrong size
    torch.manual_seed(1022)
    recordings = [torch.randn(n, 3).cumsum(0) / 7 for n in (121, 121, 121, 61, 41)]
    model = nn.ModuleDict({"gru": nn.GRU(3, 8), "head": nn.Linear(8, 3)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(1, len(recordings), 8)
    for start in range(0, 120, 20):
        live = [r for r in recordings if len(r) > start + 20]
        chunk = torch.stack([r[start : start + 21] for r in live], dim=1)
        out, h = model["gru"](chunk[:-1], h)  # <- TT211
        h = h.detach()
        loss = nn.functional.mse_loss(model["head"](out), chunk[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.keep, self.norm = nn.Linear(1, 10), nn.Linear(10, 10), nn.LayerNorm(10)
        self.out = nn.Linear(10, 1)

    def forward(self, x, h):
        y = []
        for x_t in x:
            new = torch.tanh(self.read(x_t[:, None]) + self.keep(self.norm(h)))  # <- TT206
            h = 0.8 * h + 0.2 * new
            y.append(self.out(h)[:, 0])
        return torch.stack(y), h


def lanes_in_a_new_order_each_chunk():
    """The lanes of every chunk are shuffled, while the state of a leaky cell keeps their last
    order.
    """
    torch.manual_seed(1310)
    data = torch.sin(torch.arange(151)[:, None] * (0.05 + 0.5 * torch.rand(6)))
    net = Residual()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    h = torch.zeros(6, 10)
    for i in range(0, 150, 15):
        order = torch.randperm(6)
        y, h = net(data[i : i + 15, order], h.detach())  # <- TT206
        loss = nn.functional.mse_loss(y, data[i + 1 : i + 16, order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Windows3(L.LightningDataModule):
    def setup(self, stage):
        series = torch.randn(161, 2).cumsum(0) / 12
        self.train = TensorDataset(series[:-1].view(16, 10, 2), series[1:].view(16, 10, 2))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=1, shuffle=True)  # <- TT207


class Model2(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, batch_first=True)
        self.proj = nn.Linear(8, 2)
        self.state = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.state is not None:
            self.state = tuple(s.detach() for s in self.state)
        z, self.state = self.lstm(x, self.state)
        return nn.functional.mse_loss(self.proj(z), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def lightning_shuffled_windows():
    """Lightning: windows of one series with shuffle=True, and a state carried from one
    training_step to the next.
    """
    L.seed_everything(59, verbose=False)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model2(), datamodule=Windows3())  # <- TT207


def windows_of(series, width):
    return series[:-1].unfold(0, width, width).transpose(1, 2), series[1:].unfold(
        0, width, width
    ).transpose(1, 2)


def neighbours_side_by_side():
    """shuffle=False, but neighbouring windows lie side by side in a batch: row 0 of the next batch
    starts four windows later.
    """
    torch.manual_seed(42)
    series = torch.randn(321, 1).cumsum(0) / 15
    loader = DataLoader(  # <- TT207
        TensorDataset(*windows_of(series, 10)), batch_size=4, shuffle=False, drop_last=True
    )
    rnn = nn.RNN(1, 8, batch_first=True)
    readout = nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *readout.parameters()], lr=1e-3)
    hidden = torch.zeros(1, 4, 8)
    for x, y in loader:  # <- TT207
        output, hidden = rnn(x, hidden)
        hidden = hidden.detach()
        loss = nn.functional.mse_loss(readout(output), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.guess = nn.RNN(9, 12), nn.Linear(12, 9)

    def forward(self, ids, state):
        y, state = self.rnn(nn.functional.one_hot(ids.T, 9).float(), state)  # <- TT208
        return self.guess(y), state


def passes_of_converted_counts():
    """The text is turned into one-hot vectors inside the model, and the state is made before the
    loop over epochs: the end of the text enters its beginning, long after the first chunks.
    """
    torch.manual_seed(1301)
    text = torch.tensor([(i * i + i // 7) % 9 for i in range(601)])
    x, y = text[:-1].view(3, -1), text[1:].view(3, -1)
    model = Letters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = None
    for _ in range(2):
        for i in range(0, 200, 20):
            if state is not None:
                state.detach_()
            guess, state = model(x[:, i : i + 20], state)  # <- TT208
            loss = nn.functional.cross_entropy(guess.flatten(0, 1), y[:, i : i + 20].T.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


DATA = "a long time ago in a small village there lived a cat who could count up to seven"


def pointer_back_to_zero():
    """A pointer walks through the text and goes back to zero at its end, but the state of the end
    stays: it begins the text anew.
    """
    torch.manual_seed(1018)
    chars = sorted(set(DATA))
    ids = torch.tensor([chars.index(c) for c in DATA])
    x2h, h2h, h2y = nn.Embedding(len(chars), 14), nn.Linear(14, 14), nn.Linear(14, len(chars))
    optimizer = torch.optim.Adagrad(
        [*x2h.parameters(), *h2h.parameters(), *h2y.parameters()], lr=0.05
    )
    n, p, seq_length = 0, 0, 10
    hprev = torch.zeros(14)
    while n < 25:
        if p + seq_length + 1 > len(ids):
            p = 0  # <- TT208
        inputs, targets = ids[p : p + seq_length], ids[p + 1 : p + seq_length + 1]
        h, loss = hprev, 0.0
        for i in range(seq_length):
            h = torch.tanh(x2h(inputs[i]) + h2h(h))  # <- TT208
            loss = loss + nn.functional.cross_entropy(h2y(h), targets[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hprev = h.detach()  # <- TT208
        p += seq_length
        n += 1


TEXT = "in the beginning there was a loop and the loop had no end and the end had no loop " * 6
CHARS = sorted(set(TEXT))


def excerpt(ids, length):
    start = random.randrange(len(ids) - length - 1)  # <- TT207
    return ids[start : start + length], ids[start + 1 : start + length + 1]


def random_excerpts():
    """Every update reads an excerpt from a random place of the text, and goes on with the state of
    the excerpt before.
    """
    torch.manual_seed(1017)
    random.seed(1017)
    ids = torch.tensor([CHARS.index(c) for c in TEXT])
    encoder, rnn = nn.Embedding(len(CHARS), 10), nn.GRU(10, 10)
    decoder = nn.Linear(10, len(CHARS))
    optimizer = torch.optim.Adam(
        [*encoder.parameters(), *rnn.parameters(), *decoder.parameters()], lr=5e-3
    )
    hidden = torch.zeros(1, 10)
    for iteration in range(12):
        source, target = excerpt(ids, 20)  # <- TT207
        output, hidden = rnn(encoder(source), hidden)  # <- TT207
        hidden = hidden.detach()
        loss = nn.functional.cross_entropy(decoder(output), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(iteration, loss.item())


def replay_with_the_last_state():
    """Sequences are drawn at random from a replay memory, and each batch of them begins with the
    state in which the last drawn batch ended.
    """
    torch.manual_seed(1223)
    random.seed(1223)
    memory = [torch.randn(31, 3).cumsum(0) / 5 for _ in range(15)]
    net, value = nn.GRU(3, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*net.parameters(), *value.parameters()], lr=1e-3)
    hidden = torch.zeros(1, 4, 8)
    for _ in range(10):
        picked = random.sample(memory, 4)  # <- TT207
        start = random.randrange(18)  # <- TT207
        batch = torch.stack([episode[start : start + 12] for episode in picked], dim=1)
        features, hidden = net(batch, hidden)  # <- TT207
        hidden = hidden.detach()
        v = value(features).squeeze(-1)
        goal = batch[1:, :, 0] + 0.9 * v[1:].detach()
        loss = nn.functional.smooth_l1_loss(v[:-1], goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Sentiment(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.dim = dim
        self.embedding = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers=2, dropout=0.3, batch_first=True)
        self.fc = nn.Linear(dim, 1)

    def forward(self, x, hidden):
        out, hidden = self.lstm(self.embedding(x), hidden)  # <- TT207
        return self.fc(out[:, -1]).squeeze(-1), hidden

    def init_hidden(self, batch_size):
        return torch.zeros(2, batch_size, self.dim), torch.zeros(2, batch_size, self.dim)


def reviews_share_a_state():
    """Reviews have nothing to do with each other, and come shuffled: still the state of one batch
    of reviews, detached, is where the next batch begins.
    """
    torch.manual_seed(1016)
    reviews, labels = torch.randint(50, (48, 14)), torch.randint(2, (48,)).float()
    train = DataLoader(  # <- TT207
        TensorDataset(reviews, labels), batch_size=8, shuffle=True, drop_last=True
    )
    net = Sentiment(50, 8)
    criterion, optimizer = nn.BCEWithLogitsLoss(), torch.optim.Adam(net.parameters(), lr=1e-3)
    net.train()
    for epoch in range(2):
        h = net.init_hidden(8)
        for inputs, target in train:  # <- TT207
            h = tuple(each.data for each in h)
            net.zero_grad()
            output, h = net(inputs, h)  # <- TT207
            loss = criterion(output, target)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5)
            optimizer.step()
        print(epoch, loss.item())


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, batch_first=True)
        self.fc = nn.Linear(8, 2)

    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return self.fc(y), state


def shuffled_windows():
    """Windows of one series come from a loader with shuffle=True while the state is carried from
    batch to batch.
    """
    torch.manual_seed(39)
    series = torch.randn(161, 2).cumsum(0) / 12
    windows = torch.stack([series[i : i + 11] for i in range(0, 160, 10)])
    dataset = TensorDataset(windows[:, :-1], windows[:, 1:])
    loader = DataLoader(dataset, batch_size=1, shuffle=True)  # <- TT207
    net = Net2()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    state = None
    for x, y in loader:  # <- TT207
        if state is not None:
            state = tuple(s.detach() for s in state)
        prediction, state = net(x, state)
        loss = nn.functional.mse_loss(prediction, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 8, batch_first=True)
        self.fc = nn.Linear(8, 2)

    def forward(self, x, h):
        y, h = self.gru(x, h)  # <- TT206
        return self.fc(y), h


def sorted_inputs_unsorted_state():
    """The lanes of every chunk are sorted by loudness. The carried state stays in the order of the
    chunk before.
    """
    torch.manual_seed(36)
    data = torch.randn(5, 121, 2).cumsum(1) / 4
    model = Sorter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(1, 5, 8)
    for start in range(0, 120, 12):
        x, y = data[:, start : start + 12], data[:, start + 1 : start + 13]
        order = x.abs().sum((1, 2)).argsort(descending=True)
        x, y = x[order], y[order]
        prediction, h = model(x, h.detach())  # <- TT206
        loss = nn.functional.mse_loss(prediction, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class CellNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(3, 7)
        self.head = nn.Linear(7, 1)

    def forward(self, x, h):
        out = []
        for frame in x:
            h = self.cell(frame, h)  # <- TT206
            out.append(self.head(h))
        return torch.stack(out), h


def state_rows_drawn_anew():
    """Lanes are shuffled for every chunk: the inputs with one permutation, the state
    with another.
    """
    torch.manual_seed(38)
    x = torch.randn(100, 6, 3).cumsum(0) / 6
    y = x.amax(-1, keepdim=True)
    net = CellNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    lanes = torch.arange(6)
    h = torch.zeros(6, 7)
    for xs, ys in zip(x.split(10), y.split(10)):
        lanes = lanes[torch.randperm(6)]
        h = h[torch.randperm(6)].detach()
        prediction, h = net(xs[:, lanes], h)  # <- TT206
        loss = nn.functional.mse_loss(prediction, ys[:, lanes])
        opt.zero_grad()
        loss.backward()
        opt.step()


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(2, 8), nn.Linear(8, 2)

    def forward(self, x, h):
        ys = []
        for x_t in x:
            h = self.cell(x_t, h)  # <- TT206
            ys.append(self.out(h))
        return torch.stack(ys), h


def states_in_another_order():
    """The inputs of the users are put together in the order of their visit, their states in the
    order of their names.
    """
    torch.manual_seed(1103)
    paths = {name: torch.randn(61, 2).cumsum(0) / 6 for name in ("dora", "abe", "carl", "bea")}
    states = {name: torch.zeros(8) for name in paths}
    model = Tracker()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for start in range(0, 60, 12):
        visitors = list(paths)
        x = torch.stack([paths[name][start : start + 13] for name in visitors], 1)
        h = torch.stack([states[name] for name in sorted(visitors)])  # <- TT206
        y, h = model(x[:-1], h)  # <- TT206
        loss = nn.functional.mse_loss(y, x[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        states.update(zip(visitors, h.detach()))


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(3, 8), nn.Linear(8, 4)

    def forward(self, x, hidden):
        y, hidden = self.lstm(x, hidden)  # <- TT210
        return self.fc(y), hidden


def three_updates_per_batch():
    """Each batch is used for three updates, and the state that one of them leaves behind is where
    the next, on the same batch, begins.
    """
    torch.manual_seed(1210)
    frames = torch.randn(120, 2, 3).cumsum(0) / 8
    labels = (frames.sum(-1) * 2).long() % 4
    net = Recogniser()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    hidden = None
    for x, y in zip(frames.split(20), labels.split(20)):
        for _ in range(3):  # <- TT210
            logits, hidden = net(x, hidden)  # <- TT210
            hidden = tuple(h.detach() for h in hidden)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(1, 8), nn.Linear(8, 1)

    def forward(self, x, h):
        y, h = self.rnn(x, h)  # <- TT207
        return self.fc(y[-1]), h


def windows_moved_by_one():
    """Each window of 12 days begins one day after the last one, and starts from its
    final state.
    """
    torch.manual_seed(1301)
    price = torch.randn(133).cumsum(0).view(-1, 1, 1) / 9
    width = 12
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(1, 1, 8)
    for i in range(60):  # <- TT207
        guess, h = model(price[i : i + width], h.detach())  # <- TT207
        loss = (guess - price[i + width]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Net4(nn.Module):
    def __init__(self, batch_size):
        super().__init__()
        self.rnn, self.fc = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 2)
        self.batch_size = batch_size

    def init_hidden(self):
        return torch.zeros(1, self.batch_size, 6), torch.zeros(1, self.batch_size, 6)

    def forward(self, x):
        out, _ = self.rnn(x, self.init_hidden())  # <- TT211
        return self.fc(out[:, -1])


def zeros_for_eight_lanes():
    """Weights are learnt on batches of 8, and every batch gets zeros for 8 lanes; the last batch
    has five.
    """
    # raises: wrong size
    torch.manual_seed(1105)
    x = torch.randn(29, 10, 3).cumsum(1) / 3
    y = (x[:, -1, 0] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)  # <- TT211
    net = Net4(batch_size=8)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(net(xb), yb)  # <- TT211
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
