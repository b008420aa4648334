"""Laws that a carried module obeys, for anyone's module: call them in your own tests."""

from throughtime.testing.laws import Law, check_carry

__all__ = ["Law", "check_carry"]
