"""`Predictor.step`, prepared once, gives what a call gives, whatever changes between two steps."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import DataError, ModelError, RunError, StateError
from throughtime.kernels.library import library
from throughtime.nn.affine import Affine

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled kernels")


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


class LearnedStart(nn.Module):
    """Starts from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.readout = tt.nn.GRU(3, 8), nn.Linear(8, 2)
        self.start = nn.Parameter(torch.randn(8))

    def initial_state(self, lanes: int) -> Tensor:
        return self.start.expand(1, lanes, 8).contiguous()

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        y, h = self.layer(x, h)
        return self.readout(y), h


class Loud(nn.Module):
    """A module of the user's that carries nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


class LoudDropout(nn.Dropout):
    """Is active in evaluation mode as well."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        return input * 2


def standardised() -> nn.Module:
    first, last = Affine(3, inverse=False), Affine(2, inverse=True)
    for values, number in ((first.shift, 1e4), (first.scale, 3), (last.shift, 5), (last.scale, 2)):
        values.fill_(number)
    return nn.Sequential(first, tt.nn.GRU(3, 8), nn.Linear(8, 2), last)


NETS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.Sequential(tt.nn.LSTM(3, 8), nn.Linear(8, 2)),
    "gru": lambda: nn.Sequential(tt.nn.GRU(3, 8, 2, bias=False), nn.ReLU(), nn.Linear(8, 2)),
    "rnn": lambda: nn.Sequential(tt.nn.RNN(3, 8, nonlinearity="relu"), nn.Softmax(2)),
    "projected": lambda: nn.Sequential(tt.nn.LSTM(3, 8, 2, proj_size=5), nn.Dropout(), Loud()),
    "loud dropout": lambda: nn.Sequential(tt.nn.GRU(3, 8), LoudDropout(), nn.Linear(8, 2)),
    "between": lambda: nn.Sequential(
        *(nn.Linear(3, 4), tt.nn.GRU(4, 8, batch_first=True), nn.SiLU(), tt.nn.LSTM(8, 9)),
    ),
    "words": lambda: nn.Sequential(nn.Embedding(11, 5), tt.nn.LSTM(5, 8), nn.Linear(8, 11)),
    "standardised": standardised,
    "explicit": Explicit,
    "internal": Internal,
    "learned start": LearnedStart,
    "bare layer": lambda: tt.nn.LSTM(3, 8, batch_first=True),
    "double": lambda: NETS["lstm"]().double(),
}
# modules that no prepared call serves
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "torch.nn": lambda: nn.Sequential(nn.LSTM(3, 8), nn.Linear(8, 2)),
    "cell": lambda: nn.GRUCell(3, 8),
}


def rows_of(name: str, steps: int, lanes: int) -> Tensor:
    if name == "words":
        return torch.randint(0, 11, (steps, lanes))
    x = torch.randn(steps, lanes, 3, dtype=torch.float64 if name == "double" else None)
    return x * 3 + 1e4 if name == "standardised" else x


def make(name: str) -> Carried:
    torch.manual_seed(0)
    return tt.carry((NETS | OTHERS)[name]())


class Pair:
    """Two predictors of a net, one for steps and one for calls."""

    def __init__(self, net: Carried, lanes: int = 2, **options: Any) -> None:
        self.step = tt.Predictor(net, lanes, **options)
        self.call = tt.Predictor(net, lanes, **options)

    @property
    def is_prepared(self) -> bool:
        return self.step._single is not None

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
@pytest.mark.parametrize("name", [*NETS, *OTHERS])
def test_steps_give_the_bits_of_calls(name: str, lanes: int, training: bool) -> None:
    pair = Pair(make(name).train(training), lanes)
    assert pair.agrees(rows_of(name, 12, lanes))
    assert pair.is_prepared == (name in NETS)
    assert pair.step._prepared == 1 or not pair.is_prepared
    assert all(module.training is training for module in pair.step.net.modules())


def replaced(module: Any) -> None:
    module.layer.weight_hh_l0 = nn.Parameter(torch.randn_like(module.layer.weight_hh_l0))


def moved(module: Any) -> None:
    module.layer.weight_hh_l0.data = torch.randn_like(module.layer.weight_hh_l0)


def transposed(module: Any) -> None:
    """The same address and shape, another order of numbers."""
    module.layer.weight_hh_l0.data = module.layer.weight_hh_l0.data.as_strided((24, 8), (1, 24))


def in_place(module: Any) -> None:
    with torch.no_grad():
        module.layer.weight_hh_l0.mul_(2)
        module.layer.bias_ih_l0.add_(1)


def loaded(module: Any) -> None:
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})


def readout(module: Any) -> None:
    module.readout = nn.Linear(8, 2)


def attribute(module: Any) -> None:
    module.loud = True


def instance_forward(module: Any) -> None:
    module.layer.forward = lambda *args, own=module.layer.forward: tuple(
        2 * part for part in own(*args)
    )


def hook_of_layer(module: Any) -> None:
    module.layer.register_forward_hook(lambda _, __, result: (result[0] * 2, result[1]))


def hook_of_readout(module: Any) -> None:
    module.readout.register_forward_hook(lambda _, __, result: result * 2)


def hook_of_module(module: Any) -> None:
    module.register_forward_hook(lambda _, __, result: result * 2)


def plain_layer(module: Any) -> None:
    module.layer.__class__ = nn.GRU


def parametrized(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module.layer, "weight_hh_l0")


def training(module: Any) -> None:
    module.train()


CHANGES = [
    *(replaced, moved, transposed, in_place, loaded, readout, attribute, instance_forward),
    *(hook_of_layer, hook_of_readout, hook_of_module, plain_layer, parametrized, training),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_net_counts_at_the_next_step(change: Callable[..., None]) -> None:
    net = make("internal").eval()
    pair = Pair(net)
    rows = rows_of("internal", 20, 2)
    assert pair.agrees(rows[:5])
    assert pair.is_prepared
    change(net.module)
    assert pair.agrees(rows[5:])


def test_a_net_that_changes_is_prepared_anew_for_a_while() -> None:
    net = make("lstm")
    module: Any = net.module
    pair, layer = Pair(net), module[0]
    for row in rows_of("lstm", 5, 2):
        layer.weight_hh_l0.data = layer.weight_hh_l0.data.clone()
        assert pair.agrees(row[None])
        assert pair.is_prepared
    module[1] = nn.Linear(8, 2)
    for _ in range(2):
        with pytest.raises(ModelError, match="was replaced after"):
            pair.step.step(torch.zeros(2, 3))


def test_weights_of_another_type_are_those_of_the_next_step() -> None:
    net = make("lstm")
    pair = Pair(net)
    assert pair.agrees(torch.randn(3, 2, 3))
    net.double()
    for predictor in (pair.step, pair.call):
        with pytest.raises(ValueError, match="dtype"):
            predictor.step(torch.randn(2, 3))
    assert Pair(net).agrees(torch.randn(3, 2, 3, dtype=torch.float64))


def test_modes_of_torch_see_every_step() -> None:
    net = make("lstm")
    pair = Pair(net)
    assert pair.agrees(torch.randn(3, 2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert pair.agrees(torch.randn(3, 2, 3))
    totals: list[int] = []
    for call in (pair.step.step, lambda row: pair.call(row[None])):
        with FlopCounterMode(display=False) as counter:
            call(torch.randn(2, 3))
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    pair.step.step(torch.randn(2, 3))
    handle.remove()
    assert "LSTM" in seen


def test_memory_made_in_inference_mode_serves_outside_of_it() -> None:
    pair = Pair(make("explicit"))
    with torch.inference_mode():
        assert pair.agrees(torch.randn(4, 2, 3))
    assert pair.agrees(torch.randn(4, 2, 3))
    assert pair.is_prepared


@pytest.mark.parametrize("name", ["lstm", "internal", "torch.nn"])
def test_steps_and_calls_take_turns(name: str) -> None:
    net, rows, outputs = make(name), torch.randn(30, 2, 3), list[Tensor]()
    expected = tt.Predictor(net, 2)(rows)
    predictor, begin = tt.Predictor(net, 2), 0
    for steps in (1, 1, 4, 1, 1, 1, 7, 3, 1, 1, 1, 8):
        part = rows[begin : begin + steps]
        outputs.append(predictor.step(part[0])[None] if steps == 1 else predictor(part))
        begin += steps
    assert torch.allclose(torch.cat(outputs), expected, atol=1e-6)


def test_rows_of_a_memory_map_and_lists_are_steps_as_well(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(6, 2, 3))
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    pair = Pair(make("lstm"))
    for row in (*mapped, *rows.tolist()):
        assert torch.equal(pair.step.step(row), pair.call(np.array(row)[None])[0])
    assert pair.is_prepared


def test_another_forward_of_a_class_counts_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(make("lstm"))
    assert pair.agrees(torch.randn(3, 2, 3))
    own = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda module, x: 2 * own(module, x))
    assert pair.agrees(torch.randn(3, 2, 3))


def test_copies_that_share_a_net_run_in_threads_of_their_own() -> None:
    predictor, row = tt.Predictor(make("lstm"), 2), torch.randn(2, 3)
    predictor.step(row)
    other, outputs = copy.copy(predictor), list[Tensor]()

    def run_other(*_: Any) -> None:  # while the first one runs
        handle.remove()
        outputs.append(other.step(row))

    handle = predictor.net.register_forward_hook(run_other)
    expected = predictor.step(row)
    assert torch.equal(outputs[0], expected)


def test_outputs_and_states_are_values() -> None:
    pair, rows = Pair(make("bare layer")), torch.randn(6, 2, 3)
    assert pair.agrees(rows[1:2])
    first = pair.step.step(rows[0])
    kept = first.clone()
    before = pair.call.state = pair.step.state
    values = [leaf.clone() for leaf in tt.state.tensors(before)]
    assert pair.agrees(rows[2:])
    assert torch.equal(first, kept)
    assert all(map(torch.equal, tt.state.tensors(before), values))
    assert not pair.step.step(rows[0]).requires_grad


def test_a_state_may_be_changed_in_place_replaced_and_reset(tmp_path: Any) -> None:
    pair, rows = Pair(make("explicit"), 3), torch.randn(40, 3, 3)
    assert pair.agrees(rows[:5])
    for predictor in (pair.step, pair.call):
        tt.state.tensors(predictor.state)[0][1] = 0.5
    assert pair.agrees(rows[5:10])
    for predictor in (pair.step, pair.call):
        predictor.reset([2])
    assert pair.agrees(rows[10:15])
    tt.state.save(pair.step.state, tmp_path / "state")
    pair.call.state = tt.state.load(tmp_path / "state", like=pair.step.state)
    assert pair.agrees(rows[15:20])
    pair.call.state = pair.step.state = tt.state.map_leaves(torch.randn_like, pair.call.state)
    assert pair.agrees(rows[20:25])
    state = pair.step.state
    for row in rows[25:27]:
        pair.step.step(row)
    pair.step.state = state
    assert torch.equal(pair.step(rows[25:30]), pair.call(rows[25:30]))
    assert pair.agrees(rows[30:35])
    for predictor in (pair.step, pair.call):
        predictor.reset()
    assert pair.agrees(rows[35:])
    assert pair.is_prepared
    pair.step.state = tt.state.map_leaves(lambda leaf: leaf[:2], pair.step.state)
    with pytest.raises(StateError, match="has 3 lanes"):
        pair.step.step(rows[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_goes_on_by_itself(duplicate: Callable[[Any], tt.Predictor]) -> None:
    pair, rows = Pair(make("lstm")), torch.randn(9, 2, 3)
    assert pair.agrees(rows[:3])
    pair.call = duplicate(pair.step)
    pair.call._prepared = 99
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
    assert pair.is_prepared


def test_numbers_that_are_not_finite_are_refused_and_the_state_is_as_it_was() -> None:
    net = make("lstm")
    pair, rows = Pair(net), torch.randn(9, 2, 3)
    assert pair.agrees(rows[:3])
    with pytest.raises(DataError, match="step 0 of the call, lane 1, column 2"):
        pair.step.step(torch.tensor([[0, 0, 0], [0, 0, torch.nan]]))
    assert pair.agrees(rows[3:6])
    weight = net.get_parameter("module.1.weight")
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    with pytest.raises(RunError, match=r"the weight '1.weight' is not finite"):
        pair.step.step(rows[6])
    with torch.no_grad():
        weight.copy_(kept)
    assert pair.agrees(rows[6:])


def test_rows_of_numpy_are_taken_in_any_precision() -> None:
    pair, rows = Pair(make("lstm")), np.random.default_rng(0).standard_normal((9, 2, 3))
    assert pair.agrees(rows[:3])
    assert pair.agrees(rows[3:6].astype(np.float16))
    assert pair.agrees(torch.from_numpy(rows[6:]))
    assert pair.agrees(rows[:, ::-1, ::-1])
    assert pair.is_prepared
    listed: Any = rows[0].tolist()
    assert torch.equal(pair.step.step(listed), pair.call(rows[:1])[0])
    words = Pair(make("words"))
    for kind in (np.int64, np.int32, np.uint8):
        assert words.agrees(np.arange(6).reshape(3, 2).astype(kind))
    assert words.is_prepared


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
        for _ in range(2):  # prepared or not
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
