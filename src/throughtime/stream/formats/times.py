"""Time stamps of rows: read from text, kept as nanoseconds since 1970, checked to ascend.

A time stamp is a date, `2020-03-09`, `2020/3/9`, `09.03.2020`, `9/3/2020` or `3/9/2020`, with or
without a time of day, `10`, `10:14`, `10:14:33.5`, and a zone, `Z`, `UTC` or `+01:00`. Times with a
zone are converted to UTC. Whether 3/9 is March or September is decided by all stamps together, by a
number above 12; without one they are refused.

A kind of times is the order of a date, and `Z` where a zone follows, such as `dmy` or `ymdZ`.
"""

import contextlib
import re
from typing import Any

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, RowSource

_YEAR, _MONTH, _DAY = r"(?P<y>\d{4})", r"(?P<m>\d\d?)", r"(?P<d>\d\d?)"
_CLOCK = r"(?:[T ] *(?P<H>\d\d?)(?P<M>:\d\d(?::\d\d(?:[.,]\d{1,9})?)?)?"
_ZONE = r"(?: *(?P<z>Z|UTC|GMT|[+-]\d\d(?::?\d\d)?))?)?"
_PATTERNS = {
    order: re.compile(date + _CLOCK + _ZONE, re.ASCII)
    for order, date in {
        "ymd": f"{_YEAR}[-/.]{_MONTH}[-/.]{_DAY}",
        "mdy": f"{_MONTH}[-/]{_DAY}[-/]{_YEAR}",
        "dmy": f"{_DAY}[-/.]{_MONTH}[-/.]{_YEAR}",
    }.items()
}
KINDS = [order + zone for zone in ("", "Z") for order in _PATTERNS]
_BLOCK = 65_536  # rows read at once


def is_time(text: str) -> bool:
    """Whether a text is written like a time stamp; `2020-02-31` is, too."""
    return any(pattern.fullmatch(text.strip()) for pattern in _PATTERNS.values())


def time_kinds(texts: Any) -> list[str]:
    """The kind of an Arrow array of texts that are times; none if the first is no time.

    Two kinds where the texts leave open which number is the day.

    Example:
        >>> import pyarrow as pa
        >>> [time_kinds(pa.array([text])) for text in ("2020-03-19 10:14", "2020-03-09T10Z", "x")]
        [['ymd'], ['ymdZ'], []]
        >>> time_kinds(pa.array(["1/2/2020", "1/3/2020"]))
        ['mdy', 'dmy']
    """
    import pyarrow as pa

    if not is_time(texts[0].as_py()):
        return []
    first, values = list[str](), dict[bytes, str]()
    for kind in KINDS:
        with contextlib.suppress(pa.ArrowInvalid):
            parse_times(texts[:1], kind)
            first.append(kind)
            values.setdefault(parse_times(texts, kind).to_numpy().tobytes(), kind)
    some = texts[:_BLOCK].to_pylist()  # a text may begin with a date
    if values or 2 * sum(map(is_time, some)) <= len(some):
        return [*values.values()][:2]
    return [*first, *KINDS][:1]


def parse_times(texts: Any, kind: str) -> Any:
    """An Arrow array of text as time stamps in nanoseconds; what is null stays so.

    Raises:
        pyarrow.ArrowInvalid: a text is of another kind, or is no time, such as 2020-02-30.

    Cost: 0.1 microseconds for each text in ISO 8601, two for others.
    """
    import pyarrow as pa

    order, zone = kind[:3], kind[3:]
    dtype, values = pa.timestamp("ns", "UTC" if zone else None), None
    if order == "ymd":
        with contextlib.suppress(pa.ArrowInvalid):  # of ISO 8601
            values = texts.cast(dtype)
    if values is None:
        matches = (text and _PATTERNS[order].fullmatch(text) for text in texts.to_pylist())
        values = pa.array([match and _iso(match) for match in matches], pa.string()).cast(dtype)
        if values.null_count != texts.null_count:
            raise pa.ArrowInvalid
    return values.cast("int64").cast(pa.timestamp("ns"))


def _iso(match: re.Match[str]) -> str:
    """A time in ISO 8601."""
    part = match.groupdict("")
    zone = "Z" if part["z"].isalpha() else part["z"]
    day = f"{part['y']}-{part['m']:0>2}-{part['d']:0>2}"
    hour, minutes = part["H"] or "0", part["M"].replace(",", ".") or ":00"
    return f"{day} {hour:0>2}{minutes}{zone}"


def nanoseconds(values: Array, source: str) -> Array:
    """Times as `datetime64[ns]`.

    Raises:
        DataError: a time outside of the years that this type has, such as 9999-12-31.
    """
    result = values.astype("M8[ns]")
    wrong = ~np.isnat(values) & (result.astype(values.dtype) != values)
    if wrong.any():
        raise DataError(
            f"{source}: holds the time {values[wrong][0]}, not from 1678 to 2261; exclude it"
        )
    return result


def time_texts(values: Array) -> list[str]:
    """Times in ISO 8601, to the second or as far as they have decimals; NaT is empty.

    Example:
        >>> time_texts(np.array(["2020-03-09T10:14", "2020-03-09T10:14:33.5", "NaT"], "M8[ns]"))
        ['2020-03-09T10:14:00', '2020-03-09T10:14:33.5', '']
    """
    texts = np.datetime_as_string(values.astype("M8[ns]")).tolist()
    return ["" if text == "NaT" else text.rstrip("0").rstrip(".") for text in texts]


def rate_of_times(name: str, column: str, rows: RowSource) -> float | None:
    """The rate of time stamps `(n,)`, which are read once, in blocks.

    Args:
        name: of the recording, for messages.
        column: that of the stamps, likewise.
        rows: the stamps.

    Returns:
        Rows per second; `None` where rows are not evenly spaced, or too few to tell. Stamps may be
        rounded: each differs from its time by at most the unit in which they are written. Or their
        steps differ by a fiftieth.

    Raises:
        DataError: a row is earlier than the one before it.
    """
    last = max(1, len(rows) - 1)
    begin, end = (int(rows.read(i, i + 1).astype(np.int64).sum()) for i in (0, last))
    mean, times = (end - begin) / last, rows.read(0, 0)
    known, unit, spacing, shortest, longest, off = 0, 0, 0.0, np.inf, 0.0, 0.0
    for start in range(0, len(rows), _BLOCK):
        values = rows.read(start, start + _BLOCK)
        present = np.flatnonzero(~np.isnat(values))
        known += len(present)
        times = np.concatenate([times[-1:], values[present]])
        steps = np.diff(times).astype(np.int64)
        if not len(steps):
            continue
        if (steps < 0).any():
            i = int((steps < 0).argmax())
            before, after = time_texts(times[i : i + 2])
            raise DataError(
                f"recording '{name}': row {start + int(present[i - len(steps)])} of '{column}',"
                f" {after}, is earlier than the row before it, {before} (the first row is row 0);"
                f" sort or split them, or leave times out: exclude='{column}' (--exclude {column})"
            )
        passed = values[present].astype(np.int64) - begin
        off = max(off, np.abs(passed - mean * (start + present)).max())
        unit = int(np.gcd.reduce(steps, initial=unit))
        shortest, longest = min(shortest, steps.min()), max(longest, steps.max())
        spacing = spacing or float(np.median(steps))
    close = off <= unit or longest - shortest <= mean / 50
    is_even = close and shortest > 0 and longest <= 1.5 * spacing
    # ten rows may be evenly spaced by chance
    return 1e9 / mean if is_even and known == len(rows) > 10 else None
