"""Which data files of a table a read has to open, found from partitions and statistics alone.

Manifests that cannot hold a match, by what the manifest list says of them, are not opened; of the others the files are
tested all at once, as columns. A file is left out only if it is proven that no row of it matches the condition; the
condition is still applied to the rows that are read. So a selection that is too large costs time, never an answer. The
files of incoming keys (write/prune.py) are found by the same comparison of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from floodmark.commit.file_columns import ABSENT, FileColumns, PlannedDataFile
from floodmark.commit.live_files import LiveFile, is_empty, newest_in, seq_field_id
from floodmark.commit.metadata import MetadataFiles
from floodmark.model import SEQ_COLUMN, Head
from floodmark.rows.sql.file_test import Mask, Span, file_spans, listed_span
from floodmark.rows.sql.where import Where

# With more ranges than this, files are compared with what is around them all.
RANGES_MAX = 500


@dataclass(frozen=True)
class Selection:
    """The files to open, in the order of the manifests, and what the whole table has.

    Of its manifests, `skipped` could not hold a match; `read` were asked for their files.
    """

    files: Sequence[LiveFile]
    all_files: int
    all_bytes: int
    manifests_read: int
    manifests_skipped: int


def select_files(files: MetadataFiles, head: Head, schema: Schema, where: Where | None = None) -> Selection:
    """The files of a table at a state that may hold a matching row; without a condition, all of them."""
    listed = files.manifests(head.manifest_list)
    manifests = [manifest for manifest in listed if not is_empty(manifest)]
    seq_id, found = seq_field_id(schema), list[LiveFile]()
    if where is None:
        for manifest in manifests:
            found += _live(columns := files.columns(manifest), np.ones(columns.count, np.bool_), seq_id)
        return Selection(found, head.files, head.size_bytes, len(manifests), len(listed) - len(manifests))
    metadata = files.metadata(head.metadata_location)
    held = where.which_may_hold(manifests, metadata)
    for manifest, may in zip(manifests, held, strict=True):
        if may:
            columns = files.columns(manifest)
            found += _live(columns, where.which_may_match(columns, metadata), seq_id)
    return Selection(found, head.files, head.size_bytes, sum(held), len(listed) - sum(held))


def select_newer(files: MetadataFiles, head: Head, schema: Schema, since: int, until: int) -> list[LiveFile]:
    """The files of a table at a state that may hold a row with a sequence in (since, until]."""
    seq_id, found = seq_field_id(schema), list[LiveFile]()
    for manifest in files.manifests(head.manifest_list):
        if newest_in(manifest) > since:
            columns = files.columns(manifest)
            found += _live(columns, _may_be_newer(columns, seq_id, since, until), seq_id)
    return found


def select_overlapping(
    files: Sequence[LiveFile], fields: Sequence[NestedField], ranges: Sequence[Span], count: int
) -> list[LiveFile]:
    """Those of the files that may hold a row whose values are all in one of `count` ranges: a span for each field."""
    spans = [listed_span([file.data_file for file in files], field) for field in fields]
    return [files[at] for at in np.flatnonzero(overlapping(spans, ranges, count, len(files))).tolist()]


def overlapping(spans: Sequence[Span], ranges: Sequence[Span], count: int, places: int) -> Mask:
    """Where a row may be whose values are all in one of `count` ranges: `spans` are of files, or of row groups."""
    if count > RANGES_MAX:
        ranges, count = [one.around() for one in ranges], 1
    found: Mask = np.zeros(places, np.bool_)
    for at in range(count):
        inside: Mask = np.ones(places, np.bool_)
        for span, one in zip(spans, ranges, strict=True):
            inside &= span.within(*one.ends(at))
        found |= inside
    return found


def _live(columns: FileColumns, which: Mask, seq_id: int | None) -> list[LiveFile]:
    places = np.flatnonzero(which).tolist()
    return [LiveFile(PlannedDataFile(columns, at), columns.sequence(at), seq_id) for at in places]


def _may_be_newer(columns: FileColumns, seq_id: int | None, since: int, until: int) -> Mask:
    """As `LiveFile.seq_bounds` has it: a fresh file has one sequence, a settled one those in its bounds."""
    own = columns.sequences
    by_file = (own == ABSENT) | ((own > since) & (own <= until))
    everywhere: Mask = np.ones(columns.count, np.bool_)
    facts = None if seq_id is None else columns.columns.get(seq_id)
    if seq_id is None or facts is None:
        fresh: Mask = np.ones(1, np.bool_) if seq_id is None else columns.counted
        everywhere &= by_file | ~fresh
        return everywhere
    span = file_spans(columns)(NestedField(seq_id, SEQ_COLUMN, LongType(), required=False))
    fresh = np.where(facts.values == ABSENT, columns.counted, facts.values == facts.nulls)
    settled = (facts.values != ABSENT) & (facts.values == columns.rows) & (facts.nulls == 0)
    by_bounds = everywhere if span is None else span.within(pa.scalar(since + 1), pa.scalar(until))
    everywhere &= np.where(fresh, by_file, ~settled | by_bounds)
    return everywhere
