"""The base class of the rules: the events of a training loop, each of which does nothing here.

A rule overrides the events that it needs and adds findings to `self.findings`. `_events.RULES`
lists the rules in the order in which they receive an event. A rule that fails does not stop the
loop: the doctor stores the exception as `internal_error`.
"""

from types import FrameType
from typing import Any

from torch import Tensor, nn

from throughtime.doctor._frames import SourceLine
from throughtime.doctor._records import BackwardCall, DetachRecord, Operation, TensorRecord
from throughtime.doctor.findings import Finding, FindingList
from throughtime.doctor.watcher import Watcher


class Rule:
    """A rule; `clock` is the position in the loop."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        self.watcher, self.findings, self.clock = watcher, findings, watcher.clock

    def on_operation(self, op: Operation, result: TensorRecord) -> None:
        """Handle an operation that depends on parameters; `result` may be changed."""

    def on_detach(self, detach: DetachRecord, record: TensorRecord) -> None:
        """Handle a detach of the tensor with that record."""

    def before_module(self, module: nn.Module, inputs: Any, frame: FrameType | None) -> None:
        """Handle a layer or cell that is called from `frame` while operations are not watched."""

    def after_module(self, module: nn.Module, result: Any) -> None:
        """Handle the outputs of such a layer or cell."""

    def on_module_error(self, module: nn.Module) -> None:
        """Handle a layer or cell that raises the exception that is handled now."""

    def on_operation_error(
        self, error: RuntimeError, inputs: list[Tensor], records: list[TensorRecord | None]
    ) -> None:
        """Handle an operation on these tensors that raises an error."""

    def on_exit(self, error: BaseException) -> None:
        """Handle an error that ends the loop."""

    def before_backward(self, backward: BackwardCall) -> None:
        """Handle a backward that begins."""

    def end_backward(self, backward: BackwardCall) -> None:
        """Handle a backward that ended, by an error or not."""

    def after_backward(self, backward: BackwardCall) -> None:
        """Handle a backward that ended without an error: a new chunk begins."""

    def explain(
        self, error: RuntimeError, roots: list[Tensor], backward: BackwardCall
    ) -> Finding | None:
        """Add the finding behind an error of a backward and return it."""

    def before_zero_grad(
        self, owner: Any, parameters: list[Tensor], line: SourceLine | None
    ) -> None:
        """Handle a `zero_grad` of an optimizer or a module, before it clears."""

    def before_step(self, optimizer: Any) -> None:
        """Handle an optimizer step that begins."""

    def after_step(self, optimizer: Any, line: SourceLine | None) -> None:
        """Handle an optimizer step that ended."""

    def close(self) -> None:
        """Handle the end of the loop."""


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]
