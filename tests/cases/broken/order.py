"""Data in another order than the states: rows, chunks, dimensions, steps."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
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
