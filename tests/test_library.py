"""The compiled core is found, checked, and runs on torch's threads."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import elsewhere
from throughtime.errors import ConfigError
from throughtime.kernels import library as loader

BUILT = pytest.mark.skipif(
    shutil.which("c++") is None,
    reason="without a compiler there is no library in an install from the sources",
)
ALL = ("v4", "v3", "v2", "base")


@pytest.fixture(autouse=True)
def new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test looks for the library anew, and leaves it as it was."""
    monkeypatch.delenv("THROUGHTIME_LEVEL", raising=False)
    monkeypatch.delenv("THROUGHTIME_LIBRARY", raising=False)
    before = loader.level()
    monkeypatch.setattr(loader, "_warned", [])
    loader._loaded.cache_clear()
    yield
    monkeypatch.undo()
    loader._loaded.cache_clear()
    assert loader.level() == before


def _there() -> ctypes.CDLL:
    core = loader.library()
    assert core is not None, loader.why_missing()
    return core


def _python(code: str, **environment: str) -> str:
    """What another process prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _level_elsewhere(asked: str) -> str:
    """The level of a process that has not looked for the library before the variable is set."""
    code = (
        "import warnings; warnings.simplefilter('error')\nfrom throughtime.kernels import library"
        " as l\n"
    )
    code += "assert not l._loaded.cache_info().currsize; print(l.level())"
    done = elsewhere(code, THROUGHTIME_LEVEL=asked)
    assert done.code == 0, done.errors
    return done.output.strip()


@BUILT
def test_an_install_has_a_library_that_speaks_this_version() -> None:
    core = _there()
    assert core.tt_version() == loader.VERSION
    assert loader.level() in ALL
    assert loader.why_missing() is None
    header = Path(loader.__file__).with_name("cpu") / "throughtime.h"
    assert f"#define TT_VERSION {loader.VERSION}\n" in header.read_text()


@BUILT
def test_the_environment_forces_a_level() -> None:
    core, widest = _there(), loader.level()
    narrowest = next(name for name in reversed(ALL) if core.tt_use(name.encode()))
    core.tt_use(str(widest).encode())
    assert _level_elsewhere(narrowest) == narrowest
    assert _level_elsewhere("") == widest


@BUILT
def test_bfloat16_products_are_available_where_level_and_processor_have_them() -> None:
    core, known = _there(), Path("/proc/cpuinfo")
    widest = core.tt_level()
    assert loader.bfloat16() == bool(core.tt_bfloat16())
    assert not loader.bfloat16() or not known.is_file() or "avx512_bf16" in known.read_text()
    try:
        for name in (b"v3", b"v2"):
            assert not core.tt_use(name) or not loader.bfloat16()
    finally:
        core.tt_use(widest)


@BUILT
def test_an_unavailable_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    widest = _there().tt_level().decode()
    loader._loaded.cache_clear()
    monkeypatch.setenv("THROUGHTIME_LEVEL", "v9")
    with pytest.raises(
        ConfigError, match=rf"THROUGHTIME_LEVEL=v9: .*{widest}; expected.*unset THROUGHTIME_LEVEL"
    ):
        loader.library()


@BUILT
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = _there()._name
    loader._loaded.cache_clear()
    monkeypatch.setattr(loader, "VERSION", loader.VERSION + 1)
    assert loader.library() is None
    assert f"version {loader.VERSION - 1} of the C interface, expected {loader.VERSION}" in (
        loader.why_missing() or ""
    )
    loader._loaded.cache_clear()
    monkeypatch.setenv("THROUGHTIME_LIBRARY", path)
    with pytest.raises(ConfigError, match=r"THROUGHTIME_LIBRARY=.*expected .*pip install"):
        loader.library()


@pytest.mark.parametrize("what", ["nothing", "text", "another library"])
def test_what_is_no_library_of_ours_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    path = tmp_path / loader.NAME
    if what == "text":
        path.write_text("no ELF")
    other = sys.modules["torch._C"].__file__ if what == "another library" else path
    monkeypatch.setenv("THROUGHTIME_LIBRARY", str(other))
    with pytest.raises(
        ConfigError, match=r"is not a compiled core that loads here.*unset THROUGHTIME_LIBRARY"
    ):
        loader.library()


def who_runs(parallel: int) -> set[int]:
    """The threads that a region of two runs on; two, because each waits for the other."""
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    observed, both = set[int](), threading.Barrier(2, timeout=60)

    @body
    def look(_: int) -> None:
        observed.add(threading.get_native_id())
        both.wait()

    ctypes.CFUNCTYPE(None, body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(parallel)(
        look, None, 2, 0
    )
    return observed


OF_TORCH = r"""
import ctypes, os, shutil, sys
sys.path[:0] = [TESTS]
import torch
from test_library import who_runs
from throughtime.kernels import library as loader
from throughtime.kernels.cells import GRU, Weights
from throughtime.kernels.recurrent import LayerInputs, forward

def tasks():
    return set(map(int, os.listdir("/proc/self/task")))

torch.set_num_threads(2)
x, h = torch.randn(64, 64, 256), torch.zeros(64, 256)
weights = Weights(torch.randn(768, 256), torch.randn(768, 256), None, None, None)
torch.randn(1 << 22).exp_()
pool = tasks()
assert os.getpid() in pool and len(pool) >= 2, pool
parallel = loader._parallel()
ran = who_runs(parallel)
assert len(ran) == 2 and ran <= pool, (ran, pool)
forward(LayerInputs(GRU, x.dtype, x, h, None, weights, None), keep=True)
assert tasks() == pool, (tasks(), pool)
paths = {line.split()[-1] for line in open("/proc/self/maps")}
maps = {path for path in paths if "omp" in path.rsplit("/", 1)[-1]}
assert len(maps) == 1, maps
# The mutant: a second copy of the same runtime has threads of its own.
second = ctypes.CDLL(shutil.copy(maps.pop(), FOLDER))
address = ctypes.cast(second.GOMP_parallel, ctypes.c_void_p).value
assert address != parallel and not who_runs(address) <= pool
print("well")
"""


@BUILT
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_threads_are_those_of_torch(tmp_path: Path) -> None:
    code = OF_TORCH.replace("TESTS", repr(str(Path(__file__).parent))).replace(
        "FOLDER", repr(str(tmp_path))
    )
    assert _python(code, OMP_NUM_THREADS="2").strip() == "well"


FORKED = r"""
import os, signal
import torch
from throughtime.kernels.cells import GRU, Weights
from throughtime.kernels.recurrent import LayerInputs, forward

torch.set_num_threads(2)
x, h = torch.randn(64, 64, 256), torch.zeros(64, 256)
weights = Weights(torch.randn(768, 256), torch.randn(768, 256), None, None, None)
given = LayerInputs(GRU, x.dtype, x, h, None, weights, None)
before = forward(given, keep=False)[0]  # starts a thread that the child will not have
child = os.fork()
if not child:
    signal.alarm(60)
    same = forward(given, keep=False)[0].numpy() == before.numpy()  # torch.equal would hang
    os._exit(0 if same.all() and len(os.listdir("/proc/self/task")) == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
again = forward(given, keep=False)[0]
print(torch.equal(again, before))
"""


@BUILT
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_forked_child_runs_on_the_thread_it_has() -> None:
    assert _python(
        "import warnings; warnings.simplefilter('ignore')\n" + FORKED, OMP_NUM_THREADS="2"
    ).split() == ["0", "True"]
