"""References between tables: every write is checked on what it comes to, and no two writers can break one together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import floodmark as fm
from floodmark.commit.intent import Intent
from floodmark.commit.journal import all_files
from floodmark.commit.metadata import schema_of
from floodmark.commit.references import Reference, no_reference, reference_property, referrer_property
from floodmark.errors import Invalid
from floodmark.storage import join
from floodmark.testing.children import run_killed
from floodmark.testing.invariants import check_lake
from floodmark.write.change import Change
from floodmark.write.options import WriteOptions
from tests.conftest import Place
from tests.contract.test_apply_writers import publish
from tests.contract.test_catalog_keyed import at_point
from tests.without_spark import without_spark

pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("customers", "id long not null, name string", key=["id"])
        lake.create_table("orders", "id long not null, customer long, note string")
        lake.append("customers", customers(1, 2, 3))
        lake.append("customers", customers(4, 5))
        lake.append("orders", orders(o1=1, o2=2, o3=None))
        refer(lake, "orders", "customer", "customers")
        yield lake
        check_lake(lake.catalog)
        assert dangling(lake) == []


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    with place.open(actor="other") as other:
        yield other


def customers(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": number, "name": f"c{number}"} for number in numbers]


def orders(**named: int | None) -> list[dict[str, Any]]:
    """orders(o7=1) is order 7 of customer 1."""
    return [{"id": int(key[1:]), "customer": customer, "note": "n"} for key, customer in named.items()]


def reference(lake: fm.Lake, child: str, column: str, parent: str) -> Reference:
    found = {}
    for table, name in ((child, column), (parent, "id")):
        head = lake.catalog.history.head(table)
        schema = schema_of(lake.catalog.files.metadata(head.metadata_location), head)
        found[table, name] = head.table_id, schema.find_field(name).field_id
    (child_id, field_id), (parent_id, key_id) = found[child, column], found[parent, "id"]
    return Reference(child_id, field_id, parent, parent_id, key_id)


def refer(lake: fm.Lake, child: str, column: str, parent: str, *, no_more: bool = False) -> None:
    """Declare a reference, or take it back, in both tables; each gets a schema of its own, of the same columns."""
    one = reference(lake, child, column, parent)
    said = no_reference(one) if no_more else (reference_property(one), referrer_property(one, child))
    for table, (key, value) in zip((child, parent), said, strict=True):
        head = lake.catalog.history.head(table)
        metadata = lake.catalog.files.metadata(head.metadata_location)
        number = max(known.schema_id for known in metadata.schemas) + 1
        schema = schema_of(metadata, head).model_copy(update={"schema_id": number}).model_dump_json()
        publish(lake, table, schema_id=number, schema=schema, base_schema_id=head.schema_id, properties={key: value})


def column(lake: fm.Lake, table: str, name: str) -> list[Any]:
    return [row[name] for row in lake.read_arrow(table).read_all().to_pylist()]


def dangling(lake: fm.Lake) -> list[int]:
    there = {None, *column(lake, "customers", "id")}
    return [value for value in column(lake, "orders", "customer") if value not in there]


def refused(lake: fm.Lake, write: Callable[[], Any]) -> Invalid:
    """The write is Invalid, no version was made, and nothing that it staged stayed."""
    version, files = lake.status()["version"], _files(lake)
    with pytest.raises(Invalid) as caught:
        write()
    assert lake.status()["version"] == version
    assert _files(lake) == files
    return caught.value


def orphaned(lake: fm.Lake, source: str, into: str | None = None) -> list[tuple[str, str | None, Any]]:
    """The merge is in conflict over references, no version was made, and nothing that it staged stayed."""
    version, files = lake.status()["version"], _files(lake)
    with pytest.raises(fm.MergeConflict) as caught:
        lake.branches.merge(source, into=into)
    assert lake.status()["version"] == version
    assert _files(lake) == files
    assert {one.reason for one in caught.value.conflicts} == {"reference"}
    return [(one.table, one.about, one.key) for one in caught.value.conflicts]


def _files(lake: fm.Lake) -> set[str]:
    found = all_files(lake.catalog.storage, join(lake.catalog.location, "tables"))
    return {entry.location for entry in found if entry.location.endswith(".parquet")}


# ── alone ──


@pytest.mark.parametrize(
    "write",
    [
        lambda lake: lake.append("orders", orders(o4=5, o5=9, o6=None, o7=8)),
        lambda lake: lake.overwrite("orders", orders(o4=9, o5=8)),
        lambda lake: lake.overwrite("orders", orders(o1=9, o2=8), where="id < 3"),
    ],
    ids=["append", "overwrite all", "overwrite some"],
)
def test_rows_that_refer_to_nothing_are_refused_and_listed(lake: fm.Lake, write: Callable[[fm.Lake], Any]) -> None:
    error = refused(lake, lambda: write(lake))
    facts = error.facts
    assert (facts["table"], facts["column"], facts["parent"]) == ("orders", "customer", "customers.id")
    assert facts["values"] == 2
    assert set(facts["examples"].split("; ")) == {"customer=9", "customer=8"}


def test_merged_rows_are_checked_too(lake: fm.Lake) -> None:
    lake.create_table("accounts", "id long not null, owner long", key=["id"])
    refer(lake, "accounts", "owner", "customers")
    lake.merge("accounts", [{"id": 1, "owner": 3}, {"id": 2, "owner": None}])
    error = refused(lake, lambda: lake.merge("accounts", [{"id": 1, "owner": 3}, {"id": 2, "owner": 7}]))
    assert error.facts["examples"] == "owner=7"
    # A row that was there is not asked again when its file is rewritten beside it.
    lake.merge("accounts", [{"id": 2, "owner": 4}])
    assert sorted(column(lake, "accounts", "owner")) == [3, 4]


@pytest.mark.parametrize(
    "write",
    [
        lambda lake: lake.delete("customers", "id <= 3"),
        lambda lake: lake.overwrite("customers", customers(3, 4, 5)),
        lambda lake: lake.overwrite("customers", [], where="id < 3"),
        lambda lake: _delete_keys(lake, 2, 3, 1),
    ],
    ids=["delete", "overwrite all", "overwrite some", "by key"],
)
def test_keys_that_are_referred_to_do_not_go(lake: fm.Lake, write: Callable[[fm.Lake], Any]) -> None:
    facts = refused(lake, lambda: write(lake)).facts
    assert (facts["table"], facts["referrer"], facts["column"]) == ("customers", "orders", "customer")
    assert facts["values"] == 2
    assert set(facts["examples"].split("; ")) == {"customer=1", "customer=2"}


def _delete_keys(lake: fm.Lake, *keys: int) -> None:
    with lake.transaction("keys") as tx:
        tx.delete_keys("customers", [{"id": key} for key in keys])


def test_what_nobody_refers_to_goes_and_what_stays_is_replaced(lake: fm.Lake) -> None:
    assert lake.delete("customers", "id >= 3").outcome == "committed"
    assert lake.overwrite("customers", [{"id": key, "name": "new"} for key in (1, 2, 8)]).outcome == "committed"
    lake.merge("customers", [{"id": 1, "name": "newer"}])
    assert sorted(column(lake, "customers", "id")) == [1, 2, 8]
    lake.append("orders", orders(o9=8))


def test_a_transaction_is_checked_as_a_whole_whatever_the_order_of_its_steps(lake: fm.Lake) -> None:
    with lake.transaction("new") as tx:
        tx.append("orders", orders(o7=7))
        tx.append("customers", customers(7))
    with lake.transaction("gone") as tx:
        tx.delete("customers", "id = 7")
        tx.delete("orders", "customer = 7")
    with lake.transaction("again") as tx:
        tx.delete("customers", "id = 1")
        tx.append("customers", [{"id": 1, "name": "again"}])
        tx.append("orders", orders(o8=1))

    def moved() -> None:
        with lake.transaction("both wrong") as tx:
            tx.append("orders", orders(o9=77))
            tx.delete("customers", "id = 2")

    facts = refused(lake, moved).facts
    assert facts["examples"] == "customer=77"
    assert "customer=2" in facts["also"]


def test_a_table_may_refer_to_itself(lake: fm.Lake) -> None:
    lake.create_table("staff", "id long not null, boss long", key=["id"])
    refer(lake, "staff", "boss", "staff")
    lake.append("staff", [{"id": 1, "boss": 2}, {"id": 2, "boss": None}, {"id": 3, "boss": 3}])
    refused(lake, lambda: lake.append("staff", [{"id": 4, "boss": 9}]))
    refused(lake, lambda: lake.delete("staff", "id = 2"))
    lake.delete("staff", "id = 3")
    lake.delete("staff", "id < 3")
    assert column(lake, "staff", "id") == []


def test_a_reference_that_is_no_more_is_not_checked(lake: fm.Lake) -> None:
    refer(lake, "orders", "customer", "customers", no_more=True)
    lake.append("orders", orders(o9=99))
    lake.delete("orders", "id = 9")
    lake.create_table("free", "id long not null", key=["id"])


def test_rows_do_not_go_by_age_from_a_table_that_is_referred_to(lake: fm.Lake) -> None:
    change = Change.begin(without_spark(lake), Intent("retain", "main", "test", ""))
    with pytest.raises(Invalid):
        change.write("retain", "customers")
    with pytest.raises(Invalid):
        change.undo(Invalid("undone"))


def test_the_properties_of_a_reference_are_not_a_users_to_give(lake: fm.Lake) -> None:
    key, value = reference_property(reference(lake, "orders", "customer", "customers"))
    with pytest.raises(Invalid):
        lake.create_table("mine", "id long", properties={key: value})


# ── beside others ──


@pytest.mark.parametrize("point", ["sealed", "built"])
def test_an_append_loses_to_a_delete_of_what_it_refers_to(lake: fm.Lake, other: fm.Lake, point: str) -> None:
    with at_point(f"append.{point}", lambda: other.delete("customers", "id = 5")), pytest.raises(Invalid) as caught:
        lake.append("orders", orders(o7=5))
    assert caught.value.facts["examples"] == "customer=5"
    assert len(column(lake, "orders", "id")) == 3


@pytest.mark.parametrize("point", ["sealed", "built"])
def test_a_delete_loses_to_an_append_that_refers_to_it(lake: fm.Lake, other: fm.Lake, point: str) -> None:
    with (
        at_point(f"delete.{point}", lambda: other.append("orders", orders(o7=5))),
        pytest.raises(Invalid) as caught,
    ):
        lake.delete("customers", "id = 5")
    assert caught.value.facts["examples"] == "customer=5"
    assert len(column(lake, "customers", "id")) == 5


@pytest.mark.parametrize(
    "act",
    [
        lambda other: other.append("customers", customers(9)),
        lambda other: other.merge("customers", [{"id": 5, "name": "rewritten"}]),
        lambda other: other.maintain.compact("customers"),
        lambda other: other.append("orders", orders(o8=1)),
        lambda other: other.delete("orders", "id = 1"),
    ],
    ids=["parent grows", "parent rewritten", "parent compacted", "child grows", "child shrinks"],
)
def test_what_does_not_matter_to_a_reference_does_not_stop_a_write(
    lake: fm.Lake, other: fm.Lake, act: Callable[[fm.Lake], Any]
) -> None:
    with at_point("append.sealed", lambda: act(other)):
        assert lake.append("orders", orders(o7=5)).outcome == "committed"
    with at_point("delete.sealed", lambda: other.append("orders", orders(o9=1))):
        assert lake.delete("customers", "id = 4").outcome == "committed"


def test_a_reference_that_is_declared_meanwhile_is_checked(lake: fm.Lake, other: fm.Lake) -> None:
    refer(lake, "orders", "customer", "customers", no_more=True)
    with (
        at_point("append.sealed", lambda: refer(other, "orders", "customer", "customers")),
        pytest.raises(Invalid),
    ):
        lake.append("orders", orders(o7=77))
    refer(lake, "orders", "customer", "customers", no_more=True)
    with (
        at_point("delete.sealed", lambda: refer(other, "orders", "customer", "customers")),
        pytest.raises(Invalid),
    ):
        lake.delete("customers", "id = 1")


@pytest.mark.parametrize("moved", [False, True], ids=["parent as it was", "parent moved"])
def test_a_batch_that_died_is_finished_only_beside_the_parent_that_it_was_checked_against(
    lake: fm.Lake, place: Place, moved: bool
) -> None:
    """A healer does not look at rows: it takes the batch back, and the caller's retry is checked anew."""
    assert run_killed(append_batch, place, failpoint="append.sealed")
    if moved:
        # Not by the lake's verb, which would heal first.
        change = Change.begin(without_spark(lake), Intent("delete", "main", "test", ""))
        change.write("delete", "customers", options=WriteOptions(where="id = 5"))
        change.publish()
    report = lake.recover()
    assert (len(report.rolled_back), len(report.rolled_forward)) == ((1, 0) if moved else (0, 1))
    if moved:
        with pytest.raises(Invalid):
            lake.append("orders", orders(o7=5), batch="b")
    else:
        assert lake.append("orders", orders(o7=5), batch="b").outcome == "already_committed"


def test_a_branch_is_checked_by_its_own_rows_and_its_merge_by_those_of_the_target(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    lake.delete("customers", "id = 5", branch="dev")
    refused(lake, lambda: lake.append("orders", orders(o7=5), branch="dev"))
    lake.append("orders", orders(o8=5))
    # Each of them is right where it was written, and wrong together.
    assert orphaned(lake, "dev") == [("customers", "orders", {"id": 5})]
    lake.delete("orders", "id = 8")
    assert lake.branches.merge("dev").outcome == "merged"
    # The branch has to know what went from a table without a key before it adds to it.
    assert lake.branches.merge("main", into="dev").outcome == "merged"
    lake.append("customers", customers(9), branch="dev")
    lake.append("orders", orders(o9=9), branch="dev")
    assert lake.branches.merge("dev").outcome == "merged"
    assert sorted(column(lake, "customers", "id")) == [1, 2, 3, 4, 9]
    assert 9 in column(lake, "orders", "customer")


def test_a_reference_that_comes_down_to_a_branch_is_held_against_all_of_its_rows(lake: fm.Lake) -> None:
    refer(lake, "orders", "customer", "customers", no_more=True)
    lake.branches.create("dev")
    lake.append("orders", orders(o7=77), branch="dev")
    refer(lake, "orders", "customer", "customers")
    lake.append("orders", orders(o8=1))
    assert orphaned(lake, "main", "dev") == [("orders", "customers", {"customer": 77})]
    lake.delete("orders", "id = 7", branch="dev")
    assert lake.branches.merge("main", into="dev", prefer="theirs").outcome == "merged"


def test_a_whole_table_that_comes_is_held_against_the_rows_that_are_there(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    lake.delete("customers", "id = 5", branch="dev")
    lake.create_table("returns", "id long not null, customer long")
    lake.append("returns", [{"id": 1, "customer": 5}])
    refer(lake, "returns", "customer", "customers")
    assert orphaned(lake, "main", "dev") == [("returns", "customers", {"customer": 5})]
    lake.overwrite("returns", [{"id": 1, "customer": 4}])
    assert lake.branches.merge("main", into="dev").outcome == "merged"
    assert column(lake, "returns", "customer") == [4]


def append_batch(place: Place) -> None:
    with place.open(actor="child") as lake:
        lake.append("orders", orders(o7=5), batch="b")
