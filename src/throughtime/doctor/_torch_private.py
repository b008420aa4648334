"""Private names of torch that have no public counterpart: tensors, graph nodes, modes and loaders.

No other module of the doctor uses a name of torch that begins with an underscore.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as is_transformed
from torch._C import _len_torch_function_stack as mode_depth
from torch._C._autograd import _get_sequence_nr as next_sequence
from torch.overrides import _get_current_function_mode as current_mode
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "ATTRIBUTE_GETTER",
    "LoaderIterator",
    "current_mode",
    "is_transformed",
    "mode_depth",
    "next_sequence",
]

LEAF = 2**63  # sequence numbers of leaves are not smaller

# the type of a getter of C, which the type checker replaces by the attribute's value
ATTRIBUTE_GETTER = type(torch.Tensor.shape.__get__)  # pyright: ignore[reportAttributeAccessIssue]


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of."""
    return tensor._base


def root_of(tensor: Tensor) -> Tensor:
    """The tensor that owns the memory: the base of a view, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def version_of(tensor: Tensor) -> int:
    """The number of in-place changes so far."""
    return tensor._version


def storage_of(tensor: Tensor) -> int:
    """The address of its storage; another storage may reuse it after this one is freed."""
    return tensor.untyped_storage()._cdata


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors have the same storage."""
    return a.layout is b.layout is torch.strided and storage_of(a) == storage_of(b)


def sequence(node: Any) -> int:
    """The number of a node of the graph: larger for later ones, the largest for leaves."""
    number = getattr(node, "_sequence_nr", None)
    return LEAF if number is None else number()


def output_shape(node: Any) -> tuple[int, ...] | None:
    """The shape of the first result that a node computed."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(map(int, metadata[0].shape)) if metadata else None


def saved(node: Any, name: str) -> Any:
    """What a node saved under a name; `None` if it has none or a backward has freed it."""
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None


def mean_count(node: Any, name: str) -> float | None:
    """The number of elements, or the total weight, of the mean that a node computes."""
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel)
    if saved(node, "reduction") != 1:
        return None
    inputs = saved(node, "self")
    weight = saved(node, "total_weight")
    return None if inputs is None else float(inputs.numel() if weight is None else weight)
