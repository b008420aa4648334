"""Time stamps of rows: recognised in text, kept as nanoseconds since 1970, checked to ascend.

A time stamp is a date, `2020-03-09`, `2020/3/9`, `09.03.2020`, `9/3/20`, `3/9/2020` or
`9-Mar-2020`, with or without a time of day, `10:14`, `10:14:33.5`, `1:14 PM`, and a zone, `Z`,
`UTC` or `+01:00`. Times with a zone are converted to UTC. Whether 3/9 is March or September is
decided by all stamps together: by a number above 12, or else by the order that ascends, in the
shorter time. Two digits of a year are one of 1969 to 2068.

A form is a list of patterns and replacements that make a text ISO 8601, which pyarrow reads.
"""

import importlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, RowSource

_DATES = (
    r"\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/]\d\d?[-/](\d{4}|\d\d)|\d\d?\.\d\d?\.\d{4}|\d\d\.\d\d\.\d\d"
    r"|\d\d?[-/ ][A-Za-z]{3}[-/ ](\d{4}|\d\d)"  # 1.2.00 is a version
)
_MINUTES = r":\d\d(:\d\d([.,]\d{1,9})?)?"
_CLOCK = rf"(\d\d?{_MINUTES}|(0?[1-9]|1[0-2]){_MINUTES} *[AaPp][Mm])"
_ZONE = r" *([Zz]|UTC|GMT|[+-]\d\d(:?\d\d)?)"
_ANY = rf"^({_CLOCK}|({_DATES})(([Tt]|,? +){_CLOCK}({_ZONE})?)?)$"
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ISO = r"^\d{4}-\d\d-\d\d([T ]([01]\d|2[0-3]):\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?)?$"
_OTHER = (r"^\d{4}", "another form")  # of dates that do not begin with a year
_ORDERS = {
    "ymd": [(r"^\d\d?[-/]", "another form"), (r"^(\d{4})[-/.](\d+)[-/.](\d+)", r"\1-\2-\3")],
    "dmy": [_OTHER, (r"^(\d+)[-/.](\d+)[-/.](\d+)", r"\3-\2-\1")],
    "mdy": [_OTHER, (r"^(\d+)[-/](\d+)[-/](\d+)", r"\3-\1-\2")],
    "yymd": [_OTHER, (r"^(\d\d)[-/](\d+)[-/](\d+)", r"\1-\2-\3")],
    "dby": [(r"^\d+[-/.]\d", "another form")]
    + [
        (rf"(?i)^(\d+)[-/ ]{month}[-/ ](\d+)", rf"\2-{number}-\1")
        for number, month in enumerate(_MONTHS, 1)
    ],
    "": [("^", "1970-01-01 ")],  # a time of day
}
_REPAIRS = [
    (r"^([0-6]\d)-", r"20\1-"),  # two digits of a year, as POSIX has it
    (r"^(\d\d)-", r"19\1-"),
    (r"^(\d+)-(\d)-", r"\1-0\2-"),
    (r"^(\d+-\d+)-(\d)\b", r"\1-0\2"),
    (r"(\d)(?:[Tt]|,? +)(\d+:)", r"\1 \2"),
    (r" (\d):", r" 0\1:"),
    (" 12(.*[AaPp][Mm])$", r" 00\1"),
    (" *[AaPp][Mm]$", ""),
    (" 24:00(:00)?$", r" 00:00\1"),
    (r",(\d)", r".\1"),
    ("(:.*?) *([Zz]|UTC|GMT)$", r"\1Z"),
    (r"(:.*?) *([+-]\d+:?\d*)$", r"\1\2"),
]
_LATER = {"[Pp][Mm]$": 43_200 * 10**9, "[Tt ]24:00(:00)?$": 86_400 * 10**9}  # nanoseconds
CLOCK, DATE = "+clock", "+date"  # ends of forms: of times of day, of dates
_FORMS = [order + rest for rest in (DATE, "+time", "+zone") for order in _ORDERS if order]
_FORMS.append(CLOCK)
_EPOCH = np.datetime64(0, "ns")
_BLOCK = 65_536  # rows read at once
_FEW = 10  # steps: fewer may be evenly spaced by chance
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us"))


def is_time(text: str) -> bool:
    """Whether a text is written like a time stamp or a time of day; `2020-02-31` is, too."""
    return re.match(_ANY, text.strip(), re.ASCII) is not None


def time_forms(texts: Any) -> list[str]:
    """The form of an Arrow array of texts that are times; none if the first is no time.

    That by which most of them are read until one is not; of several, one whose times ascend, in the
    shorter time. Both are returned where that leaves open which is the day, or the year. More than
    half of the texts are written like times, or all.

    Example:
        >>> import pyarrow as pa
        >>> [time_forms(pa.array([text])) for text in ("2020-03-19 10:14:33", "1:14 PM", "x")]
        [['ymd+time'], ['+clock'], []]
        >>> time_forms(pa.array(["1/2/2020", "1/3/2020"]))
        ['dmy+date', 'mdy+date']
    """
    compute: Any = importlib.import_module("pyarrow.compute")
    like = compute.sum(compute.match_substring_regex(texts, _ANY)).as_py()
    if 2 * like <= len(texts) != like:
        return []
    readings = dict[str, tuple[tuple[int, bool, bool, int], list[int]]]()
    for form in _FORMS:
        if texts[0].as_py()[-1] in "Mm" and form.startswith(("dmy", "yymd")):
            continue  # with 1 PM the month comes first
        convert = partial(_parse, form=form)
        count = count_converted(texts[:1], convert) and count_converted(texts, convert)
        if count:
            values = _parse(texts[:count], form).to_numpy()
            ascends, is_date = bool((np.diff(values) >= 0).all()), form.endswith(DATE)
            span = int(values[-1] - values[0]) if ascends and not is_date else 0
            readings[form] = (-count, not is_date, not ascends, span), values.tolist()
    best = min((rank for rank, _ in readings.values()), default=None)
    forms = [form for form, (rank, _) in readings.items() if rank == best]
    first, *others = forms or _FORMS[:1]  # as of 2020-02-30 alone
    return [first, *(form for form in others if readings[form] != readings[first])]


def count_converted(texts: Any, convert: Callable[[Any], object]) -> int:
    """How many of the first texts are converted without an `ArrowInvalid`, by bisection."""
    import pyarrow as pa

    first, last, middle = 0, len(texts), len(texts)
    while first < last:
        try:
            convert(texts[first:middle])
            first = middle
        except pa.ArrowInvalid:
            last = middle - 1
        middle = (first + last + 1) // 2
    return first


def parse_times(texts: Any, form: str) -> Any:
    """An Arrow array of text as time stamps, dates or times of day; what is null stays so.

    Raises:
        pyarrow.ArrowInvalid: a text has another form, or is no time, such as 2020-02-30.

    Cost: one microsecond for each text with two digits for day, month and hour; four for others.
    """
    import pyarrow as pa

    times = _parse(texts, form)
    if form == CLOCK:
        return times.cast(pa.time64("ns"))
    stamps = times.cast(pa.timestamp("ns"))
    return stamps.cast(pa.date32()) if form.endswith(DATE) else stamps


def _parse(texts: Any, form: str) -> Any:
    """The nanoseconds since 1970 of an Arrow array of text."""
    import pyarrow as pa

    compute: Any = importlib.import_module("pyarrow.compute")
    order, rest = form.split("+")

    def match(pattern: str) -> bool:
        return compute.all(compute.match_substring_regex(texts, pattern), min_count=0).as_py()

    if not match(_ANY):
        raise pa.ArrowInvalid("a text is no time")
    later = [
        compute.multiply(compute.match_substring_regex(texts, pattern).cast("int64"), shift)
        for pattern, shift in _LATER.items()
    ]
    for rewrites in (_ORDERS[order], _REPAIRS):
        if rewrites not in (_ORDERS["ymd"], _REPAIRS) or not match(_ISO):
            for pattern, replacement in rewrites:
                texts = compute.replace_substring_regex(texts, pattern, replacement)
    if form.endswith(DATE):
        texts = texts.cast(pa.date32())
    times = texts.cast(pa.timestamp("ns", "UTC" if rest == "zone" else None)).cast("int64")
    return reduce(compute.add, later, times)


def nanoseconds(values: Array, source: str) -> Array:
    """Times as `datetime64[ns]`; times of day are those of 1970-01-01.

    Raises:
        DataError: a time outside of the years that this type has, such as 9999-12-31 for "never".
    """
    result = _EPOCH + values if values.dtype.kind == "m" else values.astype("M8[ns]")
    wrong = ~np.isnat(values) & (values.dtype.kind == "M") & (result.astype(values.dtype) != values)
    if wrong.any():
        raise DataError(
            f"{source}: holds the time {values[wrong][0]}, and time stamps are from 1678 to 2261;"
            " correct it, or leave the column out"
        )
    return result


def time_texts(values: Array) -> list[str]:
    """Times in ISO 8601, to the second or as far as they have decimals; NaT is empty.

    Example:
        >>> time_texts(np.array(["2020-03-09T10:14", "2020-03-09T10:14:33.5", "NaT"], "M8[ns]"))
        ['2020-03-09T10:14:00', '2020-03-09T10:14:33.5', '']
    """
    texts = np.datetime_as_string(values.astype("M8[ns]")).tolist()
    return [
        "" if text == "NaT" else text.rstrip("0").rstrip(".") if "." in text else text
        for text in texts
    ]


@dataclass
class TimeSummary:
    """The time stamps of a recording: their spacing, and what is irregular.

    Attributes:
        rows: how many there are.
        missing: how many are empty.
        backward: the first row that is earlier than the one before it, and the two times.
        longest: the longest step in nanoseconds, and the row after it.
        shortest: the shortest step.
        unit: the largest time of which all steps are multiples.
    """

    rows: int = 0
    missing: int = 0
    backward: tuple[int, str, str] | None = None
    longest: tuple[int, int] = (0, 0)
    shortest: int = np.iinfo(np.int64).max
    unit: int = 0
    _span: int = 0
    _count: int = 0
    _mean: tuple[float, float] = (0.0, float("inf"))  # range of those that rounded stamps can have
    _steps: Counter[int] = field(default_factory=Counter[int])  # in nanoseconds, three digits
    _last: Array = field(default_factory=lambda: np.empty(0, "M8[ns]"))

    def add(self, values: Array) -> None:
        """Add the times of the next rows, `datetime64[ns]`."""
        known = ~np.isnat(values)
        rows = np.flatnonzero(known) + self.rows
        self.missing += len(values) - len(rows)
        self.rows += len(values)
        times = np.concatenate([self._last, values[known]])
        self._last = times[-1:]
        steps, rows = np.diff(times).astype(np.int64), rows[len(rows) + 1 - len(times) :]
        if not len(steps):
            return
        if self.backward is None and (steps < 0).any():
            index = int((steps < 0).argmax())
            before, after = time_texts(times[index : index + 2])
            self.backward = (int(rows[index]), before, after)
        self.shortest = min(self.shortest, int(steps.min()))
        self.unit = int(np.gcd.reduce(steps, initial=self.unit))
        passed = self._span + np.cumsum(steps)
        counts = self._count + np.arange(1, len(steps) + 1)
        self._count, self._span = int(counts[-1]), int(passed[-1])
        low, high = (passed - self.unit) / counts, (passed + self.unit) / counts
        self._mean = max(self._mean[0], low.max()), min(self._mean[1], high.min())
        longest = int(steps.argmax())
        if steps[longest] > self.longest[0]:
            self.longest = (int(steps[longest]), int(rows[longest]))
        digits = 10.0 ** np.floor(np.log10(np.maximum(steps, 1)) - 2)
        rounded = np.where(steps > 999, np.round(steps / digits) * digits, steps)
        values, counts = np.unique(rounded.astype(np.int64), return_counts=True)
        self._steps.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    @property
    def spacing(self) -> int:
        """The median step in nanoseconds, to three digits; 0 without steps."""
        half, total = self._steps.total() / 2, 0
        for step in sorted(self._steps):
            total += self._steps[step]
            if total >= half:
                return step
        return 0

    @property
    def is_even(self) -> bool:
        """Whether rows are evenly spaced.

        Stamps may be rounded: each differs from its time by less than the unit in which they are
        written. Or their steps differ by a fiftieth.
        """
        jitter = self.longest[0] - self.shortest
        rounded = jitter <= self.unit and self._mean[0] <= self._mean[1]
        close = rounded or jitter <= self._span / 50 / max(1, self.rows - 1)
        return close and self.shortest > 0 and not self.missing and not self.gaps

    @property
    def rate(self) -> float | None:
        """Rows per second; `None` where rows are not evenly spaced, or too few to tell."""
        count = self.rows - 1
        return 1e9 * count / self._span if count >= _FEW and self.is_even else None

    @property
    def gaps(self) -> int:
        """How many steps are longer than one and a half times the median; 0 where that is 0."""
        limit = 1.5 * self.spacing
        return sum(n for step, n in self._steps.items() if step > limit) if limit else 0


def summarize_times(rows: RowSource) -> TimeSummary:
    """Read time stamps `(n,)` once, in blocks."""
    summary = TimeSummary()
    for start in range(0, len(rows), _BLOCK):
        summary.add(rows.read(start, start + _BLOCK))
    return summary


def time_span(nanoseconds: float) -> str:
    """A time span in the unit that suits it.

    Example:
        >>> time_span(3.6e12), time_span(9e11), time_span(5e6)
        ('1 h', '15 min', '5 ms')
    """
    seconds = nanoseconds / 1e9
    unit, name = next((u for u in _UNITS if seconds >= u[0] * (1 - 1e-9)), _UNITS[-1])
    return f"{seconds / unit:.4g} {name}"
