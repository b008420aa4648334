"""Truncated backpropagation through time as Lightning 1.9 had it, on Lightning 2.6.

Shapes: `B` lanes, `T` steps. As in 1.9 batches come lanes first, `(B, T, ...)`.
"""

from collections.abc import Collection, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from throughtime.integrations.lightning import splits, turns
from throughtime.integrations.lightning.splits import TBPTTError


class TBPTT(LightningModule):
    """Puts `truncated_bptt_steps`, `tbptt_split_batch` and `hiddens` back; name it before any other
    LightningModule.

    For modules written for Lightning 1.9. New ones are better off with `StreamModule`, which
    carries the state across batches.

    With `truncated_bptt_steps = k > 0` every batch is split into `k` steps at a time.
    `training_step(self, batch, batch_idx, hiddens)` plays one split and returns `{"loss": ...,
    "hiddens": ...}`; `hiddens` is `None` on the first split of every batch and then what the split
    before returned, detached. The optimizer steps once per split: `global_step` and `max_steps`
    count splits; `batch_idx`, `on_train_batch_*` and schedulers with `interval="step"` count
    batches. With `automatic_optimization = False`, `training_step` is called once per split and the
    rest is yours.

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
        >>> batch = {"x": torch.zeros(2, 5, 1), "y": torch.zeros(2, 5), "speaker": torch.tensor([3, 8]), "name": ["a", "b"]}
        >>> [(split["x"].shape[1], split["speaker"].tolist()) for split in TBPTT().tbptt_split_batch(batch, 2)]
        [(2, [3, 8]), (2, [3, 8]), (1, [3, 8])]

    References:
        Williams, Peng. An efficient gradient-based algorithm for on-line training of recurrent
        network trajectories. Neural Computation 2(4), 1990. Here with k1 = k2 =
        `truncated_bptt_steps`.
    """

    truncated_bptt_steps: int = 0
    tbptt_whole: Collection[int | str] = ()

    @property
    def trainer(self) -> Trainer:
        """The trainer; attaching one lets it play splits, and no hook does, since a module may override any without super."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        LightningModule.trainer.__set__(self, trainer)
        if trainer is not None:
            turns.install(trainer)

    def tbptt_split_batch(self, batch: Any, split_size: int) -> list[Any]:
        """The splits of a batch, in order; override it for batches of another layout.

        Split along time are tensors of two or more dimensions, `(B, T, ...)`, lists of `B` rows
        that each have `T` entries (tensors or lists), and mappings of these. Passed whole are
        numbers, strings, 1-D tensors `(B,)`, whatever else there is, and the items named in
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
        whole = self.tbptt_whole
        return [
            splits.cut(batch, slice(t, t + split_size), whole)
            for t in range(0, splits.steps(batch, whole), split_size)
        ]

    def tbptt_split_steps(self, batch: Any, parts: Sequence[Any]) -> list[int]:
        """The steps of each split, its weight when gradients are accumulated; override it along
        with `tbptt_split_batch`.

        Raises:
            TBPTTError: the splits do not add up to the batch by the default layout.
        """
        found, expected = (
            [splits.steps(part, self.tbptt_whole) for part in parts],
            splits.steps(batch, self.tbptt_whole),
        )
        if sum(found) != expected:
            raise TBPTTError(
                f"splits of {found} steps in dimension 1 do not add up to the {expected} of the"
                " batch, and accumulated gradients are weighted by steps. Override"
                " tbptt_split_steps(self, batch, parts) and return the steps of each split."
            )
        return found
