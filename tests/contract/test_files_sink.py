"""A files sink, in a folder and in a bucket: units whole or not there, the same objects at every try, nobody else's
overwritten, and their rows exactly what the lake says has changed."""

from __future__ import annotations

import hashlib
import io
import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog.unit import ACKNOWLEDGED, SEALED, Part, Rules, Settled, Shipped, Unit
from floodmark.errors import Corrupt, Invalid, TooNew, Unavailable
from floodmark.model import BEGINNING
from floodmark.rows.reading import parts
from floodmark.rows.reading.shipment import Shipment, plan_shipment
from floodmark.runs import Stopped
from floodmark.sinks.files import destination as files
from floodmark.sinks.files.destination import FilesDestination, safe_name, unit_folder
from floodmark.sinks.files.units import MANIFEST, FileUnit, read_rows, read_units
from floodmark.sinks.settings import FilesSettings
from floodmark.storage import Storage, join, root_location
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.s3 import S3Server
from tests.conftest import Place
from tests.without_spark import NO_SPARK

FORMATS = ["parquet", "jsonl"]
POINTS = ["unit.sealed", "unit.sent", "unit.acknowledged", "unit.manifest"]
PART_BYTES = 2048
TYPES = (
    "id long not null, flag boolean, small int, number double, price decimal(12,3), name string, raw binary, day date, "
    "ts timestamp, local timestamp_ntz, pair struct<a:int,b:struct<c:string>>, words array<string>, "
    "counts map<string,int>, deep array<struct<x:int,y:array<double>>>"
)


def rich(number: int) -> dict[str, Any]:
    moment = datetime(2026, 11, 15, tzinfo=UTC) + timedelta(hours=number, microseconds=number)
    filled = {
        "flag": number % 2 == 0,
        "small": -number,
        "number": [0.1, -0.0, math.nan, math.inf][number % 4],
        "price": Decimal(number).scaleb(-3),
        "name": ["", 'ä"\\\u0001\u2028\U0001f40b', f"row {number}", "x" * 300][number % 4],
        "raw": bytes([0, 255, number % 256]),
        "day": date(1969, 12, 30) + timedelta(days=number),
        "ts": moment,
        "local": moment.replace(tzinfo=None),
        "pair": {"a": number, "b": {"c": None}},
        "words": [None, "", "a"],
        "counts": {"a": 1, "b": None},
        "deep": [None, {"x": 1, "y": [math.nan, None, 2.5]}],
    }
    return {"id": number, **(filled if number % 5 else {})}


# ── what a run gives to a destination ──


@dataclass
class ListLog:
    """A unit's parts in memory, as strict as those in the catalog."""

    states: dict[int, Part] = field(default_factory=dict)

    def parts(self) -> list[Part]:
        return [self.states[first] for first in sorted(self.states)]

    def destination(self) -> str | None:
        return None

    def settled_units(self) -> list[Settled]:
        return []

    def knows(self, unit: str, epoch: int) -> bool:
        return True

    def settled_until(self) -> int | None:
        return None

    def seal(self, parts: list[Part]) -> None:
        for part in parts:
            if part.first in self.states:
                raise AssertionError("a part is sealed once")
            self.states[part.first] = replace(part, state=SEALED)

    def acknowledge(self, parts: list[Part], destination: str | None = None) -> None:
        for part in parts:
            if self.states[part.first].state == SEALED:
                self.states[part.first] = replace(part, state=ACKNOWLEDGED)

    def split(self, whole: Part, halves: list[Part]) -> None:
        raise AssertionError("an object is never halved")

    def quarantine(self, part: Part, line: bytes, reason: str) -> None:
        raise AssertionError("a folder refuses no row")


@dataclass
class Told:
    rows: int = 0
    size_bytes: int = 0
    checks: int = 0
    stop_at: int | None = None

    def progress(self, rows: int, size_bytes: int) -> None:
        self.rows, self.size_bytes = self.rows + rows, self.size_bytes + size_bytes

    def check(self) -> None:
        self.checks += 1
        if self.checks == self.stop_at:
            raise Stopped

    def wait(self, seconds: float) -> bool:
        return False


@dataclass(frozen=True)
class Out:
    """Where a sink writes."""

    path: str
    options: dict[str, str]

    @property
    def storage(self) -> Storage:
        return Storage(self.options)

    def settings(self, file_format: str = "parquet", part_bytes: int = PART_BYTES) -> FilesSettings:
        return FilesSettings(path=self.path, format=file_format, part_bytes=part_bytes, storage=self.options)

    def below(self, name: str) -> Out:
        return Out(f"{self.path}/{name}", self.options)

    def content(self) -> dict[str, str]:
        """Every object by its name below the path, with the digest of what it holds."""
        root = root_location(self.path)
        return {
            entry.location.removeprefix(root): hashlib.sha256(self.storage.read(entry.location)).hexdigest()
            for entry in self.storage.list(root)
        }

    def units(self) -> list[FileUnit]:
        return read_units(self.path, self.storage)


@pytest.fixture(params=["local", "s3"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Out:
    if request.param == "local":
        return Out(str(tmp_path / "out"), {})
    server: S3Server = request.getfixturevalue("s3_server")
    return Out(f"s3://{server.make_bucket()}/some/out", server.options)


@pytest.fixture
def folder(tmp_path: Path) -> Out:
    """For what does not depend on the store."""
    return Out(str(tmp_path / "out"), {})


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("Events", TYPES, key=["id"])
        for start in range(0, 40, 10):
            lake.append("Events", [rich(number) for number in range(start, start + 10)])
        lake.merge("Events", [rich(3) | {"small": 77}, rich(41)])
        lake.delete("Events", "id in (5, 17)")
        yield lake


@pytest.fixture(autouse=True)
def piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of some kilobytes has several pieces, each acknowledged by itself."""
    monkeypatch.setattr(files, "HERE_BYTES", 1)


def unit_of(lake: fm.Lake, rules: Rules, since: int = BEGINNING) -> tuple[Unit, Shipment]:
    head = lake.catalog.history.head("Events")
    changes = lake.changes("Events", None if since == BEGINNING else since)
    unit = Unit("01U", "01L", "to files", "01S", 1, "Events", head.table_id, 7, since, changes.until, rules)
    return unit, plan_shipment(changes.plan, rules.columns, rules.where)


def ship(
    lake: fm.Lake,
    settings: FilesSettings,
    log: ListLog | None = None,
    *,
    rules: Rules | None = None,
    told: Told | None = None,
    storage: Storage | None = None,
    since: int = BEGINNING,
) -> Shipped:
    unit, shipment = unit_of(lake, rules or settings.rules(), since)
    destination = FilesDestination(settings, storage or lake.catalog.storage, NO_SPARK)
    return destination.ship(unit, shipment, log or ListLog(), told or Told())


def shown(batches: Iterator[pa.RecordBatch]) -> list[str]:
    """Rows as text: NaN is equal to itself, -0.0 is not 0.0."""
    return [repr(row) for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict")]


def taken(out: Out) -> list[str]:
    """What a consumer takes, unit by unit; the order of rows within a unit is tested by itself."""
    storage = out.storage
    return [row for unit in out.units() for row in sorted(shown(read_rows(unit, storage)))]


def changed(lake: fm.Lake, since: int | None = None) -> list[str]:
    return sorted(shown(iter(lake.changes("Events", since).arrow())))


class Crash(Exception):
    """What stands for a crash in this process."""


class crash_at:
    """Raise at the Nth passing of a failpoint."""

    def __init__(self, point: str, passing: int = 1) -> None:
        self.left, self.point = passing, point

    def __enter__(self) -> crash_at:
        failpoints.observer = self._observe
        return self

    def __exit__(self, *_: object) -> None:
        failpoints.observer = None

    def _observe(self, name: str) -> None:
        self.left -= name == self.point
        if name == self.point and self.left == 0:
            raise Crash


# ── names ──


def test_names_never_meet_on_any_file_system() -> None:
    names = ["events", "Events", "EVENTS", "eVents", "_events", "ev-45nts", "ev%45nts", "ev.nts", "ev/nts", "ä", ""]
    found = [safe_name(name) for name in names]
    assert len({name.lower() for name in found}) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") for name in found)
    assert found[0] == "events"
    long = [safe_name("A" * 127 + last) for last in "AB"]
    assert long[0] != long[1]
    assert max(map(len, long)) <= 255


def test_folders_of_units_sort_in_the_order_of_their_ranges() -> None:
    unit = Unit("01U", "01L", "s", "01S", 1, "t", "01T", 7, BEGINNING, 0, Rules())
    ranges = [(BEGINNING, 0), (0, 9), (9, 10), (10, 123_456_789_012), (123_456_789_012, 2**63 - 1)]
    folders = [unit_folder("s3://b/x", replace(unit, since=since, until=until)) for since, until in ranges]
    assert folders == sorted(folders)
    assert folders[0] == "s3://b/x/t/01T/01L-01S-e1/00000000000000000000-00000000000000000000"


@pytest.mark.parametrize(
    "other", [{"lake": "01M"}, {"sink_id": "01R"}, {"epoch": 2}, {"table_id": "01Q"}, {"until": 8}]
)
def test_another_unit_has_another_folder(other: dict[str, Any]) -> None:
    unit = Unit("01U", "01L", "s", "01S", 1, "t", "01T", 7, 1, 2, Rules())
    assert unit_folder("/x", unit) != unit_folder("/x", replace(unit, **other))
    assert unit_folder("/x", unit) == unit_folder("/x", replace(unit, id="01V", sink="renamed", version=9))


# ── rows ──


@pytest.mark.parametrize("file_format", FORMATS)
def test_the_rows_of_the_units_are_what_changed(lake: fm.Lake, out: Out, file_format: str) -> None:
    told = Told()
    shipped = ship(lake, out.settings(file_format), told=told)
    (unit,) = out.units()
    assert taken(out) == changed(lake)
    _, shipment = unit_of(lake, out.settings(file_format).rules())
    in_order = shown(shipment.batches(lake.catalog.storage))
    assert shown(read_rows(unit, out.storage)) == in_order, "data files by path, rows by position, then deletions"
    assert (shipped.rows, shipped.deletions) == (41, 2) == (unit.rows, unit.deletions)
    assert shipped.size_bytes == unit.size_bytes == told.size_bytes
    assert (shipped.parts, told.rows) == (len(unit.objects), 41)
    assert (unit.table, unit.key, unit.columns[-2:]) == ("Events", ("id",), ("_change", "_seq"))
    assert (unit.since, unit.until, unit.sink, unit.epoch) == (BEGINNING, lake.changes("Events").until, "to files", 1)


@pytest.mark.parametrize("file_format", FORMATS)
def test_only_the_chosen_columns_and_rows_ship(lake: fm.Lake, folder: Out, file_format: str) -> None:
    rules = Rules(("name",), "small > -20", file_format, "none", 2**31, PART_BYTES)
    ship(lake, folder.settings(file_format), rules=rules)
    rows = [row for unit in folder.units() for batch in read_rows(unit) for row in batch.to_pylist()]
    assert {tuple(row) for row in rows} == {("id", "name", "_change", "_seq")}
    assert len(rows) == 41, "a row that does not pass ships as a deletion of its key"
    assert {row["id"] for row in rows if row["_change"] == "upsert"} == {
        number for number in (*range(20), 41) if number % 5 and number not in (17, 41)
    }
    assert next(row for row in rows if row["id"] == 39) == {"id": 39, "name": None, "_change": "delete", "_seq": 4}


def test_nothing_is_written_if_nothing_ships(lake: fm.Lake, folder: Out) -> None:
    lake.create_table("plain", "id long")
    lake.append("plain", [{"id": 1}])
    changes = lake.changes("plain")
    rules = Rules(None, "id = 2", "parquet", "none", 2**31, PART_BYTES)
    unit = Unit("01U", "01L", "s", "01S", 1, "plain", "01T", 7, BEGINNING, changes.until, rules)
    destination = FilesDestination(folder.settings(), lake.catalog.storage, NO_SPARK)
    log = ListLog()
    assert destination.ship(unit, plan_shipment(changes.plan, None, "id = 2"), log, Told()) == Shipped()
    assert [part.state for part in log.parts()] == [ACKNOWLEDGED]
    assert not Path(folder.path).exists()


def test_other_engines_read_the_objects_by_name(lake: fm.Lake, folder: Out) -> None:
    import duckdb
    import pandas as pd

    ship(lake, folder.settings())
    (unit,) = folder.units()
    paths = [location.removeprefix("file://") for location in unit.locations]
    frame = pd.concat(pd.read_parquet(path) for path in paths)
    assert sorted(frame["id"]) == sorted(number for number in range(42) if number != 40)
    assert str(frame["ts"].dtype) == "datetime64[us, UTC]"
    counted = duckdb.sql(f"select _change, count(*), max(ts) from read_parquet({paths!r}) group by 1 order by 1")
    assert [row[:2] for row in counted.fetchall()] == [("delete", 2), ("upsert", 39)]
    schema = pq.read_schema(paths[0])
    assert [schema.field(name).metadata[b"PARQUET:field_id"] for name in ("id", "flag")] == [b"1", b"2"]
    element = schema.field("deep").type.value_field
    assert element.metadata[b"PARQUET:field_id"]
    assert element.type.field("y").type.value_field.metadata[b"PARQUET:field_id"]


# ── objects roll by size ──


def test_json_lines_roll_at_the_byte(lake: fm.Lake, folder: Out) -> None:
    rows = [{"id": 100 + number, "name": "y" * (number * 37 % 900)} for number in range(60)]
    rows[20]["name"] = "z" * 3 * PART_BYTES
    since = lake.changes("Events").until
    lake.append("Events", rows)
    ship(lake, folder.settings("jsonl"), since=since)
    (unit,) = folder.units()
    texts = [folder.storage.read(location).splitlines(keepends=True) for location in unit.locations]
    sizes = [sum(map(len, lines)) for lines in texts]
    assert [len(lines) for lines in texts if sum(map(len, lines)) > PART_BYTES] == [1], "the large row is alone"
    for size, behind in zip(sizes, texts[1:], strict=False):
        assert size + len(behind[0]) > PART_BYTES, "an object ends only where the next line does not fit"
    assert [json.loads(line)["id"] for lines in texts for line in lines] == [row["id"] for row in rows]
    assert [one.name for one in unit.objects] == [f"part-00000-{at:03d}.jsonl" for at in range(len(texts))]
    assert len(texts) > 10


@pytest.mark.parametrize(("more", "rows"), [(-1, 9), (0, 10), (1, 10)])
@pytest.mark.parametrize("encode_bytes", [1, 10_000_000], ids=["row by row", "at once"])
def test_a_line_that_fits_to_the_last_byte_fits_however_rows_are_encoded(
    lake: fm.Lake, folder: Out, monkeypatch: pytest.MonkeyPatch, encode_bytes: int, more: int, rows: int
) -> None:
    monkeypatch.setattr(parts, "_ENCODE_BYTES", encode_bytes)
    since = lake.changes("Events").until
    lake.append("Events", [{"id": number, "name": "x" * 100} for number in range(100, 145)])
    ship(lake, folder.below("one").settings("jsonl", 1_000_000), since=since)
    (line, *others) = folder.storage.read(folder.below("one").units()[0].locations[0]).splitlines(keepends=True)
    assert {len(line)} == set(map(len, others))
    ship(lake, folder.below("many").settings("jsonl", 10 * len(line) + more), since=since)
    assert [one.rows for one in folder.below("many").units()[0].objects] == [rows] * (45 // rows) + (
        [45 % rows] if 45 % rows else []
    )


def test_a_large_file_becomes_objects_of_as_many_rows(lake: fm.Lake, folder: Out) -> None:
    noise = [{"id": 1000 + at, "name": hashlib.sha256(str(at).encode()).hexdigest()} for at in range(300)]
    since = lake.changes("Events").until
    lake.append("Events", noise)
    (source,) = lake.changes("Events", since).plan.files
    ship(lake, folder.settings(part_bytes=source.size_bytes // 3), since=since)
    (unit,) = folder.units()
    assert [(one.name, one.rows) for one in unit.objects] == [
        (f"part-00000-{roll:03d}.parquet", 75) for roll in range(4)
    ]
    assert [batch["id"].to_pylist() for batch in read_rows(unit)] == [
        list(range(start, start + 75)) for start in range(1000, 1300, 75)
    ]


# ── whole or not there ──


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("point", POINTS)
def test_after_a_crash_at_any_step_the_unit_is_whole_or_not_there(
    lake: fm.Lake, out: Out, point: str, file_format: str
) -> None:
    ship(lake, out.below("whole").settings(file_format))
    expected, passing, log, tried = out.below("whole").content(), 1, ListLog(), out.below("tried")
    assert len(expected) > 5
    for _ in range(len(expected)):
        try:
            with crash_at(point, passing):
                ship(lake, tried.settings(file_format), log)
            break
        except Crash:
            assert tried.content().items() <= expected.items(), "whole objects with the same content, or none"
            complete = any(name.endswith(MANIFEST) for name in tried.content())
            assert complete is (point == "unit.manifest")
            assert [unit.rows for unit in tried.units()] == ([41] if complete else [])
        # Each try goes one wave further, so that the crash meets every one of them.
        passing = 1 if point == "unit.acknowledged" else 2
    assert tried.content() == expected
    assert taken(tried) == changed(lake)


def test_what_is_acknowledged_is_not_made_again(lake: fm.Lake, out: Out) -> None:
    log, settings = ListLog(), out.settings()
    with pytest.raises(Crash), crash_at("unit.acknowledged", 3):
        ship(lake, settings, log)
    assert [part.state for part in log.parts()] == [ACKNOWLEDGED] * 3
    read = lake.catalog.storage.counters.snapshot()
    told = Told()
    shipped = ship(lake, settings, log, told=told)
    pieces = len(log.parts())
    assert lake.catalog.storage.counters.difference(read).calls["open_input"] < 2 * pieces
    assert (told.checks, shipped.rows) == (pieces - 3, told.rows)
    assert [part.state for part in log.parts()] == [ACKNOWLEDGED] * pieces
    assert sum(json.loads(part.detail)["rows"] for part in log.parts()) == 41
    assert shipped.rows == 41 - sum(json.loads(part.detail)["rows"] for part in log.parts()[:3])
    assert taken(out) == changed(lake)


@pytest.mark.parametrize("mode", ["before", "after", "torn", "disk_full"])
def test_whichever_call_to_storage_fails_a_later_try_ends_the_same(lake: fm.Lake, folder: Out, mode: str) -> None:
    since = lake.changes("Events").until - 2
    ship(lake, folder.below("whole").settings(), since=since)
    expected = folder.below("whole").content()
    for number in range(1, 1000):
        tried, log = folder.below(str(number)), ListLog()
        faulty = FaultyStorage(fail_at=number, mode=mode)
        try:
            ship(lake, tried.settings(), log, storage=faulty, since=since)
        except (Unavailable, Corrupt):
            assert tried.content().items() <= expected.items()
            ship(lake, tried.settings(), log, since=since)
        assert tried.content() == expected
        if not faulty.fired:
            break
    assert number > len(expected) > 2


def test_a_stop_leaves_what_is_done_to_the_next_try(lake: fm.Lake, out: Out) -> None:
    log = ListLog()
    with pytest.raises(Stopped):
        ship(lake, out.settings(), log, told=Told(stop_at=3))
    assert (len(log.parts()), out.units()) == (2, [])
    ship(lake, out.settings(), log)
    assert taken(out) == changed(lake)


def test_two_at_once_write_one_unit(lake: fm.Lake, out: Out) -> None:
    ship(lake, out.below("whole").settings())
    both, errors = out.below("both"), []

    def try_it() -> None:
        try:
            ship(lake, both.settings())
        except Exception as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=try_it) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (errors, both.content()) == ([], out.below("whole").content())


# ── the same at every try ──


@pytest.mark.parametrize("file_format", FORMATS)
def test_settings_that_changed_in_the_middle_do_not_change_the_unit(
    lake: fm.Lake, folder: Out, file_format: str
) -> None:
    rules, log = folder.settings(file_format).rules(), ListLog()
    ship(lake, folder.below("whole").settings(file_format))
    tried = folder.below("tried")
    with pytest.raises(Crash), crash_at("unit.sent", 3):
        ship(lake, tried.settings(file_format), log, rules=rules)
    other = tried.settings("jsonl" if file_format == "parquet" else "parquet", 64 * PART_BYTES)
    ship(lake, other, log, rules=rules)
    assert tried.content() == folder.below("whole").content()


def test_a_unit_that_was_moved_in_the_middle_is_whole_at_its_new_place(lake: fm.Lake, folder: Out) -> None:
    """What is acknowledged is not there: its objects are made again before the manifest names them."""
    log, rules = ListLog(), folder.settings().rules()
    with pytest.raises(Crash), crash_at("unit.acknowledged", 3):
        ship(lake, folder.below("old").settings(), log, rules=rules)
    moved = folder.below("new")
    shipped = ship(lake, moved.settings(), log, rules=rules)
    assert shipped.rows == 41
    assert taken(moved) == changed(lake)
    assert folder.below("old").units() == []


# ── nobody else's content is overwritten ──


def first_object(lake: fm.Lake, out: Out, file_format: str = "parquet") -> str:
    unit, _ = unit_of(lake, out.settings(file_format).rules())
    return join(unit_folder(root_location(out.path), unit), f"part-00000-000.{file_format}")


def parquet_again(data: bytes, rows: Callable[[pa.Table], pa.Table]) -> bytes:
    """The same object as another program would write it."""
    stream = io.BytesIO()
    pq.write_table(rows(pq.read_table(io.BytesIO(data))), stream, compression="snappy", row_group_size=3)
    return stream.getvalue()


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.slice(1),
        lambda table: table.take(list(reversed(range(len(table))))),
        lambda table: table.rename_columns(["ID", *table.column_names[1:]]),
        lambda table: table.drop_columns(["deep"]),
        lambda table: table.set_column(0, "id", pa.array(range(len(table)), pa.int32())),
        lambda table: pa.concat_tables([table, table.slice(0, 1)]),
    ],
    ids=["a row less", "another order", "another name", "a column less", "another type", "a row more"],
)
def test_a_name_that_has_other_rows_stops_the_unit(
    lake: fm.Lake, folder: Out, change: Callable[[pa.Table], pa.Table]
) -> None:
    ship(lake, folder.below("whole").settings())
    place = first_object(lake, folder.below("whole"))
    other = parquet_again(folder.storage.read(place), change)
    tried = folder.below("tried")
    refused(lake, tried, "parquet", other)


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("foreign", [b"", b"something else\n", b"PAR1PAR1"], ids=["empty", "text", "torn"])
def test_a_name_that_has_something_else_stops_the_unit(
    lake: fm.Lake, out: Out, file_format: str, foreign: bytes
) -> None:
    refused(lake, out, file_format, foreign)


def refused(lake: fm.Lake, out: Out, file_format: str, foreign: bytes) -> None:
    place, log = first_object(lake, out, file_format), ListLog()
    out.storage.put(place, foreign)
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"something else has the name") as caught:
            ship(lake, out.settings(file_format), log)
        assert caught.value.facts["object"] == place
    assert out.storage.read(place) == foreign
    assert out.units() == []
    assert {part.state for part in log.parts()} == {SEALED}
    # Moved away, it is no hindrance any more.
    out.storage.delete(place)
    ship(lake, out.settings(file_format), log)
    assert taken(out) == changed(lake)


def test_the_same_rows_by_another_writer_are_as_good_as_written(lake: fm.Lake, out: Out) -> None:
    ship(lake, out.below("whole").settings())
    data = out.storage.read(first_object(lake, out.below("whole")))
    tried = out.below("tried")
    place, again = first_object(lake, tried), parquet_again(data, lambda table: table)
    assert again != data
    tried.storage.put(place, again)
    ship(lake, tried.settings())
    (unit,) = tried.units()
    assert tried.storage.read(place) == again
    assert (unit.objects[0].size_bytes, unit.objects[0].sha256) == (len(again), hashlib.sha256(again).hexdigest())
    assert taken(tried) == changed(lake)


def test_another_manifest_of_the_same_name_stops_the_unit(lake: fm.Lake, out: Out) -> None:
    ship(lake, out.settings())
    (unit,) = out.units()
    place = join(unit.folder, MANIFEST)
    ship(lake, out.settings())
    other = out.storage.read(place).replace(unit.objects[0].sha256.encode(), b"0" * 64)
    out.storage.put(place, other)
    with pytest.raises(Corrupt, match=r"another unit exists at this location already"):
        ship(lake, out.settings())
    assert out.storage.read(place) == other


# ── readers ──


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_reader_is_told_of_what_is_damaged_or_gone(lake: fm.Lake, out: Out, file_format: str) -> None:
    ship(lake, out.settings(file_format))
    (unit,) = out.units()
    place = unit.locations[1]
    data = out.storage.read(place)
    out.storage.put(place, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Corrupt, match=r"not what was written"):
        taken(out)
    out.storage.delete(place)
    with pytest.raises(Corrupt, match=r"is gone"):
        taken(out)


def test_manifests_of_other_programs_are_refused_by_name(folder: Out) -> None:
    place = join(root_location(folder.path), "t", MANIFEST)
    folder.storage.put(place, b'{"floodmark_unit": 2}')
    with pytest.raises(TooNew):
        folder.units()
    for wrong in (b"", b"[]", b'{"floodmark_unit": 1}', b'{"floodmark_unit": 1, "objects": [{"name": "x"}]}'):
        folder.storage.put(place, wrong)
        with pytest.raises(Corrupt) as caught:
            folder.units()
        assert caught.value.facts["manifest"] == place


def test_an_object_is_looked_for_in_the_units_own_folder_only(lake: fm.Lake, folder: Out) -> None:
    ship(lake, folder.settings())
    (unit,) = folder.units()
    place = join(unit.folder, MANIFEST)
    folder.storage.put(place, folder.storage.read(place).replace(b"part-00000", b"../part-00000"))
    with pytest.raises((Invalid, Corrupt)):
        taken(folder)


# ── through the lake ──


@pytest.mark.parametrize("file_format", FORMATS)
def test_units_in_order_bring_every_change_once_through_compactions_and_replays(
    lake: fm.Lake, out: Out, file_format: str
) -> None:
    lake.sinks.add("to files", "files", tables="Events", path=out.path, format=file_format, storage=out.options)
    expected: list[str] = []
    since: int | None = None
    for step in range(4):
        expected += changed(lake, since)
        since = lake.changes("Events").until
        run = lake.sinks.run("to files")
        assert (run.outcome, run.error) == ("shipped", None)
        assert taken(out) == expected
        assert lake.sinks.run("to files").outcome == "nothing_to_do"
        lake.merge("Events", [rich(step) | {"small": step}, rich(100 + step)], partial=True)
        lake.maintain.compact("Events", files_min=2)
        lake.delete("Events", f"id = {20 + step}")
    units = out.units()
    assert [unit.since for unit in units] == [BEGINNING, *(unit.until for unit in units[:-1])]
    lake.sinks.replay("to files", start="beginning")
    lake.sinks.run("to files")
    assert [unit.epoch for unit in out.units()] == [units[0].epoch] * 4 + [units[0].epoch + 1]
    assert sorted(shown(read_rows(out.units()[-1], out.storage))) == changed(lake)
