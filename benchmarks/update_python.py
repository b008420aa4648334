"""The time of a one-call update outside the compiled kernel.

    python benchmarks/update_python.py [--json FILE]

An LSTM of 50 units with a linear readout, one lane, stride and chunk of 100 steps, `fused=True`:
`tt.updates` makes such an update in one call of the compiled core. The benchmark times every
`next(updates)` and the call inside it, optimizer excluded, and prints medians in microseconds:
kernel, the rest ("python"), and their sum. It checks that every update was one call.
"""

import argparse
import importlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

import throughtime as tt

UPDATES, SKIPPED = 1_500, 200


def kernel_function() -> tuple[Any, str]:
    """The module and the name of the function that calls the fused step of the compiled core."""
    for path, name in (("recurrent", "fused_step"), ("fused_step", "step"), ("whole", "step")):
        try:
            module = importlib.import_module(f"throughtime.kernels.{path}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, name):
            return module, name
    raise ModuleNotFoundError("throughtime.kernels has no fused step")


class CallTimer:
    """Wraps the function that calls the compiled core and adds up the time inside it."""

    def __init__(self, function: Callable[[Any], int]) -> None:
        self._function = function
        self.calls = self.nanoseconds = 0

    def __call__(self, argument: Any) -> int:
        start = perf_counter_ns()
        code = self._function(argument)
        self.nanoseconds += perf_counter_ns() - start
        self.calls += 1
        return code


def measure(loss_fn: nn.Module, dtype: torch.dtype) -> dict[str, float]:
    """Medians over the updates of one epoch, in microseconds."""
    module, name = kernel_function()
    original = getattr(module, name)
    timer = CallTimer(original)
    torch.manual_seed(0)
    steps, classes = 100 * UPDATES, 4
    regression = isinstance(loss_fn, nn.MSELoss)
    targets = torch.randn(steps, classes) if regression else torch.randint(classes, (steps,))
    recording = {"inputs": torch.randn(steps, 8), "targets": targets}
    stream = tt.Stream(recording, lanes=1, chunk=100, dtype=dtype)
    layers = nn.Sequential(nn.LSTM(8, 50), nn.Linear(50, classes)).to(dtype)
    net = tt.carry(layers, fused=True)
    updates = tt.updates(net, stream, loss_fn, gradient=tt.Truncated(100))
    weights, kernel, rest = list(net.parameters()), list[float](), list[float]()
    setattr(module, name, timer)
    try:
        for _ in range(UPDATES):
            for weight in weights:
                weight.grad = None
            timer.nanoseconds = 0
            start = perf_counter_ns()
            next(updates)
            total = perf_counter_ns() - start
            kernel.append(timer.nanoseconds / 1e3)
            rest.append((total - timer.nanoseconds) / 1e3)
    finally:
        setattr(module, name, original)
    if timer.calls != UPDATES:
        raise RuntimeError(f"{timer.calls} of {UPDATES} updates were one call")
    kernel_us, python_us = statistics.median(kernel[SKIPPED:]), statistics.median(rest[SKIPPED:])
    return {"kernel": kernel_us, "python": python_us, "total": kernel_us + python_us}


def main() -> None:
    """Measure both losses in both types."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    file = parser.parse_args().json
    torch.set_num_threads(1)
    rows: dict[str, dict[str, float]] = {}
    for loss_fn in (nn.MSELoss(), nn.CrossEntropyLoss()):
        for dtype in (torch.float64, torch.float32):
            name = f"{type(loss_fn).__name__}, {str(dtype).removeprefix('torch.')}"
            rows[name] = measure(loss_fn, dtype)
            text = ", ".join(f"{key} {value:.1f}" for key, value in rows[name].items())
            print(f"{name}: {text} microseconds")
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
