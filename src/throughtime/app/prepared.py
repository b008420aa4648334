"""Prepared: the data of a run, opened, looked at and split, with what a user should know of them before training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from throughtime.app import data as datasets
from throughtime.app.config import Config
from throughtime.app.form import Form
from throughtime.app.manifest import Files, find
from throughtime.app.model import Spec
from throughtime.app.opened import Opened, open_recordings
from throughtime.app.survey import Survey, blocks, sorted_classes, survey
from throughtime.errors import ConfigError, DataError
from throughtime.stream import Recording

_IDLE = 0.05  # of an epoch: more of it is worth a remark


@dataclass(frozen=True)
class Prepared:
    """The data of a run, opened, surveyed and split."""

    train: list[Recording]
    valid: list[Recording]
    found: Survey
    spec: Spec
    remarks: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """What was found, as plain values."""
        return {
            "train": len(self.train),
            "valid": len(self.valid),
            "steps": sum(map(len, self.train)),
            "remarks": list(self.remarks),
        }


def prepare(config: Config) -> Prepared:
    """Opens the recordings, looks at all that training will see, and settles the model's shape.

    Raises:
        DataError: whatever is wrong with the data: all faults of the files at once, then all of the
            survey.
    """
    check_device(config.device)
    listed = find(Path(config.data), config.static)
    opened = open_recordings(datasets.of_splits(listed, ("train", "valid")), Form.of(config))
    checked = [
        (one.split, datasets.Numeric(one.recording, config.task == "regress")) for one in opened
    ]
    splits, whence = datasets.split(checked, config.holdout)
    train, valid = datasets.choose(splits, "train"), splits.get("valid", [])
    classify = config.task == "classify"
    found, later = survey(train, classify=classify), survey(valid, classify=classify)
    _refuse(config, found, later)
    if classify:
        train, valid = _labelled(train, valid, found)
        _refuse_unknown(valid, later, found)
    elif not len(found.targets.mean) or not found.targets.count.all():
        raise DataError(
            "a target column of the training split has no value at all; regression needs some"
        )
    first = opened[0].recording
    rate = next((rate.value for one in opened for rate in one.rates), None)
    spec = Spec.of(config, found, first.input_columns, first.target_columns, rate)
    remarks = (
        *_of_files(listed, whence),
        *_of_cut(config, len(train)),
        *_of_survey(found, spec),
        *_of_frames(opened, config.frame),
    )
    return Prepared(train, valid, found, spec, remarks)


def check_device(device: str) -> None:
    """Refuses a device on which nothing can be computed here."""
    if device == "meta":
        raise ConfigError("device=meta: holds no numbers; take --device cpu")
    try:
        torch.empty(0, device=device)
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ) as error:  # what torch raises for a device that is not there
        raise ConfigError(
            f"device={device}: cannot be used here ({str(error).splitlines()[0]}); take"
            " --device cpu"
        ) from error


def _refuse(config: Config, found: Survey, later: Survey) -> None:
    faults = found.faults + later.faults if config.missing == "error" else []
    faults += [
        f"{fault}; targets must be finite, or NaN where there are none"
        for fault in found.bad_targets + later.bad_targets
    ]
    if faults:
        raise DataError(
            "; ".join(faults) + ". Clean the files, or mask steps without inputs: --missing mask"
        )


def _refuse_unknown(valid: list[Recording], later: Survey, found: Survey) -> None:
    """Reads the held-out recordings again to name the place, if there is a class that training never sees."""
    if set(later.classes) - set(found.classes):
        for recording in valid:
            for _ in blocks(recording):
                pass


def _labelled(
    train: list[Recording], valid: list[Recording], found: Survey
) -> tuple[list[Recording], list[Recording]]:
    classes = sorted_classes(found.classes)
    if len(classes) < 2:
        raise DataError(
            f"the training split has {len(classes)} class ({', '.join(classes)}); classification"
            " needs two or more. Is it --task regress?"
        )
    if len(classes) > 1000:
        raise DataError(
            f"the training split has {len(classes)} classes, such as {', '.join(classes[:3])}; is"
            " it --task regress?"
        )
    named = [[datasets.Labelled(r, classes) for r in part] for part in (train, valid)]
    return list(named[0]), list(named[1])


def _of_files(listed: Sequence[Files], whence: str) -> list[str]:
    named = Counter(one.split for one in listed)
    return [
        whence
        + (
            f" ({', '.join(f'{name} {count}' for name, count in named.items())})"
            if len(named) > 1
            else ""
        )
    ]


def _of_cut(config: Config, trained: int) -> list[str]:
    """Whether recordings are cut into parts, and from where the parts go on."""
    if config.train_on == "windows":
        return []
    if trained >= config.lanes:
        return (
            ["hand_off has nothing to hand on: there are recordings for all lanes, and none is cut"]
            if config.hand_off
            else []
        )
    state = (
        "from the state in which the part before it ended the last epoch"
        if config.hand_off
        else "from a zero state"
    )
    return [
        f"cut into {config.lanes} parts, one for each lane, each {state} (--lanes {trained} keeps"
        " recordings whole)"
    ]


def _of_survey(found: Survey, spec: Spec) -> list[str]:
    remarks: list[str] = []
    clocks = [name for name, rises in zip(spec.inputs, found.rising, strict=False) if rises]
    if clocks:
        remarks.append(
            f"input {', '.join(clocks)} only ever rises: a clock? name the inputs with --inputs to"
            " leave it out"
        )
    if found.missing:
        remarks.append(f"{found.missing} steps masked: their inputs are NaN or infinite")
    if found.missing_targets:
        remarks.append(f"{found.missing_targets} steps masked: they have no target")
    return remarks


def _of_frames(opened: Sequence[Opened], frame: int) -> list[str]:
    left, lost = sum(one.left_out for one in opened), sum(one.lost for one in opened)
    remarks = (
        [f"{left} rows left out: at the end of their recordings they fill no frame of {frame}"]
        if left
        else []
    )
    return remarks + (
        [f"{lost} intervals left out: they cover the last row of no frame of {frame}"]
        if lost
        else []
    )


def of_idle(share: float) -> list[str]:
    """What share of the first epoch lanes have nothing to play, if it is much."""
    if share <= _IDLE:
        return []
    return [
        f"lanes are idle for {share:.0%} of an epoch: they are of different lengths (fewer --lanes"
        " waste less, and so do parts)"
    ]
