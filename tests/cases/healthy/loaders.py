"""Healthy loops over a DataLoader."""

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


class Stretch(Dataset):
    def __init__(self, series, begin, length):
        self.series, self.begin, self.length = series, begin, length

    def __len__(self):
        return len(self.series)

    def __getitem__(self, i):
        a, b = self.begin, self.begin + self.length
        return i, self.series[i][a:b], self.series[i][a + 1 : b + 1]


def bank_of_states():
    """Many series move on together, drawn in random order each round; every series finds its own
    state in a bank by its number.
    """
    torch.manual_seed(2027)
    series = [torch.randn(61, 2).cumsum(0) / 8 for _ in range(9)]
    lstm, head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    h_bank, c_bank = torch.zeros(1, 9, 8), torch.zeros(1, 9, 8)
    for begin in range(0, 60, 12):
        for who, x, y in DataLoader(Stretch(series, begin, 12), batch_size=3, shuffle=True):
            out, (h, c) = lstm(x, (h_bank[:, who], c_bank[:, who]))
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            h_bank[:, who] = h.detach()
            c_bank[:, who] = c.detach()


def create_sequences(series, lookback):
    xs, ys = [], []
    for i in range(len(series) - lookback):
        xs.append(series[i : i + lookback])
        ys.append(series[i + lookback])
    return np.array(xs, dtype=np.float32), np.array(ys, dtype=np.float32)


class PriceModel(nn.Module):
    def __init__(self, hidden=12, layers=2):
        super().__init__()
        self.hidden, self.layers = hidden, layers
        self.lstm = nn.LSTM(1, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        h0 = torch.zeros(self.layers, x.size(0), self.hidden)
        c0 = torch.zeros(self.layers, x.size(0), self.hidden)
        out, _ = self.lstm(x, (h0.detach(), c0.detach()))
        return self.fc(out[:, -1, :])


def lookback_windows():
    """Forecasting from a look-back of 24 values: overlapping windows, one target each, a zero
    state for every window.
    """
    torch.manual_seed(2007)
    rng = np.random.default_rng(2007)
    prices = rng.normal(size=(120, 1)).cumsum(0) / 10
    x, y = create_sequences(prices, 24)
    cut = 76
    train = DataLoader(
        TensorDataset(torch.from_numpy(x[:cut]), torch.from_numpy(y[:cut])), batch_size=16
    )
    model, criterion = PriceModel(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        for xb, yb in train:
            loss = criterion(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            test = criterion(model(torch.from_numpy(x[cut:])), torch.from_numpy(y[cut:]))
        model.train()
        print(epoch, loss.item(), test.item())


def collate(items):
    ids, labels = zip(*items)
    return (
        pad_sequence(ids, batch_first=True),
        torch.tensor([len(i) for i in ids]),
        torch.stack(labels),
    )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(25, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(16, 3)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(
            self.emb(ids), lengths, batch_first=True, enforce_sorted=False
        )
        out, (h, _) = self.lstm(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return self.fc(torch.cat([h[0], h[1]], -1) + out.amax(1))


def packed_sentences():
    """Sentences of many lengths are packed; the layer sorts them inside and gives their states
    back in the order in which they came.
    """
    torch.manual_seed(2021)
    data = [
        (torch.randint(1, 25, (int(n),)), torch.randint(3, ())) for n in torch.randint(3, 15, (30,))
    ]
    loader = DataLoader(data, batch_size=6, shuffle=True, collate_fn=collate)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        for ids, lengths, labels in loader:
            loss = nn.functional.cross_entropy(model(ids, lengths), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


class Windows(Dataset):
    def __init__(self, series, width):
        self.series, self.width = series, width

    def __len__(self):
        return (len(self.series) - 1) // self.width

    def __getitem__(self, i):
        a = i * self.width
        return self.series[a : a + self.width], self.series[a + 1 : a + 1 + self.width]


class Lanes:
    def __init__(self, windows, lanes):
        self.steps, self.lanes = windows // lanes, lanes

    def __len__(self):
        return self.steps

    def __iter__(self):
        for s in range(self.steps):
            yield [lane * self.steps + s for lane in range(self.lanes)]


def sampler_that_keeps_lanes():
    """A batch sampler draws window s of every lane at step s: row i of a batch goes on with row i
    of the one before, and the state is carried.
    """
    torch.manual_seed(2129)
    windows = Windows(torch.randn(241, 1).cumsum(0) / 12, 10)
    loader = DataLoader(windows, batch_sampler=Lanes(len(windows), 3))
    lstm, head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(2):
        hc = None
        for x, y in loader:
            out, hc = lstm(x, hc)
            hc = tuple(s.detach() for s in hc)
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x, h=None):
        y, h = self.rnn(x, h)
        return self.fc(y), h


def shuffled_recordings_in_chunks():
    """Whole recordings come shuffled, each is played in chunks from zeros. The state is carried
    only inside a recording.
    """
    torch.manual_seed(129)
    recordings = torch.randn(12, 41, 2).cumsum(1) / 6
    loader = DataLoader(
        TensorDataset(recordings[:, :-1], recordings[:, 1:]), batch_size=4, shuffle=True
    )
    net = Net2()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(2):
        for recording, target in loader:
            h = None
            for x, y in zip(recording.split(10, 1), target.split(10, 1)):
                prediction, h = net(x, h)
                h = h.detach()
                loss = nn.functional.mse_loss(prediction, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print(epoch, loss.item())


class Recordings(IterableDataset):
    def __init__(self, lengths, chunk):
        self.recordings = [torch.randn(n + 1, 2).cumsum(0) / 8 for n in lengths]
        self.chunk = chunk

    def __iter__(self):
        for recording in self.recordings:
            for i in range(0, len(recording) - 1, self.chunk):
                piece = recording[i : i + self.chunk + 1]
                yield i == 0, piece[:-1].unsqueeze(1), piece[1:].unsqueeze(1)


def stream_with_first_flags():
    """An iterable dataset yields chunks with a flag for the first of every recording; the flag
    sets the state to zeros.
    """
    torch.manual_seed(2130)
    loader = DataLoader(Recordings([60, 36, 48], 12), batch_size=None)
    gru, head = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    h = torch.zeros(1, 1, 8)
    for epoch in range(2):
        for first, x, y in loader:
            h = torch.zeros_like(h) if first else h.detach()
            out, h = gru(x, h)
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


def windows_in_order():
    """Windows of one series come from a loader in order, one at a time. The state is carried and
    detached, fresh at every epoch.
    """
    torch.manual_seed(130)
    series = torch.randn(121, 2).cumsum(0) / 10
    dataset = TensorDataset(series[:-1].view(12, 10, 2), series[1:].view(12, 10, 2))
    loader = DataLoader(dataset, batch_size=1, shuffle=False)
    lstm, head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    for epoch in range(2):
        state = None
        for x, y in loader:
            out, state = lstm(x, state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
