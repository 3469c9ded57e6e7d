"""The judge of one table's rows: JSON lines in, an Arrow table of its columns out, or every wrong line by its number.

A write accepts what the judge accepts: it checks names, types, exactness, nulls in required columns, changes and keys,
so that a sender gets the error while it can still act. Errors that depend on other rows and tables (references, a
changed table) are found when the rows are written. All rows of a text are taken or none. Two passes: all rows column by
column, which is quick; and only if the rows have an error, value by value, to find where. Pure but for its cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cachetools import LRUCache
from pyiceberg.schema import Schema

from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import fills_of
from floodmark.commit.metadata import schema_of
from floodmark.errors import Invalid
from floodmark.model import SEQ_COLUMN, Head, Row, Value
from floodmark.rows.convert import NULL_IN_REQUIRED, Column, Conformer, Shape, table_shape
from floodmark.rows.evolve import evolve_schema
from floodmark.rows.json.json_lines import PROBLEMS_MAX, LineProblem, NumberedRows, WrongRows, python_values, read_lines
from floodmark.rows.misfits import Misfits
from floodmark.rows.reading.changes import CHANGE_COLUMN, DELETE, UPSERT
from floodmark.rows.schema import nearest
from floodmark.rows.staging.dicts import rows_schema, rows_to_table
from floodmark.write.prune import key_fields

JUDGES_MAX = 256
_PREFIX = "the rows do not fit the table: "
NO_SUCH_COLUMN = "the table has no such column"
# The columns that a row may have besides the table's. The sequence is the sender's own, and is ignored here.
NOT_COLUMNS = frozenset({CHANGE_COLUMN, SEQ_COLUMN})


@dataclass(frozen=True)
class JudgedRows:
    """Rows that fit: the columns that some line brings, in the table's types, all nullable, in the order of lines.

    If any line has a change, the column `_change` is upsert or delete in every row; a deletion has its key, all else of
    it is null. `judge` is the one that read them: of the table, or of the table as these rows would evolve it.
    """

    rows: int
    table: pa.Table
    judge: Judge


# ── changes that rows carry ──


def change_of(row: Row) -> str | None:
    """What a row does, by its `_change`: upsert or delete; None if it is neither."""
    change = row.get(CHANGE_COLUMN)
    if change is None or change == UPSERT:
        return UPSERT
    return DELETE if change == DELETE else None


def columns_of(row: Row) -> dict[str, Value]:
    """The values of a row that are for columns of the table."""
    return {name: value for name, value in row.items() if name not in NOT_COLUMNS}


def deletions_of(table: pa.Table) -> pa.Array:
    """Which rows of an Arrow table are deletions."""
    if CHANGE_COLUMN not in table.column_names:
        return pa.array(np.zeros(table.num_rows, bool))
    changes = table.column(CHANGE_COLUMN).cast(pa.string()).combine_chunks()
    return pc.fill_null(pc.equal(changes, DELETE), False)


def with_all_columns(table: pa.Table, columns: Iterable[Column], *, changes: bool = False) -> pa.Table:
    """These columns in their order, null where no row brings one. `_change` is last, if the table has it; with
    `changes` always."""
    arrays, fields = [], []
    for column in columns:
        there = column.name in table.column_names
        array = table.column(column.name) if there else pa.nulls(table.num_rows, column.field.type)
        arrays.append(array)
        fields.append(pa.field(column.name, array.type))
    there = CHANGE_COLUMN in table.column_names
    if there or changes:
        arrays.append(table.column(CHANGE_COLUMN) if there else pa.repeat(UPSERT, table.num_rows))
        fields.append(pa.field(CHANGE_COLUMN, pa.string()))
    return pa.table(arrays, schema=pa.schema(fields))


def leave_out_advice(name: str, known: Iterable[str]) -> str:
    """What to do about a column that the table does not have."""
    return nearest(name, sorted(known)) + " Leave it out, or add the column to the table first."


# ── the judge ──


@dataclass(frozen=True)
class _Row:
    """A line: its values, those of them that count as columns, and its change; None if that is no valid change."""

    line: int
    given: dict[str, Value]
    columns: dict[str, Value]
    change: str | None


# With `evolve`: columns that one request may add, fields that the rows may have in all, and the length of a name.
NEW_MAX, FIELDS_MAX, NAME_CHARACTERS_MAX = 200, 2_000, 255


class Judge:
    """One table's reader of JSON lines. `filled`: columns that rows need not bring, since the table fills them.

    `whole`: every row must bring every other column, since it replaces a row as a whole.
    """

    def __init__(self, schema: Schema, filled: Sequence[str] = (), *, whole: bool = False) -> None:
        self.schema = schema
        self.filled = frozenset(filled)
        self.key = tuple(one.name for one in key_fields(schema))
        self.shape = table_shape(schema.model_dump_json())
        self._names = frozenset(column.name for column in self.shape.columns)
        self._needed = self._names - self.filled if whole else frozenset()
        self._alone = {column.name: _alone(self.shape, column) for column in self.shape.columns}
        self._deep = [column for column in self.shape.columns if column.required_inside]

    def read(self, text: bytes, rows_max: int, *, evolve: bool = False) -> JudgedRows:
        """The rows of a text. `NotJson`, `TooManyRows`, or `Invalid` with the first of the wrong lines."""
        try:
            lines = read_lines(text, rows_max)
            judge = self._evolved(lines) if evolve else self
            judged = judge._judged(lines, evolve)
            if judged is None:
                # Read again: values were put in the place of JSON's forms of them.
                raise judge._wrong(read_lines(text, rows_max), evolve)
        except RecursionError as error:
            raise Invalid("a value is nested too deeply", advice="Send it as text.") from error
        return judged

    def _evolved(self, lines: NumberedRows) -> Judge:
        """The judge of the table as these rows would evolve it."""
        rows = [row.columns for row in self._changes(lines) if row.change == UPSERT]
        _check_new(set().union(*rows) - self._names)
        try:
            found = rows_schema(rows, self.shape)
            if (count := sum(map(_fields_of, found.types))) > FIELDS_MAX:
                raise Invalid("these rows would add too many columns to the table", columns=count, most=FIELDS_MAX)
            evolved = evolve_schema(self.schema, found, self.schema.highest_field_id, 0)
            return self if evolved is None else Judge(evolved, tuple(self.filled))
        except (ValueError, pa.ArrowException) as error:
            # A name that is no text, or a nesting that no schema can have.
            advice = "Use names that are text, and nest values less deeply."
            raise Invalid("these rows cannot add columns", cause=error, advice=advice) from error

    def _judged(self, lines: NumberedRows, evolve: bool) -> JudgedRows | None:
        """None if something is wrong with some row."""
        carries_changes = any(not NOT_COLUMNS.isdisjoint(row) for row in lines.rows)
        changes = self._changes(lines) if carries_changes else None
        columns = lines.rows if changes is None else [row.columns for row in changes]
        if self._needed and not all(self._needed <= row.keys() for row in columns):
            return None
        table = self._table(columns)
        if table is None or not self._is_whole(table, columns, changes, evolve):
            return None
        return self._shown(table, columns, changes)

    def _changes(self, lines: NumberedRows) -> list[_Row]:
        return [self._row(line, row) for line, row in zip(lines.numbers, lines.rows, strict=True)]

    def _row(self, line: int, given: dict[str, Value]) -> _Row:
        change = change_of(given)
        if change == UPSERT:
            return _Row(line, given, given if NOT_COLUMNS.isdisjoint(given) else columns_of(given), UPSERT)
        # Only the key of a deletion counts.
        key = {name: given[name] for name in self.key if name in given} if change == DELETE else {}
        return _Row(line, given, key, change)

    # ── all rows at once ──

    def _table(self, rows: list[dict[str, Value]]) -> pa.Table | None:
        """None if a name or a value does not fit."""
        try:
            python_values(rows, self.shape.columns)
            return rows_to_table(rows, self.shape)
        except Invalid:
            return None

    def _is_whole(
        self, table: pa.Table, columns: list[dict[str, Value]], changes: list[_Row] | None, evolve: bool
    ) -> bool:
        """Whether nothing is missing: changes that are known, keys, and what is required of rows."""
        if changes is not None and not all(self._is_change(row, evolve) for row in changes):
            return False
        upserts = table
        if changes is not None and any(row.change == DELETE for row in changes):
            if any(table.column(name).null_count for name in self.key):
                return False
            upserts = table.filter(pa.array([row.change == UPSERT for row in changes], pa.bool_()))
            columns = [row.columns for row in changes if row.change == UPSERT]
        for column in self.shape.columns:
            nulls = upserts.column(column.name).null_count if column.required else 0
            if nulls and (column.name not in self.filled or nulls != sum(column.name not in row for row in columns)):
                return False
        return all(self._problem_inside(upserts, column) is None for column in self._deep)

    def _is_change(self, row: _Row, evolve: bool) -> bool:
        if row.change == DELETE:
            return bool(self.key) and (evolve or row.given.keys() - NOT_COLUMNS <= self._names)
        return row.change is not None

    def _problem_inside(self, table: pa.Table, column: Column) -> LineProblem | None:
        """A null in a required field inside a column, in some row; the line is not known here."""
        given = table.select([column.name]).combine_chunks()
        nullable = replace(column, field=column.field.with_nullable(True))
        shape = replace(self._alone[column.name], columns=(nullable,), file_schema=pa.schema([nullable.field]))
        problems = Misfits()
        for batch in given.to_batches():
            Conformer(shape, given.schema).conform(batch, problems)
        found = problems.all()
        return LineProblem(0, found[0].column, None, found[0].problem, found[0].advice) if found else None

    def _shown(self, table: pa.Table, columns: list[dict[str, Value]], changes: list[_Row] | None) -> JudgedRows:
        names = set().union(*columns)
        shown = table.select([name for name in table.column_names if name in names])
        if changes is not None and any(CHANGE_COLUMN in row.given for row in changes):
            shown = shown.append_column(CHANGE_COLUMN, pa.array([row.change for row in changes], pa.string()))
        return JudgedRows(len(columns), shown, self)

    # ── value by value ──

    def _wrong(self, lines: NumberedRows, evolve: bool) -> Invalid:
        found = self._problems(self._changes(lines), evolve)
        first = list(islice(found, PROBLEMS_MAX))
        if not first:  # not known to happen; refused all the same
            return Invalid("the rows do not fit the table", rows=len(lines.rows))
        return WrongRows(first, len(first) + sum(1 for _ in found))

    def _problems(self, rows: list[_Row], evolve: bool) -> Iterator[LineProblem]:
        """All that is wrong, line by line. Only columns with something wrong are looked at value by value."""
        suspects = [column for column in self.shape.columns if not self._all_fit(rows, column)]
        for row in rows:
            if row.change is None or (row.change == DELETE and not self.key):
                yield _wrong_change(row)
            if not (evolve and row.change == DELETE):
                for name in row.given.keys() - self._names - NOT_COLUMNS:
                    yield LineProblem(row.line, name, None, NO_SUCH_COLUMN, leave_out_advice(name, self._names))
            for name in sorted(self._needed - row.columns.keys()) if row.change == UPSERT else ():
                yield LineProblem(row.line, name, None, "a column is missing", "Send it in every row; null is allowed.")
            if row.change is not None:
                for column in suspects:
                    yield from self._problems_in(row, column)

    def _all_fit(self, rows: list[_Row], column: Column) -> bool:
        values = [row.columns.get(column.name) for row in rows if row.change is not None]
        needed = column.required or column.name in self.key
        return not (needed and None in values) and not self._value_problems(values, column)

    def _problems_in(self, row: _Row, column: Column) -> Iterator[LineProblem]:
        name, value = column.name, row.columns.get(column.name)
        if value is not None:
            yield from (replace(problem, line=row.line) for problem in self._value_problems([value], column))
        elif name in self.key or (column.required and row.change == UPSERT):
            if name in row.columns:
                yield LineProblem(row.line, name, None, NULL_IN_REQUIRED, "Fill it, or make it optional.")
            elif name not in self.filled:
                yield LineProblem(row.line, name, None, "a required column is missing", "Send it in every row.")

    def _value_problems(self, values: Sequence[Value], column: Column) -> list[LineProblem]:
        """What is wrong with values of one column; the lines are not known here."""
        rows = [{column.name: value} for value in values]
        try:
            python_values(rows, [column])
            table = rows_to_table(rows, self._alone[column.name])
        except Invalid as error:
            path = str(error.facts.get("column", column.name))
            return [LineProblem(0, path, None, error.message.removeprefix(_PREFIX), error.advice)]
        inside = self._problem_inside(table, column) if column.required_inside else None
        return [] if inside is None else [inside]


def _alone(shape: Shape, column: Column) -> Shape:
    return Shape(shape.schema, (), (column,), pa.schema([column.field]))


def _wrong_change(row: _Row) -> LineProblem:
    if row.change == DELETE:
        problem, advice = "rows cannot be deleted from a table without a key", "Send only rows to be added."
    else:
        given = repr(row.given[CHANGE_COLUMN])[:40]
        problem, advice = f"a change is not {UPSERT} or {DELETE}: {given}", f"Leave it out for {UPSERT}."
    return LineProblem(row.line, CHANGE_COLUMN, None, problem, advice)


def _check_new(names: set[str]) -> None:
    """Bound the columns that rows may add to a table by themselves."""
    if len(names) > NEW_MAX:
        raise Invalid("too many new columns at once", columns=len(names), most=NEW_MAX)
    if long := next((name for name in names if len(name) > NAME_CHARACTERS_MAX), None):
        raise Invalid("a new column's name is too long", column=f"{long[:40]}…", characters_most=NAME_CHARACTERS_MAX)


def _fields_of(kind: pa.DataType) -> int:
    """A column, and all fields inside it."""
    return 1 + sum(_fields_of(kind.field(place).type) for place in range(kind.num_fields))


def shape_at(catalog: Catalog, head: Head) -> tuple[Schema, tuple[str, ...]]:
    """A table's columns, and the names of those that it fills by itself."""
    metadata = catalog.files.metadata(head.metadata_location)
    schema = schema_of(metadata, head)
    return schema, tuple(fill.column for fill in fills_of(metadata.properties, schema))


class Judges:
    """The judges of a lake's tables, as they are now; kept as long as their schemas are. For any thread."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._judges: LRUCache[tuple[str, int, tuple[str, ...]], Judge] = LRUCache(JUDGES_MAX)
        # Which columns are filled is in a table's metadata, which is another file after every commit.
        self._filled: LRUCache[str, tuple[str, ...]] = LRUCache(JUDGES_MAX)

    def of(self, table: str) -> tuple[Head, Judge]:
        """The table's head, and the judge of rows for it."""
        return self._catalog.at_head(table, lambda head: (head, self.at(head)))

    def at(self, head: Head) -> Judge:
        with self._lock:
            filled = self._filled.get(head.metadata_location)
            found = None if filled is None else self._judges.get((head.table_id, head.schema_id, filled))
        if found is not None:
            return found
        schema, filled = shape_at(self._catalog, head)
        made = Judge(schema, filled)
        with self._lock:
            self._filled[head.metadata_location] = filled
            return self._judges.setdefault((head.table_id, head.schema_id, filled), made)
