"""The mock device computes what the CPU computes, is as strict as CUDA, and counts."""

import copy
from collections.abc import Callable

import pytest
import torch
from mock_device import DEVICE, counted
from torch import Tensor, nn

OTHER = torch.device("mock:1")


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_and_their_gradients_equal_those_of_the_cpu(
    layer: Callable[..., nn.RNNBase], bias: bool
) -> None:
    on_cpu = layer(4, 5, 2, bias=bias, dtype=torch.float64)
    on_device = copy.deepcopy(on_cpu).to(DEVICE)
    x = torch.randn(7, 3, 4, dtype=torch.float64)
    losses: list[Tensor] = []
    for net, inputs in ((on_cpu, x), (on_device, x.to(DEVICE))):
        y, _ = net(inputs)
        losses.append(y.square().sum())
        losses[-1].backward()
    torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-12, atol=0)
    for p, q in zip(on_cpu.parameters(), on_device.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert q.grad.device == DEVICE
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda d, x: d + x, id="number by number"),
        pytest.param(lambda d, x: d @ x.T, id="product"),
        pytest.param(lambda d, x: torch.cat([d, x]), id="cat"),
        pytest.param(lambda d, x: torch.where(x > 0, d, d), id="where"),
        pytest.param(lambda d, x: x.add_(d), id="in place"),
        pytest.param(lambda d, _: torch.zeros(()).add_(d.sum()), id="into a number"),
        pytest.param(lambda d, x: d.index_add_(0, torch.tensor([0]), x[:1].to(DEVICE)), id="index"),
        pytest.param(lambda d, x: d + x.to(OTHER), id="two devices"),
        pytest.param(lambda d, x: torch.ops.aten._foreach_add.List([d], [x]), id="lists"),
    ],
)
def test_tensors_of_two_devices_are_refused(function: Callable[[Tensor, Tensor], object]) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="same device"):
        function(x.to(DEVICE), x)


def test_counts() -> None:
    x = torch.randn(3, 4)
    with counted() as counts:
        on_device = x.to(DEVICE)
    assert (counts.to_device, counts.from_device, counts.blocking) == (1, 0, 1)
    with counted() as counts:
        _ = (on_device + 1).T.contiguous()
    assert (counts.operators, dict(counts.names)) == (2, {"aten::add": 1, "copy_": 1})
    with counted() as counts:
        assert on_device.sum().item() == pytest.approx(x.sum().item())
        assert bool((on_device == on_device).all())
        assert torch.equal(on_device, on_device)
    assert (counts.host_reads, counts.from_device) == (3, 0)
    with counted() as counts:
        _ = on_device[on_device > 0], on_device.nonzero()
        on_device[on_device > 0] = 1.0  # needs no shape
    assert (counts.nonzero, counts.host_reads) == (2, 0)
    with counted() as counts:
        _ = on_device.cpu()
    assert (counts.from_device, counts.blocking) == (1, 1)
