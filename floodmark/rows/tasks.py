"""Work on files as Spark tasks: one text in, some texts out, no rows pass through the driver.

Each piece of work is one task of its own, on any kind of Spark. A task that is repeated, or runs twice, writes under
names of its own; only what the driver received counts (I3). A task's Invalid or Corrupt is raised as such in the
driver; Spark retries other errors. If the driver stops waiting, the tasks are stopped by their tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from floodmark.errors import Corrupt, FloodmarkError, Invalid
from floodmark.rows.failures import spark_job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_KINDS: dict[str, type[FloodmarkError]] = {"Invalid": Invalid, "Corrupt": Corrupt}


def run_tasks(
    spark: SparkSession, work: Callable[[str], Iterator[str]], tasks: Sequence[str], *, tag: str, message: str
) -> list[str]:
    """The texts that `work` returned for all tasks, in no order. `message` begins the message of an error of Spark."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _texts(_guarded(work, tasks[number]))

    # A partition for every number: no shuffle decides which task does what.
    numbers = spark.range(0, len(tasks), 1, len(tasks))
    results = [row["body"] for row in collect_tagged(numbers.mapInArrow(run, "body string"), tag, message)]
    for result in results:
        if result.startswith("error:"):
            error = json.loads(result.removeprefix("error:"))
            raise _KINDS[error["kind"]](error["message"], advice=error["advice"], **error["facts"])
    return results


def _guarded(work: Callable[[str], Iterator[str]], task: str) -> list[str]:
    try:
        return list(work(task))
    except (Invalid, Corrupt) as error:
        return ["error:" + json.dumps(error.as_dict())]


def _texts(texts: list[str]) -> Iterator[pa.RecordBatch]:
    if texts:
        yield pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], names=["body"])


def collect_tagged(df: DataFrame, tag: str, message: str) -> list[Any]:
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
