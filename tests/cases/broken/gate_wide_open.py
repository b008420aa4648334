"""The update gate is far too wide open: nothing of the state before goes on."""

import torch
from torch import nn


class Light(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.gate, self.new, self.n = nn.Linear(n_in + n, n), nn.Linear(n_in, n), n
        self.head = nn.Linear(n, n_in)
        nn.init.constant_(self.gate.bias, 40.0)

    def forward(self, x, h=None):
        h = x.new_zeros(x.shape[1], self.n) if h is None else h
        out = []
        for t in range(x.shape[0]):
            z = torch.sigmoid(self.gate(torch.cat([x[t], h], -1)))
            h = (1 - z) * h + z * self.new(x[t]).tanh()  # <- TT303
            out.append(h)
        return self.head(torch.stack(out)[-1:]), h


torch.manual_seed(0)
model = Light(3, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x, h = torch.randn(161, 2, 3).cumsum(0) / 10, None
for i in range(0, 160, 16):
    y, h = model(x[i : i + 16], h)
    h = h.detach()
    loss = (y[0] - x[i + 16]).square().mean()
    optimizer.zero_grad()
    loss.backward()  # <- TT303
    optimizer.step()
