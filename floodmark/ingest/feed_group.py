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
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema

from floodmark.commit.catalog import Catalog
from floodmark.errors import Conflict, Invalid
from floodmark.ingest.judge import Judge, shape_at
from floodmark.model import SEQ_COLUMN, Head
from floodmark.rows.convert import Shape, table_shape
from floodmark.rows.json.json_lines import parse_lines
from floodmark.rows.reading.changes import CHANGE_COLUMN, DELETE, UPSERT
from floodmark.rows.staging.duplicates import last_of_table
from floodmark.spool.segments import Record
from floodmark.write.prune import key_fields
from floodmark.write.refusals import Offence

# How often the actor may change in one read of a spool before the records are published together.
TURNS_MAX = 16
# Judged rows of one table that are kept in memory.
MEMORY_BYTES_MAX = 32 * 1024 * 1024


@dataclass(frozen=True)
class Bad:
    """A row that does not fit its table any more, as it was sent, and why."""

    record: int
    line: int
    text: str
    evolve: bool
    error: dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """Rows to be put into a table: an Arrow table, or dicts with JSON's forms of values. `judged`: all of them, before
    folding, in the types that they come in; `kept`: the places of those that are left, if not all are."""

    data: pa.Table | list[dict[str, Any]]
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


class Group:
    """How the records of one table are read, for as long as it has this shape."""

    def __init__(self, schema: Schema, filled: Sequence[str]) -> None:
        self.schema = schema
        self.filled = tuple(filled)
        self.shape: Shape = table_shape(schema.model_dump_json())
        self.key = [field.name for field in key_fields(schema)]
        self._judge = Judge(schema, filled)

    def read(self, texts: Sequence[bytes], rows_max: int, *, evolve: bool) -> Rows:
        """All rows of these texts, folded; `Invalid` if one of them does not fit."""
        text = b"\n".join(texts)
        judged = self._judge.read(text, rows_max, evolve=evolve)
        data: Any = parse_lines(text, rows_max) if evolve or self.filled else self._whole(judged.table)
        # By the keys as they were judged: rows that may widen a key's type have keys that its old one cannot hold.
        kept = last_of_each(judged.table.select(self.key), self.key) if self.key and judged.rows > 1 else None
        return Rows(taken(data, kept), judged.table, kept)

    def is_judged_by(self, judge: Judge) -> bool:
        """Whether `read` would return what this one judged. Defaults are filled row by row, from dicts."""
        return not self.filled and not judge.filled and judge.schema == self.schema

    def join(self, tables: Sequence[pa.Table]) -> Rows:
        """The same as `read`, for rows that were judged before."""
        with_changes = any(CHANGE_COLUMN in table.schema.names for table in tables)
        data = pa.concat_tables([self._whole(table, with_changes) for table in tables])
        kept = last_of_each(data.select(self.key), self.key) if self.key and data.num_rows > 1 else None
        return Rows(taken(data, kept), data, kept)

    def _whole(self, table: pa.Table, with_changes: bool = False) -> pa.Table:
        """With nulls for columns that no line brings."""
        arrays, fields = [], []
        for column in self.shape.columns:
            there = column.name in table.schema.names
            array = table.column(column.name) if there else pa.nulls(table.num_rows, column.field.type)
            arrays.append(array)
            fields.append(pa.field(column.name, array.type))
        if with_changes or CHANGE_COLUMN in table.schema.names:
            there = CHANGE_COLUMN in table.schema.names
            arrays.append(table.column(CHANGE_COLUMN) if there else pa.repeat(UPSERT, table.num_rows))
            fields.append(pa.field(CHANGE_COLUMN, pa.string()))
        return pa.table(arrays, schema=pa.schema(fields))

    # ── rows that do not fit ──

    def offending(self, rows: Rows, offences: Sequence[Offence]) -> dict[int, tuple[str, str]]:
        """Which rows other tables refuse, by their places before folding: the column and the value in it."""
        table, found = rows.judged, dict[int, tuple[str, str]]()
        kept = None if rows.kept is None else set(rows.kept)
        deleted = pa.array(np.zeros(table.num_rows, bool))
        if CHANGE_COLUMN in table.schema.names:
            deleted = pc.fill_null(pc.equal(table.column(CHANGE_COLUMN).combine_chunks(), DELETE), False)
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

    def sift(self, record: Record) -> tuple[list[tuple[int, str]], list[Bad]]:
        """The lines of a record that fit by themselves, with their numbers, and those that do not."""
        good: list[tuple[int, str]] = []
        bad: list[Bad] = []
        for number, line in lines_of(record.text):
            try:
                self.read([line.encode(errors="surrogateescape")], 1, evolve=record.evolve)
            except Invalid as error:
                bad.append(Bad(record.number, number, line, record.evolve, _at_line(error, number)))
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


def group_of(catalog: Catalog, head: Head, known: Group | None = None) -> Group:
    """The reader of this table's records; the known one if the table still has its shape."""

    def read(head: Head) -> Group:
        schema, filled = shape_at(catalog, head)
        if known is not None and (known.schema, known.filled) == (schema, filled):
            return known
        return Group(schema, filled)

    return catalog.at_head(head.table, read)


def _at_line(error: Invalid, number: int) -> dict[str, Any]:
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


def taken(data: Any, places: list[int] | None) -> Any:
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


@dataclass(frozen=True)
class Seen:
    """The rows of a record, and the judge that read them."""

    judge: Judge
    table: pa.Table


class Memory:
    """Judged rows of one table. The spool's id is part of the key: another spool counts from 0 again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], Seen] = OrderedDict()
        self._bytes = 0

    def put(self, spool: str, record: int, seen: Seen) -> None:
        with self._lock:
            if self._bytes + seen.table.nbytes <= MEMORY_BYTES_MAX and (spool, record) not in self._kept:
                self._kept[spool, record] = seen
                self._bytes += seen.table.nbytes

    def find(self, spool: str, records: Sequence[Record]) -> list[Seen] | None:
        """The rows of all these records, in their order; None if those of one are not kept."""
        with self._lock:
            found = [self._kept.get((spool, record.number)) for record in records]
        return [one for one in found if one is not None] if None not in found else None

    def forget(self, spool: str, position: int) -> None:
        """Drop rows that are in the table by now, or belong to a spool that is gone."""
        with self._lock:
            for key in [key for key in self._kept if key[0] != spool or key[1] < position]:
                self._bytes -= self._kept.pop(key).table.nbytes
