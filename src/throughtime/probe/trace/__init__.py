"""The gradient of every state and gate at every step, seen in the backward pass that is made anyway."""

from throughtime.probe.trace.found import Found, Pace, Row
from throughtime.probe.trace.passes import Pass
from throughtime.probe.trace.trace import Trace, trace

__all__ = ["Found", "Pace", "Pass", "Row", "Trace", "trace"]
