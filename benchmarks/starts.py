"""Windows that start from other states: the task of `examples/demo.py`, and two example policies.

    python benchmarks/starts.py [--seeds 3] [--updates 1000] [--out benchmarks/results/starts.json]

The LSTM of the demo is trained on shuffled windows from a zero state, from the states in which the
windows before them ended, and from noise like these (`examples/policies/starts.py`), and on the
unbroken stream. Then it labels one unbroken recording that it has not been trained on. The best
accuracy is 0.95, chance is 0.5. The first and the last row are those of `examples/demo.py`.
Printed are the median of the seeds, the lowest and the highest.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

import throughtime as tt
from record import parser_of, write

sys.path.append(str(Path(__file__).parent.parent))
from examples.demo import HIDDEN, LANES, RATE, STRIDE, TEST_SEED, TESTED, TRAINED, generate
from examples.policies.starts import CarriedStart, NoiseStart

from throughtime.carry import Carried
from throughtime.gradient import Policy, Update


def policies() -> dict[str, Policy]:
    """How windows start."""
    return {
        "windows from a zero state": tt.Truncated(STRIDE),
        "windows from noise": NoiseStart(STRIDE),
        "windows from carried states": CarriedStart(STRIDE),
        "one unbroken stream": tt.Truncated(STRIDE),
    }


def epochs(net: Carried, stream: tt.Stream, policy: Policy) -> Iterator[Update]:
    """Updates without end."""
    memory = None
    while True:
        run = tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=policy, policy_state=memory)
        yield from run
        memory = run.policy_state


def accuracy(recordings: Sequence[Any], policy: Policy, seed: int, updates: int) -> float:
    """The share of correct labels on the unbroken test recording, after training."""
    torch.manual_seed(seed)
    net = tt.carry(nn.Sequential(nn.LSTM(1, HIDDEN), nn.Linear(HIDDEN, 2)))
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    stream = tt.Stream(recordings, LANES, STRIDE, seed=seed)
    for _ in islice(epochs(net, stream, policy), updates):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    test = generate(TESTED, TEST_SEED)
    outputs, _ = tt.predict(net, test.inputs)
    return float((outputs.argmax(dim=1).numpy() == test.labels).mean())


def main() -> None:
    parser = parser_of(__doc__, "starts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=1_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train = [generate(TRAINED, i).recording for i in range(LANES)]
    rows: dict[str, list[float]] = {}
    for name, policy in policies().items():
        data = tt.windows(train, STRIDE) if name.startswith("windows") else train
        rows[name] = [
            accuracy(data, policy, seed, options.updates) for seed in range(options.seeds)
        ]
        print(
            f"{name:28} {statistics.median(rows[name]):.3f}"
            f" ({min(rows[name]):.3f} to {max(rows[name]):.3f})",
            flush=True,
        )
    write(options.out, {"updates": options.updates, "accuracy": rows})


if __name__ == "__main__":
    main()
