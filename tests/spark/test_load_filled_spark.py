"""Files that lack a column which the table fills by itself: it is filled, and not taken for null."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import floodmark as fm
from floodmark.backfill.chunks.sources import PathSource
from floodmark.ingest.files import read_files
from floodmark.rows.schema import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES = {
    "lacking.jsonl": '{"id": 1, "name": "a"}\n{"id": 2, "name": "b"}\n',
    "having.jsonl": '{"id": 3, "name": "c", "tag": "own"}\n{"id": 4, "name": "d"}\n',
    "lacking.csv": "id,name\n5,e\n",
    "having.csv": "id,name,tag\n6,f,own\n",
}
FILLED = {1: "new", 2: "new", 3: "own", 4: None, 5: "new", 6: "own"}


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> fm.Lake:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    lake = fm.open(tmp_path / "lake", create=True, spark=spark)
    lake.create_table("events", "id long not null, name string")
    assert lake.backfill.column("events", "tag", "'new'").outcome == "done"
    return lake


def test_a_load_leaves_out_what_the_table_fills(lake: fm.Lake, tmp_path: Path, spark: SparkSession) -> None:
    for name in FILES:
        columns, kind = spark_schema(lake.schema("events")), name.rpartition(".")[2].replace("jsonl", "json")
        filled = lake.filled_columns("events")
        lake.append("events", read_files(spark, [str(tmp_path / name)], kind, columns, filled=filled))
    found = lake.read_arrow("events").read_all().to_pylist()
    assert {row["id"]: row["tag"] for row in found} == FILLED


def test_a_history_of_files_leaves_out_what_the_table_fills(lake: fm.Lake, tmp_path: Path) -> None:
    (tmp_path / "part-0.jsonl").write_text(FILES["lacking.jsonl"])
    source = PathSource(f"{tmp_path}/part-{{number}}.jsonl")
    done = lake.backfill.history("years", source, "events", first=0, last=10, chunk=10, column="id")
    assert (done.outcome, done.job["rows"]) == ("done", 2)
    assert {row["tag"] for row in lake.read_arrow("events").read_all().to_pylist()} == {"new"}
