"""The commands: train, eval, predict, export, audit, doctor.

A command imports what it runs when it runs, so that `throughtime --help` needs no torch.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from throughtime import __version__
from throughtime.app.config import AuditOptions, Config
from throughtime.app.flags import Command, failures_printed
from throughtime.app.values import Device, Natural, Settings, flag, read_toml
from throughtime.errors import ConfigError, counted

if TYPE_CHECKING:
    from throughtime.app.load import Run


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


class TrainOptions(Settings):
    """The flags of `train` that are no settings of a run."""

    config: Path | None = None
    """A TOML file with the same settings as keys; flags win."""
    resume: Path | None = None
    """Go on with the run in this folder, from its last checkpoint."""
    trust_code: bool = False
    """With --resume: execute the code that the run folder keeps, though you have not trained with
    it."""


def train(values: dict[str, Any]) -> None:
    """Train a model on recordings."""
    own = {name: values.pop(name) for name in TrainOptions.model_fields if name in values}
    options, resume = TrainOptions(**own), None
    if options.resume is None:
        settings = new_settings(options.config, values)
    else:
        resume, settings = options.resume, _resumed_settings(options, values)
    from throughtime.app.console import ProgressDisplay, run_training
    from throughtime.app.distributed import started_ranks
    from throughtime.app.train import Training

    with started_ranks(settings) as ranks, ProgressDisplay(enabled=ranks.rank == 0) as display:
        if resume is None:
            training = Training.begin(settings, ranks)
        else:
            end = {name: getattr(settings, name) for name in values}
            trust = options.trust_code
            training = Training.resume(resume, trust_code=trust, ranks=ranks, **end)
        run_training(training, display)


def new_settings(file: Path | None, flags: Mapping[str, Any]) -> Config:
    """The settings of a file with the flags over them; arguments of another policy are dropped."""
    base = {} if file is None else read_toml(file)
    merged = {**base, **flags}
    kept = base.get("gradient_args", {}) if merged.get("gradient") == base.get("gradient") else {}
    merged["gradient_args"] = [kept, *flags.get("gradient_args", [])]
    try:
        return Config(**merged)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}" if file else str(error)) from error


def _resumed_settings(options: TrainOptions, flags: Mapping[str, Any]) -> Config:
    """The settings of a run, with another end if the flags name one."""
    from throughtime.app.run_folder import RunFolder

    settings = RunFolder(Path(str(options.resume))).read_config()
    other = [flag(name) for name in sorted(flags.keys() - {"updates", "epochs"})]
    if other or options.config is not None:
        raise ConfigError(
            f"--resume goes on with the settings of {options.resume}; leave out"
            f" {', '.join(other) or '--config'}. Only --updates or --epochs may be given, to train"
            " on to another end."
        )
    end = {"updates": None, "epochs": None, **flags} if flags else {}
    return settings.changed(**end)


class RunOptions(Settings):
    """The flags of each command on a run."""

    run: Path
    """The folder of a run."""
    trust_code: bool = False
    """Execute the code that the run folder keeps, though you have not trained with it."""


class EvalOptions(RunOptions):
    """The flags of `eval`."""

    data: Path | None = None
    """As for train. Default: the data of the run."""
    split: str | None = None
    """Which split: train, valid, ..., all. Default: test, or valid where there is none; without
    splits all of other data; of an audit train."""
    missing: Literal["error", "mask"] | None = None
    """How to treat inputs that are NaN or infinite. Default: as in training."""
    as_json: bool = False
    """Print one JSON object on standard output, and nothing else."""


def evaluate(values: dict[str, Any]) -> None:
    """Score a trained model on whole recordings, state carried, and update its report."""
    options = EvalOptions(**values)
    from throughtime.app.console import ProgressDisplay, out, print_json, print_scores
    from throughtime.app.evaluate import evaluate_run, keep_results

    trained = _open_run(options, missing=options.missing)
    with ProgressDisplay(enabled=not options.as_json):
        scores = evaluate_run(trained, options.data, options.split)
    path = trained.files.scores(scores["split"])
    written = keep_results(trained, path, scores)
    if options.as_json:
        print_json(scores)
        return
    print_scores(scores["split"], scores["metrics"], scores["recordings"], path)
    out.print(
        f"{counted(scores['steps'], 'frame')} scored, by the model of update {scores['update']};"
        f" {written}"
    )


class PredictOptions(RunOptions):
    """The flags of `predict`."""

    data: Path | None = None
    """A file with the input columns of the training, or a folder or manifest of recordings.
    Default: the data of the run."""
    split: str | None = None
    """Which split: train, valid, ..., all. Default: as eval."""
    missing: Literal["error", "mask"] = "error"
    """How to treat inputs that are NaN or infinite."""
    on_nan: Literal["raise", "hold", "reset"] = "raise"
    """At inputs that are NaN or infinite: stop, leave the step out and hold the state, or start
    anew after it."""
    state_in: Path | None = None
    """Start from a state that an earlier call wrote."""
    state_out: Path | None = None
    """Write the state after the last step, to go on later."""
    out: Path | None = None
    """The file to write: .npy (T, C), .csv or .parquet with a row per step. A folder for many
    recordings, with a file for each. Default: predictions.csv, or the folder predictions."""
    format: Literal["npy", "csv", "parquet"] | None = None
    """The format of the files in a folder. Default: csv."""


def predict(values: dict[str, Any]) -> None:
    """Run a trained model over whole recordings, in memory that does not grow with them."""
    options = PredictOptions(**values)
    from throughtime.app.console import ProgressDisplay, out
    from throughtime.app.predictions import predict_run

    trained = _open_run(options)
    what = options.data, options.split, options.out, options.format
    names = "state_in", "state_out", "missing", "on_nan"
    with ProgressDisplay():
        how = {name: getattr(options, name) for name in names}
        target, files = predict_run(trained, *what, **how)
    steps, skipped = (sum(count) for count in zip(*(file[2:] for file in files), strict=True))
    out.print(
        f"{counted(steps, 'frame')} of {counted(len(files), 'recording')} to {target}, by the model"
        f" of update {trained.spec.update}"
    )
    if skipped:
        out.print(f"{counted(skipped, 'step')} without an answer: the inputs are NaN or infinite")


def _open_run(
    options: RunOptions, device: str = "cpu", missing: Literal["error", "mask"] | None = None
) -> "Run":
    """A run, perhaps with another treatment of NaN; a remark on standard error if it is unfinished.

    Raises:
        RunError: no run there, none that reached a checkpoint, or code that is not trusted.
    """
    from throughtime.app.load import load_run

    run = load_run(options.run, device=device, trust_code=options.trust_code)
    if run.remark:
        print(f"remark: {run.remark}", file=sys.stderr, flush=True)
    return run.changed(missing=missing or run.config.missing)


class ExportOptions(RunOptions):
    """The flags of `export`."""

    out: Path
    """The file to write: .onnx, .c (and .h), .js, .nam, .json. Required."""
    check: Path | None = None
    """Verify the file on this recording as well, and measure its settling time."""
    steps: Natural = 100_000
    """Random steps to verify the file on; 0 for none."""
    with_session: bool = False
    """Also write session.py, which runs an .onnx file with numpy and onnxruntime only."""


def export(values: dict[str, Any]) -> None:
    """Write a trained model, its state inside, as a file that runs without Python."""
    options = ExportOptions(**values)
    from throughtime.app.console import out as console
    from throughtime.app.dataset import open_recording
    from throughtime.app.model import example_inputs, one_thread, unbroken_stream
    from throughtime.deploy.export import export as export_net

    run, stream = _open_run(options), None
    spec, layout = run.spec, run.spec.layout
    if options.check is not None:
        recording = open_recording([options.check], spec)
        stream = unbroken_stream([recording], spec, run.config, 1, len(recording))
    with one_thread(when=spec.is_small(lanes=1)):
        written = export_net(
            run.net,
            options.out,
            inputs=example_inputs(run.net, spec),
            steps=options.steps,
            rate=layout.rate and layout.rate / layout.frame_size,
            classes=spec.classes or (spec.target_names if spec.is_multilabel else ()),
            stream=stream,
            details={
                "task": layout.task,
                "columns": {
                    "inputs": [*layout.inputs, *layout.static],
                    "targets": [*spec.target_names],
                },
                "rows_per_step": layout.frame_size,
                "rows_ahead": layout.ahead,
            },
            with_session=options.with_session,
        )
    console.print(f"{', '.join(map(str, written.paths))} written")
    for verification, steps_of in (
        (written.recorded, ("step of the recording", "steps of the recording")),
        (written.verification, ("random step",)),
    ):
        if verification is not None:
            counts = counted(verification.steps, *steps_of)
            console.print(f"verified on {counts}: {verification.summary}")
    for text in (written.settling, *written.remarks):
        if text is not None:
            console.print(str(text))


class AuditFlags(EvalOptions):
    """The flags of `audit` besides what it measures."""

    device: Device = "cpu"
    """Where to compute: cpu, cuda, ..."""


def audit(values: dict[str, Any]) -> None:
    """Measure what truncating the gradient costs a model and how long a cold start differs."""
    measured = {name: values.pop(name) for name in AuditOptions.model_fields if name in values}
    what, options = AuditOptions(**measured), AuditFlags(**values)
    from throughtime.app.audit import audit_run
    from throughtime.app.console import ProgressDisplay, out, print_json
    from throughtime.app.evaluate import keep_results

    run = trained = _open_run(options, options.device, options.missing)
    if ":" in (trained.config.loss or ""):
        run = trained.with_own_code("loss", trust_code=options.trust_code)
    with ProgressDisplay(enabled=not options.as_json):
        report = audit_run(run, what, options.data, options.split)
    written = keep_results(trained, trained.files.audit, report.facts())
    if options.as_json:
        print_json(report.facts())
        return
    out.print(f"{report}\n{written}")


class DoctorOptions(Settings):
    """The flags of `doctor`."""

    script: str
    """The script to run; what follows it are its own arguments."""
    module: bool = False
    """SCRIPT is the name of a module, as after python -m."""
    ignore: str | None = None
    """Codes that are not reported, separated by commas, such as TT201,TT207."""
    strict: bool = False
    """Stop at the first finding."""
    as_json: bool = False
    """Print one JSON object on standard output, and nothing else."""


def doctor(values: dict[str, Any]) -> int:
    """Run a training script unchanged and name what is wrong with its loop.

    Exit code: that of the script, if it fails. Otherwise 1: there are findings; 2: there is no
    verdict, since no recurrent state was watched or the doctor itself failed; 0: nothing found.
    """
    options = DoctorOptions(**values)
    from throughtime.app.script import watch_script

    return watch_script(
        options.script,
        click.get_current_context().args,
        options.ignore.split(",") if options.ignore else (),
        module=options.module,
        strict=options.strict,
        as_json=options.as_json,
    )


commands = click.Group(
    name="throughtime",
    help="Train recurrent networks on one unbroken stream, with the state carried.",
    context_settings={"help_option_names": ["-h", "--help"]},
    commands=[
        Command("train", train, Config, TrainOptions),
        Command("eval", evaluate, EvalOptions),
        Command("predict", predict, PredictOptions),
        Command("export", export, ExportOptions),
        Command("audit", audit, AuditOptions, AuditFlags),
        Command(
            "doctor",
            doctor,
            DoctorOptions,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        ),
    ],
)
commands.commands["doctor"].allow_interspersed_args = False
click.version_option(__version__, message="%(prog)s %(version)s")(commands)
