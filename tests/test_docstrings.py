"""Docstrings of the public names: arguments, what comes back, an example that runs."""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import throughtime as tt

INTEGRATIONS = ("lightning", "ignite", "accelerate")


def members(module: Any) -> Iterator[tuple[str, Any]]:
    """What a module lists in `__all__`, or else defines."""
    own = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    for name in getattr(module, "__all__", own):
        if not name.startswith("_"):  # of Ignite's own API
            yield f"{module.__name__}.{name}", getattr(module, name)


def public() -> Iterator[tuple[str, Any]]:
    """Every class and function of the API by its name there."""
    for name in INTEGRATIONS:
        yield from members(importlib.import_module(f"throughtime.integrations.{name}"))
    for name in tt.__all__:
        if name in tt._MODULES:
            yield from members(getattr(tt, name))
        elif name != "__version__":
            yield name, getattr(tt, name)


NAMES = dict(public())


def section(value: Any, title: str) -> str | None:
    """The indented text below a heading of a docstring."""
    text = inspect.getdoc(value) or ""
    match = re.search(rf"^{title}:\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
    return match and match[1]


def entries(value: Any, *titles: str) -> set[str]:
    """The names that sections describe."""
    found = [section(value, title) or "" for title in titles]
    return set(re.findall(r"^    \*{0,2}(\w+):", "".join(found), re.MULTILINE))


def test_functions_describe_their_arguments_and_result_and_show_an_example() -> None:
    for name, function in NAMES.items():
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            given = set(signature.parameters) - {"self", "cls"}
            assert given <= entries(function, "Args"), name
            yields = section(function, "Returns") or section(function, "Yields")
            assert yields or signature.return_annotation is None, name
            assert ">>>" in (section(function, "Example") or ""), name


def test_classes_describe_what_they_take_and_what_they_have() -> None:
    """Arguments or attributes, or an example; of a protocol the laws, of the rest its maker."""
    for name, kind in NAMES.items():
        if inspect.isclass(kind):
            described, text = entries(kind, "Args", "Attributes"), inspect.getdoc(kind) or ""
            laws = getattr(kind, "_is_protocol", False) and "these laws" in text
            assert described or ">>>" in text or laws or "Made by" in text, name
            fields: dict[str, Any] = getattr(kind, "__dataclass_fields__", {})
            assert {field for field in fields if not field.startswith("_")} <= described, name
