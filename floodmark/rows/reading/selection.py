"""Which data files of a table a read has to open, found from partitions and statistics alone.

A file is left out only if it is proven that no row of it matches the condition; the condition is still applied to the
rows that are read. So a selection that is too large costs time, never an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pyiceberg.schema import Schema

from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import MetadataFiles
from floodmark.model import Head
from floodmark.rows.sql.where import Where


@dataclass(frozen=True)
class Selection:
    """The files to open, in the order of the manifests, and what the whole table has."""

    files: Sequence[LiveFile]
    all_files: int
    all_bytes: int

    @property
    def part(self) -> str:
        """A name for this choice of files, so that two choices are never taken for one; empty if it is all."""
        if len(self.files) == self.all_files:
            return ""
        return "_" + hashlib.sha256("\n".join(file.path for file in self.files).encode()).hexdigest()[:32]


def select_files(files: MetadataFiles, head: Head, schema: Schema, where: Where | None = None) -> Selection:
    """The files of a table at a state that may hold a matching row; without a condition, all of them."""
    live = live_files(files, head, schema)
    metadata = files.metadata(head.metadata_location)
    found = live if where is None else [file for file in live if where.may_match(file, metadata)]
    return Selection(found, len(live), sum(file.size_bytes for file in live))
