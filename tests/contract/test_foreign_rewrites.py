"""Files that another engine only wrote anew (Iceberg's `replace`): rows keep their sequences, nothing counts as new."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import Table

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.foreign_writer import SCHEMA, by_another, foreign_catalog


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    """Rows of three commits; the first two are the same row twice."""
    with place.open(create=True, actor="test") as lake:
        for table, key in (("people", ["id"]), ("events", [])):
            lake.create_table(table, "id long not null, name string", key=key)
            lake.append(table, named(1, 2))
            lake.append(table, named(3) if key else named(1, 3))
        yield lake


def named(*ids: int) -> list[dict[str, Any]]:
    return [{"id": one, "name": f"n{one}"} for one in ids]


def sequences(lake: fm.Lake, table: str) -> list[tuple[int, int]]:
    found = lake.changes(table).arrow().read_all().to_pylist()
    return sorted((row["id"], row["_seq"]) for row in found)


def news(lake: fm.Lake, table: str, since: int) -> list[int]:
    return sorted(row["id"] for row in lake.changes(table, since).arrow().read_all().to_pylist())


def rewrite(place: Place, table: str, *, more: tuple[int, ...] = (), without: int | None = None) -> None:
    """As an engine does it that puts files together: every row into one file, in a snapshot that says `replace`."""

    def act(one: Table) -> None:
        ids = [*one.scan(selected_fields=("id",)).to_arrow()["id"].to_pylist(), *more]
        ids = [each for each in ids if each != without]
        one.overwrite(pa.table({"id": ids, "name": [f"n{each}" for each in ids]}, schema=SCHEMA))

    with foreign_catalog(place) as catalog:
        before = {snapshot.snapshot_id for snapshot in catalog.load_table(f"default.{table}").metadata.snapshots}
    by_another(place, table, act)
    with foreign_catalog(place) as catalog:
        path = Path(catalog.load_table(f"default.{table}").metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    for snapshot in metadata["snapshots"]:
        if snapshot["snapshot-id"] not in before:
            snapshot["summary"]["operation"] = "replace"
    path.write_text(json.dumps(metadata))


@pytest.mark.parametrize("table", ["people", "events"])
def test_files_that_were_only_written_anew_are_recognised_and_rows_keep_their_sequences(
    place: Place, lake: fm.Lake, table: str
) -> None:
    before, head = sequences(lake, table), lake.catalog.history.head(table).sequence
    rewrite(place, table)
    (planned,) = lake.repair()
    assert (planned.happened, planned.outcome, planned.choice) == ("rewritten", "planned", "revert")
    assert "same rows, by checksum" in planned.detail
    (done,) = lake.repair(apply=True)
    assert (done.outcome, done.rows_added, done.rows_removed) == ("reverted", 0, 0)
    assert sequences(lake, table) == before
    assert news(lake, table, head) == []
    check_lake(lake.catalog)
    # Asked to take it in, the same.
    rewrite(place, table)
    (taken,) = lake.repair(table, choice="accept", apply=True)
    assert (taken.outcome, taken.rows_added, taken.rows_removed) == ("accepted", 0, 0)
    assert (sequences(lake, table), news(lake, table, head)) == (before, [])
    lake.append(table, named(50))
    assert news(lake, table, head) == [50]
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("table", ["people", "events"])
def test_a_rewrite_that_does_not_hold_the_same_rows_is_not_believed(place: Place, lake: fm.Lake, table: str) -> None:
    rewrite(place, table, without=3)
    (planned,) = lake.repair()
    assert (planned.outcome, planned.choice) == ("unclear", None)
    assert "the rows differ" in planned.detail
    assert len(planned.ways) == 2
    with pytest.raises(fm.Invalid):
        lake.repair(table, apply=True)
    assert lake.repair(table, choice="revert", apply=True)[0].outcome == "reverted"
    assert 3 in news(lake, table, 0)


@pytest.mark.parametrize("table", ["people", "events"])
def test_rows_that_were_appended_before_a_rewrite_are_the_only_new_ones(
    place: Place, lake: fm.Lake, table: str
) -> None:
    """The events have a row three times then: twice it is ours, and once it is new."""
    before, head = sequences(lake, table), lake.catalog.history.head(table).sequence
    more = (8, 9) if table == "people" else (8, 1)
    by_another(
        place, table, lambda one: one.append(pa.table({"id": more, "name": [f"n{each}" for each in more]}, SCHEMA))
    )
    rewrite(place, table)
    (planned,) = lake.repair()
    assert (planned.happened, planned.choice, planned.rows_added, planned.rows_removed) == (
        "overwritten",
        "accept",
        2,
        0,
    )
    assert "2 row(s) are new" in planned.detail
    (done,) = lake.repair(apply=True)
    assert done.outcome == "accepted"
    assert news(lake, table, head) == sorted(more)
    assert [row for row in sequences(lake, table) if row[1] <= head] == before
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_rows_that_went_before_a_rewrite_are_taken_in_as_before(place: Place, lake: fm.Lake) -> None:
    head = lake.catalog.history.head("people").sequence
    by_another(place, "people", lambda one: one.delete("id = 2"))
    rewrite(place, "people")
    (done,) = lake.repair(apply=True)
    assert (done.happened, done.outcome) == ("overwritten", "accepted")
    found = lake.changes("people", head).arrow().read_all().to_pylist()
    assert {(row["id"], row["_change"]) for row in found} >= {(2, "delete")}
    assert sorted(row["id"] for row in lake.read_arrow("people").read_all().to_pylist()) == [1, 3]
