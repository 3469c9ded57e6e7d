"""Compaction keeps every row, its sequence and the change feed, beside any other writer; and ends in a true outcome."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import func, select, update

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.catalog.maintenance_state import Maintenance
from floodmark.commit.journal import ABANDONED
from floodmark.maintenance import compact as compaction
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows

# What these show does not depend on the database; the door that they pass is shown on both elsewhere.
pytestmark = pytest.mark.mostly_sqlite


def compact(lake: fm.Lake, table: str, files_min: int = 2) -> Maintenance:
    (record,) = lake.maintain.compact(table, files_min=files_min).records
    return record


def content(lake: fm.Lake, table: str, **options: Any) -> list[str]:
    """Every row with its sequence, as text: NaN is equal to itself, -0.0 is not 0.0."""
    return sorted(map(repr, lake.read_arrow(table, with_seq=True, **options).read_all().to_pylist()))


def feed(lake: fm.Lake, table: str, since: int | None, until: int | None = None) -> list[str]:
    return sorted(map(repr, lake.changes(table, since, until).arrow().read_all().to_pylist()))


def operations(lake: fm.Lake) -> int:
    with lake.catalog.database.read() as tx:
        return int(tx.execute(select(func.count()).select_from(tables.operations)).scalar_one())


def local(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def data_files(lake: fm.Lake, table: str) -> list[str]:
    return lake.catalog.files.data_files(lake.catalog.history.head(table))


# ── rows, sequences, changes ──

TYPES = (
    "id long not null, flag boolean, small int, real float, number double, price decimal(12,3), name string, "
    "raw binary, day date, ts timestamp, local timestamp_ntz, pair struct<a:int,b:struct<c:string>>, "
    "words array<string>, counts map<string,int>, deep array<struct<x:int,y:array<long>>>"
)
START = datetime(2026, 1, 1, tzinfo=UTC)


def rich_row(dice: random.Random, number: int) -> dict[str, Any]:
    moment = START + timedelta(hours=7 * (number % 16), microseconds=number)
    row: dict[str, Any] = {
        "flag": dice.random() < 0.5,
        "small": dice.randint(-(2**31), 2**31 - 1),
        "real": dice.choice([0.5, -0.0, math.nan, math.inf]),
        "number": dice.choice([dice.random(), -0.0, math.nan]),
        "price": Decimal(dice.randint(-(10**9), 10**9)).scaleb(-3),
        "name": dice.choice(["", "ä\u0000\U0001f40b", f"row {number}", "x" * 3000]),
        "raw": dice.choice([b"", bytes([0, 255]), dice.randbytes(20)]),
        "day": date(1969, 12, 31) + timedelta(days=dice.randint(0, 9)),
        "ts": moment,
        "local": moment.replace(tzinfo=None),
        "pair": dice.choice([{"a": None, "b": None}, {"a": 1, "b": {"c": None}}, {"a": 2, "b": {"c": "in"}}]),
        "words": dice.choice([[], [None], ["a", "", None]]),
        "counts": dice.choice([{}, {"k": None}, {"a": 1, "b": 2}]),
        "deep": dice.choice([[], [None], [{"x": None, "y": []}, {"x": 1, "y": [1, None]}]]),
    }
    return {"id": number, **{name: None if dice.random() < 0.2 else value for name, value in row.items()}, "ts": moment}


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keyed": {"key": ["id"]},
    "identity and sorted": {"key": ["id"], "partition": ["flag"], "sort": ["small desc", "name"]},
    "day": {"partition": ["day(ts)"], "sort": ["ts"]},
    "bucket": {"key": ["id"], "partition": ["bucket(3, id)"]},
}


@pytest.fixture
def sqlite_lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    """For what does not depend on the database."""
    with new_place("sqlite").open(create=True) as lake:
        yield lake


@pytest.mark.parametrize(("database", "layout"), [*(("sqlite", layout) for layout in LAYOUTS), ("postgresql", "keyed")])
def test_every_row_its_sequence_and_the_changes_stay(
    new_place: Callable[[str], Place], database: str, layout: str
) -> None:
    with new_place(database).open(create=True) as lake:
        check_layout(lake, layout)


def check_layout(lake: fm.Lake, layout: str) -> None:
    dice = random.Random(layout)
    lake.create_table("all", TYPES, **LAYOUTS[layout])
    for start in range(0, 40, 4):
        lake.append("all", [rich_row(dice, number) for number in range(start, start + 4)])
    if "key" in LAYOUTS[layout]:
        lake.merge("all", [rich_row(dice, number) for number in (1, 2, 21, 41)])
    lake.delete("all", "id in (3, 9, 10, 21)")
    head = lake.catalog.history.head("all")
    before, sinces = content(lake, "all"), [None, *range(head.sequence + 1)]
    feeds = {since: feed(lake, "all", since, head.sequence) for since in sinces}
    assert len(set(before)) == len(before) == 37 if "key" in LAYOUTS[layout] else 36

    done = compact(lake, "all")

    assert done.outcome == "compacted"
    assert done.detail["rows"] > 0
    assert done.detail["files_out"] < done.detail["files_in"]
    after = lake.catalog.history.head("all")
    assert after.files < head.files
    assert content(lake, "all") == before
    assert content(lake, "all", version=head.version) == before, "the old files are still those of the old version"
    assert {since: feed(lake, "all", since, head.sequence) for since in sinces} == feeds
    assert feed(lake, "all", head.sequence) == [], "nothing is new"
    assert compact(lake, "all").outcome in ("nothing_to_do", "below_threshold")
    check_lake(lake.catalog)
    # Once more over what is settled, with new rows beside it.
    for start in range(60, 108, 8):
        lake.append("all", [rich_row(dice, number) for number in range(start, start + 8)])
    before = content(lake, "all")
    assert compact(lake, "all").outcome == "compacted"
    assert content(lake, "all") == before
    check_lake(lake.catalog)


def test_a_sorted_table_is_in_order_within_its_new_files(sqlite_lake: fm.Lake) -> None:
    sqlite_lake.create_table("sorted", "id long not null, name string", sort=["name desc", "id"])
    dice = random.Random(1)
    for start in range(0, 60, 6):
        sqlite_lake.append("sorted", [{"id": n, "name": dice.choice("abc")} for n in range(start, start + 6)])
    assert compact(sqlite_lake, "sorted").outcome == "compacted"
    (path,) = data_files(sqlite_lake, "sorted")
    found = [(row["name"], row["id"]) for row in pq.read_table(local(path)).to_pylist()]
    assert found == sorted(found, key=lambda row: (-ord(row[0]), row[1]))


def test_files_of_an_older_schema_become_files_of_the_present_one(sqlite_lake: fm.Lake) -> None:
    sqlite_lake.create_table("grows", "id long not null, count int, pair struct<a:int>", key=["id"])
    for number in range(3):
        sqlite_lake.append("grows", [{"id": number, "count": number, "pair": {"a": number}}])
    wide = pa.table(
        {"id": [9], "count": pa.array([2**40], pa.int64()), "pair": [{"a": 1, "b": "new"}], "more": [1.5]},
    )
    sqlite_lake.append("grows", wide, evolve=True)
    before, changed = content(sqlite_lake, "grows"), feed(sqlite_lake, "grows", 2)
    assert compact(sqlite_lake, "grows").outcome == "compacted"
    (path,) = data_files(sqlite_lake, "grows")
    assert pq.read_schema(local(path)).names == ["id", "count", "pair", "more", "_seq"]
    assert (content(sqlite_lake, "grows"), feed(sqlite_lake, "grows", 2, 4)) == (before, changed)
    check_lake(sqlite_lake.catalog)


Settings = dict[str, str]


def foreign_table(
    folder: Path, schema: pa.Schema, batches: list[pa.Table], made_with: Settings, later: Settings
) -> str:
    """A table that plain PyIceberg wrote, a file for each batch, and whose properties changed later; its metadata."""
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("foreign", uri=f"sqlite:///{folder}/foreign.db", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace("default")
    table = catalog.create_table("default.old", schema, properties=made_with)
    for batch in batches:
        table.append(batch.cast(schema))
    if later:
        table.transaction().set_properties(later).commit_transaction()
    return str(catalog.load_table("default.old").metadata_location)


@pytest.mark.parametrize(("version", "metrics"), [("1", "full"), ("2", "full"), ("2", "none")])
def test_adopted_files_keep_the_sequences_that_their_rows_had(
    sqlite_lake: fm.Lake, tmp_path: Path, version: str, metrics: str
) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    batches = [pa.table({"id": [number]}) for number in range(4)]
    made_with = {"format-version": version, "write.metadata.metrics.default": metrics}
    sqlite_lake.adopt("old", foreign_table(tmp_path, schema, batches, made_with, {}))
    sqlite_lake.append("old", [{"id": 9}])
    before = content(sqlite_lake, "old")
    assert sum("'_seq': 0" in row for row in before) == (4 if version == "1" else 0)
    assert compact(sqlite_lake, "old").outcome == "compacted"
    assert content(sqlite_lake, "old") == before
    assert len(data_files(sqlite_lake, "old")) == 1
    check_lake(sqlite_lake.catalog)


# ── beside other writers ──

POINTS = ("begun", "rewritten", "sealed", "built", "published", "cleaned")
BEFORE_PUBLISH = POINTS[:4]
PARTS = "id long not null, name string, part string"
State = dict[int, tuple[str, int]]


def part_row(number: int, name: str) -> dict[str, Any]:
    return {"id": number, "name": name, "part": "ab"[number % 2]}


def fill_parts(lake: fm.Lake, table: str) -> State:
    """Two partitions, a and b, with three small files each: two groups."""
    lake.create_table(table, PARTS, key=["id"], partition=["part"])
    for start in (0, 2, 4):
        lake.append(table, [part_row(start, "old"), part_row(start + 1, "old")])
    return {number: ("old", 1 + number // 2) for number in range(6)}


def state(lake: fm.Lake, table: str) -> State:
    found = lake.read_arrow(table, with_seq=True).read_all().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: (row["name"], row["_seq"]) for row in found}


def folded(lake: fm.Lake, table: str) -> State:
    """The rows, from the changes in small steps."""
    known: State = {}
    for since in range(-1, lake.changes(table).until):
        for row in lake.changes(table, since, since + 1).arrow().read_all().to_pylist():
            known.pop(row["id"], None)
            if row["_change"] == "upsert":
                known[row["id"]] = (row["name"], row["_seq"])
    return known


# What another writer does meanwhile; what becomes of the rows; how the compaction ends if it comes before the publish.
Meddler = tuple[Callable[[fm.Lake, str], object], Callable[[State, int], State], dict[str, str]]
EVERYWHERE = dict.fromkeys(BEFORE_PUBLISH, "compacted")
PARTLY = dict.fromkeys(BEFORE_PUBLISH, "partial")
MEDDLERS: dict[str, Meddler] = {
    "append": (
        lambda lake, table: lake.append(table, [part_row(8, "new")]),
        lambda rows, seq: {**rows, 8: ("new", seq)},
        EVERYWHERE,
    ),
    "merge of a new key": (
        lambda lake, table: lake.merge(table, [part_row(8, "new")]),
        lambda rows, seq: {**rows, 8: ("new", seq)},
        EVERYWHERE,
    ),
    "merge of a row that is being moved": (
        lambda lake, table: lake.merge(table, [part_row(2, "new"), part_row(8, "new")]),
        lambda rows, seq: {**rows, 2: ("new", seq), 8: ("new", seq)},
        PARTLY,
    ),
    "delete": (
        lambda lake, table: lake.delete(table, "id = 1"),
        lambda rows, seq: {key: row for key, row in rows.items() if key != 1},
        PARTLY,
    ),
    "overwrite of one partition": (
        lambda lake, table: lake.overwrite(table, [part_row(0, "new")], where="part = 'a'"),
        lambda rows, seq: {**{key: row for key, row in rows.items() if key % 2}, 0: ("new", seq)},
        PARTLY,
    ),
    "overwrite of everything": (
        lambda lake, table: lake.overwrite(table, [part_row(7, "new")]),
        lambda rows, seq: {7: ("new", seq)},
        dict.fromkeys(BEFORE_PUBLISH, "conflict"),
    ),
    "a new column": (
        lambda lake, table: lake.append(table, [{**part_row(8, "new"), "more": 1}], evolve=True),
        lambda rows, seq: {**rows, 8: ("new", seq)},
        # What is begun looks at the table as it is then; what is staged has another shape.
        {**dict.fromkeys(BEFORE_PUBLISH, "conflict"), "begun": "compacted"},
    ),
    "another compaction": (
        lambda lake, table: compact(lake, table),
        lambda rows, seq: rows,
        dict.fromkeys(BEFORE_PUBLISH, "conflict"),
    ),
}


@pytest.mark.parametrize("meddler", MEDDLERS)
def test_beside_another_writer_no_row_is_lost_or_doubled(lake: fm.Lake, place: Place, meddler: str) -> None:
    act, model, outcomes = MEDDLERS[meddler]
    with place.open() as other:
        for number, point in enumerate(POINTS if place.catalog is None else ("built",)):
            table = f"table{number}"
            before = fill_parts(lake, table)
            with at(f"compact.{point}", partial(act, other, table)):
                done = compact(lake, table)
            # A compaction has a sequence too: what comes after it has a higher one.
            expected = model(before, 4 if point in BEFORE_PUBLISH else 5)
            assert done.outcome == outcomes.get(point, "compacted"), point
            assert done.detail["conflicts"] == {"compacted": 0, "partial": 1, "conflict": 2}[done.outcome], point
            assert len(done.detail["versions"]) == (0 if done.outcome == "conflict" else 1)
            assert state(lake, table) == folded(lake, table) == expected, point
            if done.outcome == "partial":
                assert done.detail["files_in"] == 3, "the other group was published"
            if number % 2:
                # At once, without any healing: nothing is staged any more.
                check_lake(lake.catalog)
            assert compact(lake, table).outcome in ("compacted", "nothing_to_do", "below_threshold")
            assert state(lake, table) == expected


WRITERS = {
    "merge": "merge of a row that is being moved",
    "delete": "delete",
    "overwrite": "overwrite of one partition",
}


@pytest.mark.parametrize("verb", WRITERS)
def test_a_writer_whose_files_are_compacted_under_it_plans_again(lake: fm.Lake, place: Place, verb: str) -> None:
    act, model, _ = MEDDLERS[WRITERS[verb]]
    points = [f"{verb}.{step}" for step in ("begun", "staged", "rewritten", "sealed", "built")]
    with place.open() as other:
        for number, point in enumerate(point for point in points if point in failpoints.FAILPOINTS):
            table = f"table{number}"
            before = fill_parts(lake, table)
            with at(point, partial(compact, other, table)):
                act(lake, table)
            assert state(lake, table) == folded(lake, table) == model(before, 5), point
    check_lake(lake.catalog)


def test_a_table_is_planned_as_it_is_when_its_turn_comes(lake: fm.Lake, place: Place) -> None:
    """The first of several tables may take long: what happened to the others meanwhile is no conflict."""
    for number in range(4):
        lake.append("events", rows(number))
        lake.append("notes", rows(number))
    with place.open() as other, at("compact.published", lambda: other.delete("notes", "id = 1")):
        done = lake.maintain.compact(files_min=2)
    assert [(record.table, record.outcome) for record in done.records] == [
        ("events", "compacted"),
        ("notes", "compacted"),
    ]
    assert (ids(lake, "events"), ids(lake, "notes")) == ([0, 1, 2, 3], [0, 2, 3])


# ── damage ──


def change_a_value(path: Path) -> None:
    """One letter of a value is another one: all lengths are right, every page can be read."""
    data = path.read_bytes()
    assert b"row 13" in data
    path.write_bytes(data.replace(b"row 13", b"row 18"))


def spoil_a_page(path: Path) -> None:
    column = pq.read_metadata(path).row_group(0).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    data = bytearray(path.read_bytes())
    middle = start + column.total_compressed_size // 2
    data[middle : middle + 8] = bytes(255 - byte for byte in data[middle : middle + 8])
    path.write_bytes(bytes(data))


def lose_a_row(path: Path) -> None:
    pq.write_table(pq.ParquetFile(path).read().slice(1), path)


def lose_the_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


DAMAGES = [
    *((codec, damage) for codec in ("zstd", "uncompressed") for damage in (spoil_a_page, lose_a_row, lose_the_end)),
    ("uncompressed", change_a_value),
    ("zstd", Path.unlink),
]


@pytest.mark.parametrize(("codec", "spoil"), DAMAGES)
def test_a_damaged_file_is_refused_and_nothing_changes(
    new_place: Callable[[str], Place], codec: str, spoil: Callable[[Path], None]
) -> None:
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("bad", EVENTS, properties={"write.parquet.compression-codec": codec})
        lake.create_table("good", EVENTS)
        for number in range(3):
            lake.append("bad", rows(*range(number * 10, number * 10 + 10)))
            lake.append("good", rows(number))
        files = sorted(data_files(lake, "bad"))
        damaged = [path for path in files if 13 in pq.read_table(local(path), columns=["id"])["id"].to_pylist()]
        spoil(local(damaged[0]))
        done = lake.maintain.compact(files_min=2)
        (bad,) = [record for record in done.records if record.table == "bad"]
        (good,) = [record for record in done.records if record.table == "good"]
        assert (bad.outcome, bad.detail.get("error")) == ("failed", "Corrupt"), bad.detail
        assert sorted(data_files(lake, "bad")) == files
        assert good.outcome == "compacted", "one table's damage does not stop the others"
        assert (done.outcome, done.exit_code) == ("partial", 5)
        with lake.catalog.database.read() as tx:
            states = tx.execute(select(tables.operations.c.state, tables.operations.c.kind))
            assert [row.state for row in states if row.kind == "compact"].count(ABANDONED) == 1


def test_maintenance_is_refused_where_healing_is(lake: fm.Lake) -> None:
    for number in range(3):
        lake.append("events", rows(number))
    operation = lake.catalog.journal.begin("append", branch="main", actor="test", message="")
    lake.catalog.journal.active.discard(operation.id)
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.operations).where(tables.operations.c.id == operation.id).values(state="odd"))
    version = lake.status()["version"]
    for verb in (lake.maintain.compact, lake.maintain.expire, lake.maintain.sweep):
        done = verb()
        assert (done.outcome, done.exit_code) == ("refused", 5)
        assert all(operation.id in record.detail["message"] for record in done.records)
    assert lake.status()["version"] == version
    assert ids(lake) == [0, 1, 2]


# ── named outcomes ──


def test_a_table_that_has_been_compacted_is_left_alone(lake: fm.Lake) -> None:
    for number in range(5):
        lake.append("events", rows(number))
    planned = lake.maintain.compact("events", files_min=2, dry_run=True)
    assert planned.outcome == "planned"
    assert planned.records[0].detail["files_in"] == 5
    assert len(data_files(lake, "events")) == 5
    assert compact(lake, "events").outcome == "compacted"
    version, begun = lake.status()["version"], operations(lake)
    for _ in range(2):
        assert compact(lake, "events").outcome == "nothing_to_do"
        assert lake.maintain.compact("events", files_min=2, dry_run=True).outcome == "nothing_to_do"
    assert (lake.status()["version"], operations(lake)) == (version, begun)
    assert [record.outcome for record in lake.maintain.history("events")] == ["nothing_to_do"] * 2 + ["compacted"]


def test_few_small_files_are_below_the_threshold(lake: fm.Lake) -> None:
    for number in range(4):
        lake.append("events", rows(number))
    begun = operations(lake)
    done = compact(lake, "events", files_min=5)
    assert (done.outcome, done.detail["below_threshold"], done.detail["small_files"]) == ("below_threshold", 4, 4)
    assert lake.maintain.compact("events", files_min=5).exit_code == 0
    assert operations(lake) == begun
    lake.append("events", rows(9))
    assert compact(lake, "events", files_min=5).outcome == "compacted"


def test_files_that_cannot_be_fewer_are_tried_once_until_they_change(sqlite_lake: fm.Lake, tmp_path: Path) -> None:
    # Another engine compressed them; the table's own files are not compressed, and each holds less than they do.
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
    count = 70_000
    batches = [
        pa.table({"id": range(start, start + count), "name": [f"{'x' * 20} {n}" for n in range(count)]})
        for start in (0, count, 2 * count)
    ]
    properties = {"write.parquet.compression-codec": "uncompressed", "write.target-file-size-bytes": "2000000"}
    sqlite_lake.adopt("tight", foreign_table(tmp_path, schema, batches, {}, properties))
    before, head, begun = (
        in_order(sqlite_lake, "tight"),
        sqlite_lake.catalog.history.head("tight"),
        operations(sqlite_lake),
    )
    for _ in range(2):
        done = compact(sqlite_lake, "tight")
        assert (done.outcome, done.detail["could_not_improve"]) == ("nothing_to_do", 1), done.detail
        assert operations(sqlite_lake) == begun + 1, "it is tried once"
        check_lake(sqlite_lake.catalog)
    assert sqlite_lake.catalog.history.head("tight") == head
    assert in_order(sqlite_lake, "tight").equals(before)
    sqlite_lake.append("tight", [{"id": 4 * count, "name": "y"}])
    tried = compact(sqlite_lake, "tight")
    assert operations(sqlite_lake) == begun + 3, "its files have changed: it is tried again"
    assert tried.outcome in ("compacted", "nothing_to_do"), tried.detail
    assert in_order(sqlite_lake, "tight").slice(0, len(before)).equals(before)
    check_lake(sqlite_lake.catalog)


def in_order(lake: fm.Lake, table: str) -> pa.Table:
    return lake.read_arrow(table, with_seq=True).read_all().combine_chunks().sort_by("id")


def test_a_run_that_fails_half_way_tells_what_it_had_done(
    sqlite_lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "BATCH_GROUPS_MAX", 1)
    before = fill_parts(sqlite_lake, "parts")
    head = sqlite_lake.catalog.history.head("parts")
    last = local(next(path for path in data_files(sqlite_lake, "parts") if "b" in part_of(path)))
    kept = last.read_bytes()
    last.write_bytes(kept[:-30])
    done = compact(sqlite_lake, "parts")
    after = sqlite_lake.catalog.history.head("parts")
    last.write_bytes(kept)
    published = after.version - head.version
    assert done.outcome in ("failed", "partial")
    assert done.detail["error"] == "Corrupt"
    assert (done.detail["groups"], len(done.detail["versions"])) == (published, published), "what was done, not planned"
    assert state(sqlite_lake, "parts") == before


def part_of(path: str) -> list[Any]:
    return list(pq.ParquetFile(local(path)).read(["part"])["part"].to_pylist())


# ── what it costs ──


def test_each_row_is_rewritten_a_few_times_however_often_small_files_come(new_place: Callable[[str], Place]) -> None:
    count = 64
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("events", EVENTS)
        rewritten = 0
        for number in range(count):
            lake.append("events", rows(number))
            done = compact(lake, "events")
            rewritten += done.detail["rows"] if done.outcome == "compacted" else 0
        assert len(data_files(lake, "events")) <= 2 * math.log2(count)
        assert ids(lake) == list(range(count))
        assert rewritten <= count * math.log2(count) + count


def test_readers_of_what_is_new_do_not_open_old_rows_for_it(new_place: Callable[[str], Place]) -> None:
    """Files of one age stay together: the newest rows are not put beside the oldest while there is room apart."""
    dice = random.Random(3)
    place = new_place("sqlite")
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS, properties={"write.target-file-size-bytes": str(64 * 1024)})
        for number in range(32):
            lake.append("events", [{"id": number, "name": dice.randbytes(4000).hex()}])
        assert compact(lake, "events").outcome == "compacted"
        spans = [sorted(_sequences(path)) for path in data_files(lake, "events")]
        assert len(spans) <= 32 // 6
        ages = sorted((span[0], span[-1]) for span in spans)
        assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(ages)), "no two files mix their ages"
        since = ages[-1][0] - 1
    with place.open(read_only=True) as reader:
        found = reader.changes("events", since)
        assert len(found.plan.files) == 1
        assert found.arrow().read_all().num_rows == 32 - since
        calls = reader.catalog.storage.counters.calls
        # The table's metadata, the list, a manifest, and one data file.
        assert calls.get("open_input", 0) + calls.get("read", 0) <= 4


def _sequences(path: str) -> list[int]:
    found = pq.ParquetFile(local(path)).read()
    return [int(one) for one in found["_seq"].to_pylist()] if "_seq" in found.column_names else []
