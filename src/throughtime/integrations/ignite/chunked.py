"""The two ways in which Ignite's trainer plays a batch: chunk by chunk as it always did, or in
windows of `tt.updates`.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.errors import DataError
from throughtime.integrations.ignite.batches import Batch, pieces
from throughtime.integrations.ignite.stepping import Stepping, device_of

Prepare = Callable[[Batch], tuple[Any, Any]]
LossFn = Callable[[Any, Any], Tensor]
Resets = str | Callable[[Batch], Tensor] | None


class Played(NamedTuple):
    """What came of one chunk: its mean loss, the steps behind it (0: none counted), and the state after it."""

    loss: float
    steps: int
    hidden: Any


class Way(Protocol):
    """How a batch is played: `begin` is called before each forward pass."""

    def play(self, batch: Batch, hidden: Any, begin: Callable[[], None]) -> Iterator[Played]:
        """Trains on chunk after chunk, beginning with the state `hidden`, or from the start where it is `None`."""
        ...


@dataclass(frozen=True)
class Plain:
    """`model(x)`, then `model(x, hidden)`: each chunk sees itself; any batch, any state."""

    model: nn.Module
    loss_fn: LossFn
    stepping: Stepping
    prepare: Prepare
    steps: int
    dim: int
    static: tuple[str, ...]

    def play(self, batch: Batch, hidden: Any, begin: Callable[[], None]) -> Iterator[Played]:
        for piece, steps in pieces(batch, self.steps, self.dim, self.static):
            x, y = self.prepare(piece)
            begin()
            self.model.train()
            self.stepping.optimizer.zero_grad()
            hidden = None if hidden is None else tt.state.detach(hidden)
            with self.stepping.autocast(device_of(self.model)):
                outputs, hidden = self.model(x) if hidden is None else self.model(x, hidden)
                loss = self.loss_fn(outputs, y)
            self.stepping.backward(loss)
            self.stepping.clip()
            self.stepping.step()
            yield Played(loss.item(), steps, hidden)


@dataclass(frozen=True)
class Windowed:
    """`tt.updates` over the chunks of the batch: credit flows back over chunks, and rows start anew where they are told to."""

    net: tt.Carried
    loss_fn: LossFn
    stepping: Stepping
    prepare: Prepare
    gradient: tt.Truncated
    dim: int
    static: tuple[str, ...]
    resets: Resets

    def play(self, batch: Batch, hidden: Any, begin: Callable[[], None]) -> Iterator[Played]:
        chunks = list(self._chunks(batch))
        updates = tt.updates(
            self.net,
            chunks,
            self.loss_fn,
            gradient=self.gradient,
            state=hidden,
            scaler=self.stepping.scaler,
        )
        for _ in chunks:
            begin()
            self.net.train()
            self.stepping.optimizer.zero_grad()
            with self.stepping.autocast(device_of(self.net)):
                update = next(updates, None)
            if update is None:  # the rest has no target that counts
                yield Played(math.nan, 0, updates.state)
                return
            self.stepping.clip()
            self.stepping.step()
            yield Played(update.loss.item(), update.steps, updates.state)

    def _chunks(self, batch: Batch) -> Iterator[tt.Chunk]:
        """The batch as adjacent chunks, time first."""
        fresh = self._fresh(batch)
        if isinstance(self.resets, str):
            batch = {key: entry for key, entry in batch.items() if key != self.resets}
        start = 0
        for piece, steps in pieces(batch, self.gradient.stride, self.dim, self.static):
            x, y = (self._time_first(part) for part in self.prepare(piece))
            resets = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
            if fresh is not None and start == 0:
                _check_rows(fresh, x.shape[1])
                resets[0] = fresh
            position = (
                torch.arange(start, start + steps, device=x.device).unsqueeze(1).expand(x.shape[:2])
            )
            yield tt.Chunk.from_tensors(x, y, resets=resets, position=position)
            start += steps

    def _time_first(self, part: Any) -> Tensor:
        if not isinstance(part, Tensor) or part.dim() < 2:
            got = f"{tuple(part.shape)} tensor" if isinstance(part, Tensor) else type(part).__name__
            raise DataError(
                f"prepare_batch gave a {got}, expected a tensor (T, B, ...), or (B, T, ...) with"
                " dim=1: resets and horizon need lanes. Without both of them any nesting will do"
            )
        return part.transpose(0, 1) if self.dim == 1 else part

    def _fresh(self, batch: Batch) -> Any:
        """The rows whose recording starts with this batch; `None` where nobody says."""
        if self.resets is None or callable(self.resets):
            return None if self.resets is None else self.resets(batch)
        if not isinstance(batch, Mapping) or self.resets not in batch:
            held = (
                f"the keys {list(batch)}"
                if isinstance(batch, Mapping)
                else f"a {type(batch).__name__}"
            )
            raise DataError(
                f"resets={self.resets!r} names no entry of the batch, which has {held}: give the"
                " key, or a function, resets=lambda batch: ..."
            )
        return batch[self.resets]


def _check_rows(fresh: Any, lanes: int) -> None:
    if not isinstance(fresh, Tensor) or fresh.dtype != torch.bool or fresh.shape != (lanes,):
        got = (
            f"{fresh.dtype} of shape {tuple(fresh.shape)}"
            if isinstance(fresh, Tensor)
            else type(fresh).__name__
        )
        raise DataError(
            f"resets gave {got}, expected torch.bool of shape ({lanes},): true for each row whose"
            " recording starts here"
        )
