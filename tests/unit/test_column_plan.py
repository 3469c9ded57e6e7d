"""Which files a column backfill fills next, and which it cuts first: pure planning over records of files."""

from __future__ import annotations

import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record

from floodmark.backfill.columns.column import ColumnSpec, fold, spec_from_job
from floodmark.backfill.columns.plan import CUT_BYTES_MIN, Batch, BatchLimits, in_order, plan_batches
from floodmark.catalog.jobs import COLUMN, HISTORY, ROWS, RUNNING, Job
from floodmark.commit.live_files import LiveFile
from floodmark.errors import Corrupt, Invalid

MUCH = 1 << 40
LARGE = 10 * CUT_BYTES_MIN


def file(
    name: str, rows: int, sequence: int | None = 1, *, size: int = 100, partition: object = "a", spec_id: int = 0
) -> LiveFile:
    data_file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=name,
        file_format=FileFormat.PARQUET,
        partition=Record(partition),
        record_count=rows,
        file_size_in_bytes=size,
        value_counts={1: rows},
    )
    data_file.spec_id = spec_id
    return LiveFile(data_file, sequence, 99)


def names(batches: list[Batch]) -> list[list[str]]:
    return [[one.path for one in batch.files] for batch in batches]


def plan(files: list[LiveFile], rows: int = MUCH, size: int = MUCH, count: int = 256) -> list[Batch]:
    return list(plan_batches(files, BatchLimits(rows, size, count)))


# ── which files ──


def test_files_come_partition_by_partition_and_the_oldest_first() -> None:
    files = [
        file("tue 4", 1, 4, partition="tue"),
        file("mon 5", 1, 5, partition="mon"),
        file("tue 2", 1, 2, partition="tue"),
        file("mon 3", 1, 3, partition="mon"),
        file("mon, but of another layout", 1, 1, partition="mon", spec_id=1),
        file("without a day", 1, 9, partition=None),
    ]
    expected = ["mon, but of another layout", "tue 2", "tue 4", "mon 3", "mon 5", "without a day"]
    assert [one.path for one in in_order(files)] == expected
    assert [one.path for one in in_order(files[::-1])] == expected


def test_files_whose_sequences_are_not_known_come_first_in_their_partition() -> None:
    assert [one.path for one in in_order([file("b", 1, 3), file("a", 1, None)])] == ["a", "b"]


def test_no_files_make_no_batch() -> None:
    assert plan([]) == []


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, [["a", "b", "c", "d"]]),
        ({"rows": 20}, [["a", "b"], ["c", "d"]]),
        ({"rows": 19}, [["a"], ["b"], ["c"], ["d"]]),
        ({"size": 300}, [["a", "b", "c"], ["d"]]),
        ({"size": 1}, [["a"], ["b"], ["c"], ["d"]]),
        ({"count": 3}, [["a", "b", "c"], ["d"]]),
    ],
    ids=lambda value: " ".join(f"{name} {limit}" for name, limit in value.items()) if isinstance(value, dict) else "",
)
def test_a_batch_is_bounded_by_rows_bytes_and_files(limits: dict[str, int], expected: list[list[str]]) -> None:
    files = [file(name, 10, number) for number, name in enumerate("abcd")]
    found = plan(files, **limits)
    assert names(found) == expected
    assert all(batch.piece_rows is None and not batch.pieces for batch in found)


# ── which are cut ──


def test_a_file_of_too_many_rows_is_cut_alone_when_nothing_else_is_left() -> None:
    """Else many large files of one commit would all be cut before a row is filled."""
    files = [file("a", 12_000, 1), file("b", 10, 2), file("c", 6000, 3), file("d", 10, 4), file("e", 5000, 5)]
    found = plan(files, rows=5000)
    assert names(found) == [["b", "d"], ["e"], ["a"], ["c"]]
    assert [batch.piece_rows for batch in found] == [None, None, 5000, 5000]
    assert [batch.pieces for batch in found] == [0, 0, 3, 2]


def test_a_file_of_too_many_bytes_is_cut_by_rows_that_fit_with_a_margin() -> None:
    (batch,) = plan([file("a", 1000, size=LARGE)], size=LARGE // 4)
    assert batch.piece_rows == 1000 * 3 // 16
    assert batch.piece_rows * LARGE / 1000 <= LARGE / 4
    (batch,) = plan([file("a", 1000, size=LARGE)], rows=10, size=LARGE // 4)
    assert batch.piece_rows == 10


def test_the_pieces_of_a_file_are_not_cut_again() -> None:
    limits = BatchLimits(5000, LARGE)
    big = file("a", 100_000, size=7 * LARGE)
    rows = limits.piece_rows(big)
    assert rows is not None
    per_row = big.size_bytes // big.rows
    assert limits.piece_rows(file("piece", rows, size=rows * per_row * 5 // 4)) is None


@pytest.mark.parametrize("size", [1, CUT_BYTES_MIN, 100 * LARGE])
def test_one_row_cannot_be_cut(size: int) -> None:
    assert BatchLimits(1, 1).piece_rows(file("a", 1, size=size)) is None


def test_a_small_file_is_not_cut_by_its_bytes() -> None:
    """It is mostly its frame: pieces of it would have as many bytes, and be cut again down to single rows."""
    assert BatchLimits(MUCH, 1).piece_rows(file("a", 100, size=CUT_BYTES_MIN)) is None
    assert BatchLimits(MUCH, 1).piece_rows(file("a", 100, size=CUT_BYTES_MIN + 1)) == 1


def test_a_file_without_rows_is_taken_with_others() -> None:
    assert names(plan([file("a", 0, 1), file("b", 5, 2)], rows=5)) == [["a", "b"]]


# ── parts of a batch ──


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, ["abcd"]),
        (1, ["abcd"]),
        (2, ["ab", "cd"]),
        (3, ["ab", "c", "d"]),
        (4, ["a", "b", "c", "d"]),
        (9, ["a", "b", "c", "d"]),
    ],
)
def test_a_batch_is_divided_into_parts_of_about_as_many_rows(count: int, expected: list[str]) -> None:
    batch = Batch(tuple(file(name, 10) for name in "abcd"))
    assert ["".join(one.path for one in part) for part in batch.units(count)] == expected


def test_parts_follow_rows_not_files() -> None:
    batch = Batch((file("a", 1000), file("b", 1), file("c", 1), file("d", 1)))
    assert [[one.path for one in part] for part in batch.units(2)] == [["a"], ["b", "c", "d"]]
    empty = Batch((file("a", 0), file("b", 0)))
    assert sum(len(part) for part in empty.units(2)) == 2


# ── the spec ──


def test_a_join_becomes_a_query_over_the_row() -> None:
    assert fold(" upper(name) ", None, None) == "upper(name)"
    folded = fold("max(o.ts)", "orders o", "o.user_id = users.id")
    assert folded == "(select max(o.ts) from orders o where o.user_id = users.id)"


@pytest.mark.parametrize(
    "parts", [("max(o.ts)", "orders o", None), ("max(o.ts)", None, "true"), ("max(o.ts)", " ", "true")]
)
def test_a_join_needs_all_its_parts(parts: tuple[str, str | None, str | None]) -> None:
    with pytest.raises(Invalid):
        fold(*parts)


SPEC = ColumnSpec("users", "nick", "upper(name)", False, 5000, 1 << 20, 0.1)


def job(kind: str = COLUMN, **settings: object) -> Job:
    told = {**SPEC.pinned("some id"), **SPEC.settings(), **settings}
    return Job("1", SPEC.name, kind, ("users",), "{}", RUNNING, 0, 0, ROWS, 0, 0, 0, 0, None, "x", 0, 0, settings=told)


def test_a_spec_comes_back_from_its_job() -> None:
    assert spec_from_job(job()) == SPEC
    assert SPEC.name == "users.nick"
    with pytest.raises(Invalid):
        spec_from_job(job(HISTORY))
    broken = job()
    with pytest.raises(Corrupt):
        spec_from_job(Job(**{**broken.__dict__, "settings": {"table": "users"}}))
