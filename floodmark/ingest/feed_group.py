"""Records of a spool as rows of their table: read, folded by key, and split into rows that fit and rows that do not.

Last arrival wins: of the changes of one key in a group only the last is left, a deletion like a row, within one record
too. Nothing is folded across a null key: such rows do not fit, and must be refused. A column that is filled by its
default is left to those rows that do not bring it, row by row: dicts keep the difference between null and absent, Arrow
does not, so a table with such columns, and records that may add columns, are read as dicts.

Rows that a request brought and that were judged when they came are kept in memory, up to a bound (I14), for the feed
that follows a moment later. That only saves work: other rows, and rows that were judged by another shape of the table,
are read from the spool, as after a crash.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from floodmark.commit.catalog import Catalog
from floodmark.errors import Conflict, Invalid
from floodmark.ingest.judge import Judge, JudgedRows, deletions_of, with_all_columns
from floodmark.json_form import Json
from floodmark.model import SEQ_COLUMN, Head, Value
from floodmark.rows.json.json_lines import parse_lines
from floodmark.rows.reading.changes import CHANGE_COLUMN
from floodmark.rows.staging.duplicates import last_of_table
from floodmark.spool.segments import Record
from floodmark.write.refusals import Offence

# How often the actor may change in one read of a spool before the records are published together.
TURNS_MAX = 16
# Judged rows of one table that are kept in memory.
MEMORY_BYTES_MAX = 32 * 1024 * 1024


@dataclass(frozen=True)
class BadRow:
    """A row that does not fit its table any more, as it was sent, and why."""

    record: int
    line: int
    text: str
    evolve: bool
    error: dict[str, Json]


@dataclass(frozen=True)
class SpooledRows:
    """Rows to be put into a table: an Arrow table, or dicts with JSON's forms of values. `judged`: all of them, before
    folding, in the types that they come in; `kept`: the places of those that are left, if not all are."""

    data: pa.Table | list[dict[str, Value]]
    judged: pa.Table
    kept: list[int] | None = None

    @property
    def count(self) -> int:
        """Before folding."""
        return int(self.judged.num_rows)

    @property
    def from_json(self) -> bool:
        return isinstance(self.data, list)


def same_kind(records: Sequence[Record]) -> list[Record]:
    """The first of them that can be one publish: a record that may add columns must not let others add some.

    A publish has the rows of one actor. Where actors alternate so often that nearly every record would be a publish of
    its own, and the feed fall behind, it has the rows of all of them, and names them all.
    """
    alike = list(takewhile(lambda record: record.evolve == records[0].evolve, records))
    turns = [len(list(turn)) for _, turn in groupby(alike, key=lambda record: record.actor)]
    return alike if len(turns) > TURNS_MAX else alike[: turns[0]] if turns else []


def actor_of(records: Sequence[Record], own: str) -> str:
    """The actor of the commit: `own` for rows that were sent without a token."""
    return ", ".join(dict.fromkeys(record.actor or own for record in records))


class RecordReader:
    """How the records of one table are read, for as long as it has the shape that its judge knows."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.key = judge.key

    def read(self, texts: Sequence[bytes], rows_max: int, *, evolve: bool) -> SpooledRows:
        """All rows of these texts, folded; `Invalid` if one of them does not fit."""
        text = b"\n".join(texts)
        judged = self._judge.read(text, rows_max, evolve=evolve)
        if evolve or self._judge.filled:
            data = parse_lines(text, rows_max)
        else:
            data = with_all_columns(judged.table, self._judge.shape.columns)
        # By the keys as they were judged: rows that may widen a key's type have keys that its old one cannot hold.
        return self._folded(data, judged.table)

    def is_judged_by(self, judge: Judge) -> bool:
        """Whether `read` would return what this one judged. Defaults are filled row by row, from dicts."""
        return not self._judge.filled and not judge.filled and judge.schema == self._judge.schema

    def join(self, tables: Sequence[pa.Table]) -> SpooledRows:
        """The same as `read`, for rows that were judged before."""
        changes = any(CHANGE_COLUMN in table.schema.names for table in tables)
        columns = self._judge.shape.columns
        data = pa.concat_tables([with_all_columns(table, columns, changes=changes) for table in tables])
        return self._folded(data, data)

    def _folded(self, data: pa.Table | list[dict[str, Value]], judged: pa.Table) -> SpooledRows:
        kept = last_of_each(judged.select(self.key), self.key) if self.key and judged.num_rows > 1 else None
        return SpooledRows(taken(data, kept), judged, kept)

    # ── rows that do not fit ──

    def offending(self, rows: SpooledRows, offences: Sequence[Offence]) -> dict[int, tuple[str, str]]:
        """Which rows other tables refuse, by their places before folding: the column and the value in it."""
        table, found = rows.judged, dict[int, tuple[str, str]]()
        kept = None if rows.kept is None else set(rows.kept)
        deleted = deletions_of(table)
        for offence in offences:
            if offence.column not in table.schema.names:
                continue
            values = table.column(offence.column).combine_chunks()
            wrong = pc.is_in(values.cast(offence.values.type), value_set=offence.values)
            wrong = pc.and_(wrong, deleted if offence.go else pc.invert(deleted))
            for place in pc.indices_nonzero(wrong).to_pylist():
                # A row that a later row of its key replaces is not published.
                if kept is None or place in kept:
                    found.setdefault(place, (offence.column, str(values[place].as_py())))
        return found

    def sift(self, record: Record) -> tuple[list[tuple[int, str]], list[BadRow]]:
        """The lines of a record that fit by themselves, with their numbers, and those that do not."""
        good: list[tuple[int, str]] = []
        bad: list[BadRow] = []
        for number, line in lines_of(record.text):
            try:
                self.read([line.encode(errors="surrogateescape")], 1, evolve=record.evolve)
            except Invalid as error:
                bad.append(BadRow(record.number, number, line, record.evolve, _at_line(error, number)))
            else:
                good.append((number, line))
        return good, bad


def head_of(catalog: Catalog, table_id: str) -> Head:
    """The head of a table, whatever its name is now; Conflict if it is gone."""
    found = next((head for head in catalog.history.heads() if head.table_id == table_id), None)
    if found is None:
        raise table_gone(table_id)
    return found


def table_gone(table_id: str) -> Conflict:
    return Conflict(
        "the table of this spool is gone",
        table_id=table_id,
        advice="Its rows are kept. `floodmark spool accept` shows what can be done.",
    )


def _at_line(error: Invalid, number: int) -> dict[str, Json]:
    """The error of a line that was read by itself, with its number in its record."""
    shown = {**error.as_dict(), "message": error.message.replace("line 1,", f"line {number},", 1)}
    if "line" in shown["facts"]:
        shown["facts"] = {**shown["facts"], "line": str(number)}
    if "problems" in shown:
        shown["problems"] = [{**one, "line": number} for one in shown["problems"]]
    return shown


def lines_of(text: bytes) -> list[tuple[int, str]]:
    """The lines that are rows, with their numbers from 1. Bytes that are no text are kept as they are."""
    lines = text.decode(errors="surrogateescape").split("\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip(" \t\r")]


def taken(data: pa.Table | list[dict[str, Value]], places: list[int] | None) -> pa.Table | list[dict[str, Value]]:
    """Rows by their places; all of them if that is None."""
    if places is None:
        return data
    return [data[place] for place in places] if isinstance(data, list) else data.take(pa.array(places))


def last_of_each(keys: pa.Table, names: Sequence[str]) -> list[int] | None:
    """The places of the last row of each key, ascending; None if all keys differ. Rows with a null in it all stay."""
    places = pa.array(np.arange(keys.num_rows, dtype=np.int64))
    whole = pa.array(np.ones(keys.num_rows, bool))
    for name in names:
        whole = pc.and_(whole, keys.column(name).combine_chunks().is_valid())
    numbered = keys.append_column(SEQ_COLUMN, places)
    last = last_of_table(numbered.filter(whole), names, SEQ_COLUMN).column(SEQ_COLUMN).to_pylist()
    rest = places.filter(pc.invert(whole)).to_pylist()
    if len(last) + len(rest) == keys.num_rows:
        return None
    return sorted([*last, *rest])


# ── rows in memory ──


class Memory:
    """Judged rows of one table. The spool's id is part of the key: another spool counts from 0 again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], JudgedRows] = OrderedDict()
        self._bytes = 0

    def put(self, spool: str, record: int, rows: JudgedRows) -> None:
        with self._lock:
            if self._bytes + rows.table.nbytes <= MEMORY_BYTES_MAX and (spool, record) not in self._kept:
                self._kept[spool, record] = rows
                self._bytes += rows.table.nbytes

    def find(self, spool: str, records: Sequence[Record]) -> list[JudgedRows] | None:
        """The rows of all these records, in their order; None if those of one are not kept."""
        with self._lock:
            found = [self._kept.get((spool, record.number)) for record in records]
        return [one for one in found if one is not None] if None not in found else None

    def forget(self, spool: str, position: int) -> None:
        """Drop rows that are in the table by now, or belong to a spool that is gone."""
        with self._lock:
            for key in [key for key in self._kept if key[0] != spool or key[1] < position]:
                self._bytes -= self._kept.pop(key).table.nbytes
