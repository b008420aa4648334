"""Ignite's trainer for truncated backpropagation through time, corrected: change the import.

With default arguments it computes the same as
`ignite.contrib.engines.create_supervised_tbptt_trainer`, to the bit.

Shapes: `T` steps, `B` lanes, `C` outputs, `N` steps times lanes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from ignite.engine import Engine, EventEnum, Events
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, DataError, listed
from throughtime.integrations._ignite_step import OptimizerStep
from throughtime.state import map_tensors, named_tensors

Batch: TypeAlias = Any  # a nesting of tensors and anything else; `_count_steps` checks it
LossFn: TypeAlias = Callable[[Any, Any], Tensor]
Resets: TypeAlias = str | Callable[[Batch], Tensor] | None


class Tbptt_Events(EventEnum):  # noqa: N801  # the name that scripts import
    """Fired by the trainer around every chunk; filters count the chunks of the run.

    Example:
        >>> from throughtime.integrations.ignite import Tbptt_Events
        >>> Tbptt_Events.TIME_ITERATION_COMPLETED(every=100).filter is not None
        True
    """

    TIME_ITERATION_STARTED = "time_iteration_started"
    TIME_ITERATION_COMPLETED = "time_iteration_completed"


def _detach_hidden(hidden: Any) -> Any:
    """The state without its graph."""
    return tt.state.detach(hidden)


def prepare_batch(
    batch: Batch, device: str | torch.device | None = None, non_blocking: bool = False
) -> tuple[Batch, Batch]:
    """Inputs and targets on the device, from a pair or from a mapping of `inputs` and `targets`.

    Raises:
        DataError: a batch of another form, for which the user has to write a function.
    """
    if isinstance(batch, Mapping) and set(batch) == {"inputs", "targets"}:
        pair = batch["inputs"], batch["targets"]
    elif isinstance(batch, Sequence) and len(batch) == 2:
        pair = batch[0], batch[1]
    else:
        got = (
            f"the keys {listed(batch, quoted=True)}"
            if isinstance(batch, Mapping)
            else f"{type(batch).__name__} of {len(named_tensors(batch))} tensors"
        )
        raise DataError(
            f"a batch is a {got}, expected a pair (inputs, targets) or a mapping of 'inputs' and"
            " 'targets' alone. Write which is which: prepare_batch=lambda batch, device,"
            " non_blocking: (batch['x'].to(device), batch['y'].to(device))"
        )

    if device is None:
        return pair
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), pair)


def create_supervised_tbptt_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    tbtt_step: int,
    dim: int = 0,
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., tuple[Any, Any]] = prepare_batch,
    *,
    static: Sequence[str] = (),
    carry: bool = False,
    resets: Resets = None,
    horizon: int | None = None,
    max_norm: float | None = None,
    amp_mode: Literal["amp"] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    weighted: bool = False,
) -> Engine:
    """An Ignite engine that trains on chunks of `tbtt_step` steps of each batch.

    Takes the place of the function of the same name in `ignite.contrib.engines`, and makes an
    update after each chunk. For recordings longer than a batch can hold, or for another policy than
    truncation, use `StreamTrainer`.

    Args:
        model: maps `x` to `(outputs, hidden)`, and `(x, hidden)` as well; any nested `hidden`, see
            `tt.state`. One made by `tt.carry` runs as with `horizon`.
        optimizer: any.
        loss_fn: of `(outputs, targets)` of a chunk. With `resets` or `horizon` it is as for
            `tt.updates`: a mean over N rows.
        tbtt_step: steps of a chunk; the last one of a batch may be shorter.
        dim: the time dimension of the batches.
        device: batches are moved there; the model stays where it is.
        non_blocking: copies to the device need not be waited for.
        prepare_batch: of `(chunk, device, non_blocking)`, gives `(x, y)`. The default takes pairs
            and mappings of `inputs` and `targets`.
        static: paths of tensors without time, as `"speaker"` or `"0.age"`, that go whole into each
            chunk; all others are cut.
        carry: row i of a batch continues row i of the batch before; every epoch starts anew. The
            state is `trainer.state.hidden`, and `trainer.state_dict()` has it.
        resets: rows whose recording starts with the batch: the batch's key of, or a function
            giving, `(B,)` bool.
        horizon: steps that credit flows back, within the batch, at least `tbtt_step`; default
            `tbtt_step`.
        max_norm: the gradient is clipped to this global norm.
        amp_mode: "amp" runs model and loss under `torch.autocast`.
        scaler: a `torch.amp.GradScaler`; only with `amp_mode`.
        weighted: `state.output` of an iteration is the mean over steps; default: over chunks, a
            short last one counting as any other.

    Returns:
        The engine. Chunks fire `Tbptt_Events`; handlers read the loss of the chunk from
        `state.output` and the number of chunks from `state.time_iteration`. `terminate()` stops
        after the present chunk.

    Raises:
        ConfigError: arguments that contradict each other.
        ModelError: `resets` or `horizon` with a model that cannot be carried. A batch that does not
            fit raises `DataError`.

    Cost: that of the loop by hand; with `horizon` `horizon / tbtt_step` times as much.

    Example:
        >>> import torch
        >>> from throughtime.integrations.ignite import create_supervised_tbptt_trainer
        >>> gru, loss_fn = torch.nn.GRU(3, 1), torch.nn.MSELoss()
        >>> optimizer = torch.optim.SGD(gru.parameters(), lr=0.1)
        >>> trainer = create_supervised_tbptt_trainer(gru, optimizer, loss_fn, 4, carry=True)
        >>> trainer.run([(torch.zeros(10, 2, 3), torch.zeros(10, 2, 1))] * 2).time_iteration
        6

    References: R. J. Williams and J. Peng, Neural Computation 2 (1990).
    """
    step = OptimizerStep(optimizer, max_norm, amp_mode, scaler)
    _check_arguments(tbtt_step, dim, static, carry, resets, horizon)
    prepare = partial(prepare_batch, device=device, non_blocking=non_blocking)
    if resets is not None or horizon is not None or isinstance(model, Carried):
        net = tt.carry(model, batch_first=dim == 1)
        gradient = tt.Truncated(tbtt_step, horizon)
        mode = _UpdatesMode(net, loss_fn, step, prepare, gradient, dim, tuple(static), resets)
    else:
        mode = _ModelMode(model, loss_fn, step, prepare, tbtt_step, dim, tuple(static))
    paths = (*static, resets) if isinstance(resets, str) else tuple(static)
    return _Iteration(
        mode.run, partial(_count_lanes, dim=dim, static=paths), carry, weighted
    ).engine()


def _check_arguments(
    tbtt_step: int,
    dim: int,
    static: Sequence[str],
    carry: bool,
    resets: Resets,
    horizon: int | None,
) -> None:
    faults: list[str] = []
    steps: Any = tbtt_step  # a user's 1e2 is a float
    if not isinstance(steps, int) or steps < 1:
        faults.append(f"tbtt_step={tbtt_step!r}: expected a number of steps, at least 1")
    if isinstance(static, str):
        faults.append(f"static={static!r} is a string, expected several: static=({static!r},)")
    if resets is not None and not carry:
        faults.append(
            "resets without carry=True: without it every row of every batch starts from the initial"
            " state anyway"
        )
    if (resets is not None or horizon is not None) and dim not in (0, 1):
        faults.append(
            f"dim={dim} with resets or horizon: expected 0 for (T, B, ...) or 1 for (B, T, ...)"
        )
    if faults:
        raise ConfigError("; ".join(faults))


class _ChunkResult(NamedTuple):
    """Mean loss of a chunk, the steps it is over (0: none valid), and the state after it."""

    loss: float
    steps: int
    hidden: Any


@dataclass(frozen=True)
class _ModelMode:
    """Calls `model(x)`, then `model(x, hidden)`: credit stays in its chunk; any batch and state."""

    model: nn.Module
    loss_fn: LossFn
    step: OptimizerStep
    prepare: Callable[[Batch], tuple[Any, Any]]
    steps: int
    dim: int
    static: tuple[str, ...]

    def run(self, batch: Batch, hidden: Any, begin: Callable[[], None]) -> Iterator[_ChunkResult]:
        """Train on chunk after chunk, from `hidden`; `begin` is called before each forward pass."""
        start = 0
        for chunk, steps in _cut(batch, self.steps, self.dim, self.static):
            x, y = self.prepare(chunk)
            begin()
            self.model.train()
            self.step.optimizer.zero_grad()
            hidden = None if hidden is None else _detach_hidden(hidden)
            with self.step.autocast(self.model):
                outputs, hidden = self.model(x) if hidden is None else self.model(x, hidden)
                loss = self.loss_fn(outputs, y)
            self.step.backward(loss)
            self.step.check_finite(loss, start, start + steps)
            self.step.clip()
            self.step.step()
            yield _ChunkResult(loss.item(), steps, hidden)
            start += steps


@dataclass(frozen=True)
class _UpdatesMode:
    """Runs `tt.updates` over the chunks: credit crosses them, and rows are reset on request."""

    net: Carried
    loss_fn: LossFn
    step: OptimizerStep
    prepare: Callable[[Batch], tuple[Any, Any]]
    gradient: tt.Truncated
    dim: int
    static: tuple[str, ...]
    resets: Resets

    def run(self, batch: Batch, hidden: Any, begin: Callable[[], None]) -> Iterator[_ChunkResult]:
        """As `_ModelMode.run`."""
        chunks = list(self._chunks(batch))
        options: dict[str, Any] = {"gradient": self.gradient, "scaler": self.step.scaler}
        updates = tt.updates(self.net, chunks, self.loss_fn, state=hidden, **options)
        for _ in chunks:
            begin()
            self.net.train()
            update = self.step.next_update(updates, self.net)
            if update is None:  # no valid target is left
                yield _ChunkResult(math.nan, 0, updates.state)
                return
            self.step.clip()
            self.step.step()
            yield _ChunkResult(update.loss.item(), update.steps, updates.state)

    def _chunks(self, batch: Batch) -> Iterator[Chunk]:
        """The batch as adjacent chunks, time first."""
        first_resets = self._first_resets(batch)
        if isinstance(self.resets, str):
            batch = {key: entry for key, entry in batch.items() if key != self.resets}
        start = 0
        for part, steps in _cut(batch, self.gradient.stride, self.dim, self.static):
            x, y = (self._time_first(tensor) for tensor in self.prepare(part))
            resets = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
            if first_resets is not None and start == 0:
                resets[0] = _check_rows(first_resets, x.shape[1])
            position = torch.arange(start, start + steps, device=x.device)
            position = position.unsqueeze(1).expand(x.shape[:2])
            yield Chunk.from_tensors(x, y, resets=resets, position=position)
            start += steps

    def _time_first(self, part: Any) -> Tensor:
        if not isinstance(part, Tensor) or part.dim() < 2:
            got = f"{tuple(part.shape)} tensor" if isinstance(part, Tensor) else type(part).__name__
            raise DataError(
                f"prepare_batch gave a {got}, expected a tensor (T, B, ...), or (B, T, ...) with"
                " dim=1: resets and horizon need lanes. Without both of them any nesting will do"
            )
        return part.transpose(0, 1) if self.dim == 1 else part

    def _first_resets(self, batch: Batch) -> Any:
        """The rows whose recording starts with this batch, or None."""
        if self.resets is None or callable(self.resets):
            return None if self.resets is None else self.resets(batch)
        if isinstance(batch, Mapping) and self.resets in batch:
            return batch[self.resets]
        keys = list(batch) if isinstance(batch, Mapping) else None
        raise DataError(
            f"resets={self.resets!r} names no entry of the batch, which has"
            f" {f'a {type(batch).__name__}' if keys is None else f'the keys {keys}'}: give the key,"
            " or a function, resets=lambda batch: ..."
        )


def _check_rows(rows: Any, lanes: int) -> Tensor:
    if isinstance(rows, Tensor) and rows.dtype == torch.bool and rows.shape == (lanes,):
        return rows
    is_tensor = isinstance(rows, Tensor)
    got = f"{rows.dtype} of shape {tuple(rows.shape)}" if is_tensor else type(rows).__name__
    raise DataError(
        f"resets gave {got}, expected torch.bool of shape ({lanes},): true for each row whose"
        " recording starts here"
    )


@dataclass
class _Iteration:
    """The process function of the engine; `state.hidden` of the engine is what it carries."""

    run: Callable[[Batch, Any, Callable[[], None]], Iterator[_ChunkResult]]
    count_lanes: Callable[[Batch], int | None]
    carry: bool
    weighted: bool
    carried: Any = None  # the `state.hidden` that this object set
    carried_lanes: int | None = None

    def __call__(self, engine: Engine, batch: Batch) -> float | None:
        losses: list[float] = []
        steps: list[int] = []
        state: Any = engine.state
        begin = partial(self._begin_chunk, engine)
        for result in self.run(batch, self._entering_state(state, batch), begin):
            if self.carry:
                hidden = result.hidden
                self.carried = state.hidden = None if hidden is None else _detach_hidden(hidden)
            if not result.steps:
                break
            state.output = result.loss
            losses.append(result.loss)
            steps.append(result.steps)
            engine.fire_event(Tbptt_Events.TIME_ITERATION_COMPLETED)
            if engine.should_terminate or engine.should_terminate_single_epoch:
                break
        if not losses:
            return None
        return fmean(losses, steps) if self.weighted else sum(losses) / len(losses)

    @staticmethod
    def _begin_chunk(engine: Engine) -> None:
        state: Any = engine.state
        state.time_iteration += 1
        engine.fire_event(Tbptt_Events.TIME_ITERATION_STARTED)

    def _entering_state(self, state: Any, batch: Batch) -> Any:
        if not self.carry:
            return None
        lanes = self.count_lanes(batch)
        is_own = state.hidden is not None and state.hidden is self.carried
        if is_own and lanes != self.carried_lanes:
            raise DataError(
                f"the batch has {lanes} lanes, the carried state {self.carried_lanes}: with"
                " carry=True row i continues row i of the batch before it, so all batches of an"
                " epoch need the same rows. Leave out the last one, DataLoader(...,"
                " drop_last=True)"
            )
        self.carried_lanes = lanes
        return state.hidden

    def _start_epoch(self, engine: Engine) -> None:
        """Forget the state, unless a checkpoint brought it and resumes within the epoch."""
        state: Any = engine.state
        if state.iteration == 0:
            state.time_iteration = 0
        begins = state.epoch_length is not None and state.iteration % state.epoch_length == 0
        if self.carry and (begins or state.hidden is self.carried):
            state.hidden = None

    def engine(self) -> Engine:
        """The engine, with events that filters can count."""
        engine = Engine(self)
        counters: dict[Any, str] = dict.fromkeys(Tbptt_Events, "time_iteration")
        engine.register_events(*Tbptt_Events, event_to_attr=counters)
        if self.carry:
            state: Any = engine.state
            state.hidden = None
            engine.state_dict_user_keys.append("hidden")
        engine.add_event_handler(Events.EPOCH_STARTED, self._start_epoch)
        return engine


# Batches of any nesting. Every tensor is cut along `dim`, where all must have equally many steps,
# except those under a path in `static`: these, and leaves that are no tensors, go whole into every
# chunk. A path joins keys, field names and positions by dots: "1", "speaker", "0.meta.age".


def _is_static(path: str, static: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in static)


def _count_steps(batch: Batch, dim: int, static: Sequence[str]) -> int:
    """The number of steps of a batch.

    Raises:
        DataError: no tensor, one without the dimension, or different numbers of steps.
    """
    tensors = dict(named_tensors(batch))
    unknown = [name for name in static if not any(_is_static(path, (name,)) for path in tensors)]
    lengths = {
        tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else None
        for path, tensor in tensors.items()
        if not _is_static(path, static)
    }
    if len(lengths) == 1 and not unknown and (steps := next(iter(lengths))):
        return steps
    shapes = ", ".join(f"'{path}' {tuple(tensor.shape)}" for path, tensor in tensors.items())
    raise DataError(
        f"the batch has the tensors {shapes or 'none'}; along dim={dim} they have"
        f" {sorted(lengths, key=str)} steps, expected one number above 0 for all but"
        f" static={tuple(static)}{f', of which {unknown} are missing' if unknown else ''}. Pad or"
        " cut them to one length; name those without time:"
        " create_supervised_tbptt_trainer(..., static=('path', ...))"
    )


def _count_lanes(batch: Batch, dim: int, static: Sequence[str]) -> int | None:
    """The first dimension besides time of the first tensor with time; None if it has no other."""
    first = next(t for path, t in named_tensors(batch) if not _is_static(path, static))
    return next((size for i, size in enumerate(first.shape) if i != dim % first.dim()), None)


def _cut(batch: Batch, steps: int, dim: int, static: Sequence[str]) -> Iterator[tuple[Batch, int]]:
    """Chunks of at most `steps` steps in the nesting of the batch, and the steps of each.

    A batch that is a list becomes a tuple.
    """
    total = _count_steps(batch, dim, static)
    batch = tuple(batch) if isinstance(batch, list) else batch
    whole = [_is_static(path, static) for path, _ in named_tensors(batch)]
    for start in range(0, total, steps):
        count = min(steps, total - start)
        static_flags = iter(whole)

        def narrow(
            t: Tensor, flags: Iterator[bool] = static_flags, start: int = start, count: int = count
        ) -> Tensor:
            return t if next(flags) else t.narrow(dim, start, count)

        yield map_tensors(narrow, batch), count
