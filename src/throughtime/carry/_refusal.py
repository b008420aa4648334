"""In words: why a module cannot be carried, and the line to write.

Shapes: `T` steps, `B` lanes.
"""

import inspect
import re
from dataclasses import replace

from torch import nn
from torch.utils._pytree import tree_map

from throughtime import state as trees
from throughtime.carry._calls import Convention, layer_zeros
from throughtime.carry._inside import (
    RECURRENT,
    is_turned,
    key_name,
    names_state,
    parameters_of,
    plain_name,
    reach_of,
    returned_names,
)
from throughtime.carry._laws import LAWS, Law
from throughtime.carry._layout import path_name
from throughtime.carry._search import PATIENCE, Failure, Search
from throughtime.errors import ModelError, ThroughtimeError
from throughtime.state import State

MARK = 9973  # stands for the number of lanes in shapes
ASKS = re.compile("return|output|use_cache|need")  # flags by which a module is asked for a state
DATA, ZEROS = "x[..., N:]", "torch.zeros(lanes, N)"
LENGTHS, GOES_ON = "torch.full((x.shape[1],), len(x))", "x.new_ones(*x.shape[:-1], 1)"
CONSTANTS = {  # by the names of parameters; the others are marks that are 0, or 1, at a restart
    "len": LENGTHS,
    "mask|not_|nonterminal|continu": GOES_ON,
    "done|reset|first|begin|start|termin|end": "x.new_zeros(x.shape[:-1])",
}
OVER_TIME = ("causal", "whole", "long", "last")
# parts that usually break a law over time, in training mode and before it
BATCH_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    (
        "batch statistics mix lanes and steps. Use nn.LayerNorm, or freeze them with"
        " module.{path}.eval()"
    ),
)
CONVOLUTIONS = (
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d),
    (
        "if it convolves over time, the steps before a chunk are lost, or it looks ahead: pad it on"
        " the left only, F.pad(x, ({past}, 0)), and write tt.carry(module, context={past}), the sum"
        " of (kernel_size - 1) * dilation over the convolutions, one after another"
    ),
)


class _Code(str):
    """A part of a line to write."""

    __slots__ = ()
    __repr__ = str.__str__


def refusal(search: Search, convention: Convention | None, link: str) -> ModelError:
    """The error for a module of which no convention obeys every law, or several outputs do.

    Args:
        search: that has ended.
        convention: the one with several outputs, if any.
        link: the name of the module in a chain, or nothing.
    """
    module = search.module
    name = f"'{link}' of this nn.Sequential" if link else type(module).__name__
    if convention is not None:
        choices = [f"{path_name(y.path)} with features {y.features}" for (y,) in search.choices]
        path = search.choices[0][0].path
        return ModelError(
            f"{name} returns several tensors with one output per step: {', '.join(choices)}. Choose"
            " the one that the loss gets: tt.carry(module,"
            f' output={path if path[1:] else path[0]!r}), or output="all"'
        )
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase) and part.bidirectional:
            return bidirectional_error(path or type(part).__name__)
    context = 0 if search.base.context or search.base.call else reach_of(module)
    line, nearest = "", _nearest(search)
    if context:
        base = replace(search.base, context=context)
        other = Search(module, search.x, base, search.steps, is_link=search.is_link)
        other.began = search.began  # the time that is left
        line, after = f"context={context}" * (other.find() is not None), _nearest(other)
        nearest = after if after.law and after.law.name == "start" else nearest
    law = nearest.law
    text = broken(module, law, nearest.convention) if law else _uncallable(search, nearest.error)
    late = (
        f" The search ended after {PATIENCE:.0f} s of processor time, before all ways were tried."
        " With OMP_NUM_THREADS=1 it may take less."
    ) * search.is_late
    if link:
        late += (
            " A layer here returns its outputs only: drop a module that picks them out of a tuple."
        )
    line = line or _line(search, nearest)
    line = f"\nWrite: tt.carry(module, {line})" * bool(line)
    if "call=" in line:
        line += ", where call returns (outputs, next state) for a step (B, ...) or a chunk"
    return ModelError(f"{name} {text}{late}{line}")


def broken(module: nn.Module, law: Law, c: Convention) -> str:
    """What is wrong with a module that breaks a law, called by a convention."""
    mode = "in training mode, " * law.training
    if law.error:
        return (
            f"cannot be carried: {mode}its forward raised {law.error}, where the {law.name!r} law"
            " is measured with other lengths, lanes or states. Mend that, or carry it in"
            " evaluation mode if it is one of training: tt.carry(module.eval(), x)."
        )
    what, _, advice = LAWS[law.name].partition(". ")
    kinds, text = BATCH_NORMS if law.training else CONVOLUTIONS
    is_over_time = law.name in OVER_TIME or (law.training and law.name == "lanes")
    for path, part in reversed([*module.named_modules()]):
        if isinstance(part, kinds) and is_over_time and not c.context:
            cause = text.format(path=path, past=reach_of(module))
            advice = f"The likely cause is '{path}' ({type(part).__name__}): {cause}"
    where = ", ".join([*c.arguments, *c.layers, *map(key_name, c.attributes)])
    return (
        f"cannot be carried: {mode}{what} (deviation {law.deviation:.2g}; the state is in"
        f" {where or 'what call takes'}). {advice}."
    )


def _uncallable(search: Search, error: Exception | None) -> str:
    """What is wrong with a module of which no call gave outputs and a state."""
    if not has_forward(search.module) and not search.base.call:
        return "has no forward, so the call must be written."
    text = str(error).split("\n")[0]
    is_foreign = not isinstance(error, ThroughtimeError)
    if is_foreign:
        text = f"the call that came furthest failed: {type(error).__name__}: {text}"
    if search.base.inputs:
        text += ". inputs= returns what the module takes: x.transpose(0, 1) for (B, T, ...)"
    elif is_foreign and not search.base.call:
        text += (
            ". Several inputs: tt.carry(module, inputs=lambda x: (x[..., :N], x[..., N:])), those"
            " in a dict: inputs=lambda x: {'name': x[..., :N]}"
        )
    return f"cannot be carried: {text}."


def has_forward(module: nn.Module) -> bool:
    """Whether a module says what it computes."""
    return type(module).forward not in (None, nn.Module.forward)


def _nearest(search: Search) -> Failure:
    """The trial that came furthest."""
    return max(search.failures, key=lambda f: f.stage, default=Failure(0, search.base))


def _line(search: Search, nearest: Failure) -> str:
    """The keywords to write: a start, or a call with one, or inputs; none for another fault."""
    law, c = nearest.law, nearest.convention
    if law is not None and law.name in ("random", "start") and c.lanes.dims and not c.context:
        if law.name == "start" and c.start in search.own_methods:
            return ""  # of two, the user knows which is meant
        state = c.lanes.to_module(c.lanes.fill(None, MARK, None))
        return _start(state, "torch.full({}, VALUE)" if law.name == "start" else "torch.zeros{}")
    if search.base.call or not (law is None or law.error or law.name == "memory"):
        return ""
    return _call(search)


def _call(search: Search) -> str:
    """The keywords with inputs, or a call and a start; none where no argument is a state."""
    name, parameters = _method(search)
    if search.base.inputs or search.base.start or not parameters:
        return ""
    turned = is_turned(parameters)
    first = parameters.pop(int(turned)).name
    values = {p.name: value for p in parameters if (value := _value(p))}
    states, data = ([n for n, v in values.items() if v == kind] for kind in ("state", DATA))
    x = "x[..., :N]" if data else "x"
    if LENGTHS in values.values() or (data and [*values][: len(data)] == data):
        line = f"inputs=lambda x: ({', '.join([x, *(v for v in values.values() if 'x' in v)])})"
        if not states and len(data) == 1:
            start = f"tt.carry(module, start=lambda m, lanes: {ZEROS}"
            line += f"), or, if '{data[0]}' is a state, {start}"
        return line
    if not states:
        return ""
    values |= {n: f"state[{i}]" for i, n in enumerate(states) if states[1:]}
    passed = [f"{first}={x}" if turned else x, *(f"{n}={value}" for n, value in values.items())]
    call = f"m{name}({', '.join(passed)})"
    known = {plain_name(n): n for n in states}
    method = getattr(search.module, name[1:] or "forward")
    names = [known.get(n, "") for n in map(plain_name, returned_names(method))]
    if turned and not names:
        return ""  # the order of what it returns is not known either
    is_turned_back = search.is_turned or (any(names) and not names[-1])
    if is_turned_back and "True" not in values.values():  # a flag may change what it returns
        call += "[::-1]"
    if states[1:]:
        names = [n for n in names if n]
        names = names if sorted(names) == sorted(states) else states
        call = f"(lambda y, {', '.join(names)}: (y, ({', '.join(states)})))(*{call})"
    return f"call=lambda m, x, state: {call}, {_start_of(search, len(states), values)}"


def _method(search: Search) -> tuple[str, list[inspect.Parameter]]:
    """A method that takes a step, as it is called, or nothing for forward; its parameters."""
    module = search.module
    own = [n for n, value in vars(type(module)).items() if inspect.isfunction(value)]
    own = [n for n in own if n[0] != "_" and n not in (*search.own_methods, "forward")]
    for name in own:
        if "step" in name or not has_forward(module):
            return f".{name}", parameters_of(getattr(module, name))
    return "", parameters_of(module.forward)


def _value(p: inspect.Parameter) -> str:
    """What a call passes for a parameter; nothing for an option.

    Marks of restarts are constants: a net is restarted by resets.
    """
    if p.default is False and ASKS.search(p.name):
        return "True"
    if names_state(p.name):
        return "state" * (p.default in (None, p.empty))
    if p.default is not p.empty:
        return ""
    kinds = [value for pattern, value in CONSTANTS.items() if re.search(pattern, p.name)]
    return [*kinds, DATA][0]


def _start_of(search: Search, count: int, values: dict[str, str]) -> str:
    """The start of so many states: by a method of the module, or zeros, as its only layer has."""
    module, layers = search.module, [m for m in search.module.modules() if isinstance(m, RECURRENT)]
    if search.own_methods:
        maker = search.own_methods[0]
        lanes = "lanes" * any(p.default is p.empty for p in parameters_of(getattr(module, maker)))
        return f"start=lambda m, lanes: m.{maker}({lanes})"
    state = layer_zeros(module, MARK) if len(layers) == 1 else ()
    if GOES_ON in values.values():  # such a mask is multiplied with it
        state = tree_map(lambda leaf: leaf.reshape(MARK, -1), state)
    if len(trees.tensors(state)) in (count, 2 * count):
        return _start(state)
    return f"start=lambda m, lanes: {ZEROS if count == 1 else f'({ZEROS},) * {count}'}"


def _start(state: State, text: str = "torch.zeros{}") -> str:
    """A start with the sizes of a state of `MARK` lanes, each tensor as a text for its shape."""
    shown = tree_map(lambda leaf: _Code(text.format(tuple(leaf.shape))), state)
    return f"start=lambda m, lanes: {shown}".replace(str(MARK), "lanes")


def bidirectional_error(name: str) -> ModelError:
    """The error for a layer that runs backwards over time."""
    return ModelError(
        f"layer '{name}' is bidirectional: its backward direction starts at the end of the"
        " recording, and a stream has none, so no state can be carried into it. Use"
        " bidirectional=False if it runs over time; over another dimension, such as frequency,"
        " write the call: tt.carry(module, call=lambda m, x, state: ...)."
    )
