"""`throughtime bench`: the same training by us, by hand and by others, in turns, and where it stands beside its goals."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from throughtime.app.cli.screen import out
from throughtime.bench import Case, chosen, put_into, tables
from throughtime.bench.measure import QUICK, Settings
from throughtime.bench.page import parts_of
from throughtime.bench.peers import PEERS
from throughtime.bench.results import NARROW, Results, avx512, read, run, run_narrow
from throughtime.errors import ConfigError


def bench(  # every setting is a flag
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
                "ignite, lightning, tsfast, or none. [default: all that are installed; quick: none]"
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
    rounds: Annotated[
        int | None, typer.Option(help="Turns of every side. [default: 15; quick: 5]")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A look that takes a minute: short turns, no large cases."),
    ] = False,
    add: Annotated[
        bool, typer.Option("--add", help="Keep what --out has, except what is measured again.")
    ] = False,
    to: Annotated[
        Path, typer.Option("--out", help="Where the results are written, as JSON.")
    ] = Path("benchmarks/results/bench.json"),
    docs: Annotated[Path | None, typer.Option(help="A page whose tables are put in anew.")] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Measure nothing; print what --out holds, as tables.")
    ] = False,
) -> None:
    """Measure updates of recurrent nets beside a loop by hand, Ignite, Lightning and tsfast, after checking that all compute the same."""
    if docs is not None:
        parts_of(docs)  # a page that does not serve is found before, not after
    if not show:
        wanted = chosen([] if cases is None else _parts(cases), quick)
        by_default = "own" if quick or not avx512() else f"own,{NARROW}"
        asked = _among("levels", levels or by_default, ["own", NARROW])
        counts = _threads(threads or ("1" if quick else "1,2"))
        _measure(Results(to, add=add), wanted, counts, asked, _settings(rounds, quick, peers))
    found = tables(read(to))
    out.print(
        found if show else f"{to} written; throughtime bench --show --out {to} prints it as tables"
    )
    if docs is not None:
        put_into(docs, found)
        out.print(f"{docs} written")


def _measure(
    results: Results, cases: list[Case], threads: list[int], levels: list[str], settings: Settings
) -> None:
    if "own" in levels:
        run(results, cases, threads, settings, out.print)
    if NARROW in levels:
        flags = [
            "--rounds",
            str(settings.rounds),
            *(["--quick"] if settings.turn == QUICK.turn else []),
        ]
        run_narrow(results, [case for case in cases if case.kind == "train"], [1], flags, out.print)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _among(name: str, text: str, known: list[str]) -> list[str]:
    """The words of a list.

    Raises:
        ConfigError: an unknown one.
    """
    found = _parts(text)
    for word in found:
        if word not in known:
            raise ConfigError(
                f"{name}={word!r}: expected some of {', '.join(known)}, separated by commas"
            )
    return found


def _threads(text: str) -> list[int]:
    found = _parts(text)
    if not found or not all(part.isdecimal() and int(part) > 0 for part in found):
        raise ConfigError(
            f"threads={text!r}: expected numbers from 1 on, separated by commas, such as 1,2"
        )
    return [int(part) for part in found]


def _settings(rounds: int | None, quick: bool, peers: str | None) -> Settings:
    settings = QUICK if quick else Settings()
    if rounds is not None and rounds < 1:
        raise ConfigError(f"rounds={rounds}: expected at least 1")
    if peers is not None:
        settings = replace(
            settings, peers=() if peers == "none" else tuple(_among("peers", peers, list(PEERS)))
        )
    return settings if rounds is None else replace(settings, rounds=rounds)
