"""Sentences of many lengths are packed; the layer sorts them inside and gives their states back in
the order in which they came.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader


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


def main():
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


if __name__ == "__main__":
    main()
