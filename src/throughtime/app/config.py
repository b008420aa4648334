"""The settings of a run, each declared once: a flag, its help and choices, a key of TOML, a check.

This module imports no torch, so that `throughtime --help` is instant.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

from throughtime.app.user_class import is_reference
from throughtime.app.values import convert, toml_lines, weights_by_class
from throughtime.errors import ConfigError, did_you_mean

DEFAULT_STRIDE = 100
LoggerName: TypeAlias = Literal["tensorboard", "wandb", "mlflow"]
MODEL_NAMES = ("lstm", "gru", "rnn")
POLICY_NAMES = ("truncated", "exact", "adaptive", "randomized", "rtrl")
# Settings that are short for an argument of a gradient policy, and the policies that have it.
_SHORT = {
    "stride": {"truncated", "adaptive", "rtrl"},
    "horizon": {"truncated"},
    "cut_every": {"exact"},
}


PANELS = ("Data", "Model", "Gradient", "Training", "Output")  # of the help, in this order


def _setting(panel: str, help_: str, default: Any = MISSING, **checks: Any) -> Any:
    """A field of `Config`: the heading of its group in the help, what it sets, its default.

    `checks` are `minimum=N`, `positive=True` for finite numbers above 0, `share=True` for those
    from 0 to below 1, `unset="..."`, what `None` means, and `words=...`, the values of a text that
    a shell completes.
    """
    return field(default=default, metadata={"panel": panel, "help": help_, **checks})


@dataclass(frozen=True)
class Config:
    """The settings of `throughtime train`; every field is a flag and a key of `--config run.toml`.

    Raises:
        ConfigError: values out of range or that exclude each other; all faults are listed.
    """

    data: str = _setting(
        "Data",
        "A file with one recording, a folder of them, or a manifest (CSV: id,split,inputs,targets"
        " or label).",
    )
    out: str = _setting("Output", "The run folder.", unset="runs/NAME-OF-DATA")
    task: Literal["classify", "regress"] | None = _setting(
        "Data",
        "What the targets are: classes, or numbers.",
        None,
        unset="classify for text and up to 20 different whole numbers, else regress",
    )
    inputs: tuple[str, ...] = _setting(
        "Data", "Input columns, separated by commas.", (), unset="all that are not targets"
    )
    targets: tuple[str, ...] = _setting(
        "Data",
        "Target columns, separated by commas.",
        (),
        unset="'targets', or all of a targets file",
    )
    exclude: tuple[str, ...] = _setting(
        "Data", "Columns that are neither inputs nor targets, separated by commas.", ()
    )
    allow_target_as_input: bool = _setting(
        "Data",
        "Take a target column as an input of the same step, too: a net can copy it.",
        False,
    )
    static: tuple[str, ...] = _setting(
        "Data",
        "Columns of the manifest with numbers of a whole recording, separated by commas. The net"
        " receives them at every step.",
        (),
    )
    csv: Literal["columns", "rows"] = _setting(
        "Data",
        "Signals of a CSV file: its columns, or its rows (time runs along a line).",
        "columns",
    )
    delimiter: str | None = _setting(
        "Data",
        "The character between the fields of a CSV file, or tab, or space for any run of spaces.",
        None,
        unset="detected",
        words=("tab", "space"),
    )
    decimal: Literal[".", ","] | None = _setting(
        "Data", "The decimal mark of CSV files.", None, unset="detected"
    )
    frame_size: int = _setting(
        "Data", "Consecutive rows of a file that form one step.", 1, minimum=1
    )
    target_every: int | None = _setting(
        "Data", "Rows of the inputs for each row of the targets file.", None, minimum=1
    )
    target_at: Literal["all", "last"] | None = _setting(
        "Data",
        "Which steps of a labelled span count.",
        None,
        unset="all of an interval, otherwise the last",
    )
    background_class: str | None = _setting(
        "Data", "The class of steps outside all intervals.", None, unset="they have no target"
    )
    ahead: int = _setting(
        "Data",
        "Forecast: the target of a row is the value so many rows later, of an input or another"
        " column.",
        0,
        minimum=0,
    )
    season: int | None = _setting(
        "Data",
        "With --ahead: rows of a season, such as 24 of hourly data. Scores are compared with the"
        " value one season before.",
        None,
        minimum=1,
    )
    missing: Literal["error", "mask"] = _setting(
        "Data", "How to treat inputs that are NaN or infinite.", "error"
    )
    holdout: float = _setting(
        "Data",
        "Share of the recordings, or of the end of a single one, held out for validation when no"
        " manifest names splits.",
        0.2,
        share=True,
    )
    model: str = _setting(
        "Model",
        f"The recurrent layer: {', '.join(MODEL_NAMES)}; or your own module as FILE.py:Class, made"
        " with those of inputs, outputs, hidden, layers and dropout that it takes.",
        "lstm",
        words=MODEL_NAMES,
    )
    hidden: int = _setting("Model", "Width of the recurrent layers.", 64, minimum=1)
    layers: int = _setting("Model", "Number of recurrent layers.", 1, minimum=1)
    dropout: float = _setting(
        "Model",
        "Share of the outputs of every recurrent layer that training replaces by 0. An update is"
        " then several calls instead of one.",
        0.0,
        share=True,
    )
    dtype: Literal["float32", "float64"] = _setting(
        "Model", "Type of inputs and weights.", "float32"
    )
    gradient: str = _setting(
        "Gradient",
        f"How credit flows back: {', '.join(POLICY_NAMES)}, or your own policy as FILE.py:Class.",
        "truncated",
        words=POLICY_NAMES,
    )
    gradient_args: Mapping[str, Any] = _setting(
        "Gradient", "An argument of the gradient policy, NAME=VALUE; repeat for more.", None
    )
    stride: int | None = _setting(
        "Gradient",
        "Steps between two updates (k1).",
        None,
        minimum=1,
        unset=f"{DEFAULT_STRIDE} for truncated and rtrl",
    )
    horizon: int | None = _setting(
        "Gradient",
        "Truncated: steps that credit flows back (k2), at least the stride.",
        None,
        unset="the stride",
    )
    cut_every: int | None = _setting(
        "Gradient",
        "Exact: steps between two updates; credit is cut there.",
        None,
        minimum=1,
        unset="an update where all lanes start a recording",
    )
    train_on: Literal["stream", "windows"] = _setting(
        "Gradient",
        "The unbroken stream, or for comparison shuffled windows of a stride.",
        "stream",
    )
    start: Literal["zero", "carried", "noise"] = _setting(
        "Gradient",
        "With --train-on windows: the state that enters a window. The initial one; carried: that in"
        " which the window before it ended when it was last played; or noise like such states.",
        "zero",
    )
    lanes: int = _setting(
        "Training", "Recordings played at the same time, on all ranks together.", 16, minimum=1
    )
    warm_up: int = _setting(
        "Training", "First steps of a recording whose loss does not count.", 0, minimum=0
    )
    offset: int = _setting(
        "Training",
        "Leave out a random number of first steps of each recording, below this.",
        0,
        minimum=0,
    )
    hand_off: bool = _setting(
        "Training",
        "A part of a recording starts from the final state of the part before it.",
        False,
    )
    workers: int | Literal["thread"] = _setting(
        "Training", "Processes that read ahead, or 'thread'.", 0, words=("thread",)
    )
    updates: int | None = _setting("Training", "Stop after this many updates.", None, minimum=1)
    epochs: int | None = _setting(
        "Training", "Stop after this many epochs.", None, minimum=1, unset="1 without --updates"
    )
    lr: float = _setting("Training", "Learning rate of Adam.", 1e-3, positive=True)
    schedule: Literal["constant", "cosine"] = _setting(
        "Training", "The learning rate stays, or falls to 0 along half a cosine.", "constant"
    )
    lr_warmup: int = _setting(
        "Training", "First updates, over which the learning rate rises from 0.", 0, minimum=0
    )
    weight_decay: float = _setting(
        "Training",
        "AdamW: matrices shrink by this times the learning rate at each update; biases do not.",
        0.0,
        minimum=0,
    )
    max_norm: float = _setting("Training", "Clip the gradient to this norm.", 1.0, positive=True)
    class_weights: str = _setting(
        "Training",
        "Weights of the classes in the loss: none, balanced (by the inverse frequency), or numbers"
        " such as pvc=5,beat=2 (others 1).",
        "none",
        words=("none", "balanced"),
    )
    seed: int = _setting("Training", "Seed of the weights and of the order.", 0, minimum=0)
    device: str = _setting(
        "Training", "Where to compute: cpu, cuda, ...", "cpu", words=("cpu", "cuda", "mps")
    )
    valid_every: int | None = _setting(
        "Training",
        "Updates between two validations; 0: only at the end.",
        None,
        minimum=0,
        unset="a fifth of the run",
    )
    keep: Literal["best", "last"] = _setting(
        "Training",
        "Weights of the model: those of the best validation (macro-F1 of classes, else loss), or"
        " the last.",
        "best",
    )
    patience: int | None = _setting(
        "Training",
        "Stop after so many validations without a better one.",
        None,
        minimum=1,
        unset="never stop early",
    )
    logger: tuple[LoggerName, ...] = _setting(
        "Training",
        f"Write the metrics there, too: {', '.join(get_args(LoggerName))}; repeat for more.",
        (),
        unset="none",
        words=get_args(LoggerName),
    )
    checkpoint_every: float = _setting(
        "Output",
        "Seconds between two checkpoints; the first ones come sooner.",
        30.0,
        positive=True,
    )
    strategy: Literal["single", "ddp"] = _setting(
        "Training", "One process, or several that share the lanes.", "single"
    )
    devices: int = _setting(
        "Training",
        "With ddp: processes on each machine, one per GPU with --device cuda.",
        1,
        minimum=1,
    )
    nodes: int = _setting("Training", "With ddp: machines.", 1, minimum=1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gradient_args", dict(self.gradient_args or {}))
        if (
            self.gradient in {"truncated", "rtrl"}
            and self.stride is None
            and "stride" not in self.gradient_args
        ):
            object.__setattr__(self, "stride", DEFAULT_STRIDE)
        faults = [
            *self._range_faults(),
            *_name_faults("model", self.model, MODEL_NAMES),
            *self._gradient_faults(),
            *self._label_faults(),
            *self._stream_faults(),
            *self._schedule_faults(),
            *self._rank_faults(),
        ]
        if faults:
            raise ConfigError("; ".join(faults))

    def policy_arguments(self) -> dict[str, Any]:
        """The arguments of the gradient policy: those by name, and the short settings."""
        short = {name: getattr(self, name) for name in _SHORT}
        if self.start != "zero":
            short["start"] = self.start
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

    def start_in_words(self) -> str:
        """The state that enters a window of `train_on="windows"`."""
        words = {
            "zero": "a zero state",
            "carried": "the state in which the window before it ended",
            "noise": "noise like the states in which windows end",
        }
        return words[self.start]

    def settings(self) -> dict[str, Any]:
        """The settings that have a value."""
        return {
            key: value
            for key, value in asdict(self).items()
            if value is not None and (key != "gradient_args" or value)
        }

    def to_toml(self) -> str:
        """The settings as TOML that `read_toml` reads back."""
        settings = self.settings()
        arguments = settings.pop("gradient_args", {})
        if arguments:
            arguments = {"policy": settings.pop("gradient"), **arguments}
        return toml_lines(settings) + ("\n[gradient]\n" + toml_lines(arguments)) * bool(arguments)

    def _range_faults(self) -> Iterator[str]:
        for setting in fields(self):
            value, checks = getattr(self, setting.name), setting.metadata
            if value is None:
                continue
            if "minimum" in checks and not checks["minimum"] <= value < math.inf:
                yield f"{setting.name}={value}: expected at least {checks['minimum']}"
            if checks.get("positive") and not 0 < value < math.inf:
                yield f"{setting.name}={value}: expected a finite number above 0"
            if checks.get("share") and not 0 <= value < 1:
                yield f"{setting.name}={value}: expected a share from 0 to below 1"
        if self.seed >= 2**63:
            yield f"seed={self.seed}: expected a number below 2**63"
        if self.updates is not None and self.epochs is not None:
            yield (
                f"updates={self.updates} and epochs={self.epochs} are both given: one of them says"
                " when to stop"
            )

    def _gradient_faults(self) -> Iterator[str]:
        """The policy's name, and settings that do not go with it."""
        own = is_reference(self.gradient)
        if unknown := _name_faults("gradient", self.gradient, POLICY_NAMES):
            yield from unknown
            return
        for name, policies in _SHORT.items():
            value = getattr(self, name)
            if value is None:
                continue
            if name in self.gradient_args:
                yield f"{name}={value} is given again among the arguments of the gradient"
            if self.gradient == "exact" and name != "cut_every":
                yield (
                    f"gradient='exact' and {name}={value} are both given: the exact gradient cuts"
                    f" no credit, so it has no {name}. Leave one of them out; cut_every=N makes an"
                    " update every N steps"
                )
            elif not own and self.gradient not in policies:
                yield (
                    f"{name}={value} belongs to gradient={' or '.join(sorted(policies))} (such as"
                    f" --gradient {min(policies)}), got gradient={self.gradient!r}: leave one out"
                )
        if self.train_on == "windows" and self.gradient != "truncated":
            yield (
                f"gradient={self.gradient!r} and train_on='windows' are both given: credit ends"
                " with a window, and within one the truncated gradient is exact. Leave one of them"
                " out"
            )
        if self.start != "zero" and self.train_on != "windows":
            yield (
                f"start={self.start!r} is for windows, and training is on the stream, where the"
                " state is carried anyway: leave it out, or set train_on='windows'"
            )
        if self.start == "carried" and self.strategy == "ddp":
            yield (
                "start='carried' and strategy='ddp' are both given: ranks do not exchange the"
                " states of windows. Take start='noise', or one process"
            )

    def _label_faults(self) -> Iterator[str]:
        """Contradictions between the settings of targets and class weights."""
        both = sorted({*self.exclude} & {*self.inputs, *self.targets})
        if both:
            yield f"exclude={','.join(both)} is among the inputs or targets, too: leave one out"
        frame, weights = self.frame_size, self.class_weights
        for name in ("target_every", "ahead", "season"):
            rows = getattr(self, name)
            if rows is not None and frame > 0 and rows % frame:
                yield (
                    f"{name}={rows} rows are no whole number of frames of {frame}: expected a"
                    " multiple"
                )
        if self.season is not None and not self.ahead:
            yield f"season={self.season} belongs to forecasts: leave it out, or set ahead=24 or so"
        for_classes = {"background_class": self.background_class}
        for_classes["class_weights"] = None if weights == "none" else weights
        for name, value in for_classes.items() if self.task == "regress" else ():
            if value is not None:
                yield f"{name}={value!r} belongs to classes: leave it out, or set task='classify'"
        if weights not in {"none", "balanced"}:
            try:
                weights_by_class(weights)
            except ConfigError as error:
                yield str(error)

    def _stream_faults(self) -> Iterator[str]:
        if isinstance(self.workers, int) and self.workers < 0:
            yield f"workers={self.workers}: expected a number of processes, 0 for none, or 'thread'"
        if self.offset and self.hand_off:
            yield (
                f"offset={self.offset} moves the boundaries between parts from epoch to epoch, and"
                " hand_off=True passes states on at these boundaries: leave one of them out"
            )
        for name in ("offset", "hand_off") if self.train_on == "windows" else ():
            if value := getattr(self, name):
                yield (
                    f"{name}={value} and train_on='windows' are both given: windows start at the"
                    " same steps in every epoch; start= says from which state"
                )

    def _schedule_faults(self) -> Iterator[str]:
        """Contradictions between the settings of a run's length."""
        if self.updates is not None and self.lr_warmup >= self.updates:
            yield (
                f"lr_warmup={self.lr_warmup} of updates={self.updates}: expected fewer, the"
                " learning rate would only rise"
            )
        if self.valid_every == 0 and self.patience is not None:
            yield (
                f"patience={self.patience} counts validations, and valid_every=0 has none before"
                " the end: leave one of them out"
            )

    def _rank_faults(self) -> Iterator[str]:
        """Contradictions between the settings of several processes."""
        devices, nodes = self.devices, self.nodes
        if self.strategy == "single":
            several = {"devices": devices, "nodes": nodes}
            named = " and ".join(f"{name}={value}" for name, value in several.items() if value > 1)
            if named:
                yield f"{named}: several processes need strategy='ddp'"
            return
        if self.device not in {"cpu", "cuda"}:
            yield (
                f"device={self.device!r} with strategy='ddp': expected 'cpu', or 'cuda' and each"
                " process takes its own GPU"
            )
        ranks = devices * nodes
        if ranks > 0 and self.lanes % ranks:
            below = self.lanes // ranks * ranks
            near = [str(n) for n in (below, below + ranks) if n]
            yield (
                f"lanes={self.lanes} are those of all ranks together, and each of {ranks} ranks"
                f" (devices={devices} on each of nodes={nodes}) plays the same number: expected a"
                f" multiple of {ranks}, such as {' or '.join(near)}"
            )


def _name_faults(setting: str, value: str, names: Sequence[str]) -> list[str]:
    """The fault of a value that is neither one of the names nor a class in a file, if it is."""
    if value in names or is_reference(value):
        return []
    hint = did_you_mean(value.lower(), names)
    return [f"{setting}={value!r}: expected {', '.join(names)}, or FILE.py:Class{hint}"]


def make_config(settings: Mapping[str, Any], *, source: str = "the settings") -> Config:
    """A checked config from settings by name; `None` means the default.

    Raises:
        ConfigError: unknown keys (with the nearest known ones), missing ones, or values of the
            wrong type; all are listed.
    """
    types = get_type_hints(Config)
    present = {key: value for key, value in settings.items() if value is not None}
    known = f"; known are {', '.join(types)}"
    faults = [
        f"unknown key '{key}'{did_you_mean(key, types, ', ') or known}"
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
    if faults:
        raise ConfigError(f"{source}: " + "; ".join(faults))
    return Config(**values)
