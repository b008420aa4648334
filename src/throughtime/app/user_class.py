"""A class in the user's own file, named FILE.py:Class: a gradient policy, or a model.

The file is loaded by its path, not through `sys.path`, and executed once for each content, so its
classes keep their identity. A run keeps a copy of the file of its model beside the weights, whose
description has the SHA-256 of the file.
"""

import hashlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from throughtime.errors import ConfigError, RunError

if TYPE_CHECKING:
    from torch import nn

    from throughtime.app.model import ModelSpec

_ARGUMENTS = ("inputs", "outputs", "hidden", "layers", "dropout")  # of a model, in this order


@dataclass(frozen=True)
class ClassReference:
    """A file and the name of a class in it.

    Args:
        setting: the setting whose value it is, for messages.
        path: the file, resolved.
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
        return cls(setting, Path(file).resolve(), name)

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

    def load(self) -> type[Any]:
        """The class.

        Raises:
            ConfigError: no such file or class, or an error while the file is executed.
        """
        result = getattr(self._module(), self.name, None)
        if not inspect.isclass(result):
            raise ConfigError(f"{self._setting}: {self.path.name} defines no class {self.name}")
        return cast("type[Any]", result)

    @property
    def _setting(self) -> str:
        return f"{self.setting}={str(self)!r}"

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            what = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
            raise ConfigError(f"{self._setting}: {what} {self.path}") from error

    def _module(self) -> Any:
        digest = hashlib.sha256(str(self.path).encode() + self._read()).hexdigest()
        name = f"throughtime_user_{self.path.stem}_{digest[:16]}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, self.path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{self.path}: is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look up the annotations of their module there
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            hint = ""
            if isinstance(error, ModuleNotFoundError):
                hint = (
                    "; it is loaded by its path alone: what it imports must be installed, on"
                    " PYTHONPATH, or in the file itself"
                )
            raise ConfigError(
                f"{self.path}: cannot be imported ({type(error).__name__}: {error}){hint}"
            ) from error
        return module


def is_reference(text: str) -> bool:
    """Whether a setting names a class in a file."""
    return ".py:" in text


def model_arguments(reference: ClassReference) -> list[str]:
    """The arguments of a run that the constructor of a user's model accepts.

    Raises:
        ConfigError: no such class, it is no module, or it needs other arguments.
    """
    from torch import nn

    model_class = reference.load()
    if not issubclass(model_class, nn.Module):
        raise ConfigError(
            f"{reference._setting}: {reference.name} is no torch.nn.Module; write class"
            f" {reference.name}(nn.Module)"
        )
    parameters = inspect.signature(model_class).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(_ARGUMENTS)
    keywords = [p for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}
    ]
    passed = [name for name in _ARGUMENTS if name in {p.name for p in keywords}]
    if missing := [name for name in required if name not in passed]:
        raise ConfigError(
            f"{reference._setting}: its constructor needs {', '.join(map(repr, missing))}, and"
            f" train passes by name those of {', '.join(_ARGUMENTS)} that it takes. Write def"
            f" __init__(self, inputs, outputs, hidden, {missing[0]}=...): a default for the rest"
        )
    return passed


def make_user_model(reference: ClassReference, spec: "ModelSpec") -> "nn.Module":
    """The user's module, constructed with the sizes of the run.

    Raises:
        ConfigError: its constructor does not accept them, or fails.
    """
    arguments = {
        "inputs": spec.features,
        "outputs": spec.outputs,
        "hidden": spec.hidden,
        "layers": spec.layers,
        "dropout": spec.dropout,
    }
    arguments = {name: arguments[name] for name in model_arguments(reference)}
    try:
        return reference.load()(**arguments)
    except Exception as error:
        written = ", ".join(f"{name}={value}" for name, value in arguments.items())
        raise ConfigError(
            f"{reference._setting}: {reference.name}({written}) fails with"
            f" {type(error).__name__}: {error}"
        ) from error


def kept_class(folder: Path, name: str, sha256: str) -> ClassReference:
    """The class of a model in the copy of its file that a run keeps.

    Args:
        folder: of the run.
        name: the file and the class, as the description of the weights has it.
        sha256: of the file, of which the weights are.

    Raises:
        RunError: the copy is missing, or is another file.
    """
    file, _, class_name = name.rpartition(":")
    reference = ClassReference("model", (folder / file).resolve(), class_name)
    hint = f"put back the file that the run was started with (SHA-256 {sha256})"
    if not reference.path.is_file():
        raise RunError(f"{folder / file}: the code of the model is missing; {hint}")
    if reference.sha256() != sha256:
        raise RunError(f"{folder / file}: the code of the model has been changed; {hint}")
    return reference
