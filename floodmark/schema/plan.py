"""A plan: the steps from the present lake to the one that a file wants, and the state that they were computed on.

Making one reads the catalog and tables' metadata, no rows and no Spark. It is stale as soon as one of the tables that
it read moved, even by an append: applying it then is a Conflict. Appends to other tables do not matter.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import select

from floodmark.catalog import tables
from floodmark.catalog.history import to_head
from floodmark.catalog.maintenance_state import Policy
from floodmark.catalog.sink_state import Sink
from floodmark.commit.catalog import READS_MAX, Catalog
from floodmark.commit.fills import Fill, absent_fields
from floodmark.commit.live_files import live_files
from floodmark.commit.metadata import schema_of
from floodmark.commit.references import references_of, referrers_of
from floodmark.commit.shape_riders import histories_of, settings_digest
from floodmark.errors import Conflict, Corrupt, NotFound
from floodmark.json_form import Json
from floodmark.model import MAIN, Head
from floodmark.schema.diff import diff
from floodmark.schema.file import WantedTable
from floodmark.schema.step import DESTRUCTIVE, REFUSED, Step
from floodmark.schema.table_plan import Current, Dependents, TablePlan

# The origin of tables that no file declares.
GIVEN = "the tables given"
_WORD = re.compile(r"\w+")

# Of one table: name, table id, snapshot, schema id, spec id. Without an id the table does not exist.
Seen = tuple[str, str | None, int | None, int, int]


@dataclass(frozen=True)
class Plan:
    """`heads` are the states of every table that the file names or that its references touch.

    `id` covers them, the steps, and all that will be done; `contents` only the last.
    """

    origin: str
    version: int
    heads: tuple[Seen, ...]
    steps: tuple[Step, ...]
    tables: tuple[TablePlan, ...] = field(repr=False)

    @property
    def id(self) -> str:
        return _digest([[step.as_dict() for step in self.steps], self.heads, self.contents])

    @property
    def file(self) -> str | None:
        """The file that declares the tables; None if they were given otherwise."""
        return None if self.origin == GIVEN else self.origin

    @property
    def contents(self) -> str:
        return _digest([table.contents() for table in self.tables if table.changes])

    @property
    def outcome(self) -> str:
        if any(step.kind == REFUSED for step in self.steps):
            return "refused"
        return "planned" if self.steps else "nothing_to_do"

    @property
    def refused(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.kind == REFUSED)

    @property
    def destructive(self) -> tuple[Step, ...]:
        """The steps that lose data: they are done only if allowed."""
        return tuple(step for step in self.steps if step.kind == DESTRUCTIVE)

    def with_refused(self, problems: Sequence[Step]) -> Plan:
        """The plan after a check of the rows: these steps cannot be done."""
        found = {(step.table, step.action, step.column): step for step in problems}
        return replace(
            self, steps=tuple(found.get((step.table, step.action, step.column), step) for step in self.steps)
        )

    def as_dict(self) -> dict[str, Json]:
        return {
            "outcome": self.outcome,
            "plan": self.id,
            "version": self.version,
            "origin": self.origin,
            "steps": [step.as_dict() for step in self.steps],
        }


def make_plan(catalog: Catalog, wanted: Sequence[WantedTable], origin: str) -> Plan:
    """The plan for main as it is now."""
    for _ in range(READS_MAX):
        version = catalog.history.resolve()
        heads = {head.table: head for head in catalog.history.heads()}
        try:
            current = _current(catalog, wanted, heads)
        except (Corrupt, NotFound, FileNotFoundError):
            # A file of a table may be missing because the table moved and was swept meanwhile: then it is read again.
            if {head.table: head for head in catalog.history.heads()} == heads:
                raise
            continue
        plans = diff(wanted, current)
        names = sorted({*current, *(table.name for table in wanted)})
        steps = tuple(step for plan in plans for step in plan.steps)
        return Plan(origin, version, tuple(seen(name, heads.get(name)) for name in names), steps, plans)
    raise Conflict("the tables kept changing while they were read", advice="Run it again.")


def _digest(parts: Sequence[Json]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def seen(name: str, head: Head | None) -> Seen:
    if head is None:
        return name, None, None, -1, -1
    return name, head.table_id, head.snapshot, head.schema_id, head.spec_id


# ── reading the present state ──


def _current(catalog: Catalog, wanted: Sequence[WantedTable], heads: Mapping[str, Head]) -> dict[str, Current]:
    """The relevant tables: the named ones, in any case, and those on the other side of a reference."""
    named = {table.name.lower() for table in wanted} | {(table.rename_to or table.name).lower() for table in wanted}
    parents = {parent.lower() for table in wanted for parent, _ in table.parents.values()}
    by_id = {head.table_id: head for head in heads.values()}
    first = [head for head in heads.values() if head.table.lower() in named | parents]
    others: set[str] = set()
    for head in first:
        metadata = catalog.files.metadata(head.metadata_location)
        others |= {one.table_id for one in referrers_of(metadata.properties)}
        schema = schema_of(metadata, head)
        others |= {one.parent_id for one in references_of(metadata.properties, schema, head.table_id)}
    chosen = {head.table: head for head in (*first, *(by_id[one] for one in others if one in by_id))}
    defaults = {table.name: _with_default(table) for table in wanted}
    reads = _CatalogReads(catalog)
    return {name: reads.current(head, defaults.get(name, set())) for name, head in sorted(chosen.items())}


def _with_default(table: WantedTable) -> set[str]:
    """The columns that are to have a default, under every name that they may have today."""
    columns = [column for column in table.columns if column.default is not None]
    return {name for column in columns for name in (column.name, column.renamed_from) if name is not None}


class _CatalogReads:
    """What is read from the catalog once for all tables."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._sinks = catalog.sinks.all()
        self._jobs = [job for job in catalog.jobs.all() if not job.is_over]
        self._policies = catalog.maintenance.policies()

    def current(self, head: Head, defaults: set[str]) -> Current:
        catalog = self._catalog
        # Not the head's own: another branch may have added columns to the table since, whose ids are taken.
        metadata = catalog.files.metadata(catalog.history.newest_metadata(head.table_id))
        states = self._states(head)
        specs = {
            manifest.partition_spec_id
            for state in states
            for manifest in catalog.files.manifests(state.manifest_list)
            if manifest.has_added_files() or manifest.has_existing_files()
        }
        sinks = [sink for sink in self._sinks if self._follows(sink, head)]
        dependents = Dependents(
            {sink.name: _words(sink.settings) for sink in sinks},
            tuple(job.name for job in self._jobs if head.table in job.table_names),
            self._histories(head),
            tuple(sorted(state.branch for state in states if state.branch != MAIN)),
            frozenset(specs),
            self._lacking(head, defaults),
            {sink.name: settings_digest(sink.settings) for sink in sinks},
        )
        return Current(head, metadata, self._policies.get(head.table_id, Policy()), dependents)

    def _histories(self, head: Head) -> tuple[str, ...]:
        with self._catalog.database.read() as tx:
            return tuple(histories_of(tx, head.table_id))

    def _follows(self, sink: Sink, head: Head) -> bool:
        return any(one.table_id == head.table_id for one in sink.tables)

    def _states(self, head: Head) -> list[Head]:
        """The table on every branch that has its own state of it."""
        query = select(tables.heads).where(tables.heads.c.table_id == head.table_id)
        with self._catalog.database.read() as tx:
            others = [to_head(row, row.branch) for row in tx.execute(query)]
        return [head, *(other for other in others if other.branch != head.branch)]

    def _lacking(self, head: Head, defaults: set[str]) -> frozenset[int]:
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
