"""Truncated backpropagation through time as Lightning 1.9 had it, on Lightning 2.6.

Lightning's loop over one batch runs once for each split of the batch, with every hook, progress,
clipping and synchronisation. There is no public name for this: hooks get the closure or the step,
and may be overridden without super. If the private names move, the imports below fail; nothing is
trained wrongly.

Shapes: `B` lanes, `T` steps. As in 1.9 batches come lanes first, `(B, T, ...)`.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from throughtime.errors import ConfigError, MissingExtraError, listed

try:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
    from lightning.pytorch.loops.optimization.manual import _ManualOptimization
    from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
    from lightning.pytorch.utilities.memory import recursive_detach
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "throughtime.integrations.lightning needs Lightning: pip install 'throughtime[lightning]'"
    ) from error

Kwargs = OrderedDict[str, Any]


class TBPTTError(ConfigError, MisconfigurationException):
    """A module or a batch that cannot be split.

    `except MisconfigurationException` catches it too, as in Lightning 1.9.
    """


class AttachedModule(pl.LightningModule):
    """A module that changes the Trainer it is attached to."""

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer; attaching one installs what the module needs in it."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        pl.LightningModule.trainer.__set__(self, trainer)
        if trainer is not None:
            self._install(trainer)

    def _install(self, trainer: pl.Trainer) -> None:
        raise NotImplementedError


class TBPTT(AttachedModule):
    """Adds `truncated_bptt_steps`, `tbptt_split_batch` and `hiddens` to a LightningModule.

    For modules written for Lightning 1.9; name it before any other base class. New modules use
    `StreamModule`, which carries the state across batches.

    With `truncated_bptt_steps = k > 0` every batch is split into `k` steps at a time.
    `training_step(self, batch, batch_idx, hiddens)` runs one split and returns `{"loss": ...,
    "hiddens": ...}`. `hiddens` is `None` on the first split of a batch, and then the one that the
    split before returned, detached. The optimizer steps once per split: `global_step` and
    `max_steps` count splits; `batch_idx`, `on_train_batch_*` and schedulers with `interval="step"`
    count batches. With `automatic_optimization = False`, `training_step` is called once per split
    and the rest is yours.

    With `accumulate_grad_batches = n > 1` the optimizer steps once per `n` batches, on the mean of
    all their splits, each weighted by its share of the steps of its batch. (1.9 lost the gradients
    of all splits of a batch but the last.)

    Attributes:
        truncated_bptt_steps: steps per split; 0 turns splitting off.
        tbptt_whole: keys (or positions) of the items of a batch that every split gets whole
            although they look splittable.

    Cost: the graph of one split at a time; a forward, a backward and an optimizer step per split.

    Example:
        >>> import torch
        >>> from throughtime.integrations.lightning import LightningModule
        >>> batch = {"x": torch.zeros(2, 5, 1), "y": torch.zeros(2, 5), "name": ["a", "b"]}
        >>> splits = LightningModule().tbptt_split_batch(batch, 2)
        >>> [(split["x"].shape[1], split["y"].shape[1], split["name"]) for split in splits]
        [(2, 2, ['a', 'b']), (2, 2, ['a', 'b']), (1, 1, ['a', 'b'])]

    References:
        Williams, Peng. An efficient gradient-based algorithm for on-line training of recurrent
        network trajectories. Neural Computation 2(4), 1990. Here with k1 = k2 =
        `truncated_bptt_steps`.
    """

    truncated_bptt_steps: int = 0
    tbptt_whole: Collection[int | str] = ()

    def _install(self, trainer: pl.Trainer) -> None:
        """Replace the trainer's loops over a batch; their progress stays as it is."""
        loop = trainer.fit_loop.epoch_loop
        for name, kind in _SPLIT_LOOPS.items():
            old = getattr(loop, name)
            if not isinstance(old, kind):
                new = kind(old.trainer)
                vars(new).update(vars(old))
                setattr(loop, name, new)

    def tbptt_split_batch(self, batch: Any, split_size: int) -> list[Any]:
        """The splits of a batch, in order; override it for batches of another layout.

        Split along time are tensors of two or more dimensions, `(B, T, ...)`, lists of `B` rows
        that each have `T` entries (tensors or lists), and mappings of these. Passed whole are
        numbers, strings, 1-D tensors `(B,)`, all other objects, and the items named in
        `tbptt_whole`. A nested `[x, y]` looks like two rows: override this for one.

        Args:
            batch: a tensor, a mapping, or a tuple or list of items.
            split_size: steps per split; the last split has the rest.

        Returns:
            Batches: a dict for a mapping, the same type for a namedtuple, a tensor for a tensor,
                else a list. Tensors are views.

        Raises:
            TBPTTError: nothing in the batch has a time dimension, or two items have different
                numbers of steps.
        """
        starts = range(0, _count_steps(batch, self.tbptt_whole), split_size)
        return [_slice_batch(batch, slice(t, t + split_size), self.tbptt_whole) for t in starts]

    def tbptt_split_steps(self, batch: Any, parts: Sequence[Any]) -> list[int]:
        """The steps of each split, its weight when gradients are accumulated.

        Override it along with `tbptt_split_batch`.

        Raises:
            TBPTTError: the splits do not add up to the batch by the default layout.
        """
        steps = [_count_steps(part, self.tbptt_whole) for part in parts]
        expected = _count_steps(batch, self.tbptt_whole)
        if sum(steps) != expected:
            raise TBPTTError(
                f"splits of {steps} steps in dimension 1 do not add up to the {expected} of the"
                " batch, and accumulated gradients are weighted by steps. Override"
                " tbptt_split_steps(self, batch, parts) and return the steps of each split."
            )
        return steps


class LightningModule(TBPTT, pl.LightningModule):
    """Lightning's module with the truncated backpropagation of 1.9, for an old module's import.

    Change `from pytorch_lightning import LightningModule` to this class, and a module of 1.9 with
    `truncated_bptt_steps` trains as before. `TBPTT` describes what it adds.

    Example:
        >>> import torch
        >>> from throughtime.integrations.lightning import LightningModule
        >>> class Old(LightningModule):
        ...     truncated_bptt_steps = 2
        >>> [split.shape[1] for split in Old().tbptt_split_batch(torch.zeros(4, 5, 1), 2)]
        [2, 2, 1]
    """


def _count_steps(batch: Any, whole: Collection[int | str]) -> int:
    """The number of steps of a batch; items named in `whole` do not count."""
    items = dict(_items(batch))
    if unknown := [name for name in whole if name not in items]:
        raise TBPTTError(
            f"tbptt_whole names {unknown}, the batch has {listed(items, quoted=True)}. Name keys of"
            " a mapping, or positions of a list."
        )
    lengths = {name: _lengths(item) for name, item in items.items() if name not in whole}
    timed = {name: sorted(several) for name, several in lengths.items() if several}
    advice = "Override tbptt_split_batch(self, batch, split_size) for another layout."
    if not timed:
        raise TBPTTError(
            f"no time dimension in a {type(batch).__name__}: expected a tensor (B, T, ...) or a"
            f" list of B rows, alone or in a mapping, tuple or list. {advice}"
        )
    counts = {length for several in timed.values() for length in several}
    if len(counts) > 1 or counts == {0}:
        raise TBPTTError(
            f"the time dimension is ambiguous, steps by item: {timed}; expected one number, above"
            f" 0. If an item has no time, name it: tbptt_whole = ({list(timed)[-1]!r},). {advice}"
        )
    return counts.pop()


def _slice_batch(batch: Any, steps: slice, whole: Collection[int | str]) -> Any:
    """Some steps of a batch, in the types that `tbptt_split_batch` returns."""
    if isinstance(batch, Tensor):
        return _slice_item(batch, steps)
    parts = {k: item if k in whole else _slice_item(item, steps) for k, item in _items(batch)}
    if isinstance(batch, Mapping):
        return parts
    return type(batch)(*parts.values()) if hasattr(batch, "_fields") else list(parts.values())


def _items(batch: Any) -> list[tuple[int | str, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    return list(enumerate(batch)) if _is_list(batch) else [(0, batch)]


def _is_list(item: Any) -> bool:
    return isinstance(item, Sequence) and not isinstance(item, str | bytes)


def _has_rows(item: Any) -> bool:
    """Whether an item is a list with one row for each lane, each of which can be sliced."""
    return (
        _is_list(item)
        and len(item) > 0
        and all(row.dim() > 0 if isinstance(row, Tensor) else _is_list(row) for row in item)
    )


def _lengths(item: Any) -> set[int]:
    """The numbers of steps in an item; none for an item without time."""
    if isinstance(item, Tensor):
        return {item.shape[1]} if item.dim() > 1 else set()
    if isinstance(item, Mapping):
        return {length for part in item.values() for length in _lengths(part)}
    if not _has_rows(item):
        return set()
    if len(shapes := {tuple(row.shape[1:]) for row in item if isinstance(row, Tensor)}) > 1:
        raise TBPTTError(
            f"a list of tensors that differ by more than their steps, {sorted(shapes)}, is no list"
            " of rows; a nested batch, or one of several dataloaders? Override"
            " tbptt_split_batch(self, batch, split_size)."
        )
    return {len(row) for row in item}


def _slice_item(item: Any, steps: slice) -> Any:
    if isinstance(item, Tensor):
        return item[:, steps] if item.dim() > 1 else item
    if isinstance(item, Mapping):
        return {name: _slice_item(part, steps) for name, part in item.items()}
    return [row[steps] for row in item] if _has_rows(item) else item


class _Split(NamedTuple):
    """One split of a batch: whether it is the first or last of it, and its share of the steps."""

    batch: Any
    first: bool = True
    last: bool = True
    share: float = 1.0


class _AutomaticSplits(_AutomaticOptimization):
    _split = _Split(None)

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Kwargs) -> Any:
        run = super().run

        def run_split(split: _Split, kwargs: Kwargs) -> dict[str, Any]:
            self._split = split
            return run(optimizer, batch_idx, kwargs)

        return _run_splits(self.trainer, kwargs, run_split)

    def _training_step(self, kwargs: Kwargs) -> ClosureResult:
        result = super()._training_step(kwargs)
        if result.closure_loss is not None and self._split.share < 1:
            result.closure_loss = result.closure_loss * self._split.share
        return result

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        return super()._make_zero_grad_fn(batch_idx, optimizer) if self._split.first else None

    def _optimizer_step(
        self, batch_idx: int, train_step_and_backward_closure: Callable[[], Any]
    ) -> None:
        if self._split.last:
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        else:
            with _block_parallel_sync_behavior(self.trainer.strategy):
                train_step_and_backward_closure()


class _ManualSplits(_ManualOptimization):
    def run(self, kwargs: Kwargs) -> Any:
        run = super().run
        return _run_splits(self.trainer, kwargs, lambda _, kwargs: run(kwargs))


_SPLIT_LOOPS: dict[str, Any] = {
    "automatic_optimization": _AutomaticSplits,
    "manual_optimization": _ManualSplits,
}


def _run_splits(
    trainer: pl.Trainer, kwargs: Kwargs, run_split: Callable[[_Split, Kwargs], dict[str, Any]]
) -> Any:
    """Run the splits of a batch in order; the outputs, or the one output, as in 1.9."""
    module = trainer.lightning_module
    if not isinstance(module, TBPTT):
        return run_split(_Split(None), kwargs)
    if module.truncated_bptt_steps <= 0:
        output = run_split(_Split(None), kwargs)
        if "hiddens" in output:
            raise TBPTTError(
                'training_step returned "hiddens", and truncated_bptt_steps is 0: set it to the'
                " steps of a split, or return no hiddens"
            )
        return output
    # Nothing public says that a batch continues. In the first batch of an epoch, a log from another
    # hook than the last one would drop the values logged in the splits before.
    log = trainer._logger_connector
    outputs, hiddens, first_batch = [], None, log._first_loop_iter
    for split in _splits(trainer, module, kwargs):
        output = run_split(split, OrderedDict(kwargs, batch=split.batch, hiddens=hiddens))
        if "hiddens" not in output:
            raise TBPTTError(
                f'training_step returned no "hiddens", got {sorted(output) or None}, and'
                ' truncated_bptt_steps is on: return {"loss": loss, "hiddens": hiddens}; or set'
                " truncated_bptt_steps = 0"
            )
        hiddens = recursive_detach(output.pop("hiddens"))
        outputs.append(output)
        log._first_loop_iter = False
        if 0 <= trainer.max_steps <= trainer.global_step:
            break
    log._first_loop_iter = first_batch
    return outputs[0] if len(outputs) == 1 else outputs


def _splits(trainer: pl.Trainer, module: TBPTT, kwargs: Kwargs) -> list[_Split]:
    """The splits of a batch, after all checks that are possible before the first one runs."""
    signature = inspect.signature(module.training_step)
    try:
        signature.bind(kwargs["batch"], kwargs["batch_idx"], None)
    except (TypeError, KeyError):
        raise TBPTTError(
            f"truncated_bptt_steps is {module.truncated_bptt_steps}, and training_step{signature}"
            " takes no batch, batch_idx and hiddens: def training_step(self, batch, batch_idx,"
            " hiddens)"
        ) from None
    parts = module.tbptt_split_batch(kwargs["batch"], module.truncated_bptt_steps)
    if len(parts) == 0:
        raise TBPTTError(
            "tbptt_split_batch returned no splits, expected at least one: return [batch] for a"
            " batch not to be split"
        )
    if trainer.accumulate_grad_batches == 1:
        return [_Split(part) for part in parts]
    if trainer.strategy.handles_gradient_accumulation:
        raise TBPTTError(
            f"{type(trainer.strategy).__name__} counts every split's backward as a batch: it would"
            f" accumulate {trainer.accumulate_grad_batches} splits. Use accumulate_grad_batches=1,"
            " or strategy='ddp'."
        )
    lengths = module.tbptt_split_steps(kwargs["batch"], parts)
    if len(lengths) != len(parts) or min(lengths) < 0 or sum(lengths) == 0:
        raise TBPTTError(
            f"tbptt_split_steps returned {list(lengths)} for {len(parts)} splits; expected the"
            " steps of each, by which gradients are weighted"
        )
    return [
        _Split(part, i == 0, i == len(parts) - 1, length / sum(lengths))
        for i, (length, part) in enumerate(zip(lengths, parts, strict=True))
    ]
