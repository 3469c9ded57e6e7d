"""Many small data files into few, with the same rows: copied, sorted, written, read back and proved.

A group of files becomes files of its own, all settled: every row keeps its sequence, its own or the one it inherited
from its file (I6). The rows read and the rows read back from storage have the same checksum, or it is `Corrupt` and the
new files are deleted again. A source with another row count than in the catalog is `Corrupt` too. Sources are never
changed. Memory follows the batch and the limit for sorting, not the group (I14).

The same function runs in the caller's process and in Spark tasks. A crash leaves files in the operation's own folder
that nothing refers to (I3).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
from pyiceberg.schema import Schema

from floodmark import clock
from floodmark.errors import Corrupt, FloodmarkError
from floodmark.model import FileRecord
from floodmark.rows.checksum import RowChecksum
from floodmark.rows.reading.arrow_reader import read_rows
from floodmark.rows.rewriting.merge_sort import sorted_batches
from floodmark.rows.rewriting.rewrite import InputFile
from floodmark.rows.session import Sessions
from floodmark.rows.staging.stage import StageTarget, stage_batches
from floodmark.rows.tasks import run_files
from floodmark.storage import Storage, join

SORT_BYTES_MAX = 128 * 1024 * 1024
# Small files come in small batches; work on a batch costs the same for more rows.
_BATCH_ROWS = 64 * 1024
_BATCH_BYTES = 4 * 1024 * 1024
_ADVICE = "Nothing was changed. Run `floodmark doctor`."


@dataclass(frozen=True)
class Group:
    """Files that become few; plain values, so that it can be sent to executors."""

    number: int
    sources: tuple[InputFile, ...]

    @property
    def rows(self) -> int:
        return sum(source.rows for source in self.sources)

    @property
    def size_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)


@dataclass(frozen=True)
class Gathered:
    """The result for one group: the new files, and the checksum of the rows that the sources and they hold."""

    number: int
    records: tuple[FileRecord, ...]
    rows: int
    checksum: str


def run_groups(
    storage: Storage,
    sessions: Sessions,
    tag: str,
    target: StageTarget,
    groups: Sequence[Group],
    *,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[Gathered], bool]:
    """Gather all groups, in this process if they are small, else as Spark tasks; and whether Spark was used.

    `progress` gets the number of groups that are done: after each in this process, once at the end with Spark.
    """
    done = 0

    def here(groups: Sequence[Group]) -> Iterator[Gathered]:
        nonlocal done
        for group in groups:
            yield gather(target, group, storage)
            done += 1
            if progress is not None:
                progress(done)

    # A task for each group: they are large enough.
    found, used_spark = run_files(
        sessions,
        groups,
        here,
        partial(_gather_task, target),
        tag=tag,
        message="Spark could not gather the table's files",
        tasks_max=max(1, len(groups)),
    )
    if used_spark:
        found = sorted(found, key=lambda one: one.number)
        if [one.number for one in found] != sorted(group.number for group in groups):
            raise Corrupt("Spark did not give one result for every group", groups=len(groups), results=len(found))
        if progress is not None:
            progress(len(found))
    return found, used_spark


def _gather_task(target: StageTarget, groups: Sequence[Group]) -> Iterator[Gathered]:
    for group in groups:
        yield gather(target, group, Storage(target.storage_options), in_task=True)


def gather(
    target: StageTarget,
    group: Group,
    storage: Storage,
    *,
    in_task: bool = False,
    sort_bytes: int = SORT_BYTES_MAX,
) -> Gathered:
    """Write the rows of all sources to as few files as their size allows, and read them back to prove it."""
    # Files that lack a column stay without it, and are never gathered with others (commit/fills.py).
    lacks = {source.absent for source in group.sources}
    if len(lacks) > 1:
        raise ValueError("a group mixes files that lack a column with others")
    settled = replace(target, settled=True).without(*lacks or [()])
    name = clock.new_id()
    try:
        return _gather(settled, group, storage, name, in_task, sort_bytes)
    except BaseException:
        _delete(storage, target.folder, name)
        raise


def _gather(target: StageTarget, group: Group, storage: Storage, name: str, in_task: bool, sort_bytes: int) -> Gathered:
    shape = target.shape()
    before = RowChecksum()
    rows = _take_rows(storage, group, shape.schema, before)
    options = target.options(shape)
    columns = dict(zip(shape.file_schema.names, (field.name for field in shape.fields), strict=True))
    keys = [(columns[column], direction) for column, direction in options.sort]
    if keys:
        # Rows are held twice while a run of them is put in order.
        rows = sorted_batches(rows, keys, sort_bytes // 2)
        # The rows come sorted: sorting every row group again would change nothing.
        target = replace(target, sort_json=None)
    with closing(rows):
        pieces = _cut(rows, options.row_group_bytes)
        staged = stage_batches(target, pieces, name, storage=storage, in_task=in_task)
    if staged.problems:
        raise Corrupt(
            "data files have rows that do not fit their table",
            files=_some(source.path for source in group.sources),
            cause=staged.problems[0],
            advice=_ADVICE,
        )
    after = RowChecksum()
    for record in staged.records:
        # Without a sequence to inherit: a row that lost its own is another row.
        for batch in _larger(read_rows(storage, record.path, shape.schema, True, None)):
            after.add(batch)
    if after != before:
        raise Corrupt(
            "the written rows differ from the rows that were read",
            files=_some(source.path for source in group.sources),
            rows=after.rows,
            rows_expected=before.rows,
            checksum=after.hexdigest(),
            checksum_expected=before.hexdigest(),
            advice=_ADVICE,
        )
    return Gathered(group.number, staged.records, before.rows, before.hexdigest())


def _take_rows(
    storage: Storage, group: Group, schema: Schema, checksum: RowChecksum
) -> Generator[pa.RecordBatch, None, None]:
    """The rows of all sources with their sequences, added to the checksum as they were read."""
    for batch in _larger(_rows_of(storage, group, schema)):
        checksum.add(batch)
        yield batch


def _rows_of(storage: Storage, group: Group, schema: Schema) -> Iterator[pa.RecordBatch]:
    for source in group.sources:
        rows = 0
        for batch in read_rows(storage, source.path, schema, True, source.sequence):
            rows += len(batch)
            yield batch
        if rows != source.rows:
            raise Corrupt(
                "a data file does not have the number of rows in the catalog",
                file=source.path,
                rows=rows,
                rows_expected=source.rows,
                advice=_ADVICE,
            )


def _larger(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches, as long as these stay small in memory."""
    waiting: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if waiting and (rows + len(batch) > _BATCH_ROWS or size_bytes + batch.nbytes > _BATCH_BYTES):
            yield _joined(waiting)
            waiting, rows, size_bytes = [], 0, 0
        waiting.append(batch)
        rows += len(batch)
        size_bytes += batch.nbytes
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _cut(batches: Iterable[pa.RecordBatch], bytes_max: int) -> Iterator[pa.RecordBatch]:
    """The same rows, without copying, in batches that are no larger than a row group: where files can end."""
    for batch in batches:
        rows = max(1, len(batch) * bytes_max // max(1, batch.nbytes))
        for start in range(0, len(batch), rows):
            yield batch.slice(start, rows)


def _some(paths: Iterable[str]) -> str:
    first, *others = paths
    return f"{first} and {len(others)} more" if others else first


def _delete(storage: Storage, folder: str, name: str) -> None:
    """Delete what was written under this name, best effort: the operation's undo deletes the rest with its folder."""
    with suppress(FloodmarkError):
        for entry in list(storage.list(folder)):
            if entry.location.startswith(join(folder, f"{name}-")):
                storage.delete(entry.location)
