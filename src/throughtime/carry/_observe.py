"""What one call of a module does to its submodules and attributes: where its state may be inside.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from throughtime.carry._adapter import is_state
from throughtime.carry._names import names_state, parameters_of
from throughtime.carry._ports import FlowPort, ParameterPort, Port, TorchPort

Key: TypeAlias = tuple[str, str]  # of an attribute: the path of its module, its name
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class PartCall(NamedTuple):
    """One call of a submodule."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


def observe(module: nn.Module, forward: Callable[[], Any]) -> dict[str, list[PartCall]]:
    """All calls of submodules during one call of `forward`, by name."""
    calls: dict[str, list[PartCall]] = {}

    def record(name: str, _: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls.setdefault(name, []).append(PartCall(args, kwargs, result))

    handles = [
        part.register_forward_hook(partial(record, name), with_kwargs=True)
        for name, part in module.named_modules()
        if name
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def inside(name: str, outer: str) -> bool:
    """Whether a submodule is another one, or in it."""
    return name == outer or name.startswith(f"{outer}.")


def torch_ports(
    module: nn.Module, calls: dict[str, list[PartCall]] | None, steps: int
) -> dict[str, Port]:
    """The recurrent layers and cells of torch.nn that ran once, or once for each step.

    All that the module has if `calls` are unknown. Layers that run over another dimension than
    time, and bidirectional ones, have no state that could be carried.
    """
    ports: dict[str, Port] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            ran = calls is None or _runs_over_time(part, calls.get(name, []), steps)
            if ran and not part.bidirectional:
                ports[name] = TorchPort(is_layer=True)
        elif isinstance(part, nn.RNNCellBase) and (
            calls is None or len(calls.get(name, [])) == steps
        ):
            ports[name] = TorchPort(is_layer=False)
    return ports


def _runs_over_time(layer: nn.RNNBase, calls: list[PartCall], steps: int) -> bool:
    if len(calls) != 1:
        return bool(calls)
    sequence = calls[0].args[0] if calls[0].args else calls[0].kwargs.get("input")
    if not isinstance(sequence, Tensor) or sequence.dim() != 3:
        return True
    return sequence.shape[int(layer.batch_first)] == steps


def flow_ports(calls: dict[str, list[PartCall]], steps: int) -> dict[str, Port]:
    """Submodules that receive, step after step, what they returned at the step before."""
    ports: dict[str, Port] = {}
    for name, of_part in calls.items():
        slots = _slots(of_part) if len(of_part) == steps > 1 else ()
        if slots:
            ports[name] = FlowPort(slots)
    return _outermost(ports)


def _slots(calls: list[PartCall]) -> tuple[tuple[int, int], ...]:
    """Positions of the arguments that are, at every call, a result of the call before."""
    received = [pytree.tree_leaves((call.args, call.kwargs)) for call in calls]
    returned = [pytree.tree_leaves(call.result) for call in calls]
    if len({len(leaves) for leaves in received}) > 1:
        return ()
    return tuple(
        (argument, item)
        for argument, leaf in enumerate(received[1])
        for item, result in enumerate(returned[0])
        if result is leaf
        and isinstance(received[0][argument], Tensor)
        and all(
            now[argument] is last[item]
            for now, last in zip(received[1:], returned[:-1], strict=True)
        )
    )


def parameter_ports(module: nn.Module, calls: dict[str, list[PartCall]]) -> dict[str, Port]:
    """Submodules of the user's that ran once, have an optional state and return `(y, state)`."""
    ports: dict[str, Port] = {}
    for name, (first, *others) in calls.items():
        part, result = module.get_submodule(name), first.result
        if others or isinstance(part, (*RECURRENT, torch.jit.ScriptModule)):
            continue
        if not (isinstance(result, tuple) and len(result) == 2 and is_state(result[1])):
            continue
        for position, p in enumerate(parameters_of(part.forward)):
            if position and p.default is None and names_state(p.name):
                ports[name] = ParameterPort(position, p.name)
                break
    return _outermost(ports)


def mirrors(
    ports: dict[str, Port], calls: dict[str, list[PartCall]], values: dict[Key, Any]
) -> tuple[Key, ...]:
    """The attributes in which a module keeps what its ports returned, detached or not."""
    returned = {
        leaf.data_ptr()
        for name, port in ports.items()
        for leaf in pytree.tree_leaves(port.leaving(calls[name][-1].result))
        if isinstance(leaf, Tensor)
    }

    def mirrors_state(value: Any) -> bool:
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        return any(leaf.data_ptr() in returned for leaf in leaves)

    return tuple(key for key, value in values.items() if mirrors_state(value))


def _outermost(ports: dict[str, Port]) -> dict[str, Port]:
    return {
        name: port
        for name, port in ports.items()
        if not any(other != name and inside(name, other) for other in ports)
    }


def attributes(module: nn.Module) -> dict[Key, Any]:
    """Plain attributes and buffers of all parts that could hold a state, lists as copies."""
    values: dict[Key, Any] = {}
    for name, part in module.named_modules():
        own = {k: v for k, v in vars(part).items() if k not in nn.Module().__dict__}
        for key, value in (own | dict(part._buffers)).items():
            if value is None or isinstance(value, (Tensor, tuple, list, dict)):
                values[name, key] = list(value) if isinstance(value, list) else value
    return values


def changed_attributes(before: dict[Key, Any], after: dict[Key, Any]) -> tuple[Key, ...]:
    """The attributes that hold other tensors than before."""

    def changed(key: Key) -> bool:
        new, old = pytree.tree_leaves(after[key]), pytree.tree_leaves(before.get(key))
        if not any(isinstance(leaf, Tensor) for leaf in new):
            return False
        return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))

    return tuple(key for key in after if changed(key))
