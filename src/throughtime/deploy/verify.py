"""Runs an exported file beside the net that it was written from, before anybody relies on it.

A file and torch compute the same function and round it differently. How much that may matter is
measured on the net itself: by how much its other evaluations in the type of the file, torch's own
and those with weights that are changed in their last digits, drift from the one in float64. A net
that amplifies rounding, as many do that were trained on unscaled inputs, is so allowed some times
what it does to itself.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import copy
import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._search import CALL_ERRORS
from throughtime.carry.carried import Carried, device_of, running
from throughtime.deploy.chain import Array, Leaf, state_of
from throughtime.deploy.session import Session, initial_state
from throughtime.deploy.source import identifier
from throughtime.errors import ModelError, counted
from throughtime.state import State

C_FLAGS = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off")
ROUNDING = {"float32": 1e-6, "float64": 1e-10}  # of one evaluation, of the spread of outputs
MARGIN = 4  # times the drift of the net itself
# Weights are changed by so many units in the last place: onnxruntime's logistic function of a gate
# is wrong by up to 6e-7, ten times as much as torch's, and a net does the same to both
_ULPS = 8
_PERTURBED = 4  # nets, at most
_LONGEST = 2_000  # steps of a random chunk
_SINGLE = 500  # steps that are played from states of their own, at most
Result = TypeVar("Result")
# The leaves of a state of one lane, as the file has them
_Start: TypeAlias = Mapping[str, Array]
# Plays chunks `(T, D)` one after another from the initial state, or each from its own; outputs
# `(T, C)`
_Play: TypeAlias = Callable[[Sequence[Array], Sequence[_Start]], list[Array]]


class Verification(NamedTuple):
    """Steps that the file and the net have both played, and the largest difference of outputs.

    `drift` is the largest difference between evaluations of the net itself and one in float64,
    measured where the file differs from the net by more than one evaluation rounds.
    """

    steps: int
    error: float
    drift: float | None = None

    @property
    def summary(self) -> str:
        """The largest difference in words, with its cause where the net amplifies rounding."""
        said = f"largest difference {self.error:.2g}"
        if self.drift:
            said += (
                ". The net itself amplifies rounding on these inputs: torch differs from float64"
                f" by {self.drift:.2g}, so this is no fault of the file"
            )
        return said


def in_float64(net: Carried, run: Callable[[Carried], Result]) -> Result:
    """The result for the net in float64, or as it is where it makes tensors of another type."""
    try:
        return run(copy.deepcopy(net).double())
    except CALL_ERRORS:
        return run(net)


def verify(
    net: Carried,
    kind: str,
    files: Mapping[Path, bytes],
    description: Mapping[str, Any],
    leaves: Sequence[Leaf],
    x: Array,
) -> Verification | None:
    """Play steps on both, on the file in chunks of random lengths, and single steps.

    A single step is played from a state that the net has reached. So a fault is seen where a net
    amplifies so much that two unbroken runs cannot be compared.

    Args:
        net: that was exported.
        kind: the format.
        files: contents by path, which are written to a folder of their own.
        description: of the file.
        leaves: of the file.
        x: the steps, `(T, ...)` or `(T,)` indices.

    Returns:
        None if there is nothing to run the file with.

    Raises:
        ModelError: the outputs differ.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, content in files.items():
            (folder / path.name).write_bytes(content)
        path = folder / next(iter(files)).name
        play = _PLAYERS[kind](path, description, folder) if kind in _PLAYERS else None
        if play is None:
            return None
        cuts = np.cumsum(np.random.default_rng(0).integers(1, _LONGEST, len(x)))
        got = _flat(play(np.split(x, cuts[cuts < len(x)]), ()), len(x))
        blocks = np.array_split(x, min(_SINGLE, len(x)))
        own, states = _run_net(net, blocks)
        dtype = description["inputs"]["dtype"]
        compare = partial(_compare, net, dtype, ROUNDING[dtype] * np.ptp(own))
        whole = partial(_run_net, chunks=blocks)
        drift = compare(got, own, whole, f"{path.name}: in {counted(len(x), 'step')}")
        steps = [block[:1] for block in blocks]
        like = initial_state(description, 1)
        starts = [_start(state_of(net, leaves, state), like) for state in states]
        single = _flat(play(steps, starts), len(steps))
        step = partial(_run_net, chunks=steps, starts=states)
        where = f"{path.name}: in {counted(len(steps), 'single step')}"
        compare(single, step(net)[0], step, where)
    return Verification(len(x), float(np.abs(got - own).max()), drift)


def _compare(
    net: Carried,
    dtype: str,
    limit: float,
    got: Array,
    own: Array,
    run: Callable[[Carried], tuple[Array, Any]],
    where: str,
) -> float | None:
    """Refuse outputs `(T, C)` that differ from the net's `own` by more than rounding.

    Returns:
        The largest drift of the net, None where the file is so close that it was not measured.
    """
    if np.abs(got - own).max() <= limit:
        return None
    twin = copy.deepcopy(net).to(getattr(torch, dtype))
    others = (_perturbed(copy.deepcopy(twin), seed) for seed in range(_PERTURBED))
    (expected, _), drift = in_float64(net, run), np.zeros(2)
    error = _sizes(got - expected)
    for other in chain((twin,), others):
        drift = np.maximum(drift, _sizes(run(other)[0] - expected))
        if (error <= limit + MARGIN * drift).all():
            return float(drift[1])
    raise ModelError(
        f"{where}, the file differs from the net in float64 by {error[1]:.2g} at most and"
        f" {error[0]:.2g} in the median. Torch itself differs from it by {drift[1]:.2g} and"
        f" {drift[0]:.2g}, of which {MARGIN} times as much is allowed. No file was left. Does the"
        " net compute something beside its layers? Please report it with print(net). steps= is the"
        " number of random steps: 0 writes a file that was not verified"
    )


def _sizes(differences: Array) -> Array:
    """The median over the steps, and the largest one; NaN is infinite."""
    errors = np.nan_to_num(np.abs(differences).max(axis=1), nan=np.inf)
    return np.quantile(errors, [0.5, 1.0], method="lower")


def random_steps(description: Mapping[str, Any], steps: int) -> Array:
    """Random inputs with the means and deviations of the description, or random indices."""
    inputs, random = description["inputs"], np.random.default_rng(0)
    if inputs["indexed"]:
        return random.integers(0, inputs["width"], steps)
    values = random.standard_normal((steps, inputs["width"])) * inputs["scale"] + inputs["shift"]
    return values.reshape(steps, *inputs["shape"]).astype(inputs["dtype"])


def like_weights(net: nn.Module, x: Tensor) -> Tensor:
    """Inputs on the device of the weights, and numbers in their type."""
    types = (w.dtype for w in net.parameters() if w.is_floating_point())
    return x.to(device_of(net), next(types, None) if x.is_floating_point() else None)


def _start(leaves: Mapping[str, Tensor], like: _Start) -> _Start:
    arrays = {k: leaf.cpu().numpy().astype(like[k].dtype) for k, leaf in leaves.items()}
    return {k: array.reshape(like[k].shape) for k, array in arrays.items()}


def _numbers(start: _Start) -> Array:
    """The numbers of all leaves, one after another."""
    return np.concatenate([leaf.ravel() for leaf in start.values()])


def _flat(outputs: Sequence[Array], steps: int) -> Array:
    return np.concatenate(outputs).reshape(steps, -1)


def _run_net(
    net: Carried, chunks: Sequence[Array], starts: Sequence[State] = ()
) -> tuple[Array, list[State]]:
    """The outputs `(T, C)` of all chunks, and the state that enters each.

    Chunks are played one after another, or each from its state, of any type.
    """
    outputs, entering, state = list[Tensor](), list[State](), None
    with running(net):
        for n, chunk in enumerate(chunks):
            inputs = like_weights(net, torch.from_numpy(chunk).unsqueeze(1))
            if starts or not entering:
                state = trees.detach(net.initial_state(1, like=inputs))
            if starts:
                state = trees.map_leaves(lambda own, leaf: leaf.to(own), state, starts[n])
            entering.append(state)
            y, state = net(inputs, state)
            outputs.append(y)
    y = torch.cat(outputs)
    return y.cpu().reshape(len(y), -1).numpy(), entering


def _perturbed(net: Carried, seed: int) -> Carried:
    """The net with each weight changed in its last digits."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            if weight.is_floating_point():
                noise = torch.rand(weight.shape, generator=random, device="cpu").to(weight) * 2 - 1
                weight.mul_(1 + _ULPS * torch.finfo(weight.dtype).eps * noise)
    return net


def _onnx(path: Path, description: Mapping[str, Any], folder: Path) -> _Play | None:
    del description, folder
    try:
        session = Session(path)
    except ImportError:
        return None
    except (ValueError, RuntimeError) as error:
        raise ModelError(str(error)) from error

    def play(chunks: Sequence[Array], starts: Sequence[_Start]) -> list[Array]:
        session.reset()
        outputs: list[Array] = []
        for n, chunk in enumerate(chunks):
            if starts:
                session.state = starts[n]
            outputs.append(session(chunk))
        return outputs

    return play


def _c(path: Path, description: Mapping[str, Any], folder: Path) -> _Play | None:
    compiler = shutil.which("cc") or shutil.which("clang")
    if compiler is None or sys.platform == "win32":
        return None
    library = folder / "net.so"
    command = [compiler, *C_FLAGS, "-O2", "-shared", "-fPIC", "-x", "c", str(path)]
    _run([*command, "-o", str(library)], path)
    return partial(play_c, library, path.stem, description)


def play_c(
    library: Path,
    name: str,
    description: Mapping[str, Any],
    chunks: Sequence[Array],
    starts: Sequence[_Start] = (),
) -> list[Array]:
    """The outputs of a compiled C file for chunks, one after another, from the initial state.

    With `starts`, each chunk starts from its own state.

    Raises:
        ModelError: `check` fails.
    """
    compiled, name = ctypes.CDLL(str(library)), identifier(name)
    if getattr(compiled, f"{name}_check")():
        raise ModelError(f"{library}: its check fails")
    run, reset = (getattr(compiled, f"{name}_{function}") for function in ("run", "reset"))
    state = _numbers(initial_state(description, 1)) * np.nan  # a reset must set all of it
    reset(state.ctypes)
    kind = np.int32 if description["inputs"]["indexed"] else np.float32
    outputs: list[Array] = []
    for n, chunk in enumerate(chunks):
        if starts:
            state[:] = _numbers(starts[n])
        x = np.ascontiguousarray(chunk, dtype=kind)
        outputs.append(np.empty((len(x), description["outputs"]["width"]), np.float32))
        run(state.ctypes, x.ctypes, outputs[-1].ctypes, ctypes.c_size_t(len(x)))
    return outputs


_SCRIPT = """
import { readFileSync, writeFileSync } from "node:fs";
import { create } from "./net.mjs";
const [width, indexed] = [Number(process.argv[2]), process.argv[3] === "True"];
const numbers = (file, kind) => new kind(new Uint8Array(readFileSync(file)).buffer);
const x = numbers("x.bin", indexed ? Int32Array : Float32Array);
const starts = numbers("starts.bin", Float32Array);
const net = create();
if (!net.check()) throw new Error("its check fails");
for (const leaf of Object.values(net.state)) leaf.fill(NaN);
net.reset();
const rows = [];
for (let k = 0, at = 0; k < x.length; k += width) {
  if (starts.length)
    for (const leaf of Object.values(net.state)) leaf.set(starts.subarray(at, at += leaf.length));
  rows.push(net.step(indexed ? x[k] : x.subarray(k, k + width)));
}
const y = new Float32Array(rows.length * rows[0].length);
rows.forEach((row, t) => y.set(row, t * row.length));
writeFileSync("y.bin", Buffer.from(y.buffer));
"""


def _javascript(path: Path, description: Mapping[str, Any], folder: Path) -> _Play | None:
    node, inputs = shutil.which("node"), description["inputs"]
    if node is None:
        return None
    (folder / "net.mjs").write_bytes(path.read_bytes())
    (folder / "run.mjs").write_text(_SCRIPT)
    width, kind = (1, np.int32) if inputs["indexed"] else (inputs["width"], np.float32)

    def play(chunks: Sequence[Array], starts: Sequence[_Start]) -> list[Array]:
        """As `_Play`; with `starts`, chunks have one step each."""
        (folder / "x.bin").write_bytes(np.concatenate(chunks).astype(kind).tobytes())
        states = np.concatenate([np.empty(0), *map(_numbers, starts)])
        (folder / "starts.bin").write_bytes(states.astype(np.float32).tobytes())
        _run([node, "run.mjs", str(width), str(inputs["indexed"])], path, folder)
        return [
            np.fromfile(folder / "y.bin", np.float32).reshape(-1, description["outputs"]["width"])
        ]

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
}
