"""A training run on the terminal: what it is about to do, how it goes, how it ended. The first rank speaks for all."""

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import typer

from throughtime.app.cli.progress import Progress, duration
from throughtime.app.cli.screen import out, print_scores
from throughtime.app.report import run_page
from throughtime.app.team import LostRankError
from throughtime.app.threads import one_thread, small
from throughtime.app.train import Training

_ONE_PRESS = 1.0  # seconds: launchers pass on a signal that the terminal has sent already


def train_through(training: Training) -> None:
    """Trains to the end, or until Ctrl-C or SIGTERM on any rank, which saves and stops.

    Raises:
        typer.Exit: it was stopped; with code 130.
        RunError, DataError: why it could not go on.
    """
    team, path = training.team, training.folder.path
    already = training.finished
    if team.first:
        _announce(training)
    try:
        _go(training)
        if not training.finished:
            if team.first:
                out.print(
                    f"stopped at update {training.count}; go on with: throughtime train --resume"
                    f" {path}"
                )
            raise typer.Exit(130)
        team.first_does(lambda: _close(training, already=already))
    except LostRankError as error:
        raise LostRankError(
            f"{error}. Start all ranks again from the last checkpoint: throughtime train --resume"
            f" {path}"
        ) from error


def _announce(training: Training) -> None:
    prepared, spec, team = training.prepared, training.prepared.spec, training.team
    steps = sum(map(len, prepared.train))
    out.print(
        f"{len(prepared.train)} recordings, {steps:,} frames to train on, {len(prepared.valid)}"
        " held out; " + "; ".join(prepared.remarks)
    )
    inputs = ", ".join((*spec.inputs, *spec.static)) + (
        f", {spec.frame} rows a step" if spec.frame > 1 else ""
    )
    outputs = (
        f"classes {', '.join(spec.classes)}"
        if spec.classes
        else f"targets {', '.join(spec.targets)}"
    )
    shares = (
        f"; {team.count} ranks of {training.stream.lanes}"
        f" lane{'' if training.stream.lanes == 1 else 's'}"
        if team.count > 1
        else ""
    )
    out.print(
        f"inputs {inputs}; {outputs}; {spec.model} of {spec.layers} x {spec.hidden};"
        f" {training.policy.describe()}{shares}"
    )
    if training.config.exact and training.config.segment is None:
        count = training.epoch_updates
        out.print(
            f"about {count} update{'' if count == 1 else 's'} an epoch; --segment N makes one every"
            " N steps, credit cut between them"
        )
    if training.count:
        out.print(f"resumed at update {training.count}")


def _go(training: Training) -> None:
    """Trains; the first rank shows a live line."""
    shown = Progress(out) if training.team.first else nullcontext()
    with (
        _stopped_by_signals(training),
        one_thread(when=small(training.prepared.spec, training.stream.lanes)),
        shown as progress,
    ):
        for moment in training.go():
            if progress is not None:
                progress.show(moment)


@contextmanager
def _stopped_by_signals(training: Training) -> Generator[None]:
    """The first signal asks to save and stop.

    One that comes later than the same press of a key ends at once.
    """
    asked: list[float] = []

    def stop(*_: object) -> None:
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > _ONE_PRESS:
            raise KeyboardInterrupt
        training.stop()

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _close(training: Training, *, already: bool) -> None:
    """Scores, report, and where all of it is."""
    folder = training.folder
    if already:
        again = f"throughtime train --resume {folder.path} --updates {2 * training.count}"
        out.print(f"already finished at update {training.count}; to train on: {again}")
    valid = [row for row in folder.read_metrics() if row["kind"] == "valid"]
    if valid:
        figures = {
            k: v for k, v in valid[-1].items() if k in training.prepared.spec.score().compute()
        }
        print_scores("valid", figures, valid[-1]["recordings"], folder.metrics)
    run_page.write_report(folder)
    spent = (
        f"{training.count} updates in {duration(training.seconds)}, {training.waiting:.0%} of it"
        " waiting for data"
    )
    out.print(f"{spent}; model, metrics and report.html are in {folder.path}")
