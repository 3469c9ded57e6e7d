"""A bad chunk is loaded again: what goes, what stays, what is named, who is asked, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks import redo
from floodmark.catalog.maintenance_state import Consumer
from floodmark.jobs.record import BackfillRun
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows
from tests.history_world import Numbers, chunk_rows, history, number_rows, room_of, run

pytestmark = pytest.mark.mostly_sqlite

Row = dict[str, Any]


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        yield lake
        check_lake(lake.catalog)


def bad(chunk: Any) -> list[Row]:
    """Half of the rows, under wrong names, and one that the source never had."""
    return [{"id": row["id"], "name": "bad"} for row in number_rows(chunk)[::2]]


def loaded_badly(lake: fm.Lake, tables: Any = "events", **options: Any) -> Numbers:
    """All five chunks, of which one came badly."""
    source = Numbers(act={("20..30", 1): bad})
    assert run(lake, history(source, tables, **options)).outcome == "done"
    return source


def again(lake: fm.Lake, source: Any, first: Any = 20, last: Any = 30, **options: Any) -> BackfillRun:
    job = lake.catalog.jobs.find("years")
    return redo.redo(room_of(lake), job, first, last, "fixer", source=source, **options)


def names(lake: fm.Lake, table: str = "events") -> dict[int, str]:
    return {row["id"]: row["name"] for row in lake.read_arrow(table).read_all().to_pylist()}


WANTED = {number: f"row {number}" for number in range(50)}


def consumer(lake: fm.Lake, mark: int, table: str = "events") -> None:
    table_id = lake.catalog.history.head(table).table_id
    lake.catalog.maintenance.put_consumer(Consumer("follower", table_id, mark))


# ── what goes and comes ──


@pytest.mark.parametrize("table", ["events", "people"])
@pytest.mark.parametrize("compacted", [False, True])
def test_a_bad_chunk_is_taken_out_and_loaded_again(lake: fm.Lake, table: str, compacted: bool) -> None:
    source = loaded_badly(lake, table)
    if compacted:
        assert lake.maintain.compact(table, files_min=2).outcome == "compacted"
    found = again(lake, source)
    assert (found.outcome, found.job["status"], found.job["processed"]) == ("redone", "done", 5)
    assert found.job["rows"] == 50, "counts are replaced, never added"
    assert names(lake, table) == WANTED
    assert len(ids(lake, table)) == 50
    assert source.asked == {"0..10": 1, "10..20": 1, "20..30": 2, "30..40": 1, "40..50": 1}
    out, loaded = (lake.history(limit=2)[place] for place in (1, 0))
    assert (out.kind, out.tables[0].rows_deleted, loaded.kind) == ("redo", 5, "chunk")
    assert run(lake, history(source, table)).outcome == "nothing_to_do"


def test_a_redo_has_an_audit_row_that_says_who_and_what(lake: fm.Lake) -> None:
    again(lake, loaded_badly(lake))
    (row,) = lake.audit()
    assert (row.kind, row.found, row.outcome) == ("redo", "done", "redone")
    assert row.detail == "years: 20..30 by fixer: 5 rows of events deleted"
    assert row.version == lake.history(limit=2)[1].version


def test_rows_go_and_the_chunk_is_missing_in_one_publish(lake: fm.Lake) -> None:
    source = loaded_badly(lake, {"events": None, "people": None})
    seen: list[Any] = []
    with at("redo.published", lambda: seen.append((chunk_rows(lake), ids(lake), ids(lake, "people")))):
        again(lake, source)
    states, events, people = seen[0]
    assert {chunk for _, chunk in states} == {0, 1, 3, 4}
    assert events == people == [number for number in range(50) if number not in range(20, 30)]
    assert names(lake) == names(lake, "people") == WANTED


def test_several_chunks_go_in_one_publish(lake: fm.Lake) -> None:
    source = loaded_badly(lake)
    found = again(lake, source, 10, 40)
    assert found.redone is not None
    assert (found.redone["range"], found.redone["chunks"]) == ("10..40", 3)
    assert [commit.kind for commit in lake.history(limit=4)] == ["chunk", "chunk", "chunk", "redo"]
    assert names(lake) == WANTED


def test_consumers_of_a_table_with_a_key_see_what_went(lake: fm.Lake) -> None:
    extra = Numbers(act={("20..30", 1): lambda chunk: [*number_rows(chunk)[1:], {"id": 20, "name": "never was"}]})
    assert run(lake, history(extra, "people")).outcome == "done"
    since = lake.catalog.history.head("people").sequence
    consumer(lake, since, "people")
    again(lake, Numbers(act={"20..30": lambda chunk: number_rows(chunk)[1:]}))
    changed = lake.changes("people", since).arrow().read_all().to_pylist()
    assert {row["id"] for row in changed if row["_change"] == "delete"} == {20}
    assert {row["id"] for row in changed if row["_change"] == "upsert"} == set(range(21, 30))


def test_a_chunk_of_a_table_without_the_range_column_is_told_by_its_commit(lake: fm.Lake) -> None:
    source = loaded_badly(lake, column=None)
    lake.append("events", rows(25))
    assert lake.maintain.compact("events", files_min=2).outcome == "compacted"
    again(lake, source)
    assert sorted(ids(lake)) == sorted([*range(50), 25])


# ── rows of others ──


def test_rows_merged_since_stay_and_are_named(lake: fm.Lake) -> None:
    source = loaded_badly(lake, "people")
    lake.merge("people", [{"id": 24, "name": "mended by hand"}, {"id": 99, "name": "elsewhere"}])
    found = again(lake, source)
    assert found.redone is not None
    told = found.redone["tables"]["people"]
    assert (told["rows_out"], told["rows_since"], told["since"]) == (4, 1, ["id=24"])
    assert names(lake, "people") == {**WANTED, 24: "mended by hand", 99: "elsewhere"}
    assert "1 added since (id=24)" in lake.audit()[0].detail


def test_all_rows_takes_out_what_others_merged_too(lake: fm.Lake) -> None:
    source = loaded_badly(lake, "people")
    lake.merge("people", [{"id": 24, "name": "by hand"}])
    again(lake, source, all_rows=True)
    assert names(lake, "people") == WANTED


def test_rows_that_others_appended_into_the_range_stay(lake: fm.Lake) -> None:
    source = loaded_badly(lake)
    lake.append("events", rows(25))
    found = again(lake, source)
    assert found.redone is not None
    assert found.redone["tables"]["events"]["since"] == ["id=25"]
    assert ids(lake) == sorted([*range(50), 25])


def test_rows_that_cannot_be_told_from_those_of_others_are_refused(lake: fm.Lake) -> None:
    """They got new sequences: as they are, a redo would double them."""
    source = loaded_badly(lake)
    lake.overwrite("events", [{"id": 20, "name": "changed"}], where="id = 20")
    with pytest.raises(fm.Invalid, match="were changed since") as refused:
        again(lake, source)
    assert (refused.value.facts["rows_as_loaded"], refused.value.facts["rows_of_others"]) == (4, 1)
    again(lake, source, all_rows=True)
    assert names(lake) == WANTED
    assert len(ids(lake)) == 50


# ── consumers ──


def test_what_a_consumer_shipped_of_a_table_without_a_key_is_refused_by_its_name(lake: fm.Lake) -> None:
    source = loaded_badly(lake)
    version = lake.status()["version"]
    consumer(lake, lake.catalog.history.head("events").sequence)
    with pytest.raises(fm.Invalid, match="have been shipped") as refused:
        again(lake, source)
    assert (refused.value.facts["consumers"], refused.value.facts["table"]) == ("follower", "events")
    assert (lake.status()["version"], lake.catalog.jobs.find("years").status) == (version, "done")
    assert lake.audit() == []
    found = again(lake, source, force=True)
    assert found.redone is not None
    assert (found.outcome, found.redone["tables"]["events"]["shipped_to"]) == ("redone", ["follower"])
    assert "already shipped to follower" in lake.audit()[0].detail
    assert names(lake) == WANTED


def test_a_consumer_that_has_not_come_so_far_does_not_hinder(lake: fm.Lake) -> None:
    source = Numbers(act={("20..30", 1): bad})
    run(lake, history(source, order="oldest"))
    # The third chunk has the third sequence.
    consumer(lake, 2)
    assert again(lake, source).outcome == "redone"


def test_a_consumer_that_ships_while_rows_are_taken_out_is_noticed_in_the_publish(lake: fm.Lake) -> None:
    source = loaded_badly(lake)
    with (
        at("redo.built", lambda: consumer(lake, lake.catalog.history.head("events").sequence)),
        pytest.raises(fm.Invalid, match="have been shipped"),
    ):
        again(lake, source)
    assert len(ids(lake)) == 45, "nothing went"
    assert lake.catalog.jobs.find("years").status == "done"


def test_a_unit_under_way_counts_as_shipped(lake: fm.Lake, tmp_path: Path) -> None:
    source = loaded_badly(lake)
    lake.sinks.add("out", "files", tables=["events"], path=str(tmp_path / "out"))

    class Died(Exception):
        pass

    def die() -> None:
        raise Died

    with at("unit.sealed", die), pytest.raises(Died):
        lake.sinks.run("out")
    with pytest.raises(fm.Invalid, match="have been shipped") as refused:
        again(lake, source)
    assert refused.value.facts["consumers"] == "sink:out"


# ── what is refused ──


def test_a_part_of_a_chunk_is_refused_with_the_chunk_that_it_is_of(lake: fm.Lake) -> None:
    source = loaded_badly(lake)
    with pytest.raises(fm.Invalid, match="only whole chunks") as refused:
        again(lake, source, 22, 35)
    assert "20..40" in refused.value.advice
    with pytest.raises(fm.Invalid, match="no chunk"):
        again(lake, source, 30, 30)
    assert len(ids(lake)) == 45


def test_a_chunk_that_the_source_does_not_have_any_more_is_not_taken_out(lake: fm.Lake) -> None:
    source = loaded_badly(lake)
    source.now = 25
    with pytest.raises(fm.Incomplete, match="could not be loaded again"):
        again(lake, source)
    assert len(ids(lake)) == 45


def test_a_chunk_below_the_floor_is_not_taken_out(lake: fm.Lake) -> None:
    source = Numbers(tip=50)
    run(lake, history(source, last=None, keep=20))
    with pytest.raises(fm.BelowRetention):
        again(lake, source)


def test_a_job_at_work_is_not_redone_beside_itself(lake: fm.Lake, place: Place) -> None:
    told: list[Any] = []

    def meanwhile(chunk: Any) -> Any:
        with place.open(actor="other") as other, pytest.raises(fm.Busy):
            again(other, Numbers(), 40, 50)
        told.append(chunk.name)
        return number_rows(chunk)

    assert run(lake, history(Numbers(act={"20..30": meanwhile}))).outcome == "done"
    assert told == ["20..30"]
    assert ids(lake) == list(range(50))


# ── what cannot be loaded again ──


def test_a_chunk_that_fails_again_is_missing_and_says_so(lake: fm.Lake) -> None:
    source = loaded_badly(lake)
    found = again(lake, Numbers(act={"20..30": lambda chunk: [{"id": 99, "name": "elsewhere"}]}))
    assert (found.outcome, found.job["status"]) == ("failed", "failed")
    assert [number for number in ids(lake) if number in range(20, 30)] == []
    assert lake.backfill.coverage("years")["tables"]["events"]["gaps"] == [["20", "30"]]
    assert run(lake, history(source)).outcome == "done"
    assert names(lake) == WANTED


def test_a_redo_loads_its_range_only_and_is_not_done_over_other_gaps(lake: fm.Lake) -> None:
    source = Numbers(act={("30..40", 1): bad, ("20..30", 1): lambda chunk: None})
    before = run(lake, history(source)).job
    found = again(lake, source, 30, 40)
    assert (found.outcome, found.job["status"], found.job["error"]) == ("redone", "failed", before["error"])
    assert (found.job["processed"], found.job["total"], source.asked["0..10"]) == (2, 5, 0)
    assert names(lake) == {number: name for number, name in WANTED.items() if number >= 30}
    assert run(lake, history(source)).outcome == "done"
    assert names(lake) == WANTED


def test_a_plan_tells_what_would_go_and_changes_nothing(lake: fm.Lake) -> None:
    source = loaded_badly(lake, "people")
    lake.merge("people", [{"id": 24, "name": "by hand"}])
    version = lake.status()["version"]
    found = redo.plan(room_of(lake), lake.catalog.jobs.find("years"), 20, 30, source=source)
    assert found == {
        "job": "years",
        "range": "20..30",
        "chunks": 1,
        "tables": {"people": {"rows_out": 4, "rows_since": 1, "since": ["id=24"], "shipped_to": []}},
    }
    assert (lake.status()["version"], lake.audit()) == (version, [])


def test_a_redo_that_another_run_took_over_publishes_nothing(lake: fm.Lake) -> None:
    """Else that run, which knows the chunk as done, would end over a gap."""
    source = loaded_badly(lake)

    def take_over() -> None:
        lake.catalog.jobs.disown(lake.catalog.jobs.find("years").run or "")
        assert run(lake, history(Numbers())).outcome == "nothing_to_do"

    with at("redo.built", take_over), pytest.raises(fm.Conflict, match="taken this job over"):
        again(lake, source)
    assert len(ids(lake)) == 45
    assert lake.catalog.jobs.find("years").status == "done"
