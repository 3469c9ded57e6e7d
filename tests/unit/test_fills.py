"""Which columns an expression fills, and which files lack them: from properties and statistics alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema

from floodmark.commit.fills import FILL_PREFIX, Fill, absent_fields, fill_property, fills_of, lacking
from floodmark.commit.live_files import LiveFile
from floodmark.commit.manifests import data_file
from floodmark.commit.metadata import new_metadata
from floodmark.errors import Corrupt, Invalid
from floodmark.model import FileRecord
from floodmark.rows.evolve import evolve_schema
from floodmark.rows.rewriting.fill import computed_anew, run_fill
from floodmark.rows.rewriting.rewrite import InputFile
from floodmark.rows.schema import arrow_schema, table_schema
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage
from floodmark.write.shape import plan_table
from tests.without_spark import NO_SPARK

COLUMNS = (
    "id long not null, name string, flag boolean, pair struct<a:int,b:string>, words array<string>, "
    "counts map<string,int>"
)
SCHEMA = table_schema(COLUMNS)
IDS = {field.name: field.field_id for field in SCHEMA.fields}


def fill(column: str, expression: str = "1") -> Fill:
    return Fill(IDS[column], column, expression)


def target(folder: Path, *fills: Fill, settled: bool = False) -> StageTarget:
    spec = UNPARTITIONED_PARTITION_SPEC.model_dump_json()
    properties = dict(fill_property(one) for one in fills)
    return StageTarget(folder.as_uri(), SCHEMA.model_dump_json(), spec, properties=properties, settled=settled)


def staged(folder: Path, rows: list[dict[str, object]], *absent: str) -> FileRecord:
    into = target(folder).without(tuple(IDS[name] for name in absent))
    (record,) = stage_in_process(into, rows, Storage())
    return record


def no_tables(name: str) -> None:
    raise AssertionError(f"no other table is needed here: {name}")


def run(into: StageTarget, sources: list[InputFile], *fills: Fill, schema: Schema = SCHEMA):  # type: ignore[no-untyped-def]
    filled, used_spark = run_fill(
        Storage(), NO_SPARK, "tag", into, sources, fills, table="t", source_schema=schema, tables=no_tables
    )
    assert not used_spark
    return filled


def rows_in(records: tuple[FileRecord, ...]) -> list[dict[str, object]]:
    found = []
    for record in records:
        found += pq.read_table(record.path.removeprefix("file://")).to_pylist()
    return found


# ── what properties say ──


def test_a_property_says_which_column_is_filled_and_how() -> None:
    key, text = fill_property(Fill(7, "country", "upper('ä')"))
    assert key == f"{FILL_PREFIX}7"
    schema = table_schema("a int, b int, c int, d int, e int, f int, country string")
    assert fills_of({key: text, "write.x": "y"}, schema) == (Fill(7, "country", "upper('ä')"),)


def test_the_oldest_column_comes_first_under_its_present_name_and_gone_ones_not_at_all() -> None:
    properties = dict(
        map(fill_property, [Fill(IDS["pair"], "was", "2"), Fill(IDS["name"], "name", "1"), Fill(99, "x", "3")])
    )
    assert fills_of(properties, SCHEMA) == (fill("name", "1"), fill("pair", "2"))


def test_an_empty_property_says_that_the_column_is_not_bound_any_more() -> None:
    assert fills_of({f"{FILL_PREFIX}1": ""}, SCHEMA) == ()


@pytest.mark.parametrize("text", [" ", "{}", "[]", "nonsense"])
def test_a_property_that_cannot_be_read_is_corrupt(text: str) -> None:
    with pytest.raises(Corrupt):
        fills_of({f"{FILL_PREFIX}1": text}, SCHEMA)


def test_rows_lack_what_they_do_not_name() -> None:
    fills = (fill("name"), fill("flag"))
    assert lacking(fills, ["id", "flag"]) == (fill("name"),)
    assert lacking(fills, {"name": None, "flag": None}) == ()


@pytest.mark.parametrize(
    ("given", "anew"),
    [
        ("a", "bc"),
        ("b", "c"),
        ("c", ""),
        ("ab", "c"),
        ("id", "d"),
        ("e", ""),
        ("", ""),
    ],
)
def test_what_is_given_to_a_row_has_columns_computed_anew_that_name_it_also_by_others(given: str, anew: str) -> None:
    schema = table_schema("id long, a string, b string, c string, d string, e string")
    by_name = {field.name: field.field_id for field in schema.fields}
    made = {"b": "a", "c": "upper(`B`) || '-'", "d": "concat(cast(id as string), 'x')", "e": "'a'"}
    fills = [Fill(by_name[column], column, expression) for column, expression in made.items()]
    ids = {by_name[name] for name in ([given] if given in by_name else given)}
    assert computed_anew(fills[::-1], schema, ids) == tuple(by_name[name] for name in anew)


# ── what files hold ──

NESTED = ["name", "pair", "words", "counts"]


@pytest.mark.parametrize(
    "absent", [*([name] for name in NESTED), [], NESTED], ids=lambda names: "-".join(names) or "none"
)
@pytest.mark.parametrize("values", ["null", "empty", "full"])
def test_a_file_says_which_columns_it_lacks(tmp_path: Path, absent: list[str], values: str) -> None:
    row: dict[str, object] = {"id": 1}
    if values != "null":
        full = values == "full"
        row |= {"words": ["w"] if full else [], "counts": {"k": 1} if full else {}, "pair": {"a": 1} if full else None}
    row = {name: value for name, value in row.items() if name not in absent}
    record = staged(tmp_path, [row], *absent)
    fills = [fill(name) for name in NESTED]
    wanted = tuple(IDS[name] for name in absent)
    assert absent_fields(record, fills, SCHEMA) == wanted
    shape = plan_table("t", COLUMNS)
    metadata = new_metadata("file:///t", "0" * 8 + "-0000-4000-8000-" + "0" * 12, SCHEMA, shape.spec, shape.sort, {})
    live = LiveFile(data_file(record, metadata, 0), 1, None)
    assert absent_fields(live, fills, SCHEMA) == wanted
    assert absent_fields(live, (), SCHEMA) == ()


def test_a_file_without_any_counts_lacks_the_column(tmp_path: Path) -> None:
    record = replace(staged(tmp_path, [{"id": 1}]), value_counts={})
    assert absent_fields(record, [fill("name")], SCHEMA) == (IDS["name"],)


# ── filling, by plain expressions ──


def source(record: FileRecord, *absent: str, sequence: int | None = None) -> InputFile:
    ids = tuple(IDS[name] for name in absent)
    return InputFile(record.path, record.rows, record.size_bytes, sequence, True, absent=ids)


def test_rows_get_the_value_and_keep_the_rest_with_their_sequence(tmp_path: Path) -> None:
    first = staged(tmp_path, [{"id": 1, "flag": True, "words": ["a"]}], "name")
    second = staged(tmp_path, [{"id": 2}, {"id": 3}], "name")
    sources = [source(first, "name", sequence=4), source(second, "name", sequence=9)]
    filled = run(target(tmp_path, settled=True), sources, fill("name", "'x'"))
    assert [(row["id"], row["name"], row["flag"], row["words"], row["_seq"]) for row in rows_in(filled.records)] == [
        (1, "x", True, ["a"], 4),
        (2, "x", None, None, 9),
        (3, "x", None, None, 9),
    ]
    assert (filled.rows, filled.unfilled) == (3, {IDS["name"]: 0})
    assert all(absent_fields(record, [fill("name")], SCHEMA) == () for record in filled.records)


def test_fresh_rows_stay_fresh(tmp_path: Path) -> None:
    filled = run(target(tmp_path), [source(staged(tmp_path, [{"id": 1}], "flag"), "flag")], fill("flag", "true"))
    assert rows_in(filled.records) == [
        {"id": 1, "name": None, "flag": True, "pair": None, "words": None, "counts": None},
    ]


@pytest.mark.parametrize("column", ["name", "pair"])
def test_rows_without_a_value_are_counted(tmp_path: Path, column: str) -> None:
    copy = pa.field("copy", arrow_schema(SCHEMA).field(column).type)
    schema = evolve_schema(SCHEMA, arrow_schema(SCHEMA).append(copy), SCHEMA.highest_field_id, 1)
    assert schema is not None
    copied = schema.find_field("copy")
    value = {"name": "n", "pair": {"a": None, "b": "b"}}[column]
    record = staged(tmp_path, [{"id": 1, column: value}, {"id": 2, column: None}, {"id": 3, column: None}])
    into = replace(target(tmp_path), schema_json=schema.model_dump_json())
    filled = run(into, [source(record)], Fill(copied.field_id, "copy", column), schema=schema)
    assert filled.unfilled == {copied.field_id: 2}
    assert [row["copy"] for row in rows_in(filled.records)] == [value, None, None]


def test_a_column_that_is_not_to_be_filled_stays_absent(tmp_path: Path) -> None:
    made = (fill("name", "'n'"), fill("flag", "true"))
    record = staged(tmp_path, [{"id": 1}], "name", "flag")
    into = target(tmp_path, *made)
    filled = run(into, [source(record, "name", "flag")], fill("flag", "true"))
    assert [row["flag"] for row in rows_in(filled.records)] == [True]
    assert absent_fields(filled.records[0], made, SCHEMA) == (IDS["name"],)


def test_an_expression_sees_the_filled_value_of_a_column_that_is_to_be_filled_itself(tmp_path: Path) -> None:
    schema = table_schema("id long, a string, b string, c string")
    by_name = {field.name: field.field_id for field in schema.fields}
    fills = [Fill(by_name["a"], "a", "'x'"), Fill(by_name["b"], "b", "A"), Fill(by_name["c"], "c", "`b`")]
    properties = dict(map(fill_property, fills))
    into = replace(target(tmp_path), schema_json=schema.model_dump_json(), properties=properties)
    ids = tuple(one.field_id for one in fills)
    (record,) = stage_in_process(into.without(ids), [{"id": 1}], Storage())
    absent = InputFile(record.path, 1, record.size_bytes, None, True, absent=ids)
    filled = run(into, [absent], fills[2], schema=schema)
    assert rows_in(filled.records) == [{"id": 1, "c": "x"}]
    filled = run(into, [absent], *fills, schema=schema)
    assert rows_in(filled.records) == [{"id": 1, "a": "x", "b": "x", "c": "x"}]


def test_without_a_fill_rows_are_written_again_as_they_are(tmp_path: Path) -> None:
    record = staged(tmp_path, [{"id": 1}], "name")
    filled = run(target(tmp_path), [source(record, "name")])
    assert (filled.rows, filled.unfilled) == (1, {})
    assert absent_fields(filled.records[0], [fill("name")], SCHEMA) == (IDS["name"],)


def test_sources_that_lack_different_columns_give_files_of_their_own(tmp_path: Path) -> None:
    one = source(staged(tmp_path, [{"id": 1}], "name"), "name")
    two = source(staged(tmp_path, [{"id": 2}], "name", "flag"), "name", "flag")
    filled = run(target(tmp_path), [one, two], fill("name", "'x'"))
    fills = [fill("name"), fill("flag")]
    assert [absent_fields(record, fills, SCHEMA) for record in filled.records] == [(), (IDS["flag"],)]
    assert [row["name"] for row in rows_in(filled.records)] == ["x", "x"]


def test_other_rows_than_were_said_are_corrupt(tmp_path: Path) -> None:
    record = staged(tmp_path, [{"id": 1}], "name")
    with pytest.raises(Corrupt):
        run(target(tmp_path), [replace(source(record, "name"), rows=2)], fill("name", "'x'"))


def test_a_value_that_is_none_of_the_column_is_invalid(tmp_path: Path) -> None:
    record = staged(tmp_path, [{"id": 1}], "flag")
    with pytest.raises(Invalid, match="flag"):
        run(target(tmp_path), [source(record, "flag")], fill("flag", "'text'"))


def test_a_narrow_number_fills_a_wider_column(tmp_path: Path) -> None:
    schema = table_schema("id long, n long")
    into = replace(target(tmp_path), schema_json=schema.model_dump_json())
    (record,) = stage_in_process(into.without((2,)), [{"id": 1}], Storage())
    filled = run(into, [InputFile(record.path, 1, 1, None, True, absent=(2,))], Fill(2, "n", "5"), schema=schema)
    assert pq.read_table(filled.records[0].path.removeprefix("file://")).schema.field("n").type == pa.int64()
