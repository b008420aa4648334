"""A convolutional LSTM on moving pictures.

Inputs are `(T, B, 1, SIDE, SIDE)`, the state is `(B, H, SIDE, SIDE)`.

    python examples/models/conv_lstm.py

The task: a dot moves across a board without edges, one field a step, in a direction that changes
now and then; half of the pictures are blank. Say where the dot is. In the blank ones only the state
knows.

Shapes: `T` steps, `B` lanes, `H` maps.

References: X. Shi et al., Convolutional LSTM network: a machine learning approach for precipitation
nowcasting, NIPS (2015).
"""

from typing import Any

import torch
from torch import Tensor, nn

import throughtime as tt

SIDE, MAPS = 6, 8
STRIDE, HORIZON = 5, 10


class ConvLSTM(nn.Module):
    """Pictures `(T, B, 1, SIDE, SIDE)` to a score for every field `(T, B, SIDE * SIDE)`.

    The state is a pair of maps.
    """

    def __init__(self, maps: int = MAPS) -> None:
        super().__init__()
        self.maps = maps
        self.into = nn.Conv2d(1, 4 * maps, 3, padding=1, padding_mode="circular")
        self.through = nn.Conv2d(maps, 4 * maps, 3, padding=1, padding_mode="circular", bias=False)
        self.read = nn.Conv2d(maps, 1, 1)
        with torch.no_grad():
            # it has a bias
            self.into.bias[maps : 2 * maps] += 1.0  # pyright: ignore[reportOptionalSubscript]

    def initial_state(self, lanes: int) -> tuple[Tensor, Tensor]:
        """Zeros, for h and c."""
        zeros = self.read.weight.new_zeros(lanes, self.maps, SIDE, SIDE)
        return zeros, zeros

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Scores for every step, and h and c after the last."""
        h, c = state
        hidden: list[Tensor] = []
        for given in (
            self.into(x.flatten(0, 1)).unflatten(0, x.shape[:2]).unbind(0)
        ):  # no step depends on another here
            i, f, g, o = (given + self.through(h)).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            hidden.append(h)
        return self.read(torch.cat(hidden)).flatten(1).unflatten(0, x.shape[:2]), (h, c)


def recordings(count: int, steps: int) -> list[dict[str, Any]]:
    """Pictures `(T, 1, SIDE, SIDE)` of a moving dot, half of them blank.

    The target is the number of its field.
    """
    ways = torch.tensor([(0, 1), (1, 0), (0, -1), (-1, 0)])
    made: list[dict[str, Any]] = []
    for _ in range(count):
        turns = torch.randint(4, (steps // 20 + 1,)).repeat_interleave(20)[:steps]
        row, column = ((torch.randint(SIDE, (2,)) + ways[turns].cumsum(0)) % SIDE).unbind(1)
        field = row * SIDE + column
        pictures = nn.functional.one_hot(field, SIDE * SIDE).float() * (torch.rand(steps, 1) < 0.5)
        made.append({"inputs": pictures.view(steps, 1, SIDE, SIDE), "targets": field})
    return made


def main(updates: int = 150) -> float:
    """Trains, and returns the mean loss of the last twenty updates."""
    torch.manual_seed(0)
    net = tt.carry(ConvLSTM())
    stream = tt.Stream(recordings(16, updates * STRIDE), lanes=16, chunk=STRIDE)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    losses: list[float] = []
    for update in tt.updates(
        net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(STRIDE, HORIZON)
    ):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(update.loss))
    found = sum(losses[-20:]) / 20
    print(
        f"ConvLSTM: {found:.3f} nats after {len(losses)} updates; guessing the blank half costs"
        " 1.792"
    )
    return found


if __name__ == "__main__":
    main()
