"""What a change would do, counted and not done: for commands that show their plan first. Writes nothing (I17)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from floodmark.commit.live_files import live_files
from floodmark.commit.metadata import has_renamed_columns, schema_of
from floodmark.engine import Engine
from floodmark.model import Head
from floodmark.rows.rewriting.rewrite import BY_WHERE, Rewrite, Source
from floodmark.rows.rewriting.runner import Runner
from floodmark.rows.sql.where import Where, count_positions
from floodmark.rows.staging.stage import StageTarget

if TYPE_CHECKING:
    pass


def count_where(engine: Engine, head: Head, where: str) -> dict[str, Any]:
    """The rows that a condition matches now, and the files that hold them."""
    catalog = engine.catalog
    metadata = catalog.files.metadata(head.metadata_location)
    schema = schema_of(metadata, head)
    condition = Where.parse(where, schema)
    runner = Runner(engine.storage, engine.sessions, "plan")
    runner.check(condition, schema)
    files = {file.path: file for file in live_files(catalog.files, head, schema) if condition.may_match(file, metadata)}
    if condition.plain:
        target = StageTarget("", schema.model_dump_json(), "", storage_options=catalog.storage.options)
        rewrite = Rewrite(target, BY_WHERE, where=where, look_only=True)
        result = runner.run(rewrite, [Source.of(file) for file in files.values()])
        counts = {file.path: file.matched for file in result.files if file.matched}
    else:
        options, arrow = catalog.storage.options, True if has_renamed_columns(metadata) else None
        counts = count_positions(
            engine.sessions.get(), condition, list(files), schema, storage_options=options, arrow=arrow
        )
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
