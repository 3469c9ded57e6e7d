"""A table gets another shape while a write is under way: its rows are there, in the new shape, or it is a Conflict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

import floodmark as fm
from floodmark.commit.intent import Intent
from floodmark.commit.metadata import new_snapshot_id, schema_of
from floodmark.commit.seal import WRITE, Edit
from floodmark.errors import Conflict, Invalid
from floodmark.model import MAIN
from floodmark.testing.invariants import check_lake
from floodmark.write.change import Change
from floodmark.write.options import WriteOptions
from tests.conftest import Place
from tests.contract.test_catalog_keyed import at_point
from tests.without_spark import without_spark

pytestmark = pytest.mark.mostly_sqlite

COLUMNS = "id long not null, part string, n int, name string"
Shape = Callable[[fm.Lake, str], None]


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", COLUMNS, partition=["part"])
        lake.create_table("people", COLUMNS, key=["id"], partition=["bucket(2, id)"])
        for table in ("events", "people"):
            lake.append(table, [row(1, "a"), row(2, "b")])
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    with place.open(actor="other") as other:
        yield other


def row(number: int, part: str = "a") -> dict[str, Any]:
    return {"id": number, "part": part, "n": number * 10, "name": f"row {number}"}


# ── other shapes ──


def publish(lake: fm.Lake, table: str, **given: Any) -> None:
    """One commit of another shape, as it is given: by a change that does nothing else."""
    head = lake.catalog.history.head(table)
    metadata = lake.catalog.files.metadata(head.metadata_location)
    values: dict[str, Any] = {"schema_id": head.schema_id, "spec_id": head.spec_id, **given}
    edit = Edit(WRITE, table, head.table_id, metadata.location, snapshot=new_snapshot_id(), **values)
    change = Change.begin(without_spark(lake), Intent("apply", MAIN, "shaper", ""))
    change.give(edit)
    change.publish()


def _now(lake: fm.Lake, table: str) -> tuple[TableMetadata, Schema]:
    head = lake.catalog.history.head(table)
    metadata = lake.catalog.files.metadata(head.metadata_location)
    return metadata, schema_of(metadata, head)


def columns(change: Callable[[NestedField], NestedField | None], *more: str, key: tuple[str, ...] = ()) -> Shape:
    """A shape with each column changed, or left out; and new text columns."""

    def act(lake: fm.Lake, table: str) -> None:
        metadata, schema = _now(lake, table)
        kept = [field for field in map(change, schema.fields) if field is not None]
        ids = range(metadata.last_column_id + 1, metadata.last_column_id + 10)
        kept[-1:-1] = [NestedField(number, name, StringType()) for number, name in zip(ids, more, strict=False)]
        keys = [field.field_id for field in kept if field.name in key] or list(schema.identifier_field_ids)
        number = max(known.schema_id for known in metadata.schemas) + 1
        shape = Schema(*kept, schema_id=number, identifier_field_ids=keys)
        publish(lake, table, schema_id=number, schema=shape.model_dump_json(), base_schema_id=schema.schema_id)

    return act


def _set(column: str, **values: Any) -> Callable[[NestedField], NestedField]:
    return lambda field: field.model_copy(update=values) if field.name == column else field


def _without(name: str) -> Callable[[NestedField], NestedField | None]:
    return lambda field: None if field.name == name else field


def _swapped(one: str, other: str) -> Callable[[NestedField], NestedField]:
    names = {one: other, other: one}
    return lambda field: field.model_copy(update={"name": names.get(field.name, field.name)})


def new_spec(lake: fm.Lake, table: str) -> None:
    """Two partition fields where there was one: a value of the old spec would be Corrupt, or wrong."""
    metadata, schema = _now(lake, table)
    source = schema.find_field("id").field_id
    fields = [PartitionField(source, 1100, BucketTransform(4), "id_four")]
    if table == "events":
        fields.append(PartitionField(schema.find_field("name").field_id, 1101, IdentityTransform(), "name"))
    number = max(metadata.specs()) + 1
    spec = PartitionSpec(*fields, spec_id=number)
    publish(lake, table, spec_id=number, spec=spec.model_dump_json(), base_spec_id=metadata.default_spec_id)


def new_sort(lake: fm.Lake, table: str) -> None:
    _, schema = _now(lake, table)
    order = SortOrder(SortField(schema.find_field("n").field_id, IdentityTransform()), order_id=5)
    publish(lake, table, sort=order.model_dump_json())


rename = columns(_set("name", name="title"))
drop = columns(_without("name"))
widen = columns(_set("n", field_type=LongType()))
anew = columns(_without("name"), "name")
swap = columns(_swapped("part", "name"))
require = columns(_set("n", required=True))
more = columns(lambda field: field, "extra")
# What a row that was sent as row(number) is in the shape.
SHAPES: dict[str, tuple[Shape, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "renamed": (rename, lambda sent: {**_less(sent, "name"), "title": sent["name"]}),
    "dropped": (drop, lambda sent: _less(sent, "name")),
    "widened": (widen, lambda sent: sent),
    "anew": (anew, lambda sent: {**sent, "name": None}),
    "swapped": (swap, lambda sent: {**sent, "part": sent["name"], "name": sent["part"]}),
    "required": (require, lambda sent: sent),
    "added": (more, lambda sent: {**sent, "extra": None}),
    "partitioned": (new_spec, lambda sent: sent),
    "sorted": (new_sort, lambda sent: sent),
}


def _less(sent: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in sent.items() if key != name}


def content(lake: fm.Lake, table: str) -> list[dict[str, Any]]:
    found = lake.read_arrow(table).read_all().to_pylist()
    return sorted(found, key=lambda one: one["id"])


def check_partitions(lake: fm.Lake, table: str) -> None:
    """Every file lies where its rows belong, by the spec that it names."""
    metadata, schema = _now(lake, table)
    head = lake.catalog.history.head(table)
    rows = {read["id"]: read for read in lake.read_arrow(table).read_all().to_pylist()}
    for manifest in lake.catalog.files.manifests(head.manifest_list):
        spec = metadata.specs()[manifest.partition_spec_id]
        for entry in lake.catalog.files.entries(manifest):
            found = [rows[number] for number in _ids(lake, entry.data_file.file_path)]
            assert found
            for at, field in enumerate(spec.fields):
                source = schema.find_field(field.source_id)
                transform = field.transform.transform(source.field_type)
                assert {transform(read[source.name]) for read in found} == {entry.data_file.partition[at]}


def _ids(lake: fm.Lake, path: str) -> set[int]:
    import pyarrow.parquet as pq

    with lake.catalog.storage.open_input(path) as stream:
        return set(pq.read_table(stream, columns=["id"])["id"].to_pylist())


# ── writes beside them ──


@pytest.mark.parametrize(
    ("shape", "point"), [*((shape, "sealed") for shape in SHAPES), ("renamed", "built"), ("partitioned", "built")]
)
def test_appended_rows_are_there_in_the_new_shape(lake: fm.Lake, other: fm.Lake, shape: str, point: str) -> None:
    act, expected = SHAPES[shape]
    with at_point(f"append.{point}", lambda: act(other, "events")):
        commit = lake.append("events", [row(3, "c"), row(4, "a")])
    assert commit.outcome == "committed"
    assert content(lake, "events") == [expected(row(1, "a")), expected(row(2, "b")), *map(expected, _sent())]
    check_partitions(lake, "events")
    # The next write is one of the new shape from the start.
    lake.append("events", [expected({**row(5), "name": "five"})])
    check_partitions(lake, "events")


def _sent() -> list[dict[str, Any]]:
    return [row(3, "c"), row(4, "a")]


@pytest.mark.parametrize("shape", SHAPES)
def test_merged_rows_are_there_in_the_new_shape(lake: fm.Lake, other: fm.Lake, shape: str) -> None:
    act, expected = SHAPES[shape]
    with at_point("merge.sealed", lambda: act(other, "people")):
        lake.merge("people", [{**row(2, "b"), "n": 7}, row(3, "c")])
    assert content(lake, "people") == [
        expected(row(1, "a")),
        expected({**row(2, "b"), "n": 7}),
        expected(row(3, "c")),
    ]
    check_partitions(lake, "people")


@pytest.mark.parametrize("shape", SHAPES)
def test_deletes_by_key_and_by_a_condition_that_still_means_the_same_go_on(
    lake: fm.Lake, other: fm.Lake, shape: str
) -> None:
    act, expected = SHAPES[shape]
    lake.append("people", [row(3, "c")])
    with at_point("transaction.sealed", lambda: act(other, "people")), lake.transaction("both") as tx:
        tx.delete_keys("people", [{"id": 1}, {"id": 77}])
        tx.delete("people", "id = 3")
        tx.append("people", [row(4, "d")])
    assert content(lake, "people") == [expected(row(2, "b")), expected(row(4, "d"))]
    check_partitions(lake, "people")
    feed = lake.changes("people", 2).arrow().read_all().to_pylist()
    assert sorted((one["id"], one["_change"]) for one in feed) == [(1, "delete"), (3, "delete"), (4, "upsert")]


@pytest.mark.parametrize("shape", ["renamed", "dropped", "anew", "swapped"])
@pytest.mark.parametrize("verb", ["delete", "overwrite"])
def test_a_condition_that_names_another_column_now_is_a_conflict(
    lake: fm.Lake, other: fm.Lake, shape: str, verb: str
) -> None:
    act, expected = SHAPES[shape]

    def write() -> None:
        if verb == "delete":
            lake.delete("events", "name = 'row 1'")
        else:
            lake.overwrite("events", [row(1, "a")], where="name = 'row 1'")

    with at_point(f"{verb}.sealed", lambda: act(other, "events")), pytest.raises(Conflict) as caught:
        write()
    assert caught.value.facts["table"] == "events"
    assert content(lake, "events") == [expected(row(1, "a")), expected(row(2, "b"))]


@pytest.mark.parametrize("verb", ["append", "merge", "overwrite"])
def test_rows_without_a_value_that_is_required_now_are_a_conflict(lake: fm.Lake, other: fm.Lake, verb: str) -> None:
    with at_point(f"{verb}.sealed", lambda: require(other, "people")), pytest.raises(Conflict) as caught:
        getattr(lake, verb)("people", [{**row(3), "n": None}])
    assert "n" in str(caught.value.facts["cause"])
    assert content(lake, "people") == [row(1, "a"), row(2, "b")]
    with pytest.raises(Invalid):
        lake.append("people", [{**row(3), "n": None}])


def test_a_key_that_came_meanwhile_is_kept_by_the_append_that_was_staged_without_it(
    lake: fm.Lake, other: fm.Lake
) -> None:
    keyed = columns(lambda field: field, key=("id",))
    with at_point("append.sealed", lambda: keyed(other, "events")):
        lake.append("events", [row(3)])
    with pytest.raises(Invalid):
        lake.append("events", [row(3)])
    assert [one["id"] for one in content(lake, "events")] == [1, 2, 3]


@pytest.mark.parametrize("rows", [[row(1)], [row(3), row(3)]], ids=["there", "twice"])
def test_rows_that_break_a_key_that_came_meanwhile_are_invalid(
    lake: fm.Lake, other: fm.Lake, rows: list[dict[str, Any]]
) -> None:
    keyed = columns(lambda field: field, key=("id",))
    with at_point("append.sealed", lambda: keyed(other, "events")), pytest.raises(Invalid) as caught:
        lake.append("events", rows)
    assert f"id={rows[0]['id']}" in str(caught.value)
    assert [one["id"] for one in content(lake, "events")] == [1, 2]


def test_a_column_that_the_rows_bring_is_not_taken_for_the_one_that_got_its_id(lake: fm.Lake, other: fm.Lake) -> None:
    with at_point("transaction.sealed", lambda: more(other, "events")), lake.transaction("evolve") as tx:
        tx.append("events", [{**row(3), "city": "Rome"}], evolve=True)
        tx.append("events", [{**row(4), "city": "Oslo"}])
    assert [one["city"] for one in content(lake, "events")] == [None, None, "Rome", "Oslo"]
    assert {one["extra"] for one in content(lake, "events")} == {None}


def test_several_shapes_one_after_the_other(lake: fm.Lake, other: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    # The other one acts inside the merge, and so waits until the merge's turn has run out.
    monkeypatch.setattr("floodmark.commit.publication.PLAN_TURN_MS", 1_000)
    shapes = [rename, new_spec, widen, more, new_sort, columns(_set("title", name="label"))]

    def act() -> None:
        for shape in [shapes.pop(0), shapes.pop(0)] if shapes else []:
            shape(other, "people")

    # Every time that it is planned again it is too late again, until there are no more of them.
    with at_point("merge.sealed", act, always=True):
        lake.merge("people", [{**row(1), "n": 5}, row(9)])
    assert not shapes
    expected = [{**row(1), "n": 5}, row(2, "b"), row(9)]
    assert content(lake, "people") == [{**_less(one, "name"), "label": one["name"], "extra": None} for one in expected]
    check_partitions(lake, "people")


def test_the_column_that_tells_the_newest_row_is_followed_through_a_rename(lake: fm.Lake, other: fm.Lake) -> None:
    change = Change.begin(without_spark(lake), Intent("merge", MAIN, "test", ""))
    renamed = columns(_set("n", name="number"))
    with at_point("merge.sealed", lambda: renamed(other, "people")):
        change.write("merge", "people", [{**row(1), "n": 5}, {**row(2, "b"), "n": 50}], WriteOptions(newest_by="n"))
        change.publish()
    assert [(one["id"], one["number"]) for one in content(lake, "people")] == [(1, 10), (2, 50)]


@pytest.mark.parametrize(
    ("shape", "where", "gone"),
    [
        ("widened", "n = 10", {1}),
        ("widened", "n >= 20 and n < 9000000000", {2}),
        ("widened", "n > 9000000000", set[int]()),
        ("renamed", "title = 'row 2'", {2}),
        ("swapped", "name = 'a'", {1}),
        ("swapped", "part = 'row 2'", {2}),
        ("anew", "name is null", {1, 2}),
        ("anew", "name = 'row 1'", set[int]()),
        ("partitioned", "part = 'a' and id = 1", {1}),
    ],
)
def test_a_condition_finds_the_rows_of_files_that_are_older_than_the_shape(
    lake: fm.Lake, shape: str, where: str, gone: set[int]
) -> None:
    for table in ("events", "people"):
        SHAPES[shape][0](lake, table)
        lake.append(table, [SHAPES[shape][1]({**row(3, "z"), "n": 2, "name": "three"}) | {"id": 3}])
        before = {one["id"] for one in content(lake, table)}
        lake.delete(table, where)
        assert before - {one["id"] for one in content(lake, table)} == gone | ({3} & _new_ones(shape, where))


def _new_ones(shape: str, where: str) -> set[int]:
    """The row that came after the change has no value in a column that is new."""
    return {3} if (shape, where) == ("anew", "name is null") else set()


def test_columns_that_two_branches_bring_at_once_get_ids_of_their_own(lake: fm.Lake, other: fm.Lake) -> None:
    lake.branches.create("dev")

    def evolve() -> None:
        other.append("events", [{**row(4), "left": "dev's"}], branch="dev", evolve=True)

    with at_point("append.sealed", evolve):
        lake.append("events", [{**row(3), "right": "main's"}], evolve=True)
    here, there = (lake.schema("events", branch=branch) for branch in ("main", "dev"))
    assert here.schema_id != there.schema_id
    assert here.find_field("right").field_id != there.find_field("left").field_id
    assert [one["right"] for one in content(lake, "events")] == [None, None, "main's"]
    found = lake.read_arrow("events", branch="dev").read_all().to_pylist()
    assert {one["id"]: one["left"] for one in found} == {1: None, 2: None, 4: "dev's"}


def test_a_branch_writes_in_its_own_shape_whatever_main_got(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    for shape in (new_spec, widen, rename):
        shape(lake, "events")
    lake.append("events", [row(3)], branch="dev")
    lake.append("events", [{**_less(row(4), "name"), "title": "four", "n": 2**40}])
    found = lake.read_arrow("events", branch="dev").read_all().to_pylist()
    assert sorted(found, key=lambda one: one["id"]) == [row(1, "a"), row(2, "b"), row(3)]
    check_partitions(lake, "events")
