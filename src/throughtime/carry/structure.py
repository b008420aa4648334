"""What a module's forward computes, read from its source: front, recurrent layers, tail.

A fused update and an exported file do not call the forward of a module. So it must be certain what
a call would do, for any inputs and at every later update. A trial cannot show that: a forward may
count its calls, or branch on the values of its inputs. This module evaluates the source of
`forward` with a symbol in place of the inputs, and accepts only what it understands: assignments to
local names, calls of layers and of other modules of torch.nn, functions and methods on a list,
conditions whose value is known. Everything else (arithmetic on tensors, loops over steps,
attributes that are set, `with`, in-place operations) is refused, and the net is run as it is.

What was read on the way is kept as guards: submodules, plain attributes such as `training`, global
names and the functions themselves. The structure is valid for as long as they are the same objects.
"""

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from throughtime.carry.carried import Carried
from throughtime.carry.guards import Guards, definition_of
from throughtime.carry.layers import ChainAdapter, LayerAdapter, StatelessAdapter
from throughtime.nn.layers import GRU, LSTM, RNN
from throughtime.state import State

LAYERS = (nn.LSTM, nn.GRU, nn.RNN, LSTM, GRU, RNN)  # a subclass may compute something else
PLAIN = (int, float, bool, str, type(None))
ACTIVATIONS = ("relu", "tanh", "sigmoid", "log_softmax", "softmax")  # of torch, and methods
FUNCTIONS: set[object] = {
    *(getattr(torch, name) for name in ACTIVATIONS),
    *(getattr(functional, name) for name in (*ACTIVATIONS, "gelu", "elu", "silu", "leaky_relu")),
}
METHODS = {
    *("transpose", "permute", "contiguous", "view", "reshape", "flatten", "unsqueeze", "squeeze"),
    *ACTIVATIONS,
}
SIZES = {"shape", "device", "dtype", "size", "dim"}


class UnknownError(Exception):
    """A forward does something that this module does not understand; the text names what."""


class TensorCall(NamedTuple):
    """A call on a tensor: of a module, a function, or a method by name."""

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """The result for a tensor."""
        call = getattr(x, self.target) if isinstance(self.target, str) else self.target
        first = () if isinstance(self.target, str) else (x,)
        return call(*first, *self.args, **self.kwargs)


@dataclass(frozen=True, eq=False)
class Flow:
    """The inputs, after some operations."""

    operations: tuple[TensorCall, ...] = ()

    def then(self, operation: TensorCall) -> "Flow":
        """After one more."""
        return Flow((*self.operations, operation))


class StateArgument(NamedTuple):
    """The state that the forward gets, or the part of it at a path."""

    path: tuple[int, ...] = ()


class LayerState(NamedTuple):
    """The state that a layer returns, or a leaf of it."""

    layer: nn.Module
    leaf: int | None = None


class Opaque(NamedTuple):
    """A number, shape, device or type that depends on the inputs, or zeros made with such."""

    zeros: bool = False


# Operations before and after layers
Around: TypeAlias = tuple[tuple[TensorCall, ...], tuple[TensorCall, ...]]


class Structure(NamedTuple):
    """A net of recurrent layers and operations on their inputs and outputs, one on another.

    Attributes:
        operations: from the inputs of the net to its outputs, those of layers among them.
        paths: of each layer the path to its state in that of the net; empty for hooks.
        guards: for how long this is valid.
    """

    operations: tuple[TensorCall, ...]
    paths: tuple[tuple[int, ...], ...]
    guards: Guards

    @property
    def layers(self) -> tuple[nn.RNNBase, ...]:
        """The recurrent layers, in order."""
        return tuple(op.target for op in self.operations if isinstance(op.target, nn.RNNBase))

    def around_layers(self) -> Around | None:
        """The operations before and after the layers; None if others stand between layers."""
        flags = [isinstance(op.target, nn.RNNBase) for op in self.operations]
        first, stop = flags.index(True), len(flags) - flags[::-1].index(True)
        if not all(flags[first:stop]):
            return None
        return self.operations[:first], self.operations[stop:]


def structure_of(net: Carried, inputs: Tensor) -> Structure | None:
    """The structure of a net; None for one of other parts, or whose forward may do something else.

    Args:
        net: made by `tt.carry`, and prepared.
        inputs: `(T, B, ...)`, of which a step is looked at.
    """
    try:
        return require_structure(net, inputs)
    except UnknownError:
        return None


def require_structure(net: Carried, inputs: Tensor) -> Structure:
    """As `structure_of`.

    Raises:
        UnknownError: the net has none; the text names what is in the way.
    """
    if isinstance(net.adapter, ChainAdapter):
        return _read_chain(net.adapter)
    if isinstance(net.adapter, LayerAdapter):
        return _structure([TensorCall(net.module)], Guards())
    arguments = net.adapter.forward_arguments(inputs[:1], ())
    name = type(net.module).__name__
    if arguments is None:
        raise UnknownError(f"the state of {name}, which is not that of its layers alone,")
    try:
        return _read_structure(net.module, takes_state=len(arguments) == 2)
    except (UnknownError, KeyError, TypeError, ValueError) as error:
        text = str(error) if isinstance(error, UnknownError) else ""
        raise UnknownError(text or f"what {name}.forward makes of its arguments") from error


def layer_states(net: Carried, structure: Structure, state: State) -> list[State]:
    """The state of each layer of a structure, in order, in a state of its net.

    Raises:
        LookupError, TypeError: the state is another one.
    """
    if isinstance(net.adapter, LayerAdapter):
        return [state]
    if isinstance(net.adapter, ChainAdapter) or not structure.paths:
        names = {child: name for name, child in net.module.named_modules()}
        return [state[names[layer]] for layer in structure.layers]
    return [reduce(getitem, path, state) for path in structure.paths]


def _read_chain(adapter: ChainAdapter) -> Structure:
    """The structure of an `nn.Sequential`."""
    guards, operations = Guards(), list[TensorCall]()
    if (*adapter.module._modules.values(),) != adapter.children:
        raise UnknownError("a module that was replaced after tt.carry")
    for name, link in adapter.links.items():
        if isinstance(link, StatelessAdapter):
            if not is_identity(link.module, guards):
                operations.append(TensorCall(link.module))
        elif isinstance(link, LayerAdapter):
            operations.append(TensorCall(link.module))
        else:
            raise UnknownError(
                f"'{name}', a {type(link.module).__name__}, with a state of its own,"
            )
    return _structure(operations, guards)


def _read_structure(module: nn.Module, *, takes_state: bool) -> Structure:
    """The structure of a module by the source of its forward.

    Args:
        module: its forward takes the inputs, and as the second argument the state, if it
            `takes_state`; then it returns outputs and state. Otherwise hooks set the states of its
            layers, and it returns outputs.
        takes_state: see above.
    """
    reader = _Reader()
    arguments = (Flow(), StateArgument()) if takes_state else (Flow(),)
    result: Any = reader.call_forward(module, arguments, {})
    flow, after = result if takes_state else (result, ())
    if not isinstance(flow, Flow):
        raise UnknownError
    structure = _structure(flow.operations, reader.guards)
    if len(structure.layers) != len(reader.entering):
        raise UnknownError(f"a layer of {type(module).__name__} whose outputs go elsewhere")
    if not takes_state:
        return structure
    leaving = (after,) if len(structure.layers) == 1 else after
    paths = tuple((i,) if len(leaving) > 1 else () for i in range(len(leaving)))
    is_own = [reader.entering[layer] for layer in structure.layers] == [*paths] and [
        _whole_leaving(state) for state in leaving
    ] == [LayerState(layer) for layer in structure.layers]
    if not is_own:
        raise UnknownError(f"the state of {type(module).__name__}, not its layers' in order,")
    return structure._replace(paths=paths)


def _structure(operations: Sequence[TensorCall], guards: Guards) -> Structure:
    """The structure of operations, if the layers are different ones that run forward in time."""
    structure = Structure(tuple(operations), (), guards)
    layers = structure.layers
    if not layers:
        raise UnknownError("a net without an nn.LSTM, nn.GRU or nn.RNN")
    for i, layer in enumerate(layers):
        if layer in layers[:i]:
            raise UnknownError(f"a {type(layer).__name__} that is called twice")
        if type(layer) not in LAYERS or layer.bidirectional:
            raise UnknownError(f"a {type(layer).__name__}")
    return structure


def _whole_leaving(value: Any) -> Any:
    """The pair of both leaves of a layer as the state of the layer."""
    if isinstance(value, tuple) and not isinstance(value, LayerState):
        h, c = value
        if h == LayerState(h.layer, 0) and c == LayerState(h.layer, 1):
            return LayerState(h.layer)
    return value


class _Reader:
    """Evaluates the forward of a module with symbols for its arguments."""

    def __init__(self) -> None:
        self.guards = Guards()
        self.entering: dict[nn.Module, tuple[int, ...] | None] = {}  # of each layer that was called

    def call_forward(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of calling a module of the user's."""
        own = type(module)
        if own.__call__ is not nn.Module.__call__ or own.__getattr__ is not nn.Module.__getattr__:
            raise UnknownError
        if own.__getattribute__ is not object.__getattribute__ or "forward" in module.__dict__:
            raise UnknownError
        return self.call_method(module, "forward", args, kwargs)

    def call_method(
        self, module: nn.Module, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a method of a module of the user's."""
        function = getattr(type(module), name)
        if not isinstance(function, FunctionType) or function.__closure__:
            raise UnknownError
        self.guards.methods[module, name] = function, function.__code__
        names = inspect.signature(function).bind(module, *args, **kwargs)
        names.apply_defaults()
        definition = definition_of(function)
        if definition is None:
            raise UnknownError(f"{function.__qualname__}, whose source is not at hand,")
        return _Frame(self, function, dict(names.arguments)).run(definition.body)

    def call_module(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of calling any module."""
        if isinstance(module, nn.RNNBase):
            return self._call_layer(module, *args, **kwargs)
        if type(module).__module__.startswith("torch.nn.modules."):
            (flow,) = args
            if not isinstance(flow, Flow) or kwargs or any(map(is_foreign, module.modules())):
                raise UnknownError
            return flow if is_identity(module, self.guards) else flow.then(TensorCall(module))
        return self.call_forward(module, args, kwargs)

    def _call_layer(self, layer: nn.RNNBase, x: Any, hx: Any = None) -> Any:
        if not isinstance(x, Flow) or layer in self.entering:
            raise UnknownError
        if isinstance(hx, tuple) and not isinstance(hx, (StateArgument, Opaque)):
            first, second = hx
            if isinstance(first, StateArgument):
                if (first.path[-1], second.path) != (0, (*first.path[:-1], 1)):
                    raise UnknownError
                hx = StateArgument(first.path[:-1])
            elif first == second == Opaque(zeros=True):
                hx = None
        if hx == Opaque(zeros=True):
            hx = None
        if hx is not None and not isinstance(hx, StateArgument):
            raise UnknownError
        self.entering[layer] = None if hx is None else hx.path
        return x.then(TensorCall(layer)), LayerState(layer)


class _Frame:
    """One call of a function: its local names."""

    def __init__(self, reader: _Reader, function: FunctionType, names: dict[str, Any]) -> None:
        self._reader, self._function, self._names = reader, function, names

    def run(self, body: Sequence[ast.stmt]) -> Any:
        """The value that the statements return."""
        returned, value = self._statements(body)
        if not returned:
            raise UnknownError
        return value

    def _statements(self, body: Sequence[ast.stmt]) -> tuple[bool, Any]:
        for statement in body:
            try:
                returned, value = self._statement(statement)
            except (UnknownError, KeyError, TypeError, ValueError) as error:
                if isinstance(error, UnknownError) and error.args:
                    raise
                line = ast.unparse(statement).splitlines()[0]
                name = self._function.__qualname__.rpartition("<locals>.")[2]
                raise UnknownError(f"`{line}` in {name}") from error
            if returned:
                return True, value
        return False, None

    def _statement(self, statement: ast.stmt) -> tuple[bool, Any]:
        """Whether it returned, and the value."""
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case ast.Assign(targets=[target], value=value):
                self._assign(target, self._value(value))
            case ast.Return(value=value) if value is not None:
                return True, self._value(value)
            case ast.If(test=test, body=then, orelse=otherwise):
                return self._statements(then if self._known(test) else otherwise)
            case ast.For(target=target, iter=iterated, body=then, orelse=[]):
                for child in self._children(self._value(iterated)):
                    self._assign(target, child)
                    if self._statements(then)[0]:
                        raise UnknownError
            case _:
                raise UnknownError
        return False, None

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
            return
        if not isinstance(target, (ast.Tuple, ast.List)):
            raise UnknownError
        values = [_item(value, i) for i in range(len(target.elts))]
        if type(value) is tuple and len(value) != len(values):
            raise UnknownError
        for part, item in zip(target.elts, values, strict=True):
            self._assign(part, item)

    def _children(self, value: Any) -> list[nn.Module]:
        """The modules of an `nn.ModuleList`."""
        if type(value) is not nn.ModuleList:
            raise UnknownError
        return [self._reader.guards.entry(value._modules, name) for name in [*value._modules]]

    def _known(self, test: ast.expr) -> bool:
        """The value of a condition, which must not depend on a tensor."""
        match test:
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[right]):
                same = self._value(left) is self._value(right)
                return same is isinstance(op, ast.Is)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._known(operand)
            case ast.BoolOp(op=op, values=values):
                known = [self._known(value) for value in values]
                return all(known) if isinstance(op, ast.And) else any(known)
            case _:
                value = self._value(test)
                if not isinstance(value, PLAIN):
                    raise UnknownError
                return bool(value)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value) if isinstance(value, PLAIN):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
                return -number
            case ast.Name(id=name):
                if name in self._names:
                    return self._names[name]
                return self._global(self._reader.guards.entry(self._function.__globals__, name))
            case ast.Tuple(elts=parts):
                return tuple(self._value(part) for part in parts)
            case ast.IfExp(test=test, body=then, orelse=otherwise):
                return self._value(then if self._known(test) else otherwise)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self._value(owner), name)
            case ast.Subscript(value=owner, slice=index):
                return _item(self._value(owner), self._value(index))
            case ast.Call(func=function, args=args, keywords=keywords):
                named = {word.arg or "**": self._value(word.value) for word in keywords}
                return self._call(function, [self._value(arg) for arg in args], named)
            case _:
                raise UnknownError

    def _global(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and value.__name__.split(".")[0] == "torch":
            return value
        if value in FUNCTIONS:
            return value
        raise UnknownError

    def _attribute(self, owner: Any, name: str) -> Any:
        guards = self._reader.guards
        if isinstance(owner, ModuleType):
            value = guards.entry(vars(owner), name)
            known = isinstance(value, (ModuleType, torch.dtype)) or value is torch.zeros
            return value if known else self._global(value)
        if isinstance(owner, nn.Module) and not hasattr(type(owner), name):
            if name in owner._modules:
                return guards.entry(owner._modules, name)
            value = guards.entry(owner.__dict__, name)
            if isinstance(value, PLAIN):
                return value
        if isinstance(owner, Flow) and name in SIZES:
            return Opaque()
        raise UnknownError

    def _call(self, function: ast.expr, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(function, ast.Attribute):
            owner, name = self._value(function.value), function.attr
            if isinstance(owner, (Flow, Opaque)):
                return _tensor_method(owner, name, args, kwargs)
            method = getattr(type(owner), name, None)
            if isinstance(owner, nn.Module) and isinstance(method, FunctionType):
                if not is_foreign(owner):
                    raise UnknownError
                return self._reader.call_method(owner, name, args, kwargs)
        target = self._value(function)
        if isinstance(target, nn.Module):
            return self._reader.call_module(target, args, kwargs)
        if target is torch.zeros:
            return Opaque(zeros=True)
        (flow, *rest) = args
        if not isinstance(flow, Flow) or not _plain(rest, kwargs) or kwargs.get("inplace"):
            raise UnknownError
        return flow.then(TensorCall(target, tuple(rest), kwargs))


def _tensor_method(owner: Flow | Opaque, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a method of a tensor, or of a size."""
    if isinstance(owner, Opaque):
        if owner.zeros and name in {"to", "type_as"}:
            return owner
        raise UnknownError
    if name in SIZES or name == "new_zeros":
        return Opaque(zeros=name == "new_zeros")
    if name not in METHODS or not _plain(args, kwargs):
        raise UnknownError
    return owner.then(TensorCall(name, tuple(args), kwargs))


def _plain(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return all(isinstance(value, PLAIN) for value in (*args, *kwargs.values()))


def _item(value: Any, index: Any) -> Any:
    """An item of a tuple or of a state."""
    if type(index) is not int:
        raise UnknownError
    match value:
        case StateArgument(path=path):
            return StateArgument((*path, index))
        case LayerState(layer=layer, leaf=None):
            return LayerState(layer, index)
        case Opaque(zeros=False):
            return value
        case tuple() if not isinstance(value, (LayerState, Opaque)):
            return value[index]
        case _:
            raise UnknownError


def is_identity(module: nn.Module, guards: Guards) -> bool:
    """Whether a module returns its inputs: dropout does, unless it is active."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        values = module.__dict__
        return not (guards.entry(values, "training") and guards.entry(values, "p"))
    return type(module) is nn.Identity


def is_foreign(module: nn.Module) -> bool:
    """Whether a module is none of torch.nn."""
    return not type(module).__module__.startswith("torch.nn.modules.")
