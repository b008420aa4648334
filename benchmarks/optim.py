"""The time of one clipped step of Adam: torch's three variants and `throughtime.optim.Adam`.

Torch's follow `clip_grad_norm_`; ours takes `max_norm`.

    python benchmarks/optim.py [--rounds 41] [--threads 1] [--out benchmarks/results/optim.json]

    S     nn.LSTM(16, 50) and a linear head: 6 tensors, 13,855 numbers
    M     nn.LSTM(32, 128) and a head: 6 tensors, 84,234 numbers
    L     nn.LSTM(650, 650, num_layers=2) and a head: 10 tensors, 6.8 million numbers

First all take twenty steps on the same gradients, and must agree. Then they run in turns in one
process, a block of steps each; the ratio to ours is taken round by round. Gradients are the same
tensors at every step, so caches are warm. On one thread times are of the processor, which other
programs disturb less; on more, of the clock.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from record import parser_of, write
from throughtime.kernels.library import level
from throughtime.optim import Adam

NETS: dict[
    str, tuple[Callable[[], nn.Module], torch.dtype, int]
] = {  # and how many steps a block has
    "S": (lambda: nn.ModuleList([nn.LSTM(16, 50), nn.Linear(50, 5)]), torch.float32, 50),
    "S float64": (lambda: nn.ModuleList([nn.LSTM(16, 50), nn.Linear(50, 5)]), torch.float64, 50),
    "M": (lambda: nn.ModuleList([nn.LSTM(32, 128), nn.Linear(128, 10)]), torch.float32, 20),
    "L": (
        lambda: nn.ModuleList([nn.LSTM(650, 650, num_layers=2), nn.Linear(650, 10)]),
        torch.float32,
        1,
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "default": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "ours": {},
}
Step = Callable[[], None]


def build(way: str, net: str) -> tuple[Step, list[nn.Parameter]]:
    torch.manual_seed(0)
    make, dtype, _ = NETS[net]
    params = list(make().to(dtype).parameters())
    for param in params:
        param.grad = torch.randn_like(param)
    if way == "ours":
        mine = Adam(params, lr=1e-3, max_norm=1.0)
        return mine.step, params
    torchs = torch.optim.Adam(params, lr=1e-3, **WAYS[way])

    def step() -> None:
        clip_grad_norm_(params, 1.0)
        torchs.step()

    return step, params


def checked(net: str) -> dict[str, float]:
    """The largest difference of the weights from torch's default after twenty steps."""
    weights: dict[str, list[torch.Tensor]] = {}
    for way in WAYS:
        step, params = build(way, net)
        for turn in range(20):
            torch.manual_seed(turn)
            for param in params:
                param.grad = torch.randn_like(param)
            step()
        weights[way] = [param.detach() for param in params]
    apart = {
        way: max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(found, weights["default"], strict=True)
        )
        for way, found in weights.items()
    }
    if not max(apart.values()) < (1e-12 if NETS[net][1] == torch.float64 else 1e-5):
        raise SystemExit(f"they do not compute the same: {apart}")
    return apart


def block(step: Step, steps: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(steps):
        step()
    return (clock() - began) / steps * 1e6


def in_turns(net: str, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Quartiles of the microseconds of each, and of its ratio to ours."""
    steps = {way: build(way, net)[0] for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 2):
        for way, step in steps.items():
            took = block(step, NETS[net][2], clock)
            if turn >= 2:
                times[way].append(took)
    quartiles = partial(statistics.quantiles, n=4)
    return {
        "microseconds": {way: quartiles(values) for way, values in times.items()},
        "over_ours": {
            way: quartiles([a / b for a, b in zip(values, times["ours"], strict=True)])
            for way, values in times.items()
        },
    }


def main() -> None:
    parser = parser_of(__doc__, "optim", rounds=41)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for net in NETS:
            row: dict[str, Any] = {"net": net, "threads": threads, "apart": checked(net)}
            row |= in_turns(
                net, options.rounds, time.process_time if threads == 1 else time.perf_counter
            )
            rows.append(row)
            said = "  ".join(
                f"{way} {row['microseconds'][way][1]:.1f} us ({row['over_ours'][way][1]:.2f})"
                for way in WAYS
            )
            print(f"{threads} threads  {net:10}", said, flush=True)
    write(options.out, {"instructions": level(), "rows": rows})


if __name__ == "__main__":
    main()
