"""The settings of a run, each declared once: a flag, its help and choices, a key of TOML, a check.

The text below a field is its help. This module imports no torch and no numpy, so that
`throughtime --help` is quick.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from throughtime.app.user_class import ClassReference, is_reference
from throughtime.app.values import (
    LIST,
    NUMBER,
    ClassFile,
    Columns,
    Count,
    Device,
    Natural,
    Positive,
    Settings,
    Share,
    checked_by,
    class_numbers,
    named_arguments,
    named_series,
    rows_ahead,
    toml_lines,
    written,
)
from throughtime.errors import listed

DEFAULT_STRIDE = 100
PANELS = {
    "data": "Data",
    "model": "Model",
    "gradient": "Gradient",
    "lanes": "Training",
    "out": "Output",
}
"""The first setting of each group of the help."""
CODE = ("model", "gradient", "loss", "optimizer")
"""The settings that may name a class in a user's file."""
# Settings that are short for an argument of a gradient policy, and the policies that have it.
SHORT = {
    "stride": {"truncated", "adaptive"},
    "horizon": {"truncated"},
    "cut_every": {"exact"},
}
LOSSES = {
    "cross-entropy": {"classify", "multilabel"},
    "mse": {"regress"},
    "mae": {"regress"},
    "huber": {"regress"},
}
"""The tasks of each loss."""


class Config(Settings):
    """The settings of `throughtime train`; every field is a flag and a key of `--config run.toml`.

    Raises:
        ConfigError: unknown or missing settings, values of the wrong type or out of range, or what
            does not go together; all at once.
    """

    data: Annotated[str, Field(min_length=1), "a path"]
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
    series: Annotated[Columns, checked_by(named_series), "NAME=COLUMN, such as weight=w"] = ()
    """Further columns that chunks have by name, for a policy or a loss of your own: NAME=COLUMN,
    separated by commas."""
    allow_target_as_input: bool = False
    """Take a target column as an input of the same step, too: a net can copy it."""
    static: Columns = ()
    """Columns of the manifest with numbers of a whole recording, separated by commas. The net
    receives them at every step."""
    standardise: (
        Literal["split", "recording", "none"]
        | Annotated[str, StringConstraints(pattern="^first:[1-9][0-9]*$"), "first:N"]
    ) = "split"
    """Inputs are standardised by the mean and deviation of the training split, of each recording,
    or of the first N steps of each recording, as they arrive (first:400); or not."""
    delimiter: Literal["tab"] | Annotated[str, "a character"] | None = None
    """The character between the fields of a CSV file, or tab. Default: detected."""
    decimal: Literal[".", ","] | None = None
    """The decimal mark of CSV files. Default: detected."""
    frame_size: Count = 1
    """Consecutive rows of a file that form one step."""
    rate: Positive | None = None
    """Rows per second, whatever the files say. Default: that of the files, which must agree, or of
    evenly spaced time stamps."""
    target_every: Count | None = None
    """Rows of the inputs for each row of the targets file."""
    target_at: Literal["all", "last"] | None = None
    """Which steps of a labelled span count. Default: all of an interval, otherwise the last."""
    background_class: str | None = None
    """The class of steps outside all intervals. Default: they have no target."""
    ahead: Annotated[
        Natural | str,
        Field(union_mode="left_to_right"),
        checked_by(rows_ahead),
        "rows of at least 1 in rising order, such as 24, all of 1-24, or 1,6,24",
    ] = 0
    """Forecast: the target of a row is the value so many rows later, of an input or another column;
    of several, such as 1-24 or 1,6,24, side by side."""
    season: Count | None = None
    """With --ahead: rows of a season, such as 24 of hourly data. Scores are compared with the value
    one season before."""
    missing: Literal["error", "mask"] = "error"
    """How to treat inputs that are NaN or infinite."""
    holdout: Share = 0.2
    """Share of the recordings, or of the end of a single one, held out for validation when no
    manifest names splits."""
    model: Literal["lstm", "gru", "rnn"] | ClassFile = "lstm"
    """The recurrent layer; or your own module as FILE.py:Class, made with those of inputs, outputs,
    hidden, layers and dropout that it takes."""
    difference: bool = False
    """With --ahead: outputs are changes of input columns from now, which the net adds to them; the
    loss is in units of the change."""
    hidden: Count = 64
    """Width of the recurrent layers."""
    layers: Count = 1
    """Number of recurrent layers."""
    dropout: Share = 0.0
    """Share of the outputs of every recurrent layer that training replaces by 0. An update is then
    several calls instead of one."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of inputs and weights."""
    gradient: Literal["truncated", "exact", "adaptive", "randomized"] | ClassFile = "truncated"
    """How credit flows back; or your own policy as FILE.py:Class."""
    gradient_args: Annotated[
        dict[str, Any], BeforeValidator(named_arguments), "NAME=VALUE, such as tolerance=0.1"
    ] = Field(default_factory=dict)
    """An argument of the gradient policy, NAME=VALUE; repeat for more."""
    stride: Count | None = None
    """Steps between two updates (k1). Default: 100 for truncated."""
    horizon: Count | None = None
    """Truncated: steps that credit flows back (k2), at least the stride. Default: the stride."""
    cut_every: Count | None = None
    """Exact: steps between two updates; credit is cut there. Default: an update where all lanes
    start a recording."""
    train_on: Literal["stream", "windows"] = "stream"
    """The unbroken stream, or for comparison shuffled windows of a stride."""
    lanes: Count = 16
    """Recordings played at the same time, on all ranks together."""
    warm_up: Natural = 0
    """First steps of a recording whose loss does not count."""
    offset: Natural = 0
    """Leave out a random number of first steps of each recording, below this."""
    hand_off: bool = False
    """A part of a recording starts from the final state of the part before it."""
    workers: Literal["thread"] | Natural = 0
    """'thread' reads ahead in a thread."""
    updates: Count | None = None
    """Stop after this many updates."""
    epochs: Count | None = None
    """Stop after this many epochs. Default: 1 without --updates."""
    loss: Literal["cross-entropy", "mse", "mae", "huber"] | ClassFile | None = None
    """The loss: cross-entropy of classes and labels; of numbers the squared, absolute or Huber
    error in units of each target's deviation; or your own as FILE.py:Class, made with those of
    outputs, weight and scale that it takes. Default: cross-entropy or mse, by the task."""
    optimizer: Literal["adam", "adamw", "sgd"] | ClassFile = "adamw"
    """The rule of an update; adamw without --weight-decay is adam. Or your own subclass of
    torch.optim.Optimizer as FILE.py:Class, made with the weights, lr, and weight_decay and momentum
    where they are set."""
    lr: Positive = 1e-3
    """Learning rate."""
    schedule: Literal["constant", "cosine", "plateau"] = "constant"
    """The learning rate stays, falls to 0 along half a cosine, or is halved after every two
    validations without a better one."""
    lr_warmup: Natural = 0
    """First updates, over which the learning rate rises from 0."""
    momentum: Share = 0.0
    """Of sgd: the share of the last change that is added to the next."""
    weight_decay: Annotated[
        float, NUMBER, Field(ge=0, allow_inf_nan=False), "a finite number of at least 0"
    ] = 0.0
    """Matrices shrink by this times the learning rate at each update; biases do not."""
    max_norm: Positive = 1.0
    """Clip the gradient to this norm."""
    class_weights: (
        Literal["none", "balanced"]
        | Annotated[
            str,
            checked_by(class_numbers),
            "a number above 0 for some classes, such as pvc=5,beat=2",
        ]
    ) = "none"
    """Weights of the classes in the loss: none, balanced (by the inverse frequency), or numbers
    such as pvc=5,beat=2 (others 1)."""
    seed: Annotated[int, NUMBER, Field(ge=0, lt=2**63), "a whole number from 0 to below 2**63"] = 0
    """Seed of the weights and of the order."""
    device: Device = "cpu"
    """Where to compute: cpu, cuda, ..."""
    valid_every: Natural | None = None
    """Updates between two validations; 0: only at the end. Default: a fifth of the run."""
    keep: Literal["best", "last"] = "best"
    """Weights of the model: those of the best validation (macro-F1 of classes, else loss), or the
    last."""
    patience: Count | None = None
    """Stop after so many validations without a better one. Default: never stop early."""
    logger: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], LIST] = ()
    """Write the metrics there, too; repeat for more."""
    out: str = ""
    """The run folder. Default: runs/NAME-OF-DATA."""
    checkpoint_every: Positive = 30.0
    """Seconds between two checkpoints; the first ones come sooner."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Fill in what follows from other settings, and refuse what does not go together."""
        if self.gradient == "truncated" and "stride" not in self.policy_arguments():
            object.__setattr__(self, "stride", DEFAULT_STRIDE)
        if not self.out:
            object.__setattr__(self, "out", f"runs/{Path(self.data).resolve().stem}")
        if faults := [text for text, wrong in self._faults().items() if wrong]:
            raise ValueError("; ".join(faults))
        return self

    def policy_arguments(self) -> dict[str, Any]:
        """The arguments of the gradient policy: those by name, and the short settings."""
        short = {name: getattr(self, name) for name in SHORT}
        return {k: v for k, v in short.items() if v is not None} | self.gradient_args

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

    def settings(self) -> dict[str, Any]:
        """The settings that have a value."""
        return {name: value for name, value in self if value not in (None, {})}

    def code(self) -> list[ClassReference]:
        """The classes in the user's own files that the settings name."""
        named = {name: getattr(self, name) or "" for name in CODE}
        return [ClassReference.parse(*item) for item in named.items() if is_reference(item[1])]

    def kept(self) -> "Config":
        """The settings as a run folder has them, which keeps copies of the user's files."""
        return self.changed(**{own.setting: own.short for own in self.code()})

    def to_toml(self) -> str:
        """The settings as TOML that `read_toml` reads back."""
        settings = self.settings()
        arguments = toml_lines(settings.pop("gradient_args", {}))
        return toml_lines(settings) + f"\n[gradient_args]\n{arguments}" * bool(arguments)

    def _faults(self) -> dict[str, Any]:
        """What does not go together, in words, and whether it is so."""
        w = {name: written(name, value) for name, value in self if not isinstance(value, dict)}
        own, windows, task = is_reference(self.gradient), self.train_on == "windows", self.task
        stride, horizon = self.update_steps() or 0, self.horizon or math.inf
        ahead, frame = rows_ahead(self.ahead), self.frame_size
        rows = {"target_every": [self.target_every], "season": [self.season], "ahead": ahead}
        both = sorted({*self.exclude} & {*self.inputs, *self.targets})
        plateau, difference = self.schedule == "plateau", self.difference
        return {
            **{
                f"{w[name]} belongs to --gradient {' or '.join(sorted(policies))}, got"
                f" {w['gradient']}: leave one of them out": getattr(self, name) is not None
                and not (own or self.gradient in policies)
                for name, policies in SHORT.items()
            },
            **{
                f"{w[name]} is given again by --gradient-arg: leave one of them out": (
                    getattr(self, name) is not None and name in self.gradient_args
                )
                for name in SHORT
            },
            f"{w['horizon']} is below --stride {stride}: the first losses of every stride would"
            f" reach back no step at all. Write --horizon {stride} or more": (
                self.gradient == "truncated" and horizon < stride
            ),
            f"{w['gradient']} and {w['train_on']} are both given: credit ends with a window, and"
            " within one the truncated gradient is exact. Leave one of them out": (
                windows and not own and self.gradient != "truncated"
            ),
            f"{w['standardise']} has no statistics of {w['static']}, which are the same at each"
            " step of a recording: take --standardise split, or leave --static out": (
                self.static and self.standardise not in {"split", "none"}
            ),
            f"{w['standardise']} would count steps of {w['missing']} as zeros: fill them, or take"
            " --standardise split": self.missing == "mask"
            and self.standardise.startswith("first:"),
            f"{w['data']} is an address: download it, and write its path": "://" in self.data,
            f"{w['exclude']}: {listed(both)} is among the inputs or targets, too": both,
            f"{w['background_class']} belongs to classes: leave it out, or write --task classify": (
                self.background_class is not None and task not in {None, "classify"}
            ),
            f"{w['class_weights']} belongs to classes: leave it out, or write --task classify": (
                self.class_weights != "none" and task == "regress"
            ),
            f"{w['loss']} does not fit {w['task']}: take --loss"
            f" {' or '.join(name for name, tasks in LOSSES.items() if task in tasks)}": (
                task is not None and task not in LOSSES.get(self.loss or "", {task})
            ),
            **{
                f"{w[name]} rows are no whole number of frames of {frame}: expected a multiple of"
                f" {frame}": any((n or 0) % frame for n in several)
                for name, several in rows.items()
            },
            f"{w['ahead']} are several forecasts, which are of numbers: take one": (
                len(ahead) > 1 and task == "classify"
            ),
            **{
                f"{w[name]} belongs to forecasts: leave it out, or write --ahead 24 or so": (
                    getattr(self, name) and not ahead
                )
                for name in ("season", "difference")
            },
            "--difference belongs to numbers: leave it out, or write --task regress": (
                difference and task not in {None, "regress"}
            ),
            "--difference adds to the inputs of the net, which --standardise recording takes out of"
            " their units: take --standardise split or first:400": (
                difference and self.standardise == "recording"
            ),
            f"{w['offset']} moves the boundaries between parts from epoch to epoch, and --hand-off"
            " passes states on at these boundaries: leave one of them out": (
                self.offset and self.hand_off
            ),
            **{
                f"{w[name]} and --train-on windows are both given: windows start at the same steps"
                " in every epoch. Leave one of them out": windows and getattr(self, name)
                for name in ("offset", "hand_off")
            },
            f"{w['updates']} and {w['epochs']} are both given: one of them says when to stop": (
                self.updates and self.epochs
            ),
            f"{w['lr_warmup']} of {w['updates']}: expected fewer, the learning rate would only"
            " rise": self.updates and self.lr_warmup >= self.updates,
            f"{w['schedule']} counts validations, and --valid-every 0 has none before the end:"
            " leave one of them out": plateau and self.valid_every == 0,
            f"{w['lr_warmup']} and --schedule plateau are both given: a plateau counts validations,"
            " not updates": plateau and self.lr_warmup,
            f"{w['momentum']} belongs to --optimizer sgd: write that, or leave --momentum out": (
                self.momentum and self.optimizer in {"adam", "adamw"}
            ),
            f"{w['weight_decay']} belongs to --optimizer adamw, got --optimizer adam: take adamw": (
                self.weight_decay and self.optimizer == "adam"
            ),
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
    splits all of other data; of an audit train."""
    missing: Literal["error", "mask"] | None = None
    """How to treat inputs that are NaN or infinite. Default: as in training."""
    as_json: bool = False
    """Print one JSON object on standard output, and nothing else."""


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
    state_in: Path | None = None
    """Start from a state that an earlier call wrote."""
    state_out: Path | None = None
    """Write the state after the last step, to go on later."""
    out: Path | None = None
    """The file to write: .npy (T, C), .csv or .parquet with a row per step. A folder for many
    recordings, with a file for each. Default: predictions.csv, or the folder predictions."""
    format: Literal["npy", "csv", "parquet"] | None = None
    """The format of the files in a folder. Default: csv."""


class ExportOptions(RunOptions):
    """The flags of `export`."""

    out: Path
    """The file to write: .onnx, .c (and .h), .js, .nam, .json. Required."""
    check: Path | None = None
    """Verify the file on this recording as well, and measure its settling time."""
    steps: Natural = 100_000
    """Random steps to verify the file on; 0 for none."""
    with_session: bool = False
    """Also write session.py, which runs an .onnx file with numpy and onnxruntime only."""


class AuditOptions(Settings):
    """What `throughtime audit` measures; `None` means what the run and its data suggest."""

    horizons: (
        Annotated[tuple[Count, ...], LIST, "whole numbers of steps, such as 50,200,800"] | None
    ) = None
    """Horizons to audit, separated by commas. Default: those of 50,200,800,3200 below the steps."""
    stride: Count | None = None
    """Steps between two updates. Default: each horizon is its own stride."""
    steps: Count | None = None
    """Steps of every lane. Default: 6400, or an epoch."""
    lanes: Count | None = None
    """Recordings played at the same time. Default: as in training, fewer where other recordings are
    fewer."""
    max_lag: Count = 1000
    """Steps back that the gradient is traced, and for which a cold start is compared."""
    tolerance: Annotated[Positive, Field(lt=1), "a number above 0 and below 1"] = 0.1
    """Largest acceptable relative bias."""


class AuditFlags(AuditOptions, EvalOptions):
    """The flags of `audit`."""

    device: Device = "cpu"
    """Where to compute: cpu, cuda, ..."""


class DoctorOptions(Settings):
    """The flags of `doctor`."""

    script: str
    """The script to run; what follows it are its own arguments."""
    module: bool = False
    """SCRIPT is the name of a module, as after python -m."""
    ignore: str | None = None
    """Codes that are not reported, separated by commas, such as TT201,TT207."""
    strict: bool = False
    """Stop at the first finding."""
    as_json: bool = False
    """Print one JSON object on standard output, and nothing else."""
