"""The findings of the doctor: the codes, one finding, and the list of them.

`codes.json` says of each code what is wrong and what to write; `zh.json` says all of it in Chinese.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from throughtime.doctor._frames import PART, SourceLine
from throughtime.doctor._log import Fault
from throughtime.errors import ConfigError, DiagnosisError

PAGES_URL = "https://github.com/throughtime/throughtime/blob/main/docs/reference/doctor"


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


CODES: dict[str, tuple[str, str]] = {
    code: tuple(texts) for code, texts in _read("codes.json").items()
}
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


def in_chinese() -> bool:
    """Whether the environment asks for Chinese; LC_ALL counts more than LC_MESSAGES and LANG."""
    languages = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return next(filter(None, languages), "").startswith("zh")


@cache
def catalogue() -> dict[str, str]:
    """The Chinese texts by the English ones, both with `{}` for what differs."""
    return _read("zh.json")


def translated(text: str) -> str:
    """A text of one or several sentences of the catalogue in the user's language."""
    result, rest = list[str](), text
    while rest and in_chinese():
        for english, chinese in catalogue().items():
            pattern = re.escape(english).replace(r"\{\}", "(.*?)")
            if match := re.match(pattern + r"(?: (?=[A-Z])|$)", rest):
                values = (catalogue().get(value, value) for value in match.groups())
                result.append(chinese.format(*values))
                rest = rest[match.end() :]
                break
        else:
            return text
    return "".join(result) or text


def detached(path: str) -> str:
    """The statement that detaches a variable, or the container at a path."""
    whole = path.removesuffix(PART)
    return f"{path} = {path}.detach()" if whole == path else f"{whole} = tt.state.detach({whole})"


def detach_fix(paths: Iterable[str], *, retained: bool = False) -> str:
    """The fix for states that are carried with their graph; empty if no path is known."""
    statements = "; ".join(dict.fromkeys(map(detached, filter(None, paths))))
    backward = "; and one backward without retain_graph=True, for the sum of the losses" * retained
    return f"between chunks: {statements}{backward}" if statements else ""


@dataclass(frozen=True)
class Finding:
    """One fault of a training loop.

    Attributes:
        code: `TT101` and so on; each has a page.
        file: the user's file.
        line: the line in it.
        tensor: variable or attribute path of the tensor, `""` if unknown.
        created_in: the chunk in which the tensor was created, counted from 1; `None` if that does
            not apply.
        used_in: the chunk in which it was used.
        message: what is wrong, with the evidence.
        fix: the line to write.
        page: the address of the page that explains it, with a before and an after.
    """

    code: str
    file: str
    line: int
    tensor: str
    created_in: int | None
    used_in: int | None
    message: str
    fix: str
    page: str

    def __str__(self) -> str:
        name = f" [{self.tensor}]" if self.tensor else ""
        chunks = f" (created in chunk {self.created_in}, used in chunk {self.used_in})"
        usual = CODES[self.code][0]
        detail = self.message.removeprefix(usual).removeprefix(". ")
        message = ("。" if in_chinese() else ". ").join(
            map(translated, filter(None, [usual, detail]))
        )
        message += translated(chunks) if self.created_in else ""
        fix = translated(self.fix.removesuffix(IMPORT)) + IMPORT * self.fix.endswith(IMPORT)
        return (
            f"{self.code} {SourceLine(self.file, self.line)}{name} {message}\n"
            f"      {translated('write:')} {fix}\n      {translated('see:  ')} {self.page}"
        )


@dataclass
class FindingList:
    """The findings so far, each code once per line."""

    ignore: frozenset[str]
    strict: bool
    items: list[Finding] = field(default_factory=list)
    evidence: Counter[tuple[str, SourceLine]] = field(default_factory=Counter)

    @classmethod
    def from_options(cls, ignore: Iterable[str], strict: bool) -> "FindingList":
        """An empty list, with the codes checked."""
        codes = frozenset[Any]([ignore] if isinstance(ignore, str | int) else ignore)
        if unknown := sorted(map(str, codes - CODES.keys())):
            raise ConfigError(
                f"ignore={ignore!r}: unknown {unknown}, the codes are {', '.join(CODES)}."
                " Write tt.doctor(ignore={'TT207'})"
            )
        return cls(codes, strict)

    def add(self, fault: Fault | None) -> Finding | None:
        """Add the finding of a fault, if any, and return it, unless it is ignored or known.

        A fault without a line is not added, nor one that has not yet occurred `after` times: one
        may be chance.

        Raises:
            DiagnosisError: under `strict`.
        """
        code, line, detail, tensor, chunks, fix, after = fault or Fault("", None)
        if not line or code in self.ignore:
            return None
        self.evidence[code, line] += 1
        known = [(f.code, f.file, f.line) for f in self.items]
        if self.evidence[code, line] < after or (code, *line) in known:
            return None
        message, usual_fix = CODES[code]
        fix = fix or usual_fix
        created, used = (chunks[0] + 1, chunks[1] + 1) if chunks else (None, None)
        finding = Finding(
            code,
            *line,
            tensor,
            created,
            used,
            f"{message}. {detail}" if detail else message,
            fix + IMPORT * ("tt." in fix),
            f"{PAGES_URL}/{code}.md",
        )
        self.items.append(finding)
        if self.strict:
            raise DiagnosisError(str(finding))
        return finding
