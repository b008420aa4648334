"""`tt.export`: a trained net, with its state, as a file that other runtimes run.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._search import CALL_ERRORS
from throughtime.carry.carried import Carried, require_carried, running
from throughtime.deploy import session
from throughtime.deploy.audio import write_nam, write_rtneural
from throughtime.deploy.chain import Array, Chain, Leaf, read_chain, state_of
from throughtime.deploy.onnx import step_model, write_chain, write_onnx
from throughtime.deploy.source import write_c, write_javascript
from throughtime.deploy.verify import (
    Verification,
    in_float64,
    like_weights,
    random_steps,
    verify,
)
from throughtime.diagnose import SettlingTime, settling_time
from throughtime.errors import ConfigError, DataError, ModelError, listed, one_line
from throughtime.files import write_together
from throughtime.gradient.window import check_whole
from throughtime.nn.affine import refuse_whole_recordings
from throughtime.predict import inputs_hint
from throughtime.stream import Stream
from throughtime.stream.sources import Recordings
from throughtime.stream.stream import whole_stream

_Write: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, bytes]]
_WRITERS = {  # of chains
    "onnx": write_chain,
    "c": write_c,
    "js": write_javascript,
    "nam": write_nam,
    "json": write_rtneural,
}
_SUFFIXES = {".onnx": "onnx", ".c": "c", ".js": "js", ".mjs": "js", ".nam": "nam", ".json": "json"}
_VECTOR, _NUMBERS = 64, 4096  # steps of the conformance vector, and numbers in it, at most
_NEEDS = {
    "onnx": "onnxruntime is not at hand",
    "c": "a C compiler is not at hand",
    "js": "Node.js is not at hand",
}
_EXPECTED = (
    "expected an example: numbers (T, D) or (T, B, D), images (T, C, H, W) or (T, B, C, H, W), or"
    " indices for an nn.Embedding, whole numbers (T,) or (T, B)"
)
_LAST = {"softmax": "probabilities", "log_softmax": "log-probabilities", "sigmoid": "probabilities"}


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        paths: of the files, that which was asked for first.
        verification: steps and largest error against the net, of the random steps; None for none
            of these, or if no runtime was at hand.
        recorded: the same of the longest recording of `stream`, without a reset.
        settling: how long a cold start differs; None without `stream`.
        remarks: what a user should know.
    """

    paths: tuple[Path, ...]
    verification: Verification | None
    recorded: Verification | None = None
    settling: SettlingTime | None = None
    remarks: tuple[str, ...] = ()


def export(
    net: Carried,
    path: str | Path,
    *,
    inputs: Any,
    rate: float | None = None,
    classes: Sequence[str] = (),
    steps: int = 100_000,
    stream: Stream | Recordings | None = None,
    details: Mapping[str, Any] | None = None,
    with_session: bool = False,
) -> Export:
    """Write the net as a file that runs without Python, its state explicit.

    The file is verified before it is there: it plays `steps` random steps in chunks of random
    lengths, and must give the outputs of the net. That needs onnxruntime, a C compiler or Node.js;
    without one, and for .nam and .json, nothing is verified, and a remark says so. Other files hold
    a short vector by which they are checked where they are loaded.

    Args:
        net: made by `tt.carry`. ONNX takes any; the other formats a chain, an `nn.Sequential` or a
            class: an `nn.Embedding` or standardisation, layers of LSTM, GRU or RNN (tanh or relu),
            `nn.Linear`, `nn.LayerNorm` and functions of each value. A chain is written in float32.
        path: of the file; its suffix names the format: .onnx, .c (C99, and a header beside it), .js
            or .mjs (an ES module), .nam (Neural Amp Modeler) or .json (RTNeural and AIDA-X).
        inputs: an example `(T, B, D)` or `(T, D)`, or indices `(T, B)` or `(T,)`, in the units in
            which the file will get its inputs: random steps have its means and about its
            deviations. Steps of more dimensions are taken as by `tt.predict`, or with lanes.
        rate: steps per second, for the description.
        classes: names of the outputs.
        steps: random ones to verify; 0 for none.
        stream: recordings, as for `tt.evaluate`, or a `tt.Stream`. The longest one is played from
            the initial state without a reset; `verified` of the description is the result, and
            `settling_time` that of `tt.settling_time(net, stream)`.
        details: more entries of the description, such as names of columns.
        with_session: also write session.py beside an .onnx file: `Session`, which runs it on
            machines that have numpy and onnxruntime only.

    Returns:
        An `Export`: the files, and the largest error against the net.

    Raises:
        ConfigError: a suffix that names no format; negative `steps`.
        DataError: an example of another shape, or with NaN or infinite values.
        ModelError: the net is no chain, with the child in the way, or the file that was written
            computes something else; then there is no file.

    Cost: writing takes milliseconds; verifying takes a forward pass of `steps` steps, twice; the
    settling time one over `stream`.

    Example:
        >>> import tempfile, torch, throughtime as tt
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 2)))
        >>> path = tempfile.mkdtemp() + "/beat.c"
        >>> written = tt.export(net, path, inputs=torch.randn(100, 3), steps=0)
        >>> [file.name for file in written.paths]
        ['beat.c', 'beat.h']
    """
    net, path = require_carried(net), Path(path)
    kind = _kind(path, with_session)
    check_whole("steps", steps, 0)
    _check_weights(net)
    refuse_whole_recordings(net)
    with running(net):
        example = _accepted(net, _example(inputs))
        chain = _chain(net, kind, example)
        leaves = _leaves(net, example) if chain is None else chain.leaves
        description = _describe(net, chain, leaves, example, rate, classes, details or {})
        write: _Write = (
            partial(write_onnx, step_model(net, example, description, path.stem))
            if chain is None
            else partial(_WRITERS[kind], chain, name=path.stem)
        )

    def check(x: Array) -> Verification | None:
        files = _named(path, write(description))
        return verify(net, kind, files, description, leaves, x)

    settling, recorded = None, None
    if stream is not None:
        played = stream if isinstance(stream, Stream) else whole_stream(stream)
        signal, settling = _longest(played), settling_time(net, played)
        description["settling_time"] = _settling_facts(settling)
        recorded = check(signal[:, 0].numpy().astype(random_steps(description, 1).dtype))
    verification = check(random_steps(description, steps)) if steps else None
    description["verified"] = recorded and recorded._asdict()
    files = _named(path, write(description))
    if with_session:
        files[path.with_name("session.py")] = Path(session.__file__).read_bytes()
    write_together(files)
    remarks = ()
    if verification is None and recorded is None:
        reason = _NEEDS.get(kind, "play it in the plug-in")
        if not steps and stream is None:
            reason = "no steps were asked for. Leave out steps, or give stream="
        remarks = (f"not verified: {reason}",)
    return Export(tuple(files), verification, recorded, settling, remarks)


def _kind(path: Path, with_session: bool) -> str:
    """The format that the suffix of a path names."""
    kind = _SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"{path}: its suffix names no format; expected {', '.join(_SUFFIXES)}")
    if with_session and kind != "onnx":
        raise ConfigError(f"with_session: {path} needs no session, which runs .onnx files")
    return kind


def _named(path: Path, files: Mapping[str, bytes]) -> dict[Path, bytes]:
    """The contents by path, the first one as the user named it."""
    return {path.with_suffix(s) if i else path: files[s] for i, s in enumerate(files)}


def _longest(stream: Stream) -> Tensor:
    """The inputs of the longest recording, `(T, 1, D)` or `(T, 1)`."""
    longest = max(stream.recordings, key=len)
    options: Any = {"missing": stream.missing, "rank": 0, "ranks": 1}
    single = Stream([longest], 1, len(longest), seed=None, **options)
    return single.read(0, len(longest)).inputs


def _settling_facts(settling: SettlingTime) -> dict[str, Any]:
    """The settling time for a description: steps by share of the cold starts, null if unsettled."""
    return {
        "steps": {f"{share:g}": n for share, n in settling.quantiles.items()},
        "starts": len(settling.starts),
        "unsettled": settling.unsettled,
        "compared": max(start.compared for start in settling.starts),
        "tolerance": settling.tolerance,
        "scale": settling.scale,
    }


def _check_weights(net: Carried) -> None:
    """Refuse weights that are NaN or infinite, or of a type that files do not have."""
    for name, weight in net.module.named_parameters():
        if not weight.isfinite().all():
            raise ModelError(
                f"the weight '{name}' is not finite: the training diverged. Take weights from"
                " before that"
            )
        if weight.dtype in {torch.float16, torch.bfloat16}:
            raise ModelError(
                f"the weight '{name}' is {weight.dtype}, and files have float32 or float64: export"
                " tt.carry(copy.deepcopy(module).float())"
            )


def _example(inputs: Any) -> Tensor:
    """The example as a tensor of numbers or of indices."""
    try:
        x = torch.as_tensor(inputs, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"inputs is a {type(inputs).__name__}, {_EXPECTED}") from error
    numbers = x.is_floating_point()
    known = numbers or not (x.is_complex() or x.dtype is torch.bool)
    if not known or not x.numel() or (x.dim() < 2 if numbers else x.dim() not in (1, 2)):
        raise DataError(f"inputs have shape {tuple(x.shape)} and type {x.dtype}, {_EXPECTED}")
    return x


def _accepted(net: Carried, x: Tensor) -> Tensor:
    """The example with lanes, `(T, B, ...)`: it is a recording, or has lanes, as the net takes it.

    Four dimensions are a recording of images `(T, C, H, W)` first, as for `tt.predict`.
    """
    x = like_weights(net, x)
    forms = [x[:, None], x] if x.dim() in (2, 4) else [x, x[:, None]]
    errors: list[DataError] = []
    for form in forms:
        try:
            _check_call(net, form)
        except DataError as error:
            errors.append(error)
        else:
            _check_finite(form)
            return form
    raise errors[0] if 1 < x.dim() < 4 else errors[-1]


def _check_call(net: Carried, example: Tensor) -> None:
    """Refuse an example that the net does not take."""
    try:
        y, _ = net(example, net.initial_state(example.shape[1], like=example))
    except ModelError:
        raise
    except CALL_ERRORS as error:
        raise DataError(
            f"inputs: the net does not take the example, {tuple(example.shape)} {example.dtype}"
            f" from {example.min():.4g} to {example.max():.4g}: {one_line(error)}"
            f"{inputs_hint(net.module, example)}. Give inputs like those that it was trained"
            " on"
        ) from error
    if not isinstance(y, Tensor):
        raise ModelError(
            "a file has one output in each step, and the net returns"
            f" {listed(range(len(y)) if type(y) is tuple else y)}: carry it with one of them,"
            " tt.carry(module, output=...), or let its forward join them, torch.cat([a, b], -1)"
        )


def _check_finite(x: Tensor) -> None:
    """Refuse an example `(T, B, ...)` with values that are NaN or infinite."""
    missing = (~x.flatten(2).isfinite()).nonzero() if x.is_floating_point() else x[:0]
    if len(missing):
        step, lane, column = missing[0].tolist()
        raise DataError(
            f"inputs: the example has values that are NaN or infinite in {x.dtype}, the first at"
            f" step {step}, lane {lane}, column {column}. Means and"
            " deviations are taken from it: give one without, such as"
            " inputs=torch.nan_to_num(x, posinf=0.0, neginf=0.0), or a part of the signal without"
            " them"
        )


def _chain(net: Carried, kind: str, example: Tensor) -> Chain | None:
    """The chain of a net, None for one that ONNX gets step by step."""
    try:
        chain = read_chain(net, example)
    except ModelError:
        if kind != "onnx":
            raise
        return None
    projected = any(layer.hr is not None for layer in chain.layers)
    return None if kind == "onnx" and projected else chain  # ONNX has no LSTM with a projection


def _leaves(net: Carried, example: Tensor) -> tuple[Leaf, ...]:
    """The leaves of the net's own state."""
    state = trees.detach(net.initial_state(1, like=example))
    pairs = zip(net.leaf_names(state), trees.tensors(state), strict=True)
    return tuple(Leaf(k.replace("/", "."), leaf[0].cpu().numpy(), k) for k, leaf in pairs)


def _describe(
    net: Carried,
    chain: Chain | None,
    leaves: Sequence[Leaf],
    example: Tensor,
    rate: float | None,
    classes: Sequence[str],
    details: Mapping[str, Any],
) -> dict[str, Any]:
    """The description, with the conformance vector that the net computes."""
    y, _ = net(example[:1, :1], net.initial_state(1, like=example))
    width = y[0, 0].numel()
    if isinstance(classes, str) or any(type(name) is not str for name in classes):
        raise ConfigError(f"classes={classes!r}: expected names, such as ('none', 'beat')")
    if classes and len(classes) != width:
        raise ConfigError(f"{len(classes)} classes are named and the net has {width} outputs")
    if rate is not None and not 0 < rate < math.inf:
        raise ConfigError(f"rate={rate}: expected steps per second, above 0")
    last = getattr(chain and chain.operations[-1], "function", "")
    outputs = {
        "shape": [*y.shape[2:]],
        "width": width,
        "meaning": _LAST.get(last, "logits" if classes else "values"),
        "classes": [*classes],
    }
    description: dict[str, Any] = {
        "format": session.FORMAT,
        "inputs": _describe_inputs(net, example, "float32" if chain else str(y.dtype)[6:]),
        "outputs": outputs,
        "rate": rate,
        "state": [_describe_leaf(leaf, [1, "B"] if chain else ["B"]) for leaf in leaves],
        "settling_time": None,
        "verified": None,
    }
    if clash := details.keys() & {*description, "conformance"}:
        raise ConfigError(f"details: {listed(clash)} belongs to every file; take another name")
    try:
        json.dumps(details, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"details: {error}; expected what JSON has") from error
    description |= details
    description["conformance"] = _conformance(net, leaves, description)
    return description


def _describe_inputs(net: Carried, example: Tensor, dtype: str) -> dict[str, Any]:
    indexed, shape = not example.is_floating_point(), [*example.shape[2:]]
    inputs: dict[str, Any] = {"shape": shape, "indexed": indexed, "dtype": dtype}
    if indexed:
        tables = [m.num_embeddings for m in net.modules() if isinstance(m, nn.Embedding)]
        return inputs | {"width": tables[0] if len(tables) == 1 else int(example.max()) + 1}
    flat = example.flatten(0, 1).flatten(1).to(torch.float64)
    deviation, shift = flat.std(0, correction=0), flat.mean(0).tolist()
    scale = deviation.where(deviation > 0, 1.0).tolist()
    return inputs | {"width": len(shift), "shift": shift, "scale": scale}


def _describe_leaf(leaf: Leaf, lanes: Sequence[int | str]) -> dict[str, Any]:
    start, shape = leaf.start, [*lanes, *leaf.start.shape]
    return {"name": leaf.name, "shape": shape, "dtype": start.dtype.name, "start": start.tolist()}


def _conformance(
    net: Carried, leaves: Sequence[Leaf], description: Mapping[str, Any], steps: int = _VECTOR
) -> dict[str, Any]:
    """The conformance vector, of as many steps as the net does not amplify rounding in.

    A chaotic net doubles a difference in a few steps: after 64 no two runtimes agree, and after the
    first ones all that compute the same function do.
    """
    inputs = random_steps(description, steps)

    def run(net: Carried) -> Any:
        x = like_weights(net, torch.from_numpy(inputs)[:, None])
        return net(x, net.initial_state(1, like=x))

    (y, after), (z, other) = run(net), in_float64(net, run)
    pairs = zip([y[-1], *trees.tensors(after)], [z[-1], *trees.tensors(other)], strict=True)
    limit, numbers = session.TOLERANCE / 100, steps * description["inputs"]["width"]
    close = all(torch.allclose(a.to(b), b, rtol=limit, atol=limit) for a, b in pairs)
    if steps > 1 and not (close and numbers <= _NUMBERS):
        return _conformance(net, leaves, description, steps // 2)
    return {
        "inputs": inputs.tolist(),
        "outputs": y[-1, 0].tolist(),
        "state": {k: leaf[0].tolist() for k, leaf in state_of(net, leaves, after).items()},
    }
