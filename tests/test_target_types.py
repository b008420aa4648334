"""Numbers reach net and loss in the types that they take, however the user has stored them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import DataError

T = 150
random = np.random.default_rng(0)
INPUTS = random.normal(size=(T, 3)).astype(np.float32)
LABELS = random.integers(0, 2, T)
NUMBERS = random.normal(size=T).astype(np.float32)


def net(outputs: int, dtype: torch.dtype = torch.float32) -> Carried:
    torch.manual_seed(0)
    return tt.carry(nn.Sequential(nn.GRU(3, 4), nn.Linear(4, outputs)).to(dtype))


def losses(
    inputs: Any, targets: Any, loss_fn: Any, outputs: int, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Of three updates with steps between them, of an audit and of an evaluation."""
    carried, data = net(outputs, dtype), (inputs, targets)
    optimizer = torch.optim.SGD(carried.parameters(), lr=0.1)
    stream = tt.Stream(data, lanes=3, chunk=20)
    values: list[float] = []
    for update in tt.updates(carried, stream, loss_fn, gradient=tt.Truncated(stride=40)):
        optimizer.step()
        optimizer.zero_grad()
        values.append(update.loss.item())
    again = tt.Stream(data, lanes=3, chunk=20)
    audit = tt.audit(carried, again, loss_fn, stride=5, horizons=(5, 10), steps=30)
    loss = tt.evaluate(carried, data, loss_fn).loss
    return [*values, *(row.bias for row in audit.rows), loss]


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("inputs", ["float16", "float32", "float64"])
@pytest.mark.parametrize("targets", ["float32", "float64"])
def test_floating_numbers_take_the_type_of_the_weights(
    inputs: str, targets: str, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")
    x, y = INPUTS.astype("float16"), NUMBERS
    expected = losses(x.astype(name), y.astype(name), nn.MSELoss(), 1, dtype)
    assert losses(x.astype(inputs), y.astype(targets), nn.MSELoss(), 1, dtype) == expected


CLASS_LOSSES: dict[str, Callable[..., Tensor]] = {
    "module": nn.CrossEntropyLoss(),
    "weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])),
    "ignored class": nn.CrossEntropyLoss(ignore_index=1),
    "function": nn.functional.cross_entropy,
    "partial": partial(nn.functional.cross_entropy, label_smoothing=0.1),
    "margin": nn.MultiMarginLoss(),
}


@pytest.mark.covering
@pytest.mark.parametrize("loss_fn", list(CLASS_LOSSES.values()), ids=list(CLASS_LOSSES))
@pytest.mark.parametrize("kind", ["float32", "float64", "bool", "uint8"])
def test_classes_may_be_stored_as_any_numbers(loss_fn: Any, kind: str) -> None:
    expected = losses(INPUTS, LABELS, loss_fn, 2)
    assert losses(INPUTS, LABELS.astype(kind), loss_fn, 2) == expected
    assert losses(INPUTS, LABELS.astype(kind)[:, None], loss_fn, 2) == expected
    assert losses(INPUTS, 1 - LABELS, loss_fn, 2) != expected


def test_missing_classes_may_be_nan_or_100_below_zero() -> None:
    integers, floats = LABELS.copy(), LABELS.astype(np.float64)
    integers[::7], floats[::7] = -100, np.nan
    expected = losses(INPUTS, integers, nn.CrossEntropyLoss(), 2)
    assert losses(INPUTS, floats, nn.CrossEntropyLoss(), 2) == expected


@pytest.mark.parametrize(
    "loss_fn",
    [nn.BCEWithLogitsLoss(), nn.MSELoss(), nn.SmoothL1Loss(), nn.functional.l1_loss],
    ids=lambda loss_fn: getattr(loss_fn, "__name__", str(loss_fn)),
)
def test_integers_are_numbers_where_the_loss_takes_numbers(loss_fn: Any) -> None:
    expected = losses(INPUTS, LABELS.astype(np.float32), loss_fn, 1)
    for labels in (LABELS, LABELS.astype(np.bool_), LABELS[:, None]):
        assert losses(INPUTS, labels, loss_fn, 1) == expected


def test_probabilities_of_classes_stay_numbers() -> None:
    both = np.stack([1 - LABELS, LABELS], axis=1).astype(np.float64)
    both[::2] = 0.5
    assert np.isfinite(losses(INPUTS, both, nn.CrossEntropyLoss(), 2)).all()


def test_a_class_that_is_no_whole_number_is_named_before_any_update() -> None:
    labels = LABELS.astype(np.float64)
    labels[3], labels[5] = np.nan, 0.5  # the first is missing
    stream = tt.Stream((INPUTS, labels), lanes=1, chunk=50)
    updates = tt.updates(net(2), stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(stride=50))
    reason = r"the target of step 5 of recording 0 is 0\.5, and the loss takes class indices"
    with pytest.raises(DataError, match=reason):
        next(updates)
    with pytest.raises(DataError, match=reason):
        tt.evaluate(net(2), (INPUTS, labels), metrics=tt.metrics.Classification(2))


def test_metrics_of_classes_take_them_as_losses_do() -> None:
    scores = [
        tt.evaluate(net(2), (INPUTS, labels), metrics=tt.metrics.Classification(2)).metrics
        for labels in (LABELS, LABELS.astype(np.float32), LABELS[:, None], LABELS[:, None] * 1.0)
    ]
    assert all(score == scores[0] for score in scores)
