"""The Chinese pages: nothing stale, the same code as in English, the words of the glossary."""

import re
from hashlib import sha256
from pathlib import Path

from babel.messages.pofile import read_po

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CATALOGS = DOCS / "locale" / "zh_CN" / "LC_MESSAGES"
CHINESE = "README.zh-CN.md"
PAGES = sorted(
    path.relative_to(CATALOGS).with_suffix("").as_posix()
    for path in CATALOGS.rglob("*.po")
    if path.stem not in {"pictures", "sphinx"}
)


def code(markdown: str) -> list[str]:
    return re.findall(r"^```\w+\n(.*?)\n^```", markdown, re.DOTALL | re.MULTILINE)


def messages(name: str) -> dict[str, str]:
    with (CATALOGS / f"{name}.po").open("rb") as file:
        return {str(entry.id): str(entry.string) for entry in read_po(file) if entry.id}


def sections(page: str) -> list[str]:
    return re.split(r"^## ", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_the_chinese_readme_follows_each_section_of_the_english_one() -> None:
    """The mend: look at the Chinese section, then write the new hash below its heading."""
    english = {
        text.split("\n", 1)[0]: sha256(text.encode()).hexdigest()[:8]
        for text in sections("README.md")
    }
    recorded = [re.findall(r"<!-- README\.md: (\w+) -->", text) for text in sections(CHINESE)]
    assert recorded == [[hashed] for hashed in english.values()], english


def test_the_chinese_readme_has_the_code_the_pictures_and_the_links_of_the_english_one() -> None:
    english, chinese = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", CHINESE)
    )
    assert code(chinese) == code(english)
    for link in (r"\]\(([^)]*)\)", r'(?:src|srcset)="([^"]*)"', r"`[^`\n]+`"):
        ours, theirs = set(re.findall(link, chinese)), set(re.findall(link, english))
        assert theirs - ours == ({CHINESE} if link.startswith(r"\]") else set())
    assert english.startswith(f"[中文]({CHINESE})\n")
    assert chinese.startswith("[English](README.md)\n")


def texts() -> dict[str, str]:
    """The Chinese of each page and of the README, as Markdown."""
    result = {CHINESE: (ROOT / CHINESE).read_text(encoding="utf-8")}
    return result | {name: "\n".join(messages(name).values()) for name in (*PAGES, "pictures")}


def test_the_words_of_chinese_pages_are_those_that_are_fixed() -> None:
    fixed = (CATALOGS.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", fixed, re.MULTILINE)
    banned = [word for _, _, words in rows[1:] for word in words.split("、")]
    assert len(banned) > 30
    assert not [(page, word) for page, text in texts().items() for word in banned if word in text]
