"""Rows that another system sends: received once, with the changes that they carry, in one publish.

A row may have its change in `_change` (upsert, or delete with its key); `_seq` is the sender's own and is ignored. The
sender's identity is committed with the rows (I9): for another lake's sink its marks (catalog/senders.py), for any other
system a key. So the same rows again are a no-op, whatever crashed between the two, and recovery finishes rows that it
finds sealed. An error means that none of the rows is in the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema

from floodmark.catalog.riders import Rider
from floodmark.catalog.senders import SenderRider, is_skipped
from floodmark.commit.catalog import Catalog
from floodmark.commit.intent import Intent, batch_rider
from floodmark.commit.metadata import schema_of
from floodmark.commit.publication import publish, rehearse
from floodmark.engine import Engine
from floodmark.errors import Conflict, Invalid
from floodmark.ingest.judge import NO_SUCH_COLUMN, NOT_COLUMNS, change_of, columns_of, deletions_of, leave_out_advice
from floodmark.model import MAIN, Commit, Head, Row, Value
from floodmark.rows.convert import Shape, table_shape
from floodmark.rows.json.json_lines import python_values
from floodmark.rows.keys import render_keys
from floodmark.rows.misfits import Misfits, Problem
from floodmark.rows.reading.changes import CHANGE_COLUMN, DELETE, UPSERT
from floodmark.rows.staging.dicts import rows_to_table
from floodmark.rows.staging.stage import in_memory_batches
from floodmark.storage import join
from floodmark.write.change import Change
from floodmark.write.options import WriteOptions
from floodmark.write.prune import key_fields
from floodmark.write.step import APPEND, DELETE_KEYS, MERGE

SENDER_CHARACTERS_MAX = 200
NUMBER_MAX = 2**63 - 1
EXAMPLES_MAX = 3
SKIPPED = "skipped"
# Rows as dicts, or as Arrow data in memory.
ReceivedRows: TypeAlias = Sequence[Row] | pa.Table


@dataclass(frozen=True)
class Sender:
    """The sender, and its part: the rows [first, last) of the unit (since, until] of an epoch."""

    name: str
    epoch: int
    since: int
    until: int
    first: int
    last: int
    # The unit's identity, and that of the one before it that brought rows.
    unit: str | None = None
    after: str | None = None
    # The sender gives these rows up; none of them comes.
    skip: bool = False

    def __post_init__(self) -> None:
        plain = self.name.isascii() and self.name.isprintable() and self.name == self.name.strip()
        numbers = (self.epoch, self.since, self.until, self.first, self.last)
        if not (plain and 0 < len(self.name) <= SENDER_CHARACTERS_MAX):
            raise Invalid("invalid name of a sender", sender=repr(self.name)[:80])
        if not (self.since < self.until and 0 <= self.first < self.last) or any(abs(n) > NUMBER_MAX for n in numbers):
            raise Invalid(
                "a unit is a range (since, until], and a part a range [first, last) of its rows",
                unit=f"{self.since}..{self.until}",
                part=f"{self.first}-{self.last}",
            )

    def rider(self, table_id: str) -> SenderRider:
        bounds = (self.since, self.until, self.first, self.last)
        return SenderRider(self.name, table_id, self.epoch, *bounds, unit=self.unit, after=self.after, skip=self.skip)


@dataclass(frozen=True)
class _Received:
    """The received rows, split: rows to put in, and keys to delete."""

    upserts: list[dict[str, Value]] | pa.Table
    deletes: list[dict[str, Value]] | pa.Table | None
    rows: int
    deletions: int


def receive(
    engine: Engine,
    actor: str,
    table: str,
    rows: ReceivedRows,
    *,
    sender: Sender | None = None,
    key: str | None = None,
    rider: Rider | None = None,
    table_id: str | None = None,
    evolve: bool = False,
    from_json: bool = False,
    message: str = "",
    if_version: int | None = None,
) -> Commit:
    """Receive rows (dicts, or Arrow) into a table: appended, or by the table's key merged and deleted.

    `sender`, `rider` or else `key` is their identity; `table_id` identifies the table that has this name. `from_json`:
    the dicts hold JSON's forms of values. `evolve` adds columns that the table does not have; without it they are
    Invalid. `if_version`: only if the table is as it was then; rows that are there already are still answered so.
    """
    engine.get_ready()
    catalog = engine.catalog
    head, kind, part = _prepared(catalog, table, rows, sender, evolve=evolve, from_json=from_json)
    if sender is not None:
        rider = sender.rider(head.table_id)
    elif rider is None:
        rider = batch_rider(table, key)
    note = message or ("received" if sender is None else f"received from {sender.name}")
    intent = Intent(kind, MAIN, actor, note, rider, if_version)

    def fill(change: Change) -> None:
        if sender is not None and sender.skip:
            _check_writable(catalog, change)
        _write(change, table, table_id or head.table_id, kind, part, evolve=evolve)

    commit = publish(catalog, intent, Change(engine, intent, fill, [table]))
    return _as_skipped(catalog, rider, commit)


def _check_writable(catalog: Catalog, change: Change) -> None:
    """Rows are skipped only where rows could be received: none may be given up while storage is unreachable."""
    operation = change.operation
    data = next(folder for folder in operation.folders if folder.endswith(f"/data/{operation.id}"))
    location = join(data, "skip")
    catalog.storage.put(location, b"")
    # Crash here: a file in the operation's own folder, which recovery deletes (I10).
    catalog.storage.delete(location)


def _as_skipped(catalog: Catalog, rider: Rider | None, commit: Commit) -> Commit:
    """The rows that a sender gives up are skipped, now or by an earlier request, or they were received before."""
    if not isinstance(rider, SenderRider) or not rider.skip:
        return commit
    with catalog.database.read() as tx:
        return replace(commit, outcome=SKIPPED) if is_skipped(tx, rider) else commit


def try_receive(
    engine: Engine,
    actor: str,
    table: str,
    rows: ReceivedRows,
    *,
    table_id: str | None = None,
    evolve: bool = False,
    from_json: bool = False,
) -> None:
    """Raise the error with which `receive` would refuse these rows. They are staged and undone, not published."""
    catalog = engine.catalog
    head, kind, part = _prepared(catalog, table, rows, None, evolve=evolve, from_json=from_json)
    intent = Intent(kind, MAIN, actor, "tried")

    def fill(change: Change) -> None:
        _write(change, table, table_id or head.table_id, kind, part, evolve=evolve)

    rehearse(catalog, intent, Change(engine, intent, fill, [table]))


def _prepared(
    catalog: Catalog, table: str, rows: ReceivedRows, sender: Sender | None, *, evolve: bool, from_json: bool
) -> tuple[Head, str, _Received]:
    """The table's head, the kind of the write, and the rows, checked and split."""
    head, schema = catalog.at_head(table, lambda head: (head, _schema(catalog, head)))
    part = _taken_apart(rows, schema, evolve=evolve, from_json=from_json)
    _check_part(part, schema, table, sender)
    return head, MERGE if schema.identifier_field_ids else APPEND, part


def _write(change: Change, table: str, table_id: str, kind: str, part: _Received, *, evolve: bool) -> None:
    # Marks belong to one table: they must not be recorded for another one that took its name.
    if change.table_id(table) != table_id:
        raise Conflict("the table was created again meanwhile", table=table)
    if part.rows or not part.deletions:
        # A sender's rows are whole by contract: a column that it leaves out is null (docs/http.md).
        change.write(kind, table, part.upserts, WriteOptions(evolve=evolve, whole_rows=False))
    if part.deletions:
        change.write(DELETE_KEYS, table, part.deletes)


def _schema(catalog: Catalog, head: Head) -> Schema:
    return schema_of(catalog.files.metadata(head.metadata_location), head)


def _check_part(part: _Received, schema: Schema, table: str, sender: Sender | None) -> None:
    rows_said = 0 if sender is None or sender.skip else sender.last - sender.first
    if sender is not None and rows_said != part.rows + part.deletions:
        raise Invalid(
            "the part has another number of rows than its header says",
            part=f"{sender.first}-{sender.last}",
            rows=part.rows + part.deletions,
        )
    if part.deletions and not schema.identifier_field_ids:
        raise Invalid(
            "rows cannot be deleted from a table without a key",
            table=table,
            deletions=part.deletions,
            advice="Send only rows to be added, or create a table with a key.",
        )
    if part.rows and part.deletions:
        _check_apart(part, schema, table)


def _check_apart(part: _Received, schema: Schema, table: str) -> None:
    """No key is both put in and deleted: their order is unknown."""
    names = [field.name for field in key_fields(schema)]
    upserts, deletes = (_keys(rows, schema) for rows in (part.upserts, part.deletes))
    both = upserts.join(deletes, keys=names, join_type="inner", use_threads=False)
    if both.num_rows:
        raise Invalid(
            "a key is both in a row and in a deletion",
            table=table,
            rows=both.num_rows,
            examples="; ".join(render_keys(both.select(names).slice(0, EXAMPLES_MAX))),
            advice="Send only the last change of each key.",
        )


def _key_shape(schema: Schema) -> Shape:
    return table_shape(Schema(*key_fields(schema)).model_dump_json())


def _keys(rows: list[dict[str, Value]] | pa.Table, schema: Schema) -> pa.Table:
    """The key columns of rows, in the types of the table."""
    names = [field.name for field in key_fields(schema)]
    if isinstance(rows, pa.Table):
        return rows.select(names)
    return rows_to_table([{name: row.get(name) for name in names} for row in rows], _key_shape(schema))


# ── rows and deletions apart ──


def _taken_apart(rows: ReceivedRows, schema: Schema, *, evolve: bool, from_json: bool) -> _Received:
    shape = table_shape(schema.model_dump_json())
    if not isinstance(rows, list | tuple):
        return _tables_apart(rows, shape)
    upserts, deletes = _dicts_apart(rows)
    _check_names(deletes, shape, evolve=evolve)
    names = [field.name for field in key_fields(schema)]
    keys = [{name: row.get(name) for name in names} for row in deletes]
    if from_json:
        python_values(upserts, shape.columns)
        python_values(keys, [column for column in shape.columns if column.name in names])
    return _Received(upserts, keys, len(upserts), len(keys))


def _dicts_apart(rows: Sequence[Row]) -> tuple[list[dict[str, Value]], list[dict[str, Value]]]:
    """The rows and the deletions, as dicts of their own, with only their columns."""
    apart: dict[str, list[dict[str, Value]]] = {UPSERT: [], DELETE: []}
    for row in rows:
        if not isinstance(row, dict):
            raise Invalid("a row is not a dict", given=type(row).__name__, advice="Send a list of dicts.")
        change = change_of(row)
        if change is None:
            raise _unknown_change([row[CHANGE_COLUMN]])
        apart[change].append(columns_of(row))
    return apart[UPSERT], apart[DELETE]


def _tables_apart(rows: pa.Table, shape: Shape) -> _Received:
    schema, batches = in_memory_batches(rows, shape)
    table = pa.Table.from_batches(batches, schema)
    columns = table.drop_columns([name for name in schema.names if name in NOT_COLUMNS])
    if CHANGE_COLUMN not in schema.names:
        return _Received(columns, None, columns.num_rows, 0)
    wrong = set(table.column(CHANGE_COLUMN).unique().to_pylist()) - {UPSERT, DELETE, None}
    if wrong:
        raise _unknown_change(wrong)
    deleted = deletions_of(table)
    upserts, deletes = columns.filter(pc.invert(deleted)), columns.filter(deleted)
    key = [name for name in columns.schema.names if name in {field.name for field in key_fields(shape.schema)}]
    return _Received(upserts, deletes.select(key), upserts.num_rows, deletes.num_rows)


def _unknown_change(found: Iterable[Value]) -> Invalid:
    shown = ", ".join(repr(one)[:40] for one in found)
    return Invalid(f"a change is not {UPSERT} or {DELETE}", change=shown[:200], advice=f"Leave it out for {UPSERT}.")


def _check_names(deletes: Sequence[Row], shape: Shape, *, evolve: bool) -> None:
    """Only the key of a deletion counts, but a name that the table does not have is an error there too."""
    names = {column.name for column in shape.columns}
    problems = Misfits()
    for row in deletes:
        for name in row.keys() - names if not evolve else ():
            problems.add(Problem(str(name), NO_SUCH_COLUMN, 1, leave_out_advice(str(name), names)))
    problems.raise_invalid()
