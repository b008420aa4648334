"""Several ranks training one net: what they agree on, and the sum of their gradients.

    g = sum over ranks of w_r g_r / sum over ranks of w_r,        w_r: the valid steps of rank r

so that ranks give the gradient of one that plays all their lanes, and no DistributedDataParallel is
needed. Each rank delivers its own `.grad` first, whatever the policy did to find it; then one
message adds up the weights w_r and the gradients w_r g_r. A rank without a valid step takes part
with w_r = 0. All of it is `torch.distributed` on the default group.

Weights that `fully_shard` spread over the ranks are whole on each of them while an update is made,
and so is the gradient, for every policy; between updates they, the gradient and the state of the
optimizer are spread again.

Shapes: `B` lanes of one rank.
"""

import hashlib
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn

from throughtime import state as trees
from throughtime._device import is_accelerator
from throughtime.carry.carried import device_of, refuse_wrappers
from throughtime.errors import DataError, ModelError, RunError
from throughtime.gradient import Update
from throughtime.kernels.shared_sum import SharedSum
from throughtime.state import State
from throughtime.stream import Stream

if TYPE_CHECKING:  # the import takes longer than all of throughtime
    from torch.distributed.fsdp import FSDPModule


T = TypeVar("T")


class RankError(RunError):
    """Ranks that differ, or another one that failed or has gone.

    What this rank itself did is right.
    """


_SAME_WEIGHTS = (
    "Call torch.manual_seed(...) before the net is made, load and freeze the same weights on every"
    " rank, and step with the same optimizer, learning rate and clipping."
)


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
    _message: list["_Message"] = field(default_factory=list["_Message"], repr=False, compare=False)

    def unsharded(self, net: nn.Module) -> AbstractContextManager[None]:
        """Inside it the weights of the net are whole; all ranks must enter it."""
        return unsharded_weights(net, self.shards) if self.shards else nullcontext()

    def total(self, values: Sequence[float]) -> list[float]:
        """Of each value over the ranks."""
        summed = torch.tensor(values, dtype=torch.float64, device=self.device)
        with rank_errors():
            distributed.all_reduce(summed)
        return summed.tolist()

    def gather(self, value: T) -> list[T]:
        """The value of each rank, on all ranks; it is pickled."""
        everyone: list[Any] = [None] * self.count
        with rank_errors():
            distributed.all_gather_object(everyone, value)
        return everyone

    def mean(self, values: Sequence[float]) -> list[float]:
        """Of each value over the ranks."""
        return [value / self.count for value in self.total(values)]

    def weighted_mean(self, tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
        """The mean of each over the ranks, by their weights; zeros where nobody weighs anything."""
        (everywhere,) = self.total([weight])
        scaled = [tensor * (weight / everywhere if everywhere else 0.0) for tensor in tensors]
        with rank_errors():
            for tensor in scaled:
                distributed.all_reduce(tensor)
        return scaled

    def broadcast(self, value: int) -> int:
        """That of the first rank, for what is drawn at random and must be drawn alike."""
        shared = torch.tensor([value], device=self.device)
        with rank_errors():
            distributed.broadcast(shared, src=0)
        return int(shared)

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
        mine = {
            **{f"weight '{name}'": _digest(w) for name, w in weights.items()},
            **{key: repr(value) for key, value in (plan or {}).items()},
        }
        everyone = self.gather(mine)
        for rank, other in enumerate(everyone):
            keys = differing_keys(everyone[0], other)
            if keys and keys[0].startswith("weight"):
                has = "has after the first update" if plan is None else "starts with"
                raise RankError(
                    f"rank {rank} {has} other weights than rank 0 ({keys[0]} and"
                    f" {len(keys) - 1} more): their gradients would be added to different nets."
                    f" {_SAME_WEIGHTS}"
                )
            if keys:
                differences = "; ".join(
                    f"{key} is {everyone[0].get(key)} there and {other.get(key)} here"
                    for key in keys
                )
                raise RankError(
                    f"rank {rank} would not play its share of the plan of rank 0:"
                    f" {differences}. Every"
                    " rank makes the same stream, of the same recordings in the same order and the"
                    " same seed, and takes up the same checkpoint."
                )

    def shift_lanes(self, state: State) -> State:
        """For every lane the state of the lane before it, across ranks.

        The first lane of all gets that of the last.
        """
        before = trees.detach(trees.select(state, [-1 % _lanes(state), *range(_lanes(state) - 1)]))
        return before if self.count == 1 else trees.map_leaves(self._from_previous_rank, before)

    def _from_previous_rank(self, leaf: Tensor) -> Tensor:
        """Send the first lane of `leaf` to the next rank and replace it by the previous rank's."""
        last = [torch.empty_like(leaf[:1]) for _ in range(self.count)]
        with rank_errors():
            distributed.all_gather(last, leaf[:1].contiguous())
        return torch.cat([last[self.rank - 1], leaf[1:]])

    def reduce_update(self, update: Update, weights: Sequence[Tensor]) -> Update | None:
        """Put the gradient of all ranks into `.grad`, in one message.

        Returns:
            The update of all ranks; None if none of them has a valid step.

        Raises:
            RankError: another rank could not make this update.
            RunError: a gradient is sparse.
        """
        if any(w.grad is not None and w.grad.is_sparse for w in weights):
            self.signal_failure(weights)
            raise RunError(
                "sparse gradients are not added up over ranks; make the layer with sparse=False"
            )
        weight = update.steps if update.weight is None else update.weight
        loss = update.loss.item() * weight if weight else 0.0
        message = self._message_for(weights)
        message.write([0.0, weight, update.steps, loss], [w.grad for w in weights])
        failed, everywhere, steps, loss = message.reduce()
        if failed:
            raise RankError(
                f"{failed:.0f} of {self.count} ranks could not make this update; their own output"
                " says why"
            )
        if not everywhere:
            return None
        message.read(weights, everywhere)
        return replace(
            update,
            loss=update.loss.new_tensor(loss / everywhere),
            steps=int(steps),
            weight=everywhere,
        )

    def signal_failure(self, weights: Sequence[Tensor]) -> None:
        """Tell the others, who wait for this rank's part of an update, that none will come."""
        message = self._message_for(weights)
        message.write([1.0, 0.0, 0.0, 0.0], [None] * len(weights))
        message.reduce()

    def _message_for(self, weights: Sequence[Tensor]) -> "_Message":
        """That of the last update, if it fits: fresh memory costs more than the sum."""
        layout = [(weight.shape, weight.dtype) for weight in weights]
        if not self._message or self._message[0].layout != layout:
            self._message[:] = [_Message(layout, self.rank, self.count, self.device)]
        return self._message[0]


_FLOATS = Struct("4d")  # the counts of each rank: failed, loss weight, steps, weighted loss
_BITS = Struct("16H")  # their bits, in numbers that every type of a message holds
_PIECES = 16


class _GroupSum:
    """A sum over the ranks of the default group in one of its own messages; see `SharedSum`."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.mine = self.total = torch.zeros(size, dtype=dtype, device=device)

    def reduce(self) -> None:
        """Replace the vector of this rank by the sum."""
        distributed.all_reduce(self.total)


class _Message:
    """What a rank sends for an update: its counts, which gradients it has, and their values.

    All is summed in one call. Gradients of all types travel in the widest of them, at least
    float32, times the loss weight of their rank. Counts stay exact in every type: each rank writes
    their bits where all others write zeros, 16 to a number.

    Args:
        layout: shape and type of each weight.
        rank: of this process.
        ranks: how many there are.
        device: of the gradients.
    """

    def __init__(
        self,
        layout: Sequence[tuple[torch.Size, torch.dtype]],
        rank: int,
        ranks: int,
        device: torch.device,
    ) -> None:
        self.layout, self._rank, self._counts = layout, rank, ranks * _PIECES
        shapes = [(*shape, 2) if dtype.is_complex else shape for shape, dtype in layout]
        sizes = [math.prod(shape) for shape in shapes]
        dtype = torch.float32
        for _, of_weight in layout:
            dtype = torch.promote_types(dtype, of_weight.to_real())
        self._head = self._counts + len(layout)
        size = self._head + sum(sizes)
        with rank_errors():
            shared = None if is_accelerator(device) else SharedSum.open(size, dtype)
        self._sum = shared or _GroupSum(size, dtype, device)
        self._grads, self._means = (
            [
                part.view(shape)
                for part, shape in zip(v[self._head :].split(sizes), shapes, strict=True)
            ]
            for v in (self._sum.mine, self._sum.total)
        )
        self._owners: list[float] = []  # how many ranks have a gradient, for each weight

    def write(self, counts: Sequence[float], grads: Sequence[Tensor | None]) -> None:
        """Write the counts of this rank, and its gradients times its loss weight."""
        head = [0] * self._counts + [grad is not None for grad in grads]
        start = self._rank * _PIECES
        head[start : start + _PIECES] = _BITS.unpack(_FLOATS.pack(*counts))
        self._sum.mine[: self._head].copy_(torch.tensor(head, device="cpu"))
        for part, grad in zip(self._grads, grads, strict=True):
            if grad is None:
                part.zero_()
            else:
                part.copy_(_as_real(grad)).mul_(counts[1])

    def reduce(self) -> list[float]:
        """Send it; returns the sums of the counts of all ranks."""
        with rank_errors():
            self._sum.reduce()
        head = self._sum.total[: self._head].tolist()
        self._owners = head[self._counts :]
        everyone = [
            _FLOATS.unpack(_BITS.pack(*map(int, head[start : start + _PIECES])))
            for start in range(0, self._counts, _PIECES)
        ]
        return [sum(values) for values in zip(*everyone, strict=True)]

    def read(self, weights: Sequence[Tensor], loss_weight: float) -> None:
        """Write the mean gradients, for the loss weight of all ranks, to `.grad`."""
        for weight, part, owners in zip(weights, self._means, self._owners, strict=True):
            if owners:
                if weight.grad is None:
                    weight.grad = torch.empty_like(weight)
                torch.div(part, loss_weight, out=_as_real(weight.grad))


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


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
    if not (distributed.is_available() and distributed.is_initialized()):
        raise DataError(
            f"the stream plays rank {stream._shard.rank} of {stream._shard.ranks}, and there is no"
            " process group over which the ranks could add up what they find: call"
            " torch.distributed.init_process_group(...) first, as torchrun's scripts do"
        )
    group = distributed.get_rank(), distributed.get_world_size()
    if group != (stream._shard.rank, stream._shard.ranks):
        raise DataError(
            f"the stream plays rank {stream._shard.rank} of {stream._shard.ranks}, and this process"
            f" is rank {group[0]} of {group[1]} of the process group: recordings would be left out"
            " or played twice. Leave out rank=, ranks=, or give those of the group"
        )
    return Ranks(stream._shard.rank, stream._shard.ranks, device, shards)


def shards_of(net: nn.Module) -> tuple["FSDPModule", ...]:
    """The modules that `fully_shard` made of those of the net.

    Raises:
        ModelError: one with a MixedPrecisionPolicy, under which gradients are kept elsewhere than
            in `.grad`.
    """
    sharded = [
        module
        for module in net.modules()
        if any(c.__name__ == "FSDPModule" for c in type(module).__mro__)
    ]
    shards = tuple(cast("FSDPModule", module) for module in sharded)
    for shard in shards:
        policy = shard._get_fsdp_state()._mp_policy  # there is no public way
        if policy.param_dtype is not None or policy.reduce_dtype is not None:
            raise ModelError(
                f"the net is sharded with {policy}: its gradients would be kept where no policy"
                " finds them. Leave mp_policy out of fully_shard(...), and put the loop under"
                " torch.autocast(...)"
            )
    return shards


@contextmanager
def unsharded_weights(net: nn.Module, shards: Sequence["FSDPModule"]) -> Generator[None]:
    """Inside it the weights of the net are whole and plain.

    What is added to their `.grad` there is spread out after it.
    """
    with rank_errors():
        for shard in shards:
            shard.set_requires_gradient_sync(
                False, recurse=False
            )  # the ranks add up once, not at every backward pass
            shard.set_reshard_after_forward(
                False, recurse=False
            )  # ranks that reset at other steps make other numbers of forward calls
            shard.set_reshard_after_backward(False, recurse=False)
            # a forward call outside may have left weights from before the last step
            shard.reshard()
            shard.unshard()
    try:
        yield
    finally:
        grads = {name: weight.grad for name, weight in net.named_parameters()}
        for weight in net.parameters():
            weight.grad = None
        for shard in shards:
            shard.reshard()
            shard.set_requires_gradient_sync(True, recurse=False)
            shard.set_reshard_after_backward(True, recurse=False)
        for name, weight in net.named_parameters():
            _spread(weight, grads[name])


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
    values = torch.view_as_real(weight.detach()) if weight.is_complex() else weight.detach()
    values = (
        values.cpu().contiguous().clone()
    )  # memory that NumPy has seen can no longer be freed by fully_shard
    return hashlib.blake2b(values.view(torch.uint8).numpy().data, digest_size=8).hexdigest()


def _lanes(state: State) -> int:
    return trees.lanes(state) or 1
