"""`tt.export`: a trained net, with its state, as a file that other runtimes run.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from throughtime import state as trees
from throughtime._files import write_together
from throughtime.carry.carried import Carried, require_carried, running
from throughtime.deploy import metadata
from throughtime.deploy.audio import write_nam, write_rtneural
from throughtime.deploy.chain import Array, Chain, Pointwise, Rescale, read_chain
from throughtime.deploy.onnx import write_onnx
from throughtime.deploy.page import PageNet, write_page
from throughtime.deploy.scan import scan_writer
from throughtime.deploy.source import write_c, write_javascript
from throughtime.deploy.verify import Verification, random_steps, rounded_otherwise, verify
from throughtime.diagnose import SettlingTime, settling_time
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.state import State
from throughtime.stream import Stream
from throughtime.stream.sources import Recordings
from throughtime.stream.stream import whole_stream

Format: TypeAlias = Literal["onnx", "c", "js", "html", "nam", "rtneural"]
# Writes the files of a chain by their suffixes; the description, and the name of the file
_Writer: TypeAlias = Callable[[Chain, Mapping[str, Any], str], Mapping[str, bytes]]
_WRITERS: dict[str, _Writer] = {
    "onnx": write_onnx,
    "c": write_c,
    "js": write_javascript,
    "nam": write_nam,
    "rtneural": write_rtneural,
}
_SUFFIXES: dict[str, Format] = {
    ".onnx": "onnx",
    ".c": "c",
    ".js": "js",
    ".mjs": "js",
    ".html": "html",
    ".nam": "nam",
    ".json": "rtneural",
}
_LAST = {"softmax": "probabilities", "log_softmax": "log-probabilities", "sigmoid": "probabilities"}


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        paths: of the files, that which was asked for first.
        format: of them.
        verification: steps and largest error against the net, of the random steps; None for none
            of these, or if no runtime was at hand.
        recorded: the same of the longest recording of `stream`, without a reset.
        settling: how long a cold start differs; None without `stream`.
        remarks: what a user should know.
    """

    paths: tuple[Path, ...]
    format: str
    verification: Verification | None
    recorded: Verification | None = None
    settling: SettlingTime | None = None
    remarks: tuple[str, ...] = ()


def export(
    net: Carried,
    path: str | Path,
    *,
    inputs: Any,
    to: Format | None = None,
    rate: float | None = None,
    classes: Sequence[str] = (),
    steps: int = 100_000,
    stream: Stream | Recordings | None = None,
    details: Mapping[str, Any] | None = None,
) -> Export:
    """Write the net as a file that runs without Python, its state explicit.

    The file is verified before it is there: it plays `steps` random steps in chunks of random
    lengths, and must give the outputs of the net. That needs onnxruntime, a C compiler or Node.js;
    without one nothing is verified, and a remark says so. Each file also holds a short vector by
    which it is checked where it is loaded.

    Args:
        net: made by `tt.carry`. ONNX takes any; the other formats a chain, an `nn.Sequential` or a
            class: an `nn.Embedding` or standardisation, layers of LSTM, GRU or RNN (tanh or relu),
            `nn.Linear` and functions of each value. A chain is written in float32.
        path: of the file; its suffix names the format, unless `to` does.
        inputs: an example `(T, B, D)` or `(T, D)`, or indices `(T, B)` or `(T,)`, in the units in
            which the file will get its inputs: random steps have its means and about its
            deviations.
        to: "onnx", "c" (C99, and a header beside it), "js" (an ES module), "html" (a page that runs
            the net on the longest recording of `stream`, or on the example), "nam" (Neural Amp
            Modeler) or "rtneural" (the JSON of RTNeural and AIDA-X).
        rate: steps per second, for the description.
        classes: names of the outputs.
        steps: random ones to verify; 0 for none.
        stream: recordings, as for `tt.evaluate`, or a `tt.Stream`. The longest one is played from
            the initial state without a reset; `verified` of the description is what came of it, and
            `settling_time` that of `tt.settling_time(net, stream)`.
        details: more entries of the description, such as names of columns.

    Returns:
        An `Export`: the files, and the largest error against the net.

    Raises:
        ConfigError: a suffix that names no format, or another one than `to`; negative `steps`.
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
    kind = format_of(path, to)
    if steps < 0:
        raise ConfigError(f"steps={steps}: expected a number of random steps, or 0 for none")
    example = _example(inputs)
    _check_weights(net)
    if example.is_floating_point() and (w := next(net.parameters(), None)) is not None:
        example = example.to(w)
        _check_finite(example)  # in the type of the weights, too
    chain: Chain | None = None
    with running(net):
        try:
            chain = read_chain(net, example)
            _check_supported(chain, kind)
        except ModelError:
            if kind != "onnx":
                raise
            chain = None
        ports = _chain_ports(chain, net) if chain is not None else _net_ports(net, example)
        description = _describe(net, ports, example, rate, classes, details or {})
    signal, settling = None, None
    if stream is not None:
        played = stream if isinstance(stream, Stream) else whole_stream(stream)
        signal, settling = _longest(played), settling_time(net, played)
        description["settling_time"] = _settling_facts(settling)
    if chain is None:
        write = scan_writer(net, example, description, path.stem)
    else:
        write = _chain_writer(chain, kind, path.stem, example if signal is None else signal)
    files, random = _named(path, write(description)), random_steps(description, steps)
    verification = _verify(net, kind, files, description, random) if steps else None
    recorded = None
    if signal is not None:
        x = signal[:, 0].numpy().astype(random.dtype)
        recorded = _verify(net, kind, files, description, x)
        if recorded is not None:
            played_steps, error, *_ = recorded
            run = {"steps": played_steps, "error": error, "longest_run": played_steps}
            description["verified"] = run
    named = _named(path, write(description))
    write_together(named)
    asked = bool(steps) or signal is not None
    remarks = [*_unverified(kind, verification or recorded, asked, description)]
    remarks += _folding(chain, kind)
    return Export(tuple(named), kind, verification, recorded, settling, tuple(remarks))


def format_of(path: Path, to: Format | None, option: str = "to={!r}") -> Format:
    """The format that a path or `to` names; `option` is how the user writes `to`.

    Raises:
        ConfigError: neither names one, or they name two.
    """
    suffix = path.suffix.lower()
    named, formats = _SUFFIXES.get(suffix), get_args(Format)
    kind = to or named
    if kind is None or kind not in formats:
        got = "its suffix names no format" if to is None else f"{option.format(to)} is no format"
        raise ConfigError(
            f"{path}: {got}; expected {', '.join(_SUFFIXES)}, or"
            f" {' or '.join(map(option.format, formats))}"
        )
    usual = next(end for end, format_ in _SUFFIXES.items() if format_ == kind)
    if suffix == ".h" or named not in (None, kind):
        owner = "the header of a C file" if suffix == ".h" else option.format(named)
        raise ConfigError(
            f"{path}: {suffix} is the suffix of {owner}, and {option.format(kind)} is asked for;"
            f" write {path.with_suffix(usual)}"
            + ("" if named is None else f", or {option.format(named)}")
        )
    return kind


def _chain_writer(
    chain: Chain, kind: str, name: str, example: Tensor
) -> Callable[[Mapping[str, Any]], Mapping[str, bytes]]:
    """Writes the files by their suffixes, with a description; a page plays the example."""
    if kind == "html":
        signal = example[:, 0].cpu().numpy()
        return lambda d: {".html": write_page(name, [PageNet("", chain, d)], signal)}
    return lambda d: _WRITERS[kind](chain, d, name)


def _named(path: Path, files: Mapping[str, bytes]) -> dict[Path, bytes]:
    """The contents by path, the first one as the user named it."""
    return {path if i == 0 else path.with_suffix(s): files[s] for i, s in enumerate(files)}


def _longest(stream: Stream) -> Tensor:
    """The inputs of the longest recording, `(T, 1, D)` or `(T, 1)`."""
    longest = max(stream.recordings, key=len)
    single = Stream([longest], 1, len(longest), seed=None, missing=stream.missing, rank=0, ranks=1)
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
    """Refuse weights that are NaN or infinite."""
    for name, weight in net.module.named_parameters():
        if not bool(weight.isfinite().all()):
            raise ModelError(
                f"the weight '{name}' is not finite: the training diverged. Take weights from"
                " before that"
            )


def _verify(
    net: Carried, kind: str, files: Mapping[Path, bytes], description: Mapping[str, Any], x: Array
) -> Verification | None:
    """Verify the files in a folder of their own, before they are where the user wants them."""
    with tempfile.TemporaryDirectory() as folder:
        trial = [Path(folder) / path.name for path in files]
        for temporary, content in zip(trial, files.values(), strict=True):
            temporary.write_bytes(content)
        return verify(net, kind, trial[0], description, x)


def export_page(
    nets: Mapping[str, Carried],
    path: Path,
    *,
    inputs: Tensor,
    classes: Sequence[str],
    labels: Array,
) -> None:
    """Write a page that runs several nets side by side on the same inputs.

    Args:
        nets: chains, by their titles.
        path: the file to write.
        inputs: that the page plays, `(T, D)` or `(T,)` indices.
        classes: names of the outputs.
        labels: the right class of each step, `(T,)`.

    Raises:
        ModelError: a net is no chain.
    """
    example = _example(inputs)
    parts: list[PageNet] = []
    for title, net in nets.items():
        with running(net):
            chain = read_chain(net, example)
            description = _describe(net, _chain_ports(chain, net), example, None, classes, {})
        parts.append(PageNet(title, chain, description))
    write_together({path: write_page(path.stem, parts, example[:, 0].numpy(), labels)})


def _example(inputs: Any) -> Tensor:
    """The example as `(T, B, D)`, or with more dimensions for D, or `(T, B)` indices."""
    x = torch.as_tensor(inputs).detach().cpu()
    x = x.unsqueeze(1) if x.dim() == (2 if x.is_floating_point() else 1) else x
    if (x.dim() < 3 if x.is_floating_point() else x.dim() != 2) or not x.numel():
        raise DataError(
            f"inputs have shape {tuple(x.shape)}, expected an example (T, D) or (T, B, D), or"
            " indices (T,) or (T, B)"
        )
    _check_finite(x)
    return x


def _check_finite(x: Tensor) -> None:
    """Refuse an example `(T, B, ...)` with values that are NaN or infinite."""
    missing = ~x.flatten(2).isfinite() if x.is_floating_point() else x.new_zeros(1)
    if missing.any():
        step, lane, column = missing.nonzero()[0].tolist()
        where = f"step {step}, lane {lane}" if x.shape[1] > 1 else f"step {step}"
        raise DataError(
            f"inputs: the example has {int(missing.sum())} values that are NaN or infinite in"
            f" {x.dtype}, the first at {where}, column {column}. Means and deviations are taken"
            " from it: give one without, such as inputs=torch.nan_to_num(x, posinf=0.0,"
            " neginf=0.0), or a part of the signal without them"
        )


class _Ports(NamedTuple):
    """What goes in and out of a file, and how to find the leaves of its state in the net's."""

    shape: tuple[int, ...]  # of a step of a lane; () for indices
    width: int  # the numbers in it, or the entries of an embedding
    indexed: bool
    dtype: str
    outputs: tuple[int, ...]
    meaning: str | None
    leaves: list[dict[str, Any]]
    read_state: Callable[[State], Mapping[str, Tensor]]


def _chain_ports(chain: Chain, net: Carried) -> _Ports:
    real = chain.layers[0].ih.dtype.name
    last = chain.operations[-1]
    leaves = [
        {
            "name": leaf.name,
            "shape": [1, "B", len(leaf.start)],
            "dtype": real,
            "start": metadata.plain_numbers(leaf.start),
        }
        for leaf in chain.leaves
    ]
    return _Ports(
        () if chain.is_indexed else (chain.width,),
        chain.width,
        chain.is_indexed,
        real,
        (chain.outputs,),
        _LAST.get(last.function) if isinstance(last, Pointwise) else None,
        leaves,
        lambda state: chain.state_of(state, net.leaf_names(state)),
    )


def _net_ports(net: Carried, example: Tensor) -> _Ports:
    """Those of a net that is no chain: the leaves as they are, lanes first."""
    state = net.initial_state(1, like=example)
    y, _ = net(example[:1, :1], state)
    names = [name.replace("/", ".") for name in net.leaf_names(state)]
    leaves = [
        {
            "name": name,
            "shape": ["B", *leaf.shape[1:]],
            "dtype": str(leaf.dtype).removeprefix("torch."),
            "start": metadata.plain_numbers(leaf.detach().cpu().numpy()),
        }
        for name, leaf in zip(names, trees.tensors(state), strict=True)
    ]
    indexed = not example.is_floating_point()
    tables = [m.num_embeddings for m in net.modules() if isinstance(m, nn.Embedding)]
    entries = tables[0] if len(tables) == 1 else int(example.max()) + 1
    return _Ports(
        example.shape[2:],
        entries if indexed else math.prod(example.shape[2:]),
        indexed,
        str(y.dtype).removeprefix("torch."),
        y.shape[2:],
        None,
        leaves,
        lambda state: dict(zip(names, trees.tensors(state), strict=True)),
    )


def _check_supported(chain: Chain, kind: str) -> None:
    """Refuse what a single format lacks."""
    if kind == "onnx" and any(layer.hr is not None for layer in chain.layers):
        raise ModelError("ONNX has no LSTM with a projection")


def _describe(
    net: Carried,
    ports: _Ports,
    example: Tensor,
    rate: float | None,
    classes: Sequence[str],
    details: Mapping[str, Any],
) -> dict[str, Any]:
    """The description, with the conformance vector that the net computes."""
    outputs = math.prod(ports.outputs)
    if classes and len(classes) != outputs:
        raise ConfigError(f"{len(classes)} classes are named and the net has {outputs} outputs")
    inputs: dict[str, Any] = {
        "shape": [*ports.shape],
        "width": ports.width,
        "indexed": ports.indexed,
        "dtype": ports.dtype,
    }
    if not ports.indexed:
        flat = example.flatten(0, 1).flatten(1).to(torch.float64)
        deviation = flat.std(0, correction=0)
        # numbers with which each runtime computes the same inputs of the conformance vector, to the
        # bit and with any contraction: where a mean is 1e4 deviations, rounding it otherwise counts
        inputs["shift"] = flat.mean(0).to(getattr(torch, ports.dtype)).tolist()
        power = deviation.where(deviation > 0, 1.0).log2().round()
        inputs["scale"] = power.exp2().tolist()
    description: dict[str, Any] = {
        "format": metadata.FORMAT,
        "inputs": inputs,
        "outputs": {
            "shape": [*ports.outputs],
            "width": outputs,
            "meaning": ports.meaning or ("logits" if classes else "values"),
            "classes": list(classes),
        },
        "rate": rate,
        "state": ports.leaves,
        "settling_time": None,
        "verified": None,
        **details,
    }
    description["conformance"] = _conformance(net, ports, description)
    return description


def _conformance(net: Carried, ports: _Ports, description: Mapping[str, Any]) -> dict[str, Any]:
    """The conformance vector, of as many steps as the net does not amplify rounding in.

    A chaotic net doubles a difference in a few steps: after 64 no two runtimes agree, and after the
    first ones all that compute the same function do.
    """
    weight, steps = next(net.parameters()), metadata.STEPS
    while True:
        x = torch.from_numpy(metadata.vector_inputs(description, steps))
        x = x.to(weight.device, weight.dtype if x.is_floating_point() else None)
        y, after = net(x, net.initial_state(1, like=x))
        z, other = functional_call(net, rounded_otherwise(net), (x, net.initial_state(1, like=x)))
        pairs = zip([y[-1], *trees.tensors(after)], [z[-1], *trees.tensors(other)], strict=True)
        limit = metadata.TOLERANCE / 100
        if steps == 1 or all(torch.allclose(a, b, rtol=limit, atol=limit) for a, b in pairs):
            break
        steps //= 2
    return {
        "generator": metadata.GENERATOR,
        "steps": steps,
        "outputs": y[-1, 0].tolist(),
        "state": {name: leaf[0].tolist() for name, leaf in ports.read_state(after).items()},
    }


def _folding(chain: Chain | None, kind: str) -> list[str]:
    """Says that standardisation is in the weights, and what that costs."""
    first = None if chain is None else chain.operations[0]
    if kind not in {"nam", "rtneural"} or not isinstance(first, Rescale):
        return []
    ratio = float(np.abs(first.shift / first.scale).max())
    cost = f"{6e-8 * ratio:.1g} of a standardised input"
    return [f"the standardisation is folded into the weights, which costs about {cost} in float32"]


def _unverified(
    kind: str, verification: Verification | None, asked: bool, description: Mapping[str, Any]
) -> list[str]:
    """Says what was not verified."""
    if not asked:
        return ["not verified: no steps were asked for. Leave out steps, or give a recording"]
    if verification is None:
        needs = {"onnx": "onnxruntime", "c": "a C compiler"}.get(kind, "Node.js")
        return [f"not verified: {needs} is not at hand"]
    if description["conformance"]["steps"] == 1:  # from the initial state, which may be zero
        said = (
            "the net amplifies rounding so much that its second step agrees on no two runtimes; the"
            " recurrent weights in the file are not verified. Are the weights of the net too large?"
        )
        return [said]
    return []
