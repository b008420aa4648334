"""Measuring ourselves beside others: cases, sides, and turns taken in one process."""

from throughtime.bench.cases import CASES, Case, chosen
from throughtime.bench.measure import Settings, measured
from throughtime.bench.page import put_into, tables

__all__ = ["CASES", "Case", "Settings", "chosen", "measured", "put_into", "tables"]
