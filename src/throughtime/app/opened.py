"""Opened: the recordings of a list of files, with the columns and labels that are asked for,
checked against each other.

Shapes: `T` steps, `D` input features, `S` static features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from throughtime.app import labels
from throughtime.app.form import Form
from throughtime.app.framed import Framed
from throughtime.app.joined import joined
from throughtime.app.labels import Targets
from throughtime.app.manifest import Files, header_of, together
from throughtime.app.rates import Rate, disagreements
from throughtime.errors import DataError
from throughtime.stream import formats
from throughtime.stream.formats import Table
from throughtime.stream.recording import INTERVAL_COLUMNS, TableRecording, columns


@dataclass(frozen=True)
class Opened:
    """A recording and what its files tell besides.

    Attributes:
        split: empty if nothing says.
        recording: itself.
        rates: rows per second of its files, as far as they say.
        left_out: rows at the end that fill no frame.
        lost: intervals shorter than a frame.
    """

    split: str
    recording: TableRecording
    rates: tuple[Rate, ...] = ()
    left_out: int = 0
    lost: int = 0


def open_recordings(found: Sequence[Files], form: Form) -> list[Opened]:
    """Opens every recording with the columns and labels asked for, in order.

    Raises:
        DataError: missing columns, targets of another length, an empty recording, an unreadable
            file, other columns or rates than those of the first recording; all such faults are
            listed.
    """
    opened: list[Opened] = []
    faults: list[str] = []
    for files in found:
        try:
            opened.append(_opened(files, form))
        except DataError as error:
            faults.append(str(error))
    known = [] if form.rate is None else [Rate("what the model was trained on", form.rate)]
    faults += disagreements(
        [*known, *(rate for one in opened for rate in one.rates)]
    ) + _other_columns(opened)
    if faults:
        raise DataError(together(faults))
    return opened


def _other_columns(opened: Sequence[Opened]) -> list[str]:
    """Columns that were not named may be others, or in another order, in another file."""
    faults: list[str] = []
    for role in ("input", "target"):
        named = [(one.recording.name, getattr(one.recording, f"{role}_columns")) for one in opened]
        faults += [
            f"recording '{name}' has the {role} columns {', '.join(got)}, '{named[0][0]}' has"
            f" {', '.join(named[0][1])}; name them with --{role}s, or rename them"
            for name, got in named
            if got != named[0][1]
        ]
    return faults


def _opened(files: Files, form: Form) -> Opened:
    tables = [table_of(path, form) for path in files.inputs]
    table = joined(files.name, tables)
    targets = _targets(files, table, form)
    apart = files.targets is not None or files.label is not None
    chosen = form.inputs or tuple(c for c in table.columns if apart or c not in targets.columns)
    if not chosen:
        said = ", ".join(targets.columns)
        raise DataError(
            f"{table.path}: no column is left for the inputs, {said} being the targets; name them"
            " with --inputs"
        )
    recording = composed(files.name, table, replace(form, inputs=chosen), files.static)
    recording = replace(recording, targets=targets.rows, target_columns=targets.columns)
    return Opened(
        files.split,
        recording,
        rates_of(tables) + targets.rates,
        len(table) % form.frame,
        targets.lost,
    )


def table_of(path: Path, form: Form) -> Table:
    """A file of a recording; one of intervals has its signals in columns in any case."""
    on_its_side = (
        form.csv == "rows"
        and path.suffix.lower() == ".csv"
        and set(header_of(path)) != set(INTERVAL_COLUMNS)
    )
    return formats.open_table(path, rows=on_its_side)


def rates_of(tables: Sequence[Table]) -> tuple[Rate, ...]:
    """Those of the tables that say one."""
    return tuple(Rate(str(table.path), table.rate) for table in tables if table.rate is not None)


def composed(name: str, table: Table, form: Form, static: tuple[float, ...] = ()) -> TableRecording:
    """The inputs of a recording: columns of a table, framed, with its static features."""
    recording = columns(name, table, form.inputs)
    if len(table) < form.frame:
        raise DataError(
            f"{table.path}: has {len(table)} rows, too few for a single frame of {form.frame}"
        )
    inputs = recording.inputs if form.frame == 1 else Framed(recording.inputs, form.frame)
    return replace(recording, inputs=inputs, static=np.array(static) if static else None)


def _targets(files: Files, table: Table, form: Form) -> Targets:
    """The targets in the form in which they come.

    Settings that belong to another form are refused.
    """
    steps = len(table)
    apart = None if files.targets is None else table_of(files.targets, form)
    if apart is not None and labels.are_intervals(apart, form):
        _refuse(files, form, f"{apart.path} holds intervals", "label_every")
        return labels.of_intervals(files, apart, steps, form)
    if files.label is not None:
        _refuse(files, form, "its label is for the whole recording", "label_every", "outside")
        return labels.whole(files, steps // form.frame, form)
    if apart is not None and form.label_every is not None:
        _refuse(
            files,
            form,
            f"{apart.path} holds a row of targets for every {form.label_every} rows",
            "outside",
        )
        return labels.of_every(files, apart, steps, form.label_every, form)
    _refuse(files, form, "its targets are one for each row", "label_every", "label_at", "outside")
    wanted = form.targets or (
        apart.columns if apart is not None else ("targets",) if "targets" in table.columns else ()
    )
    if not wanted:
        raise DataError(
            f"{table.path}: which columns are the targets? The file has {', '.join(table.columns)};"
            " name them with --targets"
        )
    own = table if apart is None else apart
    if len(own) != steps:
        raise DataError(
            f"recording '{files.name}': {table.path} has {steps} steps and {own.path} has"
            f" {len(own)}; targets need one row per step, or say how many steps each of them is"
            " for: --label-every N"
        )
    checked = columns(files.name, table, table.columns, own, wanted)
    return labels.of_rows(own, checked.target_columns, form.frame)


def _refuse(files: Files, form: Form, what: str, *settings: str) -> None:
    belongs = {
        "label_every": "a targets file with fewer rows",
        "label_at": "labels for more than one step",
        "outside": "a targets file with the columns start,stop,label",
    }
    for name in settings:
        value = getattr(form, name)
        if value is not None:
            raise DataError(
                f"recording '{files.name}': {name}={value} belongs to {belongs[name]}, but {what};"
                " leave it out"
            )
