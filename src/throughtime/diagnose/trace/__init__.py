"""The gradient of every state and gate at every step, seen in the backward pass that is made anyway."""

from throughtime.diagnose.trace.found import Found, Row, Timescale
from throughtime.diagnose.trace.passes import Pass
from throughtime.diagnose.trace.trace import Trace, trace

__all__ = ["Found", "Pass", "Row", "Timescale", "Trace", "trace"]
