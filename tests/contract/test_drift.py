"""A table that another writer moved, past the door: the next write, every follower, `doctor` and `status` say so.

They say what happened and what a repair would do; what cannot be told is said to be unclear, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import Table
from pyiceberg.types import StringType
from sqlalchemy import select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.commit.drift import classify
from floodmark.repair.examine import examine_lake
from tests.conftest import Place, at, ids, rows
from tests.foreign_writer import by_another, foreign_catalog, theirs

PEOPLE = "id long not null, name string"


@pytest.fixture
def people(place: Place) -> fm.Lake:
    lake = place.open(create=True, actor="test")
    lake.create_table("people", PEOPLE, key=["id"])
    lake.append("people", [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
    lake.append("people", [{"id": 3, "name": "c"}])
    return lake


def happened(lake: fm.Lake) -> Any:
    return classify(lake.catalog.files, lake.catalog.history.current_tables("main", ["people"])["people"])


def drop_table(place: Place) -> None:
    with foreign_catalog(place) as catalog:
        catalog.drop_table("default.people")


def make_again(place: Place) -> None:
    with foreign_catalog(place) as catalog:
        schema = catalog.load_table("default.people").schema()
        catalog.drop_table("default.people")
        catalog.create_table("default.people", schema)


def add_column(table: Table) -> None:
    with table.update_schema() as update:
        update.add_column("land", StringType())


def roll_back(table: Table) -> None:
    first = table.metadata.snapshots[0].snapshot_id
    table.manage_snapshots().set_current_snapshot(snapshot_id=first).commit()


def set_property(table: Table) -> None:
    with table.transaction() as changes:
        changes.set_properties({"theirs": "yes"})


def break_metadata(place: Place) -> None:
    by_another(place, "people", lambda table: table.append(theirs(k9="i")))
    with foreign_catalog(place) as catalog:
        location = catalog.load_table("default.people").metadata_location
    Path(location.removeprefix("file://")).write_text("{")


def on(act: Callable[[Table], object]) -> Callable[[Place], None]:
    return lambda place: by_another(place, "people", act)


CASES: dict[str, tuple[Callable[[Place], None], str, int, int, str]] = {
    "append": (on(lambda table: table.append(theirs(k9="i"))), "appended", 1, 0, ""),
    "two appends": (
        on(lambda table: (table.append(theirs(k8="h")), table.append(theirs(k9="i")))),
        "appended",
        2,
        0,
        "",
    ),
    "delete of a file": (on(lambda table: table.delete("id = 3")), "deleted", 0, 1, ""),
    "delete of a row": (on(lambda table: table.delete("id = 1")), "overwritten", 1, 2, ""),
    "overwrite": (on(lambda table: table.overwrite(theirs(k1="x", k9="i"))), "overwritten", 2, 3, ""),
    "setting": (on(set_property), "changed", 0, 0, ""),
    "drop": (drop_table, "dropped", 0, 0, ""),
    "made again": (make_again, "unclear", 0, 0, "another table"),
    "column": (on(add_column), "unclear", 0, 0, "columns"),
    "rolled back": (on(roll_back), "rolled_back", 0, 1, "not in the table's history"),
    "metadata that cannot be read": (break_metadata, "unclear", 0, 0, "cannot be parsed"),
}


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("case", CASES)
def test_the_next_write_the_next_follower_doctor_and_status_notice_it(place: Place, people: fm.Lake, case: str) -> None:
    act, expected, rows_added, rows_removed, unclear = CASES[case]
    people.create_table("notes", PEOPLE)
    assert happened(people) is None
    act(place)
    drift = happened(people)
    assert (drift.happened, drift.rows_added, drift.rows_removed) == (expected, rows_added, rows_removed)
    assert unclear in drift.unclear
    assert bool(drift.unclear) is bool(unclear)
    for question in (lambda: people.changes("people"), lambda: people.merge("people", rows(5))):
        with pytest.raises(fm.Corrupt) as caught:
            question()
        assert caught.value.facts["happened"] == expected
        assert caught.value.facts["table"] == "people"
        assert "floodmark repair people" in caught.value.advice
        assert unclear in caught.value.advice
    failed = {check.name: check.detail for check in examine_lake(people.catalog) if not check.passed}
    assert list(failed) == ["table people"]
    assert "another writer" in failed["table people"]
    assert "floodmark repair people" in failed["table people"]
    status = people.status()
    assert status["drifted"] == ["people"]
    assert "people" in status["health"]
    # Versions that we published stay readable, and other tables go on.
    assert sorted(people.read_arrow("people").read_all()["id"].to_pylist()) == [1, 2, 3]
    assert people.append("notes", rows(1)).outcome == "committed"
    people.close()


def test_a_sink_at_the_head_notices_it_too_and_sends_nothing(place: Place, people: fm.Lake, tmp_path: Path) -> None:
    """The other writer does not move our head, so a sink whose mark is there would have nothing to do for ever."""
    people.sinks.add("out", "files", tables=["people"], path=str(tmp_path / "out"))
    assert people.sinks.run("out").outcome == "shipped"
    assert people.sinks.run("out").outcome == "nothing_to_do"
    by_another(place, "people", lambda table: table.append(theirs(k9="i")))
    done = people.sinks.run("out")
    assert (done.outcome, done.exit_code) == ("refused", 5)
    error = done.tables[0].error
    assert error is not None
    assert error.facts["happened"] == "appended"
    assert "floodmark repair people" in error.advice
    people.repair("people", apply=True)
    assert people.sinks.run("out").outcome == "shipped"
    assert people.sinks.run("out").outcome == "nothing_to_do"
    people.close()


def write_all(lake: fm.Lake, names: list[str]) -> None:
    with lake.transaction() as tx:
        for name in names:
            tx.append(name, rows(1))


def test_a_transaction_moves_no_pointer_if_another_writer_moves_one_of_them_meanwhile(
    place: Place, lake: fm.Lake
) -> None:
    """All pointers are moved by one statement, which counts them."""

    def pointers() -> dict[str, str]:
        table = tables.iceberg_tables
        with lake.catalog.database.read() as tx:
            return dict(tx.execute(select(table.c.table_name, table.c.metadata_location)).all())

    lake.create_table("third", "id long not null, name string")
    before = pointers()
    meanwhile = at("transaction.built", lambda: by_another(place, "notes", set_property))
    with pytest.raises(fm.FloodmarkError, match="another writer"), meanwhile:
        write_all(lake, ["events", "notes", "third"])
    after = pointers()
    assert {name for name in before if before[name] != after[name]} == {"notes"}
    assert ids(lake) == ids(lake, "third") == []
