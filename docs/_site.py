"""A Sphinx extension with what the site needs besides: links of inline code, and equations.

The pages stay plain Markdown: `tt.Stream` in backticks becomes a link to its page of the API, and
an equation becomes MathML, which browsers show without a script and without a network.
"""

import re
from pathlib import Path
from textwrap import indent
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.search import SearchLanguage
from sphinx.search._stopwords.en import ENGLISH_STOPWORDS
from sphinx.search.en import SearchEnglish
from sphinx.transforms.post_transforms import SphinxPostTransform

import throughtime

_CODE = re.compile(r"(tt|throughtime|torch|nn)((?:\.\w+)+)(?:\(.*\))?", re.DOTALL)
_QUESTION_WORDS = frozenset(
    [
        "between",
        "difference",
        "do",
        "does",
        "every",
        "how",
        "implement",
        "my",
        "need",
        "pytorch",
        "should",
        "use",
        "using",
        "vs",
        "what",
        "when",
        "which",
        "why",
    ]
)
_CHINESE_OR_NOT = re.compile(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+")
_BACKTICKS = re.compile(r"(?<![`\w:])`([^`]+)`(?![`\w])")
_LETTER = re.compile(r"^(\s+\w+: )([A-Z])\.$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_PACKAGES = {"tt": "throughtime", "throughtime": "throughtime", "torch": "torch", "nn": "torch.nn"}


class CodeLinks(SphinxPostTransform):
    """Inline code that is a name of throughtime or torch, with or without a call, as a link."""

    default_priority = 5  # before references are resolved

    def run(self, **_: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            named = _CODE.fullmatch(literal.astext())
            if named is None or isinstance(literal.parent, nodes.reference | addnodes.pending_xref):
                continue
            target = _PACKAGES[named[1]] + named[2]
            link = addnodes.pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                reftarget=target,
                refexplicit=True,
                refdoc=self.env.current_document.docname,
                refwarn=False,
            )
            literal.replace_self(link)
            link += literal


class InlinePictures(SphinxPostTransform):
    """A picture that is drawn in the colours of the page becomes a part of it.

    As a file, which GitHub shows, it is black on white; on the page it follows light and dark. One
    with colours of its own for both stays a file.
    """

    formats = ("html",)
    default_priority = 5  # before the file is copied

    def run(self, **_: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            path = Path(self.app.srcdir, str(image["uri"]))
            if path.suffix != ".svg" or "var(--paper" not in (svg := path.read_text("utf-8")):
                continue
            if "prefers-color-scheme" in svg:
                continue
            figure = f'<div class="drawing">{svg}</div>'
            image.replace_self(nodes.raw("", figure, format="html", description=image.get("alt")))


class EnglishSearch(SearchEnglish):
    """Questions as people type them: these words rank no page (`search_ranking.js`)."""

    stopwords = ENGLISH_STOPWORDS | _QUESTION_WORDS


class ChineseSearch(SearchLanguage):
    """Pairs of neighbouring characters, so that a query of any length finds the phrase.

    Sphinx's own splits by a dictionary of 20 MB, the index only: a query stays one word.
    """

    lang = "zh"
    language_name = "English"  # that of the stemmer
    js_stemmer_rawcode = "english-stemmer.js"
    stopwords = EnglishSearch.stopwords | {
        "为什",
        "什么",
        "如何",
        "怎么",
        "怎样",
        "是什",
        "解决",
        "区别",
    }
    js_splitter_code = """
function splitQuery(query) {
  return query.split(/[^\\p{Letter}\\p{Number}_]+/gu).flatMap((word) =>
    (word.match(/[\\u4e00-\\u9fff]+|[^\\u4e00-\\u9fff]+/g) || []).flatMap((part) =>
      /[\\u4e00-\\u9fff]{2}/.test(part)
        ? Array.from({ length: part.length - 1 }, (_, i) => part.slice(i, i + 2))
        : [part]));
}
"""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._english = SearchEnglish(options)

    def split(self, input: str) -> list[str]:  # noqa: A002
        words: list[str] = []
        for part in _CHINESE_OR_NOT.findall(input):
            if part[0] < "\u4e00":
                words.append(part)
            else:
                words += [part[i : i + 2] for i in range(max(len(part) - 1, 1))]
        return words

    def stem(self, word: str) -> str:
        return self._english.stem(word)

    def word_filter(self, word: str) -> bool:
        return self._english.word_filter(word) or word >= "\u4e00"


def find_public(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """The page of a name that a docstring or a signature writes by its module, or as `tt.name`."""
    target = str(node.get("reftarget", ""))
    last = target.removeprefix("tt.").removeprefix("throughtime.").rpartition(".")[2]
    names = [target.replace("tt.", "throughtime.", 1)] if target.startswith("tt.") else []
    if last in throughtime.__all__:
        names.append(f"throughtime.{last}")
    for name in names:
        if name != target:
            domain = env.domains.python_domain
            result = domain.resolve_xref(
                env, str(node["refdoc"]), app.builder, "obj", name, node, content
            )
            if result is not None:
                return result
    return None


def plain_docstring(
    _app: Sphinx, what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """A docstring as reStructuredText: code that is no name, and diagrams of a module, as they are.

    A name in backticks is a reference, in which a leading dot and angle brackets have a meaning.
    """
    text = _BACKTICKS.sub(
        lambda span: span[0] if _NAME.fullmatch(span[1]) else f"``{span[1]}``", "\n".join(lines)
    )
    text = _LETTER.sub(r"\1``\2``.", text)  # it would begin a numbered list
    blocks = text.split("\n\n")
    for number, block in enumerate(blocks):
        if what == "module" and (block.startswith("    ") or "├──" in block):
            blocks[number] = ".. code-block:: text\n\n" + indent(block, "    ")
    lines[:] = "\n\n".join(blocks).split("\n")


def visit_math(self: Any, node: nodes.math) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def leave_out(self: Any, node: nodes.Node) -> None:
    """The visitors leave nothing to close."""


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(CodeLinks)
    app.add_post_transform(InlinePictures)
    app.add_search_language(EnglishSearch)
    app.add_search_language(ChineseSearch)
    app.connect("missing-reference", find_public)
    app.connect("autodoc-process-docstring", plain_docstring, priority=400)  # before napoleon
    app.add_node(nodes.math, override=True, html=(visit_math, leave_out))
    app.add_node(nodes.math_block, override=True, html=(visit_math_block, leave_out))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
