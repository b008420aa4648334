"""Which code runs is decided by a table, said in words, and the same every time.

`which` and forward cannot disagree.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.overrides import BaseTorchFunctionMode

import throughtime as tt
from processes import elsewhere
from recurrences import needs_kernels
from throughtime.kernels import dispatch, library, recurrent, reference
from throughtime.kernels.cells import LSTM
from throughtime.kernels.dispatch import TorchFaster

X = torch.randn(5, 2, 4)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test makes of the table is not kept."""
    dispatch.static_backend.cache_clear()
    yield
    dispatch.static_backend.cache_clear()


def which(x: Any = X, hx: Any = None, layer: nn.Module | None = None) -> str:
    return str(tt.nn.backend(layer or tt.nn.LSTM(4, 6), x, hx))


@needs_kernels
def test_the_kernel_says_its_instruction_set_and_type() -> None:
    assert which() == f"fused ({library.level()}), float32"
    assert (
        which(X.double(), layer=tt.nn.GRU(4, 6).double()) == f"fused ({library.level()}), float64"
    )


@needs_kernels
def test_unsupported_inputs_have_a_reason() -> None:
    assert which(rnn.pack_sequence([X[:, 0]])).startswith("torch.nn: packed input")
    assert "the inputs on meta" in which(X.to("meta"))
    assert "the inputs torch.float16" in which(X.half(), layer=tt.nn.LSTM(4, 6).half())
    assert "do not fit" in which(X[..., :3])
    assert "inputs are torch.float64, a weight" in which(X.double())
    assert which(X[:0]) == "reference: nothing to compute"
    with torch.autocast("cpu"):
        assert which().startswith("fused")
        assert "under autocast" in which(layer=tt.nn.LSTM(4, 6).bfloat16())
    with BaseTorchFunctionMode():
        assert "TorchFunctionMode" in which()
    actual, layer = list[str](), tt.nn.LSTM(4, 6)
    torch.func.vmap(lambda x: actual.append(which(x, layer=layer)) or x)(X.unsqueeze(0))
    assert actual == ["reference: a transform of torch.func"]


@needs_kernels
def test_table_decides_by_level_cell_type_units_and_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dispatch,
        "TORCH_FASTER",
        (TorchFaster((library.level() or "",), LSTM, torch.float32, 6, 2, "it was measured"),),
    )
    assert which() == "torch.nn: it was measured"
    others = {
        "fewer lanes": which(X[:, :1]),
        "fewer units": which(layer=tt.nn.LSTM(4, 5)),
        "cell": which(layer=tt.nn.GRU(4, 6)),
        "type": which(X.double(), layer=tt.nn.LSTM(4, 6).double()),
        "projected": which(layer=tt.nn.LSTM(4, 6, proj_size=2)),
    }
    assert all(words.startswith("fused") for words in others.values()), others
    with monkeypatch.context() as patch:
        patch.setattr(nn.LSTM, "forward", None)  # one call for each reset would not be faster
        tt.nn.LSTM(4, 6)(X, resets=torch.zeros(X.shape[:2], dtype=torch.bool))
    dispatch.static_backend.cache_clear()
    monkeypatch.setattr(dispatch, "level", lambda: "another")
    assert which() == "fused (another), float32"


@needs_kernels
def test_backend_and_forward_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def noted(name: str, run: Any) -> Any:
        return lambda *args: (ran.append(name), run(*args))[1]

    for name, module in (("fused", recurrent), ("reference", reference)):
        monkeypatch.setattr(module, "run", noted(name, module.run))
    monkeypatch.setattr(nn.LSTM, "forward", noted("torch.nn", nn.LSTM.forward))
    layer = tt.nn.LSTM(4, 6)
    for x, lower in ((X, False), (X[:0], False), (X[:, :0], False), (X, True)):
        with torch.autocast("cpu", enabled=lower):
            layer(x)
            assert ran.pop() == tt.nn.backend(layer, x).name
    assert not ran


def test_without_kernels_torch_runs_with_the_same_results_and_warns_once() -> None:
    """In a process of its own: the library is looked for once."""
    script = """
import warnings, torch, throughtime as tt
torch.manual_seed(0)
x, resets = torch.randn(9, 3, 4), torch.rand(9, 3) < 0.3
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for layer in (tt.nn.LSTM(4, 6), tt.nn.GRU(4, 6, 2, bidirectional=True), tt.nn.RNN(4, 6)):
        y, _ = layer(x, resets=resets)
        y.sum().backward()
        assert tt.nn.backend(layer, x).reason.startswith("the compiled kernels are missing")
        starts = [t for t in resets[:, 0].nonzero().flatten().tolist() if t]
        lane = [layer(part.unsqueeze(1))[0] for part in torch.tensor_split(x[:, 0], starts)]
        assert (torch.cat(lane).squeeze(1) - y[:, 0]).abs().max() < 1e-6
print(len(said))
"""
    clean = (
        "import os; [os.environ.pop(name) for name in [*os.environ] if"
        " name.startswith('THROUGHTIME_')]"
    )
    asked = "os.environ['THROUGHTIME_LEVEL'] = 'none'"  # who says so need not be told
    nowhere = (
        "from throughtime.kernels import library;"
        " library._installed = lambda: (None, 'not installed.')"
    )
    for missing, times in ((asked, "0"), (nowhere, "1")):
        done = elsewhere(f"{clean}\n{missing}\n{script}")
        assert done.output.strip() == times, done.errors
