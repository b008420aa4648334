"""The package as a whole: its names, its exceptions, and what importing it costs."""

import ast
import importlib
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import throughtime as tt
from processes import elsewhere
from throughtime import errors

OPTIONAL = (
    *("pyarrow", "soundfile", "h5py", "zarr", "netCDF4", "edfio", "wfdb", "pandas", "scipy"),
    *("lightning", "pytorch_lightning", "matplotlib", "ignite", "accelerate"),
)


def imported_for_type_checkers() -> dict[str, str]:
    """Each name that `throughtime/__init__.py` imports under TYPE_CHECKING, with its module."""
    tree = ast.parse(Path(tt.__file__).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_the_namespace_has_at_most_38_names() -> None:
    """What functions return stays in its module: a reader of `tt.` sees what to call."""
    assert len(set(tt.__all__) - {"__version__"}) <= 38
    assert not hasattr(tt, "Chunk")


def test_all_is_complete_and_every_name_resolves() -> None:
    imported = imported_for_type_checkers()
    assert set(imported) | {"__version__"} == set(tt.__all__) == set(dir(tt))
    for name, module in imported.items():
        value = getattr(tt, name)
        if module == "throughtime":
            assert value is sys.modules[f"throughtime.{name}"]
        else:
            assert value is getattr(sys.modules[module], name)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", tt.__version__)
    with pytest.raises(AttributeError, match="has no attribute 'Online'"):
        _ = tt.Online


def test_public_names_are_functions_beside_their_modules_and_load_nothing_optional() -> None:
    code = (
        "import throughtime.carry, throughtime.doctor, throughtime.predict, throughtime.updates\n"
        "import throughtime as tt, types\n"
        "for name in ('carry', 'doctor', 'predict', 'updates'):\n"
        "    assert isinstance(getattr(tt, name), types.FunctionType), name\n"
    )
    script = f"{code}from throughtime import *\nimport sys\nprint(*sys.modules)"
    loaded = {name.partition(".")[0] for name in elsewhere(script).output.split()}
    assert {"throughtime", "torch", "numpy"} <= loaded
    assert not loaded & set(OPTIONAL)


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after running `code`."""
    script = f"{code}\nimport sys\nprint('\\n'.join(m.partition('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_loads_neither_torch_nor_an_optional_dependency() -> None:
    loaded = loaded_by("import throughtime")
    assert "throughtime" in loaded
    assert not loaded & {"torch", "numpy", *OPTIONAL}


def test_the_package_is_pickled_by_name() -> None:
    """Ray sends functions that use `tt` to its workers so."""
    assert pickle.loads(pickle.dumps(tt)) is tt  # of this line


@pytest.mark.parametrize(
    ("extra", "needed"),
    [
        ("ignite", "ignite.engine"),
        ("accelerate", "accelerate"),
        ("lightning", "lightning.pytorch"),
    ],
)
def test_without_an_extra_the_import_says_what_to_install(
    extra: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"throughtime.integrations.{extra}"
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(errors.MissingExtraError, match=rf"pip install 'throughtime\[{extra}\]'"):
        importlib.import_module(module)
