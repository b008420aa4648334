"""Which contract fits a module.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

import inspect
from collections.abc import Iterator, Mapping

from torch import nn

from throughtime import state as trees
from throughtime.carry._adapter import Contract, own_start
from throughtime.carry.chain import Chain, Stateless
from throughtime.carry.explicit import Explicit
from throughtime.carry.hooks import Hiding
from throughtime.carry.layers import RECURRENT, Cell, Layer, plain
from throughtime.errors import ModelError
from throughtime.state import State


def contract_of(module: nn.Module, batch_first: bool | None) -> Contract:
    """The contract that fits a module.

    A module that cannot be carried is refused with the reason.
    """
    layers = {name: m for name, m in module.named_modules() if isinstance(m, RECURRENT)}
    for name, layer in layers.items():
        if isinstance(layer, nn.RNNBase) and layer.bidirectional:
            raise ModelError(
                f"layer '{name or type(layer).__name__}' is bidirectional: its backward direction"
                " starts at the end of the recording, and a stream has none, so no state can be"
                " carried into it. Use bidirectional=False."
            )
    if isinstance(module, nn.RNNBase):
        return Layer(module)
    if isinstance(module, nn.RNNCellBase):
        return Cell(module)
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return _chain(module, batch_first)
    if own_start(module) is not None or _takes_state(module):
        return Explicit(module, _batch_first(layers, batch_first))
    if layers:
        return Hiding(module, layers, _batch_first(layers, batch_first))
    raise ModelError(
        f"{type(module).__name__} has no recurrent layer of torch.nn inside, and its forward takes"
        " no state: there is nothing to carry, or it is hidden where it cannot be reached. Let"
        " forward(x, state) return (y, state)."
    )


def leaf_names(contract: Contract, state: State, path: str = "") -> Iterator[str]:
    """The leaves of a state by name: `h` and `c` of torch's layers, a user module's own names for its own."""
    if isinstance(contract, (Layer, Cell)):
        yield from (f"{path}{name}" for name, _ in zip("hc", trees.tensors(state), strict=False))
    elif isinstance(contract, Chain):
        for name, link in contract.links.items():
            yield from leaf_names(link, state[name], f"{path}{name}.")
    elif isinstance(contract, Hiding):
        for name, layer in contract.layers.items():
            yield from leaf_names(plain(layer), state[name], f"{path}{name}.")
    else:
        yield from (f"{path}{name}" for name, _ in trees.leaves(state))


def _chain(module: nn.Sequential, batch_first: bool | None) -> Contract:
    links: dict[str, Contract] = {}
    places = zip(
        (
            name
            for name, _ in module.named_modules(remove_duplicate=False)
            if name and "." not in name
        ),
        module,
        strict=True,
    )  # named_children leaves out a module's second place
    for name, child in places:
        recurrent = any(isinstance(m, RECURRENT) for m in child.modules())
        carried = (
            recurrent
            or own_start(child) is not None
            or (_takes_state(child) and not _of_torch(child))
        )
        links[name] = contract_of(child, batch_first) if carried else Stateless(child)
    if all(isinstance(link, Stateless) for link in links.values()):
        raise ModelError(
            "none of the modules in this nn.Sequential carries a state; nothing to carry"
        )
    return Chain(module, tuple(module), links)


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _batch_first(layers: Mapping[str, nn.Module], asked: bool | None) -> bool:
    found = {layer.batch_first for layer in layers.values() if isinstance(layer, nn.RNNBase)}
    if asked is None and len(found) > 1:
        raise ModelError(
            f"the layers {sorted(layers)} disagree about batch_first; say what forward(x) of your"
            " module wants: tt.carry(module, batch_first=True)"
        )
    return found == {True} if asked is None else asked


def _takes_state(module: nn.Module) -> bool:
    """Whether forward has a second positional parameter."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [
        p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds
    ]
    return len(positional) > 1
