"""What it costs to trace a net: forward and backward pass, traced and untraced.

    python benchmarks/trace_cost.py [--rounds 40] [--out benchmarks/results/trace_cost.json]

Layers and cells of torch.nn with 64 units on chunks of 100 steps, float32, one thread, batches of 1
and 32, and the fused layers of tt.nn in three sizes: a forward pass, a mean square of all outputs,
a backward pass. First the outputs are checked to be the same bits and the gradients to agree; then
the sides run in turns in one process, and the ratio of each turn to the untraced one is taken. Time
is that which the processor spends on the thread, so that what else runs on the machine counts
little. Memory is what torch's operators hold at most during a pass, and what the trace keeps of it
afterwards; it is not told of fused layers. What a trace costs updates in one call, stream and
optimizer included, `python -m benchmarks.bench --cases 'trace-*'` tells.
"""

import argparse
import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.diagnose.trace import Trace, trace

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
allocated = importlib.import_module(
    "givens"
).allocated  # counts every tensor that is made, as the tests do

STEPS, FEATURES, HIDDEN = 100, 16, 64
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
SIDES = ("untraced", "norms", "tensors")


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


def opened(net: nn.Module, side: str) -> Trace | None:
    return None if side == "untraced" else trace(net, tensors=side == "tensors")


def check(net: nn.Module, x: Tensor) -> None:
    """Refuses to time sides that compute different things."""
    plain = [found.clone() for found in step(net, x)]
    with trace(net):
        traced = step(net, x)
    if not torch.equal(plain[0], traced[0]):
        raise SystemExit(f"{net}: the traced outputs are others; nothing to compare")
    torch.testing.assert_close(traced, plain, rtol=1e-3, atol=1e-6)


def timed(net: nn.Module, x: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds and ratios to the untraced turn, by side."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    began = time.thread_time()
    step(net, x)
    steps = max(5, round(TURN / (time.thread_time() - began)))
    for turn in range(rounds):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            found = opened(net, side)
            step(net, x)
            began = time.thread_time()
            for _ in range(steps):
                step(net, x)
            seconds[side].append((time.thread_time() - began) / steps)
            if found is not None:
                found.close()
    told: dict[str, dict[str, float]] = {}
    for side, times in seconds.items():
        low, middle, high = statistics.quantiles(
            [a / b for a, b in zip(times, seconds["untraced"], strict=True)], n=4
        )
        told[side] = {
            "ms": statistics.median(times) * 1e3,
            "ratio": middle,
            "lower_quartile": low,
            "upper_quartile": high,
        }
    return told


def held(net: nn.Module, x: Tensor, side: str) -> dict[str, float]:
    """Kilobytes of a pass at most, and of what the trace keeps afterwards."""
    step(net, x)
    found = opened(net, side)

    def run() -> None:
        step(net, x)

    memory = allocated(run)
    if found is not None:
        found.close()
    return {"kb_most": memory.most / 1e3, "kb_kept": memory.kept / 1e3}


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], int, torch.dtype]]:
    """Name, net, lanes and type of each row."""
    for lanes in (1, 32):
        for name, make in LAYERS.items():
            yield f"{name}, batch {lanes}", make, lanes, torch.float32
    for layer in FUSED:
        for lanes, units, dtype in SIZES:
            told = (
                f"tt.nn.{layer.__name__}, {units} units, {str(dtype).removeprefix('torch.')}, batch"
                f" {lanes}"
            )
            yield told, partial(layer, FEATURES, units), lanes, dtype


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trace_cost.json"))
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name, make, lanes, dtype in cases():
        torch.manual_seed(0)
        net, x = make().to(dtype), torch.randn(STEPS, lanes, FEATURES, dtype=dtype)
        check(net, x)
        found = timed(net, x, options.rounds)
        memory = (
            {} if isinstance(net, FUSED) else {side: held(net, x, side) for side in SIDES}
        )  # who counts would see torch.nn's
        result[name] = {side: found[side] | memory.get(side, {}) for side in SIDES}
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": 1,
        "processor": platform.machine(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    told = {
        "machine": machine,
        "rounds": options.rounds,
        "steps": STEPS,
        "hidden": HIDDEN,
        "result": result,
    }
    options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    for name, sides in result.items():
        row = "; ".join(
            f"{side} {sides[side]['ratio']:.2f} ({sides[side]['ms']:.2f} ms,"
            f" {sides[side].get('kb_most', 0):.0f} kB)"
            for side in SIDES
        )
        print(f"{name:>40}: {row}")


if __name__ == "__main__":
    main()
