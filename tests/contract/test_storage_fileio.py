"""PyIceberg's FileIO over every kind of store, and PyIceberg itself on top of it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import ManifestEntry

from floodmark.errors import Invalid, NotFound
from floodmark.storage import Storage, join, root_location
from floodmark.storage.fileio import LakeFileIO
from floodmark.testing.s3 import S3Server
from floodmark.testing.storage_contract import names


class TestFileIO:
    def test_a_claimed_name_is_not_given_twice(self, options: dict[str, str], root: str) -> None:
        file_io = LakeFileIO.over(Storage(options))
        location = join(root, "metadata/v1.metadata.json")
        output = file_io.new_output(location)
        with output.create() as stream:
            stream.write(b"first")
            assert not output.exists()
        with pytest.raises(FileExistsError), file_io.new_output(location).create() as stream:
            stream.write(b"second")
        assert file_io.storage.read(location) == b"first"
        with file_io.new_output(location).create(overwrite=True) as stream:
            stream.write(b"third")
        assert file_io.storage.read(location) == b"third"

    @pytest.mark.parametrize("name", ["m.avro", "d.parquet"])
    def test_the_length_is_known_without_asking(self, options: dict[str, str], root: str, name: str) -> None:
        file_io = LakeFileIO.over(Storage(options))
        output = file_io.new_output(join(root, name))
        stream = output.create(overwrite=True)
        stream.write(b"12345")
        assert stream.tell() == 5
        stream.close()
        stream.close()
        before = file_io.storage.counters.snapshot()
        assert len(output) == 5
        assert file_io.storage.counters.difference(before).total == 0
        assert len(output.to_input_file()) == 5

    @pytest.mark.parametrize("name", ["m.avro", "d.parquet"])
    def test_a_stream_closed_by_an_error_makes_no_file(self, options: dict[str, str], root: str, name: str) -> None:
        file_io = LakeFileIO.over(Storage(options))
        output = file_io.new_output(join(root, name))
        stream = output.create(overwrite=True)
        stream.write(b"half")
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            stream.close()

        def fail() -> None:
            with output.create(overwrite=True) as stream:
                stream.write(b"half")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert not output.exists()
        with pytest.raises(FileNotFoundError):
            len(output)
        assert list(file_io.storage.list(root, temporary=True)) == []

    def test_a_file_written_while_another_error_is_handled_is_kept(self, options: dict[str, str], root: str) -> None:
        file_io = LakeFileIO.over(Storage(options))
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            stream = file_io.new_output(join(root, "m.avro")).create(overwrite=True)
            stream.write(b"whole")
            stream.close()
        assert file_io.storage.read(join(root, "m.avro")) == b"whole"

    def test_metadata_is_read_in_one_call(self, options: dict[str, str], root: str) -> None:
        file_io = LakeFileIO.over(Storage(options))
        file_io.storage.put(join(root, "m.avro"), b"0123456789")
        before = file_io.storage.counters.snapshot()
        with file_io.new_input(join(root, "m.avro")).open() as stream:
            stream.seek(3)
            assert stream.read(2) == b"34"
            stream.seek(0)
            assert stream.read() == b"0123456789"
        assert file_io.storage.counters.difference(before).calls == {"read": 1}

    @pytest.mark.parametrize("name", ["absent.avro", "absent.parquet"])
    def test_absent_is_both_errors_in_one(self, options: dict[str, str], root: str, name: str) -> None:
        file = LakeFileIO.over(Storage(options)).new_input(join(root, name))
        assert not file.exists()
        for call in (file.open, file.__len__):
            with pytest.raises(NotFound) as caught:
                call()
            assert isinstance(caught.value, FileNotFoundError)
            assert caught.value.as_dict()["kind"] == "NotFound"
            assert name in str(caught.value)

    def test_delete_takes_a_location_or_a_file_and_may_be_repeated(self, options: dict[str, str], root: str) -> None:
        file_io = LakeFileIO.over(Storage(options))
        for file in (join(root, "x"), file_io.new_input(join(root, "x")), file_io.new_output(join(root, "x"))):
            file_io.storage.put(join(root, "x"), b"1")
            file_io.delete(file)
            file_io.delete(file)
            assert not file_io.storage.exists(join(root, "x"))

    def test_credentials_among_the_properties_are_refused_without_repeating_them(self) -> None:
        with pytest.raises(Invalid) as caught:
            LakeFileIO({"s3.secret-access-key": "hidden-secret"})
        assert "hidden-secret" not in str(caught.value)

    @pytest.mark.parametrize("kind", ["local", "s3"])
    def test_pyiceberg_writes_and_reads_a_table(
        self, kind: str, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        properties = {}
        warehouse = root_location(str(tmp_path / "a folder"))
        if kind == "s3":
            server: S3Server = request.getfixturevalue("s3_server")
            properties = {"s3.endpoint": server.endpoint, "s3.region": "us-east-1"}
            warehouse = f"s3://{server.make_bucket()}/warehouse"
        catalog = SqlCatalog(
            "lake",
            uri=f"sqlite:///{tmp_path}/catalog.db",
            warehouse=warehouse,
            **{"py-io-impl": "floodmark.storage.fileio.LakeFileIO", **properties},
        )
        catalog.create_namespace("main")
        rows = pa.table({"id": [1, 2, 3], "text": ["a", "b", None]})
        table = catalog.create_table("main.events", rows.schema)
        table.append(rows)
        table.append(rows)
        assert isinstance(table.io, LakeFileIO)
        table = catalog.load_table("main.events")
        assert table.scan().to_arrow().sort_by("id").column("id").to_pylist() == [1, 1, 2, 2, 3, 3]
        entries: list[ManifestEntry] = [
            entry
            for manifest in table.current_snapshot().manifests(table.io)
            for entry in manifest.fetch_manifest_entry(table.io)
        ]
        storage = table.io.storage
        assert [storage.size(entry.data_file.file_path) for entry in entries] == [
            entry.data_file.file_size_in_bytes for entry in entries
        ]
        catalog.purge_table("main.events")
        assert names(storage, join(warehouse, "main")) == []
        catalog.engine.dispose()
