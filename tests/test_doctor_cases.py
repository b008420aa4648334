"""The doctor names the code and line of every broken case, and finds nothing in a healthy one."""

import contextlib
import io
import json
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from cases.check import Case, cases

pytestmark = pytest.mark.slow


def examine(case: Case) -> dict[str, Any]:
    """The findings of the doctor, and how the case ended."""
    from throughtime.doctor import doctor

    error, d, run = "", doctor(), case.load()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # a case's own warnings are not tested here
        try:
            with d:
                run()
        except RuntimeError as raised:
            error = str(raised)
    return {
        "findings": [[f.code, f.line, f.file] for f in d.findings],
        "error": error,
        "internal_error": str(d.internal_error or ""),
    }


def have_layers(case: Case, traced: bool) -> bool:
    """Whether a case has recurrent layers, and a trace takes what they do."""
    refused = traced and re.search(r"pack_|dropout=", case.source)
    return not refused and re.search(r"nn\.(LSTM|GRU|RNN)\(", case.source) is not None


def replace_layers(layers: str) -> list[Any]:
    """Replace torch's layers by fused ones, or by ones under a trace that stays open."""
    import throughtime as tt

    trace = tt.trace  # imported before the layers are replaced
    traces: list[Any] = []
    for name in ("LSTM", "GRU", "RNN"):
        base: Any = getattr(tt.nn if layers.startswith("fused") else torch.nn, name)

        def init(self: Any, *args: Any, base: Any = base, **kwargs: Any) -> None:
            base.__init__(self, *args, **kwargs)
            traces.append(trace(self).__enter__())

        setattr(
            torch.nn,
            name,
            type(name, (base,), {"__init__": init}) if layers.endswith("traced") else base,
        )
    return traces


@pytest.fixture(scope="module", params=["broken", "healthy"])
def group(request: pytest.FixtureRequest) -> str:
    return request.param


def examine_group(group: str, layers: str) -> dict[str, Any]:
    """Examine all cases of a group in one process, each under a doctor of its own."""
    words = [sys.executable, __file__, group, layers]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("layers", ["torch", "fused", "fused-traced", "traced"])
def test_each_case_is_diagnosed(group: str, layers: str) -> None:
    results = examine_group(group, layers)
    assert len(results) >= (40 if layers == "torch" else 15)
    wrong = [
        f"{name}: {results[name]}"
        for name, case in cases(group).items()
        if name in results and not right(case, results[name])
    ]
    print(f"{group}, {layers}: {len(wrong)} of {len(results)} wrong", *wrong, sep="\n")
    assert len(wrong) <= (len(results) // 20 if group == "broken" else 0), "\n".join(wrong)


def right(case: Case, result: dict[str, Any]) -> bool:
    """Whether the findings name some marked line with its code, and no unmarked line."""
    findings = {(code, line) for code, line, file in result["findings"] if file == str(case.path)}
    same_file = all(file == str(case.path) for _, _, file in result["findings"])
    return (
        not result["internal_error"]
        and findings <= case.marks
        and bool(findings) == bool(case.marks)
        and same_file
        and bool(result["error"]) == bool(case.raises)
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    others = sys.argv[2] != "torch"
    traces = replace_layers(sys.argv[2]) if others else []  # kept open until the end
    print(
        json.dumps(
            {
                name: examine(case)
                for name, case in cases(sys.argv[1]).items()
                if not others or have_layers(case, sys.argv[2].endswith("traced"))
            }
        )
    )
