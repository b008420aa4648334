"""The data set of a run: recordings by split, checked, and the statistics that the model needs.

Shapes: `T` steps, `C` target columns.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.app.config import Config
from throughtime.app.model import ModelSpec, make_stream
from throughtime.app.recordings import (
    SourceRecording,
    Statistics,
    check_sources,
    collect_statistics,
    find_entries,
    layout_of,
    leaks,
    once,
    open_entry,
    open_recordings,
    target_moments,
)
from throughtime.errors import DataError, counted, listed
from throughtime.stream import Recording, Stream, windows
from throughtime.stream.formats import Table
from throughtime.stream.layout import Layout
from throughtime.stream.manifest import (
    ManifestEntry,
    is_folder,
    join_faults,
    manifest_of,
    read_folder,
)
from throughtime.stream.recording import Part, StandardisedRecording, read_blocks
from throughtime.stream.targets import ClassRecording, shift_targets, sorted_classes

_OWNER = "the training split has"  # the classes
_MAX_CLASSES = 1000
_COMPARED = 4  # recordings: fewer may differ by chance


@dataclass(frozen=True)
class Dataset:
    """The recordings of a run, in splits.

    Attributes:
        train: recordings to train on.
        valid: recordings held out.
        statistics: of the training split.
        spec: the model that fits them.
        remarks: facts that a user should know before training.
    """

    train: list[Recording]
    valid: list[Recording]
    statistics: Statistics
    spec: ModelSpec
    remarks: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """The size of the data set and the remarks, as plain values."""
        return {
            "train": len(self.train),
            "valid": len(self.valid),
            "steps": sum(map(len, self.train)),
            "remarks": list(self.remarks),
        }


def open_dataset(config: Config) -> Dataset:
    """Open the recordings, read them once for statistics, and derive the shape of the model.

    Args:
        config: the settings of the run.

    Raises:
        DataError: every fault of the files, or else every fault of the values.
    """
    entries, layout = find_entries(Path(config.data), config.static), layout_of(config)
    sources = open_recordings(entries_of(entries, ("train", "valid")), layout)
    splits, remark = split_recordings(in_splits(sources, config.standardise), config.holdout)
    train, valid = choose_split(splits, "train"), splits.get("valid", [])
    # of unshifted targets: those without a later step are values of the same column
    statistics, held_out = (
        collect_statistics(part, task=layout.task or "classify") for part in (train, valid)
    )
    _check_values(config, statistics, held_out)
    spec = ModelSpec.from_data(config, statistics, sources)
    for recording in valid if {*held_out.classes} - {*spec.classes} and layout.classify else ():
        for _ in read_blocks(ClassRecording(recording, spec.classes, _OWNER)):
            pass  # reading names the step of the unknown class
    if any(entry.split for entry in entries):
        counts = sorted(Counter(entry.split for entry in entries).items())
        remark = f"splits as in the data ({listed(f'{name} {n}' for name, n in counts)})"
    if spec.difference and any(entry.targets for entry in entries):
        raise DataError(
            "--difference adds to the present values of the targets, which it finds among the"
            " columns of the inputs: put the targets into the files of the inputs, or leave"
            " --difference out"
        )
    train, valid = (as_played(part, layout, spec.classes) for part in (train, valid))
    copied = _target_columns(entries, spec)
    remarks = remark, *_remarks(config, sources, train, statistics, held_out, spec, copied)
    if spec.difference or len(layout.steps_ahead) > 1:
        statistics = replace(statistics, targets=target_moments(train, spec.difference))
    return Dataset(train, valid, statistics, spec, remarks)


def recordings_for(
    spec: ModelSpec,
    config: Config,
    data: Path | str | None = None,
    split: str | None = None,
    *,
    targets: bool = True,
) -> tuple[str, list[Recording]]:
    """The recordings of a split with the columns and classes of a model.

    Args:
        spec: of the model.
        config: of its run.
        data: recordings; default: those of the run.
        split: which of them; default: `test`, where there is none `valid`, what was held out of
            the data of the run, or all of other data.
        targets: whether they have targets; without, to predict.

    Returns:
        The name of the split, and its recordings.

    Raises:
        DataError: no such split, or recordings that the model does not fit; all are listed.
    """
    entries = find_entries(Path(data or config.data), spec.layout.static)
    named = {entry.split for entry in entries}
    default = "valid" if data is None else "all"
    chosen = split or next((name for name in ("test", "valid") if name in named), default)
    own = entries if chosen == "all" else entries_of(entries, (chosen,))
    sources = open_recordings(own, spec.layout, targets=targets)
    played, share = _fitting(sources, spec), config.holdout
    splits, _ = split_recordings(played, 0.0 if chosen == "all" else share)
    if split is None and data is None and set(splits) == {"train"}:
        raise DataError(
            "nothing of the data was held out from training: give other data, or write --split"
            " train to take those of the training"
        )
    recordings = choose_split(splits, chosen)
    return chosen, as_played(recordings, spec.layout, spec.classes) if targets else recordings


def open_recording(
    sources: Sequence[Path | Table],
    spec: ModelSpec,
    static: Mapping[str, float] | None = None,
) -> Recording:
    """The inputs in a file, or in several side by side, with the columns of a model, to predict.

    Args:
        sources: its files, or tables that are open already.
        spec: of the model.
        static: the static features of the recording, by name.

    Raises:
        DataError: a column or a static feature is missing, the rate differs, or a file cannot be
            read.
    """
    features, expected = dict(static or {}), spec.layout.static
    if set(features) != set(expected):
        flag = "--static " + ",".join(f"{name}=NUMBER" for name in expected)
        raise DataError(
            f"the model was trained on the static features {listed(expected) or 'none'}, got"
            f" {listed(features) or 'none'}; " + (f"write {flag}" if expected else "leave them out")
        )
    tables = [spec.layout.open(s) if isinstance(s, Path) else s for s in sources]
    name = ";".join(Path(table.path).name for table in tables)
    entry = ManifestEntry(name, "", (), static=tuple(features[feature] for feature in expected))
    source = open_entry(entry, tables, spec.layout, targets=False)
    ((_, recording),) = _fitting(check_sources([source], spec.layout), spec)
    return recording


def _fitting(sources: Sequence[SourceRecording], spec: ModelSpec) -> list[tuple[str, Recording]]:
    """The split of each recording, and the recording.

    Raises:
        DataError: another number of input columns than that of the model.
    """
    for recording in (source.recording for source in sources):
        width = recording.read(0, 1).inputs.size
        if width != spec.features:
            raise DataError(
                f"{recording.name}: has {width} input columns, the model was trained on"
                f" {spec.features} ({listed(spec.layout.inputs)})"
            )
    return in_splits(sources, spec.standardise)


def as_played(
    recordings: Sequence[Recording], layout: Layout, classes: tuple[str, ...]
) -> list[Recording]:
    """The recordings of one split: classes as indices; of a forecast the targets of later steps."""
    indexed = [ClassRecording(r, classes, _OWNER) for r in recordings] if classes else recordings
    ahead = layout.steps_ahead or 0
    return [shift_targets(recording, ahead) for recording in indexed]


def in_splits(sources: Sequence[SourceRecording], standardise: str) -> list[tuple[str, Recording]]:
    """The split of each recording, and the recording, standardised by itself if it is to be."""
    if standardise != "recording":
        return [(one.split, one.recording) for one in sources]
    return [(one.split, StandardisedRecording(one.recording)) for one in sources]


def entries_of(entries: Sequence[ManifestEntry], splits: Sequence[str]) -> list[ManifestEntry]:
    """The entries of some splits and those without a split; all entries if there are none."""
    chosen = [entry for entry in entries if entry.split in {*splits, ""}]
    return chosen or list(entries)


def split_recordings(
    recordings: Sequence[tuple[str, Recording]], holdout: float
) -> tuple[dict[str, list[Recording]], str]:
    """Recordings by split, and in words where the splits come from.

    Without splits in a manifest or by sub-folders, the last recordings by name are held out as
    `valid`; of a single recording, its end.
    """
    splits = dict[str, list[Recording]]()
    for name, recording in recordings:
        splits.setdefault(name or "train", []).append(recording)
    if any(name for name, _ in recordings):
        return splits, ""
    train = splits.get("train", [])
    if holdout == 0:
        return splits, "nothing held out (--holdout 0): the scores are those of the training data"
    if len(train) > 1:
        count = max(1, round(len(train) * holdout))
        remark = f"{count} of {len(train)} recordings held out, the last by name"
        return {"train": train[:-count], "valid": train[-count:]}, remark
    (whole,), cut = train, round(len(train[0]) * (1 - holdout))
    if not 0 < cut < len(whole):
        raise DataError(
            f"recording '{whole.name}' has {counted(len(whole), 'step')}, too few to hold out a"
            f" share of {holdout}; take --holdout 0"
        )
    parts: list[Recording] = [Part(whole, 0, cut), Part(whole, cut, len(whole))]
    return {
        "train": parts[:1],
        "valid": parts[1:],
    }, f"the last {holdout:.0%} of the recording held out"


def choose_split(splits: Mapping[str, list[Recording]], name: str) -> list[Recording]:
    """The recordings of one split; `all` is every one.

    Raises:
        DataError: there is no such split.
    """
    chosen = [r for rs in splits.values() for r in rs] if name == "all" else splits.get(name, [])
    if not chosen:
        counts = listed(f"{k} ({len(v)})" for k, v in splits.items())
        hint = (
            "; write train into the column 'split' of those to train on" if name == "train" else ""
        )
        raise DataError(f"no recordings in split '{name}'; there are {counts}{hint}")
    return chosen


def training_stream(dataset: Dataset, config: Config, ranks: int) -> Stream:
    """The recordings to train on, in the lanes of this rank."""
    recordings: list[Recording] = dataset.train
    if config.train_on == "windows":
        recordings = list(windows(recordings, config.chunk_steps()))
    names = "seed", "offset", "hand_off", "workers"
    how = {name: getattr(config, name) for name in names}
    return make_stream(recordings, dataset.spec, config, config.lanes // ranks, **how)


def _check_values(config: Config, train: Statistics, valid: Statistics) -> None:
    """Refuse missing inputs that are not masked, and targets that the task cannot have."""
    faults = once(train.faults | valid.faults) if config.missing == "error" else []
    expected = "0 or 1" if config.task == "multilabel" else "finite"
    faults += [
        f"{fault}; targets must be {expected}, or NaN where there are none"
        for fault in once(train.bad_targets | valid.bad_targets)
    ]
    if faults:
        raise DataError(
            join_faults(faults) + ". Clean the files, or mask steps without inputs: --missing mask"
        )
    classes = sorted_classes(train.classes)
    if config.task in {None, "classify"} and not 2 <= len(classes) <= _MAX_CLASSES:
        raise DataError(
            f"the training split has {counted(len(classes), 'class', 'classes')}"
            f" ({listed(classes)}), expected 2 to {_MAX_CLASSES}. Name another column with"
            " --targets, or is it --task regress?"
        )
    if config.task not in {None, "classify"} and not train.targets.count.all():
        raise DataError(
            "a target column of the training split has no value at all; regression needs some"
        )


def _remarks(
    config: Config,
    sources: Sequence[SourceRecording],
    train: Sequence[Recording],
    statistics: Statistics,
    held_out: Statistics,
    spec: ModelSpec,
    copied: list[str],
) -> Iterator[str]:
    """What a user may not expect of the data: files, rows and values left out, copies and leaks."""
    data, trained = Path(config.data), {v: k for k, v in statistics.checksums.items()}
    is_list = manifest_of(data) is not None or not is_folder(data)
    others = () if is_list else read_folder(data).others
    frame, lanes = f"they fill no frame of {config.frame_size}", config.lanes
    for count, noun, why in (
        (len(others), "file", f"of no known format: {listed(others)}"),
        (sum(one.left_out for one in sources), "row", frame),
        (sum(one.lost for one in sources), "interval", frame),
        (statistics.missing, "step", "the inputs are NaN or infinite"),
        (statistics.missing_targets, "step", "there is no target"),
    ):
        if count:
            yield f"{counted(count, noun)} left out: {why}"
    if len(train) < lanes and config.train_on == "stream":
        yield f"cut into {lanes} parts, one a lane (--lanes {len(train)} keeps recordings whole)"
    for name, checksum in held_out.checksums.items():
        if checksum in trained:  # such as a copy of a file
            yield (
                f"held-out recording '{name}' has the values of '{trained[checksum]}', which is"
                " trained on"
            )
    apart = np.std(statistics.means, axis=0)
    within = np.sqrt(np.maximum(statistics.inputs.scale**2 - apart**2, 0))
    differ = [n for n, far in zip(spec.layout.inputs, apart > within, strict=False) if far]
    if differ and len(statistics.means) >= _COMPARED and spec.standardise == "split":
        yield (
            f"input {listed(differ)} differs more between recordings than within them; if its level"
            " is of no meaning, --standardise first:400 takes that of the first steps of each"
        )
    _, steps = next(read_blocks(max(train, key=len)))
    columns = zip(spec.target_names, leaks(steps, spec.layout.inputs), strict=False)
    named = {f"determines {target}": names for target, names in columns}
    named["is a column of the targets files"] = copied
    for what, names in () if config.allow_target_as_input else named.items():
        if names:
            yield (
                f"input {listed(names)} {what}; if it is not known when the net runs, leave it out"
                " of --inputs"
            )


def _target_columns(entries: Sequence[ManifestEntry], spec: ModelSpec) -> list[str]:
    """The inputs that are columns of a targets file as well."""
    layout, files = spec.layout, [entry.targets for entry in entries if entry.targets is not None]
    if not files or layout.ahead:
        return []
    own = layout.open(files[0]).columns  # those called 0, 1, ... are without a name
    return [name for name in layout.inputs if name in own and not name.isdecimal()]
