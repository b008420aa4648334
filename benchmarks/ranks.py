"""Two ranks with half of the lanes each, beside two threads with all of them, on the same cores.

    python benchmarks/ranks.py [--rounds 40] [--cell LSTM] [--hidden 128]
        [--out benchmarks/results/ranks.json]

A recurrent layer of `tt.nn` with a linear readout, 32 lanes, 32 features, chunks of 100 steps,
float32, cross-entropy, `tt.optim.Adam`. Three processes: two ranks over gloo, one thread each, and
one process with two threads. They take turns of a few updates, in the opposite order in every other
round. All losses of all sides must agree. One thread with all lanes is measured as well. Ratios are
taken round by round. Other programs disturb both sides, and differently: medians are printed of all
rounds, and of those in which others used less than a tenth of a core.

Shapes: `T` steps, `B` lanes, `D` features, `H` units, `C` classes.
"""

import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil
import torch
from torch import distributed, multiprocessing, nn

import throughtime as tt
from record import parser_of, write

LANES, FEATURES, CLASSES, CHUNK = 32, 32, 10, 100
RANKS, TURN, WARM_UP = 2, 10, 5  # updates in a turn, and before the first
PAUSE = 0.03  # seconds before a turn: OpenMP's threads spin on for 10 ms after the last
QUIET = 0.1  # cores that others use at most in a quiet round


class Setting(NamedTuple):
    """What every process computes."""

    cell: str
    hidden: int
    updates: int
    port: int


def updates(setting: Setting) -> Iterator[torch.Tensor]:
    """The loss of each update of one epoch, after the step of the optimizer."""
    torch.manual_seed(0)
    steps = setting.updates * CHUNK
    layer = getattr(tt.nn, setting.cell)(FEATURES, setting.hidden)
    net = tt.carry(nn.Sequential(layer, nn.Linear(setting.hidden, CLASSES)))
    optimizer = tt.optim.Adam(net.parameters(), max_norm=1.0)
    recordings = [
        {"inputs": torch.randn(steps, FEATURES), "targets": torch.randint(CLASSES, (steps,))}
        for _ in range(LANES)
    ]
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    stream = tt.Stream(recordings, lanes=LANES // ranks, chunk=CHUNK)
    policy = tt.Truncated(stride=CHUNK)
    for update in tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=policy):
        optimizer.step()
        optimizer.zero_grad()
        yield update.loss


def serve(pipe: Connection, setting: Setting, threads: int, rank: int | None) -> None:
    """Make as many updates as each message asks for; answer with seconds per update and losses."""
    torch.set_num_threads(threads)
    if rank is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        address = f"tcp://127.0.0.1:{setting.port}"
        distributed.init_process_group("gloo", address, rank=rank, world_size=RANKS)
    losses = updates(setting)
    while count := pipe.recv():
        began = time.perf_counter()
        made = [next(losses) for _ in range(count)]
        seconds = (time.perf_counter() - began) / count
        pipe.send((seconds, [loss.item() for loss in made]))
    if rank is not None:
        distributed.destroy_process_group()


class Side:
    """The processes of one way to train."""

    def __init__(self, setting: Setting, threads: int, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes = list[Any]()
        self.processes = list[Any]()
        self.losses: list[float] = []
        for rank in range(ranks):
            here, there = context.Pipe()
            rank_or_none = rank if ranks > 1 else None
            process = context.Process(target=serve, args=(there, setting, threads, rank_or_none))
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def turn(self, count: int) -> float:
        """Make updates; returns milliseconds per update of the slowest process."""
        time.sleep(PAUSE)
        for pipe in self.pipes:
            pipe.send(count)
        answers = [pipe.recv() for pipe in self.pipes]
        self.losses += answers[0][1]
        return 1e3 * max(seconds for seconds, _ in answers)

    def end(self) -> None:
        """Let the processes end."""
        for pipe in self.pipes:
            pipe.send(0)
        for process in self.processes:
            process.join()


class Others:
    """The processor time of programs that are none of ours."""

    def __init__(self, processes: Sequence[Any]) -> None:
        self.processes = [psutil.Process(process.pid) for process in processes]
        self.before = self.seconds()

    def seconds(self) -> tuple[float, float]:
        """Of the clock, and of other programs on all cores."""
        times = psutil.cpu_times()
        busy = times.user + times.nice + times.system
        ours = [process.cpu_times() for process in (*self.processes, psutil.Process())]
        return time.perf_counter(), busy - sum(own.user + own.system for own in ours)

    def cores(self) -> float:
        """How many cores they used since the last call."""
        began, before = self.before
        self.before = now, busy = self.seconds()
        return (busy - before) / (now - began)


class Rounds(NamedTuple):
    """Milliseconds per update of each side, and cores that other programs used, by round."""

    milliseconds: dict[str, list[float]]
    others: list[float]


def measure(setting: Setting, rounds: int) -> Rounds:
    """Run all sides in turns and compare their losses."""
    sides = {
        "two ranks": Side(setting, 1, RANKS),
        "two threads": Side(setting, 2, 1),
        "one thread": Side(setting, 1, 1),
    }
    result = Rounds({name: [] for name in sides}, [])
    try:
        for side in sides.values():
            side.turn(WARM_UP)
        others = Others([process for side in sides.values() for process in side.processes])
        for turn in range(rounds):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                result.milliseconds[name].append(sides[name].turn(TURN))
            result.others.append(others.cores())
    finally:
        for side in sides.values():
            side.end()
    expected = sides["one thread"].losses
    for name, side in sides.items():
        deviation = max(abs(a - b) / abs(b) for a, b in zip(side.losses, expected, strict=True))
        if not deviation < 1e-4:
            raise SystemExit(f"{name} and one thread compute other losses: they differ {deviation}")
    return result


def summary(rounds: Rounds, most: float) -> dict[str, Any]:
    """Quartiles over the rounds in which others used at most so many cores."""
    chosen = [i for i, cores in enumerate(rounds.others) if cores <= most]
    if len(chosen) < 2:
        return {"rounds": len(chosen)}
    times = {name: [values[i] for i in chosen] for name, values in rounds.milliseconds.items()}
    ranks = times["two ranks"]
    speed = {
        name: statistics.quantiles([a / b for a, b in zip(times[name], ranks, strict=True)], n=4)
        for name in ("two threads", "one thread")
    }
    return {
        "rounds": len(chosen),
        "milliseconds": {name: statistics.quantiles(values, n=4) for name, values in times.items()},
        "speed of two ranks over": speed,
    }


def main() -> None:
    parser = parser_of(__doc__, "ranks", rounds=100)
    parser.add_argument("--cell", default="LSTM", choices=["LSTM", "GRU", "RNN"])
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    count = WARM_UP + TURN * options.rounds
    rounds = measure(Setting(options.cell, options.hidden, count, port), options.rounds)
    summaries = {"all": summary(rounds, float("inf")), "quiet": summary(rounds, QUIET)}
    for kind, part in summaries.items():
        print(f"{part['rounds']} rounds, {kind}")
        for unit in ("milliseconds", "speed of two ranks over"):
            for name, (low, middle, high) in part.get(unit, {}).items():
                print(f"    {unit} {name}: {middle:.2f} [{low:.2f}, {high:.2f}]")
    print(f"other programs used {statistics.median(rounds.others):.2f} cores in the median round")
    record = {
        "cell": options.cell,
        "hidden": options.hidden,
        "cores": os.cpu_count(),
        "others": statistics.quantiles(rounds.others, n=4),
        **summaries,
    }
    write(options.out, record)


if __name__ == "__main__":
    main()
