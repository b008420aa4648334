"""The findings of the doctor: the codes, one finding, and the list of them.

`codes.json` says of each code what is wrong and what to write; `zh.json` says all of it in Chinese.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from throughtime.doctor._frames import PART, SourceLine
from throughtime.doctor._log import Fault
from throughtime.errors import ConfigError, DiagnosisError

PAGES_URL = "https://github.com/throughtime/throughtime/blob/main/docs/reference/doctor"


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


CODES: dict[str, list[str]] = _read("codes.json")  # what is wrong, and what to write
# the Chinese texts by the English ones, both with `{}` for what differs
CHINESE: dict[str, str] = _read("zh.json")
IMPORT = " (import throughtime as tt)"
# Fixes of special cases.
BACKWARD_FIRST = (
    "loss.backward() before optimizer.step() or any other change of the parameters; where the loss"
    " comes only after a step, keep the inputs and the state, and compute the forward pass anew"
)
OWN_LOSS = (
    "loss.backward() for the loss of this chunk alone; of the sum keep only the value:"
    " total += loss.detach()"
)
CLEAR_ONCE = (
    "clear once for each step: optimizer.zero_grad() right after optimizer.step(), not at every"
    " backward"
)


def translated(text: str) -> str:
    """A text in the user's language, each of its sentences by the catalogue.

    The environment asks for Chinese; LC_ALL counts more than LC_MESSAGES and LANG.
    """
    languages = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    if next(filter(None, languages), "").startswith("zh"):
        return "".join(map(_in_chinese, re.split(r"(?<=\.) (?=[A-Z\d])", text)))
    return text


def _in_chinese(sentence: str) -> str:
    for english, chinese in CHINESE.items():
        pattern = re.escape(english).replace(r"\{\}", "(.*?)")
        if match := re.fullmatch(pattern, sentence):
            return chinese.format(*match.groups())
    return sentence


def detach_fix(paths: Iterable[str], *, retained: bool = False) -> str:
    """The fix for states that are carried with their graph; empty if no path is known."""
    statements = "; ".join(dict.fromkeys(map(_detached, filter(None, paths))))
    backward = "; and one backward without retain_graph=True, for the sum of the losses" * retained
    backward += IMPORT * ("tt." in statements)
    return f"between chunks: {statements}{backward}" if statements else ""


def _detached(path: str) -> str:
    """The statement that detaches a variable, or the container at a path."""
    whole = path.removesuffix(PART)
    return f"{path} = {path}.detach()" if whole == path else f"{whole} = tt.state.detach({whole})"


@dataclass(frozen=True)
class Finding:
    """One fault of a training loop.

    Attributes:
        code: `TT101` and so on; each has a page.
        file: the user's file.
        line: the line in it.
        tensor: variable or attribute path of the tensor, `""` if unknown.
        message: what is wrong, with the evidence.
        fix: the line to write.
        page: the address of the page that explains it, with a before and an after.
    """

    code: str
    file: str
    line: int
    tensor: str
    message: str
    fix: str
    page: str

    def __str__(self) -> str:
        name = f" [{self.tensor}]" if self.tensor else ""
        return (
            f"{self.code} {SourceLine(self.file, self.line)}{name} {translated(self.message)}\n"
            f"      {translated('write:')} {translated(self.fix)}\n"
            f"      {translated('see:  ')} {self.page}"
        )


@dataclass
class FindingList:
    """The findings so far, each code once per line.

    Raises:
        ConfigError: an unknown code to ignore.
    """

    ignore: Iterable[str]
    strict: bool
    items: list[Finding] = field(default_factory=list)
    evidence: Counter[Any] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        codes = {*([self.ignore] if isinstance(self.ignore, str | int) else self.ignore)}
        if unknown := sorted(map(str, codes - CODES.keys())):
            raise ConfigError(
                f"ignore={self.ignore!r}: unknown {unknown}, the codes are {', '.join(CODES)}."
                " Write tt.doctor(ignore={'TT207'})"
            )
        self.ignore = codes

    def add(self, fault: Fault | None) -> None:
        """Add the finding of a fault, if any, unless its code is ignored.

        A fault without a line is not added, nor one that has not yet occurred `after` times: one
        may be chance.

        Raises:
            DiagnosisError: under `strict`.
        """
        code, line, detail, tensor, fix, after = fault or Fault("", None)
        if not line or code in self.ignore:
            return
        self.evidence[code, line] += 1
        if self.evidence[code, line] < after:
            return
        self.evidence[code, line] = -sys.maxsize  # never again
        message, usual_fix = CODES[code]
        finding = Finding(
            code,
            *line,
            tensor,
            f"{message} {detail}".rstrip(),
            fix or usual_fix,
            f"{PAGES_URL}/{code}.md",
        )
        self.items.append(finding)
        if self.strict:
            raise DiagnosisError(str(finding))
