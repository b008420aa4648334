"""The ranks of `throughtime train`: one process, or those of `--strategy ddp`, of which one speaks."""

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import typer
from torch import distributed

from throughtime.app.config import Config
from throughtime.app.team import ALONE, Team, TeamError
from throughtime.errors import ConfigError, ThroughtimeError

_SPOKEN = 10.0  # seconds in which an error has surely been said


@contextmanager
def team_of(config: Config) -> Generator[Team]:
    """The team that the settings ask for; what fails on one of its ranks is said once, and ends all
    with exit code 2.

    Raises:
        ConfigError: ranks that do not fit how this process was started.
        MissingExtraError: several of them without Lightning.
    """
    if config.strategy == "single":
        _refuse_copies()
        yield ALONE
        return
    from throughtime.integrations.lightning.launch import launched

    with launched(config.device, config.devices, config.nodes) as device:
        team = Team.here(device)
        try:
            yield team
            team.part()
        except typer.Exit:
            team.part()
            raise
        except TeamError as error:
            if error.mine:
                say(str(error))
            team.part()
            raise typer.Exit(2) from error
        except (ThroughtimeError, OSError) as error:
            say(f"rank {team.rank}: {error}")
            raise typer.Exit(2) from error


def _refuse_copies() -> None:
    """Processes of torchrun that do not know of each other would all write one folder."""
    copies = int(os.environ.get("WORLD_SIZE", "1"))
    if distributed.is_available() and distributed.is_torchelastic_launched() and copies > 1:
        raise ConfigError(
            f"torchrun has started {copies} processes, and strategy='single' is one: each would"
            " train the same run. Add --strategy ddp --devices N, the processes on a node, and"
            " --nodes M"
        )


def tell(error: BaseException) -> None:
    """The message of an error that ends this process, before ranks know of each other.

    Where torchrun has started several, the first of them on a node says it, and the others, which
    fail alike, wait for torchrun to end them: it ends all as soon as one has ended, and must not
    cut the message off.
    """
    if (
        distributed.is_available()
        and distributed.is_torchelastic_launched()
        and os.environ.get("LOCAL_RANK", "0") != "0"
    ):
        time.sleep(_SPOKEN)
    else:
        say(str(error))


def say(error: str) -> None:
    """One message on the terminal."""
    print(f"error: {error}", file=sys.stderr, flush=True)
