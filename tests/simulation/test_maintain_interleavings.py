"""Compaction, expiry and sweeps beside writers, pins, healers and each other: all orders of their steps, up to a bound.

Without any grace, so that what nothing holds goes at once. Whatever the order was: every version that can be read, and
every one that is pinned, has exactly the rows that its commits say; and a last healing and sweep leave nothing over.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.history import LIVE
from floodmark.maintenance.record import MaintenanceRun
from floodmark.model import SNAPSHOTS_KEPT
from floodmark.testing.children import Child
from floodmark.testing.explorer import ExploredRun, explore
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, Place
from tests.simulation import feed

# What these show does not depend on the database; the door that they pass is shown on both elsewhere.
pytestmark = pytest.mark.mostly_sqlite

LAKES_LAST = 12
# Orders between two looks for what is left over: what one of them left is still there.
CLEAR_EVERY = 4
SWEPT = {"swept", "nothing_to_do"}
COMPACTED = {"compacted", "partial", "conflict", "nothing_to_do", "below_threshold"}
EXPECTED = {
    "compact": COMPACTED,
    "index": {"indexed", "partial", "conflict", "nothing_to_do"},
    "expire": {"expired", "nothing_to_do"},
}
REFUSED = (fm.Invalid, fm.Conflict)


class Judge:
    """Knows the rows of every version from what the commits say, and reads back what can be read."""

    def __init__(self, lake: fm.Lake) -> None:
        self.lake = lake
        self.versions: dict[int, feed.Rows] = {1: {}}

    def check(self) -> None:
        """Every version that can be read has exactly its rows."""
        self.look()
        with self.lake.catalog.database.read() as tx:
            live = tx.execute(select(tables.commits.c.version).where(tables.commits.c.state == LIVE)).scalars().all()
        for version in live:
            found = feed.read_rows(self.lake, version)
            assert found == self.versions[version], f"version {version}: {found} is not {self.versions[version]}"

    def look(self) -> None:
        newest = max(self.versions)
        for commit in sorted(self.lake.history(limit=100), key=lambda commit: commit.version):
            if commit.version > newest:
                rows = self.versions[commit.version - 1]
                if commit.kind != "compact" and commit.tables:
                    rows = feed.apply(rows, json.loads(commit.message), commit.tables[0].sequence)
                self.versions[commit.version] = rows

    def clear(self) -> None:
        """After a last healing, expiry and sweep: nothing is left over, and nothing is gone."""
        maintain = self.lake.maintain
        assert maintain.expire(keep="0s").outcome in ("expired", "nothing_to_do")
        done = maintain.sweep(grace="0s")
        assert done.outcome in SWEPT, done.as_dict()
        deep = maintain.sweep(grace="0s", deep=True)
        assert deep.outcome == "nothing_to_do", deep.as_dict()
        check_lake(self.lake.catalog)
        self.check()


class World:
    """A lake and its actors. With a healer leases end at once, so that it takes over whoever it meets half-way."""

    def __init__(self, new_place: Callable[[], Place], scenario: tuple[str, ...]) -> None:
        self._new_place = new_place
        self._scenario = scenario
        self._runs = 0
        self._key = 0
        self._lakes: dict[str, fm.Lake] = {}
        self._pinned: tuple[int, str] | None = None

    def make(self) -> Mapping[str, Callable[[], Any]]:
        if self._runs % LAKES_LAST == 0:
            self.close()
            place = self._new_place()
            with place.open(create=True) as lake:
                feed.make(lake, [])
            lease = {"lease_ms": -60_000} if "heal" in self._scenario else {}
            self._lakes = {name: place.open(recover=False, **lease) for name in (*self._scenario, "judge")}
            self._judge = Judge(self._lakes["judge"])
            for value in range(3):
                self._write("judge", "merge", [[30, value, "a"], [31, value, "b"], [32, value, "c"]])
        self._runs += 1
        self._key = 3 * self._runs % 30
        self._pinned = None
        # Two small files, rows that go, and states that are dead as soon as they expire.
        self._write("judge", "merge", [[self._key, self._runs, "a"], [30 + self._runs % 3, self._runs, "b"]])
        self._write("judge", "delete", ["id", "=", 30 + (self._runs + 1) % 3])
        return {name: getattr(self, name) for name in self._scenario}

    def _write(self, lake: str, verb: str, what: list[Any]) -> fm.Commit:
        content = {"where": what} if verb == "delete" else {"rows": what}
        return feed.perform(self._lakes[lake], {"verb": verb, **content})

    def close(self) -> None:
        for lake in self._lakes.values():
            lake.close()
        self._lakes = {}

    # ── actors ──

    def delete(self) -> fm.Commit:
        return self._write("delete", "delete", ["id", "=", 30 + (self._runs + 2) % 3])

    def merge(self) -> fm.Commit:
        return self._write("merge", "merge", [[self._key, -1, "c"], [33, self._runs, "c"]])

    def rollback(self) -> fm.Commit:
        return feed.perform(self._lakes["rollback"], {"verb": "rollback", "back": 1})

    def compact(self) -> MaintenanceRun:
        return self._lakes["compact"].maintain.compact(feed.TABLE, files_min=2)

    def expire(self) -> MaintenanceRun:
        return self._lakes["expire"].maintain.expire(keep="0s")

    def sweep(self) -> MaintenanceRun:
        return self._lakes["sweep"].maintain.sweep(grace="0s")

    def deep(self) -> MaintenanceRun:
        return self._lakes["deep"].maintain.sweep(grace="0s", deep=True)

    def cycle(self) -> MaintenanceRun:
        """A second keeper that does all of it."""
        return self._lakes["cycle"].maintain.run(files_min=2, keep="0s", grace="0s")

    def heal(self) -> Any:
        return self._lakes["heal"].recover()

    def pin(self) -> int:
        history = self._lakes["pin"].catalog.history
        version = history.resolve() - 1
        self._pinned = version, history.pin(version, holder="test", reason="explored")
        return version

    # ── what must hold, whatever the order was ──

    def check(self, run: ExploredRun) -> None:
        judge = self._judge
        judge.lake.recover()
        judge.look()
        for name, actor in run.actors.items():
            self._check_actor(name, actor.result, actor.error)
        judge.check()
        if self._pinned is not None:
            version, pin = self._pinned
            assert feed.read_rows(judge.lake, version) == judge.versions[version]
            judge.lake.maintain.sweep(grace="0s")
            assert feed.read_rows(judge.lake, version) == judge.versions[version]
            judge.lake.catalog.history.unpin(pin)
        if self._runs % CLEAR_EVERY == 0:
            judge.clear()

    def _check_actor(self, name: str, result: Any, error: BaseException | None) -> None:
        fenced = "heal" in self._scenario
        if error is not None:
            # The version that it returns to may have expired just before it was held.
            expired = {"pin": fm.BelowRetention, "rollback": fm.Conflict}
            allowed = {**expired, "delete": fm.Fenced, "merge": fm.Fenced}.get(name)
            assert allowed is not None, f"{name}: {error!r}"
            assert isinstance(error, allowed), f"{name}: {error!r}"
            assert fenced or name in expired, f"{name}: {error!r}"
        elif isinstance(result, MaintenanceRun):
            for record in result.records:
                expected = EXPECTED.get(record.verb, SWEPT)
                taken_over = fenced and record.detail.get("error") == "Fenced"
                assert record.outcome in expected or taken_over, f"{name}: {record.as_dict()}"


# Actors; how many times one may be stopped for another although it could go on, on SQLite and on PostgreSQL; how many
# orders there must be at least on SQLite. `make soak` allows one more.
SCENARIOS = [
    (("compact", "cycle"), 1, 0, 10),
    (("delete", "expire", "sweep"), 1, 0, 60),
    (("sweep", "cycle"), 1, 1, 10),
    (("pin", "expire", "sweep"), 1, 0, 25),
    (("rollback", "expire", "sweep"), 1, 0, 60),
    (("compact", "heal", "cycle"), 0, 0, 5),
    (("merge", "compact", "expire", "deep"), 0, 0, 20),
]


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize(("scenario", "on_sqlite", "on_postgresql", "at_least"), SCENARIOS)
def test_every_order_of_maintenance_and_others_keeps_what_can_be_read(
    new_place: Callable[[str], Place],
    database: str,
    scenario: tuple[str, ...],
    on_sqlite: int,
    on_postgresql: int,
    at_least: int,
) -> None:
    bound = on_sqlite if database == "sqlite" else on_postgresql
    count = explored(lambda: new_place(database), scenario, bound)
    assert count >= (at_least if bound == on_sqlite else 2)


@pytest.mark.soak
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize(("scenario", "bound"), [(scenario, bound + 1) for scenario, bound, *_ in SCENARIOS])
def test_soak_more_orders(
    new_place: Callable[[str], Place], database: str, scenario: tuple[str, ...], bound: int
) -> None:
    assert explored(lambda: new_place(database), scenario, bound) > 20


def explored(new_place: Callable[[], Place], scenario: tuple[str, ...], bound: int) -> int:
    world = World(new_place, scenario)
    count = explore(world.make, preemptions=bound, check=world.check)
    world.close()
    print(f"{'+'.join(scenario)}: {count} orders within {bound} preemptions")
    return count


# ── between any two calls ──


class Between(FaultyStorage):
    """Lets others act before the Nth call of one lake's storage or database, whichever comes first."""

    def __init__(self, act_at: int, act: Callable[[], object]) -> None:
        super().__init__()
        self._left = act_at
        self._act = act
        self._actor_thread = threading.get_ident()
        self._transactions = 0
        self.acted = False

    def _strikes(self, verb: str) -> bool:
        # What it writes is its own, and nobody else's business.
        if verb in ("read", "open_input", "list", "delete", "delete_many", "delete_prefix"):
            self._step()
        return False

    def _step(self) -> None:
        # A heartbeat's calls are its own; inside a transaction others would only wait for its end.
        if threading.get_ident() != self._actor_thread or self._transactions:
            return
        self._left -= 1
        if self._left == 0:
            self.acted = True
            self._act()

    def watch(self, lake: fm.Lake) -> fm.Lake:
        database = lake.catalog.database
        for name in ("read", "write"):
            setattr(database, name, self._watched(getattr(database, name)))
        return lake

    def _watched(self, transaction: Callable[[], Any]) -> Callable[[], Any]:
        @contextmanager
        def watched() -> Iterator[Any]:
            self._step()
            own = threading.get_ident() == self._actor_thread
            self._transactions += own
            try:
                with transaction() as tx:
                    yield tx
            finally:
                self._transactions -= own

        return watched


def others_act(other: fm.Lake, dice: random.Random) -> None:
    """Rows come and go; then everything is rewritten, expires, and is swept: more versions than a table keeps."""
    for number in range(SNAPSHOTS_KEPT):
        verb = "delete" if number == 2 else "merge"
        what = {"where": ["id", "<", 9]} if number == 2 else {"rows": feed.random_rows(dice)}
        feed.perform(other, {"verb": verb, **what})
    done = other.maintain.run(files_min=2, keep="0s", grace="0s")
    assert done.exit_code == 0, done.as_dict()


def compact_between(lake: fm.Lake, judge: Judge) -> None:
    (record,) = lake.maintain.compact(feed.TABLE, files_min=2).records
    assert record.outcome in COMPACTED, record.as_dict()


def sweep_between(lake: fm.Lake, judge: Judge) -> None:
    lake.maintain.expire(keep="0s")
    done = lake.maintain.sweep(grace="0s")
    assert done.outcome in SWEPT, done.as_dict()


def deep_between(lake: fm.Lake, judge: Judge) -> None:
    done = lake.maintain.sweep(grace="0s", deep=True)
    assert done.outcome in SWEPT, done.as_dict()


def write_between(lake: fm.Lake, judge: Judge) -> None:
    with suppress(*REFUSED):
        feed.perform(lake, {"verb": "delete", "where": ["part", "=", "a"]})


def read_between(lake: fm.Lake, judge: Judge) -> None:
    """A reader gets all rows of some version, or is told that it was too slow."""
    with suppress(fm.BelowRetention):
        found = feed.read_rows(lake)
        judge.look()
        assert found in judge.versions.values()


def follow_between(lake: fm.Lake, judge: Judge) -> None:
    """Who follows from a state that it knows comes to the next one, or is told that it cannot."""
    judge.look()
    version = max(judge.versions)
    known, since = dict(judge.versions[version]), lake.catalog.history.tables_at(version)[feed.TABLE].sequence
    feed.perform(judge.lake, {"verb": "delete", "where": ["id", "<", 12]})
    with suppress(fm.BelowRetention):
        found = lake.changes(feed.TABLE, since)
        feed.fold(known, found.arrow().read_all().to_pylist(), since, found.until)
        judge.look()
        assert known == judge.versions[found.version]


def rollback_between(lake: fm.Lake, judge: Judge) -> None:
    """The rows of the version come back, whatever was done meanwhile; or it expired before it was held."""
    with suppress(*REFUSED):
        feed.perform(lake, {"verb": "rollback", "back": 1})


def diff_between(lake: fm.Lake, judge: Judge) -> None:
    """What differs between the two newest versions, or an error that says that one of them expired."""
    judge.look()
    newest = max(judge.versions)
    one, other = ({key: row[:2] for key, row in judge.versions[at].items()} for at in (newest - 1, newest))
    with suppress(fm.BelowRetention):
        (found,) = lake.diff(newest - 1, newest).tables
        assert found.rows_added == len(other.keys() - one.keys())
        assert found.rows_deleted == len(one.keys() - other.keys())
        assert found.rows_updated == sum(one[key] != other[key] for key in one.keys() & other.keys())


VERBS = {
    "rollback": rollback_between,
    "diff": diff_between,
    "compact": compact_between,
    "sweep": sweep_between,
    "deep": deep_between,
    "write": write_between,
    "read": read_between,
    "follow": follow_between,
}


# Those that make many calls are interrupted at every second one here, and at every one in `make soak`.
STEPS = {"sweep": 2, "deep": 2, "compact": 2, "write": 2, "rollback": 2}


@pytest.mark.parametrize("verb", VERBS)
def test_whatever_others_do_between_two_calls_nothing_is_lost(new_place: Callable[[str], Place], verb: str) -> None:
    assert interrupted(lambda: new_place("sqlite"), verb, STEPS.get(verb, 1)) > 4, "hardly any call was counted"


@pytest.mark.soak
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("verb", VERBS)
def test_soak_others_between_any_two_calls(new_place: Callable[[str], Place], database: str, verb: str) -> None:
    assert interrupted(lambda: new_place(database), verb, 1) > 4


def interrupted(new_place: Callable[[], Place], verb: str, step: int) -> int:
    """Let others act before the 1st call, then before the next one, … until it makes no more; how many it made."""
    dice = random.Random(verb)
    number, runs, acted = 1 - step, 0, True
    with ExitStack() as lakes:
        while acted:
            number, runs = number + step, runs + 1
            if runs % LAKES_LAST == 1:
                lakes.close()
                place = new_place()
                first, other = (lakes.enter_context(place.open(create=True)) for _ in range(2))
                feed.make(first, [])
                judge = Judge(first)
            rows = [[key, number, "abc"[key % 3]] for key in range(4, 24)]
            feed.perform(first, {"verb": "merge", "rows": rows})
            feed.perform(first, {"verb": "delete", "where": ["id", "=", 4 + number % 20]})
            between = Between(number, partial(others_act, other, dice))
            with between.watch(place.open(storage=between, recover=False)) as lake:
                VERBS[verb](lake, judge)
            acted = between.acted
            judge.check()
            if runs % 5 == 0 or not acted:
                first.recover()
                judge.clear()
    return number


# ── two real processes ──


def hammer(place: Place, seed: int, steps: int) -> tuple[int, dict[str, int], list[str]]:
    """Write and maintain at random; how many writes, what maintenance came to, and what must not have been."""
    dice = random.Random(seed)
    written, outcomes, bad = 0, Counter[str](), list[str]()
    with place.open() as lake:
        verbs: list[Callable[[], MaintenanceRun]] = [
            lambda: lake.maintain.compact(feed.TABLE, files_min=2),
            lambda: lake.maintain.expire(keep="0s"),
            lambda: lake.maintain.sweep(grace="0s"),
            lambda: lake.maintain.sweep(grace="0s", deep=True),
        ]
        for _ in range(steps):
            if dice.random() < 0.6:
                with suppress(*REFUSED):
                    written += feed.perform(lake, feed.random_operation(dice)).outcome == "committed"
                continue
            done = dice.choice(verbs)()
            outcomes[done.outcome] += 1
            bad += [str(record.as_dict()) for record in done.records if record.outcome in ("failed", "refused")]
    return written, dict(outcomes), bad


@pytest.mark.parametrize("database", DATABASES)
def test_two_processes_write_and_maintain_while_a_third_reads(new_place: Callable[[str], Place], database: str) -> None:
    place = new_place(database)
    with place.open(create=True) as lake:
        feed.make(lake, [])
        judge = Judge(lake)
        for number in range(4):
            feed.perform(lake, {"verb": "merge", "rows": [[key, number, "a"] for key in range(30)]})
        judge.look()
        pinned = max(judge.versions)
        lake.catalog.history.pin(pinned, holder="test", reason="read again and again")
        children = [Child(hammer, place, seed, 60) for seed in (21, 22)]
        reads = slow = 0
        while any(child.process.is_alive() for child in children):
            assert feed.read_rows(lake, pinned) == judge.versions[pinned]
            try:
                version = lake.catalog.history.resolve()
                found = feed.read_rows(lake, version)
            except fm.BelowRetention:
                slow += 1
                continue
            judge.look()
            assert found == judge.versions[version]
            reads += 1
        done = [child.wait() for child in children]
        assert [bad for _, _, found in done for bad in found] == []
        assert sum(written for written, _, _ in done) > 30
        assert sum(outcomes.get("swept", 0) for _, outcomes, _ in done) > 2
        assert reads > 2
        lake.recover()
        judge.check()
        assert feed.read_rows(lake, pinned) == judge.versions[pinned]
        judge.clear()
