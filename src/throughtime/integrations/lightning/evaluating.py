"""Validation, test and prediction of a carried net in Lightning: chunk by chunk, each stream with a
state of its own.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

import throughtime as tt
from throughtime.errors import DataError
from throughtime.gradient import LossFn
from throughtime.integrations.lightning.keeper import Streaming
from throughtime.integrations.stretches import Stretch, stretch


class Evaluating(Streaming):
    """A carried net that a Trainer evaluates on streams, each given as a `Loader`.

    `StreamModule` is this and trains.
    """

    def __init__(self, net: tt.Carried, loss_fn: LossFn, score: Any) -> None:
        super().__init__()
        self.net, self.loss_fn, self.score = net, loss_fn, score
        self._evaluators: dict[tuple[str, int], tuple[tt.Stream, tt.Evaluator]] = {}
        self._predictors: dict[int, tt.Predictor] = {}
        self._trained: tt.Stream | None = None

    # Lightning gives it
    def validation_step(self, batch: Stretch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The chunks of a stretch, with a state of their own."""
        self._evaluate("val", stretch(batch), dataloader_idx)

    # Lightning gives it
    def test_step(self, batch: Stretch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As in validation."""
        self._evaluate("test", stretch(batch), dataloader_idx)

    def keep_logged(self, kind: str) -> None:
        """Logs what was found."""
        mine = [key for key in self._evaluators if key[0] == kind]
        for key in mine:
            stream, evaluator = self._evaluators.pop(key)
            found, suffix = (
                evaluator.result(stream),
                (f"/dataloader_idx_{key[1]}" if len(mine) > 1 else ""),
            )
            figures = {
                f"{kind}_{name}{suffix}": value
                for name, value in {"loss": found.loss, **found.metrics}.items()
            }
            self.log_dict(figures, prog_bar=True, sync_dist=True, add_dataloader_idx=False)

    def _evaluate(self, kind: str, batch: Stretch, index: int) -> None:
        if batch.stream is self._trained and self.trainer.state.fn == TrainerFn.FITTING:
            raise DataError(
                "the stream of the validation is the one that is trained on: playing it would move"
                " the training. Make two"
            )
        if batch.index == 0:
            evaluator = tt.Evaluator(self.net, self.loss_fn, metrics=self.score)
            evaluator.check(batch.stream)
            self._evaluators[kind, index] = batch.stream, evaluator
        for chunk in batch.chunks():
            self._evaluators[kind, index][1].add(chunk)

    # Lightning gives it
    def predict_step(self, batch: Stretch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """The outputs `(T, B, C)` of a stretch."""
        if stretch(batch).index == 0:
            self._predictors[dataloader_idx] = tt.Predictor(self.net, batch.stream.lanes)
        play, device = self._predictors[dataloader_idx], self.device
        found = [
            play(c.inputs.to(device), c.resets.to(device) if c.any_reset else None).cpu()
            for c in batch.chunks()
        ]
        return torch.cat(found) if found else torch.empty(0, batch.stream.lanes)
