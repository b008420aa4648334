"""A wheel that needs no compiler, an sdist that builds, plain Python where nothing compiles."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None, reason="wheels are built with a compiler"),
]


FALL_BACK = """
import warnings
from throughtime.kernels import library
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert library.need("tt.nn.LSTM") is None and library.need("tt.nn.GRU") is None
assert len(told) == 1 and "pip install" in str(told[0].message), told
import throughtime as tt, torch
net = tt.carry(torch.nn.LSTM(2, 3))
y, state = net(torch.ones(4, 1, 2), net.initial_state(lanes=1))
print(tuple(y.shape))
"""


def _do(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    prefix = Path(sys.prefix)
    places = f"DIST={folder}", f"BUILD={folder / 'build'}", f"VENV={prefix}"
    _do("make", "-o", prefix / ".installed", "wheel", *places)
    return folder


def _installed(wheel: Path, folder: Path) -> Path:
    """The Python of a new environment that has this wheel, and torch from ours."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    _do(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    place = _do(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(place) / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    return python


def _plainly(python: Path, code: str) -> str:
    """What it prints where there is no compiler, nor anything else."""
    done = subprocess.run(
        [python, "-W", "error", "-c", code],
        cwd=python.parent,
        env={"PATH": str(python.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_sdist_builds_and_without_a_compiler_gives_plain_python(
    handed_out: Path, tmp_path: Path
) -> None:
    (sdist,) = handed_out.glob("*.tar.gz")
    for name, environment in (("core", {}), ("plain", {"CXX": "/bin/false"})):
        command = [sys.executable, *["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]]
        _do(*command, tmp_path / name, sdist, **environment)
    (core,), (plain,) = (tmp_path / "core").iterdir(), (tmp_path / "plain").iterdir()
    assert not core.name.endswith("-any.whl")
    assert plain.name.endswith("-py3-none-any.whl")
    assert _plainly(_installed(plain, tmp_path / "environment"), FALL_BACK) == "(4, 1, 3)"


@pytest.mark.skipif(
    not (shutil.which("nm") and shutil.which("cmake")),
    reason="objects are built by CMake and read with nm",
)
def test_no_symbol_of_one_instruction_set_is_taken_for_another(tmp_path: Path) -> None:
    """A weak symbol compiled for AVX-512 could serve all levels: an illegal instruction."""
    _do("cmake", "-S", ROOT, "-B", tmp_path)
    _do("cmake", "--build", tmp_path)
    objects = sorted(tmp_path.glob("CMakeFiles/kernels_*.dir/**/*.o"))
    assert objects
    for path in objects:
        weak = [
            line
            for line in _do("nm", "--defined-only", path).splitlines()
            if re.search(r" [WVu] ", line)
        ]
        assert not weak, (path.parent, weak[:5])
