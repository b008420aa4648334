"""Accelerate: the weights of the plain loop, with its accumulation, mixed precision, scheduler,
checkpoints and processes.

Shapes: `T` steps, `B` lanes.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
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
from torch.optim.lr_scheduler import StepLR

import throughtime as tt
from plain_loop import Course, adam, check, every_course, flat
from processes import in_processes
from throughtime.errors import ConfigError, DataError
from throughtime.integrations.accelerate import prepare, updates

LOSS, POLICY = nn.MSELoss(), tt.Truncated(7)
OF_RANKS = Course(accumulate=4, clip=0.05, dropout=0, decay=0.9)


@pytest.fixture(autouse=True)
def apart_from_other_tests() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    forget()
    yield
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def parts(course: Course = OF_RANKS) -> tuple[Any, ...]:
    """Net, optimizer and scheduler."""
    net = course.net()
    optimizer = adam(net)
    return net, optimizer, StepLR(optimizer, 1, course.decay)


def train(
    course: Course, folder: Path, accelerator: Accelerator | None = None, lanes: int = 2
) -> Tensor:
    """The weights and the learning rate at the end."""
    kind = "bf16" if course.bfloat16 else "no"
    accelerator = accelerator or Accelerator(cpu=True, mixed_precision=kind)
    accelerator.gradient_accumulation_steps = course.accumulate
    if course.resume:
        part(course, folder, accelerator, lanes, 0, course.resume)
    return part(course, folder, accelerator, lanes, course.resume, -1)


def part(
    course: Course, folder: Path, accelerator: Accelerator, lanes: int, done: int, stop: int
) -> Tensor:
    """From update `done` on, in new objects."""
    accelerator.free_memory()
    accelerator._custom_objects.clear()  # what a new process would not have
    net, optimizer, scheduler = prepare(accelerator, *parts(course))
    stream = course.stream(lanes)
    run = updates(accelerator, net, stream, LOSS, gradient=course.gradient)
    accelerator.register_for_checkpointing(run)
    torch.manual_seed(99 if done else 5)
    if done:
        accelerator.load_state(str(folder))
    while done != stop and stream.epoch < 2:
        for _ in run:
            if course.clip:
                accelerator.clip_grad_norm_(net.parameters(), course.clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done += 1
            if done == stop:
                accelerator.save_state(str(folder))
                accelerator.wait_for_everyone()
                break
    return torch.cat([flat(net), torch.tensor(scheduler.get_last_lr())])


def without_rate(course: Course, folder: Path) -> Tensor:
    return train(course, folder)[:-1]


@every_course
def test_updates_under_an_accelerator_give_the_weights_of_a_plain_loop(
    course: Course, tmp_path: Path
) -> None:
    check(without_rate, replace(course, decay=0.9), tmp_path)


def test_what_an_accelerator_must_not_do_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, optimizer, _ = prepare(accelerator, *parts())
    run = updates(accelerator, net, OF_RANKS.stream(), LOSS, gradient=POLICY)
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
    yield "by 4", train(OF_RANKS, Path(), accelerator, 1)
    with TemporaryDirectory() as mine:
        (first,) = broadcast_object_list([mine])
        for name, resume in (("whole", 0), ("resumed", 7)):
            yield name, train(Course(resume=resume), Path(first), accelerator, 1)
        accelerator.wait_for_everyone()


@cache
def results() -> list[dict[str, Any]]:
    return in_processes(2, nothing_before, ranks_work)


def test_two_processes_give_the_weights_and_the_schedule_of_one() -> None:
    expected = train(OF_RANKS, Path())
    for values in results():
        assert values["processes"] == 2
        torch.testing.assert_close(values["by 4"], expected, rtol=0, atol=1e-12)


def test_two_processes_resume_to_the_bit() -> None:
    for values in results():
        assert torch.equal(values["resumed"], values["whole"])
