"""A repair by Spark tasks, and files of the lake that Spark cannot read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import floodmark as fm
from floodmark.rows import tasks
from floodmark.rows.reading.scan import scan
from floodmark.rows.sql.query import stream
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, rows
from tests.foreign_writer import by_another, theirs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def test_what_a_retried_task_of_a_repair_left_is_deleted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that Spark ran twice wrote its deletions file twice; the repair names one, the other has to go."""
    place = Place(str(tmp_path / "lake"), None)
    with fm.open(place.path, create=True, spark=spark) as lake:
        lake.create_table("people", "id long not null, name string", key=["id"])
        lake.append("people", [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
        by_another(place, "people", lambda table: table.overwrite(theirs(k2="bee"), "id > 0"))
        monkeypatch.setattr(tasks, "IN_PROCESS_ROWS_MAX", 0)
        copies: list[Path] = []

        def run_twice() -> None:
            (operation,) = lake.catalog.journal.active
            (written,) = Path(place.path, "tables").glob(f"*/data/{operation}/*")
            copies.append(written.with_name("second-" + written.name))
            copies[0].write_bytes(written.read_bytes())

        with at("repair.rewritten", run_twice):
            (done,) = lake.repair("people", choice="accept", apply=True)
        assert done.outcome == "accepted"
        assert not copies[0].exists()
        assert lake.maintain.sweep(grace="0s", deep=True).records[-1].detail["leftovers"] == 0
        check_lake(lake.catalog)


# ── files that Spark cannot read ──


def by_spark(lake: fm.Lake) -> list[object]:
    return list(stream(lake.sql("select * from events"), None))


def by_tasks(lake: fm.Lake) -> list[object]:
    catalog = lake.catalog
    head = catalog.history.head("events")
    schema = catalog.files.metadata(head.metadata_location).schema()
    return list(stream(scan(lake.sessions.get(), catalog.files.data_files(head), schema, arrow=True), None))


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[fm.Lake]:
    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(*range(100)))
        yield lake


def data_file(lake: fm.Lake) -> Path:
    (path,) = lake.catalog.files.data_files(lake.catalog.history.head("events"))
    return Path(path.removeprefix("file://"))


@pytest.mark.parametrize("read", [by_spark, by_tasks])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_a_missing_or_truncated_data_file_is_corrupt_through_spark(
    lake: fm.Lake, read: Callable[[fm.Lake], list[object]], damage: str
) -> None:
    path = data_file(lake)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:200] if damage == "truncated" else b"")
    with pytest.raises(fm.Corrupt) as caught:
        read(lake)
    assert caught.value.facts["file"].endswith(path.name)
    assert "doctor" in caught.value.advice


def test_a_data_file_that_goes_after_the_query_was_planned_is_corrupt_through_spark(lake: fm.Lake) -> None:
    planned: DataFrame = lake.sql("select * from events where id > 3")
    data_file(lake).unlink()
    with pytest.raises(fm.Corrupt):
        list(stream(planned, None))


def test_a_bad_file_of_the_user_is_not_called_damage_of_the_lake(lake: fm.Lake, tmp_path: Path) -> None:
    from floodmark.rows.failures import spark_failures

    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"not Parquet at all")
    with pytest.raises(fm.FloodmarkError) as caught, spark_failures("these files cannot be read"):
        lake.sessions.get().read.parquet(str(bad)).collect()
    assert not isinstance(caught.value, fm.Corrupt)
