"""The live page: two nets beside each other on one stream, in a browser, from exported JavaScript.

    python docs/live.py [live.html] [--updates 1000]

Rare pulses switch a machine off and on, single spikes mean nothing, and one label in twenty is
wrong: no net names more than 95 % of the steps. The same LSTM is trained on windows from a zero
state and on the unbroken stream.
"""

import argparse
import base64
import html
import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from torch import nn

import throughtime as tt
from throughtime.carry import Carried

TEMPLATE = Path(__file__).parent / "live.html.j2"
CUT, LANES = 100, 16  # steps of a window; recordings
CLASSES = ("off", "on")


def machine(steps: int, seed: int) -> dict[str, Any]:
    """A recording: inputs `(T, 1)` and the mode of the machine at each step, `(T,)`."""
    random = np.random.default_rng(seed)
    starts = np.cumsum(300 + random.exponential(1_700, steps // 300 + 2)).astype(int)
    starts = np.append(0, starts[starts < steps - 10])
    modes = (np.searchsorted(starts, np.arange(steps), side="right") + seed) % 2
    signal = random.normal(0.0, 0.3, steps)
    spikes = np.flatnonzero(random.random(steps) < 1 / 30)
    signal[spikes] += random.choice((-2.0, 2.0), len(spikes))
    for start in starts:
        signal[start : start + 10] += 6.0 * modes[start] - 3.0
    wrong = random.random(steps) < 0.05
    return {
        "inputs": torch.from_numpy(signal[:, None]).float(),
        "targets": torch.from_numpy(np.where(wrong, 1 - modes, modes)),
    }


def train(recordings: Any, updates: int) -> Carried:
    """An LSTM after so many updates."""
    torch.manual_seed(0)
    net = tt.carry(nn.Sequential(tt.nn.LSTM(1, 32), nn.Linear(32, len(CLASSES))))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    stream, loss_fn = tt.Stream(recordings, LANES, CUT, seed=0), nn.CrossEntropyLoss()
    done = 0
    while done < updates:
        run = tt.updates(net, stream, loss_fn, gradient=tt.Truncated(CUT))
        for _ in islice(run, updates - done):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    return net.eval()


def page(title: str, nets: Mapping[str, Carried], inputs: Any, labels: Sequence[int]) -> str:
    """The page of nets by title that get `inputs` `(T, D)`; right classes `(T,)` beside them."""
    sources: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.js"
        for net in nets.values():
            tt.export(net, path, inputs=inputs, classes=CLASSES, steps=1_000)
            sources.append(path.read_text(encoding="utf-8").replace("\nexport ", "\n"))
    signal = np.ascontiguousarray(inputs, dtype="<f4")
    environment = Environment(undefined=StrictUndefined, autoescape=False)  # noqa: S701  # escaped here
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=html.escape(title),
        summary=html.escape("One net is " + ", the other is ".join(nets)),
        sources=sources,
        titles=json.dumps([*nets]).replace("</", "<\\/"),
        width=signal.shape[1],
        indexed=False,
        signal=base64.b64encode(signal.tobytes()).decode(),
        labels=base64.b64encode(np.asarray(labels, np.uint8).tobytes()).decode(),
        cut=CUT,
    )


def main() -> None:
    """Train both nets and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=Path("live.html"))
    parser.add_argument("--updates", type=int, default=1_000)
    options = parser.parse_args()
    recordings = [machine(20_000, seed) for seed in range(LANES)]
    test = machine(20_000, 999)
    nets = {
        "trained on windows": train([*tt.windows(recordings, CUT)], options.updates),
        "trained on the stream": train(recordings, options.updates),
    }
    text = page("One net, trained twice", nets, test["inputs"], test["targets"].tolist())
    options.out.write_text(text, encoding="utf-8")
    for name, net in nets.items():
        right = tt.predict(net, test["inputs"])[0].argmax(dim=1) == test["targets"]
        print(f"{name}: {right.float().mean():.1%} of the steps")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
