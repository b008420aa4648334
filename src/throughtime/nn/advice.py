"""What `tt.fuse` would gain, said once in a process where torch.nn takes its slow way.

In the log, not as a warning: advice must not stop a program whose warnings are errors. To silence
it: `logging.getLogger("throughtime").setLevel("ERROR")`.
"""

import logging

from torch import nn

from throughtime.kernels.dispatch import gain
from throughtime.nn.fuse import FUSED
from throughtime.nn.layers import KINDS

AFTER = 100  # updates; a short script is not worth a line
_log = logging.getLogger("throughtime")
_said: list[str] = []


def advise(module: nn.Module, lanes: int) -> None:
    """Says what fusing the layers inside would gain, if it is much, and nothing was said before.

    Args:
        module: a net that trains.
        lanes: B.
    """
    if _said:
        return
    found = {
        name: ratio for name, layer in module.named_modules() if (ratio := _ratio(layer, lanes)) > 1
    }
    if found:
        name, ratio = max(found.items(), key=lambda pair: pair[1])
        _said.append(name)
        _log.warning(
            "layer '%s' is a %s of torch.nn, which runs step by step on a CPU. net ="
            " tt.carry(module, fused=True) made such an update some %.0f times as fast where it was"
            " measured, with the same results to rounding (docs/layers.md)",
            name,
            type(module.get_submodule(name)).__name__,
            ratio,
        )


def _ratio(layer: nn.Module, lanes: int) -> float:
    """How many times faster an update would be; 1 for what `tt.fuse` leaves alone."""
    if type(layer) not in FUSED or not isinstance(layer, nn.RNNBase) or "forward" in vars(layer):
        return 1.0
    weight = next(layer.parameters(), None)
    if weight is None or not weight.is_cpu:
        return 1.0
    return gain(KINDS[layer.mode], weight.dtype, layer.hidden_size, lanes, layer.proj_size > 0)
