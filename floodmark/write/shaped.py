"""A table as a change sees it: its shape, where its rows are staged, and rows that are brought to that shape.

Rows that came in without a column which an expression fills are staged without it first, and then again with it: so the
expression is evaluated on what is in the table's own files, whatever form the rows came in. A crash leaves files in the
operation's own folder that nothing refers to (I3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata

from floodmark.catalog.catalog import Catalog
from floodmark.catalog.fills import Fill, absent_fields, fills_of
from floodmark.catalog.live import LiveFile
from floodmark.catalog.metadata import MetadataFiles, schema_of, seen_from
from floodmark.errors import Invalid
from floodmark.model import FileRecord, Head
from floodmark.rows.evolve import evolve_schema
from floodmark.rows.rewrite import NONE, Rewrite, Source
from floodmark.rows.runner import Runner
from floodmark.rows.stage import StageTarget
from floodmark.storage import Storage
from floodmark.write.by_key import keys_target
from floodmark.write.prune import key_fields

if TYPE_CHECKING:
    from floodmark.rows.frames import DataFrame


def planned_metadata(catalog: Catalog, head: Head) -> TableMetadata:
    """A table's newest metadata, as the branch of this head sees it: ids that any branch has given are taken there."""
    newest = catalog.files.metadata(catalog.history.newest_metadata(head.table_id))
    return seen_from(newest, head.schema_id, head.spec_id)


@dataclass(frozen=True)
class Means:
    """What a change works on a table with. `tables` gives others of the lake, for expressions that fill columns."""

    files: MetadataFiles
    storage: Storage
    runner: Runner
    tables: Callable[[str], DataFrame]


class ShapedTable:
    def __init__(self, name: str, metadata: TableMetadata, head: Head | None, folder: str, means: Means) -> None:
        """`head` is None for a table that the same change makes: then `metadata` is its first.

        `folder` is where the change stages its files.
        """
        self.name = name
        self.metadata = metadata
        self.head = head
        self._files = means.files
        self._storage = means.storage
        self._runner = means.runner
        self.folder = folder
        self._tables = means.tables
        # The table's own; `schema` has the columns that this change brings, too.
        self.own = metadata.schema() if head is None else schema_of(metadata, head)
        self.schema = self.own
        self._new_spec_id: int | None = None

    @property
    def spec_id(self) -> int:
        if self._new_spec_id is not None:
            return self._new_spec_id
        return self.metadata.default_spec_id if self.head is None else self.head.spec_id

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(column.name for column in key_fields(self.schema))

    def evolved(self, incoming: pa.Schema) -> Schema:
        """The table's schema with what rows of this Arrow schema bring: columns, wider numbers. Changes nothing yet."""
        known = [schema.schema_id for schema in self.metadata.schemas]
        found = evolve_schema(
            self.schema, incoming, last_column_id=self.metadata.last_column_id, next_schema_id=max(known) + 1
        )
        return self.schema if found is None else found

    def target(self, schema: Schema | None = None, *, fill_missing: bool = False) -> StageTarget:
        return StageTarget(
            folder=self.folder,
            schema_json=(schema or self.schema).model_dump_json(),
            spec_json=self.metadata.specs()[self.spec_id].model_dump_json(),
            sort_json=self.metadata.sort_order().model_dump_json(),
            properties=dict(self.metadata.properties),
            storage_options=self._storage.options,
            fill_missing=fill_missing,
        )

    def keys_target(self) -> StageTarget:
        return keys_target(self.target(), self.metadata, self.schema, self.spec_id)

    def part_target(self, schema: Schema, names: Sequence[str]) -> tuple[StageTarget, Schema]:
        """Where rows are staged that bring these columns only, and the schema of those. Its files are not published.

        Names that the schema does not have are left to staging, which refuses them.
        """
        kept = [column for column in schema.fields if column.name in names]
        keys = list(schema.identifier_field_ids)
        part = Schema(*kept, schema_id=schema.schema_id, identifier_field_ids=keys)
        target = keys_target(self.target(), self.metadata, schema, self.spec_id)
        return replace(target, schema_json=part.model_dump_json()), part

    @property
    def fills(self) -> tuple[Fill, ...]:
        """The table's columns that an expression fills."""
        return fills_of(self.metadata.properties, self.schema)

    def staged_again(
        self, records: Sequence[FileRecord], schema: Schema, target: StageTarget, fills: Sequence[Fill]
    ) -> tuple[FileRecord, ...]:
        """Rows that came in and were staged for `schema`, staged again for the target with these columns filled."""
        sources = [Source(record.path, record.rows, record.size_bytes, None, True) for record in records]
        if fills:
            try:
                return self._runner.fill(
                    target, sources, fills, table=self.name, source_schema=schema, tables=self._tables
                )
            except Invalid as error:
                raise _cannot_fill(error, self.name, fills) from error
        rewrite = Rewrite(target, NONE, source_schema_json=schema.model_dump_json())
        return tuple(record for file in self._runner.run(rewrite, sources).files for record in file.records)

    def _sources(self, files: Iterable[LiveFile]) -> list[Source]:
        fills = self.fills
        return [Source.of(file, absent=absent_fields(file, fills, self.schema)) for file in files]


def _cannot_fill(error: Invalid, table: str, fills: Sequence[Fill]) -> Invalid:
    """Rows that fit the table, and for which a column cannot be computed: there are ways out."""
    columns = ", ".join(fill.column for fill in fills)
    out = f"Bring the column with the rows; `floodmark backfill unbind {table} COLUMN` lets all writers leave it out."
    facts = {**error.facts, "table": table, "filled": columns}
    return Invalid(error.message, advice=f"{error.advice} {out}".strip(), **facts)
