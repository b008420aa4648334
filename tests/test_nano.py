"""`examples/nano.py` computes what the library computes, and imports nothing of it.

Each mutant is an edit of its text: a wrong version that the comparison must tell apart.

Shapes: `T` steps, `B` lanes.
"""

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from plain_loop import plain_loop
from throughtime.gradient import Policy

ROOT = Path(__file__).parent.parent
SOURCE = (ROOT / "examples" / "nano.py").read_text(encoding="utf-8")
LANES, STRIDE, HORIZON, SEGMENT = 3, 6, 17, 5
LENGTHS = (23, 10, 8, 31, 12, 4, 17)  # lanes start recordings within windows, and end apart
ALIKE = (20, 20, 20, 15, 15, 15)  # lanes start recordings together
WIDE = torch.float64
Numbers = tuple[list[float], list[Tensor]]


def load() -> Any:
    """The file as a module."""
    nano = ModuleType("nano")
    exec(compile(SOURCE, "nano.py", "exec"), nano.__dict__)
    return nano


def recordings(lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=WIDE, generator=generator)

    data = [(draw(n, 2), draw(n)) for n in lengths]
    data[1][1][3:7] = torch.nan  # steps without a target
    return data


def make_net(nano: Any) -> Any:
    torch.manual_seed(3)
    net = nano.Net(inputs=2, units=6).to(WIDE)
    with torch.no_grad():
        net.lstm.bias_ih_l0[6:12] += 3.0  # the state lasts, so each mistake shows
    return net


def windows(nano: Any, stream: Any, policy: Policy) -> list[Any]:
    if isinstance(policy, tt.Truncated):
        return nano.truncated(stream, policy.stride, policy.horizon or policy.stride)
    return nano.exact(stream, SEGMENT)


def by_nano(nano: Any, lengths: Sequence[int], policy: Policy) -> Numbers:
    """The loss of each update in two epochs, and the weights after them."""
    stream, net = nano.Stream(recordings(lengths), LANES), make_net(nano)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loss_sum, losses = nn.MSELoss(reduction="sum"), list[float]()
    for _ in range(2):
        progress = nano.Progress(0, net.initial_state(LANES))
        plan = windows(nano, stream, policy)
        updates = nano.train(net, optimizer, stream, plan, loss_sum, progress)
        losses += [loss for loss, _ in updates if loss is not None]
    return losses, [weight.detach() for weight in net.parameters()]


@cache
def by_library(case: str) -> Numbers:
    lengths, policy = CASES[case]
    module = make_net(load())
    net = tt.carry(nn.Sequential(module.lstm, module.head))
    data = [{"inputs": x, "targets": y} for x, y in recordings(lengths)]
    stream = tt.Stream(data, lanes=LANES, chunk=7, seed=None, dtype=WIDE)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = [loss for loss, _ in plain_loop(net, stream, optimizer, policy, epochs=2)]
    return losses, [weight.detach() for weight in module.parameters()]


def difference(a: Numbers, b: Numbers) -> float:
    """The largest difference of any loss or weight; infinite where the updates are not as many."""
    if len(a[0]) != len(b[0]):
        return torch.inf
    losses = max(abs(x - y) for x, y in zip(a[0], b[0], strict=True))
    return max(losses, *((x - y).abs().max().item() for x, y in zip(a[1], b[1], strict=True)))


CASES: dict[str, tuple[Sequence[int], Policy]] = {
    "k1 < k2": (LENGTHS, tt.Truncated(STRIDE, HORIZON)),
    "k2 beyond the recordings": (LENGTHS, tt.Truncated(STRIDE, 100)),
    "exact, one update": (LENGTHS, tt.Exact()),
    "exact, several updates": (ALIKE, tt.Exact(chunk=7)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_library(case: str) -> None:
    ours, theirs = by_nano(load(), *CASES[case]), by_library(case)
    assert len(ours[0]) == {"exact, one update": 2, "exact, several updates": 4}.get(case, 14)
    assert difference(ours, theirs) < 1e-13


def test_the_script_resumes_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> list[str]:
        monkeypatch.setattr(
            sys, "argv", ["nano.py", "--checkpoint", str(tmp_path / words[0]), *words[1:]]
        )
        load().main()
        return capsys.readouterr().out.splitlines()

    whole = run("a.pt", "--epochs", "2")
    assert run("b.pt", "--epochs", "1") == whole[:1]
    assert run("b.pt", "--epochs", "2", "--resume") == whole[1:]
    assert len(run("c.pt", "--epochs", "1", "--exact")) == 1


def test_the_page_reads_the_file_from_top_to_bottom() -> None:
    page = (ROOT / "docs" / "explanation" / "in-one-file.md").read_text(encoding="utf-8")
    rest = SOURCE
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 9
    for block in blocks:
        before, found, rest = rest.partition(block)
        assert found, block
        assert not re.search(r"^(class|def) ", before, re.MULTILINE), "a part is left out"
    assert f"{len(SOURCE.splitlines())} lines" in page
