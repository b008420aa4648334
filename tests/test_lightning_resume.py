"""Lightning's checkpoints of a training on a stream: resumed anywhere to the bits of the plain
loop, or refused.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import throughtime as tt
from plain_loop import Growing
from throughtime.errors import RunError
from throughtime.gradient import Update
from throughtime.integrations.lightning import Loader

pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_streams import (
    EXPECTED,
    Module,
    loader_of_validation,
    net_of,
    plain,
    stream_of,
    trainer_of,
    weights,
)

pytestmark = EXPECTED
UPDATES = 24  # of an epoch, in 12 training steps


def resumed(folder: Path, at: int, *, max_epochs: int, **settings: Any) -> Tensor:
    """Train to the end of the epoch of update `at`, save, continue in a new module and trainer."""
    saver = ModelCheckpoint(folder, every_n_train_steps=at, save_top_k=-1, filename="{step}")
    module, trainer = (
        Module(net_of(0.3), **settings),
        trainer_of(
            folder, enable_checkpointing=True, callbacks=[saver], max_epochs=-(-at // UPDATES)
        ),
    )
    torch.manual_seed(5)
    trainer.fit(module, Loader(stream_of(), 2), loader_of_validation())
    path = folder / f"step={at}.ckpt"
    module = Module(net_of(0.3), **settings)
    torch.manual_seed(99)
    trainer_of(folder, max_epochs=max_epochs).fit(
        module, Loader(stream_of(), 2), loader_of_validation(), ckpt_path=path
    )
    return weights(module.net)


@pytest.mark.parametrize(("at", "policy"), [(3, tt.Truncated(10, 25)), (27, Growing(4))], ids=str)
def test_resume_in_the_middle_of_an_epoch_gives_the_same_bits(
    at: int, policy: Any, tmp_path: Path
) -> None:
    expected = plain(lambda: policy, epochs=3, dropout=0.3)
    assert torch.equal(resumed(tmp_path, at, max_epochs=3, gradient=policy), expected)


def test_a_batch_ends_where_a_checkpoint_is_due(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1, filename="{step}")
    module = Module()
    torch.manual_seed(5)
    trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver]).fit(
        module, Loader(stream_of(), 4)
    )
    assert torch.equal(weights(module.net), plain())
    assert {int(path.stem.split("=")[1]) for path in tmp_path.glob("*.ckpt")} == {10, 20, 30, 40}


def test_a_checkpoint_saved_after_max_steps_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    trainer, again = trainer_of(tmp_path, max_steps=6, max_epochs=-1), Module()
    torch.manual_seed(5)
    trainer.fit(Module(), Loader(stream_of(), 4))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    trainer_of(tmp_path, max_steps=40, max_epochs=-1).fit(
        again, Loader(stream_of(), 4), ckpt_path=tmp_path / "after.ckpt"
    )
    assert torch.equal(weights(again.net), plain(stop=40))


class Failing(Module):
    """Fails once, between an update and its step."""

    def on_update(self, update: Update) -> None:
        super().on_update(update)
        if len(self.rates) == 11:
            raise RuntimeError("enough")


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available.*")
@pytest.mark.filterwarnings(
    "ignore:.*was called without a model.*"
)  # Lightning, of any fit with OnExceptionCheckpoint
def test_a_checkpoint_of_an_exception_makes_the_lost_update_again(tmp_path: Path) -> None:
    saver = OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises(RuntimeError, match="enough"):
        trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver]).fit(
            Failing(), Loader(stream_of(), 4)
        )
    module = Module()
    trainer_of(tmp_path).fit(module, Loader(stream_of(), 4), ckpt_path=tmp_path / "failed.ckpt")
    assert torch.equal(weights(module.net), plain())


def test_a_checkpoint_without_a_position_or_of_two_ranks_is_refused(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1, filename="{step}")
    trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver], max_epochs=1).fit(
        Module(), Loader(stream_of(), 2)
    )
    path = tmp_path / "step=8.ckpt"
    saved = torch.load(path, weights_only=False)
    for positions, message in (
        (saved["throughtime"] * 2, "written by 2 ranks, and 1 continue from it"),
        ([], "the checkpoint of step 8 holds no position in a stream"),
    ):
        torch.save(saved | {"throughtime": positions}, path)
        with pytest.raises(RunError, match=message):
            trainer_of(tmp_path).fit(Module(), Loader(stream_of(), 2), ckpt_path=path)
