"""One task on every executor, before rows depend on them: does it have the same version of Floodmark, and can it write?

Spark has no call for "every executor". So as many tasks as run at once are started, and each keeps its slot until all
of them had the time to begin: every executor gets one. A task reports a value, also where Floodmark is missing: its
function is sent by value and imports nothing of ours before that check.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from floodmark.errors import FloodmarkError
from floodmark.rows.reading.parts import task_slots
from floodmark.rows.tasks import collect_tagged
from floodmark.storage import local_path
from floodmark.storage.probe import impatient, probe_writing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How long a task holds its slot: the others are launched and their Python started within that.
HOLD_S = 2.0
SLOTS_MAX = 4096
# Executors register one after the other: they are asked again until none is new.
ROUNDS_MAX = 5


@dataclass(frozen=True)
class Executor:
    """What one executor answered. `problem` is empty if it can work for this lake."""

    host: str
    name: str
    version: str
    problem: str


def ask_executors(
    spark: SparkSession, version: str, root: str, options: Mapping[str, str], hold_s: float = HOLD_S
) -> list[Executor]:
    """Every executor that has a slot, as its task reports it; `version` is the Floodmark of the caller."""
    storage_options = dict(options)

    # A function inside a function is sent by value: executors without Floodmark can run it.
    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import json
        import os
        import socket
        import time

        import pyarrow

        for _ in batches:
            pass
        began_s = time.monotonic()
        # Each executor has a folder of its own for its blocks: it distinguishes executors that share a host.
        found = {"host": socket.gethostname(), "name": os.environ.get("SPARK_LOCAL_DIRS", ""), "version": ""}
        try:
            from floodmark.version import __version__

            found["version"] = __version__
        except Exception as error:  # noqa: BLE001 - any error is the answer
            found["problem"] = f"Floodmark cannot be imported there ({type(error).__name__}: {error})"
        else:
            if __version__ == version:
                from floodmark.rows.executors import writing_problem

                found["problem"] = writing_problem(root, storage_options)
            else:
                found["problem"] = f"Floodmark {__version__} is installed there, and {version} here"
        time.sleep(max(0.0, hold_s - (time.monotonic() - began_s)))
        texts = pyarrow.array([json.dumps(found)], pyarrow.string())
        yield pyarrow.RecordBatch.from_arrays([texts], names=["body"])

    known: dict[tuple[str, str], Executor] = {}
    for _ in range(ROUNDS_MAX):
        slots = min(task_slots(spark), SLOTS_MAX)
        answers = spark.range(0, slots, 1, slots).mapInArrow(answer, "body string")
        rows = collect_tagged(answers, "floodmark-executors", "Spark does not answer")
        found = [Executor(**json.loads(row["body"])) for row in rows]
        before = len(known)
        # One line for each executor, the one with a problem if its tasks differ.
        known |= {(one.host, one.name): one for one in sorted(found, key=lambda one: one.problem)}
        if len(known) == before:
            break
    return sorted(known.values(), key=lambda one: (one.host, one.name))


def writing_problem(root: str, options: Mapping[str, str]) -> str:
    """Why this process cannot write below the lake's root; empty if it can."""
    folder = local_path(root)
    if folder is not None and not os.path.isdir(folder):
        return f"the lake's folder {folder} is not on this host: use storage that all hosts share"
    try:
        probe_writing(impatient(options), root)
    except FloodmarkError as error:
        return str(error)
    return ""
