"""Server-sent events, at a real socket: told at once and when something changes, bounded, and gone with the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from sqlalchemy import text

import floodmark as fm
from floodmark.report.overview import Overview, digest_of, overview
from floodmark.serve.app import create_app
from floodmark.serve.http import events
from floodmark.serve.http.service import Service
from tests.conftest import EVENTS, Place, rows
from tests.contract.test_http_api import asked, told

WAIT_S = 30.0


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        yield lake


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.05)


@contextmanager
def listening(client: httpx.Client) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """The events of one listener, as they come."""
    with client.stream("GET", "/api/events", timeout=WAIT_S) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer)


def _events(answer: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in answer.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def heard_by(client: httpx.Client) -> int:
    return int(client.app.state.events.clients)  # type: ignore[attr-defined]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_listener_is_told_at_once_and_whenever_something_changes(lake: fm.Lake) -> None:
    with asked(lake) as client, listening(client) as heard:
        name, first = next(heard)
        assert (name, first["version"], first["health"]) == ("change", 1, "fine")
        assert first["digest"] == digest_of(overview(lake.catalog))
        lake.append("events", rows(1))
        # A look while it was being written shows the write under way.
        name, second = next((name, told) for name, told in heard if told["version"] != 1)
        assert (name, second["version"]) == ("change", 2)
        assert second["digest"] != first["digest"]


def test_a_state_that_cannot_be_read_is_told_and_so_is_its_end(lake: fm.Lake) -> None:
    def rename(before: str, after: str) -> None:
        with lake.catalog.database.write() as tx:
            tx.execute(text(f"ALTER TABLE {before} RENAME TO {after}"))

    with asked(lake) as client, listening(client) as heard:
        first = next(heard)
        rename("fm_heads", "away")
        name, trouble = next(heard)
        assert name == "trouble"
        assert trouble["message"].startswith("the lake's state cannot be read (")
        assert "Traceback" not in trouble["message"]
        rename("away", "fm_heads")
        again = next(heard)
        assert (again[0], again[1]["digest"]) == ("change", first[1]["digest"])


def test_nothing_is_asked_of_the_catalog_while_nobody_listens(lake: fm.Lake) -> None:
    with asked(lake) as client:
        found = client.app.state.events  # type: ignore[attr-defined]
        assert found._poller is None
        with ExitStack() as stack:
            everybody = [stack.enter_context(listening(client)) for _ in range(3)]
            assert len({next(heard)[1]["digest"] for heard in everybody}) == 1
            assert heard_by(client) == 3
            poller = found._poller
            assert poller is not None
        # Who left is seen without a word being sent.
        until(lambda: heard_by(client) == 0)
        until(lambda: poller.done())
        with listening(client) as heard:
            assert next(heard)[0] == "change", "and begins again"


def test_one_listener_too_many_is_told_to_come_later(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CLIENTS_MAX", 2)
    with asked(lake) as client:
        with listening(client), listening(client):
            answer = client.get("/api/events")
            assert told(answer, 429)["kind"] == "Busy"
            assert answer.headers["Retry-After"]
        until(lambda: heard_by(client) == 0)
        with listening(client) as heard:
            next(heard)


def test_a_quiet_stream_is_kept_alive(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(events, "LOOK_S", 0.01)
    with asked(lake) as client, client.stream("GET", "/api/events") as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("retry: ")
        assert next(line for line in lines if line.startswith(":")) == ": still here"


def test_a_stream_comes_to_its_end_in_order_when_the_server_is_to_end(lake: fm.Lake) -> None:
    """One that was cut off, because the server did not wait any longer, is an error to its client."""
    with asked(lake) as client, listening(client) as heard:
        next(heard)
        client.stop()  # type: ignore[attr-defined]
        assert list(heard) == []
    with asked(lake) as client:
        client.app.state.stopping.set()  # type: ignore[attr-defined]
        assert told(client.get("/api/events"), 503)["kind"] == "Unavailable"


def test_a_listener_that_takes_nothing_loses_its_place(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SEND_S_MAX", 0.05)

    async def listen(app: Any) -> None:
        async def never(message: Any = None) -> Any:
            await asyncio.Event().wait()

        stream = events._Stream(app.state.events)
        async with asyncio.timeout(WAIT_S):
            await stream({"type": "http"}, never, never)

    app = create_app(Service(lake))
    asyncio.run(listen(app))
    assert app.state.events.clients == 0
    assert app.state.workers.close(10)


def test_whoever_only_asks_for_the_head_is_no_listener(lake: fm.Lake) -> None:
    with asked(lake) as client:
        assert client.head("/api/events").status_code == 200
        until(lambda: heard_by(client) == 0)


def test_ages_that_grow_are_no_change_until_they_matter(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    lake.sinks.add("out", "files", tables="events", path=f"{lake.location}-out")
    found = overview(lake.catalog)
    [sink] = found.status.sinks
    age = sink.lag_ms // 10_000 * 10_000

    def later(lag_ms: int) -> Overview:
        status = replace(found.status, sinks=(replace(sink, lag_ms=lag_ms),))
        return replace(found, at="2030-01-01T00:00:00.000Z", status=status)

    assert digest_of(later(age + 9_999)) == digest_of(found)
    assert digest_of(later(age + 10_000)) != digest_of(found)
