"""What an audit looks like on the screen."""

from rich.console import Console
from rich.table import Table

from throughtime.app.audit_report import AuditReport
from throughtime.app.config import Config
from throughtime.app.trace import RunTrace
from throughtime.diagnose import Audit, Reach
from throughtime.diagnose.reach import within
from throughtime.errors import ConfigError


def horizons_in(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas.

    Raises:
        ConfigError: something else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"horizons={text!r}: expected whole numbers of steps, separated by commas, such as"
            " 50,200,800"
        ) from error


def print_audit(out: Console, found: AuditReport, config: Config) -> None:
    """Both tables, the losses by context, and which window to take."""
    out.print(_costs(found.audit))
    out.print(_goes(found.reach))
    if found.trace is not None:
        out.print(_lives(found.trace))
    contexts = "  ".join(f"{steps}: {loss:.4g}" for steps, loss in found.reach.contexts.items())
    out.print(
        f"loss by steps of context from a zero state: {contexts}; with the whole past, state"
        f" carried: {found.reach.loss:.4g}"
    )
    out.print(found.advice(config))
    out.print(found.warning())


def _costs(audit: Audit) -> Table:
    table = Table(title="what cutting the gradient costs, against the exact one")
    for name in ("horizon", "stride", "updates", "bias", "cosine"):
        table.add_column(name, justify="right")
    table.add_column("worst parameter")
    for row in audit.rows:
        worst = max(row.by_parameter, key=lambda name: row.by_parameter[name])
        figures = (f"{row.bias:.3f}", f"{row.cosine:.3f}", f"{worst} {row.by_parameter[worst]:.3f}")
        table.add_row(str(row.horizon), str(row.stride), str(row.updates), *figures)
    table.add_section()
    table.add_row("exact", str(audit.steps), "1", "0.000", "1.000", "")
    return table


def _goes(reach: Reach) -> Table:
    table = Table(
        title=f"steps back within which the credit of a loss lies, mean of {reach.anchors} losses"
    )
    table.add_column("to the")
    shares = sorted(reach.shares)
    for share in shares:
        table.add_column(f"{share:.0%} of it", justify="right")
    table.add_row("whole state", *(str(reach.shares[share]) for share in shares))
    for name, norms in reach.by_leaf.items() if len(reach.by_leaf) > 1 else ():
        table.add_row(name, *(str(within(reach.lags, norms, share)) for share in shares))
    return table


def _lives(seen: RunTrace) -> Table:
    where = f"steps {seen.start} to {seen.start + seen.steps} of {seen.recording}"
    table = Table(
        title=(
            f"gradient step by step: {where}, {seen.windows}"
            f" window{'' if seen.windows == 1 else 's'}"
        )
    )
    for name in ("gradient of", "largest", "lives, steps back", "crosses the edge"):
        table.add_column(name, justify="left" if name == "gradient of" else "right")
    for life in seen.lifetimes:
        lived = f"{life.lived:.0f}" if not life.exploded else f"blows up {life.burst:.0f} back"
        table.add_row(
            life.name, f"{life.largest:.2g}", lived, "" if life.edge is None else f"{life.edge:.2g}"
        )
    return table
