"""Recurrent layers of torch.nn inside any model become those of `tt.nn`, in place: the same
objects, of another class.

So parameters, buffers, hooks, training mode, ties between modules and everything that holds a layer
stay as they are; nothing is copied. Torch does the same where it parametrizes a module or shards
it.
"""

import logging
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from throughtime.nn.layers import GRU, LSTM, RNN, Recurrent

FUSED: dict[type[nn.RNNBase], type[Recurrent]] = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: RNN}
M = TypeVar("M", bound=nn.Module)
_log = logging.getLogger("throughtime")


def fuse(module: M) -> M:
    """The module, its `nn.LSTM`, `nn.GRU` and `nn.RNN` made `tt.nn.LSTM`, `tt.nn.GRU` and
    `tt.nn.RNN`.

    For models that exist; a new one may use `tt.nn` itself. Parameters are the same objects, so an
    optimizer made before goes on. Subclasses of torch's layers are left alone, since what their
    forward does is not known; so are layers whose forward was replaced, and cells in loops. Those
    left alone are named in the log, `logging.getLogger("throughtime")`.

    Args:
        module: changed in place, a bare layer too.

    Returns:
        The same object. Fusing again changes nothing.

    Cost: nothing is copied.

    Example:
        >>> import torch, throughtime as tt
        >>> net = tt.fuse(torch.nn.Sequential(torch.nn.LSTM(3, 8), torch.nn.Tanh()))
        >>> type(net[0]) is tt.nn.LSTM
        True
    """
    left: list[str] = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase) and not isinstance(layer, Recurrent):
            reason = _fuse_one(layer)
            if reason is not None:
                left.append(f"'{name or type(layer).__name__}': {reason}")
    if left:
        _log.warning("tt.fuse left these layers as they are. %s", "; ".join(left))
    return module


def _fuse_one(layer: nn.RNNBase) -> str | None:
    """Makes one layer a fused one; why not, where it must stay."""
    kind, parametrized = type(layer), parametrize.is_parametrized(layer)
    plain = kind.__bases__[0] if parametrized else kind
    if plain not in FUSED:
        return (
            f"a {plain.__name__}, whose forward is not torch's; where it is a subclass of your own,"
            " let it inherit from "
            f"tt.nn.{next(base.__name__ for base in kind.__mro__ if base in FUSED or base is nn.RNNBase)}"
        )
    if "forward" in vars(layer):
        return (
            "its forward was replaced in the instance (a tt.trace that is open, a wrapper); fuse"
            " before that"
        )
    fused: type[nn.RNNBase] = FUSED[plain]
    if parametrized:  # torch has made a class for it, with a property for each weight
        own = {
            name: value
            for name, value in vars(kind).items()
            if name not in {"__dict__", "__weakref__"}
        }
        fused = type(kind.__name__, (fused,), own)
    layer.__class__ = fused
    return None
