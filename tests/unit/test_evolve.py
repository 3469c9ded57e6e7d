"""Rows with more in them than the table has: what the table becomes, what stays refused, and how old files read."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, StructType

from floodmark import clock
from floodmark.errors import Invalid
from floodmark.rows.convert import table_shape
from floodmark.rows.evolve import evolve_schema
from floodmark.rows.layout import partition_spec
from floodmark.rows.project import read_file
from floodmark.rows.schema import arrow_schema, table_schema, user_fields
from floodmark.rows.staging.stage import StageTarget, incoming_schema, stage_in_process
from floodmark.storage import Storage


def evolve(schema: Schema, incoming: pa.Schema) -> Schema | None:
    return evolve_schema(schema, incoming, schema.highest_field_id, schema.schema_id + 1)


def evolved(text: str, key: tuple[str, ...] = (), **columns: pa.DataType) -> Schema:
    found = evolve(table_schema(text, key), pa.schema(list(columns.items())))
    assert found is not None
    # What travels to executors and into metadata is the JSON.
    assert Schema.model_validate_json(found.model_dump_json()) == found
    return found


def kinds(schema: Schema) -> dict[str, str]:
    return {schema.find_column_name(i) or "": str(schema.find_type(i)) for i in sorted(schema.field_ids)}


def target_of(schema: Schema, partition: tuple[str, ...] = (), **extra: Any) -> StageTarget:
    spec = partition_spec(schema, partition)
    folder = f"memory://lake/{clock.new_id()}"
    return StageTarget(folder, schema.model_dump_json(), spec.model_dump_json(), fill_missing=True, **extra)


def write(storage: Storage, schema: Schema, data: Any) -> tuple[Schema, str]:
    """What a write with evolve=True does: the next schema, then the rows staged with it."""
    incoming, data = incoming_schema(data, table_shape(schema.model_dump_json()))
    schema = evolve(schema, incoming) or schema
    (record,) = stage_in_process(target_of(schema), data, storage)
    return schema, record.path


def read(storage: Storage, schema: Schema, path: str) -> list[dict[str, Any]]:
    batches = read_file(storage, path, user_fields(schema))
    return [row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict")]


# ── what the schema becomes ──


def test_new_columns_are_optional_have_fresh_ids_and_stand_before_the_hidden_one() -> None:
    schema = table_schema("id long, s string", key=["id"])
    many = pa.list_(pa.field("element", pa.float64(), nullable=False))
    point = pa.struct([pa.field("x", pa.int64(), nullable=False), pa.field("y", many)])
    incoming = pa.schema(
        [
            pa.field("id", pa.int64()),
            pa.field("p", point, nullable=False),
            pa.field("m", pa.map_(pa.string(), pa.field("v", pa.decimal128(9, 2), nullable=False))),
            pa.field("t", pa.timestamp("ms", tz="Europe/Paris"), nullable=False),
            pa.field("s", pa.string()),
        ]
    )
    found = evolve_schema(schema, incoming, last_column_id=41, next_schema_id=7)
    assert found is not None
    assert [field.name for field in found.fields] == ["id", "s", "p", "m", "t", "_seq"]
    assert [field.required for field in found.fields] == [True] + [False] * 5
    assert [found.find_field(name).field_id for name in ("id", "s", "_seq")] == [1, 2, 3]
    names = ("p", "p.x", "p.y", "p.y.element", "m", "m.key", "m.value", "t")
    assert [found.find_field(name).field_id for name in names] == list(range(42, 50))
    # That the first rows have no null is no rule for later ones.
    optional = ("p", "p.x", "p.y", "p.y.element", "m", "m.value", "t")
    assert not any(found.find_field(name).required for name in optional)
    assert found.find_field("m.key").required
    assert {name: str(found.find_type(name)) for name in ("p.x", "m.value", "t")} == {
        "p.x": "long",
        "m.value": "decimal(9, 2)",
        "t": "timestamptz",
    }
    assert (found.schema_id, found.identifier_field_ids) == (7, [1])


@pytest.mark.parametrize(
    ("before", "incoming", "after"),
    [
        ("int", pa.int64(), "long"),
        ("int", pa.uint32(), "long"),
        ("int", pa.dictionary(pa.int32(), pa.int64()), "long"),
        ("float", pa.float64(), "double"),
        ("decimal(9,2)", pa.decimal128(20, 2), "decimal(20, 2)"),
        ("decimal(9,2)", pa.decimal256(38, 2), "decimal(38, 2)"),
    ],
)
@pytest.mark.parametrize(
    ("where", "column"), [("{}", "c"), ("struct<a:string,b:{}>", "c.b"), ("array<map<string,{}>>", "c.element.value")]
)
def test_numbers_widen_at_every_depth(before: str, incoming: pa.DataType, after: str, where: str, column: str) -> None:
    source = {
        "c": incoming,
        "c.b": pa.struct([("b", incoming), ("a", pa.string())]),
        "c.element.value": pa.large_list(pa.map_(pa.string(), incoming)),
    }[column]
    text = f"id long, c {where.format(before)} comment 'why', z string"
    found = evolved(text, id=pa.int64(), c=source, z=pa.string())
    was = table_schema(text)
    assert str(found.find_type(column)) == after
    assert found.find_field(column).field_id == was.find_field(column).field_id
    assert found.find_field("c").doc == "why"
    # Nothing else changed.
    assert kinds(found).keys() == kinds(was).keys()
    assert [field for field in found.fields if field.name != "c"] == [f for f in was.fields if f.name != "c"]


@pytest.mark.parametrize(
    ("text", "incoming"),
    [
        ("long", pa.int32()),
        ("long", pa.int64()),
        ("double", pa.float32()),
        ("double", pa.int64()),
        ("float", pa.int64()),
        ("float", pa.float16()),
        ("decimal(20,2)", pa.decimal128(9, 2)),
        ("decimal(9,2)", pa.decimal128(20, 3)),
        ("decimal(9,2)", pa.decimal256(50, 2)),
        ("decimal(9,2)", pa.int64()),
        ("int", pa.uint64()),
        ("int", pa.string()),
        ("string", pa.int64()),
        ("string", pa.null()),
        ("date", pa.timestamp("us")),
        ("timestamp", pa.timestamp("ns", tz="UTC")),
        ("timestamp", pa.date32()),
        ("timestamp_ntz", pa.timestamp("us", tz="UTC")),
        ("int", pa.list_(pa.int64())),
        ("array<int>", pa.int64()),
        ("struct<a:int>", pa.int64()),
        ("struct<a:int>", pa.map_(pa.string(), pa.int64())),
        ("map<int,string>", pa.map_(pa.int64(), pa.string())),
        ("map<struct<a:int>,string>", pa.map_(pa.struct([("a", pa.int64()), ("b", pa.int64())]), pa.string())),
        ("binary", pa.time64("us")),
    ],
)
def test_what_is_not_additive_changes_nothing_and_raises_nothing(text: str, incoming: pa.DataType) -> None:
    assert evolve(table_schema(f"c {text}, other long not null"), pa.schema([("c", incoming)])) is None


def test_the_columns_of_the_table_itself_change_nothing() -> None:
    schema = table_schema(
        "id long not null comment 'x', l array<struct<a:int not null>>, m map<string,struct<b:float>>, d decimal(5,1)"
    )
    assert evolve(schema, arrow_schema(schema)) is None
    assert evolve(schema, pa.schema([])) is None


def test_new_fields_go_to_the_end_of_their_struct_at_every_depth() -> None:
    text = "s struct<a:int not null>, l array<struct<a:struct<b:int>>>, m map<string,struct<a:int>>"
    more = pa.struct([pa.field("new", pa.string(), nullable=False), pa.field("a", pa.int32())])
    deep = pa.struct([("a", pa.struct([("new", pa.list_(pa.int32())), ("b", pa.int64())]))])
    was = table_schema(text)
    found = evolved(text, s=more, l=pa.list_(deep), m=pa.map_(pa.string(), more))
    fresh = ["s.new", "l.element.a.new", "l.element.a.new.element", "m.value.new"]
    assert sorted(found.find_field(name).field_id for name in fresh) == list(
        range(was.highest_field_id + 1, was.highest_field_id + 5)
    )
    assert not any(found.find_field(name).required for name in fresh)
    struct = found.find_type("s")
    assert isinstance(struct, StructType)
    assert [(field.name, field.required) for field in struct.fields] == [("a", True), ("new", False)]
    assert str(found.find_type("l.element.a.b")) == "long"
    assert kinds(found).keys() - kinds(was).keys() == set(fresh)


def test_a_key_that_widens_stays_the_key() -> None:
    found = evolved("id int, part decimal(5,0)", key=("id", "part"), id=pa.int64(), part=pa.decimal128(9, 0))
    assert found.identifier_field_ids == [1, 2]
    assert [(str(field.field_type), field.required) for field in found.fields[:2]] == [
        ("long", True),
        ("decimal(9, 0)", True),
    ]


@pytest.mark.parametrize(
    ("columns", "column"),
    [
        ([("_change", pa.string())], "_change"),
        ([("_SEQ", pa.int64())], "_SEQ"),
        ([("_seq", pa.int64())], "_seq"),
        ([("ID", pa.int64())], "ID"),
        ([("new", pa.int64()), ("New", pa.int64())], "New"),
        ([("s", pa.struct([("A", pa.int64())]))], "s.A"),
        ([("new", pa.struct([("x", pa.int64()), ("X", pa.int64())]))], "new.X"),
        ([(" ", pa.int64())], "' '"),
        ([("new", pa.null())], "new"),
        ([("s", pa.struct([("new", pa.null())]))], "s.new"),
        ([("new", pa.list_(pa.null()))], "new.element"),
        ([("new", pa.struct([]))], "new"),
        ([("new", pa.uint64())], "new"),
        ([("new", pa.timestamp("ns"))], "new"),
        ([("s", pa.struct([("new", pa.time64("us"))]))], "s.new"),
        ([("l", pa.list_(pa.struct([("new", pa.decimal256(50, 2))])))], "l.element.new"),
    ],
)
def test_a_new_column_that_a_table_cannot_have_is_refused_by_its_full_name(columns: Any, column: str) -> None:
    schema = table_schema("id long, s struct<a:int>, l array<struct<a:int>>")
    with pytest.raises(Invalid) as refused:
        evolve(schema, pa.schema(columns))
    assert refused.value.facts["column"] == column
    assert refused.value.advice


def test_a_new_column_without_a_value_is_told_that_it_has_no_type() -> None:
    with pytest.raises(Invalid, match="has no type") as refused:
        evolve(table_schema("id long"), pa.schema([("new", pa.map_(pa.string(), pa.struct([("x", pa.null())])))]))
    assert refused.value.facts["column"] == "new.value.x"
    assert "leave it out" in refused.value.advice


def test_a_table_without_the_hidden_column_gets_its_new_columns_last() -> None:
    schema = Schema(*user_fields(table_schema("id long")))
    found = evolve(schema, pa.schema([("new", pa.int64())]))
    assert found is not None
    assert [field.name for field in found.fields] == ["id", "new"]


# ── rows in every form ──


def forms(table: pa.Table) -> dict[str, Any]:
    return {
        "table": table,
        "batch": table.combine_chunks().to_batches()[0],
        "reader": table.to_reader(),
        "stream": type("Stream", (), {"__arrow_c_stream__": table.to_reader().__arrow_c_stream__})(),
        "pandas": table.to_pandas(),
        "dicts": table.to_pylist(),
        "tuple": tuple(table.to_pylist()),
    }


@pytest.mark.parametrize("form", ["table", "batch", "reader", "stream", "pandas", "dicts", "tuple"])
def test_every_form_of_rows_says_its_columns_and_can_still_be_staged(form: str) -> None:
    table = pa.table({"new": ["a", None, "c"], "id": [1, 2, 3]})
    storage, schema = Storage({}), table_schema("id long, gone string")
    now, path = write(storage, schema, forms(table)[form])
    assert [field.name for field in now.fields] == ["id", "gone", "new", "_seq"]
    assert read(storage, now, path) == [
        {"id": 1, "gone": None, "new": "a"},
        {"id": 2, "gone": None, "new": None},
        {"id": 3, "gone": None, "new": "c"},
    ]


def test_a_spark_dataframe_is_known_by_its_schema_alone() -> None:
    class Field:
        def jsonValue(self) -> dict[str, Any]:
            listed = {"type": "array", "elementType": "integer", "containsNull": False}
            kinds = [("id", "long"), ("l", listed), ("t", "timestamp_ntz")]
            return {"fields": [{"name": n, "type": t, "nullable": False, "metadata": {}} for n, t in kinds]}

    class DataFrame:
        schema = Field()

        def mapInArrow(self) -> None: ...

    df = DataFrame()
    found, data = incoming_schema(df, table_shape(table_schema("id long").model_dump_json()))
    assert data is df
    assert found.names == ["id", "l", "t"]
    assert found.field("t").type == pa.timestamp("us")
    assert found.field("l").type.value_type == pa.int32()


def test_what_are_no_rows_is_refused() -> None:
    shape = table_shape(table_schema("id long").model_dump_json())
    with pytest.raises(Invalid, match="unsupported data type"):
        incoming_schema(42, shape)
    with pytest.raises(Invalid, match="not a dict"):
        incoming_schema([1], shape)


@pytest.mark.parametrize(
    ("values", "kind", "stored"),
    [
        ([True, None], "boolean", [True, None]),
        ([1, None], "long", [1, None]),
        ([1, 2.5], "double", [1.0, 2.5]),
        (["x", "é"], "string", ["x", "é"]),
        ([b"x", None], "binary", [b"x", None]),
        ([date(2026, 1, 2)], "date", [date(2026, 1, 2)]),
        ([datetime(2026, 1, 2, 3, 4, 5, 6)], "timestamp", [datetime(2026, 1, 2, 3, 4, 5, 6)]),
        (
            [datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=1)))],
            "timestamptz",
            [datetime(2026, 1, 1, 23, tzinfo=UTC)],
        ),
        ([Decimal("1.25"), Decimal(100)], "decimal(5, 2)", [Decimal("1.25"), Decimal("100.00")]),
        ([[1, None], None, []], "list<long>", [[1, None], None, []]),
        (
            [{"a": 1}, {"b": "x"}],
            "struct<4: a: optional long, 5: b: optional string>",
            [{"a": 1, "b": None}, {"a": None, "b": "x"}],
        ),
    ],
)
def test_the_type_of_a_new_column_of_dicts_comes_from_its_values(values: Any, kind: str, stored: list[Any]) -> None:
    storage = Storage({})
    now, path = write(storage, table_schema("id long"), [{"id": i, "new": v} for i, v in enumerate(values)])
    assert str(now.find_type("new")) == kind
    assert [row["new"] for row in read(storage, now, path)] == stored


@pytest.mark.parametrize(
    "values",
    [
        [1, "x"],
        [True, 1],
        [{"a": 1}, 5],
        [[1], [{"a": 1}]],
        [2**63],
        [object()],
        [None],
        [[]],
        [{}],
        [{1: 2}],
        [{1, 2}],
        ["\ud800"],
        [date(2026, 1, 1), datetime(2026, 1, 1)],
        [datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC)],
        [Decimal("NaN")],
        ["x", b"x"],
    ],
)
def test_a_new_column_of_dicts_without_one_type_is_refused_by_name(values: list[Any]) -> None:
    with pytest.raises(Invalid) as refused:
        write(Storage({}), table_schema("id long"), [{"id": 1, "new": value} for value in values])
    assert refused.value.facts["column"].split(".")[0] == "new"
    assert refused.value.advice


def test_dicts_widen_a_number_only_where_a_value_needs_it() -> None:
    storage = Storage({})
    schema = table_schema("n int, d decimal(4,2), f float, deep array<struct<n:int>>, m map<string,int>, s string")
    rows = [{"n": 5, "d": "1.5", "f": 0.1, "deep": [{"n": 1}, None], "m": {"k": 1}}, {"n": None}]
    now, _ = write(storage, schema, rows)
    assert now == schema
    big = {"n": 2**40, "d": 12345, "deep": [{"n": 2**40}], "m": {"k": -(2**31) - 1}, "s": "x"}
    now, path = write(storage, schema, [*rows, big])
    names = ("n", "d", "f", "deep.element.n", "m.value")
    assert [str(now.find_type(name)) for name in names] == ["long", "decimal(7, 2)", "float", "long", "long"]
    assert read(storage, now, path)[2] == {**big, "d": Decimal("12345.00"), "f": None}


def test_dicts_bring_new_fields_inside_structs_lists_and_maps() -> None:
    storage = Storage({})
    schema = table_schema("s struct<`odd name`:int>, l array<struct<a:int>>, m map<string,struct<a:int>>")
    row = {"s": {"odd name": 1, "x": "new"}, "l": [{"a": 1, "y": 1.5}, None], "m": {"k": {"a": None, "z": [True]}}}
    now, path = write(storage, schema, [row, {"s": None}, {"l": []}])
    new = ("s.x", "l.element.y", "m.value.z.element")
    assert [str(now.find_type(name)) for name in new] == ["string", "double", "boolean"]
    assert read(storage, now, path) == [
        row,
        {"s": None, "l": None, "m": None},
        {"s": None, "l": [], "m": None},
    ]


def test_a_wrong_value_or_key_in_dicts_is_refused_as_without_evolution() -> None:
    schema = table_schema("n int, s struct<a:int>")
    for row, column in (({"n": "x"}, "n"), ({"n": 2**63}, "n"), ({"s": 5}, "s"), ({7: 1}, "7")):
        with pytest.raises(Invalid) as refused:
            write(Storage({}), schema, [{"new": 1, **row}])
        assert refused.value.facts["column"] == column


def test_times_of_pandas_become_microseconds_and_finer_ones_are_refused() -> None:
    storage, schema = Storage({}), table_schema("id long")
    times = pd.to_datetime(["2026-01-01T00:00:00.000001Z", None]).astype("datetime64[ns, UTC]")
    now, path = write(storage, schema, pd.DataFrame({"id": [1, 2], "t": times}))
    assert str(now.find_type("t")) == "timestamptz"
    assert [row["t"] for row in read(storage, now, path)] == [datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC), None]
    with pytest.raises(Invalid) as refused:
        write(storage, schema, pd.DataFrame({"id": [1, 2], "t": times + pd.Timedelta(1, "ns")}))
    assert refused.value.facts == {"column": "t", "count": 1}


# ── one thing additive, another wrong ──


@pytest.mark.parametrize(
    ("wrong", "column"),
    [
        ({"id": pa.array(["x"])}, "id"),
        ({"day": pa.array([1], pa.timestamp("us"))}, "day"),
        ({"l": pa.array([1])}, "l"),
        ({"s": pa.array([{"a": "x", "more": 1}])}, "s.a"),
        ({"id": None}, "id"),
        ({"n": pa.array([2.5])}, "n"),
        ({"m": pa.array([[(1, 1)]], pa.map_(pa.int64(), pa.int64()))}, "m.key"),
    ],
)
def test_one_wrong_column_refuses_the_rows_whatever_else_is_additive(wrong: dict[str, Any], column: str) -> None:
    schema = table_schema("id long not null, n int, day date, l array<int>, s struct<a:int>, m map<string,int>")
    columns = {"id": pa.array([1]), "n": pa.array([2**40]), "new": pa.array(["x"]), **wrong}
    data = pa.table({name: array for name, array in columns.items() if array is not None})
    incoming, data = incoming_schema(data, table_shape(schema.model_dump_json()))
    now = evolve(schema, incoming)
    assert now is not None
    assert "new" in [field.name for field in now.fields]
    storage, target = Storage({}), target_of(now)
    with pytest.raises(Invalid, match="do not fit the table") as refused:
        stage_in_process(target, data, storage)
    assert refused.value.facts["column"] == column
    assert list(storage.list(target.folder)) == []


def test_only_optional_columns_are_filled_and_only_on_demand() -> None:
    schema = table_schema("id long not null, a string, s struct<x:int, y:struct<z:int not null>, w:int not null>")
    data = pa.table({"id": [1, 2], "s": pa.array([{"w": 1}, None])})
    storage, target = Storage({}), target_of(schema)
    (record,) = stage_in_process(target, data, storage)
    filled = {"id": 1, "a": None, "s": {"x": None, "y": None, "w": 1}}
    assert read(storage, schema, record.path) == [filled, {"id": 2, "a": None, "s": None}]
    strict = StageTarget(target.folder, target.schema_json, target.spec_json)
    with pytest.raises(Invalid) as refused:
        stage_in_process(strict, data, storage)
    assert refused.value.facts["column"] == "a, s.x, s.y"
    for missing, column in (({"a": ["x"]}, "id"), ({"id": [1], "s": pa.array([{"x": 1}])}, "s.w")):
        with pytest.raises(Invalid, match="missing") as refused:
            stage_in_process(target, pa.table(missing), storage)
        assert refused.value.facts["column"] == column


def test_fields_inside_lists_and_maps_are_filled_too() -> None:
    schema = table_schema("l array<struct<a:int,b:string>>, m map<string,struct<a:int,b:array<int>>>")
    part = pa.struct([("a", pa.int32())])
    data = pa.table(
        {
            "l": pa.array([[{"a": 1}, None], None, []], pa.list_(part)),
            "m": pa.array([[("k", {"a": 1}), ("n", None)], None, []], pa.map_(pa.string(), part)),
        }
    )
    storage = Storage({})
    (record,) = stage_in_process(target_of(schema), data, storage)
    assert read(storage, schema, record.path) == [
        {"l": [{"a": 1, "b": None}, None], "m": {"k": {"a": 1, "b": None}, "n": None}},
        {"l": None, "m": None},
        {"l": [], "m": {}},
    ]


# ── old files under the new schema ──


def test_old_files_read_with_the_evolved_schema() -> None:
    storage = Storage({})
    schema = table_schema(
        "id int, f float, d decimal(4,2), big decimal(15,2), s struct<a:int,in:struct<x:float>>, "
        "l array<struct<a:int>>, m map<string,struct<a:int>>, k map<int,int>",
        key=["id"],
    )
    old = [
        {
            "id": 1,
            "f": 0.1,
            "d": Decimal("-1.25"),
            "big": Decimal("1234567890123.45"),
            "s": {"a": 5, "in": {"x": 0.5}},
            "l": [{"a": 1}, None],
            "m": {"k": {"a": 1}, "none": None},
            "k": {1: 2},
        },
        {"id": 2, "s": {"a": None, "in": None}, "l": []},
        {"id": 3},
    ]
    (record,) = stage_in_process(target_of(schema), old, storage)
    part = pa.struct([("a", pa.int64()), ("new", pa.string())])
    inner = pa.struct([("x", pa.float64()), ("new", pa.list_(pa.int64()))])
    incoming = pa.schema(
        [
            ("id", pa.int64()),
            ("f", pa.float64()),
            ("d", pa.decimal128(30, 2)),
            ("big", pa.decimal128(16, 2)),
            ("s", pa.struct([("a", pa.int64()), ("in", inner), ("new", inner)])),
            ("l", pa.list_(part)),
            ("m", pa.map_(pa.string(), part)),
            ("k", pa.map_(pa.int32(), pa.int64())),
            ("new", part),
        ]
    )
    now = evolve(schema, incoming)
    assert now is not None
    single = pa.scalar(0.1, pa.float32()).as_py()
    assert read(storage, now, record.path) == [
        {
            "id": 1,
            "f": single,
            "d": Decimal("-1.25"),
            "big": Decimal("1234567890123.45"),
            "s": {"a": 5, "in": {"x": 0.5, "new": None}, "new": None},
            "l": [{"a": 1, "new": None}, None],
            "m": {"k": {"a": 1, "new": None}, "none": None},
            "k": {1: 2},
            "new": None,
        },
        {
            **dict.fromkeys(("f", "d", "big", "m", "k", "new")),
            "id": 2,
            "s": {"a": None, "in": None, "new": None},
            "l": [],
        },
        {**dict.fromkeys(field.name for field in user_fields(now)), "id": 3},
    ]
    (batch,) = read_file(storage, record.path, user_fields(now))
    assert batch.schema.field("id").type == pa.int64()
    assert batch.schema.field("d").type == pa.decimal128(30, 2)
    assert batch.schema.field("s").type.field("a").type == pa.int64()


@pytest.mark.parametrize(
    ("kind", "wide", "values"),
    [
        ("int", pa.int64(), [0, -1, 7, 2**31 - 1, -(2**31)]),
        ("decimal(9,2)", pa.decimal128(38, 2), [Decimal("10.65"), Decimal("-0.05"), Decimal("9999999.99")]),
    ],
)
@pytest.mark.parametrize("partition", ["bucket(16, c)", "truncate(3, c)", "c"])
def test_a_partition_source_that_widens_keeps_the_partition_of_its_values(
    kind: str, wide: pa.DataType, values: list[Any], partition: str
) -> None:
    storage, schema = Storage({}), table_schema(f"c {kind}")
    now = evolve(schema, pa.schema([("c", wide)]))
    assert now is not None
    spec = partition_spec(schema, [partition])
    field = spec.fields[0]
    before, after = (field.transform.transform(known.find_type("c")) for known in (schema, now))
    assert [before(value) for value in values] == [after(value) for value in values]
    target = StageTarget(f"memory://lake/{clock.new_id()}", now.model_dump_json(), spec.model_dump_json())
    records = stage_in_process(target, pa.table({"c": pa.array(values, wide)}), storage)
    for record in records:
        assert len({after(row["c"]) for row in read(storage, now, record.path)}) == 1


def test_a_column_dropped_before_does_not_come_back_with_its_old_values() -> None:
    storage, schema = Storage({}), table_schema("id long, gone string")
    (record,) = stage_in_process(target_of(schema), [{"id": 1, "gone": "old"}], storage)
    dropped = Schema(*(field for field in schema.fields if field.name != "gone"), schema_id=1)
    now = evolve_schema(dropped, pa.schema([("gone", pa.string())]), schema.highest_field_id, 2)
    assert now is not None
    assert isinstance(now.find_field("gone"), NestedField)
    assert now.find_field("gone").field_id == schema.highest_field_id + 1
    assert read(storage, now, record.path) == [{"id": 1, "gone": None}]
