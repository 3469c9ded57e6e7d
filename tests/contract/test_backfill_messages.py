"""What people and programs are told of backfills: floors, files of tips, callbacks that fail, names and definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks.coverage import check_range, coverage
from floodmark.backfill.chunks.frontier import SEEN
from floodmark.backfill.chunks.geometry import Chunk, Geometry
from floodmark.backfill.chunks.history import HistorySpec, plan
from floodmark.backfill.chunks.sources import CallSource, HistorySource, PathSource
from floodmark.cli.backfill import is_complete, job_fields, progress_text
from floodmark.cli.main import main
from floodmark.report.jobs import report_of
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.history_world import Numbers, history, number_rows, room_of, run

pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def sqlite_lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    """For what does not depend on the database."""
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        yield lake


def covered(lake: fm.Lake) -> dict[str, Any]:
    return coverage(room_of(lake), lake.catalog.jobs.find("years"))


def gaps(lake: fm.Lake) -> Any:
    return covered(lake)["tables"]["events"]["gaps"]


def check(lake: fm.Lake, first: Any, last: Any) -> None:
    check_range(room_of(lake), lake.catalog.jobs.find("years"), first, last)


# ── floors ──


@pytest.mark.parametrize(
    ("tip", "last", "keep", "floor"),
    [(1000, 400, 700, "300"), (409, None, 205, "200"), (409, 900, 205, "200"), (None, 400, 95, "300")],
    ids=["tip-behind-the-end", "tip-within-a-chunk", "tip-before-the-end", "no-tip"],
)
def test_a_floor_of_numbers_is_counted_from_the_tip_of_the_last_run(
    lake: fm.Lake, tip: int | None, last: int | None, keep: int, floor: str
) -> None:
    spec = history(Numbers(tip=tip), last=last, keep=keep)
    planned = plan(room_of(lake), spec)
    assert (run(lake, spec).outcome, planned["floor"]) == ("timed_out" if last == 900 else "done", floor)
    assert (covered(lake)["floor"], gaps(lake)) == (floor, [] if last != 900 else [["400", "900"]])
    check(lake, int(floor), 400)
    with pytest.raises(fm.BelowRetention) as below:
        check(lake, int(floor) - 10, 400)
    assert below.value.facts["oldest"] == floor


def test_a_history_that_is_all_below_the_floor_is_complete(lake: fm.Lake) -> None:
    lake.create_table("times", "t timestamp")
    geometry = Geometry.of("2024-01-01", "2024-02-01", "1d")
    spec = HistorySpec("years", Numbers(), {"times": None}, geometry, column="t", keep="90d")
    assert run(lake, spec).outcome == "nothing_to_do"
    found = covered(lake)
    assert (found["floor"], found["tables"]["times"]["gaps"]) == (found["last"], [])
    assert is_complete(found)
    with pytest.raises(fm.BelowRetention):
        check(lake, "2024-01-05", "2024-01-06")


def test_a_history_of_numbers_below_the_floor_is_complete(lake: fm.Lake) -> None:
    assert run(lake, history(Numbers(tip=1000), keep=10)).outcome == "nothing_to_do"
    assert (covered(lake)["floor"], gaps(lake), is_complete(covered(lake))) == ("50", [], True)
    with pytest.raises(fm.BelowRetention):
        check(lake, 40, 50)


def test_a_run_that_does_not_reach_its_source_leaves_the_floor_where_it_was(lake: fm.Lake) -> None:
    source = Numbers(tip=409)
    spec = history(source, last=None, keep=205)
    run(lake, spec)

    def away() -> int:
        raise OSError("the source is away")

    source.now = away
    assert run(lake, spec, retries=1).outcome == "failed"
    assert (covered(lake)["floor"], gaps(lake)) == ("200", [])
    # More is kept from now on: what is not there is missing, also if the source has not been asked.
    assert run(lake, spec, retries=1, keep=300).outcome == "failed"
    assert gaps(lake) == [["100", "200"]]
    source.now = 409
    # Also without a floor: how far a range without an end has come is not forgotten.
    assert (run(lake, spec, keep=None).outcome, lake.backfill.show("years")["settings"][SEEN]) == ("done", 409)


def test_a_job_whose_tip_is_not_kept_has_a_floor_by_what_is_loaded(lake: fm.Lake) -> None:
    spec = history(Numbers(tip=79), last=None, keep=25)
    run(lake, spec)
    held = lake.catalog.jobs.start("years", "history", ["events"], spec.pinned(), spec.settings(), "chunks", "test")
    lake.catalog.jobs.end(held, "cancelled", None, None)
    assert (covered(lake)["floor"], gaps(lake)) == ("40", [["40", "50"]])


# ── a file that holds the tip ──


def by_file(path: Path, **options: Any) -> HistorySpec:
    return history(CallSource(number_rows, f"@{path}"), **options)


@pytest.mark.parametrize("torn", ["missing", "empty"])
def test_a_tip_file_that_is_not_whole_is_read_again(sqlite_lake: fm.Lake, tmp_path: Path, torn: str) -> None:
    """Its writer takes it away, or empties it, before it writes it anew; the run asks again and goes on."""
    lake, path, asked = sqlite_lake, tmp_path / "tip", []
    path.write_text("20\n")
    real = CallSource.tip

    class Torn(CallSource):
        def tip(self) -> Any:
            asked.append(1)
            if len(asked) in (2, 3):
                path.unlink(missing_ok=True) if torn == "missing" else path.write_text(" \n")
            elif len(asked) == 6:
                lake.catalog.jobs.cancel("years")
            else:
                path.write_text("20" if len(asked) == 1 else "40")
            return real(self)

    spec = history(Torn(number_rows, f"@{path}"), last=None, follow=True)
    found = run(lake, spec)
    assert (found.outcome, found.error, ids(lake)) == ("cancelled", None, list(range(40)))


def test_a_tip_file_that_stays_away_is_a_source_that_does_not_answer(sqlite_lake: fm.Lake, tmp_path: Path) -> None:
    found = run(sqlite_lake, by_file(tmp_path / "tip", retries=2))
    assert found.error is not None
    assert (found.outcome, found.error["kind"], found.exit_code) == ("failed", "Unavailable", 4)
    assert "does not exist" in str(found.error)
    (tmp_path / "tip").write_text("nonsense")
    found = run(sqlite_lake, by_file(tmp_path / "tip"))
    assert found.error is not None
    assert found.error["kind"] == "Invalid"


# ── a path that says too little ──


def test_a_template_that_repeats_makes_no_job(sqlite_lake: fm.Lake) -> None:
    sqlite_lake.create_table("times", "t timestamp")
    spec = HistorySpec(
        "years",
        PathSource("/d/{start:%d}.jsonl"),
        {"times": None},
        Geometry.of("2024-01-01", "2024-03-01", "1d"),
        column="t",
    )
    with pytest.raises(fm.Invalid, match="more than once") as caught:
        run(sqlite_lake, spec)
    assert (caught.value.facts["chunk"], caught.value.facts["again"]) == (
        "2024-01-01..2024-01-02",
        "2024-02-01..2024-02-02",
    )
    assert sqlite_lake.backfill.list() == []


# ── callbacks ──

RAISED = [fm.Invalid("no, thanks"), fm.Unavailable("no, thanks"), fm.Fenced("no, thanks"), ValueError("no, thanks")]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_of_a_callback_fails_a_column_and_nothing_else(lake: fm.Lake, error: Exception) -> None:
    lake.append("events", rows(1, 2, 3))
    calls: list[int] = []

    def fail(processed: int, total: int | None) -> None:
        calls.append(processed)
        raise error

    found = lake.backfill.column("events", "nick", "name", batch_rows=1, pause="0ms", progress=fail)
    assert found.error is not None
    assert (found.outcome, calls) == ("failed", [0])
    assert (found.error["kind"], found.error["message"], found.error["advice"]) == (
        type(error).__name__, "no, thanks", "",
    )  # fmt: skip
    assert lake.filled_columns("events") == ("nick",), "the column stays bound to its expression"
    assert lake.backfill.resume("events.nick").outcome == "done"
    assert {row["nick"] for row in lake.read_arrow("events").read_all().to_pylist()} == {"row 1", "row 2", "row 3"}


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("workers", [1, 2], ids=["one-worker", "two-workers"])
def test_an_error_of_a_callback_fails_a_history(sqlite_lake: fm.Lake, error: Exception, workers: int) -> None:
    def fail(processed: int, total: int | None) -> None:
        if processed:
            raise error

    found = run(sqlite_lake, history(Numbers()), fail, workers=workers)
    assert found.error is not None
    assert (found.outcome, found.error["kind"], found.error["message"]) == (
        "failed", type(error).__name__, "no, thanks",
    )  # fmt: skip
    assert run(sqlite_lake, history(Numbers())).outcome == "done"


# ── names and definitions ──


@pytest.mark.parametrize("name", ["events.nick", "anything.else", "."])
def test_a_history_has_no_name_of_a_column(lake: fm.Lake, name: str) -> None:
    for start in (lambda spec: run(lake, spec), lambda spec: plan(room_of(lake), spec)):
        with pytest.raises(fm.Invalid, match="not have a dot"):
            start(history(Numbers(), name=name))
    assert lake.backfill.list() == []


def test_a_history_that_has_the_name_of_a_column_goes_on_and_is_named_to_the_column(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    spec = history(Numbers(), name="events.nick")
    held = lake.catalog.jobs.start(
        "events.nick", "history", ["events"], spec.pinned(), spec.settings(), "chunks", "test"
    )
    lake.catalog.jobs.end(held, "cancelled", None, None)
    assert run(lake, spec).outcome == "done"
    for start in (lake.backfill.column, lambda *given: lake.backfill.plan(lake.backfill.column_spec(*given))):
        with pytest.raises(fm.Invalid, match="a history backfill has that name") as caught:
            start("events", "nick", "name")
        assert "table_id" not in str(caught.value)


def by_function(definition: Callable[[Any], Any]) -> HistorySpec:
    return history(Numbers(), {"events": None, "notes": definition})


def test_another_code_of_a_function_is_another_definition(sqlite_lake: fm.Lake) -> None:
    lake = sqlite_lake
    lake.create_table("notes", EVENTS)
    one, other = (lambda frame: frame.where("id > 3"), lambda frame: frame.where("id > 4"))
    spec = by_function(one)
    job = _with_done(lake, spec)
    again = lambda frame: frame.where("id > 3")  # noqa: E731 - of the same name
    assert plan(room_of(lake), by_function(again))["done"] == 5
    version = lake.status()["version"]
    with pytest.raises(fm.Invalid, match="another definition") as caught:
        run(lake, by_function(other))
    assert (caught.value.facts["table"], lake.status()["version"]) == ("notes", version)
    assert caught.value.facts["definition"] != caught.value.facts["was"]
    assert lake.catalog.jobs.find("years").id == job


def _with_done(lake: fm.Lake, spec: HistorySpec) -> str:
    """The job of a history all of whose chunks are done for both tables, without Spark."""
    assert run(lake, history(spec.source, {"events": None, "notes": None})).outcome == "done"
    held = lake.catalog.jobs.start(
        "years", "history", list(spec.tables), spec.pinned(), spec.settings(), "chunks", "test"
    )
    return lake.catalog.jobs.end(held, "done", 5, 5).id


# ── figures and sentences ──


def test_whoever_follows_is_never_at_its_end(lake: fm.Lake) -> None:
    seen: list[dict[str, Any]] = []

    def tip() -> int:
        if len(seen) == 2:
            lake.catalog.jobs.cancel("years")
        elif (job := lake.backfill.show("years"))["processed"] == 5:
            seen.append(job)
        return 50

    found = run(lake, history(Numbers(tip=tip), last=None, follow=True))
    assert (found.outcome, [job["status"] for job in seen]) == ("cancelled", ["running", "running"])
    for job in seen:
        assert (job["percent"], job["eta_s"]) == (None, None)
        assert "follows" in progress_text(report_of(job))
    assert (found.job["percent"], found.job["processed"]) == (100.0, 5)


def test_a_history_that_waits_says_by_which_options_it_would_wait_longer(lake: fm.Lake) -> None:
    found = run(lake, history(Numbers(tip=30)))
    assert found.error is not None
    assert (found.outcome, found.error["facts"]["tip"]) == ("timed_out", "30")
    assert "--tip-wait" in found.error["advice"]
    assert "--tip " in found.error["advice"]


def test_a_long_error_is_shown_in_lines(lake: fm.Lake, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(chunk: Chunk) -> None:
        raise fm.Invalid("words " * 60, path="/a/" + "long-" * 30 + "path", advice="Mend it.")

    run(lake, history(Numbers(act={"40..50": fail})))
    text = job_fields(report_of(lake.backfill.show("years")), covered(lake))["error"]
    assert max(len(line) for line in text.splitlines() if "/a/" not in line) <= 90
    assert "/a/" + "long-" * 30 + "path" in text, "what may be copied stays whole"
    catalog = [] if place.catalog is None else ["--catalog", place.catalog]
    with pytest.raises(SystemExit) as ended:
        main(["--lake", place.path, *catalog, "backfill", "show", "years"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    first = next(place for place, line in enumerate(shown) if line.startswith("error "))
    assert shown[first + 1].startswith(" " * (len(shown[first]) - len(shown[first].removeprefix("error").lstrip())))


def test_a_column_that_was_unbound_is_told_from_any_other(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    assert lake.backfill.column("events", "nick", "name").outcome == "done"
    lake.backfill.unbind("events", "nick")
    with pytest.raises(fm.Invalid, match="was unbound from its expression, and data files hold it"):
        lake.backfill.column("events", "nick", "name")
    with pytest.raises(fm.Invalid, match="has a column of this name"):
        lake.backfill.column("events", "name", "nick")


def test_a_table_that_is_not_there_is_told_with_how_to_make_it(lake: fm.Lake) -> None:
    source: HistorySource = Numbers()
    with pytest.raises(fm.NotFound) as caught:
        run(lake, history(source, "nothing"))
    assert "floodmark load --create" in caught.value.advice
    assert "lake.create_table" in str(caught.value)


def test_rows_are_those_that_came_into_tables(lake: fm.Lake) -> None:
    lake.create_table("people", "who long not null, id long, name string", key=["who"])
    source = Numbers(rows=lambda chunk: [{"who": row["id"] % 3, **row} for row in number_rows(chunk)])
    found = run(lake, history(source, "people"))
    # One of each key in a chunk, also those that were not newer than what was there.
    assert (found.job["rows"], ids(lake, "people")) == (15, [47, 48, 49])
    lake.create_table("notes", EVENTS)
    assert run(lake, history(Numbers(), {"events": None, "notes": None}, name="two")).job["rows"] == 100
