"""What each integration costs beside the plain loop over `tt.updates`, and beside a loop by hand
without throughtime.

    python benchmarks/integrations.py [--rounds 5] [--chunks 3000] [--out
    benchmarks/results/integrations.json] python benchmarks/integrations.py --table [--out
    benchmarks/results/integrations.json]

LSTM of 50 units with a linear readout, one lane, chunks of 100 steps, an update after each,
float32, mean squared error, clipping, Adam, one thread: small enough that what surrounds the
network shows. First an epoch of each side is checked to end with the weights of the plain loop.
Then all sides play at once in one process, one at a time: each in a thread that stops after every
100 updates and waits for its next turn, so that a machine that is busy now and idle then is so for
all of them. The ratio is that of 100 updates to the 100 of the plain loop in the same round of
turns. Whole epochs are given as well, with all that a `fit` of a bare Trainer (no logger, progress
bar or checkpoints) or a `run` does before and after its updates.

Ignite's own function cannot clip: here its optimizer does, before a step. The recording of an old
Lightning module or an Ignite script is one batch, since both drop the state between batches.
`--table` prints what is there.
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
from torch.utils.data import DataLoader, TensorDataset

import throughtime as tt
from throughtime.integrations import accelerate as accelerated
from throughtime.integrations.ignite import create_supervised_tbptt_trainer, stream_trainer
from throughtime.integrations.lightning import LightningModule, Loader, StreamModule

CHUNK, FEATURES, HIDDEN, NORM = 100, 4, 50, 1.0
BLOCK = 100  # updates timed at a time, as many as the longest of the training steps
PLAIN = "plain loop"
GRADIENT = tt.Truncated(stride=CHUNK)
LOSS = nn.MSELoss()
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
State = tuple[Tensor, Tensor]
Times = dict[
    str, list[tuple[float, float]]
]  # of each side, turn by turn: by the clock, and of the processor


class Net(nn.Module):
    """Takes and returns its state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN)
        self.readout = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, after = self.lstm(x, state)
        return self.readout(y), after


class Side(NamedTuple):
    """One way of training: its network, the optimizer that steps, and an epoch."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    epoch: Callable[[], object]


class Task:
    """A recording, and for each side a network with its optimizer, all alike."""

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


def by_hand(task: Task) -> Side:
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

    return Side(net, optimizer, epoch)


def plain(task: Task) -> Side:
    """The loop over `tt.updates`."""
    net, optimizer = task.net()
    carried, stream = tt.carry(net), task.stream()

    def epoch() -> None:
        for _ in tt.updates(carried, stream, LOSS, gradient=GRADIENT):
            nn.utils.clip_grad_norm_(net.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()

    return Side(net, optimizer, epoch)


class Streamed(StreamModule):
    """Its optimizer stays the same in every fit."""

    kept: torch.optim.Optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kept


def lightning_stream(task: Task, chunks: int) -> Side:
    """A StreamModule, so many chunks in a training step."""
    net, optimizer = task.net()
    module, loader = (
        Streamed(tt.carry(net), LOSS, gradient=GRADIENT, clip=NORM),
        Loader(task.stream(), chunks),
    )
    module.kept = optimizer
    return Side(
        net,
        optimizer,
        lambda: pl.Trainer(max_epochs=1, accelerator="cpu", **QUIET).fit(module, loader),
    )


class Old(LightningModule):
    """A module as it was written for Lightning 1.9."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.net, self.kept = net, optimizer
        self.truncated_bptt_steps = CHUNK

    def training_step(self, batch: Any, batch_idx: int, hiddens: State | None) -> dict[str, Any]:
        del batch_idx
        x, target = batch
        y, after = self.net(x.transpose(0, 1), hiddens)
        return {"loss": LOSS(y, target.transpose(0, 1)), "hiddens": after}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kept


def lightning_old(task: Task) -> Side:
    """What 1.9 had: a batch split by the trainer, a step of the optimizer for each split."""
    net, optimizer = task.net()
    module, batches = (
        Old(net, optimizer),
        DataLoader(TensorDataset(task.x.transpose(0, 1), task.y.transpose(0, 1))),
    )
    return Side(
        net,
        optimizer,
        lambda: pl.Trainer(max_epochs=1, accelerator="cpu", gradient_clip_val=NORM, **QUIET).fit(
            module, batches
        ),
    )


def ignite_stream(task: Task, chunks: int) -> Side:
    """An engine on a stream, so many chunks in an iteration."""
    net, optimizer = task.net()
    trainer, stream = (
        stream_trainer(
            tt.carry(net), optimizer, LOSS, gradient=GRADIENT, chunks=chunks, max_norm=NORM
        ),
        task.stream(),
    )
    return Side(net, optimizer, lambda: trainer.run(stream, max_epochs=1))


def ignite_batches(task: Task) -> Side:
    """The function that takes the place of Ignite's."""
    net, optimizer = task.net()
    trainer = create_supervised_tbptt_trainer(net, optimizer, LOSS, CHUNK, max_norm=NORM)
    return Side(net, optimizer, lambda: trainer.run([(task.x, task.y)], max_epochs=1))


def ignite_upstream(task: Task) -> Side:
    """Ignite's own."""
    net, optimizer = task.net()

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), NORM)

    optimizer.register_step_pre_hook(clip)
    trainer = upstream_trainer(net, optimizer, LOSS, CHUNK)
    return Side(net, optimizer, lambda: trainer.run([(task.x, task.y)], max_epochs=1))


def under_accelerate(task: Task) -> Side:
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

    return Side(net, bare, epoch)


SIDES: dict[str, Callable[[Task], Side]] = {
    "by hand, without throughtime": by_hand,
    PLAIN: plain,
    "Lightning, 1 chunk a step": lambda task: lightning_stream(task, 1),
    "Lightning, 10 chunks a step": lambda task: lightning_stream(task, 10),
    "Lightning, 100 chunks a step": lambda task: lightning_stream(task, 100),
    "Lightning, module of 1.9": lightning_old,
    "Ignite, 1 chunk an iteration": lambda task: ignite_stream(task, 1),
    "Ignite, 100 chunks an iteration": lambda task: ignite_stream(task, 100),
    "Ignite, supervised": ignite_batches,
    "Ignite's own": ignite_upstream,
    "Accelerate": under_accelerate,
}


def deviation(side: Side, other: Side) -> float:
    """The largest difference of a weight."""
    pairs = zip(side.net.parameters(), other.net.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs)


def check_alike(sides: dict[str, Side], when: str) -> dict[str, float]:
    """How far the weights of each side are from those of the plain loop.

    Ends where they are not the same to 1e-6.
    """
    apart = {name: deviation(side, sides[PLAIN]) for name, side in sides.items()}
    if not all(far <= 1e-6 for far in apart.values()):
        raise SystemExit(
            f"{when} the weights differ from those of the plain loop, nothing to compare: {apart}"
        )
    return apart


class Player:
    """A side in a thread of its own, which stops after every `BLOCK` updates and where an epoch ends, until it is its turn again."""

    def __init__(self, side: Side, epochs: int) -> None:
        self.side, self.epochs, self.done = side, epochs, 0
        self.error: BaseException | None = None
        self.mine, self.over = threading.Semaphore(0), threading.Semaphore(0)
        side.optimizer.register_step_post_hook(self.stepped)
        threading.Thread(target=self.play, daemon=True).start()

    def play(self) -> None:
        self.mine.acquire()
        try:
            for _ in range(self.epochs):
                self.side.epoch()
                self.stop()
        except BaseException as error:  # whatever it is, the turn tells it
            self.error = error
            self.over.release()

    def stepped(self, *_: object) -> None:
        self.done += 1
        if self.done % BLOCK == 0:
            self.stop()

    def stop(self) -> None:
        self.over.release()
        self.mine.acquire()

    def turn(self) -> tuple[float, float]:
        """Lets it run; its seconds by the clock, and of the processor."""
        began, busy = time.perf_counter(), time.process_time()
        self.mine.release()
        self.over.acquire()
        taken = time.perf_counter() - began, time.process_time() - busy
        if self.error is not None:
            raise self.error
        return taken


def epoch_of(players: dict[str, Player], blocks: int) -> Times:
    """The seconds of an epoch of each: `blocks` turns, each of them begun by another side, and one to come to the end."""
    times: Times = {name: [] for name in players}
    names = list(players)
    for turn in range(blocks + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(players[name].turn())
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
    """What is told of a side: of its blocks, and of its whole epochs."""
    mine, base = ([turn for times in epochs for turn in times[side][:-1]] for side in (name, PLAIN))
    whole, of = (
        [sum(seconds for seconds, _ in times[side]) for times in epochs] for side in (name, PLAIN)
    )
    return {
        "us_per_update": round(statistics.median(seconds for seconds, _ in mine) / BLOCK * 1e6, 1),
        "ratio": ratio([seconds for seconds, _ in mine], [seconds for seconds, _ in base]),
        "processor_ratio": ratio([busy for _, busy in mine], [busy for _, busy in base]),
        "whole_epoch_ratio": round(
            statistics.median(a / b for a, b in zip(whole, of, strict=True)), 4
        ),
    }


def measured(chunks: int, rounds: int) -> dict[str, Any]:
    """All that goes to the results."""
    task, load = Task(chunks), os.getloadavg()[0]
    sides = {name: make(task) for name, make in SIDES.items()}
    players = {name: Player(side, rounds + 1) for name, side in sides.items()}
    epoch_of(players, chunks // BLOCK)
    check_alike(sides, "after an epoch")
    epochs: list[Times] = []
    for turn in range(rounds):
        epochs.append(epoch_of(players, chunks // BLOCK))
        print(f"epoch {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    apart = check_alike(sides, "at the end")
    rows = {name: row(epochs, name) | {"weights_apart": apart[name]} for name in sides}
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
    """Prints the Markdown table."""
    found = json.loads(path.read_text(encoding="utf-8"))
    print(
        "| loop | us per update | beside the plain loop | quartiles | in processor time | whole"
        " epochs |"
    )
    print("|---|---|---|---|---|---|")
    for name, told in found["result"].items():
        of, busy = told["ratio"], told["processor_ratio"]["median"]
        spread = f"{of['lower_quartile']:.2f} to {of['upper_quartile']:.2f}"
        print(
            f"| {name} | {told['us_per_update']:.0f} | {of['median']:.2f} | {spread} | {busy:.2f} |"
            f" {told['whole_epoch_ratio']:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each side")
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
        found = surroundings() | measured(options.chunks, options.rounds)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    table(options.out)


if __name__ == "__main__":
    main()
