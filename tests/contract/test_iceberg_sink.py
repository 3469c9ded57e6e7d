"""A sink into another Iceberg catalog: every unit once, in one commit with its own record, beside other writers.

The destination is a real SQL catalog of PyIceberg in another folder; rows are read back by PyIceberg and DuckDB.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import ManifestContent, ManifestFile, read_manifest_list, write_manifest_list
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate
from pyiceberg.transforms import BucketTransform, DayTransform
from pyiceberg.types import StringType

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog.maintenance_state import Maintenance
from floodmark.catalog.unit import ACKNOWLEDGED, Part, Rules, Settled, Shipped, Unit, UnitLog
from floodmark.errors import Conflict, Corrupt
from floodmark.rows.reading.shipment import plan_shipment
from floodmark.sinks.iceberg import destination as iceberg
from floodmark.sinks.iceberg.compact import compact_destination
from floodmark.sinks.iceberg.destination import IcebergDestination
from floodmark.sinks.outcome import SinkRun
from floodmark.sinks.run import RunWatch
from floodmark.sinks.settings import IcebergSettings
from floodmark.storage import Storage
from floodmark.testing.children import preload, run_killed
from floodmark.testing.s3 import S3Server
from tests.conftest import Place, at

preload("tests.contract.test_iceberg_sink")

START = datetime(2026, 11, 1, tzinfo=UTC)
PEOPLE = "id long not null, name string, ts timestamp"
ARROW = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("name", pa.string()), ("ts", pa.timestamp("us", tz="UTC"))]
)


def person(number: int, name: str = "first") -> dict[str, Any]:
    return {"id": number, "name": name, "ts": START + timedelta(hours=number)}


def people(*numbers: int, name: str = "first") -> list[dict[str, Any]]:
    return [person(number, name) for number in numbers]


@dataclass(frozen=True)
class Elsewhere:
    """Another catalog, in another folder, as its other users see it."""

    folder: Path

    @property
    def properties(self) -> dict[str, str]:
        return {"type": "sql", "uri": f"sqlite:///{self.folder}/catalog.db", "warehouse": f"file://{self.folder}/files"}

    @contextmanager
    def catalog(self) -> Iterator[Catalog]:
        with closing(load_catalog("default", **self.properties)) as catalog:
            yield catalog

    def table(self, name: str = "people") -> Table:
        with self.catalog() as catalog:
            return catalog.load_table(f"default.{name}")

    def rows(self, name: str = "people") -> list[dict[str, Any]]:
        found = self.table(name).scan().to_arrow().to_pylist()
        return sorted(found, key=lambda row: (row["id"], str(row)))

    def names(self, name: str = "people") -> dict[int, str]:
        found = self.rows(name)
        assert len({row["id"] for row in found}) == len(found), "a key is there twice"
        return {row["id"]: row["name"] for row in found}

    def append(self, rows: list[dict[str, Any]], name: str = "people") -> None:
        """Somebody else commits rows."""
        self.table(name).append(pa.Table.from_pylist(rows, schema=ARROW))

    def sent(self, name: str = "people") -> dict[str, Any]:
        (text,) = (value for key, value in self.table(name).properties.items() if key.startswith("floodmark."))
        found: dict[str, Any] = json.loads(text)
        return found

    def units(self, name: str = "people") -> list[str]:
        """The units of the table's history, oldest first."""
        found = (snapshot.summary for snapshot in self.table(name).metadata.snapshots)
        return [summary["floodmark-unit"] for summary in found if summary and summary["floodmark-unit"]]

    def operation(self, name: str = "people") -> str:
        """What the last commit of the table calls itself; its counts have to be true."""
        table = self.table(name)
        snapshot = table.current_snapshot()
        assert snapshot is not None
        assert snapshot.summary is not None
        files = [task.file for task in table.scan().plan_files()]
        counts = (len(files), sum(file.record_count for file in files), sum(file.file_size_in_bytes for file in files))
        totals = ("total-data-files", "total-records", "total-files-size")
        assert tuple(int(snapshot.summary[total] or -1) for total in totals) == counts
        return str(snapshot.summary.operation.value)

    def unnamed(self, name: str = "people") -> set[str]:
        """Files at the table's place that none of its snapshots names."""
        table = self.table(name)
        named = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
        for snapshot in table.metadata.snapshots:
            named.add(snapshot.manifest_list)
            for manifest in snapshot.manifests(table.io):
                named.add(manifest.manifest_path)
                named.update(
                    entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
                )
        root = table.location().removeprefix("file://")
        there = {f"file://{folder}/{file}" for folder, _, files in os.walk(root) for file in files}
        return there - named


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    (tmp_path / "elsewhere").mkdir()
    return Elsewhere(tmp_path / "elsewhere")


@pytest.fixture
def home(new_place: Callable[[str], Place]) -> Place:
    return new_place("sqlite")


@pytest.fixture
def lake(home: Place, elsewhere: Elsewhere) -> Iterator[fm.Lake]:
    """A lake with a keyed table `people` and an unkeyed one `events`, and a sink for each."""
    with home.open(create=True, actor="test") as lake:
        lake.create_table("people", PEOPLE, key=["id"])
        lake.create_table("events", PEOPLE)
        for table in ("people", "events"):
            lake.sinks.add(table, "iceberg", tables=table, catalog=elsewhere.properties)
        yield lake


def ship(lake: fm.Lake, sink: str = "people") -> SinkRun:
    """Run a sink; it has to go well."""
    done = lake.sinks.run(sink)
    assert done.error is None, done.error
    return done


def refused(lake: fm.Lake, sink: str = "people") -> fm.FloodmarkError:
    """Run a sink, which has to be refused or to fail; why."""
    done = lake.sinks.run(sink)
    assert done.error is not None, done.as_dict()
    return done.error


@contextmanager
def always(point: str, act: Callable[[], object]) -> Iterator[None]:
    """Act whenever the failpoint is passed."""

    def observe(name: str) -> None:
        if name == point:
            act()

    failpoints.observer = observe
    try:
        yield
    finally:
        failpoints.observer = None


# ── rows ──


def test_appended_rows_arrive_once_and_rows_of_others_stay(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("events", people(1, 2))
    assert ship(lake, "events").rows == 2
    elsewhere.append(people(100, name="theirs"), "events")
    lake.append("events", people(2, 3))
    ship(lake, "events")
    assert lake.sinks.run("events").outcome == "nothing_to_do"
    assert elsewhere.rows("events") == [*people(1, 2, 2, 3), *people(100, name="theirs")]
    assert len(elsewhere.units("events")) == 2, "one commit for every unit"
    assert not elsewhere.unnamed("events")


def test_duckdb_reads_the_same(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    from tests.interop.conftest import extension

    duckdb = pytest.importorskip("duckdb")
    lake.append("people", people(1, 2, 3))
    ship(lake)
    lake.merge("people", people(2, name="second"))
    lake.delete("people", "id = 3")
    ship(lake)
    offline = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    with duckdb.connect(config=offline) as duck:
        for name in ("avro", "iceberg"):
            duck.execute(f"LOAD '{extension(name)}'")
        found = duck.execute(f"SELECT id, name FROM iceberg_scan('{elsewhere.table().metadata_location}') ORDER BY id")
        assert found.fetchall() == [(1, "first"), (2, "second")]


def test_upserts_replace_rows_of_their_key_and_deletions_take_them_out(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("people", people(*range(10)))
    ship(lake)
    elsewhere.append([*people(5, 50, name="theirs")])
    lake.merge("people", people(3, 50, 11, name="second"))
    lake.delete("people", "id in (5, 7)")
    done = ship(lake)
    assert (done.rows, done.tables[0].deletions) == (5, 2)
    expected = dict.fromkeys((0, 1, 2, 4, 6, 8, 9), "first") | dict.fromkeys((3, 50, 11), "second")
    assert elsewhere.names() == expected
    assert elsewhere.operation() == "overwrite"
    assert len(elsewhere.units()) == 2
    assert not elsewhere.unnamed()


def test_a_rollback_brings_the_destination_to_the_earlier_rows(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("people", people(1, 2, 3))
    then = lake.catalog.history.resolve()
    ship(lake)
    lake.merge("people", people(2, 4, name="second"))
    lake.delete("people", "id = 3")
    ship(lake)
    assert elsewhere.names() == {1: "first", 2: "second", 4: "second"}
    lake.rollback("people", to=then)
    ship(lake)
    assert elsewhere.names() == {1: "first", 2: "first", 3: "first"}


def test_a_row_that_moves_to_another_partition_is_there_once(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("people", people(1, 30, 60))
    ship(lake)
    assert len({str(task.file.partition) for task in elsewhere.table().scan().plan_files()}) == 3
    lake.merge("people", [{"id": 1, "name": "moved", "ts": START + timedelta(days=9)}])
    ship(lake)
    assert elsewhere.names() == {1: "moved", 30: "first", 60: "first"}


def test_rows_that_leave_the_filter_leave_the_destination(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.sinks.add(
        "some", "iceberg", tables="people", catalog=elsewhere.properties, table="some", where="name = 'first'",
        columns=["name"], partition=[],
    )  # fmt: skip
    lake.append("people", people(1, 2, 3))
    ship(lake, "some")
    assert elsewhere.rows("some") == [{"id": number, "name": "first"} for number in (1, 2, 3)]
    lake.merge("people", people(2, name="second"))
    lake.delete("people", "id = 3")
    ship(lake, "some")
    assert elsewhere.names("some") == {1: "first"}


def test_a_unit_without_rows_moves_the_table_on(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.sinks.add(
        "some", "iceberg", tables="events", catalog=elsewhere.properties, table="some", where="name = 'rare'"
    )
    lake.append("events", people(1, 2))
    ship(lake, "some")
    lake.append("events", people(3, name="rare"))
    ship(lake, "some")
    assert elsewhere.rows("some") == people(3, name="rare")
    assert len(elsewhere.units("some")) == 2, "a unit that is no commit could be taken for one that never came"
    assert elsewhere.sent("some")["until"] == 2


def test_many_units_keep_the_list_of_manifests_short(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    for number in range(36):
        lake.append("events", people(number))
        ship(lake, "events")
    table = elsewhere.table("events")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert len(snapshot.manifests(table.io)) < 20
    assert len(elsewhere.rows("events")) == 36
    assert not elsewhere.unnamed("events")


def test_two_sinks_ship_into_one_table(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.sinks.add("other", "iceberg", tables="people", catalog=elsewhere.properties, table="events")
    lake.append("events", people(1))
    lake.append("people", people(2))
    ship(lake, "events")
    ship(lake, "other")
    lake.merge("people", people(2, name="second"))
    lake.append("events", people(3))
    ship(lake, "other")
    ship(lake, "events")
    assert elsewhere.names("events") == {1: "first", 2: "second", 3: "first"}


# ── the table that is made ──


def test_a_table_is_made_with_the_key_and_by_day_of_the_first_time(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("people", people(1))
    ship(lake)
    table = elsewhere.table()
    assert [field.name for field in table.schema().fields] == ["id", "name", "ts"]
    assert table.schema().identifier_field_names() == {"id"}
    assert [(field.name, str(field.transform)) for field in table.spec().fields] == [("ts_day", "day")]
    assert table.metadata.format_version == 2


@pytest.mark.parametrize(
    ("columns", "chosen", "expected"),
    [
        ("id long, at date, ts timestamp", None, ["at_day"]),
        ("id long, name string", None, []),
        ("id long, ts timestamp, ts_day int", None, []),
        ("id long, ts timestamp", [], []),
        ("id long, ts timestamp", ["bucket(4, id)", "hour(ts)"], ["id_bucket", "ts_hour"]),
    ],
)
def test_partitions_are_as_configured(
    lake: fm.Lake, elsewhere: Elsewhere, columns: str, chosen: list[str] | None, expected: list[str]
) -> None:
    lake.create_table("shaped", columns)
    lake.sinks.add("shaped", "iceberg", tables="shaped", catalog=elsewhere.properties, partition=chosen)
    lake.append("shaped", [{name.split()[0]: None for name in columns.split(", ")}])
    ship(lake, "shaped")
    assert [field.name for field in elsewhere.table("shaped").spec().fields] == expected
    assert elsewhere.table("shaped").scan().to_arrow().num_rows == 1


def test_names_of_catalog_namespace_and_table_are_the_settings(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    catalog = {**elsewhere.properties, "name": "theirs"}
    lake.sinks.add("named", "iceberg", tables="events", catalog=catalog, namespace="a.b", table="all_{table}")
    lake.append("events", people(1))
    ship(lake, "named")
    with closing(load_catalog("theirs", **elsewhere.properties)) as theirs:
        assert theirs.load_table("a.b.all_events").scan().to_arrow().num_rows == 1


# ── other shapes ──


def test_columns_are_added_and_widened_in_the_commit_of_the_rows(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.create_table("grown", "id long not null, size int", key=["id"])
    lake.sinks.add("grown", "iceberg", tables="grown", catalog=elsewhere.properties)
    lake.append("grown", [{"id": 1, "size": 1}, {"id": 2, "size": 2}])
    ship(lake, "grown")
    more = pa.table({"id": pa.array([2, 3], pa.int64()), "size": pa.array([2**40, 3], pa.int64()), "extra": ["a", "b"]})
    lake.merge("grown", more, evolve=True)
    ship(lake, "grown")
    table = elsewhere.table("grown")
    assert [(field.name, str(field.field_type), field.required) for field in table.schema().fields] == [
        ("id", "long", True),
        ("size", "long", False),
        ("extra", "string", False),
    ]
    assert elsewhere.rows("grown") == [
        {"id": 1, "size": 1, "extra": None},
        {"id": 2, "size": 2**40, "extra": "a"},
        {"id": 3, "size": 3, "extra": "b"},
    ]
    # Creation, and one for each unit: the shape changed together with the rows.
    assert len(table.metadata.metadata_log) == 2
    assert not elsewhere.unnamed("grown")


def test_a_column_that_does_not_come_any_more_stays_and_is_null(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("people", people(1))
    ship(lake)
    lake.sinks.set("people", columns=["id", "ts"])
    lake.append("people", people(2))
    ship(lake)
    assert elsewhere.names() == {1: "first", 2: None}


def test_what_the_destination_cannot_hold_is_refused_by_column(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("people", people(1))
    with elsewhere.catalog() as catalog:
        catalog.create_namespace("default")
        catalog.create_table("default.people", pa.schema([("id", pa.int64()), ("name", pa.int64())]))
    error = refused(lake)
    assert error.kind == "Invalid"
    assert "name" in str(error)
    assert elsewhere.table().current_snapshot() is None
    assert not elsewhere.unnamed()


def test_a_column_that_the_destination_requires_is_refused_by_name(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("people", people(1))
    with elsewhere.catalog() as catalog:
        catalog.create_namespace("default")
        catalog.create_table("default.people", ARROW.append(pa.field("needed", pa.string(), nullable=False)))
    error = refused(lake)
    assert error.kind == "Invalid"
    assert "needed" in str(error)


def test_a_table_that_others_made_is_used_as_it_is(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    with elsewhere.catalog() as catalog:
        catalog.create_namespace("default")
        shape = pa.schema([("ts", pa.timestamp("us", tz="UTC")), ("note", pa.string()), ("id", pa.int64())])
        with catalog.create_table("default.people", shape).update_spec() as update:
            update.add_field("ts", DayTransform(), "d")
        theirs = pa.Table.from_pylist([{"id": 1, "note": "old", "ts": START}, {"id": None, "note": "no key"}], shape)
        catalog.load_table("default.people").append(theirs)
    lake.append("people", people(1, 2))
    ship(lake)
    found = elsewhere.table().scan().to_arrow().select(["id", "note", "name"]).sort_by("id").to_pylist()
    assert found == [
        {"id": 1, "note": None, "name": "first"},
        {"id": 2, "note": None, "name": "first"},
        {"id": None, "note": "no key", "name": None},
    ]


def test_a_table_of_a_lake_is_refused(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    with elsewhere.catalog() as catalog:
        catalog.create_namespace("default")
        catalog.create_table("default.people", ARROW.append(pa.field("_seq", pa.int64())))
    lake.append("people", people(1))
    assert "only that lake may write to it" in str(refused(lake))


def test_another_format_is_refused(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    with elsewhere.catalog() as catalog:
        catalog.create_namespace("default")
        catalog.create_table("default.people", ARROW, properties={"format-version": "1"})
    lake.append("people", people(1))
    assert "format" in str(refused(lake))


def test_delete_files_of_another_engine_are_refused(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("people", people(1, 2))
    ship(lake)
    commit_delete_manifest(elsewhere)
    lake.append("people", people(3))
    error = refused(lake)
    assert (error.kind, "delete files" in str(error)) == ("Invalid", True)
    assert len(elsewhere.units()) == 1


def commit_delete_manifest(elsewhere: Elsewhere) -> None:
    """A snapshot whose list says that a manifest holds delete files, as an engine that merges on read writes it."""
    table = elsewhere.table()
    head = table.current_snapshot()
    assert head is not None
    manifests = list(read_manifest_list(table.io.new_input(head.manifest_list)))
    deletes = ManifestFile(*manifests[0]._data)
    deletes[3] = ManifestContent.DELETES
    location = f"{table.location()}/metadata/with-deletes.avro"
    with write_manifest_list(2, table.io.new_output(location), 77, head.snapshot_id, 2, "deflate") as writer:
        writer.add_manifests([*manifests, deletes])
    snapshot = Snapshot(
        snapshot_id=77, parent_snapshot_id=head.snapshot_id, sequence_number=2, manifest_list=location, schema_id=0
    )
    moved = SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=77)  # type: ignore[call-arg]
    with elsewhere.catalog() as catalog:
        catalog.commit_table(table, (), (AddSnapshotUpdate(snapshot=snapshot), moved))


# ── a bucket ──


def stop() -> None:
    raise KeyboardInterrupt


def test_a_destination_in_a_bucket_of_its_own(lake: fm.Lake, elsewhere: Elsewhere, s3_server: S3Server) -> None:
    root = f"s3://{s3_server.make_bucket()}/files"
    catalog = {**elsewhere.properties, "warehouse": root, "s3.endpoint": s3_server.endpoint, "s3.region": "us-east-1"}
    lake.sinks.add("bucket", "iceberg", tables="people", catalog=catalog)
    lake.append("people", people(1, 2))
    ship(lake, "bucket")
    lake.merge("people", people(2, name="second"))
    lake.delete("people", "id = 1")
    # The first try is stopped with everything staged.
    with at("unit.staged", stop), pytest.raises(KeyboardInterrupt):
        lake.sinks.run("bucket")
    ship(lake, "bucket")
    with closing(load_catalog("default", **catalog)) as theirs:
        table = theirs.load_table("default.people")
        assert table.scan().to_arrow().select(["id", "name"]).to_pylist() == [{"id": 2, "name": "second"}]
    there = {entry.location for entry in Storage(s3_server.options).list(f"{table.location()}/data")}
    named = {
        entry.data_file.file_path
        for snapshot in table.metadata.snapshots
        for manifest in snapshot.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io)
    }
    assert there == named


def test_credentials_in_the_settings_of_a_catalog_are_refused(
    lake: fm.Lake, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    catalog = {**elsewhere.properties, "s3.secret-access-key": "env:A_SECRET"}
    lake.sinks.add("secret", "iceberg", tables="people", catalog=catalog)
    lake.append("people", people(1))
    error = refused(lake, "secret")
    assert error.kind == "Invalid"
    assert "hunter2" not in str(error)


# ── crashes and lost replies ──


def run_sink(place: Place) -> None:
    with place.open(actor="test") as lake:
        lake.sinks.run("people")


@pytest.mark.parametrize("point", ["unit.sealed", "unit.staged", "unit.committed", "unit.acknowledged", "unit.shipped"])
def test_a_unit_whose_run_is_killed_arrives_once(home: Place, lake: fm.Lake, elsewhere: Elsewhere, point: str) -> None:
    lake.append("people", people(1, 2, 3))
    ship(lake)
    lake.merge("people", people(2, 4, name="second"))
    lake.delete("people", "id = 3")
    assert run_killed(run_sink, home, failpoint=point)
    done = ship(lake)
    assert (done.tables[0].units, done.tables[0].resumed) == (1, 1)
    assert elsewhere.names() == {1: "first", 2: "second", 4: "second"}
    assert len(elsewhere.units()) == 2
    assert not elsewhere.unnamed()
    assert lake.sinks.run("people").outcome == "nothing_to_do"


def test_attempts_that_were_killed_leave_nothing_once_the_unit_is_there(
    home: Place, lake: fm.Lake, elsewhere: Elsewhere
) -> None:
    lake.append("people", people(1, 2))
    for _ in range(2):
        assert run_killed(run_sink, home, failpoint="unit.staged")
    assert elsewhere.unnamed(), "the attempts staged files"
    ship(lake)
    assert elsewhere.names() == {1: "first", 2: "first"}
    assert not elsewhere.unnamed()


def test_files_of_a_killed_attempt_go_also_if_another_run_finds_the_unit_there(
    home: Place, lake: fm.Lake, elsewhere: Elsewhere
) -> None:
    lake.append("people", people(1, 2))
    assert run_killed(run_sink, home, failpoint="unit.staged")
    assert run_killed(run_sink, home, failpoint="unit.committed")
    assert elsewhere.unnamed()
    assert ship(lake).rows == 2
    assert len(elsewhere.units()) == 1
    assert not elsewhere.unnamed()


@contextmanager
def commits(monkeypatch: pytest.MonkeyPatch, *plan: Callable[[Callable[[], Any]], Any]) -> Iterator[list[int]]:
    """The first commits at the destination go as planned, with the real one in hand; the others as always."""
    real = SqlCatalog.commit_table
    left = list(plan)
    calls: list[int] = []

    def commit_table(self: SqlCatalog, *arguments: Any) -> Any:
        calls.append(1)
        return left.pop(0)(lambda: real(self, *arguments)) if left else real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SqlCatalog, "commit_table", commit_table)
        yield calls


def reply_lost(commit: Callable[[], Any]) -> None:
    commit()
    raise ConnectionResetError("the reply was lost")


def request_lost(commit: Callable[[], Any]) -> None:
    raise ConnectionResetError("nobody was there")


def test_a_commit_whose_reply_was_lost_is_found_by_reading(
    lake: fm.Lake, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.append("events", people(1, 2))
    with commits(monkeypatch, reply_lost) as calls:
        assert ship(lake, "events").rows == 2
    assert len(calls) == 1, "sent again although it was there"
    assert elsewhere.rows("events") == people(1, 2)
    assert not elsewhere.unnamed("events")


def test_a_commit_that_never_arrived_is_tried_again(
    lake: fm.Lake, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.append("events", people(1, 2))
    with commits(monkeypatch, request_lost, request_lost):
        ship(lake, "events")
    assert elsewhere.rows("events") == people(1, 2)
    assert not elsewhere.unnamed("events")


def test_a_commit_that_arrives_late_is_not_taken_beside_the_next_try(
    lake: fm.Lake, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[], Any]] = []

    def delayed(commit: Callable[[], Any]) -> None:
        late.append(commit)
        raise TimeoutError("no answer in time")

    lake.append("events", people(1, 2))
    with commits(monkeypatch, delayed):
        ship(lake, "events")
    with pytest.raises(CommitFailedException):
        late[0]()
    assert elsewhere.rows("events") == people(1, 2)


def test_files_stay_while_a_commit_may_still_arrive(
    lake: fm.Lake, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[], Any]] = []

    def delayed(commit: Callable[[], Any]) -> None:
        late.append(commit)
        raise TimeoutError("no answer in time")

    monkeypatch.setattr(iceberg, "TRIES_MAX", 1)
    lake.append("events", people(1, 2))
    with commits(monkeypatch, delayed):
        assert refused(lake, "events").kind == "Unavailable"
    late[0]()
    assert elsewhere.rows("events") == people(1, 2), "a file of the late commit was deleted"
    assert ship(lake, "events").rows == 2
    assert elsewhere.rows("events") == people(1, 2)
    assert not elsewhere.unnamed("events")


def test_a_catalog_that_cannot_be_reached_fails_the_run_and_nothing_else(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("events", people(1))
    moved = elsewhere.folder.with_name("away")
    elsewhere.folder.rename(moved)
    error = refused(lake, "events")
    assert error.kind == "Unavailable"
    assert str(elsewhere.folder) not in str(error), "an address may hold a password"
    moved.rename(elsewhere.folder)
    ship(lake, "events")
    assert elsewhere.rows("events") == people(1)


# ── beside other writers ──


def test_a_commit_of_somebody_else_meanwhile_is_planned_on(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("people", people(1, 2))
    ship(lake)
    lake.merge("people", people(2, 3, name="second"))
    with at("unit.staged", lambda: elsewhere.append(people(3, 9, name="theirs"))):
        ship(lake)
    assert elsewhere.names() == {1: "first", 2: "second", 3: "second", 9: "theirs"}
    assert not elsewhere.unnamed()


def widen(table: Table) -> None:
    with table.update_schema() as update:
        update.add_column("note", StringType())


def lay_out_anew(table: Table) -> None:
    with table.update_spec() as update:
        update.add_field("id", BucketTransform(4), "id_bucket")


@pytest.mark.parametrize("change", [widen, lay_out_anew])
def test_another_shape_meanwhile_is_planned_on(
    lake: fm.Lake, elsewhere: Elsewhere, change: Callable[[Table], None]
) -> None:
    lake.append("people", people(1))
    ship(lake)
    lake.append("people", people(2))
    with at("unit.staged", lambda: change(elsewhere.table())):
        ship(lake)
    assert elsewhere.names() == {1: "first", 2: "first"}
    table = elsewhere.table()
    newest = [task.file for task in table.scan("id = 2").plan_files()]
    assert [len(file.partition) for file in newest] == [len(table.spec().fields)]
    assert [one.schema_id for one in table.metadata.snapshots][-1] == table.metadata.current_schema_id
    assert not elsewhere.unnamed()


def test_a_table_that_keeps_changing_is_a_conflict_that_leaves_nothing(
    lake: fm.Lake, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg, "TRIES_MAX", 3)
    lake.append("events", people(1))
    with always("unit.staged", lambda: elsewhere.append(people(100, name="theirs"), "events")):
        error = refused(lake, "events")
    assert isinstance(error, Conflict)
    assert elsewhere.rows("events") == people(100, 100, 100, name="theirs")
    assert not elsewhere.unnamed("events")
    ship(lake, "events")
    assert elsewhere.rows("events") == [*people(1), *people(100, 100, 100, name="theirs")]


def test_a_run_that_was_paused_does_not_commit(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("events", people(1))
    ship(lake, "events")
    lake.append("events", people(2))
    with at("unit.sealed", lambda: lake.sinks.pause("events")):
        assert lake.sinks.run("events").outcome == "paused"
    assert elsewhere.rows("events") == people(1)
    assert not elsewhere.unnamed("events")
    lake.sinks.resume("events")
    ship(lake, "events")
    assert elsewhere.rows("events") == people(1, 2)


# ── a destination that is not what it was ──


def test_the_record_of_units_only_rises(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    seen = []
    for number in range(4):
        lake.append("events", people(number))
        ship(lake, "events")
        seen.append((elsewhere.sent("events")["since"], elsewhere.sent("events")["until"]))
    assert seen == [(-1, 1), (1, 2), (2, 3), (3, 4)]


def test_ranges_without_rows_for_anybody_are_passed_over(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    for number in range(3):
        lake.append("events", people(number))
    ship(lake, "events")
    lake.maintain.compact("events", files_min=2)
    assert lake.sinks.run("events").outcome == "nothing_to_do"
    lake.append("events", people(9))
    ship(lake, "events")
    assert elsewhere.rows("events") == people(0, 1, 2, 9)


def shipped_twice(lake: fm.Lake, elsewhere: Elsewhere) -> Table:
    """Two units at the destination, a third to come; the table between the two."""
    lake.append("events", people(1))
    ship(lake, "events")
    between = elsewhere.table("events")
    lake.append("events", people(2))
    ship(lake, "events")
    lake.append("events", people(3))
    return between


def check_refused_until_chosen(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    before = elsewhere.rows("events")
    error = refused(lake, "events")
    assert error.kind == "Corrupt"
    assert "sink replay" in error.advice
    assert elsewhere.rows("events") == before, "something was sent"
    assert not elsewhere.unnamed("events")
    lake.sinks.replay("events", start="beginning")
    ship(lake, "events")
    assert [row for row in elsewhere.rows("events") if row not in before] == people(
        *(number for number in (1, 2, 3) if person(number) not in before)
    )


def test_a_destination_that_was_made_again_is_refused(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    shipped_twice(lake, elsewhere)
    with elsewhere.catalog() as catalog:
        catalog.drop_table("default.events")
        catalog.create_table("default.events", ARROW, location=f"file://{elsewhere.folder}/files/again")
    check_refused_until_chosen(lake, elsewhere)


@dataclass
class ListedLog:
    """A unit's log in memory, with what the units before it came to."""

    settled: int | None = None
    listed: list[Part] = field(default_factory=list)
    known: str | None = None

    def settled_units(self) -> list[Settled]:
        return []

    def knows(self, unit: str, epoch: int) -> bool:
        return True

    def settled_until(self) -> int | None:
        return self.settled

    def destination(self) -> str | None:
        return self.known

    def parts(self) -> list[Part]:
        return list(self.listed)

    def seal(self, parts: list[Part]) -> None:
        self.listed += parts

    def acknowledge(self, parts: list[Part], destination: str | None = None) -> None:
        self.known = destination
        done = {(part.first, part.last): replace(part, state=ACKNOWLEDGED) for part in parts}
        self.listed = [done.get((part.first, part.last), part) for part in self.listed]

    def split(self, whole: Part, halves: list[Part]) -> None:
        raise AssertionError("a table takes a unit whole")

    def quarantine(self, part: Part, line: bytes, reason: str) -> None:
        raise AssertionError("a table refuses no single row")


def unit_of(lake: fm.Lake, since: int, until: int, *, epoch: int = 0, of: str = "lake") -> Unit:
    """A unit of `events`, under a name that tells lake, epoch and range."""
    name = f"{of}-{epoch}-{since}-{until}"
    table_id = lake.catalog.history.head("events").table_id
    return Unit(name, of, "sink", "sink", epoch, "events", table_id, 0, since, until, Rules(format="iceberg"))


def ship_unit(lake: fm.Lake, elsewhere: Elsewhere, unit: Unit, log: UnitLog) -> Shipped:
    """Bring one unit to the destination, past the lake's own record of its sinks."""
    changes = lake.changes("events", None if unit.since < 0 else unit.since, unit.until)
    destination = IcebergDestination(IcebergSettings(catalog=elsewhere.properties), lake.catalog.storage, lake.sessions)
    return destination.ship(unit, plan_shipment(changes.plan, None, None), log, RunWatch())


def test_an_acknowledged_unit_is_not_looked_at_again(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("events", people(1))
    log = ListedLog()
    shipped = ship_unit(lake, elsewhere, unit_of(lake, -1, 1), log)
    assert (shipped.rows, shipped.parts) == (1, 1)
    assert log.known == str(elsewhere.table("events").metadata.table_uuid)
    assert json.loads(log.listed[0].detail)["rows"] == 1
    with elsewhere.catalog() as catalog:
        catalog.drop_table("default.events")
    assert ship_unit(lake, elsewhere, unit_of(lake, -1, 1), log) == Shipped()


def test_units_that_the_table_has_are_acknowledged_and_not_sent(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    for number in (1, 2):
        lake.append("events", people(number))
    ship_unit(lake, elsewhere, unit_of(lake, -1, 1), ListedLog())
    ship_unit(lake, elsewhere, unit_of(lake, 1, 2), ListedLog(settled=1))
    before = elsewhere.sent("events")
    for unit in (unit_of(lake, -1, 1), unit_of(lake, 1, 2)):
        log = ListedLog()
        assert ship_unit(lake, elsewhere, unit, log) == Shipped()
        assert log.listed[0].state == ACKNOWLEDGED
    assert elsewhere.sent("events") == before, "the record went back"
    assert elsewhere.rows("events") == people(1, 2)


@pytest.mark.parametrize(
    ("settled", "next_unit", "fits"),
    [
        (2, {"since": 2}, True),
        # Ranges without rows were passed over meanwhile.
        (2, {"since": 3}, True),
        # The lake settled more than the destination has: that one was restored.
        (3, {"since": 3}, False),
        # The destination has more than the lake knows of.
        (None, {"since": -1}, False),
        # A new epoch goes on from whatever somebody chose.
        (None, {"since": -1, "epoch": 1}, True),
        (None, {"since": 3, "epoch": 1}, True),
        # Rows of the new epoch were settled, and the destination does not know of it.
        (3, {"since": 3, "epoch": 1}, False),
        # A lake that was restored from a backup, in the same epoch and after a choice.
        (2, {"since": 2, "of": "restored"}, False),
        (None, {"since": 2, "of": "restored", "epoch": 1}, True),
    ],
)
def test_a_unit_goes_on_only_where_the_last_one_ended(
    lake: fm.Lake, elsewhere: Elsewhere, settled: int | None, next_unit: dict[str, Any], fits: bool
) -> None:
    for number in (1, 2, 3, 4):
        lake.append("events", people(number))
    ship_unit(lake, elsewhere, unit_of(lake, -1, 2), ListedLog())
    unit = unit_of(lake, until=4, **next_unit)
    if fits:
        assert ship_unit(lake, elsewhere, unit, ListedLog(settled)).parts == 1
        assert elsewhere.sent("events")["unit"] == unit.id
        return
    with pytest.raises(Corrupt, match=r"sinks\.replay"):
        ship_unit(lake, elsewhere, unit, ListedLog(settled))
    assert elsewhere.rows("events") == people(1, 2)


def test_two_attempts_of_one_unit_at_once_bring_it_once(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("events", people(1, 2))
    unit = unit_of(lake, -1, 1)
    rival: list[Shipped] = []
    with at("unit.staged", lambda: rival.append(ship_unit(lake, elsewhere, unit, ListedLog()))):
        assert ship_unit(lake, elsewhere, unit, ListedLog()) == Shipped()
    assert rival[0].rows == 2
    assert elsewhere.rows("events") == people(1, 2)
    assert elsewhere.units("events") == [unit.id]
    assert not elsewhere.unnamed("events")


def test_an_older_epoch_does_not_write_any_more(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    for number in (1, 2):
        lake.append("events", people(number))
    ship_unit(lake, elsewhere, unit_of(lake, -1, 1, epoch=3), ListedLog())
    with pytest.raises(Corrupt, match="newer epoch"):
        ship_unit(lake, elsewhere, unit_of(lake, 1, 2, epoch=2), ListedLog(1))


def test_another_table_under_the_same_name_is_refused(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("events", people(1))
    with pytest.raises(Corrupt, match="another table"):
        ship_unit(lake, elsewhere, unit_of(lake, -1, 1), ListedLog(known="somebody"))
    assert elsewhere.rows("events") == []


def test_a_table_that_is_gone_is_not_made_again_unasked(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("events", people(1))
    with pytest.raises(Corrupt, match="is gone"):
        ship_unit(lake, elsewhere, unit_of(lake, 0, 1), ListedLog(settled=0))
    with elsewhere.catalog() as catalog:
        assert not catalog.table_exists("default.events")


def test_a_destination_that_was_restored_is_refused(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    between = shipped_twice(lake, elsewhere)
    with elsewhere.catalog() as catalog:
        catalog.drop_table("default.events")
        catalog.register_table("default.events", between.metadata_location)
    # What it had is not named any more, so only rows and refusal are looked at here.
    assert refused(lake, "events").kind == "Corrupt"
    assert elsewhere.rows("events") == people(1)
    lake.sinks.replay("events", start=1)
    ship(lake, "events")
    assert elsewhere.rows("events") == people(1, 2, 3)


def test_a_destination_that_was_rolled_back_is_refused(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    between = shipped_twice(lake, elsewhere)
    snapshot = between.current_snapshot()
    assert snapshot is not None
    elsewhere.table("events").manage_snapshots().rollback_to_snapshot(snapshot.snapshot_id).commit()
    elsewhere.append(people(100, name="theirs"), "events")
    check_refused_until_chosen(lake, elsewhere)


def test_a_destination_whose_old_snapshots_expired_goes_on(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("events", people(1))
    ship(lake, "events")
    for number in range(2):
        elsewhere.append(people(100 + number, name="theirs"), "events")
    table = elsewhere.table("events")
    table.maintenance.expire_snapshots().by_ids([one.snapshot_id for one in table.metadata.snapshots[:-1]]).commit()
    lake.append("events", people(2))
    ship(lake, "events")
    assert [row["id"] for row in elsewhere.rows("events")] == [1, 2, 100, 101]


def test_a_replay_sends_again_and_raises_the_epoch(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    lake.append("people", people(1, 2))
    ship(lake)
    assert elsewhere.sent()["epoch"] == 0
    lake.sinks.replay("people", start="beginning")
    assert ship(lake).rows == 2
    assert elsewhere.names() == {1: "first", 2: "first"}
    assert elsewhere.sent()["epoch"] == 1
    assert not elsewhere.unnamed()


# ── compaction, out of band ──


def compact(lake: fm.Lake, elsewhere: Elsewhere, table: str = "events", **options: Any) -> Maintenance:
    settings = IcebergSettings(catalog=elsewhere.properties, compact_file_count=3)
    destination = IcebergDestination(settings, lake.catalog.storage, lake.sessions)
    return compact_destination(destination, table, **options)


def data_files(elsewhere: Elsewhere, table: str = "events") -> list[str]:
    return sorted(task.file.file_path for task in elsewhere.table(table).scan().plan_files())


@pytest.fixture
def crumbs(lake: fm.Lake, elsewhere: Elsewhere) -> fm.Lake:
    """A lake whose sink `events` has made four small files in one partition, and somebody else another one."""
    for number in range(4):
        lake.append("events", people(number))
        ship(lake, "events")
    elsewhere.append(people(0, name="theirs"), "events")
    return lake


def test_small_files_become_one_with_the_same_rows(crumbs: fm.Lake, elsewhere: Elsewhere) -> None:
    before, sent = elsewhere.rows("events"), elsewhere.sent("events")
    done = compact(crumbs, elsewhere)
    assert (done.outcome, done.detail["files_in"], done.detail["files_out"]) == ("compacted", 5, 1)
    assert elsewhere.rows("events") == before
    assert len(data_files(elsewhere)) == 1
    assert elsewhere.sent("events") == sent
    assert elsewhere.operation("events") == "replace"
    assert not elsewhere.unnamed("events")
    assert compact(crumbs, elsewhere).outcome == "nothing_to_do"


def test_ships_go_on_after_a_compaction(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    for number in range(4):
        lake.append("people", people(number))
        ship(lake)
    assert compact(lake, elsewhere, "people").outcome == "compacted"
    lake.merge("people", people(1, 9, name="second"))
    lake.delete("people", "id = 2")
    ship(lake)
    assert elsewhere.names() == {0: "first", 1: "second", 3: "first", 9: "second"}
    assert not elsewhere.unnamed()


def test_a_ship_never_compacts(crumbs: fm.Lake, elsewhere: Elsewhere) -> None:
    before = set(data_files(elsewhere))
    crumbs.append("events", people(9))
    ship(crumbs, "events")
    assert before < set(data_files(elsewhere))


def test_few_files_are_below_the_threshold(crumbs: fm.Lake, elsewhere: Elsewhere) -> None:
    done = compact(crumbs, elsewhere, file_count=6)
    assert (done.outcome, done.detail["below_threshold"]) == ("below_threshold", 5)
    assert len(data_files(elsewhere)) == 5


def test_a_dry_run_tells_and_changes_nothing(crumbs: fm.Lake, elsewhere: Elsewhere) -> None:
    before = elsewhere.table("events").metadata_location
    done = compact(crumbs, elsewhere, dry_run=True)
    assert (done.outcome, done.detail["files_in"]) == ("planned", 5)
    assert elsewhere.table("events").metadata_location == before
    assert not elsewhere.unnamed("events")


def test_there_is_nothing_to_do_for_a_table_that_is_not_there(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    assert compact(lake, elsewhere).outcome == "nothing_to_do"


def test_a_ship_meanwhile_wins_and_the_compaction_looks_again(crumbs: fm.Lake, elsewhere: Elsewhere) -> None:
    crumbs.append("events", people(9))
    with at("compact.rewritten", lambda: ship(crumbs, "events")):
        done = compact(crumbs, elsewhere)
    assert done.outcome == "compacted"
    assert elsewhere.rows("events") == sorted(
        [*people(0, 1, 2, 3, 9), *people(0, name="theirs")], key=lambda row: (row["id"], str(row))
    )
    assert not elsewhere.unnamed("events")


def test_a_table_that_keeps_changing_ends_a_compaction_in_conflict(crumbs: fm.Lake, elsewhere: Elsewhere) -> None:
    with always("compact.rewritten", lambda: elsewhere.append(people(100, name="theirs"), "events")):
        done = compact(crumbs, elsewhere)
    assert (done.outcome, done.detail["conflicts"]) == ("conflict", 1)
    assert not elsewhere.unnamed("events"), "staged files are still there"
    assert len(elsewhere.rows("events")) == 5 + 3


def test_files_that_somebody_rewrote_meanwhile_are_a_conflict(crumbs: fm.Lake, elsewhere: Elsewhere) -> None:
    with at("compact.rewritten", lambda: elsewhere.table("events").delete("id = 1")):
        done = compact(crumbs, elsewhere)
    assert done.outcome == "conflict"
    assert [row["id"] for row in elsewhere.rows("events")] == [0, 0, 2, 3]
    assert not elsewhere.unnamed("events")


def test_a_damaged_file_fails_a_compaction_by_name(crumbs: fm.Lake, elsewhere: Elsewhere) -> None:
    damaged = Path(data_files(elsewhere)[0].removeprefix("file://"))
    damaged.unlink()
    done = compact(crumbs, elsewhere)
    assert (done.outcome, done.detail["error"]) == ("failed", "Corrupt")
    assert damaged.name in done.detail["message"]
    assert not elsewhere.unnamed("events")


def test_a_compaction_whose_reply_was_lost_is_found_by_reading(
    crumbs: fm.Lake, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = elsewhere.rows("events")
    with commits(monkeypatch, reply_lost):
        assert compact(crumbs, elsewhere).outcome == "compacted"
    assert elsewhere.rows("events") == before
    assert not elsewhere.unnamed("events")


def test_a_compaction_that_may_still_arrive_keeps_its_files(
    crumbs: fm.Lake, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[], Any]] = []

    def delayed(commit: Callable[[], Any]) -> None:
        late.append(commit)
        raise TimeoutError("no answer in time")

    before = elsewhere.rows("events")
    with commits(monkeypatch, delayed):
        done = compact(crumbs, elsewhere)
    assert (done.outcome, done.detail["error"]) == ("failed", "Unavailable")
    late[0]()
    assert elsewhere.rows("events") == before, "a file of the late commit was deleted"


def compact_in_child(place: Place, elsewhere: Elsewhere) -> None:
    with place.open(actor="test") as lake:
        compact(lake, elsewhere)


def test_what_a_killed_compaction_left_goes_with_the_next_one(
    home: Place, crumbs: fm.Lake, elsewhere: Elsewhere
) -> None:
    assert run_killed(compact_in_child, home, elsewhere, failpoint="compact.rewritten")
    left = elsewhere.unnamed("events")
    assert left
    assert compact(crumbs, elsewhere, file_count=9).detail["leftovers_deleted"] == 0, "it might still be at work"
    crumbs.append("events", people(9))
    ship(crumbs, "events")
    done = compact(crumbs, elsewhere)
    assert (done.outcome, done.detail["leftovers_deleted"]) == ("compacted", len(left))
    assert not elsewhere.unnamed("events")
    assert len(elsewhere.rows("events")) == 6


def test_a_killed_compaction_that_was_committed_keeps_its_files(
    home: Place, crumbs: fm.Lake, elsewhere: Elsewhere
) -> None:
    before = elsewhere.rows("events")
    assert run_killed(compact_in_child, home, elsewhere, failpoint="compact.published")
    crumbs.append("events", people(9))
    ship(crumbs, "events")
    assert compact(crumbs, elsewhere).detail["leftovers_deleted"] == 0
    assert [row for row in elsewhere.rows("events") if row["id"] != 9] == before
    assert not elsewhere.unnamed("events")
