"""Accelerate: the weights of the plain loop, with its accumulation, mixed precision, scheduler,
checkpoints and processes.

Shapes: `T` steps, `B` lanes.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn

import throughtime as tt
from plain_loop import Growing, plain_loop
from processes import in_processes
from strategies import apart, recordings
from throughtime.carry import Carried
from throughtime.errors import ConfigError, DataError
from throughtime.gradient import Policy
from throughtime.integrations.accelerate import prepare, updates

LENGTHS = (40, 25, 53, 8, 3, 29, 15)
STRIDE, COUNT = 7, 25
LOSS, POLICY, GROWING = nn.MSELoss(), tt.Truncated(7), Growing(4)


@pytest.fixture(autouse=True)
def apart_from_other_tests() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    forget()
    yield
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def parts(
    dtype: torch.dtype = torch.float64, lr: float = 0.5
) -> tuple[Carried, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    net = tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 1))).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)


def stream(lanes: int = 4, dtype: torch.dtype = torch.float64) -> tt.Stream:
    return tt.Stream(recordings(LENGTHS, outputs=1), lanes, 10, dtype=dtype)


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in net.named_parameters()}


def accelerated(
    accelerator: Accelerator,
    lanes: int = 4,
    dtype: torch.dtype = torch.float64,
    gradient: Any = None,
) -> dict[str, Any]:
    """Weights and learning rate after so many updates with the adapter."""
    net, optimizer, scheduler = prepare(accelerator, *parts(dtype))
    run = updates(accelerator, net, stream(lanes, dtype), LOSS, gradient=gradient or POLICY)
    done = 0
    while done < COUNT:
        for _ in run:
            accelerator.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done += 1
            if done == COUNT:
                break
    return {"weights": weights(net), "lr": scheduler.get_last_lr()}


def plain(
    dtype: torch.dtype = torch.float64,
    gradient: Any = POLICY,
    several: int = 1,
    *,
    autocast: bool = False,
) -> dict[str, Any]:
    """The same by the plain loop of updates."""
    net, optimizer, scheduler = parts(dtype)
    options: Any = {"stop": COUNT, "clip": 0.05, "accumulate": several, "after": scheduler.step}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain_loop(net, stream(dtype=dtype), optimizer, gradient, **options)
    return {"weights": weights(net), "lr": scheduler.get_last_lr()}


@pytest.mark.parametrize(("several", "policy"), [(1, GROWING), (4, POLICY)], ids=str)
def test_updates_under_an_accelerator_give_the_weights_of_a_plain_loop(
    several: int, policy: Policy
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=several)
    result = accelerated(accelerator, gradient=policy)
    expected = plain(several=several, gradient=policy)
    assert apart(result["weights"], expected["weights"]) < 1e-12
    assert result["lr"] == expected["lr"] == pytest.approx([0.5 * 0.7**2])
    assert apart(plain(several=several + 1)["weights"], expected["weights"]) > 1e-4


def test_mixed_precision_is_that_of_torch_autocast() -> None:
    accelerator, policy = Accelerator(cpu=True, mixed_precision="bf16"), tt.Truncated(STRIDE, 15)
    result = accelerated(accelerator, dtype=torch.float32, gradient=policy)["weights"]
    lower, full = (plain(torch.float32, policy, autocast=on)["weights"] for on in (True, False))
    assert apart(result, lower) < 1e-6
    assert apart(result, full) > 1e-5  # a mutant: no autocast


def test_what_an_accelerator_must_not_do_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, optimizer, _ = prepare(accelerator, *parts())
    run = updates(accelerator, net, stream(), LOSS, gradient=POLICY)
    position = run.state_dict()["positions"][0]
    with pytest.raises(DataError, match=r"positions of 2 processes, .* and there are 1"):
        run.load_state_dict({"positions": [position, position]})
    next(iter(run))
    with accelerator.accumulate(net):
        optimizer.step()
    with pytest.raises(ConfigError, match=r"accelerator.accumulate.* leave it out"):
        next(iter(run))
    accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(ConfigError, match="of type FSDP, which adds up or shards"):
        prepare(accelerator, *parts())
    forget()
    with pytest.raises(ConfigError, match=r"compiles the net.* leave dynamo_backend"):
        prepare(Accelerator(cpu=True, dynamo_backend="eager"), *parts())


def run_updates(
    accelerator: Accelerator,
    folder: Path,
    lanes: int,
    first: int,
    last: int,
    gradient: Any = None,
) -> dict[str, Tensor]:
    """Weights after update `last`, in new objects that resume from the folder, or write it."""
    accelerator.free_memory()
    accelerator._custom_objects.clear()  # what a new process would not have
    net, optimizer, scheduler = prepare(accelerator, *parts())
    policy, done = gradient or tt.Truncated(STRIDE, 15), first
    run = updates(accelerator, net, stream(lanes), LOSS, gradient=policy)
    accelerator.register_for_checkpointing(run)
    if first:
        torch.manual_seed(9)  # another state than the one that was saved
        accelerator.load_state(str(folder))
    while done < last:
        for _ in run:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done += 1
            if done == last:
                break
    if not first:
        accelerator.save_state(str(folder))
        accelerator.wait_for_everyone()
    return weights(net)


def stopped(
    accelerator: Accelerator, folder: Path, lanes: int, gradient: Any = None
) -> dict[str, Tensor]:
    """Weights of a training that was stopped and resumed by `save_state` and `load_state`."""
    run_updates(accelerator, folder, lanes, 0, 12, gradient)
    return run_updates(accelerator, folder, lanes, 12, COUNT, gradient)


@pytest.mark.parametrize(("several", "gradient"), [(3, None), (1, GROWING)], ids=str)
def test_saved_and_loaded_states_resume_to_the_bit(
    several: int, gradient: Policy | None, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=several)
    whole = run_updates(accelerator, tmp_path / "whole", 4, 0, COUNT, gradient)
    assert apart(stopped(accelerator, tmp_path / "law", 4, gradient), whole) == 0


def nothing_before() -> None:
    """Streams are made where the group is up."""


def ranks_work(rank: int, before: None) -> Iterator[tuple[str, Any]]:
    """The process group is up; Accelerate finds the rest where a launcher leaves it."""
    del before
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    accelerator = Accelerator(cpu=True)
    yield "processes", accelerator.num_processes
    accelerator.gradient_accumulation_steps = 4
    yield "by 4", accelerated(accelerator, 2)
    accelerator.gradient_accumulation_steps = 1
    with TemporaryDirectory() as mine:
        (first,) = broadcast_object_list([mine])
        yield "whole", run_updates(accelerator, Path(first) / "whole", 2, 0, COUNT)
        yield "resumed", stopped(accelerator, Path(first) / "resumed", 2)
        accelerator.wait_for_everyone()


@cache
def results() -> list[dict[str, Any]]:
    return in_processes(2, nothing_before, ranks_work)


def test_two_processes_give_the_weights_and_the_schedule_of_one() -> None:
    expected = accelerated(Accelerator(cpu=True, gradient_accumulation_steps=4))
    for values in results():
        assert values["processes"] == 2
        assert apart(values["by 4"]["weights"], expected["weights"]) < 1e-12
        assert values["by 4"]["lr"] == expected["lr"]


def test_two_processes_resume_to_the_bit() -> None:
    for values in results():
        assert apart(values["resumed"], values["whole"]) == 0
