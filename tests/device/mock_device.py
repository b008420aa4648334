"""The device of `mock_device.cpp`: built once, loaded into PyTorch as `torch.device("mock")`.

    from mock_device import DEVICE, counted

    with counted() as counts:
        next(updates)
    assert counts.host_reads == 0

Its two devices, `mock:0` and `mock:1`, compute in the memory of the host under strict rules: see
the C++ source. `counted(refuse=("host_reads",))` raises at the line that reads.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import types
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration, cpp_extension

SOURCE = Path(__file__).with_name("mock_device.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-DAT_PER_OPERATOR_HEADERS")
MEMORY = 1 << 30  # bytes that the device says it has

backend_registration.rename_privateuse1_backend("mock")
DEVICE = torch.device("mock:0")


class NoCompilerError(RuntimeError):
    """Nothing here compiles C++ against PyTorch."""


def load() -> None:
    """Build the device if this source has not been built yet, and register it.

    Raises:
        NoCompilerError: there is no compiler of C++.
    """
    if getattr(torch, "mock", None) is None:
        torch.ops.load_library(str(_built()))
        torch._register_device_module("mock", _device_module())


def _built() -> Path:
    """The compiled device, in a folder of this user and of no other program."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise NoCompilerError(f"no C++ compiler: none of {', '.join(COMPILERS)} is installed")
    include = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    libraries = [
        f for path in cpp_extension.library_paths() for f in (f"-L{path}", f"-Wl,-rpath,{path}")
    ]
    command = [compiler, *FLAGS, *include, str(SOURCE), *libraries, "-ltorch_cpu", "-lc10"]
    key = hashlib.sha256(
        f"{command} {torch.__version__}".encode() + SOURCE.read_bytes()
    ).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"throughtime-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise NoCompilerError(f"{folder} belongs to another user")
    target = folder / f"mock_device-{key[:16]}.so"
    if not target.exists():
        partial = target.with_suffix(
            f".{os.getpid()}.so"
        )  # two processes of tests may build at once
        result = subprocess.run(
            [*command, "-o", str(partial)], capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise RuntimeError(f"the device of the tests does not compile:\n{result.stderr}")
        partial.rename(target)
    return target


def _device_module() -> types.ModuleType:
    """What PyTorch expects of a backend in `torch.mock`."""
    ops: Any = torch.ops.mock

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return ops.current_device() if index is None else index

    def manual_seed_all(seed: int) -> None:
        for index in range(2):
            ops.manual_seed(seed, index)

    def get_rng_state(device: Any = None) -> Tensor:
        return ops.get_rng_state(index_of(device))

    def set_rng_state(state: Tensor, device: Any = None) -> None:
        ops.set_rng_state(state, index_of(device))

    @contextmanager
    def current(device: Any) -> Generator[None]:
        previous = ops.current_device()
        ops.set_device(index_of(device))
        try:
            yield
        finally:
            ops.set_device(previous)

    module = types.ModuleType("torch.mock")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device": current,
        "device_count": lambda: 2,
        "current_device": ops.current_device,
        "set_device": lambda device: ops.set_device(index_of(device)),
        "synchronize": lambda device=None: ops.synchronize(),  # noqa: ARG005
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),  # noqa: ARG005
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "manual_seed": lambda seed: ops.manual_seed(seed, ops.current_device()),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


KINDS = ("to_device", "from_device", "blocking", "host_reads", "nonzero", "operators", "events")


@dataclass
class Counts:
    """What happened on the device in a block; filled in at its end.

    Attributes:
        to_device: copies from the host, of any size.
        from_device: copies to the host.
        blocking: those of both that the host waits for; a copy is not if it is `non_blocking` and
            the memory of the host is pinned.
        host_reads: values that Python reads: `item()`, `bool(tensor)`, `torch.equal`.
        nonzero: shapes that depend on values: `nonzero`, `x[mask]`, `unique`.
        operators: kernels that were started, copies on the device included.
        events: waits for an event, a queue or the whole device.
    """

    to_device: int = 0
    from_device: int = 0
    blocking: int = 0
    host_reads: int = 0
    nonzero: int = 0
    operators: int = 0
    events: int = 0

    @property
    def waits(self) -> int:
        """How often the host waited for the device."""
        return self.host_reads + self.nonzero + self.events + self.blocking


@contextmanager
def counted(*, refuse: Sequence[str] = ()) -> Generator[Counts]:
    """Count what happens on the device; of the kinds to `refuse`, raise at the first.

    Raises:
        RuntimeError: a kind that is refused, at the line of Python that caused it.
    """
    ops: Any = torch.ops.mock
    counts = Counts()
    before = ops.counts()
    for kind in refuse:
        ops.refuse(KINDS.index(kind), True)
    try:
        yield counts
    finally:
        for kind in refuse:
            ops.refuse(KINDS.index(kind), False)
        for kind, old, new in zip(KINDS, before, ops.counts(), strict=True):
            setattr(counts, kind, new - old)
