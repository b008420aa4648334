"""The autograd graph, and the private names of torch: no other module of the doctor uses any.

A node of the graph is unusable if a backward has freed its saved tensors, or if one was changed in
place.
"""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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
MAX_NODES = 20_000  # nodes visited in one search
FREED, CHANGED = "second time", "inplace operation"  # parts of the errors of unusable nodes
# Operations that only copy, view or index a tensor.
COPY_OR_VIEW = re.compile(
    "(Alias|Clone|Expand|Index|Permute|Reshape|Select|Slice|Squeeze|T|ToCopy|Transpose|UnsafeView"
    "|Unsqueeze|View)Backward[01]"
)
# the type of a getter of C, which the type checker replaces by the attribute's value
ATTRIBUTE_GETTER = type(torch.Tensor.shape.__get__)  # pyright: ignore[reportAttributeAccessIssue]


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that owns the memory: the base of a view, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def version_of(tensor: Tensor) -> int:
    """The number of in-place changes so far; inference tensors do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def storage_of(tensor: Tensor) -> int:
    """The address of its storage; another storage may reuse it after this one is freed."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def has_hook(tensor: Tensor) -> bool:
    """Whether a hook receives its gradients."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def sequence(node: Any) -> int:
    """The number of a node of the graph: larger for later ones, the largest for leaves."""
    number = getattr(node, "_sequence_nr", None)
    return LEAF if number is None else number()


def is_leaf(node: Any) -> bool:
    """Whether a node accumulates the gradient of a leaf tensor, such as a parameter."""
    return node.name().endswith("AccumulateGrad")


def children(node: Any) -> list[Any]:
    """The `next_functions` of a node, without None."""
    return [child for child, _ in node.next_functions if child]


def reachable_nodes(root: Any, limit: int = MAX_NODES, above: int = -1) -> Iterator[Any]:
    """The nodes reachable from `root`, itself included, the nearest first, up to about `limit`.

    Only nodes with a sequence number over `above`, which leaves have.
    """
    queue, visited = deque([root]), {root}
    while queue and len(visited) < limit + len(queue):
        node = queue.popleft()
        yield node
        for child in children(node):
            if child not in visited and sequence(child) > above:
                visited.add(child)
                queue.append(child)


def _saved_errors(node: Any) -> Iterator[str]:
    """The errors raised on reading the saved tensors of a node."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError as error:
                yield str(error)


def reaches_unusable(node: Any, limit: int = 400, *errors: str) -> bool:
    """Whether this node or one that it reaches is unusable, for one of these reasons if any."""
    texts = (
        text
        for below in reachable_nodes(node, limit)
        if not is_leaf(below)
        for text in _saved_errors(below)
    )
    return any(error in text for text in texts for error in errors or (FREED, CHANGED))


class ChangedTensor(NamedTuple):
    """A saved tensor that was changed in place."""

    node: Any  # that saved it
    parameter: Tensor | None  # if it is one
    shape: list[int]
    version: int  # now
    expected: int  # the version that the node needs


def changed_tensor(root: Any, message: str) -> ChangedTensor | None:
    """The tensor that torch's message is about; `None` if no node has that message."""
    parts = re.search(r"\[([\d, ]*)\]\].* is at version (\d+); expected version (\d+)", message)
    for node in reachable_nodes(root) if parts else ():
        if parts and any(parts[0] in text for text in _saved_errors(node)):
            shape, version = [int(n) for n in re.findall(r"\d+", parts[1])], int(parts[2])
            matches = (
                p
                for p in parameters_of_node(node)
                if version_of(p) == version and sorted(p.shape) == sorted(shape)
            )
            return ChangedTensor(node, next(matches, None), shape, version, int(parts[3]))
    return None


def parameters_of_node(node: Any) -> list[Tensor]:
    """The parameters that a node uses, directly or through views."""
    parameters, pending = list[Tensor](), children(node)
    for child in pending:
        if is_leaf(child):
            parameters.append(child.variable)
        elif _is_copy_or_view(child):
            pending += children(child)
    return parameters


def behind_copies(node: Any) -> Any:
    """The node whose result a node copies, views or indexes, or the node itself."""
    while _is_copy_or_view(node):
        (node,) = children(node)
    return node


def _is_copy_or_view(node: Any) -> bool:
    return bool(COPY_OR_VIEW.fullmatch(node.name())) and len(children(node)) == 1


class StaleEdge(NamedTuple):
    """An edge from a node of this chunk to one of an earlier chunk."""

    path: list[Any]  # the nodes from the loss to the edge
    old: Any  # the node of the earlier chunk
    entry: Any  # the first operation on the old tensor that is not a view or copy

    @property
    def is_number(self) -> bool:
        """Whether the old tensor enters as a single number, as a loss does."""
        metadata = getattr(self.entry, "_input_metadata", None)
        return bool(metadata) and all(n == 1 for n in metadata[0].shape)

    @property
    def uses_parameters(self) -> bool:
        """Whether its path uses a parameter; that of a kept loss or output does not."""
        return any(is_leaf(child) for node in self.path for child in children(node))


def stale_edges(root: Any, boundary: int) -> list[StaleEdge]:
    """The edges from nodes numbered above `boundary` to older unusable nodes, in order."""
    parents: dict[Any, Any] = {root: None}
    stack, edges = [root], list[StaleEdge]()
    while stack and len(parents) < MAX_NODES:
        node = stack.pop()
        for child in children(node):
            if child in parents or is_leaf(child):
                continue
            parents[child] = node
            if sequence(child) > boundary:
                stack.append(child)
            elif reaches_unusable(child):
                path = [node]
                while above := parents[path[0]]:
                    path.insert(0, above)
                steps = (each for each in reversed(path) if not _is_copy_or_view(each))
                edges.append(StaleEdge(path, child, next(steps, node)))
    return sorted(edges, key=lambda edge: sequence(edge.entry))


@dataclass(frozen=True)
class MeanTerm:
    """A mean in a loss."""

    kind: str  # the name of its node
    weight: float
    count: int  # of elements


def mean_of(node: Any) -> MeanTerm | None:
    """The mean that a loss is, times a number; `None` if it is anything else."""
    weight = 1.0
    while (count := _mean_count(node)) is None:
        name, factor = node.name(), _factor(node)
        if name not in {"MulBackward0", "DivBackward0"} or not factor:
            return None
        weight *= factor if name == "MulBackward0" else 1 / factor
        (node,) = children(node)
    return MeanTerm(node.name(), weight, int(count))


def _factor(node: Any) -> float:
    """The number by which a node multiplies or divides its only input; 0 if there is none."""
    factor = _saved(node, "other") if len(children(node)) == 1 else None
    is_number = factor is not None and torch.as_tensor(factor).numel() == 1
    return float(factor) if factor is not None and is_number else 0.0


def _saved(node: Any, name: str) -> Any:
    """What a node saved under a name; `None` if it has none or a backward has freed it."""
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None


def _mean_count(node: Any) -> float | None:
    """The number of elements, or the total weight, of the mean that a node computes."""
    if node.name() == "MeanBackward0":
        return float(node._saved_self_sym_numel)
    if _saved(node, "reduction") != 1 or (inputs := _saved(node, "self")) is None:
        return None
    weight = _saved(node, "total_weight")
    return float(inputs.numel() if weight is None else weight)
