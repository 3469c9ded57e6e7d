"""Kill every kind of write between its index segments and its seal: it is undone, segments too, and can be done again.

What recovery finishes is published with its segments. A repair covers nothing: the files are another writer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.children import preload, run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, Place
from tests.crash import (
    backfill_world,
    test_apply_kills,
    test_branch_kills,
    test_keyed_kills,
    test_partial_merge_kills,
    test_redo_kills,
    test_retain_kills,
    test_rollback_kills,
)

pytestmark = pytest.mark.whole

preload("tests.crash.test_index_kills")

POINT = "index.written"


@dataclass(frozen=True)
class Case:
    """A lake, and a write to it that covers files: of one kind, as the journal has it."""

    kind: str
    prepare: Callable[[Place], object]
    write: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    # Publishes of the same run that came before, without a file for an index.
    has_begun: bool = False


def apply_before(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.apply(test_apply_kills.BEFORE, allow_destructive=True)
        lake.append("users", [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}])
        lake.append("orders", [{"id": 1, "user": 1}])
        lake.append("scrap", [{"id": 1}])


def four_files(place: Place) -> None:
    test_keyed_kills.prepare(place)
    test_keyed_kills.more_files(place)


def compact(place: Place) -> str:
    with place.open() as lake:
        return lake.maintain.compact("people", files_min=2).outcome


CASES = {
    **{kind: Case(kind, test_keyed_kills.prepare, write, (None,)) for kind, write in test_keyed_kills.WRITERS.items()},
    "partial merge": Case("merge", test_partial_merge_kills.prepare, test_partial_merge_kills.merge, (None,)),
    "compaction": Case("compact", four_files, compact),
    "retention": Case("retain", test_retain_kills.prepare, test_retain_kills.retain_table),
    "a column backfill": Case("fill", backfill_world.make_people, backfill_world.fill_column, has_begun=True),
    "a chunk": Case("chunk", backfill_world.make_tables, backfill_world.load_history),
    "pruning": Case("prune", backfill_world.make_loaded, backfill_world.prune_history, has_begun=True),
    "a redo": Case("redo", backfill_world.make_loaded, test_redo_kills.redo_chunk),
    "a branch merge": Case("branch_merge", test_branch_kills.prepare, test_branch_kills.merge),
    "a rollback": Case("rollback", test_rollback_kills.prepare, test_rollback_kills.roll_back),
    "an apply": Case("apply", apply_before, test_apply_kills.apply_in_child, (False,)),
}

Contents = dict[tuple[str, str], list[str]]


def contents(lake: fm.Lake) -> Contents:
    """The rows of every table on every branch, with their sequences, and what followers get from the beginning."""
    found: Contents = {}
    for branch in lake.branches.list():
        for head in lake.heads(branch.name):
            rows = lake.read_arrow(head.table, branch=branch.name, with_seq=True).read_all().to_pylist()
            changes = lake.changes(head.table, branch=branch.name).arrow().read_all().to_pylist()
            found[branch.name, head.table] = sorted(map(str, [*rows, *changes]))
    return found


def covered(lake: fm.Lake) -> dict[tuple[str, str], tuple[int, int]]:
    """How many data files each table with a key has, and how many of them its index covers."""
    found = {}
    for branch in lake.branches.list():
        for head in lake.heads(branch.name):
            paths = list(lake.catalog.files.data_files(head))
            for index in lake.catalog.indexes.of_table(head.table_id):
                found[branch.name, head.table] = len(paths), lake.engine.coverings.covered(index, paths)
    return found


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("name", CASES)
def test_a_write_that_dies_with_its_segments_is_undone_and_can_be_done_again(
    new_place: Callable[[str], Place], database: str, name: str
) -> None:
    case = CASES[name]
    place, unhurt = new_place(database), new_place(database)
    for one in (place, unhurt):
        run_child(case.prepare, one)
    run_child(case.write, unhurt, *case.arguments)
    with place.open() as lake:
        before = contents(lake)
    assert run_killed(case.write, place, *case.arguments, failpoint=POINT), f"{POINT} was never passed"
    for _ in range(2):
        with place.open() as lake:
            check_lake(lake.catalog)
            assert case.has_begun or contents(lake) == before
            undone = [(row.kind, row.outcome) for row in lake.audit() if row.outcome != "resumed"]
            assert undone == [(case.kind, "rolled_back")]
    run_child(case.write, place, *case.arguments)
    with place.open() as lake, unhurt.open() as other:
        check_lake(lake.catalog)
        assert contents(lake) == contents(other)
        assert covered(lake) == covered(other)
        # An apply gives a table a key, whose index covers none of its rows yet.
        assert name == "an apply" or all(files == found for files, found in covered(lake).values())


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("step", ["sealed", "built", "moved"])
@pytest.mark.parametrize("kind", ["append", "merge", "transaction"])
def test_recovery_that_finishes_a_batch_publishes_its_segments_with_its_rows(
    new_place: Callable[[str], Place], database: str, kind: str, step: str
) -> None:
    place = new_place(database)
    run_child(test_keyed_kills.prepare, place)
    assert run_killed(test_keyed_kills.WRITERS[kind], place, "monday", failpoint=f"{kind}.{step}")
    test_keyed_kills.check(place, kind, "rolled_forward")
    with place.open() as lake:
        assert all(files == found for files, found in covered(lake).values())


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("database", DATABASES)
def test_a_sealed_batch_is_published_although_its_index_was_dropped(
    new_place: Callable[[str], Place], database: str
) -> None:
    place = new_place(database)
    run_child(test_keyed_kills.prepare, place)
    assert run_killed(test_keyed_kills.merge, place, "monday", failpoint="merge.sealed")
    with place.open(recover=False) as lake:
        (index,) = lake.catalog.indexes.of_table(lake.catalog.history.head("people").table_id)
        assert lake.indexes.drop("people", on="id").outcome != "nothing_to_do"
    test_keyed_kills.check(place, "merge", "rolled_forward")
    with place.open() as lake:
        rows = lake.catalog.indexes.segments(index.table_id)
        assert len(rows) > 2
        assert all(row.retired_ms is not None for row in rows), "nothing uses them, and a sweep knows their files"
