"""Tables that are backfilled, runs that are killed, what others do meanwhile, and what must be there at the end.

Rows are folded by plain Python: `loaded` and `meddled` say what a chunk and the other writers come to, without asking
Floodmark. Which rows are filled is told by the data files themselves. Nothing here needs Spark.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from sqlalchemy import func, select

import floodmark as fm
from floodmark import failpoints
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.sources import CallSource
from floodmark.catalog import tables
from floodmark.catalog.chunks import DONE, PRUNED
from floodmark.jobs.record import BackfillRun
from floodmark.testing.children import preload
from floodmark.testing.invariants import check_lake
from tests.conftest import Place

# What a backfill imports late, before the children are forked.
preload(
    "tests.crash.backfill_world",
    "floodmark.backfill.backfills",
    "floodmark.backfill.columns.column",
    "floodmark.backfill.chunks.history",
    "floodmark.backfill.chunks.prune",
    "floodmark.maintenance.maintenance",
    "floodmark.maintenance.compact",
    "floodmark.rows.rewriting.fill",
)

EVENTS, PEOPLE = "events", "people"
# A row of a history has its number as `at` too; what others write is older than that, or newer.
SCHEMA = "id long not null, name string, at long"
OLD, NEW = -1, 1000
Row = dict[str, Any]


def person(number: int, name: str, at: int = OLD) -> Row:
    """Every fifth has no name, so there is nothing to fill its new column with."""
    return {"id": number, "name": None if number % 5 == 0 else name, "at": at}


# ── a column ──

COLUMN_JOB, COLUMN = "people.nick", "nick"
# The first file has more rows than a batch: it is cut, and its parts are filled after the other file.
FILES = (range(6), range(6, 9))
COLUMN_OPTIONS = {"batch_rows": 4, "pause": "0ms"}


def make_people(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table(PEOPLE, SCHEMA, key=["id"])
        for numbers in FILES:
            lake.append(PEOPLE, [person(number, f"row {number}") for number in numbers])


def fill_column(place: Place, **options: Any) -> str:
    with place.open(actor="filler") as lake:
        return lake.backfill.column(PEOPLE, COLUMN, "name", **COLUMN_OPTIONS, **options).outcome


def fill_column_announced(place: Place) -> str:
    return fill_column(place, announce=True)


def column_plan(lake: fm.Lake, **options: Any) -> dict[str, Any]:
    return lake.backfill.plan(lake.backfill.column_spec(PEOPLE, COLUMN, "name", **COLUMN_OPTIONS, **options))


@dataclass(frozen=True)
class People:
    """The table as it is: its rows by id, which of them are in a file that has the column, and what they have there."""

    rows: dict[int, tuple[Any, int]]
    filled: dict[int, Any]

    @property
    def names(self) -> dict[int, Any]:
        return {number: name for number, (name, _) in self.rows.items()}

    @property
    def lacking(self) -> set[int]:
        return set(self.rows) - set(self.filled)

    def nulls(self, numbers: Collection[int]) -> int:
        """How many of these cannot be filled."""
        return sum(self.rows[number][0] is None for number in numbers)


def people(lake: fm.Lake) -> People:
    """From the files themselves; and what readers are told is the same."""
    filled: dict[int, Any] = {}
    found = 0
    for path in lake.catalog.files.data_files(lake.catalog.history.head(PEOPLE)):
        with lake.catalog.storage.open_input(path) as stream:
            table = pq.ParquetFile(stream).read(use_threads=False)
        found += len(table)
        if COLUMN in table.column_names:
            filled |= dict(zip(table["id"].to_pylist(), table[COLUMN].to_pylist(), strict=True))
    rows = lake.read_arrow(PEOPLE, with_seq=True).read_all().to_pylist()
    assert len(rows) == found
    assert {row["id"]: row.get(COLUMN) for row in rows} == {row["id"]: filled.get(row["id"]) for row in rows}
    return People({row["id"]: (row["name"], row["_seq"]) for row in rows}, filled)


def check_filled(now: People) -> None:
    assert now.lacking == set()
    assert now.names == now.filled


# ── a history ──

HISTORY_JOB = "years"
CHUNK_ROWS, CHUNKS = 4, 3
LAST = CHUNK_ROWS * CHUNKS
TABLES = (EVENTS, PEOPLE)


def read_chunk(chunk: Chunk) -> list[Row]:
    assert isinstance(chunk.start, int)
    assert isinstance(chunk.end, int)
    return [person(number, "history", number) for number in range(chunk.start, chunk.end)]


def history(lake: fm.Lake, source: CallSource | None = None, **options: Any) -> BackfillRun:
    settings = {"chunk": CHUNK_ROWS, "first": 0, "last": LAST, "column": "at", "order": "oldest", "workers": 1}
    rows = source or CallSource("tests.crash.backfill_world:read_chunk")
    return lake.backfill.history(HISTORY_JOB, rows, TABLES, **{**settings, "retries": 1, **options})


def history_plan(lake: fm.Lake) -> dict[str, Any]:
    from floodmark.backfill.chunks.history import spec_from_job

    return lake.backfill.plan(spec_from_job(lake.catalog.jobs.find(HISTORY_JOB)))


FIRST_EVENTS = [person(101, "before")]
FIRST_PEOPLE = [person(number, "before") for number in (1, 9, 101)]


def make_tables(place: Place) -> None:
    """Rows of others, some of which the history's chunks replace."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table(EVENTS, SCHEMA)
        lake.create_table(PEOPLE, SCHEMA, key=["id"])
        lake.append(EVENTS, FIRST_EVENTS)
        lake.append(PEOPLE, FIRST_PEOPLE)


def load_history(place: Place, **options: Any) -> str:
    with place.open(actor="loader") as lake:
        return history(lake, **options).outcome


def load_by_two(place: Place) -> str:
    return load_history(place, workers=2)


# Above the floor of this setting are the second and the third chunk.
KEEP = 8
PRUNED_CHUNKS = 1


def make_loaded(place: Place) -> None:
    """All of the history, in one file for each table: a floor lies in the middle of it."""
    make_tables(place)
    with place.open() as lake:
        assert history(lake).outcome == "done"
        for table in TABLES:
            assert lake.maintain.compact(table, files_min=2).outcome == "compacted"


def prune_history(place: Place) -> str:
    return load_history(place, keep=KEEP)


@dataclass
class Contents:
    """What is in the two tables: how often each event, and each person once."""

    events: Counter[tuple[Any, ...]]
    people: dict[int, tuple[Any, int]]

    def merge(self, rows: Sequence[Row]) -> None:
        self.people |= {row["id"]: (row["name"], row["at"]) for row in rows}

    def append(self, rows: Sequence[Row]) -> None:
        self.events.update((row["id"], row["name"], row["at"]) for row in rows)


def before() -> Contents:
    found = Contents(Counter(), {})
    found.append(FIRST_EVENTS)
    found.merge(FIRST_PEOPLE)
    return found


def loaded(contents: Contents, number: int) -> None:
    """A chunk comes in. Of people, it takes the place of what is older."""
    rows = [person(one, "history", one) for one in range(number * CHUNK_ROWS, (number + 1) * CHUNK_ROWS)]
    contents.append(rows)
    contents.merge([row for row in rows if contents.people.get(row["id"], (None, OLD))[1] < row["at"]])


def pruned(contents: Contents, table: str) -> None:
    """Rows of chunks below the floor go; what others brought has no place in the range."""
    gone = range(PRUNED_CHUNKS * CHUNK_ROWS)
    if table == EVENTS:
        contents.events = Counter({row: count for row, count in contents.events.items() if row[2] not in gone})
    else:
        contents.people = {number: row for number, row in contents.people.items() if row[1] not in gone}


def contents(lake: fm.Lake) -> Contents:
    events, persons = (lake.read_arrow(table).read_all().to_pylist() for table in TABLES)
    found = Contents(Counter(), {})
    found.append(events)
    found.merge(persons)
    assert len(persons) == len(found.people)
    return found


def chunk_states(lake: fm.Lake) -> dict[tuple[str, int], tuple[str, int]]:
    found = lake.catalog.chunks.of(lake.catalog.jobs.find(HISTORY_JOB).id)
    return {(state.table, state.chunk): (state.state, state.rows) for state in found}


def chunks_done(lake: fm.Lake) -> set[int]:
    """The chunks that are there; for both tables, or for none (I2)."""
    found = [{number for name, number in chunk_states(lake) if name == table} for table in TABLES]
    assert found[0] == found[1]
    return found[0]


def check_loaded(lake: fm.Lake, *, keep: bool = False) -> None:
    """Each chunk came in once, in a publish of its own, and all figures say so."""
    states = {
        (table, number): (PRUNED if keep and number < PRUNED_CHUNKS else DONE, CHUNK_ROWS)
        for table in TABLES
        for number in range(CHUNKS)
    }
    assert chunk_states(lake) == states
    versions = {state.version for state in lake.catalog.chunks.of(lake.catalog.jobs.find(HISTORY_JOB).id)}
    commits = [commit for commit in lake.history(limit=100) if commit.kind == "chunk"]
    assert {commit.version for commit in commits} == versions
    assert len(commits) == CHUNKS
    job = lake.backfill.show(HISTORY_JOB)
    kept = CHUNKS - PRUNED_CHUNKS if keep else CHUNKS
    assert (job["status"], job["processed"], job["total"], job["error"]) == ("done", kept, kept, None)
    assert (job["rows"], job["publishes"]) == (CHUNKS * CHUNK_ROWS * len(TABLES), CHUNKS)


# ── what others do meanwhile ──


APPENDED = [person(number, "new", NEW) for number in (20, 21)]
MERGED = [person(number, "merged", NEW) for number in (1, 8, 22)]
DELETED = (2, 7)


def meddle_people(lake: fm.Lake) -> None:
    """New rows, changed rows, rows that go, small files put together: some are filled by now, some are not."""
    lake.append(PEOPLE, APPENDED)
    lake.merge(PEOPLE, MERGED, partial=True)  # others may have added a column meanwhile
    lake.delete(PEOPLE, f"id in {DELETED}")
    assert lake.maintain.compact(PEOPLE, files_min=2).outcome in ("compacted", "nothing_to_do", "below_threshold")


def people_meddled(names: dict[int, Any]) -> dict[int, Any]:
    """Names by id, after that."""
    found = {**names, **{row["id"]: row["name"] for row in (*APPENDED, *MERGED)}}
    return {number: name for number, name in found.items() if number not in DELETED}


def meddle(lake: fm.Lake) -> None:
    meddle_people(lake)
    lake.append(EVENTS, MERGED)
    lake.delete(EVENTS, f"id in {DELETED}")
    assert lake.maintain.compact(EVENTS, files_min=2).outcome in ("compacted", "nothing_to_do", "below_threshold")


def meddled(contents: Contents) -> None:
    contents.merge([*APPENDED, *MERGED])
    contents.people = {number: row for number, row in contents.people.items() if number not in DELETED}
    contents.append(MERGED)
    contents.events = Counter({row: count for row, count in contents.events.items() if row[0] not in DELETED})


def planned_again(kind: str, act: Callable[[fm.Lake], object], run: Callable[[Place], object], place: Place) -> None:
    """A run beside which another writer changes what it depends on, after it was sealed."""

    def observe(point: str) -> None:
        if point == f"{kind}.sealed":
            failpoints.observer = None
            with place.open(recover=False) as other:
                act(other)

    failpoints.observer = observe
    run(place)


# ── at rest ──


def audited(lake: fm.Lake) -> list[tuple[str, str]]:
    """What healers and takeovers reported, the oldest first: exactly one row for each that died (I16)."""
    found = list(reversed(lake.audit()))
    assert len({row.operation for row in found}) == len(found)
    return [(row.kind, row.outcome) for row in found]


def check_at_rest(lake: fm.Lake) -> None:
    """Nobody holds anything, nothing is left over, no job needs anybody."""
    with lake.catalog.database.read() as tx:
        assert tx.execute(select(tables.turns)).all() == []
        assert tx.execute(select(func.count()).where(tables.jobs.c.owner_run.is_not(None))).scalar_one() == 0
    assert {job.status for job in lake.catalog.jobs.all()} == {"done"}
    check_lake(lake.catalog)


# ── both kinds ──


def fill(lake: fm.Lake) -> BackfillRun:
    return lake.backfill.column(PEOPLE, COLUMN, "name", **COLUMN_OPTIONS)


JOBS: dict[str, tuple[Callable[[Place], None], Callable[[fm.Lake], BackfillRun]]] = {
    COLUMN_JOB: (make_people, fill),
    HISTORY_JOB: (make_tables, history),
}


def check_done(lake: fm.Lake, job: str, audit: list[tuple[str, str]]) -> None:
    """A job that nobody else meddled with has done all of its work, each part of it once."""
    if job == COLUMN_JOB:
        now, figures = people(lake), lake.backfill.show(COLUMN_JOB)
        check_filled(now)
        assert (figures["rows"], figures["unfilled"]) == (len(now.rows), now.nulls(now.rows))
        published = Counter(commit.kind for commit in lake.history(limit=100))
        # A file is cut into two, and those and the other one are filled.
        assert (published["add_column"], published["fill"], figures["publishes"]) == (1, 4, 5)
    else:
        wanted = before()
        for number in range(CHUNKS):
            loaded(wanted, number)
        assert contents(lake) == wanted
        check_loaded(lake)
    assert audited(lake) == audit
    check_at_rest(lake)


# ── processes that are paused ──


def pause_here(lake: fm.Lake) -> None:
    """Stop this process (SIGSTOP), right after a beat, so that the heartbeat is not stopped in its transaction."""

    def last_beat() -> int:
        with lake.catalog.database.read() as tx:
            mine = tables.processes.c.id == lake.catalog.heartbeat.id
            return int(tx.execute(select(func.max(tables.processes.c.beat_ms)).where(mine)).scalar_one())

    seen = last_beat()
    while last_beat() == seen:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGSTOP)


def is_paused(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_for(happened: Callable[[], bool], wait_s_max: float = 60) -> None:
    end_s = time.monotonic() + wait_s_max
    while not happened():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.01)
