"""What the commands print: progress, a training run from start to end, tables of results."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table

from throughtime.app.load import load_run
from throughtime.app.model import one_thread
from throughtime.app.policy import describe_policy
from throughtime.app.run_folder import json_safe
from throughtime.app.scores import (
    DataTable,
    baseline_table,
    is_comparison,
    scores_table,
)
from throughtime.app.train import Training, TrainProgress
from throughtime.distributed import RankError
from throughtime.errors import counted, listed

_BAR = 10  # characters
_MAX_ROWS = 40  # recordings in a table of scores
_PLAIN_EVERY = 10.0  # seconds between two plain lines
out = Console(soft_wrap=True, markup=False, highlight=False)  # names of columns may hold brackets


class ProgressDisplay:
    """A line for each phase on a terminal, with a bar; elsewhere plain lines every ten seconds.

    The bars are visible inside `with ProgressDisplay() as display`. Between two phases, and before
    the first one, a bar moves without an end.

    Args:
        enabled: `False` prints nothing, as on all ranks but the first.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True))
        columns = (TextColumn("{task.description}"), BarColumn(_BAR), text)
        self._enabled, self._live = enabled, enabled and out.is_terminal
        self._bars = Progress(*columns, console=out, disable=not self._live)
        self._tasks: dict[str, TaskID] = {}
        self._idle = self._bars.add_task("listing files", total=None, text="")
        self._printed, self._phase_printed = -math.inf, time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def phase(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts of a phase are finished; of 0, that it has begun."""
        if self._live:
            self._update(name, done, total, f"{done:,}/{total:,}" if total else "")
            if total and done >= total:
                self._bars.remove_task(self._tasks.pop(name))
                self._bars.update(self._idle, description="working", visible=not self._tasks)
        elif self._enabled and (
            not total or time.monotonic() - self._phase_printed >= _PLAIN_EVERY
        ):
            self._phase_printed = time.monotonic()
            self._print(f"{name}: {done / total:.0%}" if total else f"{name} ...")

    def train(self, progress: TrainProgress) -> None:
        """Show a line of the log: the last one always."""
        if self._live:
            room = out.width - len("evaluating") - _BAR - 2  # the wider of two at a time
            line = progress_line(progress, room)
            self._update("training", progress.update, progress.updates, line)
        elif self._enabled and (
            progress.update >= progress.updates or time.monotonic() - self._printed >= _PLAIN_EVERY
        ):
            self._printed = self._phase_printed = time.monotonic()
            self._print(progress_line(progress))

    def _update(self, name: str, done: int, total: int, text: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=None, text="")
            self._bars.update(self._idle, visible=False)
        self._bars.update(self._tasks[name], completed=done, total=total or None, text=text)

    def _print(self, line: str) -> None:
        out.print(line)
        sys.stdout.flush()


def progress_line(progress: TrainProgress, width: int | None = None) -> str:
    r"""Update, loss, metrics, speed, time left, memory, and the share of time waiting for data.

    Args:
        progress: of the run.
        width: the most characters, if any; what is less important is left out.

    Example:
        >>> from throughtime.app.train import TrainProgress
        >>> progress = TrainProgress(
        ...     50, 200, 0.25, {"accuracy": 0.5}, 12_500.0, 75.0, 300_000_000, 0.03
        ... )
        >>> print(progress_line(progress).replace("  ", "\n"))
        update 50/200
        loss 0.2500
        accuracy 0.500
        12.5k frames/s
        1m15s left
        300 MB peak
        waiting for data 3%
        >>> progress_line(progress, 55)
        'update 50/200  loss 0.2500  12.5k frames/s  1m15s left'
    """
    rate = progress.frames_per_second
    parts = [(0, f"update {progress.update}/{progress.updates}"), (1, f"loss {progress.loss:.4f}")]
    parts += [(4, f"{name} {value:.3f}") for name, value in list(progress.metrics.items())[:2]]
    parts.append((3, f"{rate / 1e3:.1f}k frames/s" if rate >= 1e3 else f"{rate:.0f} frames/s"))
    parts.append((2, f"{duration(progress.remaining_seconds)} left"))
    if progress.peak_memory is not None:
        parts.append((6, f"{progress.peak_memory / 1e6:.0f} MB peak"))
    parts.append((5, f"waiting for data {progress.waiting:.0%}"))
    while width is not None and len(_joined(parts)) > width and len(parts) > 1:
        parts.remove(max(reversed(parts), key=itemgetter(0)))
    return _joined(parts)


def _joined(parts: Sequence[tuple[int, str]]) -> str:
    return "  ".join(text for _, text in parts)


def duration(seconds: float) -> str:
    """Seconds in units that people use.

    Example:
        >>> duration(59.6), duration(3725)
        ('1m00s', '1h02m')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def run_training(training: Training, display: ProgressDisplay) -> None:
    """Train to the end, or until Ctrl-C or SIGTERM on any rank, which saves and stops.

    Raises:
        SystemExit: it was stopped; with code 130.
        RunError, DataError: why it could not go on.
    """
    team, path, finished = training.team, training.folder.path, training.done.finished
    if team.is_first:
        _print_start(training)
    small = training.dataset.spec.is_small(training.stream.lanes)
    try:
        with one_thread(when=small):
            training.run(display.train)
        team.on_first(lambda: _print_end(training, was_finished=finished))
    except KeyboardInterrupt as stop:
        if not stop.args:  # not saved
            raise
        if team.is_first:
            out.print(f"{stop}; go on with: throughtime train --resume {path}")
        raise SystemExit(130) from stop
    except RankError as error:
        raise RankError(f"{error}. Go on with: throughtime train --resume {path}") from error


def _print_start(training: Training) -> None:
    dataset, spec, config = training.dataset, training.dataset.spec, training.config
    out.print(
        f"{counted(len(dataset.train), 'recording')},"
        f" {counted(sum(map(len, dataset.train)), 'frame')} to train on, {len(dataset.valid)}"
        " held out; " + "; ".join(dataset.remarks)
    )
    layout, lanes = spec.layout, training.stream.lanes
    inputs = ", ".join((*layout.inputs, *layout.static))  # each by name: one may be a leak
    if layout.frame_size > 1:
        inputs += f", {layout.frame_size} rows a step"
    outputs = (
        f"classes {listed(spec.classes)}"
        if spec.classes
        else f"targets {listed(spec.target_names)}"
    )
    model = spec.title if spec.sha256 else f"{spec.model} of {spec.layers} x {spec.hidden}"
    ranks = f"; {training.team.count} ranks of {counted(lanes, 'lane')}"
    out.print(
        f"inputs {inputs}; {outputs}; {model};"
        f" {describe_policy(config)}{ranks if training.team.count > 1 else ''}"
    )
    if config.gradient == "exact" and config.update_steps() is None:
        count = training.epoch_updates
        out.print(
            f"about {counted(count, 'update')} an epoch; --cut-every N makes one every"
            " N steps, credit cut between them"
        )
    if training.done.count:
        out.print(f"resumed at update {training.done.count}")
    elif training.resumed:
        out.print("no checkpoint yet: starting again at update 0")


def _print_end(training: Training, *, was_finished: bool) -> None:
    """Print the scores and where the results are; write the report."""
    from throughtime.app.report.page import write_report  # imports matplotlib

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
    print_table(title, scores_table(names, metrics, shown))
    if (baselines := baseline_table(metrics)) is not None:
        print_table(baselines.caption, baselines)


def print_json(facts: Mapping[str, Any]) -> None:
    """Print an object, with `null` for numbers that are not finite."""
    print(json.dumps(json_safe(facts), indent=1, allow_nan=False), flush=True)


def print_table(title: str, content: DataTable) -> None:
    """Print a table of a report under another title."""
    table = Table(title=title)
    for i, name in enumerate(content.columns):
        justify = "right" if i in content.numeric_columns else "left"
        table.add_column(name, justify=justify, overflow="fold")
    for cells in content.cells:
        table.add_row(*cells)
    out.print(table)
