"""Data sets in splits, and finished runs, as the command line reads them, for Python."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from throughtime.app.config import Config
from throughtime.app.dataset import (
    as_played,
    entries_of,
    in_splits,
    recordings_for,
    split_recordings,
)
from throughtime.app.model import ModelSpec, check_device, load_model
from throughtime.app.recordings import (
    check_sources,
    find_entries,
    layout_of,
    open_entry,
    open_recordings,
)
from throughtime.app.run_folder import RunFolder
from throughtime.carry.carried import Carried
from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import Array, is_number
from throughtime.stream.layout import Layout
from throughtime.stream.manifest import ManifestEntry
from throughtime.stream.recording import Recording, read_blocks
from throughtime.stream.sources import as_table, names_of
from throughtime.stream.targets import class_names, horizons

Task: TypeAlias = Literal["classify", "multilabel", "regress"]
_MOST_CLASSES = 20  # that are whole numbers; text may have more
_RECORDINGS, _BLOCKS = 8, 16  # read at most


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


def recordings(
    data: str | Path,
    *,
    inputs: str | Sequence[str] = (),
    targets: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    static: str | Sequence[str] = (),
    series: Mapping[str, str | Sequence[str]] | None = None,
    task: Task | None = None,
    delimiter: str | None = None,
    decimal: Literal[".", ","] | None = None,
    rate: float | None = None,
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
        delimiter: the character between the fields of CSV files; default: detected.
        decimal: the decimal mark of CSV files; default: detected.
        rate: rows per second, whatever the files say; default: theirs, which must agree.
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
    layout = Layout(
        inputs=names_of(inputs),
        targets=names_of(targets),
        exclude=names_of(exclude),
        static=features,
        series={key: names_of(names) for key, names in (series or {}).items()},
        delimiter=delimiter,
        decimal=decimal,
        rate=rate,
        rate_set=rate is not None,
        ahead=horizons(ahead),
        allow_target_as_input=allow_target_as_input,
    )
    layout = replace(layout, task=task or _find_task(entries, layout))
    sources = open_recordings(entries, layout)
    splits, _ = split_recordings(in_splits(sources, "split"), holdout)
    train = splits.get("train", []) if layout.classify else []
    classes = class_names(targets for r in train for targets in _targets(r))
    played = {split: as_played(several, layout, classes) for split, several in splits.items()}
    return Splits(played, classes)


def _targets(recording: Recording) -> Iterable[Array]:
    """The targets of the blocks of a recording."""
    blocks = (steps.targets for _, steps in read_blocks(recording))
    return (targets for targets in blocks if targets is not None)


def resolve_task(config: Config) -> Config:
    """The settings with a task: that of the settings, or else the one that fits the targets.

    Text is classes, and so are at most 20 different whole numbers, in a single column. Several
    columns of 0 and 1 are labels, each by itself. Other numbers are numbers.

    Raises:
        DataError: as for `open_dataset`.

    Cost: the targets of up to 8 recordings, some blocks of each, until one decides.
    """
    if config.task is not None:
        return config
    entries = find_entries(Path(config.data), config.static)
    return config.changed(task=_find_task(entries, layout_of(config)))


def _find_task(entries: Sequence[ManifestEntry], layout: Layout) -> Task:
    first = entries_of(entries, ("train",))[:_RECORDINGS]
    names, columns = set[str](), 1
    for source in open_recordings(first, replace(layout, task="classify")):
        for targets in islice(_targets(source.recording), _BLOCKS):
            names |= {*class_names([targets])}
            columns = targets[:1].size
            if not all(map(is_number, names)):
                return "classify"
            if len(names) > _MOST_CLASSES:
                return "regress"
    values = {*map(float, names)}
    if columns > 1:
        return "multilabel" if values <= {0.0, 1.0} else "regress"
    return "classify" if all(map(float.is_integer, values)) else "regress"


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

    @property
    def layout(self) -> Layout:
        """The columns of inputs and targets, and how files are read."""
        return self.spec.layout

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the outputs; empty for a regression."""
        return self.spec.classes

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
        return self.in_split(data, split, targets=targets)[1]

    def in_split(
        self, data: str | Path | None = None, split: str | None = None, *, targets: bool = True
    ) -> tuple[str, list[Recording]]:
        """The name of the split, and its recordings, as `recordings`."""
        return recordings_for(self.spec, self.config, data, split, targets=targets)

    def recording(self, source: Any, static: Mapping[str, float] | None = None) -> Recording:
        """The inputs of one recording, to predict: of a file, a frame or another table.

        Args:
            source: as for `tt.recording`.
            static: the static features of the recording, by name.

        Raises:
            DataError: a column or a static feature is missing, or the rate differs.
        """
        layout, features = self.spec.layout, dict(static or {})
        if {*features} != {*layout.static}:
            raise DataError(
                f"the model was trained on the static features {listed(layout.static) or 'none'},"
                f" got {listed(features) or 'none'}; give these by static=, or in a manifest as"
                " DATA"
            )
        is_file = isinstance(source, (str, Path))
        table = layout.open(Path(source)) if is_file else as_table(source)
        values = tuple(features[name] for name in layout.static)
        entry = ManifestEntry(Path(table.path).name, "", (), static=values)
        opened = [open_entry(entry, [table], layout, targets=False)]
        checked = check_sources(opened, layout, width=self.spec.features)
        return in_splits(checked, self.spec.standardise)[0][1]


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
