"""What the workflows name exists, and their actions cannot change unseen."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
MADE = {"build", "dist"}  # folders that the commands write
FILE = re.compile(r"(?<![\w/.\"-])(\.?[\w-]+(?:/[\w.-]*[\w*])+|[\w-]+\.(?:toml|txt|md))(?![\w/])")


def faults(text: str) -> list[str]:
    """The targets and files of a workflow that do not exist, and actions without a commit."""
    found = [f"make {name}" for name in re.findall(r"\bmake ([\w-]+)", text) if name not in TARGETS]
    for action, version in re.findall(r"uses: (\S+)( # v\d+\.\d+\.\d+$)?", text, re.MULTILINE):
        if not (version and re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)):
            found.append(action)
    rest = re.sub(
        r"uses: .*|https?://\S+|refs/\S*|\$\{\{.*?\}\}|^ +case .*\n.*", "", text, flags=re.MULTILINE
    )
    named = (name for name in FILE.findall(rest) if name.split("/")[0] not in MADE)
    return found + [name for name in named if not list(ROOT.glob(name))]


def test_workflows_name_what_exists() -> None:
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        assert faults(text) == []
        assert "\npermissions:\n  contents: read\n" in text
        assert text.count("runs-on:") == text.count("timeout-minutes:") >= 1


def test_the_wheels_are_built_for_the_oldest_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    oldest = project["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert project["tool"]["cibuildwheel"]["build"] == f"cp{oldest}-*"


def test_no_page_names_the_package_on_pypi_before_it_is_there() -> None:
    """The steps of a release say when. An extra of what is installed asks no index for it."""
    steps = (ROOT / ".github" / "RELEASING.md").read_text(encoding="utf-8")
    assert "pip install throughtime" in steps
    pages = [*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")]
    install = re.compile(r"pip install (-\S+ )*['\"]?throughtime\b(?!\[)")
    assert not [page for page in pages if install.search(page.read_text(encoding="utf-8"))]
