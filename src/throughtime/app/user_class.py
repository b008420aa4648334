"""A class in the user's own file, named FILE.py:Class: a model, policy, loss or optimizer.

The file is loaded by its path, not through `sys.path`, and executed once for each content, so its
classes keep their identity. A run keeps copies of the files that its settings name, and their
SHA-256.

A file is executed only if the user has named it in this process, as `train` and `trust_code` do, or
has trained with this content before: a list in the user's folder of settings has the SHA-256 of
each such file. So a run folder from elsewhere executes nothing by itself.
"""

import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import StringConstraints

from throughtime.errors import ConfigError, RunError
from throughtime.files import user_folder

T = TypeVar("T")
ClassFile: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^.+\.py:[A-Za-z_]\w*$"), "FILE.py:Class"
]
"""FILE.py:Class."""
OWN_CODE = "throughtime_user_"  # begins the names of modules of the user's
_trusted = set[str]()  # the SHA-256 of files that this process may execute


@dataclass(frozen=True)
class ClassReference:
    """A file and the name of a class in it.

    Args:
        setting: the setting whose value it is, for messages.
        path: the file.
        name: the class.

    Example:
        >>> ClassReference.parse("model", "nets/gru.py:Net").name
        'Net'
    """

    setting: str
    path: Path
    name: str

    @classmethod
    def parse(cls, setting: str, text: str) -> "ClassReference":
        """The reference in `FILE.py:Class`."""
        file, _, name = text.rpartition(":")
        return cls(setting, Path(file), name)

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    @property
    def short(self) -> str:
        """The name of the file, without its folder, and that of the class."""
        return f"{self.path.name}:{self.name}"

    def sha256(self) -> str:
        """The SHA-256 of the file, in hexadecimal digits.

        Raises:
            ConfigError: no such file.
        """
        return hashlib.sha256(self._read()).hexdigest()

    def trust(self) -> None:
        """Let this process execute the file as it is now.

        Raises:
            ConfigError: no such file.
        """
        _trusted.add(self.sha256())

    def load(self) -> type[Any]:
        """The class.

        Raises:
            ConfigError: no such file or class, or an error while the file is executed.
            RunError: the file is not trusted.
        """
        result = getattr(self._module(self._read()), self.name, None)
        if not inspect.isclass(result):
            raise ConfigError(f"{self.written}: {self.path.name} defines no class {self.name}")
        return result

    @property
    def written(self) -> str:
        """The setting as a flag, for messages."""
        return f"--{self.setting} {self}"

    def make(self, base: type[T], offered: Mapping[str, Any], needed: Iterable[str] = ()) -> T:
        """An object of the class, made with those of the offered arguments that it takes by name.

        Args:
            base: of the class.
            offered: arguments by name.
            needed: the names of those that its constructor must name.

        Raises:
            ConfigError: no such class, none of the base, or one whose constructor needs more, takes
                less than it must, or fails.
        """
        from torch.nn import Module

        kind = self.load()
        if not issubclass(kind, base):
            name = f"{base.__module__}.{base.__name__}"
            raise ConfigError(f"{self.written}: is no {name}; make the class a subclass of it")
        parameters = inspect.signature(kind).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not takes_all or kind.__init__ is Module.__init__:
            offered = {name: value for name, value in offered.items() if name in parameters}
        for name in needed:
            if name not in offered:
                raise ConfigError(
                    f"{self.written}: its constructor names no {name}, which a flag sets; add it"
                    " there, or leave the flag out"
                )
        try:
            return kind(**offered)
        except Exception as error:
            raise ConfigError(
                f"{self.written}: {self.name} fails with {type(error).__name__}: {error}; it was"
                f" given {', '.join(offered)}"
            ) from error

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{self.written}: no such file {self.path}") from error

    def _module(self, content: bytes) -> Any:
        sha256 = hashlib.sha256(content).hexdigest()
        if not is_trusted(sha256):
            raise RunError(
                f"{self.path}: its class {self.name} is code that you have not trained with; read"
                " the file, then write --trust-code (in Python trust_code=True) to execute it"
            )
        name = OWN_CODE + sha256
        if name in sys.modules:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__ = str(self.path)
        sys.modules[name] = module  # dataclasses look up the annotations of their module there
        try:
            # the bytes that were hashed, and nothing from __pycache__
            exec(compile(content, self.path, "exec"), vars(module))  # noqa: S102  # it is trusted
        except Exception as error:
            del sys.modules[name]
            raise ConfigError(
                f"{self.path}: cannot be imported ({type(error).__name__}: {error}); it is loaded"
                " by its path alone: what it imports must be installed, or on PYTHONPATH"
            ) from error
        return module


def trust_list() -> Path:
    """The file of the SHA-256 of all code that this user has trained with, one on a line."""
    return user_folder("config", {}) / "trusted-code"


def is_trusted(sha256: str) -> bool:
    """Whether a file may be executed: it is named in this process, or is in the list."""
    return sha256 in _trusted | _listed()


def _listed() -> set[str]:
    with suppress(OSError, RuntimeError):  # no list that can be read, or a user without a home
        return set(trust_list().read_text("ascii", "replace").split())
    return set()


def remember(code: Sequence[ClassReference]) -> None:
    """Add files to the list of trusted code; without it later commands ask for --trust-code."""
    with suppress(OSError, RuntimeError):  # as of `_listed`
        if new := {reference.sha256() for reference in code} - _listed():
            trust_list().parent.mkdir(parents=True, exist_ok=True)
            with trust_list().open("a", encoding="ascii") as file:  # one write, at the end
                file.write("\n".join([*new, ""]))


def is_reference(text: str) -> bool:
    """Whether a setting names a class in a file."""
    return ".py:" in text


def kept_class(
    folder: Path, named: ClassReference, sha256: str | None = None, *, trust_code: bool
) -> ClassReference:
    """The class in the copy of its file that a run keeps.

    Args:
        folder: of the run.
        named: the file and the class, as the run names them.
        sha256: of the file that the run was started with; `None` if something else compares it.
        trust_code: let this process execute the file.

    Raises:
        RunError: the run names a file outside its folder, or the copy is missing or another file.
    """
    kept = replace(named, path=(folder / named.path).resolve())
    inside = kept.path.is_file() and kept.path.parent == folder.resolve()
    if not inside or sha256 not in {None, kept.sha256()}:
        raise RunError(
            f"{kept.path}: the code of the {named.setting} is missing or has been changed, or lies"
            " outside this run folder; put back the file that the run was started with"
        )
    if trust_code:
        kept.trust()
    return kept
