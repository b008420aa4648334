"""`throughtime doctor SCRIPT` runs a script as Python does, and says what it found and watched."""

import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from test_cli import ended
from throughtime.doctor import doctor

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(3, 8), nn.Linear(8, 1)

    def forward(self, x, h=None):
        y, h = self.gru(x, h)
        return self.out(y), h


net, h = Net(), None
"""
LEAK = f"""{NET}
for x in torch.randn(60, 2, 3).split(10):
    y, h = net(x, h)
    y.square().mean().backward()
"""
SOUND = f"""{NET}
for x in torch.randn(60, 2, 3).split(10):
    y, h = net(x, h)
    y.square().mean().backward()
    h = h.detach()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def watch(folder: Path, script: str, *words: str) -> tuple[int, str, str]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    return ended("doctor", *(words or ("train.py",)))


def test_a_failing_script_has_its_traceback_and_findings(folder: Path) -> None:
    code, printed, complained = watch(folder, LEAK)
    assert code == 1
    assert "TT101" in printed
    assert "RuntimeError: Trying to backward through the graph a second time" in complained


def never_detached() -> None:
    gru, h = nn.GRU(3, 4), None
    for x in torch.randn(60, 2, 3).split(10):
        y, h = gru(x, h)
        y.square().mean().backward()


def fail_from_a_cause() -> None:
    try:
        never_detached()
    except RuntimeError as error:
        raise ValueError("training failed") from error


def test_an_error_in_a_with_block_has_its_findings_once() -> None:
    with pytest.raises(ValueError, match="training failed") as raised, doctor():
        fail_from_a_cause()
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("tt.doctor: TT101") == 1
    assert "in never_detached" in text
    assert "in fail_from_a_cause" in text


@pytest.mark.parametrize(
    ("script", "code", "kind", "complaint"),
    [
        ("import throughtime as tt\ntt.Stream([], lanes=2, chunk=3)", 1, "DataError", "Traceback"),
        ("import throughtime as tt\nwith tt.doctor(): pass", 1, "ConfigError", "Traceback"),
        (
            "from throughtime.errors import DiagnosisError\nraise DiagnosisError('mine')",
            1,
            "DiagnosisError",
            "DiagnosisError: mine",
        ),
        ("def f(:\n  pass", 1, "SyntaxError", '  File "'),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt", "Traceback"),
        ("import sys; sys.exit(3)", 3, "SystemExit", ""),
        ("import sys; sys.exit('bad data')", 1, "SystemExit", "bad data\n"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--strict",)], ids=["", "strict"])
def test_a_script_that_fails_keeps_its_exit_code_and_is_not_called_sound(
    folder: Path, script: str, code: int, kind: str, complaint: str, flags: tuple[str, ...]
) -> None:
    result, printed, complained = watch(folder, script, *flags, "train.py")
    assert result == code
    assert f"tt.doctor: no finding before the run ended with {kind}\n" in printed
    assert complaint in complained
    assert bool(complaint) == bool(complained)
    assert "nothing found" not in printed


def test_strict_stops_at_the_first_finding(folder: Path) -> None:
    code, printed, complained = watch(folder, LEAK + "print('after')", "--strict", "train.py")
    assert (code, complained) == (1, "")
    assert "TT101 train.py" in printed
    assert "after" not in printed


@pytest.mark.parametrize("end", ["", "raise SystemExit", "import sys; sys.exit(0)"])
def test_a_sound_script_says_what_was_watched(folder: Path, end: str) -> None:
    code, printed, complained = watch(folder, SOUND + end)
    assert (code, complained) == (0, "")
    assert printed == (
        "tt.doctor: nothing found\n"
        "Watched: backward passes: 6; optimizer steps: 0; the recurrent state of train.py:11,"
        " carried from chunk to chunk.\n"
    )


def test_findings_of_the_end_of_a_loop_are_reported_although_the_script_exits(folder: Path) -> None:
    script = f"""{NET}
import sys
with torch.enable_grad():
    net.eval()
    for x in torch.randn(60, 2, 3).split(10):
        y, h = net(x, h)
sys.exit()
"""
    code, printed, _ = watch(folder, script)
    assert code == 1
    assert "TT202 train.py:11" in printed


@pytest.mark.parametrize(
    ("script", "code", "verdict", "missing"),
    [
        (
            "import torch\ntorch.nn.Linear(3, 1)(torch.ones(2, 3)).sum().backward()",
            2,
            "no verdict, since no recurrent state was watched",
            "Other processes and threads are not watched",
        ),
        (
            f"{NET}with torch.no_grad():\n    net(torch.ones(5, 2, 3))",
            0,
            "nothing found",
            "No backward pass was watched",
        ),
    ],
)
def test_the_report_says_what_a_loop_lacked(
    folder: Path, script: str, code: int, verdict: str, missing: str
) -> None:
    result, printed, _ = watch(folder, script)
    assert result == code
    assert f"tt.doctor: {verdict}\n" in printed
    assert missing in printed


def test_a_script_runs_as_python_runs_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "code").mkdir()
    (folder / "code" / "helper.py").write_text("X = 3", encoding="utf-8")
    script = """
import os, sys, helper
print(sys.argv[1:], __name__, __file__, sys.path[0], helper.X, input())
os.chdir("code")
"""
    (folder / "code" / "main.py").write_text(script, encoding="utf-8")
    monkeypatch.setattr("builtins.input", lambda: "typed")
    monkeypatch.setattr(sys, "path", [*sys.path])
    _, printed, _ = ended("doctor", "code/main.py", "--lr", "1", "-h")
    file = folder / "code" / "main.py"
    assert printed.startswith(f"['--lr', '1', '-h'] __main__ {file} {folder / 'code'} 3 typed\n")
    assert sys.path[0] == str(folder / "code")


@pytest.mark.parametrize(("name", "kind"), [("nosuch.py", "no such file"), (".", "no such file")])
def test_a_script_that_is_missing_is_an_error_of_usage(name: str, kind: str) -> None:
    code, printed, complained = ended("doctor", name)
    assert (code, printed) == (2, "")
    assert complained.startswith(f"error: {name}: {kind}. Write throughtime doctor train.py")


WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == {bad}:
            torch.zeros(2, 3) @ torch.zeros(2, 3)
        return torch.randn(10, 3)


if __name__ == "__main__":
    gru = torch.nn.GRU(3, 4, batch_first=True)
    for x in DataLoader(Windows(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
        gru(x)[0].sum().backward()
"""


@pytest.mark.parametrize("bad", [-1, 5])
def test_workers_of_a_loader_are_not_watched(folder: Path, bad: int) -> None:
    code, printed, complained = watch(folder, WORKERS.replace("{bad}", str(bad)))
    assert code == (bad > 0)
    assert "the recurrent state of train.py:19" in printed
    assert ("torch.zeros(2, 3) @ torch.zeros(2, 3)" in complained) == (bad > 0)
