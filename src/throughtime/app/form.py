"""Form: how the files of recordings are to be read, the same for all of a run."""

from dataclasses import dataclass
from typing import Literal

from throughtime.app.config import Config


@dataclass(frozen=True)
class Form:
    """What the settings of a run say of its files; the attributes are those of `Config`.

    Attributes:
        task: classes or numbers.
        inputs: columns; empty: all that are not targets.
        targets: columns; empty: `targets`, or the whole targets file.
        static: columns of the manifest.
        frame: rows of a file that are one step.
        csv: whether time runs down the columns of a CSV file, or along its rows.
        label_every: rows of the inputs that one row of the targets file is for.
        label_at: which steps of a span carry its label.
        outside: the class between intervals.
        rate: rows per second that files which say one must have.
    """

    task: Literal["classify", "regress"]
    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    frame: int = 1
    csv: Literal["columns", "rows"] = "columns"
    label_every: int | None = None
    label_at: Literal["all", "last"] | None = None
    outside: str | None = None
    rate: float | None = None

    @classmethod
    def of(cls, config: Config) -> "Form":
        """As a run is asked to read its files."""
        return cls(
            config.task,
            config.inputs,
            config.targets,
            config.static,
            config.frame,
            config.csv,
            config.label_every,
            config.label_at,
            config.outside,
        )
