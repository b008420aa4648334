"""The commands: train, eval, predict, audit, doctor, demo."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from throughtime import __version__
from throughtime import state as trees
from throughtime.app import demo as demos
from throughtime.app.assess import assess
from throughtime.app.audit import Question, look_at
from throughtime.app.cli.audit import horizons_in, print_audit
from throughtime.app.cli.doctor import SCRIPT
from throughtime.app.cli.doctor import doctor as examine
from throughtime.app.cli.numbers import numbers_in
from throughtime.app.cli.ranks import team_of
from throughtime.app.cli.screen import out, print_scores
from throughtime.app.cli.training import train_through
from throughtime.app.config import make_config, read_toml
from throughtime.app.folder import Folder
from throughtime.app.model import load_model
from throughtime.app.report import demo_page, run_page
from throughtime.app.threads import one_thread, small
from throughtime.app.train import Training, begin
from throughtime.app.write import initial_state, open_recording, predict_to_file
from throughtime.errors import ConfigError

app = typer.Typer(
    name="throughtime",
    help=(
        "Train recurrent networks the way they are deployed: on one unbroken stream, with the state"
        " carried."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts name their defaults in brackets
)


def _version(asked: bool) -> None:
    if asked:
        out.print(f"throughtime {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train recurrent networks the way they are deployed: on one unbroken stream, with the state carried."""


@app.command()
def train(  # every setting is a flag
    data: Annotated[
        Path | None,
        typer.Argument(
            help=(
                "A file of one recording, a folder of them, or a manifest (CSV:"
                " id,split,inputs,targets or label)."
            )
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="classify or regress.")] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="Input columns, separated by commas; default: all that are not targets."),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help=(
                "Target columns, separated by commas; default: 'targets', or all of a targets file."
            )
        ),
    ] = None,
    static: Annotated[
        str | None,
        typer.Option(
            help="Columns of the manifest that are numbers of a recording, separated by commas."
        ),
    ] = None,
    csv: Annotated[
        str | None,
        typer.Option(
            help="Signals of a CSV file: columns, or rows (time along the line). [default: columns]"
        ),
    ] = None,
    frame: Annotated[
        int | None, typer.Option(help="Rows of a file that are one step. [default: 1]")
    ] = None,
    label_every: Annotated[
        int | None, typer.Option(help="Rows of the inputs that one row of the targets file is for.")
    ] = None,
    label_at: Annotated[
        str | None,
        typer.Option(
            help=(
                "Which steps of a labelled span count: all or last. [default: all of an interval,"
                " else last]"
            )
        ),
    ] = None,
    outside: Annotated[
        str | None,
        typer.Option(
            help="The class of steps outside all intervals. [default: they have no target]"
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="lstm, gru or rnn. [default: lstm]")] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Width of the recurrent layers. [default: 64]")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="How many of them. [default: 1]")] = None,
    lanes: Annotated[
        int | None,
        typer.Option(help="Recordings played side by side, on all ranks together. [default: 16]"),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Steps between two updates. [default: 100]")
    ] = None,
    horizon: Annotated[
        int | None,
        typer.Option(
            help="Steps that credit may flow back, at least the stride. [default: the stride]"
        ),
    ] = None,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--no-exact",
            help="The exact gradient in flat memory, no horizon. [default: no-exact]",
        ),
    ] = None,
    segment: Annotated[
        int | None,
        typer.Option(
            help=(
                "With --exact: steps between two updates. [default: to where all lanes start a"
                " recording]"
            )
        ),
    ] = None,
    warm_up: Annotated[
        int | None,
        typer.Option(help="First steps of a recording whose loss does not count. [default: 0]"),
    ] = None,
    offset: Annotated[
        int | None,
        typer.Option(
            help="Leave out up to so many first steps of recordings, at random. [default: 0]"
        ),
    ] = None,
    hand_off: Annotated[
        bool | None,
        typer.Option(
            "--hand-off/--no-hand-off",
            help=(
                "A part starts where the one before it ended the last epoch. [default: no-hand-off]"
            ),
        ),
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="Processes that read ahead, or thread. [default: 0]")
    ] = None,
    train_on: Annotated[
        str | None,
        typer.Option(
            help=(
                "stream, or windows: shuffled windows of a stride from a zero state, to compare."
                " [default: stream]"
            )
        ),
    ] = None,
    updates: Annotated[int | None, typer.Option(help="Stop after so many updates.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Or after playing every recording so often. [default: 1]")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Adam's learning rate. [default: 0.001]")] = None,
    clip: Annotated[
        float | None, typer.Option(help="Largest norm of the gradient. [default: 1]")
    ] = None,
    class_weights: Annotated[
        str | None,
        typer.Option(help="none, balanced, or numbers such as pvc=5,beat=2. [default: none]"),
    ] = None,
    missing: Annotated[
        str | None,
        typer.Option(help="Inputs that are NaN or infinite: error or mask. [default: error]"),
    ] = None,
    holdout: Annotated[
        float | None,
        typer.Option(help="Share held out for validation where no manifest says. [default: 0.2]"),
    ] = None,
    valid_every: Annotated[
        int | None,
        typer.Option(
            help="Updates between validations; 0: only at the end. [default: a fifth of the run]"
        ),
    ] = None,
    checkpoint_every: Annotated[
        float | None, typer.Option(help="Seconds between checkpoints. [default: 30]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draws weights and order. [default: 0]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: cpu]")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or float64. [default: float32]")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help=(
                "single: one process; ddp: several share the lanes (needs Lightning). [default:"
                " single]"
            )
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="With ddp: processes on each node, or its GPUs. [default: 1]")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="With ddp: machines. [default: 1]")] = None,
    run: Annotated[
        Path | None, typer.Option("--out", help="The run folder. [default: runs/NAME-OF-DATA]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with the same settings as keys; flags win.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the run in this folder, from its last checkpoint."),
    ] = None,
) -> None:
    """Train a model on recordings."""
    given = {
        k: v for k, v in locals().items() if k not in {"config", "resume", "run"} and v is not None
    }
    flags = _settings(given | ({} if run is None else {"out": run}))
    if resume is not None:
        if set(flags) - {"updates", "epochs"} or config is not None:
            raise ConfigError(
                f"--resume goes on with the settings of {resume}; leave out "
                f"{', '.join(sorted(set(flags) - {'updates', 'epochs'})) or '--config'}. "
                "Only --updates or --epochs may be given, to train on to another end."
            )
        with team_of(Folder(resume).read_config()) as team:
            train_through(Training.resume(resume, updates=updates, epochs=epochs, team=team))
    else:
        settings = (read_toml(config) if config is not None else {}) | flags
        if "data" in settings:
            settings.setdefault("out", f"runs/{Path(str(settings['data'])).resolve().stem}")
        resolved = make_config(settings, source=str(config or "the command line"))
        with team_of(resolved) as team:
            train_through(begin(resolved, team))


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """The flags as settings: names of columns apart, paths as text, and a number of workers as one."""
    flags = {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
    flags |= {
        k: tuple(c.strip() for c in flags[k].split(","))
        for k in ("inputs", "targets", "static")
        if k in flags
    }
    if re.fullmatch(r"-?[0-9]+", flags.get("workers", "")):
        flags["workers"] = int(flags["workers"])
    return flags


@app.command(name="eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    data: Annotated[
        Path | None, typer.Argument(help="As for train; default: the data of the run.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help=(
                "Which split: train, valid, ..., all. [default: test; without names valid, or all"
                " of other data]"
            )
        ),
    ] = None,
    missing: Annotated[
        str | None,
        typer.Option(
            help="Inputs that are NaN or infinite: error or mask. [default: as in training]"
        ),
    ] = None,
) -> None:
    """Score a trained model on whole recordings, state carried, and put the scores into its report."""
    folder = Folder(run)
    split, found = assess(folder, data, split, missing)
    print_scores(split, found.metrics, found.recordings, folder.scores(split))
    out.print(f"{found.steps:,} frames scored; {folder.scores(split)} written")
    run_page.write_report(folder)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    recording: Annotated[
        str,
        typer.Argument(
            help="A file with the input columns of the training, or several: 'a.csv;b.csv'."
        ),
    ],
    to: Annotated[
        Path,
        typer.Option("--out", help="Where to write: .npy (T, C), or .csv with a line per step."),
    ] = Path("predictions.csv"),
    static: Annotated[
        str | None, typer.Option(help="Its static features: age=63,weight=71.5.")
    ] = None,
    state_in: Annotated[
        Path | None, typer.Option(help="Start from a state that an earlier call wrote.")
    ] = None,
    state_out: Annotated[
        Path | None, typer.Option(help="Write the state after the last step, to go on later.")
    ] = None,
    missing: Annotated[
        str, typer.Option(help="Inputs that are NaN or infinite: error or mask.")
    ] = "error",
) -> None:
    """Run a trained model over one whole recording, in memory that does not grow with its length."""
    if missing not in {"error", "mask"}:
        raise ConfigError(f"missing={missing!r}: expected 'error' or 'mask'")
    paths = (
        [Path(recording)]
        if Path(recording).exists()
        else [Path(part.strip()) for part in recording.split(";")]
    )
    if to.exists() and any(path.exists() and to.samefile(path) for path in paths):
        raise ConfigError(f"{to}: is the recording itself; choose another --out")
    net, spec = load_model(Folder(run).model)
    source = open_recording(paths, spec, None if static is None else numbers_in(static))
    state = trees.load(state_in, initial_state(net)) if state_in is not None else None
    with one_thread(when=small(spec, lanes=1)):
        after = predict_to_file(net, spec, source, to, state=state, missing=missing)
    if state_out is not None:
        trees.save(after, state_out)
    out.print(f"{len(source):,} frames from {recording} to {to}")


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    data: Annotated[
        Path | None, typer.Argument(help="As for train; default: the data of the run.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Which split: train, valid, ..., all. [default: train; for other data as eval]"
        ),
    ] = None,
    horizons: Annotated[
        str | None,
        typer.Option(
            help="Horizons to audit, separated by commas. [default: 50,200,800 and the run's own]"
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Steps between two updates. [default: each horizon is its own]"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of every lane to look at. [default: 8 times the longest horizon]"),
    ] = None,
    lanes: Annotated[
        int | None, typer.Option(help="Recordings played side by side. [default: as in training]")
    ] = None,
    max_lag: Annotated[int, typer.Option(help="Steps back that the gradient is traced.")] = 1000,
    tolerance: Annotated[float, typer.Option(help="Largest relative bias to put up with.")] = 0.1,
    missing: Annotated[
        str | None,
        typer.Option(
            help="Inputs that are NaN or infinite: error or mask. [default: as in training]"
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: cpu]")] = None,
) -> None:
    """Measure what truncating the gradient costs a trained model, and put it into its report."""
    folder = Folder(run)
    question = Question(
        None if horizons is None else horizons_in(horizons),
        stride,
        steps,
        lanes,
        max_lag,
        tolerance,
    )
    look = look_at(folder, question, data, split, device, missing)
    out.print(look.describe())
    found = look.go()
    found.write(folder.audit)
    print_audit(out, found, folder.read_config())
    run_page.write_report(folder)
    out.print(f"{folder.audit} and {folder.report} written")


app.command(name="doctor", context_settings=SCRIPT)(examine)


@app.command()
def demo(
    short: Annotated[
        bool, typer.Option("--short", help="One seed only: to see that everything works.")
    ] = False,
    updates: Annotated[int, typer.Option(help="Updates of each network.")] = 1_000,
    to: Annotated[Path, typer.Option("--out", help="The folder for the report.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train on windows and on the unbroken stream, on a generated recording whose best score is known."""
    if updates < 1:
        raise ConfigError(f"updates={updates}: expected at least 1")
    to.mkdir(parents=True, exist_ok=True)
    seeds = range(1 if short else 3)
    out.print(
        "Rare pulses switch a machine off and on; every frame is labelled off or on. The same LSTM,"
        " trained two ways:"
    )

    def watch(name: str, update: int, loss: float) -> None:
        if update % 500 == 0 or update == updates:
            out.print(f"  {name}: update {update}/{updates}  loss {loss:.4f}")

    found = demos.run_demo(updates, seeds, watch)
    table = Table(
        title=(
            f"accuracy after {updates} updates, {len(seeds)}"
            f" seed{'' if len(seeds) == 1 else 's: mean (worst to best)'}"
        )
    )
    for heading in ("trained on", "on the unbroken recording", "on pieces as trained"):
        table.add_column(heading, justify="left" if heading == "trained on" else "right")
    for row in demos.summary(found):
        table.add_row(*row)
    out.print(table)
    out.print(demos.credit(found))
    out.print(demos.exact(found))
    out.print(f"the pictures are in {demo_page.write_report(found, to)}")
