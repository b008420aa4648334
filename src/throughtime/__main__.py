"""`python -m throughtime` is the command `throughtime`."""

from throughtime.app.cli import main

main()
