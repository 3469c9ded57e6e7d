"""A Spark that lost its executors or its master reports nothing: a job waits without end. This module ends that wait.

While a job runs, a thread checks its progress. A task that runs on a live executor is progress, however long it takes;
so is planning, which needs no executor. If tasks are pending while none runs and none ends, for `stall` seconds, no
executor is alive: the job is interrupted, and the caller gets `Unavailable`. The caller undoes what it staged as after
any error, and the next call gets a newly built session (rows/session.py). A Connect client notices itself that its
server is unreachable, and repeats its requests for `stall` seconds. The executors of the server are the server's
concern: tasks of its other clients, behind which ours may wait, are invisible from here. The checks use StatusTracker,
which a classic session offers to observers. A crash here leaves nothing: the thread holds no state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from floodmark.errors import Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STALL_S = 300.0
# The interval of the checks, at most; a job that ends before the first one is never checked.
LOOK_S = 5.0
# What Spark and its Connect client report for a session that no call can use any more.
_OVER = (
    "stopped SparkContext",
    "SparkContext was shut down",
    "SparkContext has been shutdown",
    "StatusCode.UNAVAILABLE",
    "server side session",
    "SESSION_NOT_FOUND",
    "SESSION_CLOSED",
    "SESSION_CHANGED",
)


@dataclass
class _Rule:
    """How long one session may make no progress; `own`: it was built here, so it may be rebuilt."""

    stall_s: float
    own: bool
    lost: bool = False


# By session and not in it: sessions are Spark's objects, and are released with their last reference.
_rules: WeakKeyDictionary[SparkSession, _Rule] = WeakKeyDictionary()


def is_connect(spark: SparkSession) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect")


def watch_session(spark: SparkSession, stall_s: float, *, own: bool) -> None:
    """From now on, `watched` bounds the waits of this session."""
    _rules[spark] = _Rule(stall_s, own)
    if own and is_connect(spark):
        _bound_retries(spark, stall_s)


def is_lost(spark: SparkSession) -> bool:
    """Whether a call found that this session is unusable. Always False for a session that the caller passed in."""
    rule = _rules.get(spark)
    return rule is not None and rule.lost


@contextmanager
def watched(spark: SparkSession) -> Iterator[None]:
    """A job inside the block that makes no progress for too long is interrupted, and ends in `Unavailable`."""
    rule = _rules.get(spark)
    if rule is None:
        yield
        return
    watch = _Watch(spark, rule)
    try:
        with nullcontext() if is_connect(spark) else watch.running():
            yield
    except Exception as error:
        said = f"{error} {error.__cause__}"
        if rule.own and (watch.stalled or any(words in said for words in _OVER)):
            rule.lost = True
        if watch.stalled:
            raise _stalled(spark, rule) from error
        raise


def _stalled(spark: SparkSession, rule: _Rule) -> Unavailable:
    again = "the next call connects again" if rule.own else "create the Spark session again if this continues"
    return Unavailable(
        "Spark has no live executor: none ran a task of a waiting job",
        master=_master(spark),
        stall_s=round(rule.stall_s),
        advice=f"Check the master and its workers, then try again: nothing was committed, and {again}.",
    )


def _master(spark: SparkSession) -> str | None:
    with suppress(Exception):
        return str(spark.conf.get("spark.master"))
    return None


class _Watch:
    """The observer of one job."""

    def __init__(self, spark: SparkSession, rule: _Rule) -> None:
        self._spark = spark
        self._rule = rule
        self._over = threading.Event()
        self.stalled = False

    @contextmanager
    def running(self) -> Iterator[None]:
        threading.Thread(target=self._run, name="floodmark-spark-watch", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _run(self) -> None:
        waiting: Hashable = None
        since_s = time.monotonic()
        while not self._over.wait(min(LOOK_S, self._rule.stall_s / 4)):
            seen = self._look()
            if seen is None or seen != waiting:
                waiting, since_s = seen, time.monotonic()
            elif time.monotonic() - since_s >= self._rule.stall_s:
                self.stalled = True
                # All jobs: no stage of the context has an executor. `interruptAll` of the session does not reach the
                # job that a reader starts to infer a schema. Again at each check: a query may begin its next job.
                with suppress(Exception):
                    self._spark.sparkContext.cancelAllJobs()

    def _look(self) -> Hashable:
        """None while there is progress; else what waits, so that a later check sees whether it still does."""
        try:
            tracker = self._spark.sparkContext.statusTracker()
            found = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        except Exception:  # noqa: BLE001 - any error: the job itself will report it
            return None
        return what_waits(
            (stage.stageId, stage.numTasks, stage.numActiveTasks, stage.numCompletedTasks) for stage in found if stage
        )


def what_waits(stages: Iterable[tuple[int, int, int, int]]) -> Hashable:
    """The stages (number, tasks, active, completed) if tasks are pending and none is active; else None."""
    known = tuple(stages)
    wanted = any(tasks > completed for _, tasks, _, completed in known)
    active = any(one[2] for one in known)
    return tuple((number, completed) for number, _, _, completed in known) if wanted and not active else None


def _bound_retries(spark: SparkSession, stall_s: float) -> None:
    """A Connect client by itself repeats requests to an unreachable server for ten minutes: here for `stall`."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    pause_ms = max(50, min(5_000, round(stall_s * 1000 / 10)))
    policy = DefaultPolicy(
        max_retries=max(1, round(stall_s * 1000 / pause_ms)),
        initial_backoff=pause_ms,
        max_backoff=pause_ms,
        jitter=0,
        max_server_retry_delay=pause_ms,
    )
    spark.client.set_retry_policies([policy])
