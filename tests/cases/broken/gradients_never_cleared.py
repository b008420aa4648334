"""Nobody ever calls zero_grad: every step uses the sum of all gradients so far."""

import torch
from torch import nn


class Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(2, 8)
        self.fc = nn.Linear(8, 2)

    def forward(self, x, hc):
        ys = []
        for t in range(len(x)):
            hc = self.cell(x[t], hc)
            ys.append(self.fc(hc[0]))
        return torch.stack(ys), tuple(s.detach() for s in hc)


def main():
    torch.manual_seed(46)
    model = Seq()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    walk = torch.randn(97, 2, 2).cumsum(0) / 10
    hc = (torch.zeros(2, 8), torch.zeros(2, 8))
    for lo in range(0, 96, 8):
        y, hc = model(walk[lo : lo + 8], hc)
        loss = (y - walk[lo + 1 : lo + 9]).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()  # <- TT302


if __name__ == "__main__":
    main()
