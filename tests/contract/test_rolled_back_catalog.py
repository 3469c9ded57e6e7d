"""A catalog that was rolled back gives sequences again, for other rows: no destination takes them for known ones."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.senders import OtherUnit
from floodmark.catalog.witness import FOLDER, STALE_MAX
from floodmark.errors import Corrupt, Invalid
from floodmark.ingest.receive import Sender, receive
from floodmark.repair.examine import examine_lake
from floodmark.sinks.files.units import MANIFEST, read_rows, read_units
from floodmark.sinks.outcome import SinkRun
from floodmark.testing.invariants import check_lake
from floodmark.testing.receiver import Receiver
from tests.conftest import Place, at
from tests.crash.sink_ends import End, HttpEnd, NewEnd, ends
from tests.crash.sink_world import EVENTS, SINK, append, make, perform
from tests.rolled_back import CatalogCopy

KINDS = ("files", "http", "iceberg", "lake")
# Those that keep units themselves; a foreign endpoint keeps none.
KEEPERS = ("files", "iceberg", "lake")


@pytest.fixture
def new_end(tmp_path: Path) -> Iterator[NewEnd]:
    with ends(tmp_path) as make_end:
        yield make_end


def begin(place: Place, end: End, *numbers: int) -> None:
    """A lake with a sink that shipped these rows, each in a unit of its own."""
    with place.open(create=True, actor="test") as lake:
        make(lake)
        lake.sinks.add(SINK, end.kind, tables=EVENTS, **end.settings)
        ship(lake, *numbers)


def write(lake: fm.Lake, *numbers: int) -> None:
    for number in numbers:
        perform(lake, append(EVENTS, [number], "row"))


def ship(lake: fm.Lake, *numbers: int) -> None:
    for number in numbers:
        write(lake, number)
        shipped(lake)


def shipped(lake: fm.Lake) -> SinkRun:
    done = lake.sinks.run(SINK, until_empty=True)
    assert done.error is None, done.error
    return done


def refused(lake: fm.Lake) -> Corrupt:
    done = lake.sinks.run(SINK)
    assert (done.outcome, done.exit_code) == ("refused", 5), done
    assert isinstance(done.error, Corrupt)
    return done.error


def there(end: End) -> list[int]:
    if end.name == "files":
        # In any order: units of two epochs, or of a catalog that was lost, may have the same sequences.
        units = read_units(str(end.settings["path"]), table=EVENTS)
        return sorted(row["id"] for unit in units for batch in read_rows(unit) for row in batch.to_pylist())
    return sorted(number for number, _ in end.contents().events.elements())


def error_shown(lake: fm.Lake) -> str:
    return str((lake.sinks.about(SINK)["error"] or {}).get("message", ""))


def witness_names(place: Place) -> list[str]:
    return sorted(path.name for path in (Path(place.path) / FOLDER).glob("**/*.json"))


def rolled_back(place: Place, end: End, tmp_path: Path, *, witnesses: bool = False) -> None:
    """Ship 1, copy the catalog, ship 2 and 3, and put the copy back."""
    begin(place, end, 1)
    copy = CatalogCopy(place, tmp_path / "copy", witnesses=witnesses)
    with place.open() as lake:
        ship(lake, 2, 3)
    assert there(end) == [1, 2, 3]
    copy.put_back()


# ── noticed by storage ──


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_rolled_back_catalog_are_refused_until_somebody_chooses(
    place: Place, new_end: NewEnd, tmp_path: Path, kind: str
) -> None:
    end = new_end(kind)
    rolled_back(place, end, tmp_path)
    with place.open() as lake:
        assert "rolled back" in error_shown(lake), "opening compares"
        write(lake, 102, 103, 104)
        assert lake.sinks.run(SINK, dry_run=True).outcome == "refused"
        error = refused(lake)
        assert error.facts["witness"].startswith(f"{lake.location}/{FOLDER}/")
        assert "--from mark" in error.advice
        assert there(end) == [1, 2, 3], "nothing was sent"
        lake.sinks.replay(SINK, start="mark")
        shipped(lake)
        assert there(end) == [1, 2, 3, 102, 103, 104]
        assert error_shown(lake) == ""
        ship(lake, 105)
        assert there(end) == [1, 2, 3, 102, 103, 104, 105]
        # What the lost catalog wrote is left over: no record names it.
        check_lake(lake.catalog, settled=False)


@pytest.mark.mostly_sqlite
def test_every_run_compares_also_one_with_nothing_new(place: Place, new_end: NewEnd, tmp_path: Path) -> None:
    end = new_end("files")
    rolled_back(place, end, tmp_path)
    with place.open(recover=False) as lake:
        assert error_shown(lake) == ""
        assert "rolled back" in str(refused(lake))
        lake.maintain.compact(EVENTS, files_min=2)
        mark = lake.sinks.about(SINK)["tables"][0]["mark"]
        assert "rolled back" in str(refused(lake))
        assert lake.sinks.about(SINK)["tables"][0]["mark"] == mark, "a mark moved past what is not known"


@pytest.mark.mostly_sqlite
def test_a_read_only_open_and_doctor_notice_and_write_nothing(place: Place, new_end: NewEnd, tmp_path: Path) -> None:
    rolled_back(place, new_end("files"), tmp_path)
    with place.open(read_only=True) as lake:
        failed = [check for check in examine_lake(lake.catalog) if not check.passed]
        assert [check.name for check in failed] == [f"sink {SINK}"]
        assert "rolled back" in failed[0].detail
        assert error_shown(lake) == ""


@pytest.mark.mostly_sqlite
def test_the_newer_catalog_that_is_put_back_goes_on(place: Place, new_end: NewEnd, tmp_path: Path) -> None:
    end = new_end("http")
    begin(place, end, 1)
    old = CatalogCopy(place, tmp_path / "old")
    with place.open() as lake:
        ship(lake, 2)
    new = CatalogCopy(place, tmp_path / "new")
    old.put_back()
    with place.open() as lake:
        write(lake, 102)
        refused(lake)
    new.put_back()
    with place.open() as lake:
        ship(lake, 3)
        assert there(end) == [1, 2, 3]


@pytest.mark.mostly_sqlite
def test_a_replay_opens_an_epoch_above_those_of_the_lost_catalog(place: Place, new_end: NewEnd, tmp_path: Path) -> None:
    end = new_end("lake")
    begin(place, end, 1)
    copy = CatalogCopy(place, tmp_path / "copy")
    with place.open() as lake:
        for _ in range(3):
            lake.sinks.replay(SINK, start="head")
        ship(lake, 2)
        assert lake.sinks.about(SINK)["tables"][0]["epoch"] == 3
    copy.put_back()
    with place.open() as lake:
        write(lake, 102)
        refused(lake)
        lake.sinks.replay(SINK, start="mark")
        assert lake.sinks.about(SINK)["tables"][0]["epoch"] == 4
        shipped(lake)
    assert there(end) == [1, 2, 102]


@pytest.mark.mostly_sqlite
def test_refused_rows_that_were_sent_again_are_witnessed_too(place: Place, new_end: NewEnd, tmp_path: Path) -> None:
    end = new_end("http")
    assert isinstance(end, HttpEnd)
    receiver = end.receiver
    begin(place, end, 1)
    receiver.refuses = lambda row: row["id"] == 7
    with place.open() as lake:
        ship(lake, 7)
        assert len(lake.sinks.quarantine(SINK)) == 1
    copy = CatalogCopy(place, tmp_path / "copy")
    receiver.refuses = None
    with place.open() as lake:
        assert lake.sinks.retry(SINK).outcome == "shipped"
    copy.put_back()
    with place.open() as lake:
        assert lake.sinks.retry(SINK).outcome == "refused"
    assert there(end) == [1, 7]


# ── noticed by the destination, where storage was rolled back too ──


@pytest.mark.mostly_sqlite
@pytest.mark.whole
@pytest.mark.parametrize("kind", KEEPERS)
def test_a_destination_that_keeps_units_notices_a_lake_that_was_rolled_back_whole(
    place: Place, new_end: NewEnd, tmp_path: Path, kind: str
) -> None:
    end = new_end(kind)
    rolled_back(place, end, tmp_path, witnesses=True)
    with place.open() as lake:
        assert error_shown(lake) == ""
        write(lake, 102, 103, 104)
        error = refused(lake)
        assert "does not know" in error.message
        assert error.facts["has_unit"]
        assert there(end) == [1, 2, 3]
        assert refused(lake).message == error.message, "the unit that is open asks again"
        lake.sinks.replay(SINK, start="mark")
        shipped(lake)
        ship(lake, 105)
    assert there(end) == [1, 2, 3, 102, 103, 104, 105]


@pytest.mark.mostly_sqlite
def test_a_foreign_endpoint_gets_other_keys_from_a_lake_that_was_rolled_back_whole(
    place: Place, new_end: NewEnd, tmp_path: Path
) -> None:
    end = new_end("http")
    rolled_back(place, end, tmp_path, witnesses=True)
    with place.open() as lake:
        ship(lake, 102)
    assert there(end) == [1, 2, 3, 102]
    end.check_clean()


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("kind", ["iceberg", "lake"])
def test_one_replay_is_enough_where_only_the_destination_knows_the_newer_epoch(
    place: Place, new_end: NewEnd, tmp_path: Path, kind: str
) -> None:
    end = new_end(kind)
    begin(place, end, 1)
    copy = CatalogCopy(place, tmp_path / "copy", witnesses=True)
    with place.open() as lake:
        for _ in range(3):
            lake.sinks.replay(SINK, start="head")
        ship(lake, 2)
    copy.put_back()
    with place.open() as lake:
        write(lake, 102)
        refused(lake)
        lake.sinks.replay(SINK, start="mark")
        shipped(lake)
    assert there(end) == [1, 2, 102]


@pytest.mark.mostly_sqlite
def test_a_manifest_of_the_same_range_with_another_identity_is_refused(
    place: Place, new_end: NewEnd, tmp_path: Path
) -> None:
    end = new_end("files")
    begin(place, end, 1)
    copy = CatalogCopy(place, tmp_path / "copy", witnesses=True)
    with place.open() as lake:
        ship(lake, 2)
    manifests = manifests_of(end)
    assert len({json.loads(path.read_text())["unit"] for path in manifests}) == 2
    copy.put_back()
    with place.open() as lake:
        write(lake, 2)
        error = refused(lake)
    assert error.facts["manifest"].endswith(str(manifests[1]))
    assert error.facts["has_unit"] == json.loads(manifests[1].read_text())["unit"]
    assert manifests_of(end) == manifests


def manifests_of(end: End) -> list[Path]:
    return sorted(Path(end.settings["path"]).glob(f"**/{MANIFEST}"))


# ── units and keys ──


@pytest.mark.mostly_sqlite
def test_a_unit_that_was_left_open_is_known_by_its_id_to_endpoints_and_in_files(place: Place, new_end: NewEnd) -> None:
    web, files = new_end("http"), new_end("files")
    assert isinstance(web, HttpEnd)
    begin(place, web)
    with place.open() as lake:
        lake.sinks.add("files", "files", tables=EVENTS, **files.settings)
        write(lake, 1)
        for name in (SINK, "files"):
            with at("unit.opened", lose), pytest.raises(Lost):
                lake.sinks.run(name)
        unit, filed = row_of(lake, SINK, 0), row_of(lake, "files", 0)
        shipped(lake)
        assert lake.sinks.run("files", until_empty=True).outcome == "shipped"
        (request,) = web.receiver.requests
        assert request.key == f"fm-{hashlib.sha256(f'{unit}/0-1'.encode()).hexdigest()}"
        assert request.headers["floodmark-unit-id"] == unit
        assert "floodmark-after" not in request.headers
        assert json.loads(manifests_of(files)[0].read_text())["unit"] == filed
        ship(lake, 2)
        assert web.receiver.requests[-1].headers["floodmark-after"] == unit
        check_lake(lake.catalog)


def row_of(lake: fm.Lake, sink: str, number: int) -> str:
    found = select(tables.units.c.id).where(tables.units.c.sink == lake.catalog.sinks.find(sink).id)
    with lake.catalog.database.read() as tx:
        return str(tx.execute(found.order_by(tables.units.c.until)).scalars().all()[number])


class Lost(Exception):
    """The process did not get further."""


def lose() -> None:
    raise Lost


@pytest.mark.mostly_sqlite
def test_the_witness_is_in_storage_before_anything_is_sent(place: Place, new_end: NewEnd) -> None:
    end = new_end("http")
    assert isinstance(end, HttpEnd)
    begin(place, end)
    with place.open() as lake:
        write(lake, 1)
        with at("unit.witnessed", lose), pytest.raises(Lost):
            lake.sinks.run(SINK)
        assert end.receiver.requests == []
        assert [row_of(lake, SINK, 0) in name for name in witness_names(place)] == [True]
        shipped(lake)
        assert len(witness_names(place)) == 1, "a unit has one witness, however often it is tried"


@pytest.mark.mostly_sqlite
def test_witnesses_that_say_nothing_any_more_go_and_the_newest_stays(place: Place, new_end: NewEnd) -> None:
    begin(place, new_end("files"), *range(2 * STALE_MAX + 3))
    with place.open() as lake:
        ship(lake, 100)
        assert 1 <= len(witness_names(place)) <= STALE_MAX + 2
        assert any(row_of(lake, SINK, -1) in name for name in witness_names(place))
        check_lake(lake.catalog)


# ── a receiving lake ──


def part(
    number: int, unit: str, after: str | None = None, *, epoch: int = 0, since: int = -1, until: int = 1
) -> Sender:
    return Sender("lake/sink/table/rows", epoch, since, until, number, number + 1, unit * 26, after and after * 26)


@pytest.mark.mostly_sqlite
def test_a_receiving_lake_takes_a_unit_only_after_the_one_that_it_has(lake: fm.Lake) -> None:
    def take(sender: Sender, number: int) -> str:
        return receive(lake.engine, "test", "events", [{"id": number, "name": "row"}], sender=sender).outcome

    assert take(part(0, "A"), 1) == "committed"
    assert take(part(0, "A"), 1) == "already_committed"
    assert take(part(1, "A"), 2) == "committed"
    for other in (part(0, "B"), part(5, "B", until=3), part(0, "B", "C", since=1, until=3)):
        with pytest.raises(OtherUnit) as error:
            take(other, 9)
        assert error.value.newest is not None
        assert error.value.newest.unit == "A" * 26
    assert take(part(0, "B", "A", since=1, until=3), 3) == "committed"
    with pytest.raises(OtherUnit):
        take(part(0, "A"), 9)
    with pytest.raises(OtherUnit, match="not in this lake any more"):
        take(part(0, "D", "C", epoch=1, since=3, until=4), 9)
    assert take(part(0, "D", epoch=1, since=3, until=4), 4) == "committed"
    with pytest.raises(OtherUnit):
        take(part(0, "E", "B", since=3, until=5), 9)


@pytest.mark.mostly_sqlite
def test_units_without_rows_do_not_break_the_chain_at_a_receiving_lake(place: Place, new_end: NewEnd) -> None:
    end = new_end("lake")
    begin(place, end)
    with place.open() as lake:
        lake.sinks.set(SINK, where="id < 10")
        ship(lake, 1, 10, 11, 2, 12, 3)
    assert there(end) == [1, 2, 3]


# ── a destination that was rolled back ──


def follow(lake: fm.Lake, error: Corrupt) -> None:
    """Do what the advice says first."""
    found = re.search(r"--from (\w+)`", error.advice)
    assert found is not None, error.advice
    start = found[1]
    lake.sinks.replay(SINK, start=int(start) if start.isdecimal() else start)
    shipped(lake)


def roll_back_end(end: End, folder: Path, act: Any) -> None:
    """Copy what is at the destination, act, and put it back."""
    place = Path(end._path if end.name == "lake" else str(end.settings["catalog"]["uri"]).removeprefix("sqlite:///"))
    if end.name == "lake":
        end.kill()  # type: ignore[attr-defined]
        copy = CatalogCopy(Place(str(place), None), folder)
        end.serve(end._address.read_text().removeprefix("http://"))
        act()
        end.kill()  # type: ignore[attr-defined]
        copy.put_back()
        end.serve(end._address.read_text().removeprefix("http://"))
        return
    shutil.copy2(place, folder)
    act()
    shutil.copy2(folder, place)


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("kind", ["iceberg", "lake"])
def test_the_advice_after_a_destination_was_rolled_back_loses_no_row(
    place: Place, new_end: NewEnd, tmp_path: Path, kind: str
) -> None:
    end = new_end(kind)
    begin(place, end, 1)
    with place.open() as lake:
        roll_back_end(end, tmp_path / "copy", lambda: ship(lake, 2, 3))
        assert there(end) == [1]
        write(lake, 4)
        error = refused(lake)
        assert "--from mark" not in error.advice
        assert "--from head" not in error.advice
        follow(lake, error)
    assert there(end) == [1, 2, 3, 4]


# ── a folder that lost units ──


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize(
    ("lost", "noticed"), [((0,), False), ((0, 1), False), ((2,), True), ((1,), True), ((0, 1, 2), True)]
)
def test_a_files_folder_that_lost_units_is_noticed(
    place: Place, new_end: NewEnd, lost: tuple[int, ...], noticed: bool
) -> None:
    end = new_end("files")
    begin(place, end, 1, 2, 3)
    units = [path.parent for path in manifests_of(end)]
    for number in lost:
        shutil.rmtree(units[number])
    with place.open() as lake:
        write(lake, 4)
        if not noticed:
            shipped(lake)
            return
        error = refused(lake)
        assert "lost units" in error.message
        follow(lake, error)
    assert set(there(end)) == {1, 2, 3, 4}


# ── a sink that is added again ──


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("kind", ["files", "http", "iceberg"])
def test_a_sink_added_again_over_its_own_destination_is_noticed(place: Place, new_end: NewEnd, kind: str) -> None:
    end = new_end(kind)
    begin(place, end, 1, 2)
    with place.open() as lake:
        lake.sinks.remove(SINK)
        with pytest.raises(Invalid, match="sent rows of this table there before") as error:
            lake.sinks.add("again", end.kind, tables=EVENTS, **end.settings)
        assert error.value.facts["sink_before"] == SINK
        assert lake.sinks.status() == []
        lake.sinks.add("again", end.kind, tables=EVENTS, start="head", **end.settings)
        # Beside one that is here, another one is not taken for it.
        lake.sinks.add("other", end.kind, tables=EVENTS, start="head", **end.settings)


@pytest.mark.mostly_sqlite
def test_a_sink_that_a_rolled_back_catalog_lost_is_noticed_when_it_is_added_again(place: Place, tmp_path: Path) -> None:
    with Receiver() as receiver:
        with place.open(create=True) as lake:
            make(lake)
        copy = CatalogCopy(place, tmp_path / "copy")
        with place.open() as lake:
            lake.sinks.add(SINK, "http", tables=EVENTS, url=receiver.url)
            ship(lake, 1)
        copy.put_back()
        with place.open() as lake, pytest.raises(Invalid, match="rolled-back catalog lost"):
            lake.sinks.add(SINK, "http", tables=EVENTS, url=receiver.url)
