"""Random operations, faults and real kills against a model: a dict of what must be in every version.

A failing seed is printed; put it into SEEDS to keep it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import floodmark as fm
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.sources import CallSource
from floodmark.failpoints import FAILPOINTS
from floodmark.jobs.record import BackfillRun
from floodmark.sinks.files.units import read_rows, read_units
from floodmark.testing.children import run_killed
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, ids, rows
from tests.foreign_writer import by_another
from tests.intake_world import SLOW, intake_of, take
from tests.publishing import Behind, in_this_thread

SEEDS = [1, 2]
STEPS = 40
CHECK_EVERY = 4
# Nothing is rewritten or planned again here; tests/simulation/test_feed.py has the writes that do.
KILL_POINTS = [
    point
    for point, kind in FAILPOINTS.items()
    if kind in ("append", "transaction") and not point.endswith((".rewritten", ".planned_again"))
]

UPKEEP_POINTS = [
    point
    for point, kind in FAILPOINTS.items()
    if kind in ("compact", "expire", "sweep", "maintain") and not point.endswith(".planned_again")
]

# What a files sink passes.
SHIP_POINTS = [f"unit.{step}" for step in ("held", "opened", "sealed", "sent", "acknowledged", "manifest", "settled")]

# What a column backfill and a history pass; which of them a run comes to depends on what there is to do.
FILL_POINTS, CHUNK_POINTS = (
    [point for point, kind in FAILPOINTS.items() if kind in kinds and not point.endswith(".planned_again")]
    for kinds in (("job", "add_column", "fill"), ("job", "chunk"))
)
# What a new shape, and a repair of what another writer did, pass.
APPLY_POINTS, REPAIR_POINTS = (
    [point for point, kind in FAILPOINTS.items() if kind == wanted and not point.endswith(".planned_again")]
    for wanted in ("apply", "repair")
)
UPDATE_POINTS = [point for point, kind in FAILPOINTS.items() if kind == "update" and "planned_again" not in point]
UNDROP_POINTS = [point for point, kind in FAILPOINTS.items() if kind == "undrop"]
ROLLBACK_POINTS = [
    point for point, kind in FAILPOINTS.items() if kind == "rollback" and not point.endswith(".planned_again")
]
# What a record passes on its way into its table, once it was acknowledged.
FEED_POINTS = [*(f"feed.{step}" for step in ("grouped", "fed", "forgotten")), *KILL_POINTS]
# What a redo of a chunk passes; the chunk is loaded again as part of it.
REDO_POINTS = [
    point for point, kind in FAILPOINTS.items() if kind in ("job", "redo", "chunk") and "planned_again" not in point
]
HISTORY = "history"
CHUNK_IDS = 1_000_000

Content = dict[str, list[int]]


def write(lake: fm.Lake, content: Content, batch: str | None, if_version: int | None = None) -> fm.Commit:
    if len(content) == 1:
        ((table, numbers),) = content.items()
        return lake.append(table, rows(*numbers), batch=batch, if_version=if_version)
    with lake.transaction("model", batch=batch, if_version=if_version) as tx:
        for table, numbers in content.items():
            tx.append(table, rows(*numbers))
    assert tx.commit is not None
    return tx.commit


def write_in_child(place: Place, content: Content, batch: str | None, if_version: int | None) -> None:
    with place.open() as lake:
        write(lake, content, batch, if_version)


def update_in_child(place: Place, table: str, number: int, name: str, batch: str | None) -> None:
    with place.open() as lake:
        lake.update(table, {"name": f"'{name}'"}, f"id = {number}", batch=batch)


def rename_in_child(place: Place, table: str, name: str) -> None:
    with place.open() as lake:
        lake.rename_table(table, name)


def take_in_child(place: Place, table: str, numbers: list[int]) -> None:
    with place.open() as lake, intake_of(lake, SLOW) as intake:
        take(lake, intake, table, *rows(*numbers))
        assert intake.drain(60)


def maintain_in_child(place: Place) -> None:
    with place.open() as lake:
        lake.maintain.run(files_min=2, keep="0s", grace="0s")


def ship_in_child(place: Place) -> None:
    with place.open() as lake:
        lake.sinks.run("out", until_empty=True)


def read_chunk(chunk: Chunk) -> list[dict[str, Any]]:
    """Two rows for every chunk, of numbers that nobody else writes."""
    assert isinstance(chunk.start, int)
    return rows(CHUNK_IDS + chunk.start, CHUNK_IDS + chunk.start + 1)


def load_history(lake: fm.Lake, tip: int) -> BackfillRun:
    source = CallSource("tests.simulation.test_model:read_chunk", tip=tip)
    return lake.backfill.history(HISTORY, source, ["events", "notes"], chunk=2, first=0, workers=1, retries=1)


def redo_chunk(lake: fm.Lake, first: int) -> str:
    """Load a chunk again; refused if the sink has its rows, or is about to."""
    try:
        return lake.backfill.redo(HISTORY, first, first + 2).outcome
    except fm.Invalid as refused:
        return "refused" if "have been shipped" in refused.message else str(refused)


def redo_in_child(place: Place, first: int) -> None:
    with place.open() as lake:
        redo_chunk(lake, first)


def fill_column(lake: fm.Lake, table: str, column: str) -> BackfillRun:
    return lake.backfill.column(table, column, "name", batch_rows=20, pause="0ms")


def backfill_in_child(place: Place, run: Callable[..., BackfillRun], *arguments: Any) -> None:
    with place.open() as lake:
        run(lake, *arguments)


def apply_in_child(place: Place, wanted: dict[str, Any]) -> None:
    with place.open() as lake:
        lake.apply(wanted, allow_destructive=True)


def undrop_in_child(place: Place, table: str) -> None:
    with place.open() as lake:
        lake.undrop(table)


def roll_back_in_child(place: Place, table: str, version: int) -> None:
    with place.open() as lake:
        lake.rollback(table, to=version)


def repair_in_child(place: Place, table: str, choice: str) -> None:
    with place.open(recover=False) as lake:
        lake.repair(table, choice=choice, apply=True)


class Model:
    def __init__(self, place: Place, seed: int) -> None:
        self.random = random.Random(seed)
        self.place = place
        self.next_id = 0
        self.batches: dict[tuple[str, str], Content] = {}
        self.versions: dict[int, Content] = {0: {}}
        self.head = 0
        self.expired: set[int] = set()
        self.tip = 0
        self.columns: dict[str, list[str]] = {}
        # Columns that a file declared, with the default that every row has in them.
        self.defaults: dict[str, dict[str, str]] = {}
        self.declared = 0
        # Of rows that were updated, by table and id: their names.
        self.names: dict[tuple[str, int], str] = {}
        # The same at each version, but for those before the first update.
        self.names_at: dict[int, dict[tuple[str, int], str]] = {}
        # Tables that were dropped, with what they held.
        self.dropped: dict[str, list[int]] = {}
        # Backfills that may not be at their end.
        self.started: list[tuple[Any, ...]] = []
        self.shipped = f"{place.path}-shipped"
        with place.open(create=True) as lake:
            for table in ("events", "notes"):
                lake.create_table(table, EVENTS)
                self.happened({table: []})
            # Small parts: several objects for every unit.
            lake.sinks.add("out", "files", tables=["events", "notes"], path=self.shipped, part_bytes=1024)

    def happened(self, added: Content) -> None:
        """The next version: the last one and these rows."""
        new = {table: list(numbers) for table, numbers in self.versions[self.head].items()}
        for table, numbers in added.items():
            new.setdefault(table, []).extend(numbers)
        self.head += 1
        self.versions[self.head] = new

    def rows_of(self, table: str, version: int) -> list[tuple[int, str]]:
        """The rows of a table, each with the name that an update gave it."""
        names = self.names_at.get(version, {})
        return sorted((number, names.get((table, number), "")) for number in self.versions[version][table])

    # ── steps ──

    def step(self) -> None:
        kind = self.random.choice(
            [
                *("write", "write", "write", "kill", "kill", "storage", "database", "again", "create"),
                *("expire", "compact", "sweep", "maintain", "maintain", "ship", "ship", "chunks", "column"),
                *("redo", "redo"),
                *("apply", "apply", "foreign", "intake", "intake", "drop", "undrop", "together"),
                *("rollback", "rollback"),
                *("update", "update", "rename", "expected"),
            ]
        )
        # Before it: versions that a check has made meanwhile, by ending a backfill.
        self.note_names()
        getattr(self, f"step_{kind}")()
        self.note_names()

    def note_names(self) -> None:
        for version in self.versions:
            self.names_at.setdefault(version, self.names)

    def content(self) -> tuple[Content, str | None, tuple[str, str] | None]:
        tables = sorted(self.versions[self.head])
        chosen = self.random.sample(tables, self.random.randint(1, min(2, len(tables))))
        content: Content = {}
        for table in chosen:
            count = self.random.randint(1, 3)
            content[table] = list(range(self.next_id, self.next_id + count))
            self.next_id += count
        batch = f"b{self.next_id}" if self.random.random() < 0.5 else None
        scope = chosen[0] if len(chosen) == 1 else ""
        return content, batch, (scope, batch) if batch else None

    def settle(self, content: Content, key: tuple[str, str] | None) -> None:
        self.happened(content)
        if key is not None:
            self.batches[key] = content

    def step_write(self) -> None:
        content, batch, key = self.content()
        with self.place.open() as lake:
            commit = write(lake, content, batch)
        assert commit.outcome == "committed"
        self.settle(content, key)
        assert commit.version == self.head

    def step_together(self) -> None:
        """Several appends to one table: those that wait are published with the first, each as a version of its own."""
        table = self.random.choice(sorted(self.versions[self.head]))
        contents = [{table: [self.next_id + number]} for number in range(self.random.randint(2, 5))]
        batches = [f"together {self.next_id + number}" if self.random.random() < 0.5 else None for number in range(5)]
        self.next_id += len(contents)
        with ExitStack() as stack:
            lakes = [stack.enter_context(self.place.open()) for _ in contents]
            calls = [partial(write, *each) for each in zip(lakes, contents, batches, strict=False)]
            behind = Behind(lakes[0], calls[1:])
            with in_this_thread("append.sealed", behind.begin):
                first = calls[0]()
            commits = [first, *behind.wait()]
        assert [commit.outcome for commit in commits] == ["committed"] * len(contents)
        # Not by their seals: on a busy machine the first one's turn may end while the others come.
        for commit, content, batch in sorted(
            zip(commits, contents, batches, strict=False), key=lambda one: one[0].version
        ):
            self.settle(content, (table, batch) if batch else None)
            assert commit.version == self.head

    def step_intake(self) -> None:
        """Rows that were acknowledged over HTTP are one version, whoever feeds them in the end."""
        content, _, _ = self.content()
        (table, numbers), *_ = content.items()
        run_killed(take_in_child, self.place, table, numbers, failpoint=self.random.choice(FEED_POINTS))
        with self.place.open() as lake, intake_of(lake, SLOW) as intake:
            assert intake.drain(60)
        self.settle({table: numbers}, None)

    def step_again(self) -> None:
        """A batch that is in comes again: nothing happens, and it says so."""
        there = self.versions[self.head]
        known = [one for one in sorted(self.batches.items()) if all(table in there for table in one[1])]
        if not known:
            return
        (scope, batch), content = self.random.choice(known)
        with self.place.open() as lake:
            commit = write(lake, {scope: content[scope]} if scope else content, batch)
            assert commit.outcome == "already_committed"

    def step_create(self) -> None:
        name = f"table{self.head}"
        with self.place.open() as lake:
            lake.create_table(name, EVENTS)
        self.happened({name: []})

    def step_kill(self) -> None:
        content, batch, key = self.content()
        kind = "append" if len(content) == 1 else "transaction"
        point = self.random.choice([point for point in KILL_POINTS if FAILPOINTS[point] == kind])
        expected = self.head if self.random.random() < 0.3 else None
        killed = run_killed(write_in_child, self.place, content, batch, expected, failpoint=point)
        assert killed
        with self.place.open() as lake:
            version = lake.status()["version"]
            assert version - self.head in (0, 1)
            if version > self.head:
                self.settle(content, key)
            elif batch is not None:
                assert point.endswith((".begun", ".staged")), f"a sealed batch was lost at {point}"

    def unfollowed(self) -> list[str]:
        """The tables that no sink follows and no history fills."""
        return sorted(table for table in self.versions[self.head] if table not in ("events", "notes"))

    def step_update(self) -> None:
        """A row gets another name, whole or killed somewhere; columns that are filled by the name follow it."""
        there = [table for table in self.unfollowed() if self.versions[self.head][table]]
        if not there:
            return
        table = self.random.choice(there)
        number = self.random.choice(self.versions[self.head][table])
        name, batch = f"name {self.head}", f"update {self.head}" if self.random.random() < 0.5 else None
        if self.random.random() < 0.6:
            arguments = (table, number, name, batch)
            run_killed(update_in_child, self.place, *arguments, failpoint=self.random.choice(UPDATE_POINTS))
        with self.place.open() as lake:
            again = lake.update(table, {"name": f"'{name}'"}, f"id = {number}", batch=batch)
            assert again.outcome in ("committed", "nothing_to_do", "already_committed")
            assert lake.status()["version"] == self.head + 1, "one publish, whoever made it"
        self.happened({})
        self.names = {**self.names, (table, number): name}

    def step_rename(self) -> None:
        """A table gets another name, whole or killed somewhere; its batches, and all else of it, keep to it."""
        if not self.unfollowed():
            return
        table, name = self.random.choice(self.unfollowed()), f"renamed{self.head}"
        with self.place.open() as lake:
            # A job that is not at its end has the old name.
            self.check_backfilled(lake)
        if self.random.random() < 0.6:
            run_killed(rename_in_child, self.place, table, name, failpoint=self.random.choice(APPLY_POINTS))
        with self.place.open() as lake:
            if table in {head.table for head in lake.heads()}:
                lake.rename_table(table, name)
            assert lake.status()["version"] == self.head + 1, "one publish, whoever made it"
        self.happened({})
        self.versions[self.head][name] = self.versions[self.head].pop(table)
        for known in (self.columns, self.defaults):
            if table in known:
                known[name] = known.pop(table)
        self.names = {(name if one == table else one, key): text for (one, key), text in self.names.items()}
        self.batches = {
            (name if scope == table else scope, batch): {name if one == table else one: ids for one, ids in own.items()}
            for (scope, batch), own in self.batches.items()
        }

    def step_expected(self) -> None:
        """A write that expects an older state of its tables is refused; one that expects the present one is not."""
        content, batch, key = self.content()
        with self.place.open() as lake:
            moved = max(head.version for head in lake.heads() if head.table in content)
            with pytest.raises(fm.Conflict) as caught:
                write(lake, content, batch, moved - 1)
            assert caught.value.facts["table"] in content
            assert lake.status()["version"] == self.head
            assert write(lake, content, batch, self.random.randint(moved, self.head)).outcome == "committed"
        self.settle(content, key)

    def step_storage(self) -> None:
        mode = self.random.choice(["before", "after", "torn", "disk_full"])
        storage = FaultyStorage(fail_at=self.random.randint(1, 25), mode=mode)
        self.faulted(lambda: self.place.open(storage=storage, recover=False), lambda lake: None)

    def step_database(self) -> None:
        mode, place_in_run = self.random.choice(["before", "after"]), self.random.randint(1, 45)
        self.faulted(
            lambda: self.place.open(recover=False),
            lambda lake: DatabaseFaults(lake.catalog.database, fail_at=place_in_run, mode=mode),
        )

    def faulted(self, open_lake: Callable[[], fm.Lake], arm: Callable[[fm.Lake], Any]) -> None:
        content, batch, key = self.content()
        with open_lake() as lake:
            faults = arm(lake)
            try:
                commit: fm.Commit | None = write(lake, content, batch)
            except fm.CommitUnknown as unknown:
                commit = lake.resolve(unknown.operation)
            except fm.FloodmarkError:
                commit = None
            finally:
                if faults is not None:
                    faults.remove()
        if commit is not None:
            assert commit.outcome == "committed"
            self.settle(content, key)
        with self.place.open() as lake:
            assert lake.status()["version"] == self.head, "an error was not undone, or a commit was"

    def step_expire(self) -> None:
        with self.place.open() as lake:
            gone = lake.catalog.expiry.expire(before_ms=2**60)
        assert self.head not in gone
        self.expired.update(gone)

    def step_compact(self) -> None:
        with self.place.open() as lake:
            done = lake.maintain.compact(files_min=2)
            assert {record.outcome for record in done.records} <= {"compacted", "nothing_to_do", "below_threshold"}
            self.maintained(lake)

    def step_sweep(self) -> None:
        with self.place.open() as lake:
            done = lake.maintain.sweep(grace="0s", deep=self.random.random() < 0.5)
            assert done.outcome in ("swept", "nothing_to_do"), done.as_dict()

    def step_maintain(self) -> None:
        """All of it, killed somewhere or with a fault; whatever happened, no row is another one."""
        how = self.random.choice(["kill", "storage", "database"])
        if how == "kill":
            run_killed(maintain_in_child, self.place, failpoint=self.random.choice(UPKEEP_POINTS))
        else:
            call, mode = self.random.randint(1, 80), self.random.choice(["before", "after"])
            storage = FaultyStorage(fail_at=call, mode=mode) if how == "storage" else None
            with self.place.open(recover=False, storage=storage) as lake:
                faults = DatabaseFaults(lake.catalog.database, fail_at=call, mode=mode) if storage is None else None
                with suppress(fm.FloodmarkError):
                    lake.maintain.run(files_min=2, keep="0s", grace="0s")
                if faults is not None:
                    faults.remove()
        with self.place.open() as lake:
            self.maintained(lake)

    def step_ship(self) -> None:
        """A sink's run, whole, killed somewhere, or with a fault; the next one goes on from there."""
        how = self.random.choice(["kill", "storage", "database", "whole"])
        if how == "kill":
            run_killed(ship_in_child, self.place, failpoint=self.random.choice(SHIP_POINTS))
            return
        call, mode = self.random.randint(1, 40), self.random.choice(["before", "after"])
        storage = FaultyStorage(fail_at=call, mode=mode) if how == "storage" else None
        with self.place.open(storage=storage, recover=storage is None) as lake:
            faults = DatabaseFaults(lake.catalog.database, fail_at=call, mode=mode) if how == "database" else None
            with suppress(fm.FloodmarkError):
                done = lake.sinks.run("out")
                assert done.outcome in ("shipped", "nothing_to_do") or (how != "whole" and done.error), done
            if faults is not None:
                faults.remove()

    def step_chunks(self) -> None:
        """The source of a history has come further: its new chunks are loaded."""
        self.tip += 2 * self.random.randint(1, 2)
        self.forget_tips()
        self.backfill(CHUNK_POINTS, load_history, self.tip)

    def forget_tips(self) -> None:
        """A source does not go back: a run that is to be finished asks for the newest tip."""
        self.started = [one for one in self.started if one[0] is not load_history]

    def step_redo(self) -> None:
        """The newest chunk is loaded again, whole or killed somewhere; unless the sink has it."""
        if not self.tip:
            return
        with self.place.open() as lake:
            self.check_backfilled(lake)
            shipped = lake.sinks.run("out", until_empty=True).outcome if self.random.random() < 0.2 else None
        if shipped is None and self.random.random() < 0.6:
            run_killed(redo_in_child, self.place, self.tip - 2, failpoint=self.random.choice(REDO_POINTS))
        else:
            with self.place.open() as lake:
                outcome = redo_chunk(lake, self.tip - 2)
                assert outcome == "refused" if shipped else outcome in ("redone", "refused")
        self.forget_tips()
        self.started.append((load_history, self.tip))
        with self.place.open() as lake:
            self.backfilled(lake)

    def step_column(self) -> None:
        table = self.random.choice(sorted(self.versions[self.head]))
        columns = self.columns.setdefault(table, [])
        columns.append(f"c{len(columns)}")
        self.backfill(FILL_POINTS, fill_column, table, columns[-1])

    def step_apply(self) -> None:
        """A column with a default comes, gets another name or goes, perhaps beside a new table; whole, or killed."""
        table = self.random.choice(sorted(self.versions[self.head]))
        before = self.defaults.get(table, {})
        after = dict(before)
        self.declared += 1
        new, how = f"x{self.declared}", self.random.choice(["add", "rename", "drop"] if before else ["add"])
        with self.place.open() as lake:
            if how != "add":
                # A column that a backfill may read does not go, nor get another name, before the backfill has ended.
                # Ended first, then listed: a column that it adds would else be missing below, and be dropped.
                self.check_backfilled(lake)
            there = lake.show(table)["columns"]
        wanted: dict[str, Any] = {one["name"]: {"type": one["type"], "required": one["required"]} for one in there}
        if how == "add":
            wanted[new], after[new] = {"type": "string", "default": new}, new
        else:
            old = self.random.choice(sorted(before))
            value = after.pop(old)
            del wanted[old]
            if how == "rename":
                wanted[new], after[new] = {"type": "string", "renamed_from": old}, value
        made = {f"made{self.head}": {"schema": EVENTS}} if self.random.random() < 0.3 else {}
        tables = {table: {"columns": wanted}, **made}
        if self.random.random() < 0.6:
            run_killed(apply_in_child, self.place, tables, failpoint=self.random.choice(APPLY_POINTS))
        with self.place.open() as lake:
            lake.apply(tables, allow_destructive=True)
            assert lake.apply(tables, allow_destructive=True).outcome == "nothing_to_do"
            assert lake.status()["version"] == self.head + 1, "one publish, whoever made it"
        self.happened({name: [] for name in made})
        self.defaults[table] = after

    def step_drop(self) -> None:
        """Of the tables that nothing follows, one goes."""
        there = [table for table in self.versions[self.head] if table not in ("events", "notes")]
        if not there:
            return
        table = self.random.choice(sorted(there))
        with self.place.open() as lake:
            self.check_backfilled(lake)
            lake.drop_table(table)
        self.dropped[table] = self.versions[self.head][table]
        self.happened({})
        del self.versions[self.head][table]
        if self.random.random() < 0.5:
            self.step_sweep()
            self.step_undrop()

    def step_undrop(self) -> None:
        """A table that was dropped comes back, whole or killed somewhere; unless no version that has it is left."""
        if not self.dropped:
            return
        table = self.random.choice(sorted(self.dropped))
        last = max(version for version in self.versions if table in self.versions[version])
        if self.random.random() < 0.6 and last not in self.expired:
            run_killed(undrop_in_child, self.place, table, failpoint=self.random.choice(UNDROP_POINTS))
        with self.place.open() as lake:
            if table not in {head.table for head in lake.heads()}:
                try:
                    lake.undrop(table)
                except fm.BelowRetention:
                    # A sink's unit may hold an older version that has the same state.
                    assert last in self.expired
                    return
            assert lake.status()["version"] == self.head + 1, "one publish, whoever made it"
        self.happened({table: self.dropped.pop(table)})

    def step_rollback(self) -> None:
        """A table returns to an earlier version, whole or killed somewhere; none that a sink follows."""
        there = [table for table in self.versions[self.head] if table not in ("events", "notes")]
        if not there:
            return
        table = self.random.choice(sorted(there))
        had = [version for version, content in self.versions.items() if table in content]
        to = self.random.choice([version for version in had if version not in self.expired])
        if self.random.random() < 0.6:
            run_killed(roll_back_in_child, self.place, table, to, failpoint=self.random.choice(ROLLBACK_POINTS))
        with self.place.open() as lake:
            lake.rollback(table, to=to)
            assert lake.rollback(table, to=to).outcome == "nothing_to_do"
            changed = self.rows_of(table, self.head) != self.rows_of(table, to)
            assert lake.status()["version"] == self.head + changed, "one publish, whoever made it"
        if changed:
            numbers = list(self.versions[to][table])
            self.happened({})
            self.versions[self.head][table] = numbers
            others = {row: name for row, name in self.names.items() if row[0] != table}
            self.names = others | {row: name for row, name in self.names_at.get(to, {}).items() if row[0] == table}

    def step_foreign(self) -> None:
        """Another writer appends past the door: refused, then taken in or put back, by a repair that may be killed."""
        table = self.random.choice(sorted(self.versions[self.head]))
        number, self.next_id = self.next_id, self.next_id + 1
        with self.place.open() as lake:
            # Nothing may wait for this table: healing would rightly refuse.
            self.check_backfilled(lake)
            names = [one["name"] for one in lake.show(table)["columns"]]
        row = {**dict.fromkeys(names, f"row {number}"), **self.defaults.get(table, {})}
        columns = [pa.field(name, pa.string()) if name != "id" else pa.field("id", pa.int64(), False) for name in names]
        brought = pa.Table.from_pylist([{**row, "id": number}], schema=pa.schema(columns))
        by_another(self.place, table, lambda theirs: theirs.append(brought))
        choice = self.random.choice(["accept", "revert"])
        with self.place.open() as lake, pytest.raises(fm.Corrupt):
            lake.append(table, rows(number))
        if self.random.random() < 0.6:
            run_killed(repair_in_child, self.place, table, choice, failpoint=self.random.choice(REPAIR_POINTS))
        with self.place.open() as lake:
            assert lake.repair(table, choice=choice, apply=True)[0].outcome in ("accepted", "reverted", "nothing_to_do")
            assert lake.status()["version"] == self.head + 1
        self.happened({table: [number]} if choice == "accept" else {})

    def backfill(self, points: list[str], run: Callable[..., BackfillRun], *arguments: Any) -> None:
        """Whole, killed somewhere, or with a fault; what is not done then is done by a later run."""
        self.started.append((run, *arguments))
        how = self.random.choice(["whole", "kill", "kill", "storage", "database"])
        if how == "kill":
            run_killed(backfill_in_child, self.place, run, *arguments, failpoint=self.random.choice(points))
        else:
            call, mode = self.random.randint(1, 60), self.random.choice(["before", "after"])
            storage = FaultyStorage(fail_at=call, mode=mode) if how == "storage" else None
            with self.place.open(storage=storage, recover=storage is None) as lake:
                faults = DatabaseFaults(lake.catalog.database, fail_at=call, mode=mode) if how == "database" else None
                with suppress(fm.Unavailable, fm.CommitUnknown):
                    done = run(lake, *arguments)
                    assert done.outcome == "done" or (how != "whole" and done.error), done.as_dict()
                if faults is not None:
                    faults.remove()
        with self.place.open() as lake:
            self.backfilled(lake)

    def backfilled(self, lake: fm.Lake) -> None:
        """Versions that backfills have added: chunks with their rows, or the same rows with a column more."""
        chunks = [chunk for job in lake.catalog.jobs.all() for chunk in lake.catalog.chunks.of(job.id)]
        for commit in reversed(lake.history(limit=1000)):
            if commit.version > self.head:
                new = [chunk for chunk in chunks if chunk.version == commit.version]
                if commit.kind == "redo":
                    self.took_out(commit.message)
                    continue
                assert commit.kind == "chunk" if new else commit.kind in ("add_column", "fill")
                self.happened({one.table: [CHUNK_IDS + 2 * one.chunk, CHUNK_IDS + 2 * one.chunk + 1] for one in new})
        assert lake.status()["version"] == self.head

    def took_out(self, message: str) -> None:
        """The next version: the last one without the rows of a chunk."""
        first = int(message.removeprefix(f"{HISTORY}: redo ").partition("..")[0])
        gone = {CHUNK_IDS + first, CHUNK_IDS + first + 1}
        self.happened({})
        content = self.versions[self.head]
        for table in ("events", "notes"):
            assert gone <= set(content[table])
            content[table] = [number for number in content[table] if number not in gone]

    def check_backfilled(self, lake: fm.Lake) -> None:
        """Each chunk is there once; every row has what its columns are filled by, whoever wrote it and when."""
        for run, *arguments in self.started:
            assert run(lake, *arguments).outcome in ("done", "nothing_to_do")
        self.started.clear()
        self.backfilled(lake)
        assert {job.status for job in lake.catalog.jobs.all()} <= {"done"}
        for table in ("events", "notes"):
            loaded = [number for number in self.versions[self.head][table] if number >= CHUNK_IDS]
            assert sorted(loaded) == list(range(CHUNK_IDS, CHUNK_IDS + self.tip))
        for table, columns in self.columns.items():
            if table in self.dropped:
                continue
            for row in lake.read_arrow(table).read_all().to_pylist():
                assert {row[column] for column in columns} == {row["name"]}, table

    def check_declared(self, lake: fm.Lake) -> None:
        """Every row has the defaults of the columns that were declared, under their present names."""
        for table, defaults in self.defaults.items():
            if table in self.dropped:
                continue
            named = {one["name"] for one in lake.show(table)["columns"]}
            assert {name for name in named if name.startswith("x")} == set(defaults), table
            for row in lake.read_arrow(table).read_all().to_pylist():
                assert {name: row[name] for name in defaults} == defaults, table

    def check_names(self, lake: fm.Lake) -> None:
        """Every row has the name that its last update gave it."""
        for table in {table for table, _ in self.names if table in self.versions[self.head]}:
            found = {row["id"]: row["name"] for row in lake.read_arrow(table).read_all().to_pylist()}
            for number in found:
                assert found[number] == self.names.get((table, number), f"row {number}"), (table, number)

    def check_shipped(self, lake: fm.Lake) -> None:
        """Every row of the head is at the destination, once."""
        assert lake.sinks.run("out", until_empty=True).outcome in ("shipped", "nothing_to_do")
        for table in ("events", "notes"):
            units = read_units(self.shipped, table=table)
            found = [row for unit in units for batch in read_rows(unit) for row in batch["id"].to_pylist()]
            assert sorted(found) == sorted(self.versions[self.head][table]), table
        assert lake.catalog.pin_count() == 0

    def maintained(self, lake: fm.Lake) -> None:
        """What maintenance may have added: versions with the same rows; and it may have let go of older ones."""
        newer = [commit for commit in lake.history(limit=100) if commit.version > self.head]
        assert {commit.kind for commit in newer} <= {"compact"}
        for _ in newer:
            self.happened({})
        assert lake.status()["version"] == self.head
        for version in range(1, self.head):
            if lake.catalog.history.is_expired(version):
                self.expired.add(version)
        assert not lake.catalog.history.is_expired(self.head)

    # ── what must hold ──

    def check(self) -> None:
        with self.place.open() as lake:
            # What a sweep that was stopped has left is ended by the next one.
            assert lake.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")
            self.check_backfilled(lake)
            self.check_declared(lake)
            self.check_names(lake)
            self.check_shipped(lake)
            check_lake(lake.catalog)
            for version in {self.head, self.random.randint(1, self.head)}:
                if version in self.expired:
                    with pytest.raises(fm.BelowRetention):
                        ids(lake, "events", version)
                    continue
                for table, numbers in self.versions[version].items():
                    assert ids(lake, table, version) == sorted(numbers), (version, table)


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_operations_faults_and_kills_match_the_model(
    new_place: Callable[[str], Place], database: str, seed: int
) -> None:
    run_model(new_place(database), seed, STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("database", DATABASES)
def test_soak(new_place: Callable[[str], Place], database: str) -> None:
    seed = int(os.environ.get("FLOODMARK_SOAK_SEED", "0")) or random.SystemRandom().randint(1, 10**9)
    for number in range(25):
        run_model(new_place(database), seed + number, 200)


def run_model(place: Place, seed: int, steps: int) -> None:
    model = Model(place, seed)
    for step in range(steps):
        try:
            model.step()
            if step % CHECK_EVERY == 0 or step == steps - 1:
                model.check()
        except BaseException:
            print(f"seed {seed}, step {step}")
            raise
