"""A table with sinks gets another name, on both databases: they follow it, and go on where they were."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.serve.daemon.declaration import check_file, check_lake, make_new
from floodmark.settings.settings import load_settings
from floodmark.sinks.files.units import read_rows, read_units
from floodmark.sinks.settings import parse_settings
from floodmark.testing.invariants import check_lake as check_whole
from floodmark.testing.receiver import Receiver
from tests.conftest import EVENTS, Place, at, ids, rows
from tests.contract.test_lake_to_lake import Chain, content


class Lost(Exception):
    """The process did not get further."""


def lose() -> None:
    raise Lost


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        yield lake
        check_whole(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    with place.open(actor="other") as other:
        yield other


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "out")


def shipped(out: str, table: str = "events") -> list[int]:
    return sorted(
        row["id"] for unit in read_units(out, table=table) for part in read_rows(unit) for row in part.to_pylist()
    )


def ship(lake: fm.Lake) -> list[tuple[str, str, int]]:
    done = lake.sinks.run("out", until_empty=True)
    assert done.error is None, done.error
    return [(one.table, one.outcome, one.rows) for one in done.tables]


# ── what follows ──


def test_a_sink_goes_on_under_the_name_that_its_destination_knows(lake: fm.Lake, out: str) -> None:
    lake.sinks.add("out", "files", tables=["events", "people"], path=out)
    lake.append("events", rows(1, 2))
    assert ship(lake) == [("events", "shipped", 2), ("people", "nothing_to_do", 0)]
    before = lake.sinks.about("out")["tables"][0]
    plan = lake.plan_drop("events")
    assert plan.refused
    lake.rename_table("events", "happenings")
    assert ship(lake) == [("happenings", "nothing_to_do", 0), ("people", "nothing_to_do", 0)]
    lake.append("happenings", rows(3))
    assert ship(lake) == [("happenings", "shipped", 1), ("people", "nothing_to_do", 0)]
    assert shipped(out) == [1, 2, 3]
    assert shipped(out, "happenings") == []
    about = lake.sinks.about("out")["tables"][0]
    assert (about["table"], about["shipped_as"], about["rows"], about["refused"]) == ("happenings", "events", 3, None)
    assert before["shipped_as"] is None
    with lake.catalog.database.read() as tx:
        assert json.loads(tx.execute(select(tables.sinks.c.table_names)).scalar_one()) == ["happenings", "people"]
    # By either name, until another table has the old one.
    assert lake.sinks.plan_replay("out", start="mark", table="events")[0]["table"] == "happenings"
    with pytest.raises(fm.Invalid, match="cannot be done"):
        lake.drop_table("happenings")
    lake.rename_table("happenings", "events")
    assert lake.sinks.about("out")["tables"][0]["shipped_as"] is None


def test_another_table_under_the_old_name_is_not_its(lake: fm.Lake, out: str) -> None:
    lake.sinks.add("out", "files", tables=["events"], path=out)
    lake.append("events", rows(1))
    lake.rename_table("events", "happenings")
    lake.create_table("events", EVENTS)
    lake.append("events", rows(50))
    lake.append("happenings", rows(2))
    assert ship(lake) == [("happenings", "shipped", 2)]
    assert shipped(out) == [1, 2]
    assert lake.sinks.about("out")["lost"] == []
    # A second sink would mix it with the first one's rows there.
    with pytest.raises(fm.Invalid, match="another table is shipped there") as caught:
        lake.sinks.add("more", "files", tables=["events"], path=out)
    assert (caught.value.facts["other_sink"], caught.value.facts["other_table"]) == ("out", "happenings")
    lake.sinks.add("more", "files", tables=["events"], path=f"{out}2")
    lake.sinks.replay("out", start="beginning", table="happenings")
    assert ship(lake) == [("happenings", "shipped", 2)]


@pytest.mark.parametrize("moved", ["old", "new"])
def test_nor_does_a_sink_move_to_where_another_table_has_its_name(lake: fm.Lake, moved: str) -> None:
    url = "http://127.0.0.1:9/{place}/{{table}}".format
    lake.sinks.add("old", "http", tables="events", url=url(place="old"))
    lake.rename_table("events", "happenings")
    lake.create_table("events", EVENTS)
    lake.sinks.add("new", "http", tables=["people", "events"], url=url(place="new"))
    (there,) = {"old", "new"} - {moved}
    with pytest.raises(fm.Invalid, match="another table is shipped there") as caught:
        lake.sinks.set(moved, url=url(place=there))
    assert (caught.value.facts["table"], caught.value.facts["other_sink"]) == ("events", there)
    lake.sinks.set(moved, url=url(place="elsewhere"))


def test_two_tables_of_one_sink_swap_their_names(lake: fm.Lake, out: str) -> None:
    lake.create_table("notes", EVENTS)
    lake.sinks.add("out", "files", tables=["events", "notes"], path=out)
    for old, new in (("events", "x"), ("notes", "events"), ("x", "notes")):
        lake.rename_table(old, new)
    lake.append("notes", rows(1))
    lake.append("events", rows(2))
    ship(lake)
    assert (shipped(out), shipped(out, "notes")) == ([1], [2])
    assert lake.sinks.plan_replay("out", start="mark", table="events")[0]["rows"] == 0
    about = {one["table"]: one["shipped_as"] for one in lake.sinks.about("out")["tables"]}
    assert about == {"notes": "events", "events": "notes"}


def swap(lake: fm.Lake, first: str, second: str) -> None:
    for old, new in ((first, "x"), (second, first), ("x", second)):
        lake.rename_table(old, new)


def test_refused_rows_stay_those_of_their_table(lake: fm.Lake, other: fm.Lake) -> None:
    lake.create_table("notes", EVENTS, key=["id"])
    with Receiver() as receiver:
        lake.sinks.add("web", "http", tables=["people", "notes"], url=receiver.url + "/{table}", backoff_s_max=0.01)
        receiver.refuses = lambda row: True
        lake.merge("people", [{"id": 1, "name": "of people"}])
        lake.merge("notes", [{"id": 2, "name": "of notes"}])
        assert [one.quarantined for one in lake.sinks.run("web").tables] == [1, 1]
        swap(lake, "people", "notes")
        for table, number in (("people", 2), ("notes", 1)):
            found = lake.sinks.quarantine("web", table=table)
            assert [(row["table"], json.loads(row["line"])["id"]) for row in found] == [(table, number)]
        with pytest.raises(fm.NotFound):
            lake.sinks.quarantine("web", table="events")
        receiver.refuses = None
        with at("unit.held", lambda: swap(other, "people", "notes")):
            retried = lake.sinks.retry("web")
        assert retried.error is None
        assert [one.detail["replaced"] for one in retried.tables] == [0, 0]
        assert sorted(row["name"] for row in receiver.rows) == ["of notes", "of people"]
        assert lake.sinks.quarantine("web") == []


POINTS = ["unit.opened", "unit.witnessed", "unit.sent", "unit.shipped", "unit.settled"]


@pytest.mark.parametrize("point", POINTS)
def test_an_open_unit_is_finished_under_its_recorded_name(lake: fm.Lake, out: str, point: str) -> None:
    lake.sinks.add("out", "files", tables=["people"], path=out)
    lake.merge("people", rows(1, 2))
    with at(point, lose), pytest.raises(Lost):
        lake.sinks.run("out")
    lake.rename_table("people", "folk")
    lake.create_table("people", EVENTS, key=["id"])
    lake.merge("people", rows(77))
    lake.delete("folk", "id = 1")
    lake.maintain.expire(keep="0s")
    lake.maintain.sweep(grace="0s")
    ship(lake)
    changes = [row for unit in read_units(out, table="people") for part in read_rows(unit) for row in part.to_pylist()]
    assert [(row["id"], row["_change"]) for row in changes] == [(1, "upsert"), (2, "upsert"), (1, "delete")]


@pytest.mark.parametrize("point", ["unit.held", *POINTS])
def test_a_rename_in_the_middle_of_a_run_loses_nothing(lake: fm.Lake, other: fm.Lake, out: str, point: str) -> None:
    lake.sinks.add("out", "files", tables=["events"], path=out, unit_rows=1)
    lake.append("events", rows(1))
    lake.append("events", rows(2))

    def meddle() -> None:
        other.rename_table("events", "happenings")
        other.create_table("events", EVENTS)
        other.append("events", rows(50))
        other.append("happenings", rows(3))

    with at(point, meddle):
        done = lake.sinks.run("out", until_empty=True)
    assert done.error is None, done.error
    ship(lake)
    assert shipped(out) == [1, 2, 3]


@pytest.mark.parametrize("step", ["begun", "sealed", "built", "locked"])
def test_a_run_or_a_sink_that_comes_during_the_rename_follows_too(
    lake: fm.Lake, other: fm.Lake, out: str, step: str
) -> None:
    lake.append("events", rows(1))

    def meddle() -> None:
        other.sinks.add("out", "files", tables=["events"], path=out)
        assert other.sinks.run("out").outcome == "shipped"

    if step == "locked":
        meddle()
        lake.rename_table("events", "happenings")
    else:
        with at(f"apply.{step}", meddle):
            lake.rename_table("events", "happenings")
    lake.append("happenings", rows(2))
    assert ship(lake) == [("happenings", "shipped", 1)]
    assert shipped(out) == [1, 2]


def test_a_table_that_is_renamed_or_dropped_while_its_sink_is_added_is_refused(lake: fm.Lake, out: str) -> None:
    settings = parse_settings("files", {"path": out}).to_json()
    heads = [lake.catalog.history.head(table) for table in ("events", "people")]
    lake.rename_table("events", "happenings")
    lake.create_table("events", EVENTS)
    lake.drop_table("people")
    for table, head in zip(("events", "people"), heads, strict=True):
        with pytest.raises(fm.Conflict, match="renamed or dropped meanwhile") as caught:
            lake.catalog.sinks.add("out", "files", settings, [head], {}, True)
        assert caught.value.facts["table"] == table
    assert lake.sinks.status() == []


def test_a_sink_of_a_branch_follows_its_table(lake: fm.Lake, out: str) -> None:
    lake.branches.create("dev")
    lake.create_table("drafts", EVENTS, branch="dev")
    lake.sinks.add("out", "files", tables=["drafts"], path=out, branch="dev")
    lake.append("drafts", rows(1), branch="dev")
    ship(lake)
    lake.rename_table("drafts", "plans", branch="dev")
    lake.append("plans", rows(2), branch="dev")
    assert ship(lake) == [("plans", "shipped", 1)]
    assert shipped(out, "drafts") == [1, 2]


def test_a_deleted_branch_is_the_only_reason_that_its_sink_reports(lake: fm.Lake, out: str) -> None:
    lake.branches.create("dev")
    lake.create_table("drafts", EVENTS, branch="dev")
    lake.sinks.add("out", "files", tables=["drafts"], path=out, branch="dev")
    lake.rename_table("drafts", "plans", branch="dev")
    lake.branches.delete("dev")
    (done,) = lake.sinks.run("out").tables
    assert isinstance(done.error, fm.NotFound)
    assert "branch that the sink follows was deleted" in str(done.error)
    assert lake.sinks.about("out")["lost"] == []


def test_another_lake_goes_on_and_needs_no_rename(new_place: Callable[[str], Place]) -> None:
    with ExitStack() as stack:
        chain = Chain(new_place, stack, 2)
        first, last = chain.lakes
        for lake in chain.lakes:
            lake.create_table("people", EVENTS, key=["id"])
        chain.connect(["people"], part_rows=2)
        first.merge("people", rows(*range(5)))
        chain.flow()
        first.merge("people", rows(5, 6))
        with at("unit.sent", lose), pytest.raises(Lost):
            first.sinks.run("next")
        first.rename_table("people", "folk")
        first.delete("folk", "id = 1")
        chain.flow()
        assert content(last, "people") == content(first, "folk")
        for one in chain.lakes:
            check_whole(one.catalog)


def test_marks_hold_retention_and_expiry_back_after_it(lake: fm.Lake, out: str) -> None:
    lake.sinks.add("out", "files", tables=["events"], path=out)
    lake.append("events", rows(1))
    ship(lake)
    lake.append("events", rows(2))
    lake.rename_table("events", "happenings")
    lake.maintain.set_policy("happenings", "1 rows")
    lake.append("happenings", rows(3))
    assert lake.maintain.retain("happenings").outcome in ("protected", "retained", "nothing_to_do")
    ship(lake)
    assert shipped(out) == [1, 2, 3]


def test_rows_that_retention_removed_are_reported_by_the_run_that_meets_the_rename(
    lake: fm.Lake, other: fm.Lake, out: str
) -> None:
    lake.append("events", rows(1, 2))
    lake.append("events", rows(3))
    lake.sinks.add("out", "files", tables=["events", "people"], path=out)
    lake.maintain.set_policy("events", "1 rows")
    assert lake.maintain.retain("events", force=True).outcome == "retained"
    with at("unit.held", lambda: other.rename_table("events", "happenings")):
        done = lake.sinks.run("out")
    assert [(one.table, one.detail) for one in done.tables] == [("happenings", {"rows_lost": 2}), ("people", {})]
    assert "rows_lost" not in lake.sinks.run("out").tables[0].detail


# ── the settings file ──


def differences(lake: fm.Lake, folder: Path, text: str) -> list[str]:
    file = folder / "floodmark.toml"
    file.write_text(text)
    settings = load_settings(file)
    declaration = check_file(settings)
    check_lake(declaration, {head.table for head in lake.heads()}, lake.catalog.sinks.all())
    return make_new(declaration, settings, lake, create=False)


def test_a_file_with_the_old_name_gets_a_clear_answer(lake: fm.Lake, tmp_path: Path, out: str) -> None:
    section = f'[sinks.out]\ntype = "files"\npath = {json.dumps(out)}\ntables = '
    assert differences(lake, tmp_path, f'{section}["people", "events"]\n') == []
    lake.rename_table("events", "happenings")
    (told,) = differences(lake, tmp_path, f'{section}["people", "events"]\n')
    assert "events was renamed to happenings, and the sink follows it" in told.lower()
    assert 'tables = ["people", "happenings"]' in told
    assert "sink remove" not in told
    assert differences(lake, tmp_path, f'{section}["happenings", "people"]\n') == []
    # What else differs is a difference like any other.
    (told,) = differences(lake, tmp_path, f'{section}["events"]\n')
    assert "cannot change" in told
    with pytest.raises(fm.Invalid, match="no such table"):
        differences(lake, tmp_path, f'{section}["people", "nowhere"]\n')
    assert ids(lake, "happenings") == []
