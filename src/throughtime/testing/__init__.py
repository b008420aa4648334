"""Laws that a carried module obeys, for anyone's module and data: call them in your own tests."""

from throughtime.testing.carry import Law, check_carry
from throughtime.testing.leaks import LeakReport, check_no_leak

__all__ = ["Law", "LeakReport", "check_carry", "check_no_leak"]
