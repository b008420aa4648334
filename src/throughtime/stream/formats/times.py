"""Time stamps of rows: read from text, kept as nanoseconds since 1970, checked to ascend.

A time stamp is a date, `2020-03-09`, `2020/3/9`, `09.03.2020`, `9/3/2020` or `3/9/2020`, with or
without a time of day, `10`, `10:14`, `10:14:33.5`, `1:14 PM`, and a zone, `Z`, `UTC` or `+01:00`.
Times with a zone are converted to UTC. Whether 3/9 is March or September is decided by all stamps
together, by a number above 12; without one they are refused.

A kind of times is the order of a date and what follows it, such as `dmy+time`.
"""

import contextlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

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
_FEW = 10  # rows: so few may be evenly spaced by chance


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

    def parsed(part: Any, kinds: Iterable[str]) -> dict[str, bytes]:
        values = dict[str, bytes]()
        for kind in kinds:
            with contextlib.suppress(pa.ArrowInvalid):
                values[kind] = _nanoseconds(part, kind).to_numpy().tobytes()
        return values

    if not is_time(texts[0].as_py()):
        return []
    first = parsed(texts[:1], KINDS)
    if values := parsed(texts, first):
        rest = min(kind.partition("+")[2] for kind in values)  # a date is a time as well
        return [*{values[kind]: kind for kind in values if kind.endswith(f"+{rest}")}.values()]
    some = texts[:_BLOCK].to_pylist()  # a text may begin with a date
    return [*first, KINDS[0]][:1] if 2 * sum(map(is_time, some)) > len(some) else []


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


class TimeRangeError(DataError):
    """A time that `datetime64[ns]` does not have."""


def nanoseconds(values: Array, source: str) -> Array:
    """Times as `datetime64[ns]`; times of day are those of 1970-01-01.

    Raises:
        TimeRangeError: a time outside of the years that this type has, such as 9999-12-31.
    """
    result = _EPOCH + values if values.dtype.kind == "m" else values.astype("M8[ns]")
    wrong = ~np.isnat(values) & (values.dtype.kind == "M") & (result.astype(values.dtype) != values)
    if wrong.any():
        raise TimeRangeError(
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


class TimeSummary(NamedTuple):
    """The time stamps of a recording: their spacing, and what is irregular.

    Attributes:
        spacing: the median step of the first rows in nanoseconds; 0 without steps.
        gaps: how many steps are longer than one and a half times that; 0 where it is 0.
        backward: the first row that is earlier than the one before it, and the two times.
        rate: rows per second; `None` where rows are not evenly spaced, or too few to tell. Stamps
            may be rounded: each differs from its time by less than the unit in which they are
            written. Or their steps differ by a fiftieth.
    """

    spacing: float = 0
    gaps: int = 0
    backward: tuple[int, str, str] | None = None
    rate: float | None = None


def summarize_times(rows: RowSource) -> TimeSummary:
    """Read time stamps `(n,)` once, in blocks."""
    spacing, gaps, backward, known, span, unit = 0.0, 0, None, 0, 0, 0
    times, low, high = np.empty(0, "M8[ns]"), 0.0, np.inf  # means that rounded stamps can have
    shortest, longest, count = np.inf, 0.0, max(1, len(rows) - 1)
    for start in range(0, len(rows), _BLOCK):
        values = rows.read(start, start + _BLOCK)
        present = np.flatnonzero(~np.isnat(values))
        known += len(present)
        times = np.concatenate([times[-1:], values[present]])
        steps = np.diff(times).astype(np.int64)
        if not len(steps):
            continue
        if backward is None and (steps < 0).any():
            i = int((steps < 0).argmax())
            row = start + int(present[i - len(steps)])
            before, after = time_texts(times[i : i + 2])
            backward = row, before, after
        passed, counts = span + np.cumsum(steps), np.arange(known - len(steps), known)
        span, unit = int(passed[-1]), int(np.gcd.reduce(steps, initial=unit))
        low = max(low, ((passed - unit) / counts).max())
        high = min(high, ((passed + unit) / counts).min())
        shortest, longest = min(shortest, steps.min()), max(longest, steps.max())
        spacing = spacing or float(np.median(steps))
        gaps += int((steps > 1.5 * spacing).sum()) * (spacing > 0)
    jitter = longest - shortest
    close = (jitter <= unit and low <= high) or jitter <= span / 50 / count
    is_even = close and shortest > 0 and known == len(rows) > _FEW and not gaps
    return TimeSummary(spacing, gaps, backward, 1e9 * count / span if is_even else None)
