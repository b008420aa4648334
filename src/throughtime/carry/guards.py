"""What must stay as it was for a prepared computation to be that of a net.

A fused update does not call the forward of a module, so no hook of it runs.
Guards say whether a module is still what it was: its class, its children, its hooks, the code and
the names that its forward uses; and whether torch itself observes or changes what modules compute.
"""

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _profiler_enabled as profiler_enabled  # as torch's optimizers do
from torch.nn.modules import module as torch_modules

from throughtime.kernels.dispatch import active_torch_modes

# plain attributes of a recurrent layer, which the user may write to
_SETTINGS = ("mode", "input_size", "hidden_size", "proj_size", "num_layers", "bias", "batch_first")
_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_hooks = itemgetter(*_KINDS)
_GLOBAL_HOOKS = [getattr(torch_modules, "_global" + kind) for kind in _KINDS]


class Guards:
    """What was read, which must stay the same objects."""

    def __init__(self) -> None:
        self._values: dict[tuple[Callable[[Any], Any], Any], Any] = {}

    def read(self, get: Callable[[Any], Any], key: Any) -> Any:
        """What a function returns, which must stay the same object."""
        self._values[get, key] = value = get(key)
        return value

    def hold(self) -> bool:
        """Whether all is as it was."""
        for (get, key), value in self._values.items():  # noqa: SIM110  # a generator takes longer
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
        modules = (*module.modules(),)
        self._guards = guards or Guards()
        own = self._own = Guards()
        # of all: an empty container may be filled later
        self._children = [(m._modules, [*m._modules.items()]) for m in modules]
        self._hooks = [(vars(m), [*filter(_is_own, _listed(vars(m)))]) for m in modules]
        for m in modules:
            own.read(attrgetter("forward"), own.read(type, m))
            for name in _SETTINGS if isinstance(m, nn.RNNBase) else ():
                own.read(vars(m).get, name)

    def hold(self, net: nn.Module) -> bool:
        """Whether all is as it was, and nothing observes a call: no mode of torch, no hook.

        Args:
            net: that carries the module.
        """
        if torch_observes() or modified(net.__dict__):
            return False
        for own, hooks in self._hooks:  # as `modified`, which would be a call in every update
            if "forward" in own or ((hooks or any(_hooks(own))) and _listed(own) != hooks):
                return False
        return self._own.hold() and self.is_same()

    def is_same(self) -> bool:
        """Whether no module was replaced, and the forward would be read as it was."""
        for children, before in self._children:
            if [*children.items()] != before:
                return False
        return self._guards.hold()


def modified(instance: dict[str, Any]) -> bool:
    """Whether a module, by its `__dict__`, has hooks or another forward than that of its class."""
    return any(_hooks(instance)) or "forward" in instance


def _listed(instance: dict[str, Any]) -> list[Any]:
    return [hook for kind in _hooks(instance) for hook in kind.values()]


def _is_own(hook: Any) -> bool:
    """Whether a hook is that of an adapter."""
    function = getattr(hook, "func", hook)
    return type(getattr(function, "__self__", function)).__module__.startswith("throughtime.carry.")
