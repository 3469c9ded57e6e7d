"""Keyed writes beside index segments that are damaged, foreign or gone: always what a scan would give."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.indexes import IndexRow, SegmentRow, WantedIndex
from floodmark.index import covering
from floodmark.index.keys import files_holding_keys
from floodmark.rows.index import hashing
from floodmark.storage import Storage, local_path
from floodmark.testing.invariants import check_lake
from floodmark.testing.s3 import S3Server
from tests.conftest import Place, at
from tests.publishing import Behind, in_this_thread

# So many rows that a segment is not read whole: its file stays open, and its blocks are read when they are asked for.
MANY = 5_000
FILES = 3


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No segment is open, and what this Floodmark can read is not remembered from an encoder of another test."""
    monkeypatch.setattr(covering, "_OPEN", covering._OpenSegments())
    covering.form_of.cache_clear()
    yield
    covering.form_of.cache_clear()


def people(start: int, end: int, name: str = "old") -> list[dict[str, Any]]:
    return [{"id": f"person {number:06}", "name": name} for number in range(start, end)]


def fill(lake: fm.Lake, rows: int) -> None:
    """Files whose keys lie between each other: bounds leave none of them out."""
    lake.create_table("people", "id string not null, name string", key=["id"])
    for number in range(FILES):
        lake.append("people", people(0, rows * FILES)[number::FILES])


@pytest.fixture(params=[20, MANY], ids=["small", "large"])
def filled(request: pytest.FixtureRequest, new_place: Callable[[str], Place]) -> Place:
    place = new_place("sqlite")
    with place.open(create=True, actor="test") as lake:
        fill(lake, request.param)
    return place


def index_of(lake: fm.Lake, table: str = "people") -> IndexRow:
    (index,) = lake.catalog.indexes.of_table(lake.catalog.history.head(table).table_id)
    return index


def segments(lake: fm.Lake) -> list[SegmentRow]:
    return lake.catalog.indexes.segments(lake.catalog.history.head("people").table_id)


def covered(lake: fm.Lake) -> int:
    paths = list(lake.catalog.files.data_files(lake.catalog.history.head("people")))
    return lake.engine.coverings.covered(index_of(lake), paths)


def state(lake: fm.Lake) -> dict[str, str]:
    rows = lake.read_arrow("people").read_all().to_pylist()
    found = {row["id"]: row["name"] for row in rows}
    assert len(found) == len(rows), "a key is there twice"
    return found


def write_all_kinds(lake: fm.Lake) -> None:
    """Every keyed verb, on keys of every file and on new ones: nothing is missed, nothing comes twice."""
    there = state(lake)
    # Every block of every segment is read.
    everything = [{"id": key, "name": name} for key, name in there.items()]
    assert lake.merge("people", everything).outcome == "nothing_to_do"
    some = sorted(there)[:FILES]
    for key in some:
        with pytest.raises(fm.Invalid, match="key"):
            lake.append("people", [{"id": key, "name": "again"}, {"id": "new", "name": "new"}])
    merged = [{"id": key, "name": "merged"} for key in some[:2]]
    commit = lake.merge("people", [*merged, {"id": some[2], "name": there[some[2]]}, {"id": "new", "name": "new"}])
    touched = commit.tables[0]
    assert (touched.rows_added, touched.rows_updated, touched.rows_deleted) == (1, 2, 0)
    there.update(dict.fromkeys(some[:2], "merged"), new="new")
    assert state(lake) == there
    with lake.transaction("several") as tx:
        tx.merge("people", [{"id": some[0], "name": "once more"}])
        tx.delete_keys("people", [{"id": some[1]}, {"id": "nobody"}])
        with pytest.raises(fm.Invalid):
            tx.append("people", [{"id": some[0], "name": "twice"}])
    there[some[0]] = "once more"
    del there[some[1]]
    assert state(lake) == there
    lake.append("people", [{"id": some[1], "name": "back"}])
    there[some[1]] = "back"
    assert state(lake) == there


def check_there(lake: fm.Lake, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        with pytest.raises(fm.Invalid):
            lake.append("people", [row])


# ── damage ──


def parts_of(data: bytes) -> dict[str, tuple[int, int]]:
    """Where the parts of a segment lie, as docs/index-format.md has it."""
    _, _, directory_bytes, _, _ = struct.unpack("<QQIII", data[-40:-12])
    directory = data[-40 - directory_bytes : -40]
    (section,) = json.loads(directory)["sections"]
    return {
        "trailer": (len(data) - 40, 40),
        "directory": (len(data) - 40 - directory_bytes, directory_bytes),
        **{name: tuple(section[name][:2]) for name in ("header", "fences", "filter", "blocks")},
    }


def flip(part: str) -> Callable[[Path, Path], None]:
    def damage(path: Path, other: Path) -> None:
        data = bytearray(path.read_bytes())
        start, size = parts_of(bytes(data))[part]
        data[start + size // 2] ^= 0x10
        path.write_bytes(data)

    return damage


def cut(share: float) -> Callable[[Path, Path], None]:
    def damage(path: Path, other: Path) -> None:
        os.truncate(path, int(path.stat().st_size * share))

    return damage


def remove(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    """Another table's segment under its name."""
    path.write_bytes(other.read_bytes())


def grow(path: Path, other: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "deleted": remove,
    "empty": cut(0),
    "cut in the middle": cut(0.5),
    "cut at the end": cut(0.999),
    "grown": grow,
    "another table's": swap,
    **{f"a bit of the {part}": flip(part) for part in ("trailer", "directory", "header", "fences", "filter", "blocks")},
}


def path_of(location: str) -> Path:
    found = local_path(location)
    assert found is not None
    return Path(found)


def damage_one(place: Place, how: Callable[[Path, Path], None]) -> str:
    with place.open() as lake:
        lake.create_table("others", "id string not null, name string", key=["id"])
        lake.append("others", people(0, 60))
        found = segments(lake)[1].location
        (other,) = lake.catalog.indexes.segments(lake.catalog.history.head("others").table_id)
        how(path_of(found), path_of(other.location))
    covering._OPEN.forget(found)
    return found


@pytest.mark.whole
@pytest.mark.parametrize("damage", DAMAGES)
def test_writes_beside_a_damaged_segment_are_right_and_the_damage_is_marked(filled: Place, damage: str) -> None:
    location = damage_one(filled, DAMAGES[damage])
    with filled.open() as lake:
        write_all_kinds(lake)
        assert [row.location for row in segments(lake) if row.broken] == [location]
        check_lake(lake.catalog)


@pytest.mark.whole
@pytest.mark.parametrize("damage", ["deleted", "cut in the middle", "a bit of the blocks", "another table's"])
def test_writes_whose_segments_are_damaged_while_they_are_open_are_right(filled: Place, damage: str) -> None:
    with filled.open() as lake:
        assert covered(lake) == FILES
        with pytest.raises(fm.Invalid):
            lake.append("people", people(0, 1))
        for row in segments(lake)[:2]:
            DAMAGES[damage](path_of(row.location), path_of(segments(lake)[2].location))
        write_all_kinds(lake)


@pytest.mark.whole
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_lake_that_is_read_only_does_without_a_damaged_segment_and_marks_nothing(filled: Place, damage: str) -> None:
    damage_one(filled, DAMAGES[damage])
    with filled.open(read_only=True) as lake:
        index = index_of(lake)
        head = lake.catalog.history.head("people")
        paths = list(lake.catalog.files.data_files(head))
        form = covering.form_of(index)
        assert form is not None
        asked = hashing.hash_values([pa.array([row["id"] for row in people(0, head.rows)])], form.secret)
        for _ in range(2):
            found = lake.engine.coverings.find(index, paths, asked)
            assert set(found.files.tolist()) | set(found.uncovered) == set(range(FILES))
            assert len(found.uncovered) == 1
        assert not [row for row in segments(lake) if row.broken]


def test_more_damaged_segments_than_tries_are_all_done_without(new_place: Callable[[str], Place]) -> None:
    place = new_place("sqlite")
    with place.open(create=True) as lake:
        lake.create_table("people", "id string not null, name string", key=["id"])
        for number in range(covering.TRIES_MAX + 2):
            lake.append("people", people(number, number + 1))
        for row in segments(lake):
            path_of(row.location).unlink()
        covering._OPEN = covering._OpenSegments()
        with pytest.raises(fm.Invalid):
            lake.append("people", people(0, 1))
        write_all_kinds(lake)
        assert all(row.broken for row in segments(lake)[: covering.TRIES_MAX + 2])


# ── what this Floodmark cannot read ──


def change_index(lake: fm.Lake, **values: Any) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.indexes).values(values))


@pytest.mark.parametrize("values", [{"encoder": 99}, {"secret": "f" * 32}, {"wide": 0}], ids=str)
def test_segments_of_another_encoder_secret_or_form_cover_nothing_and_are_not_damaged(
    filled: Place, values: dict[str, Any]
) -> None:
    with filled.open() as lake:
        change_index(lake, **values)
    covering._OPEN = covering._OpenSegments()
    with filled.open() as lake:
        assert covered(lake) == 0
        write_all_kinds(lake)
        assert not [row for row in segments(lake) if row.broken]


def test_half_of_the_files_may_be_covered_by_nothing(filled: Place) -> None:
    with filled.open() as lake:
        with lake.catalog.database.write() as tx:
            gone = segments(lake)[0].location
            tx.execute(tables.segments.delete().where(tables.segments.c.location == gone))
        lake.catalog.storage.delete(gone)
        write_all_kinds(lake)
        check_lake(lake.catalog)


def test_hashes_that_many_keys_share_change_no_result(filled: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder of four bits: nearly every key has the hash of others in every file."""
    narrow = hashing.Encoder(77, bits=4)
    monkeypatch.setitem(hashing.ENCODERS, narrow.number, narrow)
    monkeypatch.setattr("floodmark.index.writing.ENCODER", narrow)
    with filled.open() as lake:
        lake.create_table("narrow", "id string not null, name string", key=["id"])
        fill_narrow(lake)
        assert index_of(lake, "narrow").encoder == narrow.number
        rows = {row["id"]: row["name"] for row in lake.read_arrow("narrow").read_all().to_pylist()}
        assert rows == {**{row["id"]: "old" for row in people(0, 300)}, **{row["id"]: "new" for row in people(0, 30)}}
        check_lake(lake.catalog)


def fill_narrow(lake: fm.Lake) -> None:
    for number in range(FILES):
        lake.append("narrow", people(0, 300)[number::FILES])
    for row in people(0, 300)[::50]:
        with pytest.raises(fm.Invalid):
            lake.append("narrow", [row])
    commit = lake.merge("narrow", [*people(0, 30, "new"), *people(100, 130)])
    assert (commit.tables[0].rows_added, commit.tables[0].rows_updated) == (0, 30)


# ── where an index helps ──


def opened(lake: fm.Lake, rows: list[dict[str, Any]]) -> int:
    """How many data files of the table may hold one of these keys, by the index."""
    from floodmark.commit.live_files import live_files
    from floodmark.commit.metadata import schema_of
    from floodmark.write.prune import key_fields

    head = lake.catalog.history.head("people")
    metadata = lake.catalog.files.metadata(head.metadata_location)
    schema = schema_of(metadata, head)
    lake.create_table("asked", "id string not null, name string", if_not_exists=True)
    lake.overwrite("asked", rows)
    staged = list(lake.catalog.files.data_files(lake.catalog.history.head("asked")))
    files = live_files(lake.catalog.files, head, schema)
    coverings, storage = lake.engine.coverings, lake.catalog.storage
    return len(files_holding_keys(coverings, index_of(lake), storage, files, staged, key_fields(schema)))


def test_only_files_that_hold_a_key_are_opened(filled: Place) -> None:
    with filled.open() as lake:
        assert opened(lake, [{"id": "person 000001 and more", "name": "new"}]) == 0
        assert opened(lake, people(0, 1)) == 1
        assert opened(lake, people(0, FILES)) == FILES


# ── beside others ──


def test_an_index_that_is_dropped_or_made_anew_beside_a_writer_changes_no_result(filled: Place) -> None:
    """What a process knows of a table's indexes is a few seconds old."""
    with filled.open() as lake, filled.open(actor="other") as other:
        write_all_kinds(lake)
        old = index_of(other)
        other.indexes.drop("people", on="id")
        lake.append("people", people(100_000, 100_001))
        assert all(row.retired_ms is not None for row in segments(lake)), "the index was dropped before this commit"
        other.indexes.create("people", on="id", kind="key")
        made = index_of(other)
        assert made.secret != old.secret
        lake.append("people", people(100_001, 100_002))
        with pytest.raises(fm.Invalid):
            lake.append("people", people(100_001, 100_003))
        lake.engine.segments.forget(old.table_id)
        lake.append("people", people(100_002, 100_003))
        assert covered(lake) == 1
        check_there(lake, people(100_000, 100_003))
        check_lake(lake.catalog)


def test_an_index_that_is_dropped_between_plan_and_publish_does_not_refuse_the_write(filled: Place) -> None:
    with filled.open() as lake, filled.open(actor="other") as other:
        with at("append.sealed", lambda: other.indexes.drop("people", on="id")):
            assert lake.append("people", people(100_000, 100_001)).outcome == "committed"
        assert segments(lake)[-1].retired_ms is not None
        check_there(lake, people(100_000, 100_001))
        check_lake(lake.catalog)


@pytest.mark.parametrize("act", ["drop", "rename", "made again"])
@pytest.mark.parametrize("key", [["id"], []], ids=["key", "no key"])
def test_a_table_that_goes_while_rows_are_staged_is_a_conflict(place: Place, act: str, key: list[str]) -> None:
    with place.open(create=True) as lake, place.open() as other:
        lake.create_table("people", "id string not null, name string", key=key)
        other.append("people", people(0, 1))

        def go() -> None:
            if act == "rename":
                lake.rename_table("people", "persons")
            else:
                lake.drop_table("people")
            if act == "made again":
                lake.create_table("people", "name long, id int not null", key=["id"])

        with place.open() as late, at("append.staged", go), pytest.raises(fm.Conflict, match="dropped or made again"):
            late.append("people", people(1, 2))
        check_lake(lake.catalog)


def test_a_value_index_on_the_key_does_not_stand_for_the_index_of_the_key(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", "id string not null, name string", key=["id"])
        table_id = lake.catalog.history.head("people").table_id
        # As a column has that becomes the key later.
        lake.catalog.indexes.declare(table_id, WantedIndex("value", (1,), True, hashing.ENCODER.number))
        lake.append("people", people(0, 3))
        kinds = {row.id: row.kind for row in lake.catalog.indexes.of_table(table_id)}
        assert sorted(kinds.values()) == ["key", "value"]
        assert {row.index_id for row in segments(lake)} == set(kinds)
        check_there(lake, people(0, 3))
        check_lake(lake.catalog)


def test_rows_of_this_process_are_indexed_by_it_however_many_they_are(
    new_place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without Spark stages any number of rows: their index must not need a JVM either."""
    monkeypatch.setattr("floodmark.rows.tasks.IN_PROCESS_ROWS_MAX", 10)
    monkeypatch.setattr("floodmark.rows.session.Sessions.get", lambda self: pytest.fail("Spark was started"))
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("people", "id string not null, name string", key=["id"])
        lake.append("people", people(0, 100))
        assert covered(lake) == 1


def test_appends_that_are_published_together_bring_each_its_own_segments(place: Place) -> None:
    with place.open(create=True) as lake, place.open() as one, place.open() as other:
        lake.create_table("people", "id string not null, name string")
        lake.indexes.create("people", on="name")
        behind = Behind(
            lake, [partial(one.append, "people", people(1, 2)), partial(other.append, "people", people(2, 3))]
        )
        with in_this_thread("append.sealed", behind.begin):
            first = lake.append("people", people(0, 1))
        commits = [first, *behind.wait()]
        assert {row.operation for row in segments(lake)} == {commit.operation for commit in commits}
        assert covered(lake) == len(commits)
        lake.maintain.sweep(grace="0s", deep=True)
        assert covered(lake) == len(commits)
        check_lake(lake.catalog)


# ── stores where a read is a request ──


@pytest.fixture
def remote(s3_server: S3Server, new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    folder = f"s3://{s3_server.make_bucket()}/lake"
    catalog = f"sqlite:///{new_place('sqlite').path}.db"
    with fm.open(folder, catalog=catalog, create=True, storage=Storage(s3_server.options)) as lake:
        fill(lake, MANY)
        yield lake


@pytest.mark.parametrize("damage", ["deleted", "empty", "cut", "another"])
def test_a_segment_that_changes_in_an_object_store_is_done_without(remote: fm.Lake, damage: str) -> None:
    with pytest.raises(fm.Invalid):
        remote.append("people", people(0, FILES))
    for row in segments(remote)[:2]:
        whole = remote.catalog.storage.read(row.location)
        if damage == "deleted":
            remote.catalog.storage.delete(row.location)
        elif damage == "another":
            remote.catalog.storage.put(row.location, remote.catalog.storage.read(segments(remote)[2].location))
        else:
            remote.catalog.storage.put(row.location, b"" if damage == "empty" else whole[: len(whole) // 2])
    write_all_kinds(remote)
    assert sum(row.broken for row in segments(remote)) == 2


def test_maintenance_that_reads_a_segment_which_goes_does_without_it(remote: fm.Lake) -> None:
    coverings, index = remote.engine.coverings, index_of(remote)
    first, *others = segments(remote)
    sections = coverings.open_sections(index, [first, *others])
    remote.catalog.storage.delete(first.location)
    with pytest.raises(fm.NotFound) as gone:
        list(sections[first.location].all())
    assert coverings.mark_damaged(index, sections, gone.value)
    assert [row.broken for row in segments(remote)] == [True] + [False] * len(others)
