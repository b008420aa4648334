"""The command line: parse, call, print."""

import sys
from contextlib import suppress

from throughtime.app.cli.app import app
from throughtime.app.cli.ranks import tell
from throughtime.errors import ThroughtimeError

__all__ = ["app", "main"]


def _allow_many_files() -> None:
    """A memory-mapped recording holds a file open, and the usual soft limit is 1,024 of them."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(
            ValueError, OSError
        ):  # a system that refuses its own hard limit keeps the soft one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Runs the command line.

    What goes wrong on purpose is one message and exit code 2, not a traceback.
    """
    _allow_many_files()
    try:
        app()
    except (ThroughtimeError, OSError) as error:
        tell(error)
        sys.exit(2)
