"""What the gradient does: measured, never changed."""

from throughtime.probe.audit import Audit, audit
from throughtime.probe.doctor import Doctor, Finding, doctor
from throughtime.probe.reach import Reach, reach
from throughtime.probe.trace import Trace, trace

__all__ = ["Audit", "Doctor", "Finding", "Reach", "Trace", "audit", "doctor", "reach", "trace"]
