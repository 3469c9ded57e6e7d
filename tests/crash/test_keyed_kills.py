"""Kill writers of keyed tables at every failpoint; heal; check rows, sequences, the feed, files, journal and audit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.failpoints import FAILPOINTS, WRITE_STEPS
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, ids
from tests.crash.test_kill_at_every_step import expected_outcome

pytestmark = pytest.mark.mostly_sqlite

PEOPLE = "id long not null, name string"
State = dict[int, tuple[str, int]]


def people(**named: str) -> list[dict[str, object]]:
    """people(k1="a") is a row with id 1."""
    return [{"id": int(key[1:]), "name": name} for key, name in named.items()]


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", PEOPLE, key=["id"])
        lake.create_table("events", PEOPLE)
        lake.append("people", people(k1="a", k2="b", k3="c"))
        lake.merge("people", people(k3="see", k4="d"))


BEFORE: State = {1: ("a", 1), 2: ("b", 1), 3: ("see", 2), 4: ("d", 2)}
FEED_BEFORE = {(1, "upsert"), (2, "upsert"), (3, "upsert"), (4, "upsert")}


# ── what the killed processes do, and what it comes to ──


def append(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        return lake.append("people", people(k8="h"), batch=batch).outcome


def merge(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        return lake.merge("people", people(k1="a", k2="bee", k9="i"), batch=batch).outcome


def delete(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        return lake.delete("people", "id in (2, 4)", batch=batch).outcome


def overwrite(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        return lake.overwrite("people", people(k1="x", k2="y"), where="id < 4", batch=batch).outcome


def update(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        return lake.update("people", {"name": "'see'"}, "id in (1, 3)", batch=batch).outcome


def transaction(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        with lake.transaction("all", batch=batch) as tx:
            tx.merge("people", people(k2="bee", k9="i"))
            tx.append("events", people(k5="e"))
            tx.delete("people", "id = 2 or id = 1")
        assert tx.commit is not None
        return tx.commit.outcome


WRITERS: dict[str, Callable[[Place, str | None], str]] = {
    "append": append,
    "merge": merge,
    "delete": delete,
    "overwrite": overwrite,
    "update": update,
    "transaction": transaction,
}
AFTER: dict[str, State] = {
    "append": {**BEFORE, 8: ("h", 3)},
    "merge": {**BEFORE, 2: ("bee", 3), 9: ("i", 3)},
    "delete": {1: ("a", 1), 3: ("see", 2)},
    "overwrite": {1: ("x", 3), 2: ("y", 3), 4: ("d", 2)},
    "update": {**BEFORE, 1: ("see", 3)},
    "transaction": {3: ("see", 2), 4: ("d", 2), 9: ("i", 3)},
}
DELETED = {"append": set(), "merge": set(), "delete": {2, 4}, "overwrite": {3}, "update": set(), "transaction": {1, 2}}
POINTS = [
    (kind, f"{kind}.{step}")
    for kind in WRITERS
    for step in WRITE_STEPS
    if f"{kind}.{step}" in FAILPOINTS and step != "planned_again"
]


def state(lake: fm.Lake) -> State:
    found = lake.read_arrow("people", with_seq=True).read_all().to_pylist()
    return {row["id"]: (row["name"], row["_seq"]) for row in found}


def feed(lake: fm.Lake, since: int | None = None) -> set[tuple[int, str]]:
    return {(row["id"], row["_change"]) for row in lake.changes("people", since).arrow().read_all().to_pylist()}


def check(place: Place, kind: str, outcome: str | None) -> None:
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert sorted(facts.audit.values()) == ([outcome] if outcome else [])
        happened = outcome != "rolled_back"
        assert state(lake) == (AFTER[kind] if happened else BEFORE)
        assert ids(lake, "events") == ([5] if happened and kind == "transaction" else [])
        assert lake.changes("people").until == (3 if happened else 2)
        new = {(key, "upsert") for key, (_, sequence) in AFTER[kind].items() if sequence == 3}
        gone = {(key, "delete") for key in DELETED[kind]}
        assert feed(lake, 2) == (new | gone if happened else set())
        assert feed(lake) == ({(key, "upsert") for key in AFTER[kind]} | gone if happened else FEED_BEFORE)
        assert lake.status()["health"] == "fine"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("database", "batch"), [("sqlite", None), ("sqlite", "monday"), ("postgresql", "monday")])
@pytest.mark.parametrize(("kind", "point"), POINTS)
def test_killed_keyed_write_happens_whole_or_not_at_all(
    new_place: Callable[[str], Place], database: str, kind: str, point: str, batch: str | None
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    assert run_killed(WRITERS[kind], place, batch, failpoint=point), f"{point} was never passed"
    outcome = expected_outcome(kind, point, batch)
    check(place, kind, outcome)
    check(place, kind, outcome)
    if batch is not None or outcome == "rolled_back":
        again = run_child(WRITERS[kind], place, batch)
        assert again == ("committed" if outcome == "rolled_back" else "already_committed")
    with place.open() as lake:
        assert state(lake) == AFTER[kind]
        check_lake(lake.catalog)


def write_meddled(place: Place, kind: str) -> None:
    """A write beside which another writer adds a row, after it was planned and before it is sealed."""
    point = f"{kind}.rewritten" if kind in ("delete", "update") else f"{kind}.staged"

    def observe(name: str) -> None:
        if name == point:
            failpoints.observer = None
            with place.open(recover=False) as other:
                other.append("people", people(k7="g"))

    failpoints.observer = observe
    WRITERS[kind](place, "monday")


@pytest.mark.parametrize("kind", ["append", "merge", "delete", "overwrite", "update"])
def test_a_sealed_batch_is_not_rolled_forward_over_rows_that_nobody_checked_it_against(place: Place, kind: str) -> None:
    """Only its writer could look whether the new rows matter to it; the caller's retry does it right."""
    run_child(prepare, place)
    sealed = "append.sealed:2" if kind == "append" else f"{kind}.sealed"  # the meddler's own append passes it first
    assert run_killed(write_meddled, place, kind, failpoint=sealed)
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert list(facts.audit.values()) == ["rolled_back"]
        assert state(lake) == {**BEFORE, 7: ("g", 3)}
    assert run_child(WRITERS[kind], place, "monday") == "committed"
    with place.open() as lake:
        later = {key: (name, 4 if sequence == 3 else sequence) for key, (name, sequence) in AFTER[kind].items()}
        assert state(lake) == {**later, 7: ("g", 3)}
        check_lake(lake.catalog)


# ── planned again ──


def merge_late(place: Place) -> str:
    """A merge beside which another writer deletes one of its keys, after it was sealed the first time."""

    def observe(point: str) -> None:
        if point == "merge.sealed":
            failpoints.observer = None
            with place.open(recover=False) as other:
                other.delete("people", "id = 2")

    with place.open() as lake:
        failpoints.observer = observe
        return lake.merge("people", people(k2="bee", k9="i"), batch="monday").outcome


@pytest.mark.parametrize(
    ("point", "outcome"), [("sealed:2", "rolled_forward"), ("built:1", "rolled_forward"), ("published", None)]
)
def test_killed_after_planning_again_publishes_the_newer_plan_or_none(
    place: Place, point: str, outcome: str | None
) -> None:
    run_child(prepare, place)
    assert run_killed(merge_late, place, failpoint=f"merge.{point}")
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert list(facts.audit.values()) == ([outcome] if outcome else [])
        assert state(lake) == {1: ("a", 1), 3: ("see", 2), 4: ("d", 2), 2: ("bee", 4), 9: ("i", 4)}
        assert feed(lake, 2) == {(2, "upsert"), (9, "upsert")}
    with place.open() as lake:
        assert lake.merge("people", people(k2="bee", k9="i"), batch="monday").outcome == "already_committed"


def more_files(place: Place) -> None:
    with place.open() as lake:
        lake.append("people", people(k20="t"))
        lake.append("people", people(k21="u"))


def merge_moved(place: Place) -> str:
    """A merge whose files are put together under it, after it was sealed the first time."""

    def observe(point: str) -> None:
        if point == "merge.sealed":
            failpoints.observer = None
            with place.open(recover=False) as other:
                assert other.maintain.compact("people", files_min=2).outcome == "compacted"

    with place.open() as lake:
        failpoints.observer = observe
        return lake.merge("people", people(k2="bee", k20="tea", k9="i"), batch="monday").outcome


@pytest.mark.parametrize(
    ("point", "outcome"), [("planned_again", "rolled_back"), ("sealed:2", "rolled_forward"), ("published", None)]
)
def test_killed_after_its_files_were_compacted_a_merge_happens_whole_or_not_at_all(
    place: Place, point: str, outcome: str | None
) -> None:
    run_child(prepare, place)
    run_child(more_files, place)
    before = {**BEFORE, 20: ("t", 3), 21: ("u", 4)}
    assert run_killed(merge_moved, place, failpoint=f"merge.{point}")
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert list(facts.audit.values()) == ([outcome] if outcome else [])
        # The compaction has a sequence too, and gives it to no row.
        merged = {2: ("bee", 6), 9: ("i", 6), 20: ("tea", 6)}
        assert state(lake) == (before if outcome == "rolled_back" else {**before, **merged})
        assert feed(lake, 4) == (set() if outcome == "rolled_back" else {(key, "upsert") for key in merged})


def write_reshaped(place: Place, kind: str, batch: str | None) -> None:
    """A write beside which another writer brings a column, after it was sealed: every kind is planned again then."""

    def observe(point: str) -> None:
        if point == f"{kind}.sealed":
            failpoints.observer = None
            with place.open(recover=False) as other:
                other.merge("people", [{"id": 70, "name": "z", "more": 1}], evolve=True)
                if kind == "transaction":
                    other.append("events", [{"id": 71, "name": "z", "more": 1}], evolve=True)

    failpoints.observer = observe
    WRITERS[kind](place, batch)


@pytest.mark.parametrize("batch", [None, "monday"])
@pytest.mark.parametrize("kind", WRITERS)
def test_killed_between_the_new_plan_and_its_seal_the_old_one_is_not_published(
    place: Place, kind: str, batch: str | None
) -> None:
    run_child(prepare, place)
    assert run_killed(write_reshaped, place, kind, batch, failpoint=f"{kind}.planned_again")
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert list(facts.audit.values()) == ["rolled_back"]
        assert state(lake) == {**BEFORE, 70: ("z", 3)}
    # Sent again: with the column that came, since rows without it are Invalid now.
    with place.open() as lake:
        lake.merge("people", [{"id": 71, "name": "again", "more": None}], batch=batch)
        assert state(lake)[71] == ("again", 4)
        check_lake(lake.catalog)


# ── adoption ──


def make_foreign(folder: str) -> str:
    """A table of plain PyIceberg with two snapshots; its metadata file."""
    import pyarrow as pa
    from pyiceberg.catalog.sql import SqlCatalog

    Path(folder).mkdir()
    catalog = SqlCatalog("foreign", uri=f"sqlite:///{folder}/foreign.db", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace("default")
    table = catalog.create_table("default.old", pa.schema([pa.field("id", pa.int64(), nullable=False)]))
    for numbers in ([1, 2], [3]):
        table.append(pa.table({"id": numbers}, schema=table.schema().as_arrow()))
    return table.metadata_location


def adopt(place: Place, metadata: str) -> str:
    with place.open() as lake:
        return lake.adopt("old", metadata, key=["id"]).outcome


ADOPT_POINTS = [f"adopt.{step}" for step in WRITE_STEPS if f"adopt.{step}" in FAILPOINTS]


@pytest.mark.parametrize("point", ADOPT_POINTS)
def test_killed_adoption_leaves_the_foreign_table_as_it_was(place: Place, tmp_path: Path, point: str) -> None:
    metadata = run_child(make_foreign, str(tmp_path / "foreign"))
    files = {path for path in (tmp_path / "foreign").rglob("*") if path.is_file()}
    run_child(prepare, place)
    assert run_killed(adopt, place, metadata, failpoint=point)
    outcome = expected_outcome("adopt", point, None)
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert list(facts.audit.values()) == ([outcome] if outcome else [])
        there = "old" in {table["table"] for table in lake.tables()}
        assert there is (outcome is None)
        found = {path for path in (tmp_path / "foreign").rglob("*") if path.is_file()}
        assert files <= found
        assert len(found - files) == (1 if there else 0), "one metadata file is ours, and nothing else"
    if not there:
        assert run_child(adopt, place, metadata) == "committed"
    with place.open() as lake:
        assert ids(lake, "old") == [1, 2, 3]
        check_lake(lake.catalog)


# ── a write that has nothing to publish ──


def merge_equal_rows(place: Place) -> str:
    with place.open() as lake:
        return lake.merge("people", people(k1="a", k2="b")).outcome


@pytest.mark.parametrize("point", ["abandon.fenced", "abandon.files_deleted"])
def test_a_write_with_nothing_to_do_that_is_killed_at_its_end_leaves_nothing(place: Place, point: str) -> None:
    """Its staged rows lie in the operation's own folder until they are deleted; recovery deletes what is left."""
    prepare(place)
    with place.open() as lake:
        before = lake.status()["version"]
    assert run_killed(merge_equal_rows, place, failpoint=point)
    with place.open() as lake:
        assert lake.recover().waiting == ()
        assert (lake.status()["version"], ids(lake, "people")) == (before, [1, 2, 3, 4])
        assert lake.audit() == [], "fenced by its own writer: recovery only deletes files"
        rows, _ = lake.catalog.journal.unfinished()
        folders = [folder for row in rows for folder in lake.catalog.journal.find(row.id).folders]
        assert not [entry for folder in folders for entry in lake.catalog.storage.list(folder)]
        check_lake(lake.catalog)
    assert run_child(merge_equal_rows, place) == "nothing_to_do"
