"""Schedules around drops, branches, redo and partial rows that once lost or doubled rows, or blocked the lake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.catalog.history import drifted_tables
from floodmark.ingest.csv_rows import CsvFiles
from floodmark.ingest.small_files import read_rows
from floodmark.rows.convert import table_shape
from floodmark.rows.schema import table_schema
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.history_world import Numbers, history, run


@pytest.fixture
def place(new_place: Callable[[str], Place]) -> Place:
    return new_place("sqlite")


def before_a_drop(lake: fm.Lake) -> int:
    lake.create_table("t", EVENTS)
    lake.create_table("other", EVENTS)
    lake.append("t", rows(1), batch="a")
    version = lake.history()[0].version
    lake.append("t", rows(2), batch="c")
    lake.drop_table("t")
    return version


def test_rows_that_a_merge_leaves_behind_leave_their_batch_ids_too(place: Place) -> None:
    with place.open(create=True) as lake:
        version = before_a_drop(lake)
        lake.branches.create("b", version=version)
        lake.append("t", rows(10), branch="b", batch="z")
        lake.append("other", rows(7), branch="b")
        assert lake.branches.merge("b", prefer="ours").outcome == "merged"
        lake.branches.delete("b")
        lake.create_table("t", EVENTS)
        assert lake.append("t", rows(10), batch="z").outcome == "committed"
        assert ids(lake, "t") == [10]
        check_lake(lake.catalog)


def test_a_branch_of_a_branch_from_before_a_drop_knows_what_its_parent_knows(place: Place) -> None:
    with place.open(create=True) as lake:
        version = before_a_drop(lake)
        lake.branches.create("b1", version=version)
        lake.append("other", rows(5), branch="b1")
        lake.branches.create("b2", source="b1")
        assert lake.append("t", rows(2), branch="b2", batch="c").outcome == "committed"
        assert lake.append("t", rows(1), branch="b2", batch="a").outcome == "already_committed"
        check_lake(lake.catalog)


def test_a_branch_from_before_a_drop_is_no_drift(place: Place) -> None:
    with place.open(create=True) as lake:
        version = before_a_drop(lake)
        lake.branches.create("b", version=version)
        assert drifted_tables(lake.catalog.database) == {}
        assert lake.status()["health"] == "fine"


def test_a_table_whose_chunks_another_one_took_over_does_not_come_back(place: Place) -> None:
    """The history would be loaded into it again."""
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        run(lake, history(Numbers()))
        loaded = ids(lake)
        lake.drop_table("events")
        lake.undrop("events")
        assert run(lake, history(Numbers())).outcome == "nothing_to_do"
        assert ids(lake) == loaded
        version = lake.history()[0].version
        lake.drop_table("events")
        lake.create_table("events", EVENTS)
        run(lake, history(Numbers()))
        lake.drop_table("events")
        with pytest.raises(fm.Invalid, match="history was loaded into another table"):
            lake.undrop("events", version=version)


def test_rows_of_one_key_with_different_columns_have_no_last_one(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("t", "k long not null, a long, b long, ts long", key=["k"])
        lake.append("t", [{"k": 1, "a": 0, "b": 0, "ts": 0}])
        both = [{"k": 1, "a": 5, "ts": 1}, {"k": 1, "b": 6, "ts": 2}]
        with pytest.raises(fm.Invalid, match="have different columns"):
            lake.merge("t", both, partial=True, on_duplicate="last", order="ts")
        same = [{"k": 1, "a": 5, "ts": 1}, {"k": 1, "a": 6, "ts": 2}]
        lake.merge("t", same, partial=True, on_duplicate="last", order="ts")
        assert lake.read_arrow("t").read_all().to_pylist() == [{"k": 1, "a": 6, "b": 0, "ts": 2}]


UNCLOSED = 'id,name\n1,"abc\n2,def\n3,ghi\n'
SCHEMA = table_schema(EVENTS)
COLUMNS = table_shape(SCHEMA.model_dump_json()).columns


def test_a_quote_that_is_never_closed_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(UNCLOSED)
    with pytest.raises(fm.Invalid) as found:
        CsvFiles([str(file)], COLUMNS).good_rows().read_all()
    assert found.value.facts["line"] == 2
    with pytest.raises(fm.Invalid, match="never closed") as found:
        read_rows("rows.csv", UNCLOSED.encode(), "csv", SCHEMA, (), bytes_max=10**6)
    assert found.value.facts["line"] == 2


def test_what_was_set_aside_is_not_loaded_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,name\n1,x\n")
    (tmp_path / "_bad-rows").mkdir()
    (tmp_path / "_bad-rows/a.csv").write_text("id,name\nx,y\n")
    (tmp_path / "_bad-rows/a.reasons.jsonl").write_text("{}\n")
    assert CsvFiles.local_files([str(tmp_path)]) == [str(tmp_path / "a.csv")]
