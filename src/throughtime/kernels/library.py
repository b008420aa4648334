"""The compiled core: load it on first use, check it, and give it torch's threads.

It is one shared library without torch or Python in it, so one build serves every version of both.
Calls go through ctypes, which releases the interpreter's lock. Two environment variables are read
once, on first use:

    THROUGHTIME_LIBRARY=/path/to/libthroughtime.so
        another library instead of the installed one
    THROUGHTIME_LEVEL=v4 | v3 | v2 | base | none
        another instruction set than the widest of the processor: x86-64-v4 (AVX-512), v3 (AVX2),
        v2 (SSE4.2). `base` is the only one of other processors. `none` disables the library, and
        plain PyTorch runs.

Threads are torch's: a kernel distributes its work through GOMP_parallel of the OpenMP runtime that
torch calls, so no second pool of threads competes for the cores. A kernel takes fewer threads than
torch's number if its work is small, and for some calls only one if other programs keep the cores
busy; the bits are the same for any number. In a forked process kernels run on one thread: OpenMP's
threads do not survive a fork, and torch's own operators hang there.
"""

import ctypes
import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from throughtime import kernels
from throughtime.errors import ConfigError, ThroughtimeError

VERSION = 8  # of the C interface: TT_VERSION in cpu/throughtime.h
NAME = "libthroughtime.dylib" if sys.platform == "darwin" else "libthroughtime.so"
REBUILD = (
    "pip install --force-reinstall --no-deps --no-cache-dir --no-binary throughtime throughtime"
    " (in a clone of the sources: pip install -e . --no-deps)"
)
# the result and the arguments of each call of the C interface; a pointer is that of `byref`
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "tt_level": (ctypes.c_char_p,),
    "tt_use": (ctypes.c_int, ctypes.c_char_p),
    "tt_bfloat16": (ctypes.c_int,),
    "tt_pool": (None, ctypes.c_void_p),
    "tt_blas": (None, *[ctypes.c_void_p] * 4),
    "tt_saved": (ctypes.c_int64, ctypes.c_void_p),
    "tt_forward": (ctypes.c_int, ctypes.c_void_p),
    "tt_backward": (ctypes.c_int, ctypes.c_void_p),
    "tt_fused_step_scratch": (ctypes.c_int64, ctypes.c_void_p),
    "tt_fused_step_run": (ctypes.c_int, ctypes.c_void_p),
    "tt_optimize": (ctypes.c_double, ctypes.c_void_p),
}
NO_MEMORY = 1  # TT_NO_MEMORY: nothing has been written
TYPES = {torch.float32: 0, torch.float64: 1}  # tt_type
_warned: list[str] = []  # the first caller that went without the library


def library() -> ctypes.CDLL | None:
    """The compiled core, or None if plain PyTorch has to run; `why_missing` then says why.

    Returns:
        The same library at every call of a process, with the types of its calls set and torch's
        threads handed over.

    Raises:
        ConfigError: THROUGHTIME_LIBRARY or THROUGHTIME_LEVEL is invalid. A fault of the installed
            library raises nothing.

    Cost: half a millisecond once, then a look-up in a cache.

    Example:
        >>> from throughtime.kernels.library import library, why_missing
        >>> (library() is None) == (why_missing() is not None)
        True
    """
    return _loaded()[0]


def why_missing() -> str | None:
    """Why `library()` is None, with the line to write; None if it is loaded."""
    return _loaded()[1]


@functools.cache
def core() -> ctypes.CDLL:
    """The library for a call that needs it."""
    result = library()
    if result is None:
        raise ThroughtimeError(
            f"the compiled kernels are missing, kernels.reference.run computes the same:"
            f" {why_missing()}"
        )
    return result


def fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Fields of a structure that have one type."""
    return [(name, kind) for name in names]


def checked(code: int) -> int:
    """The result of a call of the library, but for TT_NO_MEMORY, which raises."""
    if code == NO_MEMORY:
        raise MemoryError(
            "the kernels of throughtime could not allocate their memory; take fewer lanes or"
            " shorter chunks"
        )
    return code


def level() -> str | None:
    """The active instruction set: "v4", "v3", "v2" or "base"; None without the library."""
    core = library()
    return None if core is None else core.tt_level().decode()


def bfloat16() -> bool:
    """Whether the library is loaded and its active instruction set has products in bfloat16."""
    core = library()
    return core is not None and bool(core.tt_bfloat16())


def need(caller: str) -> ctypes.CDLL | None:
    """As `library`, for callers that are slower without it; warn once in a process.

    Args:
        caller: the name that the user knows: "tt.nn.LSTM".
    """
    core = library()
    if core is None and not _warned and os.environ.get("THROUGHTIME_LEVEL") != "none":
        _warned.append(caller)
        warnings.warn(
            f"Compiled kernels unavailable for {caller}. Using plain PyTorch: same results, slower."
            f" Reason: {why_missing()}",
            stacklevel=3,
        )
    return core


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    level, path = os.environ.get("THROUGHTIME_LEVEL", ""), os.environ.get("THROUGHTIME_LIBRARY", "")
    if level == "none":
        return None, "THROUGHTIME_LEVEL=none disables the compiled kernels. unset THROUGHTIME_LEVEL"
    core, reason = _open(Path(path)) if path else _installed()
    if core is None and path:
        raise ConfigError(
            f"THROUGHTIME_LIBRARY={path}: {reason} Or take the installed one: unset"
            " THROUGHTIME_LIBRARY"
        )
    if core is not None:
        if level and not core.tt_use(level.encode()):
            raise ConfigError(
                f"THROUGHTIME_LEVEL={level}: the widest of this processor and this library is"
                f" {core.tt_level().decode()}; expected v4, v3, v2 or base up to it, or none for"
                " plain PyTorch. For the widest: unset THROUGHTIME_LEVEL"
            )
        core.tt_pool(_parallel())
        core.tt_blas(*_blas())
    return core, reason


def _installed() -> tuple[ctypes.CDLL | None, str | None]:
    # In an editable install, a finder of scikit-build-core adds the environment's folder.
    for folder in kernels.__path__:
        path = Path(folder) / "cpu" / NAME
        if path.is_file():
            return _open(path)
    return (
        None,
        (
            f"the library is not installed: no wheel for {sys.platform} on this processor, no C++"
            f" compiler (GCC or Clang). With a compiler: {REBUILD}."
        ),
    )


def _open(path: Path) -> tuple[ctypes.CDLL | None, str | None]:
    """The library at `path` with its types set, or why not."""
    try:
        core = ctypes.CDLL(str(path))
        version = core.tt_version()
    except (OSError, AttributeError) as error:
        return (
            None,
            (
                f"{path} is not a compiled core that loads here ({error}). Build it again:"
                f" {REBUILD}."
            ),
        )
    if version != VERSION:
        return (
            None,
            (
                f"{path} has version {version} of the C interface, expected {VERSION}: the library"
                " and the Python files come from two versions of throughtime. Install both again:"
                f" {REBUILD}."
            ),
        )
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(core, name)
        function.restype, function.argtypes = result, arguments
    if not core.tt_level():
        return (
            None,
            (f"{path} needs a processor with x86-64-v2 (SSE4.2, from 2009 on); this one is older."),
        )
    return core, None


def _blas() -> tuple[int | None, ...]:
    """The addresses of sgemm, dgemm, the bfloat16 product and the thread setter of Intel's MKL.

    All None if our own products are at least as fast. Products of 384 rows took 0.66 to 0.94 of our
    time in MKL on an Intel processor (AVX-512, one thread), and those of bfloat16 an eighth, by
    AMX. On AMD, MKL reaches half of the processor's peak and our own products all of it. Nothing
    else was measured.
    """
    nothing = (None,) * 4
    if not torch.backends.mkl.is_available() or not _is_intel():
        return nothing
    try:
        torch_cpu = ctypes.CDLL(sys.modules["torch._C"].__file__, getattr(os, "RTLD_NOLOAD", 0))
        names = "sgemm_", "dgemm_", "gemm_bf16bf16f32_", "MKL_Set_Num_Threads_Local"
        return tuple(ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p).value for name in names)
    except (OSError, AttributeError):
        return nothing


def _is_intel() -> bool:
    """Whether Linux names Intel as the processor's vendor."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    return "GenuineIntel" in cpuinfo.read_text(encoding="utf-8", errors="replace")[:4096]


def _parallel() -> int | None:
    """The address of GOMP_parallel in torch's OpenMP runtime, or None: then one thread runs.

    The search order is that of the dynamic linker for torch: first global symbols (a preloaded
    runtime, libtorch_global_deps), then the libraries that torch needs, in their order. Nothing new
    is loaded. GCC's, LLVM's and Intel's runtimes all have the function.
    """
    if not torch.backends.openmp.is_available():
        return None
    for name, mode in (
        (None, ctypes.DEFAULT_MODE),
        (sys.modules["torch._C"].__file__, getattr(os, "RTLD_NOLOAD", 0)),
    ):
        try:
            return ctypes.cast(ctypes.CDLL(name, mode).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
