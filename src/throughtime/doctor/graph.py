"""The autograd graph as it is: the order of its nodes, which were freed, where new ones hang on old ones."""

from collections.abc import Iterator
from typing import Any

from throughtime.doctor.inner import elements_of, factor_of, number_of

NODES = 20_000  # nodes visited at most
LEAF = 2**63  # leaves carry the largest sequence number
LIGHT = (
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
)


def sequence(node: Any) -> int:
    """The number of a node; later ones are larger."""
    return number_of(node) if hasattr(node, "_sequence_nr") else LEAF


def is_leaf(node: Any) -> bool:
    """Whether a node is where a parameter's gradient ends up."""
    return node.name().endswith("AccumulateGrad")


def children(node: Any) -> list[Any]:
    """The nodes that its gradient goes to."""
    return [child for child, _ in node.next_functions if child is not None]


def reached(root: Any, limit: int = NODES) -> Iterator[Any]:
    """Every node below `root`, itself included."""
    stack, seen = [root], {root}
    while stack and len(seen) < limit:
        node = stack.pop()
        yield node
        for child in children(node):
            if child not in seen:
                seen.add(child)
                stack.append(child)


def leaves_of(node: Any, limit: int = 200) -> frozenset[int]:
    """The leaves, such as weights, that the nodes near this one go back to."""
    return (
        frozenset(id(below.variable) for below in reached(node, limit) if is_leaf(below))
        if node is not None
        else frozenset()
    )


def saved(node: Any) -> Iterator[str]:
    """What a node says when asked for a saved tensor that it cannot hand out."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError as error:
                yield str(error)


def freed(node: Any) -> bool:
    """Whether a backward has used up what the node had saved."""
    return any("second time" in text for text in saved(node))


def hangs_on_freed(node: Any, limit: int = 400) -> bool:
    """Whether a backward has been through this node or those below it."""
    return any(freed(below) for below in reached(node, limit) if not is_leaf(below))


def changed(root: Any) -> tuple[Any, str] | None:
    """The first node that needs a tensor which was changed in place, with what it says."""
    for node in reached(root):
        for text in saved(node):
            if "inplace operation" in text:
                return node, text
    return None


def size(node: Any) -> int:
    """Elements of what a node computed; 0 where that is unknown."""
    metadata = getattr(node, "_input_metadata", None)
    if not metadata:
        return 0
    count = 1
    for n in metadata[0].shape:
        count *= int(n)
    return count


def is_light(node: Any) -> bool:
    """Whether a node only hands on what another computed."""
    name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
    return name in LIGHT and len(children(node)) == 1


class Crossing:
    """An edge from a node of this chunk to one of an earlier chunk, and the way to it from the loss."""

    def __init__(self, way: list[Any], old: Any) -> None:
        self.way, self.old = way, old

    @property
    def entry(self) -> Any:
        """The operation that takes the old state in, below it only views and copies."""
        for node in reversed(self.way):
            if not is_light(node):
                return node
        return self.way[-1]

    @property
    def learned(self) -> bool:
        """Whether a parameter takes part on the way: then it is a state, not a kept loss or output."""
        below = [child for node in self.way for child in children(node)]
        return size(self.entry) != 1 and any(is_leaf(child) for child in below)


def crossings(root: Any, boundary: int) -> list[Crossing]:
    """All edges from nodes younger than `boundary` to freed ones that are not, oldest entry first."""
    parent: dict[Any, Any] = {root: None}
    stack, found = [root], list[Crossing]()
    while stack and len(parent) < NODES:
        node = stack.pop()
        for child in children(node):
            if child in parent or is_leaf(child):
                continue
            parent[child] = node
            if sequence(child) > boundary:
                stack.append(child)
            elif hangs_on_freed(child):
                found.append(Crossing(_way(parent, node), child))
    return sorted(found, key=lambda crossing: sequence(crossing.entry))


def _way(parent: dict[Any, Any], node: Any) -> list[Any]:
    way = [node]
    while (node := parent[node]) is not None:
        way.insert(0, node)
    return way


def means(root: Any) -> list[tuple[str, float, float]]:
    """The means a loss is a weighted sum of: kind, weight, number of elements; empty where the loss is something else."""
    found: list[tuple[str, float, float]] = []
    stack: list[tuple[Any, float]] = [(root, 1.0)]
    while stack:
        node, weight = stack.pop()
        name = node.name()
        if (count := _counted(node, name)) is not None:
            found.append((name, weight, count))
        elif name in {"MulBackward0", "DivBackward0"} and (factor := _factor(node)) is not None:
            inner = [child for child in children(node) if not is_leaf(child)]
            stack += [
                (child, weight * factor if name == "MulBackward0" else weight / factor)
                for child in inner
            ]
        elif name == "AddBackward0":
            stack += [(child, weight) for child in children(node)]
        else:
            return []
    return found


def _factor(node: Any) -> float | None:
    try:
        other = factor_of(node)
    except RuntimeError:
        return None
    return (
        float(other)
        if other is not None and len(children(node)) == 1 and float(other) != 0
        else None
    )


def _counted(node: Any, name: str) -> float | None:
    """Over how many elements a node takes the mean."""
    if name == "MeanBackward0":
        return float(elements_of(node))
    if getattr(node, "_saved_reduction", None) != 1:
        return None
    try:
        weight = getattr(node, "_saved_total_weight", None)
        inner = getattr(node, "_saved_self", None) if weight is None else None
    except RuntimeError:  # freed by an earlier backward
        return None
    return (
        float(weight) if weight is not None else float(inner.numel()) if inner is not None else None
    )
