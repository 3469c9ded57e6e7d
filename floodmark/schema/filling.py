"""The files of a table, rewritten with the defaults of its new columns: once each, however often it is planned.

Rows keep their sequences (I6). A crash leaves files in the operation's own folder that nothing refers to (I3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import absent_fields, fills_of
from floodmark.commit.journal import Operation
from floodmark.commit.live_files import LiveFile
from floodmark.commit.seal import RemovedFile
from floodmark.model import FileRecord, Head
from floodmark.rows.rewriting.rewrite import Source
from floodmark.rows.rewriting.runner import IN_PROCESS_BYTES_MAX, IN_PROCESS_ROWS_MAX, Runner
from floodmark.rows.staging.stage import StageTarget
from floodmark.schema.edits import FilledFiles
from floodmark.schema.tables import TablePlan
from floodmark.write.table import check_records

if TYPE_CHECKING:
    from floodmark.rows.frames import DataFrame


@dataclass(frozen=True)
class _Group:
    """Files that were filled together: they are replaced together, or not."""

    files: tuple[LiveFile, ...]
    records: tuple[FileRecord, ...]

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(file.path for file in self.files)


class Filling:
    """What one operation has filled so far, by table."""

    def __init__(
        self, catalog: Catalog, runner: Runner, operation: Operation, tables: Callable[[str], DataFrame]
    ) -> None:
        self._catalog = catalog
        self._runner = runner
        self._operation = operation
        self._tables = tables
        self._done: dict[str, tuple[StageTarget, list[_Group]]] = {}

    def fill(self, table: TablePlan, head: Head, files: Sequence[LiveFile]) -> FilledFiles:
        """All these files with the table's new columns; files that were filled before are not filled again."""
        target = self._target(table)
        known, groups = self._done.get(table.name, (target, []))
        live = {file.path for file in files}
        # Schema or layout changed, or a file is not live any more: the fill cannot be used.
        groups = [group for group in groups if known == target and group.paths <= live]
        done = frozenset(path for group in groups for path in group.paths)
        for unit in _units([file for file in files if file.path not in done]):
            groups.append(_Group(unit, self._fill(table, target, unit)))
        self._done[table.name] = (target, groups)
        records = tuple(record for group in groups for record in group.records)
        check_records(records, target.folder)
        removed = (RemovedFile(file.path, file.rows, file.size_bytes) for group in groups for file in group.files)
        return FilledFiles(tuple(removed), records)

    def _target(self, table: TablePlan) -> StageTarget:
        assert table.current is not None
        metadata = table.current.metadata
        return StageTarget(
            folder=self._operation.folder(metadata.location, "data"),
            schema_json=table.final_schema.model_dump_json(),
            spec_json=(table.spec or table.current.spec).model_dump_json(),
            sort_json=(table.sort or table.current.sort).model_dump_json(),
            properties={**metadata.properties, **table.properties},
            storage_options=self._catalog.storage.options,
            settled=True,
        )

    def _fill(self, table: TablePlan, target: StageTarget, files: Sequence[LiveFile]) -> tuple[FileRecord, ...]:
        schema = table.final_schema
        fills = fills_of(target.properties, schema)
        return self._runner.fill(
            target,
            [Source.of(file, absent=absent_fields(file, fills, schema)) for file in files],
            table.fills,
            table=table.name,
            source_schema=schema,
            tables=self._tables,
        )


def _units(files: Sequence[LiveFile]) -> list[tuple[LiveFile, ...]]:
    """Few rows are filled here, a file at a time; many are one job for Spark."""
    if not files:
        return []
    rows, size_bytes = sum(file.rows for file in files), sum(file.size_bytes for file in files)
    if rows <= IN_PROCESS_ROWS_MAX and size_bytes <= IN_PROCESS_BYTES_MAX:
        return [(file,) for file in files]
    return [tuple(files)]
