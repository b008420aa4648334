"""What a forward pass draws and changes besides its state, so that it can be run again as it was.

Random numbers of torch's generators (dropout) and buffers (BatchNorm's running statistics, the
vectors of spectral norm) are noted at every edge, by reference where nothing changed: a net that
draws nothing pays a comparison. What a module draws from elsewhere, or keeps in attributes, cannot
be seen here; the comparison of states finds it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Moment(NamedTuple):
    """Generators and buffers at one edge."""

    random: dict[str, Tensor]
    buffers: dict[str, Tensor]


class _Seen(NamedTuple):
    """A buffer as it was when it was last copied; torch counts its changes in place."""

    buffer: Tensor
    version: int


@dataclass(eq=False)
class Replay:
    """The moments of one forward pass of `net`, in order."""

    net: nn.Module
    device: torch.device
    moments: list[Moment] = field(default_factory=list[Moment])
    _seen: dict[str, _Seen] = field(default_factory=dict[str, _Seen])

    def note(self) -> None:
        """Notes the present."""
        last = self.moments[-1] if self.moments else Moment({}, {})
        self.moments.append(Moment(self._random(last.random), self._buffers(last.buffers)))

    def _random(self, last: dict[str, Tensor]) -> dict[str, Tensor]:
        now = generators(self.device)
        return (
            last
            if last and all(torch.equal(last[name], state) for name, state in now.items())
            else now
        )

    def _buffers(self, last: dict[str, Tensor]) -> dict[str, Tensor]:
        now: dict[str, Tensor] = {}
        for name, buffer in self.net.named_buffers():
            seen = self._seen.get(name)
            unchanged = (
                seen is not None and seen.buffer is buffer and seen.version == buffer._version
            )  # torch's documented counter has no other name
            now[name] = last[name] if unchanged else buffer.detach().clone()
            self._seen[name] = _Seen(buffer, buffer._version)
        return now

    def restore(self, index: int) -> None:
        """Back to the moment noted as number `index`."""
        moment = self.moments[index]
        set_generators(moment.random, self.device)
        set_buffers(self.net, moment.buffers)


def generators(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that a net on `device` draws from."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        found["mps"] = torch.mps.get_rng_state()
    return found


def set_generators(states: dict[str, Tensor], device: torch.device) -> None:
    """Puts the generators back, those that a net on `device` draws from.

    A checkpoint may have brought the states to another one.
    """
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    if device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"].cpu())


def set_buffers(net: nn.Module, values: dict[str, Tensor]) -> None:
    """Puts buffers back in place."""
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            if name in values and not torch.equal(buffer, values[name]):
                buffer.copy_(values[name])


@contextmanager
def unnoticed(net: nn.Module, device: torch.device) -> Generator[None]:
    """Whatever runs inside leaves generators and buffers as they were."""
    random = generators(device)
    buffers = {name: buffer.detach().clone() for name, buffer in net.named_buffers()}
    try:
        yield
    finally:
        set_generators(random, device)
        set_buffers(net, buffers)
