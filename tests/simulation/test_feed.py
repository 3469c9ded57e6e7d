"""Keyed writes by several writers at once against a dict: rows, sequences and the change feed, exactly.

A failing seed is printed; put it into SEEDS to keep it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog.maintenance_state import Consumer
from floodmark.commit.expiry import deletions_floor
from floodmark.failpoints import FAILPOINTS
from floodmark.index import covering
from floodmark.storage import local_path
from floodmark.testing.children import Child, run_killed
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.explorer import NOT_A_STOP
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.simulation import feed

SEEDS = [1, pytest.param(2, marks=pytest.mark.soak)]
STEPS = 500
CHECK_EVERY = 50
# What may refuse a random operation: a key that is there, and races lost too often.
REFUSED = (fm.Invalid, fm.Conflict)
UPKEEP = ("compact", "index", "expire", "sweep", "maintain")


def run_feed(place: Place, seed: int, steps: int) -> int:
    """Random operations; in a third of them another writer does something in the middle. Returns how many did.

    Both put small files together now and then. At every check old versions are forgotten and swept away; half of the
    seeds have a consumer that is behind, the others let go of old rows.
    """
    dice = random.Random(seed)
    raced = 0
    with place.open(create=True) as first, place.open() as second:
        feed.make(first, dice.choice([[], ["bucket(3, id)"], ["part"]]))
        rows, checked = feed.Rows(), first.status()["version"]
        follower = Follower(first) if seed % 2 else None
        if follower is None:
            first.maintain.set_policy(feed.TABLE, f"{feed.KEYS // 3} rows")
        for step in range(steps):
            wanted = dice.randint(1, 6) if dice.random() < 0.35 else 0
            if wanted:
                failpoints.observer = interrupt(second, dice, wanted)
            with suppress(*REFUSED):
                act(first, dice)
            raced += bool(wanted) and failpoints.observer is None
            failpoints.observer = None
            if step % CHECK_EVERY == CHECK_EVERY - 1:
                if follower is None:
                    assert first.maintain.retain(feed.TABLE).outcome in ("retained", "nothing_to_do")
                rows = feed.check_history(first, dice, from_version=checked, rows=rows)
                if follower is not None:
                    follower.follow(rows, dice)
                feed.forget(first, deep=dice.random() < 0.3)
                checked = first.status()["version"]
        check_lake(first.catalog)
        assert feed.read_rows(first) == rows
    return raced


def act(lake: fm.Lake, dice: random.Random) -> None:
    """One random change, or a compaction."""
    operation = feed.random_operation(dice)
    if dice.random() < 0.15:
        operation["if_version"] = lake.status()["version"]
    if dice.random() < 0.08:
        feed.compact(lake)
    else:
        feed.perform(lake, operation)


class Follower:
    """A protected consumer: it knows the rows up to its mark, and what it has not seen is kept for it."""

    def __init__(self, lake: fm.Lake) -> None:
        self._lake = lake
        self._known = feed.Rows()
        self._mark = -1
        self._put()

    def _put(self) -> None:
        head = self._lake.catalog.history.head(feed.TABLE)
        self._lake.catalog.maintenance.put_consumer(Consumer("follower", head.table_id, self._mark))

    def follow(self, rows: feed.Rows, dice: random.Random) -> None:
        """Go on to the head, or only look how far it could; deletions are never forgotten above the mark."""
        head = self._lake.catalog.history.head(feed.TABLE)
        assert deletions_floor(self._lake.catalog.database, head.table_id) <= self._mark
        found = self._lake.changes(feed.TABLE, None if self._mark < 0 else self._mark)
        known = dict(self._known)
        feed.fold(known, found.arrow().read_all().to_pylist(), self._mark, found.until)
        assert known == rows
        if dice.random() < 0.7:
            self._known, self._mark = known, found.until
            self._put()


def interrupt(lake: fm.Lake, dice: random.Random, wanted: int) -> Callable[[str], None]:
    """Let `lake` do something when the other writer passes its `wanted`-th failpoint outside a transaction."""
    passed = 0

    def observe(point: str) -> None:
        nonlocal passed
        if point.endswith(NOT_A_STOP):
            return
        passed += 1
        if passed == wanted:
            failpoints.observer = None
            with suppress(*REFUSED):
                act(lake, dice)

    return observe


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_sequences_and_changes_match_a_dict_after_every_commit(
    new_place: Callable[[str], Place], seed: int
) -> None:
    try:
        raced = run_feed(new_place("sqlite"), seed, STEPS)
    except BaseException:
        print(f"seed {seed}")
        raise
    assert raced > STEPS // 10, "hardly any operation was interrupted"


def write_alone(place: Place, seed: int, steps: int) -> int:
    """What one of the processes does; returns how many commits it made."""
    dice = random.Random(seed)
    done = 0
    with place.open() as lake:
        for _ in range(steps):
            if dice.random() < 0.1:
                done += feed.compact(lake)
            with suppress(*REFUSED):
                done += feed.perform(lake, feed.random_operation(dice)).outcome == "committed"
    return done


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_two_processes_write_and_a_third_follows_without_missing_anything(
    new_place: Callable[[str], Place], database: str
) -> None:
    """While two processes write, a reader asks again and again what is new, and ends with exactly the rows."""
    place, dice = new_place(database), random.Random(7)
    with place.open(create=True) as lake:
        feed.make(lake, [])
        first = lake.status()["version"]
        children = [Child(write_alone, place, seed, 120) for seed in (11, 12)]
        folded, mark = feed.Rows(), -1
        asked = 0
        while any(child.process.is_alive() for child in children):
            found = lake.changes(feed.TABLE, None if mark < 0 else mark)
            feed.fold(folded, found.arrow().read_all().to_pylist(), mark, found.until)
            mark, asked = found.until, asked + 1
            assert folded == feed.read_rows(lake, found.version), "what was followed is not what is there"
        commits = sum(child.wait() for child in children)
        feed.fold(folded, feed.changes(lake, mark, None), mark, lake.changes(feed.TABLE).until)
        rows = feed.check_history(lake, dice, from_version=first)
        assert folded == rows
        assert lake.status()["version"] == first + commits
        assert commits > 100
        assert asked > 5
        check_lake(lake.catalog)


# ── faults and kills ──


def write_in_child(place: Place, operation: dict[str, object], batch: str | None) -> None:
    with place.open() as lake, suppress(*REFUSED):
        feed.perform(lake, operation, batch)


def maintain_in_child(place: Place) -> None:
    with place.open() as lake:
        lake.maintain.run(files_min=2, keep="0s", grace="0s")


class Troubled:
    """Random operations, each of which may be killed, lose a call of its storage or database, or come again."""

    def __init__(self, place: Place, seed: int) -> None:
        self.dice = random.Random(seed)
        self.place = place
        self.batches: dict[str, dict[str, object]] = {}
        with place.open(create=True) as lake:
            feed.make(lake, self.dice.choice([[], ["bucket(2, id)"]]))
            self.version = self.checked = lake.status()["version"]
        self.rows = feed.Rows()

    def step(self) -> None:
        verbs = ["write", "write", "kill", "kill", "storage", "database", "again", "maintain", "maintain_badly"]
        getattr(self, self.dice.choice([*verbs, "damage", "damage", "change_index", "branch"]))()

    def next(self) -> tuple[dict[str, object], str | None]:
        operation = feed.random_operation(self.dice)
        batch = f"b{self.dice.getrandbits(60)}" if self.dice.random() < 0.5 else None
        return operation, batch

    def write(self) -> None:
        operation, batch = self.next()
        with self.place.open() as lake, suppress(*REFUSED):
            self.told(lake, feed.perform(lake, operation, batch), operation, batch)

    def told(self, lake: fm.Lake, commit: fm.Commit, operation: dict[str, object], batch: str | None) -> None:
        """What a writer was told is true."""
        if commit.outcome == "committed":
            self.version += 1
            if batch is not None:
                self.batches[batch] = operation
        assert lake.status()["version"] == self.version

    def again(self) -> None:
        if self.batches:
            batch, operation = self.dice.choice(sorted(self.batches.items()))
            # A rollback may find no version to return to, before it is recognized.
            with self.place.open() as lake, suppress(fm.Conflict):
                assert feed.perform(lake, operation, batch).outcome == "already_committed"

    def kill(self) -> None:
        operation, batch = self.next()
        verb = "merge" if operation["verb"] == "partial" else operation["verb"]
        points = [point for point, kind in FAILPOINTS.items() if kind == verb]
        run_killed(write_in_child, self.place, operation, batch, failpoint=self.dice.choice(points))
        with self.place.open() as lake:
            version = lake.status()["version"]
            assert version - self.version in (0, 1)
            if version > self.version and batch is not None:
                self.batches[batch] = operation
            self.version = version

    def storage(self) -> None:
        mode = self.dice.choice(["before", "after", "torn", "disk_full"])
        storage = FaultyStorage(fail_at=self.dice.randint(1, 40), mode=mode)
        self.faulted(lambda: self.place.open(storage=storage, recover=False), lambda lake: None)

    def database(self) -> None:
        mode, call = self.dice.choice(["before", "after"]), self.dice.randint(1, 50)
        self.faulted(
            lambda: self.place.open(recover=False),
            lambda lake: DatabaseFaults(lake.catalog.database, fail_at=call, mode=mode),
        )

    def faulted(self, open_lake: Callable[[], fm.Lake], arm: Callable[[fm.Lake], Any]) -> None:
        operation, batch = self.next()
        with open_lake() as lake:
            faults = arm(lake)
            try:
                commit: fm.Commit | None = feed.perform(lake, operation, batch)
            except fm.CommitUnknown as unknown:
                commit = lake.resolve(unknown.operation)
            except fm.FloodmarkError:
                commit = None
            finally:
                if faults is not None:
                    faults.remove()
        with self.place.open() as lake:
            if commit is not None:
                self.told(lake, commit, operation, batch)
            assert lake.status()["version"] == self.version, "an error was not undone, or a commit was"

    def maintain(self) -> None:
        """Killed anywhere, or not at all."""
        points = [point for point, kind in FAILPOINTS.items() if kind in UPKEEP and not point.endswith("planned_again")]
        run_killed(maintain_in_child, self.place, failpoint=self.dice.choice(points))
        self.maintained()

    def maintain_badly(self) -> None:
        mode, call = self.dice.choice(["before", "after"]), self.dice.randint(1, 60)
        faulty = FaultyStorage(fail_at=call, mode=mode) if self.dice.random() < 0.5 else None
        with self.place.open(storage=faulty, recover=False) as lake:
            faults = None if faulty else DatabaseFaults(lake.catalog.database, fail_at=call, mode=mode)
            with suppress(fm.FloodmarkError):
                lake.maintain.run(files_min=2, keep="0s", grace="0s")
            if faults is not None:
                faults.remove()
        self.maintained()

    def damage(self) -> None:
        """A segment goes, ends early, has another byte, or is another one; no process has it open."""
        with self.place.open() as lake:
            rows = lake.catalog.indexes.segments(self.table_id(lake))
            found = [row.location for row in rows if not row.broken and row.retired_ms is None]
        paths = [path for path in map(local_path, found) if path is not None and os.path.exists(path)]
        if not paths:
            return
        path, other = self.dice.choice(paths), self.dice.choice(paths)
        with open(path, "rb") as file, open(other, "rb") as another:
            data, instead = bytearray(file.read()), another.read()
        how = self.dice.choice(["gone", "cut", "flipped", "another"])
        if how == "gone":
            os.unlink(path)
        else:
            data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
            new = {"cut": data[: self.dice.randrange(len(data))], "flipped": data, "another": instead}[how]
            with open(path, "wb") as file:
                file.write(new)
        covering._OPEN.forget(found[paths.index(path)])

    def change_index(self) -> None:
        """The key's index is dropped, or made again."""
        with self.place.open() as lake:
            if any(index.is_live for index in lake.catalog.indexes.of_table(self.table_id(lake))):
                lake.indexes.drop(feed.TABLE, on="id", kind="key")
            else:
                lake.indexes.create(feed.TABLE, on="id", kind="key")

    def table_id(self, lake: fm.Lake) -> str:
        return lake.catalog.history.head(feed.TABLE).table_id

    def branch(self) -> None:
        """Rows are merged into a branch, and from there into main: as if they had been merged into main."""
        rows = feed.random_rows(self.dice)
        with self.place.open() as lake:
            lake.branches.create("aside")
            lake.merge(feed.TABLE, feed.as_dicts(rows), branch="aside")
            if self.dice.random() < 0.5:
                lake.maintain.index(feed.TABLE)
            lake.branches.merge("aside", message=json.dumps({"verb": "merge", "rows": rows}))
            lake.branches.delete("aside")
            self.version = lake.status()["version"]

    def maintained(self) -> None:
        """All that maintenance may have added is versions with the same rows."""
        with self.place.open() as lake:
            newer = [commit for commit in lake.history(limit=5) if commit.version > self.version]
            assert {commit.kind for commit in newer} <= {"compact"}
            self.version += len(newer)
            assert lake.status()["version"] == self.version

    def check(self) -> None:
        with self.place.open() as lake:
            # What a sweep that was stopped has left is ended by the next one.
            assert lake.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")
            # Damage that no write has met is found, and mended.
            assert lake.maintain.index(feed.TABLE, verify=True).outcome in ("indexed", "nothing_to_do")
            check_lake(lake.catalog)
            self.rows = feed.check_history(lake, self.dice, from_version=self.checked, rows=self.rows)
            self.checked = self.version
            assert feed.read_rows(lake) == self.rows


@pytest.mark.parametrize(("database", "seed"), [("sqlite", 1), ("postgresql", 3)])
def test_random_faults_and_kills_match_the_dict(new_place: Callable[[str], Place], database: str, seed: int) -> None:
    troubled = Troubled(new_place(database), seed)
    for step in range(60):
        try:
            troubled.step()
            if step % 6 == 5:
                troubled.check()
        except BaseException:
            print(f"seed {seed}, step {step}")
            raise


@pytest.mark.soak
def test_soak(new_place: Callable[[str], Place]) -> None:
    seed = int(os.environ.get("FLOODMARK_SOAK_SEED", "0")) or random.SystemRandom().randint(1, 10**9)
    print(f"seed {seed}")
    for number in range(10):
        run_feed(new_place("sqlite"), seed + number, 2000)
        troubled = Troubled(new_place("postgresql"), seed + number)
        for _ in range(300):
            troubled.step()
        troubled.check()
