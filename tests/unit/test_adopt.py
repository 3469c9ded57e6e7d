"""Adoption of tables that PyIceberg made: nothing is rewritten, nothing is lost, and what cannot be held is refused."""

from __future__ import annotations

import gzip
import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import (
    DataFile,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import (
    DoubleType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
)

from floodmark.commit.adopt import ADOPTED_UUID, Adopted, read_foreign
from floodmark.commit.live_files import live_files
from floodmark.commit.manifests import write_list, write_merged
from floodmark.commit.metadata import METADATA_LOG_KEPT, MetadataFiles
from floodmark.errors import Corrupt, Invalid, NotFound
from floodmark.model import SNAPSHOTS_KEPT, Head
from floodmark.storage import Storage

TABLE_ID = "0a6c1d5e-8f7b-4b53-9d0a-5f2f3f1f9c11"
COLUMNS = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "name", StringType(), required=False),
    NestedField(3, "part", StringType(), required=False),
    NestedField(4, "weight", DoubleType(), required=True),
)


def rows(*ids: int) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": [f"row {number}" for number in ids],
            "part": [f"part/{number % 2}" for number in ids],
            "weight": [number / 2 for number in ids],
        },
        schema=pa.schema(
            [
                pa.field("id", pa.int64(), nullable=False),
                pa.field("name", pa.string()),
                pa.field("part", pa.string()),
                pa.field("weight", pa.float64(), nullable=False),
            ]
        ),
    )


def adopt(location: str, **options: Any) -> Adopted:
    return read_foreign(MetadataFiles(Storage()), location, table_id=TABLE_ID, **options)


def entries(adopted: Adopted) -> list[ManifestEntry]:
    files = MetadataFiles(Storage())
    return [entry for manifest in files.manifests(adopted.manifest_list) for entry in files.entries(manifest)]


def everything_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def loaded(adopted: Adopted, folder: Path) -> StaticTable:
    """The adopted metadata, written by the lake's own door for bytes and loaded by PyIceberg."""
    location = f"file://{folder}/{uuid.uuid4()}.metadata.json"
    ToOutputFile.table_metadata(adopted.metadata, MetadataFiles(Storage()).io.new_output(location))
    return StaticTable.from_metadata(location)


def content(table: Table) -> list[dict[str, Any]]:
    return sorted(table.scan().to_arrow().to_pylist(), key=lambda row: row["id"])


MakeTable = Callable[..., Table]


@pytest.fixture
def make_table(tmp_path: Path) -> MakeTable:
    catalog = SqlCatalog("foreign", uri=f"sqlite:///{tmp_path}/foreign.db", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("n")

    def make(schema: Schema = COLUMNS, version: int = 2, **properties: str) -> Table:
        name = f"n.t{uuid.uuid4().hex[:8]}"
        return catalog.create_table(name, schema, properties={"format-version": str(version), **properties})

    return make


@dataclass(frozen=True)
class State:
    """A foreign table at one moment, as PyIceberg itself tells it."""

    location: str
    content: list[dict[str, Any]]
    paths: list[str]
    size_bytes: int
    head: Snapshot


def state(table: Table) -> State:
    tasks = list(table.scan().plan_files())
    head = table.current_snapshot()
    assert head is not None
    return State(
        table.metadata_location,
        content(table),
        sorted(task.file.file_path for task in tasks),
        sum(task.file.file_size_in_bytes for task in tasks),
        head,
    )


@dataclass(frozen=True)
class Evolved:
    folder: Path
    v1: State
    upgraded: State


@pytest.fixture(scope="module")
def evolved(tmp_path_factory: pytest.TempPathFactory) -> Evolved:
    """A table that saw appends, a delete, an overwrite, two changes of its partitions, and an upgrade."""
    folder = tmp_path_factory.mktemp("evolved")
    catalog = SqlCatalog("foreign", uri=f"sqlite:///{folder}/foreign.db", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace("n")
    table = catalog.create_table("n.t", COLUMNS, properties={"format-version": "1"})
    table.append(rows(1, 2))
    table.append(rows(3, 4))
    table.delete("id = 3")
    with table.update_spec() as spec:
        spec.add_field("part", IdentityTransform(), "by_part")
    table.append(rows(5, 6))
    with table.update_spec() as spec:
        spec.remove_field("by_part")
        spec.add_field("id", BucketTransform(4), "by_id")
    table.append(rows(7, 8))
    table.overwrite(rows(20), overwrite_filter="id = 5")
    v1 = state(table)
    with table.transaction() as transaction:
        transaction.upgrade_table_version(2)
    table.append(rows(30, 31))
    table.delete("id = 1")
    table.append(rows(40))
    return Evolved(folder, v1, state(table))


@pytest.fixture(params=["v1", "upgraded"])
def moment(request: pytest.FixtureRequest, evolved: Evolved) -> State:
    found: State = getattr(evolved, request.param)
    return found


class TestWhatIsAdopted:
    def test_every_live_file_is_there_exactly_once(self, moment: State) -> None:
        adopted = adopt(moment.location)
        assert sorted(entry.data_file.file_path for entry in entries(adopted)) == moment.paths
        assert (adopted.rows, adopted.files, adopted.size_bytes) == (
            len(moment.content),
            len(moment.paths),
            moment.size_bytes,
        )
        assert (adopted.snapshot, adopted.manifest_list) == (moment.head.snapshot_id, moment.head.manifest_list)

    def test_files_of_format_v1_have_sequence_zero(self, evolved: Evolved) -> None:
        adopted = adopt(evolved.v1.location)
        assert adopted.sequence == 0
        assert [entry.sequence_number for entry in entries(adopted)] == [0] * len(evolved.v1.paths)
        assert adopted.metadata.last_sequence_number == 0

    def test_files_after_an_upgrade_have_the_sequence_of_their_commit(self, evolved: Evolved) -> None:
        adopted = adopt(evolved.upgraded.location)
        sequences = {entry.data_file.file_path: entry.sequence_number for entry in entries(adopted)}
        old = {path: 0 for path in evolved.v1.paths if path in sequences}
        new = sorted(sequence or 0 for path, sequence in sequences.items() if path not in old)
        assert old.items() <= sequences.items()
        # An append of two partitions, what a delete left of a file, an append.
        assert new == [1, 1, 2, 3]
        assert adopted.sequence == adopted.metadata.last_sequence_number == 3

    def test_every_row_is_in_the_change_feed_by_its_files_sequence(self, moment: State) -> None:
        adopted = adopt(moment.location)
        schema = adopted.metadata.schema()
        head = Head(
            "main", "t", TABLE_ID, adopted.snapshot, adopted.sequence, schema.schema_id, 0, adopted.manifest_list,
            moment.location, 1, adopted.rows, adopted.files, adopted.size_bytes,
        )  # fmt: skip
        live = live_files(MetadataFiles(Storage()), head, schema)
        assert sorted(file.path for file in live) == moment.paths
        for file in live:
            assert file.fresh
            assert file.sequence is not None
            assert file.seq_bounds() == (file.sequence, file.sequence)
            assert 0 <= file.sequence <= adopted.sequence

    def test_pyiceberg_reads_the_same_rows_with_an_empty_hidden_column(self, moment: State, tmp_path: Path) -> None:
        table = loaded(adopt(moment.location), tmp_path)
        assert table.format_version == 2
        assert content(table) == [{**row, "_seq": None} for row in moment.content]

    def test_a_table_of_format_v2_keeps_its_sequences(self, make_table: MakeTable, tmp_path: Path) -> None:
        table = make_table()
        table.append(rows(1))
        table.append(rows(2))
        table.append(rows(3))
        adopted = adopt(table.metadata_location)
        assert sorted(entry.sequence_number or 0 for entry in entries(adopted)) == [1, 2, 3]
        assert (adopted.sequence, adopted.rows) == (3, 3)
        assert [row["id"] for row in content(loaded(adopted, tmp_path))] == [1, 2, 3]

    def test_an_empty_table_is_adopted_empty(self, make_table: MakeTable, tmp_path: Path) -> None:
        adopted = adopt(make_table(version=1).metadata_location)
        assert (adopted.snapshot, adopted.sequence, adopted.manifest_list) == (None, 0, None)
        assert (adopted.rows, adopted.files, adopted.size_bytes) == (0, 0, 0)
        assert adopted.metadata.refs == {}
        assert content(loaded(adopted, tmp_path)) == []

    def test_reading_writes_nothing(self, evolved: Evolved) -> None:
        before = everything_below(evolved.folder)
        files = MetadataFiles(Storage())
        read_foreign(files, evolved.upgraded.location, table_id=TABLE_ID)
        assert everything_below(evolved.folder) == before
        assert files.io.storage.counters.bytes_written == 0

    def test_the_lake_can_merge_and_list_the_adopted_manifests(self, moment: State, tmp_path: Path) -> None:
        """What every later commit does: manifests of v1 become manifests and lists of v2, with the same sequences."""
        adopted = adopt(moment.location)
        files = MetadataFiles(Storage())
        before = {entry.data_file.file_path: entry.sequence_number for entry in entries(adopted)}
        manifests = files.manifests(adopted.manifest_list)
        merged = [
            write_merged(
                files.io,
                f"file://{tmp_path}/{spec_id}.avro",
                adopted.metadata,
                spec_id,
                7,
                [entry for one in manifests if one.partition_spec_id == spec_id for entry in files.entries(one)],
            )
            for spec_id in sorted({manifest.partition_spec_id for manifest in manifests})
        ]
        sequence = adopted.metadata.last_sequence_number + 1
        for group in (merged, manifests):
            location = f"file://{tmp_path}/{uuid.uuid4()}.avro"
            write_list(files.io, location, 7, adopted.snapshot, sequence, group)
            found = [entry for one in files.manifests(location) for entry in files.entries(one)]
            assert {entry.data_file.file_path: entry.sequence_number for entry in found} == before


class TestTheNewMetadata:
    def test_the_hidden_column_is_optional_and_last_in_a_new_schema(self, evolved: Evolved) -> None:
        metadata = adopt(evolved.v1.location).metadata
        assert metadata.schema().fields[-1] == NestedField(5, "_seq", LongType(), required=False)
        assert metadata.schema().fields[:-1] == COLUMNS.fields
        assert (metadata.current_schema_id, metadata.last_column_id) == (1, 5)
        assert [schema.schema_id for schema in metadata.schemas] == [0, 1]

    def test_the_hidden_column_never_gets_the_id_of_a_dropped_one(self, make_table: MakeTable) -> None:
        table = make_table()
        with table.update_schema() as update:
            update.add_column("gone", LongType())
        with table.update_schema() as update:
            update.delete_column("gone")
        raw = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
        metadata = adopt(table.metadata_location).metadata
        assert metadata.schema().find_field("_seq").field_id == raw["last-column-id"] + 1 == 6
        assert metadata.current_schema_id not in {schema["schema-id"] for schema in raw["schemas"]}

    def test_it_has_a_new_identity_and_remembers_the_old_one(self, evolved: Evolved) -> None:
        raw = json.loads(Path(evolved.v1.location.removeprefix("file://")).read_text())
        metadata = adopt(evolved.v1.location).metadata
        assert str(metadata.table_uuid) == TABLE_ID
        assert metadata.properties[ADOPTED_UUID] == raw["table-uuid"] != TABLE_ID

    def test_only_main_and_the_newest_snapshots_of_its_line_stay(self, make_table: MakeTable) -> None:
        table = make_table()
        for number in range(SNAPSHOTS_KEPT + 2):
            table.append(rows(number))
        table.manage_snapshots().create_tag(table.history()[0].snapshot_id, "first").create_branch(
            table.history()[1].snapshot_id, "other"
        ).commit()
        table.append(rows(100), branch="other")
        line = [entry.snapshot_id for entry in table.history()][-SNAPSHOTS_KEPT:]
        adopted = adopt(table.metadata_location)
        metadata = adopted.metadata
        assert [snapshot.snapshot_id for snapshot in metadata.snapshots] == line
        assert [snapshot.parent_snapshot_id for snapshot in metadata.snapshots] == [None, *line[:-1]]
        assert [entry.snapshot_id for entry in metadata.snapshot_log] == line
        assert {name: ref.snapshot_id for name, ref in metadata.refs.items()} == {"main": line[-1]}
        # The other branch's commit had a sequence too, which must not be given again.
        assert (adopted.sequence, metadata.last_sequence_number) == (SNAPSHOTS_KEPT + 2, SNAPSHOTS_KEPT + 3)

    def test_a_table_that_was_rolled_back_never_gives_a_sequence_twice(self, make_table: MakeTable) -> None:
        table = make_table()
        for number in range(3):
            table.append(rows(number))
        first = table.history()[0].snapshot_id
        table.manage_snapshots().rollback_to_snapshot(first).commit()
        adopted = adopt(table.metadata_location)
        assert (adopted.snapshot, adopted.sequence, adopted.rows) == (first, 1, 1)
        assert adopted.metadata.last_sequence_number == 3
        assert [snapshot.snapshot_id for snapshot in adopted.metadata.snapshots] == [first]
        assert [entry.snapshot_id for entry in adopted.metadata.snapshot_log] == [first]

    def test_the_metadata_log_ends_with_the_file_that_was_adopted(self, evolved: Evolved) -> None:
        metadata = adopt(evolved.upgraded.location).metadata
        assert metadata.metadata_log[-1].metadata_file == evolved.upgraded.location
        assert len(metadata.metadata_log) == METADATA_LOG_KEPT
        times = [entry.timestamp_ms for entry in metadata.metadata_log]
        assert times == sorted(times)
        assert metadata.last_updated_ms >= times[-1]

    def test_settings_that_delete_history_are_dropped_and_others_stay(self, make_table: MakeTable) -> None:
        table = make_table(
            owner="somebody",
            **{
                "write.metadata.delete-after-commit.enabled": "true",
                "write.metadata.previous-versions-max": "1",
                "history.expire.max-snapshot-age-ms": "1",
                "write.parquet.compression-codec": "snappy",
            },
        )
        properties = adopt(table.metadata_location).metadata.properties
        assert set(properties) == {"owner", "write.parquet.compression-codec", ADOPTED_UUID}


class TestTheKey:
    IDENTIFIED = Schema(*COLUMNS.fields, identifier_field_ids=[1])

    def test_identifier_fields_are_not_taken_for_a_key(self, make_table: MakeTable) -> None:
        table = make_table(self.IDENTIFIED)
        assert table.schema().identifier_field_ids == [1]
        assert adopt(table.metadata_location).metadata.schema().identifier_field_ids == []

    def test_a_key_of_required_columns_is_written_into_the_schema(self, make_table: MakeTable) -> None:
        assert adopt(make_table().metadata_location, key=["id"]).metadata.schema().identifier_field_ids == [1]

    @pytest.mark.parametrize(
        ("key", "message", "advice"),
        [
            (["name"], "may hold nulls", "without a key"),
            (["weight"], "cannot be part of a key", "not float or double"),
            (["nothing"], "no such column", "id, name, part, weight"),
            (["id", "id"], "twice", "once"),
            ("id", "list of columns", 'key=["id"]'),
        ],
    )
    def test_what_cannot_be_a_key_is_refused(self, make_table: MakeTable, key: Any, message: str, advice: str) -> None:
        with pytest.raises(Invalid, match=message) as caught:
            adopt(make_table().metadata_location, key=key)
        assert advice in caught.value.advice


class TestWhereTheMetadataIs:
    def folder_of(self, table: Table, tmp_path: Path, *names: str) -> Path:
        """A folder with copies of the table's metadata under these names; each later copy has one more property."""
        text = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
        folder = tmp_path / uuid.uuid4().hex
        (folder / "metadata").mkdir(parents=True)
        for name in names:
            text["properties"] = {"name": name}
            data = json.dumps(text).encode()
            (folder / "metadata" / name).write_bytes(gzip.compress(data) if ".gz" in name else data)
        return folder

    def taken(self, folder: Path) -> str:
        adopted = adopt(f"file://{folder}/")
        name = adopted.metadata.properties["name"]
        assert adopted.metadata.metadata_log[-1].metadata_file == f"file://{folder}/metadata/{name}"
        return name

    @pytest.mark.parametrize(
        ("names", "newest"),
        [
            (("00009-b.metadata.json", "00010-a.metadata.json", "notes.json"), "00010-a.metadata.json"),
            (("99999-a.metadata.json", "100000-a.metadata.json"), "100000-a.metadata.json"),
            (("v9.metadata.json", "v10.metadata.json"), "v10.metadata.json"),
            (("00001-a.metadata.json", "00002-b.gz.metadata.json"), "00002-b.gz.metadata.json"),
            (("v1.metadata.json", "v2.metadata.json.gz"), "v2.metadata.json.gz"),
        ],
    )
    def test_the_highest_number_is_the_newest(
        self, make_table: MakeTable, tmp_path: Path, names: tuple[str, ...], newest: str
    ) -> None:
        assert self.taken(self.folder_of(make_table(), tmp_path, *names)) == newest

    @pytest.mark.parametrize(
        ("hint", "taken"),
        [
            ("00001-a", "00001-a.metadata.json"),
            ("00001-a.metadata.json\n", "00001-a.metadata.json"),
            ("4", "v4.metadata.json"),
            # A hint lags behind when its writer died after the commit.
            ("1", "v2.metadata.json"),
        ],
    )
    def test_a_version_hint_decides(self, make_table: MakeTable, tmp_path: Path, hint: str, taken: str) -> None:
        names = ["00001-a", "00002-b", "v1", "v2", "v4"]
        folder = self.folder_of(make_table(), tmp_path, *(f"{name}.metadata.json" for name in names))
        (folder / "metadata" / "version-hint.text").write_text(hint)
        assert self.taken(folder) == taken

    def test_two_newest_ones_are_both_named(self, make_table: MakeTable, tmp_path: Path) -> None:
        names = ("00001-z.metadata.json", "00002-a.metadata.json", "00002-b.metadata.json")
        folder = self.folder_of(make_table(), tmp_path, *names)
        with pytest.raises(Invalid) as caught:
            adopt(f"file://{folder}")
        assert caught.value.facts["files"] == "00002-a.metadata.json, 00002-b.metadata.json"

    def test_a_folder_without_metadata_is_not_found(self, make_table: MakeTable, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            adopt(f"file://{tmp_path}/nothing")
        folder = self.folder_of(make_table(), tmp_path, "v1.metadata.json")
        (folder / "metadata" / "version-hint.text").write_text("7")
        with pytest.raises(NotFound):
            adopt(f"file://{folder}")

    def test_a_metadata_file_that_is_not_there_is_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            adopt(f"file://{tmp_path}/00000-a.metadata.json")

    def test_metadata_written_again_under_its_name_is_read_again(self, make_table: MakeTable, tmp_path: Path) -> None:
        files = MetadataFiles(Storage())
        folder = self.folder_of(make_table(), tmp_path, "v1.metadata.json")
        location = f"file://{folder}/metadata/v1.metadata.json"
        first = read_foreign(files, location, table_id=TABLE_ID)
        shutil.copy(make_table().metadata_location.removeprefix("file://"), folder / "metadata" / "v1.metadata.json")
        again = read_foreign(files, location, table_id=TABLE_ID)
        assert first.metadata.properties[ADOPTED_UUID] != again.metadata.properties[ADOPTED_UUID]


def changed(table: Table, **changes: Any) -> str:
    """The location of a copy of the table's metadata with some of its fields replaced (None: removed)."""
    raw = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
    raw.update({name.replace("_", "-"): value for name, value in changes.items()})
    location = table.metadata_location.replace(".metadata.json", f"-{uuid.uuid4()}.metadata.json")
    text = json.dumps({name: value for name, value in raw.items() if value is not None})
    Path(location.removeprefix("file://")).write_text(text)
    return location


def with_manifests(table: Table, *manifests: ManifestFile, version: Any = 2) -> str:
    """The location of metadata whose current snapshot has these manifests."""
    head = table.current_snapshot()
    assert head is not None
    location = f"{table.location()}/metadata/{uuid.uuid4()}.avro"
    sequence = head.sequence_number
    with write_manifest_list(
        version, table.io.new_output(location), head.snapshot_id, None, sequence, "deflate"
    ) as out:
        out.add_manifests(list(manifests))
    snapshot = json.loads(head.model_dump_json()) | {"manifest-list": location}
    return changed(table, snapshots=[snapshot], **{"current-snapshot-id": head.snapshot_id})


def manifests_of(table: Table) -> list[ManifestFile]:
    head = table.current_snapshot()
    assert head is not None
    # Copies: PyIceberg keeps what it has read for everybody in the process.
    return [ManifestFile(*manifest._data) for manifest in head.manifests(table.io)]


def with_files(table: Table, *changes: dict[str, Any], sequence: int = 1) -> str:
    """The location of metadata whose only files are copies of the table's first one, each with these changes."""
    head = table.current_snapshot()
    assert head is not None
    [manifest, *_] = manifests_of(table)
    [entry, *_] = manifest.fetch_manifest_entry(table.io)
    location = f"{table.location()}/metadata/{uuid.uuid4()}.avro"
    output = table.io.new_output(location)
    with write_manifest(2, UNPARTITIONED_PARTITION_SPEC, table.schema(), output, head.snapshot_id, "deflate") as writer:
        for change in changes:
            file = DataFile(*entry.data_file._data)
            for place, value in change.items():
                file[int(place)] = value
            writer.existing(
                ManifestEntry.from_args(
                    snapshot_id=head.snapshot_id, sequence_number=sequence, file_sequence_number=1, data_file=file
                )
            )
    return with_manifests(table, writer.to_manifest_file())


class TestWhatIsRefused:
    @pytest.fixture
    def table(self, make_table: MakeTable) -> Table:
        table = make_table()
        table.append(rows(1, 2))
        return table

    def refused(self, location: str, *words: str) -> Invalid:
        with pytest.raises(Invalid) as caught:
            adopt(location)
        assert caught.value.advice
        for word in words:
            assert word in str(caught.value)
        return caught.value

    def test_the_crafted_metadata_of_these_tests_is_otherwise_good(self, table: Table) -> None:
        assert adopt(with_manifests(table, *manifests_of(table))).rows == 2
        assert adopt(with_files(table, {})).rows == 2

    def test_delete_files(self, table: Table) -> None:
        [manifest] = manifests_of(table)
        manifest[3] = ManifestContent.DELETES
        self.refused(with_manifests(table, manifest), "delete files", "copy-on-write")

    def test_encrypted_manifests_and_files(self, table: Table) -> None:
        [manifest] = manifests_of(table)
        manifest[14] = b"key"
        self.refused(with_manifests(table, manifest), "encrypted")
        self.refused(with_files(table, {"12": b"key"}), "encrypted")

    def test_files_that_are_not_parquet(self, table: Table) -> None:
        self.refused(with_files(table, {"2": FileFormat.ORC}), "not Parquet")

    def test_a_file_that_is_named_twice(self, table: Table) -> None:
        self.refused(with_files(table, {}, {}), "twice")

    def test_a_file_that_no_storage_can_reach(self, table: Table) -> None:
        self.refused(with_files(table, {"1": "hdfs://host/file.parquet"}), "hdfs://host/file.parquet")

    def test_a_list_without_counts_to_which_v2_could_not_commit(self, make_table: MakeTable) -> None:
        table = make_table(version=1)
        table.append(rows(1))
        manifests = manifests_of(table)
        assert adopt(with_manifests(table, *manifests, version=1)).rows == 1
        for manifest in manifests:
            manifest[7] = None
        self.refused(with_manifests(table, *manifests, version=1), "does not count", "format v2")

    @pytest.mark.parametrize("version", [3, 4])
    def test_newer_formats(self, table: Table, version: int) -> None:
        self.refused(changed(table, format_version=version), f"format_version={version}", "Copy")

    def test_a_current_snapshot_without_a_manifest_list(self, make_table: MakeTable) -> None:
        table = make_table(version=1)
        table.append(rows(1))
        table.append(rows(2))
        raw = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
        old, new = ({**one, "manifests": [], "manifest-list": None} for one in raw["snapshots"])
        self.refused(changed(table, snapshots=[raw["snapshots"][0], new]), "no manifest list")
        # An old one is not needed any more.
        adopted = adopt(changed(table, snapshots=[old, raw["snapshots"][1]]))
        assert adopted.rows == 2
        assert [one.snapshot_id for one in adopted.metadata.snapshots] == [raw["current-snapshot-id"]]

    @pytest.mark.parametrize("name", ["_seq", "_SEQ", "_change", "_file", "_Pos"])
    def test_reserved_column_names(self, make_table: MakeTable, name: str) -> None:
        table = make_table(Schema(NestedField(1, name, StringType(), required=False)))
        self.refused(table.metadata_location, name, "Rename")

    def test_the_table_of_another_lake(self, make_table: MakeTable) -> None:
        table = make_table(Schema(*COLUMNS.fields, NestedField(5, "_seq", LongType(), required=False)))
        self.refused(table.metadata_location, "another lake's order", "Copy")

    @pytest.mark.parametrize("version", [1, 2])
    def test_files_partitioned_by_a_dropped_column(self, make_table: MakeTable, version: int) -> None:
        table = make_table(version=version)
        with table.update_spec() as spec:
            spec.add_identity("part")
        table.append(rows(1))
        with table.update_spec() as spec:
            spec.remove_field("part")
        assert adopt(table.metadata_location).rows == 1
        with table.update_schema() as update:
            update.delete_column("part")
        self.refused(table.metadata_location, "dropped", "field=part")


class TestWhatIsCorrupt:
    @pytest.fixture
    def table(self, make_table: MakeTable) -> Table:
        table = make_table()
        table.append(rows(1, 2))
        return table

    @pytest.mark.parametrize(
        "data", [b"", b"{", b"[]", b"{}", b"\xff", b"\x1f\x8bnot gzip", b'{"format-version": "x"}']
    )
    def test_metadata_that_is_no_metadata(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "v1.metadata.json").write_bytes(data)
        with pytest.raises(Corrupt):
            adopt(f"file://{tmp_path}/v1.metadata.json")

    def test_metadata_without_its_parts(self, table: Table) -> None:
        for part in ("schemas", "last-column-id", "location", "partition-specs"):
            with pytest.raises(Corrupt):
                adopt(changed(table, **{part: None}))

    def test_heads_that_do_not_agree(self, table: Table) -> None:
        for changes in (
            {"current-snapshot-id": 5},
            {"current-snapshot-id": None},
            {"refs": {"main": {"snapshot-id": 5, "type": "branch"}}},
            {"snapshots": []},
        ):
            with pytest.raises(Corrupt, match="current snapshot"):
                adopt(changed(table, **changes))

    def test_sequences_that_were_never_given(self, table: Table) -> None:
        with pytest.raises(Corrupt, match="last sequence number"):
            adopt(changed(table, last_sequence_number=0))
        with pytest.raises(Corrupt, match="never assigned"):
            adopt(with_files(table, {}, sequence=9))

    @pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"Obj\x01damaged")])
    def test_lists_and_manifests_that_are_gone_or_damaged(self, table: Table, damage: Callable[[Path], None]) -> None:
        [manifest] = manifests_of(table)
        location = with_manifests(table, manifest)
        damage(Path(manifest.manifest_path.removeprefix("file://")))
        with pytest.raises(Corrupt) as caught:
            adopt(location)
        assert caught.value.facts["file"] == manifest.manifest_path
        head = table.current_snapshot()
        assert head is not None
        damage(Path(head.manifest_list.removeprefix("file://")))
        with pytest.raises(Corrupt) as caught:
            adopt(table.metadata_location)
        assert caught.value.facts["file"] == head.manifest_list

    def test_files_of_an_unknown_partition_spec(self, table: Table) -> None:
        [manifest] = manifests_of(table)
        manifest[2] = 7
        with pytest.raises(Corrupt, match="partition spec"):
            adopt(with_manifests(table, manifest))


class TestEarlyMetadata:
    def test_metadata_of_v1_with_only_what_v1_demands(self, make_table: MakeTable, tmp_path: Path) -> None:
        table = make_table(version=1)
        table.append(rows(1, 2))
        raw = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
        del raw["schema"]["schema-id"]
        for snapshot in raw["snapshots"]:
            del snapshot["schema-id"]
        optional = (
            "table-uuid", "schemas", "current-schema-id", "partition-specs", "default-spec-id", "last-partition-id",
            "sort-orders", "default-sort-order-id", "refs", "snapshot-log", "metadata-log", "statistics",
            "partition-statistics",
        )  # fmt: skip
        location = changed(table, schema=raw["schema"], snapshots=raw["snapshots"], **dict.fromkeys(optional, None))
        assert "table-uuid" not in json.loads(Path(location.removeprefix("file://")).read_text())
        adopted = adopt(location)
        # An identity that the table never had is not made up.
        assert ADOPTED_UUID not in adopted.metadata.properties
        assert [entry.snapshot_id for entry in adopted.metadata.snapshot_log] == [adopted.snapshot]
        assert [row["id"] for row in content(loaded(adopted, tmp_path))] == [1, 2]


class TestFieldIds:
    NESTED = Schema(
        NestedField(1, "id", LongType(), required=False),
        NestedField(2, "tags", ListType(3, StringType(), element_required=False), required=False),
        NestedField(4, "counts", MapType(5, StringType(), 6, IntegerType(), value_required=False), required=False),
        NestedField(7, "place", StructType(NestedField(8, "x", LongType(), required=False)), required=False),
    )
    ROW = {"id": 1, "tags": ["a"], "counts": [("a", 1)], "place": {"x": 1}}

    def nested_rows(self) -> pa.Table:
        kinds = {
            "id": pa.int64(),
            "tags": pa.list_(pa.string()),
            "counts": pa.map_(pa.string(), pa.int32()),
            "place": pa.struct({"x": pa.int64()}),
        }
        return pa.Table.from_pylist([self.ROW], schema=pa.schema(list(kinds.items())))

    def with_name_mapping(self, table: Table) -> None:
        with table.transaction() as transaction:
            mapping = table.schema().name_mapping.model_dump_json()
            transaction.set_properties({"schema.name-mapping.default": mapping})

    def test_files_with_ids_are_adopted_whatever_the_name_mapping(self, make_table: MakeTable) -> None:
        table = make_table(self.NESTED)
        table.append(self.nested_rows())
        self.with_name_mapping(table)
        assert adopt(table.metadata_location).rows == 1

    def test_a_file_that_was_added_without_ids_is_refused_by_name(self, make_table: MakeTable, tmp_path: Path) -> None:
        table = make_table()
        table.append(rows(1))
        added = f"file://{tmp_path}/added.parquet"
        pq.write_table(rows(2), tmp_path / "added.parquet")
        table.add_files([added])
        assert content(table) == rows(1, 2).to_pylist()
        with pytest.raises(Invalid, match="without field ids") as caught:
            adopt(table.metadata_location)
        assert caught.value.facts["file"] == added

    def test_ids_that_are_missing_inside_a_column_are_seen(self, make_table: MakeTable, tmp_path: Path) -> None:
        """Only the outer columns have ids: by id, what is in the struct would be lost."""
        table = make_table(self.NESTED)
        data = self.nested_rows()
        fields = [
            field.with_metadata({"PARQUET:field_id": str(table.schema().find_field(field.name).field_id)})
            for field in data.schema
        ]
        table.append(data)
        [task] = table.scan().plan_files()
        self.with_name_mapping(table)
        pq.write_table(data.cast(pa.schema(fields)), task.file.file_path.removeprefix("file://"))
        with pytest.raises(Invalid, match="without field ids") as caught:
            adopt(table.metadata_location)
        assert caught.value.facts["column"] == "tags"

    def test_a_data_file_that_is_gone_is_named(self, make_table: MakeTable) -> None:
        table = make_table()
        table.append(rows(1))
        self.with_name_mapping(table)
        [task] = table.scan().plan_files()
        Path(task.file.file_path.removeprefix("file://")).unlink()
        with pytest.raises(Corrupt) as caught:
            adopt(table.metadata_location)
        assert caught.value.facts["file"] == task.file.file_path
