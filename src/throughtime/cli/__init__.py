"""The command line: parse, call, print."""

import sys

from throughtime.cli.app import app
from throughtime.errors import ThroughtimeError

__all__ = ["app", "main"]


def main() -> None:
    """Runs the command line; what goes wrong on purpose is one message and exit code 2, not a traceback."""
    try:
        app()
    except (ThroughtimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
