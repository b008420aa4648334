"""Hugging Face Accelerate: device, mixed precision, accumulation and checkpoints are the
accelerator's, updates are those of `tt.updates`.

The net is prepared without DistributedDataParallel, since ranks add their gradients up once per
update by themselves; and a stream is never given to `accelerator.prepare`, whose sharding would
tear its lanes apart: made after `Accelerator()`, each rank plays its own. `accelerator.accumulate`
has no place in the loop: every update that comes is one to step on.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, overload

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import throughtime as tt
from throughtime.errors import ConfigError, DataError, MissingExtraError
from throughtime.gradient import LossFn, Policy

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType, gather_object, send_to_device
except ImportError as error:
    raise MissingExtraError(
        "throughtime.integrations.accelerate needs Accelerate: pip install"
        " 'throughtime[accelerate]'"
    ) from error

OTHER_WAYS = (
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


@overload
def prepare(
    accelerator: Accelerator, net: tt.Carried, optimizer: Optimizer, scheduler: LRScheduler
) -> tuple[tt.Carried, AcceleratedOptimizer, AcceleratedScheduler]: ...
@overload
def prepare(
    accelerator: Accelerator, net: tt.Carried, optimizer: Optimizer
) -> tuple[tt.Carried, AcceleratedOptimizer, None]: ...
def prepare(
    accelerator: Accelerator,
    net: tt.Carried,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
) -> tuple[tt.Carried, AcceleratedOptimizer, AcceleratedScheduler | None]:
    """The three for this accelerator, in place of `accelerator.prepare(net, optimizer, scheduler)`.

    Args:
        accelerator: on any number of processes; not with DeepSpeed, FSDP, Megatron-LM or XLA.
        net: made by `tt.carry`; it moves to the accelerator's device.
        optimizer: of the net's parameters.
        scheduler: steps once a call, where Accelerate's own steps once for each process; not where
            a scaler skipped the optimizer's step.

    Returns:
        The same net, the optimizer and the scheduler as Accelerate wraps them; `save_state` and
        `load_state` know all three.

    Raises:
        ConfigError: an accelerator that adds gradients up in a way of its own, or compiles the net.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.integrations.accelerate import Accelerator, prepare, updates
        >>> accelerator = Accelerator(cpu=True)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> net, optimizer, _ = prepare(accelerator, net, torch.optim.Adam(net.parameters()))
        >>> stream = tt.Stream({"inputs": torch.randn(50, 3), "targets": torch.randn(50)}, lanes=1, chunk=20)
        >>> for update in updates(accelerator, net, stream, torch.nn.MSELoss(), gradient=tt.Truncated(stride=20)):
        ...     _ = accelerator.clip_grad_norm_(net.parameters(), 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> update.steps
        10
    """
    if accelerator.distributed_type in OTHER_WAYS:
        raise ConfigError(
            f"the accelerator is of type {accelerator.distributed_type.name}, which adds up or"
            " shards gradients at every backward pass: expected one process, or several that are"
            " not sharded: accelerate launch --multi_gpu script.py, or torchrun script.py"
        )
    if (
        accelerator.prepare_model(net, evaluation_mode=True) is not net
    ):  # the mode that does not wrap; in training it is no other
        raise ConfigError(
            "the accelerator compiles the net, which must stay the one of tt.carry: leave"
            " dynamo_backend=... out"
        )
    prepared = cast("AcceleratedOptimizer", accelerator.prepare_optimizer(optimizer))
    if scheduler is None:
        return net, prepared, None
    stepped = cast("AcceleratedScheduler", accelerator.prepare_scheduler(scheduler))
    stepped.split_batches = (
        True  # what Accelerate calls one step of the scheduler for one of the optimizer
    )
    return net, prepared, stepped


def updates(
    accelerator: Accelerator,
    net: tt.Carried,
    stream: tt.Stream,
    loss_fn: LossFn,
    *,
    gradient: Policy,
) -> "Epochs":
    """`tt.updates` under this accelerator: its autocast, its scaler, its
    `gradient_accumulation_steps` as `accumulate`.

    Args:
        accelerator: as given to `prepare`.
        net: as `prepare` returned it.
        stream: made after the accelerator.
        loss_fn: as for `tt.updates`.
        gradient: as for `tt.updates`.

    Returns:
        Epochs: each iteration is one, or the rest of one that was left or loaded. For
            `accelerator.register_for_checkpointing`.
    """

    def start() -> tt.Updates:
        several = accelerator.gradient_accumulation_steps
        return tt.updates(
            net, stream, loss_fn, gradient=gradient, scaler=accelerator.scaler, accumulate=several
        )

    if isinstance(loss_fn, nn.Module):
        loss_fn.to(accelerator.device)  # weights of classes, say
    return Epochs(accelerator, start)


class Epochs:
    """Epoch after epoch of updates, and the place of every rank among them."""

    def __init__(self, accelerator: Accelerator, start: Callable[[], tt.Updates]) -> None:
        self._accelerator, self._start = accelerator, start
        self._run: tt.Updates | None = None

    def __iter__(self) -> Iterator[tt.Update]:
        run = self._now()
        while (update := self._next(run)) is not None:
            yield update
        self._run = None

    def _now(self) -> tt.Updates:
        self._run = self._start() if self._run is None else self._run
        return self._run

    def _next(self, run: tt.Updates) -> tt.Update | None:
        if not self._accelerator.sync_gradients:
            raise ConfigError(
                "accelerator.accumulate(...) is around the loop's body, and lets the optimizer skip"
                " updates that are there to step on: leave it out,"
                " Accelerator(gradient_accumulation_steps=...) is all that is needed"
            )
        with self._accelerator.autocast():
            return next(run, None)

    def state_dict(self) -> dict[str, Any]:
        """The place of every rank, since Accelerate writes what the first one says.

        All ranks must ask together.
        """
        return {"places": gather_object([send_to_device(self._now().state_dict(), "cpu")])}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from the place of this rank.

        Raises:
            DataError: the places of another number of processes, or of another stream.
        """
        places, mine = saved["places"], self._accelerator
        if len(places) != mine.num_processes:
            raise DataError(
                f"the checkpoint holds the places of {len(places)} processes, each of which plays"
                f" its own lanes, and there are {mine.num_processes}: start as many again"
            )
        self._run = self._start()
        self._run.load_state_dict(send_to_device(places[mine.process_index], mine.device))
