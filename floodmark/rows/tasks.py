"""Work on files: few or small ones in the caller's process, many as Spark tasks. No rows pass through the driver.

The same functions run in both places, so that a change of ten rows does not wait for a JVM, and no driver holds a
table. `is_little` is the one threshold, `run_files` the one place that decides by it.

A task gets a list of files, or any other plain value, and gives some results; both are pickled, as Spark does with the
function itself. A task that is repeated, or runs twice, writes under names of its own; only what the driver received
counts (I3). A task's Invalid or Corrupt is raised as such in the driver; Spark retries other errors. If the driver
stops waiting, the tasks are stopped by their tag.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import pyarrow as pa

from floodmark.errors import Corrupt, FloodmarkError, Invalid
from floodmark.rows.failures import spark_job
from floodmark.rows.session import Sessions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

IN_PROCESS_BYTES_MAX = 64 * 1024 * 1024
# Rows that compress well are much work for few bytes.
IN_PROCESS_ROWS_MAX = 2_000_000
TASKS_MAX = 512

_KINDS: dict[str, type[FloodmarkError]] = {"Invalid": Invalid, "Corrupt": Corrupt}


class WorkItem(Protocol):
    """A file, or a group of files, by its size."""

    @property
    def rows(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...


Item = TypeVar("Item", bound=WorkItem)
Task = TypeVar("Task")
Result = TypeVar("Result")


def is_little(rows: int, size_bytes: int) -> bool:
    """Whether files of so many rows and bytes in all are processed in this process."""
    return rows <= IN_PROCESS_ROWS_MAX and size_bytes <= IN_PROCESS_BYTES_MAX


def run_files(
    sessions: Sessions,
    items: Sequence[Item],
    here: Callable[[Sequence[Item]], Iterable[Result]],
    in_task: Callable[[Sequence[Item]], Iterable[Result]],
    *,
    tag: str,
    message: str,
    tasks_max: int = TASKS_MAX,
) -> tuple[list[Result], bool]:
    """The results for all items, in no order, and whether Spark was used.

    `here` gets all items if they are little. Else `in_task` gets some of them in each task; it is sent to executors.
    """
    if is_little(sum(item.rows for item in items), sum(item.size_bytes for item in items)):
        return list(here(items)), False
    # The largest first, dealt out in turn: tasks of about the same size when there are more items than tasks, and the
    # last task to start is not the longest.
    largest = sorted(items, key=lambda item: -item.size_bytes)
    dealt = [largest[start::tasks_max] for start in range(min(tasks_max, len(largest)))]
    return run_tasks(sessions.get(), in_task, dealt, tag=tag, message=message), True


def run_tasks(
    spark: SparkSession, work: Callable[[Task], Iterable[Result]], tasks: Sequence[Task], *, tag: str, message: str
) -> list[Result]:
    """The results of `work` for all tasks, in no order. `message` begins the message of an error of Spark."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _packed(_guarded(work, tasks[number]))

    # A partition for every number: no shuffle decides which task does what.
    numbers = spark.range(0, len(tasks), 1, len(tasks))
    rows = collect_tagged(numbers.mapInArrow(run, "body binary"), tag, message)
    results: list[Result] = []
    for found in (pickle.loads(row["body"]) for row in rows):
        if isinstance(found, _Failed):
            error = json.loads(found.error_json)
            raise _KINDS[error["kind"]](error["message"], advice=error["advice"], **error["facts"])
        results.append(found)
    return results


@dataclass(frozen=True)
class _Failed:
    """An error of a task that is the caller's."""

    error_json: str


def _guarded(work: Callable[[Task], Iterable[Result]], task: Task) -> Sequence[Result | _Failed]:
    try:
        return list(work(task))
    except (Invalid, Corrupt) as error:
        return [_Failed(json.dumps(error.as_dict()))]


def _packed(results: Sequence[Result | _Failed]) -> Iterator[pa.RecordBatch]:
    if results:
        bodies = pa.array([pickle.dumps(result) for result in results], pa.binary())
        yield pa.RecordBatch.from_arrays([bodies], names=["body"])


def collect_tagged(df: DataFrame, tag: str, message: str) -> list[Row]:
    """Run the job under its tag; if this process stops waiting for it, its tasks are stopped too."""
    spark = df.sparkSession
    spark.addTag(tag)
    try:
        with spark_job(spark, message):
            return list(df.collect())
    except FloodmarkError:
        raise
    except BaseException:
        spark.interruptTag(tag)
        raise
    finally:
        spark.removeTag(tag)
