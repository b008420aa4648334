"""The autograd nodes behind a loss: their inputs, leaves, order, and versions of the weights."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import Node

_LEVEL = 500
_FUSED = ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn")
_OURS = (
    "_RecurrentBackward",
    "TracedStepsBackward",
)  # layers of tt.nn, and layers under tt.trace: inputs first, then h
_STALE = re.compile(
    r"\[[\w.]+ \[([\d, ]*)\]\].*is at version \d+; expected version (\d+)", re.DOTALL
)


class Nodes:
    """All nodes by number, consumers before their inputs, and the uses of each leaf."""

    def __init__(self, roots: Sequence[Node], module: nn.Module | None) -> None:
        self.nodes = _ordered(roots)
        self.number = {node: i for i, node in enumerate(self.nodes)}
        self.roots = [self.number[node] for node in roots]
        self.nexts = [
            [-1 if node is None else self.number[node] for node, _ in other.next_functions]
            for other in self.nodes
        ]
        self.inputs = [[j for j in nexts if j >= 0] for nexts in self.nexts]
        # the only number that gives the order in which nodes were made
        self.seq = [node._sequence_nr() for node in self.nodes]
        self.variables = {
            i: cast("Any", node).variable
            for i, node in enumerate(self.nodes)
            if node.name().endswith("AccumulateGrad")
        }
        self.leaf = self._leaves()
        self.inner = [i for i, leaf in enumerate(self.leaf) if leaf < 0]
        self.uses = self._uses()
        self._hold()
        self.names = _names(self.variables, module)

    def _leaves(self) -> list[int]:
        """The leaf that a node is, or of which it is a view, such as a transpose; -1: none."""
        leaf = [-1] * len(self.nodes)
        roots = set(self.roots)
        for i in reversed(range(len(self.nodes))):
            if i in self.variables:
                leaf[i] = i
            elif len(self.nexts[i]) == 1 and self.inputs[i] and i not in roots:
                leaf[i] = leaf[self.inputs[i][0]]
        return leaf

    def _uses(self) -> dict[int, list[int]]:
        uses: dict[int, list[int]] = {i: [] for i in self.variables}
        for i in self.inner:
            for leaf in {self.leaf[j] for j in self.inputs[i] if self.leaf[j] >= 0}:
                uses[leaf].append(i)
        return uses

    def _hold(self) -> None:
        """Let the nodes of one level hold those of the level `_LEVEL` nodes further down.

        Torch frees nodes that Python has accessed by recursion, which overflows the stack some
        60,000 nodes deep (2.13). A held node ends the recursion. It is freed with the nodes that
        hold it, so nothing outlives the graph.
        """
        depth, levels = [0] * len(self.nodes), dict[int, list[Node]]()
        for i in self.inner:
            for j in self.inputs[i]:
                depth[j] = max(depth[j], depth[i] + 1)
            if depth[i] % _LEVEL == 0:
                levels.setdefault(depth[i], []).append(self.nodes[i])
        for level, nodes in levels.items():
            for node in nodes if level + _LEVEL in levels else ():
                cast("Any", node).metadata["throughtime.held"] = levels[level + _LEVEL]

    def fused(self, i: int) -> int:
        """The steps of a fused layer's call; 0 for any other node."""
        node: Any = self.nodes[i]
        shape = self._outputs(i)[0].shape if self._outputs(i) else ()
        if self.ours(i):
            return shape[0] if len(shape) > 2 else 1
        if not node.name().startswith(_FUSED):
            return 0
        # oneDNN always puts time first, cuDNN as the layer does.
        swapped = not node.name().startswith("Mkldnn") and node._saved_batch_first
        return shape[1 if swapped else 0] if len(shape) > 2 else 1

    def ours(self, i: int) -> bool:
        """Whether it is a call of a layer by an autograd.Function of this package."""
        return self.nodes[i].name() in _OURS

    def scalar(self, i: int) -> bool:
        """Whether its output is a single number."""
        outputs = self._outputs(i)
        return len(outputs) == 1 and tuple(outputs[0].shape) in {(), (1,)}

    def _outputs(self, i: int) -> Sequence[Any]:
        # shapes without unpacking what was saved
        return cast("Any", self.nodes[i])._input_metadata

    def weights(self) -> list[int]:
        """The leaves that are weights; all leaves if there are none."""
        named = [i for i in self.variables if self.names[i][1]]
        return named or list(self.variables)

    def age(self, i: int) -> str:
        """`freed`, `now`, or an earlier version of the weights that the node has saved.

        Empty if it saves none.
        """
        node, age = self.nodes[i], ""
        sizes = [
            sorted(self.variables[leaf].shape)
            for j in self.inputs[i]
            if (leaf := self.leaf[j]) >= 0
        ]
        for name in _saved(type(node)):
            try:
                saved = getattr(node, name)
            except RuntimeError as error:
                if "already been freed" in str(error):
                    return "freed"
                changed = _STALE.search(str(error))
                if changed and sorted(int(n) for n in changed[1].split(",") if n.strip()) in sizes:
                    return changed[2]
            else:
                saved = [saved] if isinstance(saved, Tensor) else saved
                if isinstance(saved, (list, tuple)) and any(
                    isinstance(t, Tensor) and sorted(t.shape) in sizes for t in saved
                ):
                    age = "now"
        return age


def _ordered(roots: Sequence[Node]) -> list[Node]:
    """Every node once, after all its consumers."""
    waits: Counter[Node] = Counter()
    seen, todo = set(roots), list(roots)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None:
                waits[node] += 1
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
    ready, ordered = [node for node in dict.fromkeys(roots) if not waits[node]], list[Node]()
    while ready:
        ordered.append(ready.pop())
        for node, _ in ordered[-1].next_functions:
            if node is not None:
                waits[node] -= 1
                if not waits[node]:
                    ready.append(node)
    return ordered


def _names(variables: dict[int, Tensor], module: nn.Module | None) -> dict[int, tuple[str, bool]]:
    """The name of each leaf, and whether it is a weight, in the module's order."""
    known = (
        {} if module is None else {id(weight): name for name, weight in module.named_parameters()}
    )
    names: dict[int, tuple[str, bool]] = {}
    order = {key: k for k, key in enumerate(known)}
    for i, leaf in sorted(variables.items(), key=lambda pair: order.get(id(pair[1]), len(order))):
        weight = id(leaf) in known or isinstance(leaf, nn.Parameter)
        names[i] = (
            known.get(id(leaf), f"{'weight' if weight else 'leaf'} {tuple(leaf.shape)}"),
            weight,
        )
    return names


@cache
def _saved(kind: type[Node]) -> list[str]:
    """The attributes of a kind of node that hold saved tensors."""
    return [
        n
        for n in dir(kind)
        if (n.startswith("_saved_") and "_sym_" not in n) or n == "saved_tensors"
    ]
