"""Why a module cannot be carried: the law it breaks, the part that breaks it, the line to write.

Shapes: `T` steps, `B` lanes.
"""

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from throughtime.carry._bound import BoundModule
from throughtime.carry._explain import refuse_width, source_name
from throughtime.carry._laws import LAWS, NOT_FINITE, Laboratory, Law
from throughtime.carry._names import names_state
from throughtime.carry._ports import RECURRENT, has_layers, observe
from throughtime.carry._search import Search
from throughtime.carry._subject import Failure
from throughtime.carry._trial import (
    LANES,
    STEPS,
    changed_inputs,
    copy_of,
    modes_of,
    quiet,
    trial_inputs,
)
from throughtime.errors import ModelError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d)
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def refusal(module: nn.Module, search: Search) -> ModelError:
    """The error for a module of which no way of calling obeys every law."""
    name = type(module).__name__
    if fault := device_error(module, search.x):
        return fault
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase) and part.bidirectional:
            return bidirectional_error(path or type(part).__name__)
    unknown = _unknown_parameters(search)
    if unknown:
        return ModelError(
            f"{name}.forward requires {unknown} beside its first input and its state. Inputs in"
            " several arguments are split by tt.carry(module, inputs=lambda x: (x[..., :2],"
            " x[..., 2:])); pass a constant in a module of your own that calls this one."
        )
    failure = _telling(module, search.failures)
    if failure is None or failure.rank <= 0:
        return _uncallable(module, failure, search.x)
    if failure.in_training and failure.law is None:
        return ModelError(
            f"{name} cannot be carried: it obeys every law in evaluation mode, and in training mode"
            f" its forward raised {_first_line(failure.error)}. Mend that, or carry it as"
            " tt.carry(module.eval(), x)"
        )
    if failure.law is None:
        return ModelError(f"{name}: {failure.error}")
    with quiet(search.x.device):
        part = _found_culprit(module, search, failure, failure.law)
    called = "" if failure.convention is None else source_name(failure.convention)
    return broken_error(name, failure.law, part, called)


def broken_error(
    name: str, law: Law, part: tuple[str, nn.Module] | None, state: str = ""
) -> ModelError:
    """The error for a module that breaks a law.

    Args:
        name: of the module's class.
        law: as it was measured.
        part: of the module that breaks it, if one was found.
        state: where the state is.
    """
    plain = law.plain
    is_training = law.name != plain
    if "modified by an inplace operation" in law.error:
        return ModelError(
            f"{name} cannot be carried: a later call writes into a tensor that the gradient of an"
            " earlier one needs, such as a buffer that forward fills again"
            f" ({law.error.split(':')[0]}). Make a new tensor in forward."
        )
    if law.error:
        return ModelError(
            f"{name} cannot be carried: it computes a chunk, and fails where the {plain!r} law is"
            f" measured, with other lengths, lanes or states ({law.error}). {LAWS['whole'].advice}."
        )
    details: list[str] = [] if plain in ("inputs", "memory") else [f"deviation {law.deviation:.2g}"]
    details += [f"with the state in {state}"] if state else []
    measured = f" ({', '.join(details)})" if details else ""
    if law.detached:
        return ModelError(
            f"{name} cannot be carried: it keeps its state in {law.detached!r} without its"
            " gradient. Called as it is, no gradient flows from one chunk to the one before, and a"
            " horizon longer than a chunk has no effect. Remove .detach() or .data where forward"
            f" sets {law.detached}: tt.updates cuts the gradient where its policy says, and keeps"
            " memory flat."
        )
    return ModelError(
        f"{name} cannot be carried: {'in training mode, ' if is_training else ''}"
        f"{LAWS[plain].broken}"
        f"{measured}."
        f" {_advice(plain, part, is_training)}."
    )


def _telling(module: nn.Module, failures: list[Failure]) -> Failure | None:
    """The failure that says most: of the likeliest layout, or of what came furthest."""
    broken = [f for f in failures if f.law is not None]
    if not any(f.convention is not None and f.convention.call == "chunk" for f in broken):
        whole = next((f for f in broken if f.name == "last"), None)
        if whole is not None:  # the module returns its last output only
            return whole
    failure = max(failures, key=lambda f: f.rank, default=None)
    first = next((f for f in broken if f.law is not None and not f.law.error), None)
    orders = ("causal", "lanes")  # laws that a wrong order of time and lanes breaks
    if failure is None or failure.name not in orders or first is None or first.name not in orders:
        return failure
    recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
    return first if recurrent else failure


def _unknown_parameters(search: Search) -> str:
    """Parameters without a default beside those of the state, if it has such, in quotes."""
    tried = [f.convention.source for f in search.failures if f.convention is not None]
    names = max((s.arguments or () for s in tried), key=len, default=())
    unknown = [name for name in names if not names_state(name)]
    return ", ".join(map(repr, unknown)) if len(unknown) < len(names) else ""


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
        " bidirectional=False."
    )


def _uncallable(module: nn.Module, failure: Failure | None, x: Tensor) -> ModelError:
    """No call of the module with such inputs gave outputs and a state."""
    name = type(module).__name__
    error = None if failure is None else failure.error
    convolutions = [part for part in module.modules() if isinstance(part, CONVOLUTIONS)]
    if convolutions and "one output per step" in str(error):
        return ModelError(
            f"{name} {error}. If it is a convolution over time that shortens the sequence, keep the"
            f" steps before a chunk: tt.carry(module, context={max(map(_past, convolutions))})."
        )
    if isinstance(error, NotImplementedError) and type(module).forward is nn.Module.forward:
        return ModelError(
            f"{name} has no forward. Name the method that computes a step or a chunk:"
            " tt.carry(module, call=module.METHOD)"
        )
    if error is not None and NOT_FINITE in str(error):
        return ModelError(
            f"{name} cannot be tried: {NOT_FINITE}, for inputs like the examples and for smaller"
            " weights too. Look at its weights, and at the first step that is not finite."
        )
    refuse_width(error, module, x)
    if failure is not None and failure.convention is not None:
        names = failure.convention.source.arguments or ()
        if any(map(names_state, names)):
            return ModelError(
                f"{name}.forward failed in every trial ({_first_line(error)}), with the state in"
                f" argument '{', '.join(names)}'. Let it accept None at the start of a"
                " recording, give the module a method initial_state(lanes), or write"
                " tt.carry(module, start=lambda lanes: ...)."
            )
    if not has_layers(module) and (error is None or "has one output per step" not in str(error)):
        kinds = {
            type(m).__name__ for m in module.modules() if isinstance(m, (*CONVOLUTIONS, *ATTENTION))
        }
        remark = f" ({', '.join(sorted(kinds))} over steps keeps no state)" if kinds else ""
        detail = (
            "" if error is None else f" The first call that was tried raised: {_first_line(error)}."
        )
        return ModelError(
            f"{name} has no recurrent layer of torch.nn inside, and no state was found in its"
            f" arguments, attributes or submodules{remark}: there is nothing to carry, or it is"
            " hidden where it cannot be reached. Let forward(x, state) return (y, state), or say"
            " what is unusual: tt.carry(module, inputs=lambda x: ..., state='hidden', start=lambda"
            f" lanes: ..., call='step').{detail}"
        )
    return ModelError(
        f"no way of calling {name} gave one output per step and a state. The usual one:"
        f" {_first_line(error)}. Say what is unusual: tt.carry(module, inputs=lambda x: ...,"
        " output=0, state='hidden', start=lambda lanes: ..., call='step')."
    )


def _past(convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d) -> int:
    """The steps before a chunk that a causal convolution needs, if time is its longest kernel."""
    sizes = zip(convolution.kernel_size, convolution.dilation, strict=True)
    return max((kernel - 1) * dilation for kernel, dilation in sizes)


def _first_line(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".split("\n")[0].rstrip(".")


def _advice(law: str, part: tuple[str, nn.Module] | None, is_training: bool) -> str:
    """What to change, for a law and the part of the module that breaks it."""
    if part is None:
        if is_training and law in ("whole", "last"):
            return (
                "What a step gets is not what the step before returned, such as a state after"
                " dropout: dropout belongs on outputs, or into the cell that returns the state"
            )
        return LAWS[law].advice
    name, module = part
    where = f"The first part that breaks it is '{name}' ({type(module).__name__})"
    if isinstance(module, BATCH_NORMS):
        return (
            f"{where}: batch statistics mix lanes and steps. Use nn.LayerNorm, or freeze them with"
            f" module.{name}.eval()"
        )
    if isinstance(module, CONVOLUTIONS):
        past = _past(module)
        if law == "causal":
            return (
                f"{where}: it convolves over time and looks ahead. Pad it on the left only,"
                f" F.pad(x, ({past}, 0)), and write tt.carry(module, context={past})"
            )
        return (
            f"{where}: it convolves over time, and the steps before a chunk are lost. Keep them:"
            f" tt.carry(module, context={past})"
        )
    if isinstance(module, ATTENTION):
        return (
            f"{where}: attention over all steps. Keep past keys and values in the state:"
            " forward(x, state) -> (y, state)"
        )
    if "Norm" in type(module).__name__:
        return f"{where}: it normalises over time. Normalise the features of each step alone"
    return f"{where}. {LAWS[law].advice}"


def _found_culprit(
    module: nn.Module, search: Search, failure: Failure, law: Law
) -> tuple[str, nn.Module] | None:
    """The part of a module that breaks a law, found on another copy."""
    twin = None if failure.convention is None else copy_of(module)
    if failure.convention is None or twin is None:
        return None
    modes = modes_of(module) if law.name != law.plain else None
    x = trial_inputs(search.x, twin, 1 if failure.convention.one_lane else LANES)
    bound = BoundModule(twin, failure.convention, x[:1, :1])
    return culprit(Laboratory(bound, twin, x), law.plain, modes)


def culprit(
    laboratory: Laboratory, law: str, modes: dict[str, bool] | None
) -> tuple[str, nn.Module] | None:
    """The first part, in the order of calls, whose results break a law of time or lanes."""
    if law not in ("causal", "lanes", "whole", "repeat"):
        return None
    x, laboratory.training = laboratory.x, modes
    lanes = x.shape[1]
    is_whole = law == "whole"
    chunks = (3, STEPS - 3) if is_whole else ()
    changed = x if is_whole else changed_inputs(x, STEPS // 2, lanes - 1)
    try:
        with torch.no_grad():
            whole, other = _last_calls(laboratory, x), _last_calls(laboratory, changed, *chunks)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return None
    size, first = (lanes, lanes - 1) if law == "lanes" else (STEPS, STEPS // 2)

    def differs(a: Tensor, b: Tensor) -> bool:
        return _differs_at_end(a, b) if is_whole else _differs_before(a, b, size, first, lanes)

    for name, (received, returned) in whole.items():
        part = laboratory.module.get_submodule(name)
        is_leaf = not any(True for _ in part.children()) or isinstance(part, ATTENTION)
        if not is_leaf or name not in other or isinstance(part, RECURRENT):
            continue
        got, gave = other[name]
        if any(map(differs, received, got)):
            return None  # forward itself has broken the law before this part
        if any(map(differs, returned, gave)):
            return name, part
    return None


def _last_calls(
    laboratory: Laboratory, x: Tensor, *chunks: int
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """The tensors that the last call of each part received and returned."""
    calls = observe(laboratory.module, lambda: laboratory.run(x, *chunks))
    return {
        name: (_tensors((of_part[-1].args, of_part[-1].kwargs)), _tensors(of_part[-1].result))
        for name, of_part in calls.items()
    }


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _differs_at_end(whole: Tensor, last: Tensor) -> bool:
    """Whether the last steps of a result differ from those of the last chunk."""
    if whole.dim() != last.dim():
        return False
    changed = [i for i, (p, q) in enumerate(zip(whole.shape, last.shape, strict=True)) if p != q]
    if len(changed) != 1 or whole.shape[changed[0]] != STEPS:
        return False
    length = last.shape[changed[0]]
    end = whole.narrow(changed[0], STEPS - length, length)
    return not torch.allclose(end, last, rtol=1e-4, atol=1e-5)


def _differs_before(a: Tensor, b: Tensor, size: int, first: int, lanes: int) -> bool:
    """Whether results differ before the first step, or lane, that was changed."""
    if a.shape != b.shape:
        return False
    moved = ~torch.isclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)
    dims = [i for i, n in enumerate(a.shape) if n == size > 1]
    if len(dims) == 1:
        return bool(moved.narrow(dims[0], 0, first).any())
    flat = [i for i, n in enumerate(a.shape) if n == STEPS * lanes]
    if len(flat) != 1:
        return False
    # steps first or lanes first: count what may change in either
    rows = moved.movedim(flat[0], 0).reshape(STEPS * lanes, -1).any(1)
    return int(rows.sum()) > STEPS - STEPS // 2
