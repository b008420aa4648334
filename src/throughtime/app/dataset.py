"""The data set of a run: recordings by split, checked, and the statistics that the model needs.

Shapes: `T` steps, `C` target columns.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from throughtime.app.baselines import baseline_lags
from throughtime.app.config import Config
from throughtime.app.data_statistics import (
    StandardisedRecording,
    Statistics,
    collect_statistics,
    leaks,
    read_blocks,
    target_moments,
)
from throughtime.app.model import ModelSpec
from throughtime.app.recordings import (
    OnPhase,
    SourceRecording,
    check_sources,
    layout_of,
    open_entry,
    open_recordings,
)
from throughtime.errors import DataError, counted, listed
from throughtime.stream import Recording, Stream, windows
from throughtime.stream.formats import Table
from throughtime.stream.formats.times import time_span
from throughtime.stream.layout import Layout
from throughtime.stream.manifest import (
    ManifestEntry,
    find_recordings,
    is_folder,
    join_faults,
    manifest_of,
    read_folder,
)
from throughtime.stream.recording import Part
from throughtime.stream.targets import ClassRecording, shift_targets, sorted_classes

_OWNER = "the training split has"  # the classes
_MAX_IDLE = 0.05  # share of an epoch; more is worth a remark
_MAX_CLASSES = 1000
_MAX_COPIES = 3  # named in the remarks
_COMPARED = 4  # recordings: fewer may differ by chance


@dataclass(frozen=True)
class Dataset:
    """The recordings of a run, in splits.

    Attributes:
        train: recordings to train on.
        valid: recordings held out.
        statistics: of the training split.
        held_out: of the other one.
        spec: the model that fits them.
        remarks: facts that a user should know before training.
    """

    train: list[Recording]
    valid: list[Recording]
    statistics: Statistics
    held_out: Statistics
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

    def checksums(self) -> dict[str, str]:
        """A checksum of the values of each recording, by its name and split."""
        return {
            f"the checksum of recording '{name}' in split {split}": checksum
            for split, statistics in (("train", self.statistics), ("valid", self.held_out))
            for name, checksum in statistics.checksums.items()
        } | {key: repr(value) for key, value in asdict(self.spec).items()}


def open_dataset(config: Config, on_phase: OnPhase | None = None) -> Dataset:
    """Open the recordings, read them once for statistics, and derive the shape of the model.

    Args:
        config: the settings of the run.
        on_phase: called as recordings are opened and read.

    Raises:
        DataError: every fault of the files, or else every fault of the values.
    """
    listed = find_recordings(Path(config.data), config.static)
    layout = layout_of(config)
    sources = open_recordings(entries_of(listed, ("train", "valid")), layout, on_phase)
    source = "folders" if manifest_of(Path(config.data)) is None else "manifest"
    splits, remark = split_recordings(
        in_splits(sources, config.standardise), config.holdout, source
    )
    train, valid = choose_split(splits, "train"), splits.get("valid", [])
    total, done = sum(map(len, (*train, *valid))), 0

    def advance(steps: int) -> None:
        nonlocal done
        done += steps
        if on_phase is not None:
            on_phase("reading recordings", done, total)

    # of unshifted targets: those without a later step are values of the same column
    statistics, held_out = (
        collect_statistics(part, task=layout.task or "classify", on_steps=advance)
        for part in (train, valid)
    )
    _check_values(config, statistics, held_out)
    if layout.classify:
        classes = _classes(statistics)
        if set(held_out.classes) - set(statistics.classes):
            for recording in valid:  # reading names the step of the unknown class
                for _ in read_blocks(ClassRecording(recording, classes, _OWNER)):
                    pass
    elif not statistics.targets.count.all():
        raise DataError(
            "a target column of the training split has no value at all; regression needs some"
        )
    spec = ModelSpec.from_data(config, statistics, sources)
    remarks = (
        remark + _split_counts(listed),
        *_ahead_remarks(layout),
        *_season_remarks(config, layout),
        *_folder_remarks(Path(config.data)),
        *_lane_remarks(config, len(train)),
        *_statistics_remarks(statistics, spec),
        *_time_remarks(sources, layout),
        *_copy_remarks(statistics, held_out),
        *_frame_remarks(sources, config.frame_size),
    )
    _check_present(train[0], spec)
    train, valid = (as_played(part, layout, spec.classes) for part in (train, valid))
    remarks += tuple(_leak_remarks(listed, train, spec))
    if spec.difference or len(layout.steps_ahead) > 1:
        statistics = replace(statistics, targets=target_moments(train, spec.difference))
    return Dataset(train, valid, statistics, held_out, spec, remarks)


def recordings_for(
    spec: ModelSpec,
    config: Config,
    data: Path | None = None,
    split: str | None = None,
    *,
    targets: bool = True,
    on_phase: OnPhase | None = None,
) -> tuple[str, list[Recording]]:
    """The recordings of a split with the columns and classes of a model.

    Args:
        spec: of the model.
        config: of its run.
        data: recordings; default: those of the run.
        split: which of them; default: `test`, where there is none `valid`, what was held out of
            the data of the run, or all of other data.
        targets: whether they have targets; without, to predict.
        on_phase: called as recordings are opened.

    Returns:
        The name of the split, and its recordings.

    Raises:
        DataError: no such split, or recordings that the model does not fit; all are listed.
    """
    entries = find_recordings(data or Path(config.data), spec.layout.static)
    unnamed = split is None
    if split is None:
        usual = [name for name in ("test", "valid") if any(e.split == name for e in entries)]
        split = usual[0] if usual else "valid" if data is None else "all"
    chosen = entries if split == "all" else entries_of(entries, (split,))
    sources = open_recordings(chosen, spec.layout, on_phase, targets=targets)
    numeric = _fitting(sources, spec)
    splits, _ = split_recordings(numeric, 0.0 if split == "all" else config.holdout)
    if unnamed and data is None and set(splits) == {"train"}:
        raise DataError(
            "nothing of the data was held out from training: give other data, or write --split"
            " train to take those of the training"
        )
    recordings = choose_split(splits, split)
    return split, as_played(recordings, spec.layout, spec.classes) if targets else recordings


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
        flag = ",".join(f"{name}=NUMBER" for name in expected)
        raise DataError(
            f"the model was trained on the static features {listed(expected) or 'none'}, got"
            f" {listed(features) or 'none'}; "
            + (f"write --static {flag}" if flag else "leave out --static")
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
    for source in sources:
        width = source.recording.read(0, 1).inputs.size
        if width != spec.features:
            raise DataError(
                f"{source.recording.name}: has {width} input columns, the model was trained on"
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
    recordings: Sequence[tuple[str, Recording]], holdout: float, source: str = "manifest"
) -> tuple[dict[str, list[Recording]], str]:
    """Recordings by split, and in words where the splits come from.

    Without splits in a manifest or by sub-folders, the last recordings by name are held out as
    `valid`; of a single recording, its end.
    """
    if any(name for name, _ in recordings):
        splits: dict[str, list[Recording]] = {}
        for name, recording in recordings:
            splits.setdefault(name or "train", []).append(recording)
        return splits, f"splits as in the {source}"
    everything = [recording for _, recording in recordings]
    if holdout == 0:
        remark = "nothing held out (--holdout 0): the scores are those of the training data"
        return {"train": everything}, remark
    if len(everything) == 1:
        whole, cut = everything[0], round(len(everything[0]) * (1 - holdout))
        if not 0 < cut < len(whole):
            raise DataError(
                f"recording '{whole.name}' has {counted(len(whole), 'step')}, too few to hold out a"
                f" share of {holdout}; take --holdout 0"
            )
        parts: list[Recording] = [Part(whole, 0, cut), Part(whole, cut, len(whole))]
        remark = f"the last {holdout:.0%} of the recording held out"
        return {"train": parts[:1], "valid": parts[1:]}, remark
    count = max(1, round(len(everything) * holdout))
    remark = f"{count} of {len(everything)} recordings held out, the last by name"
    return {"train": everything[:-count], "valid": everything[-count:]}, remark


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
    return Stream(
        recordings,
        config.lanes // ranks,
        config.chunk_steps(),
        seed=config.seed,
        warm_up=config.warm_up,
        dtype=dataset.spec.torch_dtype,
        missing=config.missing,
        offset=config.offset,
        hand_off=config.hand_off,
        workers=config.workers,
    )


def changed_data(
    spec: ModelSpec,
    statistics: Mapping[str, Tensor],
    before: Mapping[str, Any],
    weights: Mapping[str, Tensor],
) -> list[str]:
    """How the data differ from those of a checkpoint, in words.

    What its description lacks was not known then and is no difference, nor is a rate found since.

    Args:
        spec: of the model that fits the data.
        statistics: those of the training split.
        before: the spec in the checkpoint, as plain values.
        weights: the weights and statistics in the checkpoint.
    """
    now = asdict(spec)
    return [
        f"{key} were {old[key]!r} and are now {value!r}"
        for new, old in ((now["layout"], before["layout"]), (now, before))
        for key, value in new.items()
        if key != "layout" and old.get(key, value) != value and (key, old[key]) != ("rate", None)
    ] or [
        f"'{name}', a statistic of the training split, was {weights[name].tolist()}"
        f" and is now {value.tolist()}"
        for name, value in statistics.items()
        if not torch.equal(weights[name], value.cpu())
    ]


def _check_values(config: Config, train: Statistics, valid: Statistics) -> None:
    faults = train.faults + valid.faults if config.missing == "error" else []
    expected = "0 or 1" if config.task == "multilabel" else "finite"
    faults += [
        f"{fault}; targets must be {expected}, or NaN where there are none"
        for fault in train.bad_targets + valid.bad_targets
    ]
    if faults:
        raise DataError(
            join_faults(faults) + ". Clean the files, or mask steps without inputs: --missing mask"
        )


def _classes(statistics: Statistics) -> tuple[str, ...]:
    classes = sorted_classes(statistics.classes)
    if 2 <= len(classes) <= _MAX_CLASSES:
        return classes
    needs = "" if len(classes) > 1 else "; classification needs two or more"
    names = ", ".join(classes[:3]) + (", ..." if len(classes) > 3 else "")
    raise DataError(
        f"the training split has {counted(len(classes), 'class', 'classes')} ({names}){needs}. Is"
        " it --task regress?"
    )


def _folder_remarks(data: Path) -> list[str]:
    """Files of a folder that are no recordings."""
    if not is_folder(data) or manifest_of(data) is not None:
        return []
    others = read_folder(data).others
    what = f"{counted(len(others), 'file')} of an unknown format left out: {listed(others)}"
    return [what] if others else []


def _split_counts(entries: Sequence[ManifestEntry]) -> str:
    counts = Counter(entry.split for entry in entries)
    if len(counts) < 2:
        return ""
    return f" ({listed(f'{name} {count}' for name, count in sorted(counts.items()))})"


def _ahead_remarks(layout: Layout) -> list[str]:
    if not layout.ahead:
        return []
    steps = layout.steps_ahead
    which = counted(steps[0], "step") if len(steps) == 1 else f"{listed(steps)} steps"
    last = counted(steps[-1], "step")
    return [f"targets are {which} later: the last {last} of each recording have none"]


def _season_remarks(config: Config, layout: Layout) -> list[str]:
    """Where the comparison with the last season says nothing."""
    if config.season is None:
        return []
    if layout.task == "multilabel":
        return ["--season has no effect: labels are not compared with baselines"]
    if "season" not in baseline_lags(layout.steps_ahead, config.season // layout.frame_size):
        return [f"--season {config.season} has no effect: the value a season before is that of now"]
    return []


def _check_present(recording: Recording, spec: ModelSpec) -> None:
    """Refuse inputs that have the name of a target and are not its present value."""
    if not spec.difference:
        return
    _, steps = next(read_blocks(recording))
    if steps.targets is None:
        return
    inputs = steps.inputs.reshape(len(steps.inputs), -1)
    for i, (name, now) in enumerate(
        zip(spec.layout.targets, inputs.T[list(spec.difference)], strict=False)
    ):
        target = steps.targets.reshape(len(inputs), -1)[:, i]
        known = np.isfinite(now) & np.isfinite(target)
        if not np.allclose(now[known], target[known], rtol=1e-5):
            raise DataError(
                f"recording '{recording.name}': the input '{name}' is not the present value of the"
                f" target '{name}', to which --difference adds; leave it out, or rename one"
            )


def _leak_remarks(
    entries: Sequence[ManifestEntry], train: Sequence[Recording], spec: ModelSpec
) -> list[str]:
    """Inputs that give a target away, or that a targets file has as a column, too."""
    layout, longest = spec.layout, max(train, key=len)
    if layout.allow_target_as_input:
        return []
    _, steps = next(read_blocks(longest))
    columns = leaks(steps, layout.inputs)
    named = {
        f"determines {target}": n for target, n in zip(spec.target_names, columns, strict=False)
    }
    file = next((entry.targets for entry in entries if entry.targets is not None), None)
    if file is not None and not layout.ahead:
        own = layout.open(file).columns
        named["is a column of the targets files"] = [
            n
            for n in layout.inputs
            if n in own and not n.isdecimal()  # else it is without a name
        ]
    return [
        f"input {listed(names)} {what}; if it is not known when the net runs,"
        f" {_without(names, spec)}"
        for what, names in named.items()
        if names
    ]


def _without(names: Sequence[str], spec: ModelSpec) -> str:
    """The flag that leaves inputs out; a target cannot be excluded."""
    if not {*names} & {*spec.layout.targets}:
        return f"--exclude {','.join(names)}"
    return f"--inputs {','.join(name for name in spec.layout.inputs if name not in names)}"


def _lane_remarks(config: Config, recordings: int) -> list[str]:
    """Whether recordings are cut into parts, and from which state the parts start."""
    if config.train_on == "windows":
        return []
    if recordings >= config.lanes:
        return [
            "--hand-off has no effect: there are recordings for all lanes, and none is cut"
        ] * config.hand_off
    state = (
        "from the state in which the part before it ended the last epoch"
        if config.hand_off
        else "from a zero state"
    )
    whole = f"--lanes {recordings} keeps recordings whole"
    parts = counted(config.lanes, "part")
    return [f"cut into {parts}, one for each lane, each {state} ({whole})"]


def _statistics_remarks(statistics: Statistics, spec: ModelSpec) -> list[str]:
    remarks: list[str] = []
    names = zip(spec.layout.inputs, statistics.rising, strict=False)
    clocks = [name for name, rises in names if rises]
    if clocks:
        remarks.append(
            f"input {listed(clocks)} only ever rises: a clock? --exclude {clocks[0]} leaves it out"
        )
    means = np.array(statistics.means)
    apart = np.where(np.isnan(means), statistics.inputs.mean, means).std(axis=0)
    within = np.sqrt(np.maximum(statistics.inputs.scale**2 - apart**2, 0))
    differ = [n for n, far in zip(spec.layout.inputs, apart > within, strict=False) if far]
    if differ and len(means) >= _COMPARED and spec.standardise == "split":
        remarks.append(
            f"input {listed(differ)} differs more between recordings than within them; if its level"
            " is of no meaning, --standardise first:400 takes that of the first steps of each"
        )
    own = spec.standardise not in {"split", "none"} and not spec.difference
    if own and spec.layout.task == "regress":
        remarks.append(
            "targets are standardised by the training split: those of a new recording are not known"
            " when the net runs. If a forecast has levels of its own, take first:400 and"
            " --difference"
        )
    if statistics.missing:
        remarks.append(
            f"{counted(statistics.missing, 'step')} masked: their inputs are NaN or infinite"
        )
    if statistics.missing_targets:
        remarks.append(f"{counted(statistics.missing_targets, 'step')} masked: they have no target")
    return remarks


def _time_remarks(sources: Sequence[SourceRecording], layout: Layout) -> list[str]:
    """The column of time stamps, which is no input: its spacing, and where it has gaps."""
    named = [(s.recording.name, *s.times) for s in sources if s.times is not None]
    if not named:
        return []
    spacing = Counter(summary.spacing for _, _, summary in named)
    usual = spacing.most_common(1)[0][0]
    remark = f"time stamps in '{named[0][1]}', every {time_span(usual)}: no input"
    uneven = [s.recording.name for s in sources if s.times and not (s.rates or s.times[1].is_even)]
    if uneven and not layout.rate_set:
        whose = f" in {listed(uneven)}" if len(uneven) < len(named) else ""
        remark += f"; not evenly spaced{whose}: no rate (--rate sets rows per second)"
    gaps = [(s.longest, s.gaps, name) for name, _, s in named if s.gaps]
    if gaps:
        (longest, row), _, name = max(gaps)
        total = sum(count for _, count, _ in gaps)
        remark += (
            f"; {counted(total, 'gap')}, the longest of {time_span(longest)} before"
            f" row {row} of '{name}'"
        )
    missing = sum(summary.missing for _, _, summary in named)
    return [remark + f"; {missing} are empty" * bool(missing)]


def _copy_remarks(train: Statistics, valid: Statistics) -> list[str]:
    """Held-out recordings with the values of one that is trained on, such as a copy of its file."""
    trained = {checksum: name for name, checksum in train.checksums.items()}
    return [
        f"held-out recording '{name}' has the values of '{trained[checksum]}', which is trained on"
        for name, checksum in valid.checksums.items()
        if checksum in trained
    ][:_MAX_COPIES]


def _frame_remarks(sources: Sequence[SourceRecording], frame_size: int) -> list[str]:
    left, lost = sum(one.left_out for one in sources), sum(one.lost for one in sources)
    remarks = (
        (left, "row", f"at the end of their recordings they fill no frame of {frame_size}"),
        (lost, "interval", f"they cover the last row of no frame of {frame_size}"),
    )
    return [f"{counted(count, noun)} left out: {why}" for count, noun, why in remarks if count]


def idle_remarks(share: float) -> tuple[str, ...]:
    """A remark if lanes have nothing to play for a large share of an epoch."""
    if share <= _MAX_IDLE:
        return ()
    advice = "fewer --lanes waste less, and so do parts"
    return (f"lanes are idle for {share:.0%} of an epoch: recordings differ in length ({advice})",)
