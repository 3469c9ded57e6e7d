"""Changes, and rows with their sequences, as DataFrames: the rows that are read without Spark, at the cost planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.schema import Schema

from floodmark.commit.live_files import LiveFile
from floodmark.model import DeletionsFile
from floodmark.rows.reading import changes, scan
from floodmark.rows.reading.arrow_reader import arrow_batches
from floodmark.rows.reading.changes import changes_batches, changes_dataframe, plan_changes
from floodmark.rows.reading.scan import scan_with_seq
from floodmark.rows.schema import table_schema, user_fields
from tests.unit.test_changes import Files, Row, in_order, rows_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HOW = [None, False, True]


@dataclass
class Case:
    """Files of a table, and the range to ask for."""

    files: Files
    live: list[LiveFile]
    gone: list[DeletionsFile] = field(default_factory=list)
    since: int | None = 2
    until: int = 6


def fresh_settled_and_deleted(folder: str) -> Case:
    files = Files(table_schema("id long not null, v string", ["id"]), folder)
    live = [
        files.fresh(2, [{"id": 99}]),
        files.fresh(3, [{"id": 1, "v": "a"}, {"id": 2}]),
        files.fresh(5, [{"id": 3, "v": "b"}]),
        files.fresh(7, [{"id": 4}]),
        files.settled(8, [{"id": 5, "_seq": 1}, {"id": 6, "_seq": 6}, {"id": 7, "_seq": 4}, {"id": 8, "_seq": 8}]),
    ]
    gone = [
        files.deletions(2, [{"id": 50}]),
        files.deletions(3, [{"id": 3}, {"id": 4}, {"id": 20}, {"id": 21}, {"id": 5}]),
        files.deletions(4, [{"id": 6}, {"id": 7}, {"id": 8}, {"id": 21}]),
    ]
    return Case(files, live, gone)


def odd_names_and_every_key_type(folder: str) -> Case:
    text = (
        "n struct<x:array<int>,t:timestamp>, `a.b``c` string, `key 0` int, Upper decimal(20,2), d date, b binary, "
        "ts timestamp, ntz timestamp_ntz, ok boolean, m map<string,double>, `_metadata` string"
    )
    key = ["a.b`c", "key 0", "Upper", "d", "b", "ts", "ntz", "ok"]
    files = Files(table_schema(text, key), folder)
    plain: Row = {"a.b`c": "é", "key 0": 1, "Upper": Decimal("1.50"), "d": date(2026, 1, 1), "b": b"\0", "ok": True}
    plain |= {"ts": "2026-01-01T00:00:00Z", "ntz": "0001-01-01T00:00:00"}
    rows = [{**plain, "key 0": number, "m": {"k": None}, "_metadata": f"m{number}"} for number in range(6)]
    rows[0]["n"] = {"x": [1, None], "t": "2026-01-01T00:00:00Z"}
    live = [files.fresh(3, rows[:2]), files.fresh(4, rows[2:3])]
    stored = files.changes([files.fresh(3, rows)])
    live.append(files.settled(9, [{**stored[3], "_seq": 6}, {**stored[4], "_seq": 7}]))
    keys = [{name: row[name] for name in key} for row in stored]
    gone = [files.deletions(4, [keys[1], keys[3], keys[4]]), files.deletions(3, [keys[4], keys[5]])]
    return Case(files, live, gone)


def no_key_and_equal_rows(folder: str) -> Case:
    files = Files(table_schema("n int"), folder)
    settled = files.settled(8, [{"n": 1, "_seq": 3}, {"n": 1, "_seq": 3}, {"n": 1, "_seq": 1}])
    return Case(files, [files.fresh(3, [{"n": 1}, {"n": 1}]), files.fresh(3, [{"n": 1}]), settled])


def rows_with_and_without_sequences_in_one_file(folder: str) -> Case:
    files = Files(table_schema("id long not null, v string", ["id"]), folder)
    live = [
        files.settled(5, [{"id": 1, "_seq": None}, {"id": 2, "_seq": 1}, {"id": 3, "_seq": 4}]),
        files.settled(9, [{"id": 4, "_seq": None}, {"id": 5, "_seq": 6}]),
        files.fresh(4, [{"id": 6}]),
        files.settled(7, [{"id": 7, "_seq": 3}, {"id": 8, "_seq": 7}]),
    ]
    return Case(files, live, [files.deletions(3, [{"id": number} for number in range(12)])])


def no_hidden_column(folder: str) -> Case:
    full = table_schema("id long not null, v string", ["id"])
    files = Files(Schema(*user_fields(full), schema_id=0, identifier_field_ids=full.identifier_field_ids), folder)
    live = [files.fresh(0, [{"id": 1}]), files.fresh(4, [{"id": 2, "v": "x"}]), files.fresh(5, [{"id": 3}])]
    return Case(files, live, [files.deletions(3, [{"id": 2}, {"id": 9}])], since=None)


def only_deletions(folder: str) -> Case:
    files = Files(table_schema("id long not null, v string", ["id"]), folder)
    gone = [files.deletions(4, [{"id": 1}, {"id": 2}]), files.deletions(5, [{"id": 2}])]
    return Case(files, [files.fresh(1, [{"id": 7}])], gone)


def names_that_do_not_tell_files_apart(folder: str) -> Case:
    files = Files(table_schema("id long not null, v string", ["id"]), folder)
    other = Files(files.schema, f"{folder}/other")
    live = [
        files.settled(3, [{"id": 1, "_seq": None}], "same"),
        other.settled(4, [{"id": 2, "_seq": None}], "same"),
        files.settled(5, [{"id": 3, "_seq": None}], "odd name %20 é"),
    ]
    gone = [files.deletions(3, [{"id": 2}, {"id": 8}], "gone"), other.deletions(4, [{"id": 9}], "gone")]
    return Case(files, live, gone)


def nothing(folder: str) -> Case:
    return Case(Files(table_schema("id long not null, n struct<x:array<int>>", ["id"]), folder), [])


CASES = [
    fresh_settled_and_deleted,
    odd_names_and_every_key_type,
    no_key_and_equal_rows,
    rows_with_and_without_sequences_in_one_file,
    no_hidden_column,
    only_deletions,
    names_that_do_not_tell_files_apart,
    nothing,
]


def rows_in(df: DataFrame) -> list[Row]:
    return in_order(df.toArrow().to_pylist())


def same_type(df: DataFrame, other: DataFrame) -> bool:
    return bool(df.schema.simpleString() == other.schema.simpleString())


@pytest.mark.parametrize("arrow", HOW)
@pytest.mark.parametrize("case", CASES)
def test_changes_are_the_same_with_spark_and_without(
    spark: SparkSession, tmp_path: Path, case: Callable[[str], Case], arrow: bool | None
) -> None:
    made = case(f"file://{tmp_path}")
    plan = plan_changes(made.files.schema, made.live, made.gone, made.since, made.until)
    expected = in_order(rows_of(changes_batches(made.files.storage, plan), plan))
    df = changes_dataframe(spark, plan, arrow=arrow)
    names = [field.name for field in user_fields(made.files.schema)]
    assert df.columns == [*names, "_change", "_seq"]
    assert same_type(df, changes_dataframe(spark, plan_changes(made.files.schema, [], [], 0, 0)))
    assert rows_in(df) == expected
    assert plan.empty or expected


@pytest.mark.parametrize(("rows_max", "files_max", "arrow"), [(6, 16, False), (6, 0, True), (0, 0, False)])
def test_every_way_to_join_gives_the_same(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_max: int, files_max: int, arrow: bool
) -> None:
    made = fresh_settled_and_deleted(f"file://{tmp_path}")
    plan = plan_changes(made.files.schema, made.live, made.gone[:2], made.since, made.until)
    # More rows than deletions: 6 lies between them.
    assert sum(file.rows for file in plan.deletions) <= 6 < sum(file.rows for file in plan.files)
    expected = in_order(rows_of(changes_batches(made.files.storage, plan), plan))
    monkeypatch.setattr(changes, "BROADCAST_ROWS_MAX", rows_max)
    monkeypatch.setattr(changes, "ONE_TASK_FILES_MAX", files_max)
    assert rows_in(changes_dataframe(spark, plan, arrow=arrow)) == expected


@pytest.mark.parametrize(("arrow", "values_max"), [(False, 32), (False, 1), (True, 32)])
@pytest.mark.parametrize("case", [case for case in CASES if case is not only_deletions])
def test_every_row_has_its_sequence(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: Callable[[str], Case],
    arrow: bool,
    values_max: int,
) -> None:
    monkeypatch.setattr(scan, "LOOKUP_BY_VALUE_MAX", values_max)
    made = case(f"file://{tmp_path}")
    found = scan_with_seq(spark, made.live, made.files.schema, arrow=arrow)
    batches = arrow_batches(made.files.storage, made.live, made.files.schema, True)
    assert found.columns == [*(field.name for field in user_fields(made.files.schema)), "_seq"]
    assert found.schema["_seq"].dataType.typeName() == "long"
    assert rows_in(found) == in_order(row for batch in batches for row in batch.to_pylist())


def test_a_row_that_is_not_committed_yet_has_no_sequence(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(table_schema("id long"), f"file://{tmp_path}")
    live = [files.fresh(None, [{"id": 1}]), files.fresh(3, [{"id": 2}])]
    for arrow in (False, True):
        found = scan_with_seq(spark, live, files.schema, arrow=arrow)
        assert rows_in(found) == in_order([{"id": 1, "_seq": None}, {"id": 2, "_seq": 3}])
    (row,) = scan_with_seq(spark, live[:1], files.schema, arrow=False).collect()
    assert row.asDict() == {"id": 1, "_seq": None}


@pytest.mark.parametrize("arrow", HOW)
def test_a_missing_file_is_an_error_not_fewer_changes(spark: SparkSession, tmp_path: Path, arrow: bool | None) -> None:
    made = fresh_settled_and_deleted(f"file://{tmp_path}")
    plan = plan_changes(made.files.schema, made.live, made.gone, made.since, made.until)
    made.files.storage.delete(plan.deletions[0].location)
    with pytest.raises(Exception, match=r"deletions\.parquet"):
        changes_dataframe(spark, plan, arrow=arrow).collect()


# ── cost ──


def explained(df: DataFrame, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    df.explain()
    return capsys.readouterr().out


def jobs_of(spark: SparkSession, group: str, work: Callable[[], Any]) -> Sequence[int]:
    spark.sparkContext.setJobGroup(group, group)
    try:
        work()
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    return list(spark.sparkContext.statusTracker().getJobIdsForGroup(group))


def test_no_changes_run_no_job_and_little_is_read_without_one(spark: SparkSession, tmp_path: Path) -> None:
    made = fresh_settled_and_deleted(f"file://{tmp_path}")
    some = plan_changes(made.files.schema, made.live, made.gone, made.since, made.until)
    none = plan_changes(made.files.schema, made.live, made.gone, 8, 9)
    assert jobs_of(spark, "some", lambda: changes_dataframe(spark, some, arrow=False).collect())
    for arrow in HOW:
        empty = changes_dataframe(spark, none, arrow=arrow)
        assert jobs_of(spark, f"none {arrow}", empty.collect) == []
    assert jobs_of(spark, "little", lambda: changes_dataframe(spark, some).collect()) == []


def test_what_looked_little_and_is_much_is_left_to_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(table_schema("id long not null, v string", ["id"]), f"file://{tmp_path}")
    live = [files.fresh(3, [{"id": number, "v": "x" * 1000} for number in range(2000)])]
    plan = plan_changes(files.schema, live, [], None, 5)
    monkeypatch.setattr(changes, "LITTLE_ANSWER_BYTES", 1_000_000)
    assert plan.size_bytes < 1_000_000
    assert jobs_of(spark, "much", lambda: changes_dataframe(spark, plan).collect())
    assert changes_dataframe(spark, plan).count() == 2000


def test_sequences_of_settled_files_are_filtered_in_their_row_groups(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = fresh_settled_and_deleted(f"file://{tmp_path}")
    plan = plan_changes(made.files.schema, made.live, [], made.since, made.until)
    text = explained(changes_dataframe(spark, plan, arrow=False), capsys)
    assert "PushedFilters: [IsNotNull(_seq), GreaterThan(_seq,2), LessThanOrEqual(_seq,6)]" in text
    # One scan for settled files and one for fresh ones, whose rows need no filter.
    assert text.count("FileScan") == 2
    assert text.count("PushedFilters: []") == 1


def test_without_deletions_nothing_is_joined_but_names_of_many_files(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fresh_settled_and_deleted(f"file://{tmp_path}")
    plan = plan_changes(made.files.schema, made.live, [], made.since, made.until)
    assert "Join" not in explained(changes_dataframe(spark, plan, arrow=False), capsys)
    monkeypatch.setattr(scan, "LOOKUP_BY_VALUE_MAX", 1)
    text = explained(changes_dataframe(spark, plan, arrow=False), capsys)
    assert text.count("BroadcastHashJoin") == text.count("Join") == 1
    assert "hashpartitioning" not in text


@pytest.mark.parametrize("arrow", [False, True])
def test_few_deletions_are_found_without_a_shuffle(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], arrow: bool
) -> None:
    made = fresh_settled_and_deleted(f"file://{tmp_path}")
    plan = plan_changes(made.files.schema, made.live, made.gone, made.since, made.until)
    text = explained(changes_dataframe(spark, plan, arrow=arrow), capsys)
    assert "LeftAnti" in text
    assert "hashpartitioning" not in text
    assert "SortMergeJoin" not in text
