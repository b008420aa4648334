"""The commands: train, eval, predict, export, audit, doctor, demo, selftest.

A command imports what it runs when it runs, so that `throughtime --help` needs no torch.
"""

import json
import re
import sys
from contextlib import suppress
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from throughtime import __version__
from throughtime.app.config import make_config
from throughtime.app.flags import check_options, merge_settings, to_settings, train_signature
from throughtime.app.values import named_numbers, read_toml
from throughtime.errors import ConfigError, RunError, ThroughtimeError, counted

if TYPE_CHECKING:
    from throughtime.app.run_folder import RunFolder

_HELP = "Train recurrent networks on one unbroken stream, with the state carried."
app = typer.Typer(
    name="throughtime",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SPLIT = "Which split: train, valid, ..., all."
_MISSING = "How to treat inputs that are NaN or infinite."


def _option(help_: str, default: str | bool = True, *, flag: str | None = None) -> Any:
    """A flag: its help, what that says of the default, and its name if the parameter differs."""
    return typer.Option(*([flag] if flag else []), help=help_, show_default=default)


_Run = Annotated[Path, typer.Argument(help="The folder of a run.")]
_Data = Annotated[Path | None, typer.Argument(help="As for train; default: the data of the run.")]
_Missing = Annotated[
    Literal["error", "mask"] | None,
    _option(_MISSING, "as in training"),
]


_Json = Annotated[
    bool, _option("Print one JSON object on standard output, and nothing else.", flag="--json")
]
_NO_MEMORY = re.compile("(?i)can't allocate memory|not enough memory|out of memory")


def main() -> None:
    """Run the command line; an expected error is one message and exit code 2, no traceback."""
    _raise_file_limit()
    try:
        commands = _commands()
        check_options(commands, sys.argv[1:])
        commands(prog_name="throughtime")
    except (ThroughtimeError, OSError) as error:
        from throughtime.app.distributed import print_start_error

        if isinstance(error, OSError) and error.errno == ENOSPC and error.filename is None:
            error.filename = "standard output"  # writes to files name them
        print_start_error(error)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        from throughtime.app.distributed import print_start_error

        reason = str(error).splitlines()[0] if str(error) else "no memory"
        print_start_error(
            RunError(f"out of memory ({reason[:200]}); take fewer --lanes, or smaller --hidden")
        )
        sys.exit(2)


def _raise_file_limit() -> None:
    """A memory-mapped recording keeps a file open, and the usual soft limit is 1,024 files."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # a system may refuse its own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _commands() -> Any:
    """All commands, with plain defaults of the options before a command.

    Typer gives `--help` and those of shell completion `None`, and imports pydantic to convert it: a
    third of the time of `throughtime train --help`.
    """
    commands: Any = typer.main.get_command(app)
    for parameter in commands.get_params(typer.Context(commands, **commands.context_settings)):
        parameter.default = False
    return commands


def _print_version(requested: bool) -> None:
    if requested:
        print(f"throughtime {__version__}")
        raise typer.Exit


@app.callback(help=_HELP)
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of all commands."""


def train(context: typer.Context, **options: Any) -> None:
    """Train a model on recordings."""
    config, resume = options.pop("config"), options.pop("resume")
    flags = to_settings(
        {
            name: value
            for name, value in options.items()
            if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
        }
    )
    other = sorted(flags.keys() - {"updates", "epochs"})
    if resume is not None and (other or config is not None):
        raise ConfigError(
            f"--resume goes on with the settings of {resume}; leave out"
            f" {', '.join(other) or '--config'}. Only --updates or --epochs may be given, to train"
            " on to another end."
        )
    if resume is not None:
        from throughtime.app.run_folder import RunFolder

        settings = RunFolder(resume).read_config()
    else:
        merged = merge_settings(read_toml(config) if config is not None else {}, flags)
        if "data" in merged:
            merged.setdefault("out", f"runs/{Path(str(merged['data'])).resolve().stem}")
        settings = make_config(merged, source=str(config or "the command line"))
    from throughtime.app.console import ProgressDisplay, run_training
    from throughtime.app.distributed import started_team
    from throughtime.app.train import Training

    with started_team(settings) as team, ProgressDisplay(enabled=team.is_first) as display:
        shared: dict[str, Any] = {"team": team, "on_phase": display.phase}
        training = (
            Training.begin(settings, **shared)
            if resume is None
            else Training.resume(resume, **flags, **shared)
        )
        run_training(training, display)


_signature = train_signature()
setattr(train, "__signature__", _signature)  # noqa: B010 (typer reads the flags from it)
train.__annotations__ = {name: p.annotation for name, p in _signature.parameters.items()}
app.command()(train)


@app.command(name="eval")
def evaluate(
    run: _Run,
    data: _Data = None,
    split: Annotated[
        str | None, _option(_SPLIT, "test; without named splits valid, or all of other data")
    ] = None,
    missing: _Missing = None,
    as_json: _Json = False,
) -> None:
    """Score a trained model on whole recordings, state carried, and update its report."""
    from throughtime.app.console import ProgressDisplay, out, print_json, print_scores
    from throughtime.app.evaluate import evaluate_run
    from throughtime.app.report.run_page import write_report

    folder = _open_run(run)
    with ProgressDisplay(enabled=not as_json) as display:
        split, scores = evaluate_run(folder, data, split, missing, display.phase)
    path = folder.scores(split)
    write_report(folder)
    if as_json:
        print_json(json.loads(path.read_text(encoding="utf-8")))
        return
    print_scores(split, scores.metrics, scores.recordings, path)
    update = json.loads(path.read_text(encoding="utf-8"))["update"]
    out.print(f"{scores.steps:,} frames scored, by the model of update {update}; {path} written")


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
    to: Annotated[
        Path | None,
        _option(
            "The file to write: .npy (T, C), .csv or .parquet with a row per step. A folder for"
            " many recordings, with a file for each.",
            "predictions.csv, or the folder predictions",
            flag="--out",
        ),
    ] = None,
    split: Annotated[str | None, _option(_SPLIT, "as eval")] = None,
    form: Annotated[
        Literal["npy", "csv", "parquet"] | None,
        _option("The format of the files in a folder.", "csv", flag="--format"),
    ] = None,
    static: Annotated[str | None, _option("Its static features: age=63,weight=71.5.")] = None,
    state_in: Annotated[
        Path | None, _option("Start from a state that an earlier call wrote.")
    ] = None,
    state_out: Annotated[
        Path | None, _option("Write the state after the last step, to go on later.")
    ] = None,
    missing: Annotated[
        Literal["error", "mask"],
        _option(_MISSING),
    ] = "error",
    on_nan: Annotated[
        Literal["raise", "hold", "reset"],
        _option(
            "At inputs that are NaN or infinite: stop, leave the step out and hold the state, or"
            " start anew after it."
        ),
    ] = "raise",
) -> None:
    """Run a trained model over whole recordings, in memory that does not grow with them."""
    from throughtime import state as trees
    from throughtime.app.console import ProgressDisplay, out
    from throughtime.app.model import load_model, one_thread
    from throughtime.app.predictions import (
        initial_state,
        open_recording,
        output_file,
        predict_to_file,
        predict_to_folder,
    )

    folder = _open_run(run)
    paths = [] if data is None else [Path(data)] if Path(data).exists() else _split_paths(data)
    target = output_file(paths, split, to, form) if data is not None else None
    if target is None:
        single = {"static": static, "state-in": state_in, "state-out": state_out}
        if named := [f"--{name}" for name, value in single.items() if value is not None]:
            raise ConfigError(f"{', '.join(named)} belong to a single recording; leave them out")
        with ProgressDisplay() as display:
            files = predict_to_folder(
                folder,
                None if data is None else paths[0],
                split,
                to or Path("predictions"),
                form or "csv",
                missing=missing,
                on_nan=on_nan,
                on_phase=display.phase,
            )
        frames, written = sum(file.steps for file in files), to or Path("predictions")
        out.print(f"{frames:,} frames of {counted(len(files), 'recording')} to {written}")
        _print_skipped(sum(file.skipped for file in files))
        return
    net, spec = load_model(folder.model)
    source = open_recording(paths, spec, None if static is None else _static_features(static))
    state = trees.load(state_in, initial_state(net)) if state_in is not None else None
    with one_thread(when=spec.is_small(lanes=1)), ProgressDisplay() as display:
        after, skipped = predict_to_file(
            net,
            spec,
            source,
            target,
            state=state,
            missing=missing,
            on_nan=on_nan,
            on_phase=display.phase,
        )
    if state_out is not None:
        trees.save(after, state_out)
    out.print(
        f"{len(source):,} frames from {data} to {target}, by the model of update {spec.update}"
    )
    _print_skipped(skipped)


def _open_run(run: Path) -> "RunFolder":
    """The folder of a run; a remark on standard error if the run is not finished.

    Raises:
        RunError: no run there, or none that reached a checkpoint.
    """
    from throughtime.app.model import unfinished_remark
    from throughtime.app.run_folder import RunFolder

    folder = RunFolder(run)
    if not folder.model.exists():
        folder.read_config()
    if remark := unfinished_remark(folder.model):
        print(f"remark: {remark}", file=sys.stderr, flush=True)
    return folder


def _split_paths(text: str) -> list[Path]:
    return [Path(part.strip()) for part in text.split(";")]


def _print_skipped(skipped: int) -> None:
    from throughtime.app.console import out

    if skipped:
        out.print(f"{counted(skipped, 'step')} without an answer: their inputs are NaN or infinite")


@app.command()
def export(
    run: _Run,
    out: Annotated[
        Path,
        _option("The file to write: .onnx, .c (and .h), .js, .html, .nam, .json.", flag="--out"),
    ],
    to: Annotated[
        Literal["onnx", "c", "js", "html", "nam", "rtneural"] | None,
        _option("The format.", "by the suffix of --out"),
    ] = None,
    check: Annotated[
        Path | None,
        _option("Verify the file on this recording as well, and measure its settling time."),
    ] = None,
    steps: Annotated[int, _option("Random steps to verify the file on; 0 for none.")] = 100_000,
) -> None:
    """Write a trained model, its state inside, as a file that runs without Python."""
    from throughtime.app.console import out as console
    from throughtime.app.export import export_run

    written = export_run(_open_run(run), out, to, check, steps)
    console.print(f"{', '.join(map(str, written.paths))} written")
    for verification, steps_of in (
        (written.recorded, "steps of the recording"),
        (written.verification, "random steps"),
    ):
        if verification is not None:
            console.print(f"verified on {verification.steps:,} {steps_of}: {verification.summary}")
    if written.settling is not None:
        console.print(str(written.settling))
    for remark in written.remarks:
        console.print(remark)


def _static_features(text: str) -> dict[str, float]:
    try:
        return named_numbers(text)
    except ValueError as error:
        raise ConfigError(
            f"--static {text!r}: expected a finite number for each feature, such as"
            " age=63,weight=71.5"
        ) from error


@app.command()
def audit(
    run: _Run,
    data: _Data = None,
    split: Annotated[
        str | None,
        _option(_SPLIT, "train; for other data as eval"),
    ] = None,
    horizons: Annotated[
        str | None,
        _option("Horizons to audit, separated by commas.", "50,200,800 and the run's own"),
    ] = None,
    stride: Annotated[
        int | None,
        _option("Steps between two updates.", "each horizon is its own stride"),
    ] = None,
    steps: Annotated[
        int | None,
        _option("Steps of every lane.", "8 times the longest horizon"),
    ] = None,
    lanes: Annotated[
        int | None,
        _option("Recordings played at the same time.", "as in training"),
    ] = None,
    max_lag: Annotated[
        int,
        _option("Steps back that the gradient is traced, and for which a cold start is compared."),
    ] = 1000,
    tolerance: Annotated[float, _option("Largest acceptable relative bias.")] = 0.1,
    missing: _Missing = None,
    device: Annotated[str | None, _option("Where to compute: cpu, cuda, ...", "cpu")] = None,
    as_json: _Json = False,
) -> None:
    """Measure what truncating the gradient costs a model and how long a cold start differs."""
    from throughtime.app.audit import AuditJob, AuditOptions
    from throughtime.app.console import ProgressDisplay, out, print_audit, print_json
    from throughtime.app.report.run_page import write_report

    folder, numbers = _open_run(run), None
    if horizons is not None:
        try:
            numbers = tuple(int(part) for part in horizons.split(","))
        except ValueError as error:
            raise ConfigError(
                f"--horizons {horizons!r}: expected whole numbers of steps, separated by commas,"
                " such as 50,200,800"
            ) from error
    options = AuditOptions(numbers, stride, steps, lanes, max_lag, tolerance)
    with ProgressDisplay(enabled=not as_json) as display:
        job = AuditJob(folder, options, data, split, device, missing)
        if not as_json:
            out.print(job.describe())
        report = job.run(display.phase)
    report.write(folder.audit)
    write_report(folder)
    if as_json:
        print_json(report.facts())
        return
    print_audit(report, folder.read_config())
    out.print(f"{folder.audit} and {folder.report} written")


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
        _option("Codes that are not reported, separated by commas, such as TT201,TT207."),
    ] = None,
    strict: Annotated[bool, _option("Stop at the first finding.", flag="--strict")] = False,
    report: Annotated[
        Path | None,
        _option("Write the findings to a page, too: a file that ends in .html."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Run a training script unchanged and name what is wrong with its loop.

    Exit code: that of the script, if it fails. Otherwise 1: there are findings; 2: there is no
    verdict, since no recurrent state was watched or the doctor itself failed; 0: nothing found.
    """
    from throughtime.app.script import watch_script

    codes = ignore.split(",") if ignore else ()
    code = watch_script(
        script, context.args, codes, module=module, strict=strict, report=report, as_json=as_json
    )
    raise typer.Exit(code)


@app.command()
def demo(
    short: Annotated[
        bool, _option("One seed only: to see that everything works.", flag="--short")
    ] = False,
    updates: Annotated[int, _option("Updates of each network.")] = 1_000,
    to: Annotated[Path, _option("The folder of the report.", flag="--out")] = Path("runs/demo"),
) -> None:
    """Train on windows and on the unbroken stream, on generated data whose best score is known."""
    from throughtime.app.console import out, print_table
    from throughtime.app.demo import credit, exact, results_table, run_demo, write_live_page
    from throughtime.app.report.demo_page import write_report

    if updates < 1:
        raise ConfigError(f"updates={updates}: expected at least 1")
    to.mkdir(parents=True, exist_ok=True)
    out.print(
        "Rare pulses switch a machine off and on; every frame is labelled off or on. The same LSTM,"
        " trained four ways:"
    )

    def on_loss(name: str, update: int, loss: float) -> None:
        if update % 500 == 0 or update == updates:
            out.print(f"  {name}: update {update}/{updates}  loss {loss:.4f}")

    results = run_demo(updates, range(1 if short else 3), on_loss)
    print_table(f"after {updates} updates", results_table(results))
    for line in (credit(results), exact(results)):
        out.print(line)
    out.print(f"the pictures are in {write_report(results, to)}")
    out.print(f"two of the nets run side by side in {write_live_page(results, to)}")


@app.command()
def selftest(
    device: Annotated[
        str | None,
        _option("Which device: cuda, cuda:1, mps, cpu.", "the accelerator, if there is one"),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Compare every policy, layer and measurement on a device with plain PyTorch on the CPU.

    Exit code 1: something differs. A report of a fault should have the output of --json.
    """
    from throughtime.app.console import out, print_json
    from throughtime.app.selftest import available_device, environment, self_test

    chosen = available_device(device)
    facts = environment(chosen)
    if not as_json:
        out.print(", ".join(f"{key} {value}" for key, value in facts.items() if value is not None))
    results: list[Any] = []
    for result in self_test(chosen):
        results.append(result)
        if not as_json:
            out.print(str(result), highlight=False, markup=False)
    failed = [result for result in results if not result.holds]
    if as_json:
        laws = [result.as_dict() for result in results]
        print_json({**facts, "passed": not failed, "laws": laws})
    else:
        out.print(f"{len(results) - len(failed)} of {len(results)} hold on {chosen}")
    raise typer.Exit(bool(failed))
