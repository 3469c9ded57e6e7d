"""Live files: the data files of a table at one state, as planning sees them.

A file is fresh (its rows have no `_seq` value and inherit the file's data sequence number, which the commit gave it) or
settled (every row has its own). If a file's counts do not prove either, it counts as mixed: it is read row by row and
never pruned by sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.schema import Schema
from pyiceberg.types import LongType

from floodmark.commit.metadata import MetadataFiles
from floodmark.model import BEGINNING, SEQ_COLUMN, Head

_NEWEST = re.compile(r"\.newest-(\d+)\.avro$")


@dataclass(frozen=True)
class LiveFile:
    """`sequence` is None for a file that this change itself has staged: its commit does not exist yet."""

    data_file: DataFile
    sequence: int | None
    seq_id: int | None

    @property
    def path(self) -> str:
        return str(self.data_file.file_path)

    @property
    def rows(self) -> int:
        return int(self.data_file.record_count)

    @property
    def size_bytes(self) -> int:
        return int(self.data_file.file_size_in_bytes)

    @property
    def spec_id(self) -> int:
        return int(self.data_file.spec_id)

    @property
    def fresh(self) -> bool:
        """No row has a `_seq` of its own: the file lacks the column, or holds only nulls in it."""
        if self.seq_id is None:
            return True
        values = (self.data_file.value_counts or {}).get(self.seq_id)
        if values is None:
            # Without any counts nothing is known about the file's columns.
            return bool(self.data_file.value_counts)
        return values == (self.data_file.null_value_counts or {}).get(self.seq_id)

    @property
    def settled(self) -> bool:
        """Every row has a `_seq` of its own."""
        if self.seq_id is None:
            return False
        values = (self.data_file.value_counts or {}).get(self.seq_id)
        nulls = (self.data_file.null_value_counts or {}).get(self.seq_id)
        return values == self.rows and nulls == 0

    def seq_bounds(self) -> tuple[int, int] | None:
        """The lowest and highest sequence of its rows; None if that is not known."""
        if self.fresh:
            return None if self.sequence is None else (self.sequence, self.sequence)
        low = (self.data_file.lower_bounds or {}).get(self.seq_id or 0)
        high = (self.data_file.upper_bounds or {}).get(self.seq_id or 0)
        if not self.settled or low is None or high is None:
            return None
        return int(from_bytes(LongType(), low)), int(from_bytes(LongType(), high))


def seq_field_id(schema: Schema) -> int | None:
    return next((field.field_id for field in schema.fields if field.name == SEQ_COLUMN), None)


def manifest_name(name: str, files: Iterable[LiveFile]) -> str:
    """The name of a manifest of these files; it holds the sequence of their newest row, if that is known.

    A manifest that is rewritten, or that holds carried rows, gets the sequence of the commit that wrote it. By its name
    a reader of new rows can skip it all the same.
    """
    bounds = [file.seq_bounds() for file in files]
    known = [bound[1] for bound in bounds if bound is not None]
    return f"{name}.newest-{max(known)}.avro" if known and len(known) == len(bounds) else f"{name}.avro"


def is_empty(manifest: ManifestFile) -> bool:
    """Whether it only lists what was removed. A list of format v1 may not give the numbers."""
    return (manifest.added_files_count, manifest.existing_files_count) == (0, 0)


def newest_in(manifest: ManifestFile) -> int:
    """No row in the manifest is newer than this: by its name, or by the commit that wrote it."""
    if is_empty(manifest):
        return BEGINNING
    named = _NEWEST.search(manifest.manifest_path)
    return int(named[1]) if named else manifest.sequence_number


def live_files(files: MetadataFiles, head: Head, schema: Schema, since: int = BEGINNING) -> list[LiveFile]:
    """The data files of a table; with `since`, manifests that hold nothing newer are not opened."""
    seq_id = seq_field_id(schema)
    return [
        LiveFile(entry.data_file, entry.sequence_number, seq_id)
        for manifest in files.manifests(head.manifest_list)
        if newest_in(manifest) > since
        for entry in files.entries(manifest)
    ]
