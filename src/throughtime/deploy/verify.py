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

from throughtime.carry.carried import Carried, device_of, running
from throughtime.deploy.audio import play_nam, play_rtneural
from throughtime.deploy.chain import Array
from throughtime.deploy.metadata import STEPS
from throughtime.deploy.session import Session
from throughtime.deploy.source import identifier
from throughtime.errors import MissingExtraError, ModelError, counted
from throughtime.state import State

C_FLAGS = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off")
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}  # relative to the largest output above 1
_LONGEST = 2_000  # steps of a random chunk
_MARGIN = 20  # times the differences that rounding makes in the net itself
_SHORT = 500  # runs of a net that amplifies rounding
_SHARES = [0.5, 0.9, 0.99, 1.0]  # of the steps
_BLOCK = 1024  # steps of a forward call
# The leaves of a file in a state of the net
ReadState: TypeAlias = Callable[[State], Mapping[str, Tensor]]
# Plays chunks `(T, D)` one after another from the initial state, or each of them from its row of
# `(N, P)`, the leaves of a state one after another; the outputs `(T, C)`
_Play: TypeAlias = Callable[[Sequence[Array], Array | None], list[Array]]


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
            changed = f", another class at {counted(self.reclassified, 'step')}"
            said += changed if self.reclassified else ", the same classes"
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
    read_state: ReadState,
    x: Array,
) -> Verification | None:
    """Play steps on both, on the file in chunks of random lengths.

    A net that amplifies rounding is allowed some times what it differs by itself where its weights
    are rounded otherwise. One that does so within a few steps is also held to runs of so many
    steps, each from the state in which the net has come to it.

    Args:
        net: that was exported.
        kind: the format.
        path: the file.
        description: of the file.
        read_state: the leaves of the file in a state of the net.
        x: the steps, `(T, ...)` or `(T,)` indices.

    Returns:
        None if there is nothing to run the file with.

    Raises:
        ModelError: the outputs differ.
    """
    rounded = rounded_otherwise(net)
    with tempfile.TemporaryDirectory() as folder:
        play = _PLAYERS[kind](path, description, Path(folder))
        if play is None:
            return None
        blocks = np.split(x, range(_BLOCK, len(x), _BLOCK))
        cuts = np.cumsum(np.random.default_rng(0).integers(1, _LONGEST, len(x)))
        got = np.concatenate(play(np.split(x, cuts[cuts < len(x)]), None)).reshape(len(x), -1)
        expected, _ = _run_net(net, blocks, {})
        limit = TOLERANCE[description["inputs"]["dtype"]] * max(1.0, float(np.abs(expected).max()))
        sensitivity = _compare(
            f"{path.name}: in {counted(len(x), 'step')}",
            got - expected,
            lambda: _run_net(net, blocks, rounded)[0] - expected,
            limit,
        )
        if (steps := description["conformance"]["steps"]) < STEPS:
            runs = [x[k : k + steps] for k in range(0, len(x), steps)][:_SHORT]
            reached, states = _run_net(net, runs, {})
            starts = np.array([flat_state(read_state(state)) for state in states])
            short = np.concatenate(play(runs, starts)).reshape(len(reached), -1)
            _compare(
                f"{path.name}: in runs of {counted(steps, 'step')}",
                short - reached,
                lambda: _run_net(net, runs, rounded, states)[0] - reached,
                limit,
            )
    reclassified = None
    if description["outputs"]["classes"] and got.shape[1] > 1:
        reclassified = int((got.argmax(axis=1) != expected.argmax(axis=1)).sum())
    return Verification(len(x), float(np.abs(got - expected).max()), sensitivity, reclassified)


def _compare(
    where: str, differences: Array, own: Callable[[], Array], limit: float
) -> float | None:
    """Refuse differences `(T, C)` that are more than rounding.

    Returns:
        The largest one of the net's `own`, if they had to be asked for.
    """
    errors = np.abs(differences).max(axis=1)
    if errors.max() <= limit:
        return None
    rounding = np.abs(own()).max(axis=1)
    allowed = limit / 10 + _MARGIN * np.quantile(rounding, _SHARES)
    if not (np.quantile(errors, _SHARES) <= allowed).all():
        raise ModelError(
            f"{where}, the file gives other outputs than the net, by up to {errors.max():.2g}, half"
            f" of them by more than {np.median(errors):.2g}; the net itself differs by at most"
            f" {rounding.max():.2g} where its weights are rounded otherwise. No file was left. Does"
            " the net compute something beside its layers? Please report it with print(net)"
        )
    return float(rounding.max())


def random_steps(description: Mapping[str, Any], steps: int) -> Array:
    """Random inputs with the means and deviations of the description, or random indices."""
    inputs, random = description["inputs"], np.random.default_rng(0)
    if inputs["indexed"]:
        return random.integers(0, inputs["width"], steps)
    values = random.standard_normal((steps, inputs["width"])) * inputs["scale"] + inputs["shift"]
    return values.reshape(steps, *inputs["shape"]).astype(inputs["dtype"])


def like_weights(net: Carried, x: Tensor) -> Tensor:
    """Inputs on the device of the weights, and numbers in their type."""
    types = (w.dtype for w in net.parameters() if w.is_floating_point())
    return x.to(device_of(net), next(types, None) if x.is_floating_point() else None)


def _run_net(
    net: Carried,
    chunks: Sequence[Array],
    weights: Mapping[str, Tensor],
    starts: Sequence[State] = (),
) -> tuple[Array, list[State]]:
    """The outputs `(T, C)` of all chunks, and the state that enters each.

    Chunks are played one after another, or each from its state; some parameters may be others.
    """
    outputs, entering, state = list[Array](), list[State](), None
    with running(net):
        for n, chunk in enumerate(chunks):
            inputs = like_weights(net, torch.from_numpy(chunk).unsqueeze(1))
            if starts or not entering:
                state = starts[n] if starts else net.initial_state(1, like=inputs)
            entering.append(state)
            y, state = functional_call(net, dict(weights), (inputs, state))
            outputs.append(y.cpu().reshape(len(y), -1).numpy())
    return np.concatenate(outputs), entering


def flat_state(leaves: Mapping[str, Tensor]) -> Array:
    """The numbers of all leaves, one after another."""
    return np.concatenate([leaf.cpu().numpy().ravel() for leaf in leaves.values()])


def rounded_otherwise(net: Carried) -> dict[str, Tensor]:
    """The parameters, each changed in its last digit or not."""
    random = torch.Generator().manual_seed(0)
    return {
        name: p.detach()
        * (
            1
            + torch.finfo(p.dtype).eps
            * torch.randint(-1, 2, p.shape, device="cpu", generator=random).to(p)
        )
        for name, p in net.named_parameters()
        if p.is_floating_point()
    }


def _onnx(path: Path, description: Mapping[str, Any], folder: Path) -> _Play | None:
    del description, folder
    try:
        session = Session(path)
    except MissingExtraError:
        return None

    def play(chunks: Sequence[Array], starts: Array | None) -> list[Array]:
        session.reset()
        outputs: list[Array] = []
        for n, chunk in enumerate(chunks):
            if starts is not None:
                like = session.state
                parts = np.split(starts[n], np.cumsum([leaf.size for leaf in like.values()])[:-1])
                pairs = zip(like.items(), parts, strict=True)
                session.state = {k: p.reshape(v.shape).astype(v.dtype) for (k, v), p in pairs}
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
    return partial(play_c, library, path.stem, description)


def play_c(
    library: Path,
    name: str,
    description: Mapping[str, Any],
    chunks: Sequence[Array],
    starts: Array | None = None,
) -> list[Array]:
    """The outputs of a compiled C file for chunks, one after another, from the initial state.

    With `starts`, each chunk starts from its row of it.

    Raises:
        ModelError: `check` fails.
    """
    compiled, name = ctypes.CDLL(str(library)), identifier(name)
    state = np.zeros(sum(leaf["shape"][2] for leaf in description["state"]), np.float32)
    if getattr(compiled, f"{name}_check")():
        raise ModelError(f"{library}: its check fails")
    getattr(compiled, f"{name}_reset")(ctypes.c_void_p(state.ctypes.data))
    kind = np.int32 if description["inputs"]["indexed"] else np.float32
    outputs: list[Array] = []
    for n, chunk in enumerate(chunks):
        if starts is not None:
            state[:] = starts[n]
        x = np.ascontiguousarray(chunk, dtype=kind)
        y = np.empty((len(x), description["outputs"]["width"]), np.float32)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (state, x, y))
        getattr(compiled, f"{name}_run")(*pointers, ctypes.c_size_t(len(x)))
        outputs.append(y)
    return outputs


_SCRIPT = """
import { readFileSync, writeFileSync } from "node:fs";
import { create } from "./net.mjs";
const [width, indexed] = [Number(process.argv[2]), process.argv[3] === "True"];
const run = width * Number(process.argv[4]), each = Number(process.argv[5]);
const numbers = (file, kind) => new kind(new Uint8Array(readFileSync(file)).buffer);
const x = numbers("x.bin", indexed ? Int32Array : Float32Array);
const starts = numbers("starts.bin", Float32Array);
const net = create();
if (!net.check()) throw new Error("its check fails");
const rows = [];
for (let k = 0; k < x.length; k += width) {
  if (each && k % run === 0) {
    let at = k / run * each;
    for (const leaf of Object.values(net.state)) leaf.set(starts.subarray(at, at += leaf.length));
  }
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
    kind = np.int32 if inputs["indexed"] else np.float32

    def play(chunks: Sequence[Array], starts: Array | None) -> list[Array]:
        states = np.empty((1, 0)) if starts is None else starts
        (folder / "x.bin").write_bytes(np.concatenate(chunks).astype(kind).tobytes())
        (folder / "starts.bin").write_bytes(states.astype(np.float32).tobytes())
        settings = (width, inputs["indexed"], len(chunks[0]), states.shape[1])
        _run([node, "run.mjs", *map(str, settings)], path, folder)
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


_PLAYERS: dict[str, Callable[[Path, Mapping[str, Any], Path], _Play | None]] = {
    "onnx": _onnx,
    "c": _c,
    "js": _javascript,
    "html": _javascript,
    "nam": lambda path, *_: partial(play_nam, path.read_bytes()),
    "rtneural": lambda path, *_: partial(play_rtneural, path.read_bytes()),
}
