"""A plan in the publisher's form: one edit per table, and the riders of retention and of dropped tables. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from floodmark.catalog.riders import Rider
from floodmark.commit.metadata import new_metadata
from floodmark.commit.references import Reference, reference_property, referrer_property
from floodmark.commit.seal import CREATE, DROP, WRITE, Edit, RemovedFile
from floodmark.commit.shape_riders import DropRider, NamesRider, PolicyRider
from floodmark.model import FileRecord, Head
from floodmark.schema.plan import Plan
from floodmark.schema.tables import TablePlan


@dataclass(frozen=True)
class Made:
    """The identity and the location of a table to be created."""

    table_id: str
    location: str


@dataclass(frozen=True)
class FilledFiles:
    """Files of a table that were rewritten with their new columns: the old files, and their replacements."""

    removed: tuple[RemovedFile, ...] = ()
    added: tuple[FileRecord, ...] = ()


def make_edits(
    plan: Plan,
    heads: Mapping[str, Head],
    made: Mapping[str, Made],
    snapshots: Mapping[str, int],
    filled: Mapping[str, FilledFiles],
    looked: Collection[str],
) -> tuple[Edit, ...]:
    """`looked`: tables whose edits are valid only with the rows that were checked."""
    references = _reference_properties(plan, heads, made)
    edits = []
    for table in plan.tables:
        properties = {**table.properties, **references.get(table.name, {})}
        if table.shape is not None:
            edits.append(_create(table, made[table.name], properties))
        elif table.drop:
            edits.append(_drop(table, heads[table.name]))
        elif table.current is not None and (table.changes or properties):
            rows = filled.get(table.name, FilledFiles())
            edits.append(
                _write(table, heads[table.name], snapshots[table.name], properties, rows, checked=table.name in looked)
            )
    return tuple(edits)


def _create(table: TablePlan, made: Made, properties: Mapping[str, str]) -> Edit:
    shape = table.shape
    assert shape is not None
    metadata = new_metadata(
        made.location, made.table_id, shape.schema, shape.spec, shape.sort, {**shape.properties, **properties}
    )
    return Edit(
        CREATE,
        table.name,
        made.table_id,
        made.location,
        metadata.current_schema_id,
        metadata.default_spec_id,
        metadata=metadata.model_dump_json(exclude_none=True),
    )


def _drop(table: TablePlan, head: Head) -> Edit:
    assert table.current is not None
    return Edit(
        DROP,
        table.name,
        head.table_id,
        table.current.metadata.location,
        head.schema_id,
        head.spec_id,
        base_snapshot=head.snapshot,
        checked=True,
    )


def _write(
    table: TablePlan, head: Head, snapshot: int, properties: Mapping[str, str], rows: FilledFiles, *, checked: bool
) -> Edit:
    assert table.current is not None
    return Edit(
        WRITE,
        table.name,
        head.table_id,
        table.current.metadata.location,
        head.schema_id if table.schema is None else table.schema.schema_id,
        head.spec_id if table.spec is None else table.spec.spec_id,
        snapshot=snapshot,
        base_snapshot=head.snapshot,
        added=rows.added,
        removed=rows.removed,
        checked=checked,
        same_rows=bool(rows.removed),
        schema=None if table.schema is None else table.schema.model_dump_json(),
        base_schema_id=None if table.schema is None else head.schema_id,
        spec=None if table.spec is None else table.spec.model_dump_json(),
        base_spec_id=None if table.spec is None else head.spec_id,
        sort=None if table.sort is None else table.sort.model_dump_json(),
        properties=dict(properties),
    )


def _reference_properties(plan: Plan, heads: Mapping[str, Head], made: Mapping[str, Made]) -> dict[str, dict[str, str]]:
    """By table, the properties that new references write: in the referring table, and in the one it refers to."""

    def table_id(name: str) -> str:
        return made[name].table_id if name in made else heads[name].table_id

    found: dict[str, dict[str, str]] = {}
    for table in plan.tables:
        for link in table.links:
            parent_id = table_id(link.parent)
            reference = Reference(table_id(table.name), link.field_id, link.parent, parent_id, link.parent_field_id)
            found.setdefault(table.name, {}).update([reference_property(reference)])
            found.setdefault(link.parent, {}).update([referrer_property(reference, table.name)])
    return found


def make_riders(plan: Plan, heads: Mapping[str, Head], made: Mapping[str, Made]) -> tuple[Rider, ...]:
    riders: list[Rider] = []
    for table in plan.tables:
        if table.drop:
            head = heads[table.name]
            riders.append(DropRider(head.table_id, table.name, head.branch))
            continue
        was: tuple[str | None, str | None] = (None, None)
        if table.current is not None:
            was = (table.current.policy.retention, table.current.policy.column)
        if table.policy is not None:
            table_id = made[table.name].table_id if table.name in made else heads[table.name].table_id
            riders.append(PolicyRider(table_id, table.policy.retention, table.policy.column, was))
        if table.moves_names and table.current is not None:
            sinks = tuple(sorted(table.current.users.settings.items()))
            riders.append(NamesRider(heads[table.name].table_id, table.name, was, sinks))
    return tuple(riders)
