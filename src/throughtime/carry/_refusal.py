"""In words: why a module cannot be carried, and the line to write.

Shapes: `T` steps, `B` lanes.
"""

import inspect
import re
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from throughtime.carry._calls import Convention, layer_zeros
from throughtime.carry._inside import RECURRENT, is_turned, names_state, parameters_of
from throughtime.carry._laws import LAWS, Law
from throughtime.carry._layout import path_name
from throughtime.carry._search import PATIENCE, Failure, Search
from throughtime.carry._trial import reach_of
from throughtime.errors import ModelError, ThroughtimeError

MARK = 9973  # stands for the number of lanes in shapes
ASKS = re.compile("return|output|use_cache|need")  # flags by which a module is asked for a state
GOES_ON = re.compile("mask|not_|nonterminal|continu")  # arguments that are 0 where a lane restarts
ZEROS = "zeros(x.shape[:-1])"
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
    nearest = max(search.failures, key=lambda f: f.stage, default=Failure(0, search.base))
    law = nearest.law
    text = broken(module, law, nearest.convention) if law else _uncallable(search, nearest.error)
    line, start = "", _start(search, nearest)
    if law is not None and law.name in ("random", "start"):
        line = f"\nWrite: tt.carry(module, {start})"
    elif law is None or law.name == "memory":
        line = (
            f"\nWrite: tt.carry(module, call=lambda m, x, state: {_call(search)}, {start}), where"
            " call returns (outputs, next state) for a step (B, ...) or a chunk (T, B, ...)"
        ) * (not search.base.call)
    late = (
        f" The search ended after {PATIENCE:.0f} s of processor time, before all ways were tried."
        " With OMP_NUM_THREADS=1 it may take less."
    ) * search.is_late
    if link:
        late += (
            " A layer here returns its outputs only: drop a module that picks them out of a tuple."
        )
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
    what, advice = LAWS[law.name]
    is_over_time = law.name in ("causal", "whole", "long", "last") and not c.context
    for path, part in reversed([*module.named_modules()]):
        for kinds, text in CAUSES.items():
            matters = law.training if kinds == BATCH_NORMS else is_over_time
            if law.name in OVER_TIME and matters and isinstance(part, kinds):
                cause = text.format(path=path, past=reach_of(module))
                advice = f"The likely cause is '{path}' ({type(part).__name__}): {cause}"
    return (
        f"cannot be carried: {mode}{what} (deviation {law.deviation:.2g}; the state is"
        f" {c.where or 'what call takes'}). {advice}."
    )


def _uncallable(search: Search, error: Exception | None) -> str:
    """What is wrong with a module of which no call gave outputs and a state."""
    module, base, past = search.module, search.base, reach_of(search.module)
    if not has_forward(module) and not base.call:
        return "has no forward, so the call must be written."
    text = str(error).split("\n")[0]
    if not isinstance(error, ThroughtimeError):
        text = f"the call that came furthest failed: {type(error).__name__}: {text}"
    if past and not base.context:
        text += (
            ". If it convolves over time, a chunk needs the steps before it, the sum of"
            f" (kernel_size - 1) * dilation: write tt.carry(module, context={past})"
        )
    if base.inputs:
        text += ". inputs= returns what the module takes: x.transpose(0, 1) for (B, T, ...)"
    elif not base.call:
        required = [p.name for p in parameters_of(module.forward)[1:] if p.default is p.empty]
        others = ["x[..., N:]" for name in required if not names_state(name)] or ["x[..., N:]"]
        if "len" in str(required):
            others = ["torch.full((x.shape[1],), len(x))"]
        text += (
            f". Several inputs: tt.carry(module, inputs=lambda x: ({', '.join(['x', *others])})),"
            " those in a dict: inputs=lambda x: {'name': x[..., :N]}"
        )
    return f"cannot be carried: {text}."


def has_forward(module: nn.Module) -> bool:
    """Whether a module says what it computes."""
    return type(module).forward not in (None, nn.Module.forward)


def _call(search: Search) -> str:
    """A call of a method that takes a state, or of forward."""
    module, kind = search.module, type(search.module)
    own = [n for n, value in vars(kind).items() if inspect.isfunction(value) and n[0] != "_"]
    own = [n for n in own if n not in (*search.own_methods, "forward")]
    steps = [n for n in own if "step" in n or not has_forward(module)]
    name = f"m.{steps[0]}" if steps else "m"
    parameters = parameters_of(getattr(module, [*steps, "forward"][0]))
    if len(parameters) < 2:
        return "(y, state)"
    turned = is_turned(parameters)
    first = parameters.pop(int(turned))
    states = [p.name for p in parameters if names_state(p.name) and p.default in (None, p.empty)]
    states = states or [parameters[0].name]
    # a mark of restarts is a constant: a carried net is restarted by resets
    passed = {
        p.name: f"x.new_{'ones(*x.shape[:-1], 1)' if GOES_ON.search(p.name) else ZEROS}"
        for p in parameters
        if p.default is p.empty
    }
    passed |= {p.name: "True" for p in parameters if p.default is False and ASKS.search(p.name)}
    passed |= {n: f"state[{i}]" if states[1:] else "state" for i, n in enumerate(states)}
    rest = [f"{n}={value}" for n, value in passed.items()]
    line = f"{name}({', '.join([f'{first.name}=x' if turned else 'x', *rest])})"
    return line + "[::-1]" * turned if len(states) == 1 else f"(lambda y, *s: (y, s))(*{line})"


def _start(search: Search, failure: Failure) -> str:
    """A start from a method, tensors of the module that have the sizes of the state, or zeros."""
    module, (_, c, law, _) = search.module, failure
    if search.own_methods and law is None:
        return f"start=lambda m, lanes: m.{search.own_methods[0]}(lanes)"
    states = [layer_zeros(m, MARK) for m in module.modules() if isinstance(m, RECURRENT)]
    state, names = states[0] if len(states) == 1 else tuple(states), dict[int, list[str]]()
    if c.lanes.dims and law is not None:
        state = c.lanes.to_module(c.lanes.fill(None, MARK, None))
        for n, t in (*module.named_parameters(), *module.named_buffers()):
            if names_state(n) or re.search("0$|init|start", n):
                names.setdefault(t.numel() * MARK, []).append(n)
    elif any(GOES_ON.search(p.name) for p in parameters_of(module.forward)):
        # such a mask is multiplied with it
        state = tree_map(lambda leaf: leaf.reshape(MARK, -1), state)

    def text(leaf: Tensor) -> Any:
        if own := names.get(leaf.numel()):
            return _Code(f"m.{own.pop(0)}")
        is_tried = law is not None and law.name == "start"
        shape = tuple(leaf.shape)
        return _Code(f"torch.full({shape}, VALUE)" if is_tried else f"torch.zeros{shape}")

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
