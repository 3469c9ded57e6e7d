"""The journal under damage, and writers that wake up after their lease was taken.

What cannot be understood is refused by name and kept; what is understood is settled meanwhile; only an operator gives
anything up. A late writer gets its published commit or Fenced, never a second copy.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.commit.seal import INLINE_BYTES_MAX, seal_hash
from floodmark.repair.examine import examine_lake
from floodmark.storage import local_path
from floodmark.testing.children import Child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows

WIDE_PARTITIONS = 220


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("notes", EVENTS)
        lake.append("events", rows(1, 2))


def append_two_and_die(place: Place, batch: str | None, point: str) -> None:
    """Leave two dead operations: one sealed with a batch, and a later one that is killed at `point`.

    Both are of one process, so that the second's healing does not settle the first.
    """
    sealed = threading.Event()

    def watch(name: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            if name == "append.sealed":
                sealed.set()
                threading.Event().wait()
        elif name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.observer = watch
    with place.open() as lake:
        first = threading.Thread(
            target=lake.append, args=("events", rows(3, 4)), kwargs={"batch": "monday"}, daemon=True
        )
        first.start()
        assert sealed.wait(60)
        lake.append("notes", rows(5), batch=batch)


def leave_two(place: Place, batch: str | None, point: str) -> tuple[Any, Any]:
    child = Child(append_two_and_die, place, batch, point)
    child.wait()
    assert child.killed
    with place.open(read_only=True) as lake, lake.catalog.database.read() as tx:
        query = select(tables.operations).where(tables.unfinished).order_by(tables.operations.c.id)
        first, second = tx.execute(query)
    return first, second


def append_wide(place: Place) -> None:
    with place.open() as lake:
        lake.append("wide", [{"id": number} for number in range(WIDE_PARTITIONS)], batch="wide")


def operation_row(place: Place, **where: str) -> Any:
    with place.open(read_only=True) as lake, lake.catalog.database.read() as tx:
        query = select(tables.operations).filter_by(**where).order_by(tables.operations.c.id.desc())
        return tx.execute(query).first()


def change_row(place: Place, operation: str, **values: Any) -> None:
    with place.open(recover=False) as lake, lake.catalog.database.write() as tx:
        tx.execute(update(tables.operations).where(tables.operations.c.id == operation).values(**values))


def files_of(row: Any) -> list[str]:
    folders = [local_path(folder) or "" for folder in json.loads(row.folders)]
    return sorted(str(path) for folder in folders for path in Path(folder).rglob("*") if path.is_file())


# ── what cannot be understood ──


def reseal(row: Any, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The seal after `change`, with a hash that fits: as another version of the program could have written it."""
    data = json.loads(row.seal)
    change(data)
    text = json.dumps(data)
    return {"seal": text, "seal_hash": seal_hash(text)}


DAMAGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "a payload that is not what was hashed": lambda row: {"seal": row.seal.replace('"rows":2', '"rows":3')},
    "a payload cut off": lambda row: {"seal": row.seal[:-40]},
    "no payload": lambda row: {"seal": None},
    "an unknown state": lambda row: {"state": "floating"},
    "an unknown rider": lambda row: reseal(row, lambda data: data["riders"].append({"type": "mystery"})),
    "an unknown action": lambda row: reseal(row, lambda data: data["edits"][0].update(action="vanish")),
    "a newer seal": lambda row: reseal(row, lambda data: data.update(format=99)),
}
# The same path through the code on either database; two of them are shown on both.
ON_BOTH = {"a payload that is not what was hashed", "an unknown state"}
CASES = [
    (database, damage)
    for damage in DAMAGES
    for database in ("sqlite", "postgresql")
    if database == "sqlite" or damage in ON_BOTH
]


def check_refused(place: Place, damaged: Any) -> None:
    """Opening for writing names the operation and keeps it; reading goes on, and says what is wrong."""
    files = files_of(damaged)
    assert files
    for _ in range(2):
        with pytest.raises(fm.Corrupt) as caught:
            place.open()
        assert caught.value.facts["operation"] == damaged.id
    with place.open(recover=False) as lake, pytest.raises(fm.Corrupt):
        lake.append("events", rows(9))
    assert operation_row(place, id=damaged.id) == damaged
    assert files_of(damaged) == files
    with place.open(read_only=True) as lake:
        assert ids(lake) == [1, 2]
        status = lake.status()
        assert damaged.id in status["unknown"] + status["pending"]
        assert status["health"] != "fine"
        journal = next(check for check in examine_lake(lake.catalog) if check.name == "journal")
        assert not journal.passed
        assert damaged.id in journal.detail


def check_discarded(place: Place, damaged: Any) -> None:
    """Given up by an operator: one audit row, no files, and the lake goes on."""
    with place.open(recover=False) as lake:
        report = lake.recover(discard=[damaged.id])
        assert report.discarded == (damaged.id,)
        assert report.outcome == "recovered"
        with pytest.raises(fm.NotFound):
            lake.recover(discard=[damaged.id])
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert facts.operations[damaged.id] == "abandoned"
        assert facts.audit[damaged.id] == "discarded"
        assert [row.operation for row in lake.audit()].count(damaged.id) == 1
        assert lake.append("events", rows(3, 4), batch="monday").outcome == "committed"
        assert ids(lake) == [1, 2, 3, 4]
        assert lake.status()["health"] == "fine"


@pytest.mark.parametrize(("database", "damage"), CASES)
def test_what_cannot_be_understood_is_refused_kept_and_only_given_up_by_an_operator(
    new_place: Callable[[str], Place], database: str, damage: str
) -> None:
    place = new_place(database)
    prepare(place)
    damaged, other = leave_two(place, None, "append.staged")
    change_row(place, damaged.id, **DAMAGES[damage](damaged))
    damaged = operation_row(place, id=damaged.id)

    check_refused(place, damaged)
    with place.open(read_only=True) as lake:
        # The other dead operation was settled meanwhile, and once.
        assert {row.operation: row.outcome for row in lake.audit()} == {other.id: "rolled_back"}
    assert files_of(other) == []
    check_discarded(place, damaged)


@pytest.mark.parametrize(
    ("database", "damage"), [("sqlite", "gone"), ("postgresql", "gone"), ("sqlite", "changed"), ("sqlite", "not text")]
)
def test_a_payload_kept_as_an_object_that_is_gone_or_damaged_is_refused_and_kept(
    new_place: Callable[[str], Place], database: str, damage: str
) -> None:
    place = new_place(database)
    prepare(place)
    with place.open() as lake:
        lake.create_table("wide", "id long", partition=["id"])
    assert run_killed(append_wide, place, failpoint="append.sealed")
    damaged = operation_row(place, state="staged")
    assert damaged.seal is None
    path = Path(local_path(damaged.seal_location) or "")
    assert path.stat().st_size > INLINE_BYTES_MAX
    if damage == "gone":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(path.read_bytes().replace(b'"rows":1', b'"rows":2', 1))
    else:
        path.write_bytes(b"\xff\xfe" * 40_000)
    check_refused(place, damaged)
    check_discarded(place, damaged)


def test_a_payload_kept_as_an_object_is_rolled_forward_and_leaves_no_object(place: Place) -> None:
    prepare(place)
    with place.open() as lake:
        lake.create_table("wide", "id long", partition=["id"])
    assert run_killed(append_wide, place, failpoint="append.sealed")
    operation = operation_row(place, state="staged")
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert facts.audit == {operation.id: "rolled_forward"}
        assert ids(lake, "wide") == list(range(WIDE_PARTITIONS))
        assert lake.append("wide", [{"id": 1}], batch="wide").outcome == "already_committed"


def test_a_row_whose_folders_cannot_be_read_is_refused_too_and_does_not_stop_the_healing_of_others(
    place: Place,
) -> None:
    prepare(place)
    damaged, other = leave_two(place, None, "append.staged")
    change_row(place, damaged.id, folders="{{", state="staging")
    with pytest.raises(fm.Corrupt) as caught:
        place.open()
    assert caught.value.facts["operation"] == damaged.id
    assert operation_row(place, id=damaged.id).folders == "{{"
    with place.open(read_only=True) as lake:
        assert {row.operation: row.outcome for row in lake.audit()} == {other.id: "rolled_back"}
    with place.open(recover=False) as lake:
        assert lake.recover(discard=[damaged.id]).discarded == (damaged.id,)
    with place.open() as lake:
        assert lake.append("events", rows(3)).outcome == "committed"
        assert [row.operation for row in lake.audit()].count(damaged.id) == 1


def test_only_what_is_named_is_given_up(place: Place) -> None:
    prepare(place)
    first, second = leave_two(place, "tuesday", "append.sealed")
    change_row(place, first.id, state="floating")
    change_row(place, second.id, seal="{}")
    with place.open(recover=False) as lake:
        with pytest.raises(fm.Corrupt) as caught:
            lake.recover(discard=[first.id])
        assert caught.value.facts["operation"] == second.id
        assert [row.operation for row in lake.audit()] == [first.id]
    assert operation_row(place, id=second.id).seal == "{}"
    check_discarded(place, operation_row(place, id=second.id))


def test_nothing_but_what_is_stuck_can_be_given_up(place: Place) -> None:
    prepare(place)
    with place.open() as lake:
        published = lake.history(limit=1)[0].operation
        for operation in ("01ARZ3NDEKTSV4RRFFQ69G5FAV", str(published)):
            with pytest.raises(fm.NotFound):
                lake.recover(discard=[operation])
        with paused(lake, "append.sealed", plain) as writer, place.open() as other:
            with pytest.raises(fm.Busy):
                other.recover(discard=other.status()["running"])
            writer.go.set()
            assert writer.result.result(60).outcome == "committed"
        assert ids(lake) == [1, 2, 3, 4]
        check_lake(lake.catalog)


# ── a writer whose lease was taken ──


@dataclass
class Paused:
    """A write in a thread of its own, held at a failpoint until it is let go."""

    lake: fm.Lake
    result: Future[Any]
    go: threading.Event


@contextmanager
def paused(lake: fm.Lake, point: str, write: Callable[[fm.Lake], Any]) -> Iterator[Paused]:
    reached, go = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == point and not reached.is_set():
            reached.set()
            assert go.wait(60)

    failpoints.observer = hold
    try:
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(write, lake)
            try:
                assert reached.wait(60), "the point was never passed"
                yield Paused(lake, result, go)
            finally:
                go.set()
    finally:
        failpoints.observer = None


def end_leases(lake: fm.Lake) -> None:
    """As if the processes had not renewed their leases for a long time, by the database's clock."""
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.processes).values(beat_ms=0))


def plain(lake: fm.Lake) -> fm.Commit:
    return lake.append("events", rows(3, 4))


def with_batch(lake: fm.Lake) -> fm.Commit:
    return lake.append("events", rows(3, 4), batch="monday")


def both_tables(lake: fm.Lake) -> fm.Commit:
    with lake.transaction("both", batch="monday") as tx:
        tx.append("events", rows(3, 4))
        tx.append("notes", rows(5))
    assert tx.commit is not None
    return tx.commit


@pytest.mark.parametrize(
    ("point", "write"),
    [("append.sealed", with_batch), ("append.built", with_batch), ("transaction.built", both_tables)],
)
def test_a_late_writer_with_an_identity_gets_the_commit_that_the_healer_published(
    place: Place, point: str, write: Callable[[fm.Lake], fm.Commit]
) -> None:
    prepare(place)
    with place.open() as lake, paused(lake, point, write) as writer:
        with place.open() as other:
            assert other.status()["running"], "a living writer's lease was taken"
            assert ids(other) == [1, 2]
        end_leases(lake)
        with place.open() as healer:
            assert ids(healer) == [1, 2, 3, 4]
            healed = healer.history(limit=1)[0]
            assert healer.append("events", rows(6)).version == healed.version + 1
        writer.go.set()
        commit = writer.result.result(60)
        assert commit == healed
        assert ids(lake) == [1, 2, 3, 4, 6]
        facts = check_lake(lake.catalog)
        assert facts.audit == {healed.operation: "rolled_forward"}
        assert write(lake).outcome == "already_committed"
        assert lake.append("events", rows(7)).outcome == "committed"


@pytest.mark.parametrize(
    ("point", "write"),
    [("append.begun", plain), ("append.staged", with_batch), ("append.sealed", plain), ("append.built", plain)],
)
def test_a_late_writer_that_was_undone_is_fenced_and_leaves_nothing(
    place: Place, point: str, write: Callable[[fm.Lake], fm.Commit]
) -> None:
    prepare(place)
    with place.open() as lake, paused(lake, point, write) as writer:
        end_leases(lake)
        with place.open() as healer:
            operation = healer.audit()[0]
            assert operation.outcome == "rolled_back"
        writer.go.set()
        with pytest.raises(fm.Fenced) as caught:
            writer.result.result(60)
        assert caught.value.facts["operation"] == operation.operation
        assert lake.resolve(operation.operation) is None
        assert ids(lake) == [1, 2]
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert facts.audit == {operation.operation: "rolled_back"}
        # It was told so, so it may send its rows again: they come in once.
        assert write(lake).outcome == "committed"
        assert ids(lake) == [1, 2, 3, 4]


def test_a_published_commit_is_not_touched_when_its_writer_is_late(place: Place) -> None:
    prepare(place)
    with place.open() as lake, paused(lake, "append.published", plain) as writer:
        end_leases(lake)
        with place.open() as healer:
            assert ids(healer) == [1, 2, 3, 4]
            assert healer.audit() == []
        writer.go.set()
        assert writer.result.result(60).version == 4
        check_lake(lake.catalog)


LEASE_MS = 1500


def append_and_stop(place: Place, batch: str | None, number: int) -> Any:
    """Append one row, and stop this process (SIGSTOP) between seal and publish. Returns the version, or the error."""
    with place.open(lease_ms=LEASE_MS) as lake:

        def last_beat() -> int:
            with lake.catalog.database.read() as tx:
                query = select(func.max(tables.processes.c.beat_ms)).where(tables.processes.c.pid == os.getpid())
                return int(tx.execute(query).scalar_one())

        def stop(name: str) -> None:
            if name == "append.built":
                failpoints.observer = None
                # Right after a beat, so that the heartbeat is not stopped inside its own transaction.
                seen = last_beat()
                while last_beat() == seen:
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGSTOP)

        failpoints.observer = stop
        try:
            return lake.append("events", rows(number), batch=batch).version
        except fm.Fenced as error:
            return error.facts["operation"]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_processes_stopped_past_their_lease_get_the_commit_or_are_fenced(place: Place) -> None:
    prepare(place)
    children = [Child(append_and_stop, place, "monday", 3), Child(append_and_stop, place, None, 4)]
    try:
        deadline = time.monotonic() + 30
        while not all(is_stopped(child.pid) for child in children):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with place.open(recover=False) as lake:
            while lake.status()["running"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            lake.recover()
            assert ids(lake) == [1, 2, 3]
            healed = {row.outcome: row for row in lake.audit()}
            assert sorted(healed) == ["rolled_back", "rolled_forward"]
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGCONT)
    answers = [child.wait() for child in children]
    assert answers == [healed["rolled_forward"].version, healed["rolled_back"].operation]
    with place.open() as lake:
        assert ids(lake) == [1, 2, 3]
        facts = check_lake(lake.catalog)
        assert facts.audit == {row.operation: row.outcome for row in healed.values()}
