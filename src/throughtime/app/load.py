"""Data sets in splits, and finished runs, as the command line reads them, for Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from throughtime.app.data import (
    as_played,
    choose_split,
    entries_of,
    in_splits,
    open_recordings,
    targets_in,
    task_of,
)
from throughtime.app.model import ModelSpec, load_model
from throughtime.app.run_folder import RunFolder
from throughtime.app.settings import Config
from throughtime.carry.carried import Carried
from throughtime.stream.layout import Layout
from throughtime.stream.manifest import find_recordings
from throughtime.stream.recording import Recording
from throughtime.stream.sources import names_of
from throughtime.stream.targets import class_names, horizons

Task: TypeAlias = Literal["classify", "multilabel", "regress"]


class Splits(dict[str, list[Recording]]):
    """The recordings of a data set by split: `splits["train"]`.

    Attributes:
        classes: the names of the classes, in the order of their indices; empty for numbers.
    """

    classes: tuple[str, ...] = ()


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
        series: other columns by the name of the series, which chunks then have: `chunk["weight"]`.
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
    layout = Layout(
        inputs=names_of(inputs),
        targets=names_of(targets),
        exclude=names_of(exclude),
        static=names_of(static),
        series={name: names_of(columns) for name, columns in (series or {}).items()},
        task=task,
        delimiter=delimiter,
        decimal=decimal,
        rate=rate,
        rate_set=rate is not None,
        ahead=horizons(ahead),
        allow_target_as_input=allow_target_as_input,
    )
    entries = find_recordings(Path(data), layout.static)
    layout = replace(layout, task=task_of(layout, entries))
    splits, _ = in_splits(open_recordings(entries, layout), holdout)
    train = splits.get("train", []) if layout.classify else []
    classes = class_names(targets for recording in train for targets in targets_in(recording))
    played = Splits({name: as_played(part, layout, classes) for name, part in splits.items()})
    played.classes = classes
    return played


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
        spec = self.spec
        entries = find_recordings(Path(data or self.config.data), spec.layout.static)
        named = {entry.split for entry in entries}
        default = "valid" if data is None else "all"
        chosen = split or next((name for name in ("test", "valid") if name in named), default)
        own = entries if chosen == "all" else entries_of(entries, chosen)
        sources = open_recordings(own, spec.layout, targets=targets, width=spec.features)
        splits, _ = in_splits(
            sources, 0.0 if chosen == "all" else self.config.holdout, spec.standardise
        )
        recordings = choose_split(splits, chosen)
        played = as_played(recordings, spec.layout, spec.classes) if targets else recordings
        return chosen, played


def load_run(folder: str | Path, *, trust_code: bool = False) -> Run:
    r"""A finished run: the net, the layout of its data and its standardisation.

    Args:
        folder: that `throughtime train --out` wrote.
        trust_code: execute the file of a model of one's own that the run keeps, though you have not
            trained with it; read it before.

    Returns:
        The run: `run.net` is carried and in evaluation mode, `run.recordings(path)` lays out files
        as in training.

    Raises:
        RunError: the folder holds no run that reached a checkpoint, or its code is not trusted.

    Example:
        >>> import pathlib, tempfile, numpy as np, throughtime as tt
        >>> from throughtime.app.settings import Config
        >>> from throughtime.app.train import Training
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.csv").write_text("u,y\n" + "0.1,0\n0.7,1\n" * 200)
        >>> options = {"lanes": 2, "updates": 2, "hidden": 4}
        >>> paths = {"data": str(folder / "a.csv"), "out": str(folder / "run")}
        >>> config = Config(**paths, targets=("y",), **options)
        >>> Training.begin(config).run()
        >>> run = tt.load_run(folder / "run")
        >>> run.spec.layout.inputs, run.classes
        (('u',), ('0', '1'))
        >>> [recording] = run.recordings(folder / "a.csv", targets=False)
        >>> tt.predict(run.net, recording)[0].shape
        torch.Size([400, 2])
        >>> tt.Predictor(run.net).step(np.array([[0.1]])).shape  # live, one step at a time
        torch.Size([1, 2])
    """
    files = RunFolder(Path(folder))
    config = files.read_config()
    return Run(files.path, *load_model(files.model, trust_code=trust_code), config)
