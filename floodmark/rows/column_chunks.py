"""Where the column chunks of a Parquet file are, and fetching those of some row groups in few requests.

Pyarrow reads a chunk or a few neighbours at a time, one after the other. On object storage each is a round trip, so
what will be read is fetched before it reads: then all of it is in memory. On a local disk nothing happens. A chunk that
was not fetched, or not whole, costs a request and never an answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow.parquet as pq

from floodmark.storage import RangeReader


def chunk_start(chunk: pq.ColumnChunkMetaData) -> int:
    """The offset of a column chunk's first page, its dictionary if it has one."""
    offset = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset < offset:
        offset = chunk.dictionary_page_offset
    return int(offset)


def prefetch(
    stream: RangeReader, metadata: pq.FileMetaData, groups: Sequence[int], columns: Collection[str] | None
) -> None:
    """Fetch what reading these columns (None: all) of these row groups needs; the caller bounds their bytes (I14)."""
    if not stream.is_remote:
        return
    tops = [metadata.schema.column(at).path.split(".", 1)[0] for at in range(metadata.num_columns)]
    wanted = [at for at, top in enumerate(tops) if columns is None or top in columns]
    chunks = (metadata.row_group(group).column(at) for group in groups for at in wanted)
    stream.prefetch([(chunk_start(chunk), int(chunk.total_compressed_size)) for chunk in chunks])
