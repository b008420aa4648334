"""Mistakes that many make first: each is a sentence of ours with the line to write.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.gradient import Policy

STEPS = 40
POLICIES: dict[str, Policy] = {
    "truncated": tt.Truncated(10),
    "exact": tt.Exact(chunk=8),
    "random": tt.Randomized(16),
}
every_policy = pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))


class Tagger(nn.Module):
    """As a user writes it."""

    def __init__(self, features: int, *, front: bool = False) -> None:
        super().__init__()
        self.front = nn.Linear(features, features) if front else nn.Identity()
        self.rnn = nn.LSTM(features, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(self.front(x), state)
        return self.head(y), state


class Lit(lightning.LightningModule):
    """Of whose properties some raise without a trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 2)

    def init_hidden(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, 8)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(x, hidden)
        return self.head(hidden), hidden


def play(module: nn.Module, policy: Policy, targets: Tensor, loss_fn: nn.Module) -> None:
    torch.manual_seed(0)
    stream = tt.Stream({"inputs": torch.randn(STEPS, 3), "targets": targets}, 2, 10)
    list(tt.updates(tt.carry(module), stream, loss_fn, gradient=policy))


def test_a_lightning_module_is_carried() -> None:
    with pytest.raises(RuntimeError, match="Trainer"):
        _ = Lit().trainer
    module = Lit()
    net, x = tt.carry(module), torch.randn(5, 2, 3)
    y, _ = net(x, net.initial_state(2, like=x))
    hidden, expected = module.init_hidden(2), list[Tensor]()
    for row in x:
        out, hidden = module(row, hidden)
        expected.append(out)
    torch.testing.assert_close(y, torch.stack(expected))


@pytest.mark.parametrize("wrong", [lambda x: x, nn.GRU, None], ids=["function", "class", "none"])
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_no_module_is_not_carried(wrong: Any, fused: bool) -> None:
    with pytest.raises(ModelError, match=r"expected a torch.nn.Module.*tt\.carry\(Net\(\)\)"):
        tt.carry(wrong, fused=fused)


WIDTHS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.GRU(5, 4),
    "layer of a chain": lambda: nn.Sequential(nn.GRU(5, 8), nn.Linear(8, 4)),
    "linear map": lambda: nn.Sequential(nn.Linear(5, 6), nn.GRU(6, 4)),
    "cell": lambda: nn.GRUCell(5, 4),
    "own": lambda: Tagger(5),
    "own, a linear map": lambda: Tagger(5, front=True),
}


@every_policy
@pytest.mark.parametrize("make", list(WIDTHS.values()), ids=list(WIDTHS))
def test_inputs_of_another_width_are_named_with_that_of_the_net(
    make: Callable[[], nn.Module], policy: Policy
) -> None:
    with pytest.raises(DataError, match="have 3 features in each step, the net expects 5"):
        play(make(), policy, torch.arange(STEPS) % 4, nn.CrossEntropyLoss())


def test_a_layer_inside_that_does_not_fit_is_not_blamed_on_the_inputs() -> None:
    """Its outputs are as wide as the inputs of the net."""
    net = nn.Sequential(nn.GRU(3, 3), nn.Linear(5, 4))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        play(net, tt.Truncated(10), torch.arange(STEPS) % 4, nn.CrossEntropyLoss())


@pytest.mark.filterwarnings("ignore:Using a target size")  # of torch, before the error
@every_policy
def test_outputs_that_do_not_fit_the_targets_are_named(policy: Policy) -> None:
    net = nn.Sequential(nn.GRU(3, 8), nn.Linear(8, 2))
    with pytest.raises(ModelError, match=r"net has 2 outputs .* need 4, one for each class"):
        play(net, policy, torch.full((STEPS,), 3), nn.CrossEntropyLoss())
    with pytest.raises(ModelError, match=r"net has 2 outputs .* need 3, one for each .*column"):
        play(net, policy, torch.randn(STEPS, 3), nn.MSELoss())


def test_an_error_of_a_loss_of_the_users_keeps_its_type() -> None:
    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ValueError(f"mine: {len(outputs) - len(targets)}")

    stream = tt.Stream((torch.randn(STEPS, 3), torch.randn(STEPS, 5)), 2, 10)
    net = tt.carry(nn.GRU(3, 2))
    with pytest.raises(ValueError, match="mine: 0"):
        list(tt.updates(net, stream, loss_fn, gradient=tt.Truncated(10)))


WHOLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lanes": (lambda n: tt.Stream(np.ones(60), n, 8).lanes, "lanes"),
    "chunk": (lambda n: tt.Stream(np.ones(60), 1, n).chunk, "chunk"),
    "stride": (lambda n: tt.Truncated(n).stride, "stride"),
    "horizon": (lambda n: tt.Truncated(5, n).horizon, "horizon"),
    "burn_in": (lambda n: tt.Truncated(5, burn_in=n).burn_in, "burn_in"),
    "segments": (lambda n: tt.Exact(chunk=n).chunk, "chunk"),
    "cuts": (lambda n: tt.Exact(cut_every=n).cut_every, "cut_every"),
    "mean_horizon": (lambda n: tt.Randomized(n).mean_horizon, "mean_horizon"),
    "grain": (lambda n: tt.Randomized(100, grain=n).grain, "grain"),
    "min": (lambda n: tt.Adaptive(0.5, n, 40).min, "min"),
    "max": (lambda n: tt.Adaptive(0.5, 4, n).max, "max"),
}


@pytest.mark.parametrize(("setting", "name"), list(WHOLE.values()), ids=list(WHOLE))
def test_a_setting_is_a_whole_number_of_any_library(
    setting: Callable[[Any], Any], name: str
) -> None:
    for number in (20, np.int64(20), np.uint8(20), torch.tensor(20)):
        value = setting(number)
        assert (type(value), value) == (int, 20)
    for wrong in (20.0, np.float64(20), True, np.True_, "20"):
        with pytest.raises((ConfigError, DataError), match=f"{name}=.*expected a whole number"):
            setting(wrong)


def test_policies_of_numpy_integers_are_those_of_integers() -> None:
    twenty: Any = np.int64(20)
    policy = tt.Truncated(twenty, 2 * twenty)
    assert (policy, repr(policy)) == (tt.Truncated(20, 40), repr(tt.Truncated(20, 40)))


def test_k1_and_k2_are_named_as_here() -> None:
    wrong: Any = tt.Truncated
    line = r"k1 is the stride, k2 the horizon: write tt.Truncated\(stride=20, horizon=40\)"
    with pytest.raises(ConfigError, match=line):
        wrong(k1=20, k2=40)
    with pytest.raises(ConfigError, match=line):
        wrong(stride=20, k2=40)
    with pytest.raises(TypeError, match="unexpected keyword argument 'k3'"):
        wrong(20, k3=40)
    assert [*inspect.signature(tt.Truncated).parameters][:2] == ["stride", "horizon"]
    policy = tt.Truncated(20, 40)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert replace(policy, stride=10) == tt.Truncated(10, 40)


def test_tensors_by_name_are_columns() -> None:
    arrays: dict[str, Any] = {
        "u": torch.randn(9, requires_grad=True),
        "v": torch.randn(9, 2),
        "y": np.arange(9),
    }
    recording = tt.recording(arrays, inputs=["u", "v"], targets="y")
    steps = recording.read(2, 5)
    expected = torch.cat([arrays["u"].detach()[2:5, None], arrays["v"][2:5]], 1)
    np.testing.assert_array_equal(steps.inputs, expected)
    assert steps.targets is not None
    assert steps.targets.tolist() == [2, 3, 4]
    matrix = tt.recording(arrays["v"], inputs=["1"])
    np.testing.assert_array_equal(matrix.read(0, 9).inputs[:, 0], arrays["v"][:, 1])
    with pytest.raises(DataError, match=r"torch.bfloat16.*tensor.float\(\)"):
        tt.recording({"u": torch.zeros(9, dtype=torch.bfloat16)}, inputs=["u"])


def test_the_repr_of_a_recording_fits_a_screen() -> None:
    names = [f"{i}-{'x' * 50}" for i in range(500)]
    wide = {name: np.arange(5.0) + i for i, name in enumerate(names)}
    recordings = [
        tt.recording(wide, targets=names[:300]),
        tt.recording(wide, targets=names[0], classes=range(5000)),
        tt.recording(wide, targets=names[0], ahead=1),
        tt.recording(wide, start=1),
        *tt.Stream({"inputs": np.zeros((5, 3000)), "static": np.zeros(3000)}, 1, 5).recordings,
    ]
    for recording in recordings:
        assert len(repr(recording)) < 20 * 100
    assert repr(tt.recording({"u": np.zeros(9), "y": np.zeros(9)}, inputs=["u"], targets="y")) == (
        "TableRecording('0', 9 steps, inputs=['u'], targets=['y'])"
    )


class Tied(nn.Module):
    """One matrix for the tokens in and out: its gradient is dense in sum."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8, sparse=sparse)
        self.rnn = nn.GRU(8, 8)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(self.embedding(x), state)
        return y @ self.embedding.weight.T, state


def tokens_chain(*, sparse: bool) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 5, sparse=sparse), nn.GRU(5, 8), nn.Linear(8, 7))


SPARSE: dict[str, Policy] = {
    **POLICIES,
    "horizon beyond stride": tt.Truncated(5, 15),
    "clipped": tt.Exact(chunk=4, clip_adjoint=0.01),
}


@pytest.mark.parametrize("policy", list(SPARSE.values()), ids=list(SPARSE))
@pytest.mark.parametrize("make", [tokens_chain, Tied], ids=["chain", "tied"])
@pytest.mark.parametrize("before", [False, True], ids=["none", "own gradient before"])
def test_sparse_gradients_are_those_of_dense_embeddings(
    make: Callable[..., nn.Module], policy: Policy, before: bool
) -> None:
    """Added up over updates, and to a sparse gradient that the user has there."""
    grads = list[Tensor]()
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 7, (STEPS + 1,), generator=draw)
    for sparse in (False, True):
        torch.manual_seed(2)
        module = make(sparse=sparse).double()
        net, embedding = tt.carry(module), next(module.children())
        if before:
            embedding(torch.tensor([1, 2])).square().sum().backward()
        stream = tt.Stream({"inputs": tokens[:-1], "targets": tokens[1:]}, 2, 10)
        for accumulate in (1, 1 if policy == POLICIES["random"] else 2):
            list(
                tt.updates(
                    net, stream, nn.CrossEntropyLoss(), gradient=policy, accumulate=accumulate
                )
            )
        weight = embedding.get_parameter("weight")
        assert weight.grad is not None
        assert weight.grad.is_sparse is (sparse and make is tokens_chain)
        grads.append(weight.grad.to_dense())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-12)
    assert grads[0].count_nonzero()
