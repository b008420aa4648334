"""The mock device computes what the CPU computes, is as strict as CUDA, and counts."""

import copy
from collections.abc import Callable

import pytest
import torch
from mock_device import DEVICE, counted
from torch import Tensor, nn

from throughtime import _device

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


def test_a_number_of_the_cpu_and_indices_of_the_cpu_are_taken() -> None:
    x = torch.randn(3, 4)
    with counted() as counts:
        scaled, rows = x.to(DEVICE) * torch.tensor(2.0), x.to(DEVICE)[torch.tensor([2, 0])]
    assert torch.equal(scaled.cpu(), x * 2)
    assert torch.equal(rows.cpu(), x[[2, 0]])
    assert counts.to_device == 3  # the indices too


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


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("host_reads", lambda d: d.sum().item()),
        ("nonzero", lambda d: d[d > 0]),
        ("to_device", lambda _: torch.ones(3).to(DEVICE)),
        ("from_device", lambda d: d.tolist()),
        ("blocking", lambda d: d.cpu()),
    ],
)
def test_what_is_refused_raises_where_it_happens(
    kind: str, function: Callable[[Tensor], object]
) -> None:
    on_device = torch.ones(3, device=DEVICE)
    with counted(refuse=(kind,)), pytest.raises(RuntimeError, match=r"^refused: "):
        function(on_device)
    function(on_device)


def test_copies_of_pinned_memory_need_not_be_waited_for() -> None:
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert not torch.ones(4).is_pinned()
    with counted() as counts:
        on_device = pinned.to(DEVICE, non_blocking=True)
        back = torch.empty(4, pin_memory=True).copy_(on_device, non_blocking=True)
    assert (counts.to_device, counts.from_device, counts.blocking) == (1, 1, 0)
    assert back.isnan().all()  # it has not arrived
    event = torch.Event(DEVICE)
    event.record()
    event.synchronize()
    assert torch.equal(back, torch.ones(4))
    with counted() as counts:
        torch.ones(4).to(DEVICE, non_blocking=True)  # pageable: CUDA waits too
    assert counts.blocking == 1


def test_pinned_memory_must_be_left_alone_until_its_copy_is_done() -> None:
    pinned = torch.ones(4).pin_memory()
    on_device = pinned.to(DEVICE, non_blocking=True)
    pinned[0] = 5
    with pytest.raises(RuntimeError, match="overwritten before its copy"):
        on_device.sum().item()


def test_each_device_has_a_generator_of_its_own() -> None:
    before = torch.get_rng_state()
    with _device.fork_rng(DEVICE):
        assert torch.rand(3, device=DEVICE).device == DEVICE
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    drawn = [torch.rand(3, device=device).cpu() for device in (DEVICE, OTHER, "cpu")]
    assert torch.equal(drawn[0], drawn[1])  # seeded alike, and as the CPU's
    assert torch.equal(drawn[0], drawn[2])
    other = _device.generators(OTHER)["mock"]
    _device.seed_generators(3, DEVICE)
    assert torch.equal(torch.rand(3, device=DEVICE).cpu(), drawn[0])
    assert torch.equal(_device.generators(OTHER)["mock"], other)


def test_seeding_every_device_is_noticed() -> None:
    other = _device.generators(OTHER)["mock"]
    torch.manual_seed(11)
    assert not torch.equal(_device.generators(OTHER)["mock"], other)


def test_what_the_device_says_of_itself() -> None:
    assert _device.is_accelerator(DEVICE)
    assert _device.pins_memory(DEVICE.type)
    assert torch.empty(3, device=DEVICE).isnan().all()  # what nobody has written is no number


def test_autocast_lowers_products() -> None:
    x = torch.randn(3, 4, device=DEVICE)
    with torch.autocast("mock", dtype=torch.bfloat16):
        assert (x @ x.T).dtype == torch.bfloat16
        assert nn.functional.mse_loss((x @ x.T), (x @ x.T)).dtype == torch.float32


def test_views_share_memory_and_complex_numbers_work() -> None:
    pairs = torch.zeros(3, 2, device=DEVICE)
    z = torch.view_as_complex(pairs)
    pairs[:, 1] = 1.0
    assert torch.equal(z.conj().cpu(), torch.full((3,), -1j))
    assert torch.equal((z * z.conj()).real.cpu(), torch.ones(3))
    assert torch.equal((z[1:] * torch.tensor(2j)).imag.cpu(), torch.zeros(2))
    pairs[2] = torch.tensor([5.0, 7.0], device=DEVICE)
    assert z[1:].imag.tolist() == [1.0, 7.0]
