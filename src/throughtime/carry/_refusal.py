"""In words: how a module is called, why it cannot be carried, and the line to write.

Shapes: `T` steps, `B` lanes.
"""

import inspect
import re

from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._calls import Convention, layer_zeros
from throughtime.carry._inside import is_turned, names_state, parameters_of
from throughtime.carry._laws import LAWS, Law
from throughtime.carry._layout import MisfitError, path_name
from throughtime.carry._search import PATIENCE, Failure, Search
from throughtime.carry._trial import reach_of
from throughtime.errors import ModelError

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
    late = f" The search ended after {PATIENCE:.0f} s." if search.is_late else ""
    line, start = "", f"start={_start(search, nearest)}"
    if law is not None and law.name in ("random", "start"):
        line = f"\nWrite: tt.carry(module, {start})"
    elif (law is None or law.name == "memory") and (call := _call(search)):
        line = (
            f"\nWrite: tt.carry(module, call=lambda m, x, state: {call}, {start}), where call"
            " returns (outputs, next state) for a step (B, ...) or a chunk (T, B, ...)"
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
    module, first = search.module, search.hints.batch_first
    if not has_forward(module) and search.hints.call is None:
        return "has no forward, so the call must be written."
    needed = [p.name for p in parameters_of(module.forward)[1:] if p.default is p.empty]
    unknown = [name for name in needed if not names_state(name)]
    past, what = reach_of(module), f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
    if unknown and len(unknown) < len(needed):
        text = (
            f"its forward requires {', '.join(map(repr, unknown))} beside its"
            " first input and its state. Inputs in several arguments are split by"
            " tt.carry(module, inputs=lambda x: (x[..., :2], x[..., 2:])); what marks a restart is"
            " a constant in a call of yours, since a carried net is restarted by resets"
        )
    elif search.is_callable and not search.has_state:
        text = (
            "it has no recurrent layer of torch.nn inside, and no state was"
            " found in its arguments, attributes or submodules: there is nothing to carry, as in"
            " attention over steps, or it is a variable of forward, where it cannot be reached."
            " Let forward(x, state) return (y, state)"
        )
        if first is not None:
            text += f". If it takes the other order: tt.carry(module, batch_first={not first})"
    elif past and isinstance(error, MisfitError):
        text = (
            f"{error}. If it is a convolution over time that shortens the"
            f" sequence, keep the steps before a chunk: tt.carry(module, context={past})"
        )
    else:
        text = (
            f"the call that came furthest failed: {what}. Inputs that are several arguments or a"
            " dict: tt.carry(module, inputs=lambda x: ...)"
        )
    return f"cannot be carried: {text}."


def has_forward(module: nn.Module) -> bool:
    """Whether a module says what it computes."""
    return type(module).forward is not nn.Module.forward


def _call(search: Search) -> str:
    """A call of a method that takes a state, or of forward; empty if none does."""
    module, kind = search.module, type(search.module)
    own = [n for n, value in vars(kind).items() if inspect.isfunction(value) and n[0] != "_"]
    own = [n for n in own if n not in (*search.own_methods, "forward")]
    steps = [n for n in own if "step" in n or not has_forward(module)]
    name = f"m.{steps[0]}" if steps else "m"
    parameters = parameters_of(getattr(module, [*steps, "forward"][0]))
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
    """A start from tensors of the module that have the sizes of the state, a method, or zeros."""
    module, c, state = search.module, failure.convention, layer_zeros(search.module, MARK)
    fits: list[list[str]] = []
    if c is not None and c.lanes.dims:
        tensors = [*module.named_parameters(), *module.named_buffers()]
        fits = [
            [
                f"m.{n}"
                for n, t in tensors
                if t.numel() == leaf.numel() and (names_state(n) or re.search("0$|init|start", n))
            ]
            for leaf in trees.tensors(c.lanes.example)
        ]
        state = c.lanes.to_module(c.lanes.fill(None, MARK, None)) if c.arguments else state
    if fits and all(fits):
        texts = [names[min(i, len(names) - 1)] for i, names in enumerate(fits)]
    elif search.own_methods and failure.law is None:
        texts = [f"m.{search.own_methods[0]}(lanes)"]
    else:
        leaves = [] if state is None else trees.tensors(state)
        if any(GOES_ON.search(p.name) for p in parameters_of(module.forward)):
            leaves = [
                leaf.reshape(MARK, -1) for leaf in leaves
            ]  # such a mask is multiplied with it
        texts = [f"torch.zeros{tuple(leaf.shape)}" for leaf in leaves] or ["torch.zeros(lanes, N)"]
    text = ", ".join(texts).replace(str(MARK), "lanes")
    return f"lambda m, lanes: {text if len(texts) == 1 else f'({text})'}"


def bidirectional_error(name: str) -> ModelError:
    """The error for a layer that runs backwards over time."""
    return ModelError(
        f"layer '{name}' is bidirectional: its backward direction starts at the end of the"
        " recording, and a stream has none, so no state can be carried into it. Use"
        " bidirectional=False if it runs over time; over another dimension, such as frequency,"
        " write the call: tt.carry(module, call=lambda m, x, state: ...)."
    )


def inputs_hint(module: nn.Module, x: Tensor) -> str:
    """What to do with whole numbers, and with tokens of a net that embeds them; empty of others."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if x.is_complex() or (x.is_floating_point() and not embeddings):
        return ""
    if not embeddings:
        return (
            f"; whole numbers ({x.dtype}) are read as indexes, without a dimension of features:"
            " convert features first, such as inputs.astype(np.float32)"
        )
    if x.is_floating_point():
        return f": an embedding takes whole numbers, not {x.dtype}: write inputs.long()"
    most = min(m.num_embeddings for m in embeddings)
    if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < most:
        return (
            f": they hold the tokens {int(x.min())} to {int(x.max())}, the embedding has 0 to"
            f" {most - 1}"
        )
    return ": tokens are whole numbers of shape (T, B), those of a single step (B,)"
