"""Runs an exported file beside the net that it was written from, before anybody relies on it.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from throughtime.carry.carried import Carried, running
from throughtime.deploy.audio import play_nam, play_rtneural
from throughtime.deploy.chain import Array
from throughtime.deploy.metadata import STEPS
from throughtime.deploy.session import Session
from throughtime.deploy.source import identifier
from throughtime.errors import MissingExtraError, ModelError

C_FLAGS = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off")
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}  # relative to the largest output above 1
_LONGEST = 2_000  # steps of a random chunk
_MARGIN = 20  # times the differences that rounding makes in the net itself
_SHORT = 500  # runs from the initial state
# Plays chunks one after another, from the initial state, or each of them from it; `(T, D)` to
# `(T, C)`
_Play: TypeAlias = Callable[[Sequence[Array], bool], list[Array]]


class Verification(NamedTuple):
    """Steps that the file and the net have both played, and the largest difference of outputs.

    `sensitivity` is the largest difference that the net itself shows where its weights are rounded
    otherwise, measured where the file differs by more than rounding alone: a net with two stable
    states amplifies it. `reclassified` is the number of steps at which the two give another class;
    None for outputs that are no classes.
    """

    steps: int
    error: float
    sensitivity: float | None = None
    reclassified: int | None = None

    @property
    def summary(self) -> str:
        """The largest difference in words, with its cause where the net amplifies rounding."""
        said = f"largest difference {self.error:.2g}"
        if self.reclassified is not None:
            steps = f"{self.reclassified:,} steps" if self.reclassified != 1 else "1 step"
            said += f", another class at {steps}" if self.reclassified else ", the same classes"
        if self.sensitivity is not None:
            said += (
                f". The net itself amplifies rounding on these inputs: it differs by"
                f" {self.sensitivity:.2g} from itself where the last digit of its weights changes,"
                " so this is no fault of the file"
            )
        return said


def verify(
    net: Carried,
    kind: str,
    path: Path,
    description: Mapping[str, Any],
    x: Array,
) -> Verification | None:
    """Play steps on both, on the file in chunks of random lengths.

    Args:
        net: that was exported.
        kind: the format.
        path: the file.
        description: of the file.
        x: the steps, `(T, ...)` or `(T,)` indices.

    Returns:
        None if there is nothing to run the file with.

    Raises:
        ModelError: the outputs differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        play = _PLAYERS[kind](path, description, Path(folder))
        if play is None:
            return None
        cuts = np.cumsum(np.random.default_rng(0).integers(1, _LONGEST, len(x)))
        got = np.concatenate(play(np.split(x, cuts[cuts < len(x)]), False)).reshape(len(x), -1)
        steps = description["conformance"]["steps"]
        runs = x[: min(_SHORT, len(x) // steps) * steps].reshape(-1, steps, *x.shape[1:])
        short = play([*runs], True) if len(runs) and steps < STEPS else []
    expected = _outputs(net, x[:, None], {})[:, 0]
    limit = TOLERANCE[description["inputs"]["dtype"]] * max(1.0, float(np.abs(expected).max()))
    errors = np.abs(got - expected).max(axis=1)
    error, sensitivity = float(errors.max()), None
    if not error <= limit:
        own = np.abs(_outputs(net, x[:, None], rounded_otherwise(net))[:, 0] - expected).max(axis=1)
        sensitivity = float(own.max())
        shares = [0.5, 0.9, 0.99, 1.0]
        allowed = limit / 10 + _MARGIN * np.quantile(own, shares)
        if not (np.quantile(errors, shares) <= allowed).all():
            raise ModelError(
                f"{path.name}: the file gives other outputs than the net, by {error:.2g} in"
                f" {len(x):,} steps, half of them by more than {np.median(errors):.2g}; the net"
                f" itself differs by at most {sensitivity:.2g} where its weights are rounded"
                " otherwise. No file was left. Does the net compute something beside its layers?"
                " Please report it with print(net)"
            )
    reclassified = None
    if description["outputs"]["classes"] and got.shape[1] > 1:
        reclassified = int((got.argmax(axis=1) != expected.argmax(axis=1)).sum())
    if short:
        got = np.stack(short).reshape(len(runs), steps, -1)
        errors = np.abs(got - _outputs(net, runs.swapaxes(0, 1), {}).swapaxes(0, 1)).max(
            axis=(1, 2)
        )
        if not np.quantile(errors, 0.9) <= limit:
            raise ModelError(
                f"{path.name}: the file gives other outputs than the net in runs of {steps} steps"
                f" from the initial state, half of them by more than {np.median(errors):.2g},"
                f" expected at most {limit:.2g}. No file was left; please report it with print(net)"
            )
    return Verification(len(x), error, sensitivity, reclassified)


def random_steps(description: Mapping[str, Any], steps: int) -> Array:
    """Random inputs with the means and deviations of the description, or random indices."""
    inputs, random = description["inputs"], np.random.default_rng(0)
    if inputs["indexed"]:
        return random.integers(0, inputs["width"], steps)
    values = random.standard_normal((steps, inputs["width"])) * inputs["scale"] + inputs["shift"]
    return values.reshape(steps, *inputs["shape"]).astype(inputs["dtype"])


def _outputs(net: Carried, x: Array, weights: Mapping[str, Tensor]) -> Array:
    """The outputs `(T, B, C)` for `(T, B, ...)`, some parameters of the net being others."""
    weight = next(net.parameters())
    inputs = torch.from_numpy(x).to(weight.device)
    if inputs.is_floating_point():
        inputs = inputs.to(weight.dtype)
    outputs: list[Tensor] = []
    with running(net):
        state = net.initial_state(inputs.shape[1], like=inputs[:1])
        for part in inputs.split(1024):
            y, state = functional_call(net, dict(weights), (part, state))
            outputs.append(y.cpu())
    return torch.cat(outputs).flatten(2).numpy()


def rounded_otherwise(net: Carried) -> dict[str, Tensor]:
    """The parameters, each changed in its last digit or not."""
    random = torch.Generator().manual_seed(0)
    return {
        name: p.detach() * (1 + torch.finfo(p.dtype).eps * _signs(p, random).to(p))
        for name, p in net.named_parameters()
        if p.is_floating_point()
    }


def _signs(p: Tensor, random: torch.Generator) -> Tensor:
    return torch.randint(-1, 2, p.shape, generator=random)


def _onnx(path: Path, description: Mapping[str, Any], folder: Path) -> _Play | None:
    del description, folder
    try:
        session = Session(path)
    except MissingExtraError:
        return None

    def play(chunks: Sequence[Array], anew: bool) -> list[Array]:
        outputs: list[Array] = []
        for chunk in chunks:
            if anew or not outputs:
                session.reset()
            outputs.append(session(chunk))
        return outputs

    return play


def _c(path: Path, description: Mapping[str, Any], folder: Path) -> _Play | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform == "win32":
        return None
    library = folder / "net.so"
    command = [compiler, *C_FLAGS, "-O2", "-shared", "-fPIC", "-x", "c", str(path)]
    command += ["-o", str(library)]
    _run(command, path)
    return lambda chunks, anew: play_c(library, path.stem, description, chunks, anew=anew)


def play_c(
    library: Path,
    name: str,
    description: Mapping[str, Any],
    chunks: Sequence[Array],
    *,
    anew: bool = False,
) -> list[Array]:
    """The outputs of a compiled C file for chunks, one after another, from the initial state.

    With `anew`, each chunk starts from it.

    Raises:
        ModelError: `check` fails.
    """
    compiled, name = ctypes.CDLL(str(library)), identifier(name)
    width = sum(leaf["shape"][2] for leaf in description["state"])
    state = (ctypes.c_float * width)()
    reset = getattr(compiled, f"{name}_reset")
    if getattr(compiled, f"{name}_check")():
        raise ModelError(f"{library}: its check fails")
    kind = np.int32 if description["inputs"]["indexed"] else np.float32
    outputs: list[Array] = []
    for chunk in chunks:
        if anew or not outputs:
            reset(ctypes.byref(state))
        x = np.ascontiguousarray(chunk, dtype=kind)
        y = np.empty((len(x), description["outputs"]["width"]), np.float32)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (x, y))
        getattr(compiled, f"{name}_run")(ctypes.byref(state), *pointers, ctypes.c_size_t(len(x)))
        outputs.append(y)
    return outputs


_SCRIPT = """
import { readFileSync, writeFileSync } from "node:fs";
import { create } from "./net.mjs";
const [width, indexed] = [Number(process.argv[2]), process.argv[3] === "True"];
const run = width * Number(process.argv[4]);
const bytes = readFileSync("x.bin");
const x = indexed ? new Int32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4)
                  : new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
const net = create();
if (!net.check()) throw new Error("its check fails");
const rows = [];
for (let k = 0; k < x.length; k += width) {
  if (k % run === 0) net.reset();
  rows.push(net.step(indexed ? x[k] : x.subarray(k, k + width)));
}
const y = new Float32Array(rows.length * rows[0].length);
rows.forEach((row, t) => y.set(row, t * row.length));
writeFileSync("y.bin", Buffer.from(y.buffer));
"""


def _javascript(path: Path, description: Mapping[str, Any], folder: Path) -> _Play | None:
    node = shutil.which("node")
    if node is None:
        return None
    inputs = description["inputs"]
    text = path.read_text(encoding="utf-8")
    if text.startswith("<!doctype html>"):  # its module is a function there
        start = text.index("(() => {\n") + len("(() => {\n")
        text = text[start : text.index("return { create, description };", start)]
        text += "export { create };\n"
    (folder / "net.mjs").write_text(text, encoding="utf-8")
    (folder / "run.mjs").write_text(_SCRIPT)
    width = 1 if inputs["indexed"] else inputs["width"]

    def play(chunks: Sequence[Array], anew: bool) -> list[Array]:
        run = len(chunks[0]) if anew else sum(map(len, chunks))
        kind = np.int32 if inputs["indexed"] else np.float32
        (folder / "x.bin").write_bytes(np.concatenate(chunks).astype(kind).tobytes())
        _run([node, "run.mjs", str(width), str(inputs["indexed"]), str(run)], path, folder)
        y = np.fromfile(folder / "y.bin", np.float32).reshape(-1, description["outputs"]["width"])
        return np.split(y, np.cumsum([*map(len, chunks)])[:-1])

    return play


def _run(command: Sequence[str], path: Path, folder: Path | None = None) -> None:
    done = subprocess.run(  # noqa: S603  # our own file, no shell
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ModelError(
            f"{path.name}: {command[0]} refuses the file that was written; please report it:\n"
            f"{done.stderr.strip()[:2000]}"
        )


def _reader(play: Callable[[Sequence[Array]], list[Array]]) -> _Play:
    return lambda chunks, anew: [play([chunk])[0] for chunk in chunks] if anew else play(chunks)


_PLAYERS: dict[str, Callable[[Path, Mapping[str, Any], Path], _Play | None]] = {
    "onnx": _onnx,
    "c": _c,
    "js": _javascript,
    "html": _javascript,
    "nam": lambda path, *_: _reader(partial(play_nam, path.read_bytes())),
    "rtneural": lambda path, *_: _reader(partial(play_rtneural, path.read_bytes())),
}
