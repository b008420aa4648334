"""A module from inside: its recurrent layers and attributes, where a state may be, and its copies.

While `LayerHooks.run` calls a module, the first call of each of its layers and cells of torch.nn
takes the state that was carried, and the state that its last call returns is carried on. Outside
`run` the hooks do nothing. Trials run on copies, on a few steps, with nothing left behind.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import copy
import dis
import inspect
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from throughtime._device import fork_rng
from throughtime.errors import ModelError
from throughtime.state import State

Key: TypeAlias = tuple[str, str]  # of an attribute: the path of its module, its name
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
MISSING = object()  # the value of an attribute that a module does not have yet
INPUT_NAME = re.compile(
    "x|inputs?|obs|observations?|data|input_tensor|like|emb|tokens|features|seq|sequence|frame|u"
    "|signal"
)
STATE_NAME = re.compile(
    r"^[sm]$|(^|_)(h|c|hx|cx|hxs|h0|c0|hc|mems|syn|cache|carry|past|context|buffer|hid\w*|state\w*"
    r"|cell\w*|mem\w*)(_|$)"
)


def parameters_of(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a method by name, without self; those by keyword alone are the last."""
    if not callable(method):  # forward = None, as some write
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(method).parameters.values() if p.kind not in variable]


def returned_names(method: Any) -> list[str]:
    """The local names at the end of what a method returns last: `[y, h, c]` of `y, (h, c)`."""
    names: list[str] = []
    code: Any = getattr(inspect.unwrap(method), "__code__", "")  # of a function of Python
    for step in reversed([*dis.get_instructions(code)]):
        if step.opname.startswith("LOAD_FAST"):
            names = [*([step.argval] if isinstance(step.argval, str) else step.argval), *names]
        elif names or step.opname not in ("RETURN_VALUE", "BUILD_TUPLE"):
            break
    return names


def ancestors(tensor: Tensor, beside: Any = None) -> set[Any]:
    """The nodes of the graph from which a tensor was computed, not by way of one of them."""
    nodes, pending = set[Any](), [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node is not beside and node not in nodes:
            nodes.add(node)
            pending += [before for before, _ in node.next_functions]
    return nodes


def is_turned(parameters: list[inspect.Parameter]) -> bool:
    """Whether a method takes its state before its inputs, by their names: no law would show it."""
    first, second = [*(p.name for p in parameters), "", ""][:2]
    if INPUT_NAME.fullmatch(first) or not second:
        return False
    return bool(INPUT_NAME.fullmatch(second)) or names_state(first) > names_state(second)


def plain_name(name: str) -> str:
    """The name of a state without what says when: `h` of `h_prev`, `h_new`, `h_t` and `h0`."""
    name = name.lower().strip("_0123456789")
    return re.sub("prev|init|new|next|_t$", "", name).strip("_0123456789")


def names_state(name: str) -> bool:
    """Whether a name is one that people give a state: `hidden`, `h_prev`, `rnn_hxs`, `mems`."""
    return STATE_NAME.search(plain_name(name)) is not None


@dataclass(eq=False)
class LayerCall:
    """One forward call of a module: the states that its layers take and return.

    Attributes:
        before: the states to set, by layer; empty to record what the module passes itself.
        steps: T.
        context: steps that a layer gets before those of this chunk, and must not run again.
        passed: what the module itself passed to the first call of each layer.
        after: what the last call of each layer returned.
        seen: the steps that each layer has run over.
    """

    before: Mapping[str, State]
    steps: int
    context: int = 0
    passed: dict[str, State] = field(default_factory=dict)
    after: dict[str, State] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)


_active: ContextVar[Any] = ContextVar("_active", default=(None, None))  # hooks and their call


class LayerHooks:
    """The hooks on the layers and cells of one module."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self.module, self._layers = module, {name: module.get_submodule(name) for name in names}
        self._handles: list[Any] = []
        for name, layer in self._layers.items():
            enter, leave = partial(self._enter, name), partial(self._leave, name)
            self._handles += [
                layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                layer.register_forward_hook(leave, prepend=True),
            ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def run(self, call: LayerCall, args: Any) -> Any:
        """The result of the module, while the hooks act for a call.

        Raises:
            ModelError: no layer ran, or one was replaced.
        """
        token = _active.set((self, call))
        try:
            result = self.module(*args)
        finally:
            _active.reset(token)
        get = self.module.get_submodule
        if not call.after or any(get(name) is not part for name, part in self._layers.items()):
            raise ModelError(
                f"none of the layers {[*self._layers]} ran in {type(self.module).__name__}.forward:"
                " they were replaced after tt.carry (carry it again), or are not used"
            )
        return result

    def _enter(self, name: str, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before a call: its arguments with the carried state, if they change."""
        hooks, call = _active.get()
        if hooks is not self:
            # torch.utils.checkpoint itself notices a running backward pass so
            if torch._C._current_graph_task_id() != -1:
                raise ModelError(
                    f"layer '{name}' is run again inside a backward pass, by activation"
                    " checkpointing: its state is gone. Let forward(x, state) return (y, state)"
                )
            return None
        x, *states = *args, *(kwargs.pop(key) for key in ("input", "hx") if key in kwargs)
        steps = 1
        if isinstance(layer, nn.RNNBase):
            if not isinstance(x, Tensor):
                raise ModelError(
                    f"layer '{name}' gets a {type(x).__name__}; a stream needs no packing:"
                    " pass the tensor of its steps"
                )
            time = int(layer.batch_first and x.dim() == 3)
            steps = x.shape[time]
            if call.context and steps == call.steps:
                x = x.narrow(time, call.context, steps - call.context)
        call.seen[name] += steps
        if name in call.after:
            return (x, *states), kwargs
        if name in call.before:
            states = [call.before[name]]
        else:
            call.passed[name] = states[0] if states else None
        return (x, *states), kwargs

    def _leave(self, name: str, layer: nn.Module, _: Any, result: Any) -> None:
        """After a call: the state that it returned is carried."""
        hooks, call = _active.get()
        if hooks is self:
            call.after[name] = result[1] if isinstance(layer, nn.RNNBase) else result


# ---------------------------------------------------------------- what one call shows


OF_EVERY_MODULE = vars(nn.Module()).keys() | vars(nn.RNN(1, 1, device="meta")).keys()
HOLDS = (type(None), Tensor, tuple, list, dict, int, float)  # a state, or a counter


def attributes(module: nn.Module) -> dict[Key, Any]:
    """Copies of plain attributes and buffers of all parts that could hold a state."""
    return {
        (name, key): copied(value)
        for name, part in module.named_modules()
        for key, value in (vars(part) | part._buffers).items()
        if key not in OF_EVERY_MODULE
        and isinstance(value, HOLDS)
        # weights that weight_norm and spectral_norm of torch.nn.utils compute for each call
        and part._parameters.keys().isdisjoint((f"{key}_g", f"{key}_orig"))
    }


def key_name(key: Key) -> str:
    """An attribute as Python writes it, without the module: `memory.cells`."""
    return ".".join(filter(None, key))


def copied(value: Any) -> Any:
    """A value whose change in place leaves the original as it is."""
    return pytree.tree_map(lambda leaf: leaf.clone() if type(leaf) is Tensor else leaf, value)


def get_attributes(module: nn.Module, keys: Iterable[Key]) -> dict[Key, Any]:
    """The values of attributes and buffers."""
    return {key: getattr(module.get_submodule(key[0]), key[1], MISSING) for key in keys}


def set_attributes(module: nn.Module, values: Mapping[Key, Any]) -> None:
    """Set attributes, without the checks of `nn.Module.__setattr__`."""
    for (path, name), value in values.items():
        owner = module.get_submodule(path)
        own = owner._buffers if name in owner._buffers else owner.__dict__
        if value is MISSING:
            own.pop(name, None)
        else:
            own[name] = value


# ---------------------------------------------------------------- trials

STEPS, LANES = 7, 3  # of a trial: small, different, and rarely the sizes of a layer
LONG_STEPS, MAX_STEPS = 32, 256  # of one of a link on more steps, and of any at most

_DRAWS = re.compile("(rand|randn|normal|bernoulli|uniform|exponential)(_like)?_?")


class ConstantRandomness(TorchFunctionMode):
    """Replaces dropout and random numbers by constants: the same for every step and lane.

    What a module computes then does not depend on how its steps are divided among calls, unless
    something that is dropped or drawn is part of its state.
    """

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:
            x = (*args, *kwargs.values())[0].clone()
            y = func(*args, **kwargs)
            return y if torch.equal(x, y) else x * 0.75
        result = func(*args, **kwargs)
        if _DRAWS.fullmatch(name) and isinstance(result, Tensor) and result.is_floating_point():
            with torch.no_grad():
                result.fill_(0.5)
        return result


@contextmanager
def quiet(device: torch.device) -> Generator[None]:
    """Random states are restored; no autocast, no warnings; cuDNN, which needs training, is off."""
    python = random.getstate()
    try:
        with (
            fork_rng(device),
            torch.autocast(device.type, enabled=False),
            torch.backends.cudnn.flags(enabled=False),
            torch.inference_mode(False),
            warnings.catch_warnings(action="ignore"),
            torch.enable_grad(),
        ):
            yield
    finally:
        random.setstate(python)


def copy_of(module: Any) -> Any:
    """A copy of a module, with weights of its own; None for one that refuses to be copied.

    Tensors with a graph in attributes, which torch does not copy, are detached.
    """
    held = pytree.tree_leaves([[*vars(part).values()] for part in module.modules()])
    graphs = [leaf for leaf in held if isinstance(leaf, Tensor) and not leaf.is_leaf]
    try:
        twin = copy.deepcopy(module, {id(leaf): leaf.detach().clone() for leaf in graphs})
    # whatever a class raises that is not made for copies: FSDP, locks, handles
    except Exception:  # noqa: BLE001
        return None
    # computing in less than float32 would hide what the laws measure
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in twin.parameters()):
        twin.float()
    return twin


class Snapshot:
    """The attributes, buffers and modes of a module, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        containers: list[Any] = []
        for part in module.modules():
            own = vars(part)
            held = [value for name, value in own.items() if name not in OF_EVERY_MODULE]
            containers += [own, part._buffers, part._parameters]
            containers += [value for value in held if isinstance(value, (list, dict))]
        self._containers = [(values, copy.copy(values)) for values in containers]
        self._buffers = [(b, b.detach().clone()) for b in module.buffers()]

    def restore(self) -> None:
        """Put everything back."""
        for values, before in self._containers:
            if isinstance(values, list):
                values[:] = before
            else:
                values.clear()
                values.update(before)
        for buffer, value in self._buffers:
            if buffer.shape != value.shape or not torch.equal(buffer, value):
                buffer.data = value.clone()  # a graph may hold what is unchanged


def set_modes(module: nn.Module, training: Sequence[bool]) -> None:
    """Set the training mode of every part; none is evaluation. torch's own dropout is off."""
    for i, part in enumerate(module.modules()):
        part.training = bool(training) and training[i]
        if isinstance(part, nn.RNNBase) and training:
            part.dropout = 0.0  # a random number generator inside the operator


def is_sharded(module: nn.Module) -> bool:
    """Whether weights are spread over ranks: such a module cannot be called part by part."""
    # by name: importing DTensor takes longer than all of throughtime
    kinds = {*map(type, (*module.parameters(), *module.modules()))}
    return any(b.__name__ in ("DTensor", "FSDPModule") for kind in kinds for b in kind.__mro__)


def weight_of(module: nn.Module) -> Tensor | None:
    """A weight of a module; None without any."""
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def random_normal(shape: Sequence[int], seed: int) -> Tensor:
    """Standard normal numbers on the host, whatever the default device and dtype are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def sample_inputs(
    x: Tensor, lanes: int, steps: int = STEPS, *, scale: float = 0.0, weight: Tensor | None = None
) -> Tensor:
    """Example inputs for any number of lanes and steps, all rows different if possible.

    Rows are drawn from those of `x` `(T, B, ...)`; numbers get noise, tokens stay what they are.
    With a `scale` they are normal numbers of that deviation instead, in the dtype of a `weight`.
    """
    rows = x.detach().flatten(0, 1)
    if not x.is_floating_point():
        rows = rows.unique(dim=0)
    order = random_normal((steps * lanes,), 0).argsort() % len(rows)
    sample = rows[order.to(rows.device)].unflatten(0, (steps, lanes))
    if not x.is_floating_point():
        return sample
    sample = sample.nan_to_num(0.0, 0.0, 0.0)
    noise, spread = random_normal(sample.shape, 3).to(sample), sample.std()
    sample = noise * scale if scale else sample + noise * (spread * 0.5 if spread > 0 else 1)
    return sample if weight is None else sample.to(weight.dtype)


def reach_of(module: nn.Module) -> int:
    """The past steps that convolutions need, if time is the longest dimension of their kernels."""
    return sum(
        max((size - 1) * by for size, by in zip(part.kernel_size, part.dilation, strict=True))
        for part in module.modules()
        if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    )


def changed_inputs(x: Tensor, step: int, lane: int) -> Tensor:
    """The inputs with another row at one step of one lane."""
    other, row = x.clone(), x[step, lane]
    if x.is_floating_point():
        other[step, lane] = row * -1.5 + 0.7
        return other
    different = [o for o in x.flatten(0, 1).unique(dim=0) if not torch.equal(o, row)]
    other[step, lane] = different[0] if different else (row == 0).to(x.dtype)
    return other


def perturb(module: nn.Module) -> None:
    """Add noise to all weights and buffers: a layer that starts at zero hides what is below it.

    Weights get noise of their own size, at least .1, and stay positive where all of them were, as
    under a root. Biases become positive, since a ReLU hides negative ones; buffers keep their zeros
    and signs.
    """
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            if p.is_floating_point() and p.numel():
                spread = max(0.1, float(p.square().mean().sqrt()))
                is_positive = p.dim() == 1 or bool((p > 0).all())
                p.add_(random_normal(p.shape, i).to(p) * spread)
                p.copy_(p.abs() if is_positive else p)
        for i, b in enumerate(module.buffers()):
            if b.is_floating_point():
                b.mul_(1 + 0.1 * random_normal(b.shape, i).to(b).clamp(-3, 3))
