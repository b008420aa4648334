"""The package as a whole: its names, its exceptions, and what importing it costs."""

import builtins
import re
import subprocess
import sys
import types

import pytest

import throughtime as tt
from throughtime import errors

OPTIONAL = (
    *("pyarrow", "soundfile", "h5py", "zarr", "netCDF4", "edfio", "wfdb", "pandas", "scipy"),
    *("lightning", "pytorch_lightning", "matplotlib", "ignite", "accelerate"),
)


def isort_style(name: str) -> tuple[int, str]:
    """Ruff's RUF022: constants, then classes, then the rest, each in order."""
    rank = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return rank, name


def test_all_is_sorted() -> None:
    assert tt.__all__ == sorted(tt.__all__, key=isort_style)
    assert len(set(tt.__all__)) == len(tt.__all__)
    assert sorted(["updates", "Chunk", "__version__", "VERSION"], key=isort_style) == [
        "VERSION",
        "Chunk",
        "__version__",
        "updates",
    ]


def public_names(module: types.ModuleType) -> set[str]:
    """Every name without a leading underscore that is no submodule."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def test_all_is_complete_and_every_name_resolves() -> None:
    missing = public_names(tt) - set(tt.__all__)
    assert not missing
    for name in tt.__all__:
        assert getattr(tt, name) is not None
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", tt.__version__)
    stray = types.ModuleType("stray")
    stray.__dict__["forgotten"] = print
    assert public_names(stray) == {"forgotten"}  # the check can fail


def exceptions() -> list[type[Exception]]:
    return [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]


@pytest.mark.parametrize(
    "error", [e for e in exceptions() if e is not errors.ThroughtimeError], ids=lambda e: e.__name__
)
def test_every_exception_has_one_root_and_one_builtin_and_is_drawn(error: type[Exception]) -> None:
    assert error.__bases__[0] is errors.ThroughtimeError
    assert len(error.__bases__) == 2
    builtin = error.__bases__[1]
    assert getattr(builtins, builtin.__name__) is builtin
    assert re.search(
        rf"^[├└]── {error.__name__}\s+\({builtin.__name__}\) ", errors.__doc__ or "", re.MULTILINE
    )
    assert error.__doc__


def test_the_tree_of_exceptions_draws_nothing_else() -> None:
    drawn = re.findall(r"^[├└]── (\w+)", errors.__doc__ or "", re.MULTILINE)
    assert sorted(["ThroughtimeError", *drawn]) == sorted(e.__name__ for e in exceptions())


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after running `code`."""
    script = f"{code}\nimport sys\nprint('\\n'.join(m.partition('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_loads_no_optional_dependency() -> None:
    loaded = loaded_by("import throughtime")
    assert {"throughtime", "torch", "numpy"} <= loaded
    assert not loaded & set(OPTIONAL)


@pytest.mark.parametrize(
    "module", ["pyarrow", "soundfile", "h5py", "zarr", "netCDF4", "edfio", "wfdb"]
)
def test_the_check_of_optional_dependencies_can_fail(module: str) -> None:
    """Both are installed here, so that the test above would see them."""
    assert module in loaded_by(f"import {module}") & set(OPTIONAL)
