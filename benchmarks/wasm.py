"""The exported C file as WebAssembly, run and timed by Node.js; for `deploy.py` and for tests.

    python benchmarks/deploy.py

clang compiles it where it has the target and its linker `wasm-ld` is installed, or else the package
ziglang, which has a clang in it: `pip install ziglang`.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from throughtime.deploy.verify import C_FLAGS

WASM_FLAGS = (
    *("--target=wasm32-freestanding", "-O3", "-msimd128", "-mbulk-memory"),
    *("-ffp-contract=off", "-nostdlib", "-Wl,--no-entry"),
)
WASM_TIMER = """
import { readFileSync, writeFileSync } from "node:fs";
const [inputs, outputs] = process.argv.slice(2).map(Number), bytes = readFileSync("x.bin");
const { instance } = await WebAssembly.instantiate(readFileSync("net.wasm"));
const { memory, net_reset, net_run, net_check, __heap_base } = instance.exports;
const steps = bytes.length / (4 * inputs);
const x = __heap_base.value, y = x + bytes.length, state = y + 4 * outputs * steps;
memory.grow(Math.ceil(state / 65536) + 1);
new Uint8Array(memory.buffer).set(bytes, x);
if (net_check()) throw new Error("its check fails");
const play = () => { net_reset(state); net_run(state, x, y, steps); };
play(); play();
const began = performance.now();
play();
console.log((performance.now() - began) * 1e3 / steps);
writeFileSync("y.bin", new Uint8Array(memory.buffer, y, 4 * outputs * steps));
"""


def wasm_compiler() -> list[str] | None:
    """The beginning of a command that compiles C to WebAssembly; None where there is none."""
    clang = shutil.which("clang")
    if clang is not None and shutil.which("wasm-ld") is not None:
        return [clang]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def wasm_steps(folder: Path, x: Any) -> Callable[[], float] | None:
    """The C file `net.c` as WebAssembly in Node.js, timed inside; it writes the outputs `y.bin`.

    None without a compiler.
    """
    compiler = wasm_compiler()
    if compiler is None:
        return None
    names = ("net_reset", "net_run", "net_check", "__heap_base")
    exports = "-Wl," + ",".join(f"--export={name}" for name in names)
    command = [*compiler, *C_FLAGS, *WASM_FLAGS, exports, "net.c", "-o", "net.wasm"]
    subprocess.run(command, cwd=folder, check=True)
    (folder / "x.bin").write_bytes(x.tobytes())
    (folder / "wasm.mjs").write_text(WASM_TIMER)
    width = x.shape[1] if x.ndim == 2 else 1
    outputs = int(re.findall(r"NET_OUTPUTS = (\d+)", (folder / "net.h").read_text())[0])

    def measure() -> float:
        done = subprocess.run(
            ["node", "wasm.mjs", str(width), str(outputs)],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        )
        return float(done.stdout)

    return measure
