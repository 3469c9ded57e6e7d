"""What a read opens, over the life of a table: the files that may match, found without opening what cannot."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.commit.file_columns import REMEMBERED
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import MetadataFiles, schema_of
from floodmark.errors import Corrupt, NotFound
from floodmark.model import Head
from floodmark.rows.reading.selection import select_files, select_newer
from floodmark.rows.sql.where import Where
from floodmark.storage import Storage
from floodmark.write import table
from tests.conftest import Place

CONDITIONS = (
    "id = 7",
    "id in (3, 21, 400)",
    "day = '2024-01-03' and name like 'n1%'",
    "name is null or id > 30",
    "not (day = '2024-01-02' or id < 5)",
    "upper(name) = 'N5' and id < 10",
    "false",
)


def rows(*ids: int, **more: Any) -> list[dict[str, Any]]:
    return [{"id": one, "name": f"n{one}", "day": f"2024-01-0{one % 4 + 1}", **more} for one in ids]


@pytest.fixture
def place(place: Place) -> Place:
    """A table that saw appends, merges, deletes, an evolution and a compaction, with few rows in each file."""
    with place.open(create=True) as lake:
        columns = "id int not null, name string, day date"
        lake.create_table("t", columns, key=["id"], partition=["day"])
        for start in range(0, 40, 4):
            lake.append("t", rows(*range(start, start + 4)))
        lake.merge("t", rows(1, 5, 50, name=None))
        lake.delete("t", "id in (8, 13)")
        lake.merge("t", rows(2, 60, extra=1.5), evolve=True)
        lake.maintain.compact("t", files_min=2)
        lake.append("t", rows(70, 71))
        lake.overwrite("t", rows(80, name="n1"), where="id > 75")
    return place


def shown(file: LiveFile) -> tuple[object, ...]:
    data = file.data_file
    return (
        file.path, file.rows, file.size_bytes, file.spec_id, file.sequence, file.fresh, file.settled, file.seq_bounds(),
        list(data.partition), dict(data.value_counts), dict(data.null_value_counts), dict(data.lower_bounds),
        dict(data.upper_bounds),
    )  # fmt: skip


def test_at_every_version_the_files_are_those_that_one_by_one_may_match(place: Place) -> None:
    with place.open(read_only=True) as lake:
        files, history = lake.catalog.files, lake.catalog.history
        for version in range(2, history.resolve() + 1):
            head = history.tables_at(version)["t"]
            metadata = files.metadata(head.metadata_location)
            schema = schema_of(metadata, head)
            every = live_files(files, head, schema)
            whole = select_files(files, head, schema)
            assert [shown(file) for file in whole.files] == [shown(file) for file in every]
            assert (whole.all_files, whole.all_bytes) == (len(every), sum(file.size_bytes for file in every))
            for text in CONDITIONS:
                where = Where.parse(text, schema)
                found = [file.path for file in select_files(files, head, schema, where).files]
                assert found == [file.path for file in every if where.may_match(file, metadata)], (version, text)
            for since in range(head.sequence):
                newer = {file.path for file in select_newer(files, head, schema, since, head.sequence)}
                for file in every:
                    bounds = file.seq_bounds()
                    assert (file.path in newer) >= (bounds is None or bounds[1] > since)


@pytest.mark.parametrize("few", [0, 64])
def test_what_is_deleted_and_counted_is_what_matches(place: Place, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ONE_BY_ONE_MAX", few)
    with place.open() as lake:
        expected = {row["id"] for row in lake.read_arrow("t").read_all().to_pylist()}
        for text, gone in (("id = 7", {7}), ("name is null", {1, 5, 50}), ("day = '2024-01-03' and id < 20", None)):
            match = {one for one in expected if one % 4 == 2 and one < 20} if gone is None else gone
            assert lake.plan_delete("t", text)["rows"] == len(match)
            assert lake.delete("t", text).tables[0].rows_deleted == len(match)
            expected -= match
            assert {row["id"] for row in lake.read_arrow("t").read_all().to_pylist()} == expected
        with lake.transaction() as tx:
            tx.append("t", rows(7, 100))
            tx.delete("t", "id in (7, 70)")
        assert {row["id"] for row in lake.read_arrow("t").read_all().to_pylist()} == (expected | {100}) - {70}


def test_readers_at_once_get_the_same(place: Place) -> None:
    REMEMBERED.clear()
    with place.open(read_only=True) as lake:
        head = lake.catalog.history.head("t")
        schema = schema_of(lake.catalog.files.metadata(head.metadata_location), head)

        def ask(number: int) -> list[str]:
            where = Where.parse(CONDITIONS[number % 2], schema)
            return [file.path for file in select_files(lake.catalog.files, head, schema, where).files]

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, range(64)))
    assert all(one == found[number % 2] for number, one in enumerate(found))


def head_of(lake: fm.Lake) -> tuple[Head, list[Path]]:
    head = lake.catalog.history.head("t")
    manifests = lake.catalog.files.manifests(head.manifest_list)
    return head, [Path(one.manifest_path.removeprefix("file://")) for one in manifests]


def test_a_damaged_or_missing_manifest_is_an_error_and_never_fewer_rows(place: Place) -> None:
    with place.open(read_only=True) as lake:
        head, manifests = head_of(lake)
        schema = schema_of(lake.catalog.files.metadata(head.metadata_location), head)
    whole = manifests[0].read_bytes()
    for data in (whole[:-20], whole[: len(whole) // 2], whole.replace(b"Obj", b"obj"), b""):
        REMEMBERED.clear()
        manifests[0].write_bytes(data)
        with pytest.raises(Corrupt) as refused:
            select_files(MetadataFiles(Storage()), head, schema)
        assert refused.value.facts["file"] == f"file://{manifests[0]}"
    manifests[0].unlink()
    with pytest.raises(NotFound):
        select_files(MetadataFiles(Storage()), head, schema)
    with place.open(read_only=True) as lake, pytest.raises((Corrupt, NotFound)):
        lake.changes("t").arrow()
