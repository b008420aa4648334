"""Healthy loops over a DataLoader."""

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset


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
