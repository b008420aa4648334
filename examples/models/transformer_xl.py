"""A Transformer with a memory, trained on an unbroken stream.

Each layer attends to the last steps before the present one.

    python examples/models/transformer_xl.py

The state is what Transformer-XL calls its memory: the inputs of every layer at the last `MEMORY`
steps, and how many of these slots the recording has filled. Keys and values are computed from it
anew, so that a gradient flows into the memory as far back as the horizon allows; at the horizon
`tt.updates` detaches it. Attention is to the last `MEMORY` steps and the present one, wherever the
chunk begins, and to no slot from before the recording's start. So chunks compute what the whole
recording would.

The task: name the symbol of eight steps ago. Updates come every five steps, so it always lies in
the memory.

Shapes: `T` steps, `B` lanes, `W` = MEMORY + 1 steps that one step sees, `N` heads, `D` entries of a
head, `H` = N * D.

References: Z. Dai et al., Transformer-XL: attentive language models beyond a fixed-length context,
ACL (2019).
"""

from typing import Any

import torch
from torch import Tensor, nn

import throughtime as tt

SYMBOLS, LAG, MEMORY = 4, 8, 12
STRIDE, HORIZON = 5, 10


class Attention(nn.Module):
    """Causal attention over a sliding window, with a learnt vector for every distance.

    The scores of Transformer-XL without its biases.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.distance = nn.Parameter(torch.randn(heads, width // heads, MEMORY + 1) * 0.3)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        """Attend: `x` (T, B, H), `memory` (MEMORY, B, H), mask `seen` (T, B, W) of valid steps."""
        keys, values = (
            self.key_value(torch.cat([memory, x]))
            .unflatten(2, (2 * self.heads, -1))
            .unfold(0, MEMORY + 1, 1)
            .chunk(2, dim=2)
        )
        query = (
            self.query(x).unflatten(2, (self.heads, -1)).unsqueeze(-1)
        )  # (T, B, N, D, 1) beside keys (T, B, N, D, W)
        scores = (query * (keys + self.distance)).sum(dim=3) * query.shape[
            3
        ] ** -0.5  # (T, B, N, W)
        weights = scores.masked_fill(~seen.unsqueeze(2), -torch.inf).softmax(dim=3)
        return self.out((values * weights.unsqueeze(3)).sum(dim=4).flatten(2))


class Block(nn.Module):
    """Attention and a small network, each added to what it was given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        """`(T, B, H)` to `(T, B, H)`."""
        x = x + self.attention(self.before(x), self.before(memory), seen)
        return x + self.network(self.between(x))


class TransformerXL(nn.Module):
    """Symbols `(T, B)` to scores `(T, B, SYMBOLS)`.

    The state is a memory for every layer and the number of filled slots.
    """

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.read = nn.Linear(width, SYMBOLS)

    def initial_state(self, lanes: int) -> dict[str, Tensor]:
        """No slot of the memory is filled."""
        weight = self.embed.weight
        memory = weight.new_zeros(lanes, len(self.blocks), MEMORY, weight.shape[1])
        return {
            "memory": memory,
            "filled": torch.zeros(lanes, dtype=torch.long, device=weight.device),
        }

    def forward(
        self, symbols: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores for every step, and the memory after the last."""
        steps, memories = len(symbols), state["memory"].unbind(1)  # of each layer (B, MEMORY, H)
        slots = torch.arange(MEMORY + steps, device=symbols.device)
        there = slots.unsqueeze(1) >= MEMORY - state["filled"]  # (MEMORY + T, B)
        seen = there.unfold(0, MEMORY + 1, 1)
        x, after = self.embed(symbols), list[Tensor]()
        for block, memory in zip(self.blocks, memories, strict=True):
            after.append(torch.cat([memory, x.transpose(0, 1)], dim=1)[:, -MEMORY:])
            x = block(x, memory.transpose(0, 1), seen)
        return self.read(x), {
            "memory": torch.stack(after, dim=1),
            "filled": (state["filled"] + steps).clamp(max=MEMORY),
        }


def recordings(count: int, steps: int) -> list[dict[str, Any]]:
    """Random symbols; the target is the symbol `LAG` steps ago, -100 in the first `LAG` steps."""
    symbols = torch.randint(SYMBOLS, (count, steps))
    targets = symbols.roll(LAG, dims=1)
    targets[:, :LAG] = -100
    return [{"inputs": s, "targets": t} for s, t in zip(symbols, targets, strict=True)]


def main(updates: int = 160) -> float:
    """Trains, and returns the mean loss of the last twenty updates."""
    torch.manual_seed(0)
    net = tt.carry(TransformerXL())
    stream = tt.Stream(recordings(16, updates * STRIDE), lanes=16, chunk=STRIDE)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses: list[float] = []
    for update in tt.updates(
        net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(STRIDE, HORIZON)
    ):
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(update.loss))
    found = sum(losses[-20:]) / 20
    print(f"Transformer-XL: {found:.3f} nats after {len(losses)} updates; guessing costs 1.386")
    return found


if __name__ == "__main__":
    main()
