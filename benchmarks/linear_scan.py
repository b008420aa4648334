"""The time of `linear_scan` and its gradients, beside a loop over steps and `torch.cumsum`.

    python benchmarks/linear_scan.py [--rounds 31] [--out benchmarks/results/linear_scan.json]

    loop      h = a[t] * h + b[t] over unbound steps under autograd, stacked
    doubling  steps that reach twice as far each time (Hillis and Steele), under autograd
    torch     `associative_scan(combine_mode="generic")`, torch's own where no GPU is
    cumsum    a sum over time of as many numbers: no gates, the least that could be asked for
    scan      `linear_scan`

float32, one thread, decays of 0.9 to 1. First all are compared with the loop in float64, gradients
included; then they run in turns in one process, and the ratio to the scan is taken round by round.
Times are of the processor, which other programs disturb less.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan  # no public name

from record import parser_of, write
from throughtime.kernels import linear_scan

SHAPES = ((1000, 8, 64), (1000, 1, 64), (100, 8, 64), (1000, 32, 256))
Method = Callable[[Tensor, Tensor, Tensor], Tensor]


def loop(gates: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
    states: list[Tensor] = []
    for a, b in zip(gates.unbind(0), inputs.unbind(0), strict=True):
        state = torch.addcmul(b, a, state)
        states.append(state)
    return torch.stack(states)


def doubling(gates: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
    states, reach = torch.cat([(gates[0] * state + inputs[0]).unsqueeze(0), inputs[1:]]), 1
    while reach < len(gates):
        states = torch.cat(
            [states[:reach], torch.addcmul(states[reach:], gates[reach:], states[:-reach])]
        )
        gates = torch.cat([gates[:reach], gates[reach:] * gates[:-reach]])
        reach *= 2
    return states


def of_torch(gates: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
    first = torch.cat([(gates[0] * state + inputs[0]).unsqueeze(0), inputs[1:]])

    def both(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return before[0] * after[0], torch.addcmul(after[1], after[0], before[1])

    return associative_scan(both, (gates, first), 0, combine_mode="generic")[1]


def cumsum(gates: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
    del gates, state
    return inputs.cumsum(0)


METHODS: dict[str, Method] = {
    "scan": linear_scan,
    "loop": loop,
    "doubling": doubling,
    "torch": of_torch,
    "cumsum": cumsum,
}


def draw(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    steps, lanes, units = shape
    gates, inputs = (
        0.9 + 0.1 * torch.rand(steps, lanes, units, dtype=dtype),
        torch.randn(steps, lanes, units, dtype=dtype),
    )
    return (
        gates.requires_grad_(),
        inputs.requires_grad_(),
        torch.randn(lanes, units, dtype=dtype).requires_grad_(),
        torch.randn_like(inputs),
    )


def forward(method: Method, given: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [method(*given[:3])]


def with_gradients(method: Method, given: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    states = method(*given[:3])
    return [
        states.detach(),
        *torch.autograd.grad(
            states, given[:3], given[3], allow_unused=True, materialize_grads=True
        ),
    ]


def checked(shape: tuple[int, int, int]) -> dict[str, float]:
    """The largest difference from the loop, relative to the largest entry."""
    right = with_gradients(loop, draw(shape, torch.float64))
    found = {
        name: with_gradients(method, draw(shape, torch.float64))
        for name, method in METHODS.items()
        if name != "cumsum"
    }
    apart = {
        name: max(
            ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(values, right, strict=True)
        )
        for name, values in found.items()
    }
    if not max(apart.values()) < 1e-10:
        raise SystemExit(f"they do not compute the same: {apart}")
    return apart


def in_turns(
    run: Callable[[Method, Any], list[Tensor]], shape: tuple[int, int, int], rounds: int
) -> dict[str, Any]:
    """Median milliseconds of each, and the median of its ratio to the scan's."""
    given = draw(shape, torch.float32)
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in range(rounds + 2):
        for name, method in METHODS.items():
            began = time.process_time()
            run(method, given)
            if turn >= 2:
                times[name].append((time.process_time() - began) * 1e3)
    return {
        "milliseconds": {name: statistics.median(values) for name, values in times.items()},
        "over_scan": {
            name: statistics.median(a / b for a, b in zip(values, times["scan"], strict=True))
            for name, values in times.items()
        },
    }


def main() -> None:
    parser = parser_of(__doc__, "linear_scan", rounds=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        row: dict[str, Any] = {"shape": shape, "apart": checked(shape)}
        for name, run in (("forward", forward), ("with_gradients", with_gradients)):
            row[name] = in_turns(run, shape, options.rounds)
            print(
                f"{shape!s:16} {name:15}",
                "  ".join(f"{k} {v:.2f} ms" for k, v in row[name]["milliseconds"].items()),
                flush=True,
            )
        rows.append(row)
    write(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
