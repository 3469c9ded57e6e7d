"""The verbs of a lake that write rows or create tables: each a plan, run by one publication."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from floodmark.commit.adopt import read_foreign
from floodmark.commit.intent import Intent
from floodmark.commit.metadata import has_renamed_columns, schema_of
from floodmark.commit.publication import check_riders, publish
from floodmark.engine import Engine
from floodmark.errors import Invalid
from floodmark.json_form import Json
from floodmark.model import Commit, Head
from floodmark.rows.reading.selection import select_files
from floodmark.rows.rewriting.rewrite import BY_WHERE, InputFile, Rewrite
from floodmark.rows.rewriting.runner import Runner
from floodmark.rows.schema import check_columns
from floodmark.rows.sql.where import Searched, Where, count_positions
from floodmark.rows.staging.duplicates import find_duplicates
from floodmark.rows.staging.stage import StageTarget
from floodmark.write.change import Change
from floodmark.write.options import DEFAULT, WriteOptions
from floodmark.write.prune import key_fields
from floodmark.write.shape import TableShape, check_name
from floodmark.write.step import IncomingRows
from floodmark.write.table import check_assigned


def write(
    engine: Engine, intent: Intent, table: str, data: IncomingRows | None, options: WriteOptions = DEFAULT
) -> Commit:
    """One step on one table: append, merge, delete or overwrite, by the intent's kind."""

    def fill(change: Change) -> None:
        change.write(intent.kind, table, data, options)

    return publish(engine.catalog, intent, Change(engine, intent, fill, [table]))


def create(engine: Engine, intent: Intent, shape: TableShape) -> Commit:
    return _publish_new(engine, intent, shape.name, Change(engine, intent, lambda change: change.create_table(shape)))


def adopt(engine: Engine, intent: Intent, name: str, location: str, key: Sequence[str]) -> Commit:
    """Adopt a foreign Iceberg table. A table that the lake cannot hold is refused before anything exists."""
    catalog = engine.catalog
    check_name(name)
    adopted = read_foreign(catalog.files, location, key, table_id=str(uuid.uuid4()))
    schema = adopted.metadata.schema()
    check_columns(schema)
    if key:
        head_files = [
            entry.data_file.file_path
            for manifest in catalog.files.manifests(adopted.manifest_list)
            for entry in catalog.files.entries(manifest)
        ]
        twice = find_duplicates(catalog.storage, head_files, key_fields(schema))
        if twice:
            raise Invalid(
                "the table has a key more than once",
                table=name,
                examples="; ".join(twice),
                advice="Adopt it without a key, or with columns that are unique.",
            )
    return _publish_new(engine, intent, name, Change(engine, intent, lambda change: change.adopt(name, adopted)))


def _publish_new(engine: Engine, intent: Intent, name: str, change: Change) -> Commit:
    """Publish a new table. Who expects a version gets Conflict, not Invalid, if the name was taken since then."""
    expected = intent.expecting((), free=[name])
    check_riders(engine.catalog, intent, expected)
    try:
        return publish(engine.catalog, intent, change)
    except Invalid:
        check_riders(engine.catalog, intent, expected)
        raise


def check_order(on_duplicate: str | None, order: str | None) -> str | None:
    """The column that decides between rows of one key, if the caller gave one."""
    if on_duplicate not in (None, "last"):
        raise Invalid("unknown value of on_duplicate", on_duplicate=on_duplicate, advice='Use "last", or leave it out.')
    if (on_duplicate is None) != (order is None):
        raise Invalid(
            'on_duplicate="last" and order must be used together',
            advice="Name the column that decides which row is the last.",
        )
    return order


def count_update(engine: Engine, head: Head, options: WriteOptions) -> dict[str, Json]:
    """The rows that an update would look at now, and the files that hold them; `Invalid` if it cannot be done."""
    metadata = engine.catalog.files.metadata(head.metadata_location)
    assigned = check_assigned(head.table, schema_of(metadata, head), options.assigned)
    counted = count_where(engine, head, options.where or "")
    del counted["files_dropped"]
    return {**counted, "set": {one.column: one.expression for one in assigned}}


def count_where(engine: Engine, head: Head, where: str) -> dict[str, Json]:
    """The rows that a delete by this condition would remove now, and the files that hold them. Writes nothing (I17)."""
    catalog = engine.catalog
    metadata = catalog.files.metadata(head.metadata_location)
    schema = schema_of(metadata, head)
    condition = Where.parse(where, schema)
    runner = Runner(engine.storage, engine.sessions, "plan")
    runner.check(condition, schema)
    files = {file.path: file for file in select_files(catalog.files, head, schema, condition).files}
    if condition.plain:
        target = StageTarget.to_read(schema, catalog.storage)
        rewrite = Rewrite(target, BY_WHERE, where=where, look_only=True)
        result = runner.run(rewrite, [InputFile.of(file) for file in files.values()])
        counts = {file.path: file.matched for file in result.files if file.matched}
    else:
        arrow = True if has_renamed_columns(metadata) else None
        searched = Searched(list(files), schema, catalog.storage.options, arrow)
        counts = count_positions(engine.sessions.get(), condition, searched)
    return {
        "table": head.table,
        "where": where,
        "version": catalog.history.resolve(branch=head.branch),
        "rows": sum(counts.values()),
        "rows_total": head.rows,
        "files": len(counts),
        "files_dropped": sum(1 for path, rows in counts.items() if rows == files[path].rows),
        "files_total": head.files,
        "bytes": sum(files[path].size_bytes for path in counts),
    }
