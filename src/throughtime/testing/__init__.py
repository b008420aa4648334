"""Laws that a carried module obeys, for anyone's module and data: call them in your own tests."""

from throughtime.testing.laws import Law, check_carry
from throughtime.testing.no_leak import Isolated, check_no_leak

__all__ = ["Isolated", "Law", "check_carry", "check_no_leak"]
