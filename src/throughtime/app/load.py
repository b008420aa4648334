"""Data sets in splits, and finished runs, as the command line reads them, for Python."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import Tensor

from throughtime.app.config import Config
from throughtime.app.dataset import (
    as_played,
    entries_of,
    in_splits,
    open_recording,
    recordings_for,
    split_recordings,
)
from throughtime.app.model import ModelSpec, check_device, load_model, statistics_of
from throughtime.app.recordings import find_entries, layout_of, open_recordings
from throughtime.app.run_folder import RunFolder
from throughtime.carry.carried import Carried
from throughtime.errors import DataError, counted, listed
from throughtime.stream.formats.table import RowSource, is_number
from throughtime.stream.layout import Layout
from throughtime.stream.manifest import ManifestEntry
from throughtime.stream.recording import Recording, read_blocks
from throughtime.stream.sources import as_table, names_of
from throughtime.stream.targets import At, class_names, horizons

Task: TypeAlias = Literal["classify", "multilabel", "regress"]
_MOST_CLASSES = 20  # that are whole numbers; text may have more
_RECORDINGS, _BLOCKS, _BLOCK = 8, 16, 65_536  # read at most


class Splits(dict[str, list[Recording]]):
    """The recordings of a data set by split: `splits["train"]`.

    Attributes:
        classes: the names of the classes, in the order of their indices; empty for numbers.
    """

    def __init__(
        self, by_split: Mapping[str, list[Recording]], classes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(by_split)
        self.classes = classes

    def __missing__(self, split: str) -> list[Recording]:
        raise DataError(f"no split '{split}'; there are {listed(self)}")

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}: {counted(len(rs), 'recording')}" for name, rs in self.items())
        return f"Splits({counts}; classes {listed(self.classes) or 'none'})"


def recordings(
    data: str | Path,
    *,
    inputs: str | Sequence[str] = (),
    targets: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    static: str | Sequence[str] = (),
    series: Mapping[str, str | Sequence[str]] | None = None,
    task: Task | None = None,
    frame_size: int = 1,
    delimiter: str | None = None,
    decimal: Literal[".", ","] | None = None,
    rate: float | None = None,
    target_every: int | None = None,
    target_at: At | None = None,
    background_class: str | None = None,
    ahead: int | Sequence[int] = 0,
    allow_target_as_input: bool = False,
    holdout: float = 0.0,
) -> Splits:
    r"""The recordings of a manifest, a folder or a file in splits, as `throughtime train` has them.

    Args:
        data: a manifest (a CSV file with the columns id, inputs, and optionally split, targets and
            label), a folder, read with its sub-folders, of which those called train, valid and test
            are splits, or a file.
        inputs: columns; default: all that are neither targets nor time stamps nor excluded.
        targets: columns; default: `targets`, or the file or the label that the manifest names.
        exclude: columns that are not used.
        static: columns of the manifest that are appended to the inputs of every step.
        series: further columns by name, see `tt.recording`.
        task: whether the targets are classes, several labels of 0 and 1, or numbers; default: text,
            and at most 20 different whole numbers in a column, are classes, and several columns of
            0 and 1 labels.
        frame_size: rows that form one step.
        delimiter: the character between the fields of CSV files; default: detected.
        decimal: the decimal mark of CSV files; default: detected.
        rate: rows per second, whatever the files say; default: theirs, which must agree.
        target_every: rows of the inputs for each row of a targets file.
        target_at: which steps of such a span carry its label, "all" or the "last".
        background_class: the class between intervals.
        ahead: the target of a step is that of so many rows later; of several, such as
            `range(1, 25)`, side by side.
        allow_target_as_input: whether an input may be the target of the same step.
        holdout: without splits, the share of the recordings, or of the only one, that is `valid`.

    Returns:
        The recordings by split; `train` has all where the data have no splits.

    Raises:
        DataError: every fault of the files: missing columns, other columns than those of the first
            recording, targets of another length, a recording that is listed twice.

    Cost: the headers of all files, and the targets of the training split where they are classes.

    Example:
        >>> import pathlib, tempfile, throughtime as tt
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("a", "b"):
        ...     _ = (folder / f"{name}.csv").write_text("u,beat\n0.1,N\n0.3,V\n0.2,N\n")
        >>> splits = tt.recordings(folder, targets="beat", holdout=0.5)
        >>> {name: len(recordings) for name, recordings in splits.items()}, splits.classes
        ({'train': 1, 'valid': 1}, ('N', 'V'))
        >>> splits["train"][0].read(0, 3).targets.tolist()
        [0, 1, 0]
    """
    # users pass frames
    if not isinstance(data, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DataError(
            f"data is a {type(data).__name__}, expected the path of a file, folder or manifest; a"
            " frame or arrays are one recording each: tt.recording(frame, targets='y')"
        )
    path, features = Path(data), names_of(static)
    entries = find_entries(path, features)
    options: dict[str, Any] = {
        "inputs": names_of(inputs),
        "targets": names_of(targets),
        "exclude": names_of(exclude),
        "static": features,
        "series": {key: names_of(names) for key, names in (series or {}).items()},
        "frame_size": frame_size,
        "delimiter": delimiter,
        "decimal": decimal,
        "rate": rate,
        "rate_set": rate is not None,
        "target_every": target_every,
        "target_at": target_at,
        "background_class": background_class,
        "ahead": horizons(ahead),
        "allow_target_as_input": allow_target_as_input,
    }
    layout = Layout(**options)
    layout = replace(layout, task=task or _find_task(entries, layout))
    sources = open_recordings(entries, layout)
    splits, _ = split_recordings(in_splits(sources, "split"), holdout)
    classes = _class_names(splits.get("train", [])) if layout.classify else ()
    played = {split: as_played(several, layout, classes) for split, several in splits.items()}
    return Splits(played, classes)


def _class_names(recordings: Sequence[Recording]) -> tuple[str, ...]:
    """The classes of the training split; one pass over it."""
    blocks = (steps.targets for r in recordings for _, steps in read_blocks(r))
    return class_names(targets for targets in blocks if targets is not None)


def resolve_task(config: Config) -> Config:
    """The settings with a task: that of the settings, or else the one that fits the targets.

    Text is classes, and so are at most 20 different whole numbers, in a single column. Several
    columns of 0 and 1 are labels, each by itself. Other numbers are numbers.

    Raises:
        DataError: as for `open_dataset`.

    Cost: the targets of up to 8 recordings, a million of each, until one decides.
    """
    if config.task is not None:
        return config
    entries = find_entries(Path(config.data), config.static)
    return config.changed(task=_find_task(entries, layout_of(config)))


def _find_task(entries: Sequence[ManifestEntry], layout: Layout) -> Task:
    opened = open_recordings(
        entries_of(entries, ("train",))[:_RECORDINGS], replace(layout, task="classify")
    )
    targets = [one.recording.targets for one in opened]
    return task_of(rows for rows in targets if rows is not None)


def task_of(sources: Iterable[RowSource]) -> Task:
    """Whether the targets of recordings are classes, several labels of 0 and 1, or numbers."""
    names = set[str]()
    task: Literal["classify", "multilabel"] = "classify"
    for targets in sources:
        for start in range(0, len(targets), _BLOCK)[:_BLOCKS]:
            block = targets.read(start, min(start + _BLOCK, len(targets)))
            names |= set(class_names([block]))
            if not all(map(is_number, names)):
                return "classify"
            values = {*map(float, names)}
            if block.ndim > 1 and block.shape[1] > 1:
                task = "multilabel"
                fits = values <= {0.0, 1.0}
            else:
                fits = all(map(float.is_integer, values)) and len(names) <= _MOST_CLASSES
            if not fits:
                return "regress"
    return task


def task_remark(config: Config) -> str:
    """Why a run has its task, where no setting names it."""
    reasons = {
        "classify": "targets are text or few whole numbers, each a class",
        "multilabel": "targets are several columns of 0 and 1, each a label by itself",
        "regress": "targets are numbers",
    }
    return f"{reasons[config.task or 'regress']}: --task {config.task}"


@dataclass(frozen=True)
class Run:
    """A run that `throughtime train` wrote: its net, and how it reads data.

    Attributes:
        folder: of the run.
        net: takes raw values, standardises inside, and returns logits of the classes, or values in
            the units of the targets.
        spec: the description of the model: `layout` of the data, `classes`, `features`, `outputs`.
        config: the settings of the run.
    """

    folder: Path
    net: Carried
    spec: ModelSpec
    config: Config

    @property
    def files(self) -> RunFolder:
        """The files of the run."""
        return RunFolder(self.folder)

    def changed(self, **settings: Any) -> "Run":
        """The run with other settings."""
        return replace(self, config=self.config.changed(**settings))

    def with_own_code(self, setting: str, *, trust_code: bool) -> "Run":
        """The run whose setting names the user's class in the copy of its file that is kept."""
        saved = self.files.read_checkpoint()
        own = self.files.with_own_code(self.config, saved, [setting], trust_code=trust_code)
        return replace(self, config=own)

    @property
    def layout(self) -> Layout:
        """The columns of inputs and targets, and how files are read."""
        return self.spec.layout

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the outputs; empty for a regression."""
        return self.spec.classes

    @property
    def statistics(self) -> dict[str, Tensor]:
        """The means (`shift`) and deviations (`scale`) with which the net standardises."""
        return statistics_of(self.net)

    @property
    def remark(self) -> str:
        """What to say of a model whose run is not finished; empty of one whose run is."""
        if not self.spec.planned:
            return ""
        return (
            f"the run is not finished: these are the weights of update {self.spec.update:,} of"
            f" {self.spec.planned:,}; go on with: throughtime train --resume {self.folder}"
        )

    def recordings(
        self,
        data: str | Path | None = None,
        split: str | None = None,
        *,
        targets: bool = True,
    ) -> list[Recording]:
        """Recordings in the layout of the run; the classes are indices.

        Args:
            data: a manifest, a folder or a file; default: the data of the run.
            split: "train", "valid", "test" or "all"; default: `test`, where there is none `valid`,
                what the run held out, or all of other data.
            targets: whether the data have targets; without them, to predict.

        Raises:
            DataError: no such split, or recordings that the model does not fit.
        """
        path = None if data is None else Path(data)
        return recordings_for(self.spec, self.config, path, split, targets=targets)[1]

    def recording(self, source: Any, static: Mapping[str, float] | None = None) -> Recording:
        """The inputs of one recording, to predict: of a file, a frame or another table.

        Args:
            source: as for `tt.recording`.
            static: the static features of the recording, by name.

        Raises:
            DataError: a column or a static feature is missing, or the rate differs.
        """
        file = isinstance(source, (str, Path))
        return open_recording([Path(source) if file else as_table(source)], self.spec, static)


def load_run(folder: str | Path, *, device: str = "cpu", trust_code: bool = False) -> Run:
    r"""A finished run: the net, the layout of its data and its standardisation.

    Args:
        folder: that `throughtime train --out` wrote.
        device: where the net computes.
        trust_code: execute the file of a model of one's own that the run keeps, though you have not
            trained with it; read it before.

    Returns:
        The run: `run.net` is carried and in evaluation mode, `run.recording(path)` lays out a file
        as in training.

    Raises:
        RunError: the folder holds no run that reached a checkpoint, or its code is not trusted.
        ConfigError: no such device.

    Example:
        >>> import pathlib, tempfile, numpy as np, throughtime as tt
        >>> from throughtime.app.config import Config
        >>> from throughtime.app.train import Training
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.csv").write_text("u,y\n" + "0.1,0\n0.7,1\n" * 200)
        >>> options = {"lanes": 2, "updates": 2, "hidden": 4}
        >>> paths = {"data": str(folder / "a.csv"), "out": str(folder / "run")}
        >>> config = Config(**paths, targets=("y",), **options)
        >>> Training.begin(config).run()
        >>> run = tt.load_run(folder / "run")
        >>> run.layout.inputs, run.classes
        (('u',), ('0', '1'))
        >>> tt.predict(run.net, run.recording(folder / "a.csv"))[0].shape
        torch.Size([400, 2])
        >>> tt.Predictor(run.net).step(np.array([[0.1]])).shape  # live, one step at a time
        torch.Size([1, 2])
    """
    check_device(device)
    path = Path(folder)
    config = RunFolder(path).read_config()
    net, spec = load_model(RunFolder(path).model, trust_code=trust_code)
    return Run(path, net.to(device), spec, config)
