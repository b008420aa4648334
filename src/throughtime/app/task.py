"""Whether the targets of a run are classes or numbers, where its settings do not say."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from throughtime.app.config import Config
from throughtime.app.data_statistics import class_name
from throughtime.app.dataset import entries_of
from throughtime.app.recordings import DataLayout, OnPhase, open_recordings
from throughtime.stream.formats.table import RowSource, is_number
from throughtime.stream.manifest import find_recordings

_MOST_CLASSES = 20  # that are whole numbers; text may have more
_RECORDINGS, _BLOCKS, _BLOCK = 8, 16, 65_536  # read at most


def resolve_task(config: Config, on_phase: OnPhase | None = None) -> Config:
    """The settings with a task: that of the settings, or else the one that fits the targets.

    Text is classes, and so are at most 20 different whole numbers, in a single column. Other
    numbers are numbers.

    Raises:
        DataError: as for `open_dataset`.

    Cost: the targets of up to 8 recordings, a million of each, until one decides.
    """
    if config.task is not None:
        return config
    settings = replace(config, task="classify")
    entries = entries_of(find_recordings(Path(config.data), config.static), ("train",))
    layout = DataLayout.from_config(settings)
    opened = open_recordings(entries[:_RECORDINGS], layout, on_phase)
    targets = [one.recording.targets for one in opened]
    return replace(config, task=task_of(rows for rows in targets if rows is not None))


def task_of(sources: Iterable[RowSource]) -> Literal["classify", "regress"]:
    """Whether the targets of recordings are classes or numbers."""
    names = set[str]()
    for targets in sources:
        for start in range(0, len(targets), _BLOCK)[:_BLOCKS]:
            block = targets.read(start, min(start + _BLOCK, len(targets)))
            names |= {class_name(value) for value in np.unique(block)} - {""}
            if not all(map(is_number, names)):
                return "classify"
            several = block.ndim > 1 and block.shape[1] > 1
            whole = all(float(name).is_integer() for name in names)
            if several or not whole or len(names) > _MOST_CLASSES:
                return "regress"
    return "classify"
