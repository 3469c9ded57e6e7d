"""What a chunk was declared to be is checked before its publish: rows, numbers, a manifest with counts or digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks.geometry import Geometry
from floodmark.backfill.chunks.sources import PathSource, SourceContext, bind
from floodmark.ingest.files import unfinished_csv
from floodmark.jobs.record import BackfillRun
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids
from tests.history_world import Numbers, number_rows
from tests.history_world import run as run_spec
from tests.without_spark import NO_SPARK

pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", "id long not null, name string, at long", key=["id"])
        yield lake
        check_lake(lake.catalog)


def run(lake: fm.Lake, source: Any, expect: dict[str, Any], table: str = "events", **options: Any) -> BackfillRun:
    settings = {"chunk": 10, "first": 0, "last": 30, "column": "id", "workers": 1, "order": "oldest", "retries": 2}
    spec = lake.backfill.history_spec("years", source, table, **{**settings, **options}, expect=expect)
    return run_spec(lake, replace(spec, retry_s=0.01))


def failed(found: BackfillRun, message: str, chunk: str = "10..20") -> dict[str, Any]:
    assert found.error is not None
    assert (found.outcome, found.error["message"], found.error["facts"]["chunk"]) == ("failed", message, chunk)
    facts: dict[str, Any] = found.error["facts"]
    return facts


@pytest.mark.parametrize(
    ("expect", "count", "message"),
    [
        ({"rows": 10}, 9, "a chunk has too few rows"),
        ({"rows": 10}, 11, "a chunk has too many rows"),
        ({"min_rows": 10}, 9, "a chunk has too few rows"),
        ({"every_number": True}, 9, "a chunk has too few rows"),
    ],
)
def test_a_chunk_of_other_rows_than_declared_is_not_published(
    lake: fm.Lake, expect: dict[str, Any], count: int, message: str
) -> None:
    source = Numbers(act={("10..20", 1): lambda chunk: (number_rows(chunk) * 2)[:count]})
    failed(run(lake, source, expect), message)
    assert ids(lake) == list(range(10)), "nothing of it is published"
    assert run(lake, source, expect).outcome == "done"
    assert ids(lake) == list(range(30))


def test_what_was_declared_is_kept_with_the_job(lake: fm.Lake) -> None:
    source = Numbers(act={("10..20", 1): lambda chunk: []})
    run(lake, source, {"rows": 10, "every_number": True})
    settings = lake.backfill.show("years")["settings"]
    assert (settings["rows_min"], settings["rows_max"], settings["rows_exact"]) == (10, 10, True)


@pytest.mark.parametrize("table", ["events", "people"])
def test_every_number_wants_each_number_also_where_a_key_makes_rows_one(lake: fm.Lake, table: str) -> None:
    column = "id" if table == "events" else "at"

    def twice(chunk: Any) -> list[dict[str, Any]]:
        found = [{**row, "at": row["id"]} if table == "people" else row for row in number_rows(chunk)]
        return found if chunk.start != 10 else [*found[:-1], found[0] if table == "events" else {**found[9], "at": 10}]

    message = "a chunk has several rows for one number" if table == "events" else "a chunk lacks numbers"
    failed(run(lake, Numbers(rows=twice), {"every_number": True}, table, column=column), message)


# ── a manifest ──


def manifest(folder: Path, **chunks: Any) -> str:
    path = folder / "manifest.json"
    path.write_text(json.dumps({name.replace("_", "..").removeprefix("c"): found for name, found in chunks.items()}))
    return str(path)


def test_a_manifest_says_how_many_rows_each_chunk_has(lake: fm.Lake, tmp_path: Path) -> None:
    short = {("10..20", 1): lambda chunk: number_rows(chunk)[:4]}
    path = manifest(tmp_path, c0_10={"rows": 10}, c10=10, c20_30=10)
    facts = failed(
        run(lake, Numbers(act=short), {"manifest": path}),
        "a chunk has a different number of rows than the manifest declares",
    )
    assert (facts["rows"], facts["wanted"]) == ("4", "10")
    assert ids(lake) == list(range(10))
    assert run(lake, Numbers(), {"manifest": path}).outcome == "done"


def test_a_chunk_that_the_manifest_does_not_name_waits_until_it_does(lake: fm.Lake, tmp_path: Path) -> None:
    path = manifest(tmp_path, c0_10=10)
    failed(run(lake, Numbers(), {"manifest": path}), "the manifest does not list this chunk")
    assert ids(lake) == list(range(10))
    manifest(tmp_path, c0_10=10, c10_20=10, c20_30=10)
    assert run(lake, Numbers(), {"manifest": path}).outcome == "done"


def test_a_manifest_that_is_half_written_is_read_again(lake: fm.Lake, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"0..10": 10, "10')

    def mend(chunk: Any) -> Any:
        manifest(tmp_path, c0_10=10, c10_20=10, c20_30=10)
        return number_rows(chunk)

    assert run(lake, Numbers(act={("0..10", 1): mend}), {"manifest": str(path)}).outcome == "failed"
    manifest(tmp_path, c0_10=10, c10_20=10, c20_30=10)
    assert run(lake, Numbers(), {"manifest": str(path)}).outcome == "done"


def test_the_digest_of_a_chunk_is_that_of_its_files_one_after_the_other(lake: fm.Lake, tmp_path: Path) -> None:
    for start, text in ((0, "a"), (5, "b"), (10, "c"), (15, "")):
        (tmp_path / f"{start}.jsonl").write_text(text)
    geometry = Geometry.of(0, 20, 10)
    source = PathSource(f"{tmp_path}/{{start}}.jsonl", step=5, missing="empty")
    at_work = bind(source, SourceContext(lake.catalog, NO_SPARK, geometry, lambda: None))
    assert isinstance(at_work, PathSource)
    assert at_work.digest(geometry.chunk(0)) == hashlib.sha256(b"ab").hexdigest()
    (tmp_path / "15.jsonl").unlink()
    assert at_work.digest(geometry.chunk(1)) == hashlib.sha256(b"c").hexdigest()


def test_files_of_another_digest_are_not_read(lake: fm.Lake, tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"id": 1, "name": "a"}\n')
    path = manifest(tmp_path, c0_10={"sha256": hashlib.sha256(b"other").hexdigest()})
    # Spark is not even started.
    spec = lake.backfill.history_spec(
        "years", f"{tmp_path}/{{start}}.jsonl", "events", chunk=10, first=0, last=10, expect={"manifest": path}
    )
    failed(run_spec(lake, spec), "the files of a chunk differ from the manifest", "0..10")
    assert ids(lake) == []


def test_a_digest_of_rows_that_are_no_files_is_refused(lake: fm.Lake, tmp_path: Path) -> None:
    path = manifest(tmp_path, c0_10={"sha256": "00"})
    failed(
        run(lake, Numbers(), {"manifest": path}),
        "the manifest has digests of files, but this source has no files",
        "0..10",
    )


@pytest.mark.parametrize(
    ("expect", "options"),
    [
        ({"row": 10}, {}),
        ({"rows": "ten"}, {}),
        ({"every_number": True}, {"column": None}),
        ({"manifest": {}}, {}),
        ({"rows": 5, "min_rows": 6}, {}),
    ],
)
def test_an_expectation_that_says_nothing_makes_no_job(
    lake: fm.Lake, expect: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(fm.Invalid):
        run(lake, Numbers(), expect, **options)
    assert lake.backfill.list() == []


# ── a file that is cut ──


@pytest.mark.parametrize(
    ("name", "text", "whole"),
    [
        ("a.csv", "id,name\n1,a\n2,b\n", True),
        ("a.csv", "id,name\r1,a\r", True),
        ("a.csv", "id,name\n1,a\n2,bee", False),
        ("a.csv", "id,na", False),
        ("a.csv", "", True),
        ("a.csv.gz", "no line break", True),
    ],
)
def test_a_csv_file_cut_inside_its_last_line_is_told_by_its_last_byte(
    tmp_path: Path, name: str, text: str, whole: bool
) -> None:
    (tmp_path / name).write_text(text)
    path = f"{tmp_path}/{name}"
    assert unfinished_csv(NO_SPARK, [f"{tmp_path}/none.csv", path]) == (None if whole else path)
    assert unfinished_csv(NO_SPARK, [f"file://{path}"]) == (None if whole else f"file://{path}")


def test_a_history_refuses_a_cut_csv_file_by_its_name(lake: fm.Lake, tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("id,name\n1,a\n2,bee")
    source, geometry = PathSource(f"{tmp_path}/{{start}}.csv"), Geometry.of(0, 10, 10)
    at_work = bind(source, SourceContext(lake.catalog, SimpleNamespace(get=lambda: None), geometry, lambda: None))  # type: ignore[arg-type]
    with pytest.raises(fm.Invalid, match="the file may be cut there") as refused:
        at_work.read(Geometry.of(0, 10, 10).chunk(0))
    assert (refused.value.facts["path"], refused.value.facts["chunk"]) == (f"{tmp_path}/0.csv", "0..10")
