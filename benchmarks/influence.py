"""Influence balancing: a task on which too short a truncation has the wrong sign.

    python benchmarks/influence.py [--out benchmarks/results/influence.json]

    s' = A s + theta * b        A = I/2 + 1/2 on the first superdiagonal, 23 states; b = +1 ten
    times, then -1 thirteen times loss = (s_1 - 1)^2 / 2

theta first pushes s_1 up, through the ten nearby states, and in the end down, through all of them:
d s_1 / d theta is +1 after one step, +10 after ten, -6 after a hundred. A gradient that looks back
25 steps has the wrong sign and theta runs away; the right theta is -1/6. From C. Tallec and Y.
Ollivier (Unbiasing truncated backpropagation through time, 2017), with the sizes of P. Vicol, L.
Metz and J. Sohl-Dickstein (Unbiased gradient estimation in unrolled computation graphs with
persistent evolution strategies, ICML 2021). float64, SGD, one thread.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import throughtime as tt
from record import parser_of, write
from throughtime.chunk import Chunk
from throughtime.gradient import Policy, UpdatePolicy

STATES, PLUS, START, BEST = 23, 10, 0.5, -1 / 6


class Balance(nn.Module):
    """One weight, twenty-three states that start at 1; the output is the first state."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(START, dtype=torch.float64))
        self.register_buffer(
            "a",
            0.5 * torch.eye(STATES, dtype=torch.float64)
            + 0.5 * torch.diag(torch.ones(STATES - 1).double(), 1),
        )
        self.register_buffer(
            "b", torch.tensor([1.0] * PLUS + [-1.0] * (STATES - PLUS), dtype=torch.float64)
        )

    def initial_state(self, lanes: int) -> Tensor:
        """Every state is 1."""
        return self.theta.new_ones(lanes, STATES).detach()

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs are zeros: they say only how many steps there are."""
        outputs: list[Tensor] = []
        for step in x:
            s = s @ self.get_buffer("a").T + self.theta * self.get_buffer("b")
            outputs.append(s[:, :1] + step)
        return torch.stack(outputs), s


def online() -> UpdatePolicy:
    """Real-time recurrent learning, an example."""
    sys.path.append(str(Path(__file__).parent.parent))
    from examples.policies.rtrl import RTRL

    return RTRL(stride=1)


@dataclass(frozen=True)
class Row:
    """A way to train: its policy, steps, learning rate, and what is expected."""

    policy: Callable[[], Policy | UpdatePolicy]
    steps: int
    lr: float
    expected: str
    seeds: int = 1


ROWS = {
    **{
        f"truncated, horizon {k}": Row(lambda k=k: tt.Truncated(1, k), 3_000, 1e-4, e)
        for k, e in ((10, "diverges"), (25, "diverges"))
    },
    **{
        f"truncated, horizon {k}": Row(lambda k=k: tt.Truncated(1, k), 3_000, 1e-4, e)
        for k, e in ((50, "-0.16654"), (100, "-0.16665"))
    },
    "exact, segments of 3,000": Row(
        lambda: tt.Exact(cut_every=3_000, chunk=500), 90_000, 0.02, "-1/6"
    ),
    "online": Row(online, 6_000, 1e-4, "-1/6"),
    "randomized, mean horizon 16": Row(
        lambda: tt.Randomized(16, alpha=6, grain=1), 30_000, 16e-5, "-0.167, 5 of 5 seeds", seeds=5
    ),
}


def half_square(y: Tensor, t: Tensor) -> Tensor:
    """The loss."""
    return 0.5 * (y - t).square().mean()


def endless(steps: int) -> Iterator[Chunk]:
    """Steps without an end that carry no input."""
    for start in range(0, steps, 1_000):
        zeros = torch.zeros(1_000, 1, 1, dtype=torch.float64)
        yield Chunk.from_tensors(
            zeros, zeros + 1, position=torch.arange(start, start + 1_000).unsqueeze(1)
        )


def one_run(row: Row, seed: int) -> float:
    """Theta at the end, or where it has run away."""
    torch.manual_seed(seed)
    net = tt.carry(Balance())
    theta = net.get_parameter("module.theta")
    optimizer = torch.optim.SGD([theta], lr=row.lr)
    for _ in tt.updates(net, list(endless(row.steps)), half_square, gradient=row.policy()):
        optimizer.step()
        optimizer.zero_grad()
        if not abs(theta.item()) < 10:
            break
    return theta.item()


def influence(lag: int) -> float:
    """D s_1 / d theta, `lag` steps after theta was changed."""
    net = Balance()
    y, _ = net(torch.zeros(lag, 1, 1), torch.ones(1, STATES, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(y[-1, 0, 0], [net.theta])
    return gradient.item()


def main() -> None:
    parser = parser_of(__doc__, "influence")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lags = {lag: influence(lag) for lag in (1, 10, 20, 25, 40, 50, 100)}
    print("d s_1 / d theta:", ", ".join(f"{lag} steps {value:.4g}" for lag, value in lags.items()))
    found: dict[str, dict[str, object]] = {}
    for name, row in ROWS.items():
        began = time.process_time()
        thetas = [one_run(row, seed) for seed in range(row.seeds)]
        spread = statistics.stdev(thetas) if len(thetas) > 1 else 0.0
        close = sum(abs(theta - BEST) < 1e-3 for theta in thetas)
        found[name] = {
            "theta": thetas,
            "expected": row.expected,
            "seconds": time.process_time() - began,
        }
        print(
            f"{name:30} theta {statistics.mean(thetas):10.6f} ± {spread:.1e}  ({close} of"
            f" {len(thetas)} at -1/6; paper {row.expected})"
        )
    write(options.out, {"influence": lags, "rows": found})


if __name__ == "__main__":
    main()
