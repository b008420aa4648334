"""Optimizer steps: what was cleared and when, and which means were added up into one."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from throughtime.doctor.finding import Findings
from throughtime.doctor.frames import Place
from throughtime.doctor.graph import means
from throughtime.doctor.notes import Clock

TWICE = 2  # steps that show a fault before it is said


@dataclass
class Record:
    """What is known of one optimizer since its last step."""

    cleared: bool = True
    wiped: Place | None = None  # where gradients were cleared that no step had used
    wiped_lines: set[Place] = field(default_factory=set)
    backwards: int = 0  # since the last clearing or step
    lines: set[Place] = field(default_factory=set)
    kept: Any = None  # the gradient seen at the last step
    steps: int = 0
    uncleared: int = 0
    lost: int = 0
    dropped: int = 0  # backwards since the last step whose gradients were cleared unused
    drops: set[int] = field(default_factory=set)  # how many, at each step but the first
    since: int = 0  # the chunk at the last step
    inside: bool = False  # a step with a closure is running


class Stepping:
    """Follows gradients from backward to step."""

    def __init__(self, findings: Findings, clock: Clock) -> None:
        self.findings, self.clock = findings, clock
        self.since = 0  # the chunk at the last step of any optimizer
        self.records: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()
        self.means: list[tuple[Place, list[tuple[str, float, float]]]] = []

    def backward(self, root: Any, place: Place | None) -> None:
        """A backward that went through: what it was the mean of."""
        if place is not None and len(self.means) < 4096:
            self.means.append((place, means(root) if root is not None else []))
        for record in self.records.values():
            record.backwards += 1
            if place is not None:
                record.lines.add(place)

    def before_backward(self) -> None:
        """Gradients that the user cleared by hand count as cleared."""
        for optimizer, record in self.records.items():
            first = _first(optimizer)
            if record.kept is not None and not record.cleared:
                same = first is not None and first.grad is not None and first.grad is record.kept()
                record.cleared = not same or not bool(_grad(first).any())

    def clearing(self, parameters: list[Tensor], place: Place | None) -> None:
        """`zero_grad` of an optimizer or a module, before it clears."""
        ids = {id(p) for p in parameters}
        for optimizer, record in self.records.items():
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            if not any(id(p) in ids for p in mine):
                continue
            record.cleared = True
            lost = next((p.grad for p in mine if id(p) in ids and p.grad is not None), None)
            if (
                record.backwards
                and place is not None
                and not record.inside
                and lost is not None
                and bool(lost.isfinite().all())
                and bool(lost.any())
            ):
                record.wiped, record.wiped_lines = place, record.wiped_lines | record.lines
                record.dropped += record.backwards
            record.backwards, record.lines = 0, set()

    def known(self, optimizer: Any) -> Record:
        return self.records.setdefault(optimizer, Record())

    def step(self, optimizer: Any, place: Place | None) -> None:
        """After an optimizer stepped."""
        record = self.known(optimizer)
        record.steps += 1
        record.inside = False
        self._means()
        if record.steps > 1:
            record.drops.add(record.dropped)
        if place is not None:
            self._wrong_place(optimizer, record)
            self._never(record, place)
        first = _first(optimizer)
        record.cleared, record.backwards, record.wiped = False, 0, None
        record.lines, record.wiped_lines = set(), set()
        record.dropped, record.since, self.since = 0, self.clock.chunk, self.clock.chunk
        record.kept = weakref.ref(_grad(first)) if first is not None else None
        for other in self.records.values():
            other.backwards, other.lines = 0, set()

    def _wrong_place(self, optimizer: Any, record: Record) -> None:
        if record.wiped is None:
            return
        nothing = all(
            p.grad is None or not bool(p.grad.any())
            for group in optimizer.param_groups
            for p in group["params"]
        )
        always = len(record.drops) == 1 and self._carried(record.since)
        if nothing or (record.lines and record.lines <= record.wiped_lines and always):
            record.lost += 1
            if record.lost == TWICE:
                what = (
                    "the step finds no gradient"
                    if nothing
                    else "the step gets those of the last chunk only"
                )
                self.findings.add(
                    "TT302",
                    record.wiped,
                    f"It clears what backward left, before a step has used it: {what}.",
                )

    def _carried(self, since: int) -> bool:
        """Whether a recurrent state joins the chunks since that one."""
        return any(chunk in self.clock.crossed for chunk in range(since + 1, self.clock.chunk))

    def _never(self, record: Record, place: Place) -> None:
        if record.steps > 1 and not record.cleared and record.backwards:
            record.uncleared += 1
            if record.uncleared == TWICE:
                self.findings.add(
                    "TT302",
                    place,
                    "Since the step before nothing cleared the gradients; this one uses the old"
                    " ones again.",
                )

    def _means(self) -> None:
        """Means of one line, with one weight for all and unequal numbers of elements."""
        by_line: dict[Place, list[tuple[str, float, float]]] = {}
        for place, parts in self.means:
            if len(parts) == 1:
                by_line.setdefault(place, []).append(parts[0])
        for place, parts in by_line.items():
            kinds, weights, counts = (
                {p[0] for p in parts},
                {round(p[1], 9) for p in parts},
                {p[2] for p in parts},
            )
            if (
                len(parts) > 1
                and len(kinds) == len(weights) == 1
                and len(counts) > 1
                and self._carried(self.since)
            ):
                self.findings.add(
                    "TT301",
                    place,
                    f"Means over {sorted(int(c) for c in counts)} elements count the same in one"
                    " step.",
                )
        self.means.clear()


def _first(optimizer: Any) -> Tensor | None:
    return next(
        (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None), None
    )


def _grad(parameter: Tensor | None) -> Tensor:
    return (
        parameter.grad if parameter is not None and parameter.grad is not None else torch.zeros(())
    )
