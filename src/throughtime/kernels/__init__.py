"""Recurrences that run over all steps at once."""

from throughtime.kernels.scan import linear_scan

__all__ = ["linear_scan"]
