"""Retention policies: what their texts mean, which column counts, and which files they prove to be due."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record
from pyiceberg.types import LongType

from floodmark import clock
from floodmark.catalog.maintenance_state import Policy
from floodmark.commit.live_files import LiveFile, seq_field_id
from floodmark.commit.manifests import data_file
from floodmark.commit.metadata import new_metadata
from floodmark.errors import Invalid
from floodmark.maintenance import policy
from floodmark.maintenance.policy import (
    Share,
    check_policy,
    newest_rows_cut,
    oldest_files,
    read_rule,
    share_before,
    span,
)
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage
from floodmark.write.shape import TableShape, plan_table

DAY_MS = 86_400_000


def shape(columns: str = "id long, ts timestamp", partition: Sequence[str] = ()) -> TableShape:
    return plan_table("t", columns, partition=partition)


def kept(retention: Any, column: str | None = None, *, of: TableShape | None = None) -> Policy:
    table = of or shape()
    return check_policy(retention, column, table.schema, table.spec)


# ── texts ──


@pytest.mark.parametrize(
    ("given", "text", "age_ms"),
    [
        ("90d", "90d", 90 * DAY_MS),
        (" 90 d ", "90d", 90 * DAY_MS),
        ("007h", "7h", 7 * 3_600_000),
        ("30m", "30m", 30 * 60_000),
        ("2w", "2w", 14 * DAY_MS),
        ("1y", "1y", 365 * DAY_MS),
    ],
)
def test_an_age_is_a_number_and_a_unit(given: str, text: str, age_ms: int) -> None:
    table = shape()
    rule = read_rule(Policy(given), table.schema, table.spec)
    assert (rule.text, rule.age_ms, rule.rows, rule.size_bytes) == (text, age_ms, None, None)
    assert kept(given) == Policy(text, "ts")
    assert kept(text, "ts") == Policy(text, "ts"), "the kept form is kept as it is"


@pytest.mark.parametrize(
    ("given", "text", "rows", "size_bytes"),
    [
        ("1000000 rows", "1000000 rows", 1_000_000, None),
        ("1row", "1 rows", 1, None),
        ("10 GB", "10 GB", None, 10_000_000_000),
        ("512MiB", "512 MiB", None, 512 * 1024 * 1024),
        ("3 B", "3 B", None, 3),
        ("2 TiB", "2 TiB", None, 2 * 1024**4),
        ("4 KB", "4 KB", None, 4000),
    ],
)
def test_a_count_or_a_size_goes_by_no_column(given: str, text: str, rows: int | None, size_bytes: int | None) -> None:
    table = shape("id long")
    rule = read_rule(Policy(given), table.schema, table.spec)
    assert (rule.text, rule.age_ms, rule.rows, rule.size_bytes, rule.column) == (text, None, rows, size_bytes, None)
    assert kept(text, of=table) == Policy(text)
    with pytest.raises(Invalid, match="only an age uses a column"):
        kept(given, "ts")


@pytest.mark.parametrize(
    "given",
    [
        *("", "d", "90", "-90d", "+90d", "9.5d", "1e3 rows", "90 days", "90D", "10M", "6mo", "1s", "10 gb", "10 PB"),
        *("rows", "90d 5h", "90d,", "٩d", "0d", "0 rows", "000 GB", "1 000 rows", "1\n0d", "9" * 19 + " rows"),
        *(None, 90, b"90d"),
    ],
)
def test_all_else_is_refused_with_what_to_write(given: Any) -> None:
    with pytest.raises(Invalid) as caught:
        kept(given)
    assert "90d" in caught.value.advice
    assert "1000000 rows" in caught.value.advice


def test_an_age_that_no_calendar_holds_is_refused() -> None:
    assert kept("1000y") == Policy("1000y", "ts")
    for text in ("1001y", f"{10**17}m", f"{10**17}y"):
        with pytest.raises(Invalid, match="thousand years"):
            kept(text)


# ── columns ──


def test_the_only_time_counts_or_the_one_of_the_partitions_or_the_one_that_is_named() -> None:
    assert kept("1d", of=shape("id long, seen date")).column == "seen"
    assert kept("1d", of=shape("id long, seen timestamp_ntz")).column == "seen"
    many = "id long, made timestamp, seen date, sent timestamp"
    assert kept("1d", "sent", of=shape(many)).column == "sent"
    assert kept("1d", of=shape(many, ["bucket(4, id)", "month(seen)"])).column == "seen"
    assert kept("1d", of=shape(many, ["seen"])).column == "seen"
    assert kept("1d", "made", of=shape(many, ["day(sent)"])).column == "made"


@pytest.mark.parametrize(
    ("columns", "partition", "column", "told"),
    [
        ("id long, made timestamp, seen date", [], None, "made, seen"),
        ("id long, made timestamp, seen date", ["day(made)", "seen"], None, "made, seen"),
        ("id long, made timestamp, seen date", ["bucket(3, made)"], None, "made, seen"),
        ("id long, name string", [], None, "needs a time column"),
        ("id long, at struct<ts:timestamp>", [], None, "needs a time column"),
        ("id long, name string, ts timestamp", [], "name", "The table's times are: ts."),
        ("id long, seen timestamp", [], "sen", "Did you mean seen?"),
        ("id long, ts timestamp", [], "_seq", "no such column"),
    ],
)
def test_a_column_that_cannot_be_told_is_refused(
    columns: str, partition: list[str], column: str | None, told: str
) -> None:
    with pytest.raises(Invalid) as caught:
        kept("90d", column, of=shape(columns, partition))
    assert told in str(caught.value)


def test_a_day_is_past_when_all_of_it_is() -> None:
    noon = clock.parse_time_ms("2026-03-10T12:00:00Z")
    days, stamps = shape("d date"), shape()
    on_days = read_rule(Policy("1d"), days.schema, days.spec)
    on_stamps = read_rule(Policy("1d"), stamps.schema, stamps.spec)
    assert on_days.before(noon) == (date(2026, 3, 9) - date(1970, 1, 1)).days
    assert on_days.before(noon + DAY_MS // 2 - 1) == on_days.before(noon)
    assert on_days.before(noon + DAY_MS // 2) == on_days.before(noon) + 1
    assert on_days.before_text(noon) == "2026-03-09"
    assert on_stamps.before(noon) == (noon - DAY_MS) * 1000
    assert on_stamps.before_text(noon) == "2026-03-09T12:00:00.000Z"
    assert on_days.before(-1) == -2, "also before 1970"


# ── times in files ──


def stamp(day: int, hour: int = 0) -> datetime:
    return datetime(1970, 1, 1) + timedelta(days=day, hours=hour)


def files_of(table: TableShape, rows: list[dict[str, Any]], *, statistics: bool) -> tuple[list[LiveFile], Any]:
    """The files of these rows, as planning sees them; their rows are in `path_rows`."""
    folder = f"memory://lake/{clock.new_id()}"
    metadata = new_metadata(folder, "0" * 8 + "-0000-4000-8000-" + "0" * 12, table.schema, table.spec, table.sort, {})
    target = StageTarget(folder, table.schema.model_dump_json(), metadata.spec().model_dump_json())
    records = stage_in_process(target, rows, Storage({}))
    if not statistics:
        records = [replace(one, lower_bounds={}, upper_bounds={}, value_counts={}, null_counts={}) for one in records]
    seq_id = seq_field_id(table.schema)
    return [LiveFile(data_file(one, metadata, metadata.default_spec_id), 1, seq_id) for one in records], metadata


@pytest.mark.parametrize(
    ("kind", "partition"),
    [
        *(("timestamp", transform) for transform in ("", "hour(t)", "day(t)", "month(t)", "year(t)", "t")),
        *(("timestamp_ntz", transform) for transform in ("", "hour(t)", "day(t)", "month(t)", "year(t)")),
        *(("date", transform) for transform in ("", "day(t)", "month(t)", "year(t)", "t")),
    ],
)
@pytest.mark.parametrize("statistics", [True, False])
def test_what_is_said_of_a_file_holds_for_its_rows(kind: str, partition: str, statistics: bool) -> None:
    """Proofs are right for whatever rows, and whole partitions are decided without statistics."""
    dice = random.Random(f"{kind} {partition} {statistics}")
    table = shape(f"id long, t {kind}", [partition] if partition else [])
    decided = 0
    for _ in range(30):
        days = [dice.randrange(-900, 900) for _ in range(dice.randrange(1, 4))]
        moments = [stamp(day, dice.randrange(24)) for day in days]
        times: list[Any] = [moment.date() if kind == "date" else moment for moment in moments]
        if kind == "timestamp":
            times = [moment.replace(tzinfo=UTC) for moment in times]
        times += [None] * (dice.random() < 0.2)
        rows = [{"id": number, "t": time} for number, time in enumerate(times)]
        files, metadata = files_of(table, rows, statistics=statistics)
        border = dice.choice([*days, dice.randrange(-900, 900)])
        before = border if kind == "date" else border * DAY_MS * 1000 + dice.choice([-1, 0, 1])
        column = table.schema.find_field("t")
        for file in files:
            said = share_before(file, column, before, metadata)
            found = [_number(time) < before for time in _times(file)]
            assert said is not Share.ALL or all(found)
            assert said is not Share.NONE or not any(found)
            decided += said is not Share.SOME
    # Without statistics and partitions nothing is known; with either, much of it is.
    assert decided == 0 if not (statistics or partition) else decided >= 10


def _times(file: LiveFile) -> list[Any]:
    import pyarrow.parquet as pq

    with Storage({}).open_input(file.path) as stream:
        return list(pq.read_table(stream)["t"].to_pylist())


def _number(time: Any) -> float:
    """As the column counts; a row without a time is before nothing."""
    if time is None:
        return float("inf")
    if isinstance(time, datetime):
        return (time.replace(tzinfo=None) - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    return int((time - date(1970, 1, 1)).days)


def test_a_file_with_a_row_without_a_time_never_goes_whole() -> None:
    table = shape("id long, t timestamp_ntz")
    old: dict[str, Any] = {"id": 1, "t": stamp(10)}
    none: dict[str, Any] = {"id": 2, "t": None}
    for rows, said in (([old], Share.ALL), ([old, none], Share.SOME), ([none], Share.NONE)):
        (file,), metadata = files_of(table, rows, statistics=True)
        assert share_before(file, table.schema.find_field("t"), 20 * DAY_MS * 1000, metadata) is said


def test_the_partition_decides_what_statistics_leave_open() -> None:
    table = shape("id long, t timestamp_ntz", ["day(t)"])
    rows = [{"id": day, "t": stamp(day, 7)} for day in (18, 19, 20, 21)] + [{"id": 0, "t": None}]
    files, metadata = files_of(table, rows, statistics=False)
    before = stamp(20, 7)
    micros = (before - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    said = {
        file.data_file.partition[0]: share_before(file, table.schema.find_field("t"), micros, metadata)
        for file in files
    }
    assert said == {18: Share.ALL, 19: Share.ALL, 20: Share.SOME, 21: Share.NONE, None: Share.SOME}


def test_bounds_that_cannot_be_read_prove_nothing() -> None:
    table = shape("id long, t timestamp_ntz")
    (file,), metadata = files_of(table, [{"id": 1, "t": stamp(10)}], statistics=True)
    column = table.schema.find_field("t")
    file.data_file.upper_bounds[column.field_id] = b"\x01"
    assert share_before(file, column, 20 * DAY_MS * 1000, metadata) is Share.SOME
    file.data_file.lower_bounds[column.field_id] = b""
    assert share_before(file, column, 0, metadata) is Share.SOME


# ── sequences in files ──

SEQ_ID = 9


def settled(sequences: list[int], path: str, *, known: bool = True, size_bytes: int = 100) -> LiveFile:
    """A file with rows of these sequences; without statistics if they are not known."""
    counts: dict[str, Any] = (
        {"value_counts": {SEQ_ID: len(sequences)}, "null_value_counts": {SEQ_ID: 0}} if known else {}
    )
    lows, highs = {SEQ_ID: _raw(min(sequences))}, {SEQ_ID: _raw(max(sequences))}
    made = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(sequences),
        file_size_in_bytes=size_bytes,
        lower_bounds=lows,
        upper_bounds=highs,
        **counts,
    )
    return LiveFile(made, max(sequences) + 5, SEQ_ID)


def _raw(number: int) -> bytes:
    return to_bytes(LongType(), number)


def expected_cut(sequences: list[int], rows_kept: int) -> int | None:
    """The highest sequence above which there are at least so many rows."""
    if len(sequences) <= rows_kept:
        return None
    return max(cut for cut in range(-1, max(sequences)) if sum(one > cut for one in sequences) >= rows_kept)


@pytest.mark.parametrize("edges", [2, 3, 256])
def test_the_newest_rows_are_found_whatever_files_they_are_in(edges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "EDGES_MAX", edges)
    dice = random.Random(edges)
    for _ in range(200):
        contents = {}
        for number in range(dice.randrange(1, 8)):
            first = dice.randrange(0, 60)
            width = dice.choice([1, 1, 5, 60])
            contents[f"f{number}"] = [dice.randrange(first, first + width) for _ in range(dice.randrange(1, 9))]
        files = [settled(rows, path, known=dice.random() < 0.9) for path, rows in contents.items()]
        everything = [one for rows in contents.values() for one in rows]
        rows_kept = dice.randrange(1, len(everything) + 2)

        def count(
            read: Sequence[LiveFile], asked: Sequence[int], contents: dict[str, list[int]] = contents
        ) -> list[int]:
            assert len(asked) <= max(edges, 1)
            assert all(one < other for one, other in pairwise(asked))
            assert all(span(file)[0] < span(file)[1] for file in read), "nothing is read that is known"
            return [sum(one > edge for file in read for one in contents[file.path]) for edge in asked]

        assert newest_rows_cut(files, rows_kept, count) == expected_cut(everything, rows_kept)


def test_files_that_do_not_matter_to_the_cut_are_not_read() -> None:
    contents = {"old": [1, 2, 3], "middle": [4, 6, 8], "new": [9, 10], "newest": [11, 14]}
    files = [settled(rows, path) for path, rows in contents.items()]
    read: list[str] = []

    def count(some: Sequence[LiveFile], edges: Sequence[int]) -> list[int]:
        read.extend(file.path for file in some)
        return [sum(one > edge for file in some for one in contents[file.path]) for edge in edges]

    assert newest_rows_cut(files, 5, count) == 7
    assert set(read) == {"middle"}
    read.clear()
    assert newest_rows_cut(files, 10, count) is None
    assert newest_rows_cut([settled([4, 4], "a"), settled([7], "b"), settled([9, 9], "c")], 3, count) == 6
    assert read == []


def test_the_oldest_files_go_while_enough_stays() -> None:
    files = [settled([1, 9], "mixed"), settled([2, 3], "old"), settled([8, 8], "new"), settled([1], "?", known=False)]

    def going(bytes_kept: int) -> list[str]:
        return [file.path for file in oldest_files(files, bytes_kept)]

    assert going(400) == []
    assert going(301) == []
    assert going(300) == ["old"]
    assert going(200) == ["old", "new"]
    assert going(1) == ["old", "new", "mixed"], "a file of unknown age stays"
    large = [settled([1], "large", size_bytes=1000), settled([2], "small", size_bytes=1)]
    assert oldest_files(large, 500) == [], "no newer file goes before an older one"
