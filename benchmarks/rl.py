"""Recurrent agents with resets in one call, beside the loops of three libraries.

    python benchmarks/rl.py [--rounds 7] [--out benchmarks/results/rl.json]
    python benchmarks/rl.py --table
    python benchmarks/rl.py --returns 5

- sb3-contrib: `RecurrentPPO.learn` on CartPole without velocities, 8 environments, 128 steps a
  rollout, 10 epochs, an LSTM of 64; two agents of one seed, one with `fuse(model.policy)`. A turn
  is one rollout and its training. Their weights are compared after the first turn: later, rounding
  has changed an action.
- TorchRL: `LSTMModule` and `GRUModule` (backend "pad", the default on a CPU) and ours. Forward pass
  in inference mode, as in TorchRL's own benchmarks, in their shapes that fit two cores: those of
  test_rnn_reset_backends_benchmark.py, 32 inputs, 512 units, 256 rows of 128 steps, resets at .03
  of the steps; and of bench_gru_reset_backends.py, 64 inputs, 256 units, 128 rows of 16, 64 and 256
  steps, resets at .01 and .1. Forward and backward pass: 128 rows of 16 and 64 steps, and a small
  agent of 64 units, 16 rows of 128 steps.
- CleanRL's loop: one call of `nn.LSTM` for each step, states multiplied by `1 - done`, as in its
  single-file agents, beside one call of `tt.nn.LSTM` with resets; 8 environments of 128 steps.

Both sides compute the same numbers to 1e-5, which is checked first. They take turns in one process;
reported are medians and quartiles of the ratio of each turn, on one thread. About 5 minutes.

`--returns` trains RecurrentPPO for 20,480 steps from so many seeds, with and without `fuse`, and
prints the mean return of the last 100 episodes of each. About 1.5 minutes a seed.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import sb3_contrib
import tensordict
import torch
import torchrl
import torchrl.modules
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor, nn

import throughtime as tt
from throughtime.integrations import rl

RESULTS = Path(__file__).parent / "results" / "rl.json"
SHARES = (0.01, 0.1)  # of steps at which an episode starts
SHAPES = [(128, 16, 64, 256), (128, 64, 64, 256), (16, 128, 4, 64)]  # rows, steps, inputs, units
FORWARD = [(256, 128, 32, 512), (128, 16, 64, 256), (128, 64, 64, 256), (128, 256, 64, 256)]
Side = Callable[[], list[Tensor]]


class Positions(gymnasium.ObservationWrapper):
    """CartPole without velocities."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = gymnasium.spaces.Box(-5.0, 5.0, (2,))

    def observation(self, observation: Any) -> Any:
        return observation[[0, 2]].astype(np.float32)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compared(theirs: Side, ours: Side, rounds: int) -> dict[str, float]:
    """The ratio of their time to ours, after a check of outputs and gradients."""
    apart = max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1.0))
        for a, b in zip(ours(), theirs(), strict=True)
    )
    if apart > 1e-5:
        raise SystemExit(f"they compute other numbers: {apart:.2g} apart")
    pairs = [(seconds(theirs), seconds(ours)) for _ in range(rounds)]
    return summary(pairs) | {"apart": apart}


def summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    lower, middle, upper = statistics.quantiles([a / b for a, b in pairs], n=4)
    return {
        "theirs_ms": statistics.median(a for a, _ in pairs) * 1e3,
        "ours_ms": statistics.median(b for _, b in pairs) * 1e3,
        "ratio": middle,
        "lower_quartile": lower,
        "upper_quartile": upper,
    }


def agent(fused: bool, seed: int = 0) -> Any:
    """RecurrentPPO with or without `fuse`."""
    model = sb3_contrib.RecurrentPPO(
        "MlpLstmPolicy",
        DummyVecEnv([lambda: Monitor(Positions())] * 8),
        n_steps=128,
        batch_size=128,
        seed=seed,
        device="cpu",
        policy_kwargs={"lstm_hidden_size": 64},
    )
    if fused:
        rl.fuse(model.policy)
    return model


def returns(seeds: int) -> None:
    """Mean returns after equal steps, with and without `fuse`."""
    print("| seed | theirs | ours |\n|---|---|---|")
    for seed in range(seeds):
        means: list[str] = []
        for fused in (False, True):
            model = agent(fused, seed).learn(20 * 8 * 128)
            means.append(f"{statistics.mean(e['r'] for e in model.ep_info_buffer):.1f}")
        print(f"| {seed} | {' | '.join(means)} |", flush=True)


def learning(rounds: int) -> dict[str, float]:
    """RecurrentPPO with and without `fuse`."""
    agents = [agent(fused) for fused in (False, True)]

    def turn(model: Any, first: bool = False) -> float:
        if first:
            model.set_random_seed(0)
        return seconds(lambda: model.learn(8 * 128, reset_num_timesteps=first))

    for model in agents:
        turn(model, first=True)
    weights = zip(*(model.policy.parameters() for model in agents), strict=True)
    apart = max(float((a - b).abs().max()) for a, b in weights)
    return summary([(turn(agents[0]), turn(agents[1])) for _ in range(rounds)]) | {"apart": apart}


def module_sides(
    name: str, shape: tuple[int, ...], share: float, *, forward: bool
) -> tuple[Side, Side]:
    """TorchRL's module and ours, of equal weights, on one rollout; `forward`: no backward pass."""
    rows, steps, inputs, units = shape
    torch.manual_seed(0)
    x, starts = torch.randn(rows, steps, inputs), torch.rand(rows, steps, 1) < share
    states = ["h", "c"][: 2 if name == "LSTMModule" else 1]
    stored = {key: torch.zeros(rows, steps, 1, units) for key in states}

    def side(source: Any) -> Side:
        torch.manual_seed(1)
        module = getattr(source, name)(
            input_size=inputs,
            hidden_size=units,
            in_keys=["x", *states],
            out_keys=["y", *(("next", key) for key in states)],
            default_recurrent_mode=True,
        )
        data = tensordict.TensorDict({"x": x, "is_init": starts, **stored}, (rows, steps))

        def run() -> list[Tensor]:
            module.zero_grad()
            with torch.inference_mode(forward):
                y = module(data.copy())["y"]
            if forward:
                return [y]
            y.square().mean().backward()
            return [y.detach(), *(p.grad for p in module.parameters())]

        return run

    return side(torchrl.modules), side(rl)


def loop_sides(share: float) -> tuple[Side, Side]:
    """CleanRL's loop over the steps, and one call."""
    torch.manual_seed(0)
    x, done = torch.randn(128, 8, 64), (torch.rand(128, 8) < share).float()
    entering = torch.zeros(1, 8, 128), torch.zeros(1, 8, 128)
    plain = nn.LSTM(64, 128)
    fused = tt.fuse(copy.deepcopy(plain))

    def by_steps() -> list[Tensor]:
        plain.zero_grad()
        state, outputs = entering, list[Tensor]()
        for hidden, d in zip(x, done, strict=True):
            keep = (1.0 - d).view(1, -1, 1)
            y, state = plain(hidden.unsqueeze(0), (keep * state[0], keep * state[1]))
            outputs.append(y)
        y = torch.cat(outputs)
        y.square().mean().backward()
        return [y.detach(), *(p.grad for p in plain.parameters())]  # pyright: ignore[reportReturnType]  # each has one

    def in_one_call() -> list[Tensor]:
        fused.zero_grad()
        y, _ = fused(x, entering, done > 0)
        y.square().mean().backward()
        return [y.detach(), *(p.grad for p in fused.parameters())]  # pyright: ignore[reportReturnType]  # each has one

    return by_steps, in_one_call


def measure(rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {"sb3-contrib: RecurrentPPO.learn": learning(rounds)}
    for name in ("LSTMModule", "GRUModule"):
        for shape, forward in [*((s, True) for s in FORWARD), *((s, False) for s in SHAPES)]:
            rows, steps, _, units = shape
            for share in (0.03,) if units == 512 else SHARES:
                title = f"TorchRL: {name}, {rows} x {steps} steps, {units} units, {share:.0%}"
                sides = module_sides(name, shape, share, forward=forward)
                results[title + ", forward" * forward] = compared(*sides, rounds)
    for share in SHARES:
        title = f"CleanRL's loop: LSTM, 8 x 128 steps, 128 units, {share:.0%}"
        results[title] = compared(*loop_sides(share), rounds)
    return results


def table(path: Path) -> None:
    """Print the Markdown table."""
    print("| agent | theirs, ms | ours, ms | times as fast | quartiles |\n|---|---|---|---|---|")
    for name, row in json.loads(path.read_text(encoding="utf-8"))["result"].items():
        spread = f"{row['lower_quartile']:.1f} to {row['upper_quartile']:.1f}"
        print(
            f"| {name} | {row['theirs_ms']:.1f} | {row['ours_ms']:.1f} | {row['ratio']:.1f} |"
            f" {spread} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--returns", type=int, metavar="SEEDS")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of the libraries, about each other
    if options.returns:
        returns(options.returns)
        return
    if not options.table:
        load = os.getloadavg()[0]
        versions = {m.__name__: m.__version__ for m in (torch, torchrl, sb3_contrib, tt)}
        results = {
            "versions": versions | {"python": platform.python_version()},
            "processor": platform.processor() or platform.machine(),
            "rounds": options.rounds,
            "result": measure(options.rounds),
            "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        }
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table(options.out)


if __name__ == "__main__":
    main()
