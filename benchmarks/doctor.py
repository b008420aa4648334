"""The cost of the doctor while it watches a loop, and after it.

    python benchmarks/doctor.py [--rounds 7] [--out benchmarks/results/doctor.json]

Three loops of plain PyTorch over 500 chunks of 20 steps: a fused LSTM, an LSTMCell and a cell of
three operations written by hand; 16 lanes, 64 units, Adam, float32, one thread. The script first
checks that losses and weights with and without the doctor are the same bits, and that the doctor
finds nothing. Then it times the loop plain, watched and plain again, in turns in one process.
`watched` is the ratio to the mean of the two plain runs around it. `after` is the second plain run
divided by the first.
"""

import statistics
import time

import torch
from torch import Tensor, nn

from record import parser_of, write
from throughtime.doctor import doctor

CHUNKS, STEPS, LANES, FEATURES, UNITS = 500, 20, 16, 16, 64
KINDS = ("lstm", "cell", "by hand")


class HandWrittenCell(nn.Module):
    """A recurrent cell as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(0.1 * torch.randn(FEATURES, UNITS))
        self.u = nn.Parameter(0.1 * torch.randn(UNITS, UNITS))
        self.b = nn.Parameter(torch.zeros(UNITS))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(x @ self.w + h @ self.u + self.b)


def unroll(
    net: nn.Module, kind: str, x: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if kind == "lstm":
        return (
            net(x, (state[0].unsqueeze(0), state[1].unsqueeze(0)))
            if state[0].dim() == 2
            else net(x, state)
        )
    outputs: list[Tensor] = []
    for step in range(STEPS):
        state = net(x[step], state) if kind == "cell" else (net(x[step], state[0]),)
        outputs.append(state[0])
    return torch.stack(outputs), state


def loop(kind: str, stream: Tensor) -> list[Tensor]:
    """Train, and return the losses and the weights."""
    torch.manual_seed(0)
    net = {
        "lstm": lambda: nn.LSTM(FEATURES, UNITS),
        "cell": lambda: nn.LSTMCell(FEATURES, UNITS),
        "by hand": HandWrittenCell,
    }[kind]()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    state, losses = (torch.zeros(LANES, UNITS), torch.zeros(LANES, UNITS)), list[Tensor]()
    for x in stream.split(STEPS):
        y, state = unroll(net, kind, x, state)
        state = tuple(part.detach() for part in state)
        loss = (y[..., :FEATURES] - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(p.detach() for p in net.parameters())]


def seconds(kind: str, stream: Tensor, *, watched: bool) -> float:
    start = time.perf_counter()
    if watched:
        with doctor():
            loop(kind, stream)
    else:
        loop(kind, stream)
    return time.perf_counter() - start


def measure(kind: str, stream: Tensor, rounds: int) -> dict[str, float]:
    plain = loop(kind, stream)
    with doctor() as watching:
        watched = loop(kind, stream)
    assert not watching.findings, str(watching)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True)), kind
    ratios, after, base = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        first, second, third = (seconds(kind, stream, watched=w) for w in (False, True, False))
        ratios.append(2 * second / (first + third))
        after.append(third / first)
        base.append(first)
    ratio = {
        "watched": statistics.median(ratios),
        "watched_worst": max(ratios),
        "after": statistics.median(after),
    }
    return ratio | {"plain_seconds": statistics.median(base), "chunks": CHUNKS}


def main() -> None:
    parser = parser_of(__doc__, "doctor", rounds=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    stream = torch.randn(CHUNKS * STEPS, LANES, FEATURES)
    loops = {kind: measure(kind, stream, options.rounds) for kind in KINDS}
    write(options.out, {"rounds": options.rounds, "loops": loops})
    for kind, row in loops.items():
        print(
            f"{kind:8s} watched {row['watched']:.3f} (worst {row['watched_worst']:.3f})  after"
            f" {row['after']:.3f}"
        )


if __name__ == "__main__":
    main()
