"""The commands: train, eval, predict, export, audit, doctor.

A command imports what it runs when it runs, so that `throughtime --help` needs no torch.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from throughtime import __version__
from throughtime.app.config import (
    AuditOptions,
    Config,
    DoctorOptions,
    EvalOptions,
    ExportOptions,
    PredictOptions,
    RunOptions,
    TrainOptions,
)
from throughtime.app.flags import Command, failures_printed
from throughtime.app.user_class import is_reference
from throughtime.app.values import flag, read_toml
from throughtime.errors import ConfigError, counted

if TYPE_CHECKING:
    from throughtime.app.load import Run

WORTH_THREADS = 2e6  # multiplications of a step


def main() -> None:
    """Run the command line; an expected error is one message and exit code 2, no traceback."""
    _raise_file_limit()
    with failures_printed():
        words = sys.argv[1:] or ["--help"]
        sys.exit(commands.main(words, prog_name="throughtime", standalone_mode=False))


def _raise_file_limit() -> None:
    """A memory-mapped recording keeps a file open, and the usual soft limit is 1,024 files."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # a system may refuse its own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _take_threads(settings: Config, lanes: int) -> None:
    """A single thread for small steps, unless `OMP_NUM_THREADS` says otherwise.

    A second one is useless there, and on a busy machine the two wait for each other at every step:
    an audit of 64 units took 142 s with two threads and 2 s with one, with two processes beside it
    on two cores. The steps of a class of the user's are not known.
    """
    import torch

    if "OMP_NUM_THREADS" in os.environ or is_reference(settings.model):
        return
    if 8 * lanes * settings.hidden**2 < WORTH_THREADS:
        torch.set_num_threads(1)


def train(values: dict[str, Any]) -> None:
    """Train a model on recordings."""
    own = {name: values.pop(name) for name in TrainOptions.model_fields if name in values}
    options = TrainOptions(**own)
    resume, trust_code = options.resume, options.trust_code
    settings = _resumed(options, values) if resume else new_settings(options.config, values)
    if trust_code and not resume:
        raise ConfigError(
            "--trust-code belongs to --resume RUN, whose folder keeps code: leave it out, since a"
            " file that you name yourself is executed anyway"
        )
    _take_threads(settings, settings.lanes)
    from throughtime.app.console import out, run_training
    from throughtime.app.distributed import started_ranks
    from throughtime.app.train import Training

    with started_ranks(settings) as ranks:
        with out.status("reading recordings"):
            if resume:
                training = Training.resume(resume, trust_code=trust_code, ranks=ranks, **values)
            else:
                training = Training.begin(settings, ranks)
        run_training(training)


def new_settings(file: Path | None, flags: dict[str, Any]) -> Config:
    """The settings of a file with the flags over them."""
    try:
        return Config(**({} if file is None else read_toml(file)) | flags)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}" if file else str(error)) from error


def _resumed(options: TrainOptions, flags: dict[str, Any]) -> Config:
    """The settings of a run, with another end if the flags name one, as whole numbers."""
    from throughtime.app.run_folder import RunFolder

    settings = RunFolder(Path(str(options.resume))).read_config()
    other = [flag(name) for name in sorted(flags.keys() - {"updates", "epochs"})]
    if other or options.config is not None:
        raise ConfigError(
            f"--resume goes on with the settings of {options.resume}; leave out"
            f" {', '.join(other) or '--config'}. Only --updates or --epochs may be given, to train"
            " on to another end."
        )
    if flags:
        settings = settings.changed(**{"updates": None, "epochs": None, **flags})
        flags.update({name: getattr(settings, name) for name in flags})
    return settings


def evaluate(options: EvalOptions) -> None:
    """Score a trained model on whole recordings, state carried, and update its report."""
    from throughtime.app.console import out, print_scores
    from throughtime.app.evaluate import evaluate_run, keep_results

    trained = _open_run(options)
    with out.status("evaluating"):
        scores = evaluate_run(trained, options.data, options.split)
    path = trained.files.scores(scores["split"])
    written = keep_results(trained, path, scores)
    print_scores(scores["split"], scores["metrics"], scores["recordings"], path)
    steps, update = counted(scores["steps"], "step"), scores["update"]
    out.print(f"{steps} scored, by the model of update {update}; {written}")


def predict(options: PredictOptions) -> None:
    """Run a trained model over whole recordings, in memory that does not grow with them."""
    from throughtime.app.console import out
    from throughtime.app.predictions import predict_run

    trained = _open_run(options)
    with out.status("predicting"):
        files = predict_run(trained, options)
    for file in files:
        left_out = f", {file.skipped:,} without an answer (NaN or infinite inputs)"
        out.print(f"{file.path}: {counted(file.steps, 'step')}{left_out * bool(file.skipped)}")


def _open_run(options: RunOptions) -> "Run":
    """A run, perhaps with another treatment of NaN.

    Raises:
        RunError: no run there, none that reached a checkpoint, or code that is not trusted.
    """
    from throughtime.app.load import load_run

    run = load_run(options.run, trust_code=options.trust_code)
    many = isinstance(options, EvalOptions)  # predict and export play one recording at a time
    _take_threads(run.config, run.config.lanes if many else 1)
    return run.changed(missing=(many and options.missing) or run.config.missing)


def export(options: ExportOptions) -> None:
    """Write a trained model, its state inside, as a file that runs without Python."""
    from throughtime.app.console import out as console
    from throughtime.app.model import example_inputs, make_stream
    from throughtime.deploy.export import export as export_net

    run, stream = _open_run(options), None
    spec, layout = run.spec, run.spec.layout
    if options.check is not None:
        recording = run.recording(options.check)
        stream = make_stream([recording], spec, run.config, 1, len(recording))
    written = export_net(
        run.net,
        options.out,
        inputs=example_inputs(run.net, spec),
        steps=options.steps,
        rate=layout.rate,
        classes=spec.classes or (spec.target_names if spec.is_multilabel else ()),
        stream=stream,
        details={
            "task": layout.task,
            "columns": {
                "inputs": [*layout.inputs, *layout.static],
                "targets": [*spec.target_names],
            },
            "rows_ahead": layout.ahead,
        },
        with_session=options.with_session,
    )
    console.print(f"{', '.join(map(str, written.paths))} written")
    checks = (written.recorded, "step of the recording"), (written.verification, "random step")
    for verification, what in checks:
        if verification is not None:
            steps = counted(verification.steps, what, what.replace("step", "steps"))
            console.print(f"verified on {steps}: {verification.summary}")
    for text in filter(None, (written.settling, *written.remarks)):
        console.print(str(text))


def audit(options: AuditOptions) -> None:
    """Measure what truncating the gradient costs a model and how long a cold start differs."""
    from throughtime.app.audit import audit_run
    from throughtime.app.console import out
    from throughtime.app.evaluate import keep_results

    run = _open_run(options)
    with out.status("measuring gradients"):
        report = audit_run(run, options)
    out.print(f"{report}\n{keep_results(run, run.files.audit, report.facts())}")


def doctor(options: DoctorOptions) -> int:
    """Run a training script unchanged and name what is wrong with its loop.

    Exit code: that of the script, if it fails. Otherwise 1: there are findings; 2: there is no
    verdict, since no recurrent state was watched or the doctor itself failed; 0: nothing found.
    """
    from throughtime.app.script import watch_script

    return watch_script(options, click.get_current_context().args)


_SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True}
commands = click.Group(
    name="throughtime",
    help="Train recurrent networks on one unbroken stream, with the state carried.",
    context_settings={"help_option_names": ["-h", "--help"]},
    commands=[
        Command("train", train, Config, TrainOptions),
        Command("eval", evaluate, EvalOptions),
        Command("predict", predict, PredictOptions),
        Command("export", export, ExportOptions),
        Command("audit", audit, AuditOptions),
        Command("doctor", doctor, DoctorOptions, context_settings=_SCRIPT),
    ],
)
commands.commands["doctor"].allow_interspersed_args = False
click.version_option(__version__, message="%(prog)s %(version)s")(commands)
