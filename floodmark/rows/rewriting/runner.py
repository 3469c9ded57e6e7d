"""The rewrites of one operation, in the caller's process or as Spark tasks (rows/tasks.py): one rewriter for both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema

from floodmark import clock
from floodmark.model import FileRecord
from floodmark.rows.arrays import Numbers
from floodmark.rows.rewriting.rewrite import BY_KEY, InputFile, Result, Rewrite, Rewriter, pack_positions
from floodmark.rows.session import Sessions
from floodmark.rows.sql.where import Where
from floodmark.rows.tasks import collect_tagged, is_little, run_files
from floodmark.storage import Storage, join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from floodmark.commit.fills import Fill
    from floodmark.rows.rewriting.assign import Assigned, AssignPlan
    from floodmark.rows.staging.stage import StageTarget

LOOKS_AT_ONCE = 8


class Runner:
    """Runs rewrites for one operation. `used_spark`: whether tasks may have left files behind."""

    def __init__(self, storage: Storage, sessions: Sessions, operation: str) -> None:
        self._storage = storage
        self._sessions = sessions
        self._tag = f"floodmark-{operation}"
        self.used_spark = False

    def run(self, rewrite: Rewrite, sources: Sequence[InputFile]) -> Result:
        if not sources:
            return Result()
        # Before they run: tasks that failed may have left files behind too.
        self.used_spark |= not is_little(sum(one.rows for one in sources), sum(one.size_bytes for one in sources))
        found, _ = run_files(
            self._sessions,
            sources,
            lambda sources: [self._run_here(rewrite, sources)],
            partial(_rewrite_task, rewrite),
            tag=self._tag,
            message="Spark could not rewrite the table's files",
        )
        result = Result()
        for part in found:
            result += part
        return result

    def _run_here(self, rewrite: Rewrite, sources: Sequence[InputFile]) -> Result:
        rewriter = Rewriter(rewrite, self._storage)
        if rewrite.find == BY_KEY and len(sources) > LOOKS_AT_ONCE:
            # Most files hold none of the keys: the check mostly waits for storage, which many threads can do at once.
            looking = rewriter if rewrite.look_only else Rewriter(replace(rewrite, look_only=True), self._storage)
            looked = looking.look_at_all(sources, LOOKS_AT_ONCE)
            if rewrite.look_only:
                return Result(looked)
            sources = [source for source, found in zip(sources, looked, strict=True) if found.matched]
        try:
            # One barrier for all files.
            with self._storage.together():
                files = [rewriter.rewrite(source) for source in sources]
                completed = rewriter.complete()
                deletions = rewriter.finish()
        except BaseException:
            rewriter.abandon()
            raise
        return Result(files, [] if deletions is None else [deletions], completed)

    def fill(
        self,
        target: StageTarget,
        sources: Sequence[InputFile],
        fills: Sequence[Fill],
        *,
        table: str,
        source_schema: Schema,
        tables: Callable[[str], DataFrame],
    ) -> tuple[FileRecord, ...]:
        """Files of the target with the rows of the sources, and with these columns filled."""
        from floodmark.rows.rewriting.fill import run_fill

        try:
            filled, used_spark = run_fill(
                self._storage,
                self._sessions,
                self._tag,
                target,
                sources,
                fills,
                table=table,
                source_schema=source_schema,
                tables=tables,
            )
        except BaseException:
            self.used_spark = True  # perhaps: an error in the middle does not report it
            raise
        self.used_spark |= used_spark
        return filled.records

    def assign(self, plan: AssignPlan, sources: Sequence[InputFile], *, arrow: bool | None = None) -> Assigned:
        """Files of new values for the rows that match, and where each of them is."""
        from floodmark.rows.rewriting.assign import run_assign

        try:
            assigned, used_spark = run_assign(self._storage, self._sessions, self._tag, plan, sources, arrow=arrow)
        except BaseException:
            self.used_spark = True  # perhaps: an error in the middle does not report it
            raise
        self.used_spark |= used_spark
        return assigned

    def check(self, where: Where, schema: Schema) -> None:
        """Refuse a condition that cannot be evaluated on this table, before any file is read. Runs no job."""
        if not where.plain:
            from floodmark.rows.sql.where import check_where

            check_where(self._sessions.get(), where, schema)

    def find_positions(
        self, where: Where, files: Sequence[str], schema: Schema, folder: str, *, arrow: bool | None = None
    ) -> Mapping[str, Sequence[str]]:
        """Spark finds the rows that match; returns the objects that hold their positions, for each file that has any.

        For conditions that only Spark can evaluate. The positions stay in the operation's folder until it ends.
        """
        from floodmark.rows.sql.where import Searched, spark_positions

        self.used_spark = True
        options = self._storage.options
        matches = spark_positions(self._sessions.get(), where, Searched(files, schema, options, arrow))

        def store(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return _store_positions(batches, folder, options)

        stored = matches.mapInArrow(store, "file string, location string")
        found: dict[str, list[str]] = defaultdict(list)
        for row in collect_tagged(stored, self._tag, "Spark could not evaluate the condition"):
            found[row["file"]].append(row["location"])
        return found


def _rewrite_task(rewrite: Rewrite, sources: Sequence[InputFile]) -> list[Result]:
    storage = Storage(rewrite.target.storage_options)
    rewriter = Rewriter(rewrite, storage, in_task=True)
    try:
        with storage.batch():
            files = [rewriter.rewrite(source) for source in sources]
            completed = rewriter.complete()
            deletions = rewriter.finish()
    except BaseException:
        rewriter.abandon()
        raise
    return [Result(files, [] if deletions is None else [deletions], completed)]


def _store_positions(
    batches: Iterator[pa.RecordBatch], folder: str, options: dict[str, str]
) -> Iterator[pa.RecordBatch]:
    """Write the positions of one task's rows, an object per file and so many rows."""
    storage = Storage(options)
    waiting: dict[str, list[Numbers]] = defaultdict(list)

    def flush() -> Iterator[pa.RecordBatch]:
        with storage.batch():
            for file, parts in waiting.items():
                location = join(folder, f"{clock.new_id()}.positions")
                storage.put(location, pack_positions(np.sort(np.concatenate(parts))).encode())
                yield pa.RecordBatch.from_pylist([{"file": file, "location": location}])
        waiting.clear()

    rows = 0
    for batch in batches:
        files = batch.column(0).dictionary_encode()
        for code, file in enumerate(files.dictionary.to_pylist()):
            mask = pc.equal(files.indices, code)
            waiting[file].append(batch.column(1).filter(mask).to_numpy(zero_copy_only=False).astype(np.int64))
        rows += len(batch)
        if rows >= 4_000_000:
            yield from flush()
            rows = 0
    yield from flush()
