"""What a question about changes costs: as much as is new, whatever the table's size and its history.

Counted by the storage's own counters in a lake that was just opened, by a process that forgot what it had read. The
full sizes of the goals (1 M and 20 M rows) are measured by `make bench`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import floodmark as fm
from floodmark.commit.file_columns import REMEMBERED
from tests.conftest import Place

CHANGED = 1_000
ROWS_PER_FILE = 5_000


def rows(keys: np.ndarray, word: str) -> pa.Table:
    return pa.table({"id": keys, "name": [f"{word} {key}" for key in keys.tolist()]})


def fill(lake: fm.Lake, table: str, files: int) -> None:
    lake.create_table(table, "id long not null, name string", key=["id"])
    with lake.transaction("fill") as tx:
        for number in range(files):
            start = number * ROWS_PER_FILE
            tx.append(table, rows(np.arange(start, start + ROWS_PER_FILE), "row"))


def cost(place: Place, table: str, since: int) -> tuple[int, int, int]:
    """Rows, files opened and bytes read for what changed since, from a lake that remembers nothing."""
    REMEMBERED.clear()
    with place.open(read_only=True) as lake:
        counters = lake.catalog.storage.counters
        found = lake.changes(table, since).arrow().read_all()
        opened = sum(counters.calls.get(verb, 0) for verb in ("open_input", "read"))
        return found.num_rows, opened, counters.bytes_read


def change(lake: fm.Lake, table: str, first: int) -> int:
    """New rows; returns the sequence before them."""
    before = lake.changes(table).until
    lake.append(table, rows(np.arange(first, first + CHANGED), "new"))
    return before


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(str(tmp_path_factory.mktemp("cost") / "lake"), None)
    with place.open(create=True) as lake:
        fill(lake, "small", 2)
        fill(lake, "large", 40)
    return place


def within(one: int, other: int, part: float) -> bool:
    return abs(one - other) <= part * max(one, other)


def test_the_cost_of_what_changed_does_not_follow_the_table(place: Place) -> None:
    with place.open() as lake:
        marks = {table: change(lake, table, 10_000_000) for table in ("small", "large")}
    small, large = (cost(place, table, marks[table]) for table in ("small", "large"))
    assert small[0] == large[0] == CHANGED
    assert small[1] == large[1], "as many files are opened"
    assert within(small[2], large[2], 0.2), (small, large)
    REMEMBERED.clear()
    with place.open(read_only=True) as lake:
        everything = lake.changes("large")
        everything.arrow().read_all()
        assert lake.catalog.storage.counters.bytes_read > 5 * large[2], "the measure can see a whole table"


def test_a_rewritten_history_does_not_make_later_changes_dearer(place: Place) -> None:
    with place.open() as lake:
        plain = cost(place, "large", change(lake, "large", 20_000_000))
        for turn in range(3):
            # Some rows of every file change, so every file is rewritten: by now all of the history is in settled files.
            keys = np.arange(turn, 40 * ROWS_PER_FILE, 500)
            touched = lake.merge("large", rows(keys, f"turn {turn}"))
            assert touched.tables[0].rows_updated == len(keys)
        rewritten = cost(place, "large", change(lake, "large", 30_000_000))
    assert rewritten[0] == plain[0] == CHANGED
    assert within(rewritten[2], plain[2], 0.2), (plain, rewritten)
    assert rewritten[1] <= plain[1] + 1


def test_what_a_scattered_merge_changed_is_read_from_its_new_rows_alone(place: Place) -> None:
    with place.open() as lake:
        keys = np.arange(7, 40 * ROWS_PER_FILE, 200)
        before = lake.merge("large", rows(keys, "first")).tables[0].sequence
        lake.merge("large", rows(keys + 1, "second"))
    found, _, size_bytes = cost(place, "large", before)
    assert found == len(keys)
    with place.open(read_only=True) as lake:
        head = lake.catalog.history.head("large")
        assert size_bytes < head.size_bytes / 4, "the carried rows are not read"


def test_the_same_change_costs_the_same_after_everything_before_it_was_rewritten(place: Place) -> None:
    with place.open() as lake:
        mark = change(lake, "large", 60_000_000)
        before = cost(place, "large", mark)
        lake.delete("large", "id in (" + ", ".join(str(9 + number * 5000) for number in range(40)) + ")")
        until = lake.changes("large").until
        REMEMBERED.clear()
        with place.open(read_only=True) as reader:
            found = reader.changes("large", mark, until - 1).arrow().read_all()
            rewritten = reader.catalog.storage.counters.bytes_read
    assert found.num_rows == before[0] == CHANGED
    assert within(rewritten, before[2], 0.2), (before, rewritten)


def test_nothing_new_reads_no_data_file(place: Place) -> None:
    with place.open(read_only=True) as lake:
        head = lake.catalog.history.head("large")
        answer = lake.changes("large", head.sequence)
        assert answer.empty
        assert lake.catalog.storage.counters.total == 0, "the catalog alone answers"
        assert answer.arrow().read_all().num_rows == 0
        # The table's metadata, for its schema; no list, no manifest, no data.
        assert lake.catalog.storage.counters.total == 1


def test_a_reader_that_asks_more_often_reads_less_each_time(place: Place) -> None:
    with place.open() as lake:
        start = change(lake, "small", 40_000_000)
        middle = change(lake, "small", 50_000_000)
    whole = cost(place, "small", start)
    last = cost(place, "small", middle)
    assert (whole[0], last[0]) == (2 * CHANGED, CHANGED)
    assert last[2] < whole[2]
