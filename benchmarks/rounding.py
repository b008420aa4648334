"""How far the layers of tt.nn and of torch.nn in float32 are from float64, on trained nets.

    python benchmarks/rounding.py [--nets 20]

GRU and LSTM of 32 units are trained on inputs in raw units: waves of amplitude 0.1 to 1,000 around
-1,000 to 2,000, beside a random walk. Many gates saturate. Then the same weights run over 100,
1,000 and 10,000 steps that they were not trained on. The reference is torch.nn in float64. Printed
are medians over the nets: the mean difference of the outputs, the largest one, and the relative one
of the gradient of the mean square of the outputs; and the ratio of ours to torch's.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import throughtime as tt
from record import parser_of, write

UNITS, STEPS = 32, (100, 1_000, 10_000)
SCALES, OFFSETS = (1e3, 50.0, 0.1, 300.0, 5.0), (2e3, 0.0, 5.0, -1e3)
MEASURES = ("mean", "largest", "gradient")


def inputs(seed: int, steps: int) -> tuple[Tensor, Tensor]:
    """Waves in raw units beside a random walk, `(T, 2)`, and the sign of the wave 5 steps ago."""
    torch.manual_seed(seed)
    scale, offset = SCALES[seed % 5], OFFSETS[seed // 2 % 4]
    wave = torch.sin(torch.arange(steps) / 7) * scale + torch.randn(steps) * scale / 5
    walk = torch.randn(steps).cumsum(0) * scale / 10
    return torch.stack([wave + offset, walk], 1), wave.sign().roll(5).unsqueeze(1)


def trained(cell: str, seed: int) -> dict[str, Tensor]:
    x, y = inputs(seed, 4_000)
    layer = getattr(tt.nn, cell)(2, UNITS)
    net = tt.carry(nn.Sequential(layer, nn.Linear(UNITS, 1)))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(4):
        stream = tt.Stream({"inputs": x, "targets": y}, lanes=1, chunk=50)
        for _ in tt.updates(net, stream, nn.MSELoss(), gradient=tt.Truncated(50, 100)):
            optimizer.step()
            optimizer.zero_grad()
    return layer.state_dict()


def outputs(make: Callable[..., Any], weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Outputs `(T, 1, H)`, and the gradient of their mean square by all weights, in float64."""
    layer = make(2, UNITS, dtype=x.dtype)
    layer.load_state_dict(weights)
    y = layer(x.unsqueeze(1))[0]
    y.square().mean().backward()
    grads = [weight.grad.double().flatten() for weight in layer.parameters()]
    return y.detach().double(), torch.cat(grads)


def apart(result: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> tuple[float, float, float]:
    difference = (result[0] - reference[0]).abs()
    gradient = (result[1] - reference[1]).norm() / reference[1].norm()
    return float(difference.mean()), float(difference.max()), float(gradient)


def main() -> None:
    parser = parser_of(__doc__, "rounding")
    parser.add_argument("--nets", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for cell in ("LSTM", "GRU"):
        nets = [trained(cell, seed) for seed in range(options.nets)]
        for steps in STEPS:
            ours, torchs = list[tuple[float, ...]](), list[tuple[float, ...]]()
            for seed, weights in enumerate(nets):
                x, _ = inputs(seed + 100 * 20, steps)  # the same units, other numbers
                reference = outputs(getattr(nn, cell), weights, x.double())
                ours.append(apart(outputs(getattr(tt.nn, cell), weights, x), reference))
                torchs.append(apart(outputs(getattr(nn, cell), weights, x), reference))
            row: dict[str, Any] = {"cell": cell, "steps": steps}
            for k, measure in enumerate(MEASURES):
                pairs = [(a[k], b[k]) for a, b in zip(ours, torchs, strict=True)]
                row[measure] = {
                    "tt.nn": statistics.median(a for a, _ in pairs),
                    "torch.nn": statistics.median(b for _, b in pairs),
                    "ratio": statistics.median((a or 1e-30) / (b or 1e-30) for a, b in pairs),
                }
            rows.append(row)
            texts = [
                f"{measure} {row[measure]['tt.nn']:.1e} / {row[measure]['torch.nn']:.1e}"
                f" ({row[measure]['ratio']:.2f})"
                for measure in MEASURES
            ]
            print(f"{cell:5s} {steps:6d} steps: {', '.join(texts)}", flush=True)
    write(options.out, {"nets": options.nets, "rows": rows})


if __name__ == "__main__":
    main()
