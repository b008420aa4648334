"""How much of our Python one update and one training run go through.

    python benchmarks/calls.py            # updates of the README's loop, and one of tt.Exact()
    python benchmarks/calls.py --train    # and a short `throughtime train`

Counts calls of functions defined in `throughtime` under `sys.setprofile`: how many, how deep they
nest, and in how many files. Generator expressions, comprehensions and lambdas count as calls.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import throughtime as tt
from throughtime.updates import Updates

PACKAGE = str(Path(tt.__file__).parent)


class CallCounter:
    """Calls of our functions while a function runs."""

    def __init__(self) -> None:
        self.calls, self.depth, self.deepest = 0, 0, 0
        self.files: Counter[str] = Counter()

    def run(self, function: Callable[[], object]) -> "CallCounter":
        """Run `function` and count."""
        sys.setprofile(self._profile)
        try:
            function()
        finally:
            sys.setprofile(None)
        return self

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == "<module>":
            return
        if event == "call":
            self.calls += 1
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            self.files[str(Path(frame.f_code.co_filename).relative_to(PACKAGE))] += 1
        elif event == "return":
            self.depth -= 1

    def __str__(self) -> str:
        return f"{self.calls} calls, {self.deepest} deep, in {len(self.files)} files"


def readme_updates() -> Updates:
    """The README's loop."""
    lengths = (5_000, 3_000, 4_000)
    recordings = [{"inputs": torch.randn(n, 3), "targets": torch.randint(2, (n,))} for n in lengths]
    stream = tt.Stream(recordings, lanes=2, chunk=100)
    net = tt.carry(torch.nn.Sequential(torch.nn.LSTM(3, 32), torch.nn.Linear(32, 2)))
    gradient = tt.Truncated(stride=100, horizon=200)
    return tt.updates(net, stream, torch.nn.CrossEntropyLoss(), gradient=gradient)


def exact_updates() -> Updates:
    """One update of 10,000 steps, of a net that has been prepared."""
    recording = {"inputs": torch.randn(10_000, 3), "targets": torch.randint(2, (10_000,))}
    stream = tt.Stream(recording, lanes=1, chunk=100)
    net = tt.carry(torch.nn.Sequential(torch.nn.LSTM(3, 32), torch.nn.Linear(32, 2)))
    net.prepare(torch.randn(5, 1, 3))
    return tt.updates(net, stream, torch.nn.CrossEntropyLoss(), gradient=tt.Exact())


def count_updates() -> None:
    """Print the counts of the README's first and sixth update, and of tt.Exact()'s first."""
    updates = readme_updates()
    for number in range(1, 7):
        counter = CallCounter().run(lambda: next(updates))
        if number in {1, 6}:
            report(f"update {number}", counter)
    updates = exact_updates()
    report("first update of tt.Exact()", CallCounter().run(lambda: next(updates)))


def report(name: str, counter: CallCounter) -> None:
    """Print the counts, and the calls in each file."""
    print(f"{name}: {counter}")
    for file, calls in counter.files.most_common():
        print(f"  {calls:4} {file}")


def count_train() -> None:
    """Print in how many files a short `throughtime train` executes a function."""
    from throughtime.app.cli import main

    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        data = Path(folder, "data")
        data.mkdir()
        rows = ["id,split,inputs,targets"]
        for i, split in enumerate(("train", "train", "valid", "test")):
            np.save(data / f"x{i}.npy", rng.standard_normal((2_000, 3)).astype("float32"))
            np.save(data / f"y{i}.npy", rng.integers(0, 2, 2_000))
            rows.append(f"r{i},{split},x{i}.npy,y{i}.npy")
        (data / "recordings.csv").write_text("\n".join(rows) + "\n")
        flags = ["--task", "classify", "--lanes", "2", "--updates", "20", "--out", f"{folder}/run"]
        sys.argv = ["throughtime", "train", str(data), *flags]

        def train() -> None:
            try:
                main()
            except SystemExit as end:
                if end.code:
                    raise

        counter = CallCounter().run(train)
    print(f"throughtime train: {len(counter.files)} files with an executed function")
    print(json.dumps(dict(sorted(counter.files.items())), indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true", help="count `throughtime train` as well")
    count_updates()
    if parser.parse_args().train:
        count_train()
