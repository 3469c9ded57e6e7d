"""Keyed writes, evolution and the change feed on every database: what each verb promises, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import select, text

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.catalog.database import SQLITE_NAME
from floodmark.commit import publication
from floodmark.testing.invariants import check_lake
from floodmark.write import change
from tests.conftest import Place

PEOPLE = "id long not null, name string"


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", PEOPLE, key=["id"])
        lake.append("people", people(k1="a", k2="b", k3="c"))
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    """Another writer of the same lake."""
    with place.open(actor="other") as other:
        yield other


def people(**named: str) -> list[dict[str, Any]]:
    """people(k1="a") is a row with id 1."""
    return [{"id": int(key[1:]), "name": name} for key, name in named.items()]


def state(lake: fm.Lake, table: str = "people") -> dict[int, tuple[str, int]]:
    rows = lake.read_arrow(table, with_seq=True).read_all().to_pylist()
    return {row["id"]: (row["name"], row["_seq"]) for row in rows}


def feed(
    lake: fm.Lake, since: int | None = None, until: int | None = None, **moment: Any
) -> list[tuple[int, str, int]]:
    rows = lake.changes("people", since, until, **moment).arrow().read_all().to_pylist()
    return sorted((row["id"], row["_change"], row["_seq"]) for row in rows)


@contextmanager
def at_point(point: str, act: Callable[[], Any], *, always: bool = False) -> Iterator[None]:
    """Act when the failpoint is passed: once, or every time."""

    def observe(name: str) -> None:
        if name == point:
            failpoints.observer = None
            act()
            failpoints.observer = observe if always else None

    failpoints.observer = observe
    try:
        yield
    finally:
        failpoints.observer = None


# ── what may come in ──


def test_a_key_that_is_there_or_comes_twice_or_is_null_is_invalid_and_changes_nothing(lake: fm.Lake) -> None:
    version = lake.status()["version"]
    for rows, told in (
        (people(k3="x", k9="y"), "id=3"),
        ([*people(k8="x"), *people(k8="y")], "id=8"),
        ([{"id": None, "name": "x"}], "id"),
    ):
        with pytest.raises(fm.Invalid) as caught:
            lake.append("people", rows)
        assert told in str(caught.value)
        if rows[0]["id"] != 3:
            with pytest.raises(fm.Invalid) as caught:
                lake.merge("people", rows)
            assert told in str(caught.value)
    assert lake.status()["version"] == version
    assert state(lake) == {1: ("a", 1), 2: ("b", 1), 3: ("c", 1)}


def test_a_merge_that_changes_nothing_publishes_nothing_and_says_so(lake: fm.Lake) -> None:
    version = lake.status()["version"]
    commit = lake.merge("people", people(k1="a", k3="c"))
    assert (commit.outcome, commit.version) == ("nothing_to_do", version)
    again = lake.merge("people", people(k1="a"), skip_unchanged=False)
    assert (again.outcome, again.tables[0].rows_updated) == ("committed", 1)
    assert state(lake)[1] == ("a", 2)
    assert lake.delete("people", "id = 77").outcome == "nothing_to_do"


def test_only_files_with_a_matching_row_are_rewritten(lake: fm.Lake) -> None:
    for number in range(10, 50, 10):
        lake.append("people", people(**{f"k{number + n}": "x" for n in range(3)}))
    before = set(lake.catalog.files.data_files(lake.catalog.history.head("people")))
    lake.merge("people", people(k11="new", k31="x"))
    after = set(lake.catalog.files.data_files(lake.catalog.history.head("people")))
    # One file held a changed row; the one with an equal row, and those without, are as they were.
    assert len(before - after) == 1
    assert len(after - before) == 2


def test_rows_that_overwrite_a_part_must_belong_to_it(lake: fm.Lake) -> None:
    with pytest.raises(fm.Invalid) as caught:
        lake.overwrite("people", people(k1="x", k9="y"), where="id < 3")
    assert caught.value.facts["rows"] == 1
    lake.overwrite("people", people(k1="x", k0="z"), where="id < 3")
    assert state(lake) == {0: ("z", 2), 1: ("x", 2), 3: ("c", 1)}
    assert feed(lake, 1) == [(0, "upsert", 2), (1, "upsert", 2), (2, "delete", 2)]


def test_a_reader_can_be_merged_although_it_is_read_only_once(lake: fm.Lake, other: fm.Lake) -> None:
    """Beside another writer, so that it is planned a second time from what was staged."""
    batches = pa.table({"id": [2, 7], "name": ["bee", "g"]})
    with at_point("merge.sealed", lambda: other.delete("people", "id = 2")):
        lake.merge("people", pa.RecordBatchReader.from_batches(batches.schema, batches.to_batches()))
    assert state(lake) == {1: ("a", 1), 3: ("c", 1), 2: ("bee", 3), 7: ("g", 3)}


def test_what_is_missing_is_invalid_and_wipes_nothing(lake: fm.Lake) -> None:
    version = lake.status()["version"]
    for verb in (
        lambda: lake.delete("people", None),  # type: ignore[arg-type]
        lambda: lake.delete("people", " "),
        lambda: lake.overwrite("people", None),
        lambda: lake.append("people", None, batch="b1"),
        lambda: lake.merge("people", None),
        lambda: lake.changes("people", "1"),  # type: ignore[arg-type]
        lambda: lake.changes("people", 0.5),  # type: ignore[arg-type]
        lambda: lake.changes("people", True),
        lambda: lake.merge("people", people(k1="x"), on_duplicate="first"),
        lambda: lake.merge("people", people(k1="x"), on_duplicate="last"),
    ):
        with pytest.raises(fm.Invalid):
            verb()
    assert lake.status()["version"] == version
    assert lake.append("people", people(k9="i"), batch="b1").outcome == "committed"
    # An overwrite with no rows at all is a way to empty a table, if it is said.
    assert lake.overwrite("people", []).tables[0].rows_deleted == 4
    assert feed(lake, 2) == [(key, "delete", 3) for key in (1, 2, 3, 9)]


def test_who_has_had_a_turn_gives_it_back_also_if_no_table_moved(lake: fm.Lake, other: fm.Lake) -> None:
    """Otherwise the next writer would wait for the whole lease."""
    met = 0

    def meddle() -> None:
        nonlocal met
        met += 1
        other.merge("people", people(k2=f"other {met}" if met < 2 else "mine"))

    with at_point("merge.sealed", meddle, always=True):
        commit = lake.merge("people", people(k2="mine"), batch="b")
    assert (commit.outcome, commit.tables) == ("committed", ())
    with lake.catalog.database.read() as tx:
        assert list(tx.execute(select(tables.turns))) == []


def test_turns_are_taken_all_or_none(lake: fm.Lake) -> None:
    """Two operations with one turn each of the same two tables would wait for each other."""
    turns = lake.catalog.publisher.turns

    def held() -> dict[str, str]:
        with lake.catalog.database.read() as tx:
            return {row.table_id: row.operation for row in tx.execute(select(tables.turns))}

    turns.take("first", ["a"])
    turns.take("second", ["a", "b"])
    assert held() == {"a": "first"}
    turns.take("first", ["a", "b"])
    assert held() == {"a": "first", "b": "first"}
    turns.take("first", ["b"], lease_ms=-1)
    turns.take("second", ["a", "b"])
    assert held() == {"a": "second", "b": "second"}


# ── the feed ──


def test_the_feed_tells_the_truth_once_per_key(lake: fm.Lake) -> None:
    lake.delete("people", "id = 1")  # 2: deleted
    lake.append("people", people(k1="again"))  # 3: and inserted again
    lake.merge("people", people(k2="bee"))  # 4: updated
    lake.delete("people", "id = 2")  # 5: then deleted
    with lake.transaction("all at once") as tx:  # 6
        tx.merge("people", people(k3="sea", k8="new", k9="never"))
        tx.delete("people", "id = 3 or id = 9")
        tx.append("people", people(k4="d"))
        tx.delete("people", "id = 4")
        tx.append("people", people(k4="D"))
    assert state(lake) == {1: ("again", 3), 8: ("new", 6), 4: ("D", 6)}
    assert feed(lake) == [
        (1, "upsert", 3),
        (2, "delete", 5),
        (3, "delete", 6),
        (4, "upsert", 6),
        (8, "upsert", 6),
    ]
    assert feed(lake, 1, 2) == [(1, "delete", 2)]
    assert feed(lake, 2, 3) == [(1, "upsert", 3)]
    assert feed(lake, 3, 4) == []  # the row of key 2 is not there any more, and its deletion is later
    assert feed(lake, 1, 5) == [(1, "upsert", 3), (2, "delete", 5)]
    assert feed(lake, 5) == [(3, "delete", 6), (4, "upsert", 6), (8, "upsert", 6)]
    # A version in the past knows nothing of what came later.
    assert feed(lake, version=4) == [(1, "upsert", 3), (2, "upsert", 1), (3, "upsert", 1)]


def test_a_range_that_is_none_is_invalid(lake: fm.Lake) -> None:
    for since, until in ((5, None), (None, 9), (1, 0), (-7, None)):
        with pytest.raises(fm.Invalid) as caught:
            lake.changes("people", since, until)
        assert caught.value.facts["newest"] == 1
    assert lake.changes("people", 1).empty
    assert lake.changes("people", 1).arrow().read_all().num_rows == 0


def test_a_writer_that_began_first_and_commits_last_is_not_missed(lake: fm.Lake, other: fm.Lake) -> None:
    """Its rows get the sequence of their commit, above everything that a reader in between has seen."""
    seen: list[tuple[int, str, int]] = []
    marks: list[int] = []

    def other_commits_and_a_reader_reads() -> None:
        other.append("people", people(k7="first"))
        part = other.changes("people", 1)
        seen.extend(feed(other, 1))
        marks.append(part.until)

    with at_point("merge.sealed", other_commits_and_a_reader_reads):
        lake.merge("people", people(k2="late", k8="late"))
    assert seen == [(7, "upsert", 2)]
    assert feed(lake, marks[0]) == [(2, "upsert", 3), (8, "upsert", 3)]


def test_a_delete_that_was_rebased_over_an_append_is_not_missed(lake: fm.Lake, other: fm.Lake) -> None:
    marks: list[int] = []

    def append_and_read() -> None:
        other.append("people", people(k7="stays"))
        marks.append(other.changes("people").until)

    with at_point("delete.sealed", append_and_read):
        lake.delete("people", "id = 2")
    assert marks == [2]
    assert feed(lake, 2) == [(2, "delete", 3)]
    assert state(lake) == {1: ("a", 1), 3: ("c", 1), 7: ("stays", 2)}


def test_two_writers_of_the_same_new_key_never_make_two_rows_of_it(lake: fm.Lake, other: fm.Lake) -> None:
    with at_point("append.built", lambda: other.append("people", people(k7="other"))), pytest.raises(fm.Invalid):
        lake.append("people", people(k7="mine", k8="mine"))
    assert state(lake)[7] == ("other", 2)
    assert 8 not in state(lake)
    with at_point("merge.built", lambda: other.append("people", people(k9="other"))):
        lake.merge("people", people(k9="mine"))
    assert state(lake)[9] == ("mine", 4)


def test_a_transaction_depends_on_what_it_found_unchanged(lake: fm.Lake, other: fm.Lake) -> None:
    """Its merge into people changes nothing; if the row goes meanwhile, it has to be put back in the same version."""
    lake.create_table("notes", PEOPLE)
    meddle = at_point("transaction.sealed", lambda: other.delete("people", "id = 1"))
    with meddle, lake.transaction("both") as tx:
        tx.merge("people", people(k1="a"))
        tx.append("notes", people(k5="n"))
    assert tx.commit is not None
    assert state(lake)[1] == ("a", 3)
    assert {part.table for part in tx.commit.tables} == {"people", "notes"}


def test_rows_that_keep_changing_end_in_a_conflict_and_nothing_happened(
    lake: fm.Lake, other: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change.Change, "plans_max", 3)
    monkeypatch.setattr(publication, "PLANS_BEFORE_TURN", 99)  # the turn would let it through
    count = iter(range(100))

    def meddle() -> None:
        other.merge("people", people(k2=f"other {next(count)}"))

    with at_point("merge.sealed", meddle, always=True), pytest.raises(fm.Conflict):
        lake.merge("people", people(k2="mine"))
    assert state(lake)[2][0].startswith("other")


def test_a_writer_that_planned_twice_in_vain_is_let_through(lake: fm.Lake, other: fm.Lake) -> None:
    met = 0

    def meddle() -> None:
        nonlocal met
        met += 1
        if met < 3:
            other.merge("people", people(k2=f"other {met}"))

    with at_point("merge.sealed", meddle, always=True):
        lake.merge("people", people(k2="mine"))
    assert state(lake)[2][0] == "mine"
    assert met == 3


# ── tables that others made or changed ──


def test_the_rows_of_an_adopted_table_come_once_and_nothing_is_rewritten(
    lake: fm.Lake, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    folder = tmp_path_factory.mktemp("foreign")
    foreign = SqlCatalog("foreign", uri=f"sqlite:///{folder}/f.db", warehouse=f"file://{folder}/warehouse")
    foreign.create_namespace("default")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
    table = foreign.create_table("default.old", schema, properties={"format-version": "1"})
    for number in range(4):
        table.append(pa.table({"id": [number], "name": [f"v1 {number}"]}, schema=schema))
    with table.transaction() as tx:
        tx.upgrade_table_version(format_version=2)
    for number in range(4, 7):
        table.append(pa.table({"id": [number], "name": [f"v2 {number}"]}, schema=schema))
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    lake.adopt("old", table.metadata_location, key=["id"])
    changes = lake.changes("old")
    rows = changes.arrow().read_all().to_pylist()
    assert sorted(row["id"] for row in rows) == list(range(7))
    assert {row["_seq"] for row in rows if row["id"] < 4} == {0}
    assert {path: path.read_bytes() for path in files} == files
    new = {path for path in folder.rglob("*") if path.is_file()} - set(files)
    assert [path.suffix for path in new] == [".json"]
    mark = changes.until
    lake.merge("old", [{"id": 2, "name": "changed"}, {"id": 9, "name": "new"}])
    later = lake.changes("old", mark).arrow().read_all().to_pylist()
    assert sorted(row["id"] for row in later) == [2, 9]
    assert state(lake, "old")[3] == ("v1 3", 0)


def test_a_table_that_another_engine_rewrote_is_noticed_by_who_follows_it(place: Place) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    lake = place.open(create=True)
    lake.create_table("people", PEOPLE, key=["id"])
    lake.append("people", people(k1="a", k2="b", k3="c"))
    uri = place.catalog or f"sqlite:///{place.path}/{SQLITE_NAME}"
    catalog = SqlCatalog("floodmark", uri=uri, warehouse=lake.location)
    catalog.load_table("default.people").delete("id = 1")
    for question in (lambda: lake.changes("people"), lambda: lake.merge("people", people(k5="e"))):
        with pytest.raises(fm.Corrupt) as caught:
            question()
        assert "docs/operations.md" in caught.value.advice
        assert caught.value.exit_code == 5
    assert sorted(state(lake)) == [1, 2, 3], "our own state is still readable"
    # Back to where the catalog left it, as the documents say.
    catalog.engine.dispose()
    with lake.catalog.database.write() as tx:
        tx.execute(
            text("UPDATE iceberg_tables SET metadata_location = :expected WHERE table_name = 'people'"),
            {"expected": caught.value.facts["pointer_expected"]},
        )
    assert feed(lake) == [(1, "upsert", 1), (2, "upsert", 1), (3, "upsert", 1)]
    lake.close()
