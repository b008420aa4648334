"""Names of torch that begin with an underscore and have no public counterpart, in one place."""

# that is what this file is for

from typing import Any

from torch import Tensor


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of."""
    return tensor._base


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place."""
    return tensor._version


def storage_of(tensor: Tensor) -> int:
    """Which memory it lies in; the number is free again once the memory is."""
    return tensor.untyped_storage()._cdata


def number_of(node: Any) -> int:
    """The number of a node of the graph: later ones are larger."""
    return node._sequence_nr()


def elements_of(node: Any) -> int:
    """Over how many elements a MeanBackward takes the mean."""
    return int(node._saved_self_sym_numel)


def factor_of(node: Any) -> Any:
    """What a MulBackward or DivBackward multiplies or divides by.

    `RuntimeError` where it was freed.
    """
    return node._saved_other
