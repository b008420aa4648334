"""What the update loop costs beside a hand-written loop that does the same work.

    python benchmarks/update_loop.py [--rounds 30] [--out benchmarks/results/update_loop.json]

LSTM of 50 units with a linear readout, batch 1, chunks of 100 steps, float32, cross-entropy,
clipping, Adam, one thread. First both sides are checked to compute the same losses and the same
weights, bit for bit; then they are timed in turns in one process, an epoch each, and the ratio of
each pair is taken. The hand-written loop slices a tensor, carries and detaches the state. Ours is
`tt.updates` over a `tt.Stream`, once for each way of carrying the same network.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import throughtime as tt
from record import parser_of, write

STEPS, CHUNK, FEATURES, HIDDEN, CLASSES = 20_000, 100, 4, 50, 3


class Explicit(nn.Module):
    """Takes and returns its state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN)
        self.readout = nn.Linear(HIDDEN, CLASSES)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, after = self.lstm(x, state)
        return self.readout(y), after


class Hiding(nn.Module):
    """Keeps its layers to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN)
        self.readout = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.lstm(x)[0])


def chain() -> nn.Module:
    """The same as a chain."""
    return nn.Sequential(nn.LSTM(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES))


def by_hand(x: Tensor, t: Tensor) -> Callable[[], list[Tensor]]:
    """A loop as a careful user writes it."""
    torch.manual_seed(0)
    net, loss_fn = Explicit(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters())

    def epoch() -> list[Tensor]:
        state, losses = None, list[Tensor]()
        for start in range(0, STEPS, CHUNK):
            y, state = net(x[start : start + CHUNK].unsqueeze(1), state)
            loss = loss_fn(y.flatten(0, 1), t[start : start + CHUNK])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state = (state[0].detach(), state[1].detach())
            losses.append(loss.detach())
        return losses

    return epoch


def ours(make: Callable[[], nn.Module], x: Tensor, t: Tensor) -> Callable[[], list[Tensor]]:
    """The same through `tt.updates`."""
    torch.manual_seed(0)
    net, loss_fn = tt.carry(make()), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters())
    stream = tt.Stream({"inputs": x, "targets": t}, lanes=1, chunk=CHUNK)

    def epoch() -> list[Tensor]:
        losses = list[Tensor]()
        for update in tt.updates(net, stream, loss_fn, gradient=tt.Truncated(stride=CHUNK)):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(update.loss)
        return losses

    return epoch


def main() -> None:
    parser = parser_of(__doc__, "update_loop", rounds=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x, t = torch.randn(STEPS, FEATURES), torch.randint(CLASSES, (STEPS,))
    sides = {
        "by hand": by_hand(x, t),
        "explicit": ours(Explicit, x, t),
        "hiding": ours(Hiding, x, t),
        "chain": ours(chain, x, t),
    }
    first = {name: torch.stack(epoch()) for name, epoch in sides.items()}
    for name, losses in first.items():
        if not torch.equal(losses, first["by hand"]):
            raise SystemExit(
                f"{name} does not compute the losses of the hand-written loop; nothing to compare"
            )
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, epoch in sides.items():
            began = time.perf_counter()
            epoch()
            seconds[name].append(time.perf_counter() - began)
    updates = STEPS // CHUNK
    result: dict[str, dict[str, float]] = {}
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles(
            [a / b for a, b in zip(times, seconds["by hand"], strict=True)], n=4
        )
        result[name] = {
            "us_per_update": statistics.median(times) / updates * 1e6,
            "ratio": middle,
            "lower_quartile": low,
            "upper_quartile": high,
        }
    write(options.out, {"rounds": options.rounds, "result": result})
    for name, row in result.items():
        spread = f"quartiles {row['lower_quartile']:.3f} to {row['upper_quartile']:.3f}"
        print(
            f"{name:>9}: {row['us_per_update']:7.0f} us per update, ratio {row['ratio']:.3f}"
            f" ({spread})"
        )


if __name__ == "__main__":
    main()
