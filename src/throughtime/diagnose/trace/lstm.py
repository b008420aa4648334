"""The backward recurrence of the LSTM.

    i, f, o = sigmoid(.), g = tanh(.)       c[t] = f c[t-1] + i g       h[t] = o tanh(c[t])  (times
    W_hr, if projected)

    dh[t] = dy[t] + W_hh' ds[t+1]           s: what enters the four nonlinearities
    dc[t] = dc[t+1] f[t+1] + dh[t] o (1 - tanh(c[t])^2)
    ds[t] = (dc g i(1-i),  dc c[t-1] f(1-f),  dc i (1-g^2),  dh tanh(c) o(1-o))

The gates of all steps are computed at once from the h that are known, only dh and dc run step by
step. Cost per step: one product with W_hh and four elementwise operations; three products for all
steps together.

References: S. Hochreiter and J. Schmidhuber, Long short-term memory, Neural Computation 9 (1997);
F. Gers, J. Schmidhuber and F. Cummins, Learning to forget, Neural Computation 12 (2000); H. Sak, A.
Senior and F. Beaufays, Interspeech 2014, for the projection.

Shapes: `T` steps, `B` lanes, `H` hidden, `P` = H or the size of a projection.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from throughtime.diagnose.trace.span import Cotangents, Pulled, Steps, Told, rows_of, together
from throughtime.kernels import linear_scan


class _Values(NamedTuple):
    """Of all steps, `(T, B, H)` each.

    `past` is the c entering each, `tanh` that of the c after it.
    """

    i: Tensor
    f: Tensor
    g: Tensor
    o: Tensor
    past: Tensor
    tanh: Tensor

    def slopes(self) -> Tensor:
        """What turns (dc, dc, dc, dh) into ds, `(T, B, 4H)`."""
        by_i, by_f = self.g * self.i * (1 - self.i), self.past * self.f * (1 - self.f)
        return torch.cat(
            [by_i, by_f, self.i * (1 - self.g.square()), self.tanh * self.o * (1 - self.o)], 2
        )

    def told(self, dh: Tensor, dc: Tensor, inner: Tensor, entering: tuple[Tensor, ...]) -> Told:
        """The gradients by letter; `inner` is that of h before a projection."""
        seen = {
            "h": dh,
            "c": dc,
            "i": dc * self.g,
            "f": dc * self.past,
            "g": dc * self.i,
            "o": inner * self.tanh,
        }
        return Told(seen, entering, self.f)


def pull(steps: Steps, given: Cotangents) -> Pulled:
    """The gradients of a layer's steps."""
    i, f, g, o = _gates(steps)
    cells = linear_scan(f, i * g, steps.c)
    v = _Values(i, f, g, o, torch.cat([steps.c.unsqueeze(0), cells[:-1]]), cells.tanh())
    dh, dc, ds, entering = _back(steps, v, given)
    hr = steps.weights.hr
    if hr is None:
        return Pulled(v.told(dh, dc, dh, entering), ds, ds)
    return Pulled(v.told(dh, dc, dh @ hr, entering), ds, ds, rows_of(dh).T @ rows_of(v.o * v.tanh))


def look(steps: Steps, dh: Tensor, dc: Tensor) -> Told:
    """What is shown of a cell's steps, whose dh and dc are known."""
    i, f, g, o = _gates(steps)
    v = _Values(i, f, g, o, steps.c, (f * steps.c + i * g).tanh())
    ds = torch.cat([dc[0], dc[0], dc[0], dh[0]], 1) * v.slopes()[0]
    return v.told(dh, dc, dh, (ds @ steps.weights.hh, dc[0] * f[0]))


def _gates(steps: Steps) -> tuple[Tensor, ...]:
    by_x, by_h = steps.sums()
    i, f, g, o = (by_x + by_h).chunk(4, 2)
    return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()


def _back(
    steps: Steps, v: _Values, given: Cotangents
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """From the last step to the first: dh, dc, ds, and the gradients of the state entering."""
    to_c = v.o * (1 - v.tanh.square())
    hh, hr = steps.weights.hh, steps.weights.hr
    late = [None] * len(to_c) if given.late is None else given.late.unbind(0)
    carry = torch.zeros_like(v.f[0]) if given.dc is None else given.dc
    found: list[tuple[Tensor, ...]] = []
    rows = zip(
        given.dy.unbind(0), to_c.unbind(0), v.slopes().unbind(0), v.f.unbind(0), late, strict=True
    )
    for dy, through, slopes, keep, more in reversed(list(rows)):
        dh = torch.addmm(dy, found[-1][2], hh) if found else dy
        inner = dh if hr is None else dh @ hr
        carry = carry if more is None else carry + more
        dc = torch.addcmul(carry, inner, through)
        found.append((dh, dc, torch.cat([dc, dc, dc, inner], 1) * slopes))
        carry = dc * keep
    dh, dc, ds = together(found)
    return dh, dc, ds, (ds[0] @ hh, carry)
