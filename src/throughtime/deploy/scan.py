"""ONNX files of any carried module: one step is exported, and ONNX's `Scan` plays it over time.

Exporters of torch that see a whole chunk fix its length, or unroll a loop over its steps. A single
step has no length to fix. Inputs and outputs are those of `onnx.py`, except that every leaf of the
state has its lanes first.

Needs `onnx` and `onnxscript`.
"""

import contextlib
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry.carried import Carried, running
from throughtime.deploy.metadata import KEY, metadata_entry, seal
from throughtime.errors import MissingExtraError, ModelError
from throughtime.kernels import reference
from throughtime.kernels.cells import Cell, Weights
from throughtime.nn.fuse import FUSED
from throughtime.nn.layers import States, layer_weights, run_layers
from throughtime.state import State

_MOST_LANES = 4096  # that the exporter may assume


def scan_writer(
    net: Carried, example: Tensor, description: Mapping[str, Any], name: str
) -> Callable[[Mapping[str, Any]], dict[str, bytes]]:
    """Export a net once; the result writes the file, by suffix, with a description as a property.

    Args:
        net: made by `tt.carry`.
        example: inputs `(T, B, D)`, or `(T, B)` indices.
        description: of the file.
        name: of the graph.

    Raises:
        ModelError: torch cannot export a step.
        MissingExtraError: onnx or onnxscript is not installed.
    """
    try:
        import onnx
        import onnxscript
    except ImportError as error:
        raise MissingExtraError(
            "exporting this net to ONNX, which is no chain of layers, needs onnx and onnxscript:"
            ' pip install "throughtime[onnx]"'
        ) from error
    del onnxscript  # torch imports it
    names = [leaf["name"] for leaf in description["state"]]
    step = _export_step(net, example, names)
    model = _over_time(onnx, step, description, name)
    body: bytes = model.SerializeToString()

    def write(described: Mapping[str, Any]) -> dict[str, bytes]:
        text = json.dumps(seal(described, body), separators=(",", ":"))
        return {".onnx": body + metadata_entry(KEY, text)}

    return write


class _Step(nn.Module):
    """One step of a net, the leaves of its state as arguments and results."""

    def __init__(self, net: Carried, like: State) -> None:
        super().__init__()
        self.net, self._like = net, like

    def forward(self, x: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        values = iter(leaves)
        y, after = self.net(x, trees.map_leaves(lambda _: next(values), self._like))
        return (y, *trees.tensors(after))


def _export_step(net: Carried, example: Tensor, names: Sequence[str]) -> Any:
    """The ModelProto of one step."""
    lanes = 3  # as no other size, most likely
    x = example[:1, :1].expand(1, lanes, *example.shape[2:]).contiguous()
    state = trees.map_leaves(Tensor.clone, trees.detach(net.initial_state(lanes, like=x)))
    batch = torch.export.Dim("B", min=1, max=_MOST_LANES)
    shapes = ({1: batch}, tuple({0: batch} for _ in names))
    with _quiet(), _plain_layers(net), running(step := _Step(net, state)):
        try:
            program = torch.onnx.export(
                step,
                (x, *trees.tensors(state)),
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=["x_1", *(f"before.{name}" for name in names)],
                output_names=["y_1", *(f"after.{name}" for name in names)],
                verbose=False,
            )
        except Exception as error:  # of the exporter, whose exceptions have no common class
            raise ModelError(
                f"torch cannot export a step of {type(net.module).__name__} to ONNX:"
                f" {_cause(error)}"
            ) from error
    if program is None:
        raise ModelError(f"torch exported nothing of {type(net.module).__name__}")
    return program.model_proto


def _over_time(onnx: Any, step: Any, description: Mapping[str, Any], name: str) -> Any:
    """The model of all steps: a `Scan` whose body is the step."""
    helper, graph = onnx.helper, step.graph
    x, *entering = graph.input
    y, *leaving = graph.output
    first = helper.make_tensor("first_axis", onnx.TensorProto.INT64, [1], [0])
    constant = helper.make_node("Constant", [], ["first_axis"], value=first)
    unsqueeze = helper.make_node("Unsqueeze", ["x_t", "first_axis"], [x.name])
    squeeze = helper.make_node("Squeeze", [y.name, "first_axis"], ["y_t"])

    def info(own: str, value: Any, shape: Sequence[Any]) -> Any:
        return helper.make_tensor_value_info(own, value.type.tensor_type.elem_type, shape)

    inputs, outputs = description["inputs"], description["outputs"]
    shapes = [leaf["shape"] for leaf in description["state"]]
    body = helper.make_graph(
        [constant, unsqueeze, *graph.node, squeeze],
        "step",
        [
            *(
                info(value.name, value, shape)
                for value, shape in zip(entering, shapes, strict=True)
            ),
            info("x_t", x, ["B", *inputs["shape"]]),
        ],
        [
            *(info(value.name, value, shape) for value, shape in zip(leaving, shapes, strict=True)),
            info("y_t", y, ["B", *outputs["shape"]]),
        ],
        initializer=graph.initializer,
    )
    leaves = [leaf["name"] for leaf in description["state"]]
    before, after = ([f"{kind}.{leaf}" for leaf in leaves] for kind in ("state", "next"))
    scan = helper.make_node("Scan", [*before, "x"], [*after, "y"], body=body, num_scan_inputs=1)
    whole = helper.make_graph(
        [scan],
        name,
        [info("x", x, ["T", "B", *inputs["shape"]]), *map(info, before, entering, shapes)],
        [
            info("y", y, ["T", "B", *outputs["shape"]]),
            *map(info, after, leaving, shapes),
        ],
    )
    model = helper.make_model(
        whole, opset_imports=step.opset_import, functions=list(step.functions)
    )
    model.ir_version = min(step.ir_version, 10)  # what runtimes of two years ago read
    return model


def _forward(layer: nn.RNNBase, x: Tensor, hx: Any = None) -> Any:
    """A recurrent layer by products and functions of each value, which every exporter knows."""

    def run(
        cell: Cell, x: Tensor, states: States, weights: Weights, resets: Tensor | None
    ) -> tuple[Tensor, States]:
        return reference.run(cell, x, states, weights, resets, None)

    return run_layers(layer, run, x, hx, None, layer_weights(layer))


_PLAIN: dict[type, type] = {
    kind: type(kind.__name__, (plain,), {"forward": _forward})
    for plain, fused in FUSED.items()
    for kind in (plain, fused)
}


@contextlib.contextmanager
def _plain_layers(net: nn.Module) -> Generator[None]:
    """Layers computed by `_forward` for as long as this lasts.

    Exporters know no kernel of ours, and write an LSTM with a projection wrongly.
    """
    own = [(module, type(module)) for module in net.modules() if type(module) in _PLAIN]
    for module, kind in own:
        module.__class__ = _PLAIN[kind]
    try:
        yield
    finally:
        for module, kind in own:
            module.__class__ = kind


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Without what exporters print and log."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.disable(disabled)


def _cause(error: BaseException) -> str:
    """The first line of the error that began it, without colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return next(iter(text.splitlines()), type(error).__name__)[:300]
