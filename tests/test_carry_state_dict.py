"""The weights of a carried net interchange with those of the plain module, under its names."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import ModelError


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3))

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, after = self.lstm(x - self.mean, state)
        return self.head(y) * self.scale, after


class InnerModule(nn.Module):
    """A wrapper with a child that is called `module` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.GRU(3, 4)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.module(x, state)


def sequential() -> nn.Module:
    return nn.Sequential(nn.GRU(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LSTM(3, 4, 2),
    "cell": lambda: nn.GRUCell(3, 4),
    "sequential": sequential,
    "class": Classifier,
    "module inside": InnerModule,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.GRU(3, 4), "weight_hh_l0"),
    "fused": lambda: tt.fuse(sequential()),
}
EVERY = pytest.mark.parametrize("name", MODULES)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


@EVERY
def test_plain_and_carried_modules_load_each_other(name: str) -> None:
    plain, net = MODULES[name](), tt.carry(MODULES[name]())
    assert list(net.state_dict()) == list(plain.state_dict())
    assert str(net.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert same(weights(net), weights(plain))
    assert same(weights(net.module), weights(plain))
    other = MODULES[name]()
    assert str(other.load_state_dict(net.state_dict())) == "<All keys matched successfully>"
    assert same(weights(other), weights(plain))


@EVERY
def test_carried_nets_inside_a_module_load_and_save_the_plain_names(name: str) -> None:
    def outer(inner: nn.Module) -> nn.Module:
        return nn.ModuleDict({"first": nn.Linear(2, 2), "net": inner, "module": nn.Linear(2, 2)})

    plain, carried = outer(MODULES[name]()), outer(tt.carry(MODULES[name]()))
    assert list(carried.state_dict()) == list(plain.state_dict())
    carried.load_state_dict(plain.state_dict())
    assert same(weights(carried), weights(plain))
    plain.load_state_dict(carried.state_dict())


def test_versions_of_modules_are_saved_with_their_plain_names() -> None:
    metadata = [m.state_dict()._metadata for m in (Classifier(), tt.carry(Classifier()))]  # type: ignore[attr-defined]
    assert metadata[0].items() <= metadata[1].items()


@EVERY
def test_a_state_dict_of_a_data_parallel_module_loads(name: str) -> None:
    plain = MODULES[name]()
    net = tt.carry(MODULES[name]())
    net.load_state_dict({f"module.{key}": value for key, value in plain.state_dict().items()})
    assert same(weights(net), weights(plain))


def test_assigned_weights_are_the_tensors_of_the_state_dict() -> None:
    net, values = tt.carry(Classifier()), Classifier().double().state_dict()
    net.load_state_dict(values, assign=True)
    assert net.module.get_parameter("head.weight").dtype is torch.float64
    assert net.module.get_buffer("mean").data_ptr() == values["mean"].data_ptr()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_of_a_carried_net_save_the_plain_names(
    copied: Callable[[Carried], Carried],
) -> None:
    net = tt.carry(sequential())
    twin = copied(net)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    net.load_state_dict(twin.state_dict())
    assert same(weights(net.module), weights(twin.module))


def test_a_saved_file_interchanges() -> None:
    net, file = tt.carry(sequential(), fused=True), io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    plain = sequential()
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert same(weights(plain), weights(net))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_distributed_checkpoints_have_the_plain_names(tmp_path: Path) -> None:
    plain, net = Classifier(), tt.carry(Classifier())
    assert same(dict(get_model_state_dict(net)), dict(net.state_dict()))  # type: ignore[arg-type]
    set_model_state_dict(net, get_model_state_dict(plain))
    assert same(weights(net), weights(plain))
    optimizer = torch.optim.Adam(net.parameters())
    get_optimizer_state_dict(net, optimizer)
    state_dict_saver.save({"net": get_model_state_dict(net)}, checkpoint_id=tmp_path)
    fresh = Classifier()
    state_dict_loader.load({"net": fresh.state_dict()}, checkpoint_id=tmp_path)
    assert same(weights(fresh), weights(net))


def test_weights_are_swapped_by_the_names_of_named_parameters() -> None:
    """`functional_call` reaches the parameters of the layer, or says how."""
    net, x = tt.carry(nn.GRU(3, 4)), torch.randn(5, 2, 3)
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    y, _ = torch.func.functional_call(net, zeros, (x, net.initial_state(2)))
    assert not y.any()
    with pytest.raises(ModelError, match=r"net\.module\.weight_ih_l0.*named_parameters\(\)"):
        torch.func.functional_call(net, dict(net.state_dict()), (x, net.initial_state(2)))
    assert list(net.state_dict()) == list(net.module.state_dict())
