"""Several ranks training one net: what they agree on, and the sum of their gradients.

    g = sum over ranks of w_r g_r / sum over ranks of w_r,        w_r: the valid steps of rank r

so that ranks give the gradient of one that plays all their lanes, and no DistributedDataParallel is
needed. Each rank delivers its own `.grad` first, whatever the policy did to find it; then one
message adds up the weights w_r, and one the gradients w_r g_r. A rank without a valid step takes
part with w_r = 0. All of it is `torch.distributed` on the default group.

Weights that `fully_shard` spread over the ranks are whole on each of them while an update is made,
and so is the gradient, for every policy; between updates they, the gradient and the state of the
optimizer are spread again.

Shapes: `B` lanes of one rank.
"""

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn

from throughtime import state as trees
from throughtime.carry.carried import device_of, refuse_wrappers
from throughtime.errors import DataError, ModelError, RunError
from throughtime.gradient import Update
from throughtime.state import State
from throughtime.stream import Stream

if TYPE_CHECKING:  # the import takes longer than all of throughtime
    from torch.distributed.fsdp import FSDPModule


T = TypeVar("T")
_COUNTS = torch.float64  # float32 does not hold the steps of a day of audio


class RankError(RunError):
    """Ranks that differ, or another one that failed or has gone.

    What this rank itself did is right.
    """


def differing_keys(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """The keys whose values differ, in order; a key that one of them lacks is among them."""
    return [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]


@dataclass(frozen=True)
class Ranks:
    """This rank among the others.

    `device` is where messages are put together, `shards` are the parts of the net that are spread
    out.
    """

    rank: int
    count: int
    device: torch.device
    shards: tuple["FSDPModule", ...] = ()

    @contextmanager
    def unsharded(self, net: nn.Module) -> Generator[None]:
        """Inside it the weights of the net are whole and plain; all ranks must enter it.

        What is added to their `.grad` there is spread out after it.
        """
        if not self.shards:
            yield
            return
        with rank_errors():
            for shard in self.shards:
                # the ranks add up once, not at every backward pass
                shard.set_requires_gradient_sync(False)
                # ranks that reset at other steps make other numbers of forward calls
                shard.set_reshard_after_forward(False)
                shard.set_reshard_after_backward(False)
                # a forward call outside may have left weights from before the last step
                shard.reshard()
                shard.unshard()
        try:
            yield
        finally:
            grads = {name: weight.grad for name, weight in net.named_parameters()}
            for weight in net.parameters():
                weight.grad = None
            for shard in self.shards:
                shard.reshard()
                shard.set_requires_gradient_sync(True)
                shard.set_reshard_after_backward(True)
            for name, weight in net.named_parameters():
                _spread(weight, grads[name])

    def total(self, values: Sequence[float]) -> list[float]:
        """Of each value over the ranks."""
        summed = torch.tensor(values, dtype=_COUNTS, device=self.device)
        with rank_errors():
            distributed.all_reduce(summed)
        return summed.tolist()

    def gather(self, value: T) -> list[T]:
        """The value of each rank, on all ranks; it is pickled."""
        everyone: list[Any] = [None] * self.count
        with rank_errors():
            distributed.all_gather_object(everyone, value)
        return everyone

    def mean(self, value: float) -> float:
        """Over the ranks."""
        return self.total([value])[0] / self.count

    def check_equal(
        self, weights: Mapping[str, Tensor], plan: Mapping[str, object] | None = None
    ) -> None:
        """Refuses to train what is not one net, or not on one plan of who plays what.

        Args:
            weights: by name.
            plan: what must be the same everywhere: recordings, lanes, seed, place, policy; `None`
                after an update, which must leave the same weights everywhere.

        Raises:
            RankError: something differs between ranks; it is named.
        """
        mine = {f"weight '{name}'": _digest(weight) for name, weight in weights.items()}
        mine |= {key: repr(value) for key, value in (plan or {}).items()}
        everyone = self.gather(mine)
        for rank, other in enumerate(everyone):
            keys = differing_keys(everyone[0], other)
            if keys and keys[0].startswith("weight"):
                has = "has after the first update" if plan is None else "starts with"
                raise RankError(
                    f"rank {rank} {has} other weights than rank 0 ({keys[0]} and"
                    f" {len(keys) - 1} more): their gradients would be added to different nets."
                    " Call torch.manual_seed(...) before the net is made, load and freeze the same"
                    " weights on every rank, and step with the same optimizer, learning rate and"
                    " clipping."
                )
            if keys:
                theirs = "; ".join(
                    f"{key} is {everyone[0].get(key)} there and {other.get(key)} here"
                    for key in keys
                )
                raise RankError(
                    f"rank {rank} would not play its share of the plan of rank 0: {theirs}. Every"
                    " rank makes the same stream, of the same recordings in the same order and the"
                    " same seed, and takes up the same checkpoint."
                )

    def shift_lanes(self, state: State) -> State:
        """For every lane the state of the lane before it, across ranks.

        The first lane of all gets that of the last.
        """
        state = trees.detach(state)
        last = trees.map_leaves(lambda leaf: leaf[-1:].cpu().clone(), state)
        if self.count > 1:
            last = self.gather(last)[self.rank - 1]
        return trees.map_leaves(
            lambda leaf, first: torch.cat([first.to(leaf.device), leaf[:-1]]), state, last
        )

    def reduce_update(self, update: Update, weights: Sequence[Tensor]) -> Update | None:
        """Put the gradient of all ranks into `.grad`, in one message.

        Returns:
            The update of all ranks; None if none of them has a valid step.

        Raises:
            RankError: another rank could not make this update.
            RunError: a gradient is sparse.
        """
        grads = [weight.grad for weight in weights]
        if any(grad is not None and grad.is_sparse for grad in grads):
            self.signal_failure(weights)
            raise RunError(
                "sparse gradients are not added up over ranks; make the layer with sparse=False"
            )
        weight = update.weight
        loss = update.loss.item() * weight if weight else 0.0
        counts, sums = self._add_up([0.0, weight, update.steps, loss], weights, grads)
        failed, everywhere, steps, loss, *owners = counts
        if failed:
            raise RankError(
                f"{failed:.0f} of {self.count} ranks could not make this update; their own output"
                " says why"
            )
        if not everywhere:
            return None
        for parameter, total, ranks in zip(weights, sums, owners, strict=True):
            if ranks:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                torch.div(total, everywhere, out=parameter.grad)
        loss = update.loss.new_tensor(loss / everywhere)
        return replace(update, loss=loss, steps=int(steps), weight=everywhere)

    def signal_failure(self, weights: Sequence[Tensor]) -> None:
        """Tell the others, who wait for this rank's part of an update, that none will come."""
        self._add_up([1.0, 0.0, 0.0, 0.0], weights, [None] * len(weights))

    def _add_up(
        self, counts: Sequence[float], weights: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> tuple[list[float], list[Tensor]]:
        """Sums over the ranks: counts, how many have each gradient, and gradients by counts[1].

        Gradients of all types travel together, in the widest of them, at least float32.
        """
        parts = [
            torch.zeros_like(weight) if grad is None else grad.detach()
            for weight, grad in zip(weights, grads, strict=True)
        ]
        # of the types of all parts, cat takes the widest
        empty = torch.empty(0, dtype=torch.float32, device=self.device)
        flat = torch.cat([empty, *map(torch.flatten, parts)]).mul_(counts[1])
        owners = [grad is not None for grad in grads]
        head = torch.tensor([*counts, *owners], dtype=_COUNTS, device=self.device)
        with rank_errors():
            sent: Any = distributed.all_reduce(head, async_op=True)
            distributed.all_reduce(flat)
            sent.wait()
        sums = zip(flat.split([*map(Tensor.numel, parts)]), parts, strict=True)
        return head.tolist(), [
            (total if part.is_complex() else total.real).view(part.shape) for total, part in sums
        ]


@contextmanager
def rank_errors() -> Generator[None]:
    """A message between ranks; one that nobody answers is told as what it means.

    Raises:
        RankError: another rank has ended, or did not answer before the time limit of the process
            group.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            "another rank did not answer: it has ended, and its own output says why, or it took"
            " longer than the time limit of the process group"
            f" ({str(error).partition(chr(10))[0]}). Start all ranks again from the last"
            " checkpoint: weights, optimizer and, for each rank, updates.load_state_dict(place)"
        ) from error


def ranks_of(net: nn.Module, stream: Stream | None) -> Ranks:
    """The ranks among which a stream is shared out; one where it is not.

    Raises:
        DataError: it is, and there is no process group.
        ModelError: a module of the net is wrapped for several devices, or the net is sharded with
            a precision of its own.
    """
    refuse_wrappers(net)  # tt.carry may have been called before
    shards = shards_of(net)
    device = device_of(net)
    if stream is not None:
        stream._sync_ranks()
    if stream is None or stream._shard.ranks == 1:
        return Ranks(0, 1, device, shards)
    share, group = f"rank {stream._shard.rank} of {stream._shard.ranks}", "in no process group"
    if distributed.is_available() and distributed.is_initialized():
        group = f"rank {distributed.get_rank()} of {distributed.get_world_size()}"
    if share != group:
        raise DataError(
            f"the stream plays {share}, and this process is {group}: recordings would be left out"
            " or played twice, and gradients not added up. Call"
            " torch.distributed.init_process_group(...) first, as torchrun's scripts do, and leave"
            " out rank=, ranks=, or give those of the group"
        )
    return Ranks(stream._shard.rank, stream._shard.ranks, device, shards)


def shards_of(net: nn.Module) -> tuple["FSDPModule", ...]:
    """The modules that `fully_shard` made of those of the net.

    Raises:
        ModelError: one with a MixedPrecisionPolicy, under which gradients are kept elsewhere than
            in `.grad`.
    """
    shards = tuple(
        cast("FSDPModule", module)
        for module in net.modules()
        if any(c.__name__ == "FSDPModule" for c in type(module).__mro__)
    )
    for shard in shards:
        policy = shard._get_fsdp_state()._mp_policy  # there is no public way
        if policy.param_dtype is not None or policy.reduce_dtype is not None:
            raise ModelError(
                f"the net is sharded with {policy}: its gradients would be kept where no policy"
                " finds them. Leave mp_policy out of fully_shard(...), and put the loop under"
                " torch.autocast(...)"
            )
    return shards


def _spread(weight: Tensor, gradient: Tensor | None) -> None:
    """Adds this rank's part of a gradient that is the same on all of them."""
    from torch.distributed.tensor import DTensor, Replicate

    if gradient is None:
        return
    if isinstance(weight, DTensor):
        everywhere = [Replicate() for _ in weight.placements]
        gradient = DTensor.from_local(
            gradient, weight.device_mesh, everywhere, run_check=False
        ).redistribute(placements=weight.placements)
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _digest(weight: Tensor) -> str:
    """Of its bits: sums of numbers differ with the number of threads."""
    # a copy: memory that NumPy has seen can no longer be freed by fully_shard
    values = weight.detach().cpu().flatten().clone()
    return hashlib.blake2b(values.view(torch.uint8).numpy().data, digest_size=8).hexdigest()
