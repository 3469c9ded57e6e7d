"""What a history must not do: take what is not its own, count what is not there, or end because of a pause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import floodmark as fm
from floodmark.backfill.chunks import prune
from floodmark.backfill.chunks.coverage import check_range, coverage
from floodmark.backfill.chunks.done_chunks import DoneChunks
from floodmark.backfill.chunks.frontier import Reached
from floodmark.backfill.chunks.geometry import Chunk, Geometry
from floodmark.backfill.chunks.history import HistorySpec, Outlook, plan
from floodmark.backfill.chunks.load import Loader
from floodmark.backfill.chunks.ranges import TableRange
from floodmark.backfill.chunks.sources import TableSource
from floodmark.catalog.chunks import ChunkRider, Chunks, LoadedTable
from floodmark.catalog.jobs import Jobs
from floodmark.commit.intent import Intent
from floodmark.jobs.progress import CallbackFailed, Cancelled, JobProgress
from floodmark.model import MAIN
from floodmark.testing.invariants import check_lake
from floodmark.write.change import Change
from tests.conftest import EVENTS, Place, at, ids, rows
from tests.history_world import Numbers, Row, chunk_rows, history, number_rows, room_of, run
from tests.without_spark import without_spark


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("notes", EVENTS)
        yield lake
        check_lake(lake.catalog)


def states(lake: fm.Lake, table: str = "events") -> dict[int, str]:
    return {chunk: state for (name, chunk), (state, _) in chunk_rows(lake).items() if name == table}


def covered(lake: fm.Lake) -> Any:
    return coverage(room_of(lake), lake.catalog.jobs.find("years"))["tables"]["events"]


# ── pruning ──


def test_rows_in_chunks_that_were_never_loaded_stay(lake: fm.Lake) -> None:
    lake.append("events", rows(3, 4, 15))
    source = Numbers(tip=40)
    spec = history(source, last=None, keep=30)
    run(lake, spec)
    source.now = 50
    assert run(lake, spec).outcome == "done"
    assert states(lake) == {1: "pruned", 2: "done", 3: "done", 4: "done"}
    # 15 was in the range of a chunk that was loaded, and goes with it.
    assert ids(lake) == [3, 4, *range(20, 50)]


def test_chunks_that_are_no_neighbours_go_alone(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "RANGES_MAX", 1)

    def fail(chunk: Chunk) -> None:
        raise fm.Invalid("not this one")

    source = Numbers(tip=50, act={"10..20": fail})
    run(lake, history(source, order="oldest"))
    source = Numbers(tip=50, act={"10..20": fail})
    run(lake, history(source, order="newest"))
    assert sorted(states(lake)) == [0, 2, 3, 4]
    lake.append("events", rows(12, 5))
    lake.maintain.compact("events", files_min=2)
    assert run(lake, history(source, keep=20)).outcome == "done"
    assert states(lake) == {0: "pruned", 2: "pruned", 3: "done", 4: "done"}
    assert ids(lake) == [12, *range(30, 50)]


def test_a_chunk_that_comes_while_others_are_pruned_is_not_marked(lake: fm.Lake) -> None:
    def fail(chunk: Chunk) -> None:
        raise fm.Invalid("not yet")

    source = Numbers(act={("0..10", 1): fail})
    assert run(lake, history(source)).outcome == "failed"
    job, table_id = lake.catalog.jobs.find("years").id, lake.catalog.history.head("events").table_id

    def load() -> None:
        rider = ChunkRider.of(job, 0, (LoadedTable("events", table_id, 10),))
        change = Change.begin(without_spark(lake), Intent("chunk", MAIN, "another", "", rider))
        change.write("append", "events", rows(*range(10)))
        change.publish()

    with at("prune.sealed", load):
        assert run(lake, history(source), keep=30).outcome == "done"
    assert states(lake) == {0: "done", 1: "pruned", 2: "done", 3: "done", 4: "done"}
    assert ids(lake) == [*range(10), *range(20, 50)], "what is marked and what is there are the same"
    assert run(lake, history(source), keep=30).outcome == "done"
    assert (states(lake)[0], ids(lake)) == ("pruned", list(range(20, 50)))


def test_what_was_pruned_is_loaded_again_below_a_lower_floor(lake: fm.Lake) -> None:
    source = Numbers(tip=50)
    spec = history(source, last=None)
    run(lake, spec)
    assert run(lake, spec, keep=20).outcome == "done"
    assert (ids(lake), covered(lake)["gaps"]) == (list(range(30, 50)), [])
    assert plan(room_of(lake), spec)["to_load"] == 3
    source.asked.clear()
    found = run(lake, spec, keep=35)
    assert (found.outcome, found.job["processed"], found.job["total"]) == ("done", 4, 4)
    assert (ids(lake), dict(source.asked)) == (list(range(10, 50)), {"20..30": 1, "10..20": 1})
    assert run(lake, spec).outcome == "done"
    assert (ids(lake), covered(lake)["pruned"]) == (list(range(50)), [])
    assert run(lake, spec).outcome == "nothing_to_do"


def test_the_floor_of_a_tip_within_a_chunk_leaves_no_gap(lake: fm.Lake) -> None:
    source = Numbers(tip=60)
    spec = history(source, last=None, keep=25)
    run(lake, spec)
    source.now = 79
    run(lake, spec)
    assert (covered(lake)["gaps"], covered(lake)["pruned"]) == ([], [["30", "50"]])


def test_whoever_follows_prunes_while_nothing_comes(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.create_table("times", "t timestamp, name string")
    start = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=12)
    geometry = Geometry.of(start - timedelta(days=4), None, "1d", align=start)

    def one(chunk: Chunk) -> list[Row]:
        return [{"t": chunk.start, "name": chunk.name}]

    late: list[int] = []
    real = prune.database_now_ms

    def now_ms(catalog: Any) -> int:
        return real(catalog) + sum(late)

    for module in ("history", "prune"):
        monkeypatch.setattr(f"floodmark.backfill.chunks.{module}.database_now_ms", now_ms)
    polls: list[int] = []

    def tip() -> datetime:
        polls.append(1)
        if len(polls) == 3:
            late.append(24 * 3_600_000)
        if len(polls) == 6:
            lake.catalog.jobs.cancel("years")
        return start

    source = Numbers(tip=tip, rows=one)
    spec = HistorySpec("years", source, {"times": None}, geometry, column="t", workers=1, keep="50h", follow=True)
    spec = replace(spec, poll_s=0.3)
    assert run(lake, spec).outcome == "cancelled"
    assert sorted(states(lake, "times").values()) == ["done", "pruned"]


# ── rows that come once, rows that come twice ──


class OneShot:
    def __init__(self, table: pa.Table) -> None:
        self._reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._reader.__arrow_c_stream__(requested_schema)


def test_a_stream_that_can_be_read_once_feeds_all_tables(lake: fm.Lake) -> None:
    source = Numbers(rows=lambda chunk: OneShot(pa.Table.from_pylist(number_rows(chunk))))
    assert run(lake, history(source, {"events": None, "notes": None})).outcome == "done"
    assert ids(lake, "notes") == ids(lake) == list(range(50))


def test_tables_that_get_different_rows_get_none(lake: fm.Lake) -> None:
    given: list[Row] = []

    def same(chunk: Chunk) -> list[Row]:
        given[:] = number_rows(chunk)
        return given

    with at("chunk.staged", given.clear):
        found = run(lake, history(Numbers(rows=same), {"events": None, "notes": None}))
    assert found.error is not None
    assert (found.outcome, found.error["kind"], found.error["facts"]["chunk"]) == ("failed", "Invalid", "40..50")
    assert (ids(lake), ids(lake, "notes")) == ([], [])


def test_an_exact_chunk_has_every_number_once(lake: fm.Lake) -> None:
    source = Numbers(rows=lambda chunk: [*number_rows(chunk)[:-1], number_rows(chunk)[0]])
    found = run(lake, history(source, rows_exact=True))
    assert found.error is not None
    assert (found.error["kind"], found.error["facts"]["chunk"], found.error["facts"]["numbers"]) == (
        "Invalid", "40..50", "9",
    )  # fmt: skip
    assert ids(lake) == []
    assert run(lake, history(Numbers(), rows_exact=True)).outcome == "done"


def test_a_table_with_a_key_does_not_tell_how_many_rows_a_chunk_has(lake: fm.Lake) -> None:
    lake.create_table("people", "who long not null, id long, name string", key=["who"])
    source = Numbers(rows=lambda chunk: [{"who": row["id"] % 3, **row} for row in number_rows(chunk)])
    assert run(lake, history(source, "people", rows_min=10)).outcome == "done"


# ── plans and settings ──


def test_a_run_reads_all_that_is_done_once(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[range | None] = []
    real = Chunks.done

    def done(self: Chunks, job: str, within: range | None = None) -> Any:
        reads.append(within)
        return real(self, job, within)

    def fail(chunk: Chunk) -> None:
        raise OSError("once")

    monkeypatch.setattr(Chunks, "done", done)
    source = Numbers(act={("20..30", 1): fail})
    assert run(lake, history(source)).outcome == "done"
    assert reads == [None, range(2, 3)]


def test_what_a_run_knows_of_another_incarnation_of_a_table_counts_for_nothing(lake: fm.Lake) -> None:
    run(lake, history(Numbers()))
    job = lake.catalog.jobs.find("years").id
    for table_id, done in (("of another incarnation", 5), (lake.catalog.history.head("events").table_id, 1)):
        known = DoneChunks({"events": table_id}, {"events": {3}})
        assert Outlook.look(room_of(lake), history(Numbers()), job, None, Reached(), known).processed == done


def test_another_definition_of_a_table_that_has_chunks_is_refused(lake: fm.Lake) -> None:
    run(lake, history(Numbers(), {"events": None}))
    with pytest.raises(fm.Invalid, match="another definition") as caught:
        run(lake, history(Numbers(), {"events": "select id, name from chunk where id > 3"}))
    assert (caught.value.facts["table"], lake.catalog.jobs.find("years").status) == ("events", "done")
    assert run(lake, history(Numbers(rows=lambda chunk: []))).outcome == "nothing_to_do", "another source is allowed"


def test_a_table_is_not_its_own_source(lake: fm.Lake) -> None:
    with pytest.raises(fm.Invalid, match="its own source"):
        run(lake, history(TableSource("notes", "id"), {"events": None, "notes": None}))


def test_rows_that_came_after_a_chunk_are_not_taken_for_its_own(lake: fm.Lake) -> None:
    """As many rows as were loaded, but one of them is another's."""
    source = Numbers()
    spec = history(source)
    run(lake, spec)
    job = lake.catalog.jobs.find("years").id
    room = room_of(lake)
    loader = Loader(room, spec, source, job, "test", None)  # type: ignore[arg-type]

    def as_loaded(number: int) -> bool:
        now = TableRange.at_head(room.catalog, room.engine.sessions, spec.geometry, "events", "id")
        return loader._is_as_loaded(now, number)

    assert [as_loaded(number) for number in range(5)] == [True] * 5
    lake.delete("events", "id = 25")
    assert not as_loaded(2)
    lake.append("events", [{"id": 25, "name": "another's"}])
    assert [as_loaded(number) for number in (1, 2, 3)] == [True, False, True]


def test_a_range_below_the_tables_own_retention_is_not_read(lake: fm.Lake) -> None:
    lake.create_table("times", "t timestamp, name string")
    start = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=12)
    geometry = Geometry.of(start - timedelta(days=4), start, "1d", align=start)
    source = Numbers(rows=lambda chunk: [{"t": chunk.start, "name": chunk.name}])
    run(lake, HistorySpec("years", source, {"times": None}, geometry, column="t", workers=1))
    job, room = lake.catalog.jobs.find("years"), room_of(lake)
    check_range(room, job, start - timedelta(days=4), start)
    lake.maintain.set_policy("times", "60h", column="t")
    check_range(room, job, start - timedelta(days=1), start)
    with pytest.raises(fm.BelowRetention, match="own retention"):
        check_range(room, job, start - timedelta(days=4), start)


# ── a catalog that is away, a healer that is too quick, a cancel that is too soon ──


def away(*_: object, **__: object) -> bool:
    raise fm.Unavailable("the catalog is away")


def test_a_catalog_that_does_not_answer_ends_no_run(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Jobs, "progress", away)
        patch.setattr(Jobs, "wants_cancel", away)
        found = run(lake, history(Numbers()))
    assert (found.outcome, found.job["processed"], found.job["total"]) == ("done", 5, 5)


def test_progress_is_written_when_the_catalog_is_back() -> None:
    answers: list[Any] = [fm.Unavailable("away"), True, fm.Unavailable("away"), False, fm.Fenced("taken over")]
    written: list[tuple[int, bool]] = []

    def answer(_: object, processed: int, __: object, *, first: bool) -> Any:
        written.append((processed, first))
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    jobs: Any = SimpleNamespace(progress=answer, wants_cancel=away)
    held: Any = SimpleNamespace(name="years")
    progress = JobProgress(jobs, held, every_s=0.0)
    for processed in (0, 1, 2):
        progress.step(processed, 9)
    with pytest.raises(Cancelled):
        progress.step(3, 9)
    with pytest.raises(fm.Fenced):
        progress.step(4, 9)
    assert written == [(0, True), (1, True), (2, False), (3, False), (4, False)]

    def fail(*_: object) -> None:
        raise fm.Unavailable("of the caller")

    with pytest.raises(CallbackFailed, match="of the caller"):
        JobProgress(jobs, held, fail).step(0, 9)


def test_a_chunk_whose_operation_a_healer_took_is_tried_again(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    real, fenced = Loader.load, [1]

    def load(self: Loader, *arguments: Any) -> None:
        if fenced:
            fenced.clear()
            raise fm.Fenced("a healer took it")
        real(self, *arguments)

    monkeypatch.setattr(Loader, "load", load)
    assert run(lake, history(Numbers())).outcome == "done"
    assert ids(lake) == list(range(50))


def test_a_cancel_between_making_and_taking_a_job_counts(lake: fm.Lake) -> None:
    with at("job.made", lambda: lake.catalog.jobs.cancel("years")), pytest.raises(fm.Conflict, match="cancelled"):
        run(lake, history(Numbers()))
    assert (lake.catalog.jobs.find("years").status, ids(lake)) == ("cancelled", [])
    assert run(lake, history(Numbers())).outcome == "done"
