"""The recurrent state is detached, but the last prediction, fed back as an input of the next chunk,
is not.
"""

# raises: second time

import torch
from torch import nn


class Feedback(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, u, y, hc):
        predictions = []
        for u_t in u.unbind(0):
            hc = self.cell(torch.cat([u_t, y], dim=-1), hc)  # <- TT101
            y = self.head(hc[0])
            predictions.append(y)
        return torch.stack(predictions), y, hc


def main():
    torch.manual_seed(9)
    u = torch.randn(90, 2, 2).cumsum(0) * 0.05
    goal = (u[..., :1] - u[..., 1:]).tanh()
    net = Feedback()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    y, hc = torch.zeros(2, 1), (torch.zeros(2, 8), torch.zeros(2, 8))
    for u_chunk, goal_chunk in zip(u.chunk(9), goal.chunk(9)):
        hc = (hc[0].detach(), hc[1].detach())
        predictions, y, hc = net(u_chunk, y, hc)  # <- TT101
        loss = nn.functional.l1_loss(predictions, goal_chunk)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.3f}")


if __name__ == "__main__":
    main()
