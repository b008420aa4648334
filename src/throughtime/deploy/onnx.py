"""ONNX files: a chain in ONNX's own recurrent nodes, any other net step by step in a `Scan`.

Inputs `x` `(T, B, D)`, or `(T, B)` indices, and `state.<leaf>` for each leaf of the state; outputs
`y` `(T, B, C)` and `next.<leaf>`. T and B are dynamic. The state is not hidden in the file: a
runtime passes it in and gets it back, and recurrent nodes take it from the graph's inputs
directly, by which some runtimes recognise a state that the caller keeps.

Exporters of torch that see a whole chunk fix its length, or unroll a loop over its steps. A single
step has no length to fix: it is exported, and is the body of a `Scan`. Its leaves have lanes first;
those of a chain are `(1, B, P)`.

Needs `onnx`, and for nets that are no chain `onnxscript`.
"""

import contextlib
import io
import json
import warnings
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry.carried import Carried, running
from throughtime.deploy.chain import Array, Chain, Recurrence
from throughtime.deploy.session import KEY
from throughtime.deploy.source import constants, identifier, operations, render
from throughtime.errors import MissingExtraError, ModelError, one_line
from throughtime.kernels import reference
from throughtime.kernels.cells import GRU, LSTM, RNN_RELU, RNN_TANH
from throughtime.nn.fuse import FUSED
from throughtime.nn.layers import layer_weights, run_layers
from throughtime.state import State

OPSET, IR_VERSION = 14, 8  # for chains
_LATEST_IR = 10  # what runtimes of two years ago read
_MOST_LANES = 4096  # that the exporter may assume
_TYPES = {"float32": "float", "float64": "double"}
_GATES = {LSTM: (0, 3, 1, 2), GRU: (1, 0, 2), RNN_TANH: (0,), RNN_RELU: (0,)}  # of our gates
_EXPRESSIONS = {
    "tanh": "Tanh({x})",
    "relu": "Relu({x})",
    "sigmoid": "Sigmoid({x})",
    "leaky_relu": "LeakyRelu <alpha = {p}> ({x})",
    "elu": "Elu <alpha = {p}> ({x})",
    "softmax": "Softmax <axis = -1> ({x})",
    "log_softmax": "LogSoftmax <axis = -1> ({x})",
}


def write_onnx(model: Any, description: Mapping[str, Any]) -> dict[str, bytes]:
    """The file of a model, by suffix, with the description as a metadata property."""
    text = json.dumps(description, separators=(",", ":"))
    _onnx().helper.set_model_props(model, {KEY: text})
    return {".onnx": model.SerializeToString(deterministic=True)}


def write_chain(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The file of a chain, by suffix; `name` is that of the graph."""
    flat = "x" if len(description["inputs"]["shape"]) < 2 else "flat"
    fields = {leaf.name: str(k) for k, leaf in enumerate(chain.leaves)}
    text = render("net.onnx.j2", {"operations": [*operations(chain, fields, _EXPRESSIONS, flat)]})
    model = _model(text, description, name)
    for index, operation in enumerate(chain.operations):
        arrays = _layer(operation) if isinstance(operation, Recurrence) else constants(operation)
        for key, array in arrays:
            tensor = _onnx().numpy_helper.from_array(
                np.ascontiguousarray(array), f"op{index}_{key}"
            )
            model.graph.initializer.append(tensor)
    return write_onnx(model, description)


def step_model(net: Carried, example: Tensor, description: Mapping[str, Any], name: str) -> Any:
    """The ModelProto of any net: a `Scan` over time, whose body is a step as torch exports it.

    Args:
        net: made by `tt.carry`.
        example: inputs `(T, B, D)`, or `(T, B)` indices.
        description: of the file.
        name: of the graph.

    Raises:
        ModelError: torch cannot export a step.
        MissingExtraError: onnx or onnxscript is not installed.
    """
    step = _export_step(net, example)
    leaves = range(len(description["state"]))
    before, after = ("".join(f"{kind}_{k}, " for k in leaves) for kind in ("state", "next"))
    text = f"{after}y = Scan <num_scan_inputs = 1> ({before}x)"
    model = _model(text, description, name)
    model.graph.node[0].attribute.append(_onnx().helper.make_attribute("body", step.graph))
    del model.opset_import[:]
    model.opset_import.extend(step.opset_import)
    model.functions.extend(step.functions)
    model.ir_version = min(step.ir_version, _LATEST_IR)
    return model


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise MissingExtraError(
            'exporting to ONNX needs onnx: pip install "throughtime[onnx]"'
        ) from error
    return onnx


def _model(nodes: str, description: Mapping[str, Any], name: str) -> Any:
    """The model of the text of its nodes, with the inputs and outputs of a description.

    Leaves are `state_0` and `next_0` in the text, whose names have no dots, and an input that is
    left out is `none`.
    """
    inputs, outputs, leaves = (description[key] for key in ("inputs", "outputs", "state"))

    def value(own: str, kind: str, *shape: int | str) -> str:
        return f"{_TYPES.get(kind, kind)}[{', '.join(map(str, shape))}] {own}"

    kind = inputs["dtype"]
    entering = [value("x", "int64" if inputs["indexed"] else kind, "T", "B", *inputs["shape"])]
    leaving = [value("y", kind, "T", "B", *outputs["shape"])]
    names = {"none": ""}
    for k, leaf in enumerate(leaves):
        for values, prefix in ((entering, "state"), (leaving, "next")):
            values.append(value(f"{prefix}_{k}", leaf["dtype"], *leaf["shape"]))
            names[f"{prefix}_{k}"] = f"{prefix}.{leaf['name']}"
    model = _onnx().parser.parse_model(
        f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}], producer_name: "throughtime">\n'
        f"{identifier(name)} ({', '.join(entering)}) => ({', '.join(leaving)}) {{\n{nodes}\n}}"
    )
    for port in (*model.graph.input, *model.graph.output):
        port.name = names.get(port.name, port.name)
    for node in model.graph.node:
        for ends in (node.input, node.output):
            ends[:] = [names.get(end, end) for end in ends]
    return model


def _layer(layer: Recurrence) -> Generator[tuple[str, Array]]:
    """The constants of a recurrent node, its gates in the order of ONNX."""
    own = layer.arranged(_GATES[layer.cell])
    yield from (("W", own.ih[None]), ("R", own.hh[None]))
    yield "B", np.concatenate([own.b_ih, own.b_hh])[None]


class _Step(nn.Module):
    """One step of a net as the body of a `Scan`: leaves, then inputs `(B, D)`."""

    def __init__(self, net: Carried, like: State) -> None:
        super().__init__()
        self.net, self._like = net, like

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        leaves = iter(values)
        state = trees.map_leaves(lambda _: next(leaves), self._like)
        y, after = self.net(values[-1].unsqueeze(0), state)
        return (*trees.tensors(after), y.squeeze(0))


def _export_step(net: Carried, example: Tensor) -> Any:
    """The ModelProto of one step."""
    _onnx()
    lanes = 3  # as no other size, most likely
    x = example[0, :1].expand(lanes, *example.shape[2:]).contiguous()
    state = trees.map_leaves(Tensor.clone, trees.detach(net.initial_state(lanes, like=x[None])))
    values = (*trees.tensors(state), x)
    batch = torch.export.Dim("B", min=1, max=_MOST_LANES)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(_plain_layers(net))
        stack.enter_context(running(step := _Step(net, state)))
        try:
            program: Any = torch.onnx.export(
                step,
                values,
                dynamo=True,
                dynamic_shapes=(tuple({0: batch} for _ in values),),
            )
        except ImportError as error:
            raise MissingExtraError(
                "exporting this net to ONNX, which is no chain of layers, needs onnxscript:"
                ' pip install "throughtime[onnx]"'
            ) from error
        except Exception as error:  # of the exporter, whose exceptions have no common class
            raise ModelError(
                f"torch cannot export a step of {type(net.module).__name__} to ONNX:"
                f" {_cause(error)}"
            ) from error
    return program.model_proto


def _forward(layer: nn.RNNBase, x: Tensor, hx: Any = None) -> Any:
    """A recurrent layer by products and functions of each value, which every exporter knows."""
    return run_layers(layer, reference.run, x, hx, None, layer_weights(layer))


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


def _cause(error: BaseException) -> str:
    """The begin of the error that began it, or of one that the net itself raised."""
    while not isinstance(error, ModelError) and (before := error.__cause__ or error.__context__):
        error = before
    return (one_line(error) or type(error).__name__)[:300]
