"""The autograd graph: the order of its nodes, freed nodes, and edges into older graphs."""

from collections.abc import Iterator
from typing import Any

from throughtime.doctor._torch_private import factor_of, mean_count, output_shape, sequence

MAX_NODES = 20_000  # nodes visited in one search
# Nodes that only pass on or rearrange the values of another.
PASS_ON = {
    "Clone",
    "View",
    "Select",
    "Slice",
    "Index",
    "Unsqueeze",
    "Squeeze",
    "Transpose",
    "T",
    "Permute",
    "ToCopy",
    "Expand",
    "Reshape",
    "UnsafeView",
    "Alias",
}


def is_leaf(node: Any) -> bool:
    """Whether a node accumulates the gradient of a parameter."""
    return node.name().endswith("AccumulateGrad")


def children(node: Any) -> list[Any]:
    """The nodes that receive its gradient."""
    return [child for child, _ in node.next_functions if child is not None]


def nodes_below(root: Any, limit: int = MAX_NODES) -> Iterator[Any]:
    """Every node below `root`, itself included."""
    stack, visited = [root], {root}
    while stack and len(visited) < limit:
        node = stack.pop()
        yield node
        for child in children(node):
            if child not in visited:
                visited.add(child)
                stack.append(child)


def leaves_of(node: Any, limit: int = 200) -> frozenset[int]:
    """The ids of the leaves, such as weights, that are near below a node."""
    if node is None:
        return frozenset()
    return frozenset(id(below.variable) for below in nodes_below(node, limit) if is_leaf(below))


def _saved_errors(node: Any) -> Iterator[str]:
    """The messages of a node whose saved tensors cannot be read."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError as error:
                yield str(error)


def reaches_freed(node: Any, limit: int = 400) -> bool:
    """Whether a backward has already freed this node or one below it."""
    return any(
        "second time" in text
        for below in nodes_below(node, limit)
        if not is_leaf(below)
        for text in _saved_errors(below)
    )


def modified_in_place(root: Any) -> tuple[Any, str] | None:
    """The first node whose saved tensor was modified in place, with torch's message."""
    for node in nodes_below(root):
        for text in _saved_errors(node):
            if "inplace operation" in text:
                return node, text
    return None


def _passes_on(node: Any) -> bool:
    name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
    return name in PASS_ON and len(children(node)) == 1


class OldEdge:
    """An edge from a node of this chunk to one of an earlier chunk.

    Attributes:
        path: the nodes from the loss to the edge.
        old: the node of the earlier chunk.
    """

    def __init__(self, path: list[Any], old: Any) -> None:
        self.path, self.old = path, old

    @property
    def entry(self) -> Any:
        """The operation that takes the old tensor in; below it are only views and copies."""
        return next((node for node in reversed(self.path) if not _passes_on(node)), self.path[-1])

    @property
    def is_state(self) -> bool:
        """Whether a parameter is used on the path: a state is, a kept loss or output is not."""
        below = [child for node in self.path for child in children(node)]
        shape = output_shape(self.entry)
        is_number = shape is not None and all(n == 1 for n in shape)
        return not is_number and any(is_leaf(child) for child in below)


def old_edges(root: Any, boundary: int) -> list[OldEdge]:
    """The edges from nodes younger than `boundary` to older freed ones, oldest entry first."""
    parents: dict[Any, Any] = {root: None}
    stack, edges = [root], list[OldEdge]()
    while stack and len(parents) < MAX_NODES:
        node = stack.pop()
        for child in children(node):
            if child in parents or is_leaf(child):
                continue
            parents[child] = node
            if sequence(child) > boundary:
                stack.append(child)
            elif reaches_freed(child):
                edges.append(OldEdge(_path_to(node, parents), child))
    return sorted(edges, key=lambda edge: sequence(edge.entry))


def _path_to(node: Any, parents: dict[Any, Any]) -> list[Any]:
    path = [node]
    while (node := parents[node]) is not None:
        path.insert(0, node)
    return path


def mean_terms(root: Any) -> list[tuple[str, float, float]]:
    """The means that a loss is a weighted sum of: kind, weight and number of elements.

    Empty if the loss is anything else.
    """
    terms: list[tuple[str, float, float]] = []
    stack: list[tuple[Any, float]] = [(root, 1.0)]
    while stack:
        node, weight = stack.pop()
        name = node.name()
        if (count := mean_count(node, name)) is not None:
            terms.append((name, weight, count))
        elif name in {"MulBackward0", "DivBackward0"} and (factor := _scalar_factor(node)):
            scaled = weight * factor if name == "MulBackward0" else weight / factor
            stack += [(child, scaled) for child in children(node) if not is_leaf(child)]
        elif name == "AddBackward0":
            stack += [(child, weight) for child in children(node)]
        else:
            return []
    return terms


def _scalar_factor(node: Any) -> float | None:
    factor = factor_of(node)
    return float(factor) if factor is not None and len(children(node)) == 1 else None
