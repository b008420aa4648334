"""A Sphinx extension for the Chinese site: stale translations, links between languages, search.

A page is translated if `locale/<language>/LC_MESSAGES` has a .po file of its name. Each paragraph,
heading and cell of a table is a message. Code blocks are not: they are the same in every language.
"""

import re
from pathlib import Path
from typing import Any

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.nodes import extract_messages

NAMES = {"en": "English", "zh_CN": "中文"}
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
            if not isinstance(node, nodes.image)  # its text is in the message of its paragraph
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


def link_languages(
    app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: object
) -> None:
    """The address of the page in the other language, and a note where a page is not translated."""
    here = app.config.language
    other = "zh_CN" if here == "en" else "en"
    folder = "zh_CN/" if here == "en" else "../"
    context["other_language"] = {
        "code": other.replace("_", "-"),
        "name": NAMES[other],
        "address": "../" * page.count("/") + f"{folder}{page}.html",
    }
    if page in app.env.found_docs and here != "en" and not catalog_path(app, page).is_file():
        context["body"] = f'<p class="untranslated">{UNTRANSLATED[here]}</p>{context["body"]}'


_WORD = re.compile(r"[\u3400-\u9fff]+|[a-zA-Z0-9_]+")


def bigrams(text: str) -> list[str]:
    """Latin words, and every two adjacent Chinese characters, as there are no spaces."""
    words: list[str] = []
    for word in _WORD.findall(text):
        pairs = [word[i : i + 2] for i in range(len(word) - 1)]
        words += pairs if word[0] >= "\u3400" else [word]
    return words


class SearchChinese(SearchEnglish):
    """Search of Chinese text. It needs no dictionary, which would not know the terms of the field.

    A query loses the pairs that no page has, so that a whole question can be typed.
    """

    lang = "zh"
    language_name = "Chinese"
    js_splitter_code = r"""
var splitQuery = (query) => {
  const known = (word) =>
    Object.hasOwn(Search._index.terms, word) || Object.hasOwn(Search._index.titleterms, word);
  return (query.match(/[\u3400-\u9fff]+|[a-zA-Z0-9_]+/g) || []).flatMap((word) => {
    if (word < "\u3400") return [word];
    const pairs = Array.from(word.slice(1), (second, i) => word[i] + second);
    const found = pairs.filter(known);
    return found.length ? found : pairs;
  });
};
"""

    def split(self, input: str) -> list[str]:  # noqa: A002  # the name of the base class
        return bigrams(input)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("update_translations", False, "env", bool)
    app.add_transform(CheckTranslation)
    app.connect("html-page-context", link_languages)
    app.add_search_language(SearchChinese)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
