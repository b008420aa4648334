"""What `tt.export` and `Session` refuse, in words that name what was got and what was expected."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import throughtime as tt
from throughtime.deploy.export import Export
from throughtime.errors import ConfigError, DataError, ModelError

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))


def chain() -> nn.Module:
    return nn.Sequential(nn.LSTM(3, 8), nn.Linear(8, 2))


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.GRU(4, 8), nn.Linear(8, 2))


class Residual(nn.Module):
    """The inputs are added to the outputs, as in models of amplifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.readout = nn.LSTM(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        y, state = self.layer(x, state)
        return self.readout(y) + x, state


class Squeezed(nn.Module):
    """One number a step, without a dimension of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.readout = nn.GRU(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        y, state = self.layer(x, state)
        return self.readout(y).squeeze(-1), state


class Cell(nn.Module):
    """A net that is no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.readout = nn.GRUCell(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, h: Any = None) -> Any:
        h, outputs = x.new_zeros(x.shape[1], 8) if h is None else h, list[Tensor]()
        for step in x:
            h = self.cell(step, h)
            outputs.append(self.readout(h))
        return torch.stack(outputs), h


def export(module: nn.Module, path: Path, inputs: Any = X, **options: Any) -> Export:
    settings: dict[str, Any] = {"steps": 200, **options}
    return tt.export(tt.carry(module), path, inputs=inputs, **settings)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return export(chain(), tmp_path_factory.mktemp("net") / "net.onnx").paths[0]


@pytest.fixture
def x() -> Any:
    return np.random.default_rng(0).standard_normal((40, 2, 3)).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (chain, torch.zeros(9, 4), r"not take the example, \(9, 1, 4\) .*net expects 3"),
        (chain, torch.zeros(9, 1, 2, 3), r"not take the example, \(9, 1, 2, 3\)"),
        (chain, torch.ones(9, 3, dtype=torch.int16), r"whole numbers .* convert features first"),
        (
            chain,
            torch.zeros(9, 3, dtype=torch.cfloat),
            r"type torch.complex64, expected an example",
        ),
        (chain, torch.zeros(9, 3, dtype=torch.bool), r"type torch.bool, expected an example"),
        (chain, torch.zeros(9), r"shape \(9,\) .* numbers \(T, D\) or \(T, B, D\), images"),
        (chain, torch.zeros(0, 3), r"shape \(0, 3\)"),
        (chain, "ecg.npy", "inputs is a str, expected an example"),
        (chain, {"inputs": X}, "inputs is a dict, expected an example"),
        (chain, None, "inputs is a NoneType, expected an example"),
        (words, torch.full((9,), 9), r"not take .* torch.int64 from 9 to 9: index out of range"),
        (words, torch.tensor([3, -1]), "torch.int64 from -1 to 3: index out of range"),
        (words, torch.arange(100) // 10, "torch.int64 from 0 to 9: index out of range"),
        (words, torch.eye(9), "not take the example"),
    ],
)
@pytest.mark.parametrize("suffix", ["onnx", "c"])
def test_an_example_that_the_net_does_not_take_is_refused(
    make: Callable[[], nn.Module], inputs: Any, message: str, suffix: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        export(make(), tmp_path / f"net.{suffix}", inputs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": -1.0}, "rate=-1.0: expected steps per second, above 0"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"classes": "ab"}, "classes='ab': expected names"),
        ({"classes": (0, 1)}, r"classes=\(0, 1\): expected names"),
        ({"details": {"state": 1, "patient": 2}}, "details: state belongs to every file"),
        ({"details": {"conformance": 1}}, "details: conformance belongs"),
        ({"details": {"made": object()}}, "details: .*not JSON serializable"),
        ({"details": {"gain": float("nan")}}, "details: .*JSON"),
    ],
)
def test_settings_that_no_description_can_have_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        export(chain(), tmp_path / "net.onnx", **options)


def test_a_recording_of_another_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"have 4 features in each step, the net expects 3: .* in a stream"
    ):
        export(chain(), tmp_path / "net.onnx", stream=torch.zeros(50, 4))


def test_weights_of_half_precision_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'0.weight_ih_l0' is torch.bfloat16, .* float32"):
        export(chain().bfloat16(), tmp_path / "net.onnx")


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.LSTM(3, 8), nn.Tanh()), nn.Linear(8, 2))


def twice() -> nn.Module:
    layer = nn.GRU(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Residual,
            r"`return self.readout\(y\) \+ x, state` in Residual.forward stands in the way",
        ),
        (Cell, r"in Cell.forward stands in the way"),
        (nested, "'0', a Sequential, with a state of its own, stands in the way"),
        (twice, "a GRU that is called twice stands in the way"),
        (lambda: nn.GRUCell(3, 5), "a net without an nn.LSTM, .* stands in the way"),
    ],
)
def test_what_is_in_the_way_of_a_chain_is_named(
    make: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message + r".*An \.onnx file takes any net"):
        export(make(), tmp_path / "net.c")


PROMPT = """
class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 8)
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x, h=None):
        y, h = self.layer(x, h)
        y = FACTOR
        return self.head(y), h
"""


@pytest.mark.parametrize("suffix", ["c", "js"])
def test_a_class_that_was_typed_in_a_prompt_is_exported_or_its_line_is_named(
    suffix: str, tmp_path: Path
) -> None:
    names: dict[str, Any] = {"nn": nn}
    exec(PROMPT.replace("FACTOR", "y"), names)
    written = export(names["Doubled"](), tmp_path / f"net.{suffix}")
    assert written.verification is None or written.verification.error < 1e-6
    exec(PROMPT.replace("FACTOR", "y * 2"), names)
    with pytest.raises(ModelError, match=r"^line 10 in Doubled\.forward stands in the way"):
        export(names["Doubled"](), tmp_path / f"other.{suffix}")


@pytest.mark.parametrize("suffix", ["onnx", "c", "js"])
def test_images_are_taken_as_predict_takes_them(suffix: str, tmp_path: Path) -> None:
    net = tt.carry(nn.Sequential(nn.Flatten(2), nn.GRU(12, 8), nn.Linear(8, 2))).eval()
    for x in (torch.randn(20, 1, 3, 4), torch.randn(20, 3, 4), torch.randn(20, 2, 1, 3, 4)):
        written = tt.export(net, tmp_path / f"net.{suffix}", inputs=x, steps=200)
        assert written.verification is None or written.verification.error < 1e-6
        if x.dim() < 5:
            assert tt.predict(net, x)[0].shape == (20, 2)


def test_what_torch_cannot_export_is_said_in_a_line_of_its_own(tmp_path: Path) -> None:
    orthogonal = parametrizations.orthogonal(nn.Linear(8, 8))
    with pytest.raises(ModelError, match="torch cannot export a step of Sequential") as caught:
        export(nn.Sequential(nn.GRUCell(3, 8), orthogonal), tmp_path / "net.onnx")
    assert "\x1b" not in str(caught.value)
    assert "step 3/3" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["c", "onnx"])
def test_a_readout_with_parametrized_weights_is_one_of_a_chain(suffix: str, tmp_path: Path) -> None:
    readout = parametrizations.weight_norm(nn.Linear(8, 2))
    written = export(nn.Sequential(nn.GRU(3, 8), readout), tmp_path / f"net.{suffix}")
    assert written.verification is None or written.verification.error < 1e-6


@pytest.mark.parametrize("make", [Squeezed, Cell])
def test_an_export_step_by_step_leaves_the_net_in_its_mode(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    net = tt.carry(make())
    net.module.train()
    written = tt.export(net, tmp_path / "net.onnx", inputs=X, steps=200)
    assert all(module.training for module in net.module.modules())
    y, _ = net.eval()(X[:, None], net.initial_state(1))
    session = tt.deploy.Session(written.paths[0])
    np.testing.assert_allclose(session(X.numpy()), y[:, 0].detach(), atol=1e-6)


def test_two_threads_cannot_call_one_session(path: Path, x: Any) -> None:
    session = tt.deploy.Session(path, lanes=2)
    runtime, entered, leave = session._runtime, threading.Event(), threading.Event()

    class Slow:
        def run(self, *args: Any) -> Any:
            entered.set()
            leave.wait(10)
            return runtime.run(*args)

    session._runtime = Slow()
    thread = threading.Thread(target=session, args=(x,))
    thread.start()
    entered.wait(10)
    try:
        for call in (lambda: session(x), lambda: session.step(x[0])):
            with pytest.raises(RuntimeError, match="each thread needs one of its own"):
                call()
    finally:
        leave.set()
        thread.join()
        session._runtime = runtime
    session.step(x[0])


@pytest.mark.parametrize("lanes", [2, [-1], [0.5], "a", [True, False], [[0], [2]]])
def test_lanes_to_reset_are_numbers_of_lanes(lanes: Any, path: Path) -> None:
    with pytest.raises(ValueError, match="the session has lanes 0 to 1"):
        tt.deploy.Session(path, lanes=2).reset(lanes)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (np.zeros(3, np.float32), r"shape \(3,\) and type float32, expected \(2, 3\) float32"),
        (np.zeros((1, 3), np.float32), r"shape \(1, 3\) .* expected \(2, 3\)"),
        (np.zeros((1, 2, 3), np.float32), r"shape \(1, 2, 3\) .* expected \(2, 3\)"),
    ],
)
def test_a_step_of_another_shape_is_refused_as_a_step(step: Any, message: str, path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        tt.deploy.Session(path, lanes=2).step(step)


def test_numbers_too_large_for_float32_are_infinite_without_a_warning(path: Path) -> None:
    session = tt.deploy.Session(path, on_nan="hold")
    assert np.isnan(session(np.full((2, 3), 1e300))).all()
    assert session.skipped == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": 0}, "lanes=0: expected a whole number, at least 1"),
        ({"lanes": 2.5}, "lanes=2.5"),
        ({"lanes": "2"}, "lanes='2'"),
        ({"lanes": True}, "lanes=True"),
    ],
)
def test_settings_of_a_session_are_whole_numbers(
    options: dict[str, Any], message: str, path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        tt.deploy.Session(path, **options)
