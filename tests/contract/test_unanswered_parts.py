"""Rows that a destination fails on without a word about them (5xx, timeouts): found, set aside, never by an outage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.cli.main import main
from floodmark.errors import Invalid, Unavailable
from floodmark.ingest.receive import Sender
from floodmark.serve.http.body import RequestLimits
from floodmark.sinks.http.policy import Reply, wait_s
from floodmark.sinks.outcome import SinkRun
from floodmark.storage import local_path
from floodmark.testing.invariants import check_lake
from floodmark.testing.receiver import Fault, Receiver, answers, holds
from tests.between import Between, between
from tests.conftest import Place, rows
from tests.contract.test_receive_http import served

FOR_EVER_S = 600.0
BAD = 7


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
    assert receiver.ledger.mismatched == [], "other bytes came under a key that was used"


@pytest.fixture
def events(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    """A lake with ten rows in one file."""
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")
        lake.append("events", rows(*range(10)))
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of the database on by so many hours; everything else is as it is."""
    real, passed_ms = Database.now_ms, [0]
    monkeypatch.setattr(Database, "now_ms", lambda self, tx: real(self, tx) + passed_ms[0])

    def move(more: float) -> None:
        passed_ms[0] += round(more * 3_600_000)

    return move


def add(lake: fm.Lake, receiver: Receiver, **settings: Any) -> None:
    quick = {"part_rows": 2, "backoff_s_max": 0.01, "timeout_s": 20, "tries": 2}
    lake.sinks.add("web", "http", tables="events", url=receiver.url + "/{table}", **{**quick, **settings})


def run(lake: fm.Lake, **options: Any) -> SinkRun:
    return lake.sinks.run("web", **options)


def ids(receiver: Receiver) -> list[int]:
    return sorted(row["id"] for row in receiver.rows)


def aside(lake: fm.Lake) -> list[int]:
    return [json.loads(entry["line"])["id"] for entry in lake.sinks.quarantine("web")]


def table_of(lake: fm.Lake) -> dict[str, Any]:
    found: dict[str, Any] = lake.sinks.about("web")["tables"][0]
    return found


# ── a row to blame ──


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(500, when=holds("id", BAD), text="boom"), "500: boom"),
        (Fault(when=holds("id", BAD), drops=True), "no answer: "),
        (Fault(500, when=holds("id", BAD), delay_s=FOR_EVER_S), "no answer: TimeoutError"),
    ],
    ids=["5xx", "dropped", "timeout"],
)
def test_a_row_without_an_answer_is_found_by_halving_and_set_aside_with_the_reason(
    events: fm.Lake, receiver: Receiver, fault: Fault, reason: str, parallel: int
) -> None:
    add(events, receiver, part_rows=4, parallel=parallel, split_unanswered=True, timeout_s=1)
    receiver.script(fault)
    done = run(events)
    assert (done.outcome, done.rows, done.tables[0].quarantined) == ("shipped", 9, 1)
    assert ids(receiver) == [number for number in range(10) if number != BAD]
    assert aside(events) == [BAD]
    assert events.sinks.quarantine("web")[0]["reason"].startswith(reason)
    assert (table_of(events)["mark"], table_of(events)["open_unit"]) == (table_of(events)["head"], None)


def test_a_part_is_halved_only_if_others_were_accepted_in_the_same_run(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, part_rows=10, split_unanswered=True)
    receiver.script(Fault(500, when=holds("id", BAD)))
    assert isinstance(run(events).error, Unavailable)
    # There was no other part: one key, and nothing aside.
    assert (len(receiver.tries), aside(events)) == (1, [])


def test_a_unit_of_one_part_is_halved_by_a_later_run_to_have_something_to_compare(
    events: fm.Lake, receiver: Receiver
) -> None:
    add(events, receiver, part_rows=10, split_unanswered=True)
    receiver.script(Fault(500, when=holds("id", BAD)))
    assert run(events).outcome == "failed"
    assert run(events).outcome == "shipped"
    assert (aside(events), ids(receiver)) == ([BAD], [number for number in range(10) if number != BAD])


def test_several_bad_rows_in_every_part_are_found_over_some_runs(events: fm.Lake, receiver: Receiver) -> None:
    bad = (0, 3, 5, 9)
    add(events, receiver, part_rows=3, parallel=2, split_unanswered=True)
    receiver.script(Fault(503, when=holds("id", *bad)))
    # How many depends on which answers come first.
    for _ in range(40):
        if run(events).outcome == "shipped":
            break
    assert (sorted(aside(events)), ids(receiver)) == ([*bad], [1, 2, 4, 6, 7, 8])


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("good", [1, 9])
def test_bad_rows_that_are_all_that_is_left_of_a_unit_are_found(
    events: fm.Lake, receiver: Receiver, good: int, parallel: int
) -> None:
    bad = range(good, 10)
    add(events, receiver, part_rows=1, parallel=1, tries=1, split_unanswered=True)
    # The endpoint is down after it took the good rows: the bad ones are left, and no other part to compare them with.
    outage = Fault(503, when=lambda request: len(receiver.rows) >= good)
    receiver.script(Fault(503, when=holds("id", *bad)), outage)
    for _ in range(3):
        assert run(events).outcome == "failed"
    assert (aside(events), ids(receiver)) == ([], [*range(good)])
    events.sinks.set("web", parallel=parallel)
    receiver.script(Fault(503, when=holds("id", *bad)))
    assert run(events, until_empty=True).outcome == "shipped"
    assert (sorted(aside(events)), ids(receiver)) == ([*bad], [*range(good)])


def test_a_part_that_shows_that_the_endpoint_works_is_sent_again_under_its_own_key(
    events: fm.Lake, receiver: Receiver
) -> None:
    add(events, receiver, part_rows=9, parallel=1, tries=1, split_unanswered=True)
    receiver.script(Fault(500, when=holds("id", 9)))
    assert run(events).outcome == "shipped"
    parts = [request.part for request in receiver.requests]
    assert (parts, aside(events)) == ([(0, 9), (9, 10), (0, 9)], [9])
    assert (ids(receiver), table_of(events)["rows_doubtful"]) == (list(range(9)), 1)


def test_an_outage_between_the_answers_to_two_halves_sets_no_row_aside(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, part_rows=2, parallel=2, tries=1, split_unanswered=True)
    down = Fault(503, when=lambda request: 0 in ids(receiver))
    late = Fault(503, when=lambda request: request.part == (1, 2), delay_s=0.5)
    receiver.script(Fault(500, when=lambda request: request.part == (0, 2)), late, down)
    for _ in range(3):
        assert run(events).outcome == "failed"
    assert aside(events) == []
    receiver.script()
    assert run(events, until_empty=True).outcome == "shipped"
    assert (ids(receiver), aside(events)) == (list(range(10)), [])


def test_a_foreign_endpoint_s_part_is_not_halved_without_being_asked_to(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver)
    receiver.script(Fault(500, when=holds("id", BAD)))
    for _ in range(3):
        done = run(events)
        assert isinstance(done.error, Unavailable)
        assert "split_unanswered=true" in done.error.advice
        assert "sink quarantine add 'web' --part 6-8" in done.error.advice
    assert {request.part for request in receiver.requests if BAD in [row["id"] for row in request.rows]} == {(6, 8)}
    assert aside(events) == []


def test_rows_that_may_have_arrived_twice_at_a_foreign_endpoint_are_counted(
    events: fm.Lake, receiver: Receiver
) -> None:
    add(events, receiver, part_rows=4, parallel=2, split_unanswered=True)
    # It keeps what it fails on: the halves come under other keys.
    receiver.script(Fault(500, when=lambda request: request.part == (4, 8), stores=True))
    assert run(events).outcome == "shipped"
    assert Counter(ids(receiver)) == Counter([*range(10), 4, 5, 6, 7])
    assert (table_of(events)["rows_doubtful"], aside(events)) == (4, [])


@pytest.mark.parametrize("way", ["found", "by_hand"])
def test_rows_of_a_part_that_is_halved_again_and_again_are_counted_once(
    events: fm.Lake, receiver: Receiver, way: str
) -> None:
    add(events, receiver, part_rows=10, parallel=2, tries=1, split_unanswered=True)
    receiver.script(Fault(500, when=holds("id", BAD)))
    assert run(events).outcome == "failed"
    if way == "by_hand":
        receiver.script(answers(500))
        run(events)
        with pytest.raises(Invalid) as wrong:
            events.sinks.set_aside("web", first=0, last=10)
        first, last = (int(number) for number in wrong.value.facts["waiting"].split(", ")[-1].split("-"))
        assert events.sinks.set_aside("web", first=first, last=last) == last - first < 10
        receiver.script()
    assert run(events, until_empty=True).outcome == "shipped"
    assert table_of(events)["rows_doubtful"] == 10


def test_a_retry_that_gets_no_answer_goes_back_to_quarantine_and_does_not_block(
    events: fm.Lake, receiver: Receiver
) -> None:
    add(events, receiver, split_unanswered=True)
    receiver.script(Fault(500, when=holds("id", BAD)))
    run(events)
    again = events.sinks.retry("web")
    assert again.tables[0].quarantined == 1
    # Nothing shows whether the row or the endpoint is to blame: no success, and no block either.
    assert (again.outcome, again.exit_code, type(again.error)) == ("failed", 4, Unavailable)
    assert (aside(events), table_of(events)["open_unit"]) == ([BAD], None)
    events.append("events", rows(10, 11))
    assert run(events).rows == 2
    receiver.script()
    assert events.sinks.retry("web").rows == 1
    assert ids(receiver) == list(range(12))


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize("bad", [(BAD,), tuple(range(1, 10))], ids=["one", "many"])
def test_a_retry_at_an_endpoint_that_is_down_fails_and_the_rows_keep_their_reason(
    events: fm.Lake, receiver: Receiver, bad: tuple[int, ...], parallel: int
) -> None:
    add(events, receiver, part_rows=1, parallel=parallel, split_unanswered=True)
    receiver.script(Fault(422, when=holds("id", *bad), text="boom"))
    run(events)
    receiver.script(Fault(drops=True))
    again = events.sinks.retry("web")
    assert (again.outcome, again.exit_code, again.rows, type(again.error)) == ("failed", 4, 0, Unavailable)
    assert again.error is not None
    assert again.error.facts["answer"].startswith("no answer: ")
    kept = events.sinks.quarantine("web")
    assert {entry["reason"].partition(":")[0] for entry in kept} == {"422"}
    assert (sorted(aside(events)), {entry["retry_unit"] for entry in kept}) == ([*bad], {None})
    # Those that were sent may be there, and go out under another key next time.
    assert table_of(events)["rows_doubtful"] == again.tables[0].quarantined
    events.append("events", rows(10))
    receiver.script(Fault(422, when=holds("id", *bad)))
    assert run(events).rows == 1
    receiver.script()
    assert events.sinks.retry("web").rows == len(bad)
    assert ids(receiver) == list(range(11))


@pytest.mark.parametrize("word", [None, 422], ids=["accepted", "refused"])
def test_rows_of_a_retry_without_an_answer_have_a_new_reason_if_the_endpoint_had_a_word_about_another(
    events: fm.Lake, receiver: Receiver, word: int | None
) -> None:
    add(events, receiver, part_rows=1, parallel=2, split_unanswered=True)
    receiver.script(Fault(422, when=holds("id", 0, 3, 4, 5, 6, BAD)))
    run(events)
    fails = Fault(500, when=holds("id", 3, 4, 5, 6, BAD), text="boom")
    receiver.script(fails, *([] if word is None else [Fault(word, when=holds("id", 0))]))
    again = events.sinks.retry("web")
    assert (again.outcome, again.error, again.rows) == ("shipped", None, 1 if word is None else 0)
    found = {json.loads(entry["line"])["id"]: entry["reason"] for entry in events.sinks.quarantine("web")}
    assert {found.pop(number) for number in (3, 4, 5, 6, BAD)} == {"500: boom"}
    assert list(found) == ([] if word is None else [0])


def test_a_retry_in_which_the_endpoint_goes_down_ends_before_every_row_was_tried(
    events: fm.Lake, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.sinks.http.suspects.SILENT_MAX", 2)
    add(events, receiver, part_rows=1, parallel=1, tries=1, split_unanswered=True)
    receiver.script(Fault(422, when=holds("id", *range(1, 10)), text="boom"))
    run(events)
    receiver.script(Fault(503, when=lambda request: 1 in ids(receiver)))
    again = events.sinks.retry("web")
    assert (again.outcome, again.rows, type(again.error)) == ("failed", 1, Unavailable)
    reasons = Counter(entry["reason"].partition(":")[0] for entry in events.sinks.quarantine("web"))
    assert reasons == {"503": 2, "422": 6}
    receiver.script()
    assert events.sinks.retry("web").rows == 8
    assert ids(receiver) == list(range(10))


def test_a_retry_that_was_cut_off_and_gets_no_answer_does_not_block_the_run_that_finishes_it(
    events: fm.Lake, receiver: Receiver
) -> None:
    add(events, receiver, part_rows=1, parallel=1)
    receiver.script(Fault(422, when=holds("id", BAD)))
    run(events)
    receiver.script(Fault(500, when=holds("id", BAD)))
    assert events.sinks.retry("web").outcome == "failed"
    events.sinks.set("web", split_unanswered=True)
    events.append("events", rows(10))
    done = run(events)
    # What is new arrived, and the run says that the other did not.
    assert (done.outcome, done.rows, type(done.error)) == ("failed", 1, Unavailable)
    assert (aside(events), table_of(events)["mark"]) == ([BAD], table_of(events)["head"])
    assert run(events).outcome == "nothing_to_do"


# ── an endpoint to blame ──


@pytest.mark.parametrize("begins", [0, 1], ids=["from_the_start", "in_the_middle_of_a_run"])
@pytest.mark.parametrize("part_rows", [1, 4])
def test_an_outage_of_24_hours_sets_no_row_aside(
    events: fm.Lake, receiver: Receiver, hours: Callable[[float], None], begins: int, part_rows: int
) -> None:
    add(events, receiver, part_rows=part_rows, parallel=2, tries=1, split_unanswered=True)
    receiver.script(Fault(503, when=lambda request: request.number > begins))
    for _ in range(24):
        assert run(events).outcome == "failed"
        hours(1)
    assert aside(events) == []
    assert table_of(events)["mark"] < table_of(events)["head"]
    receiver.script()
    assert run(events, until_empty=True).outcome == "shipped"
    assert (ids(receiver), aside(events)) == (list(range(10)), [])


def test_an_outage_halves_a_part_a_few_times_at_most(events: fm.Lake, receiver: Receiver) -> None:
    events.append("events", rows(*range(10, 200)))
    add(events, receiver, part_rows=1000, tries=1, split_unanswered=True)
    receiver.script(answers(500))
    for _ in range(12):
        run(events)
    parts = {request.part for request in receiver.requests}
    assert len(parts) == 1 + 2 * 4


# ── limits ──


def test_no_more_rows_are_set_aside_in_all_than_the_cap_and_the_status_shows_it(
    events: fm.Lake, receiver: Receiver
) -> None:
    add(events, receiver, split_unanswered=True, quarantine_total_max=2)
    receiver.script(Fault(500, when=holds("id", 1, 4, 8)))
    done = run(events)
    assert isinstance(done.error, Invalid)
    assert (done.error.facts["quarantined"], done.error.facts["quarantine_total_max"]) == (2, 2)
    about = events.sinks.about("web")
    assert (about["quarantined"], about["quarantine_total_max"], about["tables"][0]["open_unit"]) != (2, 2, None)
    # Rows of later units count with those of earlier ones.
    events.sinks.set("web", quarantine_total_max=3)
    assert run(events, until_empty=True).outcome == "shipped"
    events.append("events", rows(11, 12, 13))
    receiver.script(Fault(422, when=holds("id", 12)))
    assert run(events).outcome == "failed"
    assert sorted(aside(events)) == [1, 4, 8]


def test_a_413_is_remembered_for_later_parts_units_and_runs(events: fm.Lake, receiver: Receiver) -> None:
    events.append("events", rows(*range(10, 400)))
    receiver.body_bytes_max = 2000
    add(events, receiver, part_rows=80, parallel=1, compression="none")
    assert run(events).outcome == "shipped"
    refused = [number for number, status in receiver.statuses.items() if status == 413]
    learned = events.sinks.about("web")["body_bytes_max"]
    # What was sealed before it was known is asked about; all later parts are cut to the size.
    assert (learned <= 2000, len(refused) <= 6) == (True, True)
    receiver.script()
    events.append("events", rows(*range(400, 700)))
    assert run(events).outcome == "shipped"
    assert 413 not in receiver.statuses.values()
    assert ids(receiver) == list(range(700))
    # Other settings may be the mend: it is learned anew.
    events.sinks.set("web", part_rows=100)
    assert events.sinks.about("web")["body_bytes_max"] is None


# ── rows without a form ──


def test_a_row_that_has_no_form_as_json_is_set_aside_and_the_rest_arrives(
    new_place: Callable[[str], Place], receiver: Receiver
) -> None:
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, at timestamp")
        _append_beyond_years(lake, "events", bad=(2, 5), count=8)
        add(lake, receiver, part_rows=3)
        done = run(lake)
        assert (done.outcome, done.rows, done.tables[0].quarantined) == ("shipped", 6, 2)
        assert ids(receiver) == [0, 1, 3, 4, 6, 7]
        kept = [json.loads(entry["line"]) for entry in lake.sinks.quarantine("web")]
        assert [(row["id"], row["at"], row["_unencodable"]) for row in kept] == [(2, None, ["at"]), (5, None, ["at"])]
        assert "years 1 to 9999" in lake.sinks.quarantine("web")[0]["reason"]
        # It is never sent without the value that it has.
        assert lake.sinks.retry("web").rows == 0
        assert len(lake.sinks.quarantine("web")) == 2
        assert ids(receiver) == [0, 1, 3, 4, 6, 7]
        check_lake(lake.catalog)


def test_a_row_without_a_form_that_something_newer_replaced_is_let_go(
    new_place: Callable[[str], Place], receiver: Receiver
) -> None:
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, at timestamp", key=["id"])
        _append_beyond_years(lake, "events", bad=(2, 3), count=4)
        add(lake, receiver)
        assert run(lake).tables[0].quarantined == 2
        lake.merge("events", [{"id": 2, "at": datetime(2026, 1, 1, tzinfo=UTC)}])
        assert run(lake).rows == 1
        assert lake.sinks.retry("web").tables[0].detail["replaced"] == 1
        assert [json.loads(entry["line"])["id"] for entry in lake.sinks.quarantine("web")] == [3]


def _append_beyond_years(lake: fm.Lake, table: str, bad: tuple[int, ...], count: int) -> None:
    beyond = 20_000 * 365 * 86_400 * 1_000_000
    moments = pa.array([beyond if number in bad else number for number in range(count)], pa.int64())
    columns = {"id": pa.array(range(count), pa.int64()), "at": moments.cast(pa.timestamp("us", "UTC"))}
    lake.append(table, pa.table(columns))


# ── by hand ──


def test_a_part_is_set_aside_by_hand_in_the_same_epoch(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver)
    receiver.script(Fault(500, when=holds("id", BAD)))
    error = run(events).error
    assert error is not None
    before = table_of(events)
    with pytest.raises(Invalid) as wrong:
        events.sinks.set_aside("web", first=0, last=9)
    assert "6-8" in wrong.value.facts["waiting"]
    first, last = (int(number) for number in error.facts["part"].split("-"))
    assert events.sinks.set_aside("web", first=first, last=last, reason="poison") == 2
    assert run(events).outcome == "shipped"
    after = table_of(events)
    assert (after["epoch"], after["mark"], after["rows_doubtful"]) == (before["epoch"], after["head"], 2)
    assert (aside(events), ids(receiver)) == ([6, 7], [0, 1, 2, 3, 4, 5, 8, 9])
    assert {entry["reason"] for entry in events.sinks.quarantine("web")} == {"set aside by hand: poison"}
    receiver.script()
    assert events.sinks.retry("web").rows == 2
    assert ids(receiver) == list(range(10))


def test_a_row_that_blocks_a_retry_is_put_back_by_hand(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver)
    receiver.refuses = lambda row: row["id"] == BAD
    run(events)
    receiver.script(Fault(500, when=holds("id", BAD)))
    error = events.sinks.retry("web").error
    assert isinstance(error, Unavailable)
    assert run(events).outcome == "failed"
    first, last = (int(number) for number in error.facts["part"].split("-"))
    assert events.sinks.set_aside("web", first=first, last=last) == 1
    events.append("events", rows(10))
    assert run(events, until_empty=True).outcome == "shipped"
    assert (aside(events), ids(receiver)) == ([BAD], [*range(7), 8, 9, 10])


def test_the_command_sets_a_part_aside_and_says_so(
    new_place: Callable[[str], Place], receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    place = new_place("sqlite")
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")
        lake.append("events", rows(*range(10)))
        add(lake, receiver)
    receiver.script(Fault(500, when=holds("id", BAD)))

    def command(*words: str) -> tuple[Any, dict[str, Any]]:
        with pytest.raises(SystemExit) as ended:
            main(["--lake", place.path, "--json", "sink", *words])
        return ended.value.code or 0, json.loads(capsys.readouterr().out or "{}")

    assert command("run", "web")[0] == 4
    assert command("quarantine", "add", "web", "--part", "six")[0] == 2
    assert command("quarantine", "add", "web", "--part", "6-8") == (
        0,
        {"sink": "web", "part": "6-8", "rows": 2, "outcome": "set_aside"},
    )
    assert command("run", "web", "--now")[1]["outcome"] == "shipped"
    status = command("status", "web")[1]
    assert (status["quarantined"], status["quarantine_total_max"], status["tables"][0]["rows_doubtful"]) == (
        2,
        10_000,
        2,
    )


# ── patience ──


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured_by_the_runs_that_follow(
    events: fm.Lake, receiver: Receiver, hours: Callable[[float], None], form: str
) -> None:
    events.create_table("others", "id long not null, name string")
    events.append("others", rows(1))
    add(events, receiver, parallel=1)
    events.sinks.remove("web")
    settings = {"part_rows": 2, "tries": 8, "parallel": 1, "url": receiver.url + "/{table}"}
    events.sinks.add("web", "http", tables=["events", "others"], **settings)
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True)
    receiver.script(answers(429, retry_after="600" if form == "seconds" else later))
    assert run(events).outcome == "failed"
    # Neither again, nor for another table.
    assert len(receiver.requests) == 1
    hours(5 / 3600)
    waiting = run(events)
    assert (waiting.outcome, waiting.exit_code, len(receiver.requests)) == ("waiting", 4, 1)
    assert events.sinks.about("web")["waits_until"] is not None
    run(events, now=True)
    assert len(receiver.requests) == 2
    receiver.script()
    hours(700 / 3600)
    assert run(events, until_empty=True).outcome == "shipped"
    assert len(ids(receiver)) == 11
    assert events.sinks.about("web")["waits_until"] is None


def test_retry_after_of_the_last_try_is_honoured_by_the_next_run(
    events: fm.Lake, receiver: Receiver, hours: Callable[[float], None]
) -> None:
    add(events, receiver, parallel=1, tries=1)
    receiver.script(answers(503, retry_after="60"))
    assert run(events).outcome == "failed"
    assert run(events).outcome == "waiting"
    hours(61 / 3600)
    receiver.script()
    assert run(events).outcome == "shipped"


def test_retry_after_outlives_a_part_that_is_set_aside_by_hand(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, parallel=1, tries=1)
    receiver.script(answers(503, retry_after="60"))
    assert run(events).outcome == "failed"
    assert events.sinks.set_aside("web", first=0, last=2) == 2
    assert run(events).outcome == "waiting"


def test_retry_after_of_rows_that_are_sent_again_is_honoured_too(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, parallel=1, tries=1)
    receiver.script(Fault(422, when=holds("id", BAD)))
    assert run(events).outcome == "shipped"
    receiver.script(answers(503, retry_after="60"))
    assert events.sinks.retry("web").outcome == "failed"
    events.append("events", rows(10))
    assert run(events).outcome == "waiting"


def test_retry_after_0_does_not_burn_all_tries_at_once() -> None:
    waits = [wait_s(Reply(503, retry_after_s=0.0), tries, 30.0, 0.0) for tries in range(1, 8)]
    assert waits == [wait_s(Reply(503), tries, 30.0, 0.0) for tries in range(1, 8)]
    assert sum(waits) > 15


def test_what_a_sink_notes_is_kept_on_a_shared_database_too(
    new_place: Callable[[str], Place], receiver: Receiver, hours: Callable[[float], None]
) -> None:
    with new_place("postgresql").open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")
        lake.append("events", rows(*range(60)))
        receiver.body_bytes_max = 2000
        add(lake, receiver, part_rows=60, parallel=1, compression="none", split_unanswered=True)
        receiver.script(Fault(500, when=lambda request: request.size_bytes < 2000 and holds("id", BAD)(request)))
        assert run(lake).outcome == "shipped"
        receiver.script(answers(429, retry_after="600"))
        lake.append("events", rows(60))
        assert [run(lake).outcome, run(lake).outcome] == ["failed", "waiting"]
        hours(1)
        receiver.script()
        assert run(lake).outcome == "shipped"
        assert (aside(lake), ids(receiver)) == ([BAD], [number for number in range(61) if number != BAD])
        assert (table_of(lake)["rows_doubtful"] > 0, lake.sinks.about("web")["body_bytes_max"] < 2000) == (True, True)
        check_lake(lake.catalog)


# ── another lake ──


@pytest.fixture
def to_lake(events: fm.Lake, new_place: Callable[[str], Place]) -> Iterator[tuple[fm.Lake, Between]]:
    """Another lake behind a proxy, to which the sink `web` sends."""
    with new_place("sqlite").open(create=True) as target, ExitStack() as stack:
        target.create_table("events", "id long not null, name string")
        client = stack.enter_context(served(target, limits=RequestLimits()))
        proxy = stack.enter_context(between(str(client.base_url)))
        settings = {"part_rows": 4, "backoff_s_max": 0.01, "tries": 2, "parallel": 2, "compression": "none"}
        url = proxy.url + "/api/tables/{table}/rows?wait=committed"
        events.sinks.add("web", "http", tables="events", url=url, **settings)
        yield target, proxy
        stack.close()
        check_lake(target.catalog)


def there(lake: fm.Lake) -> list[int]:
    return sorted(row["id"] for row in lake.read_arrow("events").read_all().to_pylist())


def has_bad(found: list[dict[str, Any]]) -> bool:
    return any(row["id"] == BAD for row in found)


def test_another_lake_receives_every_row_once_though_one_gets_no_answer(
    events: fm.Lake, to_lake: tuple[fm.Lake, Between]
) -> None:
    target, proxy = to_lake
    proxy.fails = has_bad
    assert run(events).outcome == "shipped"
    assert (there(target), aside(events)) == ([number for number in range(10) if number != BAD], [BAD])
    assert table_of(events)["rows_doubtful"] == 0
    proxy.fails = lambda found: False
    assert events.sinks.retry("web").rows == 1
    assert (there(target), aside(events)) == (list(range(10)), [])


def test_another_lake_that_has_the_row_after_all_says_so_before_it_is_set_aside(
    events: fm.Lake, to_lake: tuple[fm.Lake, Between]
) -> None:
    target, proxy = to_lake
    # Every answer for this row is lost, after the lake took it.
    proxy.fails, proxy.passes_on = has_bad, True
    for _ in range(4):
        if run(events).outcome == "shipped":
            break
    assert (there(target), aside(events)) == (list(range(10)), [])
    assert table_of(events)["mark"] == table_of(events)["head"]


def test_a_copy_that_comes_after_its_row_was_given_up_is_refused_by_the_lake(
    events: fm.Lake, to_lake: tuple[fm.Lake, Between]
) -> None:
    target, proxy = to_lake
    proxy.fails = has_bad
    run(events)
    part = next(part for part, skip, _ in proxy.seen if skip)
    first = int(part.split("-")[0])
    with target.catalog.database.read() as tx:
        row = tx.execute(select(tables.senders)).one()
    sender = Sender(row.sender, row.epoch, row.since, row.until, first, first + 1)
    with pytest.raises(fm.Conflict, match="gave up"):
        target.receive("events", rows(BAD), sender=sender)
    assert BAD not in there(target)


def test_a_lake_whose_storage_is_away_passes_no_row(to_lake: tuple[fm.Lake, Between], tmp_path: Path) -> None:
    target, _ = to_lake
    sender = Sender("another", 0, 0, 5, 0, 1, skip=True)
    target.append("events", rows(0))
    (folder,) = (one / "data" for one in Path(local_path(target.location), "tables").iterdir())
    folder.rename(tmp_path / "away")
    folder.write_text("no folder")
    try:
        with pytest.raises(fm.FloodmarkError):
            target.receive("events", [], sender=sender)
    finally:
        folder.unlink()
        (tmp_path / "away").rename(folder)
    assert target.receive("events", [], sender=sender).outcome == "skipped"


def test_a_lake_that_fails_for_everything_sets_no_row_aside(events: fm.Lake, to_lake: tuple[fm.Lake, Between]) -> None:
    target, proxy = to_lake
    answered: list[int] = []

    def fails(found: list[dict[str, Any]]) -> bool:
        answered.append(len(found))
        return len(answered) > 1  # one part arrives, then nothing does

    proxy.fails = fails
    for _ in range(5):
        assert run(events).outcome == "failed"
    assert aside(events) == []
    proxy.fails = lambda found: False
    assert run(events).outcome == "shipped"
    assert (there(target), aside(events)) == (list(range(10)), [])


def test_a_part_for_a_lake_is_set_aside_by_hand_once_the_lake_passes_it(
    events: fm.Lake, to_lake: tuple[fm.Lake, Between]
) -> None:
    target, proxy = to_lake
    events.sinks.set("web", part_rows=10)
    proxy.fails = lambda found: bool(found)
    run(events)
    # It never said who it is, so it is like any endpoint; then it has to say so first.
    proxy.fails = lambda found: False
    events.append("events", rows(10))
    assert run(events, until_empty=True).outcome == "shipped"
    events.append("events", rows(11, 12))
    proxy.fails, proxy.passes_on = lambda found: bool(found), True
    run(events)
    proxy.fails = lambda found: False
    assert events.sinks.set_aside("web", first=0, last=2) == 0
    assert run(events, until_empty=True).outcome in ("shipped", "nothing_to_do")
    assert (there(target), aside(events)) == (list(range(13)), [])


def test_a_unit_whose_rows_a_lake_passed_does_not_block_the_next_one(
    events: fm.Lake, to_lake: tuple[fm.Lake, Between]
) -> None:
    """The lake has a record of the unit, though no row of it came."""
    target, proxy = to_lake
    assert run(events).outcome == "shipped"
    events.append("events", rows(50))
    proxy.fails = bool
    assert run(events).outcome == "failed"
    assert events.sinks.set_aside("web", first=0, last=1) == 1
    proxy.fails = lambda found: False
    run(events)
    events.append("events", rows(60))
    assert run(events).outcome == "shipped"
    assert (50 in there(target), 60 in there(target)) == (False, True)


def test_a_retry_whose_row_a_lake_passed_does_not_block_the_next_one(
    events: fm.Lake, to_lake: tuple[fm.Lake, Between]
) -> None:
    target, proxy = to_lake
    proxy.fails = has_bad
    for _ in range(4):
        if run(events).outcome == "shipped":
            break
    (before,) = events.sinks.quarantine("web")
    again = events.sinks.retry("web")
    assert (again.outcome, again.exit_code, again.tables[0].quarantined) == ("failed", 4, 1)
    assert events.sinks.quarantine("web")[0]["reason"] == before["reason"]
    proxy.fails = lambda found: False
    assert events.sinks.retry("web").outcome == "shipped"
    events.append("events", rows(60))
    assert run(events).outcome == "shipped"
    assert aside(events) == []
    assert sorted(there(target)) == sorted({*range(10), 60})
