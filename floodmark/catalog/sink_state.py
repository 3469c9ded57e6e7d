"""A sink as the catalog has it: its definition, the tables that it follows, their marks, and its notes, in one query.

One row per table, one view, no write: a question whether anything is new takes about as long as this query. Notes are
numbers beside the row: how long its destination must not be called, how large a body it accepts, how many rows may have
arrived twice, how many retention removed before they were sent. A number is written in the transaction of the event
that it counts, so a crash cannot separate the two (I15).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    ScalarSelect,
    Select,
    String,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    select,
    update,
)

from floodmark.catalog import tables
from floodmark.catalog.database import SqlRow
from floodmark.catalog.unit import RETRY, ROWS
from floodmark.errors import Corrupt, NotFound
from floodmark.model import MAIN, Scalar

# Of the whole sink.
NOT_BEFORE_MS, BODY_BYTES_MAX = "not_before_ms", "body_bytes_max"
# Of one table.
ROWS_DOUBTFUL, ROWS_LOST, ROWS_LOST_SAID = "rows_doubtful", "rows_lost", "rows_lost_said"


def read_notes(tx: Connection, sink: str) -> dict[tuple[str, str], int]:
    row = tables.sink_notes
    return {(one.table_id, one.note): int(one.value) for one in tx.execute(select(row).where(row.c.sink == sink))}


def put_note(tx: Connection, sink: str, table_id: str, note: str, value: int, now_ms: int) -> None:
    row = tables.sink_notes
    mine = and_(row.c.sink == sink, row.c.table_id == table_id, row.c.note == note)
    if not tx.execute(update(row).where(mine).values(value=value, updated_ms=now_ms)).rowcount:
        tx.execute(insert(row).values(sink=sink, table_id=table_id, note=note, value=value, updated_ms=now_ms))


def add_to_note(tx: Connection, sink: str, table_id: str, note: str, more: int, now_ms: int) -> None:
    """Raise a count; the caller holds a lock of the sink or of the lake."""
    if more:
        known = read_notes(tx, sink).get((table_id, note), 0)
        put_note(tx, sink, table_id, note, known + more, now_ms)


def forget_notes(tx: Connection, sink: str, *notes: str) -> None:
    row = tables.sink_notes
    tx.execute(delete(row).where(row.c.sink == sink, row.c.note.in_(notes)))


ACTIVE, PAUSED = "active", "paused"
OPEN, SETTLED, GIVEN_UP = "open", "settled", "given_up"
CONSUMER = "sink:"


@dataclass(frozen=True)
class Followed:
    """A table of a sink: where the sink is, and where the table is. None: that row does not exist.

    `table` is its name now; `shipped_as` the one that it had when the sink was added, which its destination knows.
    """

    table: str
    table_id: str
    incarnation: str
    destination: str | None
    mark: int | None
    epoch: int | None
    head_id: str | None
    head_sequence: int | None
    open_unit: str | None
    retry_unit: str | None
    units: int
    rows: int
    deletions: int
    size_bytes: int
    replays: int
    last_unit: str | None
    # Another writer moved the table: a reader of its changes gets an error that describes the drift.
    drifted: bool
    shipped_as: str

    def is_called(self, name: str) -> bool:
        return name in (self.table, self.shipped_as)

    @property
    def current(self) -> bool:
        """Nothing can be new, and nothing is open."""
        if self.drifted:
            return False
        done = self.head_id == self.table_id and self.mark is not None and self.head_sequence == self.mark
        return done and self.open_unit is None and self.retry_unit is None


@dataclass(frozen=True)
class Sink:
    name: str
    id: str
    kind: str
    settings: str
    state: str
    runner: str | None
    error: str | None
    error_ms: int | None
    created_ms: int
    # The lake's incarnation now, not that of any mark.
    lake: str
    tables: tuple[Followed, ...]
    table_names: str
    # The branch that it follows; None if that was deleted.
    branch: str | None = MAIN

    @property
    def lost(self) -> list[str]:
        """Tables that the sink is set to follow, and of which no state exists.

        None if its branch was deleted: what its tables were called there last is not known any more.
        """
        if self.branch is None:
            return []
        try:
            named = [str(name) for name in json.loads(self.table_names)]
        except (ValueError, TypeError) as error:
            raise Corrupt("the tables of a sink cannot be understood", sink=self.name, cause=error) from error
        return sorted(set(named) - {one.table for one in self.tables})

    @property
    def consumer(self) -> str:
        return CONSUMER + self.name

    def table(self, name: str) -> Followed:
        """The table that is called so, or that is shipped under this name since it was renamed."""
        for one in sorted(self.tables, key=lambda one: one.table != name):
            if one.is_called(name):
                return one
        known = ",".join(one.table for one in self.tables)
        raise NotFound("the sink does not follow this table", sink=self.name, table=name, tables=known)

    def of(self, table_id: str) -> Followed:
        for one in self.tables:
            if one.table_id == table_id:
                return one
        raise NotFound("the sink does not follow this table any more", sink=self.name, table_id=table_id)


def _pointer_known() -> ScalarSelect[str]:
    """Where the last publish left a table's pointer, by the newest commit of the table on any branch."""
    commit = tables.commit_tables
    return (
        select(commit.c.metadata_location)
        .where(commit.c.table_id == tables.heads.c.table_id)
        .order_by(commit.c.version.desc())
        .limit(literal_column("1"))
        .scalar_subquery()
    )


def _looking() -> Select[*tuple[Scalar, ...]]:
    """Everything about sinks and their tables in one query, a row per table."""
    sink, lake = tables.sinks, tables.lake
    followed, head, consumer = tables.sink_tables, tables.heads, tables.consumers
    # Of a table that is gone: the one that has its name now.
    namesake = tables.heads.alias("namesake")
    pointer = tables.iceberg_tables
    rows, retry = tables.units.alias("rows_unit"), tables.units.alias("retry_unit")

    def is_open(unit: FromClause, lane: str) -> ColumnElement[bool]:
        same = (unit.c.sink == followed.c.sink) & (unit.c.table_id == followed.c.table_id)
        return same & (unit.c.lane == literal_column(f"'{lane}'")) & (unit.c.state == literal_column(f"'{OPEN}'"))

    follower = and_(
        consumer.c.name == literal_column(f"'{CONSUMER}'").op("||")(sink.c.name),
        consumer.c.table_id == followed.c.table_id,
    )
    named = and_(
        pointer.c.catalog_name == literal_column(f"'{tables.CATALOG_NAME}'"),
        pointer.c.table_namespace == literal_column(f"'{tables.NAMESPACE}'"),
        pointer.c.table_name == head.c.table_name,
    )
    main: ColumnElement[str] = literal_column(f"'{MAIN}'", String)
    line, follows = tables.lines, tables.sink_lines
    # Another branch may have the name of an ended one by now.
    other = case((line.c.ended_version.is_(None), line.c.name))
    branch = case((follows.c.line.is_(None), main), else_=other)
    return (
        select(
            sink,
            branch.label("branch"),
            lake.c.incarnation.label("lake"),
            *(column for column in followed.c if column.name != "sink"),
            consumer.c.mark,
            consumer.c.epoch,
            func.coalesce(head.c.table_name, followed.c.table_name).label("name_now"),
            func.coalesce(head.c.table_id, namesake.c.table_id).label("head_id"),
            func.coalesce(head.c.sequence, namesake.c.sequence).label("head_sequence"),
            pointer.c.metadata_location.label("pointer"),
            _pointer_known().label("pointer_known"),
            rows.c.id.label("open_unit"),
            retry.c.id.label("retry_unit"),
        )
        .select_from(sink.join(lake, lake.c.id == 1))
        .join(follows, follows.c.sink == sink.c.id, isouter=True)
        .join(line, line.c.id == follows.c.line, isouter=True)
        .join(followed, followed.c.sink == sink.c.id, isouter=True)
        .join(head, and_(head.c.branch == branch, head.c.table_id == followed.c.table_id), isouter=True)
        .join(namesake, and_(namesake.c.branch == branch, namesake.c.table_name == followed.c.table_name), isouter=True)
        .join(pointer, named, isouter=True)
        .join(consumer, follower, isouter=True)
        .join(rows, is_open(rows, ROWS), isouter=True)
        .join(retry, is_open(retry, RETRY), isouter=True)
        .order_by(sink.c.name, followed.c.table_name)
    )


# Built once: making the statement takes longer than running it.
LOOKING = _looking()
LOOKING_FOR_ONE = LOOKING.where(tables.sinks.c.name == bindparam("name"))


def to_sink(rows: Sequence[SqlRow]) -> Sink:
    row = rows[0]
    return Sink(
        row.name,
        row.id,
        row.kind,
        row.settings,
        row.state,
        row.runner_run,
        row.error,
        row.error_ms,
        row.created_ms,
        row.lake,
        tuple(
            Followed(
                one.name_now,
                one.table_id,
                one.incarnation,
                one.destination,
                one.mark,
                one.epoch,
                one.head_id,
                one.head_sequence,
                one.open_unit,
                one.retry_unit,
                one.units,
                one.rows_sent,
                one.deletions_sent,
                one.bytes_sent,
                one.replays,
                one.last_unit,
                one.head_id is not None and one.pointer != one.pointer_known,
                one.table_name,
            )
            for one in rows
            if one.table_name is not None
        ),
        row.table_names,
        row.branch,
    )
