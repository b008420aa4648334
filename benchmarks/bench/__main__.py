"""Time the same training by throughtime, by hand and by other libraries: `make bench`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.bench import Case, select_cases, tables, write_tables
from benchmarks.bench.measure import QUICK, Settings
from benchmarks.bench.page import parts_of
from benchmarks.bench.peers import PEERS
from benchmarks.bench.results import AVX2, Results, avx512, read, run, run_avx2
from rich.console import Console

from throughtime.errors import ConfigError, ThroughtimeError

out = Console(highlight=False, soft_wrap=True)


def bench(
    cases: Annotated[
        str | None,
        typer.Option(help="Names or patterns, separated by commas, such as lstm-*. [default: all]"),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(help="Numbers of threads, separated by commas. [default: 1,2; quick: 1]"),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help=(
                "ignite, lightning, tsfast, jax, or none. [default: all that are installed;"
                " quick: none]"
            )
        ),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(
            help=(
                "own, and v3: as on a processor without AVX-512, on one thread. [default: own,v3;"
                " quick: own]"
            )
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds. [default: 15; quick: 5]")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="About a minute: short turns, no large cases."),
    ] = False,
    add: Annotated[
        bool, typer.Option("--add", help="Keep the rows of --out that are not measured again.")
    ] = False,
    to: Annotated[
        Path, typer.Option("--out", help="Where the results are written, as JSON.")
    ] = Path("benchmarks/results/bench.json"),
    docs: Annotated[Path | None, typer.Option(help="A page whose tables are replaced.")] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the tables of --out without measuring.")
    ] = False,
) -> None:
    """Time updates beside a hand-written loop, Ignite, Lightning, tsfast and JAX.

    First all are checked to compute the same.
    """
    if docs is not None:
        parts_of(docs)  # raises before measuring, not after
    if not show:
        wanted = select_cases([] if cases is None else _parts(cases), quick)
        by_default = "own" if quick or not avx512() else f"own,{AVX2}"
        asked = _among("levels", levels or by_default, ["own", AVX2])
        counts = _threads(threads or ("1" if quick else "1,2"))
        _measure(Results(to, add=add), wanted, counts, asked, _settings(rounds, quick, peers))
    result = tables(read(to))
    out.print(
        result
        if show
        else f"{to} written; python -m benchmarks.bench --show --out {to} prints it as tables"
    )
    if docs is not None:
        write_tables(docs, result)
        out.print(f"{docs} written")


def _measure(
    results: Results, cases: list[Case], threads: list[int], levels: list[str], settings: Settings
) -> None:
    if "own" in levels:
        run(results, cases, threads, settings, out.print)
    trainings = [case for case in cases if case.kind == "train"]
    if AVX2 in levels and trainings:
        flags = [
            "--rounds",
            str(settings.rounds),
            *(["--quick"] if settings.turn == QUICK.turn else []),
        ]
        run_avx2(results, trainings, [1], flags, out.print)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _among(name: str, text: str, known: list[str]) -> list[str]:
    """The words of a list.

    Raises:
        ConfigError: an unknown one.
    """
    result = _parts(text)
    for word in result:
        if word not in known:
            raise ConfigError(
                f"{name}={word!r}: expected some of {', '.join(known)}, separated by commas"
            )
    return result


def _threads(text: str) -> list[int]:
    result = _parts(text)
    if not result or not all(part.isdecimal() and int(part) > 0 for part in result):
        raise ConfigError(
            f"threads={text!r}: expected numbers from 1 on, separated by commas, such as 1,2"
        )
    return [int(part) for part in result]


def _settings(rounds: int | None, quick: bool, peers: str | None) -> Settings:
    settings = QUICK if quick else Settings()
    if rounds is not None and rounds < 1:
        raise ConfigError(f"rounds={rounds}: expected at least 1")
    if peers is not None:
        settings = replace(
            settings, peers=() if peers == "none" else tuple(_among("peers", peers, list(PEERS)))
        )
    return settings if rounds is None else replace(settings, rounds=rounds)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(bench)


def main() -> None:
    """Run the bench; an expected error is one message and exit code 2."""
    try:
        app()
    except (ThroughtimeError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
