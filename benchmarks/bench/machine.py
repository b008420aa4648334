"""The machine: processor, versions, and its fastest large matrix products."""

import os
import platform
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from throughtime.kernels.library import level, why_missing
from throughtime.nn import LSTM

SIZES = (
    256,
    384,
    512,
    # square products of at most about a millisecond: longer ones are interrupted on a busy machine
)
STEPS = (
    (256, 512, 128),
    (512, 512, 128),
)  # B, D and H of one step of a layer, which is one large product and a smaller one
LOOKED = 0.3  # seconds, for the best single call: another process takes milliseconds at a time


def machine() -> dict[str, Any]:
    """Processor, versions, and the instruction sets that run."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_level": torch.backends.cpu.get_cpu_capability(),
        "level": level() or f"none: {why_missing()}",
    }


def _processor() -> str:
    """As the system names it; a virtual machine may hide which model it is."""
    summary = Path("/proc/cpuinfo")
    if summary.is_file():
        fields = dict(
            line.split(":", 1)
            for line in summary.read_text(encoding="utf-8").splitlines()
            if ":" in line
        )
        named = {key.strip(): value.strip() for key, value in fields.items()}
        parts = [
            named.get("model name", ""),
            *(f"{key} {named[key]}" for key in ("cpu family", "model") if key in named),
        ]
        return ", ".join(part for part in parts if part) or platform.machine()
    return platform.processor() or platform.machine()


@contextmanager
def with_threads(count: int) -> Generator[None]:
    """Torch's threads, and so those of the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peaks() -> dict[str, dict[str, float]]:
    """GFLOP/s of the fastest large products by dtype, of torch and of our kernels."""
    return {
        str(dtype).removeprefix("torch."): {"torch.mm": _by_torch(dtype), "kernels": _by_us(dtype)}
        for dtype in _TYPES
    }


_TYPES = (torch.float32, torch.float64)


def _by_torch(dtype: torch.dtype) -> float:
    rates: list[float] = []
    for size in SIZES:
        a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
        out = torch.empty_like(a)
        rates.append(_rate(2.0 * size**3, lambda a=a, b=b, out=out: torch.mm(a, b, out=out)))
    return round(max(rates), 1)


def _by_us(dtype: torch.dtype) -> float:
    """One step of a layer: all products and nothing else counted, so at least this."""
    rates: list[float] = []
    for lanes, width, hidden in STEPS:
        layer, x = LSTM(width, hidden).to(dtype), torch.randn(1, lanes, width, dtype=dtype)
        with torch.no_grad():
            rates.append(
                _rate(
                    2.0 * lanes * 4 * hidden * (width + hidden), lambda layer=layer, x=x: layer(x)
                )
            )
    return round(max(rates), 1)


def _rate(flops: float, call: Callable[[], object]) -> float:
    """The best GFLOP/s."""
    call()
    best, end = float("inf"), time.perf_counter() + LOOKED
    while (began := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - began)
    return flops / best / 1e9
