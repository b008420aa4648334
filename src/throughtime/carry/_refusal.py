"""In words: how a module is called, why it cannot be carried, and the line to write.

Shapes: `T` steps, `B` lanes.
"""

import inspect
import re
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._calls import (
    CALLS,
    INPUTS,
    OUTPUTS,
    BoundModule,
    Convention,
    MisfitError,
    path_name,
)
from throughtime.carry._inside import is_turned, key_name, names_state, parameters_of
from throughtime.carry._laws import LAWS, Law, NotFiniteError
from throughtime.carry._search import FLAGS, PATIENCE, Failure, Search
from throughtime.carry._trial import reach_of
from throughtime.errors import DataError, ModelError, ThroughtimeError, counted
from throughtime.state import State

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d)
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
ASKS = re.compile("return|output|use_cache|need")  # flags by which a module is asked for a state
ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def refusal(search: Search) -> ModelError:
    """The error for a module of which no way of calling obeys every law."""
    module, name = search.module, type(search.module).__name__
    if fault := device_error(module, search.x):
        return fault
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase) and part.bidirectional:
            return bidirectional_error(path or type(part).__name__)
    nearest = max(search.failures, key=lambda failure: failure.stage, default=None)
    late = f" The search ended after {PATIENCE:.0f} s." if search.is_late else ""
    if nearest is not None and nearest.law is not None:
        text = broken(module, nearest.law, nearest.convention)
    else:
        text = _uncallable(module, search, nearest)
    return ModelError(f"{name} {text}{late}{_lines(search, nearest)}")


def broken(module: nn.Module, law: Law, c: Convention | None = None) -> str:
    """What is wrong with a module that breaks a law, called by a convention."""
    mode = "in training mode, " if law.training else ""
    if "modified by an inplace operation" in law.error:
        return (
            "cannot be carried: a later call writes into a tensor that the gradient of an"
            f" earlier one needs, such as a buffer that forward fills again"
            f" ({law.error.split(':')[0]}). Make a new tensor in forward."
        )
    if law.error and law.training:
        return (
            "cannot be carried: it obeys every law in evaluation mode, and in training mode its"
            f" forward raised {law.error}. Mend that, or carry it as tt.carry(module.eval(), x)."
        )
    if law.error:
        return (
            f"cannot be carried: it computes a chunk, and fails where the {law.name!r} law is"
            f" measured, with other lengths, lanes or states ({law.error})."
            f" {LAWS['whole'].advice}."
        )
    details = [f"deviation {law.deviation:.2g}"] if 0 < law.deviation < float("inf") else []
    details += [f"the state is {c.where}"] if c is not None and c.where else []
    remark = f" ({'; '.join(details)})" if details else ""
    return f"cannot be carried: {mode}{LAWS[law.name].broken}{remark}. {_advice(module, law, c)}."


def _advice(module: nn.Module, law: Law, c: Convention | None) -> str:
    """What to change, by the law and the parts of the module that usually break it."""
    if law.training and law.name in ("whole", "last"):
        return (
            "What a step gets is not what the step before returned, such as a state after"
            " dropout: dropout belongs on outputs, or into the cell that returns the state"
        )
    if law.name not in ("causal", "lanes", "whole", "long", "last"):
        return LAWS[law.name].advice
    over_time = law.name != "lanes" and (c is None or not c.context)
    for path, part in module.named_modules():
        name = f"'{path}' ({type(part).__name__})" if path else f"this {type(part).__name__}"
        where = f"The likely cause is {name}"
        if isinstance(part, BATCH_NORMS) and law.training:
            return (
                f"{where}: batch statistics mix lanes and steps. Use nn.LayerNorm, or freeze them"
                f" with module.{path}.eval()"
            )
        if over_time and isinstance(part, CONVOLUTIONS) and max(part.kernel_size) > 1:
            past = reach_of(module)
            pad = f"pad it on the left only, F.pad(x, ({past}, 0)), and " * (law.name == "causal")
            return (
                f"{where}: if it convolves over time, the steps before a chunk are lost, or it"
                f" looks ahead: {pad}write tt.carry(module, context={past}), the sum of"
                " (kernel_size - 1) * dilation over the convolutions, one after another"
            )
        if isinstance(part, ATTENTION):
            return (
                f"{where}: attention over all steps. Keep past keys and values in the state:"
                " forward(x, state) -> (y, state)"
            )
        if isinstance(part, (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)):
            return f"{where}: it normalises over time. Normalise the features of each step alone"
    return LAWS[law.name].advice


def _uncallable(module: nn.Module, search: Search, failure: Failure | None) -> str:
    """What is wrong with a module of which no call gave outputs and a state."""
    error = None if failure is None else failure.error
    if type(module).forward is nn.Module.forward and not callable(search.hints.call):
        return "has no forward, so the call must be written."
    if isinstance(error, NotFiniteError):
        return (
            f"cannot be tried: {error}. Look at its weights, and at the first step that is not"
            " finite."
        )
    if search.failures:  # of the usual layout
        refuse_width(search.failures[0].error, module, search.x)
    needed = [p.name for p in parameters_of(module.forward)[1:] if p.default is p.empty]
    unknown = [n for n in needed if not names_state(n) and n not in FLAGS]
    if unknown and len(unknown) < len(needed):
        return (
            f"cannot be carried: its forward requires {', '.join(map(repr, unknown))} beside its"
            " first input and its state. Inputs in several arguments are split by"
            " tt.carry(module, inputs=lambda x: (x[..., :2], x[..., 2:]))."
        )
    if search.is_callable and not search.has_state:
        kinds = {
            type(m).__name__ for m in module.modules() if isinstance(m, (*CONVOLUTIONS, *ATTENTION))
        }
        remark = f" ({', '.join(sorted(kinds))} over steps keeps no state)" if kinds else ""
        return (
            "cannot be carried: it has no recurrent layer of torch.nn inside, and no state was"
            f" found in its arguments, attributes or submodules{remark}: there is nothing to carry,"
            " or it is a variable of forward, where it cannot be reached. Let forward(x, state)"
            " return (y, state)."
        )
    if reach_of(module) and isinstance(error, MisfitError):
        return (
            f"cannot be carried: it {error}. If it is a convolution over time that shortens the"
            " sequence, keep the steps before a chunk: tt.carry(module,"
            f" context={reach_of(module)})."
        )
    if error is None:
        return "cannot be carried: no way of calling it was measured to its end in the time."
    is_own = isinstance(error, ThroughtimeError)
    what = str(error) if is_own else f"{type(error).__name__}: {error}"
    return (
        "cannot be carried: the call that came furthest failed:"
        f" {what.splitlines()[0].rstrip('.')}."
        " Inputs that are several arguments or a dict: tt.carry(module, inputs=lambda x: ...)."
    )


def _lines(search: Search, failure: Failure | None) -> str:
    """The line that says what was not found, with the module's own names."""
    law = None if failure is None else failure.law
    if law is not None and law.name not in ("random", "start", "memory"):
        return ""
    module = search.module
    if failure is not None and law is not None and law.name != "memory":
        return f"\nWrite: tt.carry(module, start={_start(search, failure)})"
    own = [n for n in vars(type(module)) if inspect.isfunction(getattr(type(module), n))]
    own = [n for n in own if not n.startswith("_") and n not in search.own_methods]
    steps = sorted((n for n in own if n != "forward"), key=lambda n: "step" not in n)
    has_forward = type(module).forward is not nn.Module.forward
    if search.is_callable and not search.has_state and not any("step" in n for n in steps):
        return ""
    if steps and (not has_forward or "step" in steps[0]):
        count = len(parameters_of(getattr(module, steps[0]))) - 1
        line = f"m.{steps[0]}(x, {'*state' if count > 1 else 'state'})"
        line = f"(lambda y, *s: (y, s))(*{line})" if count > 1 else line
    else:
        names = parameters_of(module.forward) if has_forward else []
        if len(names) < 2 and search.is_callable:
            return ""
        line = _forward_line(names) if len(names) > 1 else "m((x, state))"
    start, rest = (
        "",
        ". If the module requires a state: start=lambda m, lanes: torch.zeros(lanes, N)",
    )
    if search.own_methods:
        start, rest = f", start={_start(search, failure)}", ""
    return (
        f"\nWrite: tt.carry(module, call=lambda m, x, state: {line}{start}), where call returns"
        f" (outputs, next state) for a step (B, ...) or a chunk (T, B, ...){rest}"
    )


def _forward_line(parameters: list[inspect.Parameter]) -> str:
    """A call of forward with the state as the parameters that have its names."""
    (first, *others), turned = parameters, is_turned(parameters)
    if turned:
        others[0], first = parameters[:2]
    states = [p.name for p in others if names_state(p.name) and p.default in (None, p.empty)]
    states = states or [others[0].name]
    is_pair = len(states) > 1
    passed = [f"{n}=state[{i}]" if is_pair else f"{n}=state" for i, n in enumerate(states)]
    passed += [
        f"{p.name}={'True' if p.default is False else '...'}"
        for p in others
        if p.name not in states
        and (p.default is p.empty or (p.default is False and ASKS.search(p.name)))
    ]
    line = f"m({', '.join([f'{first.name}=x' if turned else 'x', *passed])})"
    return f"(lambda y, *s: (y, s))(*{line})" if is_pair else line + "[::-1]" * turned


def _start(search: Search, failure: Failure | None) -> str:
    """A start from a method of the module, or from its tensors that have the sizes of the state."""
    c = None if failure is None else failure.convention
    tensors = dict(search.module.named_parameters()) | dict(search.module.named_buffers())
    leaves = [] if c is None else trees.tensors(c.lanes.example)
    fits = [[n for n, t in tensors.items() if t.numel() == leaf.numel()] for leaf in leaves]
    named = [[n for n in own if re.search("0$|init|start", n) or names_state(n)] for own in fits]
    if named and all(named):
        own = [f"m.{n[min(i, len(n) - 1)]}" for i, n in enumerate(named)]
        return f"lambda m, lanes: {own[0] if len(own) == 1 else '(' + ', '.join(own) + ')'}"
    if search.own_methods and (failure is None or failure.law is None):
        return f"lambda m, lanes: m.{search.own_methods[0]}(lanes)"
    zeros = [
        f"torch.zeros({', '.join([*sizes[: dim.dim], 'lanes', *sizes[dim.dim :]])})"
        for leaf, dim in zip(leaves, () if c is None else c.lanes.dims, strict=True)
        for sizes in [[*map(str, leaf.shape[1:])]]
    ]
    known = zeros[0] if len(zeros) == 1 else f"({', '.join(zeros)})"
    is_known = c is not None and zeros and c.arguments
    return f"lambda m, lanes: {known if is_known else 'torch.zeros(lanes, N)'}"


def ambiguous_error(search: Search) -> ModelError:
    """The error for a module of which several tensors may be the outputs."""
    choices = ", ".join(f"{path_name(o.path)} with features {o.features}" for o in search.choices)
    path = search.choices[0].path
    return ModelError(
        f"{type(search.module).__name__} returns several tensors with one output per step:"
        f" {choices}. Choose the one that the loss gets: tt.carry(module,"
        f' output={path if path[1:] else path[0]!r}), or output="all"'
    )


def device_error(module: nn.Module, x: Tensor) -> ModelError | None:
    """The error for inputs that are on another device than the weights."""
    weight = next(module.parameters(), x)
    if weight.device == x.device:
        return None
    return ModelError(
        f"the inputs are on {x.device}, the weights of {type(module).__name__} on {weight.device}:"
        f" move the inputs, x.to({str(weight.device)!r}), or the net"
    )


def bidirectional_error(name: str) -> ModelError:
    """The error for a layer that runs backwards over time."""
    return ModelError(
        f"layer '{name}' is bidirectional: its backward direction starts at the end of the"
        " recording, and a stream has none, so no state can be carried into it. Use"
        " bidirectional=False if it runs over time; over another dimension, such as frequency,"
        " write the call: tt.carry(module, call=lambda m, x, state: ...)."
    )


# ---------------------------------------------------------------- how a module is called


def state_shapes(names: Iterable[str], state: State) -> str:
    """The name and the shape of each tensor of a state, lanes first: `lstm.h (B, 2, 8)`."""
    return ", ".join(
        f"{name or 'state'} ({', '.join(['B', *map(str, leaf.shape[1:])])})"
        for name, leaf in zip(names, trees.tensors(state), strict=True)
    )


def convention_lines(bound: BoundModule) -> Iterator[str]:
    """How a module is called, what its state is, where it starts, and what the outputs are."""
    c, state = bound.convention, bound.convention.lanes.example
    features = ", ".join(map(str, bound.example.shape[2:]))
    layout = "what inputs= returns" if c.transform is not None else INPUTS[c.order][0]
    layout = layout.replace("D, T", f"{features}, T").replace("...", features)
    options = "".join(f", attribute {key_name(key)} set to B" for key in c.sizes)
    options += f", after {c.context} steps of the past" if c.context else ""
    yield f"called with {layout.replace(', )', ')')}: {CALLS[c.call]}{options}"
    yield f"state: {c.where}"
    leaves = [f"past (B, {c.context}, {features})"] if c.context else []
    leaves += filter(None, [state_shapes(bound.leaf_names(state), state)])
    yield f"leaves, lanes first: {', '.join(leaves)}"
    yield f"start: {c.start.name}"
    sizes = ", ".join(map(str, c.outputs.features or ()))
    outputs = OUTPUTS[c.outputs.order].replace("C", sizes).replace(", )", ")").replace(", ,", ",")
    yield f"outputs: {f'item {path_name(c.outputs.path)}, ' if c.outputs.path else ''}{outputs}"
    for name, value, _ in c.constants:
        yield f"argument {name}: always {value.item():g}; calls are split at resets"


def refuse_shapes(error: Exception, module: nn.Module, x: Tensor) -> None:
    """Say of inputs that the net refused with an error which ones it expects.

    Raises:
        DataError: the error is of torch or of the trials of a net, and says that.
    """
    if not isinstance(error, ModelError) and isinstance(error, ThroughtimeError):
        return
    if hint := whole_numbers_hint(module, x) or _tokens_hint(module, x):
        raise DataError(f"the net refuses the inputs {tuple(x.shape)}{hint}") from error
    refuse_width(error, module, x)


def refuse_width(error: Exception | None, module: nn.Module, x: Tensor) -> None:
    """Say of inputs of another width than that of the net's first matrix which one it expects.

    Raises:
        DataError: the error is of torch, and says that.
    """
    matrix = next((weight for weight in module.parameters() if weight.dim() == 2), x)
    own, net = x.shape[-1], matrix.shape[-1]
    # of a layer, a linear map and a cell
    texts = f"Expected {net}, got {own} ", f"x{own} and {net}x", f"got {own} expected {net} "
    if any(text in f"{error} " for text in texts):
        raise DataError(
            f"the inputs have {counted(own, 'feature')} in each step, the net expects {net}: write"
            f" inputs of shape (..., {net}), in a stream those of its recordings, or build the net"
            f" for {own}"
        ) from error


def _tokens_hint(module: nn.Module, x: Tensor) -> str:
    """What is wrong with the inputs of a net that embeds tokens; empty of other nets."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if not embeddings or x.is_complex():
        return ""
    if x.is_floating_point():
        return f": an embedding takes whole numbers, not {x.dtype}: write inputs.long()"
    most = min(m.num_embeddings for m in embeddings)
    if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < most:
        return (
            f": they hold the tokens {int(x.min())} to {int(x.max())}, the embedding has 0 to"
            f" {most - 1}"
        )
    return ": tokens are whole numbers of shape (T, B), those of a single step (B,)"


def whole_numbers_hint(module: nn.Module, x: Tensor) -> str:
    """What to do with features that are whole numbers; empty of others, or with an embedding."""
    embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in module.modules())
    if embeds or x.is_floating_point() or x.is_complex():
        return ""
    return (
        f"; whole numbers ({x.dtype}) are read as indexes, without a dimension of features:"
        " convert features first, such as inputs.astype(np.float32)"
    )
