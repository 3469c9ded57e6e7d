"""One step of a change: a verb of the caller, how it treats rows, and its rows as staged files or a remover of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata

from floodmark.catalog.riders import Rider
from floodmark.commit.fills import Fill, absent_fields, fills_of
from floodmark.commit.live_files import LiveFile
from floodmark.model import FileRecord, Head, Row
from floodmark.rows.rewriting.rewrite import InputFile, Result
from floodmark.rows.rewriting.runner import Runner
from floodmark.rows.staging.stage import StageTarget
from floodmark.write.options import DEFAULT, WriteOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from floodmark.rows.frames import DataFrame
    from floodmark.rows.staging.bundle import Bundle

# The rows of a write, as callers give them; pandas, too, which has no types to name here.
IncomingRows: TypeAlias = "Iterable[Row] | pa.Table | pa.RecordBatch | pa.RecordBatchReader | DataFrame | Bundle"

APPEND, MERGE, DELETE, OVERWRITE, RETAIN = "append", "merge", "delete", "overwrite", "retain"
UPDATE = "update"
# The rows that come with it are keys, staged as files of key columns.
DELETE_KEYS = "delete_keys"


@dataclass(frozen=True)
class TableState:
    """A table at one head, and what is needed to read its files and to write others."""

    head: Head
    metadata: TableMetadata
    schema: Schema
    files: Sequence[LiveFile]
    runner: Runner
    target: StageTarget

    def source(self, file: LiveFile) -> InputFile:
        """The file as a source to read or to rewrite."""
        return InputFile.of(file, absent=absent_fields(file, self._fills, self.schema))

    @cached_property
    def _fills(self) -> tuple[Fill, ...]:
        return fills_of(self.metadata.properties, self.schema)


@dataclass(frozen=True)
class Removed:
    """What is removed from a table: whole files, unopened, and rows of others, which were rewritten."""

    dropped: tuple[LiveFile, ...] = ()
    results: tuple[Result, ...] = ()

    @property
    def rows(self) -> int:
        rewritten = (file.removed for result in self.results for file in result.files)
        return sum(file.rows for file in self.dropped) + sum(rewritten)


class Remover(Protocol):
    """Removes rows from a table by its own rules. It is called again for every state that the change is planned on."""

    def remove(self, table: TableState) -> Removed: ...

    def recheck(self, table: TableState) -> None:
        """The table is at another head than planned, with all files that were read: raise PlanAgain if it matters."""

    def riders(self) -> tuple[Rider, ...]:
        """What must hold in the publish for the newest plan."""


@dataclass(frozen=True)
class PartialRows:
    """Rows of a partial merge that all have the same columns, which are those of `schema`, as they were staged."""

    schema: Schema
    records: tuple[FileRecord, ...]

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(column.field_id for column in self.schema.fields)


@dataclass(frozen=True)
class WriteStep:
    """One verb of the caller: its rows as they were staged, for which schema, and what to do with them."""

    verb: str
    options: WriteOptions = DEFAULT
    incoming: tuple[FileRecord, ...] = ()
    schema: Schema | None = None
    # The spec that the rows were staged for, and the table's own schema then: it shows which ids of `schema` are its.
    spec_id: int | None = None
    planned: Schema | None = None
    # Of a partial merge: `incoming`, by the columns that each file holds.
    parts: tuple[PartialRows, ...] = ()

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """For each incoming file of a partial merge, the ids of its columns."""
        return tuple(part.held for part in self.parts for _ in part.records)

    @property
    def rows(self) -> int:
        return sum(record.rows for record in self.incoming)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(record.path for record in self.incoming)
