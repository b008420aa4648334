"""Loops as users write them for a GPU: the numbers of the CPU, or a message with the line to write.

Every script takes the device and returns numbers; it runs on both.
"""

import io
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from mock_device import DEVICE
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried

CPU = torch.device("cpu")
LENGTHS = (130, 70, 100)
MSE, TRUNCATED = nn.MSELoss(), tt.Truncated(20, horizon=45)


def recordings() -> list[dict[str, Tensor]]:
    drawn = torch.Generator("cpu").manual_seed(0)
    result: list[dict[str, Tensor]] = []
    for n in LENGTHS:
        x = torch.randn(n, 3, generator=drawn, device="cpu")
        y = torch.randn(n, generator=drawn, device="cpu")
        result.append({"inputs": x, "targets": y})
    return result


def stream_of(data: Any = None, lanes: int = 2, **options: Any) -> tt.Stream:
    return tt.Stream(recordings() if data is None else data, lanes=lanes, chunk=20, **options)


def module_of(outputs: int = 1, device: torch.device = CPU) -> nn.Sequential:
    torch.default_generator.manual_seed(0)
    with CPU:
        module = nn.Sequential(nn.LSTM(3, 6), nn.Linear(6, outputs))
    return module.to(device)


def train(
    net: Carried, stream: Any = None, loss_fn: Any = MSE, gradient: Any = TRUNCATED
) -> list[Tensor]:
    """The weights after an epoch."""
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    stream = stream_of() if stream is None else stream
    for _ in tt.updates(net, stream, loss_fn, gradient=gradient):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [*net.parameters()]


def checkpoints_between_devices(device: torch.device) -> list[Any]:
    """Saved on the device, resumed on the CPU, and back."""
    saved: Any = None
    for place in (device, CPU, device):
        net = tt.carry(module_of(device=place))
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        updates = tt.updates(net, stream_of(), MSE, gradient=TRUNCATED)
        if saved is not None:
            saved.seek(0)
            values = torch.load(saved, map_location=place)
            net.load_state_dict(values["net"])
            optimizer.load_state_dict(values["optimizer"])
            updates.load_state_dict(values["updates"])
        for _ in range(3):
            next(updates)
            optimizer.step()
            optimizer.zero_grad()
        parts = {"net": net, "optimizer": optimizer, "updates": updates}
        saved = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items()}, saved)
    return [*net.parameters()]


def a_predictor_whose_net_moves(device: torch.device) -> list[Any]:
    net, x = tt.carry(module_of(device=device)), recordings()[0]["inputs"].unsqueeze(1)
    predictor = tt.Predictor(net)
    values = [predictor(x[:20]), predictor(x[20:40].numpy())]
    net.to(CPU)
    values += [predictor(x[40:60]), predictor.step(x[60])]
    predictor.reset([0])
    net.to(device)
    return [*values, predictor(x[:20]), predictor.step(x[20].to(device)), predictor.step(x[21])]


SCRIPTS: list[Callable[[torch.device], list[Any]]] = [
    *(checkpoints_between_devices, a_predictor_whose_net_moves),
]


def assert_equal_on_both(script: Callable[[torch.device], list[Any]]) -> None:
    on_cpu, on_device = (
        [torch.as_tensor(np.nan if v is None else v, device="cpu").detach() for v in script(device)]
        for device in (CPU, DEVICE)
    )
    torch.testing.assert_close(on_device, on_cpu, rtol=1e-3, atol=1e-5, equal_nan=True)


# torch.compile reads .grad of its inputs; it hides the warning, but not from a filter for errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_computes_on_the_device_what_it_computes_on_the_cpu(script: Any) -> None:
    assert_equal_on_both(script)


@contextmanager
def default_device(device: torch.device) -> Generator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


POLICIES: list[Any] = [
    *(tt.Truncated(20, jitter=True), tt.Exact(chunk=15), tt.Randomized(40)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_updates_are_the_same_with_a_default_device(policy: Any) -> None:
    def script(device: torch.device) -> list[Any]:
        torch.default_generator.manual_seed(1)
        with default_device(device):
            return train(tt.carry(module_of(device=device)), stream_of(lanes=1), gradient=policy)

    assert_equal_on_both(script)
