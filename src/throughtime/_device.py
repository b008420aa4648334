"""What differs between devices: the only module that asks for the kind of a device.

The CPU computes in the host's memory. An accelerator (CUDA, MPS, XPU or a backend of the user's)
has memory and a random generator of its own, and the host waits whenever it reads a value from it.
The rules of cuDNN's recurrent layers are kept on every accelerator: they cost little elsewhere, and
no other device is known to need stricter ones. A tensor on the meta device holds no values.

Every function touches the one device it is called with. `torch.manual_seed` and
`torch.random.fork_rng()` touch all of them, also those that other programs use.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

CUDNN_STEPS = 65_535  # cuDNN's recurrent kernels take no longer sequence (pytorch issue 133751)


def is_accelerator(value: Tensor | torch.device) -> bool:
    """Whether values are in another memory than the host's, and are computed while it goes on."""
    return _kind(value) not in {"cpu", "meta"}


def _kind(value: Tensor | torch.device) -> str:
    """The type of a device: `cpu`, `cuda`, `mps`, `meta`, ..."""
    return (value.device if isinstance(value, Tensor) else value).type


def cudnn_rules(value: Tensor | torch.device) -> bool:
    """Whether recurrent layers are held to what cuDNN's kernels accept.

    At most `CUDNN_STEPS` steps and no resets in one call; contiguous states; dropout between
    layers is drawn inside the kernel.
    """
    return is_accelerator(value)


def real_type(value: Tensor | torch.device) -> torch.dtype:
    """The widest real type of the device: float64, which MPS lacks."""
    return torch.float32 if _kind(value) == "mps" else torch.float64


@cache
def pins_memory(kind: str) -> bool:
    """Whether the host can pin memory, so that copies to such a device need not be waited for."""
    current = torch.accelerator.current_accelerator()
    # torch pins memory for the current one alone; MPS shares the memory of the host
    if current is None or current.type != kind or kind == "mps":
        return False
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:  # a backend without an allocator of pinned memory
        return False


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device: from the host in one transfer, not waited for where that is safe."""
    if tensor.is_cpu and pins_memory(device.type):
        if not tensor.is_pinned():  # pin_memory() takes no tensor that repeats its memory
            tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return tensor.to(device, non_blocking=True)
    return tensor.to(device)


def generators(device: torch.device) -> dict[str, Tensor]:
    """The states of the random generators that a net on `device` uses, by the type of device."""
    states = {"cpu": torch.get_rng_state()}
    get_state = _backend(device, "get_rng_state")
    if get_state is not None:
        states[device.type] = get_state(device)
    return states


def set_generators(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the random generators that a net on `device` uses.

    A checkpoint may hold their states on another device, or those of another type of device.
    """
    torch.set_rng_state(states["cpu"].cpu())
    set_state = _backend(device, "set_rng_state")
    if set_state is not None and device.type in states:
        set_state(states[device.type].cpu(), device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the random generators that a net on `device` uses."""
    torch.default_generator.manual_seed(seed)
    set_state = _backend(device, "set_rng_state")
    if set_state is not None:
        generator = torch.Generator(device)
        set_state(generator.manual_seed(seed).get_state(), device)


@contextmanager
def fork_rng(device: torch.device) -> Generator[None]:
    """Restore the random generators that a net on `device` uses at the end of the block."""
    states = generators(device)
    try:
        yield
    finally:
        set_generators(states, device)


def _backend(device: torch.device, name: str) -> Any:
    """A function of torch's module for an accelerator (`torch.cuda`); None if there is none."""
    module = getattr(torch, device.type, None) if is_accelerator(device) else None
    return getattr(module, name, None)
