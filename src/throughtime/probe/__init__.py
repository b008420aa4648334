"""What the gradient does: measured, never changed."""

from throughtime.probe.audit import Audit, audit
from throughtime.probe.reach import Reach, reach

__all__ = ["Audit", "Reach", "audit", "reach"]
