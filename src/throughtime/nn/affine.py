"""Standardisation as a module: a shift and a scale of each column, kept with the weights."""

import torch
from torch import Tensor, nn


class Affine(nn.Module):
    """`(x - shift) / scale`, or its inverse `x * scale + shift`, in every column.

    A run keeps the means and deviations of its training split so. Folded into the weights of the
    layer after it, a large shift would cost digits.

    Args:
        width: the number of columns.
        inverse: the way back, from standardised values to units.

    Example:
        >>> import torch
        >>> from throughtime.nn.affine import Affine
        >>> standardise = Affine(1, inverse=False)
        >>> _ = standardise.shift.fill_(20), standardise.scale.fill_(5)
        >>> standardise(torch.tensor([[30.0]]))
        tensor([[2.]])
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, width: int, *, inverse: bool) -> None:
        super().__init__()
        self.inverse = inverse
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., width)`."""
        return x * self.scale + self.shift if self.inverse else (x - self.shift) / self.scale
