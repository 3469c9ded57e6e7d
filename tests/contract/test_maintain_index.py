"""Segments of indexes are built, folded, retired and swept beside everything else; answers never change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.indexes import SegmentRow
from floodmark.index.covering import form_of
from floodmark.index.writing import SUFFIX
from floodmark.maintenance import folds
from floodmark.maintenance import index as maintenance
from floodmark.maintenance.folds import next_fold, tier_of
from floodmark.rows.index.segment import FILES_MAX, SectionPlan, write_segment
from floodmark.testing.children import Child, preload
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows
from tests.crash.test_index_maintain_kills import drop_indexes, found_by_key, in_use, index_names, segments

preload("tests.crash.test_index_maintain_kills", "floodmark.maintenance.index")

FIRST = range(1, 6)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three segments are due for a fold."""
    monkeypatch.setattr(folds, "SEGMENTS_MAX", 2)
    monkeypatch.setattr(folds, "TIER", 2)


@pytest.fixture
def people(lake: fm.Lake) -> fm.Lake:
    lake.create_table("people", EVENTS, key=["id"])
    for number in FIRST:
        lake.append("people", rows(number))
    return lake


def forget_segments(lake: fm.Lake) -> None:
    """As a lake has it whose files are older than its index."""
    with lake.catalog.database.write() as tx:
        found = tx.execute(select(tables.segments.c.location)).scalars().all()
        tx.execute(tables.segments.delete())
        tx.execute(update(tables.indexes).values(changes=tables.indexes.c.changes + 1))
    lake.catalog.storage.delete_many(found)


def outcome(lake: fm.Lake, **options: Any) -> tuple[str, dict[str, Any]]:
    (record,) = lake.maintain.index("people", **options).records
    return record.outcome, record.detail


def expire_and_sweep(lake: fm.Lake, **options: Any) -> None:
    for number in range(900, 906):
        lake.merge("people", rows(number))
    lake.delete("people", "id >= 900")
    assert lake.maintain.expire(keep="0s").outcome in ("expired", "nothing_to_do")
    assert lake.maintain.sweep(grace="0s", **options).outcome in ("swept", "nothing_to_do")


# ── building ──


def test_files_that_no_segment_covers_get_segments_in_batches(people: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_segments(people)
    monkeypatch.setattr(maintenance, "BATCH_FILES_MAX", 2)
    monkeypatch.setattr(folds, "SEGMENTS_MAX", 16)
    version = people.status()["version"]
    assert people.status()["due"] == ["index people: 5 files to cover"]
    assert outcome(people, dry_run=True)[0] == "planned"
    assert segments(people) == []
    seen: list[tuple[str, str, int, int]] = []
    done = people.maintain.index("people", progress=lambda *now: seen.append(now))
    assert (done.outcome, done.exit_code) == ("indexed", 0)
    assert [one[2:] for one in seen] == [(2, 5), (4, 5), (5, 5)]
    assert sorted(row.files for row in in_use(people)) == [1, 2, 2]
    assert people.status()["version"] == version, "it is not a change that anybody sees"
    assert people.status()["due"] == []
    assert outcome(people)[0] == "nothing_to_do"
    assert found_by_key(people, *FIRST, 99) == set(FIRST)
    check_lake(people.catalog)


def test_a_declared_index_and_the_key_share_a_segment(people: fm.Lake) -> None:
    forget_segments(people)
    index_names(people)
    assert outcome(people)[0] == "indexed"
    found = in_use(people)
    assert len(found) == 2
    assert len({row.location for row in found}) == 1
    check_lake(people.catalog)


def test_a_keyed_table_without_an_index_gets_one_but_not_one_that_was_dropped(people: fm.Lake) -> None:
    forget_segments(people)
    with people.catalog.database.write() as tx:
        tx.execute(tables.indexes.delete())
    assert outcome(people)[0] == "indexed"
    drop_indexes(people)
    assert outcome(people)[0] == "nothing_to_do"
    assert [one.is_live for one in people.catalog.indexes.all()] == [False]
    people.maintain.sweep(grace="0s")
    assert segments(people) == []
    check_lake(people.catalog)


def test_files_of_every_branch_are_covered(people: fm.Lake) -> None:
    people.branches.create("dev")
    people.merge("people", rows(7), branch="dev")
    people.branches.create("old", version=5)
    people.delete("people", "id <= 2")
    forget_segments(people)
    assert outcome(people)[1]["files"] == 6
    live = maintenance.look(people.catalog, people.catalog.history.head("people").table_id)
    assert live is not None
    covered = {
        file.path
        for row in in_use(people)
        for section in people.maintain._engine.coverings.open_sections(people.catalog.indexes.all()[0], [row]).values()
        for file in section.files
    }
    assert set(live.files) == covered
    check_lake(people.catalog)


def test_a_table_that_only_a_branch_has_is_maintained(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    with lake.transaction(branch="dev") as tx:
        tx.create_table("people", EVENTS, key=["id"])
        tx.append("people", rows(1, 2))
    forget_segments(lake)
    (record,) = [one for one in lake.maintain.index().records if one.table == "people"]
    assert (record.outcome, record.detail["files"]) == ("indexed", 1)
    lake.branches.delete("dev")
    assert lake.maintain.index().records == ()
    check_lake(lake.catalog)


# ── damage ──


@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_damaged_segments_are_noticed_and_made_again(people: fm.Lake, how: str) -> None:
    victim = in_use(people)[1]
    path = Path(victim.location.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    else:
        data[40] ^= 1
        path.write_bytes(data[:-7] if how == "cut" else data)
    assert found_by_key(people, *FIRST, 99) == set(FIRST) | {99}, "what it covered is scanned"
    assert [row.broken for row in segments(people)].count(True) == 1
    assert people.status()["due"] == ["index people: 1 file to cover, 1 damaged segment to make again"]
    assert outcome(people)[0] == "indexed"
    assert found_by_key(people, *FIRST, 99) == set(FIRST)
    people.maintain.sweep(grace="0s")
    assert [row.broken for row in segments(people)] == [False]
    assert people.maintain.sweep(grace="0s", deep=True).outcome == "nothing_to_do"
    check_lake(people.catalog)


def test_doctor_compares_segments_with_the_rows_and_maintenance_makes_wrong_ones_again(people: fm.Lake) -> None:
    from floodmark.repair.examine import examine_lake

    def check(deep: bool) -> Any:
        return next(one for one in examine_lake(people.catalog, deep=deep) if one.name == "indexes")

    assert check(True).passed
    make_empty(people, in_use(people)[0])
    assert check(False).passed
    assert not check(True).passed
    assert "maintain index --verify" in check(True).detail
    before = [row.location for row in in_use(people)]
    assert outcome(people, verify=True, dry_run=True)[0] == "planned"
    assert [row.location for row in in_use(people)] == before
    done, detail = outcome(people, verify=True)
    assert (done, detail["damaged"]) == ("indexed", 1)
    assert check(True).passed
    assert found_by_key(people, *FIRST, 99) == set(FIRST)
    Path(in_use(people)[0].location.removeprefix("file://")).unlink()
    assert not check(False).passed


def make_empty(lake: fm.Lake, one: SegmentRow) -> None:
    """A whole segment without entries in its place: only the rows show that it is wrong."""
    (index,) = lake.catalog.indexes.all()
    form = form_of(index)
    assert form is not None
    section = lake.maintain._engine.coverings.open_sections(index, [one])[one.location]
    location = one.location.removesuffix(SUFFIX) + "x" + SUFFIX
    record = write_segment(lake.catalog.storage, location, [SectionPlan(form, section.files, [])])
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.segments).where(tables.segments.c.location == one.location).values(**vars(record)))
        tx.execute(update(tables.indexes).values(changes=tables.indexes.c.changes + 1))
    lake.catalog.storage.delete(one.location)


# ── folding ──


def row(entries: int, name: str = "", files: int = 1) -> SegmentRow:
    return SegmentRow("index", name or f"{entries:012}", "table", "operation", 1, 1, "", entries, files)


def test_the_lowest_tiers_that_have_eight_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "SEGMENTS_MAX", 16)
    monkeypatch.setattr(folds, "TIER", 8)
    assert folds.FILES_MAX == FILES_MAX
    assert [tier_of(row(entries)) for entries in (0, 8192, 8193, 65_536, 65_537)] == [0, 0, 1, 1, 2]
    small = [row(number + 1) for number in range(10)]
    large = [row(100_000 + number) for number in range(6)]
    assert next_fold([*small, *large]) == [], "sixteen may be"
    assert next_fold([*large, *small, row(200_000)]) == small
    few_small = small[:3]
    middle = [row(10_000 + number) for number in range(6)]
    assert next_fold([*few_small, *middle, *large, *large[:2]]) == [*few_small, *middle], "tiers below count too"
    full = [row(folds.ENTRIES_FOLDED_MAX + 1 + number) for number in range(40)]
    assert next_fold(full) == [], "the largest are never folded"
    many = [row(number) for number in range(1000)]
    assert len(next_fold(many)) == folds.FOLD_SEGMENTS_MAX
    wide = [row(number, files=FILES_MAX // 8) for number in range(20)]
    assert sum(one.files for one in next_fold(wide)) <= FILES_MAX


def test_a_fold_leaves_out_files_that_no_branch_has_and_old_versions_keep_theirs(people: fm.Lake) -> None:
    old = people.status()["version"]
    people.branches.create("dev")
    people.delete("people", "id = 2")
    people.delete("people", "id = 3", branch="dev")
    assert outcome(people)[0] == "indexed"
    (folded,) = in_use(people)
    assert folded.files == 5, "both branches' files"
    people.branches.delete("dev")
    for number in (7, 8):
        people.append("people", rows(number))
    assert outcome(people)[0] == "indexed"
    assert in_use(people)[0].files == 6, "without the file of key 2, which no branch has"
    assert found_by_key(people, 1, 2, 3, 99) == {1, 3}
    assert found_by_key(people, 1, 2, 3, 99, version=old) == {1, 2, 3}
    people.maintain.sweep(grace="0s")
    assert found_by_key(people, 1, 2, 3, 99, version=old) == {1, 2, 3}, "a retired segment serves it"
    assert len(segments(people)) > 1
    expire_and_sweep(people)
    outcome(people)
    expire_and_sweep(people)
    assert found_by_key(people, *FIRST, 99) == {1, 3, 4, 5}
    check_lake(people.catalog)


def test_a_fold_whose_segments_were_folded_meanwhile_is_a_conflict(people: fm.Lake, place: Place) -> None:
    with place.open(recover=False) as other, at("index.sealed", lambda: other.maintain.index("people")):
        done, detail = outcome(people)
    assert (done, detail["conflicts"]) == ("conflict", 1)
    assert people.maintain.history("people", limit=1)[0].outcome == "conflict"
    assert len(in_use(people)) == 1
    assert people.maintain.sweep(grace="1h", deep=True).outcome == "nothing_to_do", "what it staged is deleted"
    check_lake(people.catalog)
    assert outcome(people)[0] == "nothing_to_do"


def test_a_build_whose_index_was_dropped_meanwhile_leaves_nothing(people: fm.Lake, place: Place) -> None:
    forget_segments(people)
    with (
        place.open(recover=False) as other,
        at("index.sealed", lambda: drop_indexes(other)),
    ):
        outcome(people)
    assert in_use(people) == []
    people.maintain.sweep(grace="0s")
    assert segments(people) == []
    check_lake(people.catalog)


def test_a_fenced_operation_records_nothing(people: fm.Lake, place: Place) -> None:
    forget_segments(people)

    def fence() -> None:
        (operation,) = [row for row in people.catalog.journal.unfinished()[0] if row.kind == "index"]
        people.catalog.journal.abandon(operation.id)

    with at("index.built", fence):
        done, detail = outcome(people)
    assert (done, detail["error"]) == ("failed", "Fenced")
    assert segments(people) == []
    people.recover()
    check_lake(people.catalog)
    assert outcome(people)[0] == "indexed"


# ── beside other work ──


@pytest.mark.parametrize("point", ["index.begun", "index.written", "index.sealed", "index.built"])
@pytest.mark.parametrize(
    "act",
    ["append", "if_version", "compact", "drop_index", "drop_table", "branch", "expire", "batch"],
)
def test_anything_may_come_in_between(people: fm.Lake, place: Place, point: str, act: str) -> None:
    """A build and a fold, with another change at each step: neither hinders it, and nothing is left over."""
    version = people.status()["version"]
    people.catalog.indexes.mark_broken(in_use(people)[-1].location)
    kept = set(FIRST)
    with place.open(recover=False) as other:

        def change() -> None:
            match act:
                case "append":
                    other.append("people", rows(50))
                case "if_version":
                    assert other.merge("people", rows(50), if_version=version).outcome == "committed"
                case "compact":
                    assert other.maintain.compact("people", files_min=2).outcome == "compacted"
                case "drop_index":
                    drop_indexes(other)
                case "drop_table":
                    other.drop_table("people")
                case "branch":
                    other.branches.create("dev", version=5)
                case "expire":
                    other.maintain.expire(keep="0s")
                    other.maintain.sweep(grace="0s", deep=True)
                case "batch":
                    other.append("people", rows(50), batch="one")

        with at(point, change):
            people.maintain.index()
    kept |= {50} if act in ("append", "if_version", "batch") else set()
    if act == "drop_table":
        people.undrop("people")
    check_lake(people.catalog)
    assert people.status()["version"] == version + {"drop_index": 0, "branch": 0, "expire": 0, "drop_table": 2}.get(
        act, 1
    )
    assert people.maintain.index().outcome in ("indexed", "nothing_to_do")
    assert people.maintain.index().outcome == "nothing_to_do"
    assert ids(people, "people") == sorted(kept)
    if act != "drop_index":
        assert found_by_key(people, *kept, 99) == kept
    expire_and_sweep(people, deep=True)
    check_lake(people.catalog)


def test_segments_of_a_dropped_table_go_with_its_last_state_and_its_index_after_that(people: fm.Lake) -> None:
    table_id = people.catalog.history.head("people").table_id
    people.drop_table("people")
    people.maintain.index()
    assert people.catalog.indexes.segments(table_id), "an undrop may bring it back"
    people.undrop("people")
    assert found_by_key(people, *FIRST, 99) == set(FIRST)
    people.drop_table("people")
    people.append("events", rows(1))
    people.maintain.expire(keep="0s")
    assert people.catalog.indexes.gone() == []
    assert people.maintain.sweep(grace="0s").outcome == "swept"
    assert people.catalog.indexes.segments(table_id) == []
    assert len(people.catalog.indexes.gone()) == 1
    (record,) = [one for one in people.maintain.index().records if not one.table]
    assert (record.outcome, record.detail["indexes"]) == ("indexed", 1)
    assert people.catalog.indexes.all() == []
    assert people.maintain.sweep(grace="0s", deep=True).outcome == "nothing_to_do"
    check_lake(people.catalog)


def test_segments_that_come_after_the_last_state_of_their_table_are_swept(people: fm.Lake, place: Place) -> None:
    table_id = people.catalog.history.head("people").table_id
    forget_segments(people)

    def end() -> None:
        with place.open(recover=False) as other:
            other.drop_table("people")
            other.append("events", rows(1))

    with at("index.sealed", end):
        people.maintain.index()
    people.maintain.expire(keep="0s")
    people.maintain.sweep(grace="0s")
    with people.catalog.database.write() as tx:
        tx.execute(
            tables.segments.insert().values(
                index_id="gone",
                location=f"{people.location}/tables/x/data/01M00000000000000000000000/a.index",
                table_id=table_id,
                operation="x",
                size_bytes=1,
                tail_bytes=1,
                digest="",
                entries=0,
                files=0,
                broken=0,
                retired_ms=None,
            )
        )
    assert people.maintain.sweep(grace="0s").outcome == "swept"
    assert people.catalog.indexes.segments(table_id) == []
    check_lake(people.catalog)


def test_a_restored_catalog_does_without_segments_that_were_swept(
    new_place: Callable[[str], Place], tmp_path: Path
) -> None:
    place, file = new_place("sqlite"), tmp_path / "backup"
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", EVENTS, key=["id"])
        for number in FIRST:
            lake.append("people", rows(number))
        lake.backup(file)
        outcome(lake)
        lake.maintain.sweep(grace="0s")
    for name in Path(place.path).glob("catalog.db*"):
        name.unlink()
    fm.restore(file, place.path)
    with place.open() as lake:
        assert found_by_key(lake, *FIRST, 99) >= set(FIRST), "what is gone covers nothing"
        assert outcome(lake)[0] == "indexed"
        assert found_by_key(lake, *FIRST, 99) == set(FIRST)
        assert lake.maintain.sweep(grace="0s", deep=True).outcome == "swept"
        assert found_by_key(lake, *FIRST, 99) == set(FIRST)
        assert ids(lake, "people") == [*FIRST]


def test_a_file_that_lacks_the_column_is_not_due_for_ever(lake: fm.Lake) -> None:
    lake.create_table("people", "id long not null", key=["id"])
    lake.append("people", [{"id": 1}])
    lake.add_column("people", "name", "string")
    index_names(lake)
    done, detail = outcome(lake)
    assert (done, list(detail["not_coverable"].values())) == ("nothing_to_do", [1])
    assert lake.status()["due"] == []
    lake.append("people", rows(2))
    assert lake.status()["due"] == []
    check_lake(lake.catalog)


def test_read_only_nothing_is_changed(people: fm.Lake, place: Place) -> None:
    with place.open(read_only=True) as other:
        assert other.maintain.index(dry_run=True).outcome == "planned"
        with pytest.raises(fm.Invalid):
            other.maintain.index()


# ── two processes ──


def read_for_long(place: Place, stop: str) -> list[str]:
    """Every key that the head has is found, or its file is not covered; nothing is ever raised."""
    wrong: list[str] = []
    with place.open(read_only=True) as lake:
        rounds = 0
        while not Path(stop).exists():
            head = lake.catalog.history.head("people")
            found = found_by_key(lake, *range(head.rows))
            if found < set(range(head.rows)):
                wrong.append(f"{head.version}: {sorted(set(range(head.rows)) - found)}")
            rounds += 1
    return wrong if rounds > 5 else ["hardly any round"]


def test_readers_beside_folds_and_sweeps_of_another_process_find_everything(place: Place, tmp_path: Path) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", EVENTS, key=["id"])
        lake.append("people", rows(0))
        stop = tmp_path / "stop"
        reader = Child(read_for_long, place, str(stop))
        for number in range(1, 40):
            lake.append("people", rows(number))
            if number % 3 == 0:
                assert lake.maintain.index().outcome in ("indexed", "nothing_to_do")
                assert lake.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")
        stop.touch()
        assert reader.wait() == []
        check_lake(lake.catalog)
