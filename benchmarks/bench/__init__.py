"""Measuring ourselves beside others: cases, implementations, and turns taken in one process."""

from benchmarks.bench.cases import CASES, Case, select_cases
from benchmarks.bench.measure import Settings, measure
from benchmarks.bench.page import tables, write_tables

__all__ = ["CASES", "Case", "Settings", "measure", "select_cases", "tables", "write_tables"]
