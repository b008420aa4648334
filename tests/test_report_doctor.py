"""The page of the doctor: each finding at its line of the user's code, and nothing else."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

from test_cli import ended, run
from throughtime.app.report import doctor_page
from throughtime.app.report.page import Code, Page, Section, WebLink, render
from throughtime.doctor import CODES, Doctor, doctor
from throughtime.errors import ConfigError

FAULTY = """\
import sys
import torch

torch.manual_seed(0)
gru = torch.nn.GRU(3, 4)
total = 0.0
for x in torch.randn(120, 2, 3).split(int(sys.argv[1])):  # <b> & "quoted"
    y, h = gru(x)
    y.square().mean().backward()
"""
SOUND = """\
import torch
import throughtime as tt

torch.manual_seed(0)
stream = tt.Stream({"inputs": torch.randn(400, 3), "targets": torch.randn(400)}, lanes=2, chunk=20)
net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.Adam(net.parameters())
for policy in (tt.Truncated(20), tt.Truncated(20, 50), tt.Exact(cut_every=40)):
    for update in tt.updates(net, stream, torch.nn.MSELoss(), gradient=policy):
        optimizer.step()
        optimizer.zero_grad()
"""


def examine(
    folder: Path,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    flags: tuple[str, ...] = (),
) -> tuple[int, str]:
    """Run the command in this process; return its exit code and the page."""
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(script, encoding="utf-8")
    words = ("doctor", "--report", "page.html", *flags, "train.py", *arguments)
    try:
        code = 0 if run(*words) else -1
    except AssertionError:
        code = 1
    return code, (folder / "page.html").read_text(encoding="utf-8")


def marked(page: str) -> list[str]:
    """The marked lines of the excerpts."""
    return [(e.text or "").split(maxsplit=2)[2] for e in ET.fromstring(page).iter("mark")]


def faulty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    code, page = examine(folder, FAULTY, monkeypatch, "10")
    assert code == 1
    return page


def test_page_marks_the_line_and_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = faulty(tmp_path, monkeypatch)
    assert marked(page) == ["y, h = gru(x)"]
    text = "".join(ET.fromstring(page).itertext())
    assert "TT201, line 8 of train.py" in text
    assert CODES["TT201"][1] in text
    assert (
        "→  8      y, h = gru(x)" in text
    )  # an arrow, not colour alone, and the indent of the file
    assert 'for x in torch.randn(120, 2, 3).split(int(sys.argv[1])):  # <b> & "quoted"' in text


def test_the_page_is_one_well_formed_file_that_sends_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = faulty(tmp_path, monkeypatch)
    root = ET.fromstring(page)
    assert not re.search(r"<script|<link|\bsrc=|@import|url\(", page)
    addresses = [a.attrib["href"] for a in root.iter("a")]
    outside = [address for address in addresses if not address.startswith("#")]
    assert [address.rsplit("/", 1)[1] for address in outside] == ["TT201.md"]
    assert page.count("https:") == 1  # a link to follow, never fetched
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert {a[1:] for a in addresses if a.startswith("#")} <= set(ids)


def test_a_loop_of_throughtime_is_not_watched_and_its_page_has_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SOUND, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code, _, _ = ended("doctor", "--report", "page.html", "train.py")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert code == 2
    assert "No verdict, since no recurrent state was watched." in page
    assert "the loops of throughtime itself, such as tt.updates" in page
    assert "Nothing found" not in page
    assert marked(page) == []
    assert all(known in page for known in CODES)


def test_failing_script_has_its_page_even_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "else").mkdir()
    script = "import os\nos.chdir('else')\n" + FAULTY + "raise ValueError('the disk is <full>')\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    code, printed, complained = ended("doctor", "--report", "page.html", "train.py", "10")
    assert code == 1
    script = tmp_path / "train.py"
    assert complained.startswith(f'Traceback (most recent call last):\n  File "{script}", line')
    assert complained.endswith("ValueError: the disk is <full>\n")
    assert (printed + complained).count("every chunk starts from a zero state") == 1
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "The loop ended with ValueError: the disk is &lt;full&gt;" in page
    assert marked(page) == ["y, h = gru(x)"]


def test_an_ignored_code_is_not_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, page = examine(tmp_path, FAULTY, monkeypatch, "10", flags=("--ignore", "TT201"))
    assert code == 0
    assert "Nothing found." in page
    assert "Watched: backward passes: 12; optimizer steps: 0; the recurrent state of" in page


@pytest.mark.parametrize("name", ["train.py", "page", "page.pdf"])
def test_page_never_replaces_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(3)", encoding="utf-8")
    output = run("doctor", "--report", name, "train.py", ok=False)
    assert (
        f"--report '{name}': the page is HTML. Write --report {Path(name).with_suffix('.html')},"
        " before the script" in output
    )
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == "raise SystemExit(3)"


def doctor_with_finding() -> Doctor:
    gru = torch.nn.GRU(3, 4)
    with doctor() as d:
        for x in torch.randn(120, 2, 3).split(10):
            gru(x)[0].square().mean().backward()
    return d


def test_loop_in_a_test_or_notebook_can_be_reported(tmp_path: Path) -> None:
    d = doctor_with_finding()
    path = doctor_page.write_report(d, tmp_path / "new" / "page.html", of="a notebook")
    assert marked(path.read_text(encoding="utf-8")) == ["gru(x)[0].square().mean().backward()"]


def test_missing_file_is_named_without_an_excerpt(tmp_path: Path) -> None:
    names: dict[str, Any] = {"torch": torch, "doctor": doctor}
    loop = (
        "def loop(gru):\n  for x in torch.randn(120, 2, 3).split(10):\n   "
        " gru(x)[0].square().mean().backward()\n"
    )
    exec(compile(loop, str(tmp_path / "gone.py"), "exec"), names)
    with doctor() as d:
        names["loop"](torch.nn.GRU(3, 4))
    page = doctor_page.write_report(d, tmp_path / "page.html").read_text(encoding="utf-8")
    assert marked(page) == []
    assert "gone.py, line 3; the file is not available." in page


def test_failure_of_the_doctor_itself_is_reported(tmp_path: Path) -> None:
    d = doctor_with_finding()
    d.clear()
    d.internal_error = RuntimeError("out of <ideas>")
    page = doctor_page.write_report(d, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "it may have missed something: RuntimeError: out of &lt;ideas&gt;" in page


def test_tabs_keep_their_indent_and_only_one_line_is_marked() -> None:
    page = render(
        Page("t", "", [Section("s", [Code(["if a:\n", "\tb < c\n", "d\n"], 9, 10, "f.py")])])
    )
    (code,) = ET.fromstring(page).iter("code")
    assert "".join(code.itertext()).splitlines() == ["   9  if a:", "→ 10      b < c", "  11  d"]
    assert len(list(code.iter("mark"))) == 1


def test_link_accepts_https_addresses_only() -> None:
    with pytest.raises(ConfigError, match="expected one that begins with https://"):
        WebLink("here", "javascript:alert(1)")
