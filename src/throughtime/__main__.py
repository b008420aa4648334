"""`python -m throughtime` is the command `throughtime`."""

from throughtime.app.cli import main

if __name__ == "__main__":
    main()
