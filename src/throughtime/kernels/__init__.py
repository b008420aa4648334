"""Recurrent layers, the linear scan and optimizer steps: references and compiled kernels."""

from throughtime.kernels.scan import linear_scan

__all__ = ["linear_scan"]
