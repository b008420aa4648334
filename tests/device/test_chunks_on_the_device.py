"""Chunks on a device: metadata on the host, sent when it is read."""

import gc

import torch
from mock_device import DEVICE, counted
from torch import nn

import throughtime as tt
from throughtime._metadata import ChunkMetadata
from throughtime.chunk import Chunk, join
from throughtime.gradient.objective import Objective

CPU = torch.device("cpu")
NAMES = ("resets", "mask", "recording", "position")


def chunks(device: torch.device) -> list[Chunk]:
    """Two lanes with gaps and resets, in chunks of 10 steps of one block."""
    torch.manual_seed(0)
    data: list[dict[str, torch.Tensor]] = []
    for n in (23, 40, 9, 30):
        targets = torch.arange(n) % 3 - 1
        targets[::3] = -100
        data.append({"inputs": torch.randn(n, 3), "targets": targets, "weight": torch.rand(n)})
    return [chunk.to(device) for chunk in tt.Stream(data, lanes=2, chunk=10, seed=None)]


def test_metadata_is_on_the_device_and_equals_that_of_the_host() -> None:
    for own, expected in zip(chunks(DEVICE), chunks(CPU), strict=True):
        for name in (*NAMES, "starts", "ends"):
            values = getattr(own, name)
            assert values.device == DEVICE
            assert torch.equal(values.cpu(), getattr(expected, name))
        assert own["weight"].device == DEVICE
        assert torch.equal(own["weight"].cpu(), expected["weight"])
        assert own.reset_steps == expected.reset_steps
        assert (own.valid_steps, own.any_reset) == (expected.valid_steps, expected.any_reset)
        assert own.host_targets is not None
        assert expected.targets is not None
        assert torch.equal(own.host_targets, expected.targets)
        outputs = torch.randn(own.steps, 2, 2)
        rows, targets = own.valid_pairs(outputs.to(DEVICE))
        assert torch.equal(rows.cpu(), outputs[expected.mask])
        assert torch.equal(targets.cpu(), expected.targets[expected.mask])


def test_resets_and_mask_of_a_block_are_sent_together_once() -> None:
    first, *others = chunks(DEVICE)
    with counted() as counts:
        assert first.mask.device == first.resets.device == first.valid.device == DEVICE
        for chunk in others:
            assert chunk.mask.device == DEVICE
    assert (counts.to_device, counts.blocking) == (1, 0)


def test_a_call_with_the_resets_of_a_chunk_reads_nothing() -> None:
    torch.manual_seed(1)
    net = tt.carry(nn.Sequential(nn.GRU(3, 4), nn.LSTM(4, 2)), fused=True)
    plain, chunk = (next(c for c in chunks(d)[1:] if c.any_reset) for d in (CPU, DEVICE))
    expected, _ = net(plain.inputs, net.initial_state(2), plain.resets)
    net.to(DEVICE)
    assert chunk.resets.device == DEVICE
    with counted(refuse=("host_reads", "nonzero", "from_device")):
        y, _ = net(chunk.inputs, net.initial_state(2), chunk.resets)
    torch.testing.assert_close(y.cpu(), expected)


def test_targets_that_were_changed_on_the_device_count_as_they_are_there() -> None:
    weights: list[list[float]] = []
    for device in (CPU, DEVICE):
        chunk = chunks(device)[0]
        assert chunk.targets is not None
        chunk.targets[2:5] = -100  # as a loop does that leaves out steps by itself
        seen = [chunk, chunk[1:4], join([chunk[:3], chunk[3:]])]
        weights.append([Objective(nn.CrossEntropyLoss()).weight(c) for c in seen])
    assert weights[1] == weights[0]
    assert weights[0][0] < chunks(CPU)[0].valid_steps


def test_a_window_releases_the_blocks_that_it_has_left() -> None:
    """Joined metadata refer to the blocks of their own steps, never to earlier windows."""
    torch.manual_seed(0)
    data = [{"inputs": torch.randn(n, 2), "targets": torch.randn(n, 1)} for n in [70, 330] * 160]
    net = tt.carry(nn.Sequential(nn.LSTM(2, 2), nn.Linear(2, 1))).to(DEVICE)
    stream = tt.Stream(data, lanes=160, chunk=25)
    policy = tt.Truncated(25, horizon=60)
    alive: list[int] = []
    for _ in tt.updates(net, stream, nn.MSELoss(), gradient=policy):
        gc.collect()
        alive.append(sum(isinstance(thing, ChunkMetadata) for thing in gc.get_objects()))
    assert len(alive) == 16
    assert max(alive[8:]) <= alive[6] + 1
