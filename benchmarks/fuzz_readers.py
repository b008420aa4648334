"""Read CSV files and manifests mutated at random: they are read right or refused by a DataError.

    python benchmarks/fuzz_readers.py --seconds 180 --seed 0

Values are compared with those of Python's csv module.
"""

import argparse
import csv
import io
import itertools
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from throughtime.app.data import open_recordings
from throughtime.errors import ThroughtimeError
from throughtime.stream.formats import Table, arrow, open_table
from throughtime.stream.formats import csv as csv_format
from throughtime.stream.formats.table import is_number
from throughtime.stream.formats.times import is_time
from throughtime.stream.layout import Layout
from throughtime.stream.manifest import find_recordings

HANG = 10  # seconds for one file
Mutation = Callable[[random.Random, bytes], bytes]


def table_file(rng: random.Random) -> bytes:
    """A valid file: numbers, gaps and labels."""
    kinds = [rng.choice("nngt") for _ in range(rng.randint(1, 5))]
    end = rng.choice(["\n", "\r\n"])
    lines = [",".join(f"{kind}{i}" for i, kind in enumerate(kinds))] if rng.random() < 0.8 else []
    lines += [",".join(field(rng, kind) for kind in kinds) for _ in range(rng.randint(0, 200))]
    return end.join(lines).encode() + (end.encode() if rng.random() < 0.8 else b"")


def field(rng: random.Random, kind: str) -> str:
    number = rng.choice(
        [f"{rng.gauss(0, 1):.6g}", str(rng.randint(-9, 9)), f"{rng.gauss(0, 1e-20)!r}"]
    )
    if kind == "t":
        return rng.choice(["N", "V", "1", '"beat, late"', '"say ""a"""', "é", "", '"two\nlines"'])
    return "" if kind == "g" and rng.random() < 0.3 else number


def manifest_file(rng: random.Random) -> bytes:
    names, splits, targets = ["a", "b", "001", "1"], ["train", "valid", ""], ["", "a.csv"]
    rows = [
        f"{rng.choice(names)},{rng.choice(splits)},a.csv,{rng.choice(targets)}" for _ in range(3)
    ]
    return ("id,split,inputs,targets\n" + "\n".join(rows) + "\n").encode()


def flip(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def put(*pieces: bytes) -> Mutation:
    def mutation(rng: random.Random, data: bytes) -> bytes:
        at = rng.randrange(len(data) + 1)
        return data[:at] + rng.choice(pieces) + data[at:]

    return mutation


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def drop(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.randint(1, 20) :]


def repeat(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at : at + rng.randint(1, 200)] * rng.randint(2, 5) + data[at:]


def line_ends(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(
        b"\n", rng.choice([b"\r\n", b"\r", b"\n\n", b"\r\r\n"])
    )


def duplicate_column(rng: random.Random, data: bytes) -> bytes:
    del rng
    return b"\n".join(line + b"," + line.split(b",")[0] for line in data.split(b"\n"))


MUTATIONS: list[Mutation] = [
    *(flip, cut, drop, repeat, line_ends, duplicate_column),
    put(b'"', b'""', b'","', b'"\n'),
    put(
        b"9" * 400,
        b"a" * 300,
        b"1" * 200_000,
        b"1e400",
        b"1_0",
        b"0x1",
        b"nan",
        b"-inf",
        b" ",
        b"\t",
        "\u00a0".encode(),
        "٣".encode(),
    ),
    put(b"\0", b"\xff", b"\xfe\xff", b"\xc3", b"\x1a", b"\x1c", "\u2028".encode(), "\x85".encode()),
    put(b",", b"\n", b"\r", b"\r\n", b";", b",,", b"\n\n\n"),
    lambda rng, data: b"\xef\xbb\xbf" * rng.randint(1, 2) + data,
]


def oracle(data: bytes) -> list[list[str]]:
    """All records as Python reads them; blank lines as in the file."""
    limit = csv.field_size_limit(2**30)
    try:
        return list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True))
    finally:
        csv.field_size_limit(limit)


def expected(data: bytes, names: tuple[str, ...]) -> tuple[list[str], list[list[str]]]:
    """The names and the rows; a first record of values is named by numbers."""
    first, *records = [*itertools.dropwhile(lambda record: not record, oracle(data))]
    header = [name.strip() for name in first]
    numbered = [str(i) for i in range(len(header))]
    if list(names) == numbered:
        assert any(is_number(name) or is_time(name) for name in header), header
        header, records = numbered, [first, *records]
    records = [[], *records]
    rows = [(row or [""]) if len(header) == 1 else row for row in records[1:]]
    while len(header) == 1 and records and not records[-1]:
        records.pop()
    rows = rows[: max(0, len(records) - 1)] if len(header) == 1 else [row for row in rows if row]
    return header, rows


def compare(table: Table, data: bytes) -> str:
    """Reads every column that is no error.

    Raises AssertionError where it is not what Python reads.
    """
    header, rows = expected(data, table.columns)
    assert list(table.columns) == header, (table.columns, header)
    assert len(table) == len(rows), (len(table), len(rows))
    outcome = "read"
    for index, name in enumerate(header):
        column = [row[index] for row in rows]
        first = next((f for f in column if f.strip()), "0")
        try:
            values = table.read(0, len(table), [name])[:, 0]
        except ThroughtimeError:
            words = [f for f in column if f.strip() and not is_number(f)]
            words += [f for f in column if re.fullmatch(r"\s*[+-]?\d{16,}\s*", f)]
            assert words or is_time(first), column
            outcome = "column refused"
            continue
        if values.dtype.kind == "U":
            assert values.tolist() == column, [
                (a, b) for a, b in zip(values.tolist(), column, strict=True) if a != b
            ][:3]
        elif values.dtype.kind == "f":
            np.testing.assert_array_equal(
                values,
                [math.nan if f.strip() in csv_format.MISSING else float(f.strip()) for f in column],
            )
    return outcome


def one(rng: random.Random, folder: Path) -> tuple[str, bytes]:
    """Mutates and reads one file; returns the outcome."""
    manifest = rng.random() < 0.2
    data = manifest_file(rng) if manifest else table_file(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        data = rng.choice(MUTATIONS)(rng, data) if data else data
    csv_format.FIELDS = rng.choice([1, 64, 2**20]) if len(data) < 20_000 else 2**20
    csv_format.MIN_ROWS = rng.choice([1, 64])
    arrow.SMALL = rng.choice([0, 2**18])  # of a larger file: it is not cached
    path = folder / ("recordings.csv" if manifest else "r.csv")
    path.write_bytes(data)
    (folder / "a.csv").write_bytes(b"x,y\n1,2\n3,4\n")
    signal.alarm(HANG)
    try:
        if manifest:
            outcome = attempt(
                lambda: "manifest of {} read".format(
                    len(open_recordings(find_recordings(path), Layout("regress")))
                )
            )
        else:
            attempt(
                lambda: str(
                    open_recordings(find_recordings(path), Layout("regress", targets=("n0",)))
                )
            )
            outcome = attempt(lambda: compare(open_table(path), data))
    except BaseException:
        print(f"\nCRASH on {data!r}", file=sys.stderr)
        raise
    finally:
        signal.alarm(0)
    return outcome, data


def attempt(read: Callable[[], str]) -> str:
    try:
        return read()
    except ThroughtimeError:
        return "refused"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"a file took more than {HANG} seconds"))
    counts: Counter[str] = Counter()
    begin = said = time.monotonic()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["THROUGHTIME_CACHE"] = str(Path(folder, "cache"))
        while time.monotonic() - begin < options.seconds:
            counts[one(rng, Path(folder))[0]] += 1
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(f"{said - begin:.0f} s: {dict(counts)}", flush=True)
    print(
        f"{sum(counts.values())} files: {dict(counts)}; no crash, no hang, no number that differs"
    )


if __name__ == "__main__":
    main()
