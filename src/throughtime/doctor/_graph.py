"""The autograd graph, and the private names of torch: no other module of the doctor uses any.

A node of the graph is unusable if a backward has freed its saved tensors, or if one was changed in
place.
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as is_transformed
from torch._C import _len_torch_function_stack as mode_depth
from torch._C._autograd import _get_sequence_nr as next_sequence
from torch.overrides import _get_current_function_mode as current_mode
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
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
    return sequence(node) >= LEAF


def children(node: Any) -> list[Any]:
    """The `next_functions` of a node, without None."""
    return [child for child, _ in node.next_functions if child]


def reachable_nodes(root: Any, limit: int = MAX_NODES, above: int = -1) -> Iterator[Any]:
    """The nodes reachable from `root`, itself included, the nearest first, up to about `limit`.

    Only nodes with a sequence number over `above`, which leaves have.
    """
    queue, visited = [root], {root}
    for node in islice(queue, limit):  # to which its children are added
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
    texts = (text for below in reachable_nodes(node, limit) for text in _saved_errors(below))
    return any(error in text for text in texts for error in errors or (FREED, CHANGED))


def changed_node(root: Any, message: str) -> Any:
    """The node whose saved tensor torch's message is about; `None` if there is none."""
    text = message.partition(" Hint:")[0]
    return next(
        (n for n in reachable_nodes(root) if any(text in e for e in _saved_errors(n))), None
    )


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
    def uses_parameters(self) -> bool:
        """Whether its path uses a parameter; that of a kept loss or output does not."""
        return any(is_leaf(child) for node in self.path for child in children(node))

    @property
    def is_loss(self) -> bool:
        """Whether the old tensor enters as a single number, and without a parameter."""
        metadata = getattr(self.entry, "_input_metadata", None)
        is_number = bool(metadata) and all(n == 1 for n in metadata[0].shape)
        return is_number and not self.uses_parameters


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
                while above := parents[path[-1]]:
                    path.append(above)
                steps = (each for each in path if not _is_copy_or_view(each))
                edges.append(StaleEdge(path, child, next(steps, node)))
    return sorted(edges, key=lambda edge: sequence(edge.entry))
