"""The difference between a file and the lake: one case for each step, safe or refused with a way. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from floodmark.catalog.indexes import IndexRow
from floodmark.catalog.maintenance_state import Policy
from floodmark.commit.fills import Fill, fill_property
from floodmark.commit.metadata import add_properties, new_metadata
from floodmark.commit.references import Reference, reference_property, referrer_property
from floodmark.errors import Invalid
from floodmark.model import Head
from floodmark.rows.layout import partition_spec, sort_order
from floodmark.rows.schema import table_schema
from floodmark.schema.diff import diff
from floodmark.schema.file import wanted_tables
from floodmark.schema.step import DESTRUCTIVE, NEEDS_REWRITE, REFUSED, SAFE, Step
from floodmark.schema.table_plan import Link, TablePlan
from floodmark.write.current import Current, Dependents

ORDERS = "id long, customer long, ts timestamp, n int, note string"


def table(
    name: str,
    ddl: str = ORDERS,
    *,
    key: Sequence[str] = (),
    partition: Sequence[str] = (),
    sort: Sequence[str] = (),
    rows: int = 0,
    properties: dict[str, str] | None = None,
    policy: Policy | None = None,
    **dependents: Any,
) -> Current:
    """A table as a lake would have it."""
    table_id = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
    schema = table_schema(ddl, key)
    spec, order = partition_spec(schema, partition), sort_order(schema, sort)
    metadata = new_metadata(f"file:///lake/{name}", table_id, schema, spec, order, properties or {})
    head = Head(
        branch="main",
        table=name,
        table_id=table_id,
        snapshot=7 if rows else None,
        sequence=1,
        schema_id=metadata.current_schema_id,
        spec_id=metadata.default_spec_id,
        manifest_list=None,
        metadata_location=f"file:///lake/{name}/1.json",
        version=1,
        rows=rows,
        files=1 if rows else 0,
        size_bytes=rows,
    )
    dependents = {"live_specs": frozenset({head.spec_id}) if rows else frozenset(), **dependents}
    return Current(head, metadata, policy or Policy(), Dependents(**dependents))


def plan(wanted: dict[str, dict[str, Any]], *current: Current) -> dict[str, TablePlan]:
    found = diff(wanted_tables(wanted, "here"), {one.head.table: one for one in current})
    return {one.name: one for one in found}


def steps(wanted: dict[str, dict[str, Any]], *current: Current) -> list[Step]:
    return [step for one in plan(wanted, *current).values() for step in one.steps]


def only(wanted: dict[str, Any], *current: Current) -> Step:
    (step,) = steps({"orders": wanted}, *current)
    return step


def columns(**changed: Any) -> dict[str, Any]:
    """The columns of ORDERS, but for these; None: left out."""
    whole = {"id": "long", "customer": "long", "ts": "timestamp", "n": "int", "note": "string", **changed}
    return {name: kind for name, kind in whole.items() if kind is not None}


def names(found: TablePlan) -> list[tuple[int, str]]:
    return [(field.field_id, field.name) for field in found.final_schema.fields]


# ── tables ──


def test_the_same_is_no_step() -> None:
    there = table("orders", key=["id"], partition=["day(ts)"], sort=["ts desc"], policy=Policy("90d", "ts"))
    wanted = {
        "columns": columns(),
        "key": ["id"],
        "partition": ["day(ts)"],
        "sort": ["ts desc"],
        "retention": "90d",
        "references": {},
        "comment": "",
    }
    found = plan({"orders": wanted}, there)["orders"]
    assert found.steps == ()
    assert not found.changes
    assert plan({"orders": {}}, there)["orders"].steps == ()


def test_the_order_of_columns_is_no_difference() -> None:
    assert steps({"orders": {"columns": dict(reversed(columns().items()))}}, table("orders")) == []


def test_create_table() -> None:
    wanted = {"columns": {"id": "long", "c": {"type": "string", "default": "x"}}, "key": ["id"], "comment": "why"}
    found = plan({"new": wanted | {"retention": "10 rows"}})["new"]
    (step,) = found.steps
    assert (step.action, step.kind) == ("create_table", SAFE)
    assert found.shape is not None
    assert found.shape.schema.identifier_field_ids == [1]
    assert dict(found.shape.properties) == {"comment": "why", **dict([fill_property(Fill(2, "c", "'x'"))])}
    assert found.policy == Policy("10 rows", None)


def test_a_table_that_is_not_there_needs_columns() -> None:
    (step,) = steps({"new": {"retention": "10 rows"}})
    assert (step.action, step.kind, step.way) == ("create_table", REFUSED, "Give it `columns`.")


def test_a_name_that_differs_by_case_only_is_refused() -> None:
    (step,) = steps({"Orders": {"columns": {"a": "int"}}}, table("orders"))
    assert (step.kind, step.way) == (REFUSED, "Use the name orders in the file.")


def test_drop_table() -> None:
    found = plan({"orders": {"drop": True}}, table("orders", rows=3))["orders"]
    assert [(step.action, step.kind) for step in found.steps] == [("drop_table", DESTRUCTIVE)]
    assert found.drop
    assert steps({"orders": {"drop": True}}) == []


@pytest.mark.parametrize(
    ("users", "word"),
    [
        ({"settings": {"out": "digest"}}, "out"),
        ({"jobs": ("history of orders",)}, "history of orders"),
        ({"branches": ("dev",)}, "dev"),
    ],
    ids=["sinks", "jobs", "branches"],
)
def test_a_table_with_users_is_not_dropped(users: dict[str, Any], word: str) -> None:
    step = only({"drop": True}, table("orders", **users))
    assert step.kind == REFUSED
    assert word in step.reason
    assert step.way


# ── columns ──


def test_add_column_comes_before_the_hidden_one_with_a_new_id() -> None:
    found = plan(
        {"orders": {"columns": columns(more={"type": "struct<a:int>", "comment": "c"})}}, table("orders", rows=1)
    )
    (step,) = found["orders"].steps
    assert (step.action, step.column, step.kind) == ("add_column", "more", SAFE)
    fields = found["orders"].final_schema.fields
    assert [field.name for field in fields[-2:]] == ["more", "_seq"]
    assert (fields[-2].field_id, fields[-2].doc, fields[-2].required) == (7, "c", False)
    assert found["orders"].final_schema.highest_field_id == 8
    assert found["orders"].final_schema.schema_id == 1


@pytest.mark.parametrize(("rows", "kind"), [(0, SAFE), (2, NEEDS_REWRITE)], ids=["empty", "with rows"])
@pytest.mark.parametrize("required", [False, True], ids=["optional", "required"])
def test_add_column_with_a_default_fills_what_is_there(rows: int, kind: str, required: bool) -> None:
    new = {"type": "long", "default": 7, "required": required}
    found = plan({"orders": {"columns": columns(more=new)}}, table("orders", rows=rows))["orders"]
    assert [(step.action, step.kind) for step in found.steps] == [("add_column", kind)]
    assert found.fills == (Fill(7, "more", "7"),)
    assert dict(found.properties) == dict([fill_property(Fill(7, "more", "7"))])
    assert found.final_schema.find_field(7).required is required
    assert found.no_nulls == ()


def test_add_column_that_is_never_null() -> None:
    wanted = {"columns": columns(more={"type": "int", "required": True})}
    step = only(wanted, table("orders", rows=1))
    assert (step.action, step.kind) == ("add_column", REFUSED)
    assert "default" in step.way
    found = plan({"orders": wanted}, table("orders"))["orders"]
    assert [step.kind for step in found.steps] == [SAFE]
    assert found.no_nulls == (7,), "rows that come before the publish would not have it"


def test_rename_column_keeps_the_id() -> None:
    there = table("orders", rows=1, policy=Policy("90d", "ts"), sort=["ts"], partition=["day(ts)"])
    wanted = {"columns": columns(ts=None, at={"type": "timestamp", "renamed_from": "ts"})}
    found = plan({"orders": wanted}, there)["orders"]
    assert [(step.action, step.column, step.kind) for step in found.steps] == [("rename_column", "at", SAFE)]
    assert (3, "at") in names(found)
    assert found.policy == Policy("90d", "at"), "the retention goes with it"
    assert (found.spec, found.sort) == (None, None)


def test_renamed_from_is_harmless_once_it_is_done() -> None:
    there = table("orders", "id long, at timestamp")
    wanted = {"columns": {"id": "long", "at": {"type": "timestamp", "renamed_from": "ts"}}}
    assert steps({"orders": wanted}, there) == []


def test_a_rename_may_change_the_case() -> None:
    wanted = {"columns": columns(note=None, NOTE={"type": "string", "renamed_from": "note"})}
    assert only(wanted, table("orders")).action == "rename_column"


RENAMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both are there": (columns(n={"type": "int", "renamed_from": "note"}, note=None), {}),
    "it is another column's": (columns(m={"type": "int", "renamed_from": "n"}), {}),
    "a partition is called so": (
        columns(note=None, ts_day={"type": "string", "renamed_from": "note"}),
        {"partition": ["day(ts)"]},
    ),
    "a sink names it": (
        columns(note=None, text={"type": "string", "renamed_from": "note"}),
        {"sinks": {"out": frozenset({"note"})}},
    ),
    "a job is at work": (columns(note=None, text={"type": "string", "renamed_from": "note"}), {"jobs": ("fill",)}),
    "an expression names it": (
        columns(note=None, text={"type": "string", "renamed_from": "note"}),
        {"properties": dict([fill_property(Fill(4, "n", "length(note)"))])},
    ),
}


@pytest.mark.parametrize("name", RENAMES)
def test_a_rename_that_cannot_be_is_refused_with_a_way(name: str) -> None:
    wanted, there = RENAMES[name]
    found = [step for step in steps({"orders": {"columns": wanted}}, table("orders", **there)) if step.kind == REFUSED]
    assert "rename_column" in [step.action for step in found]
    assert all(step.reason and step.way for step in found)


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ("int", "long"),
        ("float", "double"),
        ("decimal(10,2)", "decimal(12,2)"),
        ("array<int>", "array<long>"),
        ("map<string,float>", "map<string,double>"),
        ("struct<a:int>", "struct<a:long,b:string>"),
        ("struct<a:int not null>", "struct<a:int>"),
    ],
)
def test_widen_type(have: str, want: str) -> None:
    found = plan({"t": {"columns": {"id": "long", "c": want}}}, table("t", f"id long, c {have}", rows=1))["t"]
    assert [(step.action, step.column, step.kind) for step in found.steps] == [("widen_type", "c", SAFE)]
    assert found.final_schema.find_field("c").field_id == 2
    # Said again, it is no difference.
    again = replace(table("t", f"id long, c {have}"), metadata=_with_schema(table("t", f"id long, c {have}"), found))
    again = replace(again, head=replace(again.head, schema_id=1))
    assert steps({"t": {"columns": {"id": "long", "c": want}}}, again) == []


def _with_schema(there: Current, found: TablePlan) -> Any:
    from floodmark.commit.metadata import add_schema

    return add_schema(there.metadata, found.final_schema)


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ("long", "int"),
        ("int", "string"),
        ("decimal(10,2)", "decimal(10,3)"),
        ("decimal(10,2)", "decimal(9,2)"),
        ("timestamp", "timestamp_ntz"),
        ("struct<a:int,b:int>", "struct<a:int>"),
        ("struct<a:int>", "struct<a:int not null>"),
        ("struct<a:int>", "struct<a:int, b:int not null>"),
        ("map<int,int>", "map<long,int>"),
        ("array<int>", "int"),
    ],
)
def test_another_type_is_refused_with_a_way(have: str, want: str) -> None:
    (step,) = steps({"t": {"columns": {"id": "long", "c": want}}}, table("t", f"id long, c {have}"))
    assert (step.action, step.column, step.kind) == ("widen_type", "c", REFUSED)
    assert "backfill column" in step.way


def test_a_type_that_an_expression_counts_with_stays() -> None:
    there = table("orders", properties=dict([fill_property(Fill(2, "customer", "n + 1"))]))
    assert only({"columns": columns(n="long")}, there).kind == REFUSED


def test_relax_required_but_not_of_a_key() -> None:
    there = table("orders", "id long, n int not null", key=["id"])
    found = plan({"orders": {"columns": {"id": "long", "n": "int"}}}, there)["orders"]
    assert [(step.action, step.column, step.kind) for step in found.steps] == [("relax_required", "n", SAFE)]
    assert [field.required for field in found.final_schema.fields[:2]] == [True, False]


def test_require_is_looked_at() -> None:
    found = plan({"orders": {"columns": columns(n="int not null")}}, table("orders", rows=1))["orders"]
    assert [(step.action, step.column, step.kind) for step in found.steps] == [("require", "n", SAFE)]
    assert found.no_nulls == (4,)
    assert found.looks


def test_comments() -> None:
    there = table("orders", "id long comment 'old', n int comment 'stays', s struct<a:int>")
    wanted = {
        "columns": {"id": {"type": "long", "comment": "new"}, "n": "int", "s": "struct<a:int comment 'in'>"},
        "comment": "about",
    }
    found = plan({"orders": wanted}, there)["orders"]
    assert [(step.action, step.column) for step in found.steps] == [
        ("comment", "id"),
        ("comment", "s"),
        ("comment", None),
    ]
    assert [field.doc for field in found.final_schema.fields[:2]] == ["new", "stays"]
    assert dict(found.properties) == {"comment": "about"}
    gone = plan(
        {"orders": {"columns": {"id": {"type": "long", "comment": ""}, "n": "int", "s": "struct<a:int>"}}}, there
    )
    assert gone["orders"].final_schema.fields[0].doc is None


def test_drop_column() -> None:
    there = table("orders", rows=1, properties=dict([fill_property(Fill(5, "note", "'x'"))]))
    found = plan({"orders": {"columns": columns(note=None)}}, there)["orders"]
    assert [(step.action, step.column, step.kind) for step in found.steps] == [("drop_column", "note", DESTRUCTIVE)]
    assert [name for _, name in names(found)] == ["id", "customer", "ts", "n", "_seq"]
    # Another branch may have the column: what fills it stays.
    assert not found.properties


def test_a_column_that_may_have_been_renamed_is_not_dropped() -> None:
    wanted = {"columns": columns(note=None, text="string")}
    found = {step.action: step for step in steps({"orders": wanted}, table("orders"))}
    assert found["drop_column"].kind == REFUSED
    assert "renamed_from = 'note'" in found["drop_column"].way
    said = steps({"orders": wanted | {"dropped": ["note"]}}, table("orders"))
    assert [(step.action, step.kind) for step in said] == [("drop_column", DESTRUCTIVE), ("add_column", SAFE)]


def referring() -> tuple[Current, Current]:
    """orders.customer refers to customers.id."""
    child, parent = table("orders", rows=1), table("customers", "id long, name string", key=["id"], rows=1)
    reference = Reference(child.head.table_id, 2, "customers", parent.head.table_id, 1)
    there = add_properties(child.metadata, dict([reference_property(reference)]))
    target = add_properties(parent.metadata, dict([referrer_property(reference, "orders")]))
    return replace(child, metadata=there), replace(parent, metadata=target)


NEEDED: dict[str, tuple[str, Current]] = {
    "key": ("id", table("orders", key=["id"])),
    "partition": ("ts", table("orders", partition=["day(ts)"])),
    "sort": ("ts", table("orders", sort=["ts"])),
    "retention": ("ts", table("orders", policy=Policy("9d", "ts"))),
    "reference": ("customer", referring()[0]),
    "expression": ("note", table("orders", properties=dict([fill_property(Fill(4, "n", "length(note)"))]))),
    "sink": ("note", table("orders", sinks={"out": frozenset({"note"})})),
    "job": ("note", table("orders", jobs=("fill",))),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_column_that_is_needed_is_not_dropped(name: str) -> None:
    column, there = NEEDED[name]
    parent = [referring()[1]] if name == "reference" else []
    (step,) = steps({"orders": {"columns": columns(**{column: None})}}, there, *parent)
    assert (step.action, step.column, step.kind) == ("drop_column", column, REFUSED)
    assert step.reason
    assert step.way


def test_a_column_by_which_live_files_are_partitioned_is_not_dropped_with_the_partition() -> None:
    wanted = {"columns": columns(ts=None), "partition": []}
    assert REFUSED in [step.kind for step in steps({"orders": wanted}, table("orders", partition=["day(ts)"], rows=1))]
    empty = steps({"orders": wanted}, table("orders", partition=["day(ts)"]))
    assert [(step.action, step.kind) for step in empty] == [("drop_column", DESTRUCTIVE), ("change_partition", SAFE)]


# ── defaults ──


def test_set_default_where_every_file_holds_the_column() -> None:
    wanted = {"columns": columns(note={"type": "string", "default": "x"})}
    found = plan({"orders": wanted}, table("orders", rows=1))["orders"]
    assert [(step.action, step.kind) for step in found.steps] == [("set_default", SAFE)]
    assert found.schema is not None, "what was staged without it must not pass"
    assert found.fills == ()
    there = table("orders", rows=1, properties=dict([fill_property(Fill(5, "note", "'x'"))]))
    assert steps({"orders": wanted}, there) == []
    assert steps({"orders": {"columns": columns()}}, there) == [], "left out: as it is"


def test_set_default_is_refused_where_rows_would_change() -> None:
    wanted = {"columns": columns(note={"type": "string", "default": "x"})}
    assert only(wanted, table("orders", rows=1, lacking=frozenset({5}))).kind == REFUSED
    bound = table("orders", properties=dict([fill_property(Fill(5, "note", "upper(note)"))]))
    assert only(wanted, bound).kind == REFUSED


# ── layout ──


def test_change_partition_keeps_ids_of_fields_that_stay() -> None:
    there = table("orders", partition=["day(ts)"], rows=1)
    found = plan({"orders": {"partition": ["bucket(4, id)", "day(ts)"]}}, there)["orders"]
    assert [(step.action, step.kind) for step in found.steps] == [("change_partition", SAFE)]
    assert found.spec is not None
    assert [(part.name, part.field_id) for part in found.spec.fields] == [("id_bucket", 1001), ("ts_day", 1000)]
    assert found.spec.spec_id == 1
    assert found.schema is None


def test_a_partition_of_another_size_gets_another_name() -> None:
    there = table("orders", partition=["bucket(4, id)"])
    spec = plan({"orders": {"partition": ["bucket(8, id)"]}}, there)["orders"].spec
    assert spec is not None
    assert [(part.name, part.field_id) for part in spec.fields] == [("id_bucket_2", 1001)]


def test_change_partition_to_nothing_and_change_sort() -> None:
    there = table("orders", partition=["day(ts)"], sort=["ts"])
    found = plan({"orders": {"partition": [], "sort": ["ts desc", "id"]}}, there)["orders"]
    assert [(step.action, step.kind) for step in found.steps] == [("change_partition", SAFE), ("change_sort", SAFE)]
    assert found.spec is not None
    assert found.spec.is_unpartitioned()
    assert found.sort is not None
    assert found.sort.order_id == 2
    unsorted = plan({"orders": {"sort": []}}, there)["orders"].sort
    assert unsorted is not None
    assert unsorted.order_id == 0


@pytest.mark.parametrize("wanted", [{"partition": ["day(what)"]}, {"sort": ["what"]}], ids=["partition", "sort"])
def test_a_layout_by_no_column_is_refused(wanted: dict[str, Any]) -> None:
    assert only(wanted, table("orders")).kind == REFUSED


# ── keys and retention ──


def test_add_key_is_looked_at() -> None:
    found = plan({"orders": {"columns": columns(), "key": ["id"]}}, table("orders", rows=2))["orders"]
    assert [(step.action, step.kind) for step in found.steps] == [("add_key", SAFE)]
    assert found.final_schema.identifier_field_ids == [1]
    assert found.final_schema.find_field(1).required
    assert (found.unique, found.no_nulls) == (True, (1,))


KEYS: dict[str, tuple[dict[str, Any], Current]] = {
    "another": ({"key": ["customer"]}, table("orders", key=["id"])),
    "taken away": ({"key": []}, table("orders", key=["id"])),
    "no column": ({"key": ["what"]}, table("orders")),
    "a float": ({"key": ["f"]}, table("orders", "id long, f float")),
    "a column that the rows lack": ({"columns": columns(k="int"), "key": ["k"]}, table("orders", rows=1)),
    "named twice": ({"key": ["id", "id"]}, table("orders")),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_that_cannot_be_is_refused_with_a_way(name: str) -> None:
    wanted, there = KEYS[name]
    found = [step for step in steps({"orders": wanted}, there) if step.action == "add_key"]
    assert [step.kind for step in found] == [REFUSED]
    assert found[0].way


def test_set_retention() -> None:
    found = plan({"orders": {"retention": "90d"}}, table("orders"))["orders"]
    assert [(step.action, step.column, step.kind) for step in found.steps] == [("set_retention", "ts", SAFE)]
    assert found.policy == Policy("90d", "ts")
    assert (
        plan({"orders": {"retention": "none"}}, table("orders", policy=Policy("9d", "ts")))["orders"].policy == Policy()
    )
    assert steps({"orders": {"retention": "none"}}, table("orders")) == []
    two = table("orders", "id long, a timestamp, b timestamp", policy=Policy("9d", "b"))
    assert steps({"orders": {"retention": "9d"}}, two) == [], "the column it goes by stays"
    assert only({"retention": "9d"}, table("orders", "id long, a timestamp, b timestamp")).kind == REFUSED


# ── references ──


def test_a_reference_touches_both_tables() -> None:
    there, parent = table("orders", rows=1), table("customers", "id long, name string", key=["id"], rows=1)
    found = plan({"orders": {"references": {"customer": "customers.id"}}}, there, parent)
    assert [(step.table, step.action, step.column, step.kind) for one in found.values() for step in one.steps] == [
        ("orders", "add_reference", "customer", SAFE)
    ]
    assert found["orders"].links == (Link(2, "customers", 1),)
    # Both get a shape of their own, so that writers of either see it.
    assert [found[name].final_schema.schema_id for name in ("orders", "customers")] == [1, 1]
    assert found["customers"].wanted is None


def test_a_reference_between_tables_of_the_same_file() -> None:
    tables = {
        "orders": {"columns": columns(), "references": {"customer": "customers.id"}},
        "customers": {"columns": {"name": "string", "id": "long"}, "key": ["id"]},
        "people": {"columns": {"id": "long", "boss": "long"}, "key": ["id"], "references": {"boss": "people.id"}},
    }
    found = plan(tables)
    assert found["orders"].links == (Link(2, "customers", 2),)
    assert found["people"].links == (Link(2, "people", 1),)
    assert {step.kind for one in found.values() for step in one.steps} == {SAFE}


CUSTOMERS = table("customers", "id long, name string, code int", key=["id"])
LINKS: dict[str, tuple[str, list[Current]]] = {
    "no table": ("nobody.id", []),
    "no key": ("customers.name", [CUSTOMERS]),
    "part of a key": ("pairs.a", [table("pairs", "a long, b long", key=["a", "b"])]),
    "another type": ("codes.id", [table("codes", "id int", key=["id"])]),
    "a parent with retention": (
        "days.id",
        [table("days", "id long, ts timestamp", key=["id"], policy=Policy("9d", "ts"))],
    ),
}


@pytest.mark.parametrize("name", LINKS)
def test_a_reference_that_cannot_be_is_refused_with_a_way(name: str) -> None:
    target, parents = LINKS[name]
    (step,) = steps({"orders": {"references": {"customer": target}}}, table("orders"), *parents)
    assert (step.action, step.kind) == ("add_reference", REFUSED)
    assert step.way


def test_a_filled_column_cannot_refer() -> None:
    there = table("orders", properties=dict([fill_property(Fill(2, "customer", "1"))]))
    (step,) = steps({"orders": {"references": {"customer": "customers.id"}}}, there, CUSTOMERS)
    assert step.kind == REFUSED


def test_a_reference_that_is_there_is_no_step_and_can_go() -> None:
    child, parent = referring()
    assert steps({"orders": {"references": {"customer": "customers.id"}}}, child, parent) == []
    assert steps({"orders": {"columns": columns()}}, child, parent) == []
    found = plan({"orders": {"references": {}}}, child, parent)
    assert [(step.action, step.kind) for step in found["orders"].steps] == [("drop_reference", SAFE)]
    assert dict(found["orders"].properties) == {"floodmark.reference.2": ""}
    assert dict(found["customers"].properties) == {f"floodmark.referrer.{child.head.table_id}.2": ""}


def test_a_table_that_others_refer_to_stays() -> None:
    child, parent = referring()
    (step,) = steps({"customers": {"drop": True}}, child, parent)
    assert (step.action, step.kind) == ("drop_table", REFUSED)
    assert "orders" in step.reason
    for others in ({"orders": {"drop": True}}, {"orders": {"references": {}}}):
        found = steps({"customers": {"drop": True}, **others}, child, parent)
        assert {step.kind for step in found} <= {DESTRUCTIVE, SAFE}
    (step,) = steps({"customers": {"retention": "10 rows"}}, child, parent)
    assert (step.action, step.kind) == ("set_retention", REFUSED)


def test_a_table_that_goes_is_forgotten_by_the_one_it_refers_to() -> None:
    child, parent = referring()
    found = plan({"orders": {"drop": True}}, child, parent)
    assert found["orders"].drop
    assert dict(found["customers"].properties) == {f"floodmark.referrer.{child.head.table_id}.2": ""}
    assert found["customers"].schema is not None


def test_the_columns_of_a_reference_are_widened_together() -> None:
    child = table("orders", "id long, customer int")
    parent = table("customers", "id int", key=["id"])
    reference = Reference(child.head.table_id, 2, "customers", parent.head.table_id, 1)
    child = replace(child, metadata=add_properties(child.metadata, dict([reference_property(reference)])))
    wanted = {"orders": {"columns": {"id": "long", "customer": "long"}}}
    assert REFUSED in [step.kind for step in steps(wanted, child, parent)]
    both = steps(wanted | {"customers": {"columns": {"id": "long"}}}, child, parent)
    assert [(step.table, step.action, step.kind) for step in both] == [
        ("orders", "widen_type", SAFE),
        ("customers", "widen_type", SAFE),
    ]
    alone = steps({"customers": {"columns": {"id": "long"}}}, child, parent)
    assert [(step.table, step.kind) for step in alone] == [("customers", SAFE), ("orders", REFUSED)]


# ── indexes ──


def index(kind: str, *field_ids: int, state: str = "live") -> IndexRow:
    return IndexRow("01X", "table", field_ids, kind, state, 1, True, "00" * 16)


def test_indexes_are_added_and_dropped_by_what_they_are_on() -> None:
    there = replace(table("orders", key=["id"]), indexes=(index("key", 1), index("value", 2), index("value", 2, 5)))
    assert steps({"orders": {"index": ["customer", ["note", "customer"], "id"]}}, there) == []
    found = plan({"orders": {"index": ["ts"]}}, there)["orders"]
    assert [(step.action, step.column, step.kind) for step in found.steps] == [
        ("add_index", "ts", SAFE),
        ("drop_index", "customer", SAFE),
        ("drop_index", "customer, note", SAFE),
    ]
    assert [one.field_ids for one in found.declared] == [(3,)]
    assert [one.field_ids for one in found.undeclared] == [(2,), (2, 5)]
    assert not found.changes
    assert plan({"orders": {"comment": ""}}, there)["orders"].steps == ()


def test_a_dropped_key_index_comes_back_only_where_it_is_named() -> None:
    there = replace(table("orders", key=["id"]), indexes=(index("key", 1, state="dropped"),))
    assert steps({"orders": {"index": []}}, there) == []
    assert only({"index": ["id"]}, there).action == "add_index"


def test_an_index_on_a_column_that_is_dropped_or_renamed_in_the_same_plan() -> None:
    there = replace(table("orders"), indexes=(index("value", 2), index("value", 5)))
    renamed = columns(customer=None, buyer={"type": "long", "renamed_from": "customer"})
    assert [one.action for one in steps({"orders": {"columns": renamed, "index": ["buyer", "note"]}}, there)] == [
        "rename_column"
    ]
    found = steps({"orders": {"columns": columns(note=None), "index": ["customer"]}}, there)
    assert [(one.action, one.column) for one in found] == [("drop_column", "note"), ("drop_index", "note")]
    with pytest.raises(Invalid, match="the table has no such column"):
        steps({"orders": {"columns": columns(note=None), "index": ["note"]}}, there)
    # Without columns in the file, the table's own decide.
    assert only({"index": ["customer", "note", "nope"]}, there).kind == REFUSED
