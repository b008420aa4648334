"""Time stamps of rows: recognised in text, kept as nanoseconds since 1970, checked to ascend.

A time stamp is a date, `2020-03-09`, `2020/3/9`, `09.03.2020`, `9/3/20`, `3/9/2020` or
`9-Mar-2020`, with or without a time of day, `10:14`, `10:14:33.5`, `1:14 PM`, and a zone, `Z`,
`UTC` or `+01:00`. Times with a zone are converted to UTC. Whether 3/9 is March or September is
decided by all stamps of the first megabyte together: by a number above 12, or else by the order
that ascends, in the shorter time. Two digits of a year are one of 1969 to 2068.
"""

import importlib
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, RowSource

ORDERS = {
    "ymd": r"(?P<year>\d{4})[-/.](?P<month>\d{1,2})[-/.](?P<day>\d{1,2})",
    "dmy": r"(?P<day>\d{1,2})[-/](?P<month>\d{1,2})[-/](?P<year>\d{4}|\d{2})",
    "d.m.y": r"(?P<day>\d{1,2})\.(?P<month>\d{1,2})\.(?P<year>\d{4})",
    "dd.mm.yy": r"(?P<day>\d{2})\.(?P<month>\d{2})\.(?P<year>\d{2})",  # 1.2.00 is a version
    "mdy": r"(?P<month>\d{1,2})[-/](?P<day>\d{1,2})[-/](?P<year>\d{4}|\d{2})",
    "dby": r"(?P<day>\d{1,2})[-/ ](?P<month>[A-Za-z]{3})[-/ ](?P<year>\d{4}|\d{2})",
    "yymd": r"(?P<year>\d{2})[-/](?P<month>\d{1,2})[-/](?P<day>\d{1,2})",
    "": "",  # a time of day
}
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_CLOCK = (
    r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:[.,](?P<fraction>\d{1,9}))?)?"
    r" *(?P<half>[AaPp][Mm])?"
)
_TIME = rf"(?:(?:[Tt]|,? +){_CLOCK})?"
_ZONE = r" *(?:[Zz]|UTC|GMT|(?P<ahead>[+-])(?P<hours>\d{2})(?::?(?P<minutes>\d{2}))?)"
_RESTS = {"date": "", "time": _TIME, "zone": _TIME + _ZONE, "clock": _CLOCK}  # after the date
CLOCK = "+clock"  # the form of times of day
_FORMS = [f"{order}+{rest}" for rest in ("date", "time", "zone") for order in ORDERS if order]
_NAT, _LONGEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_EPOCH = np.datetime64(0, "ns")
_BLOCK = 65_536  # rows read at once
_FEW = 10  # steps: fewer may be evenly spaced by chance
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us"))


def _pattern(form: str) -> str:
    order, _, rest = form.partition("+")
    return rf"\s*(?:{ORDERS[order]}){_RESTS[rest]}\s*"


_PATTERNS = {form: re.compile(_pattern(form)) for form in (*_FORMS, CLOCK)}


_ANY = re.sub(r"\?P<\w+>", "?:", "|".join(p.pattern for p in _PATTERNS.values()))


def is_time(text: str) -> bool:
    """Whether a text is written like a time stamp or a time of day; `2020-02-31` is, too."""
    return any(pattern.fullmatch(text) for pattern in _PATTERNS.values())


def time_forms(texts: Any) -> list[str]:
    """The forms of an Arrow array of texts that are times; none if the first is no time.

    Those that most of them have; of several, one whose times ascend, in the shorter time, then with
    the day before the month. There are several if the choice would change the spacing of dates
    without a time of day, or the year. More than half of the texts are written like times, or all.

    Example:
        >>> import pyarrow as pa
        >>> [time_forms(pa.array([text])) for text in ("2020-03-09 10:14:33", "1:14 PM", "x")]
        [['ymd+time'], ['+clock'], []]
        >>> time_forms(pa.array(["1/2/2020", "1/3/2020"]))
        ['dmy+date', 'mdy+date']
    """
    compute: Any = importlib.import_module("pyarrow.compute")
    first, spans = texts[0].as_py(), dict[str, tuple[int, bool, int]]()
    like = compute.sum(compute.match_substring_regex(texts, f"^(?:{_ANY})$")).as_py()
    years = dict[str, Any]()
    for form, pattern in _PATTERNS.items():
        us = first[-1] in "Mm" and form.startswith(("dmy", "yymd"))  # 1 PM: the month comes first
        if us or not pattern.fullmatch(first) or (len(texts) > like <= len(texts) / 2):
            continue
        values = parse_times(texts, form)
        times = values[~np.isnat(values)].astype(np.int64)
        is_date, span = form.endswith("date"), _LONGEST
        if len(times) and (np.diff(times) >= 0).all():
            span = 0 if is_date else int(times[-1] - times[0])
        spans[form] = (-len(times), not is_date, span)
        years[form] = "each" if is_date else values[0].astype("M8[Y]")
    best = min(spans.values(), default=None)
    forms = [form for form, span in spans.items() if span == best]
    several = len({years[form] for form in forms}) > 1 or any("date" in form for form in forms)
    is_open = best is not None and -best[0] == len(texts) and best[2] < _LONGEST and several
    return forms if is_open else forms[:1]


def wrong_times(texts: Any, values: Array) -> Array:
    """Which texts are no times, though they are not missing."""
    return np.isnat(values) & texts.is_valid().to_numpy(zero_copy_only=False)


def parse_times(texts: Any, form: str) -> Array:
    """An Arrow array of text as `datetime64[ns]`; NaT where it has another form.

    Dates of a form `...+date` are `datetime64[D]`, times of day `timedelta64[ns]`.

    Cost: two microseconds for each text.
    """
    compute: Any = importlib.import_module("pyarrow.compute")
    order, _, rest = form.partition("+")
    parts = compute.extract_regex(texts, f"^{_pattern(form)}$")
    columns = dict(zip([f.name for f in parts.type], parts.flatten(), strict=True))
    valid: Array = parts.is_valid().to_numpy(zero_copy_only=False).copy()
    if order == "dby":
        months = importlib.import_module("pyarrow").array(_MONTHS)
        index = compute.index_in(compute.utf8_lower(columns["month"]), months)
        columns["month"] = compute.add(index, 1).cast("string")
    if "fraction" in columns:
        columns["fraction"] = compute.utf8_rpad(columns["fraction"], 9, "0")

    def number(name: str, default: int = 0) -> Array:
        if name not in columns:
            return np.full(len(valid), default)
        digits = compute.if_else(compute.equal(columns[name], ""), "0", columns[name])
        return digits.cast("int64").fill_null(0).to_numpy(zero_copy_only=False)

    def text(name: str) -> Array:
        return compute.utf8_lower(columns[name]).fill_null("").to_numpy(zero_copy_only=False)

    year, month, day = number("year", 1970), number("month", 1), number("day", 1)
    year = np.where(year < 100, year + np.where(year < 69, 2000, 1900), year)  # as POSIX has it
    hour, minute, second = map(number, ("hour", "minute", "second"))
    if "half" in columns:
        half = text("half")
        valid &= (half == "") | ((hour >= 1) & (hour <= 12))
        hour = np.where(half == "", hour, hour % 12 + 12 * (half == "pm"))
    valid &= (year > 1677) & (year < 2262) & (month >= 1) & (month <= 12) & (day >= 1)
    valid &= (hour < 24) | ((hour == 24) & (minute + second == 0))
    valid &= (minute < 60) & (second < 60) & (number("hours") < 24) & (number("minutes") < 60)
    months = (np.where(valid, year, 1970) - 1970) * 12 + np.where(valid, month, 1) - 1
    begin = months.astype("M8[M]")
    days = begin.astype("M8[D]") + np.where(valid, day, 1) - 1
    valid &= days.astype("M8[M]") == begin
    seconds = ((days.astype(np.int64) * 24 + hour) * 60 + minute) * 60 + second
    if rest == "zone":
        ahead = number("hours") * 3600 + number("minutes") * 60
        seconds = seconds - np.where(text("ahead") == "-", -ahead, ahead)
    result = np.where(valid, seconds * 10**9 + number("fraction"), _NAT)
    if form == CLOCK:
        return result.view("m8[ns]")
    return result.view("M8[ns]").astype("M8[D]" if rest == "date" else "M8[ns]")


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
    shortest: int = _LONGEST
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
