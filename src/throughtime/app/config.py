"""Config: every setting of a run, from flags or TOML, checked once and written back resolved."""

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from throughtime.errors import ConfigError
from throughtime.stream.formats.csv import is_number

Task = Literal["classify", "regress"]
_LEAST = {
    "hidden": 1,
    "layers": 1,
    "lanes": 1,
    "stride": 1,
    "segment": 1,
    "warm_up": 0,
    "frame": 1,
    "label_every": 1,
    "offset": 0,
    "seed": 0,
    "updates": 1,
    "epochs": 1,
    "valid_every": 0,
    "devices": 1,
    "nodes": 1,
}


@dataclass(frozen=True)
class Config:
    """The settings of `throughtime train`; every field is a flag and a key of `--config run.toml`.

    Attributes:
        data: a CSV, Parquet, NPY, NPZ or WAV file, a folder of them, or a manifest.
        task: classes or numbers.
        inputs: columns of the inputs; empty: all that are not targets.
        targets: columns of the targets; empty: `targets`, or the whole targets file of a manifest.
        static: columns of the manifest that are numbers of a whole recording, which the net sees at
            every step.
        csv: whether the signals of a CSV file are its `columns`, or its `rows`: time then runs
            along the lines.
        frame: so many consecutive rows of a file are one step, whose target is that of the last of
            them.
        label_every: a targets file has one row for so many rows of the inputs.
        label_at: whether `all` steps of such a span, of an interval or of a labelled recording
            count, or only the `last`; default: all of an interval, the last of others.
        outside: the class of steps outside all intervals; default: they have no target.
        model: the recurrent layer.
        hidden: its width.
        layers: how many of them.
        lanes: recordings played side by side, those of all ranks together.
        stride: steps between two updates.
        horizon: steps that credit may flow back; default: the stride.
        exact: the exact gradient of each recording or segment, in flat memory, instead of a
            truncated one; it has neither stride nor horizon.
        segment: with `exact`, steps between two updates, credit cut between them: the gradient of
            as long a stride, in flat memory; default: an update where all lanes start a recording,
            which with several lanes is mostly once an epoch.
        warm_up: first steps of a recording whose loss does not count.
        offset: leaves out a random number of first steps of each recording, below this, anew each
            epoch.
        hand_off: parts of a recording that is cut go on from the state in which the part before
            ended the last epoch.
        workers: processes that read ahead, or `thread`; 0 reads when needed.
        train_on: the unbroken stream, or shuffled windows of `stride` steps from a zero state, for
            comparison.
        updates: how many updates; or give `epochs`.
        epochs: how often every recording is played; default 1 if `updates` is not given.
        lr: Adam's learning rate.
        clip: largest norm of the gradient.
        class_weights: `balanced` weighs each class by the inverse of its frequency in the training
            split; `a=5,b=2` as it says, other classes 1.
        missing: what to do with inputs that are NaN or infinite.
        holdout: share of recordings (or of the end of a single one) held out as `valid` when
            nothing says which.
        valid_every: updates between two evaluations of the valid split; default: a fifth of the
            run; 0: only at the end.
        checkpoint_every: seconds between two checkpoints.
        seed: draws the weights and the order of the recordings.
        device: where to compute.
        dtype: of inputs and weights.
        strategy: `single` is one process; `ddp` several, each with its share of the lanes, started
            or found by Lightning.
        devices: with `ddp`, processes on each node: GPUs, or on a CPU just processes.
        nodes: with `ddp`, how many machines.
        out: the run folder.
    """

    data: str
    task: Task
    out: str
    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    csv: Literal["columns", "rows"] = "columns"
    frame: int = 1
    label_every: int | None = None
    label_at: Literal["all", "last"] | None = None
    outside: str | None = None
    model: Literal["lstm", "gru", "rnn"] = "lstm"
    hidden: int = 64
    layers: int = 1
    lanes: int = 16
    stride: int = 100
    horizon: int | None = None
    exact: bool = False
    segment: int | None = None
    warm_up: int = 0
    offset: int = 0
    hand_off: bool = False
    workers: int | Literal["thread"] = 0
    train_on: Literal["stream", "windows"] = "stream"
    updates: int | None = None
    epochs: int | None = None
    lr: float = 1e-3
    clip: float = 1.0
    class_weights: str = "none"
    missing: Literal["error", "mask"] = "error"
    holdout: float = 0.2
    valid_every: int | None = None
    checkpoint_every: float = 30.0
    seed: int = 0
    device: str = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    strategy: Literal["single", "ddp"] = "single"
    devices: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        values = [(name, getattr(self, name), least) for name, least in _LEAST.items()]
        faults = [
            f"{name}={value}: expected at least {least}"
            for name, value, least in values
            if value is not None and value < least
        ]
        faults += [
            f"{name}={value}: expected a finite number above 0"
            for name, value in (
                ("lr", self.lr),
                ("clip", self.clip),
                ("checkpoint_every", self.checkpoint_every),
            )
            if not (value > 0 and math.isfinite(value))
        ]
        if self.seed >= 2**63:
            faults.append(f"seed={self.seed}: expected a number below 2**63")
        if not 0 <= self.holdout < 1:
            faults.append(f"holdout={self.holdout}: expected a share from 0 to below 1")
        if self.updates is not None and self.epochs is not None:
            faults.append("updates and epochs are both given: one of them says when to stop")
        faults += (
            self._faults_of_gradient()
            + self._faults_of_labels()
            + self._faults_of_stream()
            + self._faults_of_ranks()
        )
        if faults:
            raise ConfigError("; ".join(faults))

    def _faults_of_gradient(self) -> list[str]:
        """What the exact gradient does not go together with."""
        if not self.exact:
            alone = (
                f"segment={self.segment} belongs to the exact gradient: add exact (--exact), or say"
                " stride for a truncated one"
            )
            return [alone] if self.segment is not None else []
        faults: list[str] = []
        if self.horizon is not None:
            faults.append(
                f"exact and horizon={self.horizon} are both given: the exact gradient cuts no"
                " credit, so it has no horizon. Leave one of them out"
            )
        if self.train_on == "windows":
            faults.append(
                "exact and train_on='windows' are both given: credit ends where a window does, and"
                " within one it is exact already. Leave one of them out"
            )
        return faults

    def _faults_of_labels(self) -> list[str]:
        """What does not go together in saying where targets come from and what they weigh."""
        faults: list[str] = []
        if self.label_every is not None and self.frame > 0 and self.label_every % self.frame:
            faults.append(
                f"label_every={self.label_every} rows are no whole number of frames of"
                f" {self.frame}: expected a multiple"
            )
        if self.task == "regress":
            faults += [
                f"{name}={value!r} belongs to classes: leave it out, or is it task='classify'?"
                for name, value, unset in (
                    ("outside", self.outside, None),
                    ("class_weights", self.class_weights, "none"),
                )
                if value != unset
            ]
        if self.class_weights not in {"none", "balanced"}:
            try:
                weights_in(self.class_weights)
            except ConfigError as error:
                faults.append(str(error))
        return faults

    def _faults_of_stream(self) -> list[str]:
        """What does not go together in how recordings are played."""
        faults: list[str] = []
        if isinstance(self.workers, int) and self.workers < 0:
            faults.append(
                f"workers={self.workers}: expected a number of processes, 0 for none, or 'thread'"
            )
        if self.offset and self.hand_off:
            faults.append(
                f"offset={self.offset} moves the edges between parts from epoch to epoch, and"
                " hand_off hands states over at these edges: leave one of them out"
            )
        if self.train_on == "windows":
            given = [
                name
                for name, value in (
                    (f"offset={self.offset}", self.offset),
                    ("hand_off", self.hand_off),
                )
                if value
            ]
            faults += [
                f"{name} and train_on='windows' are both given: windows start at the same steps,"
                " from zero"
                for name in given
            ]
        return faults

    def _faults_of_ranks(self) -> list[str]:
        """What several processes do not go together with."""
        if self.strategy == "single":
            several = [
                f"{name}={value}"
                for name, value in (("devices", self.devices), ("nodes", self.nodes))
                if value > 1
            ]
            return (
                [
                    f"{' and '.join(several)}: of several processes; add strategy='ddp' (--strategy"
                    " ddp)"
                ]
                if several
                else []
            )
        faults: list[str] = []
        if self.device not in {"cpu", "cuda"}:
            faults.append(
                f"device={self.device!r} with strategy='ddp': expected 'cpu', or 'cuda' and each"
                " process takes its own GPU"
            )
        ranks = self.devices * self.nodes
        if ranks > 0 and self.lanes % ranks:
            near = [
                str(n)
                for n in (self.lanes // ranks * ranks, (self.lanes // ranks + 1) * ranks)
                if n
            ]
            faults.append(
                f"lanes={self.lanes} are those of all ranks together, and {ranks} ranks"
                f" (devices={self.devices} on each of nodes={self.nodes}) play equally many:"
                f" expected a multiple of {ranks}, such as {' or '.join(near)}"
            )
        return faults

    def settings(self) -> dict[str, Any]:
        """The settings that are set and play a part: the exact gradient has no stride."""
        return {
            key: value
            for key, value in asdict(self).items()
            if value is not None and not (self.exact and key == "stride")
        }

    def to_toml(self) -> str:
        """The settings as TOML, those that play no part left out."""
        rows = (
            (key, list(value) if isinstance(value, tuple) else value)
            for key, value in self.settings().items()
        )
        return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in rows)


def weights_in(text: str) -> dict[str, float]:
    """The weight of each class named in `a=5,b=2`.

    Raises:
        ConfigError: something else, or a weight that is no finite number above 0.

    Example:
        >>> weights_in("pvc=5,beat=2")
        {'pvc': 5.0, 'beat': 2.0}
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.rpartition("="))
        if (
            not equals
            or not name
            or name in found
            or not is_number(value)
            or not 0 < float(value) < math.inf
        ):
            raise ConfigError(
                f"class_weights={text!r}: expected none, balanced, or a number above 0 for each of"
                " some classes, such as pvc=5,beat=2"
            )
        found[name] = float(value)
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, unchecked.

    Raises:
        ConfigError: the file is missing or no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML ({error})") from error


def make_config(settings: Mapping[str, Any], *, source: str = "the settings") -> Config:
    """A checked config from settings by name; `None` means the default.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing one, or a value of the
            wrong kind; all are listed.
    """
    kinds = get_type_hints(Config)
    given = {key: value for key, value in settings.items() if value is not None}
    faults = [_unknown(key, list(kinds)) for key in given if key not in kinds]
    required = [
        f.name for f in fields(Config) if f.name in {"data", "task", "out"} and f.name not in given
    ]
    faults += [f"'{name}' is missing" for name in required]
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in kinds:
            values[key], fault = _converted(key, value, kinds[key])
            faults += [fault] if fault else []
    if given.get("exact") is True and "stride" in given:
        faults.append(
            f"exact and stride={given['stride']} are both given: the exact gradient has no stride."
            " Leave one of them out; segment says how many steps of it an update takes"
        )
    if faults:
        raise ConfigError(f"{source}: " + "; ".join(faults))
    return Config(**values)


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key '{key}'" + (
        f", did you mean '{near[0]}'?" if near else f"; known are {', '.join(known)}"
    )


def _converted(key: str, value: Any, kind: Any) -> tuple[Any, str]:
    """The value in the type of the field, and what is wrong with it."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return value, (
            ""
            if value in options
            else f"{key}={value!r}: expected one of {', '.join(map(repr, options))}"
        )
    if get_origin(kind) is tuple:
        items = [value] if isinstance(value, str) else value
        right = isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items)
        return tuple(items) if right else (), (
            "" if right else f"{key}={value!r}: expected a list of column names"
        )
    words = [
        word for option in options if get_origin(option) is Literal for word in get_args(option)
    ]
    if value in words:
        return value, ""
    plain = next(
        (o for o in options if o is not type(None) and get_origin(o) is not Literal),
        None if words else kind,
    )
    if plain is None:
        return value, f"{key}={value!r}: expected one of {', '.join(map(repr, words))}"
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value), ""
    right = isinstance(value, plain) and not (isinstance(value, bool) and plain is not bool)
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    others = "".join(f" or {word!r}" for word in words)
    return value, "" if right else f"{key}={value!r}: expected {expected[plain]}{others}"
