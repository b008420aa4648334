"""The cost of each integration, compared with the plain loop over `tt.updates` and one by hand.

    python benchmarks/integrations.py [--rounds 5] [--chunks 3000] [--out PATH]
    python benchmarks/integrations.py --table [--out PATH]

LSTM of 50 units with a linear readout, one lane, chunks of 100 steps, an update after each,
float32, mean squared error, clipping, Adam, one thread: small enough that the cost around the
network shows. First an epoch of each implementation is checked to end with the weights of the plain
loop. Then all take turns in one process, each in a thread that stops after every 100 updates: a
machine that is busy now is busy for all of them. The ratio is that of 100 updates to the 100 of the
plain loop in the same round of turns. Whole epochs are reported as well, with all that a `fit` of a
bare Trainer (no logger, progress bar or checkpoints) or a `run` does before and after its updates.

Ignite's own function cannot clip: here its optimizer does, before a step. The recording of an old
Lightning module or an Ignite script is one batch, since both drop the state between batches.
`--table` prints the results of the file.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import ignite
import lightning.pytorch as pl
import torch
from ignite.contrib.engines.tbptt import create_supervised_tbptt_trainer as upstream_trainer
from torch import Tensor, nn

import throughtime as tt
from throughtime.integrations import accelerate as accelerated
from throughtime.integrations.ignite import StreamTrainer, create_supervised_tbptt_trainer
from throughtime.integrations.lightning import Loader, StreamModule

CHUNK, FEATURES, HIDDEN, NORM = 100, 4, 50, 1.0
BLOCK = 100  # updates timed at a time, as many as the longest of the training steps
PLAIN = "plain loop"
GRADIENT = tt.Truncated(stride=CHUNK)
LOSS = nn.MSELoss()
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
State = tuple[Tensor, Tensor]
# By implementation and turn: seconds by the clock, and of processor time.
Times = dict[str, list[tuple[float, float]]]


class Net(nn.Module):
    """Takes and returns its state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN)
        self.readout = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, after = self.lstm(x, state)
        return self.readout(y), after


class Implementation(NamedTuple):
    """One way of training: its network, the optimizer that steps, and an epoch."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    epoch: Callable[[], object]


class Task:
    """A recording, and equal networks and optimizers for all implementations."""

    def __init__(self, chunks: int) -> None:
        torch.manual_seed(1)
        self.x = torch.randn(chunks * CHUNK, 1, FEATURES)
        self.y = self.x.cumsum(0)[..., :1].div(CHUNK).sin()

    def stream(self) -> tt.Stream:
        return tt.Stream({"inputs": self.x[:, 0], "targets": self.y[:, 0]}, lanes=1, chunk=CHUNK)

    @staticmethod
    def net() -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = Net()
        return net, torch.optim.Adam(net.parameters(), lr=1e-4)


def by_hand(task: Task) -> Implementation:
    """A loop as a careful user writes it, without throughtime."""
    net, optimizer = task.net()

    def epoch() -> None:
        state: State | None = None
        for start in range(0, len(task.x), CHUNK):
            y, (h, c) = net(task.x[start : start + CHUNK], state)
            LOSS(y, task.y[start : start + CHUNK]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
            state = h.detach(), c.detach()

    return Implementation(net, optimizer, epoch)


def plain(task: Task) -> Implementation:
    """The loop over `tt.updates`."""
    net, optimizer = task.net()
    carried, stream = tt.carry(net), task.stream()

    def epoch() -> None:
        for _ in tt.updates(carried, stream, LOSS, gradient=GRADIENT):
            nn.utils.clip_grad_norm_(net.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()

    return Implementation(net, optimizer, epoch)


class StreamExample(StreamModule):
    """Its optimizer stays the same in every fit."""

    optimizer_: torch.optim.Optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_


def lightning_stream(task: Task, chunks: int) -> Implementation:
    """A StreamModule, so many chunks in a training step."""
    net, optimizer = task.net()
    module, loader = (
        StreamExample(tt.carry(net), LOSS, gradient=GRADIENT, clip=NORM),
        Loader(task.stream(), chunks),
    )
    module.optimizer_ = optimizer
    return Implementation(
        net,
        optimizer,
        lambda: pl.Trainer(max_epochs=1, accelerator="cpu", **QUIET).fit(module, loader),
    )


def ignite_stream(task: Task, chunks: int) -> Implementation:
    """An engine on a stream, so many chunks in an iteration."""
    net, optimizer = task.net()
    trainer, stream = (
        StreamTrainer(
            tt.carry(net), optimizer, LOSS, gradient=GRADIENT, chunks=chunks, max_norm=NORM
        ),
        task.stream(),
    )
    return Implementation(net, optimizer, lambda: trainer.run(stream, max_epochs=1))


def ignite_batches(task: Task) -> Implementation:
    """The function that takes the place of Ignite's."""
    net, optimizer = task.net()
    trainer = create_supervised_tbptt_trainer(net, optimizer, LOSS, CHUNK, max_norm=NORM)
    return Implementation(net, optimizer, lambda: trainer.run([(task.x, task.y)], max_epochs=1))


def ignite_upstream(task: Task) -> Implementation:
    """Ignite's own."""
    net, optimizer = task.net()

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), NORM)

    optimizer.register_step_pre_hook(clip)
    trainer = upstream_trainer(net, optimizer, LOSS, CHUNK)
    return Implementation(net, optimizer, lambda: trainer.run([(task.x, task.y)], max_epochs=1))


def under_accelerate(task: Task) -> Implementation:
    """The loop under an accelerator."""
    accelerator = accelerated.Accelerator(cpu=True)
    net, bare = task.net()
    carried, optimizer, _ = accelerated.prepare(accelerator, tt.carry(net), bare)
    epochs = accelerated.updates(accelerator, carried, task.stream(), LOSS, gradient=GRADIENT)

    def epoch() -> None:
        for _ in epochs:
            accelerator.clip_grad_norm_(net.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()

    return Implementation(net, bare, epoch)


IMPLEMENTATIONS: dict[str, Callable[[Task], Implementation]] = {
    "by hand, without throughtime": by_hand,
    PLAIN: plain,
    "Lightning, 1 chunk a step": lambda task: lightning_stream(task, 1),
    "Lightning, 10 chunks a step": lambda task: lightning_stream(task, 10),
    "Lightning, 100 chunks a step": lambda task: lightning_stream(task, 100),
    "Ignite, 1 chunk an iteration": lambda task: ignite_stream(task, 1),
    "Ignite, 100 chunks an iteration": lambda task: ignite_stream(task, 100),
    "Ignite, supervised": ignite_batches,
    "Ignite's own": ignite_upstream,
    "Accelerate": under_accelerate,
}


def deviation(implementation: Implementation, other: Implementation) -> float:
    """The largest difference of a weight."""
    pairs = zip(implementation.net.parameters(), other.net.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs)


def check_alike(implementations: dict[str, Implementation], when: str) -> dict[str, float]:
    """The largest difference of each implementation's weights from those of the plain loop.

    Exits if it is above 1e-6.
    """
    deviations = {
        name: deviation(implementation, implementations[PLAIN])
        for name, implementation in implementations.items()
    }
    if not all(value <= 1e-6 for value in deviations.values()):
        raise SystemExit(
            f"{when} the weights differ from those of the plain loop, nothing to compare:"
            f" {deviations}"
        )
    return deviations


class TurnThread:
    """A thread for an implementation: it stops after every `BLOCK` updates and each epoch."""

    def __init__(self, implementation: Implementation, epochs: int) -> None:
        self.implementation, self.epochs, self.count = implementation, epochs, 0
        self.error: BaseException | None = None
        self.may_run, self.turn_done = threading.Semaphore(0), threading.Semaphore(0)
        implementation.optimizer.register_step_post_hook(self.after_step)
        threading.Thread(target=self.train, daemon=True).start()

    def train(self) -> None:
        self.may_run.acquire()
        try:
            for _ in range(self.epochs):
                self.implementation.epoch()
                self.wait_for_turn()
        except BaseException as error:  # noqa: BLE001  # `turn` raises it
            self.error = error
            self.turn_done.release()

    def after_step(self, *_: object) -> None:
        self.count += 1
        if self.count % BLOCK == 0:
            self.wait_for_turn()

    def wait_for_turn(self) -> None:
        self.turn_done.release()
        self.may_run.acquire()

    def turn(self) -> tuple[float, float]:
        """Run one turn; its seconds by the clock, and of processor time."""
        clock, processor = time.perf_counter(), time.process_time()
        self.may_run.release()
        self.turn_done.acquire()
        seconds = time.perf_counter() - clock, time.process_time() - processor
        if self.error is not None:
            raise self.error
        return seconds


def epoch_of(threads: dict[str, TurnThread], blocks: int) -> Times:
    """The seconds of an epoch: `blocks` turns, with a rotating first, and one for the rest."""
    times: Times = {name: [] for name in threads}
    names = list(threads)
    for turn in range(blocks + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(threads[name].turn())
    return times


def ratio(times: Iterable[float], to: Iterable[float]) -> dict[str, float]:
    """Median and quartiles of the ratios."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times, to, strict=True)], n=4)
    return {
        "median": round(middle, 4),
        "lower_quartile": round(low, 4),
        "upper_quartile": round(high, 4),
    }


def row(epochs: list[Times], name: str) -> dict[str, Any]:
    """One row of the results: of its blocks of updates, and of its whole epochs."""
    own, base = ([turn for times in epochs for turn in times[key][:-1]] for key in (name, PLAIN))
    own_epochs, base_epochs = (
        [sum(seconds for seconds, _ in times[key]) for times in epochs] for key in (name, PLAIN)
    )
    return {
        "us_per_update": round(statistics.median(seconds for seconds, _ in own) / BLOCK * 1e6, 1),
        "ratio": ratio([seconds for seconds, _ in own], [seconds for seconds, _ in base]),
        "processor_ratio": ratio([used for _, used in own], [used for _, used in base]),
        "whole_epoch_ratio": round(
            statistics.median(a / b for a, b in zip(own_epochs, base_epochs, strict=True)), 4
        ),
    }


def measure(chunks: int, rounds: int) -> dict[str, Any]:
    """The results."""
    task, load = Task(chunks), os.getloadavg()[0]
    implementations = {name: make(task) for name, make in IMPLEMENTATIONS.items()}
    threads = {
        name: TurnThread(implementation, rounds + 1)
        for name, implementation in implementations.items()
    }
    epoch_of(threads, chunks // BLOCK)
    check_alike(implementations, "after an epoch")
    epochs: list[Times] = []
    for turn in range(rounds):
        epochs.append(epoch_of(threads, chunks // BLOCK))
        print(f"epoch {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    deviations = check_alike(implementations, "at the end")
    rows = {
        name: row(epochs, name) | {"weights_apart": deviations[name]} for name in implementations
    }
    return {
        "rounds": rounds,
        "chunks": chunks,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "result": rows,
    }


def surroundings() -> dict[str, Any]:
    """Versions and machine."""
    libraries = {
        m.__name__.partition(".")[0]: m.__version__ for m in (torch, pl, ignite, accelerate, tt)
    }
    machine = {
        "device": "cpu",
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
    }
    return {"versions": {"python": platform.python_version(), **libraries}, "machine": machine}


def table(path: Path) -> None:
    """Print the Markdown table."""
    results = json.loads(path.read_text(encoding="utf-8"))
    print(
        "| loop | us per update | beside the plain loop | quartiles | in processor time | whole"
        " epochs |"
    )
    print("|---|---|---|---|---|---|")
    for name, values in results["result"].items():
        clock, processor = values["ratio"], values["processor_ratio"]["median"]
        spread = f"{clock['lower_quartile']:.2f} to {clock['upper_quartile']:.2f}"
        print(
            f"| {name} | {values['us_per_update']:.0f} | {clock['median']:.2f} | {spread} |"
            f" {processor:.2f} | {values['whole_epoch_ratio']:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each")
    parser.add_argument("--chunks", type=int, default=3000, help="of an epoch; a multiple of 100")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/integrations.json"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings(
            "ignore", module="lightning"
        )  # it advises a bare Trainer to load with more workers
        results = surroundings() | measure(options.chunks, options.rounds)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table(options.out)


if __name__ == "__main__":
    main()
