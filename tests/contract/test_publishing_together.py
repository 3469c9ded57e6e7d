"""Operations that wait for the same tables are published together, and everything is as if they came one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update

import floodmark as fm
from floodmark import failpoints
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.sources import CallSource
from floodmark.catalog import tables
from floodmark.catalog.turns import WaitingOperation, end_turns, waiting
from floodmark.cli.main import main
from floodmark.commit.metadata import parse_metadata
from floodmark.commit.publisher import GROUP_MAX
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.intake_world import SLOW, intake_of, take
from tests.publishing import Behind, in_this_thread, in_this_thread_too

Others = Callable[[int], list[fm.Lake]]


@pytest.fixture
def others(lake: fm.Lake, place: Place) -> Iterator[Others]:
    """Further processes, as far as the catalog can tell: each has a heartbeat of its own."""
    with ExitStack() as stack:
        yield lambda count: [stack.enter_context(place.open(actor=f"other {number}")) for number in range(count)]


def rest(lake: fm.Lake) -> None:
    """Nobody waits, nobody has a turn, and every rule of a lake at rest holds."""
    with lake.catalog.database.read() as tx:
        assert tx.execute(select(tables.turns)).all() == []
        assert tx.execute(select(tables.waiting)).all() == []
    check_lake(lake.catalog)


def leaders(lake: fm.Lake) -> dict[int, str]:
    """Who published a version, where it was not its own process."""
    with lake.catalog.database.read() as tx:
        return {row.version: row.leader for row in tx.execute(select(tables.led))}


def led(lake: fm.Lake, behind: Behind, call: Callable[[], Any], point: str = "append.sealed") -> Any:
    """Call it; at the point, before it looks for those that wait, the others get in line."""
    with in_this_thread(point, behind.begin):
        return call()


def appends(others: list[fm.Lake], first: int = 10, **options: Any) -> list[Callable[[], fm.Commit]]:
    return [
        lambda lake=lake, number=number: lake.append("events", rows(first + number), **options)  # type: ignore[misc]
        for number, lake in enumerate(others)
    ]


def test_each_has_its_own_version_sequence_and_outcome_in_the_order_of_the_seals(lake: fm.Lake, others: Others) -> None:
    lake.append("events", rows(1))
    behind = Behind(lake, appends(others(5)))
    first = led(lake, behind, lambda: lake.append("events", rows(2), message="the leader"))
    commits = [first, *behind.wait()]
    assert [commit.outcome for commit in commits] == ["committed"] * 6
    assert [commit.version for commit in commits] == list(range(first.version, first.version + 6))
    assert [commit.tables[0].sequence for commit in commits] == list(range(2, 8))
    assert [commit.tables[0].rows_total for commit in commits] == list(range(2, 8))
    assert len({commit.tables[0].snapshot for commit in commits}) == 6
    assert [commit.actor for commit in commits] == ["test", *(f"other {number}" for number in range(5))]
    assert [leaders(lake).get(commit.version) for commit in commits] == [None, *[first.operation] * 5]
    # Readers at each version see what was there then, and no more.
    for place, commit in enumerate(commits):
        assert ids(lake, version=commit.version) == [1, 2, *range(10, 10 + place)]
    read = lake.read_arrow("events", with_seq=True).read_all()
    assert dict(zip(read["id"].to_pylist(), read["_seq"].to_pylist(), strict=True)) == {
        1: 1, 2: 2, 10: 3, 11: 4, 12: 5, 13: 6, 14: 7,
    }  # fmt: skip
    assert sorted(lake.changes("events", since=4).arrow().read_all()["id"].to_pylist()) == [12, 13, 14]
    rest(lake)


def test_a_group_writes_one_metadata_file_with_all_its_snapshots(lake: fm.Lake, others: Others) -> None:
    lake.append("events", rows(1))
    behind = Behind(lake, appends(others(7)))
    first = led(lake, behind, lambda: lake.append("events", rows(2)))
    commits = [first, *behind.wait()]
    heads = [lake.catalog.history.touched(commit.version)[0] for commit in commits]
    assert len({head.metadata_location for head in heads}) == 1
    metadata = parse_metadata(lake.catalog.storage.read(heads[0].metadata_location).decode())
    found = {one.snapshot_id: one for one in metadata.snapshots}
    assert {head.snapshot for head in heads} <= set(found)
    assert [found[head.snapshot or 0].sequence_number for head in heads] == list(range(2, 10))
    assert [found[head.snapshot or 0].parent_snapshot_id for head in heads[1:]] == [
        head.snapshot for head in heads[:-1]
    ]
    assert metadata.current_snapshot_id == heads[-1].snapshot
    # The next commit keeps as few snapshots as ever, and its log names each metadata file once.
    lake.append("events", rows(3))
    newest = lake.catalog.files.metadata(lake.catalog.history.head("events").metadata_location)
    assert len(newest.snapshots) == 5
    assert len({entry.metadata_file for entry in newest.metadata_log}) == len(newest.metadata_log)
    rest(lake)


def test_a_branch_and_old_versions_can_start_from_the_middle_of_a_group(lake: fm.Lake, others: Others) -> None:
    behind = Behind(lake, appends(others(7)))
    first = led(lake, behind, lambda: lake.append("events", rows(2)))
    behind.wait()
    lake.branches.create("dev", version=first.version + 2)
    lake.append("events", rows(99), branch="dev")
    assert sorted(lake.read_arrow("events", branch="dev").read_all()["id"].to_pylist()) == [2, 10, 11, 99]
    assert lake.catalog.expiry.expire(before_ms=2**60)
    lake.maintain.sweep(grace="0s")
    assert sorted(lake.read_arrow("events", branch="dev").read_all()["id"].to_pylist()) == [2, 10, 11, 99]
    assert ids(lake) == [2, *range(10, 17)]
    rest(lake)


def test_expired_versions_of_a_group_are_swept_and_the_rest_stays(lake: fm.Lake, others: Others) -> None:
    behind = Behind(lake, appends(others(7)))
    led(lake, behind, lambda: lake.append("events", rows(2)))
    behind.wait()
    for number in range(20, 30):
        lake.append("events", rows(number))
    assert lake.maintain.compact("events", files_min=2).outcome == "compacted"
    for number in range(30, 36):
        lake.append("events", rows(number))
    assert lake.catalog.expiry.expire(before_ms=2**60)
    assert lake.maintain.sweep(grace="0s")
    assert ids(lake) == sorted([2, *range(10, 17), *range(20, 36)])
    rest(lake)


def test_a_batch_that_two_bring_comes_in_once_and_takes_no_other_with_it(lake: fm.Lake, others: Others) -> None:
    made = others(4)
    calls = [*appends(made[:2], 10, batch="b"), *appends(made[2:], 20)]
    calls[1] = lambda: made[1].append("events", rows(10), batch="b")
    behind = Behind(lake, calls)
    first = led(lake, behind, lambda: lake.append("events", rows(2)))
    mine, again, *plain = behind.wait()
    assert (mine.outcome, again.outcome, again.version) == ("committed", "already_committed", mine.version)
    assert [commit.outcome for commit in (first, *plain)] == ["committed"] * 3
    assert ids(lake) == [2, 10, 20, 21]
    rest(lake)


def test_one_whose_batch_the_leader_brings_is_told_so(lake: fm.Lake, others: Others) -> None:
    (other,) = others(1)
    behind = Behind(lake, [lambda: other.append("events", rows(2), batch="b")])
    first = led(lake, behind, lambda: lake.append("events", rows(2), batch="b"))
    (again,) = behind.wait()
    assert (again.outcome, again.version, ids(lake)) == ("already_committed", first.version, [2])
    rest(lake)


def fence_oldest(lake: fm.Lake) -> None:
    """What recovery does to an operation whose process it takes for dead."""
    with lake.catalog.database.read() as tx:
        oldest = tx.execute(select(tables.waiting).order_by(tables.waiting.c.since_ms)).all()[0]
    operation, was_us = lake.catalog.journal.abandon(oldest.operation)
    assert operation is not None
    assert was_us
    lake.catalog.journal.delete_files(operation)


@pytest.mark.parametrize("point", ["append.sealed", "append.built"])
def test_one_that_is_fenced_meanwhile_is_taken_out_and_the_rest_goes_on(
    lake: fm.Lake, others: Others, point: str
) -> None:
    """Before the leader reads the line, and between its build and its publish: then it builds again."""
    behind = Behind(lake, appends(others(3)))

    def begin() -> None:
        behind.begin()
        if point == "append.sealed":
            fence_oldest(lake)

    with in_this_thread("append.sealed", begin):
        if point == "append.built":
            with in_this_thread_too(point, lambda: fence_oldest(lake)):
                first = lake.append("events", rows(2))
        else:
            first = lake.append("events", rows(2))
    fenced, two, three = behind.wait()
    assert isinstance(fenced, fm.Fenced)
    assert [two.version, three.version] == [first.version + 1, first.version + 2]
    assert ids(lake) == [2, 11, 12]
    rest(lake)


def test_a_drop_that_comes_first_refuses_those_that_wait(lake: fm.Lake, others: Others) -> None:
    made = others(3)
    lake.create_table("gone", EVENTS)
    calls: list[Callable[[], Any]] = [lambda: made[0].drop_table("gone")]
    calls += [lambda other=other: other.append("gone", rows(5)) for other in made[1:]]  # type: ignore[misc]
    behind = Behind(lake, calls)
    led(lake, behind, lambda: lake.append("gone", rows(2)))
    dropped, *refused = behind.wait()
    # Appends that the leader took with its own came before the drop.
    assert dropped is None or isinstance(dropped, fm.Commit), dropped
    assert all(isinstance(one, fm.Conflict) or one.outcome == "committed" for one in refused)
    assert "gone" not in {table["table"] for table in lake.tables()}
    rest(lake)


def test_a_column_that_comes_first_is_in_the_rows_of_those_that_wait(lake: fm.Lake, others: Others) -> None:
    """Their files are staged again in the new shape by their own processes."""
    made = others(3)
    wider = [{**rows(9)[0], "more": 7}]
    calls = [lambda: made[0].append("events", wider, evolve=True), *appends(made[1:])]
    behind = Behind(lake, calls)
    led(lake, behind, lambda: lake.append("events", rows(2)))
    assert [commit.outcome for commit in behind.wait()] == ["committed"] * 3
    found = {row["id"]: row for row in lake.read_arrow("events").read_all().to_pylist()}
    assert sorted(found) == [2, 9, 10, 11]
    assert [found[number]["more"] for number in (2, 9, 10, 11)] == [None, 7, None, None]
    rest(lake)


def test_a_transaction_over_more_tables_waits_for_all_of_them_and_is_not_passed_for_ever(
    lake: fm.Lake, others: Others
) -> None:
    made = others(3)

    def pair() -> fm.Commit | None:
        with made[0].transaction() as tx:
            tx.append("events", rows(10))
            tx.append("notes", rows(10))
        return tx.commit

    behind = Behind(lake, [pair, *appends(made[1:], 20)])
    first = led(lake, behind, lambda: lake.append("events", rows(2)))
    both, *plain = behind.wait()
    assert both.outcome == "committed"
    # Appends to the leader's table alone go with it; the pair is the next.
    assert sorted(commit.version for commit in (*plain, both)) == [first.version + n for n in (1, 2, 3)]
    assert (ids(lake), ids(lake, "notes")) == ([2, 10, 20, 21], [10])
    rest(lake)


def test_chunks_of_a_history_and_feeds_of_a_spool_go_with_the_appends_of_others(lake: fm.Lake, others: Others) -> None:
    loads, feeds = others(2)
    source = CallSource("tests.contract.test_publishing_together:read_chunk", tip=2)
    with intake_of(feeds, SLOW) as intake:
        take(feeds, intake, "events", *rows(30))
        calls: list[Callable[[], Any]] = [
            lambda: loads.backfill.history("old", source, "events", chunk=2, first=0, workers=1).outcome,
            lambda: intake.drain(60),
        ]
        behind = Behind(lake, calls)
        first = led(lake, behind, lambda: lake.append("events", rows(2)))
        assert behind.wait() == ["done", True]
    by_leader = {version for version, leader in leaders(lake).items() if leader == first.operation}
    kinds = [commit.kind for commit in lake.history() if commit.version in by_leader]
    assert sorted(kinds) == ["append", "chunk"]
    assert ids(lake) == [2, 20, 21, 30]
    rest(lake)


def read_chunk(chunk: Chunk) -> list[dict[str, Any]]:
    assert isinstance(chunk.start, int)
    return rows(20 + chunk.start, 21 + chunk.start)


def test_no_more_than_a_bounded_number_is_published_together(lake: fm.Lake, others: Others) -> None:
    behind = Behind(lake, appends(others(GROUP_MAX + 3)))
    first = led(lake, behind, lambda: lake.append("events", rows(2)))
    commits = behind.wait()
    assert sorted(commit.version for commit in commits) == [first.version + 1 + n for n in range(GROUP_MAX + 3)]
    by_leader = [leader for leader in leaders(lake).values() if leader == first.operation]
    assert len(by_leader) == GROUP_MAX - 1
    rest(lake)


def test_a_leader_whose_turn_has_run_out_is_published_by_the_next_one(lake: fm.Lake, others: Others) -> None:
    """It was paused for longer than its lease: another one leads, and it finds its commit, or goes again."""
    made = others(3)
    behind = Behind(lake, appends(made[:2]))
    passing: list[fm.Commit] = []

    def pause() -> None:
        behind.begin()
        with lake.catalog.database.write() as tx:
            tx.execute(update(tables.turns).values(until_ms=1))
        behind.wait()
        passing.append(made[2].append("events", rows(50)))

    with in_this_thread("append.built", pause):
        late = lake.append("events", rows(2))
    assert late.outcome == "committed"
    assert late.version == passing[0].version + 1
    assert ids(lake) == [2, 10, 11, 50]
    rest(lake)


def test_a_turn_whose_operation_is_gone_keeps_nobody_waiting(lake: fm.Lake) -> None:
    table_id = lake.catalog.history.head("events").table_id
    lake.catalog.publisher.turns.take("one that never was", [table_id], lease_ms=3_600_000)
    assert lake.append("events", rows(1)).outcome == "committed"
    rest(lake)


def test_one_that_was_published_meanwhile_takes_no_turn(lake: fm.Lake) -> None:
    """It asked while it still waited. Nothing would end its turn, and all others would wait for the lease."""
    commit = lake.append("events", rows(1))
    assert commit.operation is not None
    table_id = lake.catalog.history.head("events").table_id
    assert not lake.catalog.publisher.turns.take_next(commit.operation, [table_id])
    rest(lake)


def test_status_shows_who_waits_for_what_and_since_when(
    lake: fm.Lake, place: Place, others: Others, capsys: pytest.CaptureFixture[str]
) -> None:
    behind = Behind(lake, appends(others(2)))
    seen: list[Any] = []

    def look() -> None:
        behind.begin()
        where = ("--lake", place.path, *(("--catalog", place.catalog) if place.catalog else ()))
        with pytest.raises(SystemExit, match="0"):
            main([*where, "status"])
        seen.append((lake.status(), capsys.readouterr().out))

    with in_this_thread("append.sealed", look):
        first = lake.append("events", rows(2))
    behind.wait()
    status, text = seen[0]
    assert [line["actor"] for line in status["waiting"]] == ["other 0", "other 1"]
    assert {(line["kind"], tuple(line["tables"])) for line in status["waiting"]} == {("append", ("events",))}
    assert all(list(line["behind"]) == [first.operation] for line in status["waiting"])
    assert all(line["since"] for line in status["waiting"])
    for line in status["waiting"]:
        shown = f"{line['operation']} (append by {line['actor']}) for events since {line['since']}"
        assert f"{shown}, behind {first.operation}" in text
    assert status["health"] == "fine"
    assert list(lake.status()["waiting"]) == []


def test_a_delete_beside_appends_that_never_pause_is_published(lake: fm.Lake, others: Others) -> None:
    """It needs no turn while it reads; for its publish it waits in line like the others."""
    made = others(3)
    lake.append("events", rows(*range(1, 6)))
    stop, counts = threading.Event(), [0, 0]

    def keep_appending(place: int) -> None:
        while not stop.is_set():
            made[place].append("events", rows(1000 * (place + 1) + counts[place]))
            counts[place] += 1

    threads = [threading.Thread(target=keep_appending, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 6):
            assert made[2].delete("events", f"id = {number}").tables[0].rows_deleted == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    expected = [1000 * (place + 1) + number for place in range(2) for number in range(counts[place])]
    assert ids(lake) == sorted(expected)
    rest(lake)


def test_a_checked_edit_that_finds_the_turn_taken_waits_before_it_builds(lake: fm.Lake, others: Others) -> None:
    """What it built now would be out of date once the one that has the turn is published."""
    made = others(3)
    lake.create_table("people", "id long not null, name string", key=["id"])
    table_ids = sorted(lake.catalog.history.head(table).table_id for table in ("events", "people"))
    turns, built = lake.catalog.journal.turns, []
    turns.take("somebody else", table_ids)
    lake.append("notes", rows(1))
    behind = Behind(
        lake,
        [
            lambda: made[0].append("people", rows(1)),
            lambda: made[1].merge("people", rows(1, 2)),
            lambda: made[2].overwrite("events", rows(3)),
        ],
    )

    def observe(point: str) -> None:
        if point.endswith(".built"):
            built.append(point)

    failpoints.observer = observe
    try:
        behind.begin()
        assert built == []
        assert [line["joins"] for line in lines_of(lake)] == [0, 0, 0]
        with lake.catalog.database.write() as tx:
            end_turns(tx, ["somebody else"])
        assert [commit.outcome for commit in behind.wait()] == ["committed"] * 3
    finally:
        failpoints.observer = None
    # The merge was planned on the empty table: planned again, it finds the row that came first.
    assert built.count("append.built") == built.count("overwrite.built") == 1
    assert ids(lake, "people") == [1, 2]
    assert ids(lake) == [3]
    rest(lake)


def lines_of(lake: fm.Lake) -> list[Any]:
    with lake.catalog.database.read() as tx:
        return [row._mapping for row in tx.execute(select(tables.waiting))]


def test_a_member_that_dies_is_published_or_undone_and_never_half(lake: fm.Lake, place: Place, others: Others) -> None:
    """Its row in line is all that a leader needs; what recovery fenced first, no leader publishes."""
    gone = place.open(actor="gone")
    behind = Behind(lake, [lambda: gone.append("events", rows(10))])

    def die() -> None:
        behind.begin()
        # As a process that was killed: no heartbeat vouches for it any more.
        with lake.catalog.database.write() as tx:
            tx.execute(delete(tables.processes).where(tables.processes.c.id == gone.catalog.heartbeat.id))
        lake.recover()

    with in_this_thread("append.sealed", die):
        lake.append("events", rows(2))
    (found,) = behind.wait()
    assert isinstance(found, fm.Fenced)
    assert ids(lake) == [2]
    assert [row.outcome for row in lake.audit()] == ["rolled_back"]
    gone.close()
    rest(lake)


def test_snapshots_that_the_metadata_of_a_group_names_are_not_swept(lake: fm.Lake, others: Others) -> None:
    """Other engines read them from the metadata, and ask no catalog of ours whether they are expired."""
    behind = Behind(lake, appends(others(8)))
    led(lake, behind, lambda: lake.append("events", rows(2)))
    behind.wait()
    assert lake.catalog.expiry.expire(before_ms=2**60)
    lake.maintain.sweep(grace="0s")
    metadata = lake.catalog.files.metadata(lake.catalog.history.head("events").metadata_location)
    assert len(metadata.snapshots) == 9
    assert all(lake.catalog.storage.exists(one.manifest_list) for one in metadata.snapshots)
    rest(lake)


def test_versions_of_a_group_stay_until_the_folders_of_its_leader_are_clean(lake: fm.Lake, others: Others) -> None:
    """Cleaning compares the folders with what those versions name; without them nothing could be deleted any more."""
    behind = Behind(lake, appends(others(3)))
    first = led(lake, behind, lambda: lake.append("events", rows(2)))
    behind.wait()
    for number in range(20, 27):
        lake.append("events", rows(number))
    row = tables.operations
    with lake.catalog.database.write() as tx:
        tx.execute(update(row).where(row.c.id == first.operation).values(cleaned=0))
    lake.catalog.expiry.expire(before_ms=2**60)
    lake.maintain.sweep(grace="0s")
    assert lake.catalog.publisher.clean(lake.catalog.journal.find(first.operation), first.version) == 0  # type: ignore[arg-type]
    with lake.catalog.database.read() as tx:
        assert tx.execute(select(row.c.cleaned).where(row.c.id == first.operation)).scalar_one() != 0
    lake.maintain.sweep(grace="0s")
    rest(lake)


def test_one_that_let_its_turn_run_out_is_passed_over_until_it_waits_again(lake: fm.Lake, others: Others) -> None:
    """It was given the turn and is stopped, or plans again: its place in line has a lease like the turn."""
    made = others(3)
    behind = Behind(lake, appends(made))
    turns, table_id = lake.catalog.journal.turns, lake.catalog.history.head("events").table_id
    seen: list[str | None] = []

    def first_of(found: list[WaitingOperation], operation: str) -> str | None:
        one = turns._goes_first(found, operation, [table_id], (), found[0].since_ms)
        return None if one is None else one.operation

    def look() -> None:
        behind.begin()
        with lake.catalog.database.read() as tx:
            slow, quick, last = waiting(tx)
        stopped = replace(slow, asks=False)
        seen.extend([first_of([slow, quick, last], quick.operation), first_of([stopped, quick, last], quick.operation)])
        assert seen == [slow.operation, None]

    with in_this_thread("append.sealed", look):
        lake.append("events", rows(2))
    assert len(seen) == 2
    assert [commit.outcome for commit in behind.wait()] == ["committed"] * 3
    assert ids(lake) == [2, 10, 11, 12]
    rest(lake)


def test_one_that_has_ended_gets_no_place_in_line(lake: fm.Lake, others: Others) -> None:
    """Nothing would ever delete its row, and all others would go behind it."""
    (other,) = others(1)

    def fence() -> None:
        with lake.catalog.database.read() as tx:
            mine = tx.execute(select(tables.operations.c.id).where(tables.operations.c.state == "staged")).scalar_one()
        other.append("events", rows(3))
        with other.catalog.database.write() as tx:
            # Another one has the turn, so the publish fails, and the operation would wait in line.
            head = other.catalog.history.head("events")
            tx.execute(delete(tables.turns))
            values = {"table_id": head.table_id, "operation": mine[::-1], "until_ms": 2**60}
            tx.execute(insert(tables.turns).values(**values))
        operation, _ = other.catalog.journal.abandon(mine)
        assert operation is not None
        other.catalog.journal.delete_files(operation)

    with in_this_thread("append.built", fence), pytest.raises(fm.FloodmarkError):
        lake.append("events", rows(2))
    with lake.catalog.database.write() as tx:
        tx.execute(delete(tables.turns))
    assert ids(lake) == [3]
    rest(lake)


@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_database_call_of_a_leader_fails_the_others_come_in_once(
    new_place: Callable[[str], Place], mode: str
) -> None:
    """From its seal on, until a run passes without the fault: the leader's rows are there if it was told so."""
    place, expected = new_place("sqlite"), list[int]()
    with place.open(create=True) as lake, place.open() as one, place.open() as two:
        lake.create_table("events", EVENTS)
        for number in range(1, 200):
            faults: list[DatabaseFaults] = []
            behind = Behind(lake, appends([one, two], 1000 * number + 1))

            def begin(number: int = number, faults: list[DatabaseFaults] = faults, behind: Behind = behind) -> None:
                behind.begin()
                faults.append(DatabaseFaults(lake.catalog.database, fail_at=number, mode=mode))

            with suppress(fm.Unavailable), in_this_thread("append.sealed", begin):
                lake.append("events", rows(1000 * number))
                expected.append(1000 * number)
            faults[0].remove()
            assert [commit.outcome for commit in behind.wait()] == ["committed"] * 2
            expected += [1000 * number + 1, 1000 * number + 2]
            assert ids(lake) == expected
            if not faults[0].fired:
                break
        else:
            pytest.fail("every run met the fault")
        assert number > 10
        rest(lake)
