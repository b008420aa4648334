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
    collect_statistics,
    find_entries,
    layout_of,
    leaks,
    open_recordings,
    target_moments,
)
from throughtime.errors import DataError, counted, listed
from throughtime.stream import Recording, Stream
from throughtime.stream.layout import Layout
from throughtime.stream.manifest import (
    ManifestEntry,
    is_folder,
    join_faults,
    manifest_of,
    read_folder,
)
from throughtime.stream.recording import Part, StandardisedRecording, read_blocks
from throughtime.stream.targets import ClassRecording, shift_targets

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
    if any(entry.split for entry in entries):
        counts = sorted(Counter(entry.split for entry in entries).items())
        remark = f"splits as in the data ({listed(f'{name} {n}' for name, n in counts)})"
    files = [entry.targets for entry in entries if entry.targets is not None]
    if spec.difference and files:
        raise DataError(
            "--difference adds to the present values of the targets, which it finds among the"
            " columns of the inputs: put the targets into the files of the inputs, or leave"
            " --difference out"
        )
    train, valid = (as_played(part, layout, spec.classes) for part in (train, valid))
    remarks = [remark, *_left_out(config, statistics)]
    if len(train) < config.lanes:
        whole = f"--lanes {len(train)} keeps recordings whole"
        remarks.append(f"cut into {config.lanes} parts, one a lane ({whole})")
    remarks += _levels(statistics, spec)
    # those called 0, 1, ... are without a name
    copied = layout.open(files[0]).columns if files and not layout.ahead else ()
    remarks += _leaks(train, spec, [name for name in copied if not name.isdecimal()])
    if spec.difference or len(layout.ahead) > 1:
        statistics = replace(statistics, targets=target_moments(train, spec.difference))
    return Dataset(train, valid, statistics, spec, tuple(remarks))


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
    sources = open_recordings(own, spec.layout, targets=targets, width=spec.features)
    share = 0.0 if chosen == "all" else config.holdout
    splits, _ = split_recordings(in_splits(sources, spec.standardise), share)
    if split is None and data is None and set(splits) == {"train"}:
        raise DataError(
            "nothing of the data was held out from training: give other data, or write --split"
            " train to take those of the training"
        )
    recordings = choose_split(splits, chosen)
    return chosen, as_played(recordings, spec.layout, spec.classes) if targets else recordings


def as_played(
    recordings: Sequence[Recording], layout: Layout, classes: tuple[str, ...]
) -> list[Recording]:
    """The recordings of one split: classes as indices; of a forecast the targets of later steps."""
    if classes:
        owner = "the training split has"
        recordings = [ClassRecording(recording, classes, owner) for recording in recordings]
    return [shift_targets(recording, layout.ahead or 0) for recording in recordings]


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
    return {
        "train": [Part(whole, 0, cut)],
        "valid": [Part(whole, cut, len(whole))],
    }, f"the last {holdout:.0%} of the recording held out"


def choose_split(splits: Mapping[str, list[Recording]], name: str) -> list[Recording]:
    """The recordings of one split; `all` is every one.

    Raises:
        DataError: there is no such split.
    """
    chosen = [r for rs in splits.values() for r in rs] if name == "all" else splits.get(name, [])
    if not chosen:
        counts = listed(f"{k} ({len(v)})" for k, v in splits.items())
        raise DataError(
            f"no recordings in split '{name}'; there are {counts}. Name one of them, or write the"
            " split into the manifest"
        )
    return chosen


def training_stream(dataset: Dataset, config: Config, ranks: int) -> Stream:
    """The recordings to train on, in the lanes of this rank."""
    return make_stream(
        dataset.train,
        dataset.spec,
        config,
        config.lanes // ranks,
        seed=config.seed,
        hand_off=config.hand_off,
    )


def _check_values(config: Config, train: Statistics, valid: Statistics) -> None:
    """Refuse missing inputs that are not masked, and targets that the task cannot have."""
    faults = [*train.bad_targets, *valid.bad_targets]
    if config.missing == "error" and (absent := [*train.faults, *valid.faults]):
        faults.append(
            f"{join_faults(absent)}. Clean the files, or mask steps without inputs: --missing mask"
        )
    if config.task in {None, "classify"}:
        if not 2 <= len(train.classes) <= _MAX_CLASSES:
            faults.append(
                f"the training split has {counted(len(train.classes), 'class', 'classes')}"
                f" ({listed(train.classes)}), expected 2 to {_MAX_CLASSES}. Name another column"
                " with --targets, or is it --task regress?"
            )
        if unknown := sorted({*valid.classes} - {*train.classes}):
            faults.append(
                f"the recordings held out have the classes {listed(unknown)}, which the training"
                f" split has not ({listed(train.classes)}); hold out others, or name a split"
            )
    elif not train.targets.count.all():
        faults.append("a target column of the training split has no value at all")
    if faults:
        raise DataError(join_faults(faults))


def _left_out(config: Config, statistics: Statistics) -> Iterator[str]:
    """The files and steps that are not trained on."""
    data = Path(config.data)
    is_list = manifest_of(data) is not None or not is_folder(data)
    others = () if is_list else read_folder(data).others
    for count, noun, why in (
        (len(others), "file", f"of no known format: {listed(others)}"),
        (statistics.missing, "step", "the inputs are NaN or infinite"),
        (statistics.missing_targets, "step", "there is no target"),
    ):
        if count:
            yield f"{counted(count, noun)} left out: {why}"


def _levels(statistics: Statistics, spec: ModelSpec) -> Iterator[str]:
    """The inputs whose level is another in each recording."""
    apart = np.std(statistics.means, axis=0)
    within = np.sqrt(np.maximum(statistics.inputs.scale**2 - apart**2, 0))
    differ = [n for n, far in zip(spec.layout.inputs, apart > within, strict=False) if far]
    if differ and len(statistics.means) >= _COMPARED and spec.standardise == "split":
        yield (
            f"input {listed(differ)} differs more between recordings than within them; if its level"
            " is of no meaning, --standardise first:400 takes that of the first steps of each"
        )


def _leaks(train: Sequence[Recording], spec: ModelSpec, copied: Sequence[str]) -> Iterator[str]:
    """The inputs that determine a target, or that a targets file has as well."""
    inputs = spec.layout.inputs
    _, steps = next(read_blocks(max(train, key=len)))
    columns = zip(spec.target_names, leaks(steps, inputs), strict=False)
    named = {f"determines {target}": names for target, names in columns}
    named["is a column of the targets files"] = [name for name in inputs if name in copied]
    for what, names in named.items():
        if names:
            yield (
                f"input {listed(names)} {what}; if it is not known when the net runs, leave it out"
                " of --inputs"
            )
