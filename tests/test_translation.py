"""The Chinese pages: nothing stale, the same code as in English, the words of the glossary."""

import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from babel.messages.pofile import read_po
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CATALOGS = DOCS / "locale" / "zh_CN"
PAGES = sorted(
    path.relative_to(CATALOGS / "LC_MESSAGES").with_suffix("").as_posix()
    for path in CATALOGS.rglob("*.po")
)


def code(markdown: str) -> list[str]:
    return re.findall(r"^```\w+\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)


class Warnings:
    """The stream that Sphinx writes warnings to."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def read(source: Path, out: Path) -> tuple[Sphinx, str]:
    """The translated pages of a copy of the sources, read and not written; the warnings."""
    warnings = Warnings()
    with patch_docutils(source), docutils_namespace():
        app = Sphinx(
            source,
            None,
            out,
            out,
            "dummy",
            {
                "extensions": ["myst_parser", "_translation"],
                "myst_enable_extensions": ["dollarmath"],
                "locale_dirs": ["locale"],
                "gettext_compact": False,
                "language": "zh_CN",
            },
            status=None,
            warning=warnings,
        )
        app.build()
    return app, warnings.text
