"""The doctor and the patients: the right code at the right line of every broken script, nothing of a healthy one."""

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

PATIENTS = Path(__file__).parent / "patients"
MARK = re.compile(r"# <- (TT\d{3})\s*$")
pytestmark = pytest.mark.slow


def scripts(group: str) -> list[Path]:
    return sorted((PATIENTS / group).glob("*.py"))


def examine(path: Path) -> dict[str, Any]:
    """What the doctor finds, and how the script ended."""
    from throughtime.doctor import doctor

    error, d = "", doctor()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what a script warns of is its own affair
        try:
            with d:
                runpy.run_path(str(path), run_name="__main__")
        except RuntimeError as raised:
            error = str(raised)
    return {
        "found": [[f.code, f.line, f.file] for f in d.findings],
        "error": error,
        "fault": str(d.internal_error or ""),
    }


def have_layers(path: Path) -> bool:
    return re.search(r"nn\.(LSTM|GRU|RNN)\(", path.read_text(encoding="utf-8")) is not None


def swapped(layers: str) -> list[Any]:
    """Puts other layers in the place of torch's, before a script asks for them: fused, or every one under a trace that stays open."""
    import throughtime as tt

    traces: list[Any] = []
    for name in ("LSTM", "GRU", "RNN"):
        base: Any = getattr(tt.nn if layers.startswith("fused") else torch.nn, name)

        def made(self: Any, *args: Any, base: Any = base, **kwargs: Any) -> None:
            base.__init__(self, *args, **kwargs)
            traces.append(tt.trace(self))

        setattr(
            torch.nn,
            name,
            type(name, (base,), {"__init__": made}) if layers.endswith("traced") else base,
        )
    return traces


@pytest.fixture(scope="module", params=["broken", "healthy"])
def group(request: pytest.FixtureRequest) -> str:
    return request.param


def examined(group: str, layers: str) -> dict[str, Any]:
    """All scripts of a group in one process, as many examinations as scripts."""
    words = [sys.executable, __file__, group, layers]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("layers", ["torch", "fused", "fused-traced", "traced"])
def test_each_patient_is_diagnosed(group: str, layers: str) -> None:
    name, found = group, examined(group, layers)
    assert len(found) >= ((40 if name == "broken" else 20) if layers == "torch" else 30)
    wrong = [
        f"{path.name}: {found[path.name]}"
        for path in scripts(name)
        if path.name in found and not right(path, found[path.name])
    ]
    assert len(wrong) <= (len(found) // 20 if name == "broken" else 0), "\n".join(wrong)


def right(path: Path, seen: dict[str, Any]) -> bool:
    """Some marked line with its code, and nothing beside the marked lines."""
    source = path.read_text(encoding="utf-8")
    marked = {
        (m[1], i) for i, line in enumerate(source.splitlines(), 1) if (m := MARK.search(line))
    }
    got = {(code, line) for code, line, file in seen["found"] if file == str(path)}
    same_file = all(file == str(path) for _, _, file in seen["found"])
    return (
        not seen["fault"]
        and got <= marked
        and bool(got) == bool(marked)
        and same_file
        and bool(seen["error"]) == ("# raises:" in source)
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    others = sys.argv[2] != "torch"
    kept = swapped(sys.argv[2]) if others else []
    print(
        json.dumps(
            {
                path.name: examine(path)
                for path in scripts(sys.argv[1])
                if not others or have_layers(path)
            }
        )
    )
