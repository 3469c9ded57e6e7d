"""Repair of what another writer did not say: sequences that nobody counted, names that it left in the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import floodmark as fm
from floodmark.commit.live_files import live_files
from floodmark.repair.examine import examine_lake
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.foreign_writer import by_another, foreign_catalog, theirs

pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", "id long not null, name string")
        lake.append("people", [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
        yield lake
        check_lake(lake.catalog)


def changes(lake: fm.Lake, since: int) -> list[Any]:
    return sorted(row["id"] for row in lake.changes("people", since).arrow().read_all().to_pylist())


def uncounted(table: Any) -> None:
    """The other writer counts no `_seq`, and writes some of its own."""
    with table.transaction() as change:
        change.set_properties({"write.metadata.metrics.column._seq": "none"})
    old = pa.array([1, 1], pa.int64())
    table.overwrite(theirs(k8="h", k9="i").append_column("_seq", old))


def test_sequences_that_nobody_counted_do_not_hide_rows(lake: fm.Lake, place: Place) -> None:
    before = lake.catalog.history.head("people").sequence
    by_another(place, "people", uncounted)
    (done,) = lake.repair("people", apply=True)
    assert (done.outcome, done.rows_added) == ("accepted", 2)
    assert changes(lake, before) == [8, 9]
    head = lake.catalog.history.head("people")
    schema = lake.catalog.files.metadata(head.metadata_location).schema()
    assert all(file.fresh for file in live_files(lake.catalog.files, head, schema))


def without_counts(table: Any) -> None:
    """No `_seq` in the file at all, which its footer says."""
    with table.transaction() as change:
        change.set_properties({"write.metadata.metrics.column._seq": "none"})
    table.append(theirs(k8="h"))


def test_rows_without_sequences_come_in_either_way(lake: fm.Lake, place: Place) -> None:
    before = lake.catalog.history.head("people").sequence
    by_another(place, "people", without_counts)
    lake.repair("people", apply=True)
    assert changes(lake, before) == [8]


def test_a_table_that_was_renamed_is_told_with_its_other_name(lake: fm.Lake, place: Place) -> None:
    with foreign_catalog(place) as catalog:
        catalog.rename_table("default.people", "default.persons")
    (planned,) = lake.repair()
    assert (planned.happened, planned.choice) == ("dropped", "revert")
    assert "persons" in planned.detail
    assert "without deleting files" in " ".join(planned.ways)
    (check,) = (check for check in examine_lake(lake.catalog) if check.name == "table people")
    assert not check.passed
    assert "persons" in check.detail
    lake.repair(apply=True)
    with foreign_catalog(place) as catalog:
        catalog.drop_table("default.persons")
    assert changes(lake, 0) == [1, 2]


def test_a_table_that_was_dropped_has_no_other_name(lake: fm.Lake, place: Place) -> None:
    with foreign_catalog(place) as catalog:
        catalog.drop_table("default.people")
    (planned,) = lake.repair()
    assert "dropped or renamed" in planned.detail
    lake.repair(apply=True)


def test_files_that_were_deleted_with_the_table_are_not_put_back(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", "id long not null, name string")
        lake.append("people", [{"id": 1, "name": "a"}])
        with foreign_catalog(place) as catalog:
            catalog.purge_table("default.people")
        with pytest.raises(fm.Corrupt, match="files of the table are gone"):
            lake.repair("people", apply=True)
        assert lake.status()["drifted"] == ["people"]


def test_what_is_put_aside_is_told_also_if_it_is_not_clear_what_it_is(lake: fm.Lake, place: Place) -> None:
    def widened(table: Any) -> None:
        from pyiceberg.types import LongType

        with table.update_schema() as update:
            update.add_column("more", LongType())
        table.append(theirs(k8="h").append_column("more", pa.array([1], pa.int64())))

    by_another(place, "people", widened)
    (planned,) = lake.repair()
    back = next(way for way in planned.ways if way.startswith("--revert"))
    assert "stay on disk, unreferenced" in back
    with foreign_catalog(place) as catalog:
        assert catalog.load_table("default.people").metadata_location in back
    lake.repair("people", choice="revert", apply=True)


def test_a_name_that_another_engine_took_is_told(lake: fm.Lake, place: Place) -> None:
    with foreign_catalog(place) as catalog:
        catalog.create_table("default.strange", theirs(k8="h").schema)
        try:
            with pytest.raises(fm.Invalid, match="another engine made a table of this name"):
                lake.create_table("strange", "id long")
        finally:
            catalog.drop_table("default.strange")
