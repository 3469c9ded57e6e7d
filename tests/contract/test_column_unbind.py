"""What cannot be computed keeps nobody out: its column is unbound, by itself or by hand, and may be bound anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table.metadata import TableMetadata

import floodmark as fm
from floodmark.cli.main import main
from floodmark.commit.fills import FILL_PREFIX, Fill, fills_of
from floodmark.errors import Busy, Invalid, NotFound
from floodmark.rows.rewriting import fill as filling
from floodmark.rows.schema import table_schema
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, rows

pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def sqlite_lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    """For what does not depend on the database."""
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("events", EVENTS)
        yield lake


def backfill(lake: fm.Lake, expression: str = "name", column: str = "nick", **options: Any) -> Any:
    return lake.backfill.column("events", column, expression, **{"pause": "0ms", **options})


def nicks(lake: fm.Lake, column: str = "nick") -> dict[int, Any]:
    return {row["id"]: row.get(column) for row in lake.read_arrow("events").read_all().to_pylist()}


def fills(lake: fm.Lake) -> list[tuple[str, str]]:
    metadata = metadata_of(lake)
    return [(fill.column, fill.expression) for fill in fills_of(metadata.properties, metadata.schema())]


def metadata_of(lake: fm.Lake) -> TableMetadata:
    return lake.catalog.files.metadata(lake.catalog.history.head("events").metadata_location)


def cancelled_at_once(lake: fm.Lake, **options: Any) -> Any:
    """A column that is there, of which no row is filled."""
    return backfill(lake, **options, progress=lambda processed, total: lake.backfill.cancel("events.nick") and None)


class Broken:
    """What an expression does that fails on a row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, good: int = 0) -> None:
        def fail(*given: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls > good:
                raise Invalid("a row cannot be computed", advice="Correct it.")
            return real(*given, **options)

        self.calls, real = 0, filling.fill_source
        monkeypatch.setattr(filling, "fill_source", fail)


# ── unbinding ──


def test_an_unbound_column_is_as_any_other(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    assert cancelled_at_once(lake).outcome == "cancelled"
    lake.append("events", rows(3))
    commit = lake.backfill.unbind("events", "NICK")
    assert (commit.kind, fills(lake)) == ("add_column", [])
    lake.append("events", rows(4))
    lake.append("events", [{"id": 5, "name": "e", "nick": "mine"}])
    assert nicks(lake) == {1: None, 2: None, 3: "row 3", 4: None, 5: "mine"}
    job = lake.backfill.show("events.nick")
    assert (job["status"], "unbound" in job["error"]["message"]) == ("cancelled", True)
    assert lake.filled_columns("events") == ()
    # Files with and without it are put together now.
    assert len(lake.catalog.files.data_files(lake.catalog.history.head("events"))) == 4
    lake.maintain.compact("events", files_min=2)
    assert len(lake.catalog.files.data_files(lake.catalog.history.head("events"))) == 1
    assert nicks(lake) == {1: None, 2: None, 3: "row 3", 4: None, 5: "mine"}
    check_lake(lake.catalog)


def test_a_done_job_stays_done(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    assert backfill(lake).outcome == "done"
    lake.backfill.unbind("events", "nick")
    lake.append("events", rows(2))
    assert (lake.backfill.show("events.nick")["status"], nicks(lake)) == ("done", {1: "row 1", 2: None})
    with pytest.raises(Invalid):
        backfill(lake)
    check_lake(lake.catalog)


def test_what_is_not_bound_or_at_work_is_not_unbound(lake: fm.Lake, place: Place) -> None:
    lake.append("events", rows(1))
    version = lake.status()["version"]
    for table, column, error in (("events", "name", Invalid), ("events", "x", Invalid), ("nope", "x", NotFound)):
        with pytest.raises(error):
            lake.backfill.unbind(table, column)
    assert lake.status()["version"] == version
    told: list[str] = []

    def unbind() -> None:
        with place.open() as other, pytest.raises(Busy) as busy:
            other.backfill.unbind("events", "nick")
        told.append(busy.value.kind)

    with at("fill.begun", unbind):
        assert backfill(lake).outcome == "done"
    assert (told, fills(lake)) == (["Busy"], [("nick", "name")])


# ── an expression that fails ──


def test_what_cannot_be_computed_for_any_row_lets_writers_by(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.append("events", rows(1, 2))
    with monkeypatch.context() as patch:
        Broken(patch)
        done = backfill(lake)
    assert (done.outcome, done.exit_code, done.job["status"], done.job["rows"]) == ("failed", 2, "failed", 0)
    assert "writes leave the column out" in done.error["advice"]
    assert fills(lake) == []
    lake.append("events", rows(3))
    assert nicks(lake) == {1: None, 2: None, 3: None}
    check_lake(lake.catalog)


def test_once_rows_are_filled_the_column_stays_bound_and_the_way_out_is_told(
    lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.append("events", rows(1))
    lake.append("events", rows(2))
    with monkeypatch.context() as patch:
        Broken(patch, good=1)
        done = backfill(lake, batch_rows=1)
    assert (done.outcome, done.job["rows"], fills(lake)) == ("failed", 1, [("nick", "name")])
    assert "floodmark backfill unbind events nick" in done.error["advice"]
    lake.backfill.unbind("events", "nick")
    with pytest.raises(Invalid, match="was unbound"):
        backfill(lake, "id")
    check_lake(lake.catalog)


# ── bound anew ──


@pytest.mark.parametrize("expression", ["name", "'x'"], ids=["same", "other"])
def test_an_unbound_column_that_no_file_holds_is_bound_anew(lake: fm.Lake, expression: str) -> None:
    lake.append("events", rows(1, 2))
    assert cancelled_at_once(lake).outcome == "cancelled"
    field = metadata_of(lake).schema().find_field("nick").field_id
    lake.backfill.unbind("events", "nick")
    done = backfill(lake, expression)
    assert (done.outcome, done.job["rows"], done.job["settings"]["expression"]) == ("done", 2, expression)
    assert (fills(lake), metadata_of(lake).schema().find_field("nick").field_id) == ([("nick", expression)], field)
    lake.append("events", rows(3))
    assert nicks(lake) == {n: f"row {n}" if expression == "name" else "x" for n in (1, 2, 3)}
    check_lake(lake.catalog)


def test_another_type_or_a_file_that_holds_it_needs_another_name(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    assert cancelled_at_once(lake).outcome == "cancelled"
    lake.backfill.unbind("events", "nick")
    with pytest.raises(Invalid, match="another type"):
        backfill(lake, "7")
    lake.append("events", rows(2))
    with pytest.raises(Invalid, match="was unbound"):
        backfill(lake, "name")
    assert (fills(lake), nicks(lake)) == ([], {1: None, 2: None})


def test_what_was_rewritten_while_it_was_unbound_does_not_pass_for_filled(lake: fm.Lake, place: Place) -> None:
    for number in (1, 2, 3):
        lake.append("events", rows(number))
    assert cancelled_at_once(lake).outcome == "cancelled"
    lake.backfill.unbind("events", "nick")

    def bind() -> None:
        with place.open() as other:
            assert cancelled_at_once(other).outcome == "cancelled"

    with at("compact.rewritten", bind):
        (record,) = lake.maintain.compact("events", files_min=2).records
    assert (record.outcome, fills(lake)) == ("conflict", [("nick", "name")])
    assert backfill(lake).job["rows"] == 3
    assert nicks(lake) == {1: "row 1", 2: "row 2", 3: "row 3"}
    check_lake(lake.catalog)


def test_a_file_that_comes_while_it_is_bound_anew_is_not_taken_for_filled(lake: fm.Lake, place: Place) -> None:
    lake.append("events", rows(1))
    assert cancelled_at_once(lake).outcome == "cancelled"
    lake.backfill.unbind("events", "nick")
    with place.open() as other, at("add_column.sealed", lambda: other.append("events", rows(2)) and None):
        done = backfill(lake)
    assert (done.outcome, done.exit_code, fills(lake), nicks(lake)) == ("failed", 2, [], {1: None, 2: None})
    check_lake(lake.catalog)


# ── names and properties ──


def test_a_column_is_needed_if_it_is_named_as_a_whole_word() -> None:
    fill, other, schema = Fill(5, "b", "upper(names)"), Fill(4, "name", "x"), table_schema("name string, b string")
    assert filling._with_needed([fill], [other], schema) == (fill,)
    named = Fill(5, "b", "upper(`NAME`)")
    assert filling._with_needed([named], [other], schema) == (other, named)


def test_properties_that_bind_a_column_are_floodmarks_own(sqlite_lake: fm.Lake, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="own"):
        sqlite_lake.create_table("t", "id long", properties={f"{FILL_PREFIX}1": "{}"})
    sqlite_lake.create_table("t", "id long", properties={"mine": "x"})


def test_an_adopted_table_binds_no_column(sqlite_lake: fm.Lake, tmp_path: Path) -> None:
    from tests.contract.test_compact import foreign_table

    bound = {f"{FILL_PREFIX}1": '{"column": "id", "expression": "7"}'}
    location = foreign_table(tmp_path, pa.schema([("id", pa.int64())]), [pa.table({"id": [1]})], bound, {})
    sqlite_lake.adopt("old", location)
    assert sqlite_lake.filled_columns("old") == ()


def test_the_command_unbinds(sqlite_lake: fm.Lake, capsys: pytest.CaptureFixture[str]) -> None:
    sqlite_lake.append("events", rows(1))
    assert backfill(sqlite_lake).outcome == "done"
    with suppress(SystemExit):
        main(["--lake", sqlite_lake.location, "--json", "backfill", "unbind", "events", "nick"])
    assert json.loads(capsys.readouterr().out)["outcome"] == "unbound"
    assert fills(sqlite_lake) == []
