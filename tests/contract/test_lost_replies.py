"""Lost replies and failing calls: the right answer after asking, and an error means undone.

The database and the storage are real; their Nth call fails, N = 1, 2, … until the run passes. After every single one:
CommitUnknown is decided by resolve(), another error means that nothing happened and nothing will, a returned commit is
there exactly once; also after healing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from pyiceberg.types import LongType

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog.chunks import ChunkRider, LoadedTable
from floodmark.commit.intent import Intent
from floodmark.model import MAIN
from floodmark.testing.children import Child
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.faults import WRITES as WRITES_OF_STORAGE
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from floodmark.testing.postgres import CutProxy, PostgresServer
from floodmark.write.add_column import add_column
from floodmark.write.change import Change
from floodmark.write.step import APPEND
from tests.conftest import EVENTS, Place, ids, rows

# The catalog is read in full after every fault; a new lake now and then keeps that quick.
FAULTS_PER_LAKE = 14
# The keys that a deleting or overwriting write finds; more than there are calls to fail.
PEOPLE = range(200)
VERSIONS_PREPARED = 4
JOB = "years"


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("notes", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        lake.append("people", rows(*PEOPLE))
        jobs = lake.catalog.jobs
        jobs.end(jobs.start(JOB, "history", ["events"], {}, {}, "chunks", "test"), "done", 0, 0)


# ── writes that are tried, each with a number of its own ──


def append(lake: fm.Lake, number: int) -> fm.Commit:
    return lake.append("events", rows(number))


def append_batch(lake: fm.Lake, number: int) -> fm.Commit:
    return lake.append("events", rows(number), batch=str(number))


def transaction(lake: fm.Lake, number: int) -> fm.Commit:
    with lake.transaction("both") as tx:
        tx.append("events", rows(number))
        tx.append("notes", rows(number))
    assert tx.commit is not None
    return tx.commit


def create_table(lake: fm.Lake, number: int) -> fm.Commit:
    return lake.create_table(f"more{number}", EVENTS)


def merge(lake: fm.Lake, number: int) -> fm.Commit:
    return lake.merge("people", [{"id": number, "name": "merged"}])


def delete(lake: fm.Lake, number: int) -> fm.Commit:
    return lake.delete("people", f"id = {number}")


def overwrite(lake: fm.Lake, number: int) -> fm.Commit:
    return lake.overwrite("people", [{"id": number, "name": "overwritten"}], where=f"id = {number}")


def chunk(lake: fm.Lake, number: int) -> fm.Commit:
    """As a history backfill loads it."""
    table_id = lake.catalog.history.head("events").table_id
    rider = ChunkRider.of(lake.catalog.jobs.find(JOB).id, number, (LoadedTable("events", table_id, 1),))
    change = Change.begin(lake.engine, Intent("chunk", MAIN, "test", "", rider))
    try:
        change.write(APPEND, "events", rows(number))
        return change.publish()
    except BaseException as error:  # noqa: BLE001 - undo raises it again, or knows better
        return change.undo(error)


def new_column(lake: fm.Lake, number: int) -> fm.Commit:
    intent = Intent("add_column", MAIN, "test", "")
    return add_column(lake.catalog, intent, "notes", f"more{number}", LongType(), "id")


WRITES: dict[str, Callable[[fm.Lake, int], fm.Commit]] = {
    "append": append,
    "append_batch": append_batch,
    "transaction": transaction,
    "create_table": create_table,
    "merge": merge,
    "delete": delete,
    "overwrite": overwrite,
    "chunk": chunk,
    "add_column": new_column,
}


def numbers(lake: fm.Lake, kind: str) -> list[int]:
    """The numbers whose write happened, read from what is there: all of a write, or none of it."""
    if kind == "create_table":
        return sorted(int(table["table"][4:]) for table in lake.tables() if table["table"].startswith("more"))
    if kind == "add_column":
        names = lake.read_arrow("notes").schema.names
        return sorted(int(name[4:]) for name in names if name.startswith("more"))
    if kind in ("merge", "delete", "overwrite"):
        people = {row["id"]: row["name"] for row in lake.read_arrow("people").read_all().to_pylist()}
        if kind == "delete":
            deleted = [
                row for row in lake.changes("people").arrow().read_all().to_pylist() if row["_change"] == "delete"
            ]
            assert {row["id"] for row in deleted} == set(PEOPLE) - set(people)
            return sorted(set(PEOPLE) - set(people))
        assert set(people) == set(PEOPLE)
        return sorted(number for number, name in people.items() if name != f"row {number}")
    events, notes = ids(lake, "events"), ids(lake, "notes")
    assert notes == (events if kind == "transaction" else [])
    done = [one.chunk for one in lake.catalog.chunks.of(lake.catalog.jobs.find(JOB).id)]
    assert done == (events if kind == "chunk" else [])
    return events


@contextmanager
def at_point(point: str, act: Callable[[], Any]) -> Iterator[None]:
    """Act once, in this process, when the failpoint is passed."""

    def observe(name: str) -> None:
        if name == point:
            failpoints.observer = None
            act()

    failpoints.observer = observe
    try:
        yield
        assert failpoints.observer is None, f"{point} was never passed"
    finally:
        failpoints.observer = None


# ── COMMIT's reply is lost ──


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_lost_reply_to_commit_is_resolved_by_asking(place: Place, mode: str) -> None:
    prepare(place)
    for kind, write in WRITES.items():
        with place.open() as lake:
            version = lake.status()["version"]
            faults: list[DatabaseFaults] = []
            point = f"{kind.removesuffix('_batch')}.moved"

            def lose(lake: fm.Lake = lake, faults: list[DatabaseFaults] = faults) -> None:
                faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode=mode))

            with at_point(point, lose):
                commit = write(lake, len(kind))
            assert faults[0].fired
            assert (commit.version, commit.outcome) == (version + 1, "committed"), kind
            assert commit.operation is not None
            assert lake.resolve(commit.operation) == commit
        with place.open() as lake:
            facts = check_lake(lake.catalog)
            assert (facts.version, facts.audit) == (version + 1, {})
    with place.open() as lake:
        # By the length of their names: chunk, append, append_batch and transaction went into events.
        assert ids(lake) == [5, 6, 11, 12]
        assert ids(lake, "notes") == [11]


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[CutProxy]:
    # A socket's path must be short, so not below the test's own folder.
    with tempfile.TemporaryDirectory() as folder:
        proxy = CutProxy(postgres, Path(folder))
        yield proxy
        proxy.close()


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_connection_cut_in_commit_is_resolved_by_asking(
    postgres: PostgresServer, proxy: CutProxy, tmp_path: Path, cut: str
) -> None:
    database = postgres.new_database()
    place = Place(str(tmp_path / "lake"), postgres.url(database))
    prepare(place)
    through = Place(place.path, postgres.url(database, proxy.folder))
    done = 0
    for kind, write in WRITES.items():
        with through.open() as lake:
            version = lake.status()["version"]
            with at_point(f"{kind.removesuffix('_batch')}.moved", lambda: setattr(proxy, "cut", cut)):
                commit = write(lake, len(kind))
            done += 1
            assert proxy.cuts_done == done
            assert (commit.version, commit.outcome) == (version + 1, "committed"), kind
            assert lake.append("notes", []).outcome == "nothing_to_do"
        with place.open() as lake:
            facts = check_lake(lake.catalog)
            assert (facts.version, facts.audit) == (version + 1, {})
    with place.open() as lake:
        assert ids(lake) == [5, 6, 11, 12]
        assert ids(lake, "notes") == [11]


# ── the database stays away ──


def lose_the_database(place: Place, mode: str, kind: str) -> tuple[int | None, str]:
    """The database is lost in COMMIT and stays away; then it is back, and is asked. Returns the commit's version."""
    with place.open() as lake:
        faults: list[DatabaseFaults] = []

        def lose() -> None:
            faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode=mode, stay_broken=True))

        with at_point(f"{kind.removesuffix('_batch')}.moved", lose), pytest.raises(fm.CommitUnknown) as caught:
            WRITES[kind](lake, 7)
        assert caught.value.operation in str(caught.value)
        with pytest.raises(fm.Unavailable):
            lake.resolve(caught.value.operation)
        faults[0].remove()
        with place.open() as other:
            # Whoever asks from elsewhere, while the writer lives, is told what is known, and no more.
            if mode == "before":
                with pytest.raises(fm.Incomplete):
                    other.resolve(caught.value.operation)
        commit = lake.resolve(caught.value.operation)
        assert commit == lake.resolve(caught.value.operation)
        return None if commit is None else commit.version, caught.value.operation


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_database_that_stays_away_leaves_the_outcome_unknown_until_it_is_asked(
    new_place: Callable[[str], Place], database: str
) -> None:
    # All at once, because each of them waits in vain for a while.
    cases = [(mode, kind) for mode in ("before", "after") for kind in ("append", "append_batch", "transaction")]
    places = [new_place(database) for _ in cases]
    for place in places:
        prepare(place)
    children = [Child(lose_the_database, place, *case) for place, case in zip(places, cases, strict=True)]
    for place, (mode, kind), child in zip(places, cases, children, strict=True):
        version, operation = child.wait()
        # Not sent, and without an identity: undone, because its caller will send it again.
        expected = None if mode == "before" and kind != "append_batch" else VERSIONS_PREPARED + 1
        assert version == expected, (mode, kind)
        with place.open() as lake:
            assert numbers(lake, kind) == ([] if expected is None else [7])
            facts = check_lake(lake.catalog)
            healed = {"append_batch": "rolled_forward"}.get(kind, "rolled_back")
            assert facts.audit == ({operation: healed} if mode == "before" else {})
            resolved = lake.resolve(operation)
            assert (resolved.version if resolved else None) == expected


# ── the Nth call fails ──


class Faults:
    """Faults of a lake's database, at these of its next calls; mended once, all together."""

    def __init__(self, lake: fm.Lake, *numbers: int, mode: str, stay_broken: bool = False) -> None:
        database = lake.catalog.database
        self._laid = [DatabaseFaults(database, fail_at=n, mode=mode, stay_broken=stay_broken) for n in numbers]
        self._mended = False

    @property
    def fired(self) -> bool:
        return all(one.fired for one in self._laid)

    def mend(self) -> None:
        if not self._mended:
            self._mended = True
            self._laid[0].remove()  # which takes away those laid over it too


class Trial:
    """One fault after another against lakes of one kind of write; knows what must be there."""

    def __init__(self, new: Callable[[], Place], kind: str) -> None:
        self._new = new
        self._kind = kind
        self._used = FAULTS_PER_LAKE
        self.unknown = 0
        self.errors = 0

    def open(self, **options: Any) -> fm.Lake:
        """The lake to try the next fault on; a new one now and then, so that reading all of it stays quick."""
        if self._used == FAULTS_PER_LAKE:
            self._place, self._used = self._new(), 0
            self._expected: list[int] = []
            prepare(self._place)
        self._used += 1
        return self._place.open(**options)

    def write(self, lake: fm.Lake, number: int, mend: Callable[[], None]) -> None:
        """Write with the fault in place, and settle what is known of the outcome once it is mended."""
        try:
            commit: fm.Commit | None = WRITES[self._kind](lake, number)
        except fm.CommitUnknown as error:
            self.unknown += 1
            mend()
            commit = lake.resolve(error.operation)
        except fm.FloodmarkError:
            self.errors += 1
            commit = None
        mend()
        if commit is not None:
            assert commit.outcome == "committed"
            assert commit.version == lake.status()["version"]
            self._expected.append(number)
        lake.close()

    def check(self, number: int) -> None:
        """After opening anew, which heals: what was said is true, and stays true."""
        with self._place.open() as lake:
            assert numbers(lake, self._kind) == sorted(self._expected), f"after fault {number}"
            check_lake(lake.catalog)
            assert lake.status()["health"] == "fine"
            if self._kind == "append_batch" and number not in self._expected:
                assert append_batch(lake, number).outcome == "committed"
                self._expected.append(number)
            elif self._kind == "append_batch":
                assert append_batch(lake, number).outcome == "already_committed"


# One of every way to stage, seal and publish. The others pass the same door: with them, only the faults that leave the
# most behind are laid here, and all of them with `-m soak`.
EVERY_FAULT = ("append", "transaction", "merge")


def trials(modes: tuple[str, ...], always: tuple[str, ...]) -> list[Any]:
    """Kinds of writes and of faults."""
    return [
        pytest.param(kind, mode, marks=() if kind in EVERY_FAULT or mode in always else pytest.mark.soak)
        for kind in WRITES
        for mode in modes
    ]


DATABASE_TRIALS = [
    *(
        pytest.param("sqlite", *one.values, False, marks=one.marks)
        for one in trials(("before", "after"), always=("after",))
    ),
    ("sqlite", "append_batch", "before", True),
    *(("postgresql", kind, "after", False) for kind in ("append_batch", "transaction")),
    ("postgresql", "transaction", "before", False),
]


# Of a write's calls each third fails, begun at another one for each kind; with `make soak` all of them.
STEP = 3


def first_of(*case: str) -> int:
    return 1 + crc32("/".join(case).encode()) % STEP


@pytest.mark.parametrize(("database", "kind", "mode", "stay_broken"), DATABASE_TRIALS)
def test_whichever_database_call_fails_the_answer_is_true(
    new_place: Callable[[str], Place], database: str, kind: str, mode: str, stay_broken: bool
) -> None:
    fail_calls_of_a_write(lambda: new_place(database), kind, mode, stay_broken, first_of(kind, mode), STEP)


@pytest.mark.soak
@pytest.mark.parametrize(("database", "kind", "mode", "stay_broken"), DATABASE_TRIALS)
def test_soak_every_database_call_fails(
    new_place: Callable[[str], Place], database: str, kind: str, mode: str, stay_broken: bool
) -> None:
    fail_calls_of_a_write(lambda: new_place(database), kind, mode, stay_broken, 1, 1)


def fail_calls_of_a_write(
    new: Callable[[], Place], kind: str, mode: str, stay_broken: bool, first: int, step: int
) -> None:
    trial = Trial(new, kind)
    fired = True
    number = first - step
    while fired:
        number += step
        lake = trial.open()
        faults = Faults(lake, number, mode=mode, stay_broken=stay_broken)
        trial.write(lake, number, faults.mend)
        trial.check(number)
        fired = faults.fired
    assert number > 25, "hardly any call was counted"
    assert trial.errors > 10 // step
    assert not stay_broken or trial.unknown > 10 // step


def test_more_faults_while_a_lost_reply_is_asked_about_change_no_answer(new_place: Callable[[str], Place]) -> None:
    """COMMIT was done and its reply lost; a call of the asking fails too, and then one of what follows that."""
    trial = Trial(lambda: new_place("sqlite"), "append")
    seconds = [(second, third) for second in range(2, 9) for third in range(second + 1, second + 7)]
    for number, (second, third) in enumerate(seconds):
        lake = trial.open()
        laid: list[Faults] = []

        def lay(lake: fm.Lake = lake, laid: list[Faults] = laid, calls: tuple[int, ...] = (1, second, third)) -> None:
            laid.append(Faults(lake, *calls, mode="after"))

        def mend(laid: list[Faults] = laid) -> None:
            laid[0].mend()

        with at_point("append.moved", lay):
            trial.write(lake, number, mend)
        trial.check(number)


# ── the Nth call of the storage fails ──


STORAGE_TRIALS = trials(("before", "after", "torn", "disk_full", "gone for good"), always=("after", "gone for good"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "mode"), STORAGE_TRIALS)
def test_whichever_storage_call_fails_the_answer_is_true(
    new_place: Callable[[str], Place], kind: str, mode: str
) -> None:
    trial = Trial(lambda: new_place("sqlite"), kind)
    storage = FaultyStorage()
    fired, number = True, 0
    while fired:
        number += 1
        stay_broken = mode == "gone for good"
        storage = FaultyStorage(mode="before" if stay_broken else mode, stay_broken=stay_broken)
        lake = trial.open(storage=storage)
        storage.fail_at = storage.calls_seen + number

        def mend(storage: FaultyStorage = storage) -> None:
            storage.stay_broken, storage.fail_at = False, None

        trial.write(lake, number, mend)
        trial.check(number)
        fired = storage.fired
    assert number > (1 if kind in ("create_table", "add_column") else 3), "hardly any call was counted"
    assert trial.errors > 0


# ── faults during healing ──


def leave_dead(lake: fm.Lake, point: str, number: int, batch: str | None) -> None:
    """A write that lost its database at `point` and never came back: as dead as one of a killed process."""
    laid: list[Faults] = []
    lose = at_point(point, lambda: laid.append(Faults(lake, 1, mode="before", stay_broken=True)))
    with lose, pytest.raises(fm.CommitUnknown):
        lake.append("events", rows(number), batch=batch)
    laid[0].mend()


ROLLED_BACK, ROLLED_FORWARD = ("append.staged", None), ("append.built", "monday")


@pytest.mark.parametrize(
    ("database", "point", "batch", "mode"),
    [
        ("sqlite", *ROLLED_BACK, "after"),
        ("sqlite", *ROLLED_FORWARD, "before"),
        ("sqlite", *ROLLED_FORWARD, "after"),
        ("postgresql", *ROLLED_BACK, "after"),
    ],
)
def test_whichever_database_call_of_healing_fails_the_next_healing_ends_it(
    new_place: Callable[[str], Place], database: str, point: str, batch: str | None, mode: str
) -> None:
    heal_with_faults(lambda: new_place(database), point, batch, lambda lake, n: Faults(lake, n, mode=mode))


@pytest.mark.parametrize(
    ("point", "batch", "mode"),
    [
        *((*ROLLED_BACK, mode) for mode in ("before", "after")),
        *((*ROLLED_FORWARD, mode) for mode in ("before", "after", "torn", "disk_full")),
    ],
)
def test_whichever_storage_call_of_healing_fails_the_next_healing_ends_it(
    new_place: Callable[[str], Place], point: str, batch: str | None, mode: str
) -> None:
    def lay(lake: fm.Lake, number: int) -> FaultyStorage:
        storage = lake.catalog.storage
        assert isinstance(storage, FaultyStorage)
        storage.mode, storage.fail_at = mode, storage.calls_seen + number
        if mode == "disk_full":
            storage.verbs = WRITES_OF_STORAGE
        return storage

    heal_with_faults(lambda: new_place("sqlite"), point, batch, lay)


def heal_with_faults(
    new: Callable[[], Place], point: str, batch: str | None, lay: Callable[[fm.Lake, int], Any]
) -> None:
    """Let the Nth call of healing fail, for N = 1, 2, … until it passes; the next healing must end what is left."""
    place, first = None, 0
    fired, number = True, 0
    while fired:
        number += 1
        if place is None or batch is None or number - first == FAULTS_PER_LAKE:
            # Healing looks at what it undid again for a while: then a new lake each time, else it has ever more to do.
            place, first = new(), number
            prepare(place)
        with place.open(storage=FaultyStorage()) as lake:
            leave_dead(lake, point, number, batch and f"{batch} {number}")
            faults = lay(lake, number)
            with suppress(fm.Unavailable):
                lake.recover()
            fired = faults.fired
            if isinstance(faults, Faults):
                faults.mend()
        with place.open() as lake:
            assert ids(lake) == (list(range(first, number + 1)) if batch else []), f"after fault {number}"
            facts = check_lake(lake.catalog)
            assert len(facts.audit) == number + 1 - first
            assert set(facts.audit.values()) == {"rolled_forward" if batch else "rolled_back"}
            assert lake.recover().outcome == "nothing_to_do"
    assert number > 2
