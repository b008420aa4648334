"""The autograd graph: order of nodes, unusable nodes, edges into older graphs, means of a loss.

A node is unusable if a backward has freed its saved tensors, or if one was changed in place.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from throughtime.doctor._torch_private import (
    mean_count,
    output_shape,
    saved,
    sequence,
    version_of,
)

MAX_NODES = 20_000  # nodes visited in one search
FREED, CHANGED = "second time", "inplace operation"  # parts of the errors of unusable nodes
# Operations that only copy, view or index a tensor.
COPY_OR_VIEW = re.compile(
    "(Alias|Clone|Expand|Index|Permute|Reshape|Select|Slice|Squeeze|T|ToCopy|Transpose|UnsafeView"
    "|Unsqueeze|View)Backward[01]"
)


def is_leaf(node: Any) -> bool:
    """Whether a node accumulates the gradient of a leaf tensor, such as a parameter."""
    return node.name().endswith("AccumulateGrad")


def children(node: Any) -> list[Any]:
    """The `next_functions` of a node, without None."""
    return [child for child, _ in node.next_functions if child]


def reachable_nodes(root: Any, limit: int = MAX_NODES, above: int = -1) -> Iterator[Any]:
    """The nodes reachable from `root`, itself included, up to about `limit`.

    Only nodes with a sequence number over `above`, which leaves have.
    """
    stack, visited = [root], {root}
    while stack and len(visited) < limit:
        node = stack.pop()
        yield node
        for child in children(node):
            if child not in visited and sequence(child) > above:
                visited.add(child)
                stack.append(child)


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
    return any(
        error in text
        for below in reachable_nodes(node, limit)
        if not is_leaf(below)
        for text in _saved_errors(below)
        for error in errors or (FREED, CHANGED)
    )


@dataclass(frozen=True, eq=False)
class ChangedTensor:
    """A saved tensor that was changed in place."""

    node: Any  # that saved it
    parameter: Tensor | None  # if it is one
    shape: list[int]
    version: int  # now
    expected: int  # the version that the node needs


def changed_tensor(root: Any, message: str) -> ChangedTensor | None:
    """The tensor that torch's message is about; `None` if no node has that message."""
    parts = re.search(r"\[([\d, ]*)\]\].* is at version (\d+); expected version (\d+)", message)
    if parts is None:
        return None
    shape = [int(n) for n in parts[1].split(",") if n.strip()]
    version, expected = int(parts[2]), int(parts[3])
    for node in reachable_nodes(root):
        if any(parts[0] in text for text in _saved_errors(node)):
            matches = (
                p
                for p in parameters_of_node(node)
                if version_of(p) == version and sorted(p.shape) == sorted(shape)
            )
            return ChangedTensor(node, next(matches, None), shape, version, expected)
    return None


def parameters_of_node(node: Any) -> list[Tensor]:
    """The parameters that a node uses, directly or through views."""
    parameters: list[Tensor] = []
    pending = children(node)
    while pending:
        child = pending.pop(0)
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


@dataclass(frozen=True, eq=False)
class StaleEdge:
    """An edge from a node of this chunk to one of an earlier chunk."""

    path: list[Any]  # the nodes from the loss to the edge
    old: Any  # the node of the earlier chunk

    @property
    def entry(self) -> Any:
        """The first operation on the old tensor that is not a view or copy."""
        return next(
            (node for node in reversed(self.path) if not _is_copy_or_view(node)), self.path[-1]
        )

    @property
    def is_number(self) -> bool:
        """Whether the old tensor enters as a single number, as a loss does."""
        shape = output_shape(self.entry)
        return shape is not None and all(n == 1 for n in shape)

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
                edges.append(StaleEdge(_path_to(node, parents), child))
    return sorted(edges, key=lambda edge: sequence(edge.entry))


def _path_to(node: Any, parents: dict[Any, Any]) -> list[Any]:
    path = [node]
    while node := parents[node]:
        path.insert(0, node)
    return path


@dataclass(frozen=True)
class MeanTerm:
    """A mean in a loss."""

    kind: str  # the name of its node
    weight: float
    count: float  # of elements
    number: int  # the sequence number of its node


def mean_terms(root: Any) -> list[MeanTerm]:
    """Split a loss into a weighted sum of means.

    Empty if the loss is anything else.
    """
    terms: list[MeanTerm] = []
    stack: list[tuple[Any, float]] = [(root, 1.0)]
    while stack:
        node, weight = stack.pop()
        name = node.name()
        if (count := mean_count(node, name)) is not None:
            terms.append(MeanTerm(name, weight, count, sequence(node)))
        elif name in {"MulBackward0", "DivBackward0"} and (factor := _scalar_factor(node)):
            scaled = weight * factor if name == "MulBackward0" else weight / factor
            stack += [(child, scaled) for child in children(node) if not is_leaf(child)]
        elif name == "AddBackward0":
            stack += [(child, weight) for child in children(node)]
        else:
            return []
    return terms


def _scalar_factor(node: Any) -> float | None:
    factor = saved(node, "other")
    return float(factor) if factor is not None and len(children(node)) == 1 else None
