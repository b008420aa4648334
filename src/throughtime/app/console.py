"""What the commands print: progress, a training run from start to end, tables of results."""

import math
from collections.abc import Mapping
from datetime import timedelta
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from throughtime.app.distributed import from_first
from throughtime.app.fit import Row
from throughtime.app.load import load_run
from throughtime.app.optimizer import describe_policy
from throughtime.app.scores import FORECASTS, METRIC_NAMES, is_comparison, number_text
from throughtime.app.train import Training
from throughtime.distributed import RankError
from throughtime.errors import counted, listed

_MAX_ROWS = 40  # recordings in a table of scores
_EVERY = 10  # lines of the log where no terminal changes one line
out = Console(soft_wrap=True, markup=False, highlight=False)  # names of columns may hold brackets


def progress_line(row: Row) -> str:
    r"""Update, loss, time left, speed, and the share of time waiting for data.

    Example:
        >>> times = {"seconds": 25.0, "frames": 312_500, "waiting": 0.03}
        >>> print(progress_line({"update": 50, "updates": 200, "loss": 0.25} | times))
        update 50/200  loss 0.2500  0:01:15 left  12,500 steps/s  waiting for data 3%
    """
    update, total, seconds = row["update"], row["updates"], row["seconds"]
    left = duration(max(0, total - update) * seconds / update)
    return (
        f"update {update}/{total}  loss {row['loss']:.4f}  {left} left"
        f"  {row['frames'] / max(seconds, 1e-3):,.0f} steps/s"
        f"  waiting for data {row['waiting']:.0%}"
    )


def duration(seconds: float) -> timedelta:
    """Seconds as hours, minutes and seconds; `str` of it is what people read."""
    return timedelta(seconds=round(seconds))


def run_training(training: Training) -> None:
    """Train to the end, or until Ctrl-C or SIGTERM on any rank, which saves and stops.

    Raises:
        SystemExit: it was stopped; with code 130.
        RunError, DataError: why it could not go on.
    """
    ranks, before = training.ranks, training.done.count
    again = f"throughtime train --resume {training.folder.path}"
    if ranks.rank == 0:
        _print_start(training)
    try:
        with out.status("training") as status:
            shown = count()

            def show(row: Row) -> None:
                if row["kind"] == "train":
                    status.update(progress_line(row))
                    due = next(shown) % _EVERY == 0 or row["update"] >= row["updates"]
                    if due and not out.is_terminal:
                        out.print(progress_line(row))

            training.run(show)
        from_first(ranks, lambda: _print_end(training, was_finished=training.done.count == before))
    except KeyboardInterrupt as stop:
        if not stop.args:  # not saved
            raise
        if ranks.rank == 0:
            out.print(f"{stop}; go on with: {again}")
        raise SystemExit(130) from stop
    except RankError as error:
        raise RankError(f"{error}. Go on with: {again}") from error


def _print_start(training: Training) -> None:
    dataset, spec, ranks = training.dataset, training.dataset.spec, training.ranks
    out.print(
        f"{counted(len(dataset.train), 'recording')},"
        f" {counted(sum(map(len, dataset.train)), 'step')} to train on, {len(dataset.valid)} held"
        f" out; {'; '.join(dataset.remarks)}"
    )
    inputs = ", ".join((*spec.layout.inputs, *spec.layout.static))  # by name: one may be a leak
    kind, names = ("classes", spec.classes) if spec.classes else ("targets", spec.target_names)
    model = spec.title if spec.sha256 else f"{spec.model} of {spec.layers} x {spec.hidden}"
    shared = f"; {ranks.count} ranks of {counted(training.stream.lanes, 'lane')}"
    out.print(
        f"inputs {inputs}; {kind} {listed(names)}; {model}; {describe_policy(training.config)},"
        f" about {counted(training.epoch_updates, 'update')} an epoch{shared * (ranks.count > 1)}"
    )
    if training.resumed:
        out.print(f"resumed at update {training.done.count}")


def _print_end(training: Training, *, was_finished: bool) -> None:
    """Print the scores and where the results are; write the report."""
    from throughtime.app.page import write_report  # imports matplotlib

    folder, done = training.folder, training.done
    if was_finished:
        out.print(
            f"already finished at update {done.count}; to train on: throughtime train --resume"
            f" {folder.path} --updates {2 * done.count}"
        )
    run, rows = load_run(folder.path), folder.read_metrics()
    names, kept = list(run.spec.metrics().compute()), run.spec.update
    for row in rows:
        if row["kind"] == "valid" and row["update"] == kept:
            metrics = {k: v for k, v in row.items() if k in names or is_comparison(k)}
            print_scores("valid", metrics, row["recordings"], folder.metrics)
    if done.stale >= (training.config.patience or math.inf):
        out.print(f"stopped early: no better one in {counted(done.stale, 'validation')}")
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
    names = [name for name in metrics if not is_comparison(name)]
    titles = (METRIC_NAMES.get(name, name) for name in names)
    title = f"scores on the unbroken recordings of '{split}'{many}"
    table = Table(*_columns("recording", *titles), title=title)
    for name, row in {**({} if many else recordings), "all steps together": metrics}.items():
        table.add_row(name, *(number_text(row[key]) for key in names))
    out.print(table)
    if "compared/steps" in metrics:
        _print_baselines(metrics)


def _columns(*names: str) -> list[Column]:
    """Columns that a narrow terminal folds, and shortens no name of."""
    return [
        Column(name, overflow="fold", justify="right" if i else "left")
        for i, name in enumerate(names)
    ]


def _print_baselines(metrics: Mapping[str, float]) -> None:
    """Print the errors of a forecast and of the baselines, and what to try below a baseline."""
    steps = f"{metrics['compared/steps']:,.0f} steps"
    table = Table(*_columns("forecast", "target", "RMSE", "skill of the model"))
    skills = list[float]()
    for key, value in metrics.items():
        name, _, target = key.partition("/rmse")
        if target:
            skills.append(metrics.get(f"{name}/skill{target}", math.nan))
            texts = target.strip("[]"), number_text(value), number_text(skills[-1])
            table.add_row(FORECASTS[name], *texts)
    advice = "; below 0, try --difference, by which the net learns the change from now"
    advice *= any(skill < 0 for skill in skills)
    table.title = (
        f"RMSE of forecasts on the same {steps}. A skill above 0: the model has the smaller error"
        f"{advice}"
    )
    out.print(table)
