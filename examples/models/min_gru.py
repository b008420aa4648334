"""A minGRU: gates that do not see the state, so that all steps of a chunk are one `tt.linear_scan`.

    python examples/models/min_gru.py

    h[t] = (1 - z[t]) * h[t-1] + z[t] * c[t]        z = sigmoid(W x), c = V x

The task: hold the value that came with the last mark, some twenty steps ago on average, with an
update every ten steps.

Shapes: `T` steps, `B` lanes, `D` inputs, `H` units.

References: L. Feng et al., Were RNNs all we needed?, arXiv 2410.01201 (2024).
"""

from typing import Any

import torch
from torch import Tensor, nn

import throughtime as tt

STRIDE, HORIZON = 10, 40


class MinGRU(nn.Module):
    """`(T, B, D)` to `(T, B, H)`; the state is `(B, H)`."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.gate, self.candidate = nn.Linear(inputs, units), nn.Linear(inputs, units)
        nn.init.constant_(
            self.gate.bias, -3.0
        )  # a new unit forgets one part in twenty at each step

    def initial_state(self, lanes: int) -> Tensor:
        """Zeros."""
        return self.gate.weight.new_zeros(lanes, self.gate.out_features)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """All states, and the last of them."""
        gate = self.gate(x)
        states = tt.linear_scan((-gate).sigmoid(), gate.sigmoid() * self.candidate(x), state)
        return states, states[-1]


def recordings(count: int, steps: int) -> list[dict[str, Any]]:
    """Inputs: a value and a mark, at one step in twenty.

    The target is the value at the last mark.
    """
    values, marks = torch.rand(count, steps) * 2 - 1, torch.rand(count, steps) < 0.05
    marks[:, 0] = True
    last = torch.where(marks, torch.arange(steps), 0).cummax(dim=1).values
    inputs = torch.stack([values, marks.float()], dim=2)
    return [
        {"inputs": x, "targets": t} for x, t in zip(inputs, values.gather(1, last), strict=True)
    ]


def main(updates: int = 300) -> float:
    """Trains, and returns the mean squared error of the last twenty updates."""
    torch.manual_seed(0)
    net = tt.carry(nn.Sequential(MinGRU(2, 16), nn.Linear(16, 1)))
    stream = tt.Stream(recordings(16, updates * STRIDE), lanes=16, chunk=STRIDE)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    losses: list[float] = []
    for update in tt.updates(net, stream, nn.MSELoss(), gradient=tt.Truncated(STRIDE, HORIZON)):
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(update.loss))
    found = sum(losses[-20:]) / 20
    print(
        f"minGRU: squared error {found:.3f} after {len(losses)} updates; guessing zero costs 0.333"
    )
    return found


if __name__ == "__main__":
    main()
