"""A Sphinx extension for the Chinese site: stale translations, and a note where there is none.

A page is translated if `locale/<language>/LC_MESSAGES` has a .po file of its name. Each paragraph,
heading and cell of a table is a message. Code blocks are not: they are the same in every language.
The catalog `pictures` has the labels of the pictures, and `sphinx` the words of the theme.
"""

import re
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import extract_messages

UNTRANSLATED = {"zh_CN": "本页尚无中文版。以下为英文原文。"}
LOGGER = logging.getLogger(__name__)


def catalog_path(app: Sphinx, page: str) -> Path:
    return Path(app.srcdir, "locale", app.config.language, "LC_MESSAGES", f"{page}.po")


def stale(catalog: Catalog, messages: dict[str, None]) -> list[str]:
    """What a catalog lacks of the messages of its page, and what it has besides, as lines."""
    faults: list[str] = []
    for message in messages:
        entry = catalog.get(message)
        if entry is None or not entry.string:
            faults.append(f"not translated: {message}")
        elif entry.fuzzy:
            faults.append(f"the English has changed: {message}")
    known = {str(entry.id) for entry in catalog if entry.id} | set(catalog.obsolete)
    return faults + [f"no longer on the page: {old}" for old in known - set(messages)]


class CheckTranslation(SphinxTransform):
    """A warning for each page whose translation is stale; with `update_translations`, its mend.

    The mend writes the messages of the page into its catalog: a new one without a translation, a
    changed one with that of the most similar old one, marked fuzzy.
    """

    default_priority = 19  # before Sphinx puts the translations in

    def apply(self, **_: Any) -> None:
        page = self.env.current_document.docname
        path = catalog_path(self.app, page)
        if not path.is_file():
            return
        messages = dict.fromkeys(
            message
            for node, message in extract_messages(self.document)
            # the text of a picture is in the message of its paragraph
            if not isinstance(node, nodes.image | nodes.math_block)
        )
        with path.open("rb") as file:
            catalog = read_po(file, locale=self.config.language)
        if self.config.update_translations:
            template = Catalog()
            for message in messages:
                template.add(message)
            catalog.update(template, no_fuzzy_matching=False)
            with path.open("wb") as file:
                write_po(file, catalog, width=0, omit_header=True, ignore_obsolete=True)
        elif faults := stale(catalog, messages):
            LOGGER.warning("stale translation\n  %s", "\n  ".join(faults), location=page)


_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?:,\d{3})*")
_LABEL = re.compile(r"(?<=>)[^<>{]*[A-Za-z]{2}[^<>{]*(?=<)")
_DESCRIPTION = re.compile(r"(<desc[^>]*>)[^<]*")
_IDENTIFIER = re.compile(r"\w+([._]\w+)+")


def labels(svg: str) -> list[str]:
    """The texts of a picture as messages, `{}` for each number. Names in code are none."""
    texts = _LABEL.findall(_DESCRIPTION.sub("", svg))
    return [_NUMBER.sub("{}", text) for text in texts if not _IDENTIFIER.fullmatch(text)]


def translated(svg: str, description: str, catalog: Catalog) -> str:
    """A picture with the labels of a catalog and another description for screen readers."""

    def translate(label: re.Match[str]) -> str:
        entry = catalog.get(_NUMBER.sub("{}", label[0]))
        if entry is None or not entry.string:
            return label[0]
        return str(entry.string).format(*_NUMBER.findall(label[0]))

    svg = _LABEL.sub(translate, _DESCRIPTION.sub(r"\1", svg))
    before, tag, after = svg.partition("</desc>")
    return f"{before}{escape(description)}{tag}{after}" if tag else svg


class TranslatePictures(SphinxPostTransform):
    """The labels of a picture from the catalog `pictures`, and its description from the page."""

    formats = ("html",)
    default_priority = 6  # after InlinePictures

    def run(self, **_: Any) -> None:
        path = catalog_path(self.app, "pictures")
        if not path.is_file():
            return
        with path.open("rb") as file:
            catalog = read_po(file)
        for node in list(self.document.findall(nodes.raw)):
            if description := node.get("description"):
                node.children = [nodes.Text(translated(node.astext(), description, catalog))]
        for image in list(self.document.findall(nodes.image)):
            path = Path(self.app.srcdir, str(image["uri"]))
            if path.suffix == ".svg" and labels(svg := path.read_text("utf-8")):
                description = str(image.get("alt", ""))
                source = quote(translated(svg, description, catalog))
                html = f'<img alt="{escape(description)}" src="data:image/svg+xml,{source}">'
                image.replace_self(nodes.raw("", html, format="html"))


def mark_untranslated(
    app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: object
) -> None:
    """A note at the top of a page that is still in English."""
    note = UNTRANSLATED.get(app.config.language)
    if note and page in app.env.found_docs and not catalog_path(app, page).is_file():
        context["body"] = f'<p class="untranslated">{note}</p>{context["body"]}'


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("update_translations", False, "env", bool)
    app.add_transform(CheckTranslation)
    app.add_post_transform(TranslatePictures)
    app.connect("html-page-context", mark_untranslated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
