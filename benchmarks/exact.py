"""The exact gradient of long recordings: memory and time beside plain BPTT; the cost of an audit.

    python benchmarks/exact.py [--rounds 5] [--out benchmarks/results/exact.json]

LSTM of 128 units with a linear readout, batch 1, float32, MSE, one thread. First the gradients of
both are compared; then they are timed in turns in one process, and the ratio of each pair is taken.
Peak memory is the rise of resident memory while a fresh process computes one gradient, above what
it held with the inputs in memory and after a short gradient of the same kind. The last table is the
claim of Gruslys et al. (NeurIPS 2016): 1,000 steps in 5 % of the memory for a third more time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import throughtime as tt
from record import parser_of, write
from throughtime.carry import Carried
from throughtime.chunk import Chunk

HIDDEN, FEATURES = 128, 4


def network(hidden: int = HIDDEN) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LSTM(FEATURES, hidden), nn.Linear(hidden, 1))


def data(steps: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(steps, FEATURES), torch.randn(steps, 1)


def plain(net: Carried, x: Tensor, t: Tensor) -> None:
    """One graph over all steps."""
    y, _ = net(x.unsqueeze(1), net.initial_state(1))
    nn.functional.mse_loss(y[:, 0], t).backward()


def exact(net: Carried, x: Tensor, t: Tensor, **setting: Any) -> None:
    """The same gradient in pieces."""
    stream = tt.Stream({"inputs": x, "targets": t}, lanes=1, chunk=1000)
    for _ in tt.updates(net, stream, nn.MSELoss(), gradient=tt.Exact(**setting)):
        pass


def gradient(
    run: Callable[..., None], net: Carried, x: Tensor, t: Tensor, **setting: Any
) -> Tensor:
    net.zero_grad()
    run(net, x, t, **setting)
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def in_turns(ours: Callable[[], Any], other: Callable[[], Any], rounds: int) -> list[float]:
    """The time of one over that of the other, pair by pair."""
    ratios: list[float] = []
    for _ in range(rounds):
        base = seconds(other)
        ratios.append(seconds(ours) / base)
    return ratios


def peak(way: str, steps: int) -> dict[str, float]:
    """Bytes at the peak above the start, and seconds, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", way, str(steps)],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def measure(way: str, steps: int) -> dict[str, float]:
    """What `peak` runs: resident memory, looked at every half millisecond."""
    net, (x, t) = tt.carry(network()), data(steps)
    run = plain if way == "plain" else exact
    run(net, x[:4000], t[:4000])
    net.zero_grad(set_to_none=False)
    process, over, most = psutil.Process(), threading.Event(), 0

    def watch() -> None:
        nonlocal most
        while not over.wait(0.0005):
            most = max(most, process.memory_info().rss)

    start = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    took = seconds(lambda: run(net, x, t))
    over.set()
    watcher.join()
    return {"peak": max(most, start) - start, "seconds": took}


def compared(steps: int, rounds: int) -> dict[str, Any]:
    """Equality first, then time in turns."""
    net, (x, t) = tt.carry(network()), data(steps)
    a, b = gradient(plain, net, x, t), gradient(exact, net, x, t)
    apart = ((a - b).norm() / a.norm()).item()
    if not apart < 1e-4:
        raise SystemExit(f"the gradients differ by {apart:.2g}: nothing to time")
    ratios = in_turns(
        lambda: gradient(exact, net, x, t), lambda: gradient(plain, net, x, t), rounds
    )
    return {
        "steps": steps,
        "difference": apart,
        "median": statistics.median(ratios),
        "ratios": ratios,
    }


def audited(steps: int, rounds: int, horizons: tuple[int, ...]) -> dict[str, Any]:
    """The cost of an audit in exact sweeps."""
    net, (x, t) = tt.carry(network()), data(steps)
    stream = tt.Stream({"inputs": x, "targets": t}, lanes=1, chunk=1000)
    tt.audit(net, stream, nn.MSELoss(), horizons)
    ratios = in_turns(
        lambda: tt.audit(net, stream, nn.MSELoss(), horizons),
        lambda: gradient(exact, net, x, t),
        rounds,
    )
    return {
        "steps": steps,
        "horizons": horizons,
        "median": statistics.median(ratios),
        "ratios": ratios,
    }


def saved_bytes(
    run: Callable[..., None], net: Carried, x: Tensor, t: Tensor, **setting: Any
) -> int:
    """Peak bytes of the tensors saved for backward, each counted until its storage is freed."""
    alive: dict[int, int] = {}
    now = most = 0

    def keep(saved: Tensor) -> Saved:
        nonlocal now, most
        storage = saved.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in weights:
            now += size if not alive.get(place) else 0
            alive[place] = alive.get(place, 0) + 1
            most = max(most, now)
        return Saved(saved.detach(), lambda: drop(place, size))

    def drop(place: int, size: int) -> None:
        nonlocal now
        if place not in weights:
            alive[place] -= 1
            now -= size if not alive[place] else 0

    weights = {w.untyped_storage().data_ptr() for w in (*net.parameters(), x, t)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        run(net, x, t, **setting)
    return most


class Saved:
    """A saved tensor that says when it is let go."""

    def __init__(self, tensor: Tensor, gone: Callable[[], None]) -> None:
        self.tensor, self._gone = tensor, gone

    def __del__(self) -> None:
        self._gone()


def gruslys(rounds: int) -> dict[str, Any]:
    """Memory and time of 1,000 steps in segments of 32 = sqrt(1,000), relative to one graph."""
    steps, chunk, lanes = 1000, 32, 32
    torch.manual_seed(2)
    net, x, t = (
        tt.carry(network()),
        torch.randn(steps, lanes, FEATURES),
        torch.randn(steps, lanes, 1),
    )
    chunks = [Chunk.from_tensors(x, t)]

    def whole(net: Carried, x: Tensor, t: Tensor) -> None:
        y, _ = net(x, net.initial_state(lanes))
        nn.functional.mse_loss(y, t).backward()

    def pieces(net: Carried, x: Tensor, t: Tensor) -> None:
        del x, t
        for _ in tt.updates(net, chunks, nn.MSELoss(), gradient=tt.Exact(chunk=chunk)):
            pass

    apart = (gradient(whole, net, x, t) - gradient(pieces, net, x, t)).norm().item()
    edges = (steps // chunk + 2) * sum(
        leaf.nbytes for leaf in tt.state.tensors(net.initial_state(lanes))
    )
    bytes_whole, bytes_pieces = (
        saved_bytes(whole, net, x, t),
        saved_bytes(pieces, net, x, t) + edges,
    )
    ratios = in_turns(lambda: pieces(net, x, t), lambda: whole(net, x, t), rounds)
    return {
        "difference": apart,
        "bytes_whole": bytes_whole,
        "bytes_pieces": bytes_pieces,
        "saved": 1 - bytes_pieces / bytes_whole,
        "time": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    parser = parser_of(__doc__, "exact", rounds=5)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        print(json.dumps(measure(options.measure[0], int(options.measure[1]))))
        return
    found: dict[str, Any] = {
        "time": compared(100_000, options.rounds),
        "gruslys": gruslys(options.rounds),
    }
    print(
        f"100,000 steps: gradients apart {found['time']['difference']:.1e}, time"
        f" {found['time']['median']:.2f} of one graph's"
    )
    found["peaks"] = {
        f"{way} {steps}": peak(way, steps)
        for way, steps in (("plain", 100_000), ("exact", 100_000), ("exact", 1_000_000))
    }
    for name, values in found["peaks"].items():
        print(
            f"{name:15} {values['peak'] / 1e6:7.1f} MB above the inputs,"
            f" {values['seconds'] / int(name.split()[1]) * 1e6:6.2f} us a step"
        )
    found["audits"] = [
        audited(40_000, options.rounds, horizons)
        for horizons in ((1600,), (400,), (100,), (400, 1600), (50, 200, 800, 3200))
    ]
    for row in found["audits"]:
        print(f"audit of horizons {row['horizons']}: {row['median']:.2f} exact sweeps")
    g = found["gruslys"]
    print(
        f"1,000 steps in pieces of 32: {g['saved']:.1%} less memory (paper 95 %), {g['time']:.2f}"
        " of the time (paper 1.33)"
    )
    write(options.out, found)


if __name__ == "__main__":
    main()
