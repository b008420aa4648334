"""How a carried module is called, in words: what `print(net)` shows, and inputs that do not fit.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._bound import BoundModule
from throughtime.carry._convention import (
    CALLS,
    Convention,
    ResetArgument,
    key_name,
    path_name,
)
from throughtime.errors import DataError, ModelError, ThroughtimeError, counted
from throughtime.state import State


def state_shapes(names: Iterable[str], state: State) -> str:
    """The name and the shape of each tensor of a state, lanes first: `lstm.h (B, 2, 8)`."""
    return ", ".join(
        f"{name or 'state'} ({', '.join(['B', *map(str, leaf.shape[1:])])})"
        for name, leaf in zip(names, trees.tensors(state), strict=True)
    )


def convention_lines(bound: BoundModule) -> list[str]:
    """How a module is called, what its state is, where it starts, and what the outputs are."""
    c = bound.convention
    features = ", ".join(map(str, bound.example.shape[2:]))
    layout = str(c.inputs).replace("D, T", f"{features}, T")
    layout = layout.replace("...", "" if c.inputs.drop else features).replace(", )", ")")
    state = c.lanes.example
    leaves = [f"past (B, {c.context}, {features})"] if c.context else []
    leaves += [shapes] if (shapes := state_shapes(bound.leaf_names(state), state)) else []
    sizes = ", ".join(map(str, c.outputs.features or ()))
    outputs = str(c.outputs).replace("C", sizes).replace(", )", ")").replace(", ,", ",")
    item = f"item {path_name(c.outputs.path)}, " if c.outputs.path else ""
    return [
        f"called with {layout}: {CALLS[c.call]}{_options(c)}",
        f"state: {c.source}",
        f"leaves, lanes first: {', '.join(leaves)}",
        f"start: {c.start}",
        f"outputs: {item}{outputs}",
        *([] if c.resets is None else [f"resets: {_resets(c.resets)}"]),
    ]


def _options(c: Convention) -> str:
    """What else a call gets."""
    options = [f"{name}=True" for name in c.flags]
    options += [f"attribute {key_name(key)} set to B" for key in c.sizes]
    options += [f"after {c.context} steps of the past"] if c.context else []
    options += [f"by module.{c.method}"] if c.method != "forward" else []
    options += [f"inputs as {c.input_name}="] if c.input_name else []
    return "".join(f", {option}" for option in options)


def _resets(resets: ResetArgument) -> str:
    value = f"argument {resets.name}, {int(not resets.inverted)} where a lane restarts"
    return value if resets.applied else f"{value}; calls are split at resets all the same"


def source_name(convention: Convention) -> str:
    """Where the state is, in a few words."""
    source = convention.source
    if source.arguments is not None:
        return (
            f"argument '{', '.join(source.arguments)}'" if source.arguments else "a pair (x, state)"
        )
    return ", ".join(f"'{name}'" for name in (*source.ports, *map(key_name, source.attributes)))


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
