"""Files of a history that are cut, and files that a manifest names by their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, ids

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from floodmark.jobs.record import BackfillRun


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Iterator[fm.Lake]:
    with fm.open(tmp_path / "lake", create=True, actor="test", spark=spark) as lake:
        lake.create_table("events", EVENTS)
        yield lake
        check_lake(lake.catalog)


def whole(kind: str, folder: Path) -> bytes:
    if kind == "csv":
        return b"id,name\n1,one\n2,two\n"
    if kind == "jsonl":
        return b'{"id": 1, "name": "one"}\n{"id": 2, "name": "two"}\n'
    pq.write_table(pa.table({"id": [1, 2], "name": ["one", "two"]}), folder / "made")
    return (folder / "made").read_bytes()


def run(lake: fm.Lake, path: str, **options: object) -> BackfillRun:
    source = fm_source(path, **options)
    settings = {"chunk": 10, "first": 0, "last": 10, "workers": 1, "retries": 1}
    return lake.backfill.history("years", source, "events", **settings)  # type: ignore[arg-type]


def fm_source(path: str, **options: object) -> object:
    from floodmark.backfill.chunks.sources import PathSource

    return PathSource(path, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_file_cut_inside_its_last_line_is_refused_in_every_format(lake: fm.Lake, tmp_path: Path, kind: str) -> None:
    data, path = whole(kind, tmp_path), tmp_path / f"0.{kind}"
    path.write_bytes(data[:-2])
    found = run(lake, f"{tmp_path}/{{start}}.{kind}")
    assert (found.outcome, ids(lake)) == ("failed", [])
    assert found.error is not None
    assert found.error["facts"]["chunk"] == "0..10"
    path.write_bytes(data)
    assert run(lake, f"{tmp_path}/{{start}}.{kind}").outcome == "done"
    assert ids(lake) == [1, 2]


def test_a_cut_csv_file_that_a_pattern_finds_is_refused_by_its_name_or_accepted_on_demand(
    lake: fm.Lake, tmp_path: Path
) -> None:
    (tmp_path / "0-a.csv").write_text("id,name\n1,one\n")
    (tmp_path / "0-b.csv").write_text("id,name\n2,tw")
    found = run(lake, f"{tmp_path}/{{start}}-*.csv")
    assert found.error is not None
    assert (found.outcome, found.error["kind"]) == ("failed", "Invalid")
    assert found.error["facts"]["path"].endswith("/0-b.csv")
    assert run(lake, f"{tmp_path}/{{start}}-*.csv", unfinished="accept").outcome == "done"
    assert ids(lake) == [1, 2]


def test_files_of_the_digest_and_the_rows_of_the_manifest_are_loaded(lake: fm.Lake, tmp_path: Path) -> None:
    data = whole("csv", tmp_path)
    (tmp_path / "0.csv").write_bytes(data)
    named = {"0..10": {"sha256": hashlib.sha256(data).hexdigest(), "rows": 2}}
    (tmp_path / "manifest").write_text(json.dumps(named))
    settings = {"chunk": 10, "first": 0, "last": 10, "expect": {"manifest": str(tmp_path / "manifest")}}
    assert lake.backfill.history("years", f"{tmp_path}/{{start}}.csv", "events", **settings).outcome == "done"
    assert ids(lake) == [1, 2]
