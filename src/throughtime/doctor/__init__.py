"""`tt.doctor`: what is wrong with a training loop of the user's own.

`docs/how-to/extending.md` shows how to add a rule.
"""

from throughtime.doctor.doctor import Doctor, doctor
from throughtime.doctor.findings import CODES, Finding

__all__ = ["CODES", "Doctor", "Finding", "doctor"]
