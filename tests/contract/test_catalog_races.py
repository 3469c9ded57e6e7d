"""Schedules that once broke a promise, or would break a simpler design; each on every database."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import event, select, text, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.leases import Heartbeat
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows


def test_rows_that_lost_a_race_get_the_sequence_of_their_own_commit(lake: fm.Lake, place: Place) -> None:
    with place.open() as other:
        with at("append.built", lambda: other.append("events", rows(1))):
            late = lake.append("events", rows(2))
        assert late.table("events").sequence == 2
        head = other.catalog.history.head("events")
        found = {
            entry.data_file.file_path: entry.sequence_number
            for manifest in other.catalog.files.manifests(head.manifest_list)
            for entry in other.catalog.files.entries(manifest)
        }
        assert sorted(found.values()) == [1, 2], "the change feed would skip the rows of the late commit"
        check_lake(other.catalog)
    check_lake(lake.catalog)


def test_a_catalog_that_turns_read_only_leaves_no_commit_for_later(new_place: Callable[[str], Place]) -> None:
    place = new_place("postgresql")
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        engine = lake.catalog.database.engine

        def read_only(connection: Any) -> None:
            connection.execute(text("SET TRANSACTION READ ONLY"))

        with (
            at("append.built", lambda: event.listen(engine, "begin", read_only)),
            pytest.raises(fm.CommitUnknown) as unknown,
        ):
            lake.append("events", rows(1), batch="monday")
        event.remove(engine, "begin", read_only)
        # The caller was told to ask, and whatever the answer is, it stays.
        answer = lake.resolve(unknown.value.operation)
        assert ids(lake) == ([] if answer is None else [1])
        lake.append("events", rows(2))
        assert ids(lake) == ([2] if answer is None else [1, 2])
        check_lake(lake.catalog)


def test_a_commit_that_cannot_be_shown_is_unknown_not_undone(lake: fm.Lake) -> None:
    faults: list[DatabaseFaults] = []

    def break_for_good() -> None:
        # COMMIT is the next call: it is done, its reply is lost, and nothing answers any more.
        faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode="after", stay_broken=True))

    with at("append.moved", break_for_good), pytest.raises(fm.CommitUnknown) as unknown:
        lake.append("events", rows(1))
    faults[0].remove()
    commit = lake.resolve(unknown.value.operation)
    assert commit is not None
    assert commit.rows_added == 1
    assert ids(lake) == [1]
    check_lake(lake.catalog)


class Interrupts:
    """Ctrl-C in the middle of a call of the database driver."""

    def __init__(self, database: Database, call: str, number: int) -> None:
        self.dialect, self.call, self.number, self.fired = database.engine.dialect, call, number, False
        self.real = getattr(self.dialect, call)
        setattr(self.dialect, call, self._interrupted)

    def _interrupted(self, *arguments: Any, **named: Any) -> Any:
        self.number -= 1
        if self.number == 0:
            self.fired = True
            raise KeyboardInterrupt
        return self.real(*arguments, **named)

    def remove(self) -> None:
        delattr(self.dialect, self.call)


@pytest.mark.parametrize("call", ["do_execute", "do_commit"])
@pytest.mark.parametrize("number", [1, 2, 3, 6, 12, 20])
def test_an_interrupt_in_the_catalog_blocks_nobody(lake: fm.Lake, place: Place, call: str, number: int) -> None:
    gc.disable()
    try:
        interrupts = Interrupts(lake.catalog.database, call, number)
        try:
            lake.append("events", rows(1))
        except KeyboardInterrupt:
            assert interrupts.fired
        finally:
            interrupts.remove()
        with place.open() as other:
            other.append("events", rows(2))
        lake.append("events", rows(3))
    finally:
        gc.enable()
    assert ids(lake) in ([2, 3], [1, 2, 3])
    check_lake(lake.catalog)


def test_heartbeats_go_on_after_any_error(place: Place) -> None:
    with place.open(create=True, lease_ms=5_000) as lake:
        lake.create_table("events", EVENTS)
        engine = lake.catalog.database.engine

        def broken(connection: Any) -> None:
            if threading.current_thread().name == "floodmark-heartbeat":
                connection.execute(text("SELECT no_such_column"))

        event.listen(engine, "begin", broken)
        time.sleep(2.8)
        event.remove(engine, "begin", broken)
        thread = next(one for one in threading.enumerate() if one.name == "floodmark-heartbeat")
        assert thread.is_alive()

        def slow() -> None:
            time.sleep(7)
            with place.open() as healer:
                assert healer.recover().rolled_back == ()

        with at("append.staged", slow):
            assert lake.append("events", rows(1)).outcome == "committed"
        check_lake(lake.catalog)


def test_two_first_heartbeats_at_once_make_one_row(place: Place) -> None:
    with place.open(create=True) as lake:
        database = lake.catalog.database
        heartbeat = Heartbeat(database)
        errors: list[BaseException] = []

        def beat() -> None:
            try:
                with database.write() as tx:
                    heartbeat.beat(tx, 2)
            except BaseException as error:  # noqa: BLE001 - told by the assertion below
                errors.append(error)

        other = threading.Thread(target=beat)
        with database.write() as tx:
            database.lock_lake(tx)
            heartbeat.beat(tx, 1)
            other.start()
            time.sleep(0.5)  # the other has found no row by now, and waits
        other.join()
        assert errors == []
        with database.read() as tx:
            query = select(tables.processes.c.beat_ms).where(tables.processes.c.id == heartbeat.id)
            assert tx.execute(query).scalars().all() == [2]


def forked_use(place: Place) -> str:
    lake = place.open()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lake.append("events", rows(9))
            os.write(write, b"appended")
        except fm.Invalid as error:
            os.write(write, error.message.encode())
        finally:
            lake.close()
            os._exit(0)
    os.waitpid(child, 0)
    lake.append("events", rows(1))
    lake.close()
    return os.read(read, 100).decode()


def test_a_forked_child_is_told_to_open_the_lake_itself(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        assert run_child(forked_use, place) == "this lake was opened by another process"
        assert ids(lake) == [1]
        check_lake(lake.catalog)


def read_as_nobody(path: str) -> int | None:
    fm.open(path, read_only=True).close()  # imports what it needs while it still may read everything
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        with fm.open(path, read_only=True) as lake:
            return int(lake.status()["version"])
    except fm.Unavailable:
        return None


def test_a_reader_that_may_not_write_the_folder_is_never_behind() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with fm.open(f"{folder}/lake", create=True) as lake:
            lake.create_table("events", EVENTS)
            for number in range(5):
                lake.append("events", rows(number))
                seen = run_child(read_as_nobody, f"{folder}/lake")
                assert seen in (None, lake.status()["version"]), "refused is right, stale is not"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:hunter2@localhost:1/db?sslpassword=hunter2&host=h&password=hunter2",
        "postgresql+psycopg://me:hunter2@localhost:hunter2/db",
        "postgresql+psycopg://me:hun@ter2:hunter2@localhost/db",
    ],
)
def test_no_secret_of_a_url_is_shown(url: str) -> None:
    try:
        shown = Database(url).shown_url
    except fm.Invalid as error:
        shown = f"{error} {error.__cause__} {error.as_dict()}"
    assert "hunter2" not in shown


def test_a_transaction_filled_by_threads_loses_nothing(lake: fm.Lake) -> None:
    barrier = threading.Barrier(8)

    def fill(number: int) -> None:
        barrier.wait()
        tx.append("events" if number % 2 else "notes", rows(number))

    with lake.transaction("threads") as tx:
        threads = [threading.Thread(target=fill, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (ids(lake, "events"), ids(lake, "notes")) == ([1, 3, 5, 7], [0, 2, 4, 6])
    check_lake(lake.catalog)


def test_a_caught_error_in_a_transaction_leaves_no_files(lake: fm.Lake) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])

    def breaks() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([[1], ["fits"]], schema=schema)
        raise RuntimeError("the source broke")

    with lake.transaction("partly") as tx:
        with pytest.raises(RuntimeError, match="the source broke"):
            tx.append("events", pa.RecordBatchReader.from_batches(schema, breaks()))
        tx.append("notes", rows(1))
    assert (ids(lake, "events"), ids(lake, "notes")) == ([], [1])
    check_lake(lake.catalog)


def test_the_last_progress_of_a_step_counts_its_files_with_all_their_bytes(lake: fm.Lake) -> None:
    told: list[tuple[int, int]] = []
    with lake.transaction("progress") as tx:
        tx.append("events", rows(1), progress=lambda files, size_bytes: told.append((files, size_bytes)))
        (counted,) = told[-1:]
    assert counted == (1, lake.show("events")["bytes"])


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_a_transaction_that_lost_files_of_an_earlier_step_is_not_published(place: Place, mode: str) -> None:
    """The step that fails makes the files of all steps durable: the caller may catch its error, and nothing more."""
    storage = FaultyStorage(mode=mode, verbs=["end"])

    def write(lake: fm.Lake) -> None:
        with lake.transaction("partly") as tx:
            tx.append("events", rows(1))
            tx.append("events", rows(2))
            storage.fail_at = storage.calls_seen + 1
            with pytest.raises(fm.Unavailable):
                tx.delete("notes", "id = 1")
            tx.append("notes", rows(2))

    with place.open(create=True, storage=storage) as lake:
        for table in ("events", "notes"):
            lake.create_table(table, EVENTS)
        commit = lake.append("notes", rows(1))
        with pytest.raises(fm.Unavailable, match="could not be written"):
            write(lake)
        assert storage.fired
        assert lake.history()[0].version == commit.version
        assert (ids(lake, "events"), ids(lake, "notes")) == ([], [1])
        check_lake(lake.catalog)


def test_a_seal_too_big_for_the_journal_leaves_no_trace(lake: fm.Lake) -> None:
    lake.create_table("parts", "id long not null, name string", partition=["id"])
    commit = lake.append("parts", rows(*range(150)), batch="big")
    assert commit.table("parts").files_total == 150
    check_lake(lake.catalog)
    assert os.listdir(Path(lake.location.removeprefix("file://")) / "operations") == []


def killed_at_seal_of_a_big_batch(place: Place) -> None:
    with place.open() as lake:
        lake.append("parts", rows(*range(150)), batch="big")


def test_a_sealed_object_is_rolled_forward(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("parts", "id long not null, name string", partition=["id"])
    assert run_killed(killed_at_seal_of_a_big_batch, place, failpoint="append.sealed")
    with place.open() as lake:
        assert [row.outcome for row in lake.audit()] == ["rolled_forward"]
        assert ids(lake, "parts") == list(range(150))
        check_lake(lake.catalog)


def test_a_folder_that_is_not_quiet_is_looked_at_again(lake: fm.Lake) -> None:
    with pytest.raises(fm.Invalid):
        lake.append("events", [{"id": None, "name": "no id"}])
    with lake.catalog.database.write() as tx:
        operation = tables.operations
        row = tx.execute(operation.select().where(operation.c.state == "abandoned")).one()
        tx.execute(
            update(operation).where(operation.c.id == row.id).values(cleaned=0, ended_ms=row.ended_ms - 3_600_000)
        )
    folder = f"{lake.catalog.files.metadata(lake.show('events')['metadata_location']).location}/data/{row.id}"
    for _ in range(2):
        # However long ago it was abandoned: as long as files turn up, the looking goes on.
        lake.catalog.storage.put(f"{folder}/late.parquet", b"of an executor that outlived its driver")
        assert lake.recover().files_deleted == 1
    check_lake(lake.catalog)


def test_a_write_inside_a_readers_generator_is_durable_when_it_is_acknowledged(lake: fm.Lake) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    counters = lake.catalog.storage.counters
    synced: list[int] = []

    def nested() -> Iterator[pa.RecordBatch]:
        before = counters.snapshot().calls.get("fsync_dir", 0)
        lake.append("notes", rows(1))
        synced.append(counters.snapshot().calls.get("fsync_dir", 0) - before)
        yield pa.record_batch([[2], ["outer"]], schema=schema)

    lake.append("events", pa.RecordBatchReader.from_batches(schema, nested()))
    before = counters.snapshot().calls.get("fsync_dir", 0)
    lake.append("notes", rows(3))
    assert synced == [counters.snapshot().calls.get("fsync_dir", 0) - before]
    assert synced[0] > 0


def test_anybody_can_settle_an_operation_whose_writer_gave_up(place: Place) -> None:
    lake = place.open(create=True, lease_ms=2_000)
    lake.create_table("events", EVENTS)
    faults: list[DatabaseFaults] = []

    def break_for_good() -> None:
        faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode="before", stay_broken=True))

    with at("append.built", break_for_good), pytest.raises(fm.CommitUnknown) as unknown:
        lake.append("events", rows(1))
    faults[0].remove()
    with place.open() as other:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                assert other.resolve(unknown.value.operation) is None
                break
            except fm.Incomplete:
                time.sleep(0.1)
        else:
            pytest.fail("its process went on vouching for it")
        assert ids(other) == []
        check_lake(other.catalog)
    lake.close()


def test_of_two_makers_of_a_table_both_are_content(lake: fm.Lake, place: Place) -> None:
    with place.open() as other:
        with at("create_table.built", lambda: other.create_table("more", EVENTS)):
            assert lake.create_table("more", EVENTS, if_not_exists=True).outcome == "nothing_to_do"
        with (
            at("create_table.built", lambda: other.create_table("again", EVENTS)),
            pytest.raises(fm.Invalid, match="table of this name"),
        ):
            lake.create_table("AGAIN", EVENTS)
    check_lake(lake.catalog)


@pytest.mark.parametrize("batch", ["", "x" * 513, "nul\x00", "half \ud800", 7])
def test_a_batch_id_that_cannot_be_stored_is_refused(lake: fm.Lake, batch: Any) -> None:
    with pytest.raises(fm.Invalid):
        lake.append("events", rows(1), batch=batch)
    assert ids(lake) == []
    check_lake(lake.catalog)


def test_many_threads_on_one_lake_lose_nothing(lake: fm.Lake) -> None:
    def work(number: int) -> None:
        for step in range(3):
            lake.append("events", rows(number * 10 + step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ids(lake) == sorted(number * 10 + step for number in range(8) for step in range(3))
    check_lake(lake.catalog)


def test_a_table_and_its_first_rows_are_one_version(lake: fm.Lake) -> None:
    with lake.transaction("both") as tx:
        tx.create_table("fresh", EVENTS, partition=["bucket(2, id)"])
        tx.append("fresh", rows(1, 2))
        tx.append("fresh", rows(3))
        tx.append("events", rows(4))
    assert tx.commit is not None
    assert (ids(lake, "fresh"), ids(lake, "events")) == ([1, 2, 3], [4])
    assert tx.commit.table("fresh").sequence == 1
    lake.append("fresh", rows(5))
    assert ids(lake, "fresh") == [1, 2, 3, 5]
    version = lake.status()["version"]

    def neither() -> None:
        with lake.transaction("neither") as tx:
            tx.create_table("never", EVENTS)
            tx.append("never", [{"id": None, "name": "no id"}])

    with pytest.raises(fm.Invalid, match="required"):
        neither()
    assert lake.status()["version"] == version
    assert "never" not in {table["table"] for table in lake.tables()}
    check_lake(lake.catalog)
