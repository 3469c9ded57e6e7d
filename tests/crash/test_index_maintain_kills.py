"""Kill the maintenance of indexes at every step: answers stay right, recovery ends it, the next run does the rest."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

import floodmark as fm
from floodmark.catalog.indexes import SegmentRow
from floodmark.failpoints import FAILPOINTS
from floodmark.index.keys import key_index
from floodmark.maintenance import folds
from floodmark.rows.index.hashing import hash_values
from floodmark.testing.children import preload, run_child, run_killed
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, ids, rows
from tests.crash.faults import fail_commits, fail_statements, fail_storage

pytestmark = pytest.mark.mostly_sqlite

preload("floodmark.maintenance.maintenance", "floodmark.maintenance.index", "floodmark.maintenance.sweep_segments")

# More than a fold leaves alone.
SEGMENTS = 17
# An operation that is killed there is rolled back, or finished by recovery; after all of these it has happened.
BACK = ("begun", "written")
FORWARD = ("sealed", "built", "locked", "moved")
DONE = ("published", "cleaned")


# ── what the killed processes do ──


def prepare(place: Place) -> None:
    """Four files, and an index on their names that covers none of them."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", EVENTS, key=["id"])
        for number in range(4):
            lake.append("people", rows(number))
        index_names(lake)


def index_names(lake: fm.Lake, table: str = "people") -> None:
    lake.indexes.create(table, on="name")


def prepare_many(place: Place) -> None:
    """More segments than may be."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", EVENTS, key=["id"])
        for number in range(SEGMENTS):
            lake.append("people", rows(number))


def prepare_retired(place: Place) -> None:
    """A segment of a file that no branch has any more, and an expired version that has it."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", EVENTS, key=["id"])
        lake.append("people", rows(1, 2))
        lake.merge("people", [{"id": 1, "name": "new"}, {"id": 2, "name": "new"}])
        for number in range(3, 9):
            lake.merge("people", rows(number))
        lake.maintain.expire(keep="0s")


def prepare_folded(place: Place) -> None:
    prepare_many(place)
    with place.open() as lake:
        lake.maintain.index()


def maintain_index(place: Place) -> str:
    """Two files in a batch."""
    from floodmark.maintenance import index

    index.BATCH_FILES_MAX = 2
    with place.open(recover=False) as lake:
        return lake.maintain.index().outcome


def sweep(place: Place) -> str:
    with place.open() as lake:
        return lake.maintain.sweep(grace="0s").outcome


def heal(place: Place) -> None:
    place.open().close()


# ── what must be there afterwards ──


def segments(lake: fm.Lake, table: str = "people") -> list[SegmentRow]:
    return lake.catalog.indexes.segments(lake.catalog.history.head(table).table_id)


def in_use(lake: fm.Lake) -> list[SegmentRow]:
    return [row for row in segments(lake) if row.retired_ms is None and not row.broken]


def found_by_key(lake: fm.Lake, *numbers: int, version: int | None = None) -> set[int]:
    """Which of these keys the index finds, or may be in files that it does not cover."""
    head = lake.catalog.history.head("people")
    if version is not None:
        head = lake.catalog.history.tables_at(version)["people"]
    schema = lake.catalog.files.metadata(head.metadata_location).schema()
    index = key_index(lake.catalog.indexes, head.table_id, [schema.find_field("id")])
    assert index is not None
    from floodmark.index.covering import form_of

    form = form_of(index)
    assert form is not None
    paths = sorted(lake.catalog.files.data_files(head))
    found = lake.maintain._engine.coverings.find(
        index, paths, hash_values([pa.array(numbers, pa.int64())], form.secret, form.encoder)
    )
    return {numbers[at] for at in found.values.tolist()} | (set(numbers) if found.uncovered else set())


def check(place: Place, version: int, expected: list[int], audit: list[str]) -> None:
    """Recovered, twice: no version more, one audit row, nothing left over; and the next run does the rest."""
    for _ in range(2):
        with place.open() as lake:
            facts = check_lake(lake.catalog)
            assert (facts.version, sorted(facts.audit.values())) == (version, audit)
            assert ids(lake, "people") == expected
            assert found_by_key(lake, *expected, 99) >= set(expected)
            assert lake.status()["health"] == "fine"
            assert lake.maintain.sweep(grace="1h", deep=True).outcome == "nothing_to_do", "no file is lost"
    with place.open() as lake:
        assert lake.maintain.index().outcome in ("indexed", "nothing_to_do")
        assert lake.maintain.index().outcome == "nothing_to_do"
        assert lake.status()["due"] == []
        assert found_by_key(lake, *expected, 99) == set(expected)
        assert lake.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")
        assert check_lake(lake.catalog).version == version
        assert {row.location for row in segments(lake)} == {row.location for row in in_use(lake)}


def audit_of(point: str) -> list[str]:
    step = point.partition(".")[2].partition(":")[0]
    return ["rolled_back"] if step in BACK else ["rolled_forward"] if step in FORWARD else []


# Of the first batch, and of the second.
BUILD_POINTS = [f"index.{step}{nth}" for step in (*BACK, *FORWARD, *DONE) for nth in ("", ":2")]


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("point", BUILD_POINTS)
def test_a_killed_build_keeps_what_is_published_and_goes_on(
    new_place: Callable[[str], Place], database: str, point: str
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    assert run_killed(maintain_index, place, failpoint=point), f"{point} was never passed"
    with place.open() as lake:
        batches = int(audit_of(point) != ["rolled_back"]) + int(point.endswith(":2"))
        built = [row for row in in_use(lake) if row.files == 2]
        assert len(built) == batches, "every batch that was published stays"
    check(place, 5, [0, 1, 2, 3], audit_of(point))


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("point", [f"index.{step}" for step in (*BACK, *FORWARD, *DONE)])
def test_a_killed_fold_leaves_the_old_segments_or_the_new_one(
    new_place: Callable[[str], Place], database: str, point: str
) -> None:
    place = new_place(database)
    run_child(prepare_many, place)
    assert run_killed(maintain_index, place, failpoint=point), f"{point} was never passed"
    with place.open() as lake:
        assert len(in_use(lake)) == (SEGMENTS if audit_of(point) == ["rolled_back"] else 1)
    check(place, SEGMENTS + 1, [*range(SEGMENTS)], audit_of(point))


def test_killed_after_segments_were_retired_a_sweep_deletes_them(place: Place) -> None:
    run_child(prepare_retired, place)
    assert run_killed(maintain_index, place, failpoint="index.retired")
    check(place, 9, [*range(1, 9)], [])


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("point", ["sweep.segments_deleted", "sweep.segments_forgotten"])
def test_a_killed_sweep_of_segments_is_ended_by_the_next(
    new_place: Callable[[str], Place], database: str, point: str
) -> None:
    place = new_place(database)
    run_child(prepare_folded, place)
    assert run_killed(sweep, place, failpoint=point), f"{point} was never passed"
    with place.open() as lake:
        assert len(segments(lake)) == (SEGMENTS + 1 if point.endswith("deleted") else 1)
        assert found_by_key(lake, *range(SEGMENTS)) == set(range(SEGMENTS))
        assert lake.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")
        assert len(segments(lake)) == 1
    check(place, SEGMENTS + 1, [*range(SEGMENTS)], [])


@pytest.mark.parametrize("point", [name for name in FAILPOINTS if name.startswith("heal.")])
def test_recovery_of_a_fold_that_is_killed_too_is_ended_by_the_next(place: Place, point: str) -> None:
    """Rolled forward from a seal; `fenced` and `files_deleted` are of one that died before it."""
    back = point in ("heal.fenced", "heal.files_deleted")
    run_child(prepare_many, place)
    assert run_killed(maintain_index, place, failpoint="index.written" if back else "index.sealed")
    assert run_killed(heal, place, failpoint=point), f"{point} was never passed"
    check(place, SEGMENTS + 1, [*range(SEGMENTS)], ["rolled_back" if back else "rolled_forward"])


def drop_indexes(lake: fm.Lake) -> None:
    for index in lake.catalog.indexes.all():
        lake.catalog.indexes.drop(index.table_id, index.wanted)


def drop_index(place: Place) -> None:
    with place.open(recover=False) as lake:
        drop_indexes(lake)


def test_a_sealed_fold_whose_index_was_dropped_meanwhile_is_rolled_back(place: Place) -> None:
    run_child(prepare_many, place)
    assert run_killed(maintain_index, place, failpoint="index.sealed")
    run_child(drop_index, place)
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert list(facts.audit.values()) == ["rolled_back"]
        assert "replaced meanwhile" in lake.audit()[0].detail
        assert all(row.retired_ms is not None for row in segments(lake))
        assert lake.maintain.sweep(grace="0s").outcome == "swept"
        assert segments(lake) == []
        check_lake(lake.catalog)


# ── every call fails in turn ──


class Trial:
    """One lake, round after round: another file is not covered, and so many segments that a fold is due."""

    def __init__(self, place: Place) -> None:
        self.lake = place.open(create=True, actor="test", storage=FaultyStorage())
        self.lake.create_table("people", EVENTS, key=["id"])
        self.keys = self.rounds = 0
        self._next()

    def _next(self) -> None:
        """A damaged segment, and three others."""
        if self.rounds % 8 == 7:
            # What a round costs must not grow.
            self.lake.maintain.run(files_min=2, keep="0s", grace="0s")
        self.rounds += 1
        while len(in_use(self.lake)) < 3:
            self.lake.append("people", rows(self.keys))
            self.keys += 1
        self.lake.catalog.indexes.mark_broken(in_use(self.lake)[-1].location)
        self.lake.append("people", rows(self.keys))
        self.keys += 1
        self.version = self.lake.status()["version"]

    def act(self) -> fm.Commit:
        """As the faults know it: the outcome of a commit."""
        done = self.lake.maintain.index("people")
        if done.outcome == "indexed":
            return self.lake.catalog.history.commit(self.version)
        raise fm.Unavailable(str(done.as_dict()))

    def finish(self, outcome: str) -> None:
        again = self.lake.maintain.index("people")
        assert again.outcome in ("indexed", "nothing_to_do"), again.as_dict()
        assert found_by_key(self.lake, *range(self.keys), 10**6) == set(range(self.keys))
        assert len(in_use(self.lake)) == 1
        assert self.lake.status()["version"] == self.version
        if self.rounds % 8 == 0:
            check_lake(self.lake.catalog, settled=False)
        self._next()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three segments are due for a fold."""
    monkeypatch.setattr(folds, "SEGMENTS_MAX", 2)
    monkeypatch.setattr(folds, "TIER", 2)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("mode", ["before", "after", "torn", "disk_full"])
def test_whichever_call_to_storage_fails_the_next_run_ends_it(new_place: Callable[[str], Place], mode: str) -> None:
    outcomes = fail_storage(Trial(new_place("sqlite")), mode)
    assert "raised" in outcomes
    assert len(outcomes) > 4, "hardly any call was counted"


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_commit_of_the_catalog_fails_the_next_run_ends_it(
    new_place: Callable[[str], Place], mode: str
) -> None:
    assert len(fail_commits(Trial(new_place("sqlite")), mode)) > 4


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_statement_fails_the_next_run_ends_it(new_place: Callable[[str], Place], mode: str) -> None:
    assert len(fail_statements(Trial(new_place("sqlite")), mode)) > 4
