"""How public code passes a state: defaults, keywords, several arguments, methods to call first.

Each module is called by its author's loop and by `tt.carry`. The second half refuses what only
seems to carry a state. Shapes: `T` steps, `B` lanes, `D` inputs, `C` outputs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry._laws import Laboratory
from throughtime.errors import ModelError

STEPS, LANES, FEATURES, HIDDEN = 7, 3, 4, 5
EXACT = 1e-12

pytestmark = pytest.mark.usefixtures("float64")


class Cell(nn.Module):
    """What the modules share: a GRU cell and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(FEATURES, HIDDEN), nn.Linear(HIDDEN, 2)

    def play(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outputs: list[Tensor] = []
        for step in x:
            h = 0.5 * h + 0.5 * self.cell(step, h)  # not what the cell returns: hooks are wrong
            outputs.append(self.head(h))
        return torch.stack(outputs), h


EMPTY = torch.zeros(0, 0, 0)


class EmptyDefault(nn.Module):
    """A causal convolution whose cache is empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, 2, 3)

    def forward(self, x: Tensor, cache: Tensor = EMPTY) -> tuple[Tensor, Tensor]:
        x = x.permute(1, 2, 0)
        padded = nn.functional.pad(x, (2, 0)) if cache.size(2) == 0 else torch.cat([cache, x], 2)
        return torch.tanh(self.conv(padded)).permute(2, 0, 1), padded[:, :, -2:]


class TupleDefault(Cell):
    """A method takes the state as well, and fills it where it is None."""

    def _init_hidden(self, hx: Any, batch_size: int) -> tuple[Tensor, Tensor]:
        h, memory = (None, None) if hx is None else hx
        h = torch.zeros(batch_size, HIDDEN) if h is None else h
        return h, torch.full((batch_size, 1), 1e-3) if memory is None else memory

    def forward(self, x: Tensor, hx: Any = (None, None)) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, memory = self._init_hidden(hx, x.shape[1])
        y, h = self.play(x, h)
        decays = 0.9 ** torch.arange(1.0, len(x) + 1).view(-1, 1, 1)
        return y + memory * decays, (h, memory * decays[-1])


class KeywordOnly(Cell):
    def forward(
        self, x: Tensor, *, state: Tensor | None = None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        y, h = self.play(x, x.new_zeros(x.shape[1], HIDDEN) if state is None else state)
        return y / temperature, h


class UnnamedStates(Cell):
    """Two optional arguments with names that say nothing, returned in a list."""

    def forward(
        self, x: Tensor, r1: Tensor | None = None, r2: Tensor | None = None
    ) -> list[Tensor]:
        y, r1 = self.play(x, x.new_zeros(x.shape[1], HIDDEN) if r1 is None else r1)
        r2 = x.new_zeros(x.shape[1], 2) if r2 is None else r2
        sums = torch.cumsum(torch.cat([r2.unsqueeze(0), y]), 0)[1:]
        return [sums.sum(2), r1, sums[-1]]


class OnRequest(Cell):
    """Returns its state in evaluation, and on request."""

    def forward(
        self, x: Tensor, state: Tensor | None = None, use_cache: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        use_cache = not self.training if use_cache is None else use_cache
        y, h = self.play(x, x.new_zeros(x.shape[1], HIDDEN) if state is None else state)
        return y, h if use_cache else None


class MaskPerRow(Cell):
    """Masks of dropout, drawn when it was made, for each row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("masks", torch.rand(8, FEATURES).round() * 2)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        masks = self.get_buffer("masks")
        x = x * masks[: x.shape[1]] if self.training else x
        return self.play(x, x.new_zeros(x.shape[1], HIDDEN) if h is None else h)


def in_one_call(module: Any, x: Tensor) -> Tensor:
    return module(x)[0]


SIGNATURES: list[tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = [
    (EmptyDefault, in_one_call),
    (TupleDefault, in_one_call),
    (KeywordOnly, in_one_call),
    (UnnamedStates, in_one_call),
    (MaskPerRow, in_one_call),
]


@pytest.mark.parametrize(
    ("make", "author"), SIGNATURES, ids=[getattr(make, "__name__", "") for make, _ in SIGNATURES]
)
def test_a_module_is_carried_as_its_author_calls_it(
    make: Callable[[], nn.Module], author: Callable[[Any, Tensor], Tensor]
) -> None:
    module, x = make(), torch.randn(STEPS, LANES, FEATURES)
    net = tt.carry(module, x)
    module.eval()
    ys = []
    for lengths in ([STEPS], [3, 4], [1] * STEPS):
        state, outputs = net.initial_state(LANES), list[Tensor]()
        for part in x.split(lengths):
            y, state = net(part, state)
            outputs.append(y.reshape(len(part), LANES, -1))
        ys.append(torch.cat(outputs))
    expected = author(module, x).reshape(STEPS, LANES, -1)
    leaves = list(module.parameters())
    grads = torch.autograd.grad(expected.square().sum(), leaves, materialize_grads=True)
    for y in ys:
        assert torch.allclose(y, expected, rtol=0, atol=EXACT)
        got = torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True)
        assert all(
            torch.allclose(a, b, rtol=EXACT, atol=EXACT) for a, b in zip(got, grads, strict=True)
        )


def test_a_state_that_is_returned_on_request_is_asked_for_in_a_written_call() -> None:
    module, x = OnRequest(), torch.randn(STEPS, LANES, FEATURES)
    with pytest.raises(ModelError, match="in training mode"):
        tt.carry(module, x)
    net = tt.carry(module, x, call=lambda m, x, h: m(x, h, use_cache=True))
    expected = module.eval()(x)[0]
    assert torch.equal(net(x, net.initial_state(LANES))[0], expected)


# ------------------------------------------------------------ what seems to carry a state


class WritesWithoutGradient(nn.Module):
    """What a step computes has a gradient, what it keeps has none."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.into = nn.Linear(FEATURES + 3, 2), nn.Linear(FEATURES + 3, 3)
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.zeros(x.shape[0], 3) if self.memory is None else self.memory
        joined = torch.cat([x, memory], 1)
        with torch.no_grad():
            self.memory = torch.tanh(self.into(joined))
        return self.head(joined)


FAULTS: list[tuple[Callable[[], nn.Module], str, type, str]] = [
    (WritesWithoutGradient, "no gradient, or a part of it, flows", Laboratory, "_cuts_credit"),
]


@pytest.mark.parametrize(
    ("make", "text", "owner", "law"),
    FAULTS,
    ids=[getattr(fault[0], "__name__", "") for fault in FAULTS],
)
def test_what_seems_to_carry_a_state_is_refused(
    make: Callable[[], nn.Module],
    text: str,
    owner: type,
    law: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(STEPS, LANES, FEATURES)
    with pytest.raises(ModelError, match=text):
        tt.carry(make(), x)
    monkeypatch.setattr(owner, law, lambda *_: None)
    tt.carry(make(), x)  # accepted, and wrong: the law is needed
