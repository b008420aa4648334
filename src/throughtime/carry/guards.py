"""What must stay as it was for a prepared computation to be that of a net.

A fused update and a prepared step do not call the forward of a module, so no hook of it runs.
Guards say whether a module is still what it was: its class, its children, its hooks, the code and
the names that its forward uses; and whether torch itself observes or changes what modules compute.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._C._autograd import _profiler_enabled as profiler_enabled  # as torch's optimizers do
from torch.nn.modules import module as torch_modules

from throughtime.kernels.dispatch import active_torch_modes

Guard: TypeAlias = tuple[Mapping[str, Any], str, object]
_content = attrgetter("co_code", "co_names", "co_varnames", "co_consts")  # of a code object


@dataclass
class Guards:
    """What must stay as it was: entries of dicts, and the functions of classes."""

    entries: dict[tuple[int, str], Guard] = field(default_factory=dict[tuple[int, str], Guard])
    methods: dict[tuple[nn.Module, str], tuple[FunctionType, CodeType]] = field(
        default_factory=dict[tuple[nn.Module, str], tuple[FunctionType, CodeType]]
    )

    def entry(self, values: Mapping[str, Any], key: str) -> Any:
        """The value of a key, which must stay the same object."""
        self.entries[id(values), key] = values, key, values[key]
        return values[key]

    def hold(self) -> bool:
        """Whether all is as it was."""
        for values, key, value in self.entries.values():
            if values.get(key) is not value:
                return False
        for (module, name), (function, code) in self.methods.items():
            # tools that reload modules replace the code of a function
            if getattr(type(module), name) is not function or function.__code__ is not code:
                return False
        return True


# plain attributes of a recurrent layer, which the user may write to
_settings = itemgetter(
    "mode", "input_size", "hidden_size", "proj_size", "num_layers", "bias", "batch_first"
)
_hooks = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
Hooks: TypeAlias = tuple[tuple[object, ...], ...]
NO_HOOKS: Hooks = ((), (), (), ())
_GLOBAL_HOOKS = (
    torch_modules._global_forward_hooks,
    torch_modules._global_forward_pre_hooks,
    torch_modules._global_backward_hooks,
    torch_modules._global_backward_pre_hooks,
)


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
        source: of what was read from the source of its forward.

    Attributes:
        modules: the module and those in it.
    """

    def __init__(self, module: nn.Module, source: Guards | None = None) -> None:
        self.modules = (*module.modules(),)
        self._source = source if source is not None and (source.entries or source.methods) else None
        # an empty container may be filled later
        self._children = [
            (m._modules, [*m._modules.values()])
            for m in self.modules
            if m._modules or not m._parameters
        ]
        self._traits = [
            (m, m.__dict__, type(m), type(m).forward, _own_hooks(m)) for m in self.modules
        ]
        self._layers = [
            (m.__dict__, _settings(m.__dict__)) for m in self.modules if isinstance(m, nn.RNNBase)
        ]

    def hold(self, net: nn.Module) -> bool:
        """Whether all is as it was, and nothing observes a call: no mode of torch, no hook.

        Args:
            net: that carries the module.
        """
        if torch_observes() or modified(net.__dict__):
            return False
        # as `modified` and `is_same`, each of which would be a call in every update
        for module, own, kind, forward, hooks in self._traits:
            if type(module) is not kind or kind.forward is not forward:
                return False
            now = _hooks(own)
            if any(now) if hooks is NO_HOOKS else _values(now) != hooks:
                return False
            if "forward" in own and not _has_class_forward(own):
                return False
        for children, before in self._children:
            if [*children.values()] != before:
                return False
        for own, settings in self._layers:
            if _settings(own) != settings:
                return False
        return self._source is None or self._source.hold()

    def is_same(self) -> bool:
        """Whether no module was replaced, and the source would be read as it was."""
        return all([*children.values()] == before for children, before in self._children) and (
            self._source is None or self._source.hold()
        )


def modified(instance: dict[str, Any]) -> bool:
    """Whether a module, by its `__dict__`, has hooks or another forward than that of its class."""
    return any(_hooks(instance)) or ("forward" in instance and not _has_class_forward(instance))


def _values(hooks: Sequence[dict[int, object]]) -> Hooks:
    return tuple([tuple(kind.values()) for kind in hooks])


def _own_hooks(module: nn.Module) -> Hooks:
    """The hooks of a module that are those of its adapter."""

    def is_own(hook: Any) -> bool:
        function = getattr(hook, "func", hook)
        owner = getattr(function, "__self__", function)
        return type(owner).__module__.startswith("throughtime.carry.")

    own = tuple([tuple(filter(is_own, kind)) for kind in _values(_hooks(module.__dict__))])
    return own if any(own) else NO_HOOKS


def _has_class_forward(instance: dict[str, Any]) -> bool:
    """Whether the forward of an instance is that of its class, as in a copy of a module."""
    forward = instance["forward"]
    if not isinstance(forward, MethodType):
        return False
    module = forward.__self__
    return (
        isinstance(module, nn.Module)
        and module.__dict__ is instance
        and forward.__func__ is type(module).forward
    )


def definition_of(function: FunctionType) -> ast.FunctionDef | None:
    """The source of a function if it is what the function runs; a file may have changed since."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return None
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return None
    # calls of what a module imports compile to other instructions
    imported = [name for name, value in function.__globals__.items() if inspect.ismodule(value)]
    imports = [ast.Import([ast.alias(name)]) for name in imported]
    for before in ([], imports):
        whole = ast.fix_missing_locations(ast.Module([*before, definition], []))
        constants = compile(whole, "<forward>", "exec", dont_inherit=True).co_consts
        codes = [value for value in constants if isinstance(value, CodeType)]
        if _content(function.__code__) in map(_content, codes):
            return definition
    return None
