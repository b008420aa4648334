"""In words: how a module is called, why it cannot be carried, and the line to write.

Shapes: `T` steps, `B` lanes.
"""

import inspect
import re
from collections import defaultdict
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from throughtime.carry._calls import Convention, layer_zeros
from throughtime.carry._inside import RECURRENT, is_turned, names_state, parameters_of
from throughtime.carry._laws import LAWS, Law
from throughtime.carry._layout import MisfitError, path_name
from throughtime.carry._search import PATIENCE, Failure, Search
from throughtime.carry._trial import quiet, reach_of
from throughtime.errors import ModelError

LENGTH = "len"  # in the name of an argument that no state has
MARK = 9973  # stands for the number of lanes in shapes
ASKS = re.compile("return|output|use_cache|need")  # flags by which a module is asked for a state
GOES_ON = re.compile("mask|not_|nonterminal|continu")  # arguments that are 0 where a lane restarts
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
OVER_TIME = ("causal", "lanes", "whole", "long", "last")
CAUSES = {  # parts that usually break a law over time
    BATCH_NORMS: (
        "batch statistics mix lanes and steps. Use nn.LayerNorm, or freeze them with"
        " module.{path}.eval()"
    ),
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d): (
        "if it convolves over time, the steps before a chunk are lost, or it looks ahead: pad it on"
        " the left only, F.pad(x, ({past}, 0)), and write tt.carry(module, context={past}), the sum"
        " of (kernel_size - 1) * dilation over the convolutions, one after another"
    ),
    (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer): (
        "attention over all steps. Keep past keys and values in the state: forward(x, state) -> (y,"
        " state)"
    ),
    (
        nn.GroupNorm,
        nn.modules.instancenorm._InstanceNorm,
    ): "it normalises over time. Normalise the features of each step alone",
}


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
    nearest = max(search.failures, key=lambda failure: failure.stage, default=Failure(0, None))
    law, c = nearest.law, nearest.convention
    text = _uncallable(search, nearest.error) if law is None else broken(module, law, c)
    late = f" The search ended after {PATIENCE:.0f} s." * search.is_late
    line, start = "", _start(search, nearest)
    is_written = search.hints.inputs or search.hints.call
    if law is not None and law.name in ("random", "start"):
        line = f"\nWrite: tt.carry(module, {start})"
    elif (law is None or law.name == "memory") and not is_written and (call := _call(search)):
        line = (
            f"\nWrite: tt.carry(module, call=lambda m, x, state: {call}{start and f', {start}'}),"
            " where call returns (outputs, next state) for a step (B, ...) or a chunk (T, B, ...)"
        )
    return ModelError(f"{name} {text}{late}{line}")


def broken(module: nn.Module, law: Law, c: Convention | None = None) -> str:
    """What is wrong with a module that breaks a law, called by a convention."""
    mode = "in training mode, " * law.training
    if law.error:
        return (
            f"cannot be carried: {mode}its forward raised {law.error}, where the {law.name!r} law"
            " is measured with other lengths, lanes or states. Mend that"
            + (", or carry it as tt.carry(module.eval(), x)." if law.training else ".")
        )
    what, advice = LAWS[law.name]
    details = [f"deviation {law.deviation:.2g}"] if 0 < law.deviation < float("inf") else []
    details += [f"the state is {c.where}"] if c is not None and c.where else []
    remark = f" ({'; '.join(details)})" if details else ""
    if law.training and law.name in ("whole", "last"):
        advice = (
            "What a step gets is not what the step before returned, such as a state after"
            " dropout: dropout belongs on outputs, or into the cell that returns the state"
        )
    elif law.name in OVER_TIME:
        is_over_time = law.name != "lanes" and (c is None or not c.hints.context)
        for path, part in reversed([*module.named_modules()]):
            for kinds, text in CAUSES.items():
                if isinstance(part, kinds) and (
                    law.training if kinds == BATCH_NORMS else is_over_time
                ):
                    where = f"'{path}' ({type(part).__name__})" if path else "the module itself"
                    cause = text.format(path=path, past=reach_of(module))
                    advice = f"The likely cause is {where}: {cause}"
    return f"cannot be carried: {mode}{what}{remark}. {advice}."


def _uncallable(search: Search, error: Exception | None) -> str:
    """What is wrong with a module of which no call gave outputs and a state."""
    module, hints = search.module, search.hints
    if not has_forward(module) and not hints.call:
        return "has no forward, so the call must be written."
    text = "" if hints.inputs or hints.call else _keys(search) or _arguments(module)
    if not text and search.is_callable and not search.has_state:
        text = _stateless(search)
    past = reach_of(module)
    if not text and isinstance(error, MisfitError):
        text = str(error)
        if past and not hints.context:
            text += (
                ". If it is a convolution over time that shortens the sequence, keep the steps"
                f" before a chunk: tt.carry(module, context={past})"
            )
    if not text:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        text = f"the call that came furthest failed: {what}"
        if not hints.inputs and not hints.call:
            text += (
                "; inputs that are several arguments or a dict: tt.carry(module, inputs=lambda x:"
                " ...)"
            )
    return f"cannot be carried: {text}."


def _keys(search: Search) -> str:
    """The line for a forward that reads its inputs as a dict; empty for others."""
    keys = defaultdict[str, Tensor](lambda: search.x[0])
    required = [p for p in parameters_of(search.module.forward)[1:] if p.default is p.empty]
    with suppress(Exception), quiet(search.x.device):
        search.twins[-1].module(keys, *[None] * len(required))
    parts = ", ".join(f"{key!r}: x[..., :N]" for key in keys)
    return parts and (
        f"its forward reads {', '.join(map(repr, keys))} in its inputs, as in a dict: write"
        f" tt.carry(module, inputs=lambda x: {{{parts}}}), with all that it reads"
    )


def _arguments(module: nn.Module) -> str:
    """What a forward requires that is neither its inputs nor a state; empty if nothing."""
    needed = [p.name for p in parameters_of(module.forward)[1:] if p.default is p.empty]
    unknown = [name for name in needed if not names_state(name)]
    if lengths := [name for name in unknown if LENGTH in name]:
        return (
            f"its forward requires {lengths[0]!r}, and all lanes of a chunk are as long: write"
            " tt.carry(module, inputs=lambda x: (x, torch.full((x.shape[1],), len(x)))), with"
            " x.transpose(0, 1) if it takes (B, T, ...)"
        )
    if not 0 < len(unknown) < len(needed):
        return ""
    return (
        f"its forward requires {', '.join(map(repr, unknown))} beside its first input and its"
        " state. Inputs in several arguments are split by tt.carry(module, inputs=lambda x: (x[...,"
        " :2], x[..., 2:])); what marks a restart is a constant in a call of yours, since a carried"
        " net is restarted by resets"
    )


def _stateless(search: Search) -> str:
    """What is wrong with a module that can be called, in which no state was found."""
    module, hints = search.module, search.hints
    parts = [(n, m) for n, m in module.named_modules() if isinstance(m, RECURRENT)]
    past = reach_of(module)
    if parts and isinstance(parts[0][1], nn.RNNBase):
        text = f"its layer '{parts[0][0]}' does not run over the steps of a chunk"
        if hints.inputs and parts[0][1].batch_first:
            text += ", since inputs= has to return (B, T, ...) here: x.transpose(0, 1)"
        text += ". Let forward(x, state) return (y, state)"
    elif past and not hints.context:
        text = (
            "it has no recurrent layer of torch.nn inside. If it convolves over time, a chunk needs"
            f" {past} steps of the past, the sum of (kernel_size - 1) * dilation: write"
            f" tt.carry(module, context={past})"
        )
    else:
        text = (
            "no recurrent layer of torch.nn runs over its steps, and no state was found in its"
            " arguments, attributes or submodules: there is nothing to carry, as in attention over"
            " steps, or it is a variable of forward, where it cannot be reached. Let forward(x,"
            " state) return (y, state)"
        )
    if hints.batch_first is not None:
        text += (
            f". If it takes the other order: tt.carry(module, batch_first={not hints.batch_first})"
        )
    return text


def has_forward(module: nn.Module) -> bool:
    """Whether a module says what it computes."""
    return type(module).forward not in (None, nn.Module.forward)


def _call(search: Search) -> str:
    """A call of a method that takes a state, or of forward; empty if none does."""
    module, kind = search.module, type(search.module)
    own = [n for n, value in vars(kind).items() if inspect.isfunction(value) and n[0] != "_"]
    own = [n for n in own if n not in (*search.own_methods, "forward")]
    steps = [n for n in own if "step" in n or not has_forward(module)]
    name = f"m.{steps[0]}" if steps else "m"
    parameters = parameters_of(getattr(module, [*steps, "forward"][0]))
    if any(LENGTH in p.name for p in parameters if p.default is p.empty) or _keys(search):
        return ""  # inputs= says them
    if len(parameters) < 2:
        return "" if search.is_callable else f"{name}((x, state))"
    turned = is_turned(parameters)
    first = parameters.pop(int(turned))
    states = [p.name for p in parameters if names_state(p.name) and p.default in (None, p.empty)]
    states = states or [parameters[0].name]
    passed = [f"{first.name}=x" if turned else "x"]
    for p in parameters:
        if p.name in states:
            value = "state" if len(states) == 1 else f"state[{states.index(p.name)}]"
        elif p.default is p.empty:
            is_mask = GOES_ON.search(p.name)
            value = f"x.new_{'ones(*x.shape[:-1], 1)' if is_mask else 'zeros(x.shape[:-1])'}"
        elif p.default is False and ASKS.search(p.name):
            value = "True"
        else:
            continue
        passed.append(f"{p.name}={value}")
    line = f"{name}({', '.join(passed)})"
    return line + "[::-1]" * turned if len(states) == 1 else f"(lambda y, *s: (y, s))(*{line})"


def _start(search: Search, failure: Failure) -> str:
    """A start from tensors of the module that have the sizes of the state, a method, or zeros.

    Nothing where the module starts by itself from a state that nothing shows.
    """
    module, c, law = search.module, failure.convention, failure.law
    layers = [m for m in module.modules() if isinstance(m, RECURRENT)]
    zeros = [layer_zeros(layer, MARK) for layer in layers]
    state: Any = zeros[0] if len(zeros) == 1 else (*zeros,)
    has_lanes, options = c is not None and bool(c.lanes.dims), parameters_of(module.forward)[1:]
    if search.own_methods and law is None and not has_lanes:
        state = _Code(f"m.{search.own_methods[0]}(lanes)")
    elif c is not None and has_lanes and law is not None:
        state = c.lanes.to_module(c.lanes.fill(None, MARK, None))
    elif any(GOES_ON.search(p.name) for p in options):
        # such a mask is multiplied with it
        state = tree_map(lambda leaf: leaf.reshape(MARK, -1), state)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    own = [(n, t) for n, t in tensors if names_state(n) or re.search("0$|init|start", n)]
    leaves = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    fits = [[n for n, t in own if t.numel() * MARK == leaf.numel()] for leaf in leaves]
    chosen = iter(
        [names[min(i, len(names) - 1)] for i, names in enumerate(fits)] if all(fits) else ()
    )

    def text(leaf: Any) -> Any:
        shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else None
        is_tried = law is not None and law.name == "start"
        zeros = f"torch.full({shape}, VALUE)" if is_tried else f"torch.zeros{shape}"
        name = next(chosen, None) if has_lanes else None
        return leaf if shape is None else _Code(zeros if name is None else f"m.{name}")

    if state == () and {p.default is p.empty for p in options} == {False}:
        return ""
    shown = tree_map(text, state) if state != () else "torch.zeros(lanes, N)"
    return f"start=lambda m, lanes: {shown}".replace(str(MARK), "lanes")


def bidirectional_error(name: str) -> ModelError:
    """The error for a layer that runs backwards over time."""
    return ModelError(
        f"layer '{name}' is bidirectional: its backward direction starts at the end of the"
        " recording, and a stream has none, so no state can be carried into it. Use"
        " bidirectional=False if it runs over time; over another dimension, such as frequency,"
        " write the call: tt.carry(module, call=lambda m, x, state: ...)."
    )
