"""Large files of a drop folder go through Spark: the same rows, the same refusals, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import floodmark as fm
from floodmark.ingest.drop import Drop, DropRun
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, ids

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Iterator[fm.Lake]:
    with fm.open(tmp_path / "lake", create=True, actor="test", spark=spark) as lake:
        lake.create_table("events", EVENTS)
        yield lake
        check_lake(lake.catalog)


def test_files_that_are_too_large_for_this_process_are_read_by_spark(lake: fm.Lake, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.csv").write_text("name,id\nx,1\n")
    (folder / "b [1].jsonl").write_text('{"id": 2, "name": "y"}\n{"id": 3}\n')
    (folder / "bad.csv").write_text("id,name\n4,x\nfive,y\n")
    source = Drop(lake, "src", folder, "events", settle_s=0.0, small_bytes=0)
    assert source.run() == DropRun(loaded=2, rows=3, failed=1, set_aside=1)
    assert ids(lake) == [1, 2, 3]
    reason = json.loads((folder / ".failed" / "bad.csv.reason.json").read_text())
    assert (reason["error"]["facts"]["column"], reason["error"]["facts"]["count"]) == ("id", "1")
    # Known again by what is in it, whichever way it is read.
    (folder / "a.csv").write_text("name,id\nx,1\n")
    assert Drop(lake, "src", folder, "events", settle_s=0.0).run() == DropRun(loaded=1, set_aside=1)
    assert ids(lake) == [1, 2, 3]
