"""A sink over HTTP against a real receiver: each row once, through lost replies, refusals, stops and crashes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.unit import ACKNOWLEDGED, QUARANTINED, SEALED, Part, Rules, Settled, Shipped, Unit
from floodmark.errors import Corrupt, Invalid, Unavailable
from floodmark.rows.reading.shipment import Body
from floodmark.runs import Stopped
from floodmark.sinks.http.destination import HttpDestination
from floodmark.sinks.outcome import SinkRun
from floodmark.sinks.settings import HttpSettings
from floodmark.storage import Storage
from floodmark.testing.receiver import (
    Fault,
    Received,
    Receiver,
    answers,
    holds,
    receiver_process,
    stats_of,
    stores_then,
    stores_then_drops,
    stores_then_is_late,
)
from tests.conftest import Place, at, rows
from tests.without_spark import NO_SPARK

# Long enough that a test which waits for it fails by its own limit.
FOR_EVER_S = 600.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
    assert receiver.ledger.mismatched == [], "other bytes came under a key that was used"


@pytest.fixture
def events(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    """A lake with ten rows in three commits, and nothing left running at the end."""
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")
        for numbers in (range(4), range(4, 8), range(8, 10)):
            lake.append("events", rows(*numbers))
        yield lake
    left = [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("floodmark-wire", "floodmark-cut"))
    ]
    assert left == []


def add(lake: fm.Lake, receiver: Receiver, **settings: Any) -> None:
    quick = {"part_rows": 2, "backoff_s_max": 0.01, "timeout_s": 20}
    lake.sinks.add("web", "http", tables="events", url=receiver.url + "/{table}", **{**quick, **settings})


def run(lake: fm.Lake, **options: Any) -> SinkRun:
    return lake.sinks.run("web", **options)


def mark(lake: fm.Lake) -> int:
    found: int = lake.sinks.about("web")["tables"][0]["mark"]
    return found


def ids(receiver: Receiver) -> list[int]:
    return sorted(row["id"] for row in receiver.rows)


def check_all_there(lake: fm.Lake, receiver: Receiver, count: int = 10) -> None:
    assert ids(receiver) == list(range(count))
    about = lake.sinks.about("web")["tables"][0]
    assert (about["mark"], about["open_unit"], about["rows"]) == (about["head"], None, count)


# ── lost replies ──


@pytest.mark.parametrize(
    "fault", [stores_then(500, nth=(2,)), stores_then_drops(nth=(2,)), stores_then_is_late(FOR_EVER_S, nth=(2,))]
)
def test_a_part_whose_reply_is_lost_is_stored_once(events: fm.Lake, receiver: Receiver, fault: Fault) -> None:
    add(events, receiver, timeout_s=2)
    receiver.script(fault)
    done = run(events)
    assert (done.outcome, done.rows) == ("shipped", 10)
    assert len(receiver.tries) == 5
    assert max(receiver.tries.values()) > 1
    check_all_there(events, receiver)


def test_no_answer_at_all_ends_the_run_after_so_many_tries(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, tries=3, parallel=1)
    receiver.script(Fault(drops=True))
    done = run(events)
    assert isinstance(done.error, Unavailable)
    assert (done.outcome, done.error.facts["tries"], done.error.facts["part"]) == ("failed", 3, "0-2")
    assert len(receiver.requests) == 3
    assert len(receiver.tries) == 1
    receiver.script()
    assert run(events).tables[0].resumed == 1
    check_all_there(events, receiver)


def test_an_endpoint_that_is_not_there_is_unavailable(events: fm.Lake, receiver: Receiver) -> None:
    with Receiver() as gone:
        add(events, gone, tries=2)
    assert isinstance(run(events).error, Unavailable)
    events.sinks.set("web", url=receiver.url)
    assert run(events).outcome == "shipped"
    check_all_there(events, receiver)


def test_a_part_that_fails_while_newer_rows_arrive_is_not_passed(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, tries=60, parallel=2)
    receiver.script(Fault(503, when=holds("id", 0)))
    before = mark(events)
    done = run(events)
    assert done.outcome == "failed"
    assert 9 in ids(receiver)
    assert 0 not in ids(receiver)
    assert mark(events) == before
    receiver.script()
    assert run(events).outcome == "shipped"
    # What was acknowledged before is not sent again.
    assert [request.part for request in receiver.requests] == [(0, 2)]
    check_all_there(events, receiver)


def test_a_resumed_unit_sends_only_what_is_not_acknowledged_with_the_rules_it_was_opened_with(
    events: fm.Lake, receiver: Receiver
) -> None:
    add(events, receiver, tries=1, parallel=1)
    receiver.script(Fault(500, when=holds("id", 4)))
    assert run(events).outcome == "failed"
    assert ids(receiver) == [0, 1, 2, 3]
    events.sinks.set("web", part_rows=1, compression="zstd")
    events.append("events", rows(10, 11))
    receiver.script()
    done = run(events)
    assert (done.outcome, done.tables[0].units, done.tables[0].resumed) == ("shipped", 2, 1)
    resumed, later = receiver.requests[:3], receiver.requests[3:]
    assert sorted(request.part for request in resumed) == [(4, 6), (6, 8), (8, 10)]
    assert {request.headers["content-encoding"] for request in resumed} == {"gzip"}
    assert sorted(request.part for request in later) == [(0, 1), (1, 2)]
    assert {request.headers["content-encoding"] for request in later} == {"zstd"}
    check_all_there(events, receiver, 12)


def test_parts_and_rows_that_are_equal_to_the_byte_all_arrive(events: fm.Lake, receiver: Receiver) -> None:
    events.create_table("same", "id long, name string")
    events.append("same", [{"id": 1, "name": "x"}] * 8)
    events.sinks.add("same", "http", tables="same", url=receiver.url, part_rows=2)
    assert events.sinks.run("same").rows == 8
    assert len(receiver.rows) == 8
    assert len({request.digest for request in receiver.requests}) == 1
    assert len(receiver.tries) == 4


# ── on the wire ──


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_a_part_on_the_wire(events: fm.Lake, receiver: Receiver, compression: str) -> None:
    add(events, receiver, compression=compression, parallel=1)
    assert run(events).outcome == "shipped"
    first = receiver.requests[0]
    assert (first.method, first.path, first.part) == ("POST", "/events", (0, 2))
    assert first.rows == (
        {"id": 0, "name": "row 0", "_change": "upsert", "_seq": 1},
        {"id": 1, "name": "row 1", "_change": "upsert", "_seq": 1},
    )
    headers = first.headers
    assert headers["content-type"] == "application/x-ndjson"
    assert headers.get("content-encoding", "none") == compression
    assert headers["user-agent"] == f"floodmark/{fm.__version__}"
    assert headers["floodmark-unit"] == "-1..3"
    assert headers["floodmark-epoch"] == "0"
    assert "authorization" not in headers
    senders = {request.headers["floodmark-sender"] for request in receiver.requests}
    assert len(senders) == 1
    assert len(receiver.tries) == 5
    assert receiver.size_bytes == events.sinks.about("web")["tables"][0]["bytes"]


def test_deletions_are_counted_among_the_rows(events: fm.Lake, receiver: Receiver) -> None:
    events.create_table("users", "id long not null, name string", key=["id"])
    events.append("users", rows(*range(6)))
    events.sinks.add("users", "http", tables="users", url=receiver.url, part_rows=4, where="id < 4")
    # Halved on the way, so that halves are counted too.
    receiver.script(Fault(422, nth=(1,)))
    table = events.sinks.run("users").tables[0]
    assert (table.rows, table.deletions) == (6, 2)
    assert [row["_change"] for row in sorted(receiver.rows, key=lambda row: row["id"])] == ["upsert"] * 4 + [
        "delete"
    ] * 2


def test_no_more_requests_are_under_way_than_allowed(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, part_rows=1, parallel=3)
    receiver.script(Fault(delay_s=0.1))
    assert run(events).outcome == "shipped"
    assert receiver.at_once_max == 3


def test_it_runs_where_an_event_loop_runs_already(events: fm.Lake, receiver: Receiver) -> None:
    async def notebook() -> SinkRun:
        return run(events)

    add(events, receiver)
    assert asyncio.run(notebook()).outcome == "shipped"
    check_all_there(events, receiver)


def test_progress_is_told_for_what_is_acknowledged(events: fm.Lake, receiver: Receiver) -> None:
    told: list[tuple[int, int]] = []
    add(events, receiver, compression="none", parallel=1)
    run(events, progress=lambda table, done, rows_max, size_bytes: told.append((done, size_bytes)))
    assert [done for done, _ in told] == [0, 2, 4, 6, 8, 10]
    assert told[-1][1] == receiver.size_bytes


def test_another_one_at_the_address_is_not_taken_for_the_first(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, parallel=1)
    receiver.destination = "first"
    assert run(events).outcome == "shipped"
    receiver.destination = "second"
    events.append("events", rows(10))
    before = mark(events)
    done = run(events)
    assert isinstance(done.error, Corrupt)
    assert (done.outcome, mark(events)) == ("refused", before)


def test_a_known_part_whose_bytes_changed_is_never_sent(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, tries=1, parallel=1)
    receiver.script(answers(500))
    run(events)
    with events.catalog.database.write() as tx:
        tx.execute(update(tables.parts).where(tables.parts.c.first == 0).values(digest="0" * 64))
    receiver.script()
    done = run(events)
    assert isinstance(done.error, Corrupt)
    assert (done.outcome, receiver.requests, receiver.rows) == ("refused", [], [])


# ── patience ──


def http_date(**delta: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(**delta), usegmt=True)


@pytest.mark.parametrize(
    ("status", "value"), [(408, "0"), (409, "-3"), (425, "soon"), (429, ""), (500, "past date"), (503, "0")]
)
def test_an_endpoint_that_asks_for_no_or_senseless_patience_is_asked_again(
    events: fm.Lake, receiver: Receiver, status: int, value: str
) -> None:
    add(events, receiver)
    value = http_date(days=-1) if value == "past date" else value
    receiver.script(answers(status, nth=(1, 2), Retry_After=value))
    assert run(events).outcome == "shipped"
    assert len(receiver.requests) == 7
    check_all_there(events, receiver)


@pytest.mark.parametrize("value", ["1", "date"])
def test_patience_that_is_asked_for_is_had(events: fm.Lake, receiver: Receiver, value: str) -> None:
    add(events, receiver)
    # A date has whole seconds, so two of them are more than one.
    value = http_date(seconds=2) if value == "date" else value
    receiver.script(answers(429, nth=(1,), Retry_After=value))
    began = time.monotonic()
    assert run(events).outcome == "shipped"
    assert time.monotonic() - began >= 0.9
    check_all_there(events, receiver)


@pytest.mark.parametrize("value", ["301", "9" * 400, "date"])
def test_more_patience_than_a_run_has_ends_it(events: fm.Lake, receiver: Receiver, value: str) -> None:
    add(events, receiver, parallel=1)
    receiver.script(answers(503, Retry_After=http_date(days=1) if value == "date" else value))
    done = run(events)
    assert isinstance(done.error, Unavailable)
    assert done.error.facts["status"] == 503
    assert done.error.facts["retry_after_s"] > 300
    assert len(receiver.requests) == 1


def test_tries_without_waiting_are_counted_too(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, tries=4, parallel=1)
    receiver.script(answers(503, text="not now", Retry_After="0"))
    done = run(events)
    assert isinstance(done.error, Unavailable)
    assert (done.error.facts["tries"], done.error.facts["answer"]) == (4, "not now")
    assert list(receiver.tries.values()) == [4]


# ── rows that are refused ──


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_bad_row_is_alone_in_quarantine_and_the_rest_flows(events: fm.Lake, receiver: Receiver, status: int) -> None:
    add(events, receiver, part_rows=10)
    receiver.script(Fault(status, when=holds("id", 7), text="x" * 2000))
    done = run(events)
    assert (done.outcome, done.rows, done.tables[0].quarantined) == ("shipped", 9, 1)
    assert ids(receiver) == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    [bad] = events.sinks.quarantine("web")
    assert json.loads(bad["line"]) == {"id": 7, "name": "row 7", "_change": "upsert", "_seq": 2}
    assert bad["reason"] == f"{status}: {'x' * 500}"
    assert mark(events) == 3


def test_a_part_that_is_too_large_is_halved_until_it_fits(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, part_rows=10, compression="none")
    receiver.body_bytes_max = 200
    done = run(events)
    assert (done.outcome, done.tables[0].quarantined) == ("shipped", 0)
    assert events.sinks.quarantine("web") == []
    check_all_there(events, receiver)


def test_halves_are_known_to_the_next_run(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, part_rows=8, parallel=1, tries=1)
    receiver.script(answers(422, nth=(1,)), answers(500, nth=(3,)))
    assert run(events).outcome == "failed"
    assert ids(receiver) == [0, 1, 2, 3]
    receiver.script()
    assert run(events).outcome == "shipped"
    assert [request.part for request in receiver.requests] == [(4, 8), (8, 10)]
    check_all_there(events, receiver)


def test_more_bad_rows_than_a_sink_sets_aside_end_the_run(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, quarantine_max=2)
    receiver.refuses = lambda row: True
    before = mark(events)
    for _ in range(2):
        done = run(events)
        assert isinstance(done.error, Invalid)
        assert (done.outcome, mark(events)) == ("failed", before)
        # The second run knows how many there are already.
        assert len(events.sinks.quarantine("web")) == 2
    receiver.refuses = None
    assert run(events).outcome == "shipped"
    bad = {json.loads(entry["line"])["id"] for entry in events.sinks.quarantine("web")}
    assert sorted([*ids(receiver), *bad]) == list(range(10))


def test_a_row_of_the_quarantine_arrives_when_it_is_sent_again(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver)
    receiver.refuses = lambda row: row["id"] in (3, 7)
    run(events)
    receiver.refuses = lambda row: row["id"] == 3
    again = events.sinks.retry("web")
    assert (again.outcome, again.rows, again.tables[0].quarantined) == ("shipped", 1, 1)
    receiver.refuses = None
    events.sinks.retry("web")
    assert events.sinks.quarantine("web") == []
    check_all_there(events, receiver)


@pytest.mark.parametrize("status", [301, 302, 307, 403, 404, 405, 415])
def test_an_answer_about_the_address_ends_the_run_and_sets_no_row_aside(
    events: fm.Lake, receiver: Receiver, status: int
) -> None:
    add(events, receiver, parallel=1)
    receiver.script(answers(status, text="not like this", Location=receiver.url + "/elsewhere"))
    done = run(events)
    assert isinstance(done.error, Invalid)
    assert (done.error.facts["status"], done.error.facts["answer"]) == (status, "not like this")
    assert events.sinks.quarantine("web") == []
    assert [request.path for request in receiver.requests] == ["/events"]
    receiver.script()
    assert run(events).outcome == "shipped"
    check_all_there(events, receiver)


# ── the token ──


def test_a_token_that_was_renewed_is_read_again(events: fm.Lake, receiver: Receiver, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")

    def renew(request: Received) -> bool:
        file.write_text("new\n")
        return False

    add(events, receiver, token_file=str(file), parallel=1)
    receiver.token = "new"
    receiver.script(Fault(when=renew))
    assert run(events).outcome == "shipped"
    used = [request.headers["authorization"] for request in receiver.requests]
    assert used == ["Bearer old", *["Bearer new"] * 5]
    check_all_there(events, receiver)


@pytest.mark.parametrize("status", [401, 403, 422, 503])
def test_a_token_is_in_no_error_whatever_is_answered(
    events: fm.Lake, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    token = "s3cret/value"
    monkeypatch.setenv("WEB_TOKEN", token)
    monkeypatch.setenv("FLOODMARK_LOG", "debug")
    add(events, receiver, token_env="WEB_TOKEN", tries=2, quarantine_max=3)
    receiver.script(answers(status, text=f'you sent "Authorization: Bearer {token}" and s3cret\\/value'))
    done = run(events)
    assert done.error is not None
    said = json.dumps([str(done.error), done.as_dict(), events.sinks.about("web"), events.sinks.quarantine("web")])
    assert "you sent" in said
    assert "s3cret" not in said
    assert "s3cret" not in "".join(capfd.readouterr())
    assert receiver.requests[0].headers["authorization"] == f"Bearer {token}"


def test_a_token_that_is_not_accepted_ends_the_run_without_tries(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, parallel=1)
    receiver.token = "right"
    done = run(events)
    assert isinstance(done.error, Unavailable)
    assert done.error.facts["status"] == 401
    assert len(receiver.requests) == 1
    assert events.sinks.quarantine("web") == []


@pytest.mark.parametrize("content", [None, b"", b" \n", b"a\nb", "tökén".encode(), b"\xff\xfe"])
def test_a_token_that_cannot_be_sent_is_said_before_anything_is(
    events: fm.Lake, receiver: Receiver, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    add(events, receiver, token_file=str(file))
    assert isinstance(run(events).error, Invalid)
    assert receiver.requests == []


def test_a_variable_that_is_not_there_is_named(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, token_env="NO_SUCH_TOKEN")
    error = run(events).error
    assert isinstance(error, Invalid)
    assert error.facts["variable"] == "NO_SUCH_TOKEN"


# ── stopping ──


@pytest.mark.parametrize(
    "fault", [Fault(delay_s=FOR_EVER_S), answers(503, Retry_After="200"), stores_then_is_late(FOR_EVER_S)]
)
def test_a_stop_ends_a_run_at_once_whatever_it_waits_for(events: fm.Lake, receiver: Receiver, fault: Fault) -> None:
    add(events, receiver, timeout_s=FOR_EVER_S)
    receiver.script(fault)
    stop = threading.Event()
    stopper = threading.Timer(0.5, stop.set)
    stopper.start()
    began = time.monotonic()
    assert run(events, stop=stop).outcome == "stopped"
    assert time.monotonic() - began < 10
    stopper.join()
    receiver.script()
    assert run(events).outcome == "shipped"
    check_all_there(events, receiver)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Hypothesis has a callback in each garbage collection. An interrupt that is raised in there gets lost."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_an_interrupt_ends_a_run_at_once(events: fm.Lake, receiver: Receiver) -> None:
    add(events, receiver, timeout_s=FOR_EVER_S)
    receiver.script(Fault(delay_s=FOR_EVER_S))
    interrupter = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupter.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(events)
    assert time.monotonic() - began < 10
    interrupter.join()
    receiver.script()
    assert run(events).outcome == "shipped"
    check_all_there(events, receiver)


@pytest.mark.parametrize("name", ["floodmark-wire", "floodmark-cutter"])
def test_an_interrupt_while_a_thread_starts_ends_that_thread(
    events: fm.Lake, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    add(events, receiver)
    start = threading.Thread.start
    started = []

    def start_interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == name:
            started.append(thread)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(events)
    started[0].join(10)
    assert not started[0].is_alive()
    monkeypatch.undo()
    assert run(events).outcome == "shipped"
    check_all_there(events, receiver)


class Crash(BaseException):
    """Nothing after this point happens."""


@pytest.mark.parametrize("point", ["unit.sealed", "unit.sent", "unit.acknowledged", "unit.shipped"])
def test_a_crash_between_two_steps_neither_loses_nor_doubles(events: fm.Lake, receiver: Receiver, point: str) -> None:
    def crash() -> None:
        raise Crash

    add(events, receiver, parallel=2)
    with pytest.raises(Crash), at(point, crash):
        run(events)
    assert run(events).outcome == "shipped"
    check_all_there(events, receiver)


# ── bodies of the caller ──


class ListLog:
    """A unit's parts in a list."""

    def __init__(self, *parts: Part) -> None:
        self.known = {(part.first, part.last): part for part in parts}
        self.calls: list[tuple[str, int]] = []
        self.lines: list[bytes] = []

    def parts(self) -> list[Part]:
        return sorted(self.known.values(), key=lambda part: part.first)

    def destination(self) -> str | None:
        return None

    def settled_units(self) -> list[Settled]:
        return []

    def knows(self, unit: str, epoch: int) -> bool:
        return True

    def settled_until(self) -> int | None:
        return None

    def seal(self, parts: list[Part]) -> None:
        self._put("seal", parts)

    def acknowledge(self, parts: list[Part], destination: str | None = None) -> None:
        self._put("acknowledge", [replace(part, state=ACKNOWLEDGED) for part in parts])

    def quarantined(self) -> int:
        return len(self.lines)

    def body_bytes_max(self) -> int | None:
        return None

    def remember_bytes_max(self, size_bytes: int) -> None: ...

    def note(self, part: Part) -> None: ...

    def split(self, whole: Part, halves: list[Part], *, doubtful: int = 0) -> None:
        del self.known[whole.first, whole.last]
        self._put("split", halves)

    def quarantine(self, part: Part, line: bytes, reason: str, *, doubtful: int = 0, passed: bool = False) -> None:
        self._put("quarantine", [replace(part, state=QUARANTINED)])
        self.lines.append(line)

    def _put(self, call: str, parts: list[Part]) -> None:
        self.calls.append((call, len(parts)))
        self.known |= {(part.first, part.last): part for part in parts}


class SlowLog(ListLog):
    """Takes its time to write boundaries down: what does not wait for that is seen."""

    def seal(self, parts: list[Part]) -> None:
        time.sleep(0.05)
        super().seal(parts)


class Patient:
    """A watch that nobody uses."""

    def progress(self, rows: int, size_bytes: int) -> None: ...

    def check(self) -> None: ...

    def wait(self, seconds: float) -> bool:
        raise NotImplementedError


UNIT = Unit("u", "lake", "web", "sink", 1, "events", "table", 1, 0, 5, Rules(compression="none"))


def body(first: int, count: int = 1) -> Body:
    return Body(first, first + count, 0, b"".join(b'{"id": %d}\n' % n for n in range(first, first + count)))


def ship(receiver: Receiver, found: Any, log: ListLog, watch: Any = None, **settings: Any) -> Shipped:
    quick = {"backoff_s_max": 0.01, **settings}
    destination = HttpDestination(HttpSettings(url=receiver.url, **quick), Storage(), NO_SPARK)
    return destination.ship_bodies(UNIT, found, log, watch or Patient())


def test_a_part_is_written_down_before_it_is_sent_and_acknowledged_after(receiver: Receiver) -> None:
    log = SlowLog()
    seen: list[str | None] = []

    def look(request: Received) -> bool:
        known = log.known.get(request.part)
        seen.append(known.state if known else None)
        return False

    receiver.script(Fault(when=look))
    assert ship(receiver, map(body, range(20)), log) == Shipped(20, 0, 210, 20, 0)
    assert seen == [SEALED] * 20
    assert {part.state for part in log.parts()} == {ACKNOWLEDGED}


def test_what_waits_is_written_down_together(receiver: Receiver) -> None:
    log = SlowLog()
    ship(receiver, map(body, range(64)), log, parallel=8)
    assert len([call for call in log.calls if call[0] == "seal"]) < 40
    assert len([call for call in log.calls if call[0] == "acknowledge"]) < 40


def test_no_more_bodies_are_made_than_parallel_and_one(receiver: Receiver) -> None:
    made: list[int] = []

    def make() -> Iterator[Body]:
        for first in range(40):
            made.append(first)
            yield body(first)

    class Impatient(Patient):
        """Stops a while after as many were made as there may be."""

        looks = 0

        def check(self) -> None:
            self.looks += len(made) >= 4
            if self.looks > 10:
                raise Stopped

    receiver.script(Fault(delay_s=FOR_EVER_S))
    with pytest.raises(Stopped):
        ship(receiver, make(), ListLog(), Impatient(), parallel=3)
    assert len(made) == 4


def test_nothing_is_written_down_after_the_run_ended(receiver: Receiver) -> None:
    log = ListLog()
    receiver.script(Fault(500, when=holds("id", 0)), Fault(delay_s=0.3))
    with pytest.raises(Unavailable):
        ship(receiver, map(body, range(20)), log, tries=1)
    calls = list(log.calls)
    time.sleep(0.6)
    assert log.calls == calls


def test_what_arrived_is_acknowledged_though_another_part_ends_the_run(receiver: Receiver) -> None:
    class Slow(Patient):
        """Looks when both answers are there."""

        def check(self) -> None:
            while receiver.requests and len(receiver.statuses) < 2:
                time.sleep(0.01)
            time.sleep(0.1)

    log = ListLog()
    receiver.script(Fault(500, when=holds("id", 0)))
    with pytest.raises(Unavailable):
        ship(receiver, map(body, range(2)), log, Slow(), tries=1, parallel=2)
    assert [part.state for part in log.parts()] == [SEALED, ACKNOWLEDGED]


def test_an_error_of_the_rows_is_the_error_of_the_run(receiver: Receiver) -> None:
    def make() -> Iterator[Body]:
        yield body(0)
        raise Corrupt("a file is gone")

    log = ListLog()
    with pytest.raises(Corrupt, match="a file is gone"):
        ship(receiver, make(), log)


@pytest.mark.parametrize(
    ("known", "found"),
    [
        ([Part(0, 2, "x")], [body(0, 3)]),  # other boundaries
        ([Part(0, 2, "x")], [body(2)]),  # a part that was written down does not come
        ([Part(0, 2, "x", ACKNOWLEDGED)], [body(3)]),  # a gap
        ([Part(0, 2, "x", ACKNOWLEDGED)], [body(1)]),  # rows of a part that is done
        ([Part(0, 2, "x")], [body(0, 2)]),  # other bytes
    ],
)
def test_bodies_that_do_not_fit_to_what_is_written_down_are_not_sent(
    receiver: Receiver, known: list[Part], found: list[Body]
) -> None:
    log = ListLog(*known)
    with pytest.raises(Corrupt):
        ship(receiver, found, log)
    sent = {request.part for request in receiver.requests}
    assert not sent & {(part.first, part.last) for part in known}
    assert {bounds: part for bounds, part in log.known.items() if bounds[0] < 2} == {
        (part.first, part.last): part for part in known
    }


def test_bodies_that_are_done_are_passed(receiver: Receiver) -> None:
    log = ListLog(Part(0, 1, "x", ACKNOWLEDGED), Part(1, 2, "x", QUARANTINED), Part(2, 3, body(2).digest))
    assert ship(receiver, map(body, range(4)), log).rows == 2
    assert sorted(request.part for request in receiver.requests) == [(2, 3), (3, 4)]


def test_a_refused_line_is_kept_to_the_byte(receiver: Receiver) -> None:
    log = ListLog()
    receiver.refuses = lambda row: row["id"] == 1
    assert ship(receiver, [body(0, 3)], log) == Shipped(2, 0, 20, 2, 1)
    assert log.lines == [b'{"id": 1}\n']


# ── the receiver in a process of its own ──


def test_a_receiver_s_ledger_outlives_its_process(events: fm.Lake, tmp_path: Path) -> None:
    ledger, script = tmp_path / "ledger", tmp_path / "script"
    script.write_text(json.dumps([{"status": 500, "nth": [2], "stores": True}]))
    arguments = ("--ledger", str(ledger))
    with receiver_process(*arguments, "--script", str(script)) as url:
        events.sinks.add("web", "http", tables="events", url=url, part_rows=2, tries=1, parallel=1)
        assert run(events).outcome == "failed"
        assert stats_of(url)["keys"] == 2
    # It was killed in the middle of a line that nobody was told of.
    with open(ledger, "a") as file:
        file.write('{"key": "half')
    with receiver_process(*arguments) as url:
        events.sinks.set("web", url=url)
        assert run(events).outcome == "shipped"
        stats = stats_of(url)
        assert (stats["requests"], stats["rows"], stats["keys"], stats["mismatched"]) == (4, 6, 5, 0)
    entries = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert sorted(row["id"] for entry in entries for row in entry["rows"]) == list(range(10))


def test_a_receiver_that_throws_away_still_counts(events: fm.Lake) -> None:
    with receiver_process("--discard") as url:
        events.sinks.add("web", "http", tables="events", url=url, part_rows=4)
        done = run(events)
        stats = stats_of(url)
    assert (stats["requests"], stats["rows"], stats["bytes"]) == (3, 10, done.tables[0].size_bytes)
