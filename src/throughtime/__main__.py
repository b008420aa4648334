"""`python -m throughtime` is the command `throughtime`."""

from throughtime.cli import main

main()
