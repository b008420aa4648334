"""Forward and backward of a layer under bfloat16 autocast: torch.nn, `tt.nn`, `tt.nn` in float32.

    python benchmarks/autocast.py [--rounds 15] [--out benchmarks/results/autocast.json]

All gradients but that of the inputs are made, on one thread. First each has to be as near to
float32 as bfloat16 allows: outputs within 3 % of the largest of float32's. Then they run in turns
in one process, each round begun by another one; ratios are taken round by round. Times are of the
processor, which other programs disturb less.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import throughtime as tt
from record import parser_of, write
from throughtime.kernels.library import library

LOWERED = ("torch.nn", "tt.nn")
WAYS = (*LOWERED, "tt.nn, float32")
PAIRS = ("none", "AVX512-BF16", "AMX")


class Size(NamedTuple):
    """Of a layer and what it plays."""

    T: int
    B: int
    D: int
    H: int


SIZES = [
    Size(100, 1, 16, 50),
    Size(100, 8, 32, 128),
    Size(100, 32, 32, 128),
    Size(100, 32, 64, 256),
    Size(35, 20, 650, 650),
    Size(35, 64, 1024, 1024),
]


def build(kind: str, size: Size) -> dict[str, Callable[[], Tensor]]:
    """The three, with the same weights and inputs; each gives its outputs, gradients made."""
    torch.manual_seed(0)
    theirs, x = getattr(nn, kind)(size.D, size.H), torch.randn(size.T, size.B, size.D)
    ours = getattr(tt.nn, kind)(size.D, size.H)
    ours.load_state_dict(theirs.state_dict())

    def play(layer: nn.Module, lowered: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            y: Tensor = layer(x)[0]
        y.float().sum().backward()
        layer.zero_grad()
        return y.detach().float()

    return {
        way: lambda way=way: play(theirs if way == "torch.nn" else ours, way in LOWERED)
        for way in WAYS
    }


def measured(kind: str, size: Size, rounds: int) -> dict[str, Any]:
    """Milliseconds of each, and quartiles of how many times as fast `tt.nn` is."""
    sides = build(kind, size)
    outputs = {way: side() for way, side in sides.items()}
    exact = outputs["tt.nn, float32"]
    apart = {way: float((outputs[way] - exact).abs().max() / exact.abs().max()) for way in LOWERED}
    if not max(apart.values()) < 0.03:
        raise SystemExit(f"{kind} {size}: too far from float32: {apart}")
    count = max(1, round(0.05 / _timed(sides["torch.nn"], 1)))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
            times[way].append(_timed(sides[way], count) / count * 1e3)
    ours = times["tt.nn"]
    ratios = {
        way: statistics.quantiles([a / b for a, b in zip(times[way], ours, strict=True)], n=4)
        for way in WAYS
        if way != "tt.nn"
    }
    return {
        "kind": kind,
        **size._asdict(),
        "apart": apart,
        "ms": {way: statistics.median(times[way]) for way in WAYS},
        "times as fast as": ratios,
    }


def _timed(side: Callable[[], Tensor], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        side()
    return time.process_time() - began


def main() -> None:
    parser = parser_of(__doc__, "autocast", rounds=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    core = library()
    found: list[dict[str, Any]] = []
    for kind in ("LSTM", "GRU", "RNN"):
        for size in SIZES:
            row = measured(kind, size, given.rounds)
            found.append(row)
            ratios = " | ".join(
                f"{row['times as fast as'][way][1]:.2f}" for way in WAYS if way != "tt.nn"
            )
            print(
                f"| {kind} | {' x '.join(map(str, size))} | {row['ms']['torch.nn']:.2f} |"
                f" {row['ms']['tt.nn']:.2f} | {ratios} |"
            )
    products = PAIRS[core.tt_bfloat16() if core else 0]
    write(given.out, {"products": products, "rounds": given.rounds, "rows": found})


if __name__ == "__main__":
    main()
