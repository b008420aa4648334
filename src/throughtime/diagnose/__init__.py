"""What the gradient does: measured, never changed."""

from throughtime.diagnose.audit import Audit, audit
from throughtime.diagnose.reach import Reach, reach
from throughtime.diagnose.trace import Trace, trace

__all__ = ["Audit", "Reach", "Trace", "audit", "reach", "trace"]
