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
from floodmark.errors import Corrupt
from floodmark.model import FileRecord


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
        return bool(self.added or self.removed)

    def add(self, records: Sequence[FileRecord]) -> None:
        check_records(records, self.folder)
        self.added.update({record.path: record for record in records})

    def add_deletions(self, records: Sequence[FileRecord]) -> None:
        check_records(records, self.folder)
        self.deletions += records

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
