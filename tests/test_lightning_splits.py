"""How a batch is split along time for a module of Lightning 1.9, and what is refused."""

# ruff: noqa: ARG002  # hooks take what Lightning passes

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_old import Batch, Mixed, Tagger, batches, fitted
from throughtime.errors import ConfigError, MissingExtraError
from throughtime.integrations.lightning import LightningModule


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_the_default_split_is_that_of_1_9() -> None:
    x, y = torch.arange(24.0).view(2, 6, 2), torch.arange(12).view(2, 6)
    splits = LightningModule().tbptt_split_batch((x, y, [list("abcdef"), list("ghijkl")]), 4)
    assert all(type(split) is list for split in splits)
    torch.testing.assert_close(
        [split[:2] for split in splits], [[x[:, :4], y[:, :4]], [x[:, 4:], y[:, 4:]]]
    )
    assert [split[2] for split in splits] == [
        [list("abcd"), list("ghij")],
        [list("ef"), list("kl")],
    ]
    assert splits[0][0].data_ptr() == x.data_ptr()


def test_what_has_no_time_is_passed_whole() -> None:
    x, lengths, info = torch.zeros(2, 6, 2), torch.tensor([6, 6]), object()
    static = {
        "lengths": lengths,
        "rate": 0.5,
        "name": ["a", "b"],
        "text": "abcdef",
        "none": None,
        "info": info,
        "scalar": torch.zeros(()),
    }
    splits = LightningModule().tbptt_split_batch(
        {"x": x, "deep": {"y": x, "lengths": lengths}, **static}, 4
    )
    assert [(split["x"].shape[1], split["deep"]["y"].shape[1]) for split in splits] == [
        (4, 4),
        (2, 2),
    ]
    assert all(split[name] is item for split in splits for name, item in static.items())
    assert all(split["deep"]["lengths"] is lengths for split in splits)
    positional = LightningModule().tbptt_split_batch(
        (7, x, lengths), 4
    )  # 1.9 gave x's slice for 7, or failed
    assert [(a, b.shape[1], c is lengths) for a, b, c in positional] == [(7, 4, True), (7, 2, True)]


def test_a_tensor_and_a_namedtuple_are_batches() -> None:
    x, y = torch.zeros(2, 6, 2), torch.zeros(2, 6)
    assert [split.shape for split in LightningModule().tbptt_split_batch(x, 4)] == [
        (2, 4, 2),
        (2, 2, 2),
    ]
    assert [split.y.shape for split in LightningModule().tbptt_split_batch(Pair(x, y), 4)] == [
        (2, 4),
        (2, 2),
    ]


def test_items_named_are_passed_whole() -> None:
    x, speaker = torch.zeros(2, 6, 2), torch.zeros(2, 4)
    module = LightningModule()
    with pytest.raises(
        MisconfigurationException,
        match=r"ambiguous.*'x': \[6\], 'speaker': \[4\].*tbptt_whole = \('speaker',\)",
    ):
        module.tbptt_split_batch({"x": x, "speaker": speaker}, 4)
    module.tbptt_whole = ("speaker",)
    assert all(
        split["speaker"] is speaker
        for split in module.tbptt_split_batch({"x": x, "speaker": speaker}, 4)
    )
    module.tbptt_whole = (1,)
    assert all(split[1] is speaker for split in module.tbptt_split_batch((x, speaker), 4))
    with pytest.raises(ConfigError, match=r"tbptt_whole names \[1\], the batch has \['x'\]"):
        module.tbptt_split_batch({"x": x}, 4)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(2, 6), torch.zeros(2, 5)), "ambiguous"),
        ((torch.zeros(2, 6), [torch.zeros(6), torch.zeros(5)]), "ambiguous"),
        ((torch.zeros(2, 0),), "above 0"),
        ((torch.zeros(6), 3), "no time dimension in a tuple"),
        ({}, "no time dimension in a dict"),
        (object(), "no time dimension in a object"),
        ([(torch.zeros(2, 6, 2), torch.zeros(2, 6))], "no list of rows"),
    ],
)
def test_a_batch_without_one_time_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        LightningModule().tbptt_split_batch(batch, 4)


class NoHiddensTaken(Mixed):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Tagger.training_step(self, batch, batch_idx, None)


class OnlyTheBatchTaken(Mixed):
    def training_step(self, batch: Batch) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Tagger.training_step(self, batch, 0, None)


class NoHiddensReturned(Mixed):
    def training_step(self, batch: Batch, batch_idx: int, hiddens: Any) -> Any:
        return Tagger.training_step(self, batch, batch_idx, hiddens)["loss"]


class NothingReturned(Mixed):
    def training_step(self, batch: Batch, batch_idx: int, hiddens: Any) -> Any:
        return None


class ReturnedThoughOff(NoHiddensTaken):
    truncated_bptt_steps = 0


class NoSplits(Mixed):
    def tbptt_split_batch(self, batch: Any, split_size: int) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            NoHiddensTaken,
            r"training_step\(batch.*, batch_idx.*takes no batch, batch_idx and hiddens",
        ),
        (OnlyTheBatchTaken, r"training_step\(batch.*takes no batch, batch_idx and hiddens"),
        (NoHiddensReturned, r"no \"hiddens\", got \['loss'\]"),
        (NothingReturned, r"no \"hiddens\", got None"),
        (ReturnedThoughOff, r"truncated_bptt_steps is 0"),
        (NoSplits, r"returned no splits"),
    ],
)
# said by Lightning of a training_step that returns None, just before it is refused
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_the_mistakes_that_1_9_refused_are_refused(
    kind: type[Mixed], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MisconfigurationException, match=message) as raised:
        fitted(kind(), batches(1), tmp_path)
    assert isinstance(raised.value, ConfigError)


@pytest.mark.parametrize("steps", [[5, 5], [0] * 5, [-1, 5, 5, 5, 5]])
def test_weights_are_one_number_of_steps_per_split(steps: list[int], tmp_path: Path) -> None:
    class WrongSteps(Mixed):
        def tbptt_split_steps(self, batch: Any, parts: Sequence[Any]) -> list[int]:
            return steps

    with pytest.raises(
        MisconfigurationException, match=r"tbptt_split_steps returned \[.*\] for 5 splits"
    ):
        fitted(WrongSteps(), batches(1), tmp_path, accumulate_grad_batches=2)


class OwnAccumulation(SingleDeviceStrategy):
    """Counts batches by its backward, as DeepSpeed does."""

    @property
    def handles_gradient_accumulation(self) -> bool:
        return True


def test_a_strategy_that_would_count_splits_as_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MisconfigurationException, match="OwnAccumulation counts every split's backward as a batch"
    ):
        fitted(
            Mixed(),
            batches(1),
            tmp_path,
            accumulate_grad_batches=2,
            strategy=OwnAccumulation("cpu"),
        )


def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith("throughtime.integrations.lightning")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'throughtime\[lightning\]'"):
        __import__("throughtime.integrations.lightning")
