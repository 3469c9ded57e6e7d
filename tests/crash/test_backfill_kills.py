"""Kill backfills at every failpoint; others write; the next run goes on: each chunk and each row once, counts exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import floodmark as fm
from floodmark.catalog.chunks import PRUNED
from floodmark.failpoints import FAILPOINTS, WRITE_STEPS
from floodmark.testing.children import run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.crash.backfill_world import (
    CHUNK_ROWS,
    CHUNKS,
    COLUMN,
    COLUMN_JOB,
    COLUMN_OPTIONS,
    EVENTS,
    FILES,
    FIRST_PEOPLE,
    HISTORY_JOB,
    KEEP,
    NEW,
    PEOPLE,
    TABLES,
    Contents,
    People,
    Row,
    audited,
    before,
    check_at_rest,
    check_filled,
    check_loaded,
    chunk_states,
    chunks_done,
    column_plan,
    contents,
    fill,
    fill_column,
    fill_column_announced,
    history,
    history_plan,
    load_by_two,
    load_history,
    loaded,
    make_loaded,
    make_people,
    make_tables,
    meddle,
    meddle_people,
    meddled,
    people,
    people_meddled,
    person,
    planned_again,
    prune_history,
    pruned,
)
from tests.crash.test_kill_at_every_step import BEFORE_COMMIT, BEFORE_SEAL, heal

KINDS = ("job", "add_column", "fill", "chunk", "prune")
# What is sealed with an identity is finished by a healer; a batch of a fill has none, its rows are filled later.
REPEATABLE = ("chunk", "prune")
AGAIN = "planned_again"
Audit = list[tuple[str, str]]


def points_of(kind: str) -> list[str]:
    return [f"{kind}.{step}" for step in WRITE_STEPS if f"{kind}.{step}" in FAILPOINTS and step != AGAIN]


def died(point: str) -> Audit:
    """What healing reports of the operation that was killed there; nothing, if none was under way."""
    kind, _, step = point.partition(":")[0].partition(".")
    if step in (*BEFORE_SEAL, AGAIN):
        return [(kind, "rolled_back")]
    if step in BEFORE_COMMIT:
        return [(kind, "rolled_forward" if kind in REPEATABLE else "rolled_back")]
    return []


def status_of(point: str) -> str:
    return {"job.made": "pending", "job.ended": "done"}.get(point, "interrupted")


def taken_over(point: str) -> Audit:
    return [("job", "resumed")] if status_of(point) == "interrupted" else []


def go_on(lake: fm.Lake, job: str, point: str, again: Callable[[], Any]) -> None:
    """The next run: by the job's name, or by the same call as the one that died. Then there is nothing to do."""
    runs = [lambda: lake.backfill.resume(job), again]
    first, second = runs if ":" in point else reversed(runs)
    done = first()
    assert done.outcome in ("done", "nothing_to_do"), done.as_dict()
    assert done.job["status"] == "done"
    version = lake.catalog.history.resolve()
    assert second().outcome == "nothing_to_do"
    assert lake.catalog.history.resolve() == version


# ── a column ──

COLUMN_KILLS = [
    *("job.made", "job.held", "job.ended"),
    *points_of("add_column"),
    # The first batch fills a file, the second cuts one that is too large, after the fourth all is filled.
    *(f"{point}{number}" for point in points_of("fill") for number in ("", ":2")),
    *(f"fill.{step}:4" for step in ("sealed", "moved", "published")),
]
COLUMN_KILLS_SHARED = ["job.held", "add_column.moved", "fill.rewritten:2", "fill.moved:2", "fill.published"]
NAMES = {number: person(number, f"row {number}")["name"] for numbers in FILES for number in numbers}


def kill_column(
    place: Place,
    point: str,
    run: Callable[..., Any] = fill_column,
    *,
    names: dict[int, Any] = NAMES,
    announce: bool = False,
) -> None:
    """`names`: what is in the table when the run has died, by id."""
    make_people(place)
    assert run_killed(run, place, failpoint=point), f"{point} was never passed"
    with place.open(recover=False) as lake:
        assert lake.backfill.show(COLUMN_JOB)["status"] == status_of(point)
        found = people(lake)
        assert found.names == names
        check_sequences(found, announce)
    with place.open(actor="test") as lake:
        assert audited(lake) == died(point)
        first = people(lake)
        assert first == found, "healing changed a row"
        check_counts(lake, len(first.filled), first.nulls(first.filled))
        meddle_people(lake)
        later = people(lake)
        assert later.names == people_meddled(names)
        finish_column(lake, point, first, later, announce)
        assert audited(lake) == [*died(point), *taken_over(point)]
        check_at_rest(lake)


def finish_column(lake: fm.Lake, point: str, first: People, later: People, announce: bool) -> None:
    """`first`: the table when the run had died; `later`: when others had written."""
    sequence = lake.catalog.history.head(PEOPLE).sequence
    options: dict[str, Any] = {**COLUMN_OPTIONS, "announce": announce}
    go_on(lake, COLUMN_JOB, point, lambda: lake.backfill.column(PEOPLE, COLUMN, "name", **options))
    after = people(lake)
    check_filled(after)
    told = sorted(row["id"] for row in lake.changes(PEOPLE, sequence).arrow().read_all().to_pylist())
    assert told == (sorted(later.lacking) if announce else [])
    assert after.names == later.names
    assert announce or after.rows == later.rows, "a sequence changed"
    check_counts(lake, len(first.filled) + len(later.lacking), first.nulls(first.filled) + later.nulls(later.lacking))
    job = lake.backfill.show(COLUMN_JOB)
    assert (job["status"], job["processed"], job["total"]) == ("done", job["rows"], job["rows"])
    plan = column_plan(lake, announce=announce)
    assert (plan["rows"], plan["files"], plan["batches"], plan["adds_column"]) == (0, 0, 0, False)


def check_sequences(found: People, announce: bool) -> None:
    """Rows have the sequences they were written with; those that were announced have newer ones."""
    for sequence, numbers in enumerate(FILES, 1):
        for number in found.rows.keys() & set(numbers):
            new = announce and number in found.filled
            assert found.rows[number][1] > len(FILES) if new else found.rows[number][1] == sequence


def check_counts(lake: fm.Lake, rows: int, unfilled: int) -> None:
    """What the job says of itself is what its publishes did."""
    job = lake.backfill.show(COLUMN_JOB)
    published = [commit for commit in lake.history(limit=100) if commit.kind in ("add_column", "fill")]
    assert (job["rows"], job["unfilled"], job["publishes"]) == (rows, unfilled, len(published))


@pytest.mark.parametrize("point", COLUMN_KILLS)
def test_a_killed_column_backfill_goes_on_and_fills_each_row_once(
    new_place: Callable[[str], Place], point: str
) -> None:
    kill_column(new_place("sqlite"), point)


@pytest.mark.parametrize("point", COLUMN_KILLS_SHARED)
def test_a_killed_column_backfill_goes_on_with_a_shared_database(new_place: Callable[[str], Place], point: str) -> None:
    kill_column(new_place("postgresql"), point)


@pytest.mark.parametrize("point", ["fill.sealed:2", "fill.moved:3", "fill.published:2"])
def test_rows_that_a_killed_run_announced_are_not_announced_again(
    new_place: Callable[[str], Place], point: str
) -> None:
    kill_column(new_place("sqlite"), point, fill_column_announced, announce=True)


def widen(lake: fm.Lake) -> None:
    """Another column: what was sealed for the table's old shape does not fit any more."""
    lake.append(PEOPLE, [{**person(31, "wide"), "more": 1}], evolve=True)


def take_some(lake: fm.Lake) -> None:
    """One row of every file: whichever is in the batch, it is not live any more."""
    lake.delete(PEOPLE, "id in (3, 6)")


COLUMN_AGAIN: dict[str, tuple[Callable[[fm.Lake], None], dict[int, Any]]] = {
    "add_column.planned_again": (widen, {**NAMES, 31: "wide"}),
    "fill.planned_again": (take_some, {number: name for number, name in NAMES.items() if number not in (3, 6)}),
}


@pytest.mark.parametrize("point", COLUMN_AGAIN)
def test_a_column_backfill_killed_after_planning_again_goes_on(place: Place, point: str) -> None:
    act, names = COLUMN_AGAIN[point]
    kill_column(place, point, partial(planned_again, point.partition(".")[0], act, fill_column), names=names)


def unbind(place: Place) -> None:
    with place.open() as lake:
        lake.backfill.unbind(PEOPLE, COLUMN)


@pytest.mark.parametrize("point", ["job.held", "add_column.sealed", "add_column.published", "job.ended"])
def test_a_killed_unbinding_of_a_half_filled_column_is_ended_by_the_next(place: Place, point: str) -> None:
    make_people(place)
    assert run_killed(fill_column, place, failpoint="fill.published:2")
    assert run_killed(unbind, place, failpoint=point), f"{point} was never passed"
    with place.open(actor="test") as lake:
        now = people(lake)
        if point in ("job.held", "add_column.sealed"):
            lake.append(PEOPLE, [person(41, "still bound")])
            assert people(lake).filled[41] == "still bound"
            lake.backfill.unbind(PEOPLE, COLUMN)
        lake.append(PEOPLE, [person(42, "unbound")])
        later = people(lake)
        assert later.filled[42] is None
        assert {number: later.rows[number] for number in now.rows} == now.rows
        assert {number: later.filled[number] for number in now.filled} == now.filled
        assert later.lacking == now.lacking
        job = lake.backfill.show(COLUMN_JOB)
        assert (job["status"], job["rows"], job["unfilled"]) == ("cancelled", len(now.filled), now.nulls(now.filled))
        assert lake.status()["health"] == "fine"
        # The publish ended the job: of a run that died after it nothing is left to do.
        again = [] if point in ("add_column.published", "job.ended") else [("job", "resumed")]
        assert audited(lake) == [("job", "resumed"), *died(point), *again]
        check_lake(lake.catalog)


# ── a history ──

HISTORY_KILLS = [
    *("job.made", "job.held", "job.ended"),
    *points_of("chunk"),
    # Two tables are staged in each chunk: the third time is in the second chunk, as is the second of the others.
    *(f"{point}:{3 if point == 'chunk.staged' else 2}" for point in points_of("chunk")),
    "chunk.staged:2",
    "chunk.cleaned:3",
]
HISTORY_KILLS_SHARED = ["job.made", "chunk.staged:3", "chunk.moved:2", "chunk.published", "chunk.cleaned:3"]


def kill_history(
    place: Place,
    point: str,
    run: Callable[..., Any] = load_history,
    *,
    merged: Sequence[Row] = (),
    heal_point: str | None = None,
) -> Audit:
    """`merged`: what another writer brought in before the first chunk. `heal_point`: where a healer died too.

    Returns what healing reported.
    """
    make_tables(place)
    assert run_killed(run, place, failpoint=point), f"{point} was never passed"
    assert heal_point is None or run_killed(heal, place, failpoint=heal_point), f"{heal_point} was never passed"
    wanted = before()
    wanted.merge(merged)
    with place.open(recover=False) as lake:
        assert lake.backfill.show(HISTORY_JOB)["status"] == status_of(point)
        assert contents(lake) == with_chunks(wanted, chunks_done(lake))
    with place.open(actor="test") as lake:
        healed = audited(lake)
        done = chunks_done(lake)
        wanted = with_chunks(wanted, done)
        assert contents(lake) == wanted
        job = lake.backfill.show(HISTORY_JOB)
        assert (job["rows"], job["publishes"]) == (len(done) * CHUNK_ROWS * len(TABLES), len(done))
        meddle(lake)
        meddled(wanted)
        assert contents(lake) == wanted
        go_on(lake, HISTORY_JOB, point, lambda: history(lake))
        assert contents(lake) == with_chunks(wanted, set(range(CHUNKS)) - done)
        check_loaded(lake)
        plan = history_plan(lake)
        assert (plan["to_load"], plan["done"], plan["next"], plan["gaps"]) == (0, CHUNKS, [], [])
        assert audited(lake) == [*healed, *taken_over(point)]
        check_at_rest(lake)
    return healed


def with_chunks(start: Contents, numbers: set[int]) -> Contents:
    found = Contents(start.events.copy(), dict(start.people))
    for number in sorted(numbers):
        loaded(found, number)
    return found


@pytest.mark.parametrize("point", HISTORY_KILLS)
def test_a_killed_history_goes_on_and_each_chunk_is_loaded_once(new_place: Callable[[str], Place], point: str) -> None:
    assert kill_history(new_place("sqlite"), point) == died(point)


@pytest.mark.parametrize("point", HISTORY_KILLS_SHARED)
def test_a_killed_history_goes_on_with_a_shared_database(new_place: Callable[[str], Place], point: str) -> None:
    assert kill_history(new_place("postgresql"), point) == died(point)


@pytest.mark.parametrize("point", ["chunk.sealed", "chunk.moved:2"])
def test_a_history_of_two_workers_that_is_killed_goes_on(place: Place, point: str) -> None:
    """Each worker dies where it is: at most one operation of each is healed."""
    healed = kill_history(place, point, load_by_two)
    assert len(healed) <= 2
    assert {kind for kind, _ in healed} <= {"chunk"}


MEANWHILE = [person(1, "meanwhile"), person(3, "meanwhile", NEW)]


def merge_some(lake: fm.Lake) -> None:
    lake.merge(PEOPLE, MEANWHILE)


@pytest.mark.parametrize("point", ["chunk.planned_again", "chunk.sealed:2"])
def test_a_history_killed_after_planning_again_goes_on(place: Place, point: str) -> None:
    """The second seal is that of the new plan: it is finished. That of the old one is not published."""
    run = partial(planned_again, "chunk", merge_some, load_history)
    assert kill_history(place, point, run, merged=MEANWHILE) == died(point)


@pytest.mark.parametrize("point", ["chunk.planned_again", "chunk.sealed:2"])
def test_rows_of_a_killed_chunk_that_a_column_came_between_are_filled(place: Place, point: str) -> None:
    """Staged without the column, they are filled when the chunk is planned again; also if a healer publishes them."""
    run = partial(planned_again, "chunk", fill, load_history)
    assert kill_history(place, point, run) == died(point)
    with place.open() as lake:
        check_filled(people(lake))
        assert lake.backfill.show(COLUMN_JOB)["rows"] == len(FIRST_PEOPLE)


@pytest.mark.parametrize("heal_point", ["heal.found", "heal.moved", "heal.published"])
def test_a_chunk_whose_healer_is_killed_too_is_loaded_once(new_place: Callable[[str], Place], heal_point: str) -> None:
    assert kill_history(new_place("sqlite"), "chunk.built:2", heal_point=heal_point) == died("chunk.built")


# ── pruning ──

# Of the first table, and some of the second.
PRUNE_KILLS = [
    "job.kept",
    *points_of("prune"),
    *(f"prune.{step}:2" for step in ("rewritten", "sealed", "moved", "published")),
]
PRUNE_KILLS_SHARED = ["prune.rewritten:2", "prune.moved"]


def all_loaded() -> Contents:
    return with_chunks(before(), set(range(CHUNKS)))


def pruned_tables(lake: fm.Lake) -> set[str]:
    """Those whose chunk below the floor is marked."""
    return {table for (table, _), (state, _) in chunk_states(lake).items() if state == PRUNED}


def kill_prune(
    place: Place, point: str, run: Callable[..., Any] = prune_history, *, gone: tuple[Any, ...] | None = None
) -> None:
    """`gone`: an event that another writer took out meanwhile."""
    make_loaded(place)
    assert run_killed(run, place, failpoint=point), f"{point} was never passed"
    with place.open(actor="test") as lake:
        assert audited(lake) == died(point)
        wanted, done = all_loaded(), pruned_tables(lake)
        if gone is not None:
            del wanted.events[gone]
        for table in done:
            pruned(wanted, table)
        assert contents(lake) == wanted, "rows and marks go together"
        meddle(lake)
        meddled(wanted)
        go_on(lake, HISTORY_JOB, point, lambda: history(lake, keep=KEEP))
        for table in set(TABLES) - done:
            pruned(wanted, table)
        assert contents(lake) == wanted
        check_loaded(lake, keep=True)
        assert history_plan(lake)["to_prune"] == {}
        assert audited(lake) == [*died(point), *taken_over(point)]
        check_at_rest(lake)


@pytest.mark.parametrize("point", PRUNE_KILLS)
def test_a_killed_pruning_takes_rows_and_marks_together(new_place: Callable[[str], Place], point: str) -> None:
    kill_prune(new_place("sqlite"), point)


@pytest.mark.parametrize("point", PRUNE_KILLS_SHARED)
def test_a_killed_pruning_goes_on_with_a_shared_database(new_place: Callable[[str], Place], point: str) -> None:
    kill_prune(new_place("postgresql"), point)


def take_event(lake: fm.Lake) -> None:
    lake.delete(EVENTS, "id = 3")


def test_a_pruning_killed_after_planning_again_goes_on(place: Place) -> None:
    run = partial(planned_again, "prune", take_event, prune_history)
    kill_prune(place, "prune.planned_again", run, gone=(3, "history", 3))


# ── all of them ──


def test_every_failpoint_of_backfills_is_killed_here() -> None:
    killed = {*COLUMN_KILLS, *COLUMN_AGAIN, *HISTORY_KILLS, "chunk.planned_again", *PRUNE_KILLS, "prune.planned_again"}
    assert {point.partition(":")[0] for point in killed} == {name for name, kind in FAILPOINTS.items() if kind in KINDS}
