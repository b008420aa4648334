"""The commands: train, eval, predict, export, audit, doctor.

A command imports what it runs when it runs, so that `throughtime --help` needs no torch.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from throughtime import __version__
from throughtime.app.config import AuditOptions, Config, make_config
from throughtime.app.flags import Command, failures_printed
from throughtime.app.values import (
    Device,
    Natural,
    Settings,
    build,
    checked_by,
    declared,
    fields_of,
    flag,
    named_numbers,
    read_toml,
)
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


@declared
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
    own = {name: values.pop(name) for name in fields_of(TrainOptions) if name in values}
    options, resume = build(TrainOptions, own), None
    if options.resume is None:
        settings = new_settings(options.config, values)
    else:
        resume, settings = options.resume, _resumed_settings(options, values)
    from throughtime.app.console import ProgressDisplay, run_training
    from throughtime.app.distributed import started_ranks
    from throughtime.app.train import Training

    with started_ranks(settings) as ranks, ProgressDisplay(enabled=ranks.rank == 0) as display:
        shared: dict[str, Any] = {"ranks": ranks, "on_phase": display.phase}
        if resume is None:
            training = Training.begin(settings, **shared)
        else:
            end = {name: getattr(settings, name) for name in values}
            training = Training.resume(resume, trust_code=options.trust_code, **end, **shared)
        run_training(training, display)


def new_settings(file: Path | None, flags: Mapping[str, Any]) -> Config:
    """The settings of a file with the flags over them; arguments of another policy are dropped."""
    base = {} if file is None else read_toml(file)
    merged = {**base, **flags}
    kept = base.get("gradient_args", {}) if merged.get("gradient") == base.get("gradient") else {}
    merged["gradient_args"] = [kept, *flags.get("gradient_args", [])]
    return make_config(merged, source="" if file is None else f"{file}: ", flags=flags)


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
    return make_config(settings.settings() | end, flags=flags)


@declared
class RunOptions(Settings):
    """The flags of each command on a run."""

    run: Path
    """The folder of a run."""
    trust_code: bool = False
    """Execute the code that the run folder keeps, though you have not trained with it."""


@declared
class EvalOptions(RunOptions):
    """The flags of `eval`."""

    data: Path | None = None
    """As for train. Default: the data of the run."""
    split: str | None = None
    """Which split: train, valid, ..., all. Default: test, or valid where there is none; without
    splits all of other data; of an audit train."""
    missing: Literal["error", "mask"] | None = None
    """How to treat inputs that are NaN or infinite. Default: as in training."""
    json: bool = False
    """Print one JSON object on standard output, and nothing else."""


def evaluate(values: dict[str, Any]) -> None:
    """Score a trained model on whole recordings, state carried, and update its report."""
    options = build(EvalOptions, values)
    from throughtime.app.console import ProgressDisplay, out, print_json, print_scores
    from throughtime.app.evaluate import evaluate_run, keep_results

    trained = _open_run(options, missing=options.missing)
    with ProgressDisplay(enabled=not options.json) as display:
        scores = evaluate_run(trained, options.data, options.split, display.phase)
    path = trained.files.scores(scores["split"])
    written = keep_results(trained, path, scores)
    if options.json:
        print_json(scores)
        return
    print_scores(scores["split"], scores["metrics"], scores["recordings"], path, trained.config)
    out.print(
        f"{counted(scores['steps'], 'frame')} scored, by the model of update {scores['update']};"
        f" {written}"
    )


@declared
class PredictOptions(RunOptions):
    """The flags of `predict`."""

    data: str | None = None
    """A file with the input columns of the training, or several: 'a.csv;b.csv'; a folder or
    manifest of many recordings. Default: the data of the run."""
    split: str | None = None
    """Which split: train, valid, ..., all. Default: as eval."""
    static: (
        Annotated[
            str,
            checked_by(named_numbers),
            "a finite number for each feature, such as age=63,weight=71.5",
        ]
        | None
    ) = None
    """The static features of a single recording: age=63,weight=71.5."""
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
    options = build(PredictOptions, values)
    from throughtime import state as trees
    from throughtime.app.console import ProgressDisplay, out
    from throughtime.app.dataset import open_recording
    from throughtime.app.model import one_thread
    from throughtime.app.predictions import (
        initial_state,
        output_file,
        predict_to_file,
        predict_to_folder,
    )

    trained, data = _open_run(options), options.data
    names = [] if data is None else [data] if Path(data).exists() else data.split(";")
    paths = [Path(name.strip()) for name in names]
    target = output_file(paths, options.split, options.out, options.format) if paths else None
    with ProgressDisplay() as display:
        how: dict[str, Any] = {
            "missing": options.missing,
            "on_nan": options.on_nan,
            "on_phase": display.phase,
        }
        if target is None:
            single = ("static", "state_in", "state_out")
            if named := [flag(name) for name in single if name in values]:
                raise ConfigError(f"leave out {', '.join(named)}: for a single recording alone")
            target, other = options.out or Path("predictions"), paths[0] if paths else None
            files = predict_to_folder(
                trained, other, options.split, target, options.format or "csv", **how
            )
            steps, skipped = (sum(count) for count in zip(*(f[2:] for f in files), strict=True))
            source = f"of {counted(len(files), 'recording')}"
        else:
            net, spec = trained.net, trained.spec
            features = named_numbers(options.static) if options.static else None
            recording = open_recording(paths, spec, features)
            state = trees.load(options.state_in, initial_state(net)) if options.state_in else None
            with one_thread(when=spec.is_small(lanes=1)):
                after, skipped = predict_to_file(net, spec, recording, target, state=state, **how)
            if options.state_out:
                trees.save(after, options.state_out)
            steps, source = len(recording), f"from {data}"
    out.print(
        f"{counted(steps, 'frame')} {source} to {target}, by the model of update"
        f" {trained.spec.update}"
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
    return replace(run, config=replace(run.config, missing=missing or run.config.missing))


@declared
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
    options = build(ExportOptions, values)
    from throughtime.app.console import out as console
    from throughtime.app.export import export_run

    opened = _open_run(options)
    written = export_run(opened, options.out, options.check, options.steps, options.with_session)
    console.print(f"{', '.join(map(str, written.paths))} written")
    for verification, steps_of in (
        (written.recorded, ("step of the recording", "steps of the recording")),
        (written.verification, ("random step",)),
    ):
        if verification is not None:
            counts = counted(verification.steps, *steps_of)
            console.print(f"verified on {counts}: {verification.summary}")
    if written.settling is not None:
        console.print(str(written.settling))
    for remark in written.remarks:
        console.print(remark)


@declared
class AuditFlags(EvalOptions):
    """The flags of `audit` besides what it measures."""

    device: Device = "cpu"
    """Where to compute: cpu, cuda, ..."""


def audit(values: dict[str, Any]) -> None:
    """Measure what truncating the gradient costs a model and how long a cold start differs."""
    measured = {name: values.pop(name) for name in fields_of(AuditOptions) if name in values}
    what, options = build(AuditOptions, measured), build(AuditFlags, values)
    from throughtime.app.audit import audit_run
    from throughtime.app.console import ProgressDisplay, out, print_json
    from throughtime.app.evaluate import keep_results

    trained = _open_run(options, options.device, options.missing)
    run = _with_own_loss(trained, trust_code=options.trust_code)
    with ProgressDisplay(enabled=not options.json) as display:
        report = audit_run(run, what, options.data, options.split, display.phase)
    written = keep_results(trained, trained.files.audit, report.facts())
    if options.json:
        print_json(report.facts())
        return
    out.print(f"{report}\n{written}")


def _with_own_loss(run: "Run", *, trust_code: bool) -> "Run":
    """The run with a user's loss in the copy of its file that the run keeps."""
    from throughtime.app.user_class import kept_class

    for named in run.config.code():
        if named.setting == "loss":
            saved = run.files.read_checkpoint() or {"code": {}}
            kept = kept_class(run.folder, named, saved["code"].get("loss"), trust_code=trust_code)
            return replace(run, config=replace(run.config, loss=str(kept)))
    return run


@declared
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
    json: bool = False
    """Print one JSON object on standard output, and nothing else."""


def doctor(values: dict[str, Any]) -> int:
    """Run a training script unchanged and name what is wrong with its loop.

    Exit code: that of the script, if it fails. Otherwise 1: there are findings; 2: there is no
    verdict, since no recurrent state was watched or the doctor itself failed; 0: nothing found.
    """
    options = build(DoctorOptions, values)
    from throughtime.app.script import watch_script

    return watch_script(
        options.script,
        click.get_current_context().args,
        options.ignore.split(",") if options.ignore else (),
        module=options.module,
        strict=options.strict,
        as_json=options.json,
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
