"""The backward recurrence of the GRU, as torch computes it: the reset gate multiplies what n sees
of h.

    r, z = sigmoid(.)        n = tanh(a + r b)        h[t] = (1 - z) n + z h[t-1]        a: from the
    inputs, b: from h[t-1]

    dh[t] = dy[t] + z[t+1] dh[t+1] + W_hh' ds[t+1]
    ds[t] = (dn' b r(1-r),  dh (h[t-1] - n) z(1-z),  dn' r)   with dn' = dh (1-z) (1-n^2), and dn'
    itself on the side of the inputs

z says how much of the past is kept, as the forget gate of an LSTM does.
Cost per step: one product with W_hh and two elementwise operations.

References: K. Cho et al., Learning phrase representations using RNN encoder-decoder, EMNLP 2014.

Shapes: `T` steps, `B` lanes, `H` hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from throughtime.diagnose.trace.span import Cotangents, Pulled, Steps, Told, together


class _Values(NamedTuple):
    """Of all steps, `(T, B, H)` each; `b` is what n sees of h, `to_n` what turns dh into dn'."""

    r: Tensor
    z: Tensor
    n: Tensor
    b: Tensor
    h: Tensor
    to_n: Tensor

    def slopes(self) -> Tensor:
        """What turns (dh, dh, dh) into ds, `(T, B, 3H)`."""
        by_r, by_z = (
            self.to_n * self.b * self.r * (1 - self.r),
            (self.h - self.n) * self.z * (1 - self.z),
        )
        return torch.cat([by_r, by_z, self.to_n * self.r], 2)

    def told(self, dh: Tensor, entering: Tensor) -> Told:
        """The gradients by letter."""
        seen = {
            "h": dh,
            "r": dh * self.to_n * self.b,
            "z": dh * (self.h - self.n),
            "n": dh * (1 - self.z),
        }
        return Told(seen, (entering,), self.z)


def pull(steps: Steps, given: Cotangents) -> Pulled:
    """The gradients of a layer's steps."""
    v, hh = _values(steps), steps.weights.hh
    carry: Tensor | None = None
    found: list[tuple[Tensor, ...]] = []
    for dy, slopes, keep in reversed(
        list(zip(given.dy.unbind(0), v.slopes().unbind(0), v.z.unbind(0), strict=True))
    ):
        dh = dy if carry is None else dy + carry
        ds = torch.cat([dh, dh, dh], 1) * slopes
        carry = torch.addmm(dh * keep, ds, hh)
        found.append((dh, ds))
    dh, ds = together(found)
    by_x = torch.cat([ds[..., : 2 * v.z.shape[2]], dh * v.to_n], 2)
    return Pulled(v.told(dh, torch.zeros_like(dh[0]) if carry is None else carry), by_x, ds)


def look(steps: Steps, dh: Tensor, dc: Tensor) -> Told:
    """What is shown of a cell's steps, whose dh are known; there is no dc."""
    del dc
    v = _values(steps)
    ds = torch.cat([dh[0], dh[0], dh[0]], 1) * v.slopes()[0]
    return v.told(dh, torch.addmm(dh[0] * v.z[0], ds, steps.weights.hh))


def _values(steps: Steps) -> _Values:
    by_x, by_h = steps.sums()
    (ar, az, an), (br, bz, bn) = by_x.chunk(3, 2), by_h.chunk(3, 2)
    r, z = (ar + br).sigmoid(), (az + bz).sigmoid()
    n = (an + r * bn).tanh()
    return _Values(r, z, n, bn, steps.h, (1 - z) * (1 - n.square()))
