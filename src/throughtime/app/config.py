"""The settings of a run, each declared once: a flag, its help and choices, a key of TOML, a check.

The text below a field is its help. This module imports no torch and no numpy, so that
`throughtime --help` is quick.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from throughtime.app.user_class import ClassFile, ClassReference, is_reference
from throughtime.app.values import (
    LIST,
    Columns,
    Settings,
    Share,
    checked_by,
    flag,
    named_arguments,
    rows_ahead,
    toml_lines,
)

DEFAULT_STRIDE = 100
CODE = ("model", "gradient", "loss", "optimizer")
"""The settings that may name a class in a user's file."""
SHORT = ("stride", "horizon", "cut_every")
"""The settings that are arguments of a gradient policy."""


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
    ahead: Annotated[
        NonNegativeInt | str,
        Field(union_mode="left_to_right"),
        checked_by(rows_ahead, "rows in rising order, such as 24, all of 1-24, or 1,6,24"),
    ] = 0
    """Forecast: the target of a row is the value so many rows later, of an input or another column;
    of several, such as 1-24 or 1,6,24, side by side."""
    season: PositiveInt | None = None
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
    hidden: PositiveInt = 64
    """Width of the recurrent layers."""
    layers: PositiveInt = 1
    """Number of recurrent layers."""
    dropout: Share = 0.0
    """Share of the outputs of every recurrent layer that training replaces by 0. An update is then
    several calls instead of one."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of inputs and weights."""
    gradient: Literal["truncated", "exact", "adaptive", "randomized"] | ClassFile = "truncated"
    """How credit flows back; or your own policy as FILE.py:Class."""
    gradient_args: Annotated[
        tuple[str, ...], LIST, checked_by(named_arguments, "NAME=VALUE, such as tolerance=0.1")
    ] = ()
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
    logger: Literal["tensorboard"] | None = None
    """Write the metrics there, too: tensorboard --logdir runs shows them."""
    out: str = ""
    """The run folder. Default: runs/NAME-OF-DATA."""
    checkpoint_every: PositiveFloat = 30.0
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
        present = {name: value for name, value in short.items() if value is not None}
        named = named_arguments(self.gradient_args)
        if again := present.keys() & named.keys():
            raise ValueError(f"{flag(min(again))} is given again by --gradient-arg: leave one out")
        return present | named

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
        """The settings as TOML that `read_toml` reads back."""
        return toml_lines(self.settings())

    def _faults(self) -> dict[str, Any]:
        """What does not go together, in words, and whether it is so."""
        task, ahead = self.task, rows_ahead(self.ahead)
        return {
            f"--standardise {self.standardise} has no statistics of --static features, which are"
            " the same at each step of a recording: take --standardise split": (
                self.static and self.standardise not in {"split", "none"}
            ),
            f"--standardise {self.standardise} would count steps of --missing mask as zeros: fill"
            " them, or take --standardise split": self.missing == "mask"
            and self.standardise.startswith("first:"),
            f"DATA {self.data} is an address: download it, and write its path": "://" in self.data,
            "--class-weights belongs to classes: leave it out, or write --task classify": (
                task not in {None, "classify"} and self.class_weights != "none"
            ),
            f"--ahead {self.ahead} are several forecasts, which are of numbers: take one": (
                len(ahead) > 1 and task == "classify"
            ),
            "--season and --difference belong to forecasts: leave them out, or write --ahead 24 or"
            " so": (self.season or self.difference) and not ahead,
            "--difference belongs to numbers: leave it out, or write --task regress": (
                self.difference and task not in {None, "regress"}
            ),
            "--difference adds to the inputs of the net, which --standardise recording takes out of"
            " their units: take --standardise split or first:400": (
                self.difference and self.standardise == "recording"
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
    splits all of other data; of an audit train."""
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
    format: Literal["npy", "csv"] | None = None
    """The format of the files in a folder. Default: csv."""


class ExportOptions(RunOptions):
    """The flags of `export`."""

    out: Path
    """The file to write: .onnx, .c (and .h), .js, .nam, .json. Required."""
    check: Path | None = None
    """Verify the file on this recording as well, and measure its settling time."""
    steps: NonNegativeInt = 100_000
    """Random steps to verify the file on; 0 for none."""
    with_session: bool = False
    """Also write session.py, which runs an .onnx file with numpy and onnxruntime only."""


class AuditOptions(EvalOptions):
    """The flags of `audit`; `None` means what the run and its data suggest."""

    horizons: Annotated[tuple[PositiveInt, ...], LIST] = ()
    """Horizons to audit, separated by commas. Default: those of 50,200,800,3200 below the steps."""
    steps: PositiveInt | None = None
    """Steps of every lane. Default: 6400, or an epoch."""
    max_lag: PositiveInt = 1000
    """Steps back that the gradient is traced, and for which a cold start is compared."""


class DoctorOptions(Settings):
    """The flags of `doctor`."""

    script: str
    """The script to run; what follows it are its own arguments."""
    ignore: str | None = None
    """Codes that are not reported, separated by commas, such as TT201,TT207."""
    strict: bool = False
    """Stop at the first finding."""
