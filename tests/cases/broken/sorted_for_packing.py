"""The pieces are sorted by length for packing, in another order at every chunk; the state comes
back sorted and is never put into the order of the lanes again.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.fc = nn.GRU(2, 8), nn.Linear(8, 2)

    def forward(self, x, lengths, h):
        packed = pack_padded_sequence(x, lengths)
        out, h = self.gru(packed, h)  # <- TT206
        return self.fc(pad_packed_sequence(out)[0]), h


def main():
    torch.manual_seed(1221)
    walks = [torch.randn(90, 2).cumsum(0) / 8 for _ in range(4)]
    position = [0] * 4
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    h = torch.zeros(1, 4, 8)
    for _ in range(6):
        lengths = torch.randint(6, 14, (4,))
        lengths, order = lengths.sort(descending=True)
        pieces = [walks[i][position[i] : position[i] + n + 1] for i, n in zip(order, lengths)]
        x, y = pad_sequence([p[:-1] for p in pieces]), pad_sequence([p[1:] for p in pieces])
        prediction, h = net(x, lengths, h.detach())  # <- TT206
        mask = torch.arange(len(x)).unsqueeze(1) < lengths
        loss = (prediction - y).square().mean(-1)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for i, n in zip(order.tolist(), lengths.tolist()):
            position[i] += n


if __name__ == "__main__":
    main()
