"""What the commands print: progress, a training run from start to end, tables of results."""

from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from throughtime.app.evaluate import evaluate_run, keep_results
from throughtime.app.fit import Row, from_first
from throughtime.app.load import Run, load_run
from throughtime.app.train import Training
from throughtime.distributed import RankError
from throughtime.errors import counted, listed

out = Console(soft_wrap=True, markup=False, highlight=False)  # names of columns may hold brackets


def progress_line(row: Row) -> str:
    """Update, loss, time left and speed.

    Example:
        >>> times = {"seconds": 25.0, "frames": 312_500}
        >>> print(progress_line({"update": 50, "updates": 200, "loss": 0.25} | times))
        update 50/200  loss 0.2500  0:01:15 left  12,500 steps/s
    """
    update, total, seconds = row["update"], row["updates"], row["seconds"]
    left = timedelta(seconds=round(max(0, total - update) * seconds / update))
    speed = row["frames"] / max(seconds, 1e-3)
    return f"update {update}/{total}  loss {row['loss']:.4f}  {left} left  {speed:,.0f} steps/s"


def run_training(training: Training) -> None:
    """Train to the end, or until Ctrl-C or SIGTERM on any rank, which saves and stops.

    Raises:
        SystemExit: it was stopped; with code 130.
        RunError, DataError: why it could not go on.
    """
    ranks = training.ranks
    again = f"throughtime train --resume {training.folder.path}"
    if ranks.rank == 0:
        _print_start(training)
    try:
        with out.status("training") as status:

            def show(row: Row) -> None:
                if row["kind"] == "train":
                    status.update(progress_line(row))
                    twentieth = row["updates"] // 20 or 1
                    if not (out.is_terminal or row["update"] % twentieth):
                        out.print(progress_line(row))

            training.run(show)
        from_first(ranks, lambda: _print_end(training))
    except KeyboardInterrupt as stop:
        if not stop.args:  # not saved
            raise
        if ranks.rank == 0:
            out.print(f"{stop}; go on with: {again}")
        raise SystemExit(130) from stop
    except RankError as error:
        raise RankError(f"{error}. Go on with: {again}") from error


def _print_start(training: Training) -> None:
    facts, spec = training.folder.facts, training.spec
    out.print(
        f"{counted(facts['train'], 'recording')}, {counted(facts['steps'], 'step')} to train on,"
        f" {facts['valid']} held out; {'; '.join(facts['remarks'])}"
    )
    inputs = ", ".join((*spec.layout.inputs, *spec.layout.static))  # by name: one may be a leak
    kind, names = ("classes", spec.classes) if spec.classes else ("targets", spec.target_names)
    model = spec.model if spec.sha256 else f"{spec.model} of {spec.layers} x {spec.hidden}"
    out.print(
        f"inputs {inputs}; {kind} {listed(names)}; {model}; {training.config.describe_policy()}"
    )


def _print_end(training: Training) -> None:
    """Print the scores and where the results are; write the report."""
    from throughtime.app.page import write_report  # imports matplotlib

    folder, done = training.folder, training.done
    run = load_run(folder.path)
    run.net.to(training.config.device)
    if training.dataset.valid:
        print_scores(run, split="valid")
    else:
        write_report(run)
    out.print(
        f"{counted(done.count, 'update')} in {done.seconds:,.0f} s; model, metrics and"
        f" report.html are in {folder.path}"
    )


def print_scores(run: Run, data: Path | None = None, split: str | None = None) -> None:
    """Score a run as `evaluate_run` does, keep the scores, and print them in tables."""
    with out.status("evaluating"):
        scores = evaluate_run(run, data, split)
    path = run.folder / f"scores-{scores.split}.json"
    written = keep_results(run, path, scores)
    for title, columns, rows in scores.tables():
        heads = (
            Column(name, overflow="fold", justify="right" if i else "left")
            for i, name in enumerate(columns)
        )
        table = Table(*heads, title=f"{title} ({path})")
        for row in rows:
            table.add_row(*row)
        out.print(table)
    out.print(
        f"{counted(scores.steps, 'step')} scored, by the model of update {scores.update}; {written}"
    )
