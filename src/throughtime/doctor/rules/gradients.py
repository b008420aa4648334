"""Rules of the gradients: where they do not arrive, how they are summed, and when they are cleared.

Codes TT203 (detaches), TT301, TT302 and TT304 (optimizer steps).
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from throughtime.doctor._autograd import MeanTerm, mean_terms
from throughtime.doctor._frames import (
    Instruction,
    SourceLine,
    called_by_trainer,
    current_frame,
    line_of,
)
from throughtime.doctor._records import (
    BackwardCall,
    DetachRecord,
)
from throughtime.doctor._torch_private import version_of
from throughtime.doctor.findings import CLEAR_AFTER_STEP, FindingList
from throughtime.doctor.rules import Rule, parameters_of
from throughtime.doctor.watcher import Watcher

REPEATS = 2  # chunks or steps that show a fault before it is reported
MIN_DETACHES = 3  # one after another, a single step between them
MAX_MEANS = 4096  # between two steps


class DetachRule(Rule):
    """Counts the detaches of a state with a single step between them."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        super().__init__(watcher, findings)
        self.detaches: dict[Instruction, int] = {}  # the longest series in this chunk
        self.suspects: dict[Instruction, int] = {}  # such series of the last chunk

    def on_detach(self, detach: DetachRecord) -> None:
        key = detach.instruction
        self.detaches[key] = max(self.detaches.get(key, 0), detach.count)

    def before_backward(self, backward: BackwardCall) -> None:
        self._report()

    def _report(self) -> None:
        """Report the detaches of the last chunk, unless its gradients were passed on by hand."""
        for instruction, count in self.suspects.items():
            if instruction not in self.watcher.used_gradients:
                detail = f"{count} detaches in one chunk, a single step between them."
                self.findings.add("TT203", line_of(instruction), detail)
        self.suspects.clear()

    def after_backward(self, backward: BackwardCall) -> None:
        for instruction, count in self.detaches.items():
            if count >= MIN_DETACHES:
                self.suspects[instruction] = count
        self.detaches.clear()

    def close(self) -> None:
        self._report()


@dataclass
class OptimizerRecord:
    """Facts about one optimizer since its last step."""

    whole: bool  # all backwards since the last step are known
    backwards: list[BackwardCall] = field(default_factory=list)  # since the last clearing or step
    dropped: list[BackwardCall] = field(default_factory=list)  # their gradients were cleared unused
    cleared: bool = True
    wiped: SourceLine | None = None  # the line that did so
    last_grad: Any = None  # a reference to the gradient at the last step
    drops: set[int] = field(default_factory=set)  # the number of dropped backwards, by step
    chunk: int = 0  # at the last step
    stepping: bool = False  # a step with a closure runs
    used: bool = False  # gradients of a dropped backward were used without a step
    watched: bool = False  # the user's reads of such gradients were watched
    versions: int = 0  # of the parameters at the last backward
    grad_reads: int = 0  # the user's reads of gradients before the last backward
    position: tuple[int, int] = (0, -1)  # calls and nodes at the last step
    idle: int = 0  # steps in a row without a backward


class OptimizerRule(Rule):
    """Follows the gradients from a backward to the step that uses them."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        super().__init__(watcher, findings)
        self.last_step = 0  # the chunk at the last step of any optimizer
        self.records: weakref.WeakKeyDictionary[Any, OptimizerRecord] = weakref.WeakKeyDictionary()
        # losses of one mean, with their line and their number among those of one forward pass
        self.means: list[tuple[tuple[SourceLine, int], MeanTerm]] = []
        self.number = 0

    def before_backward(self, backward: BackwardCall) -> None:
        for optimizer, record in self.records.items():
            # gradients that the user cleared by hand count as cleared
            if record.last_grad is not None and not record.cleared:
                grad = _first_grad(optimizer)
                record.cleared = (
                    grad is None or grad is not record.last_grad() or not bool(grad.any())
                )
            if backward.root is not None:
                record.backwards.append(backward)
                record.versions = _versions(optimizer)
                record.grad_reads = self.watcher.grad_reads
        if backward.root is None:
            return
        terms = mean_terms(backward.root)
        if len(terms) == 1 and len(self.means) < MAX_MEANS:
            self.number = self.number + 1 if backward.number <= self.watcher.boundary else 0
            self.means.append(((backward.line, self.number), terms[0]))
        lines = {self.watcher.instruction_of(term.number) for term in terms}
        if len(lines) == 1 < len(terms) and len(terms) - 1 in self.clock.continued.values():
            self._report_unequal(backward.line, terms)  # a mean for each chunk of a recording

    def before_zero_grad(
        self, owner: Any, parameters: list[Tensor], line: SourceLine | None
    ) -> None:
        if isinstance(owner, torch.optim.Optimizer):
            self.records.setdefault(owner, OptimizerRecord(self.clock.chunk == 0))
        ids = {id(p) for p in parameters}
        for optimizer, record in self.records.items():
            cleared = [p for p in parameters_of(optimizer) if id(p) in ids]
            if not cleared:
                continue
            record.cleared = True
            grad = next((p.grad for p in cleared if p.grad is not None), None)
            if (
                record.backwards
                and line is not None
                and not record.stepping
                and grad is not None
                and bool(grad.isfinite().all())
                and bool(grad.any())
            ):
                record.wiped = line
                record.dropped += record.backwards
                record.used |= (
                    any(backward.retain for backward in record.backwards)
                    or record.grad_reads != self.watcher.grad_reads
                    or record.versions != _versions(optimizer)
                )
                record.watched |= self.watcher.active
            record.backwards = []

    def before_step(self, optimizer: Any) -> None:
        self.records.setdefault(optimizer, OptimizerRecord(whole=False)).stepping = True

    def after_step(self, optimizer: Any, line: SourceLine | None) -> None:
        record = self.records[optimizer]
        record.stepping = False
        self._check_means()
        if record.whole:
            record.drops.add(len(record.dropped))
        grad = _first_grad(optimizer)
        if line is not None:
            self._check_wiped(optimizer, record)
            self._check_uncleared(grad, record, line)
            self._check_idle(optimizer, record, line)
        record.cleared, record.wiped, record.dropped, record.whole = False, None, [], True
        record.chunk = self.last_step = self.clock.chunk
        record.last_grad = weakref.ref(grad) if grad is not None else None
        for other in self.records.values():
            other.backwards = []

    def _check_wiped(self, optimizer: Any, record: OptimizerRecord) -> None:
        """Report gradients that were cleared before a step used them."""
        if record.wiped is None:
            return
        none = _lacks_gradients(optimizer)
        unused = record.watched and not record.used
        unused |= self._carried_since(record.chunk)
        always = record.whole and len(record.drops) == 1 and unused
        lines, wiped = ({b.line for b in each} for each in (record.backwards, record.dropped))
        if none or (lines and lines <= wiped and always):
            effect = "has no gradient" if none else "uses those of the last chunk only"
            detail = f"It clears the gradients before a step has used them: the step {effect}."
            fix = "" if none else CLEAR_AFTER_STEP
            self.findings.add("TT302", record.wiped, detail, fix=fix, after=REPEATS)

    def _check_idle(self, optimizer: Any, record: OptimizerRecord, line: SourceLine) -> None:
        """Report steps that follow a forward pass but no backward."""
        numbers = self.watcher.node_numbers
        position = self.clock.call, numbers[-1] if numbers else -1
        idle = (
            self.clock.chunk == record.chunk
            and position != record.position
            and _lacks_gradients(optimizer)
            and not called_by_trainer(current_frame())
        )
        record.position, record.idle = position, record.idle + 1 if idle else 0
        if record.idle == REPEATS:
            detail = "No backward has run since the step before, and no parameter has a gradient."
            self.findings.add("TT304", line, detail)

    def _carried_since(self, chunk: int) -> bool:
        """Whether a recurrent state connects the chunks since that one."""
        return any(c in self.clock.crossed for c in range(chunk + 1, self.clock.chunk))

    def _check_uncleared(
        self, grad: Tensor | None, record: OptimizerRecord, line: SourceLine
    ) -> None:
        last = record.last_grad() if record.last_grad is not None else None
        same = last is not None and grad is last
        if same and not record.cleared and self.clock.chunk > record.chunk:
            detail = (
                "Nothing cleared the gradients since the previous step, so this step uses them"
                " again."
            )
            self.findings.add("TT302", line, detail, after=REPEATS)

    def _check_means(self) -> None:
        """Check the means of each line since the last step."""
        by_line: dict[tuple[SourceLine, int], list[MeanTerm]] = {}
        for key, term in self.means:
            by_line.setdefault(key, []).append(term)
        if self._carried_since(self.last_step):
            for (line, _), terms in by_line.items():
                self._report_unequal(line, terms)
        self.means.clear()

    def _report_unequal(self, line: SourceLine, terms: list[MeanTerm]) -> None:
        """Report means of one kind with the same weight over unequal numbers of elements."""
        counts = sorted({int(term.count) for term in terms})
        alike = {(term.kind, round(term.weight, 9)) for term in terms}
        if len(alike) == 1 and len(counts) > 1:
            detail = f"Means over {counts} elements have the same weight in one step."
            self.findings.add("TT301", line, detail)


def _lacks_gradients(optimizer: Any) -> bool:
    """Whether all gradients are missing or zero."""
    return all(p.grad is None or not bool(p.grad.any()) for p in parameters_of(optimizer))


def _versions(optimizer: Any) -> int:
    """The number of in-place changes of its first and its last parameter."""
    parameters = parameters_of(optimizer)
    return sum(map(version_of, (*parameters[:1], *parameters[-1:])))


def _first_grad(optimizer: Any) -> Tensor | None:
    return next((p.grad for p in parameters_of(optimizer) if p.grad is not None), None)
