"""The settings of a run, each declared once: a flag, its help and choices, a key of TOML, a check.

This module imports no torch, so that `throughtime --help` is instant.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

from throughtime.app.contradictions import MODEL_NAMES, POLICY_NAMES, SHORT, contradictions
from throughtime.app.user_class import ClassReference, is_reference
from throughtime.app.values import check, convert, range_faults, setting, toml_lines
from throughtime.errors import counted, did_you_mean

DEFAULT_STRIDE = 100
LoggerName: TypeAlias = Literal["tensorboard", "wandb", "mlflow"]
PANELS = (
    "Data",
    "Model",
    "Gradient",
    "Training",
    "Measurement",
    "Output",
)  # of the help, in this order


@dataclass(frozen=True)
class Config:
    """The settings of `throughtime train`; every field is a flag and a key of `--config run.toml`.

    Raises:
        ConfigError: values out of range or that exclude each other; all faults are listed.
    """

    data: str = setting(
        "Data",
        "A file with one recording, a folder of them, or a manifest (CSV: id,split,inputs,targets"
        " or label).",
    )
    out: str = setting("Output", "The run folder.", unset="runs/NAME-OF-DATA")
    task: Literal["classify", "multilabel", "regress"] | None = setting(
        "Data",
        "What the targets are: classes, several labels of 0 and 1, or numbers.",
        None,
        unset="classify for text and up to 20 different whole numbers in a column, multilabel for"
        " several columns of 0 and 1, else regress",
    )
    inputs: tuple[str, ...] = setting(
        "Data", "Input columns, separated by commas.", (), unset="all that are not targets"
    )
    targets: tuple[str, ...] = setting(
        "Data",
        "Target columns, separated by commas.",
        (),
        unset="'targets', or all of a targets file",
    )
    exclude: tuple[str, ...] = setting(
        "Data", "Columns that are neither inputs nor targets, separated by commas.", ()
    )
    series: tuple[str, ...] = setting(
        "Data",
        "Further columns that chunks have by name, for a policy of your own: NAME=COLUMN, separated"
        " by commas.",
        (),
    )
    allow_target_as_input: bool = setting(
        "Data",
        "Take a target column as an input of the same step, too: a net can copy it.",
        False,
    )
    static: tuple[str, ...] = setting(
        "Data",
        "Columns of the manifest with numbers of a whole recording, separated by commas. The net"
        " receives them at every step.",
        (),
    )
    standardise: str = setting(
        "Data",
        "Inputs are standardised by the mean and deviation of the training split, of each"
        " recording, or of the first N steps of each recording, as they arrive (first:N); or not.",
        "split",
        words=("split", "recording", "first:400", "none"),
    )
    delimiter: str | None = setting(
        "Data",
        "The character between the fields of a CSV file, or tab.",
        None,
        unset="detected",
        words=("tab",),
    )
    decimal: Literal[".", ","] | None = setting(
        "Data", "The decimal mark of CSV files.", None, unset="detected"
    )
    frame_size: int = setting(
        "Data", "Consecutive rows of a file that form one step.", 1, minimum=1
    )
    rate: float | None = setting(
        "Data",
        "Rows per second, whatever the files say.",
        None,
        positive=True,
        unset="that of the files, which must agree, or of evenly spaced time stamps",
    )
    target_every: int | None = setting(
        "Data", "Rows of the inputs for each row of the targets file.", None, minimum=1
    )
    target_at: Literal["all", "last"] | None = setting(
        "Data",
        "Which steps of a labelled span count.",
        None,
        unset="all of an interval, otherwise the last",
    )
    background_class: str | None = setting(
        "Data", "The class of steps outside all intervals.", None, unset="they have no target"
    )
    ahead: int | str = setting(
        "Data",
        "Forecast: the target of a row is the value so many rows later, of an input or another"
        " column; of several, such as 1-24 or 1,6,24, side by side.",
        0,
    )
    season: int | None = setting(
        "Data",
        "With --ahead: rows of a season, such as 24 of hourly data. Scores are compared with the"
        " value one season before.",
        None,
        minimum=1,
    )
    missing: Literal["error", "mask"] = setting(
        "Data", "How to treat inputs that are NaN or infinite.", "error"
    )
    holdout: float = setting(
        "Data",
        "Share of the recordings, or of the end of a single one, held out for validation when no"
        " manifest names splits.",
        0.2,
        share=True,
    )
    model: str = setting(
        "Model",
        f"The recurrent layer: {', '.join(MODEL_NAMES)}; or your own module as FILE.py:Class, made"
        " with those of inputs, outputs, hidden, layers and dropout that it takes.",
        "lstm",
        words=MODEL_NAMES,
    )
    difference: bool = setting(
        "Model",
        "With --ahead: outputs are changes of input columns from now, which the net adds to them;"
        " the loss is in units of the change.",
        False,
    )
    hidden: int = setting("Model", "Width of the recurrent layers.", 64, minimum=1)
    layers: int = setting("Model", "Number of recurrent layers.", 1, minimum=1)
    dropout: float = setting(
        "Model",
        "Share of the outputs of every recurrent layer that training replaces by 0. An update is"
        " then several calls instead of one.",
        0.0,
        share=True,
    )
    dtype: Literal["float32", "float64"] = setting(
        "Model", "Type of inputs and weights.", "float32"
    )
    gradient: str = setting(
        "Gradient",
        f"How credit flows back: {', '.join(POLICY_NAMES)}, or your own policy as FILE.py:Class.",
        "truncated",
        words=POLICY_NAMES,
    )
    gradient_args: Mapping[str, Any] = setting(
        "Gradient", "An argument of the gradient policy, NAME=VALUE; repeat for more.", None
    )
    stride: int | None = setting(
        "Gradient",
        "Steps between two updates (k1).",
        None,
        minimum=1,
        unset=f"{DEFAULT_STRIDE} for truncated",
    )
    horizon: int | None = setting(
        "Gradient",
        "Truncated: steps that credit flows back (k2), at least the stride.",
        None,
        unset="the stride",
    )
    cut_every: int | None = setting(
        "Gradient",
        "Exact: steps between two updates; credit is cut there.",
        None,
        minimum=1,
        unset="an update where all lanes start a recording",
    )
    train_on: Literal["stream", "windows"] = setting(
        "Gradient",
        "The unbroken stream, or for comparison shuffled windows of a stride.",
        "stream",
    )
    lanes: int = setting(
        "Training", "Recordings played at the same time, on all ranks together.", 16, minimum=1
    )
    warm_up: int = setting(
        "Training", "First steps of a recording whose loss does not count.", 0, minimum=0
    )
    offset: int = setting(
        "Training",
        "Leave out a random number of first steps of each recording, below this.",
        0,
        minimum=0,
    )
    hand_off: bool = setting(
        "Training",
        "A part of a recording starts from the final state of the part before it.",
        False,
    )
    workers: int | Literal["thread"] = setting(
        "Training", "Processes that read ahead, or 'thread'.", 0, words=("thread",)
    )
    updates: int | None = setting("Training", "Stop after this many updates.", None, minimum=1)
    epochs: int | None = setting(
        "Training", "Stop after this many epochs.", None, minimum=1, unset="1 without --updates"
    )
    lr: float = setting("Training", "Learning rate of Adam.", 1e-3, positive=True)
    schedule: Literal["constant", "cosine"] = setting(
        "Training", "The learning rate stays, or falls to 0 along half a cosine.", "constant"
    )
    lr_warmup: int = setting(
        "Training", "First updates, over which the learning rate rises from 0.", 0, minimum=0
    )
    weight_decay: float = setting(
        "Training",
        "AdamW: matrices shrink by this times the learning rate at each update; biases do not.",
        0.0,
        minimum=0,
    )
    max_norm: float = setting("Training", "Clip the gradient to this norm.", 1.0, positive=True)
    class_weights: str = setting(
        "Training",
        "Weights of the classes in the loss: none, balanced (by the inverse frequency), or numbers"
        " such as pvc=5,beat=2 (others 1).",
        "none",
        words=("none", "balanced"),
    )
    seed: int = setting("Training", "Seed of the weights and of the order.", 0, minimum=0)
    device: str = setting(
        "Training", "Where to compute: cpu, cuda, ...", "cpu", words=("cpu", "cuda", "mps")
    )
    valid_every: int | None = setting(
        "Training",
        "Updates between two validations; 0: only at the end.",
        None,
        minimum=0,
        unset="a fifth of the run",
    )
    keep: Literal["best", "last"] = setting(
        "Training",
        "Weights of the model: those of the best validation (macro-F1 of classes, else loss), or"
        " the last.",
        "best",
    )
    patience: int | None = setting(
        "Training",
        "Stop after so many validations without a better one.",
        None,
        minimum=1,
        unset="never stop early",
    )
    logger: tuple[LoggerName, ...] = setting(
        "Training",
        f"Write the metrics there, too: {', '.join(get_args(LoggerName))}; repeat for more.",
        (),
        unset="none",
        words=get_args(LoggerName),
    )
    checkpoint_every: float = setting(
        "Output",
        "Seconds between two checkpoints; the first ones come sooner.",
        30.0,
        positive=True,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "gradient_args", dict(self.gradient_args or {}))
        if (
            self.gradient == "truncated"
            and self.stride is None
            and "stride" not in self.gradient_args
        ):
            object.__setattr__(self, "stride", DEFAULT_STRIDE)
        check(range_faults(self) + contradictions(self))

    def policy_arguments(self) -> dict[str, Any]:
        """The arguments of the gradient policy: those by name, and the short settings."""
        short = {name: getattr(self, name) for name in SHORT}
        return {k: v for k, v in short.items() if v is not None} | dict(self.gradient_args)

    def update_steps(self) -> int | None:
        """Steps between two updates (k1); `None` if the policy or the data decide."""
        arguments = self.policy_arguments()
        return arguments.get("cut_every" if self.gradient == "exact" else "stride")

    def credit_steps(self) -> int | None:
        """Steps that credit flows back (k2); `None` if no fixed number limits them."""
        horizon = self.policy_arguments().get("horizon")
        at_updates = self.gradient in {"truncated", "exact"} and horizon is None
        return self.update_steps() if at_updates or self.train_on == "windows" else horizon

    def chunk_steps(self) -> int:
        """Steps of a chunk of the stream, and of a window of `train_on="windows"`."""
        return self.policy_arguments().get("stride") or DEFAULT_STRIDE

    def windows_in_words(self) -> str:
        """The windows of `train_on="windows"`; a policy of the user's may start them elsewhere."""
        start = "" if is_reference(self.gradient) else " from a zero state"
        return f"windows of {counted(self.chunk_steps(), 'step')}{start}"

    def settings(self) -> dict[str, Any]:
        """The settings that have a value."""
        return {
            key: value
            for key, value in asdict(self).items()
            if value is not None and (key != "gradient_args" or value)
        }

    def code(self) -> list[ClassReference]:
        """The classes in the user's own files that the settings name."""
        named = {"model": self.model, "gradient": self.gradient}
        return [ClassReference.parse(*item) for item in named.items() if is_reference(item[1])]

    def kept(self) -> "Config":
        """The settings as a run folder has them, which keeps copies of the user's files."""
        return replace(self, **{own.setting: own.short for own in self.code()})

    def to_toml(self) -> str:
        """The settings as TOML that `read_toml` reads back."""
        settings = self.settings()
        arguments = settings.pop("gradient_args", {})
        if arguments:
            arguments = {"policy": settings.pop("gradient"), **arguments}
        return toml_lines(settings) + ("\n[gradient]\n" + toml_lines(arguments)) * bool(arguments)


def make_config(settings: Mapping[str, Any], *, source: str = "") -> Config:
    """A checked config from settings by name; `None` means the default.

    Raises:
        ConfigError: unknown keys (with the nearest known ones), missing ones, or values of the
            wrong type; all are listed.
    """
    types = get_type_hints(Config)
    present = {key: value for key, value in settings.items() if value is not None}
    known = f"; known are {', '.join(types)}"
    faults = [
        f"unknown key '{key}'{did_you_mean(key, types) or known}"
        for key in present
        if key not in types
    ]
    faults += [
        f"'{f.name}' is missing"
        for f in fields(Config)
        if f.default is MISSING and f.name not in present
    ]
    values: dict[str, Any] = {}
    for key in filter(types.__contains__, present):
        values[key], fault = convert(key, present[key], types[key])
        faults += [fault] if fault else []
    check(faults, source)
    return Config(**values)


@dataclass(frozen=True)
class AuditOptions:
    """What `throughtime audit` measures; `None` means what the run and its data suggest.

    Raises:
        ConfigError: values out of range, or horizons below the stride.
    """

    horizons: tuple[int, ...] | None = setting(
        "Measurement",
        "Horizons to audit, separated by commas.",
        None,
        unset="50,200,800 and the run's own, if an epoch is twice as long",
        minimum=1,
    )
    stride: int | None = setting(
        "Measurement",
        "Steps between two updates.",
        None,
        minimum=1,
        unset="each horizon is its own stride",
    )
    steps: int | None = setting(
        "Measurement",
        "Steps of every lane.",
        None,
        minimum=1,
        unset="8 times the longest horizon",
    )
    lanes: int | None = setting(
        "Measurement",
        "Recordings played at the same time.",
        None,
        minimum=1,
        unset="as in training, fewer where other recordings are fewer",
    )
    max_lag: int = setting(
        "Measurement",
        "Steps back that the gradient is traced, and for which a cold start is compared.",
        1000,
        minimum=1,
    )
    tolerance: float = setting(
        "Measurement", "Largest acceptable relative bias.", 0.1, positive=True, share=True
    )

    def __post_init__(self) -> None:
        below = [h for h in self.horizons or () if h < (self.stride or 0)]
        check(
            range_faults(self)
            + [
                f"horizons={h} is below stride={self.stride}: the first losses of every stride"
                f" would reach back no step at all. Take horizons from {self.stride} on, or"
                f" stride={max(1, h)}"
                for h in below[:1]
            ]
        )
