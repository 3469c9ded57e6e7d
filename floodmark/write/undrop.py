"""Undrop: a table that main dropped comes back as it was, by a publish like any other.

begin (the version that has it is held from here on), check again, seal, build, publish. No row is read or written: one
snapshot over the manifests that the table had. It is the same table by its id; its rows keep their sequences, its marks
and batch ids continue. References to and from other tables are left out: those tables changed without it, so the
references have to be checked again, which `apply` does when the reference is declared again. Crash anywhere before the
publish: the table is dropped as before; recovery rolls the operation back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pyiceberg.table.metadata import TableMetadata

from floodmark.catalog.riders import PlanAgain, VersionRider
from floodmark.commit.catalog import Catalog
from floodmark.commit.dropped import DroppedTable, find_dropped
from floodmark.commit.intent import Intent
from floodmark.commit.metadata import new_snapshot_id, schema_of
from floodmark.commit.publication import Planned, Publication, PublishPlan, Start, check_riders, publish
from floodmark.commit.references import REFERENCE_PREFIX, REFERRER_PREFIX, references_of, referrers_of
from floodmark.commit.seal import UNDROP, Edit
from floodmark.commit.shape_riders import UndropRider
from floodmark.errors import Conflict
from floodmark.model import Commit


@dataclass(frozen=True)
class Undropped:
    """What came back: rows, the state's version, the version that dropped it, and columns that lost their reference."""

    table: str
    rows: int
    state_version: int
    dropped_version: int
    references_lost: tuple[str, ...]


def undrop(
    catalog: Catalog,
    intent: Intent,
    table: str,
    version: int | None = None,
    on_restored: Callable[[Undropped], None] | None = None,
) -> Commit:
    """Bring a dropped table back; `version` selects one, if several had the name. `on_restored` gets the result."""
    plan = _Undrop(catalog, intent, table, version)
    commit = publish(catalog, intent, plan)
    if on_restored is not None and plan.done is not None:
        on_restored(plan.done)
    return commit


class _Undrop(PublishPlan):
    def __init__(self, catalog: Catalog, intent: Intent, table: str, version: int | None) -> None:
        self._catalog = catalog
        self._intent = intent
        self._table = table
        self._version = version
        self._planned = Planned()
        self.done: Undropped | None = None

    def start(self) -> Start:
        found = _find(self._catalog, self._table, self._version)
        check_riders(self._catalog, self._intent, _expected(self._intent, found.state.table_id, found.state.table))
        return Start(held_version=found.held_version)

    def stage(self, work: Publication) -> None:
        # From begin on, no readable version expires that is not older than the held one.
        found = _find(self._catalog, self._table, self._version)
        if (found.held_version or 0) < work.operation.base_version:
            raise Conflict("a version expired meanwhile", table=self._table, advice="Run it again.")
        metadata = self._catalog.files.metadata(found.metadata_location)
        work.claim(metadata.location)
        properties, lost = _references(metadata, found)
        state = found.state
        rider = UndropRider(state.table_id, state.table, state.version, found.dropped_version)
        self._planned = Planned((_edit(found, metadata, properties),), (rider,))
        self.done = Undropped(self._table, state.rows, state.version, found.dropped_version, lost)

    def plan(self) -> Planned:
        return self._planned

    def expected(self, intent: Intent, planned: Planned) -> tuple[VersionRider, ...]:
        (edit,) = planned.edits
        return _expected(intent, edit.table_id, edit.table)

    def plan_again(self, lost: PlanAgain) -> None:
        raise Conflict("the table changed meanwhile", table=self._table, cause=lost.reason, advice="Run it again.")


def _expected(intent: Intent, table_id: str, table: str) -> tuple[VersionRider, ...]:
    """A caller who expects a version expects that the table had been dropped then."""
    return intent.expecting((), dropped=[(table_id, table)])


def _find(catalog: Catalog, table: str, version: int | None) -> DroppedTable:
    with catalog.database.read() as tx:
        return find_dropped(tx, table, version)


def _edit(found: DroppedTable, metadata: TableMetadata, properties: dict[str, str]) -> Edit:
    edit = Edit.at(found.state, metadata.location, new_snapshot_id(), action=UNDROP)
    return replace(edit, rows_added=found.state.rows, properties=properties, sequence_above=found.sequence_max)


def _references(metadata: TableMetadata, found: DroppedTable) -> tuple[dict[str, str], tuple[str, ...]]:
    """The properties without references to other tables, and the columns that had one."""
    schema, table_id = schema_of(metadata, found.state), found.state.table_id
    out = [one for one in references_of(metadata.properties, schema, table_id) if one.parent_id != table_id]
    into = [one for one in referrers_of(metadata.properties) if one.table_id != table_id]
    properties = {f"{REFERENCE_PREFIX}{one.field_id}": "" for one in out}
    properties |= {f"{REFERRER_PREFIX}{one.table_id}.{one.field_id}": "" for one in into}
    return properties, tuple(schema.find_field(one.field_id).name for one in out)
