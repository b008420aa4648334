"""Replace torch.nn's recurrent layers in a model by those of `tt.nn`, and advise it in the log.

A layer is replaced in place: the same object receives another class. So parameters, buffers, hooks,
training mode, ties between modules and references to the layer stay, and nothing is copied. Torch
does the same when it parametrizes or shards a module.

Messages go to `logging.getLogger("throughtime")`, not to `warnings`: advice must not stop a program
that turns warnings into errors. To silence them:

    logging.getLogger("throughtime").setLevel("ERROR")
"""

import logging
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from throughtime.kernels.cells import BY_MODE
from throughtime.kernels.dispatch import static_backend
from throughtime.kernels.library import library
from throughtime.nn.layers import GRU, LSTM, RNN, Recurrent

FUSED: dict[type[nn.RNNBase], type[Recurrent]] = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: RNN}
ADVISE_AFTER = 100  # updates; advice does not pay for a short script
M = TypeVar("M", bound=nn.Module)
_log = logging.getLogger("throughtime")
_advised: list[str] = []  # the layer that was named; once in a process


def fuse(module: M) -> M:
    """The module, its `nn.LSTM`, `nn.GRU` and `nn.RNN` replaced by those of `tt.nn`.

    For models that exist; a new one may use `tt.nn` itself. Parameters are the same objects, so an
    optimizer created before stays valid. These layers stay as they are, and the log names them:
    subclasses of torch's layers, whose forward may do anything; layers whose forward was replaced.
    Cells that a Python loop calls are not layers and stay too.

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
    unchanged: list[str] = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase) and not isinstance(layer, Recurrent):
            reason = _fuse_layer(layer)
            if reason is not None:
                unchanged.append(f"'{name or type(layer).__name__}': {reason}")
    if unchanged:
        _log.warning("tt.fuse left these layers as they are. %s", ", ".join(unchanged))
    return module


def _fuse_layer(layer: nn.RNNBase) -> str | None:
    """Change the class of one layer; the reason if it cannot be changed."""
    cls, parametrized = type(layer), parametrize.is_parametrized(layer)
    plain = cls.__bases__[0] if parametrized else cls
    if plain not in FUSED:
        base = next(base for base in cls.__mro__ if base in FUSED or base is nn.RNNBase)
        return (
            f"a {plain.__name__}, whose forward is not torch's; if it is a subclass of your own,"
            f" let it inherit from tt.nn.{base.__name__}"
        )
    if "forward" in vars(layer):
        return "its forward was replaced in the instance by a wrapper; call tt.fuse before that"
    fused: type[nn.RNNBase] = FUSED[plain]
    if parametrized:  # torch created a class for it, with a property for each weight
        skipped = {"__dict__", "__weakref__"}
        own = {name: value for name, value in vars(cls).items() if name not in skipped}
        fused = type(cls.__name__, (fused,), own)
    layer.__class__ = fused
    return None


def advise(module: nn.Module, lanes: int) -> None:
    """Log once in a process that `tt.fuse` would make this net faster, if it would.

    Args:
        module: a net that trains.
        lanes: B.
    """
    for name, layer in module.named_modules():
        if not _advised and _runs_by_steps(layer, lanes):
            _advised.append(name)
            _log.warning(
                "layer '%s' is a %s of torch.nn, which runs step by step on a CPU. net ="
                " tt.carry(module, fused=True) makes such updates several times as fast, with the"
                " same results to rounding (docs/how-to/layers.md)",
                name,
                type(layer).__name__,
            )


def _runs_by_steps(layer: nn.Module, lanes: int) -> bool:
    """Whether torch.nn computes the layer step by step where a kernel takes one call."""
    if type(layer) not in FUSED or not isinstance(layer, nn.RNNBase) or "forward" in vars(layer):
        return False
    weight, cell = next(layer.parameters(), None), BY_MODE[layer.mode]
    if weight is None or not weight.is_cpu or library() is None:
        return False
    projected = layer.proj_size > 0
    if cell.onednn and weight.dtype == torch.float32 and not projected:
        return False
    backend = static_backend(cell, weight.dtype, layer.hidden_size, lanes, projected)
    return backend.name == "fused"
