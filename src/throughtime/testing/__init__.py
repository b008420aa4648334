"""Checks of your own module and data, to call in your tests."""

from throughtime.testing.carry import Law, check_carry
from throughtime.testing.leaks import LeakReport, check_no_leak
from throughtime.testing.rollout import check_rollout

__all__ = ["Law", "LeakReport", "check_carry", "check_no_leak", "check_rollout"]
