"""The doctor's advice in Chinese: all of it, with the same values, chosen by the environment."""

import ast
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from throughtime.doctor import CODES, Doctor, doctor, findings
from throughtime.doctor.findings import CHINESE

FOLDER = Path(findings.__file__).parent
SPECIAL = ("BACKWARD_FIRST", "OWN_LOSS")


def template(node: ast.expr) -> str | None:
    """A text of the source, with {} for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    return None


def sentences(path: Path) -> set[str]:
    """The sentences in a module of rules that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    parts = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.expr)]
    texts = [template(n) for n in nodes if id(n) not in docstrings | parts]
    return {text.strip() for text in texts if text and re.search(r"[a-z}]\.$", text)}


def test_every_text_has_a_chinese_one_with_the_same_values() -> None:
    details = set().union(*map(sentences, (FOLDER / "rules").glob("*.py")))
    assert len(details) > 12
    fixes = {getattr(findings, name) for name in SPECIAL}
    texts = details | fixes | {text for pair in CODES.values() for text in pair}
    missing = texts - CHINESE.keys()
    assert not missing, missing
    for english, chinese in CHINESE.items():
        assert english.count("{}") == chinese.count("{}"), english
        assert re.search("[\u4e00-\u9fff]", chinese) or "{}" in english, english


def watched() -> Doctor:
    gru = nn.GRU(3, 4)
    with doctor() as d:
        for x in torch.randn(120, 2, 3).split(10):
            gru(x)[0].square().mean().backward()
    return d


@pytest.mark.parametrize(
    ("environment", "chinese"),
    [
        ({"LANG": "zh_CN.UTF-8"}, True),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "en_US.UTF-8"}, False),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "zh_CN"}, True),
        ({}, False),
    ],
)
def test_the_environment_chooses_the_language_of_the_report_alone(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], chinese: bool
) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    d = watched()
    assert ("有 3 次输入接着上一块" in str(d)) is chinese
    assert ("3 times the inputs continued" in str(d)) is not chinese
    assert "every chunk starts from a zero state" in asdict(d.findings[0])["message"]
