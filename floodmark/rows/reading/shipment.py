"""The rows of a unit in their one order, whole or in pieces at source files; as text in `rows/reading/texts.py`.

The order is: data files by path, rows by position; then deletions, as `rows/reading/changes.py` orders them. It depends
on the plan alone, not on the order of its files, on batches or on memory, so a row's number names the same row at every
try (I8). On a keyed table a row that does not pass the filter ships as a deletion of its key in its place; without a
key it is left out and has no number.

Memory is bounded by a batch, and by a chunk of keys where there are deletions (I14). A missing file, or one whose row
count differs from the table's state, is an error, never fewer rows: else the numbers would name other rows when the
file is skipped without being read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from floodmark.commit.live_files import LiveFile
from floodmark.errors import Corrupt, Invalid
from floodmark.model import SEQ_COLUMN, DeletionsFile
from floodmark.rows.reading.arrow_reader import arrow_read_schema, read_rows
from floodmark.rows.reading.changes import CHANGE_COLUMN, DELETE, UPSERT, ChangePlan, deletions_batches
from floodmark.rows.reading.texts import Body, Range, bodies
from floodmark.rows.schema import require_name, user_fields
from floodmark.rows.sql.where import Where
from floodmark.rows.tasks import is_little
from floodmark.storage import Storage

__all__ = ["Body", "Piece", "Shipment", "bodies", "plan_shipment"]


def plan_shipment(plan: ChangePlan, columns: tuple[str, ...] | None, where: str | None) -> Shipment:
    """What of these changes ships; Invalid for a column that does not exist and a condition that needs Spark."""
    known = [field.name for field in user_fields(plan.schema)]
    for name in columns or ():
        require_name(name, known, "sink")
    if where is not None and not Where.parse(where, plan.schema).plain:
        raise Invalid(
            "this condition cannot be the filter of a sink",
            where=where,
            advice="A sink's filter must be a plain comparison of columns with values, like: country = 'XX'.",
        )
    return Shipment(plan, columns, where)


@dataclass(frozen=True)
class ShippedFile:
    """One data file of a unit."""

    path: str
    sequence: int | None
    rows: int
    size_bytes: int
    # Every row of it is in the unit's range, so that it need not be read to count them.
    whole: bool
    # Its statistics prove that no row ships: without a key, rows that do not pass the filter have no number.
    is_left_out: bool = False


@dataclass(frozen=True)
class Reading:
    """How a data file becomes rows of a unit: plain values, so that it can be sent to executors."""

    schema_json: str
    columns: tuple[str, ...] | None
    where: str | None
    since: int
    until: int

    @cached_property
    def table(self) -> Schema:
        return Schema.model_validate_json(self.schema_json)

    @cached_property
    def key(self) -> tuple[str, ...]:
        ids = set(self.table.identifier_field_ids)
        return tuple(field.name for field in self.table.fields if field.field_id in ids)

    @cached_property
    def fields(self) -> list[NestedField]:
        """The columns that ship: the chosen ones and the key, in the table's order."""
        wanted = None if self.columns is None else {*self.columns, *self.key}
        return [field for field in user_fields(self.table) if wanted is None or field.name in wanted]

    @cached_property
    def shipped(self) -> Schema:
        """The table's schema with only the columns that ship."""
        return self._only({field.field_id for field in self.fields})

    @cached_property
    def schema(self) -> pa.Schema:
        columns = arrow_read_schema(self.shipped, with_seq=False)
        return columns.append(pa.field(CHANGE_COLUMN, pa.string())).append(pa.field(SEQ_COLUMN, pa.int64()))

    @cached_property
    def condition(self) -> Where | None:
        return None if self.where is None else Where(self.where, self.schema_json)

    def counts(self, source: ShippedFile) -> bool:
        """Whether a file ships all of its rows."""
        return source.whole and (self.where is None or bool(self.key))

    def rows(self, storage: Storage, source: ShippedFile) -> Iterator[pa.RecordBatch]:
        """The rows of one file that ship."""
        if source.is_left_out:
            return
        seen = 0
        between = self.since, self.until
        for batch in read_rows(storage, source.path, self._read, True, source.sequence, between):
            seen += len(batch)
            found = self._as_changes(batch)
            if len(found):
                yield found
        if source.whole and seen != source.rows:
            raise Corrupt(
                "a data file has a different number of rows than the table's state",
                file=source.path,
                rows=seen,
                rows_expected=source.rows,
                advice="Run `floodmark doctor`; restore the file.",
            )

    def count(self, storage: Storage, source: ShippedFile) -> int:
        """How many rows of the file ship, from the columns that decide it."""
        if self.counts(source):
            return source.rows
        return sum(len(batch) for batch in replace(self, columns=()).rows(storage, source))

    def _only(self, ids: set[int]) -> Schema:
        fields = [field for field in self.table.fields if field.field_id in ids or field.name == SEQ_COLUMN]
        return Schema(*fields, identifier_field_ids=self.table.identifier_field_ids)

    @cached_property
    def _read(self) -> Schema:
        """The columns that ship, and those that the filter reads."""
        asked = self.condition.fields if self.condition is not None else []
        return self._only({field.field_id for field in [*self.fields, *asked]})

    def _as_changes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        passes = self.condition.mask(batch) if self.condition is not None else None
        if passes is not None and not self.key:
            batch, passes = batch.filter(passes), None
        columns = [self._unless_gone(batch.column(field.name), field, passes) for field in self.fields]
        change = pa.repeat(pa.scalar(UPSERT), len(batch))
        if passes is not None:
            change = pc.if_else(passes, change, pa.scalar(DELETE))
        return pa.RecordBatch.from_arrays([*columns, change, batch.column(SEQ_COLUMN)], schema=self.schema)

    def _unless_gone(self, column: pa.Array, field: NestedField, passes: pa.Array | None) -> pa.Array:
        if passes is None or field.name in self.key:
            return column
        return pc.if_else(passes, column, pa.scalar(None, column.type))


@dataclass(frozen=True)
class Shipment:
    """The rows of a unit: what changed, without the columns and rows that its sink excludes."""

    plan: ChangePlan
    columns: tuple[str, ...] | None
    where: str | None

    @property
    def schema(self) -> pa.Schema:
        """The chosen columns, the key always among them, in the table's order; then `_change` and `_seq`."""
        return self.reading.schema

    @property
    def key(self) -> tuple[str, ...]:
        return self.plan.key

    @property
    def rows_max(self) -> int:
        """An upper bound of the rows to read, and so of those that ship."""
        return self.plan.rows_max

    @property
    def is_little(self) -> bool:
        """Whether the unit is processed in this process."""
        return is_little(self.rows_max, self.plan.size_bytes)

    @cached_property
    def reading(self) -> Reading:
        plan = self.plan
        return Reading(plan.schema.model_dump_json(), self.columns, self.where, plan.since, plan.until)

    @cached_property
    def sources(self) -> tuple[ShippedFile, ...]:
        # By the unit's own filter and the files' own statistics, so the same at every try. With a key every file is
        # read: rows that do not pass ship as deletions, as they may have passed before.
        test = None if self.key else self.reading.condition
        return tuple(_source(file, self.plan, test) for file in sorted(self.plan.files, key=lambda file: file.path))

    def batches(self, storage: Storage, first: int = 0) -> Iterator[pa.RecordBatch]:
        """The rows from number `first` on; files before it are not read, if the number of their rows is known."""
        for at, batch in self.numbered(storage, [(0, first)]):
            if at + len(batch) > first:
                yield batch.slice(max(0, first - at))

    def numbered(self, storage: Storage, passed: Sequence[Range] = ()) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches with the number of their first row, without files whose rows all lie in one range of `passed`."""
        at = 0
        for source in self.sources:
            if any(first <= at and at + source.rows <= last for first, last in passed):
                at += self.reading.count(storage, source)
                continue
            for batch in self.reading.rows(storage, source):
                yield at, batch
                at += len(batch)
        for batch in self.deletions(storage):
            yield at, batch
            at += len(batch)

    def pieces(self, piece_bytes: int) -> list[Piece]:
        """The same rows in groups of files of about so many bytes; the deletions are the last piece, alone."""
        groups: list[list[ShippedFile]] = []
        size_bytes = 0
        for source in self.sources:
            size_bytes += source.size_bytes
            if not groups or size_bytes > piece_bytes:
                groups.append([])
                size_bytes = source.size_bytes
            groups[-1].append(source)
        pieces = [Piece(number, self.reading, tuple(group)) for number, group in enumerate(groups)]
        return [*pieces, Piece(len(pieces), self.reading, (), self)] if self.plan.deletions else pieces

    def deletions(self, storage: Storage) -> Iterator[pa.RecordBatch]:
        """The end of the rows: deleted keys."""
        return deletions_batches(storage, replace(self.plan, schema=self.reading.shipped))


def _source(file: LiveFile, plan: ChangePlan, test: Where | None) -> ShippedFile:
    bounds = file.seq_bounds()
    whole = bounds is not None and plan.since < bounds[0] and bounds[1] <= plan.until
    is_left_out = test is not None and not test.may_match(file)
    return ShippedFile(file.path, file.sequence, file.rows, file.size_bytes, whole, is_left_out)


@dataclass(frozen=True)
class Piece:
    """Some rows of a unit that one task reads; a task gets it as JSON."""

    number: int
    reading: Reading
    sources: tuple[ShippedFile, ...]
    # Whose deletions these are: matching them needs the whole plan, so they stay in the process that has it.
    deletions_of: Shipment | None = None

    @property
    def has_deletions(self) -> bool:
        return self.deletions_of is not None

    @property
    def rows_max(self) -> int:
        return sum(part.rows for part in self._parts)

    @property
    def size_bytes(self) -> int:
        """Of its files, as they are stored."""
        return sum(part.size_bytes for part in self._parts)

    @property
    def _parts(self) -> Sequence[ShippedFile | DeletionsFile]:
        return self.sources if self.deletions_of is None else self.deletions_of.plan.deletions

    def batches(self, storage: Storage) -> Iterator[pa.RecordBatch]:
        for source in self.sources:
            yield from self.reading.rows(storage, source)
        if self.deletions_of is not None:
            yield from self.deletions_of.deletions(storage)

    def to_json(self) -> str:
        if self.deletions_of is not None:
            raise ValueError("a piece of deletions is read where the plan is")
        return json.dumps(
            {
                "number": self.number,
                "reading": asdict(self.reading),
                "sources": [asdict(source) for source in self.sources],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Piece:
        values = json.loads(text)
        reading = values["reading"]
        columns = None if reading["columns"] is None else tuple(reading["columns"])
        sources = tuple(ShippedFile(**source) for source in values["sources"])
        return cls(values["number"], Reading(**{**reading, "columns": columns}), sources)
