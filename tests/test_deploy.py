"""Exported files compute what the net computes, with a state of the caller's."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from benchmarks.wasm import WASM_FLAGS, wasm_compiler
from torch import Tensor, nn

import throughtime as tt
from plugin_players import play_nam, play_rtneural
from throughtime.carry import Carried
from throughtime.deploy import export as exporting
from throughtime.deploy import session, source, verify
from throughtime.deploy.chain import Dense, read_chain
from throughtime.deploy.export import Export
from throughtime.deploy.session import FORMAT
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.nn.affine import Affine

STEPS = 400
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
needs_wasm = pytest.mark.skipif(
    wasm_compiler() is None, reason="needs clang with wasm-ld, or the package ziglang"
)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


class LearnedStart(nn.Module):
    """Starts from parameters, batch first; a function after the readout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.readout = nn.RNN(3, 8, batch_first=True), nn.Linear(8, 2)
        self.start = nn.Parameter(torch.randn(8))

    def initial_state(self, lanes: int) -> Tensor:
        return self.start.expand(1, lanes, 8).contiguous()

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        y, h = self.layer(x, h)
        return torch.sigmoid(self.readout(y)), h


class Cells(nn.Module):
    """A loop of cells: no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.readout = nn.LSTMCell(3, 8), nn.Linear(8, 2)

    def initial_state(self, lanes: int) -> dict[str, Tensor]:
        zeros = self.readout.weight.new_zeros(lanes, 8)
        return {"h": zeros, "c": zeros.clone()}

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Any:
        h, c = state["h"], state["c"]
        outputs: list[Tensor] = []
        for step in x.unbind(0):
            h, c = self.cell(step, (h, c))
            outputs.append(self.readout(h))
        return torch.stack(outputs), {"h": h, "c": c}


def standardised() -> nn.Module:
    first, last = Affine(3, inverse=False), Affine(2, inverse=True)
    for values, number in ((first.shift, 1e4), (first.scale, 3), (last.shift, 5), (last.scale, 2)):
        values.fill_(number)
    return nn.Sequential(first, tt.nn.GRU(3, 8), nn.ELU(0.7), nn.Linear(8, 2), last)


def between() -> nn.Module:
    head = nn.Sequential(nn.Linear(9, 6, bias=False), nn.LayerNorm(6))
    net = nn.Sequential(
        *(nn.LayerNorm(3), nn.Linear(3, 4), nn.LeakyReLU(0.2), nn.GRU(4, 8), nn.SiLU()),
        *(nn.RNN(8, 9, bias=False, nonlinearity="relu"), nn.ReLU()),
        *(nn.LayerNorm(9, elementwise_affine=False), head, nn.Softmax(-1)),
    )
    for weight in net.parameters():
        nn.init.uniform_(weight, -0.4, 0.6)
    return net


def words() -> nn.Module:
    return nn.Sequential(
        *(nn.Embedding(11, 5), nn.LSTM(5, 8, 2), nn.Dropout(0.5), nn.Linear(8, 11)),
        nn.LogSoftmax(-1),
    )


def audio(shift: float = 5) -> nn.Module:
    """With a shift of 1e5 folded into float32 weights, digits are lost."""
    first, last = Affine(3, inverse=False), Affine(2, inverse=True)
    for values, number in ((first.shift, shift), (first.scale, 3), (last.shift, 5)):
        values.fill_(number)
    return nn.Sequential(first, nn.LSTM(3, 8), nn.Linear(8, 2), last)


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.Sequential(nn.LSTM(3, 8), nn.Linear(8, 2)),
    "lstm two": lambda: nn.Sequential(nn.LSTM(3, 8, 2), nn.Linear(8, 2)),
    "gru two": lambda: nn.Sequential(tt.nn.GRU(3, 8, 2), nn.Linear(8, 2)),
    "rnn": lambda: nn.Sequential(nn.RNN(3, 8), nn.Linear(8, 2)),
    "projected": lambda: nn.Sequential(nn.LSTM(3, 8, proj_size=5), nn.Linear(5, 2)),
    "standardised": standardised,
    "between": between,
    "words": words,
    "audio": audio,
    "learned start": LearnedStart,
    "bare layer": lambda: tt.nn.LSTM(3, 8),
    "cells": Cells,
}


def example_of(module: nn.Module) -> Tensor:
    if isinstance(module, nn.Sequential) and isinstance(module[0], nn.Embedding):
        return torch.randint(0, 11, (50,))
    x = torch.randn(50, 3)
    first = module[0] if isinstance(module, nn.Sequential) else module
    return x * first.scale + first.shift if isinstance(first, Affine) else x


def exported(
    folder: Path, make: Callable[[], nn.Module], name: str, steps: int = STEPS, **options: Any
) -> tuple[Carried, Export]:
    torch.manual_seed(0)
    module = make()
    net = tt.carry(module)
    return net, tt.export(net, folder / name, inputs=example_of(module), steps=steps, **options)


@pytest.fixture(scope="module")
def gru(tmp_path_factory: pytest.TempPathFactory) -> tuple[Carried, Path]:
    net, written = exported(tmp_path_factory.mktemp("gru"), CHAINS["gru two"], "gru.onnx")
    return net, written.paths[0]


def pieces(x: Any) -> Iterator[Any]:
    """Chunks of 1, 2, 3, ... steps."""
    at, size = 0, 1
    while at < len(x):
        yield x[at : at + size]
        at, size = at + size, size + 1


def close(got: Any, expected: Tensor) -> bool:
    return bool(np.abs(np.asarray(got) - expected.numpy()).max() < 1e-6)


OPERATIONS = ("standardised", "between", "words", "learned start")  # a branch of each template
READ = ("bare layer", "cells")  # in ways that no template sees


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in OPERATIONS for kind in ("onnx", "c", "js")),
        *((name, "onnx") for name in READ),
    ],
)
def test_a_file_computes_what_the_net_computes(name: str, kind: str, tmp_path: Path) -> None:
    net, written = exported(tmp_path, CHAINS[name], f"net.{kind}", steps=100)
    assert all(module.training for module in net.modules())
    if written.verification is None:
        pytest.skip("needs gcc, or Node.js")
    assert written.verification.steps == 100
    assert written.verification.error < 1e-6
    assert [path.exists() for path in written.paths] == [True] * (2 if kind == "c" else 1)


def test_lanes_are_independent_in_onnx(gru: Any) -> None:
    net, path = gru
    x = torch.randn(60, 9, 3)
    session = tt.deploy.Session(path, 9)
    got = np.concatenate([session(part.numpy()) for part in pieces(x)])
    expected = net(x, net.initial_state(9))[0].detach()
    assert close(got, expected)
    before, broken = session.state, session.state
    for value in broken.values():
        value[:, 8] = np.nan
    session.state = broken
    got = session(x[:5].numpy())
    assert np.isnan(got[:, 8]).any()
    session.state = before
    assert np.array_equal(got[:, :8], session(x[:5].numpy())[:, :8])
    session.state = broken
    session.reset(lanes=[8])
    again = session(x.numpy())
    assert close(again[:, 8], expected[:, 8])
    assert not close(again[:, 0], expected[:, 0])


def test_a_state_is_saved_and_loaded_to_the_bit(gru: tuple[Carried, Path], tmp_path: Path):
    x = np.random.default_rng(0).standard_normal((40, 2, 3)).astype(np.float32)
    session = tt.deploy.Session(gru[1], 2)
    session(x[:17])
    np.savez(tmp_path / "state.npz", allow_pickle=False, **session.state)
    expected = session(x[17:])
    other = tt.deploy.Session(gru[1], 2)
    other.state = np.load(tmp_path / "state.npz")
    assert np.array_equal(other(x[17:]), expected)
    with pytest.raises(
        ValueError, match=r"with 3 lanes has \{'0\.h\.0': \(\(1, 3, 8\), 'float32'\)"
    ):
        tt.deploy.Session(gru[1], 3).state = np.load(tmp_path / "state.npz")


@pytest.mark.parametrize("on_nan", ["hold", "reset"])
def test_missing_steps_are_left_out_as_by_a_predictor(gru: Any, on_nan: Any) -> None:
    net, path = gru
    x = torch.randn(30, 3, 3)
    for step, lane in ((0, 1), (7, 0), (8, 0), (12, 2), (29, 1)):
        x[step, lane, 1] = torch.nan
    x[9, 2, 0] = torch.inf
    predictor = tt.Predictor(net, lanes=3, on_nan=on_nan)
    session = tt.deploy.Session(path, 3, on_nan=on_nan)
    for part in (x[:9], x[9:10], x[10:]):
        expected = predictor(part).numpy()
        np.testing.assert_allclose(session(part.numpy()), expected, atol=1e-6, equal_nan=True)
    tail = torch.randn(5, 3, 3)
    assert close(session(tail.numpy()), predictor(tail))
    with pytest.raises(ValueError, match="step 0 of the call, lane 1"):
        tt.deploy.Session(path, 3)(x.numpy())


def test_inputs_and_lanes_that_do_not_fit_are_refused(gru: Any) -> None:
    session = tt.deploy.Session(gru[1], 2)
    before = session.state
    for shape, call in (((5, 2, 4), session), ((0, 2, 3), session), ((1, 3), session.step)):
        with pytest.raises(ValueError, match=re.escape(str(shape))):
            call(np.zeros(shape, np.float32))
    assert all(np.array_equal(before[name], leaf) for name, leaf in session.state.items())
    wrong: Any
    for wrong in (2, [0.5], [True, False]):
        with pytest.raises(ValueError, match="the session has lanes 0 to 1"):
            session.reset(wrong)
    with pytest.raises(ValueError, match="lanes="):
        tt.deploy.Session(gru[1], lanes=0)


def test_a_file_cut_short_or_foreign_is_refused(gru: Any, tmp_path: Path) -> None:
    content = gru[1].read_bytes()
    bare = onnx.load_from_string(content)
    del bare.metadata_props[:]
    path = tmp_path / "net.onnx"
    for changed, message in (
        (content[: len(content) // 2], "cannot load it"),
        (b"", "cannot load it"),
        (bare.SerializeToString(), "no ONNX file that tt.export wrote"),
        (content.replace(FORMAT.encode(), b"throughtime.export/9"), "export/9"),
    ):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=message):
            tt.deploy.Session(path)
    with pytest.raises(FileNotFoundError):
        tt.deploy.Session(tmp_path / "missing.onnx")


def test_a_runtime_that_computes_something_else_is_found(gru: Any, tmp_path: Path) -> None:
    """As if the runtime's GRU had another order of gates: the vector says other outputs."""
    model = onnx.load(gru[1])
    description = json.loads(model.metadata_props[0].value)
    description["conformance"]["outputs"][0] += 0.01
    model.metadata_props[0].value = json.dumps(description)
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(RuntimeError, match="computes other outputs"):
        tt.deploy.Session(tmp_path / "other.onnx")


ALONE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "throughtime", "onnx"}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import numpy as np
from session import Session
session = Session("net.onnx", 2)
x = np.load("x.npy")
y = np.concatenate([session(x[:20]), np.stack([session.step(row) for row in x[20:]])])
np.save("y.npy", y)
assert {"torch", "throughtime"}.isdisjoint(sys.modules)
sys.meta_path.pop(0)
from throughtime.deploy import Session
assert Session("net.onnx")(x[:4, 0]).shape == (4, 2) and "torch" not in sys.modules
"""


def test_a_session_needs_no_torch_and_the_one_beside_a_model_no_throughtime(tmp_path: Path) -> None:
    net, written = exported(tmp_path, CHAINS["gru two"], "net.onnx", with_session=True)
    assert written.paths == (tmp_path / "net.onnx", tmp_path / "session.py")
    x = torch.randn(50, 2, 3)
    np.save(tmp_path / "x.npy", x.numpy())
    subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, check=True)
    assert close(np.load(tmp_path / "y.npy"), net(x, net.initial_state(2))[0].detach())
    with pytest.raises(ConfigError, match="needs no session"):
        exported(tmp_path, CHAINS["lstm"], "net.c", with_session=True)


def test_the_description_says_what_a_user_needs(tmp_path: Path) -> None:
    names = ["no */ beat", 'a "beat"']
    for name in ("my-net.2.onnx", "my-net.2.c", "my-net.2.js"):
        _, written = exported(tmp_path, CHAINS["lstm"], name, 20, rate=360, classes=names)
        assert written.verification is not None
    description = tt.deploy.Session(tmp_path / "my-net.2.onnx").description
    assert description["outputs"] == {
        "shape": [2],
        "width": 2,
        "meaning": "logits",
        "classes": names,
    }
    assert description["rate"] == 360
    assert [(leaf["name"], leaf["shape"]) for leaf in description["state"]] == [
        ("0.h", [1, "B", 8]),
        ("0.c", [1, "B", 8]),
    ]
    source = (tmp_path / "my-net.2.c").read_text()
    assert "my_net_2_step(my_net_2_state *s" in source
    described = re.findall(r"\{.*\}", (tmp_path / "my-net.2.h").read_text())
    assert json.loads(described[0])["rate"] == 360


def test_settings_and_weights_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    wrongs: list[tuple[str, dict[str, Any]]] = [
        ("net.pt", {}),
        ("net.onnx", {"rate": -1.0}),
        ("net.onnx", {"classes": ("a", "b", "c")}),
        ("net.onnx", {"details": {"state": 1, "patient": 2}}),
        ("net.onnx", {"steps": -3}),
    ]
    for name, options in wrongs:
        with pytest.raises(ConfigError, match="|".join(options) or "expected"):
            exported(tmp_path, CHAINS["lstm"], name, **options)
    broken: Any = CHAINS["lstm"]()
    nn.init.constant_(broken[0].bias_hh_l0, torch.nan)
    with pytest.raises(ModelError, match=r"'0\.\w+' is"):
        exported(tmp_path, lambda: broken, "net.onnx")
    assert list(tmp_path.iterdir()) == []
    _, written = exported(tmp_path, CHAINS["lstm"], "net.onnx", steps=0)
    assert written.verification is None
    assert written.remarks[0].startswith("not verified")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("lstm two", "net.nam"),
        ("lstm two", "net.json"),
        ("gru two", "net.json"),
        ("audio", "net.json"),
    ],
)
def test_files_of_audio_plugins_compute_what_the_net_computes(
    name: str, file: str, tmp_path: Path
) -> None:
    net, written = exported(tmp_path, CHAINS[name], file, rate=48_000)
    assert written.verification is None
    assert written.remarks == ("not verified: play it in the plug-in",)
    x = torch.randn(1_000, 3) * (3 if name == "audio" else 1)
    play = play_nam if file == "net.nam" else play_rtneural
    expected, _ = tt.predict(net, x)
    error = np.abs(play(written.paths[0].read_bytes(), x.numpy()) - expected.numpy()).max()
    assert error < (1e-5 if name == "audio" else 1e-6)
    content = json.loads(written.paths[0].read_text())
    assert content["sample_rate" if file == "net.nam" else "samplerate"] == 48_000


def test_what_an_audio_plugin_does_not_have_is_refused(tmp_path: Path) -> None:
    for name in ("gru two", "projected", "audio", "cells"):
        with pytest.raises(ModelError):
            exported(tmp_path, CHAINS[name], "net.nam")
    for name in ("projected", "rnn", "words", "standardised"):
        with pytest.raises(ModelError, match="RTNeural"):
            exported(tmp_path, CHAINS[name], "net.json")
    with pytest.raises(ModelError, match="too many digits"):
        exported(tmp_path, lambda: audio(1e5), "net.json")
    assert list(tmp_path.iterdir()) == []


MAIN = """
#include "net.h"
#include <math.h>
#include <stdio.h>
int main(void) {
  net_state s;
  float x[3] = {NAN, INFINITY, -1e30f}, y[NET_OUTPUTS];
  net_reset(&s);
  if (net_check()) return 1;
  net_step(&s, x, y);
  if (y[0] == y[0]) return 2; /* NaN is carried */
  net_reset(&s);
  x[0] = x[1] = 1e30f;
  net_step(&s, x, y);
  if (y[0] != y[0]) return 3;
  return net_check();
}
"""


MAIN_OF_INDICES = """
#include "net.h"
int main(void) {
  net_state s;
  float y[NET_OUTPUTS];
  const int32_t bad[] = {-1, NET_INPUTS, INT32_MIN, INT32_MAX}, last = NET_INPUTS - 1;
  net_reset(&s);
  if (net_check()) return 1;
  for (int k = 0; k < 4; k++) {
    net_step(&s, bad + k, y);
    if (y[0] == y[0]) return 2;
  }
  net_step(&s, &last, y);
  if (y[0] != y[0]) return 3; /* the state was left as it was */
  return net_check();
}
"""


@needs_compiler
@pytest.mark.parametrize("name", ["lstm two", "words"])
def test_c_is_clean_under_sanitizers_and_needs_no_library(name: str, tmp_path: Path) -> None:
    exported(tmp_path, CHAINS[name], "net.c", steps=10)
    (tmp_path / "main.c").write_text(MAIN_OF_INDICES if name == "words" else MAIN)
    flags = [*verify.C_FLAGS, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = ["gcc", *flags, "net.c", "main.c", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    environment = {"ASAN_OPTIONS": "detect_leaks=0"}
    subprocess.run([tmp_path / "main"], check=True, env=environment)
    for level in ("-O0", "-O3"):
        subprocess.run(["gcc", *verify.C_FLAGS, level, "-c", "net.c"], cwd=tmp_path, check=True)
        symbols = subprocess.run(
            ["nm", "--undefined-only", "net.o"], cwd=tmp_path, check=True, capture_output=True
        ).stdout.decode()
        assert {line.split()[-1] for line in symbols.splitlines()} <= {"memcpy", "memset"}


@needs_node
def test_javascript_carries_nan_and_is_reset(tmp_path: Path) -> None:
    exported(tmp_path, CHAINS["lstm"], "net.js", steps=10)
    shutil.copyfile(tmp_path / "net.js", tmp_path / "net.mjs")
    script = """
import { create, description } from "./net.mjs";
const [a, b] = [create(), create()];
const first = a.step([1, 2, 3]);
a.step([NaN, 0, 0]);
if (!Number.isNaN(a.step([1, 2, 3])[0])) throw new Error("NaN is lost");
if (b.step([1, 2, 3])[0] !== first[0]) throw new Error("the state is shared");
a.reset();
if (a.step([1, 2, 3])[0] !== first[0]) throw new Error("reset");
if (!a.check() || description.inputs.width !== 3) throw new Error("check");
let refused = false;
try { a.step([1, 2]); } catch (error) { refused = error instanceof RangeError; }
if (!refused) throw new Error("two numbers are taken");
"""
    (tmp_path / "run.mjs").write_text(script)
    subprocess.run(["node", "run.mjs"], cwd=tmp_path, check=True)


def page_blocks(language: str) -> list[str]:
    page = Path(__file__).parent.parent / "docs" / "how-to" / "deploy.md"
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)


@needs_compiler
def test_the_c_of_the_page_runs(tmp_path: Path) -> None:
    net, _ = exported(tmp_path, CHAINS["lstm"], "beat.c", steps=10)
    (block,) = page_blocks("c")
    (tmp_path / "main.c").write_text(block)
    (command,) = re.findall(r"(gcc .*?) &&", block)
    subprocess.run(command.split(), cwd=tmp_path, check=True)
    x = torch.randn(20, 3)
    done = subprocess.run(
        [tmp_path / "beat"], input=x.numpy().tobytes(), check=True, capture_output=True
    )
    got = np.array([line.split() for line in done.stdout.decode().splitlines()], float)
    expected, _ = tt.predict(net, x)
    assert np.abs(got - expected.numpy()).max() < 1e-5  # %g prints six digits


@needs_node
def test_the_javascript_of_the_page_runs(tmp_path: Path) -> None:
    exported(tmp_path, CHAINS["lstm"], "beat.js", steps=10, classes=("none", "beat"))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "main.js").write_text(page_blocks("javascript")[0])
    done = subprocess.run(["node", "main.js"], cwd=tmp_path, check=True, capture_output=True)
    assert b"'none', 'beat'" in done.stdout


@needs_node
@needs_wasm
def test_the_webassembly_of_the_page_runs(tmp_path: Path) -> None:
    net, _ = exported(tmp_path, CHAINS["lstm"], "beat.c", steps=10)
    (block,) = (block for block in page_blocks("bash") if "wasm" in block)
    program, *command = block.replace("\\\n", " ").split()
    assert program == "clang"
    assert set(WASM_FLAGS) <= set(command)
    subprocess.run([*(wasm_compiler() or ()), *command], cwd=tmp_path, check=True)
    (tmp_path / "main.mjs").write_text(page_blocks("javascript")[1])
    done = subprocess.run(["node", "main.mjs"], cwd=tmp_path, check=True, capture_output=True)
    got = [float(number) for number in re.findall(r"-?\d+\.\d+", done.stdout.decode())]
    expected, _ = tt.predict(net, torch.tensor([[0.1, -0.2, 0.3]]))
    assert np.abs(np.array(got) - expected[0].numpy()).max() < 1e-6


def test_an_example_that_the_net_does_not_take_is_refused(tmp_path: Path) -> None:
    wrongs: list[Any] = [
        *(torch.zeros(shape) for shape in ((9, 4), (9,), (0, 3))),
        *(torch.ones(9, 3, dtype=torch.cfloat), "ecg.npy"),
        torch.full((9, 3), torch.nan),
    ]
    net, path = tt.carry(CHAINS["lstm"]()), tmp_path / "net.onnx"
    for inputs in wrongs:
        with pytest.raises(DataError, match=r"expected|example|not take|lane 0"):
            tt.export(net, path, inputs=inputs)
    with pytest.raises(DataError, match="not take"):
        tt.export(tt.carry(CHAINS["words"]()), path, inputs=torch.full((9,), 11))
    with pytest.raises(RuntimeError, match="Expected 3, got 4"):
        tt.export(net, path, inputs=torch.zeros(9, 3), stream=torch.zeros(50, 4))
    assert list(tmp_path.iterdir()) == []


def twice() -> nn.Module:
    layer = nn.GRU(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Cells, r"the code of Cells\.forward stands in the way"),
        (twice, "a GRU that is called twice stands in the way"),
    ],
)
def test_what_is_in_the_way_of_a_chain_is_named(
    make: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"{message}.*An \.onnx file takes any net"):
        exported(tmp_path, make, "net.c")


def amplifying(layer: Callable[..., nn.RNNBase], std: float) -> nn.Module:
    """Its recurrent weights are so large that it amplifies rounding."""
    net = nn.Sequential(layer(3, 32), nn.Linear(32, 2))
    nn.init.normal_(net[0].get_parameter("weight_hh_l0"), std=std)
    return net


def test_a_chaotic_net_is_exported_and_held_to_single_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> nn.Module:
        return amplifying(nn.RNN, 0.5)

    def other(*args: Any) -> Any:
        chain = read_chain(*args)
        dense = next(op for op in chain.operations if isinstance(op, Dense))
        dense.weight[:] *= 1 + 6e-5  # within the tolerance of the vector
        return chain

    _, written = exported(tmp_path, make, "net.onnx")
    assert written.verification is not None
    assert written.verification.error > 0.1
    # after more steps no two runtimes agree
    vector = tt.deploy.Session(written.paths[0]).description["conformance"]
    assert len(vector["inputs"]) < 64
    monkeypatch.setattr(exporting, "read_chain", other)
    with pytest.raises(ModelError, match="single steps, the file differs"):
        exported(tmp_path, make, "other.onnx")


@needs_compiler
@pytest.mark.parametrize("unit", [1.0, 1e-7])
def test_a_net_that_amplifies_rounding_is_exported_and_no_planted_error_is(
    unit: float, tmp_path: Path, monkeypatch: Any
) -> None:
    """By the conformance vector, and by verification where the vector tolerates everything."""

    def without_bias(*args: Any) -> Any:
        chain = read_chain(*args)
        chain.layers[0].b_ih[:] = 0
        return chain

    def make() -> nn.Module:
        net = amplifying(nn.LSTM, 1.0)
        for p in [*net.parameters()][-2:]:
            p.data *= unit
        return net

    _, written = exported(tmp_path, make, "net.c", steps=300)
    assert written.verification is not None
    assert written.verification.error > 1e-5 * unit
    for path in written.paths:
        path.unlink()
    monkeypatch.setattr(exporting, "read_chain", without_bias)
    for message in ("differs|computes other|check fails", "the file differs from the net"):
        with pytest.raises(ModelError, match=message):
            exported(tmp_path, make, "net.c", steps=300)
        monkeypatch.setattr(session, "TOLERANCE", 1e30)
        monkeypatch.setattr(source, "TOLERANCE", 1e30)
    assert list(tmp_path.iterdir()) == []


@needs_node
def test_a_reset_that_forgets_a_part_of_the_state_is_refused(
    tmp_path: Path, monkeypatch: Any
) -> None:
    render = source.render
    line = r"s\.\w+\.set\(w\.start_.*"
    monkeypatch.setattr(source, "render", lambda *a: re.sub(line, "", render(*a), count=1))
    with pytest.raises(ModelError, match="differs"):
        exported(tmp_path, CHAINS["gru two"], "net.js")
