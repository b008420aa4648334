"""`tt.doctor`: what is wrong with a training loop that somebody else wrote.

One file per kind of fault.
"""

from throughtime.probe.doctor.doctor import Doctor, doctor
from throughtime.probe.doctor.finding import CODES, Finding

__all__ = ["CODES", "Doctor", "Finding", "doctor"]
