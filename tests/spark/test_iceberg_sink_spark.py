"""Units and compactions of another catalog's table through Spark tasks: the same rows as without, and nothing left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark.rows import tasks
from floodmark.sinks.iceberg import stage as iceberg_stage
from floodmark.sinks.iceberg.compact import compact_destination
from floodmark.sinks.iceberg.destination import IcebergDestination
from floodmark.sinks.settings import IcebergSettings
from tests.contract.test_iceberg_sink import PEOPLE, Elsewhere, people, person, refused, ship

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    (tmp_path / "elsewhere").mkdir()
    return Elsewhere(tmp_path / "elsewhere")


@pytest.fixture
def lake(
    spark: SparkSession, elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[fm.Lake]:
    monkeypatch.setattr(tasks, "IN_PROCESS_ROWS_MAX", 0)  # everything is too much for this process
    monkeypatch.setattr(iceberg_stage, "PIECE_BYTES", 1)  # a task for every file
    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        lake.create_table("people", PEOPLE, key=["id"])
        lake.sinks.add(
            "people", "iceberg", tables="people", catalog=elsewhere.properties, where="name != 'hidden'", partition=[]
        )
        yield lake


def test_tasks_stage_rows_carry_others_and_take_keys_out(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    for start in (0, 10, 20):
        lake.append("people", people(*range(start, start + 10)))
    done = ship(lake)
    assert done.rows == 30
    assert elsewhere.names() == dict.fromkeys(range(30), "first")
    assert len(list(elsewhere.table().scan().plan_files())) == 3, "a file of every task"
    lake.merge("people", [person(3, "second"), person(13, "hidden"), person(40, "second")])
    lake.merge("people", people(23, name="second"))
    lake.delete("people", "id in (5, 25)")
    done = ship(lake)
    assert (done.rows, done.tables[0].deletions) == (6, 3)
    gone = {5, 13, 25}
    expected = {number: "first" for number in range(30) if number not in gone}
    assert elsewhere.names() == expected | dict.fromkeys((3, 23, 40), "second")
    assert len(elsewhere.units()) == 2
    assert not elsewhere.unnamed()


def test_rows_that_do_not_fit_are_refused_by_column_and_leave_nothing(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    import pyarrow as pa

    with elsewhere.catalog() as catalog:
        catalog.create_namespace("default")
        # Values decide: the type alone would fit.
        shape = pa.schema(
            [("id", pa.int64()), pa.field("name", pa.string(), nullable=False), ("ts", pa.timestamp("us", "UTC"))]
        )
        catalog.create_table("default.people", shape)
    nameless: list[dict[str, Any]] = [{**person(1), "name": None}]
    lake.sinks.set("people", where=None)
    lake.append("people", nameless)
    error = refused(lake)
    assert error.kind == "Invalid"
    assert "name" in str(error)
    assert elsewhere.table().current_snapshot() is None
    assert not elsewhere.unnamed()


def test_tasks_compact(lake: fm.Lake, elsewhere: Elsewhere) -> None:
    for number in range(6):
        lake.append("people", people(2 * number, 2 * number + 1))
        ship(lake)
    before = elsewhere.rows()
    settings = IcebergSettings(catalog=elsewhere.properties)
    destination = IcebergDestination(settings, lake.catalog.storage, lake.sessions)
    done = compact_destination(destination, "people", 2)
    assert (done.outcome, done.detail["files_in"], done.detail["files_out"]) == ("compacted", 6, 1)
    assert elsewhere.rows() == before
    assert not elsewhere.unnamed()
