"""The doctor: a context manager that names what is wrong with a training loop of the user's own.

It observes every operation on tensors through a `torch.overrides.TorchFunctionMode`, and calls of
modules, optimizer steps, backwards and batches through hooks. It records what each tensor was
computed from. It changes no result: it draws no random number, keeps no gradient, and restores
everything that it wrapped. Not to be confused with a profiler or a debugger of shapes.

Cost: 500 chunks of 20 steps take 1.4 times as long with an LSTM or a cell by hand, 1.2 times with
an LSTMCell (`benchmarks/doctor.py`); less after the first chunks.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from throughtime.doctor._events import LoopEvents
from throughtime.doctor.findings import Finding, FindingList
from throughtime.errors import ConfigError, DiagnosisError

_OPEN: list["Doctor"] = []
_NO_STATE = (
    "A recurrent state is that of a layer or cell of torch.nn, or of an operation that uses its own"
    " earlier result. Other processes and threads are not watched, nor is code inside"
    " torch.compile, nor are the loops of throughtime itself, such as tt.updates."
)
_NO_BACKWARD = (
    "No backward pass was watched, so only the handling of the state was checked. A training loop"
    " calls loss.backward() in every chunk."
)


@dataclass(frozen=True)
class Coverage:
    """The part of a loop that a doctor watched.

    Attributes:
        backwards: backward passes without an error; each ends a chunk.
        steps: optimizer steps.
        recurrences: lines that compute a recurrent state, such as `train.py:12`.
        carried: whether a state went from a chunk to a later one.
    """

    backwards: int = 0
    steps: int = 0
    recurrences: tuple[str, ...] = ()
    carried: bool = False

    def __str__(self) -> str:
        of = f"the recurrent state of {', '.join(self.recurrences)},"
        carried = f"{of} {'' if self.carried else 'not '}carried from chunk to chunk"
        state = carried if self.recurrences else "no recurrent state"
        missing = _NO_STATE if not self.recurrences else "" if self.backwards else _NO_BACKWARD
        watched = f"backward passes: {self.backwards}; optimizer steps: {self.steps}; {state}."
        return f"Watched: {watched}\n{missing}".rstrip()


class Doctor:
    """The context manager of `tt.doctor()`: `with tt.doctor() as d:`, then `d.findings`.

    While it is open and afterwards these hold:

    - It changes no result: values, gradients, random numbers and exceptions are those of the loop.
    - A finding is certain, and each line has each code once. What is not certain is no finding.
    - "nothing found" is the verdict only of a whole loop with a recurrent state in it.
    - A fault of the doctor ends its watch, not the loop; `internal_error` then holds it.
    - One doctor is open at a time, and it watches the thread that opened it.

    Attributes:
        internal_error: an exception of the doctor itself; then it may have missed faults.
        ended: the type of the exception that ended the loop; empty if none did.
        coverage: the part of the loop that was watched; set at the end of the `with`.
    """

    def __init__(self, findings: FindingList) -> None:
        self._findings = findings
        self._events: LoopEvents | None = None
        self.internal_error: Exception | None = None
        self.ended = ""
        self.coverage = Coverage()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings so far, in order of discovery."""
        return tuple(self._findings.items)

    @property
    def verdict(self) -> str:
        """The result in a line, such as "2 findings"; "nothing found" only after a whole loop."""
        if count := len(self.findings):
            return f"{count} finding{'s' * (count > 1)}"
        if self.internal_error is not None:
            return "no verdict, since the doctor itself failed"
        if self.ended:
            return f"no finding before the run ended with {self.ended}"
        if not self.coverage.recurrences:
            return "no verdict, since no recurrent state was watched"
        return "nothing found"

    def clear(self) -> None:
        """Remove the findings so far."""
        self._findings.items.clear()

    def __enter__(self) -> Self:
        if _OPEN:
            raise ConfigError(
                "a doctor is watching already, expected one at a time in a process. Put one"
                " tt.doctor() around the whole loop, or none where throughtime doctor runs the"
                " script"
            )
        _OPEN.append(self)
        self._events = LoopEvents(self._findings)
        self._events.open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        events = self._stop()
        if events is None:
            return
        has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        self.ended = type(error).__name__ if has_failed else ""
        try:
            events.end(error if has_failed else None)
        finally:
            log, self.internal_error = events.log, events.internal_error
            lines = dict.fromkeys(str(each.line) for each in log.units.values())
            self.coverage = Coverage(log.chunk, log.steps, tuple(lines), bool(log.crossed))
        if error is not None and not isinstance(error, DiagnosisError):
            for finding in self.findings:
                error.add_note(f"tt.doctor: {finding}")

    def _stop(self) -> LoopEvents | None:
        """Stop watching; return the events, or `None` if there are none."""
        events, self._events = self._events, None
        _OPEN.clear()
        if events:
            events.close()
        return events

    def __str__(self) -> str:
        lines = [f"tt.doctor: {self.verdict}", *map(str, self.findings)]
        if self.internal_error is not None:
            error = f"{type(self.internal_error).__name__}: {self.internal_error}"
            lines.append(f"The doctor itself failed and stopped watching: {error}")
        elif not self.findings and self._events is None:
            lines.append(str(self.coverage))
        return "\n".join(lines)


def _stop_in_child() -> None:
    """Leave a forked process, such as a worker of a DataLoader, unwatched."""
    for each in _OPEN:
        each._stop()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_stop_in_child)


def doctor(*, ignore: Iterable[str] = (), strict: bool = False) -> Doctor:
    """A context manager that names what is wrong with the training loop inside it.

    Use it around a loop in plain PyTorch, Lightning or Ignite that fails, or that trains worse than
    it should. For the gradient of a sound loop use `tt.audit` and `tt.reach`.

    Args:
        ignore: codes that are not reported, such as `{"TT207"}`.
        strict: raise at the first finding.

    Returns:
        A context manager. `findings` holds the findings; printing it gives a report. An exception
        that passes through keeps its type and gains the diagnosis as a note.

    Raises:
        ConfigError: an unknown code, or a doctor inside another.
        DiagnosisError: under `strict`, at the first finding.

    Cost:
        Some microseconds for each operation that the loop's own code calls; nothing when it is not
        open.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.doctor import doctor
        >>> lstm, x, state = torch.nn.LSTM(2, 3), torch.randn(40, 1, 2), None
        >>> with doctor() as d:
        ...     for chunk in x.split(10):
        ...         y, state = lstm(chunk)
        ...         y.square().mean().backward()
        >>> [finding.code for finding in d.findings]
        ['TT201']

    References:
        Williams & Peng, An efficient gradient-based algorithm for on-line training of recurrent
        network trajectories, 1990.
    """
    return Doctor(FindingList(ignore, strict))
