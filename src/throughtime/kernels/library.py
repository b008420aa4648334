"""The compiled core: found, checked and given torch's threads when it is first wanted.

It is one shared library without torch or Python in it, so that one build serves every version of
both; calls go through ctypes, which lets go of the interpreter's lock. Two variables of the
environment, read once, when the library is first wanted:

    THROUGHTIME_LIBRARY=/path/to/libthroughtime.so   a library built elsewhere, instead of the one
    that was installed
    THROUGHTIME_LEVEL=v4 | v3 | v2 | base | none     an instruction set instead of the widest that
                                                     the processor has: x86-64-v4 (AVX-512), v3
                                                     (AVX2), v2 (SSE4.2); base is any other
                                                     processor's only one; none leaves the library
                                                     alone, and plain PyTorch runs

Threads are torch's: a kernel runs its pieces through GOMP_parallel of the very OpenMP runtime that
torch calls, so that no second pool of threads competes for the cores. In a process that was forked
kernels run on one thread: OpenMP's do not survive a fork, and torch's own operators hang there.
"""

import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from throughtime import kernels
from throughtime.errors import ConfigError

VERSION = 5  # of the C interface: TT_VERSION in cpu/throughtime.h
NAME = "libthroughtime.dylib" if sys.platform == "darwin" else "libthroughtime.so"
REBUILD = (
    "pip install --force-reinstall --no-deps --no-cache-dir --no-binary throughtime throughtime"
)
_said: list[str] = []  # who was first to be told
_EDITABLE = "in a clone of the sources: pip install -e . --no-deps"


def library() -> ctypes.CDLL | None:
    """The compiled core, or None where plain PyTorch has to do; `why_missing` then says why.

    Returns:
        The same library at every call of a process, with the types of `tt_version`, `tt_level`,
        `tt_use`, `tt_bfloat16` and `tt_pool` set and torch's threads handed over.

    Raises:
        ConfigError: THROUGHTIME_LIBRARY or THROUGHTIME_LEVEL names what is not there. A library
            that was only installed raises nothing.

    Cost: half a millisecond once, then a look into a cache.

    Example:
        >>> from throughtime.kernels.library import library, why_missing
        >>> (library() is None) == (why_missing() is not None)
        True
    """
    return _loaded()[0]


def why_missing() -> str | None:
    """Why `library()` is None, with the line to write; None where it is there."""
    return _loaded()[1]


def level() -> str | None:
    """The instruction set that runs: "v4", "v3", "v2" or "base"; None without the library."""
    core = library()
    return None if core is None else core.tt_level().decode()


def bfloat16() -> bool:
    """Whether the instruction set that runs has products in bfloat16.

    Without the library nothing has.
    """
    core = library()
    return core is not None and bool(core.tt_bfloat16())


def need(by: str) -> ctypes.CDLL | None:
    """As `library`, for what is slower without it: a warning says so, once in a process.

    Args:
        by: who wants it, as the user knows it: "tt.nn.LSTM".
    """
    core = library()
    if core is None and not _said and os.environ.get("THROUGHTIME_LEVEL") != "none":
        _said.append(by)
        warnings.warn(
            f"{by} runs through plain PyTorch, as exact but slower: {why_missing()}", stacklevel=3
        )
    return core


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    level, path = os.environ.get("THROUGHTIME_LEVEL", ""), os.environ.get("THROUGHTIME_LIBRARY", "")
    if level == "none":
        return (
            None,
            "THROUGHTIME_LEVEL=none leaves the compiled kernels alone. unset THROUGHTIME_LEVEL",
        )
    core, why = _open(Path(path)) if path else _installed()
    if core is None and path:
        raise ConfigError(
            f"THROUGHTIME_LIBRARY={path}: {why} Or take the installed one: unset"
            " THROUGHTIME_LIBRARY"
        )
    if core is not None:
        if level and not core.tt_use(level.encode()):
            raise ConfigError(
                f"THROUGHTIME_LEVEL={level}: this processor has, or the library was built for,"
                f" {_levels(core)}; expected one of these, or none for plain PyTorch. For the"
                " widest: unset THROUGHTIME_LEVEL"
            )
        core.tt_pool(_parallel())
        core.tt_blas(*_products())
    return core, why


def _levels(core: ctypes.CDLL) -> str:
    widest = core.tt_level()
    there = [name for name in (b"v4", b"v3", b"v2", b"base") if core.tt_use(name)]
    core.tt_use(widest)
    return ", ".join(name.decode() for name in there)


def _installed() -> tuple[ctypes.CDLL | None, str | None]:
    for path in _places():
        if path.is_file():
            return _open(path)
    return (
        None,
        (
            "the compiled kernels are not installed: no wheel of throughtime was there for"
            f" {sys.platform} on this processor, and no C++ compiler (GCC or Clang) when it was"
            f" built here. With a compiler: {REBUILD} ({_EDITABLE})."
        ),
    )


def _places() -> Iterator[Path]:
    """Beside this file; in an editable install, in the environment, where a finder of scikit-build-core adds its folder to the path."""
    for folder in kernels.__path__:
        yield Path(folder) / "cpu" / NAME


def _open(path: Path) -> tuple[ctypes.CDLL | None, str | None]:
    """The library at `path` with its types set, or why not."""
    try:
        core = ctypes.CDLL(str(path))
        core.tt_version.argtypes, core.tt_version.restype = [], ctypes.c_int
    except (OSError, AttributeError) as error:
        return (
            None,
            (
                f"{path} is not a compiled core that loads here ({error}). Build it again:"
                f" {REBUILD} ({_EDITABLE})."
            ),
        )
    version = core.tt_version()
    if version != VERSION:
        return (
            None,
            (
                f"{path} speaks version {version} of the C interface, expected {VERSION}: library"
                " and Python files come from two versions of throughtime, and would misread each"
                f" other's memory. Install both again: {REBUILD} ({_EDITABLE})."
            ),
        )
    core.tt_level.argtypes, core.tt_level.restype = [], ctypes.c_char_p
    core.tt_use.argtypes, core.tt_use.restype = [ctypes.c_char_p], ctypes.c_int
    core.tt_bfloat16.argtypes, core.tt_bfloat16.restype = [], ctypes.c_int
    core.tt_pool.argtypes, core.tt_pool.restype = [ctypes.c_void_p], None
    core.tt_blas.argtypes, core.tt_blas.restype = [ctypes.c_void_p] * 4, None
    if not core.tt_level():
        return (
            None,
            f"the processor is older than {path} was built for: x86-64-v2, with SSE4.2, of 2009.",
        )
    return core, None


def _products() -> tuple[int | None, ...]:
    """The addresses of sgemm, dgemm, that of bfloat16 and what sets their threads in torch's BLAS,
    where it beats our own: Intel's MKL.

    Products of 384 rows took 0.66 to 0.94 of the time in it there (AVX-512, one thread), and of
    bfloat16, by AMX, an eighth; on AMD's MKL reaches half of what the processor can do, our own all
    of it, and elsewhere nothing was measured.
    """
    if not torch.backends.mkl.is_available() or not _is_intel():
        return None, None, None, None
    try:
        torch_cpu = ctypes.CDLL(sys.modules["torch._C"].__file__, getattr(os, "RTLD_NOLOAD", 0))
        names = "sgemm_", "dgemm_", "gemm_bf16bf16f32_", "MKL_Set_Num_Threads_Local"
        return tuple(ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p).value for name in names)
    except (OSError, AttributeError):
        return None, None, None, None


def _is_intel() -> bool:
    """Whether Linux says that Intel made the processor."""
    known = Path("/proc/cpuinfo")
    return (
        known.is_file()
        and "GenuineIntel" in known.read_text(encoding="utf-8", errors="replace")[:4096]
    )


def _parallel() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch calls; None where it has none,
    and kernels run on one thread.

    Looked up as the dynamic linker did for torch itself: what is global first (a preloaded runtime,
    libtorch_global_deps), then what torch's own libraries need, in their order. Nothing is loaded
    that was not there. GCC's, LLVM's and Intel's runtimes all have it.
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
