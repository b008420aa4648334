"""Windows from carried states on a device: the numbers of the CPU, and no read of the device."""

import pytest
import torch
from examples.policies.starts import CarriedStart, NoiseStart
from mock_device import DEVICE, counted
from torch import Tensor, nn

import throughtime as tt
from throughtime.gradient import Policy

CPU = torch.device("cpu")
LENGTHS = (23, 10, 31)


def trained(device: torch.device, policy: Policy) -> list[Tensor]:
    """The outputs of every update of two epochs of windows of 5 steps."""
    generator = torch.Generator().manual_seed(0)
    data = [
        {
            "inputs": torch.randn(n, 2, dtype=torch.float64, generator=generator),
            "targets": torch.randn(n, 1, dtype=torch.float64, generator=generator),
        }
        for n in LENGTHS
    ]
    stream = tt.Stream(tt.windows(data, 5), lanes=2, chunk=5, seed=1)
    torch.default_generator.manual_seed(3)
    net = tt.carry(nn.Sequential(nn.LSTM(2, 6), nn.Linear(6, 1)).double().to(device))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    outputs = list[Tensor]()
    run = tt.updates(net, stream, nn.MSELoss(), gradient=policy)
    for epoch in range(2):
        if epoch:
            known = run.policy_state
            run = tt.updates(net, stream, nn.MSELoss(), gradient=policy, policy_state=known)
        for update in run:
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(update.outputs.cpu())
    return outputs


both = pytest.mark.parametrize("policy", [CarriedStart(5), NoiseStart(5)], ids=["carried", "noise"])


def test_carried_starts_are_those_of_the_cpu() -> None:
    for own, expected in zip(
        trained(DEVICE, CarriedStart(5)), trained(CPU, CarriedStart(5)), strict=True
    ):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)


@both
def test_starts_read_nothing_from_the_device(policy: Policy) -> None:
    with counted() as plain:
        trained(DEVICE, tt.Truncated(5))
    with counted() as counts:
        trained(DEVICE, policy)
    assert counts.blocking <= plain.blocking
