"""Exported nets: `Session` runs an ONNX file without torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from throughtime.deploy.session import Session

__all__ = ["Session"]


def __getattr__(name: str) -> Any:
    if name != "Session":
        raise AttributeError(f"module 'throughtime.deploy' has no attribute '{name}'")
    from throughtime.deploy.session import Session

    return Session
