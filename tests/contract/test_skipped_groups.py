"""What large files cost a question about a few of their rows: row groups by rows, and readers that skip them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import floodmark as fm
from floodmark.lake import Lake
from floodmark.rows.staging.file_options import GROUP_ROWS_MAX, KEYED_GROUP_ROWS_MAX
from floodmark.storage import local_path

ROWS = 8 * GROUP_ROWS_MAX
COMMITS = 16
CHANGE = ROWS // COMMITS
SCHEMA = "id long, v double"


def rows(first: int, count: int) -> pa.Table:
    chance = np.random.default_rng(first)
    ids = pa.array(np.arange(first, first + count))
    return pa.table({"id": ids, "v": chance.random(count)})


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    with fm.open(tmp_path / "lake", create=True) as found:
        yield found


def bytes_read(lake: Lake, question: Callable[[], pa.Table]) -> tuple[pa.Table, int]:
    # What the first question reads of manifests is remembered.
    question()
    before = lake.catalog.storage.counters.snapshot()
    found = question()
    return found, lake.catalog.storage.counters.difference(before).bytes_read


def files(lake: Lake, table: str) -> list[str]:
    paths = lake.catalog.files.data_files(lake.catalog.history.head(table))
    return [local_path(path) or "" for path in paths]


def test_a_value_of_a_sorted_column_costs_one_row_group(lake: Lake) -> None:
    lake.create_table("events", SCHEMA, sort=["id"])
    lake.append("events", rows(0, ROWS).sort_by([("v", "ascending")]))
    every, whole_bytes = bytes_read(lake, lambda: lake.scan("events").to_arrow())
    one, one_bytes = bytes_read(lake, lambda: lake.scan("events", where=f"id = {ROWS // 2}").to_arrow())
    assert (every.num_rows, one["id"].to_pylist()) == (ROWS, [ROWS // 2])
    assert one_bytes < whole_bytes / 5


def test_a_key_costs_one_row_group_and_every_group_can_be_told_apart(lake: Lake) -> None:
    lake.create_table("users", "id long not null, v double", key=["id"], sort=["id"])
    lake.append("users", rows(0, ROWS))
    (path,) = files(lake, "users")
    metadata = pq.read_metadata(path)
    assert max(metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)) <= KEYED_GROUP_ROWS_MAX
    # As any other reader finds them, by statistics alone.
    (fragment,) = ds.dataset(path).get_fragments()
    assert len(fragment.subset(ds.field("id") == 12_345).row_groups) == 1
    assert len(fragment.subset(ds.field("id") < 0).row_groups) == 0
    assert len(fragment.row_groups) == ROWS // KEYED_GROUP_ROWS_MAX


def test_what_changed_costs_little_after_a_compaction_too(lake: Lake) -> None:
    lake.create_table("events", SCHEMA)
    commits = [lake.append("events", rows(CHANGE * number, CHANGE)) for number in range(COMMITS)]
    since, before = commits[8].table("events").sequence, commits[-1].version
    lake.maintain.compact("events", files_min=2)
    (path,) = files(lake, "events")
    asked = [
        bytes_read(
            lake, lambda at=at: lake.changes("events", since=since, until=since + 1, version=at).arrow().read_all()
        )
        for at in (before, lake.history()[0].version)
    ]
    (plain, plain_bytes), (gathered, gathered_bytes) = asked
    assert gathered.sort_by("id").equals(plain.sort_by("id"))
    assert plain.num_rows == CHANGE
    size_bytes = Path(path).stat().st_size
    assert plain_bytes < gathered_bytes < size_bytes / 3, "a group or two, and the footer"
