"""The settings of the commands, each declared once: a flag, its help, a key of TOML, a check.

The text below a field is its help. A fault names a setting by its flag, `--lanes 0`, in a TOML
file, too. This module imports no torch and no numpy, so that `throughtime --help` is quick.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

from throughtime.app.user_class import ClassFile, ClassReference, is_reference
from throughtime.errors import ConfigError

ARGUMENTS = {"run": "RUN", "data": "DATA", "script": "SCRIPT"}
"""The settings that are arguments of a command, not flags."""
DEFAULT_STRIDE = 100
CODE = ("model", "gradient", "loss", "optimizer")
"""The settings that may name a class in a user's file."""
SHORT = ("stride", "horizon", "cut_every")
"""The settings that are arguments of a gradient policy."""
_Model: Any = BaseModel  # a type checker would want of callers, who have texts, every field's type


class Settings(_Model):
    """Checked settings by name; `None` means the default.

    Raises:
        ConfigError: unknown names (with the nearest known one), missing ones, and values of the
            wrong type or out of range, all at once; or what does not go together.
    """

    model_config = ConfigDict(
        allow_inf_nan=False,
        frozen=True,
        extra="forbid",
        defer_build=True,  # --help needs no schema
        use_attribute_docstrings=True,
    )

    def __init__(self, **settings: Any) -> None:
        present = {  # true as a text, which is no number
            name: str(value) if isinstance(value, bool) else value
            for name, value in settings.items()
            if value is not None
        }
        try:
            super().__init__(**present)
        except ValidationError as error:
            faults = dict[str, dict[str, None]]()  # of a union there are several
            for fault in error.errors():
                name, text = _fault(type(self).model_fields, fault, present)
                faults.setdefault(name, {})[text] = None
            texts = (f"{name}{' or '.join(several)}" for name, several in faults.items())
            raise ConfigError("; ".join(texts)) from error

    def changed(self, **settings: Any) -> Self:
        """Checked settings of which some are others."""
        return type(self)(**{**dict(self), **settings})


def _fault(fields: Mapping[str, Any], fault: Any, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The setting of a fault that pydantic reports, and the fault in words."""
    message = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:  # of several settings together
        return "", message
    name = fault["loc"][0]
    if name not in fields:
        near = difflib.get_close_matches(flag(name), map(flag, fields), 1, 0.8)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"unknown '{name}'{hint}: ", "no flag or key of TOML; see --help"
    if fault["type"] == "missing":
        return f"{flag(name)} is missing: ", help_of(fields[name])
    if fault["type"] in {"literal_error", "string_pattern_mismatch"}:
        message = f"expected {' or '.join(choices(fields[name].annotation))}"
    return f"{written(name, settings[name])}: ", message


def help_of(field: Any) -> str:
    """The text below a field, in one line."""
    return " ".join(str(field.description).split())


def flag(name: str) -> str:
    """The flag, or the argument, of a setting."""
    return ARGUMENTS.get(name) or f"--{name.lstrip('-').replace('_', '-')}"


def written(name: str, value: Any) -> str:
    """A setting and its value as flags.

    Example:
        >>> written("max_norm", 0.0), written("inputs", ("u", "a b"))
        ('--max-norm 0.0', '--inputs u,a b')
    """
    items = value if isinstance(value, (list, tuple)) else [value]
    return f"{flag(name)} {','.join(map(str, items))}"


def choices(kind: Any) -> list[str]:
    """The words that a type accepts, those of its parts included."""
    if isinstance(kind, str):
        return [kind]
    return [word for part in get_args(kind) for word in choices(part)]


def _items(value: Any) -> Any:
    """The items of a text with commas; a list of a TOML file as it is."""
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


def _steps(value: Any) -> Any:
    """The numbers of a text, such as 24, 1,6,24 or, all of these, 1-24; a list as it is."""
    first, _, last = str(value).partition("-")
    if first.isdecimal() and last.isdecimal() and int(first) <= int(last):
        return range(int(first), int(last) + 1)
    return _items(str(value) if isinstance(value, int) else value)


def named_arguments(entries: Iterable[str]) -> dict[str, Any]:
    """The arguments in texts NAME=VALUE, each a line of TOML.

    Raises:
        ValueError: an entry of another form, or a name that is given twice.

    Example:
        >>> named_arguments(["min=20", "tolerance=0.1", "jitter=false", "name='auto'"])
        {'min': 20, 'tolerance': 0.1, 'jitter': False, 'name': 'auto'}
    """
    try:
        return tomllib.loads("\n".join(entries))
    except ValueError as error:
        raise ValueError(
            f"{written('gradient_arg', entries)}: expected NAME=VALUE as in TOML, such as"
            f" tolerance=0.1, and text in quotes ({error})"
        ) from error


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, unchecked.

    Raises:
        ConfigError: the file is missing or is not TOML; the message does not name it.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot be read as TOML ({error}); name a file with lines such as lr = 0.1, and text"
            " in quotes"
        ) from error


LIST = BeforeValidator(_items)
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Columns: TypeAlias = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], LIST]


class Config(Settings):
    """The settings of `throughtime train`; every field is a flag and a key of `--config run.toml`.

    Raises:
        ConfigError: unknown or missing settings, values of the wrong type or out of range, or what
            does not go together; all at once.
    """

    data: Annotated[str, Field(min_length=1)]
    """A file with one recording, a folder of them, or a manifest (CSV: id,split,inputs,targets or
    label)."""
    task: Literal["classify", "multilabel", "regress"] | None = None
    """What the targets are: classes, several labels of 0 and 1, or numbers. Default: classify for
    text and up to 20 different whole numbers in a column, multilabel for several columns of 0 and
    1, else regress."""
    inputs: Columns = ()
    """Input columns, separated by commas. Default: all that are not targets."""
    targets: Columns = ()
    """Target columns, separated by commas. Default: 'targets', or all of a targets file."""
    exclude: Columns = ()
    """Columns that are neither inputs nor targets, separated by commas."""
    static: Columns = ()
    """Columns of the manifest with numbers of a whole recording, separated by commas. The net
    receives them at every step."""
    standardise: (
        Literal["split", "recording", "none"]
        | Annotated[str, StringConstraints(pattern="^first:[1-9][0-9]*$"), "first:N"]
    ) = "split"
    """Inputs are standardised by the mean and deviation of the training split, of each recording,
    or of the first N steps of each recording, as they arrive (first:400); or not."""
    delimiter: str | None = None
    """The character between the fields of a CSV file, or tab. Default: detected."""
    decimal: Literal[".", ","] | None = None
    """The decimal mark of CSV files. Default: detected."""
    rate: PositiveFloat | None = None
    """Rows per second, whatever the files say. Default: that of the files, which must agree, or of
    evenly spaced time stamps."""
    ahead: Annotated[tuple[PositiveInt, ...], BeforeValidator(_steps)] = ()
    """Forecast: the target of a row is the value so many rows later, of an input or another column;
    of several, such as 1-24 or 1,6,24, side by side."""
    season: PositiveInt | None = None
    """With --ahead: rows of a season, such as 24 of hourly data. Scores are compared with the value
    one season before, too, not only with the value now."""
    missing: Literal["error", "mask"] = "error"
    """How to treat inputs that are NaN or infinite."""
    holdout: Share = 0.2
    """Share of the recordings, or of the end of a single one, held out for validation when no
    manifest names splits."""
    model: Literal["lstm", "gru", "rnn"] | ClassFile = "lstm"
    """The recurrent layer; or your own module as FILE.py:Class, made with those of inputs, outputs,
    hidden and layers that it takes."""
    difference: bool = False
    """With --ahead: outputs are changes of input columns from now, which the net adds to them; the
    loss is in units of the change."""
    hidden: PositiveInt = 64
    """Width of the recurrent layers."""
    layers: PositiveInt = 1
    """Number of recurrent layers."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of inputs and weights."""
    gradient: Literal["truncated", "exact", "adaptive", "randomized"] | ClassFile = "truncated"
    """How credit flows back; or your own policy as FILE.py:Class."""
    gradient_arg: Annotated[tuple[str, ...], LIST] = ()
    """An argument of the gradient policy, NAME=VALUE; repeat for more."""
    stride: PositiveInt | None = None
    """Steps between two updates (k1). Default: 100 for truncated."""
    horizon: PositiveInt | None = None
    """Truncated: steps that credit flows back (k2), at least the stride. Default: the stride."""
    cut_every: PositiveInt | None = None
    """Exact: steps between two updates; credit is cut there. Default: an update where all lanes
    start a recording."""
    lanes: PositiveInt = 16
    """Recordings played at the same time, on all ranks together."""
    warm_up: NonNegativeInt = 0
    """First steps of a recording whose loss does not count."""
    hand_off: bool = False
    """A part of a recording starts from the final state of the part before it."""
    updates: PositiveInt | None = None
    """Stop after this many updates."""
    epochs: PositiveInt | None = None
    """Stop after this many epochs. Default: 1 without --updates."""
    loss: Literal["cross-entropy", "mse", "mae", "huber"] | ClassFile | None = None
    """The loss: cross-entropy of classes and labels; of numbers the squared, absolute or Huber
    error in units of each target's deviation; or your own as FILE.py:Class, made with those of
    outputs, weight and scale that it takes. Default: cross-entropy or mse, by the task."""
    optimizer: Literal["adam", "adamw", "sgd"] | ClassFile = "adamw"
    """The rule of an update; adamw without --weight-decay is adam. Or your own subclass of
    torch.optim.Optimizer as FILE.py:Class, made with the weights, lr, and weight_decay where it is
    set."""
    lr: PositiveFloat = 1e-3
    """Learning rate."""
    schedule: Literal["constant", "cosine", "plateau"] = "constant"
    """The learning rate stays, falls to 0 along half a cosine, or is halved after every two
    validations without a better one."""
    weight_decay: NonNegativeFloat = 0.0
    """Matrices shrink by this times the learning rate at each update; biases do not."""
    max_norm: PositiveFloat = 1.0
    """Clip the gradient to this norm."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of the classes in the loss: none, or balanced, by the inverse frequency."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights and of the order."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, ..."""
    valid_every: NonNegativeInt | None = None
    """Updates between two validations; 0: only at the end. Default: a fifth of the run."""
    keep: Literal["best", "last"] = "best"
    """Weights of the model: those of the best validation (macro-F1 of classes, else loss), or the
    last."""
    patience: PositiveInt | None = None
    """Stop after so many validations without a better one. Default: never stop early."""
    out: str = ""
    """The run folder. Default: runs/NAME-OF-DATA."""
    checkpoint_every: PositiveFloat = 30.0
    """Seconds between two checkpoints."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Fill in what follows from other settings, and refuse what does not go together."""
        if "stride" not in self.policy_arguments() and self.gradient == "truncated":
            object.__setattr__(self, "stride", DEFAULT_STRIDE)
        if not self.out:
            object.__setattr__(self, "out", f"runs/{Path(self.data).resolve().stem}")
        if faults := [text for text, wrong in self._faults().items() if wrong]:
            raise ValueError("; ".join(faults))
        return self

    def policy_arguments(self) -> dict[str, Any]:
        """The arguments of the gradient policy: those by name, and the short settings."""
        short = {name: getattr(self, name) for name in SHORT}
        present = {name: value for name, value in short.items() if value is not None}
        named = named_arguments(self.gradient_arg)
        if again := present.keys() & named.keys():
            raise ValueError(f"{flag(min(again))} is given again by --gradient-arg: leave one out")
        return present | named

    def describe_policy(self) -> str:
        """The policy in words; the file of a user's class is not executed for it."""
        arguments = (f"{name}={value!r}" for name, value in self.policy_arguments().items())
        return f"{self.gradient.rpartition(':')[2]}({', '.join(arguments)})"

    def chunk_steps(self) -> int:
        """Steps of a chunk of the stream."""
        return self.policy_arguments().get("stride") or DEFAULT_STRIDE

    def settings(self) -> dict[str, Any]:
        """The settings that have a value."""
        return {name: value for name, value in self if value is not None}

    def code(self) -> list[ClassReference]:
        """The classes in the user's own files that the settings name."""
        named = {name: getattr(self, name) or "" for name in CODE}
        return [ClassReference.parse(*item) for item in named.items() if is_reference(item[1])]

    def kept(self) -> "Config":
        """The settings as a run folder has them, which keeps copies of the user's files."""
        return self.changed(**{own.setting: own.short for own in self.code()})

    def to_toml(self) -> str:
        """The settings as TOML that `read_toml` reads back: its values are written as JSON's."""
        lines = (f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in self.settings().items())
        return "".join(lines)

    def _faults(self) -> dict[str, Any]:
        """What does not go together, in words, and whether it is so."""
        return {
            f"--standardise {self.standardise} has no statistics of --static features, and first:N"
            " would count steps of --missing mask as zeros: take --standardise split": (
                (self.static and self.standardise not in {"split", "none"})
                or (self.missing == "mask" and self.standardise.startswith("first:"))
            ),
            "--difference adds to the inputs of the net, which --standardise recording takes out of"
            " their units: take --standardise split or first:400": (
                self.difference and self.standardise == "recording"
            ),
            "--class-weights belongs to classes: leave it out, or write --task classify": (
                self.task not in {None, "classify"} and self.class_weights != "none"
            ),
            f"--ahead {self.ahead} are several forecasts, which are of numbers: take one": (
                len(self.ahead) > 1 and self.task == "classify"
            ),
            "--season and --difference belong to forecasts: leave them out, or write --ahead 24": (
                (self.season or self.difference) and not self.ahead
            ),
            "--difference belongs to numbers: leave it out, or write --task regress": (
                self.difference and self.task not in {None, "regress"}
            ),
            f"--weight-decay {self.weight_decay} belongs to --optimizer adamw: take that": (
                self.weight_decay and self.optimizer == "adam"
            ),
            f"--updates {self.updates} and --epochs {self.epochs} are both given: one of them says"
            " when to stop": self.updates and self.epochs,
        }


class TrainOptions(Settings):
    """The flags of `train` that are no settings of a run."""

    config: Path | None = None
    """A TOML file with the same settings as keys; flags win."""
    resume: Path | None = None
    """Go on with the run in this folder, from its last checkpoint."""
    trust_code: bool = False
    """With --resume: execute the code that the run folder keeps, though you have not trained with
    it."""


class RunOptions(Settings):
    """The flags of each command on a run."""

    run: Path
    """The folder of a run."""
    trust_code: bool = False
    """Execute the code that the run folder keeps, though you have not trained with it."""


class EvalOptions(RunOptions):
    """The flags of `eval`."""

    data: Path | None = None
    """As for train. Default: the data of the run."""
    split: str | None = None
    """Which split: train, valid, ..., all. Default: test, or valid where there is none; without
    splits all of other data."""
    missing: Literal["error", "mask"] | None = None
    """How to treat inputs that are NaN or infinite. Default: as in training."""


class PredictOptions(RunOptions):
    """The flags of `predict`."""

    data: Path | None = None
    """A file with the input columns of the training, or a folder or manifest of recordings.
    Default: the data of the run."""
    split: str | None = None
    """Which split: train, valid, ..., all. Default: as eval."""
    missing: Literal["error", "mask"] = "error"
    """How to treat inputs that are NaN or infinite."""
    on_nan: Literal["raise", "hold", "reset"] = "raise"
    """At inputs that are NaN or infinite: stop, leave the step out and hold the state, or start
    anew after it."""
    out: Path | None = None
    """The file to write: .npy (T, C), or .csv with a row per step. A folder for many recordings,
    with a file for each. Default: predictions.csv, or the folder predictions."""


class ExportOptions(RunOptions):
    """The flags of `export`."""

    out: Path
    """The file to write: .onnx, .c (and .h), .js, .nam, .json. Required."""
    check: Path | None = None
    """Verify the file on the longest of these recordings as well, and measure its settling time."""
    steps: NonNegativeInt = 100_000
    """Random steps to verify the file on; 0 for none."""
    with_session: bool = False
    """Also write session.py, which runs an .onnx file with numpy and onnxruntime only."""


class AuditOptions(RunOptions):
    """The flags of `audit`; `None` means what the run and its data suggest."""

    horizons: Annotated[tuple[PositiveInt, ...], LIST] = ()
    """Horizons to audit, separated by commas. Default: those of 50,200,800,3200 below the steps."""
    steps: PositiveInt | None = None
    """Steps of every lane. Default: 6400, or an epoch."""
    max_lag: PositiveInt = 1000
    """Steps back that the gradient is traced, and for which a cold start is compared. With
    --standardise first:N a cold start takes other statistics, so it may never settle."""


class DoctorOptions(Settings):
    """The flags of `doctor`."""

    script: str
    """The script to run; what follows it are its own arguments."""
    ignore: Columns = ()
    """Codes that are not reported, separated by commas, such as TT201,TT207."""
    strict: bool = False
    """Stop at the first finding."""
