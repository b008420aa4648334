"""The doctor: a context manager that names what is wrong with a training loop of the user's own.

It observes every operation on tensors through a `torch.overrides.TorchFunctionMode`, and calls of
modules, optimizer steps, backwards and batches through hooks. It records what each tensor was
computed from. It changes no result: it draws no random number, keeps no gradient, and restores
everything that it wrapped. Not to be confused with a profiler or a debugger of shapes.

Cost: some microseconds per operation of the user's code, at most 0.3 of the time of usual loops
(`benchmarks/doctor.py`).
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from throughtime.doctor._events import LoopEvents
from throughtime.doctor.findings import Finding, FindingList
from throughtime.errors import ConfigError

_OPEN: list["Doctor"] = []


class Doctor:
    """The context manager of `tt.doctor()`: `with tt.doctor() as d:`, then `d.findings`.

    Attributes:
        internal_error: an exception of the doctor itself; then it may have missed faults.
    """

    def __init__(self, findings: FindingList) -> None:
        self._findings = findings
        self._events: LoopEvents | None = None
        self.internal_error: Exception | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings so far, in order of discovery."""
        return tuple(self._findings.items)

    def clear(self) -> None:
        """Remove the findings so far."""
        self._findings.items.clear()

    def __enter__(self) -> Self:
        if _OPEN:
            raise ConfigError(
                "a doctor is watching already, expected one at a time in a process. Put one"
                " tt.doctor() around the whole loop"
            )
        _OPEN.append(self)
        self._events = LoopEvents(self._findings)
        self._events.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        events, self._events = self._events, None
        if events is None:
            return
        try:
            events.close()
        finally:
            _OPEN.clear()
        if error is None:
            events.finish()
        else:
            self._annotate(error)
        self.internal_error = events.watcher.internal_error

    def _annotate(self, error: BaseException) -> None:
        """Add the findings to an exception as notes, those that it lacks."""
        notes = "\n".join(getattr(error, "__notes__", []))
        for finding in self.findings:
            if str(finding) not in notes and str(finding) != str(error):
                error.add_note(f"tt.doctor: {finding}")

    def __str__(self) -> str:
        count = len(self.findings)
        lines = [
            f"tt.doctor: {count} finding{'s' * (count > 1)}"
            if count
            else "tt.doctor: nothing found"
        ]
        lines += map(str, self.findings)
        if self.internal_error is not None:
            error = f"{type(self.internal_error).__name__}: {self.internal_error}"
            lines.append(f"The doctor itself failed and stopped watching: {error}")
        return "\n".join(lines)


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
    return Doctor(FindingList.from_options(ignore, strict))
