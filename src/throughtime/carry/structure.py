"""What a module's forward computes, by its code: front, recurrent layers, tail.

A fused update and an exported file do not call the forward of a module. So it must be certain what
a call would do, for any inputs and at every later update. A trial cannot show that: a forward may
count its calls, or branch on the values of its inputs. Here Python runs the code of `forward` with
symbols, as `torch.fx` does. In `torch.fx` the module and the global names are real: the code may
write attributes, draw random numbers or read flags, the trace does not show it, and all threads run
modules that are patched. Of the 28 forwards in the tests that must be refused, its trace shows
nothing in 8: they read or write a global or a closure, draw numbers, enter autocast, print a dtype
or have a `__call__` of their own. Here these are symbols as well, and what a symbol does not have
is refused: the net is then run as it is. A symbol has calls of layers and of modules of torch.nn
one on another, a list of functions and methods, plain attributes, `nn.ModuleList`, methods of the
user's.

What was read on the way is kept as guards: submodules, plain attributes such as `training`, global
names and the functions themselves. The structure is valid for as long as they are the same objects.
`ModuleGuards` adds classes, children and hooks, for no hook runs where no forward is called; and
whether torch itself observes or changes what modules compute.
"""

import dis
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, itemgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled as profiler_enabled  # as torch's optimizers do
from torch.nn import functional
from torch.nn.modules import module as torch_modules

from throughtime.carry._calls import LayerAdapter, ModuleAdapter
from throughtime.carry.carried import Carried
from throughtime.carry.layers import ChainAdapter, StatelessAdapter
from throughtime.kernels.dispatch import active_torch_modes
from throughtime.state import State

# plain attributes of a recurrent layer, which the user may write to
_settings = itemgetter(
    "mode", "input_size", "hidden_size", "proj_size", "num_layers", "bias", "batch_first"
)
_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_hooks = itemgetter(*_KINDS)
_GLOBAL_HOOKS = [getattr(torch_modules, "_global" + kind) for kind in _KINDS]
# of classes whose subclasses may compute something else
MODULES = ("torch.nn.modules.rnn", "throughtime.nn.layers")
PLAIN = {int, float, str, bool, type(None)}
# Of tensors, torch and torch.nn.functional: none is random or has a state
NAMES = re.compile(
    "transpose|permute|contiguous|view|reshape|flatten|unsqueeze|squeeze|relu|tanh|sigmoid"
    "|log_softmax|softmax|gelu|elu|silu|leaky_relu"
)
FUNCTIONS = {
    getattr(owner, name)
    for owner in (torch, functional)
    for name in dir(owner)
    if NAMES.fullmatch(name)
}
NUMBERS = re.compile("shape|device|dtype|size|new_zeros")
BUILTINS = {kind.__name__: kind for kind in (enumerate, len, range, tuple, zip)}
# What a symbol does not notice: writes, handlers that hide a refusal, code with other globals
UNNOTICED = re.compile("(STORE|DELETE)_(ATTR|GLOBAL)|PUSH_EXC_INFO|MAKE_FUNCTION")
_calls = attrgetter("__call__", "__getattr__", "__getattribute__")


class Guards(dict[Any, Any]):
    """What was read, which must stay the same objects."""

    def read(self, get: Callable[[Any], Any], key: Any) -> Any:
        """What a function returns, which must stay the same object."""
        self[get, key] = value = get(key)
        return value

    def hold(self) -> bool:
        """Whether all is as it was."""
        for (get, key), value in self.items():  # noqa: SIM110  # a generator takes longer
            if get(key) is not value:
                return False
        return True


def torch_observes() -> bool:
    """Whether modes, transforms, profilers or global hooks of torch would see a call of a module.

    Autocast, which changes what it computes, and the detection of anomalies count as well.
    """
    return (
        active_torch_modes() is not None
        or torch.is_anomaly_enabled()
        or torch.is_autocast_enabled("cpu")
        or profiler_enabled()
        or any(_GLOBAL_HOOKS)
    )


class ModuleGuards:
    """A module and all modules in it, as they are now: classes, children, hooks, settings.

    Args:
        module: of a carried net. The net itself is not kept: it may own these guards.
        guards: of what was read in its forward.
    """

    def __init__(self, module: nn.Module, guards: Guards | None = None) -> None:
        self._module, self._guards, self._before = module, guards or Guards(), _snapshot(module)
        self._is_plain = all(
            own is None and all(map(_is_own, hooks)) for own, hooks, *_ in self._before
        )

    def hold(self, net: nn.Module) -> bool:
        """Whether all is as it was, and nothing observes a call: no mode of torch, no hook.

        Args:
            net: that carries the module.
        """
        return (
            self._is_plain
            and not torch_observes()
            and not modified(net.__dict__)
            and _snapshot(self._module) == self._before
            and self._guards.hold()
        )


def _snapshot(module: nn.Module) -> list[list[Any]]:
    """Of each module in one: its own forward, hooks, class, children and settings."""
    rows: list[list[Any]] = []
    for m in module.modules():
        own, kind = vars(m), type(m)
        held = _hooks(own)
        hooks = [hook for each in held for hook in each.values()] if any(held) else ()
        settings = _settings(own) if isinstance(m, nn.RNNBase) else ()
        rows.append(
            [own.get("forward"), hooks, kind, kind.forward, [*own["_modules"].items()], settings]
        )
    return rows


def modified(instance: dict[str, Any]) -> bool:
    """Whether a module, by its `__dict__`, has hooks or another forward than that of its class."""
    return any(_hooks(instance)) or "forward" in instance


def _is_own(hook: Any) -> bool:
    """Whether a hook is that of an adapter."""
    home = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return home.startswith("throughtime.carry.")


class UnknownError(ValueError):
    """A forward does something that this module does not understand; the text names what."""


class TensorCall(NamedTuple):
    """A call on a tensor: of a module, a function of torch, or a method of `Tensor`."""

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """The result for a tensor."""
        return self.target(x, *self.args, **self.kwargs)


# Operations before and after layers
Around: TypeAlias = tuple[Sequence[TensorCall], Sequence[TensorCall]]


class Structure(NamedTuple):
    """A net of recurrent layers and operations on their inputs and outputs, one on another.

    Attributes:
        operations: from the inputs of the net to its outputs, those of layers among them.
        layers: the recurrent layers, in order.
        argument: whether the state of the net is that of its only layer, or those of several in
            order, and not a dict.
        guards: for how long this is valid.
    """

    operations: tuple[TensorCall, ...]
    layers: tuple[nn.RNNBase, ...]
    argument: bool
    guards: Guards

    def around_layers(self) -> Around | None:
        """The operations before and after the layers; None if others stand between layers."""
        first = self.operations.index(TensorCall(self.layers[0]))
        stop = first + len(self.layers)
        if self.operations[first:stop] != (*map(TensorCall, self.layers),):
            return None
        return self.operations[:first], self.operations[stop:]


def structure_of(net: Carried) -> Structure:
    """The structure of a net, made by `tt.carry` and prepared.

    Raises:
        UnknownError: the net has other parts, or its forward may do something else; the text names
            what is in the way.
    """
    adapter = net.adapter
    if isinstance(adapter, ChainAdapter) and isinstance(net.module, nn.Sequential):
        return _read_chain(adapter)
    if isinstance(adapter, LayerAdapter):
        return _structure([TensorCall(net.module)], Guards(), True)
    takes_state = adapter.takes_state if isinstance(adapter, ModuleAdapter) else None
    if takes_state is None:
        raise UnknownError(
            f"the state of {type(net.module).__name__}, which is not that of its layers alone,"
        )
    try:
        return _read_forward(net.module, takes_state=takes_state)
    except Exception as error:  # of any kind: a symbol does not have what a tensor has
        if isinstance(error, UnknownError) and error.args:
            raise
        raise UnknownError(f"the code of {type(net.module).__name__}.forward") from error


def layer_states(net: Carried, structure: Structure, state: State) -> list[State]:
    """The state of each layer of a structure, in order, in a state of its net.

    Raises:
        LookupError, TypeError: the state is another one.
    """
    if structure.argument:
        return [state] if len(structure.layers) == 1 else [*state]
    names = {child: name for name, child in net.module.named_modules()}
    return [state[names[layer]] for layer in structure.layers]


def _read_chain(adapter: ChainAdapter) -> Structure:
    """The structure of an `nn.Sequential`."""
    guards, operations = Guards(), list[TensorCall]()
    if (*adapter.module._modules.values(),) != adapter.children:
        raise UnknownError("a module that was replaced after tt.carry")
    for name, link in adapter.links.items():
        is_layer = isinstance(link, LayerAdapter) and isinstance(link.module, nn.RNNBase)
        if not (is_layer or isinstance(link, StatelessAdapter)):
            raise UnknownError(
                f"'{name}', a {type(link.module).__name__}, with a state of its own,"
            )
        if not _is_identity(link.module, guards):
            operations.append(TensorCall(link.module))
    return _structure(operations, guards)


def _read_forward(module: nn.Module, *, takes_state: bool) -> Structure:
    """The structure of a module by the code of its forward.

    Args:
        module: its forward takes the inputs, and as the second argument the state, if it
            `takes_state`; then it returns outputs and state. Otherwise hooks set the states of its
            layers, and it returns outputs.
        takes_state: see above.
    """
    states = [_layer_state(m) for m in module.modules() if isinstance(m, nn.RNNBase)]
    single = len(states) == 1
    state = states[0] if single else tuple(states)
    reader = _Reader(iter(states) if takes_state else repeat(None))
    result = reader.run(module, "forward", reader.flow, *[state] * takes_state)
    flow, after = result if takes_state else (result, ())
    leaving = [after] if single else [*after]
    if flow is not reader.flow or (takes_state and leaving != reader.leaving):
        raise UnknownError(f"what {type(module).__name__}.forward returns")
    return _structure(reader.operations, reader.guards, takes_state)


def _structure(operations: list[TensorCall], guards: Guards, argument: bool = False) -> Structure:
    """The structure of operations, if the layers are different ones that run forward in time."""
    layers = [op.target for op in operations if isinstance(op.target, nn.RNNBase)]
    if not layers:
        raise UnknownError("a net without an nn.LSTM, nn.GRU or nn.RNN")
    for layer in layers:
        if layers.count(layer) > 1:
            raise UnknownError(f"a {type(layer).__name__} that is called twice")
        if type(layer).__module__ not in MODULES or layer.bidirectional:
            raise UnknownError(f"a {type(layer).__name__}")
    return Structure(tuple(operations), tuple(layers), argument, guards)


def _refuse(*_: Any, **__: Any) -> Any:
    raise UnknownError


class _Symbol:
    """What a forward gets for a tensor, a module or a module of Python.

    Args:
        read: the value of an attribute.
        call: the result of a call.
    """

    def __init__(self, read: Any = _refuse, call: Any = _refuse) -> None:
        self.__read, self.__call = read, call

    def __getattr__(self, name: str) -> Any:
        return self.__read(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__call(*args, **kwargs)

    # without these, Python has an answer of its own
    __bool__ = __eq__ = __repr__ = _refuse


class _Number(_Symbol):
    """A size, device or type that depends on the inputs, or zeros made with such."""

    def __getattr__(self, name: str) -> Any:
        return self if name in ("to", "type_as") else _refuse()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    __getitem__ = __call__

    def __iter__(self) -> Any:
        """Those of `(T, B, D)`: a trial of consumers refuses what has others."""
        return iter([self] * 3)


_NUMBER = _Number()


class _Reader:
    """Runs the forward of a module with symbols.

    Args:
        states: an iterator: for each layer in order the state that it has to get, None for zeros.

    Attributes:
        operations: so far, each on the results of the one before it.
        flow: the symbol of the last results.
        leaving: of each layer the state that it returned.
    """

    def __init__(self, states: Any) -> None:
        self.guards, self.operations = Guards(), list[TensorCall]()
        self._states, self.leaving = states, list[Any]()
        self._advance()

    def run(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """The result of a method of a module of the user's."""
        kind, read = type(module), self.guards.read
        function = read(attrgetter(name), kind)
        code = read(attrgetter("__code__"), function)
        defaults = read(attrgetter("__defaults__"), function)
        is_known = (
            function is inspect.getattr_static(kind, name)
            and name not in vars(module)
            and _calls(kind) == _calls(nn.Module)
            and {*map(type, defaults or ())} <= PLAIN
        )
        names, values = {"__builtins__": BUILTINS}, function.__globals__
        for operation in dis.get_instructions(code):
            key = operation.argval
            if not is_known or UNNOTICED.match(operation.opname) or str(key).startswith("__"):
                raise UnknownError
            if operation.opname == "LOAD_GLOBAL" and key in values:
                names[key] = self._known(values, key)
        # a copy: Python writes what it learns about the names into the code. Of a closure, and of
        # defaults by keyword, nothing is passed on.
        twin = FunctionType(code.replace(), names, None, defaults)
        return twin(self._symbol(module), *args, **kwargs)

    def _then(self, target: Any, x: object, *args: Any, **kwargs: Any) -> Any:
        """The results of one more operation; a flag among its arguments may mean in place."""
        if x is not self.flow or not {*map(type, (*args, *kwargs.values()))} <= PLAIN - {bool}:
            raise UnknownError
        self.operations.append(TensorCall(target, args, kwargs))
        return self._advance()

    def _advance(self) -> _Symbol:
        """The results of the last operation, which alone have operations."""

        def read(name: str) -> Any:
            if NAMES.fullmatch(name):
                return partial(self._then, getattr(Tensor, name), flow)
            return _NUMBER if NUMBERS.fullmatch(name) else _refuse()

        self.flow = flow = _Symbol(read)
        return flow

    def _symbol(self, module: nn.Module | None) -> Any:
        """What a submodule is for a forward."""
        if type(module) is nn.ModuleList:
            return tuple(map(self._symbol, module._modules.values()))
        if module is None:
            return None
        return _Symbol(partial(self._attribute, module), partial(self._call, module))

    def _attribute(self, module: nn.Module, name: str) -> Any:
        """What `module.name` is for a forward."""
        values, kind = vars(module), type(module)
        value = self.guards.read(values.get, name)
        if name in values and type(value) in PLAIN and not hasattr(kind, name):
            return value
        if name in values or hasattr(nn.Module, name):
            raise UnknownError
        if hasattr(kind, name):
            return partial(self.run, module, name)
        return self._symbol(module._modules[name])

    def _known(self, values: Mapping[str, Any], name: str) -> Any:
        """What a global name, or one in a module, is for a forward."""
        value = self.guards.read(values.get, name)
        if isinstance(value, ModuleType):
            return _Symbol(partial(self._known, vars(value)))
        if value is torch.zeros or isinstance(value, torch.dtype):
            return _NUMBER
        return partial(self._then, value) if value in FUNCTIONS else _refuse()

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The result of calling a submodule."""
        if isinstance(module, nn.RNNBase):
            return self._call_layer(module, *args, **kwargs)
        if any(map(is_foreign, module.modules())):
            return self.run(module, "forward", *args, **kwargs)
        (x,) = (*args, *kwargs.values())
        return x if _is_identity(module, self.guards) else self._then(module, x)

    def _call_layer(self, layer: nn.RNNBase, x: Any, hx: Any = None) -> Any:
        leaves = hx if type(hx) is tuple else (hx,)
        if (None if all(leaf is _NUMBER for leaf in leaves) else hx,) != (next(self._states),):
            raise UnknownError
        self.leaving.append(_layer_state(layer))
        return self._then(layer, x), self.leaving[-1]


def _layer_state(layer: nn.RNNBase) -> Any:
    return (_Symbol(), _Symbol()) if isinstance(layer, nn.LSTM) else _Symbol()


def _is_identity(module: nn.Module, guards: Guards) -> bool:
    """Whether a module returns its inputs: dropout does, unless it is active."""
    if type(module).__module__ != "torch.nn.modules.dropout":
        return type(module) is nn.Identity
    get = vars(module).get
    return not (guards.read(get, "training") and guards.read(get, "p"))


def is_foreign(module: nn.Module) -> bool:
    """Whether a module is none of torch.nn."""
    return not type(module).__module__.startswith("torch.nn.modules.")
