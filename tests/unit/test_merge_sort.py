"""Rows sorted within bounds: the order of pyarrow's own sort, whatever had to go to disk and how often."""

from __future__ import annotations

import errno
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from floodmark.errors import Unavailable
from floodmark.rows.compare import same_rows
from floodmark.rows.rewriting.merge_sort import FAN_IN_MAX, sorted_batches

UP, DOWN = "ascending", "descending"
Keys = list[tuple[str, str]]


@dataclass
class Spills:
    """The temporary files that were made, in a folder that shows what is left of them."""

    folder: Path
    files: list[Any] = field(default_factory=list)
    open_max: int = 0

    def open(self) -> int:
        return sum(not file.closed for file in self.files)


@pytest.fixture
def spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spills:
    seen = Spills(tmp_path)
    make = tempfile.TemporaryFile

    def recorded(*args: Any, **options: Any) -> Any:
        file = make(*args, **options)
        seen.files.append(file)
        seen.open_max = max(seen.open_max, seen.open())
        return file

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", recorded)
    return seen


def random_rows(count: int, seed: int = 0) -> pa.Table:
    chance = random.Random(seed)

    def some(values: list[Any]) -> list[Any]:
        return [chance.choice(values) for _ in range(count)]

    floats = [0.0, -0.0, math.nan, None, 1.5, -math.inf, math.inf, -2.0]
    return pa.table(
        {
            "n": pa.array([chance.randrange(-1000, 1000) for _ in range(count)]),
            "few": pa.array(some([1, 2, 3, None])),
            "f": pa.array(some(floats), pa.float64()),
            "s": pa.array(some(["", "a", "aé", "東京", "b" * 40, None])),
            "ok": pa.array(some([True, False, None])),
            "ts": pa.array([chance.randrange(-(2**62), 2**62) for _ in range(count)], pa.timestamp("us")),
            "d": pa.array([chance.randrange(-50, 50) for _ in range(count)]).cast(pa.decimal128(20, 0)),
            "b": pa.array(some([b"", b"\x00", b"\xff", None]), pa.binary()),
            "l": pa.array([[at] * (at % 3) for at in range(count)], pa.list_(pa.int64())),
            "at": range(count),
        }
    )


def batches_of(table: pa.Table, size: int) -> Iterator[pa.RecordBatch]:
    return iter(table.combine_chunks().to_batches(max_chunksize=size))


def sort(table: pa.Table, keys: Keys, bytes_max: int, batch_rows: int = 50) -> pa.Table:
    found = list(sorted_batches(batches_of(table, batch_rows), keys, bytes_max))
    return pa.Table.from_batches(found, table.schema)


def in_order(table: pa.Table, keys: Keys) -> list[int]:
    """The numbers of the rows as pyarrow orders them; equal ones as they came."""
    return table.sort_by([*keys, ("at", UP)])["at"].to_pylist()  # type: ignore[no-any-return]


# ── the order ──


@pytest.mark.parametrize("bytes_max", [20_000, 100_000_000])
@pytest.mark.parametrize(
    "keys",
    [
        [("n", UP)],
        [("n", DOWN)],
        [("few", UP)],
        [("f", UP)],
        [("f", DOWN)],
        [("s", DOWN), ("ts", UP)],
        [("ok", DOWN), ("f", UP), ("b", DOWN)],
        [("d", UP), ("few", DOWN), ("s", UP)],
        [("ts", UP)],
    ],
    ids=lambda keys: " ".join(f"{name}:{way}" for name, way in keys),
)
def test_rows_come_in_the_order_of_pyarrows_sort(keys: Keys, bytes_max: int, spills: Spills) -> None:
    table = random_rows(600)
    found = sort(table, keys, bytes_max)
    assert found["at"].to_pylist() == in_order(table, keys)
    assert same_rows(found, table.take(found["at"])).all()
    assert bool(spills.files) is (bytes_max < 1_000_000)


def test_more_runs_than_can_be_open_at_once_are_merged_in_several_passes(spills: Spills) -> None:
    table = random_rows(500).select(["n", "s", "at"])
    runs = 500 // 5
    assert runs > 2 * FAN_IN_MAX
    found = sort(table, [("s", UP), ("n", DOWN)], 1, batch_rows=5)
    assert found["at"].to_pylist() == in_order(table, [("s", UP), ("n", DOWN)])
    assert len(spills.files) > runs
    # What grows with the rows is the number of passes, and with each there may be so many files more.
    assert spills.open_max <= 2 * FAN_IN_MAX + 1


@pytest.mark.parametrize("keys", [[("few", UP)], [("few", DOWN)], [("one", UP)], [("none", DOWN)]])
@pytest.mark.parametrize("batch_rows", [1, 30, 999])
def test_equal_rows_stay_as_they_came_in_also_across_runs(keys: Keys, batch_rows: int) -> None:
    rows = 1200 if batch_rows > 1 else 100
    table = (
        random_rows(rows).append_column("one", pa.array([1] * rows)).append_column("none", pa.nulls(rows, pa.int8()))
    )
    found = sort(table.select(["at", keys[0][0]]), keys, 2000, batch_rows)
    assert found["at"].to_pylist() == in_order(table, keys)


def test_the_order_does_not_depend_on_how_the_rows_were_cut() -> None:
    table = random_rows(800, seed=3)
    keys = [("few", DOWN), ("f", UP)]
    expected = in_order(table, keys)
    chance = random.Random(5)
    for _ in range(4):
        cuts = [0, *sorted(chance.sample(range(800), chance.randrange(1, 40))), 800]
        pieces = [table.slice(start, end - start).combine_chunks() for start, end in pairwise(cuts)]
        batches = (batch for piece in pieces for batch in piece.to_batches())
        found = list(sorted_batches(batches, keys, chance.choice([5_000, 30_000])))
        assert [at for batch in found for at in batch.column("at").to_pylist()] == expected


def test_a_key_may_have_any_name() -> None:
    table = pa.table({".n": [3, 1, 2], "[0]": [1, 1, 1], "a.b": [2, 2, 1]})
    assert sort(table, [(".n", UP)], 10**6)[".n"].to_pylist() == [1, 2, 3]
    assert sort(table, [("[0]", UP), ("a.b", UP), (".n", DOWN)], 1, 1)[".n"].to_pylist() == [2, 3, 1]


# ── the edges ──


def test_nothing_in_gives_nothing_out(spills: Spills) -> None:
    empty = random_rows(3).slice(0, 0).to_batches() or [random_rows(3).to_batches()[0].slice(0, 0)]
    assert list(sorted_batches(iter([]), [("n", UP)], 100)) == []
    assert list(sorted_batches(iter(empty * 3), [("n", UP)], 100)) == []
    assert spills.files == []


def test_batches_without_rows_among_others_are_passed_over() -> None:
    table = random_rows(90)
    batches = [piece for batch in batches_of(table, 30) for piece in (batch.slice(0, 0), batch, batch.slice(30))]
    found = list(sorted_batches(iter(batches), [("n", UP)], 1))
    assert [at for batch in found for at in batch.column("at").to_pylist()] == in_order(table, [("n", UP)])


def test_without_keys_rows_pass_as_they_are(spills: Spills) -> None:
    batches = list(batches_of(random_rows(100), 10))
    assert list(sorted_batches(iter(batches), [], 1)) == batches
    assert spills.files == []


# ── what it costs ──


def test_runs_that_do_not_overlap_are_not_sorted_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that looked at every loaded row in every round would look at each row as often as there are runs."""
    rows, looked = 40_000, 0
    sort_indices = pc.sort_indices

    def counted(values: Any, *args: Any, **options: Any) -> Any:
        nonlocal looked
        looked += len(values)
        return sort_indices(values, *args, **options)

    table = pa.table({"n": np.arange(rows), "text": ["x" * 100] * rows, "at": np.arange(rows)})
    monkeypatch.setattr(pc, "sort_indices", counted)
    found = sort(table, [("n", UP)], 200_000, batch_rows=500)
    assert found["at"].to_pylist() == list(range(rows))
    assert rows <= looked < 4 * rows


def test_memory_does_not_grow_with_the_rows() -> None:
    limit, peak = 4_000_000, 0
    start = pa.total_allocated_bytes()

    def look() -> None:
        nonlocal peak
        peak = max(peak, pa.total_allocated_bytes() - start)

    def rows() -> Iterator[pa.RecordBatch]:
        chance = np.random.default_rng(7)
        for _ in range(60):
            yield pa.record_batch({"n": chance.integers(0, 10**9, 5_000), "text": ["y" * 190] * 5_000})
            look()

    count, last = 0, -1
    for batch in sorted_batches(rows(), [("n", UP)], limit):
        look()
        numbers = batch.column(0).to_numpy()
        assert numbers[0] >= last
        assert (np.diff(numbers) >= 0).all()
        count, last = count + len(batch), int(numbers[-1])
    assert count == 300_000
    assert peak < 3 * limit


def test_batches_are_bounded_by_bytes_also_when_a_few_rows_are_large(spills: Spills) -> None:
    large = 1_000_000
    sizes = [large if at % 40 == 0 else 10 for at in range(800)]
    table = pa.table(
        {"n": [at % 7 for at in range(800)], "b": [bytes([at % 256]) * size for at, size in enumerate(sizes)]}
    )
    table = table.append_column("at", pa.array(range(800)))
    for bytes_max in (3_000_000, 100_000_000):
        found = list(sorted_batches(batches_of(table, 10), [("n", UP)], bytes_max))
        assert [at for batch in found for at in batch.column("at").to_pylist()] == in_order(table, [("n", UP)])
        assert max(batch.nbytes for batch in found) < 9 * large
    assert spills.files


# ── how it ends ──


def test_taking_all_rows_closes_every_file_and_leaves_none(spills: Spills) -> None:
    assert len(sort(random_rows(1000), [("n", UP)], 20_000)) == 1000
    assert len(spills.files) > 3
    assert spills.open() == 0
    assert list(spills.folder.iterdir()) == []


def test_runs_have_no_name_while_they_are_used(spills: Spills) -> None:
    rows = sorted_batches(batches_of(random_rows(1000), 50), [("n", UP)], 20_000)
    next(rows)
    assert spills.open() > 1
    assert list(spills.folder.iterdir()) == []
    rows.close()


def test_stopping_early_closes_every_file(spills: Spills) -> None:
    rows = sorted_batches(batches_of(random_rows(1000), 50), [("n", UP)], 20_000)
    next(rows)
    rows.close()
    assert len(spills.files) > 3
    assert spills.open() == 0


def test_a_failure_of_the_source_comes_through_and_closes_every_file(spills: Spills) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches_of(random_rows(1000), 50)
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        list(sorted_batches(failing(), [("n", UP)], 20_000))
    assert len(spills.files) > 3
    assert spills.open() == 0


def test_a_full_disk_is_unavailable_and_closes_every_file(spills: Spills, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.TemporaryFile

    def full(*args: Any, **options: Any) -> Any:
        if len(spills.files) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(*args, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(Unavailable, match="full") as raised:
        list(sorted_batches(batches_of(random_rows(1000), 50), [("n", UP)], 20_000))
    assert raised.value.facts["location"] == str(spills.folder)
    assert spills.open() == 0
