"""Microseconds of a step of an exported net, in each runtime, and seconds of the export itself.

    python benchmarks/deploy.py [--rounds 15] [--out benchmarks/results/deploy.json]

An LSTM of 50 units with 3 inputs and a linear readout of 2, float32, one lane, one thread, one step
at a time, as a live process runs it. First every runtime is checked to compute what the net
computes. Then the runtimes take turns. Goals, on a quiet machine: C at least 4 times as fast as
onnxruntime with bound buffers, WebAssembly at most 1.2 of C, `Session` at most 1.1 of the bound
buffers, an export under 1 s without verification and under 20 s with it.

WebAssembly is measured where clang has the target, or where the package ziglang, which has a clang
in it, is installed: `pip install ziglang`.
"""

import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import throughtime as tt
from record import parser_of, write
from throughtime.carry import Carried
from throughtime.deploy.verify import C_FLAGS, play_c
from wasm import wasm_steps

FEATURES, HIDDEN, OUTPUTS, STEPS = 3, 50, 2, 2_000
TIMER = """
import { readFileSync } from "node:fs";
import { create } from "./net.mjs";
const x = new Float32Array(new Uint8Array(readFileSync("x.bin")).buffer), net = create();
const play = () => { for (let k = 0; k < x.length; k += %d) net.step(x.subarray(k, k + %d)); };
play(); play();
const began = performance.now();
play();
console.log((performance.now() - began) * 1e3 / (x.length / %d));
"""


def steps_of(call: Callable[[Any], Any], rows: Any) -> Callable[[], float]:
    """Microseconds a call, one call for each row."""

    def measure() -> float:
        began = time.perf_counter()
        for row in rows:
            call(row)
        return (time.perf_counter() - began) / len(rows) * 1e6

    return measure


def bound(path: Path) -> Callable[[Any], None]:
    """The bare runtime with two buffers for the state, and nothing of ours around it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    runtime: Any = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    x, y = np.zeros((1, 1, FEATURES), np.float32), np.zeros((1, 1, OUTPUTS), np.float32)
    names = [value.name.removeprefix("state.") for value in runtime.get_inputs()[1:]]
    states = [{name: np.zeros((1, 1, HIDDEN), np.float32) for name in names} for _ in range(2)]
    bindings: list[Any] = []
    for before, after in (states, states[::-1]):
        binding = runtime.io_binding()
        for name, array in [("x", x), *((f"state.{k}", v) for k, v in before.items())]:
            binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        for name, array in [("y", y), *((f"next.{k}", v) for k, v in after.items())]:
            binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        bindings.append(binding)

    def step(row: Any, _kept: Any = states) -> None:  # a binding keeps no array alive
        x[0] = row
        runtime.run_with_iobinding(bindings[0])
        bindings.reverse()

    return step


def c_steps(folder: Path, x: Any, expected: Any, description: Any) -> Callable[[], float]:
    """The compiled C file, called once for all rows, which it steps through."""
    library = folder / "net.so"
    command = ["gcc", *C_FLAGS, "-O3", "-shared", "-fPIC", str(folder / "net.c")]
    subprocess.run([*command, "-o", str(library)], check=True)
    (y,) = play_c(library, "net", description, [x])
    require_same(y, expected, "C")
    compiled, state = ctypes.CDLL(str(library)), (ctypes.c_float * (2 * HIDDEN))()
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, y)]

    def measure() -> float:
        began = time.perf_counter()
        compiled.net_run(ctypes.byref(state), *pointers, ctypes.c_size_t(len(y)))
        return (time.perf_counter() - began) / len(y) * 1e6

    return measure


def javascript_steps(folder: Path, x: Any) -> Callable[[], float]:
    """The module in Node.js, timed inside."""
    shutil.copyfile(folder / "net.js", folder / "net.mjs")
    (folder / "x.bin").write_bytes(x.tobytes())
    (folder / "time.mjs").write_text(TIMER % (FEATURES, FEATURES, FEATURES))

    def measure() -> float:
        done = subprocess.run(
            ["node", "time.mjs"], cwd=folder, check=True, capture_output=True, text=True
        )
        return float(done.stdout)

    return measure


def eager_steps(layers: Sequence[nn.Module]) -> Callable[[Any], Any]:
    """A loop by hand of torch.nn, the state in a variable and nothing checked."""
    recurrent, readout = layers
    state: Any = None

    def step(x: Any) -> Any:
        nonlocal state
        with torch.no_grad():
            y, state = recurrent(x, state)
            return readout(y)

    return step


def require_same(got: Any, expected: Any, name: str) -> None:
    """Refuse to time what computes something else."""
    error = float(np.abs(np.asarray(got) - expected).max())
    if not error < 1e-6:
        raise SystemExit(f"{name} differs from the net by {error:.1g}; nothing to measure")


def exports(net: Carried, folder: Path, example: Any) -> dict[str, dict[str, float]]:
    """Seconds to write each format, without and with verification; the last files stay."""
    result: dict[str, dict[str, float]] = {}
    for suffix in ("onnx", "c", "js"):
        seconds: list[float] = []
        for steps in (0, 100_000):
            began = time.perf_counter()
            tt.export(net, folder / f"net.{suffix}", inputs=example, steps=steps)
            seconds.append(time.perf_counter() - began)
        result[suffix] = {"written_s": seconds[0], "verified_s": seconds[1]}
        print(f"{suffix:>20}: written in {seconds[0]:.2f} s, with verification {seconds[1]:.1f} s")
    return result


def main() -> None:
    parser = parser_of(__doc__, "deploy", rounds=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.LSTM(FEATURES, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)]
    eager, x = tt.carry(nn.Sequential(*layers)).eval(), torch.randn(STEPS, FEATURES)
    expected = tt.predict(eager, x)[0].numpy()
    rows = x.numpy()[:, None]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = exports(eager, folder, x)
        description = tt.deploy.Session(folder / "net.onnx").description
        measured = {"torch.nn, called": steps_of(tt.Predictor(eager).step, torch.from_numpy(rows))}
        measured["C"] = c_steps(folder, x.numpy(), expected, description)
        wasm = wasm_steps(folder, x.numpy())
        if wasm is None:
            print(
                "WebAssembly is not measured: neither clang with wasm-ld nor ziglang is installed"
            )
        else:
            wasm()
            y = np.fromfile(folder / "y.bin", np.float32).reshape(STEPS, OUTPUTS)
            require_same(y, expected, "WebAssembly")
            measured["WebAssembly"] = wasm
        measured["JavaScript"] = javascript_steps(folder, x.numpy())
        measured["onnxruntime, bound"] = steps_of(bound(folder / "net.onnx"), rows)
        measured["Session.step"] = steps_of(tt.deploy.Session(folder / "net.onnx").step, rows)
        fused = tt.carry(nn.Sequential(tt.nn.LSTM(FEATURES, HIDDEN), layers[1])).eval()
        fused.load_state_dict(eager.state_dict())
        inputs = torch.from_numpy(rows)
        measured["Predictor, called"] = steps_of(tt.Predictor(fused), inputs.unsqueeze(1))
        measured["torch eager"] = steps_of(eager_steps(layers), inputs.unsqueeze(1))
        for kind, call in (("Session", tt.deploy.Session(folder / "net.onnx")),):
            require_same(call(x.numpy()), expected, kind)
        require_same(tt.predict(fused, x)[0], expected, "Predictor")
        times: dict[str, list[float]] = {kind: [] for kind in measured}
        for turn in range(options.rounds + 1):
            for kind, measure in measured.items():
                figure = measure()
                if turn:
                    times[kind].append(figure)
    result: dict[str, dict[str, float]] = {}
    for kind, figures in times.items():
        low, middle, high = statistics.quantiles(figures, n=4)
        result[kind] = {"us": middle, "lower_quartile_us": low, "upper_quartile_us": high}
        print(f"{kind:>20}: {middle:7.2f} us a step (quartiles {low:.2f} to {high:.2f})")
    write(options.out, {"rounds": options.rounds, "export": written, "steps": result})


if __name__ == "__main__":
    main()
