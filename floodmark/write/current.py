"""A table as a branch has it now, and what depends on its columns by name: expressions, sinks, jobs, its retention.

Files know columns by their ids, so a rename or a drop rewrites none. What stores a column's name would miss it: such a
change is refused while something does, where it is planned (schema) and where a merge of branches brings it. Read from
the catalog and tables' metadata, no rows; a rider checks in the publish that the users of names are still the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import SortOrder
from pyiceberg.types import NestedField
from sqlalchemy import select

from floodmark.catalog import tables
from floodmark.catalog.history import to_head
from floodmark.catalog.indexes import IndexRow
from floodmark.catalog.maintenance_state import Policy
from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import Fill, absent_fields, fills_of
from floodmark.commit.live_files import live_files
from floodmark.commit.metadata import schema_of
from floodmark.commit.references import Reference, references_of
from floodmark.commit.shape_riders import NamesRider, histories_of, settings_digest
from floodmark.errors import Corrupt
from floodmark.model import MAIN, Head
from floodmark.rows.sql.expression import may_name

# Why something cannot be done to a column, and what to do about it.
Problem = tuple[str, str]
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Dependents:
    """What else depends on a table as it is.

    sinks: those of the branch, by name, with the words of their settings that may be columns, in lower case. jobs:
    those at work on it. histories: those that loaded rows into it. branches: the others that have it. live_specs: the
    partition specs of live files, on any branch. lacking: of the requested columns, those that some live file does not
    hold. settings: by sink of any branch, a digest of its settings.
    """

    sinks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    jobs: tuple[str, ...] = ()
    histories: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    live_specs: frozenset[int] = frozenset()
    lacking: frozenset[int] = frozenset()
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Current:
    """A table as it is now. Its metadata is the newest of any branch: ids that it has are taken."""

    head: Head
    metadata: TableMetadata
    policy: Policy = field(default_factory=Policy)
    dependents: Dependents = field(default_factory=Dependents)
    indexes: tuple[IndexRow, ...] = ()

    @cached_property
    def schema(self) -> Schema:
        return schema_of(self.metadata, self.head)

    @cached_property
    def spec(self) -> PartitionSpec:
        return self.metadata.specs()[self.head.spec_id]

    @cached_property
    def sort(self) -> SortOrder:
        return next(
            (one for one in self.metadata.sort_orders if one.order_id == self.metadata.default_sort_order_id),
            SortOrder(order_id=0),
        )

    @cached_property
    def fills(self) -> tuple[Fill, ...]:
        return fills_of(self.metadata.properties, self.schema)

    @cached_property
    def references(self) -> tuple[Reference, ...]:
        return references_of(self.metadata.properties, self.schema, self.head.table_id)

    @property
    def next_schema_id(self) -> int:
        return max(known.schema_id for known in self.metadata.schemas) + 1

    def names_rider(self) -> NamesRider:
        """What must hold when a column of it goes or gets another name: all users of names are as they were seen."""
        was = (self.policy.retention, self.policy.column)
        sinks = tuple(sorted(self.dependents.settings.items()))
        return NamesRider(self.head.table_id, self.head.table, was, sinks, self.head.branch)


class CurrentTables:
    """Reads tables as they are; what the catalog has for all of them is read once."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._sinks = catalog.sinks.all()
        self._jobs = [job for job in catalog.jobs.all() if not job.is_over]
        self._policies = catalog.maintenance.policies()

    def read(self, head: Head, defaults: Collection[str] = ()) -> Current:
        """The table at this head. `defaults`: the columns that are to have a default."""
        catalog, on_main = self._catalog, head.branch == MAIN
        # Not the head's own: another branch may have added columns to the table since, whose ids are taken.
        metadata = catalog.files.metadata(catalog.history.newest_metadata(head.table_id))
        states = self._states(head)
        specs = {
            manifest.partition_spec_id
            for state in states
            for manifest in catalog.files.manifests(state.manifest_list)
            if manifest.has_added_files() or manifest.has_existing_files()
        }
        sinks = [sink for sink in self._sinks if any(one.table_id == head.table_id for one in sink.tables)]
        dependents = Dependents(
            {sink.name: _words(sink.settings) for sink in sinks if sink.branch == head.branch},
            # Jobs and retention are of main.
            tuple(job.name for job in self._jobs if on_main and head.table in job.table_names),
            self._histories(head),
            tuple(sorted(state.branch for state in states if state.branch != head.branch)),
            frozenset(specs),
            self._lacking(head, defaults),
            {sink.name: settings_digest(sink.settings) for sink in sinks},
        )
        policy = self._policies.get(head.table_id) if on_main else None
        indexes = tuple(catalog.indexes.of_table(head.table_id))
        return Current(head, metadata, policy or Policy(), dependents, indexes)

    def _histories(self, head: Head) -> tuple[str, ...]:
        with self._catalog.database.read() as tx:
            return tuple(histories_of(tx, head.table_id))

    def _states(self, head: Head) -> list[Head]:
        """The table on every branch that has its own state of it."""
        query = select(tables.heads).where(tables.heads.c.table_id == head.table_id)
        with self._catalog.database.read() as tx:
            others = [to_head(row, row.branch) for row in tx.execute(query)]
        return [head, *(other for other in others if other.branch != head.branch)]

    def _lacking(self, head: Head, defaults: Collection[str]) -> frozenset[int]:
        """Of the columns that are to have a default, those that some live file does not hold."""
        schema = schema_of(self._catalog.files.metadata(head.metadata_location), head)
        columns = [Fill(one.field_id, one.name, "") for one in schema.fields if one.name in defaults]
        if not columns:
            return frozenset()
        files = live_files(self._catalog.files, head, schema)
        return frozenset(field_id for file in files for field_id in absent_fields(file, columns, schema))


def _words(settings: str) -> frozenset[str]:
    """Words in a sink's settings that may be column names: its columns, and the words of its condition."""
    try:
        values = json.loads(settings)
    except ValueError as error:
        raise Corrupt("the settings of a sink cannot be read", cause=error) from error
    named = {str(column).lower() for column in values.get("columns") or ()}
    texts = (values.get("where") or "", *(values.get("partition") or ()))
    return frozenset(named | {word.lower() for text in texts for word in _WORD.findall(str(text))})


# ── who uses a column ──


def used_by_name(current: Current, column: NestedField, fills: Sequence[Fill] | None = None) -> Problem | None:
    """What uses the column by its name: expressions (of these columns, by default all), sinks and jobs."""
    for fill in current.fills if fills is None else fills:
        if fill.field_id != column.field_id and names_column(fill.expression, column, current):
            return f"{fill.column} is filled by an expression over it", f"Unbind {fill.column} first."
    for sink, words in current.dependents.sinks.items():
        if column.name.lower() in words:
            return f"the sink {sink} names it", f"Change the settings of the sink {sink} first."
    for job in current.dependents.jobs:
        return f"the backfill {job} has not ended", "Let it end, or cancel it."
    return None


def needed(
    current: Current,
    column: NestedField,
    *,
    respecified: bool = False,
    resorted: bool = False,
    kept_otherwise: bool = False,
    unreferred: bool = False,
    fills: Sequence[Fill] | None = None,
) -> Problem | None:
    """Why the column cannot be dropped. The flags: the same change gives the table another layout, order, …"""
    if column.field_id in current.schema.identifier_field_ids:
        return "it is part of the key", "A table keeps its key; make a new table."
    specs = current.metadata.specs()
    used = set(current.dependents.live_specs) | (set() if respecified else {current.head.spec_id})
    if any(part.source_id == column.field_id for spec_id in used if spec_id in specs for part in specs[spec_id].fields):
        return "the table's files are partitioned by it", "Change the partition, then write the files again."
    if not resorted and any(part.source_id == column.field_id for part in current.sort.fields):
        return "the table is sorted by it", "Give another `sort`, or sort = []."
    if not kept_otherwise and current.policy.column == column.name:
        return "the table's retention goes by it", 'Give another retention_column, or retention = "none".'
    if not unreferred and any(one.field_id == column.field_id for one in current.references):
        return "it refers to another table", "Take it out of `references`."
    return used_by_name(current, column, fills)


def names_column(expression: str, column: NestedField, current: Current) -> bool:
    """Whether an expression may use this column."""
    return may_name(expression, column.name, current.schema)
