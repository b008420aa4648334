"""The doctor: a context manager around a training loop that somebody else wrote.

It watches every operation on tensors through a mode of torch (`torch.overrides.TorchFunctionMode`),
calls of modules, optimizer steps, backwards and batches, and keeps what each tensor came from. It
changes no result: it draws no random number, keeps no gradient and puts back at the end whatever it
wrapped. It is not a profiler and no debugger of shapes.

Cost: some microseconds per operation of the user's code, at most 0.3 of the time of usual loops
(`benchmarks/doctor.py`).
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from throughtime.doctor.events import Events
from throughtime.doctor.finding import Finding, Findings
from throughtime.doctor.patches import Patches
from throughtime.errors import ConfigError

_OPEN: list["Doctor"] = []


class Doctor:
    """What `tt.doctor()` gives: `with tt.doctor() as d:`, then `d.findings`."""

    def __init__(self, findings: Findings) -> None:
        self._findings, self._patches = findings, Patches()
        self._events: Events | None = None
        self.internal_error: Exception | None = (
            None  # of the doctor itself: then something may have been missed
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found so far, in the order in which it was."""
        return tuple(self._findings.found)

    def clear(self) -> None:
        """Forgets what was found so far."""
        self._findings.found.clear()

    def __enter__(self) -> Self:
        if _OPEN:
            raise ConfigError(
                "a doctor is watching already, expected one at a time in a process. Put one"
                " tt.doctor() around the whole loop"
            )
        _OPEN.append(self)
        self._events = Events(self._findings)
        self._patches.put(self._events)
        self._events.watcher.on()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        events = self._events
        self._events = None
        try:
            if events is not None:
                events.watcher.off()
                events.watcher.closed = True
        finally:
            self._patches.remove()
            _OPEN.clear()
        if events is not None and error is None:
            events.close()
        elif error is not None:
            self._tell(error)
        self.internal_error = events.watcher.internal_error if events is not None else None

    def _tell(self, error: BaseException) -> None:
        told = "\n".join(getattr(error, "__notes__", []))
        for finding in self.findings:
            if str(finding) not in told and str(finding) != str(error):
                error.add_note(f"tt.doctor: {finding}")

    def __str__(self) -> str:
        count = len(self.findings)
        first = (
            f"tt.doctor: {count} finding{'s' if count > 1 else ''}"
            if count
            else "tt.doctor: nothing found"
        )
        fault = (
            [
                f"The doctor itself failed and stopped looking: {type(self.internal_error).__name__}:"
                f" {self.internal_error}"
            ]
            if self.internal_error
            else []
        )
        return "\n".join([first, *map(str, self.findings), *fault])


def doctor(*, ignore: Iterable[str] = (), strict: bool = False) -> Doctor:
    """A context manager that names what is wrong with the training loop inside it.

    Use it around a loop in plain PyTorch, Lightning or Ignite that fails, or that trains worse than
    it should. For what the gradient of a sound loop does, take `tt.audit` and `tt.reach`.

    Args:
        ignore: codes that are not reported, such as `{"TT207"}`.
        strict: raise at the first finding.

    Returns:
        A context manager; `findings` holds what was found, printing it gives a report. An exception
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
    return Doctor(Findings.checked(ignore, strict))
