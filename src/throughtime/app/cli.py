"""The commands: train, eval, predict, export, audit, doctor.

Their flags are the fields of classes of settings. The parser only splits words: every value reaches
its setting as text and is checked there, so the faults of all flags are reported at once. A command
imports what it runs when it runs, so that `throughtime --help` needs neither torch nor numpy.
"""

import inspect
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from throughtime import __version__
from throughtime.app.settings import (
    ARGUMENTS,
    AuditOptions,
    Config,
    DoctorOptions,
    EvalOptions,
    ExportOptions,
    PredictOptions,
    RunOptions,
    TrainOptions,
    choices,
    flag,
    help_of,
    read_toml,
)
from throughtime.app.user_class import OWN_CODE, is_reference
from throughtime.errors import ConfigError, ThroughtimeError, counted, one_line

if TYPE_CHECKING:
    from throughtime.app.load import Run

_INTERRUPTED = 130  # the exit code of a shell's command that Ctrl-C ended
WORTH_THREADS = 2e6  # multiplications of a step
_NO_MEMORY = re.compile("(?i)can't allocate memory|not enough memory|out of memory")


def main() -> None:
    """Run the command line; an expected error is one message and exit code 2, no traceback."""
    with suppress(ImportError, ValueError, OSError):  # Windows; a limit that cannot be raised
        from resource import RLIMIT_NOFILE, getrlimit, setrlimit

        most = getrlimit(RLIMIT_NOFILE)[1]  # each recording keeps a file open: 1,024 are too few
        setrlimit(RLIMIT_NOFILE, (most, most))
    with failures_printed():
        sys.exit(
            commands.main(
                sys.argv[1:] or ["--help"], prog_name="throughtime", standalone_mode=False
            )
        )


@contextmanager
def failures_printed() -> Generator[None]:
    """Print an expected error, and one of no memory, as one message, and exit with code 2."""
    try:
        yield
    except click.Abort:
        sys.exit(_INTERRUPTED)
    except Exception as error:
        if not (message := _in_words(error)):
            raise
        click.echo(f"{click.style('error:', fg='red')} {message}", err=True)
        sys.exit(2)


def _in_words(error: Exception) -> str:
    """What went wrong and what to do; empty for an error that is none of these."""
    if isinstance(error, click.UsageError):
        message = error.format_message().removesuffix(".")
        return f"{message}; throughtime --help lists the commands, train --help flags as --seed 1"
    if isinstance(error, ThroughtimeError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename or 'standard output'}: {error.strerror or error}"
        return f"{where}; make room there, change its permissions, or name another path"
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return f"out of memory ({str(error)[:200]!r}); take fewer --lanes, or smaller --hidden"
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if OWN_CODE in str(frame.f_globals.get("__name__")):
            where = f"{frame.f_code.co_filename}, line {line}"
            return f"{where}: {type(error).__name__}: {one_line(error)}; mend your code there"
    return ""


def _command(name: str, action: Callable[[Any], int | None], *kinds: Any) -> click.Command:
    """A command whose flags are settings.

    Args:
        name: of the command.
        action: gets the settings; of several classes those that the flags set, by name. Its
            docstring is the help.
        kinds: the classes of these settings.
    """
    fields = {name: about for kind in kinds for name, about in kind.model_fields.items()}

    def run(**values: Any) -> int | None:
        present = {k: v for k, v in values.items() if v not in (None, ())}
        if action is not doctor:  # what follows its script is the script's
            left = click.get_current_context().args
            words = [*(present.get(name, "") for name in ARGUMENTS), *left]
            # unknown words are settings, too, so they are refused with all that is wrong
            present |= dict.fromkeys([w for w in words if w.startswith("-")] or left, "")
        return action(kinds[0](**present) if len(kinds) == 1 else present)

    about = (f"{ARGUMENTS[key]}: {help_of(fields[key])}" for key in ARGUMENTS if key in fields)
    text = "\n\n".join([inspect.cleandoc(action.__doc__ or ""), *about])
    parameters = [_parameter(*item) for item in fields.items()]
    words = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": action is not doctor,
    }
    return click.Command(name, words, run, parameters, help=text)


def _parameter(name: str, about: Any) -> click.Parameter:
    """A flag, or an argument, of a field of settings."""
    if name in ARGUMENTS:
        return click.Argument([name], required=False, metavar=ARGUMENTS[name])
    option, kind = flag(name), about.annotation
    shown = about.default != "" and type(about.default) in {int, float, str}
    return click.Option(
        [f"{option}/--no-{option[2:]}" if kind is bool else option, name],
        help=help_of(about) + f" [default: {about.default}]" * shown,
        is_flag=kind is bool,
        default=None,
        multiple=name == "gradient_arg",  # of others the last one counts
        metavar=None if kind is bool else "|".join(choices(kind)) or "VALUE",
    )


def train(values: dict[str, Any]) -> None:
    """Train a model on recordings."""
    own = {name: values.pop(name) for name in TrainOptions.model_fields if name in values}
    options = TrainOptions(**own)
    from throughtime.app.console import out, run_training
    from throughtime.app.run_folder import RunFolder
    from throughtime.app.train import Training, started_ranks

    if options.resume is None:
        settings = new_settings(options.config, values)
        start = partial(Training.begin, settings)
    else:
        settings = RunFolder(options.resume).read_config()
        other = [flag(name) for name in sorted(values.keys() - {"updates", "epochs"})]
        if other or options.config is not None:
            raise ConfigError(
                f"--resume goes on with the settings of {options.resume}; leave out"
                f" {', '.join(other) or '--config'}. Only --updates or --epochs may be given, to"
                " train on to another end."
            )
        start = partial(Training.resume, options.resume, trust_code=options.trust_code, **values)
    _take_threads(settings)
    with started_ranks(settings) as ranks:
        with out.status("reading recordings"):
            training = start(ranks=ranks)
        run_training(training)


def new_settings(file: Path | None, flags: dict[str, Any]) -> Config:
    """The settings of a file with the flags over them."""
    if file is None:
        return Config(**flags)
    try:
        return Config(**read_toml(file) | flags)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _take_threads(settings: Config) -> None:
    """A single thread for small steps, unless `OMP_NUM_THREADS` says otherwise.

    A second one is useless there, and on a busy machine the two wait for each other at every step:
    an audit of 64 units took 142 s with two threads and 2 s with one, with two processes beside it
    on two cores. The steps of a class of the user's are not known.
    """
    import torch

    if "OMP_NUM_THREADS" in os.environ or is_reference(settings.model):
        return
    if 8 * settings.lanes * settings.hidden**2 < WORTH_THREADS:
        torch.set_num_threads(1)


def evaluate(options: EvalOptions) -> None:
    """Score a trained model on whole recordings, state carried, and update its report."""
    from throughtime.app.console import print_scores

    trained = _open_run(options)
    if options.missing:
        trained = replace(trained, config=trained.config.changed(missing=options.missing))
    print_scores(trained, options.data, options.split)


def predict(options: PredictOptions) -> None:
    """Run a trained model over whole recordings."""
    from throughtime.app.console import out
    from throughtime.app.predictions import predict_run

    trained = _open_run(options)
    with out.status("predicting"):
        files = predict_run(trained, options)
    for path, steps, skipped in files:
        left_out = f", {skipped:,} without an answer (NaN or infinite inputs)"
        out.print(f"{path}: {counted(steps, 'step')}{left_out * bool(skipped)}")


def _open_run(options: RunOptions) -> "Run":
    """The run of a command.

    Raises:
        RunError: no run there, none that reached a checkpoint, or code that is not trusted.
    """
    from throughtime.app.load import load_run

    run = load_run(options.run, trust_code=options.trust_code)
    _take_threads(run.config)
    return run


def export(options: ExportOptions) -> None:
    """Write a trained model, its state inside, as a file that runs without Python."""
    from throughtime.app.console import out as console
    from throughtime.app.model import example_inputs, make_stream
    from throughtime.deploy.export import export as export_net

    run, stream = _open_run(options), None
    spec, layout = run.spec, run.spec.layout
    if options.check is not None:
        recordings = run.recordings(options.check, "all", targets=False)
        stream = make_stream(recordings, spec, run.config, 1, max(map(len, recordings)))
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
                "inputs": layout.inputs + layout.static,
                "targets": spec.target_names,
            },
            "rows_ahead": layout.ahead,
        },
        with_session=options.with_session,
    )
    console.print(f"{', '.join(map(str, written.paths))} written")
    checks = {"of the recording": written.recorded, "at random": written.verification}
    for what, verification in checks.items():
        if verification is not None:
            console.print(
                f"verified on {counted(verification.steps, 'step')} {what}: {verification.summary}"
            )
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
    out.print(f"{report}\n{keep_results(run, run.files.audit, report)}")


def doctor(options: DoctorOptions) -> int:
    """Run a training script unchanged and name what is wrong with its loop.

    Exit code: that of the script, if it fails. Otherwise 1: there are findings; 2: there is no
    verdict, since no recurrent state was watched or the doctor itself failed; 0: nothing found.
    """
    from throughtime.doctor import doctor as open_doctor

    script = Path(options.script)
    if not script.is_file():
        raise ConfigError(
            f"{script}: no such file. Write throughtime doctor train.py, with the arguments of"
            " train.py after it"
        )
    watch, code = open_doctor(ignore=options.ignore, strict=options.strict), 0
    sys.argv = [str(script), *click.get_current_context().args]
    sys.path[0] = str(script.resolve().parent)
    try:
        with watch:
            runpy.run_path(str(script.absolute()), run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:  # noqa: BLE001 (a script may raise anything)
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        if not (options.strict and watch.findings):  # the first one stopped it
            traceback.print_exc()
    print(watch, flush=True)
    unknown = watch.internal_error is not None or not watch.coverage.recurrences
    return code or (1 if watch.findings else 2 * unknown)


commands = click.Group(
    name="throughtime",
    help="Train recurrent networks on one unbroken stream, with the state carried.",
    context_settings={"help_option_names": ["-h", "--help"]},
    commands=[
        _command("train", train, Config, TrainOptions),
        _command("eval", evaluate, EvalOptions),
        _command("predict", predict, PredictOptions),
        _command("export", export, ExportOptions),
        _command("audit", audit, AuditOptions),
        _command("doctor", doctor, DoctorOptions),
    ],
)
click.version_option(__version__, message="%(prog)s %(version)s")(commands)
