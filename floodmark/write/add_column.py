"""A new column for a table, without a row: one publish of its schema, with or without the expression that fills it.

From that publish on files without the column are unfilled and writes fill it themselves (decision 0019). The snapshot
has the files of the one before it, so readers of changes see nothing new. A write that was staged before finds that the
table's shape changed, and plans again. A column may be unbound from its expression: then it is an ordinary one. If no
file holds it yet, it may be bound again, which is another shape too: what was staged as null meanwhile must not count
as filled. Crash anywhere: the old shape or the new; recovery undoes what is not published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import IcebergType, NestedField

from floodmark.catalog.riders import Rider
from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import Fill, absent_fields, fill_property, fills_of, is_unbound, unbound_property
from floodmark.commit.intent import Intent
from floodmark.commit.live_files import live_files
from floodmark.commit.metadata import new_snapshot_id, schema_of
from floodmark.commit.publication import Planned, PublishPlan, Start, publish
from floodmark.commit.references import references_of
from floodmark.commit.seal import Edit
from floodmark.errors import Conflict, Invalid
from floodmark.model import Commit, Head
from floodmark.rows.evolve import evolve_schema
from floodmark.rows.schema import arrow_schema, arrow_type, user_fields
from floodmark.write.table import planned_on

KIND = "add_column"


def add_column(
    catalog: Catalog,
    intent: Intent,
    table: str,
    name: str,
    kind: IcebergType,
    fill_expression: str | None,
    riders: Sequence[Rider] = (),
) -> Commit:
    """Add an optional column; with an expression, that fills it. `Invalid` if a column of this name exists.

    One that was unbound from its expression, and that no file holds, is bound again if it has the same type.
    """

    def edit(head: Head, metadata: TableMetadata, snapshot: int) -> Edit:
        return _edit(catalog, head, metadata, snapshot, name, kind, fill_expression)

    return publish(catalog, intent, _Reshape(catalog, intent, table, riders, edit))


def unbind_column(catalog: Catalog, intent: Intent, table: str, name: str, riders: Sequence[Rider] = ()) -> Commit:
    """Stop filling the column by its expression. `Invalid` if none fills it."""

    def edit(head: Head, metadata: TableMetadata, snapshot: int) -> Edit:
        return _unbound(head, metadata, snapshot, name)

    return publish(catalog, intent, _Reshape(catalog, intent, table, riders, edit))


class _Reshape(PublishPlan):
    """A table's new shape without a row, planned on its head each time."""

    # It reads no rows, so planning is quick: writers need not wait for it.
    takes_turn = False

    def __init__(
        self,
        catalog: Catalog,
        intent: Intent,
        table: str,
        riders: Sequence[Rider],
        edit: Callable[[Head, TableMetadata, int], Edit],
    ) -> None:
        self._catalog = catalog
        self._branch = intent.branch
        self._table = table
        self._riders = riders
        self._edit = edit
        self._snapshot = new_snapshot_id()
        self._table_id: str | None = None

    def start(self) -> Start:
        read = self._catalog.files.metadata
        return Start(
            [self._catalog.at_head(self._table, lambda head: read(head.metadata_location).location, self._branch)]
        )

    def plan(self) -> Planned:
        head, metadata = planned_on(self._catalog, self._table, self._branch)
        if head.table_id != (self._table_id or head.table_id):
            raise Conflict("the table was dropped or created again meanwhile", table=self._table)
        self._table_id = head.table_id
        return Planned((self._edit(head, metadata, self._snapshot),), tuple(self._riders))

    def kept_changing(self) -> Conflict:
        return Conflict(
            "the table's shape kept changing", table=self._table, plans=self.plans_max, advice="Run it again."
        )


def _edit(
    catalog: Catalog,
    head: Head,
    metadata: TableMetadata,
    snapshot: int,
    name: str,
    kind: IcebergType,
    expression: str | None,
) -> Edit:
    """The table with one more optional column, before the hidden one; `Invalid` if it cannot have it."""
    schema = schema_of(metadata, head)
    there = find_column(schema, name)
    if there is not None:
        if expression is None or not can_bind_anew(catalog, metadata, head, there, kind):
            raise Invalid(
                "the table has a column of this name",
                table=head.table,
                column=there.name,
                advice="Give the new column another name.",
            )
        return _bound_anew(metadata, schema, head, snapshot, Fill(there.field_id, there.name, expression))
    evolved = evolve_schema(
        schema,
        arrow_schema(schema).append(pa.field(name, arrow_type(kind))),
        last_column_id=metadata.last_column_id,
        next_schema_id=max(known.schema_id for known in metadata.schemas) + 1,
    )
    if evolved is None:
        raise Invalid("a column needs a name", table=head.table, column=repr(name))
    field_id = next(field.field_id for field in evolved.fields if field.name == name)
    fills = [] if expression is None else [fill_property(Fill(field_id, name, expression))]
    return Edit.at(head, metadata.location, snapshot).reshape(evolved, properties=dict(fills))


def find_column(schema: Schema, name: str) -> NestedField | None:
    """A column of the user's by its name, in any case."""
    return next((field for field in user_fields(schema) if field.name.lower() == name.lower()), None)


def can_bind_anew(
    catalog: Catalog, metadata: TableMetadata, head: Head, column: NestedField, kind: IcebergType | None = None
) -> bool:
    """Whether the column was unbound and no live file holds it; and, if `kind` is given, whether it has that type.

    Not one that refers to another table: values that an expression fills are not checked there.
    """
    schema = schema_of(metadata, head)
    if not is_unbound(metadata.properties, column.field_id):
        return False
    if any(one.field_id == column.field_id for one in references_of(metadata.properties, schema, head.table_id)):
        return False
    if kind is not None and not arrow_type(kind).equals(arrow_type(column.field_type)):
        return False
    fill = Fill(column.field_id, column.name, "")
    return all(absent_fields(file, [fill], schema) for file in live_files(catalog.files, head, schema))


def _bound_anew(metadata: TableMetadata, schema: Schema, head: Head, snapshot: int, fill: Fill) -> Edit:
    # A separate schema with the same columns: a write that was staged while the column was an ordinary one plans again.
    number = max(known.schema_id for known in metadata.schemas) + 1
    same = schema.model_copy(update={"schema_id": number})
    # Checked: a file that came meanwhile may hold the column.
    edit = Edit.at(head, metadata.location, snapshot, checked=True)
    return edit.reshape(same, properties=dict([fill_property(fill)]))


def bound_column(metadata: TableMetadata, schema: Schema, head: Head, name: str) -> NestedField:
    """A column that an expression fills; `Invalid` if it is not one."""
    column = find_column(schema, name)
    if column is None or all(fill.field_id != column.field_id for fill in fills_of(metadata.properties, schema)):
        raise Invalid(
            "no expression fills this column",
            table=head.table,
            column=name,
            advice="Nothing was changed; writers compute nothing for it.",
        )
    return column


def _unbound(head: Head, metadata: TableMetadata, snapshot: int, name: str) -> Edit:
    column = bound_column(metadata, schema_of(metadata, head), head, name)
    edit = Edit.at(head, metadata.location, snapshot)
    return edit.reshape(properties=dict([unbound_property(column.field_id)]))
