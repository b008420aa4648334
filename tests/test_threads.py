"""How many threads a kernel takes, and how often: by its work, and by whether the others came.

A pool of the tests takes the place of OpenMP's. It counts regions, and the caller is their only
thread, as where no core is free for the others.
"""

import ctypes
import time
from collections.abc import Callable, Container, Generator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import throughtime as tt
from throughtime.kernels import library as loader
from throughtime.kernels.cells import GRU, LSTM, RNN_TANH, Cell, Weights
from throughtime.kernels.recurrent import LayerInputs, backward, forward

pytestmark = pytest.mark.skipif(loader.library() is None, reason="needs the compiled core")
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
POOL = ctypes.CFUNCTYPE(None, BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
FEATURES = 16


class Pool:
    """Counts regions; each takes some time after its body, as if a thread had to be waited for."""

    def __init__(self, delay: float = 0.0) -> None:
        self.regions, self.delay = 0, delay

    def run(self, body: Callable[[int], None], data: int, threads: int, flags: int) -> None:
        assert (threads, flags) == (2, 0)
        self.regions += 1
        body(data)
        if self.delay:
            time.sleep(self.delay)  # even zero seconds would let other processes run


@contextmanager
def two_threads(pool: Pool, least_work: int | None = None) -> Generator[None]:
    """Kernels ask for two threads, and the pool is theirs; afterwards all is as before."""
    core = loader.library()
    assert core is not None
    core.tt_use_threads_from.argtypes = [ctypes.c_int64]
    core.tt_use_threads_from.restype = ctypes.c_int64
    run = POOL(pool.run)
    usual = core.tt_use_threads_from(0)
    if least_work is None:
        core.tt_use_threads_from(usual)
    torch.set_num_threads(2)
    core.tt_pool(ctypes.cast(run, ctypes.c_void_p))
    try:
        yield
    finally:
        in_time = POOL(Pool().run)
        core.tt_pool(ctypes.cast(in_time, ctypes.c_void_p))
        core.tt_use_threads_from(0)
        forward(layer(LSTM, 1, 8), keep=False)  # the next call may have a team
        core.tt_use_threads_from(usual)
        core.tt_pool(loader._parallel())
        torch.set_num_threads(1)


def layer(cell: Cell, lanes: int, hidden: int, steps: int = 100) -> LayerInputs:
    torch.manual_seed(0)
    x, h = torch.randn(steps, lanes, FEATURES), torch.zeros(lanes, hidden)
    gates = len(cell.gates) * hidden
    scale = hidden**-0.5  # larger ones make chaos, whose gradients are infinite
    ih, hh = torch.randn(gates, FEATURES), torch.randn(gates, hidden) * scale
    weights = Weights(ih, hh, None, None, None)
    return LayerInputs(cell, x.dtype, x, h, h.clone() if cell is LSTM else None, weights, None)


def both_passes(inputs: LayerInputs) -> list[torch.Tensor]:
    y, _, _, saved = forward(inputs, keep=True)
    needs = [t is not None for t in inputs.leaves]
    cotangents = (torch.ones_like(y), None, None)
    return [y, *(g for g in backward(inputs, y, saved, cotangents, needs) if g is not None)]


SMALL = [(LSTM, 1, 128), (GRU, 1, 128), (RNN_TANH, 1, 256)]
LARGE = [(LSTM, 32, 128), (GRU, 16, 128), (RNN_TANH, 64, 128)]


@pytest.mark.parametrize(("cell", "lanes", "hidden"), SMALL)
def test_small_layers_run_on_one_thread(cell: Cell, lanes: int, hidden: int) -> None:
    pool, inputs = Pool(), layer(cell, lanes, hidden)
    with two_threads(pool):
        both_passes(inputs)
    assert pool.regions == 0
    mutant = Pool()
    with two_threads(mutant, least_work=0):
        both_passes(inputs)
    assert mutant.regions == 2


@pytest.mark.parametrize(("cell", "lanes", "hidden"), LARGE)
def test_large_layers_open_one_region_a_pass_and_give_the_bits_of_one_thread(
    cell: Cell, lanes: int, hidden: int
) -> None:
    pool, inputs = Pool(), layer(cell, lanes, hidden)
    expected = both_passes(inputs)
    with two_threads(pool):
        actual = both_passes(inputs)
    assert pool.regions in (
        1,
        2,
    )  # the second is left out if the machine was too busy for the first
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("lanes", "regions"), [(1, 0), (32, 4)])
def test_an_update_opens_one_region_at_most(lanes: int, regions: int) -> None:
    net = tt.carry(nn.Sequential(tt.nn.LSTM(FEATURES, 128), nn.Linear(128, 5)))
    recordings = [
        {"inputs": torch.randn(400, FEATURES), "targets": torch.randint(5, (400,))}
        for _ in range(lanes)
    ]
    stream = tt.Stream(recordings, lanes=lanes, chunk=100)
    optimizer, pool = tt.optim.Adam(net.parameters(), max_norm=1.0), Pool()
    with two_threads(pool):
        for _ in tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(100)):
            optimizer.step()
            optimizer.zero_grad()
    assert min(1, regions) <= pool.regions <= regions


@pytest.mark.parametrize(("delay", "regions"), [(0.0, range(15, 21)), (0.05, [4])])
def test_calls_skip_the_pool_while_the_caller_waits_for_a_third_of_its_time(
    delay: float, regions: Container[int]
) -> None:
    """After a late region 2 calls skip it, then 4, then 8: of 20 the 1st, 4th, 9th and 18th stay.

    On a busy machine a few others may be late.
    """
    pool, inputs = Pool(delay), layer(LSTM, 32, 64, steps=40)
    with two_threads(pool):
        for _ in range(20):
            forward(inputs, keep=False)
    assert pool.regions in regions
