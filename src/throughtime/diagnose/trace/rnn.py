"""The backward recurrence of the simple RNN.

    h[t] = tanh(s) or relu(s)        dh[t] = dy[t] + W_hh' ds[t+1]        ds[t] = dh (1 - h^2), or
    dh where h > 0

Cost per step: one product with W_hh and one elementwise operation.

References: J. L. Elman, Finding structure in time, Cognitive Science 14 (1990).

Shapes: `T` steps, `B` lanes, `H` hidden.
"""

import torch
from torch import Tensor

from throughtime.diagnose.trace.span import Cotangents, Pulled, Steps, Told, together


def pull(steps: Steps, given: Cotangents) -> Pulled:
    """The gradients of a layer's steps."""
    hh = steps.weights.hh
    found: list[tuple[Tensor, ...]] = []
    for dy, slope in reversed(
        list(zip(given.dy.unbind(0), _slopes(steps.y, steps.relu).unbind(0), strict=True))
    ):
        dh = torch.addmm(dy, found[-1][1], hh) if found else dy
        found.append((dh, dh * slope))
    dh, ds = together(found)
    return Pulled(Told({"h": dh}, (ds[0] @ hh,), None), ds, ds)


def look(steps: Steps, dh: Tensor, dc: Tensor) -> Told:
    """What is shown of a cell's steps, whose dh are known; there is no dc."""
    del dc
    return Told({"h": dh}, ((dh[0] * _slopes(steps.y[0], steps.relu)) @ steps.weights.hh,), None)


def _slopes(y: Tensor, relu: bool) -> Tensor:
    return (y > 0).to(y.dtype) if relu else 1 - y.square()
