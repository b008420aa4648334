"""What the trials of `tt.carry` cost, and that nothing of them is paid afterwards.

    python benchmarks/carry_cost.py [--rounds 15] [--out benchmarks/results/carry_cost.json]

Nets of two layers of H units and a linear readout, float32, one thread: as an `nn.Sequential`, as a
class whose state is read and set by hooks, and as a class that takes and returns its state. First
each carried net is checked to compute what `torch.nn` computes. Then the first chunk's trials are
timed, one net after the other in each round (goal: a median of 50 ms on a quiet machine), and
a later check of the same net, which is one look-up. On a busy machine read the processor time.
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import throughtime as tt
from record import parser_of, write
from throughtime.carry import Carried

STEPS, LANES, FEATURES, CLASSES = 100, 1, 4, 3
Layer = type[nn.LSTM] | type[nn.GRU]
LATER = 10_000  # look-ups that are timed together


class Explicit(nn.Module):
    """Takes and returns its state."""

    def __init__(self, layer: Layer, hidden: int) -> None:
        super().__init__()
        self.layers: Any = layer(FEATURES, hidden, num_layers=2)
        self.readout = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, after = self.layers(x, state)
        return self.readout(y), after


class Hiding(Explicit):
    """Keeps its layers to itself."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.readout(self.layers(x)[0])


def chain(layer: Layer, hidden: int) -> nn.Module:
    """The same as an `nn.Sequential`."""
    return nn.Sequential(layer(FEATURES, hidden, num_layers=2), nn.Linear(hidden, CLASSES))


FORMS = {"sequential": chain, "hooks": Hiding, "explicit": Explicit}
LAYERS: dict[str, Layer] = {"LSTM": nn.LSTM, "GRU": nn.GRU}


def check(module: nn.Module, net: Carried, x: Tensor) -> None:
    """Compare a carried net with torch's layers."""
    layers, readout = (m for m in module.children())
    with torch.no_grad():
        y, _ = net(x, net.initial_state(x.shape[1], like=x))
        if not torch.equal(y, readout(layers(x)[0])):
            raise SystemExit(f"{net}: not what torch.nn computes; nothing to measure")


def measure(form: str, layer: str, hidden: int, x: Tensor) -> tuple[float, float, float]:
    """Wall and processor milliseconds of a new net's trials; microseconds of a later check."""
    torch.manual_seed(0)
    module = FORMS[form](LAYERS[layer], hidden)
    net = tt.carry(module)
    began, began_cpu = time.perf_counter(), time.process_time()
    net.prepare(x)
    trials, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    check(module, net, x)
    began = time.perf_counter()
    for _ in range(LATER):
        net.prepare(x)
    later = time.perf_counter() - began
    return trials * 1e3, cpu * 1e3, later / LATER * 1e6


def main() -> None:
    parser = parser_of(__doc__, "carry_cost", rounds=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(STEPS, LANES, FEATURES)
    nets = [(form, layer, hidden) for hidden in (50, 128) for layer in LAYERS for form in FORMS]
    times: dict[str, list[tuple[float, float, float]]] = {}
    for turn in range(options.rounds + 1):
        for form, layer, hidden in nets:
            figures = measure(form, layer, hidden, x)
            if turn:  # the first one imports and compiles
                times.setdefault(f"{layer} {form} H={hidden}", []).append(figures)
    result: dict[str, dict[str, float]] = {}
    for name, rows in times.items():
        low, middle, high = statistics.quantiles([trials for trials, _, _ in rows], n=4)
        result[name] = {
            "trials_ms": middle,
            "lower_quartile_ms": low,
            "upper_quartile_ms": high,
            "fastest_ms": min(trials for trials, _, _ in rows),
            "processor_ms": statistics.median(cpu for _, cpu, _ in rows),
            "later_us": statistics.median(later for _, _, later in rows),
        }
        figures = result[name]
        print(
            f"{name:>22}: {middle:6.1f} ms (quartiles {low:.1f} to {high:.1f}, fastest"
            f" {figures['fastest_ms']:.1f}; processor {figures['processor_ms']:.1f}), later"
            f" {figures['later_us']:.2f} us a chunk"
        )
    write(options.out, {"rounds": options.rounds, "result": result})


if __name__ == "__main__":
    main()
