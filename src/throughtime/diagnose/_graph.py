"""The graph behind a loss, folded into chunks: which chunk's graph hangs on which state.

Nothing has to be recorded for it: autograd keeps what is needed. A weight that is used again and
again, each use depending on the one before, is the clock: its uses are the steps. A chunk ends
where

1. a use depends on no earlier one: the state, or this part of it, was cut there, or starts
(certain); 2. what an earlier backward has freed ends (certain);
3. the weights have since been changed in place: autograd counts their versions (certain);
4. the state begins that the caller names as the one that entered a chunk (certain);
5. one call of a fused layer ends (certain);
6. more autograd nodes than usual were made between two steps, by their sequence numbers: of a loss,
   say. Where these nodes do not belong to the graph looked at, the past was used for something
   else, and the state should have been cut (a good guess: it takes chunks of three steps at least,
   and takes whatever else was recorded between two steps for the end of a chunk).

A crossing at 1 to 4 should have been cut, and so should one at 5 and 6 where nodes that are not
looked at lie between.
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
    "given": "the state given as entering here still hangs on the graph before",
    "unseen": (
        "something else, such as another loss, was recorded in between, and the state was not cut"
    ),
    "seen": "one graph: what lies in between belongs to it",
}


@dataclass(frozen=True)
class Leaf:
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
        steps: uses of the clock, or the steps of a fused call; 0 if nothing recurs.
        nodes: of autograd.
        enters: how the state comes in: with a graph, without any, from a leaf, or computed from
            something else; empty if unknown.
        freed: an earlier backward has freed it.
        stale: the weights have been changed in place since.
        to_loss: its outputs go into what is drawn; else only its state does.
    """

    steps: int
    nodes: int
    enters: Entry
    freed: bool
    stale: bool
    to_loss: bool


@dataclass(frozen=True)
class Link:
    """A state that crosses from one chunk into a later one with its graph.

    Attributes:
        source: the chunk it comes from, counted from 0.
        target: the chunk it enters.
        edges: of autograd.
        overdue: whether it should have been cut.
        why: what that is known from.
    """

    source: int
    target: int
    edges: int
    overdue: bool
    why: str


@dataclass(frozen=True)
class Graph:
    """What `walk` found. Every node is in a chunk, of the loss, on the way to a leaf, or a leaf."""

    chunks: tuple[Span, ...]
    links: tuple[Link, ...]
    leaves: tuple[Leaf, ...]
    losses: int
    loss_nodes: int
    leaf_views: int

    @property
    def nodes(self) -> int:
        """All nodes, leaves among them."""
        return (
            sum(chunk.nodes for chunk in self.chunks)
            + self.loss_nodes
            + self.leaf_views
            + len(self.leaves)
        )

    @property
    def overdue(self) -> tuple[Link, ...]:
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
    """The graph behind a loss, or several, folded into chunks; nothing is changed.

    Saved tensors of the clock's uses are unpacked, which runs the hooks of whoever packed them,
    such as activation checkpointing.

    Args:
        losses: a tensor with a graph, or several; whatever else hangs on the graph is not seen.
        module: names the weights.
        state: the state that entered the chunk of the loss, if it is at hand.

    Raises:
        DataError: a loss without a graph.

    Cost: linear in the nodes, about 12 microseconds each; no recursion.

    Example:
        >>> import torch
        >>> cell, h = torch.nn.GRUCell(2, 3), torch.zeros(1, 3)
        >>> for x in torch.randn(10, 1, 2):
        ...     h = cell(x, h)
        >>> found = walk(h.sum(), cell)
        >>> len(found.chunks), found.chunks[0].steps, found.leaves[0].name
        (1, 10, 'weight_ih')
    """
    roots = [losses] if isinstance(losses, Tensor) else list(losses)
    for i, loss in enumerate(roots):
        if loss.grad_fn is None:
            raise DataError(
                f"loss {i + 1} of {len(roots)} has no graph: it was made under torch.no_grad(),"
                " detached, or is a leaf. Draw the loss before it is detached, or turned into a"
                " number"
            )
    if not roots:
        raise DataError(
            "got no loss, expected one tensor at least: a graph is looked at from its loss"
        )
    nodes = Nodes([loss.grad_fn for loss in roots if loss.grad_fn is not None], module)
    return _Folded(
        nodes,
        {t.grad_fn for t in trees.tensors(() if state is None else state) if t.grad_fn is not None},
    ).graph()


class _Folded:
    """The nodes sorted into chunks."""

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
        """The latest use of the clock that each node depends on, itself included, and for each use the one before it; -1: none."""
        own = {i: k for k, i in enumerate(self.uses)}
        best, before = [-1] * len(self.nodes.nodes), [-1] * len(self.uses)
        for i in reversed(self.nodes.inner):
            reached = max((best[j] for j in self.nodes.nexts[i] if j >= 0), default=-1)
            if i in own:
                before[own[i]] = reached
            best[i] = own.get(i, reached)
        return best, before

    def _boundaries(self, entering: set[Node]) -> dict[int, str]:
        """The uses of the clock with which chunks begin, and what that is known from.

        Weaker evidence first, stronger over it.
        """
        found: dict[int, str] = {}
        chains = self._chains()
        self.main = {k for chain in chains for k in chain}
        for chain in chains:
            found |= self._by_distance(chain)
            found |= dict.fromkeys(self._after(chain, entering), "given")
            for a, b in pairwise(chain):
                if self.age[a] != self.age[b]:
                    found[b] = "freed" if "freed" in {self.age[a], self.age[b]} else "weights"
        return found | {chain[0]: "cut" for chain in chains}

    def _chains(self) -> list[list[int]]:
        """Unbroken runs of uses, one after another.

        A run beside another, as of a second input through the same net, is left out.
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
        """Where more was recorded between two uses than between their neighbours."""
        seq = [self.nodes.seq[self.uses[k]] for k in chain]
        wide = [b - a for a, b in pairwise(seq)]
        known = [
            bisect_right(self.recorded, b) - bisect_right(self.recorded, a)
            for a, b in pairwise(seq)
        ]
        unseen = [all_made - seen for all_made, seen in zip(wide, known, strict=True)]
        if any(self.nodes.fused(self.uses[k]) > 1 for k in chain):
            return {chain[i + 1]: "unseen" if unseen[i] else "seen" for i in range(len(wide))}
        odd = [i for i in range(len(wide)) if len(wide) > 1 and wide[i] > max(_beside(wide, i))]
        # So many exceptions are the rule: a step that uses the weight twice, or steps that differ.
        if 3 * len(odd) > len(wide):
            return {}
        return {
            chain[i + 1]: "unseen" if unseen[i] > max(_beside(unseen, i)) else "seen" for i in odd
        }

    def _after(self, chain: Sequence[int], entering: set[Node]) -> list[int]:
        """The first use after the state given was made."""
        made = [
            self.nodes.seq[self.nodes.number[node]]
            for node in entering
            if node in self.nodes.number
        ]
        at = bisect_right([self.nodes.seq[self.uses[k]] for k in chain], max(made, default=-1))
        return [chain[at]] if made and 0 < at < len(chain) else []

    def _tail(self) -> set[int]:
        """The nodes that only add losses up."""
        nodes, tail, held = self.nodes, set[int](), set[int]()
        for i in nodes.inner:
            made_of = [j for j in nodes.nexts[i] if j >= 0]
            ends = i in nodes.roots or i not in held
            summed = bool(made_of) and all(nodes.leaf[j] < 0 and nodes.scalar(j) for j in made_of)
            if (
                ends
                and i not in self.recurrent
                and (nodes.scalar(i) or (summed and i not in nodes.roots))
            ):
                tail.add(i)
            else:
                held.update(made_of)
        return tail

    def _labels(self) -> list[int]:
        """The chunk of every inner node: of the latest use it depends on; of what comes before the first use, that of its consumer."""
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
                for j in nodes.nexts[i]:
                    if j >= 0 and self.best[j] < 0:
                        chunk[j] = min(chunk[j], chunk[i])
        return chunk

    def _crossings(self) -> Iterator[tuple[int, int, bool]]:
        """Edges from a chunk into a later one or the loss: source, target, and whether the state goes there."""
        nodes = self.nodes
        feeds = set(self.recurrent)  # what a later step depends on
        for i in nodes.inner:
            inner = [j for j in nodes.nexts[i] if j >= 0 and nodes.leaf[j] < 0]
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

    def _leaf(self, leaf: int) -> Leaf:
        uses = self.nodes.uses[leaf]
        return Leaf(
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
        """What stands where the steps after it have their state."""
        if self.before[k] >= 0:
            return "graph"
        own = self.nodes.nexts[self.uses[k]]
        last = (
            own[1:2] if self.nodes.ours(self.uses[k]) else own[-1:]
        )  # of a fused call of torch, the state comes last
        found = [own[s] for s in self.slots if s < len(own)] if self.slots else last
        if any(j >= 0 and self.nodes.leaf[j] < 0 for j in found):
            return "computed"
        return (
            "leaf" if any(j >= 0 for j in found) else "graph" if entered and not found else "none"
        )

    def _link(
        self, firsts: Sequence[int], source: int, target: int, edges: int, to_loss: bool
    ) -> Link:
        known = [self.starts[firsts[c]] for c in range(target, source, -1)]
        fine = (
            {"seen", "unseen"} if to_loss else {"seen"}
        )  # a past whose outputs count in this very loss has not ended
        evidence = next((one for one in known if one not in fine), "seen")
        return Link(source, target, edges, evidence != "seen", WHY[evidence])


def _beside(values: Sequence[int], i: int) -> list[int]:
    return [*values[max(0, i - 1) : i], *values[i + 1 : i + 2]]


def _clock(nodes: Nodes) -> tuple[set[int], int]:
    """The uses of all weights that recur, and the weight that recurs most often, among equals the one cut most often."""
    weights = {leaf: 1 << k for k, leaf in enumerate(nodes.weights())}
    own: Counter[int] = Counter()  # bits of the weights that a node uses, summed
    for leaf, bit in weights.items():
        own.update(dict.fromkeys(nodes.uses[leaf], bit))
    seen, linked, recurring = [0] * len(nodes.nodes), Counter[int](), 0
    for i in reversed(nodes.inner):
        for j in nodes.nexts[i]:
            seen[i] |= seen[j] if j >= 0 else 0
        again = own[i] if nodes.fused(i) else seen[i] & own[i]
        recurring |= again
        if seen[i] & own[i]:
            linked.update(leaf for leaf, bit in weights.items() if seen[i] & own[i] & bit)
        seen[i] |= own[i]
    found = [leaf for leaf, bit in weights.items() if recurring & bit]
    if not found:
        return set(), -1

    def rank(leaf: int) -> tuple[int, int, int]:
        uses = nodes.uses[leaf]
        return len(uses), len(uses) - linked[leaf], -min(nodes.seq[i] for i in uses)

    return {i for leaf in found for i in nodes.uses[leaf]}, max(found, key=rank)


def _filled(ages: Sequence[str]) -> list[str]:
    """A step that keeps no weights, since nothing before it asks for a gradient, is as old as the one after it, or before it."""
    found = list(ages)
    for i in reversed(range(len(found) - 1)):
        found[i] = found[i] or found[i + 1]
    for i in range(1, len(found)):
        found[i] = found[i] or found[i - 1]
    return found
