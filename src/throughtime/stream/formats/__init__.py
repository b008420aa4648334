"""File formats, one module each, behind one protocol: length, columns, lazy `read`."""

from throughtime.stream.formats.table import SUFFIXES, Table, open_table

__all__ = ["SUFFIXES", "Table", "open_table"]
