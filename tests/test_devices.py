"""One module asks for the kind of a device, and only the device in use is touched.

Laws of the numbers on another device than the CPU are in `tests/device`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import throughtime as tt
from throughtime import _device
from throughtime.carry import Carried
from throughtime.testing import check_no_leak

SOURCES = Path(tt.__file__).parent
KINDS = {"cuda", "mps", "xpu"}
# attributes of tensors and of torch's modules that ask for a kind, or touch every device
ASKING = {"is_cuda", "is_mps", "is_xpu", "manual_seed_all", "get_rng_state_all", "synchronize"}
# of torch itself
GLOBAL = KINDS | {"manual_seed", "seed", "random"}


def questions(source: str) -> Iterator[str]:
    """The expressions that ask for a kind of device, or touch all devices."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) if name in ASKING:
                yield ast.unparse(node)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in GLOBAL:
                yield ast.unparse(node)
            case ast.Compare(left=ast.Attribute(attr="type")):
                named = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                if named & KINDS:
                    yield ast.unparse(node)
            case _:
                pass


def test_one_module_asks_for_the_kind_of_a_device() -> None:
    asked = {
        str(path.relative_to(SOURCES)): expressions
        for path in sorted(SOURCES.rglob("*.py"))
        if path.name != "_device.py"
        and (expressions := list(questions(path.read_text(encoding="utf-8"))))
    }
    assert not asked, asked


# functions that make tensors on the device of `torch.set_default_device`
FACTORIES = {
    *("zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "eye"),
    *("linspace", "logspace", "tensor", "as_tensor", "asarray", "scalar_tensor", "empty_strided"),
    *("tril_indices", "triu_indices", "hann_window", "hamming_window", "sparse_coo_tensor"),
}


def undecided(source: str) -> Iterator[str]:
    """The calls of functions that make tensors, without a device; names of them but in `is`."""
    tree = ast.parse(source)
    decided: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call() if any(keyword.arg == "device" for keyword in node.keywords):
                decided.add(id(node.func))
            case ast.Compare(ops=[ast.Is()], comparators=[compared]):
                decided.add(id(compared))
            case _:
                pass
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in FACTORIES:
                if id(node) not in decided:
                    yield f"{node.lineno}: {ast.unparse(node)}"
            case _:
                pass


def test_every_tensor_is_made_on_a_device_that_the_code_names() -> None:
    """Or `torch.set_default_device` would move what belongs to the host.

    The parameters and buffers of layers follow it, as those of `torch.nn` do.
    """
    calls = {
        str(path.relative_to(SOURCES)): lines
        for path in sorted(SOURCES.rglob("*.py"))
        if path.parent != SOURCES / "nn"
        and (lines := list(undecided(path.read_text(encoding="utf-8"))))
    }
    assert not calls, calls


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs that no test may touch."""

    train_and_check()  # torch._dynamo lists torch's functions once, which must be the real ones

    def touched(*_: Any) -> NoReturn:
        raise AssertionError("a GPU was touched, and the net is on the CPU")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, touched)


def net_with_dropout() -> Carried:
    return tt.carry(nn.Sequential(nn.LSTM(3, 4, 2, dropout=0.3), nn.Dropout(0.2), nn.Linear(4, 1)))


def stream() -> tt.Stream:
    recordings = [{"inputs": torch.randn(n, 3), "targets": torch.randn(n, 1)} for n in (30, 20)]
    return tt.Stream(recordings, lanes=2, chunk=10)


def train_and_check() -> None:
    net = net_with_dropout()
    policies: list[Any] = [tt.Exact(), tt.Truncated(5, 15)]
    for policy in policies:
        losses = [u.loss for u in tt.updates(net, stream(), nn.MSELoss(), gradient=policy)]
        assert losses
    check_no_leak(stream(), net)


@pytest.mark.usefixtures("eight_gpus")
def test_a_net_on_the_cpu_touches_no_gpu() -> None:
    train_and_check()


def test_forked_generators_return_to_their_state() -> None:
    cpu = torch.device("cpu")
    before = torch.get_rng_state()
    with _device.fork_rng(cpu):
        _device.seed_generators(7, cpu)
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn)


def test_kinds_of_devices() -> None:
    kinds = ("cpu", "meta", "cuda", "mps")
    devices = [torch.device(kind) for kind in kinds]
    assert [_device.is_accelerator(device) for device in devices] == [False, False, True, True]
    assert [_device.real_type(d) for d in devices] == [torch.float64] * 3 + [torch.float32]
