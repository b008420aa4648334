"""Lightning's loop over one batch, one turn per split.

`run` makes a closure and a step of a batch; called with a split it does so for a split, with every
hook, progress, clipping and synchronisation. No public name stands there: hooks see the closure or
the step, and may be overridden without super. If these private names move, the imports below fail,
and nothing is trained wrongly.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.utilities.memory import recursive_detach
from torch.optim import Optimizer

from throughtime.integrations.lightning import splits
from throughtime.integrations.lightning.splits import TBPTTError

Kwargs = OrderedDict[str, Any]


@runtime_checkable
class Splitting(Protocol):
    """What a module is asked for."""

    truncated_bptt_steps: int

    def training_step(self, *args: Any) -> Any: ...
    def tbptt_split_batch(self, batch: Any, split_size: int) -> Sequence[Any]: ...
    def tbptt_split_steps(self, batch: Any, parts: Sequence[Any]) -> Sequence[int]: ...


class Turn(NamedTuple):
    """The place of a split in a step of the optimizer; by default it is one by itself."""

    first: bool = True
    last: bool = True
    share: float = 1.0


def install(trainer: Trainer) -> None:
    """Lets a trainer play the splits of modules that have them.

    The progress of its loops stays as it is.
    """
    loop = trainer.fit_loop.epoch_loop
    for name, kind in (("automatic_optimization", _Automatic), ("manual_optimization", _Manual)):
        old = getattr(loop, name)
        if not isinstance(old, kind):
            new = kind(old.trainer)
            vars(new).update(vars(old))
            setattr(loop, name, new)


class _Automatic(_AutomaticOptimization):
    turn = Turn()

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Kwargs) -> Any:
        play = super().run

        def take(turn: Turn, step: Kwargs) -> dict[str, Any]:
            self.turn = turn
            return play(optimizer, batch_idx, step)

        return _played(self.trainer, kwargs, take)

    def _training_step(self, kwargs: Kwargs) -> ClosureResult:
        result = super()._training_step(kwargs)
        if result.closure_loss is not None and self.turn.share < 1:
            result.closure_loss = result.closure_loss * self.turn.share
        return result

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        return super()._make_zero_grad_fn(batch_idx, optimizer) if self.turn.first else None

    def _optimizer_step(
        self, batch_idx: int, train_step_and_backward_closure: Callable[[], Any]
    ) -> None:
        if self.turn.last:
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        else:
            with _block_parallel_sync_behavior(self.trainer.strategy):
                train_step_and_backward_closure()


class _Manual(_ManualOptimization):
    def run(self, kwargs: Kwargs) -> Any:
        play = super().run
        return _played(self.trainer, kwargs, lambda _, step: play(step))


def _played(
    trainer: Trainer, kwargs: Kwargs, play: Callable[[Turn, Kwargs], dict[str, Any]]
) -> Any:
    """Every split of a batch played in order.

    What each gave, or the one output if there is one, as in 1.9.
    """
    module = trainer.lightning_module
    if not isinstance(module, Splitting) or module.truncated_bptt_steps <= 0:
        return _without_hiddens(module, play(Turn(), kwargs))
    log = trainer._logger_connector  # nothing public says that a batch goes on
    outputs, hiddens, first_batch = [], None, log._first_loop_iter  # as above
    for turn, part in _turns(trainer, module, kwargs):
        output = play(turn, OrderedDict(kwargs, batch=part, hiddens=hiddens))
        hiddens = _carried(output)
        outputs.append(output)
        # In the first batch of an epoch a log from another hook than the last one forgets what was
        # logged: the splits before.
        log._first_loop_iter = False  # as above
        if 0 <= trainer.max_steps <= trainer.global_step:
            break
    log._first_loop_iter = first_batch  # as above
    return outputs[0] if len(outputs) == 1 else outputs


def _turns(trainer: Trainer, module: Splitting, kwargs: Kwargs) -> list[tuple[Turn, Any]]:
    """The splits of a batch, each with its place in the step.

    Checks what can be checked before the first is played.
    """
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
        return [(Turn(), part) for part in parts]
    if trainer.strategy.handles_gradient_accumulation:
        raise TBPTTError(
            f"{type(trainer.strategy).__name__} counts every split's backward as a batch: it would"
            f" accumulate {trainer.accumulate_grad_batches} splits. Use accumulate_grad_batches=1,"
            " or strategy='ddp'."
        )
    shares = splits.shares(module.tbptt_split_steps(kwargs["batch"], parts), len(parts))
    return [
        (Turn(i == 0, i == len(parts) - 1, share), part)
        for i, (share, part) in enumerate(zip(shares, parts, strict=True))
    ]


def _carried(output: dict[str, Any]) -> Any:
    """The hiddens of a split, taken out of its output and off their graph."""
    if "hiddens" not in output:
        raise TBPTTError(
            f'training_step returned no "hiddens", got {sorted(output) or None}, and'
            ' truncated_bptt_steps is on: return {"loss": loss, "hiddens": hiddens}; or set'
            " truncated_bptt_steps = 0"
        )
    return recursive_detach(output.pop("hiddens"))


def _without_hiddens(module: Any, output: dict[str, Any]) -> dict[str, Any]:
    if "hiddens" in output and isinstance(module, Splitting):
        raise TBPTTError(
            'training_step returned "hiddens", and truncated_bptt_steps is 0: set it to the steps'
            " of a split, or return no hiddens"
        )
    return output
