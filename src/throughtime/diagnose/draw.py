"""The autograd graph behind a loss as DOT or Mermaid text: chunks, and the states between them.

Nothing is recorded for it: autograd keeps all that is needed. The clock is a weight whose every use
depends on the one before; its uses are the steps. A chunk ends where

1. a use depends on no earlier one: this part of the state starts or was cut there (certain);
2. an earlier backward pass has freed the graph (certain);
3. the weights have been changed in place since, by autograd's version counter (certain);
4. the state begins that the caller passes as the one that entered a chunk (certain);
5. one call of a fused layer, or one segment of `tt.rollout`, ends (certain);
6. autograd made more nodes between two steps than between their neighbours, for a loss, say. If
   these nodes do not belong to this graph, the past was used for something else, and the state
   should have been cut. This is a good guess: it needs chunks of three steps or more, and it takes
   anything else recorded between two steps for the end of a chunk.

A crossing at 1 to 4 should have been cut; at 5 and 6, if nodes outside of this graph lie between.
"""

import html
import math
import textwrap
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from throughtime import state as trees
from throughtime.errors import DataError, counted
from throughtime.state import State

# of nodes: `Any`, since torch's stubs lack most of their attributes
Inputs: TypeAlias = dict[Any, list[Any]]  # of nodes; inputs come before their consumers
Numbers: TypeAlias = dict[Any, int]
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
_FUSED = ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "_RecurrentBackward", "SegmentBackward")
_LEVEL = 500
_DOT = {
    "box": '{} [label="{}", shape=box]',
    "note": '{} [label="{}", shape=plain]',
    "uses": "{} -> {} [color=gray, arrowhead=none]",
    "enters": "{} -> {} [style=dashed]",
    "joined": '{} -> {} [label="{}", penwidth=2.4, weight=9]',
    "overdue": '{} -> {} [label="{}", penwidth=3, weight=9, color=red, fontcolor=red]',
    "counts": "{} -> {}",
}
_MERMAID = {
    "box": '{}["{}"]',
    "note": '{}(["{}"])',
    "uses": "{} --- {}",
    "enters": "{} -.-> {}",
    "joined": '{0} ==>|"{2}"| {1}',
    "overdue": '{0} ==x|"{2}"| {1}',
    "counts": "{} --> {}",
}


class ChunkGraph(NamedTuple):
    """The graph of one chunk.

    Attributes:
        steps: uses of the clock, or the steps of a fused call; 0 if nothing is recurrent.
        nodes: of autograd, without leaves.
        starts: whether a state enters that has no graph, or is a leaf.
        to_loss: whether its outputs contribute to the losses; otherwise only its state does.
    """

    steps: int
    nodes: int
    starts: bool
    to_loss: bool


class Crossing(NamedTuple):
    """A state that crosses from one chunk into a later one with its graph.

    Attributes:
        source: the chunk it comes from, counted from 0.
        target: the chunk it enters.
        overdue: whether it should have been cut.
        why: the evidence.
    """

    source: int
    target: int
    overdue: bool
    why: str


@dataclass(frozen=True)
class Drawing:
    """The result of `tt.draw`: the graph in numbers, and as text that other programs draw.

    Attributes:
        chunks: in time.
        crossings: the states that connect them.
        leaves: how often each weight, and each other tensor that requires a gradient, is used: by
            its attribute path in the module, or by what it is.
        nodes: of autograd, all of them.
    """

    chunks: tuple[ChunkGraph, ...]
    crossings: tuple[Crossing, ...]
    leaves: dict[str, int]
    nodes: int

    @property
    def overdue(self) -> tuple[Crossing, ...]:
        """The crossings that should have been cut."""
        return tuple(crossing for crossing in self.crossings if crossing.overdue)

    @property
    def dot(self) -> str:
        """The picture for Graphviz."""
        return "\n".join(["digraph {", *self._lines(_DOT, "\\n"), "}", ""])

    @property
    def mermaid(self) -> str:
        """The picture for Mermaid, which GitHub and Jupyter draw."""
        return "\n".join(["flowchart TB", *self._lines(_MERMAID, "<br/>"), ""])

    def _repr_markdown_(self) -> str:
        return f"```mermaid\n{self.mermaid}```\n"

    def __str__(self) -> str:
        first = (
            f"{self.nodes:,} nodes in {counted(len(self.chunks), 'chunk')}, {len(self.overdue)} of"
            f" {len(self.crossings)} crossings should have been cut"
        )
        rest = [f"chunk {x.source + 1} -> {x.target + 1}: {x.why}" for x in self.overdue]
        return "\n".join([first, *rest])

    def _lines(self, templates: Mapping[str, str], newline: str) -> Iterator[str]:
        """The picture in one of the two languages."""
        for kind, *texts in self._parts():
            yield templates[kind].format(*(html.escape(t).replace("\n", newline) for t in texts))

    def _parts(self) -> Iterator[tuple[str, ...]]:
        """The nodes and edges of the picture: each a kind, names and a text."""
        chunks, horizons = self.chunks, [chunk.steps for chunk in self.chunks]
        for source, target, *_ in self.crossings:
            horizons[target] = max(horizons[target], horizons[source] + chunks[target].steps)
        leaves = ", ".join(f"{name}\u00a0x\u00a0{uses:,}" for name, uses in self.leaves.items())
        yield "note", "leaves", textwrap.fill(leaves, 50, max_lines=9)
        for i, (chunk, horizon) in enumerate(zip(chunks, horizons, strict=True), 1):
            box, k2 = f"chunk{i}", f"\nk2 (horizon): {horizon:,} steps" * chunk.to_loss
            yield "box", box, f"chunk {i}\n{chunk.steps:,} steps, {chunk.nodes:,} nodes{k2}"
            yield "uses", "leaves", box
            if chunk.starts:
                yield "note", f"before_{box}", "initial or detached state"
                yield "enters", f"before_{box}", box
            if chunk.to_loss:
                yield "counts", box, "loss"
        stride = sum(chunk.steps for chunk in chunks if chunk.to_loss)
        yield "note", "loss", f"loss\nk1 (stride): {stride:,} steps"
        for source, target, overdue, why in self.crossings:
            text = textwrap.fill("should have been cut: " * overdue + why, 44)
            kind = "overdue" if overdue else "joined"
            yield kind, f"chunk{source + 1}", f"chunk{target + 1}", text


def draw(
    losses: Tensor | Iterable[Tensor], module: nn.Module | None = None, *, state: State = None
) -> Drawing:
    """Draw the graph behind a loss: chunks, states that connect them, weights; overdue cuts in red.

    Call it before `loss.backward()` in any PyTorch loop. It needs no recording and changes no
    result. Losses of `tt.updates` need no picture: no graph outlives an update. `tt.audit` measures
    what a cut costs.

    Certain are: a state, or a part of it, that enters without a graph; a graph that an earlier
    backward pass has freed; weights changed in place since; the state you pass. All other ends of
    chunks are guessed from autograd's sequence numbers: more nodes were made between two steps than
    between their neighbours. Such a crossing is red if these nodes do not belong to the losses
    drawn and the steps before do not contribute to them. So pass `state` if chunks have one or two
    steps, or if steps differ in length.

    Three cases look alike: a state that was cut and an initial one; where a net runs again on its
    own outputs, these and a state that was cut in part; and a memory without recurrence, as a
    Transformer's, is one chunk.

    Args:
        losses: a tensor with a graph, or several with one graph.
        module: names the weights by their attribute paths.
        state: the state that entered the chunk of the loss, if available: any nested tensors.

    Returns:
        A `Drawing`: `print(drawing)` for what should have been cut, `drawing.dot` and
        `drawing.mermaid` for the picture, which a notebook shows. k1 (stride) is the number of
        steps whose outputs contribute to the losses, k2 (horizon) that of the steps that credit
        flows back. To write a file: `Path("graph.dot").write_text(drawing.dot)`.

    Raises:
        DataError: a loss without a graph.

    Cost: about 12 microseconds for each node of the graph, on one CPU core, without recursion.
        Saved tensors are unpacked, which recomputes checkpointed activations.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.diagnose.draw import draw
        >>> net = torch.nn.LSTM(3, 8)
        >>> outputs, state = net(torch.randn(20, 1, 3))
        >>> outputs.sum().backward()
        >>> outputs, _ = net(torch.randn(20, 1, 3), state)  # not detached
        >>> drawing = draw(outputs.sum(), net)
        >>> drawing.overdue[0].why
        'the graph before was freed by an earlier backward, so this loss cannot go back through it'
    """
    roots = [losses] if isinstance(losses, Tensor) else list(losses)
    bare = [i for i, loss in enumerate(roots, 1) if loss.grad_fn is None]
    if bare or not roots:
        raise DataError(
            f"got {counted(len(roots), 'loss', 'losses')}, and no graph of {bare or 'any'}: a loss"
            " computed under torch.no_grad(), a detached one or a leaf has none. Draw the loss"
            " before it is detached or converted to a number"
        )
    count, inner, uses = _walk([loss.grad_fn for loss in roots])
    _hold(inner)
    recurrent, steps = _clock(inner, uses)
    last, before = _past(inner, steps)
    entering = [t.grad_fn for t in trees.tensors(() if state is None else state)]
    passed = max((_made(node) for node in entering if node in inner), default=-1)
    starts = _starts(inner, steps, before, passed)
    chunk, to_loss, links = _divided(inner, last, list(starts), recurrent)
    sizes, times = Counter(chunk.values()), list[int]()
    for past in before:  # steps side by side, of a second input to the same net, count once
        times.append(times[past] + 1 if past >= 0 else 0)
    spans = enumerate(pairwise([*starts, len(steps)]))
    known = {} if module is None else {id(p): name for name, p in module.named_parameters()}
    leaves = Counter[str]()
    for leaf, nodes in uses.items():
        shape = tuple(leaf.variable.shape)
        leaves[known.get(id(leaf.variable), f"leaf {shape}")] += len(nodes)
    return Drawing(
        tuple(
            ChunkGraph(
                sum(map(_fused_steps, steps[a:b])) or len(set(times[a:b])),
                sizes[c],
                starts[a] == "cut",
                c in to_loss,
            )
            for c, (a, b) in spans
        ),
        tuple(_crossing(starts, *link, link[0] in to_loss) for link in sorted(links)),
        dict(leaves),
        count,
    )


def _walk(roots: list[Any]) -> tuple[int, Inputs, Inputs]:
    """The number of nodes; the inner ones, with inner inputs; the uses of each leaf.

    A view of a leaf, such as a transpose, is that leaf.
    """
    inputs: Inputs = {}
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in inputs:
            inputs[node] = [other for other, _ in node.next_functions if other]
            todo += inputs[node]
    inner: Inputs = {}
    uses: Inputs = {}
    leaf: dict[Any, Any] = {}
    for node in TopologicalSorter(inputs).static_order():
        ends = {leaf[i] for i in inputs[node] if i in leaf}
        if node.name().endswith("AccumulateGrad"):
            leaf[node], uses[node] = node, []
        elif ends and len(node.next_functions) == 1 and node not in roots:
            leaf[node] = ends.pop()
        else:
            inner[node] = [i for i in inputs[node] if i not in leaf]
            # under a trace, a state that enters names the weights without using them
            for end in ends if node.name() != "CreditGateBackward" else ():
                uses[end].append(node)
    return len(inputs), inner, uses


def _hold(inner: Inputs) -> None:
    """Let the nodes of one level hold those of the level `_LEVEL` nodes further down.

    Torch frees nodes that Python has accessed by recursion, which overflows the stack some 60,000
    nodes deep (2.13). A held node ends the recursion. It is freed with the nodes that hold it, so
    nothing outlives the graph.
    """
    depth, levels = Counter[Any](), defaultdict[int, list[Any]](list)
    for node in reversed(inner):
        levels[depth[node]].append(node)
        for i in inner[node]:
            depth[i] = max(depth[i], depth[node] + 1)
    for level in range(_LEVEL, len(levels), _LEVEL):
        for node in levels[level - _LEVEL]:
            node.metadata["throughtime.held"] = levels[level]


def _clock(inner: Inputs, uses: Inputs) -> tuple[set[Any], list[Any]]:
    """The uses of all recurrent weights, and those of the clock, in the order of their making.

    The clock is the weight with the most uses; among equals, the one cut most often, then the one
    used first: a layer above depends on it.
    """
    weights = [leaf for leaf in uses if isinstance(leaf.variable, nn.Parameter)]
    order = {leaf: sorted(uses[leaf], key=_made) for leaf in weights or uses}
    cuts = {leaf: _past(inner, nodes)[1].count(-1) for leaf, nodes in order.items()}
    linked = [n for n in order if cuts[n] < len(order[n]) or any(map(_fused_steps, order[n]))]
    linked.sort(key=lambda leaf: (-len(order[leaf]), -cuts[leaf], _made(order[leaf][0])))
    return {node for leaf in linked for node in order[leaf]}, order[linked[0]] if linked else []


def _past(inner: Inputs, steps: list[Any]) -> tuple[Numbers, list[int]]:
    """The latest step that each node depends on, itself included, and the one before each step.

    -1: none.
    """
    last: Numbers = {}
    before = [-1] * len(steps)
    number = {node: k for k, node in enumerate(steps)}
    for node, inputs in inner.items():
        last[node] = max((last[i] for i in inputs), default=-1)
        if node in number:
            before[number[node]], last[node] = last[node], number[node]
    return last, before


def _starts(inner: Inputs, steps: list[Any], before: list[int], passed: int) -> dict[int, str]:
    """The steps with which chunks begin, and the evidence.

    Args:
        inner: all nodes.
        steps: among them.
        before: the step on which each one depends; -1: none.
        passed: the sequence number of the state that the caller passes; -1: none.
    """
    recorded, numbers = sorted(map(_made, inner)), list(map(_made, steps))
    gaps = [b - a for a, b in pairwise(numbers)]
    foreign = [
        b - a - bisect_right(recorded, b) + bisect_right(recorded, a) for a, b in pairwise(numbers)
    ]
    fused = any(_fused_steps(node) > 1 for node in steps)

    def is_peak(values: list[int], k: int) -> bool:
        near = [*values[max(0, k - 1) : k], *values[k + 1 : k + 2]]
        return values[k] > (0 if fused else max(near, default=math.inf))

    wider = {k for k in range(len(gaps)) if is_peak(gaps, k)}
    # too many to be chunk ends: a step uses the weight twice, or steps differ
    guessed = wider if fused or 3 * len(wider) <= len(gaps) else ()
    starts, faults = {0: "cut"}, [_faults(node) for node in steps]
    for k in range(1, len(steps)):
        # a first step saves no weights if its state requires no gradient
        saved = faults[k - 1] or before[k - 1] >= 0
        if before[k] < 0 and k - 1 not in before[k:]:  # else it is parallel to another
            starts[k] = "cut"
        elif saved and faults[k - 1] != faults[k]:
            starts[k] = "freed" if "freed" in faults[k - 1] + faults[k] else "weights"
        elif numbers[k - 1] <= passed < numbers[k]:
            starts[k] = "passed"
        elif k - 1 in guessed:
            starts[k] = "foreign" if is_peak(foreign, k - 1) else "own"
    return starts


def _faults(node: Any) -> str:
    """Why saved tensors of a node cannot be used any more: freed, or changed in place since."""
    faults: list[str] = []
    for name in dir(type(node)):
        if (name.startswith("_saved_") and "_sym_" not in name) or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError as error:
                if "already been freed" in str(error):
                    return "freed"
                faults.append(str(error))
    return "".join(faults)


def _divided(
    inner: Inputs, last: Numbers, firsts: list[int], recurrent: set[Any]
) -> tuple[Numbers, set[int], set[tuple[int, int]]]:
    """The chunk of every inner node, the chunks that contribute to the loss, and the crossings.

    A node belongs to the chunk of the latest step that it depends on; one before the first step, to
    that of its consumer.
    """
    chunk = {node: bisect_right(firsts, k) - 1 for node, k in last.items() if k >= 0}
    fed, to_loss, edges = set[Any](), set[int](), list[tuple[Any, Any]]()
    for node in reversed(inner):
        own = chunk.setdefault(node, 0)
        for i in inner[node]:
            if last[i] < 0:
                chunk[i] = min(chunk.get(i, own), own)
            if node in fed or node in recurrent:
                edges.append((i, node))
                fed.add(i)
        if node not in fed:  # no later use of a recurrent weight depends on it
            to_loss.add(own)
    links = {(chunk[i], chunk[node]) for i, node in edges}
    return chunk, to_loss, {link for link in links if link[0] < link[1]}


def _crossing(starts: Mapping[int, str], source: int, target: int, to_loss: bool) -> Crossing:
    """A state that crosses; `to_loss`: the outputs of its source contribute to the losses."""
    # its chunk has not ended if they do
    fine = {"own", "foreign"} if to_loss else {"own"}
    known = list(starts.values())[target:source:-1]
    evidence = next((one for one in known if one not in fine), "own")
    return Crossing(source, target, evidence != "own", WHY[evidence])


def _fused_steps(node: Any) -> int:
    """The steps of a fused layer's call; 0 for any other node."""
    name, shape = node.name(), node._input_metadata[0].shape
    if not name.startswith(_FUSED):
        return 0
    # oneDNN always puts time first, cuDNN as the layer does
    swapped = "Mkldnn" not in name and getattr(node, "_saved_batch_first", False)
    return shape[int(swapped)] if len(shape) > 2 else 1


def _made(node: Any) -> int:
    """The only number that gives the order in which nodes were made."""
    return node._sequence_nr()
