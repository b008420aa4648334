"""Odd but legal CSV files, and what pandas reads in them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from odd_files import OddFile, Reference

TEXTS: list[OddFile] = []
LONG, MANY = "1234567890" * 10, 20_000  # so many digits a line, so many lines: 2 MB


def column_values(column: pd.Series) -> list[Any]:
    """Numbers of a column of pandas, exactly, with NaN where a value is missing."""
    return [float("nan") if pd.isna(value) else value for value in column.tolist()]


def is_number(column: pd.Series) -> bool:
    """Whether all values of a column are numbers or booleans."""
    if pd.api.types.is_numeric_dtype(column):
        return True
    present = column.dropna()
    return len(present) > 0 and all(isinstance(value, bool | int | float) for value in present)


def frame_reference(frame: pd.DataFrame, times: Any = None, time_columns: Any = ()) -> Reference:
    """The columns of a frame by kind; those of the time stamps are no inputs."""
    frame = frame.rename(columns=str)
    columns = {name: column for name, column in frame.items() if name not in time_columns}
    return Reference(
        {str(name): column_values(col) for name, col in columns.items() if is_number(col)},
        {
            str(name): [None if pd.isna(text) else str(text) for text in col]
            for name, col in columns.items()
            if not is_number(col)
        },
        times,
        tuple(time_columns),
    )


def stamps(column: pd.Series, form: str) -> Any:
    """Time stamps by a format of strptime, or `pandas`' words for ISO; with a zone in UTC."""
    if form == "time":
        return pd.to_datetime("1970-01-01 " + column).to_numpy()
    if "%z" in form or form == "zone":
        zoned = pd.to_datetime(column, format="ISO8601" if form == "zone" else form, utc=True)
        return zoned.dt.tz_localize(None).to_numpy()
    return pd.to_datetime(column, format=form).to_numpy()


def text(
    name: str,
    content: str | bytes,
    *,
    common: bool = True,
    times: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    **pandas: Any,
) -> None:
    """Add a CSV file: its content, the formats of its time columns, the options of `read_csv`."""
    times = times or {}

    def write(path: Path) -> Reference:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        frame = pd.read_csv(path, **({} if "engine" in pandas else {"low_memory": False}), **pandas)
        series = [stamps(frame[column].astype("str"), form) for column, form in times.items()]
        return frame_reference(frame, series[0] if series else None, list(times))

    TEXTS.append(OddFile(f"{name}.csv", write, common, options or {}))


def odd(name: str, content: str | bytes, **others: Any) -> None:
    """Add a CSV file that may be refused."""
    text(name, content, common=False, **others)


def timed(name: str, first: str, second: str, form: str, *, common: bool = True) -> None:
    """Add a file with a column of time stamps between two others."""
    rows = f"u,time,v\n1,{first},2.5\n3,{second},4.5\n"
    text(f"time_{name}", rows, common=common, times={"time": form})


def lines(row: Callable[[int], str], count: int) -> str:
    """As many lines, each by its number."""
    return "".join(f"{row(number)}\n" for number in range(count))


# Separators, decimal marks and headers
text("commas", "u,v\n1,2.5\n-3,4\n")
text("semicolons", "u;v\n1;2.5\n-3;4\n", sep=";")
text("tabs", "u\tv\n1\t2.5\n-3\t4\n", sep="\t")
text("pipes", "u|v\n1|2.5\n-3|4\n", sep="|")
text("decimal_commas", "u;v\n1,5;2,25\n-3,75;4,0\n", sep=";", decimal=",")
text("decimal_commas_tabs", "u\tv\n1,5\t2,25\n-3,75\t4,0\n", sep="\t", decimal=",")
odd("decimal_commas_pipes", "u|v\n1,5|2,25\n-3,75|4,0\n", sep="|", decimal=",")
odd(
    "decimal_commas_quoted",
    'u,v\n"1,5","2,25"\n"-3,75","4,5"\n',
    decimal=",",
    options={"delimiter": ",", "decimal": ","},
)
odd(
    "decimal_commas_late",
    "u;v\n" + lines(lambda i: f"{i};{i % 7}", 12_000) + "1,5;2\n",
    sep=";",
    decimal=",",
)
text("decimal_comma_in_one_column", "u;v\n1;2,25\n-3;4,5\n", sep=";", decimal=",")
text("tabs_missing", "u\tv\tw\n1\t\t3\n\t5\t6\n7\t8\t\n", sep="\t")
text("tabs_and_a_note", "u\tnote\tv\n1.5\ta b\t2\n2.5\tc\t3\n\td e f\t4\n", sep="\t")
text("tabs_commas_in_a_note", "u\tnote\tv\n1.5\t1,5 kg\t2\n2.5\t2,5 kg\t3\n", sep="\t")
odd("decimal_commas_in_one_column", "u\n1,5\n2,5\n", sep=";", decimal=",")
odd("separator_in_the_only_name", "u|v\n1.5\n2.5\n", sep=",")
text("decimal_commas_and_a_note", "u;note\n1,5;a, b\n2,5;d, e\n", sep=";", decimal=",")
text("no_header", "1,2.5\n-3,4\n5,6\n", header=None)
text("no_header_decimal_commas", "1,5;2,5\n-3,5;4,5\n", sep=";", decimal=",", header=None)
text("no_header_first_decimals", "400.5,410.5\n1,2\n3,4.5\n", header=None)
text("no_header_exponents", "1e3,-2E-4\n3e3,4\n", header=None)
text("names_and_numbers_in_header", "station,400,410\n1,0.1,0.2\n2,0.3,0.4\n")
text("dates_in_header", "station,2020-01-01,2020-01-02\n1,0.1,0.2\n2,0.3,0.4\n")
odd("no_header_missing_first", ",2.5\n3,4\n5,6\n", header=None)
odd("no_header_na_first", "NA,2.5\n3,4\n5,6\n", header=None)
odd("no_header_missing_last", "1,\n3,4\n5,6\n", header=None)
odd("only_dates_in_header", "2020-01-01,2020-01-02\n0.1,0.2\n0.3,0.4\n")
odd("index_without_name", ",u,v\n0,1.5,2\n1,2.5,4\n", index_col=0)
odd("first_line_sep", "sep=;\nu;v\n1;2\n3;4\n", sep=";", skiprows=1)
odd("comments_first", "# logger 7\n# Berlin\nu,v\n1,2\n3,4\n", comment="#")
odd("title_first", "Logger 7\nu,v\n1,2\n3,4\n", skiprows=1)
odd("units_second", "u,v\nm,s\n1,2\n3,4\n", skiprows=[1])
odd("separator_at_line_ends", "u,v,\n1,2,\n3,4,\n", usecols=[0, 1])

# Quotes, lines and encodings
text("quoted_numbers", 'u,v\n"1","2.5"\n"-3","4"\n')
text("quoted_here_and_there", 'u,v\n"1",2.5\n-3,"4"\n5,6\n')
text("quoted_decimal_commas", '"u";"v"\n"1,5";"2,25"\n"-3,75";"4,0"\n', sep=";", decimal=",")
text(
    "quoted_line_breaks_for_2_megabytes",
    "u,label\n" + lines(lambda i: f'{i},"{"ab"[i % 2]}\n{LONG}"', MANY),
)
text("quoted_separator", 'u,label\n1,"a,b"\n2,"c"\n3,"a,b"\n')
text("quoted_semicolons", 'u,label\n1,"a;b;c;d"\n2,"e;f;g;h"\n')
text("quoted_line_break", 'u,label\n1,"a\nb"\n2,c\n')
text("quoted_quotes", 'u,label\n1,"a ""b"" c"\n2,"""d"""\n')
odd("single_quotes", "u,v\n1,'2.5'\n2,'3.5'\n")
odd("quote_inside_text", 'u,label\n1,5" pipe\n2,6" pipe\n')
text("crlf", "u,v\r\n1,2.5\r\n-3,4\r\n")
odd("cr_alone", "u,v\r1,2.5\r-3,4\r")
odd("line_ends_mixed", "u,v\r\n1,2.5\n-3,4\r\n5,6\n")
odd("line_separator_in_text", "u,label\n1,a\u2028b\n2,c\x85d\n3,e\x0cf\n")  # str.splitlines splits
text("no_final_newline", "u,v\n1,2.5\n-3,4")
text("no_final_newline_missing", "u,v\n1,2.5\n-3,")
text("blank_line_last", "u,v\n1,2.5\n-3,4\n\n\n")
text("blank_lines_between", "u,v\n1,2.5\n\n-3,4\n\n\n5,6\n")
odd("blank_lines_first", "\n\nu,v\n1,2.5\n-3,4\n")
odd("line_of_spaces", "u,v\n1,2.5\n   \n-3,4\n", skip_blank_lines=True, skipinitialspace=True)
text("bom", "\ufeffu,v\n1,2.5\n-3,4\n")
text("bom_no_header", "\ufeff1,2.5\n-3,4\n", header=None)
text("utf16_le", "u,v\n1,2.5\n-3,4\n".encode("utf-16"), encoding="utf-16")
text("utf16_be", b"\xfe\xff" + "u,v\n1,2.5\n-3,4\n".encode("utf-16-be"), encoding="utf-16")
text(
    "utf16_excel",
    "Größe\tlabel\r\n1,5\tä\r\n2,5\tö\r\n".encode("utf-16"),
    encoding="utf-16",
    sep="\t",
    decimal=",",
)
odd("latin1", "u,label\n1,ä\n2,ö\n".encode("latin-1"), encoding="latin-1")
odd("latin1_name", "Größe,v\n1,2\n3,4\n".encode("latin-1"), encoding="latin-1")
text("spaces_after_commas", "u, v\n1, 2.5\n-3, 4\n", skipinitialspace=True)
odd("spaces_around", "u , v\n1 , 2.5\n-3 , 4\n", sep=r"\s*,\s*", engine="python")
odd("spaces_before_text", "u, label\n1, N\n2, V\n", skipinitialspace=True)
odd("spaces_aligned", "   u    v\n   1  2.5\n  -3  4.0\n", sep=r"\s+")
odd("spaces_single", "u v\n1 2.5\n-3 4\n", sep=" ")

# Missing values
text("missing_empty", "u,v\n1,\n,2\n3,4\n")
for spelling in ("NA", "NaN", "nan", "null", "NULL", "N/A", "#N/A"):
    text(f"missing_{spelling.replace('/', '')}_{len(TEXTS)}", f"u,v\n1,2.5\n2,{spelling}\n3,4\n")
for spelling in ("None", "n/a", "<NA>", "-nan", "1.#QNAN", "-1.#IND", "#NA"):
    odd(f"missing_{spelling.replace('/', '')}_{len(TEXTS)}", f"u,v\n1,2.5\n2,{spelling}\n3,4\n")
odd("missing_question_mark", "u,v\n1,2.5\n2,?\n3,4\n")
odd("missing_dash", "u,v\n1,2.5\n2,-\n3,4\n")
odd("missing_quoted", 'u,v\n1,""\n2,3\n')
odd("missing_spaces", "u,v\n1,2.5\n2,  \n3,4\n", skipinitialspace=True)
odd("missing_text", "u,label\n1,N\n2,\n3,V\n")
odd("missing_text_na", "u,label\n1,N\n2,NA\n3,V\n", keep_default_na=False)
text("nan_in_first_row", "u,v\nNaN,1\n2,3\n4,5\n")
text("missing_in_first_row", "u,v\n,1\n2,3\n4,5\n")
text("missing_for_2000_rows", "u,v\n" + lines(lambda i: f"{i},{'' if i < 2000 else i}", 2100))
text("missing_for_2_megabytes", "u,v\n" + lines(lambda i: f"{i}.{LONG},", MANY) + "1,2.5\n")
odd("empty_column", "u,v,w\n1,,3\n4,,6\n")

# Numbers
text("exponents", "u,v\n1e3,-2.5E-4\n1E+10,5e0\n")
text("plus_signs", "u,v\n+1,+2.5\n-3,+4\n")
text("leading_zeros", "u,v\n007,02.50\n-003,04\n")
text("leading_dots", "u,v\n.5,-.25\n.75,.1\n")
odd("trailing_dots", "u,v\n5.,-2.\n7.,1.\n")
odd("hexadecimal_floats", "u,v\n1,0x1p3\n2,0x1p4\n")
text("many_digits", "u,v\n0.1234567890123456789012345,3.141592653589793238\n1,2\n")
odd("denormal_and_overflow", "u,v\n1,1e-320\n2,1e400\n")
text("integers_then_decimals", "u,v\n" + lines(lambda i: f"{i},{i % 7}", 3000) + "1.5,2.5\n")
text("decimals_after_2_megabytes", "u,v\n" + lines(lambda i: f"{i}.{LONG},5", MANY) + "1,2.5\n")
text("integer_like_floats", "u,v\n1.0,2.0\n-3.0,4.0\n")
text("seconds_since_1970", "u,t\n1,1577836800\n2,1577836801\n")
text("milliseconds_since_1970", "u,t\n1,1577836800123\n2,1577836801123\n")
odd("labels_above_2_53", "u,label\n1,9007199254740992\n2,9007199254740993\n")
odd("labels_above_2_53_missing", "u,label\n1,9007199254740993\n2,\n", dtype={"label": "Int64"})
odd("largest_int64", "u,v\n1,9223372036854775807\n2,-9223372036854775808\n")
odd("largest_uint64", "u,v\n1,18446744073709551615\n2,0\n")
odd("beyond_uint64", f"u,v\n1,{10**30}\n2,{10**30 + 1}\n", dtype={"v": "str"})
odd("percents", "u,v\n1,5%\n2,6%\n")
odd("underscores", "u,v\n1,1_000\n2,2_000\n")
odd("fullwidth_digits", "u,v\n1,\uff11\uff12\n2,\uff13\n")  # numbers to float()
odd("unicode_minus", "u,v\n1,\u22125\n2,\u22126\n")
odd("thousands_points", "u;v\n1;1.234,5\n2;2.345,5\n", sep=";", decimal=",", thousands=".")
odd("thousands_spaces", "u;v\n1;1 234\n2;2 345\n", sep=";")
odd("thousands_apostrophes", "u;v\n1;1'234\n2;2'345\n", sep=";")
odd("thousands_quoted", 'u,v\n1,"1,234.5"\n2,"2,345.5"\n', thousands=",")
odd("zip_codes_with_letters", "u,v\n1,10115\n2,SW1A\n")
text("booleans", "u,v\n1,True\n2,False\n")
text("booleans_upper", "u,v\n1,TRUE\n2,FALSE\n")
odd("booleans_missing", "u,v\n1,True\n2,\n3,False\n")
odd("booleans_and_numbers", "u,v\n1,True\n2,0\n", dtype={"v": "str"})

# Time stamps
timed("space", "2020-01-01 10:00:00", "2020-01-01 10:00:01", "ISO8601")
timed("t", "2020-01-01T10:00:00", "2020-01-01T10:00:01", "ISO8601")
timed("no_seconds", "2020-01-01 10:00", "2020-01-01 10:01", "ISO8601")
timed("milliseconds", "2020-01-01 10:00:00.125", "2020-01-01 10:00:00.250", "ISO8601")
timed("microseconds", "2020-01-01T10:00:00.000001", "2020-01-01T10:00:00.000002", "ISO8601")
timed("nanoseconds", "2020-01-01T10:00:00.000000001", "2020-01-01T10:00:00.000000002", "ISO8601")
timed("fraction_sometimes", "2020-01-01 10:00:00", "2020-01-01 10:00:00.5", "ISO8601")
timed("zulu", "2020-01-01T10:00:00Z", "2020-01-01T10:00:01Z", "zone")
timed("zone", "2020-01-01T10:00:00+01:00", "2020-01-01T10:00:01+01:00", "zone")
timed("zone_hours", "2020-01-01 10:00:00+01", "2020-01-01 10:00:01+01", "zone", common=False)
timed("utc", "2020-01-01 10:00:00 UTC", "2020-01-01 10:00:01 UTC", "%Y-%m-%d %H:%M:%S UTC")
timed("zone_changes", "2020-03-29T01:59:59+01:00", "2020-03-29T03:00:00+02:00", "zone")
timed("zone_west", "2020-01-01T20:00:00.5-05:30", "2020-01-01T20:00:01.5-05:30", "zone")
timed("short_years", "20-01-01 10:00", "20-01-01 10:01", "%y-%m-%d %H:%M", common=False)
timed("nanoseconds_and_zone", "2020-01-01T10:00:00.123456789Z", "2020-01-01T10:00:01Z", "zone")
timed("date_and_slash", "2020/01/01 10:00", "2020/01/01 10:01", "%Y/%m/%d %H:%M", common=False)
timed("date_alone", "2020-01-01", "2020-01-02", "ISO8601")
timed("german", "31.12.2019 23:59", "01.01.2020 00:00", "%d.%m.%Y %H:%M")
timed("german_date", "31.12.2019", "01.01.2020", "%d.%m.%Y")
timed("german_low_days", "01.02.2020", "02.02.2020", "%d.%m.%Y")
timed("german_short_year", "31.12.19 23:59", "01.01.20 00:00", "%d.%m.%y %H:%M", common=False)
timed("german_no_zeros", "9.3.2020 9:05", "9.3.2020 9:06", "%d.%m.%Y %H:%M", common=False)
timed("american", "12/31/2019 11:59 PM", "01/01/2020 12:00 AM", "%m/%d/%Y %I:%M %p", common=False)
timed(
    "american_seconds",
    "1/31/2020 1:00:00 PM",
    "1/31/2020 1:00:01 PM",
    "%m/%d/%Y %I:%M:%S %p",
    common=False,
)
timed("american_24_hours", "12/30/2019 23:59", "12/31/2019 23:59", "%m/%d/%Y %H:%M")
timed("british", "31/12/2019 23:58", "31/12/2019 23:59", "%d/%m/%Y %H:%M", common=False)
timed("names_of_months", "9-Mar-2020", "10-Mar-2020", "%d-%b-%Y", common=False)
timed("before_1970", "1969-12-31 23:59:59", "1970-01-01 00:00:00", "ISO8601")
timed("year_1500", "1500-01-01 00:00:00", "1500-01-01 00:00:01", "ISO8601", common=False)
timed("year_9999", "9998-01-01 00:00:00", "9999-01-01 00:00:00", "ISO8601", common=False)
timed("unsorted", "2020-01-01 10:00:01", "2020-01-01 10:00:00", "ISO8601", common=False)
timed(
    "comma_fraction",
    '"2020-01-01 10:00:00,5"',
    '"2020-01-01 10:00:01,5"',
    "%Y-%m-%d %H:%M:%S,%f",
    common=False,
)
timed("quoted", '"2020-01-01 10:00:00"', '"2020-01-01 10:00:01"', "ISO8601")
timed("of_day", "10:00:00", "10:00:01", "time", common=False)
timed("of_day_fraction", "10:00:00.25", "10:00:00.50", "time", common=False)
text(
    "time_first_and_semicolons",
    "Datum;u;v\n31.12.2019 23:59;1,5;2\n01.01.2020 00:00;2,5;3\n",
    sep=";",
    decimal=",",
    times={"Datum": "%d.%m.%Y %H:%M"},
)
text(
    "time_last",
    "u,v,time\n1,2,2020-01-01 10:00\n3,4,2020-01-01 10:01\n",
    times={"time": "ISO8601"},
)
text(
    "time_fraction_after_2_megabytes",
    "u,time\n"
    + lines(lambda i: f"{i}.{LONG},2020-01-01 10:00:00", MANY)
    + "3,2020-01-01 10:00:01.5\n",
    times={"time": "ISO8601"},
)
text(
    "time_and_a_date_in_text",
    "u,time,note\n1,2020-01-01 10:00,2020-01-01\n2,2020-01-01 10:01,soon\n",
    times={"time": "ISO8601"},
)
odd(
    "time_missing",
    "u,time\n1,2020-01-01 10:00\n2,\n3,2020-01-01 10:02\n",
    times={"time": "ISO8601"},
)
odd(
    "time_of_start_and_of_end",
    "start,end,u\n2020-01-01 10:00,2020-01-01 10:01,1\n2020-01-01 10:01,2020-01-01 10:02,2\n",
    times={"start": "ISO8601", "end": "ISO8601"},
)
odd(
    "time_index_without_name",
    ",u\n2020-01-01 10:00:00,1\n2020-01-01 10:00:01,2\n",
    times={"Unnamed: 0": "ISO8601"},
)
odd(
    "time_no_header",
    "2020-01-01 10:00:00,1\n2020-01-01 10:00:01,2\n",
    header=None,
    names=["0", "1"],
    times={"0": "ISO8601"},
)

# Shapes and names
text("one_column", "u\n1\n2\n3\n")
text("one_column_no_header", "1.5\n2.5\n3.5\n", header=None)
text("one_row", "u,v\n1,2.5\n")
text("one_value", "u\n1\n")
text(
    "columns_300",
    f"{','.join(f'c{i}' for i in range(300))}\n"
    + lines(lambda row: ",".join(str(row * 300 + i + 0.5) for i in range(300)), 4),
)
odd(
    "line_of_2_megabytes",
    f"{','.join(f'c{i}' for i in range(1000))}\n"
    + lines(lambda row: ",".join(f"{row}.{i}{LONG * 25}" for i in range(1000)), 2),
)
odd("text_of_100_kilobytes", f"u,label\n1,{'x' * 100_000}\n2,y\n")
text("labels", "u,label\n1,N\n2,V\n3,N\n")
text("labels_mixed", "u,label\n1,A1\n2,B2\n3,2\n")
odd("labels_numbers_first", "u,label\n" + lines(lambda i: f"{i},{i % 3}", 50) + "1,x\n")
text("names_with_units", "T [°C],p (hPa),v / m/s\n1,2.5,3\n-3,4,5\n")
text("names_quoted_separator", '"a,b","c;d"\n1,2.5\n-3,4\n')
odd("names_quoted_quotes", '"a ""b""",c\n1,2.5\n-3,4\n')
odd("names_quoted_line_break", '"wind\nspeed",c\n1,2.5\n-3,4\n')
odd("names_by_case", "a,A\n1,2.5\n-3,4\n")
text("names_inputs_targets", "inputs,weight\n1,2.5\n-3,4\n")
odd("name_of_1000_characters", f"{'n' * 1000},v\n1,2.5\n-3,4\n")
odd("names_with_spaces_at_the_end", '"u ",v\n1,2.5\n-3,4\n')
odd("names_that_look_missing", "NA,nan\n1,2.5\n-3,4\n")
text("names_with_digits", "1st,2nd\n1,2.5\n-3,4\n")
