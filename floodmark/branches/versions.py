"""Two versions of the lake compared, and the comparison of one table's states that a rollback uses too. Reads only.

A table is the same one by its id, whatever its name. Its rows are compared in the later state's shape, by field id: a
column that only one state has does not count, but is named. With a key, a row is changed if its values are; without
one, a row that differs is another row. Files that both states have are not read. No operation, no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import chain

import numpy as np
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from floodmark import clock
from floodmark.branches.records import (
    ADDED,
    CHANGED,
    CREATED,
    GONE,
    REMOVED,
    RESHAPED,
    UPDATED,
    BranchDiff,
    RowDiff,
    TableDiff,
)
from floodmark.branches.view import schema_at
from floodmark.catalog.lineage import Lineages
from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import Fill, fills_of
from floodmark.commit.live_files import live_files
from floodmark.errors import BelowRetention, Corrupt, Invalid, NotFound
from floodmark.model import MAIN, Head, Row
from floodmark.rows.arrays import Numbers
from floodmark.rows.json.ndjson import dicts
from floodmark.rows.primitives import widens
from floodmark.rows.project import take_rows
from floodmark.rows.rewriting.two_way import RowSet, TwoStates, compare
from floodmark.rows.schema import user_fields
from floodmark.storage import Storage
from floodmark.write.prune import key_fields

# A version by its number, or by a time.
Moment = int | str | datetime


def resolve(catalog: Catalog, moment: Moment, branch: str) -> int:
    """The version that is meant; `Invalid` if it is not one, `BelowRetention` if it has expired."""
    if isinstance(moment, bool) or not isinstance(moment, int | str | datetime):
        raise Invalid("a version is a number or a time", version=repr(moment)[:80])
    if isinstance(moment, int):
        return catalog.history.resolve(version=moment, branch=branch)
    return catalog.history.resolve(at_ms=clock.parse_time_ms(moment), branch=branch)


def diff(
    catalog: Catalog, before: Moment, after: Moment, *, table: str | None = None, branch: str = MAIN, limit: int = 20
) -> BranchDiff:
    """Per table what differs between two versions, with at most `limit` rows of each. Times are those of `branch`."""
    versions = resolve(catalog, before, branch), resolve(catalog, after, branch)
    with readable(catalog, versions):
        states = [catalog.history.tables_at(version) for version in versions]
        if table is not None and not any(table in state for state in states):
            raise NotFound(
                "neither version has this table",
                table=table,
                versions=", ".join(map(str, versions)),
                advice="`floodmark tables` lists those of now.",
            )
        pairs = _pairs(*({head.table_id: head for head in state.values()} for state in states))
        found = [_table(catalog, one, other, limit) for one, other in pairs if _is_named(table, one, other)]
    names = [catalog.history.commit(version).branch for version in versions]
    return BranchDiff(names[1], names[0], versions[0], versions[1], tuple(one for one in found if one is not None))


@contextmanager
def readable(catalog: Catalog, versions: Sequence[int]) -> Iterator[None]:
    """A missing file means damage, unless a version has expired meanwhile: then the reader was too slow."""
    try:
        yield
    except (Corrupt, NotFound, FileNotFoundError) as error:
        expired = [version for version in versions if catalog.history.is_expired(version)]
        if not expired:
            raise
        raise BelowRetention(
            "this version's window ended while it was read", version=expired[0], advice="Use a newer version."
        ) from error


def check_on_line(catalog: Catalog, version: int, branch: str) -> None:
    """`Invalid` if the branch never was at this version."""
    made_on = catalog.history.commit(version).branch
    with catalog.database.read() as tx:
        lineages = Lineages.read(tx)
        if not lineages.holds(lineages.live(branch), made_on, version):
            raise Invalid(
                "the branch never was at this version",
                version=version,
                branch=branch,
                made_on=made_on,
                advice="`floodmark history` lists the versions of each branch.",
            )


def _pairs(before: dict[str, Head], after: dict[str, Head]) -> list[tuple[Head | None, Head | None]]:
    """The states of every table, by its id, in the order of their names."""
    found = [(before.get(table_id), after.get(table_id)) for table_id in {**before, **after}]
    return sorted(found, key=lambda pair: [head.table for head in reversed(pair) if head is not None])


def _is_named(table: str | None, *states: Head | None) -> bool:
    return table is None or table in {head.table for head in states if head is not None}


def _table(catalog: Catalog, before: Head | None, after: Head | None, limit: int) -> TableDiff | None:
    if after is None:
        return None if before is None else TableDiff(before.table, GONE, rows_deleted=before.rows)
    if before is None:
        return _created(catalog, after, limit)
    return compare_table(catalog, before, after, limit)


def _created(catalog: Catalog, head: Head, limit: int) -> TableDiff:
    schema = schema_at(catalog, head)
    rows = RowSet(live_files(catalog.files, head, schema))
    rows.add_all()
    samples = _added(catalog.storage, rows, rows.lowest(limit), user_fields(schema))
    return TableDiff(head.table, CREATED, rows_added=head.rows, samples=tuple(samples))


def compare_table(catalog: Catalog, before: Head, after: Head, limit: int) -> TableDiff | None:
    """What differs between two states of one table; None if nothing does."""
    columns = shape_changes(catalog, before, after)
    if before.snapshot == after.snapshot and not columns:
        return None
    schema, fills = _common_shape(catalog, before, after)
    states = compare_states(catalog, before, after, schema, fills, limit)
    if not (states.added or states.updated or states.deleted or columns):
        return None
    samples = tuple(row_samples(catalog.storage, states, schema, limit))
    change = RESHAPED if columns else CHANGED
    return TableDiff(after.table, change, states.added, states.updated, states.deleted, samples, columns)


def compare_states(
    catalog: Catalog, before: Head, after: Head, schema: Schema, fills: Sequence[Fill], first: int = 0
) -> TwoStates:
    """The rows that differ, read with this schema. They are compared by its key, if both states have that key."""
    sides = [live_files(catalog.files, head, schema) for head in (before, after)]
    if before.snapshot == after.snapshot:
        sides = [[], []]
    paths = [{file.path for file in files} for files in sides]
    one, other = ([file for file in files if file.path not in paths[0] & paths[1]] for files in sides)
    keys = {_key(schema_at(catalog, head)) for head in (before, after)}
    keyed = keys == {_key(schema)} and bool(key_fields(schema))
    return compare(catalog.storage, one, other, schema, fills, table=after.table, keyed=keyed, first=first)


def _key(schema: Schema) -> tuple[int, ...]:
    return tuple(sorted(schema.identifier_field_ids))


def _common_shape(catalog: Catalog, before: Head, after: Head) -> tuple[Schema, tuple[Fill, ...]]:
    """The later state's schema, with the wider types of both, and the columns that it fills."""
    schema, other = schema_at(catalog, after), schema_at(catalog, before)
    wide = {column.field_id: column.field_type for column in other.fields}
    fields = [
        column.model_copy(update={"field_type": wide[column.field_id]})
        if column.field_id in wide and widens(column.field_type, wide[column.field_id])
        else column
        for column in schema.fields
    ]
    shape = Schema(*fields, schema_id=schema.schema_id, identifier_field_ids=list(schema.identifier_field_ids))
    return shape, fills_of(catalog.files.metadata(after.metadata_location).properties, shape)


# ── rows as samples ──


def row_samples(storage: Storage, states: TwoStates, schema: Schema, limit: int) -> Iterator[RowDiff]:
    """The first differences: rows that came or changed, in the order of the files, then rows that went."""
    fields = user_fields(schema)
    after = np.sort(np.concatenate([states.came, states.changed[:, 1]]))[:limit]
    was = dict(states.changed[:, ::-1].tolist())
    now = _rows(storage, states.only_after, after, fields)
    before = _rows(storage, states.only_before, np.array([was[row] for row in now if row in was], np.int64), fields)
    for number, row in now.items():
        old = before[was[number]] if number in was else None
        yield {"change": ADDED if number not in was else UPDATED, "row": row, "before": old}
    went = _rows(storage, states.only_before, states.went[: max(0, limit - len(now))], fields)
    for old in went.values():
        yield {"change": REMOVED, "row": None, "before": old}


def _added(storage: Storage, rows: RowSet, numbers: Numbers, fields: Sequence[NestedField]) -> Iterator[RowDiff]:
    for row in _rows(storage, rows, numbers, fields).values():
        yield {"change": ADDED, "row": row, "before": None}


def _rows(storage: Storage, rows: RowSet, numbers: Numbers, fields: Sequence[NestedField]) -> dict[int, Row]:
    """Rows as data, by their numbers, in the order of these. Each file is opened once."""
    found: dict[int, Row] = {}
    places = rows.places(numbers)
    for place in np.unique(places):
        mine = np.sort(numbers[places == place])
        taken = take_rows(storage, rows.files[place].path, fields, mine - rows.starts[place])
        read = chain.from_iterable(dicts(batch) for batch in taken.to_batches())
        found.update(zip(mine.tolist(), read, strict=True))
    return {number: found[number] for number in numbers.tolist()}


# ── shapes ──


def shape_changes(catalog: Catalog, before: Head, after: Head) -> tuple[str, ...]:
    """How name, columns, key and partitions differ, a sentence for each change."""
    found = [] if before.table == after.table else [f"renamed from {before.table}"]
    if (before.schema_id, before.spec_id) == (after.schema_id, after.spec_id):
        return tuple(found)
    one, other = schema_at(catalog, before), schema_at(catalog, after)
    found += column_changes(one, other)
    if before.spec_id != after.spec_id:
        specs = [catalog.files.metadata(head.metadata_location).specs()[head.spec_id] for head in (before, after)]
        texts = [", ".join(field.name for field in spec.fields) or "nothing" for spec in specs]
        found.append(f"partitioned by {texts[1]}, before by {texts[0]}")
    return tuple(found)


def column_changes(before: Schema, after: Schema) -> list[str]:
    """How the columns and the key differ, by their field ids. Pure."""
    was = {column.field_id: column for column in user_fields(before)}
    now = {column.field_id: column for column in user_fields(after)}
    found = [f"column {column.name} added: {column.field_type}" for i, column in now.items() if i not in was]
    found += [f"column {column.name} dropped" for i, column in was.items() if i not in now]
    for field_id in was.keys() & now.keys():
        one, other = was[field_id], now[field_id]
        if one.name != other.name:
            found.append(f"column {one.name} renamed to {other.name}")
        if one.field_type != other.field_type:
            found.append(f"column {other.name} was {one.field_type}, is {other.field_type}")
        if one.required != other.required:
            found.append(f"column {other.name} is {'required' if other.required else 'optional'} now")
    keys = [", ".join(column.name for column in key_fields(schema)) or "none" for schema in (before, after)]
    if _key(before) != _key(after):
        found.append(f"key {keys[1]}, before {keys[0]}")
    return found
