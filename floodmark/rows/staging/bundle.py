"""Several DataFrames with the same columns, staged by one Spark job: each has files of its own.

A job costs far more than a few thousand rows do, and so does each of its tasks: parts share tasks, as many as there are
cores. Rows of a part follow one another in a task, so one file at a time is open. Only the records that came back count
(I3), as with any other staging.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from floodmark import clock
from floodmark.model import FileRecord
from floodmark.rows.frames import RowsLike, is_dataframe
from floodmark.rows.staging.stage import (
    StageTarget,
    check_dataframe,
    run_stage_tasks,
    stage_batches,
    task_name,
    task_report,
)
from floodmark.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PART = "part"


class Bundle:
    """Rows of several parts. `records` are the files of each part, in the order of the parts, once they are staged."""

    def __init__(self, frames: Sequence[DataFrame]) -> None:
        self._frames = frames
        self.records: list[tuple[FileRecord, ...]] = []

    @staticmethod
    def is_possible(frames: Sequence[RowsLike]) -> bool:
        """Whether these are DataFrames of one session with the same columns."""
        found = [frame for frame in frames if is_dataframe(frame)]
        if len(found) != len(frames):
            return False
        first = found[0]
        return all(frame.sparkSession is first.sparkSession and frame.schema == first.schema for frame in found)

    def stage(self, target: StageTarget, operation_id: str) -> list[FileRecord]:
        """Stage all parts with tasks on executors; the driver keeps the records only."""
        from pyspark.sql import functions as sf

        names = check_dataframe(target, self._frames[0])
        # As text: Spark writes numbers into the code that it compiles, so that each part would have code of its own.
        parts = [frame.select("*", sf.lit(str(number))) for number, frame in enumerate(self._frames)]
        # By position from here on: a name may hold a dot, or differ from another only in its case.
        columns = [*(f"c{position}" for position in range(len(names))), _PART]
        rows = reduce(lambda one, other: one.unionAll(other), parts).toDF(*columns)
        together = rows.coalesce(_tasks(rows, len(parts)))

        def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return _stage_task(target, names, batches)

        records = run_stage_tasks(target, together, stage, operation_id)
        self.records = [
            tuple(record for part, record in records if part == number) for number in range(len(self._frames))
        ]
        return [record for part in self.records for record in part]


def _tasks(rows: DataFrame, parts: int) -> int:
    """As many as run at once; Connect does not report it."""
    spark = rows.sparkSession
    return spark.sparkContext.defaultParallelism if hasattr(spark, "_jsc") else parts


def _stage_task(target: StageTarget, names: list[str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    storage, prefix = Storage(target.storage_options), task_name()
    for part, rows in groupby(_cut(batches), key=itemgetter(0)):
        named = (batch.rename_columns(names) for _, batch in rows)
        staged = stage_batches(target, named, f"{prefix}{clock.new_id()}", storage=storage, in_task=True)
        yield from task_report(part, staged)


def _cut(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each part by itself, without the column that names it."""
    for batch in batches:
        last, start = batch.num_columns - 1, 0
        runs, rows = pc.run_end_encode(batch.column(last)), batch.remove_column(last)
        for part, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            yield int(part), rows.slice(start, end - start)
            start = end
