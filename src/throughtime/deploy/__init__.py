"""Exported nets: `Session` runs an ONNX file without torch."""

from throughtime.deploy.session import Session

__all__ = ["Session"]
