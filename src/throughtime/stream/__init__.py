"""How data flows in: recordings, who plays them on which lane, and the chunks that come out."""

from throughtime.stream.recording import Recording, StepArrays
from throughtime.stream.sources import windows
from throughtime.stream.stream import Stream

__all__ = ["Recording", "StepArrays", "Stream", "windows"]
