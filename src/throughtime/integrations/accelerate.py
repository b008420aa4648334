"""Hugging Face Accelerate: `tt.updates` with the accelerator's device, precision and checkpoints.

The net is prepared without DistributedDataParallel: ranks add their gradients up themselves, once
per update. A stream is never passed to `accelerator.prepare`, whose sharding would separate its
lanes: made after `Accelerator()`, each rank reads its own. The loop needs no
`accelerator.accumulate`: every update is one to step on.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, overload

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import ConfigError, DataError, MissingExtraError
from throughtime.gradient import LossFn, Policy, Update
from throughtime.updates import Updates

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

SHARDED_TYPES = (
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


@overload
def prepare(
    accelerator: Accelerator, net: Carried, optimizer: Optimizer, scheduler: LRScheduler
) -> tuple[Carried, AcceleratedOptimizer, AcceleratedScheduler]: ...
@overload
def prepare(
    accelerator: Accelerator, net: Carried, optimizer: Optimizer
) -> tuple[Carried, AcceleratedOptimizer, None]: ...
def prepare(
    accelerator: Accelerator,
    net: Carried,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
) -> tuple[Carried, AcceleratedOptimizer, AcceleratedScheduler | None]:
    """Prepare the three, in place of `accelerator.prepare(net, optimizer, scheduler)`.

    Args:
        accelerator: on any number of processes; not with DeepSpeed, FSDP, Megatron-LM or XLA.
        net: made by `tt.carry`; it moves to the accelerator's device.
        optimizer: of the net's parameters.
        scheduler: steps once a call (Accelerate's own steps once for each process), unless a scaler
            skipped the optimizer's step.

    Returns:
        The same net, the optimizer and the scheduler as Accelerate wraps them; `save_state` and
        `load_state` know all three.

    Raises:
        ConfigError: an accelerator that adds gradients up itself, or compiles the net.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.integrations.accelerate import Accelerator, prepare, updates
        >>> accelerator = Accelerator(cpu=True)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> net, optimizer, _ = prepare(accelerator, net, torch.optim.Adam(net.parameters()))
        >>> recording = {"inputs": torch.randn(50, 3), "targets": torch.randn(50)}
        >>> stream = tt.Stream(recording, lanes=1, chunk=20)
        >>> loss_fn, gradient = torch.nn.MSELoss(), tt.Truncated(stride=20)
        >>> for update in updates(accelerator, net, stream, loss_fn, gradient=gradient):
        ...     _ = accelerator.clip_grad_norm_(net.parameters(), 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> update.steps
        10
    """
    if accelerator.distributed_type in SHARDED_TYPES:
        raise ConfigError(
            f"the accelerator is of type {accelerator.distributed_type.name}, which adds up or"
            " shards gradients at every backward pass: expected one process, or several that are"
            " not sharded: accelerate launch --multi_gpu script.py, or torchrun script.py"
        )
    # the mode that does not wrap; in training it makes no other difference
    if accelerator.prepare_model(net, evaluation_mode=True) is not net:
        raise ConfigError(
            "the accelerator compiles the net, which must stay the one of tt.carry: leave"
            " dynamo_backend=... out"
        )
    prepared = cast("AcceleratedOptimizer", accelerator.prepare_optimizer(optimizer))
    if scheduler is None:
        return net, prepared, None
    prepared_scheduler = cast("AcceleratedScheduler", accelerator.prepare_scheduler(scheduler))
    # Accelerate's setting for one step of the scheduler per step of the optimizer
    prepared_scheduler.split_batches = True
    return net, prepared, prepared_scheduler


def updates(
    accelerator: Accelerator,
    net: Carried,
    stream: tt.Stream,
    loss_fn: LossFn,
    *,
    gradient: Policy,
) -> "Epochs":
    """`tt.updates` with the accelerator's autocast, scaler and `gradient_accumulation_steps`.

    Args:
        accelerator: the one passed to `prepare`.
        net: as `prepare` returned it.
        stream: made after the accelerator.
        loss_fn: as for `tt.updates`.
        gradient: as for `tt.updates`.

    Returns:
        Epochs: each iteration is one, or the rest of one that was left or loaded. For
            `accelerator.register_for_checkpointing`.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.integrations.accelerate import Accelerator, prepare, updates
        >>> accelerator = Accelerator(cpu=True)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> net, optimizer, _ = prepare(accelerator, net, torch.optim.Adam(net.parameters()))
        >>> stream = tt.Stream((torch.randn(50, 3), torch.randn(50)), lanes=1, chunk=20)
        >>> epochs = updates(
        ...     accelerator, net, stream, torch.nn.MSELoss(), gradient=tt.Truncated(stride=20)
        ... )
        >>> len(list(epochs))
        3
    """

    def new_updates(policy_state: Any) -> Updates:
        return tt.updates(
            net,
            stream,
            loss_fn,
            gradient=gradient,
            policy_state=policy_state,
            scaler=accelerator.scaler,
            accumulate=accelerator.gradient_accumulation_steps,
        )

    if isinstance(loss_fn, nn.Module):
        loss_fn.to(accelerator.device)  # it may hold class weights
    epochs = Epochs(accelerator, new_updates)
    accelerator.register_save_state_pre_hook(epochs._before_save)
    return epochs


class Epochs:
    """Epoch after epoch of updates, and the position of every rank in them.

    Made by `updates`. Each iteration is one epoch, or the rest of one that was left or loaded.
    """

    def __init__(self, accelerator: Accelerator, new_updates: Callable[[Any], Updates]) -> None:
        self._accelerator, self._new_updates = accelerator, new_updates
        self._updates: Updates | None = None
        self._policy_state: Any = None  # of the epoch before

    def __iter__(self) -> Iterator[Update]:
        updates = self._current()
        while (update := self._next_update(updates)) is not None:
            yield update
        self._policy_state, self._updates = updates.policy_state, None

    def _current(self) -> Updates:
        if self._updates is None:
            self._updates = self._new_updates(self._policy_state)
        return self._updates

    def _next_update(self, updates: Updates) -> Update | None:
        if not self._accelerator.sync_gradients:
            raise ConfigError(
                "accelerator.accumulate(...) is around the loop's body, and lets the optimizer skip"
                " updates that are there to step on: leave it out,"
                " Accelerator(gradient_accumulation_steps=...) is all that is needed"
            )
        with self._accelerator.autocast():
            return next(updates, None)

    def _before_save(self, *_: Any) -> None:
        """Read the flag of the last update, before Accelerate writes any file."""
        if self._updates is not None:
            self._updates._read_flag()

    def state_dict(self) -> dict[str, Any]:
        """The positions of all ranks, since Accelerate writes the first rank's dict only.

        All ranks must call this together.
        """
        position = send_to_device(self._current().state_dict(), "cpu")
        return {"positions": gather_object([position])}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the position of this rank.

        Raises:
            DataError: the positions of another number of processes, or of another stream.
        """
        positions, accelerator = saved["positions"], self._accelerator
        if len(positions) != accelerator.num_processes:
            raise DataError(
                f"the checkpoint holds the positions of {len(positions)} processes, each of which"
                f" reads its own lanes, and there are {accelerator.num_processes}: start as many"
                " again"
            )
        self._updates = self._new_updates(None)
        position = positions[accelerator.process_index]
        self._updates.load_state_dict(send_to_device(position, accelerator.device))
