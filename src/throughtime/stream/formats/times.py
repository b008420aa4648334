"""Time stamps of rows: read from text, kept as nanoseconds since 1970, checked to ascend.

A time stamp is a date, `2020-03-09`, `2020/3/9`, `09.03.2020`, `9/3/2020` or `3/9/2020`, with or
without a time of day, `10`, `10:14`, `10:14:33.5`, `1:14 PM`, and a zone, `Z`, `UTC` or `+01:00`.
Times with a zone are converted to UTC. Whether 3/9 is March or September is decided by all stamps
together: by a number above 12, or else by the order that ascends, in the shorter time.

A kind of times is the order of a date and what follows it, such as `dmy+time`.
"""

import contextlib
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, RowSource

_YEAR, _MONTH, _DAY = r"(?P<y>\d{4})", r"(?P<m>\d\d?)", r"(?P<d>\d\d?)"
_MINUTES = r"(?P<M>:\d\d(?::\d\d(?:[.,]\d{1,9})?)?)"
_HALF = r"(?: *(?P<p>[AaPp])[Mm])?"
_ZONE = r"(?: *(?P<z>[Zz]|UTC|GMT|[+-]\d\d(?::?\d\d)?))?"
_DATES = {
    "ymd": f"{_YEAR}[-/.]{_MONTH}[-/.]{_DAY}",
    "mdy": f"{_MONTH}[-/]{_DAY}[-/]{_YEAR}",
    "dmy": f"{_DAY}[-/.]{_MONTH}[-/.]{_YEAR}",
}
_PATTERNS = {
    order: rf"^{date}(?:(?:[Tt]|,? +)(?P<H>\d\d?){_MINUTES}?{_HALF}{_ZONE})?$"
    for order, date in _DATES.items()
} | {"": rf"^(?P<H>\d\d?){_MINUTES}{_HALF}$"}
DATE, CLOCK = "+date", "+clock"
KINDS = [order + rest for rest in (DATE, "+time", "+zone") for order in _DATES] + [CLOCK]
_EPOCH_DAY = {"y": "1970", "m": "01", "d": "01"}
_EPOCH = np.datetime64(0, "ns")
_BLOCK = 65_536  # rows read at once
_FEW = 10  # steps: fewer may be evenly spaced by chance
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us"))


def is_time(text: str) -> bool:
    """Whether a text is written like a time stamp or a time of day; `2020-02-31` is, too."""
    return any(re.match(pattern, text.strip(), re.ASCII) for pattern in _PATTERNS.values())


def time_kinds(texts: Any) -> list[str]:
    """The kind of an Arrow array of texts that are times; none if the first is no time.

    Two kinds where the texts leave open which number is the day.

    Example:
        >>> import pyarrow as pa
        >>> [time_kinds(pa.array([text])) for text in ("2020-03-19 10:14:33", "1:14 PM", "x")]
        [['ymd+time'], ['+clock'], []]
        >>> time_kinds(pa.array(["1/2/2020", "1/3/2020"]))
        ['mdy+date', 'dmy+date']
    """
    import pyarrow as pa

    first, ranks, valid = texts[0].as_py(), dict[str, tuple[bool, bool, int, bytes]](), list[str]()
    like = [k for k in KINDS if re.match(_PATTERNS[k.partition("+")[0]], first, re.ASCII)]
    for kind in like:
        try:
            _nanoseconds(texts[:1], kind)
            valid.append(kind)
            values = _nanoseconds(texts, kind).to_numpy()
        except pa.ArrowInvalid:
            continue
        falls, is_date = bool((np.diff(values) < 0).any()), kind.endswith(DATE)
        span = 0 if falls or is_date else int(values[-1] - values[0])
        ranks[kind] = not is_date, falls, span, values.tobytes()
    if ranks or not like:
        best = min((rank[:3] for rank in ranks.values()), default=None)
        return [*{rank[3]: kind for kind, rank in ranks.items() if rank[:3] == best}.values()]
    some = texts[:_BLOCK].to_pylist()  # a text may begin with a date
    return (valid or like)[:1] if 2 * sum(map(is_time, some)) > len(some) else []


def parse_times(texts: Any, kind: str) -> Any:
    """An Arrow array of text as time stamps, dates or times of day; what is null stays so.

    Raises:
        pyarrow.ArrowInvalid: a text is of another kind, or is no time, such as 2020-02-30.

    Cost: 0.1 microseconds for each text in ISO 8601, two for others.
    """
    import pyarrow as pa

    times = _nanoseconds(texts, kind)
    if kind == CLOCK:
        return times.cast(pa.time64("ns"))
    stamps = times.cast(pa.timestamp("ns"))
    return stamps.cast(pa.date32()) if kind.endswith(DATE) else stamps


def _nanoseconds(texts: Any, kind: str) -> Any:
    """The nanoseconds since 1970 of an Arrow array of text."""
    import pyarrow as pa

    order, _, rest = kind.partition("+")
    dtype = pa.timestamp("ns", "UTC" if rest == "zone" else None)
    if order == "ymd":
        with contextlib.suppress(pa.ArrowInvalid):  # of ISO 8601
            return (texts.cast(pa.date32()) if rest == "date" else texts).cast(dtype).cast("int64")
    pattern = re.compile(_PATTERNS.get(order, "no time"), re.ASCII)
    isos = [
        text if text is None else _iso(pattern.match(text), order, rest)
        for text in texts.to_pylist()
    ]
    return pa.array(isos, pa.string()).cast(dtype).cast("int64")


def _iso(match: re.Match[str] | None, order: str, rest: str) -> str:
    """A time in ISO 8601; one that is no time where it is of another kind."""
    if match is None:
        return "no time"
    part = match.groupdict("")
    hour, half, zone = part["H"], part["p"], part.get("z", "")
    if bool(zone) != (rest == "zone") or (rest == "date" and hour):
        return "another kind"
    if half:
        if order == "dmy" or not 0 < int(hour) < 13:  # with 1 PM the month comes first
            return "no hour of 12"
        hour = str(int(hour) % 12 + 12 * (half in "Pp"))
    day = "-".join(f"{part.get(key, default):0>2}" for key, default in _EPOCH_DAY.items())
    zone = "Z" if zone.isalpha() else zone
    return f"{day} {hour:0>2}{part['M'].replace(',', '.') or ':00'}{zone}"


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
