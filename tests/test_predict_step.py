"""`Predictor.step` gives what a call gives, whatever changes between two steps."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import DataError


class Explicit(nn.Module):
    """Batch first, two layers, functions around them."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(3, 4)
        self.layer = tt.nn.LSTM(4, 8, 2, batch_first=True)
        self.readout = nn.Linear(8, 2)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        y, state = self.layer(torch.tanh(self.front(x)), state)
        return self.readout(y).softmax(-1), state


class Internal(nn.Module):
    """The state stays in the layer, and dropout has a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.readout = tt.nn.GRU(3, 8), nn.Linear(8, 2)
        self.dropout, self.loud = nn.Dropout(0.5), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.readout(self.dropout(self.layer(x)[0]))
        return torch.tanh(y) if self.loud else y


NETS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.Sequential(tt.nn.LSTM(3, 8), nn.Linear(8, 2)),
    "explicit": Explicit,
    "internal": Internal,
    "torch.nn": lambda: nn.Sequential(nn.LSTM(3, 8), nn.Linear(8, 2)),
    "cell": lambda: nn.GRUCell(3, 8),
}


def make(name: str) -> Carried:
    torch.manual_seed(0)
    return tt.carry(NETS[name]())


class Pair:
    """Two predictors of a net, one for steps and one for calls."""

    def __init__(self, net: Carried, lanes: int = 2, **options: Any) -> None:
        self.step = tt.Predictor(net, lanes, **options)
        self.call = tt.Predictor(net, lanes, **options)

    def agrees(self, rows: Any) -> bool:
        """Whether both give the same bits, and end in the same state."""
        same = [
            torch.equal(self.step.step(row).nan_to_num(7), self.call(row[None])[0].nan_to_num(7))
            for row in rows
        ]
        states = (tt.state.tensors(predictor.state) for predictor in (self.step, self.call))
        return all(same) and all(map(torch.equal, *states))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lanes", [1, 3, 9])
@pytest.mark.parametrize("name", NETS)
def test_steps_give_the_bits_of_calls(name: str, lanes: int, training: bool) -> None:
    pair = Pair(make(name).train(training), lanes)
    assert pair.agrees(torch.randn(12, lanes, 3))
    assert all(module.training is training for module in pair.step.net.modules())


def test_rows_of_a_memory_map_and_lists_are_steps_as_well(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(6, 2, 3))
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    pair = Pair(make("lstm"))
    for row in (*mapped, *rows.tolist()):
        assert torch.equal(pair.step.step(row), pair.call(np.array(row)[None])[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_goes_on_by_itself(duplicate: Callable[[Any], tt.Predictor]) -> None:
    pair, rows = Pair(make("lstm")), torch.randn(9, 2, 3)
    assert pair.agrees(rows[:3])
    pair.call = duplicate(pair.step)
    assert pair.agrees(rows[3:])


@pytest.mark.parametrize("on_nan", ["hold", "reset"])
@pytest.mark.parametrize("name", ["lstm", "internal"])
def test_missing_steps_are_left_out_as_in_calls(name: str, on_nan: Any) -> None:
    pair, rows = Pair(make(name), on_nan=on_nan), torch.randn(20, 2, 3)
    rows[3, 0, 1], rows[4, 1, 2], rows[5], rows[11, 1, 0] = (
        torch.nan,
        torch.inf,
        torch.nan,
        -torch.inf,
    )
    assert pair.agrees(rows)
    assert pair.step.skipped == pair.call.skipped == 5


@pytest.mark.parametrize("row", [torch.zeros(3, 3), torch.zeros(2, 4), torch.zeros(2, 3).int()])
def test_rows_that_do_not_fit_raise_as_in_calls(row: Tensor) -> None:
    pair = Pair(make("lstm"))
    assert pair.agrees(torch.randn(3, 2, 3))
    messages: list[str] = []
    for call in (lambda: pair.step.step(row), lambda: pair.call(row[None])):
        with pytest.raises((DataError, ValueError, RuntimeError)) as error:
            call()
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert pair.agrees(torch.randn(3, 2, 3))


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.recurrent = nn.Linear(1, 4), nn.GRU(4, 4)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.recurrent(self.before(x), h)


@pytest.mark.parametrize("module", [lambda: nn.LSTM(1, 4), Between])
@pytest.mark.parametrize("prepared", [False, True])
def test_inputs_of_another_width_or_type_are_named_with_what_the_net_expects(
    module: Callable[[], nn.Module], prepared: bool
) -> None:
    net = tt.carry(module())
    predictor = tt.Predictor(net)
    if prepared:
        predictor.step(np.zeros(1))
    said = "the inputs have 2 features in each step, the net expects 1"
    for call in (
        lambda: predictor.step(np.zeros(2)),
        lambda: predictor(np.zeros((5, 2))),
        lambda: tt.predict(net, np.zeros((5, 2), np.float32)),
    ):
        with pytest.raises(DataError, match=said):
            call()
    for shape in ((1,), (2,)):
        with pytest.raises(DataError, match=r"whole numbers \(torch.int64\).*astype"):
            predictor.step(np.zeros(shape, int))
    assert predictor.step(np.zeros(1)).shape == (4,)


def test_a_net_of_text_takes_tokens_and_says_so() -> None:
    embed = nn.Sequential(nn.Embedding(256, 4), nn.LSTM(4, 4), nn.Linear(4, 256))
    predictor = tt.Predictor(tt.carry(embed))
    for token in (7, [7], torch.tensor(7), torch.tensor([7]), np.array([7], dtype=np.uint8)):
        assert predictor.step(token).shape == (1, 256)  # pyright: ignore[reportArgumentType]
    assert predictor(torch.tensor(list(b"text"))).shape == (4, 256)
    for wrong, said in (
        ("a", r"the inputs are 'a', expected numbers: .* such as list\(b'text'\)"),
        (torch.tensor([7.0]), r"takes whole numbers, not torch.float32: write inputs.long\(\)"),
        (torch.tensor([256]), "they hold the tokens 256 to 256, the embedding has 0 to 255"),
        (torch.tensor([[7]]), r"of shape \(T, B\), those of a single step \(B,\)"),
    ):
        for _ in range(2):
            with pytest.raises(tt.errors.DataError, match=said):
                predictor.step(wrong)  # pyright: ignore[reportArgumentType]
            predictor.step(torch.tensor([7]))


def test_one_dimension_of_features_is_refused_with_the_line_to_write() -> None:
    net, signal = tt.carry(nn.GRU(1, 4)), torch.randn(30)
    for inputs in (signal, signal.numpy(), torch.tensor(0.5)):
        with pytest.raises(DataError, match=r"inputs\[:, None\] for .*predictor\.step\(inputs\)"):
            tt.Predictor(net)(inputs)
    assert tt.Predictor(net)(signal[:, None]).shape == (30, 4)
    assert tt.Predictor(net).step(signal[0]).shape == (4,)
