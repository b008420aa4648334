"""Real-time recurrent learning for element-wise recurrences: its cost, and what it remembers.

    python benchmarks/rtrl_elementwise.py [--rounds 15] [--seeds 0,1,2]

1. Time of an update of 20 steps of a minGRU of 128 units, one lane: `ElementwiseRTRL(20)` and
   dense `RTRL(20)` against `tt.Truncated(20)`, interleaved, one thread. First both forms of RTRL
   must give the same gradients, to rounding.
2. A chain of memory: an episode of L steps begins with a bit, +1 or -1; at its last step the net
   must name it, and no other step counts. Updates at every step, four lanes of 1,000 episodes of a
   minGRU of 16 units, Adam with rate 0.01. Truncated to one step, no credit reaches the bit.
   Printed is the accuracy in the last fifth of the episodes, before each update; chance is 0.5.

The settings of the second part are the first that were tried.
"""

import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import throughtime as tt
from record import parser_of, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.models.min_gru import MinGRU
from examples.policies.rtrl import RTRL
from examples.policies.rtrl_elementwise import ElementwiseRTRL

UNITS, FEATURES, STRIDE, UPDATES = 128, 4, 20, 10
LANES, EPISODES, RATE = 4, 1_000, 1e-2
LENGTHS = (2, 8, 32, 128)
POLICIES: dict[str, Any] = {
    "truncated to 1": tt.Truncated(1, 1),
    "horizon 20": tt.Truncated(1, 20),
    "RTRL": ElementwiseRTRL(1),
}


def timed_net(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return tt.carry(nn.Sequential(MinGRU(FEATURES, UNITS), nn.Linear(UNITS, 1)).to(dtype))


def gradients(policy: Any, dtype: torch.dtype) -> tuple[float, list[Tensor]]:
    """Seconds for each update but the first two, and the gradients of the last one."""
    net = timed_net(dtype)
    random = torch.Generator().manual_seed(0)
    steps = STRIDE * (UPDATES + 2)
    x = torch.randn(steps, FEATURES, generator=random, dtype=dtype)
    stream = tt.Stream({"inputs": x, "targets": x[:, :1].cumsum(0)}, 1, STRIDE)
    updates = tt.updates(net, stream, nn.MSELoss(), gradient=policy)
    start, results = 0.0, list[Tensor]()
    for k, _ in enumerate(updates):
        if k == 1:
            start = perf_counter()
        results = [w.grad.clone() for w in net.parameters() if w.grad is not None]
        net.zero_grad()
    return (perf_counter() - start) / UPDATES, results


def cost(rounds: int) -> dict[str, Any]:
    """Medians in milliseconds, and the ratio to `Truncated(20)` in each round."""
    own, dense = (
        gradients(policy, torch.float64)[1] for policy in (ElementwiseRTRL(STRIDE), RTRL(STRIDE))
    )
    apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(own, dense, strict=True))
    if apart > 1e-12:
        raise SystemExit(f"the two forms of RTRL differ by {apart}")
    policies = {"element-wise": ElementwiseRTRL(STRIDE), "dense": RTRL(STRIDE)}
    times = {name: list[float]() for name in ("truncated", *policies)}
    for _ in range(rounds):
        for name, policy in {"truncated": tt.Truncated(STRIDE), **policies}.items():
            times[name].append(1e3 * gradients(policy, torch.float32)[0])
    result: dict[str, Any] = {"apart": apart}
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times["truncated"], strict=True)]
        result[name] = {
            "ms": statistics.median(values),
            "ratio": statistics.median(ratios),
            "from": min(ratios),
            "to": max(ratios),
        }
        print(
            f"{name:12s} {result[name]['ms']:8.3f} ms an update, {result[name]['ratio']:6.2f} times"
            f" Truncated(20) ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"gradients of both forms of RTRL differ by {apart:.1e}")
    return result


def episodes(length: int, seed: int) -> list[dict[str, Tensor]]:
    """For each lane: bit and marks of the first and the last step; the class at the last one."""
    random = torch.Generator().manual_seed(seed)
    lanes: list[dict[str, Tensor]] = []
    for _ in range(LANES):
        bits = torch.randint(2, (EPISODES,), generator=random)
        x = torch.zeros(EPISODES, length, 3)
        x[:, 0, 0], x[:, 0, 1], x[:, -1, 2] = 2.0 * bits - 1, 1.0, 1.0
        targets = torch.full((EPISODES, length), -100)
        targets[:, -1] = bits
        lanes.append({"inputs": x.flatten(0, 1), "targets": targets.flatten()})
    return lanes


def accuracy(policy: Any, length: int, seed: int) -> float:
    torch.manual_seed(seed)
    net = tt.carry(nn.Sequential(MinGRU(3, 16), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    stream = tt.Stream(episodes(length, seed), lanes=LANES, chunk=1)
    right: list[float] = []
    for update in tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=policy):
        named, targets = update.outputs[-1].argmax(-1), update.chunk.targets
        if targets is not None and bool((targets[-1] >= 0).all()):
            right.append(float((named == targets[-1]).float().mean()))
        optimizer.step()
        optimizer.zero_grad()
    return statistics.mean(right[-EPISODES // 5 :])


def main() -> None:
    parser = parser_of(__doc__, "rtrl_elementwise", rounds=15)
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"cost": cost(options.rounds), "chain": []}
    for length in LENGTHS:
        for name, policy in POLICIES.items():
            scores = [accuracy(policy, length, int(seed)) for seed in options.seeds.split(",")]
            figures["chain"].append({"length": length, "policy": name, "accuracy": scores})
            texts = " ".join(f"{score:.3f}" for score in scores)
            print(f"chain of {length:3d} steps, {name:14s} accuracy {texts}", flush=True)
    write(options.out, figures)


if __name__ == "__main__":
    main()
