"""What an error of autograd is about: which state hangs on a freed graph, which tensor was changed, and where."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from sys import _getframe as frame_at
from typing import Any

from torch import Tensor

from throughtime.doctor.finding import Finding, Findings
from throughtime.doctor.frames import Key, Place, line_of
from throughtime.doctor.graph import changed, crossings, sequence
from throughtime.doctor.names import name_of
from throughtime.doctor.watch import Watcher


class PostMortem:
    """Explains a RuntimeError of backward from the graph of its loss."""

    def __init__(
        self, watcher: Watcher, findings: Findings, recent: Callable[[], Key | None]
    ) -> None:
        self.recent = recent  # where a recurrent layer was called last
        self.watcher, self.findings = watcher, findings
        self.steps: list[
            tuple[int, Place | None, set[tuple[int, ...]]]
        ] = []  # node number at a step, its line, the parameters' shapes
        self.bounds: list[int] = []  # node numbers at each backward

    def stepped(self, place: Place | None, parameters: list[Tensor]) -> None:
        numbers = self.watcher.numbers
        self.steps = [
            *self.steps[-64:],
            (numbers[-1] if numbers else -1, place, {tuple(p.shape) for p in parameters}),
        ]

    def explain(
        self, error: RuntimeError, roots: Iterable[Tensor], place: Place | None
    ) -> Finding | None:
        """The finding behind an error of `backward`, if it is one of those known here."""
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        if "second time" in str(error):
            return next((f for f in (self._second_time(node, place) for node in nodes) if f), None)
        if "inplace operation" in str(error):
            return next((f for f in map(self._in_place, nodes) if f), None)
        return None

    def chunk_of(self, number: int) -> int:
        return bisect_left(self.bounds, number)

    def _second_time(self, root: Any, place: Place | None) -> Finding | None:
        watcher = self.watcher
        if watcher.active and not watcher.now & watcher.before:
            return None
        found = crossings(root, watcher.boundary)
        states = [crossing for crossing in found if crossing.learned]
        if not found:
            return self._root_itself(root, place)
        first = states[0] if states else found[0]
        old = sequence(first.old)
        chunks = self.chunk_of(old), watcher.clock.chunk
        key = watcher.key_of(sequence(first.entry)) or self.recent()
        if not states:
            return self.findings.add("TT104", place, "", self._named(first.old), chunks)
        made = watcher.key_of(old)
        where = f"It was made at {line_of(made)}." if made else ""
        return self.findings.add(
            "TT101", line_of(key) if key else place, where, self._name(key, first.old), chunks
        )

    def _root_itself(self, root: Any, place: Place | None) -> Finding | None:
        old = sequence(root) <= self.watcher.boundary
        return (
            self.findings.add("TT104", place, "The loss is one of an earlier chunk.")
            if old
            else None
        )

    def _name(self, key: Any, node: Any) -> str:
        return self.watcher.names.get(key, "") or self._named(node)

    @staticmethod
    def _named(node: Any) -> str:
        return name_of(
            lambda value: isinstance(value, Tensor) and value.grad_fn is node, frame_at()
        )

    def _in_place(self, root: Any) -> Finding | None:
        found = changed(root)
        if found is None:
            return None
        node, said = found
        versions = re.search(r"\[([\d, ]*)\]\].* is at version (\d+); expected version (\d+)", said)
        if versions is None:
            return None
        shape = [int(n) for n in versions[1].split(",") if n.strip()]
        now, expected, number = int(versions[2]), int(versions[3]), sequence(node)
        needed = self.watcher.key_of(number)
        detail = f"It is needed by the operation at {line_of(needed)}." if needed else ""
        culprit = self._by_the_user(shape, now, expected, number) or self._by_a_step(shape, number)
        return self.findings.add("TT103", culprit, detail)

    def _by_the_user(self, shape: list[int], now: int, expected: int, number: int) -> Place | None:
        later = [
            entry
            for entry in self.watcher.in_place
            if expected < entry[0] <= now and entry[3] >= number - 64
        ]
        same = [entry for entry in later if list(entry[1]) == shape]
        part = [entry for entry in later if _count(entry[1]) >= _count(shape)]
        chosen = same or part
        return line_of(chosen[0][2]) if chosen else None

    def _by_a_step(self, shape: list[int], number: int) -> Place | None:
        wanted = {tuple(shape), tuple(shape[::-1])}
        for after, place, shapes in self.steps:
            if after >= number and wanted & shapes:
                return place
        return None


def _count(shape: Iterable[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
