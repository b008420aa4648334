"""The base class of the rules, and the events of a training loop that they receive.

A rule has a method with the name of each event that it needs, and adds findings to
`self.findings`. `_events.RULES` lists the rules in the order in which they receive an event. A rule
that fails does not stop the loop: the doctor stores the exception as `internal_error`.
"""

from typing import Any

from torch import Tensor

from throughtime.doctor.findings import FindingList
from throughtime.doctor.watcher import Watcher

EVENTS = (
    "on_operation",  # (op, result): it depends on parameters; its record may be changed
    "on_detach",  # (detach)
    "on_operation_error",  # (error, inputs, records): an operation on these tensors raises an error
    "before_module",  # (module, inputs, frame): a layer or cell, while operations are not watched
    "after_module",  # (module, result): its outputs
    "on_module_error",  # (module): a layer or cell raises the exception that is handled now
    "before_backward",  # (backward)
    "end_backward",  # (backward): it ended, by an error or not
    "after_backward",  # (backward): it ended without an error, and a new chunk begins
    "explain",  # (error, roots, backward): returns the finding behind an error of a backward
    "before_zero_grad",  # (owner, parameters, line): of an optimizer or a module
    "before_step",  # (optimizer)
    "after_step",  # (optimizer, line)
    "on_exit",  # (error): it ends the loop
    "close",  # (): the end of the loop without an error
)


class Rule:
    """A rule; `clock` is the position in the loop."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        self.watcher, self.findings, self.clock = watcher, findings, watcher.clock


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]
