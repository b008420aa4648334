"""What the gradient and the state do: measured, never changed."""

from throughtime.diagnose.audit import Audit, audit
from throughtime.diagnose.reach import Reach, reach
from throughtime.diagnose.settling import SettlingTime, settling_time
from throughtime.diagnose.trace import Trace, trace

__all__ = [
    "Audit",
    "Reach",
    "SettlingTime",
    "Trace",
    "audit",
    "reach",
    "settling_time",
    "trace",
]
