"""What grows: graphs kept by retain_graph, losses and outputs kept with theirs, states cut at every step."""

import itertools
import resource
import statistics
import time
from typing import Any

from torch import Tensor

from throughtime.doctor import names
from throughtime.doctor.finding import Findings
from throughtime.doctor.frames import Key, Place, line_of
from throughtime.doctor.graph import hangs_on_freed, is_leaf, reached, sequence
from throughtime.doctor.notes import Cut, Seen
from throughtime.doctor.watch import Watcher

REACH = 6  # chunks behind a retained backward before it is said
SHORT = 3  # the same when the loop ended before
KEPT = 5  # chunks whose losses or outputs are still there
SUMS = 3  # chunks through which a sum went
CUTS = 3  # detaches one after another, a single step between them
TRIES = 2  # searches of all objects for what keeps the results of one line
NODES = 4000  # nodes looked at in a retained graph


class Growing:
    """Watches backwards for what should have gone and did not."""

    def __init__(self, watcher: Watcher, findings: Findings) -> None:
        self.watcher, self.findings = watcher, findings
        self.retained: dict[
            Place, list[tuple[int, int, float, int]]
        ] = {}  # chunks reached, nodes, seconds, bytes
        self.edges: dict[Place, list[int]] = {}
        self.cuts: dict[Key, int] = {}
        self.tries: dict[Key, int] = {}
        self.started = 0.0
        self.steps = 0  # of any optimizer
        self.stepped: dict[Place, list[int]] = {}  # how many there were, at each retained backward

    def cut(self, cut: Cut) -> None:
        self.cuts[cut.key] = max(self.cuts.get(cut.key, 0), cut.count)

    def before_backward(self, root: Any, retain: bool, place: Place | None) -> None:
        """Counts how many earlier chunks a retained graph still reaches."""
        self.started = time.perf_counter()
        if place is None or not (retain or place in self.retained):
            return
        edges = self.edges.setdefault(place, [])
        if len(edges) > 2 * REACH:
            return
        oldest, nodes = sequence(root), 0
        for node in reached(root, NODES):
            nodes += 1
            if not is_leaf(node):
                oldest = min(oldest, sequence(node))
        behind = sum(1 for edge in edges if edge >= oldest)
        edges.append(sequence(root))
        self.stepped.setdefault(place, []).append(self.steps)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.retained.setdefault(place, []).append((behind, nodes, 0.0, peak))

    def after_backward(self, place: Place | None) -> None:
        if place is not None and self.retained.get(place):
            behind, nodes, _, peak = self.retained[place][-1]
            self.retained[place][-1] = behind, nodes, time.perf_counter() - self.started, peak
            if behind == REACH:
                self._retained(place)
        for key, count in self.cuts.items():
            if count >= CUTS:
                self.findings.add(
                    "TT203",
                    line_of(key),
                    f"{count} detaches in one chunk, a single step between them.",
                )
        self.cuts.clear()
        self._kept()

    def _retained(self, place: Place) -> None:
        rows = self.retained[place]
        tail = list(itertools.takewhile(lambda row: row[0] > 0, reversed(rows)))[::-1]
        if not all(b[0] == a[0] + 1 and b[1] > a[1] for a, b in itertools.pairwise(tail)):
            return
        chunk, stepped = self.watcher.clock.chunk, self.stepped[place][-len(tail) :]
        if stepped[0] == stepped[-1] and not any(
            c in self.watcher.clock.crossed for c in range(chunk - len(tail), chunk + 1)
        ):
            return  # several losses of one forward
        chunks = list(range(len(tail)))
        slopes = (
            [
                statistics.linear_regression(chunks, [row[i] for row in tail]).slope
                for i in (1, 2, 3)
            ]
            if len(tail) > 1
            else [0.0] * 3
        )
        slope = f"{slopes[0]:+.0f} nodes, {1e3 * slopes[1]:+.2f} ms, {slopes[2] / 1024:+.0f} kB"
        said = f"It reaches {tail[-1][0]} chunks back. Per chunk: {slope}."
        self.findings.add("TT102", place, said)

    def _kept(self) -> None:
        """Tensors of several chunks whose graph was used up, all of them still there."""
        by_key: dict[Key, list[Seen]] = {}
        chunk = self.watcher.clock.chunk
        for note in self.watcher.seen.values():
            if note.learned and note.chunk < chunk:
                by_key.setdefault(note.key, []).append(note)
        for key, notes in by_key.items():
            if len({note.chunk for note in notes}) >= KEPT and self.tries.get(key, 0) < TRIES:
                self.tries[key] = self.tries.get(key, 0) + 1
                self._hold(
                    [t for note in notes if (t := note.ref()) is not None and t.grad_fn is not None]
                )

    def _hold(self, tensors: list[Tensor]) -> None:
        if len(tensors) < KEPT or not hangs_on_freed(tensors[0].grad_fn, 60):
            return
        holder = names.holder_of(tensors)
        found = names.line_that_fills(holder, self.watcher.files) if holder is not None else None
        if found:
            self.findings.add(
                "TT104", found[0], f"{len(tensors)} of them are still there.", found[1]
            )

    def operation(
        self,
        inputs: list[Tensor],
        notes: list[Any],
        outputs: list[Tensor],
        key: Key,
        made: dict[str, Any],
    ) -> None:
        """A sum that goes on from chunk to chunk with its graph."""
        chunk = self.watcher.clock.chunk
        if outputs[0].numel() != 1 or outputs[0].grad_fn is None:
            return
        old = [
            n
            for t, n in zip(inputs, notes, strict=True)
            if n is not None and t.grad_fn is not None and t.numel() == 1 and n.chunk < chunk
        ]
        old = [n for n in old if key in n.lineage]
        within = [
            n.depth
            for n in notes
            if n is not None and n.learned and n.chunk == chunk and key in n.lineage
        ]
        made["depth"] = max([*(n.depth + 1 for n in old), *within], default=0)
        if made["depth"] >= SUMS and old:
            self.findings.add(
                "TT104", line_of(key), f"The sum goes through {made['depth']} chunks."
            )

    def close(self) -> None:
        for place, rows in self.retained.items():
            if rows[-1][0] >= SHORT and rows[-1][0] == len(rows) - 1:
                self._retained(place)
