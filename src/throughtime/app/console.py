"""What the commands print: progress, a training run from start to end, tables of results."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from pydantic_core import to_json
from rich.console import Console
from rich.table import Table

from throughtime.app.distributed import from_first
from throughtime.app.fit import Row
from throughtime.app.load import load_run
from throughtime.app.model import one_thread
from throughtime.app.optimizer import describe_policy
from throughtime.app.recordings import displays
from throughtime.app.scores import (
    DataTable,
    is_comparison,
    score_tables,
)
from throughtime.app.train import Training
from throughtime.distributed import RankError
from throughtime.errors import counted, listed

_SHOWN = ("accuracy", "macro_f1", "rmse", "r2")  # metrics in a line of progress
_MAX_ROWS = 40  # recordings in a table of scores
_PLAIN_EVERY = 10.0  # seconds between two plain lines
out = Console(soft_wrap=True, markup=False, highlight=False)  # names of columns may hold brackets


class ProgressDisplay:
    """A line that changes on a terminal; elsewhere a new one every ten seconds.

    It is visible inside `with ProgressDisplay() as display`.

    Args:
        enabled: `False` prints nothing, as on all ranks but the first.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled, self._printed, self._status = enabled, time.monotonic(), out.status("")

    def __enter__(self) -> Self:
        if self._enabled and out.is_terminal:
            self._status.start()
        displays.append(self.phase)
        return self

    def __exit__(self, *_: object) -> None:
        displays.remove(self.phase)
        self._status.stop()

    def phase(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts of a phase are finished; of 0, that it has begun."""
        self._show(f"{name}: {done / total:.0%}" if total else f"{name} ...", now=not total)

    def train(self, row: Row) -> None:
        """Show a line of the log: the last one always."""
        self._show(progress_line(row), now=row["update"] >= row["updates"])

    def _show(self, line: str, *, now: bool) -> None:
        self._status.update(line[: out.width - 4])
        due = now or time.monotonic() - self._printed >= _PLAIN_EVERY
        if self._enabled and due and not out.is_terminal:
            self._printed = time.monotonic()
            out.print(line)
            sys.stdout.flush()


def progress_line(row: Row) -> str:
    r"""Update, loss, time left, speed, metrics, and the share of time waiting for data.

    Example:
        >>> times = {"training_seconds": 25.0, "frames": 312_500, "waiting": 0.03}
        >>> print(progress_line({"update": 50, "updates": 200, "loss": 0.25, "rmse": 0.5} | times))
        update 50/200  loss 0.2500  0:01:15 left  12.5k steps/s  rmse 0.500  waiting for data 3%
    """
    update, total, seconds = row["update"], row["updates"], row["training_seconds"]
    rate = row["frames"] / max(seconds, 1e-3)
    speed = f"{rate / 1e3:.1f}k" if rate >= 1e3 else f"{rate:.0f}"
    left = duration((total - update) * seconds / update)
    parts = [f"update {update}/{total}", f"loss {row['loss']:.4f}", f"{left} left"]
    parts += [f"{speed} steps/s"]
    parts += [f"{name} {row[name]:.3f}" for name in _SHOWN if name in row]
    return "  ".join([*parts, f"waiting for data {row['waiting']:.0%}"])


def duration(seconds: float) -> timedelta:
    """Seconds as hours, minutes and seconds; `str` of it is what people read."""
    return timedelta(seconds=max(0, round(seconds)))


def run_training(training: Training, display: ProgressDisplay) -> None:
    """Train to the end, or until Ctrl-C or SIGTERM on any rank, which saves and stops.

    Raises:
        SystemExit: it was stopped; with code 130.
        RunError, DataError: why it could not go on.
    """
    ranks, path, before = training.ranks, training.folder.path, training.done.count
    if ranks.rank == 0:
        _print_start(training)
    try:
        with one_thread(training.dataset.spec, training.stream.lanes):
            training.run(display.train)
        from_first(ranks, lambda: _print_end(training, was_finished=training.done.count == before))
    except KeyboardInterrupt as stop:
        if not stop.args:  # not saved
            raise
        if ranks.rank == 0:
            out.print(f"{stop}; go on with: throughtime train --resume {path}")
        raise SystemExit(130) from stop
    except RankError as error:
        raise RankError(f"{error}. Go on with: throughtime train --resume {path}") from error


def _print_start(training: Training) -> None:
    dataset, spec, config = training.dataset, training.dataset.spec, training.config
    out.print(
        f"{counted(len(dataset.train), 'recording')},"
        f" {counted(sum(map(len, dataset.train)), 'step')} to train on, {len(dataset.valid)}"
        " held out; " + "; ".join(dataset.remarks)
    )
    layout, stream, count = spec.layout, training.stream, training.ranks.count
    inputs = ", ".join((*layout.inputs, *layout.static))  # each by name: one may be a leak
    inputs += f", {layout.frame_size} rows a step" * (layout.frame_size > 1)
    kind, names = ("classes", spec.classes) if spec.classes else ("targets", spec.target_names)
    model = spec.title if spec.sha256 else f"{spec.model} of {spec.layers} x {spec.hidden}"
    ranks = f"; {count} ranks of {counted(stream.lanes, 'lane')}" * (count > 1)
    out.print(
        f"inputs {inputs}; {kind} {listed(names)}; {model}; {describe_policy(config)}, about"
        f" {counted(training.epoch_updates, 'update')} an epoch{ranks}"
    )
    if training.resumed:
        count = training.done.count
        out.print(
            f"resumed at update {count}"
            if count
            else "no checkpoint yet: starting again at update 0"
        )


def _print_end(training: Training, *, was_finished: bool) -> None:
    """Print the scores and where the results are; write the report."""
    from throughtime.app.page import write_report  # imports matplotlib

    folder, done = training.folder, training.done
    if was_finished:
        again = f"throughtime train --resume {folder.path} --updates {2 * done.count}"
        out.print(f"already finished at update {done.count}; to train on: {again}")
    if training.stopped_early:
        out.print(
            f"stopped early: no better one in {counted(done.stale, 'validation')};"
            f" to train on: throughtime train --resume {folder.path} --updates N"
        )
    names = list(training.dataset.spec.metrics().compute())
    run, rows = load_run(folder.path), folder.read_metrics()
    kept = run.spec.update
    for row in rows:
        if row["kind"] == "valid" and row["update"] == kept:
            metrics = {k: v for k, v in row.items() if k in names or is_comparison(k)}
            print_scores("valid", metrics, row["recordings"], folder.metrics)
    if kept < done.count:
        out.print(f"the model is that of update {kept}, the best on validation")
    write_report(run)
    out.print(
        f"{counted(done.count, 'update')} in {duration(done.seconds)}, {rows[-1]['waiting']:.0%} of"
        f" it waiting for data; model, metrics and report.html are in {folder.path}"
    )


def print_scores(
    split: str,
    metrics: Mapping[str, float],
    recordings: Mapping[str, Mapping[str, float]],
    path: Path,
) -> None:
    """Print the metrics of each recording, if they are few, and of all steps together.

    Those of a forecast beside the baselines.
    """
    many = f" ({len(recordings)}, each of them in {path})" if len(recordings) > _MAX_ROWS else ""
    shown = {} if many else recordings
    title = f"scores on the unbroken recordings of '{split}'{many}"
    names = [name for name in metrics if not is_comparison(name)]
    for content in score_tables(title, names, metrics, shown):
        print_table(content)


def print_json(facts: Mapping[str, Any]) -> None:
    """Print an object, with `null` for numbers that are not finite."""
    print(to_json(facts, indent=1, inf_nan_mode="null").decode(), flush=True)


def print_table(content: DataTable) -> None:
    """Print a table under its caption."""
    table = Table(title=content.caption)
    for i, name in enumerate(content.columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for cells in content.cells:
        table.add_row(*cells)
    out.print(table)
