"""The cost of a trace: a forward and a backward pass, untraced, and traced.

    python benchmarks/trace_cost.py [--rounds 10] [--quick] [--out PATH]

Layers and cells of torch.nn with 64 units on chunks of 100 steps, float32, one thread, batches of 1
and 32, and the fused layers of tt.nn in three sizes: a forward pass, a mean square of all outputs,
a backward pass. Outputs and gradients are checked to agree first. Then the sides run in turns in
one process, and each turn is divided by the untraced one. Time is that of the thread, so other
processes count little. Memory is the most that torch's operators hold during a pass, and what the
trace keeps of it; it is not counted for fused layers.
`make bench` has the cost for `tt.updates`, stream and optimizer included. `--quick` checks that all
rows run: one round on chunks of 10 steps, whose figures mean little, so it writes a file only with
`--out`.
"""

import argparse
import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.diagnose.trace import trace

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
# counts every allocated tensor, as the tests do
allocated = importlib.import_module("policy_data").allocated

RESULTS = Path("benchmarks/results/trace_cost.json")
STEPS, QUICK_STEPS, FEATURES, HIDDEN = 100, 10, 16, 64
TURN = 0.02  # seconds of a turn, at least
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "nn.LSTM": lambda: nn.LSTM(FEATURES, HIDDEN),
    "nn.LSTM, 2 layers": lambda: nn.LSTM(FEATURES, HIDDEN, num_layers=2),
    "nn.GRU": lambda: nn.GRU(FEATURES, HIDDEN),
    "nn.RNN": lambda: nn.RNN(FEATURES, HIDDEN),
    "nn.LSTMCell in a loop": lambda: nn.LSTMCell(FEATURES, HIDDEN),
    "nn.GRUCell in a loop": lambda: nn.GRUCell(FEATURES, HIDDEN),
}
FUSED = (tt.nn.LSTM, tt.nn.GRU, tt.nn.RNN)
SIZES = (
    (1, 50, torch.float32),
    (1, 50, torch.float64),
    (32, 128, torch.float32),
)  # lanes, units, type
SIDES = ("untraced", "traced")


def played(net: nn.Module, x: Tensor) -> Tensor:
    """All steps of a layer, or of a cell in a loop."""
    if isinstance(net, nn.RNNBase):
        return net(x)[0]
    state, hidden = None, list[Tensor]()
    for step in x.unbind(0):
        state = net(step, state)
        hidden.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(hidden)


def step(net: nn.Module, x: Tensor) -> list[Tensor]:
    """The outputs, and the gradient of every weight."""
    net.zero_grad()
    y = played(net, x)
    y.square().mean().backward()
    return [y.detach(), *(torch.as_tensor(weight.grad) for weight in net.parameters())]


def opened(net: nn.Module, side: str) -> AbstractContextManager[object]:
    return nullcontext() if side == "untraced" else trace(net)


def check(net: nn.Module, x: Tensor) -> None:
    """Refuse to time sides that compute different things."""
    plain = [tensor.clone() for tensor in step(net, x)]
    with trace(net):
        traced = step(net, x)
    torch.testing.assert_close(traced, plain, rtol=1e-3, atol=1e-6)


def timed(net: nn.Module, x: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds and ratios to the untraced turn, by side."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    began = time.thread_time()
    step(net, x)
    steps = max(1, round(TURN / (time.thread_time() - began)))
    for turn in range(rounds):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            with opened(net, side):
                step(net, x)
                began = time.thread_time()
                for _ in range(steps):
                    step(net, x)
                seconds[side].append((time.thread_time() - began) / steps)
    ratios: dict[str, dict[str, float]] = {}
    for side, times in seconds.items():
        turns = [a / b for a, b in zip(times, seconds["untraced"], strict=True)]
        # quartiles need two turns
        low, middle, high = statistics.quantiles(turns, n=4) if rounds > 1 else turns * 3
        ratios[side] = {
            "ms": statistics.median(times) * 1e3,
            "ratio": middle,
            "lower_quartile": low,
            "upper_quartile": high,
        }
    return ratios


def held(net: nn.Module, x: Tensor, side: str) -> dict[str, float]:
    """Kilobytes of a pass at most, and of what the trace keeps afterwards."""
    step(net, x)

    def run() -> None:
        step(net, x)

    with opened(net, side):
        memory = allocated(run)
    return {"kb_most": memory.most / 1e3, "kb_kept": memory.kept / 1e3}


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], int, torch.dtype]]:
    """Name, net, lanes and type of each row."""
    for lanes in (1, 32):
        for name, make in LAYERS.items():
            yield f"{name}, batch {lanes}", make, lanes, torch.float32
    for layer in FUSED:
        for lanes, units, dtype in SIZES:
            name = (
                f"tt.nn.{layer.__name__}, {units} units, {str(dtype).removeprefix('torch.')}, batch"
                f" {lanes}"
            )
            yield name, partial(layer, FEATURES, units), lanes, dtype


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rounds, steps = (1, QUICK_STEPS) if options.quick else (options.rounds, STEPS)
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name, make, lanes, dtype in cases():
        torch.manual_seed(0)
        net, x = make().to(dtype), torch.randn(steps, lanes, FEATURES, dtype=dtype)
        check(net, x)
        times = timed(net, x, rounds)
        memory = (
            {} if isinstance(net, FUSED) else {side: held(net, x, side) for side in SIDES}
        )  # counting would make tt.nn call torch.nn
        result[name] = {side: times[side] | memory.get(side, {}) for side in SIDES}
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": 1,
        "processor": platform.machine(),
    }
    content = {
        "machine": machine,
        "rounds": rounds,
        "steps": steps,
        "hidden": HIDDEN,
        "result": result,
    }
    out = options.out or (None if options.quick else RESULTS)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, sides in result.items():
        row = "; ".join(
            f"{side} {sides[side]['ratio']:.2f} ({sides[side]['ms']:.2f} ms,"
            f" {sides[side].get('kb_most', 0):.0f} kB)"
            for side in SIDES
        )
        print(f"{name:>40}: {row}")


if __name__ == "__main__":
    main()
