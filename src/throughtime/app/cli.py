"""The commands: train, eval, predict, export, audit, doctor.

A command imports what it runs when it runs, so that `throughtime --help` needs no torch.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from throughtime import __version__
from throughtime.app.config import AuditOptions, Config, make_config
from throughtime.app.flags import (
    check_options,
    failures_printed,
    merge_settings,
    to_settings,
    with_flags,
)
from throughtime.app.values import named_numbers, read_toml
from throughtime.errors import ConfigError, counted

if TYPE_CHECKING:
    from throughtime.app.load import Run

_HELP = "Train recurrent networks on one unbroken stream, with the state carried."
app = typer.Typer(
    name="throughtime",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SPLIT = "Which split: train, valid, ..., all."
_STATIC = "a finite number for each feature, such as age=63,weight=71.5"
_MISSING = "How to treat inputs that are NaN or infinite."


def _option(
    help_: str, default: str | bool = True, *, flag: str | None = None, panel: str | None = None
) -> Any:
    """A flag: its help, what that says of the default, its name if it differs, and its panel."""
    names = [flag] if flag else []
    return typer.Option(*names, help=help_, show_default=default, rich_help_panel=panel)


_Run = Annotated[Path, typer.Argument(help="The folder of a run.")]
_Data = Annotated[Path | None, typer.Argument(help="As for train; default: the data of the run.")]
_Missing = Annotated[
    Literal["error", "mask"] | None, _option(_MISSING, "as in training", panel="Data")
]
_Trust = Annotated[
    bool,
    _option(
        "Execute the code that the run folder keeps, though you have not trained with it.",
        flag="--trust-code",
    ),
]
_Json = Annotated[
    bool,
    _option(
        "Print one JSON object on standard output, and nothing else.",
        flag="--json",
        panel="Output",
    ),
]


def main() -> None:
    """Run the command line; an expected error is one message and exit code 2, no traceback."""
    _raise_file_limit()
    with failures_printed():
        commands = all_commands()
        check_options(commands, sys.argv[1:])
        commands(prog_name="throughtime")


def _raise_file_limit() -> None:
    """A memory-mapped recording keeps a file open, and the usual soft limit is 1,024 files."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # a system may refuse its own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def all_commands() -> Any:
    """All commands, with plain defaults of the options before a command.

    Typer gives `--help` and those of shell completion `None`, and imports pydantic to convert it: a
    third of the time of `throughtime train --help`.
    """
    commands: Any = typer.main.get_command(app)
    for parameter in commands.get_params(typer.Context(commands, **commands.context_settings)):
        parameter.default = False
    return commands


@app.callback(help=_HELP, invoke_without_command=True)
def root(version: Annotated[bool, _option("Print the version.", flag="--version")] = False) -> None:
    """Options of all commands."""
    if version:
        print(f"throughtime {__version__}")
        raise typer.Exit


@app.command()
@with_flags(Config)
def train(
    context: typer.Context,
    config: Annotated[
        Path | None,
        _option("A TOML file with the same settings as keys; flags win.", panel="Output"),
    ] = None,
    resume: Annotated[
        Path | None,
        _option("Go on with the run in this folder, from its last checkpoint.", panel="Output"),
    ] = None,
    trust_code: _Trust = False,
    **options: Any,
) -> None:
    """Train a model on recordings."""
    flags = to_settings(
        {
            name: value
            for name, value in options.items()
            if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
        }
    )
    if resume is not None:
        from throughtime.app.run_folder import RunFolder

        other = sorted(flags.keys() - {"updates", "epochs"})
        named = ["DATA" if n == "data" else f"--{n.replace('_', '-')}" for n in other]
        if other or config is not None:
            raise ConfigError(
                f"--resume goes on with the settings of {resume}; leave out"
                f" {', '.join(named) or '--config'}. Only --updates or --epochs may be given, to"
                " train on to another end."
            )
        settings = RunFolder(resume).read_config()
    else:
        merged = merge_settings(read_toml(config) if config is not None else {}, flags)
        merged.setdefault("out", f"runs/{Path(str(merged.get('data'))).resolve().stem}")
        settings = make_config(merged, source="" if config is None else f"{config}: ")
    from throughtime.app.console import ProgressDisplay, run_training
    from throughtime.app.distributed import started_team
    from throughtime.app.train import Training

    with started_team(settings) as team, ProgressDisplay(enabled=team.is_first) as display:
        shared: dict[str, Any] = {"team": team, "on_phase": display.phase}
        training = (
            Training.begin(settings, **shared)
            if resume is None
            else Training.resume(resume, trust_code=trust_code, **flags, **shared)
        )
        run_training(training, display)


@app.command(name="eval")
def evaluate(
    run: _Run,
    data: _Data = None,
    split: Annotated[
        str | None,
        _option(
            _SPLIT,
            "test, or valid where there is none; without splits all of other data",
            panel="Data",
        ),
    ] = None,
    missing: _Missing = None,
    trust_code: _Trust = False,
    as_json: _Json = False,
) -> None:
    """Score a trained model on whole recordings, state carried, and update its report."""
    from throughtime.app.console import ProgressDisplay, out, print_json, print_scores
    from throughtime.app.evaluate import evaluate_run, keep_results

    trained = _open_run(run, trust_code=trust_code)
    with ProgressDisplay(enabled=not as_json) as display:
        scores = evaluate_run(_treating(trained, missing), data, split, display.phase)
    path = trained.files.scores(scores["split"])
    written = keep_results(trained, path, scores)
    if as_json:
        print_json(scores)
        return
    print_scores(scores["split"], scores["metrics"], scores["recordings"], path, trained.config)
    out.print(
        f"{counted(scores['steps'], 'frame')} scored, by the model of update {scores['update']};"
        f" {written}"
    )


@app.command()
def predict(
    run: _Run,
    data: Annotated[
        str | None,
        typer.Argument(
            help="A file with the input columns of the training, or several: 'a.csv;b.csv'; a"
            " folder or manifest of many recordings; default: the data of the run.",
        ),
    ] = None,
    split: Annotated[str | None, _option(_SPLIT, "as eval", panel="Data")] = None,
    static: Annotated[
        str | None, _option("Its static features: age=63,weight=71.5.", panel="Data")
    ] = None,
    missing: Annotated[Literal["error", "mask"], _option(_MISSING, panel="Data")] = "error",
    on_nan: Annotated[
        Literal["raise", "hold", "reset"],
        _option(
            "At inputs that are NaN or infinite: stop, leave the step out and hold the state, or"
            " start anew after it.",
            panel="Data",
        ),
    ] = "raise",
    state_in: Annotated[
        Path | None, _option("Start from a state that an earlier call wrote.", panel="State")
    ] = None,
    state_out: Annotated[
        Path | None,
        _option("Write the state after the last step, to go on later.", panel="State"),
    ] = None,
    to: Annotated[
        Path | None,
        _option(
            "The file to write: .npy (T, C), .csv or .parquet with a row per step. A folder for"
            " many recordings, with a file for each.",
            "predictions.csv, or the folder predictions",
            flag="--out",
            panel="Output",
        ),
    ] = None,
    form: Annotated[
        Literal["npy", "csv", "parquet"] | None,
        _option("The format of the files in a folder.", "csv", flag="--format", panel="Output"),
    ] = None,
    trust_code: _Trust = False,
) -> None:
    """Run a trained model over whole recordings, in memory that does not grow with them."""
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

    trained = _open_run(run, trust_code=trust_code)
    names = [] if data is None else [data] if Path(data).exists() else data.split(";")
    paths = [Path(name.strip()) for name in names]
    target = output_file(paths, split, to, form) if data is not None else None
    with ProgressDisplay() as display:
        how: dict[str, Any] = {"missing": missing, "on_nan": on_nan, "on_phase": display.phase}
        if target is None:
            single = {"static": static, "state-in": state_in, "state-out": state_out}
            if named := [f"--{name}" for name, value in single.items() if value is not None]:
                raise ConfigError(f"leave out {', '.join(named)}: for a single recording alone")
            target, other = to or Path("predictions"), paths[0] if paths else None
            files = predict_to_folder(trained, other, split, target, form or "csv", **how)
            steps, skipped = (sum(count) for count in zip(*(f[2:] for f in files), strict=True))
            source = f"of {counted(len(files), 'recording')}"
        else:
            net, spec = trained.net, trained.spec
            features = None if static is None else named_numbers("static", static, _STATIC)
            recording = open_recording(paths, spec, features)
            state = trees.load(state_in, initial_state(net)) if state_in is not None else None
            with one_thread(when=spec.is_small(lanes=1)):
                after, skipped = predict_to_file(net, spec, recording, target, state=state, **how)
            if state_out is not None:
                trees.save(after, state_out)
            steps, source = len(recording), f"from {data}"
    out.print(
        f"{counted(steps, 'frame')} {source} to {target}, by the model of update"
        f" {trained.spec.update}"
    )
    if skipped:
        out.print(f"{counted(skipped, 'step')} without an answer: the inputs are NaN or infinite")


def _open_run(folder: Path, device: str | None = None, *, trust_code: bool) -> "Run":
    """A run; a remark on standard error if it is not finished.

    Raises:
        RunError: no run there, none that reached a checkpoint, or code that is not trusted.
    """
    from throughtime.app.load import load_run

    run = load_run(folder, device=device or "cpu", trust_code=trust_code)
    if run.remark:
        print(f"remark: {run.remark}", file=sys.stderr, flush=True)
    return run


def _treating(run: "Run", missing: Literal["error", "mask"] | None) -> "Run":
    """The run with another treatment of inputs that are NaN or infinite, if one is named."""
    return replace(run, config=replace(run.config, missing=missing or run.config.missing))


@app.command()
def export(
    run: _Run,
    check: Annotated[
        Path | None,
        _option(
            "Verify the file on this recording as well, and measure its settling time.",
            panel="Verification",
        ),
    ] = None,
    steps: Annotated[
        int, _option("Random steps to verify the file on; 0 for none.", panel="Verification")
    ] = 100_000,
    trust_code: _Trust = False,
    *,
    out: Annotated[
        Path,
        _option(
            "The file to write: .onnx, .c (and .h), .js, .nam, .json.",
            flag="--out",
            panel="Output",
        ),
    ],
    with_session: Annotated[
        bool,
        _option(
            "Also write session.py, which runs an .onnx file with numpy and onnxruntime only.",
            flag="--with-session",
            panel="Output",
        ),
    ] = False,
) -> None:
    """Write a trained model, its state inside, as a file that runs without Python."""
    from throughtime.app.console import out as console
    from throughtime.app.export import export_run

    opened = _open_run(run, trust_code=trust_code)
    written = export_run(opened, out, check, steps, with_session)
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


@app.command()
@with_flags(AuditOptions)
def audit(
    run: _Run,
    data: _Data = None,
    split: Annotated[
        str | None, _option(_SPLIT, "train; for other data as eval", panel="Data")
    ] = None,
    missing: _Missing = None,
    device: Annotated[
        str | None, _option("Where to compute: cpu, cuda, ...", "cpu", panel="Measurement")
    ] = None,
    trust_code: _Trust = False,
    as_json: _Json = False,
    **options: Any,
) -> None:
    """Measure what truncating the gradient costs a model and how long a cold start differs."""
    from throughtime.app.audit import AuditJob
    from throughtime.app.console import ProgressDisplay, out, print_audit, print_json
    from throughtime.app.evaluate import keep_results

    if options["horizons"] is not None:
        try:
            options["horizons"] = tuple(int(part) for part in options["horizons"].split(","))
        except ValueError as error:
            raise ConfigError(
                f"--horizons {options['horizons']!r}: expected whole numbers of steps, separated by"
                " commas, such as 50,200,800"
            ) from error
    what, trained = AuditOptions(**options), _open_run(run, device, trust_code=trust_code)
    with ProgressDisplay(enabled=not as_json) as display:
        job = AuditJob(_treating(trained, missing), what, data, split, display.phase)
        if not as_json:
            out.print(job.describe())
        report = job.run(display.phase)
    written = keep_results(trained, trained.files.audit, report.facts())
    if as_json:
        print_json(report.facts())
        return
    print_audit(report, trained.config)
    out.print(written)


@app.command(
    context_settings={
        "allow_interspersed_args": False,
        "allow_extra_args": True,
        "ignore_unknown_options": True,
    }
)
def doctor(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(help="The script to run; what follows it are its own arguments.")
    ],
    module: Annotated[
        bool, _option("SCRIPT is the name of a module, as after python -m.", flag="-m")
    ] = False,
    ignore: Annotated[
        str | None,
        _option(
            "Codes that are not reported, separated by commas, such as TT201,TT207.",
            panel="Findings",
        ),
    ] = None,
    strict: Annotated[
        bool, _option("Stop at the first finding.", flag="--strict", panel="Findings")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Run a training script unchanged and name what is wrong with its loop.

    Exit code: that of the script, if it fails. Otherwise 1: there are findings; 2: there is no
    verdict, since no recurrent state was watched or the doctor itself failed; 0: nothing found.
    """
    from throughtime.app.script import watch_script

    codes = ignore.split(",") if ignore else ()
    code = watch_script(script, context.args, codes, module=module, strict=strict, as_json=as_json)
    raise typer.Exit(code)
