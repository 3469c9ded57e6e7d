"""A probe of a job that is live: what others wait for meanwhile, and how long the job holds the catalog.

The job fills a column in a process of its own. This process asks for the status and merges rows of other keys into the
same table, one after the other, before, while and after; only calls that were under way while the job's own row says
that it ran are `live`, the others are `idle` or, around its start and end, dropped. A live call that hangs keeps the
next ones from being made: those that would have been made count too, each with what was left of the wait. With too few
live calls the probe says nothing, and that is a problem like any other.

Tests run beside others that want the cores too. So what a thread waited for a core is told apart, and judged are the
times without it (`own_s`); that the job itself leaves cores to others is judged by those that it used.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import pyarrow as pa
from sqlalchemy import Connection, event

import floodmark as fm
from floodmark.catalog.database import Database
from floodmark.catalog.jobs import DONE
from floodmark.errors import FloodmarkError
from floodmark.testing.children import Child, preload
from tests.conftest import Place

TABLE = "people"
SCHEMA = "id long not null, name string, amount double"
EXPRESSION = "name"
STATUS, MERGE = "status", "merge"
MERGED_ROWS = 10
SLOWER_MAX = 1.5
HOLD_S_MAX = 0.050
CORES_MAX = 1.0
LIVE_CALLS_MIN = 30
_WRITES = ("INSERT", "UPDATE", "DELETE")

# Of the job: what `lake.backfill.column` takes.
Options = dict[str, Any]
Job = Callable[[Place, str, Options], "Told"]

preload("tests.simulation.probe", "floodmark.backfill.backfills", "floodmark.backfill.columns.column")


def make_table(lake: fm.Lake, files: int, file_rows: int) -> None:
    """Rows whose keys are not those of the probe, in so many files."""
    lake.create_table(TABLE, SCHEMA, key=["id"])
    for number in range(files):
        lake.append(TABLE, _rows(range(number * file_rows, (number + 1) * file_rows), number))


def _rows(ids: range, turn: int) -> pa.Table:
    columns = {
        "id": pa.array(ids, pa.int64()),
        "name": pa.array([f"name {at} {turn}" for at in ids]),
        "amount": pa.array([(at * 7919 + turn) % 1_000_003 / 100 for at in ids]),
    }
    return pa.table(columns)


class Watch:
    """How long something takes in this thread: in all, and without what the thread was ready to run but had no core."""

    def __init__(self) -> None:
        self._queued_s, self._started_s = _queued_s(), time.perf_counter()

    def took(self) -> Took:
        all_s = time.perf_counter() - self._started_s
        return Took(all_s, max(0.0, all_s - (_queued_s() - self._queued_s)))


@dataclass(frozen=True)
class Took:
    all_s: float
    own_s: float


def _queued_s() -> float:
    """What this thread has waited for a core, ever; 0 where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


# ── the job, in a process of its own ──


class Holds:
    """How long each transaction of a process held the catalog: from having the lock until COMMIT came back."""

    def __init__(self, database: Database) -> None:
        self.took: list[Took] = []
        # SQLite gives the lock with BEGIN, before this is called; PostgreSQL with the first statement that takes one.
        self._with_begin = database.dialect == "sqlite"
        event.listen(database.engine, "begin", self._begun)
        event.listen(database.engine, "after_cursor_execute", self._executed)
        event.listen(database.engine, "checkin", self._ended)

    def _begun(self, connection: Connection) -> None:
        if self._with_begin and connection.get_execution_options().get("floodmark_write"):
            connection.info["held_since"] = Watch()

    def _executed(self, connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if not self._with_begin and (statement.startswith(_WRITES) or "FOR UPDATE" in statement):
            connection.info.setdefault("held_since", Watch())

    def _ended(self, _connection: Any, record: Any) -> None:
        since = record.info.pop("held_since", None)
        if since is not None:
            self.took.append(since.took())


@dataclass(frozen=True)
class Told:
    """What the job's process says of it: how long its transactions held the catalog, and its time on all cores."""

    holds: Sequence[Took]
    cpu_s: float


def fill(place: Place, column: str, options: Options) -> Told:
    """The job as it is."""
    with place.open(actor="job") as lake:
        holds, before_s = Holds(lake.catalog.database), time.process_time()
        _run(lake, column, options)
        return Told(holds.took, time.process_time() - before_s)


def fill_at_once(place: Place, column: str, options: Options) -> Told:
    """A bad one on purpose: the table is rewritten in one go, in one transaction that holds the lake's lock."""
    del options
    with place.open(actor="job") as lake:
        holds, before_s = Holds(lake.catalog.database), time.process_time()
        with _one_transaction(lake.catalog.database):
            _run(lake, column, {})
        return Told(holds.took, time.process_time() - before_s)


def _run(lake: fm.Lake, column: str, options: Options) -> None:
    done = lake.backfill.column(TABLE, column, EXPRESSION, **options)
    if done.outcome != "done":
        raise AssertionError(f"the job did not end well: {done.as_dict()}")


@contextmanager
def _one_transaction(database: Database) -> Iterator[None]:
    """Whatever is read or written meanwhile is part of one transaction."""

    @contextmanager
    def joined() -> Iterator[Connection]:
        yield tx

    with database.write() as tx:
        database.lock_lake(tx)
        database.read = database.write = joined  # type: ignore[method-assign]
        database.ask = lambda statement, values=None: list(tx.execute(statement, values or {}))  # type: ignore[method-assign]
        try:
            yield
        finally:
            del database.read, database.write, database.ask


# ── the others, in this process ──


@dataclass(frozen=True)
class Call:
    """When it was made, by the clock of the job's row, and how long it took."""

    kind: str
    made_ms: float
    took: Took

    def overlaps(self, from_ms: float, to_ms: float) -> bool:
        return self.made_ms <= to_ms and self.made_ms + self.took.all_s * 1000 >= from_ms


@dataclass
class Others:
    """Somebody who uses the lake: one call after the other, of each kind in turn."""

    lake: fm.Lake
    calls: list[Call] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    turn: int = 0

    def round(self) -> None:
        self.turn += 1
        first = 10**12
        rows = _rows(range(first, first + MERGED_ROWS), self.turn)
        self._call(STATUS, self.lake.status)
        self._call(MERGE, lambda: self.lake.merge(TABLE, rows))

    def _call(self, kind: str, action: Callable[[], object]) -> None:
        made_ms, watch = time.time() * 1000, Watch()
        try:
            action()
        except FloodmarkError as error:
            self.errors.append(f"{kind}: {error.kind}: {error}")
        self.calls.append(Call(kind, made_ms, watch.took()))


# ── the probe ──


@dataclass(frozen=True)
class Compared:
    """One kind of call: the 95th percentile of what it took, without waiting for a core and in all."""

    idle: Took
    live: Took
    live_calls: int

    @classmethod
    def of(cls, idle: Sequence[Took], live: Sequence[Took]) -> Compared:
        usual = Took(median(one.all_s for one in idle), median(one.own_s for one in idle))
        due = Took(
            _p95(_all_due([one.all_s for one in live], usual.all_s)),
            _p95(_all_due([one.own_s for one in live], usual.own_s)),
        )
        return cls(Took(_p95([one.all_s for one in idle]), _p95([one.own_s for one in idle])), due, len(live))

    @property
    def slower(self) -> float:
        return self.live.own_s / self.idle.own_s

    @property
    def slower_in_all(self) -> float:
        return self.live.all_s / self.idle.all_s


@dataclass(frozen=True)
class Found:
    """What a probe found."""

    calls: dict[str, Compared]
    live_for_s: float
    told: Told
    errors: Sequence[str]

    @property
    def hold_s_max(self) -> float:
        return max(hold.own_s for hold in self.told.holds)

    @property
    def cores(self) -> float:
        return self.told.cpu_s / self.live_for_s

    @property
    def problems(self) -> list[str]:
        """By what this job is one that others wait for; each begins with what it is about."""
        found = [f"error: {error}" for error in self.errors]
        for kind, compared in self.calls.items():
            if compared.live_calls < LIVE_CALLS_MIN:
                found.append(f"void: {compared.live_calls} live calls of {kind}, at least {LIVE_CALLS_MIN} are needed")
            if compared.slower > SLOWER_MAX:
                times = f"{compared.live.own_s * 1000:.1f} ms, idle {compared.idle.own_s * 1000:.1f} ms"
                found.append(f"{kind}: {compared.slower:.2f} times as long: {times}")
        if self.hold_s_max > HOLD_S_MAX:
            found.append(f"hold: a transaction held the catalog for {self.hold_s_max * 1000:.1f} ms")
        if self.cores > CORES_MAX:
            found.append(f"cores: the job took {self.cores:.1f} cores")
        return found


def probe(place: Place, job: Job, column: str, *, rounds: int = 30, **options: Any) -> Found:
    """Run a job beside others. The table is there; `rounds` of calls are made before, and as many after."""
    with place.open(actor="others") as lake, _objects_of_tests_set_apart():
        Others(lake).round()
        others = Others(lake)
        before = _idle(others, rounds)
        child = Child(job, place, column, options)
        while child.process.is_alive():
            others.round()
        told: Told = child.wait()
        during = others.calls[len(before) :]
        after = _idle(others, rounds)
        row = lake.catalog.jobs.find(f"{TABLE}.{column}")
    if row.state != DONE or row.started_ms is None or row.ended_ms is None:
        raise AssertionError(f"the job's row does not say when it was live: {row}")
    live = [call for call in during if call.overlaps(row.started_ms, row.ended_ms)]
    calls = {kind: Compared.of(_took(before + after, kind), _took(live, kind)) for kind in (STATUS, MERGE)}
    return Found(calls, (row.ended_ms - row.started_ms) / 1000, told, others.errors)


@contextmanager
def _objects_of_tests_set_apart() -> Iterator[None]:
    """A full collection of all that a test process holds takes longer than any call, and the job is not its cause."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _took(calls: Sequence[Call], kind: str) -> list[Took]:
    return [call.took for call in calls if call.kind == kind]


def _idle(others: Others, rounds: int) -> list[Call]:
    start = len(others.calls)
    for _ in range(rounds):
        others.round()
    return others.calls[start:]


def _all_due(took_s: Sequence[float], usual_s: float) -> list[float]:
    """What each call took, with those that a long one kept from being made."""
    found = list(took_s)
    for one_s in took_s:
        while (one_s := one_s - usual_s) >= usual_s:
            found.append(one_s)
    return found


def _p95(values: Sequence[float]) -> float:
    """Of none it is not known, and nothing is said by it."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))] if values else float("nan")
