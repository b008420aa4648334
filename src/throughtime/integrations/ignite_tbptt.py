"""Ignite's trainer for truncated backpropagation through time, corrected: change the import.

With default arguments it computes the same as
`ignite.contrib.engines.create_supervised_tbptt_trainer`, to the bit.

Shapes: `T` steps, `B` lanes, `C` outputs, `N` steps times lanes.
"""

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
from throughtime.errors import ConfigError, DataError, listed
from throughtime.integrations._ignite_step import OptimizerStep
from throughtime.state import map_tensors, named_tensors

Batch: TypeAlias = Any  # a nesting of tensors and anything else; `_count_steps` checks it
LossFn: TypeAlias = Callable[[Any, Any], Tensor]


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
    max_norm: float | None = None,
    amp_mode: Literal["amp"] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    weighted: bool = False,
) -> Engine:
    """An Ignite engine that trains on chunks of `tbtt_step` steps of each batch.

    Takes the place of the function of the same name in `ignite.contrib.engines`, and makes an
    update after each chunk. For recordings longer than a batch can hold, resets where a recording
    starts, or credit across chunks, use `StreamTrainer`.

    Args:
        model: maps `x` to `(outputs, hidden)`, and `(x, hidden)` as well; any nested `hidden`, see
            `tt.state`.
        optimizer: any.
        loss_fn: of `(outputs, targets)` of a chunk.
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
        ConfigError: an argument out of its range. A batch that does not fit raises `DataError`.

    Cost: that of the loop by hand.

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
    _check_arguments(model, tbtt_step, static)
    prepare = partial(prepare_batch, device=device, non_blocking=non_blocking)
    chunks = _Chunks(model, loss_fn, step, prepare, tbtt_step, dim, tuple(static))
    return _Iteration(chunks, carry, weighted).engine()


def _check_arguments(model: nn.Module, tbtt_step: int, static: Sequence[str]) -> None:
    steps: Any = tbtt_step  # a user's 1e2 is a float
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"tbtt_step={tbtt_step!r}: expected a number of steps, at least 1")
    if isinstance(static, str):
        raise ConfigError(f"static={static!r} is a string, expected several: static=({static!r},)")
    if isinstance(model, Carried):
        raise ConfigError(
            "the model is made by tt.carry, which needs a stream to know where recordings start:"
            " StreamTrainer(net, optimizer, loss_fn, gradient=tt.Truncated(...)).run(stream),"
            " or give net.module"
        )


class _ChunkResult(NamedTuple):
    """Mean loss of a chunk, the steps it is over, and the state after it."""

    loss: float
    steps: int
    hidden: Any


@dataclass(frozen=True)
class _Chunks:
    """Trains on a batch chunk by chunk; credit stays in its chunk."""

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


@dataclass
class _Iteration:
    """The process function of the engine; `state.hidden` of the engine is what it carries."""

    chunks: _Chunks
    carry: bool
    weighted: bool
    carried: Any = None  # the `state.hidden` that this object set
    carried_lanes: int | None = None

    def __call__(self, engine: Engine, batch: Batch) -> float:
        losses: list[float] = []
        steps: list[int] = []
        state: Any = engine.state
        begin = partial(self._begin_chunk, engine)
        for result in self.chunks.run(batch, self._entering_state(state, batch), begin):
            if self.carry:
                hidden = result.hidden
                self.carried = state.hidden = None if hidden is None else _detach_hidden(hidden)
            state.output = result.loss
            losses.append(result.loss)
            steps.append(result.steps)
            engine.fire_event(Tbptt_Events.TIME_ITERATION_COMPLETED)
            if engine.should_terminate or engine.should_terminate_single_epoch:
                break
        return fmean(losses, steps) if self.weighted else sum(losses) / len(losses)

    @staticmethod
    def _begin_chunk(engine: Engine) -> None:
        state: Any = engine.state
        state.time_iteration += 1
        engine.fire_event(Tbptt_Events.TIME_ITERATION_STARTED)

    def _entering_state(self, state: Any, batch: Batch) -> Any:
        if not self.carry:
            return None
        lanes = _count_lanes(batch, self.chunks.dim, self.chunks.static)
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
