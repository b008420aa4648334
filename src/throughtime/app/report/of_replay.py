"""Whether the loop of a run is sound, as a table: each law, what was measured, and what the doctor calls its breach."""

from throughtime.app.replayed import Replayed
from throughtime.app.report.page import Part, Table, Text

_ANSWERS = {True: "yes", False: "no", None: "cannot be told"}


def parts(found: Replayed) -> list[Part]:
    """The answer in a sentence, how it was found, and the figures."""
    rows = [[check.law, _ANSWERS[check.holds], check.seen, check.codes] for check in found.checks]
    table = Table(
        ["what must hold", "does it", "what was measured", "its breach is"],
        rows,
        "Laws of a sound loop.",
        numeric=(),
    )
    return [Text(f"{verdict(found)}\n\n{_how(found)}"), table]


def verdict(found: Replayed) -> str:
    """In a sentence.

    Example:
        >>> from throughtime.app.replayed import Check, Replayed
        >>> verdict(Replayed(4, 400, (Check("No graph outlives its update", "TT202", "0 of 8", True),)))
        'Yes: all that was measured holds, 1 of 1.'
    """
    broken = [check for check in found.checks if check.holds is False]
    if broken:
        return f"No: {'; '.join(f'{check.law!r} does not hold ({check.codes}): {check.seen}' for check in broken)}."
    held = sum(check.holds is True for check in found.checks)
    return f"Yes: all that was measured holds, {held} of {len(found.checks)}." + (
        "" if held == len(found.checks) else " The others cannot be told by these figures."
    )


def _how(found: Replayed) -> str:
    return (
        "tt.doctor watches loops that somebody else wrote and leaves out that of throughtime"
        " train. Here updates of the run were compared with the same layers run by hand in plain"
        f" PyTorch: the first {found.updates} of an epoch, {found.steps:,} steps of every lane, at"
        " the weights of the audit. What the optimizer does between two updates (TT302) is not"
        " part of it."
    )
