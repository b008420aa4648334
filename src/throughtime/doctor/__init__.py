"""`tt.doctor`: what is wrong with a training loop that somebody else wrote.

One file per kind of fault.
"""

from throughtime.doctor.doctor import Doctor, doctor
from throughtime.doctor.finding import CODES, Finding

__all__ = ["CODES", "Doctor", "Finding", "doctor"]
