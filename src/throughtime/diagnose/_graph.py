"""The autograd graph behind a loss, divided into chunks and the states that connect them.

Nothing is recorded for it: autograd keeps all that is needed. The clock is a weight whose every use
depends on the one before; its uses are the steps. A chunk ends where

1. a use depends on no earlier one: this part of the state starts or was cut there (certain);
2. an earlier backward pass has freed the graph (certain);
3. the weights have been changed in place since, by autograd's version counter (certain);
4. the state begins that the caller passes as the one that entered a chunk (certain);
5. one call of a fused layer ends (certain);
6. autograd made more nodes between two steps than between their neighbours, for a loss, say. If
   these nodes do not belong to this graph, the past was used for something else, and the state
   should have been cut. This is a good guess: it needs chunks of three steps or more, and it takes
   anything else recorded between two steps for the end of a chunk.

A crossing at 1 to 4 should have been cut; at 5 and 6, if nodes outside of this graph lie between.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import Node

from throughtime import state as trees
from throughtime.diagnose._nodes import Nodes
from throughtime.errors import DataError
from throughtime.state import State

Entry: TypeAlias = Literal["graph", "none", "leaf", "computed", ""]
WHY = {
    "cut": "another part of the state was cut here, this part was not",
    "freed": (
        "the graph before was freed by an earlier backward, so this loss cannot go back through it"
    ),
    "weights": (
        "the weights were changed in place since the steps before, so backward refuses or is wrong"
    ),
    "passed": "the state passed as entering here still belongs to the graph before",
    "foreign": (
        "something else, such as another loss, was recorded in between, and the state was not cut"
    ),
    "own": "one graph: all nodes in between belong to it",
}


@dataclass(frozen=True)
class GraphLeaf:
    """A tensor at which the graph ends and gradients arrive.

    Attributes:
        name: its attribute path in the module, or what it is.
        parameter: whether it is a weight; else it is a state or an input that asks for its
            gradient.
        chunks: the chunks that use it.
        uses: how often it is used.
    """

    name: str
    parameter: bool
    chunks: tuple[int, ...]
    uses: int


@dataclass(frozen=True)
class Span:
    """The graph of one chunk.

    Attributes:
        steps: uses of the clock, or the steps of a fused call; 0 if nothing is recurrent.
        nodes: of autograd.
        enters: how the state enters: with a graph, without one, as a leaf, or computed from
            something else; empty if unknown.
        freed: whether an earlier backward pass has freed it.
        stale: whether the weights have been changed in place since.
        to_loss: whether its outputs contribute to the losses; otherwise only its state does.
    """

    steps: int
    nodes: int
    enters: Entry
    freed: bool
    stale: bool
    to_loss: bool


@dataclass(frozen=True)
class Crossing:
    """A state that crosses from one chunk into a later one with its graph.

    Attributes:
        source: the chunk it comes from, counted from 0.
        target: the chunk it enters.
        edges: of autograd.
        overdue: whether it should have been cut.
        why: the evidence.
    """

    source: int
    target: int
    edges: int
    overdue: bool
    why: str


@dataclass(frozen=True)
class Graph:
    """The result of `walk`. A node belongs to a chunk or the loss, or is a leaf or its view."""

    chunks: tuple[Span, ...]
    links: tuple[Crossing, ...]
    leaves: tuple[GraphLeaf, ...]
    losses: int
    loss_nodes: int
    leaf_views: int

    @property
    def nodes(self) -> int:
        """All nodes, leaves included."""
        return (
            sum(chunk.nodes for chunk in self.chunks)
            + self.loss_nodes
            + self.leaf_views
            + len(self.leaves)
        )

    @property
    def overdue(self) -> tuple[Crossing, ...]:
        """The crossings that should have been cut."""
        return tuple(link for link in self.links if link.overdue)

    def __str__(self) -> str:
        many = f"{len(self.chunks)} chunk{'' if len(self.chunks) == 1 else 's'}"
        first = (
            f"{self.nodes:,} nodes in {many}, {len(self.overdue)} of {len(self.links)} crossings"
            " should have been cut"
        )
        return "\n".join(
            [
                first,
                *(
                    f"chunk {link.source + 1} -> {link.target + 1}: {link.why}"
                    for link in self.overdue
                ),
            ]
        )


def walk(
    losses: Tensor | Iterable[Tensor], module: nn.Module | None = None, *, state: State = None
) -> Graph:
    """The graph behind one loss or several, divided into chunks.

    Nothing is changed. Saved tensors of the clock's uses are unpacked, which runs the unpack hooks,
    such as those of activation checkpointing.

    Args:
        losses: a tensor with a graph, or several. Nodes that depend on the graph are not included.
        module: names the weights.
        state: the state that entered the chunk of the loss, if available.

    Raises:
        DataError: a loss without a graph.

    Cost: linear in the nodes, about 12 microseconds each; no recursion.

    Example:
        >>> import torch
        >>> cell, h = torch.nn.GRUCell(2, 3), torch.zeros(1, 3)
        >>> for x in torch.randn(10, 1, 2):
        ...     h = cell(x, h)
        >>> graph = walk(h.sum(), cell)
        >>> len(graph.chunks), graph.chunks[0].steps, graph.leaves[0].name
        (1, 10, 'weight_ih')
    """
    roots = [losses] if isinstance(losses, Tensor) else list(losses)
    for i, loss in enumerate(roots):
        if loss.grad_fn is None:
            raise DataError(
                f"loss {i + 1} of {len(roots)} has no graph: it was computed under torch.no_grad(),"
                " detached, or is a leaf. Draw the loss before it is detached or converted to a"
                " number"
            )
    if not roots:
        raise DataError(
            "got no loss, expected one tensor at least: the graph is that behind a loss"
        )
    nodes = Nodes([loss.grad_fn for loss in roots if loss.grad_fn is not None], module)
    return _ChunkBuilder(
        nodes,
        {t.grad_fn for t in trees.tensors(() if state is None else state) if t.grad_fn is not None},
    ).graph()


class _ChunkBuilder:
    """Assigns the nodes to chunks."""

    def __init__(self, nodes: Nodes, entering: set[Node]) -> None:
        self.nodes = nodes
        self.recurrent, clock = _clock(nodes)
        self.uses = sorted(nodes.uses[clock], key=nodes.seq.__getitem__) if clock >= 0 else []
        self.best, self.before = self._depends()
        linked = [k for k, before in enumerate(self.before) if before >= 0]
        self.slots = {
            s
            for k in linked
            for s, j in enumerate(nodes.nexts[self.uses[k]])
            if j >= 0 and self.best[j] >= 0
        }
        self.age = _filled([nodes.age(i) for i in self.uses])
        self.recorded = sorted(nodes.seq[i] for i in nodes.inner)
        self.starts = {0: "cut"} | self._boundaries(entering)
        self.tail = self._tail()
        self.chunk = self._labels()

    def _depends(self) -> tuple[list[int], list[int]]:
        """For each node the latest use of the clock that it depends on, itself included; -1: none.

        And for each use the one before it.
        """
        own = {i: k for k, i in enumerate(self.uses)}
        best, before = [-1] * len(self.nodes.nodes), [-1] * len(self.uses)
        for i in reversed(self.nodes.inner):
            reached = max((best[j] for j in self.nodes.inputs[i]), default=-1)
            if i in own:
                before[own[i]] = reached
            best[i] = own.get(i, reached)
        return best, before

    def _boundaries(self, entering: set[Node]) -> dict[int, str]:
        """The uses of the clock with which chunks begin, and the evidence.

        Stronger evidence replaces weaker.
        """
        starts: dict[int, str] = {}
        chains = self._chains()
        self.main = {k for chain in chains for k in chain}
        for chain in chains:
            starts |= self._by_distance(chain)
            starts |= dict.fromkeys(self._after(chain, entering), "passed")
            for a, b in pairwise(chain):
                if self.age[a] != self.age[b]:
                    starts[b] = "freed" if "freed" in {self.age[a], self.age[b]} else "weights"
        return starts | {chain[0]: "cut" for chain in chains}

    def _chains(self) -> list[list[int]]:
        """Unbroken runs of uses, one after another.

        A run parallel to another is left out, such as that of a second input to the same net.
        """
        chain_of, chains = list[int](), list[list[int]]()
        for k, before in enumerate(self.before):
            chain_of.append(len(chains) if before < 0 else chain_of[before])
            if before < 0:
                chains.append([])
            chains[chain_of[k]].append(k)
        main = list[list[int]]()
        for chain in chains:
            if not main or main[-1][-1] < chain[0]:
                main.append(chain)
        return main

    def _by_distance(self, chain: Sequence[int]) -> dict[int, str]:
        """The uses before which more nodes were made than around their neighbours."""
        seq = [self.nodes.seq[self.uses[k]] for k in chain]
        gaps = [b - a for a, b in pairwise(seq)]
        inside = [
            bisect_right(self.recorded, b) - bisect_right(self.recorded, a)
            for a, b in pairwise(seq)
        ]
        foreign = [total - own for total, own in zip(gaps, inside, strict=True)]
        if any(self.nodes.fused(self.uses[k]) > 1 for k in chain):
            return {chain[i + 1]: "foreign" if foreign[i] else "own" for i in range(len(gaps))}
        wider = [
            i for i in range(len(gaps)) if len(gaps) > 1 and gaps[i] > max(_neighbours(gaps, i))
        ]
        # Too many to be chunk ends: a step uses the weight twice, or steps differ.
        if 3 * len(wider) > len(gaps):
            return {}
        return {
            chain[i + 1]: "foreign" if foreign[i] > max(_neighbours(foreign, i)) else "own"
            for i in wider
        }

    def _after(self, chain: Sequence[int], entering: set[Node]) -> list[int]:
        """The first use after the passed state was computed."""
        numbers = [
            self.nodes.seq[self.nodes.number[node]]
            for node in entering
            if node in self.nodes.number
        ]
        at = bisect_right([self.nodes.seq[self.uses[k]] for k in chain], max(numbers, default=-1))
        return [chain[at]] if numbers and 0 < at < len(chain) else []

    def _tail(self) -> set[int]:
        """The nodes that only add up losses."""
        nodes, tail, consumed = self.nodes, set[int](), set[int]()
        for i in nodes.inner:
            inputs = nodes.inputs[i]
            ends = i in nodes.roots or i not in consumed
            summed = bool(inputs) and all(nodes.leaf[j] < 0 and nodes.scalar(j) for j in inputs)
            if (
                ends
                and i not in self.recurrent
                and (nodes.scalar(i) or (summed and i not in nodes.roots))
            ):
                tail.add(i)
            else:
                consumed.update(inputs)
        return tail

    def _labels(self) -> list[int]:
        """The chunk of every inner node: that of the latest use of the clock it depends on.

        A node before the first use has the chunk of its consumer.
        """
        nodes, firsts = self.nodes, sorted(self.starts)
        begin = [nodes.seq[self.uses[k]] for k in firsts[1:]]
        chunk = [len(firsts)] * len(nodes.nodes)
        for i in nodes.inner:
            since = bisect_right(begin, nodes.seq[i])
            if self.best[i] >= 0:
                chunk[i] = max(bisect_right(firsts, self.best[i]) - 1, since)
            elif chunk[i] == len(firsts):
                chunk[i] = since
            if i not in self.tail:
                for j in nodes.inputs[i]:
                    if self.best[j] < 0:
                        chunk[j] = min(chunk[j], chunk[i])
        return chunk

    def _crossings(self) -> Iterator[tuple[int, int, bool]]:
        """Edges to a later chunk or the loss: source, target, whether they carry state."""
        nodes = self.nodes
        feeds = set(self.recurrent)  # nodes that a later step depends on
        for i in nodes.inner:
            inner = [j for j in nodes.inputs[i] if nodes.leaf[j] < 0]
            if i in feeds:
                feeds.update(inner)
            for j in inner:
                if j not in self.tail and (i in self.tail or self.chunk[j] < self.chunk[i]):
                    yield self.chunk[j], self.chunk[i], i in feeds and i not in self.tail

    def graph(self) -> Graph:
        """The numbers, without the nodes."""
        nodes, firsts = self.nodes, sorted(self.starts)
        crossing = list(self._crossings())
        to_loss = {source for source, _, carried in crossing if not carried} | {
            self.chunk[i] for i in nodes.roots if i not in self.tail
        }
        links = Counter((source, target) for source, target, carried in crossing if carried)
        count = Counter(self.chunk[i] for i in nodes.inner if i not in self.tail)
        entered = {target for _, target in links}
        bounds = enumerate(pairwise([*firsts, len(self.uses)]))
        spans = [
            self._span(range(a, b), count[c], c in to_loss, c in entered) for c, (a, b) in bounds
        ]
        joined = [
            self._link(firsts, *ends, edges, ends[0] in to_loss)
            for ends, edges in sorted(links.items())
        ]
        views = len(nodes.nodes) - len(nodes.inner) - len(nodes.variables)
        leaves = tuple(
            self._leaf(i) for i in sorted(nodes.names, key=lambda i: not nodes.names[i][1])
        )
        return Graph(tuple(spans), tuple(joined), leaves, len(nodes.roots), len(self.tail), views)

    def _leaf(self, leaf: int) -> GraphLeaf:
        uses = self.nodes.uses[leaf]
        return GraphLeaf(
            *self.nodes.names[leaf],
            tuple(sorted({self.chunk[i] for i in uses if i not in self.tail})),
            len(uses),
        )

    def _span(self, uses: range, count: int, to_loss: bool, entered: bool) -> Span:
        steps = sum(self.nodes.fused(self.uses[k]) or 1 for k in uses if k in self.main)
        ages = {self.age[k] for k in uses}
        enters = self._enters(uses[0], entered) if uses else ""
        return Span(
            steps, count, enters, "freed" in ages, bool(ages - {"now", "freed", ""}), to_loss
        )

    def _enters(self, k: int, entered: bool) -> Entry:
        """How the state enters the first step of a chunk."""
        if self.before[k] >= 0:
            return "graph"
        own = self.nodes.nexts[self.uses[k]]
        last = (
            own[1:2] if self.nodes.ours(self.uses[k]) else own[-1:]
        )  # of a fused call of torch, the state comes last
        states = [own[s] for s in self.slots if s < len(own)] if self.slots else last
        if any(j >= 0 for j in states):
            computed = any(j >= 0 and self.nodes.leaf[j] < 0 for j in states)
            return "computed" if computed else "leaf"
        return "graph" if entered and not states else "none"

    def _link(
        self, firsts: Sequence[int], source: int, target: int, edges: int, to_loss: bool
    ) -> Crossing:
        known = [self.starts[firsts[c]] for c in range(target, source, -1)]
        # if the outputs of the source contribute to this loss, its chunk has not ended
        fine = {"own", "foreign"} if to_loss else {"own"}
        evidence = next((one for one in known if one not in fine), "own")
        return Crossing(source, target, edges, evidence != "own", WHY[evidence])


def _neighbours(values: Sequence[int], i: int) -> list[int]:
    return [*values[max(0, i - 1) : i], *values[i + 1 : i + 2]]


def _clock(nodes: Nodes) -> tuple[set[int], int]:
    """The uses of all recurrent weights, and the clock.

    The clock is the weight with the most uses; among equals, the one cut most often.
    """
    weights = {leaf: 1 << k for k, leaf in enumerate(nodes.weights())}
    own: Counter[int] = Counter()  # bits of the weights that a node uses, summed
    for leaf, bit in weights.items():
        own.update(dict.fromkeys(nodes.uses[leaf], bit))
    reached, linked, recurring = [0] * len(nodes.nodes), Counter[int](), 0
    for i in reversed(nodes.inner):
        for j in nodes.inputs[i]:
            reached[i] |= reached[j]
        again = own[i] if nodes.fused(i) else reached[i] & own[i]
        recurring |= again
        if reached[i] & own[i]:
            linked.update(leaf for leaf, bit in weights.items() if reached[i] & own[i] & bit)
        reached[i] |= own[i]
    recurrent = [leaf for leaf, bit in weights.items() if recurring & bit]
    if not recurrent:
        return set(), -1

    def rank(leaf: int) -> tuple[int, int, int]:
        uses = nodes.uses[leaf]
        return len(uses), len(uses) - linked[leaf], -min(nodes.seq[i] for i in uses)

    return {i for leaf in recurrent for i in nodes.uses[leaf]}, max(recurrent, key=rank)


def _filled(ages: Sequence[str]) -> list[str]:
    """The ages, with that of a neighbour where a step saves no weights.

    A step saves none if nothing before it requires a gradient.
    """
    filled = list(ages)
    for i in reversed(range(len(filled) - 1)):
        filled[i] = filled[i] or filled[i + 1]
    for i in range(1, len(filled)):
        filled[i] = filled[i] or filled[i - 1]
    return filled
