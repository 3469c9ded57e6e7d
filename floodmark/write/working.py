"""A table's files on paper: what a change has planned for them so far, before anything is true.

The live files at the head that was planned on, without those removed and with those staged since. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata

from floodmark.catalog.live import LiveFile, seq_field_id
from floodmark.catalog.manifests import data_file
from floodmark.catalog.seal import CREATE, WRITE, Edit, RemovedFile
from floodmark.errors import Corrupt
from floodmark.model import FileRecord, Head


@dataclass
class WorkingFiles:
    """`needed` were read and stay; `deletions` hold keys that go. Counts are those of the steps, added up."""

    folder: str
    base: dict[str, LiveFile] | None = None
    added: dict[str, FileRecord] = field(default_factory=dict)
    removed: dict[str, LiveFile] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)
    deletions: list[FileRecord] = field(default_factory=list)
    rows_added: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    # The table gets another shape, also if no row comes or goes.
    reshaped: bool = False
    # Files were staged that will not be published.
    leftovers: bool = False

    def copy(self) -> WorkingFiles:
        return replace(
            self,
            added=dict(self.added),
            removed=dict(self.removed),
            needed=set(self.needed),
            deletions=list(self.deletions),
        )

    @property
    def changed(self) -> bool:
        return bool(self.added or self.removed or self.deletions or self.reshaped)

    def add(self, records: Sequence[FileRecord]) -> None:
        check_records(records, self.folder)
        self.added.update({record.path: record for record in records})

    def add_again(self, records: Sequence[FileRecord]) -> None:
        """Files that another operation published, on another branch: under their own paths, in its folder."""
        twice = [record.path for record in records if record.path in self.added or record.path in (self.base or {})]
        if twice or len({record.path for record in records}) != len(records):
            raise Corrupt("a file of the table would be named twice", files=", ".join(twice[:3]))
        self.added.update({record.path: record for record in records})

    def add_deletions(self, records: Sequence[FileRecord]) -> None:
        check_records(records, self.folder)
        self.deletions += records

    def edit(
        self,
        table: str,
        head: Head | None,
        metadata: TableMetadata,
        schema: Schema,
        spec_id: int,
        snapshot: int,
        *,
        checked: bool,
    ) -> Edit:
        """What the door is to do; without a head it makes the table, with this metadata."""
        evolved = head is not None and self.changed and schema.schema_id != head.schema_id
        moved = head is not None and spec_id != head.spec_id
        return Edit(
            action=WRITE if head is not None else CREATE,
            table=table,
            table_id=str(metadata.table_uuid) if head is None else head.table_id,
            location=metadata.location,
            schema_id=head.schema_id if head is not None and not evolved else schema.schema_id,
            spec_id=spec_id,
            snapshot=snapshot if self.changed else None,
            added=tuple(self.added.values()),
            removed=tuple(RemovedFile(file.path, file.rows, file.size_bytes) for file in self.removed.values()),
            needed=tuple(sorted(self.needed - set(self.removed))),
            deletions=tuple(self.deletions),
            rows_added=self.rows_added,
            rows_updated=self.rows_updated,
            rows_deleted=self.rows_deleted,
            checked=checked,
            base_snapshot=None if head is None else head.snapshot,
            schema=schema.model_dump_json() if evolved else None,
            base_schema_id=head.schema_id if head is not None and evolved else None,
            spec=metadata.specs()[spec_id].model_dump_json() if moved else None,
            base_spec_id=head.spec_id if head is not None and moved else None,
            metadata=metadata.model_dump_json(exclude_none=True) if head is None else None,
        )

    def drop(self, file: LiveFile) -> None:
        if self.added.pop(file.path, None) is None:
            self.removed[file.path] = file
        else:
            self.leftovers = True  # staged by an earlier step, and not to be published


def staged_files(
    records: Iterable[FileRecord], metadata: TableMetadata, schema: Schema, spec_id: int
) -> list[LiveFile]:
    """Files that this change has staged, as planning sees them: without a sequence."""
    seq_id = seq_field_id(schema)
    return [LiveFile(data_file(record, metadata, spec_id), None, seq_id) for record in records]


def check_records(records: Sequence[FileRecord], folder: str) -> None:
    """A file is published once, and only from the folder that this operation owns."""
    paths = [record.path for record in records]
    foreign = [path for path in paths if not path.startswith(folder + "/")]
    if foreign or len(set(paths)) != len(paths) or any(record.rows <= 0 for record in records):
        raise Corrupt("staging reported files that are not this operation's own, each once, with rows", folder=folder)
