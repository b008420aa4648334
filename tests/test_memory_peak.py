"""Resident memory of a process while an exact gradient is computed: that of one segment.

Shapes: `T` steps, `B` lanes.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.gradient import segment

# what torch and Python set up once, and what the allocator does not return to the system
UNCOUNTED = 8e6


class CellLoop(nn.Module):
    """A cell of torch in a loop over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.readout = nn.GRUCell(3, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        last = x.new_zeros(x.shape[1], 16) if h is None else h
        outputs = list[Tensor]()
        for row in x.unbind(0):
            last = self.cell(row, last)
            outputs.append(last)
        return self.readout(torch.stack(outputs)), last


class Handwritten(nn.Module):
    """An LSTM in operations on small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.back = nn.Linear(3, 64), nn.Linear(16, 64)
        self.readout = nn.Linear(16, 1)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        zeros = x.new_zeros(x.shape[1], 16)
        h, c = (zeros, zeros) if state is None else state
        outputs = list[Tensor]()
        for step in range(len(x)):
            i, f, g, o = (self.up(x[step]) + self.back(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return self.readout(torch.stack(outputs)), (h, c)


class Classifier(nn.Module):
    """A layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.readout = nn.LSTM(3, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(x, state)
        return self.readout(torch.relu(y)), state


NETS: dict[str, Callable[[], nn.Module]] = {
    "loop": CellLoop,
    "handwritten": Handwritten,
    "gru": lambda: nn.Sequential(nn.GRU(3, 16), nn.Dropout(0.1), nn.Linear(16, 1)),
    "lstm": lambda: nn.Sequential(nn.LSTM(3, 64), nn.Linear(64, 1)),
    "class": Classifier,
}


def limited(_: int) -> tt.Exact:
    """Segments whose tensors take a megabyte at most."""
    segment.MOST_BYTES = 1_000_000
    return tt.Exact()


POLICIES: dict[str, Callable[[int], Any]] = {
    "exact": lambda _: tt.Exact(),
    "limited": limited,
    "randomized": lambda steps: tt.Randomized(steps, alpha=1.01, grain=1),
    "whole": lambda steps: tt.Exact(chunk=steps),
}


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measure(net_name: str, policy_name: str, steps: int) -> None:
    """Print by how many bytes the process grew at most."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, targets = torch.randn(steps, 3), torch.randn(steps, 1)
    net = tt.carry(NETS[net_name](), x[:10].unsqueeze(1))

    def epoch(count: int, policy: Any) -> None:
        recording = {"inputs": x[:count], "targets": targets[:count]}
        for _ in tt.updates(
            net, tt.Stream(recording, lanes=1, chunk=100), nn.MSELoss(), gradient=policy
        ):
            pass

    epoch(200, tt.Exact(chunk=100))
    before = resident("VmRSS")
    epoch(steps, POLICIES[policy_name](steps))
    print(resident("VmHWM") - before)


@cache
def peak(net_name: str, policy_name: str, steps: int) -> int:
    """The same in a process of its own."""
    command = [sys.executable, __file__, net_name, policy_name, str(steps)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert not result.returncode, result.stderr
    return int(result.stdout)


on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the peak of a process from /proc"
)


@on_linux
@pytest.mark.parametrize(
    "name",
    [n if n == "loop" else pytest.param(n, marks=pytest.mark.slow) for n in NETS],
)
def test_process_hardly_grows_with_the_steps(name: str) -> None:
    assert peak(name, "exact", 15_000) < peak(name, "exact", 5000) + UNCOUNTED


@on_linux
def test_one_graph_of_all_steps_grows_with_them() -> None:
    """The mutant."""
    assert peak("loop", "whole", 5000) > 3 * peak("loop", "exact", 5000)


@on_linux
def test_segments_are_shorter_where_their_graph_would_take_more_than_the_limit() -> None:
    assert peak("lstm", "limited", 5000) < peak("lstm", "exact", 5000) / 2


@on_linux
def test_segments_of_a_step_take_little_memory() -> None:
    """A cut may fall at every step, which makes a call of the net of every step."""
    assert peak("lstm", "randomized", 3000) < 2 * UNCOUNTED


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("name", list(NETS))
def test_process_does_not_grow_with_a_million_steps(name: str) -> None:
    """Beyond its inputs and the stored states."""
    assert peak(name, "exact", 1_000_000) < peak(name, "exact", 10_000) + 2 * UNCOUNTED


if __name__ == "__main__":
    measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
