"""A lake over HTTP, at a real socket: what each answer is, and that nothing is stored with any but 200."""

from __future__ import annotations

import gzip
import json
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import pytest
import uvloop
import zstandard

import floodmark as fm
from floodmark.ingest.intake import Intake
from floodmark.serve.app import create_app
from floodmark.serve.http.access import Access, AccessToken, new_token, token_hash
from floodmark.serve.http.body import RequestLimits
from floodmark.serve.http.server import Server, bound
from floodmark.serve.http.service import Service
from floodmark.storage import local_path
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows

SMALL = RequestLimits(body_bytes_max=64 * 1024, text_bytes_max=256 * 1024, rows_max=1000)


@contextmanager
def served(
    lake: fm.Lake,
    *,
    token_sha256: str | None = None,
    tokens: Sequence[AccessToken] = (),
    limits: RequestLimits = SMALL,
    intake: Intake | None = None,
) -> Iterator[httpx.Client]:
    """A client of a server that runs in a thread of this process. Without an intake rows are committed at once."""
    address: queue.Queue[str] = queue.Queue()
    known = [*tokens, *([AccessToken("one", token_sha256, "admin")] if token_sha256 else [])]
    app = create_app(Service(lake, Access(known), limits, intake))
    with bound("127.0.0.1:0") as listening:
        server = Server(app, listening, address.put, grace_s=10)
        thread = threading.Thread(target=lambda: uvloop.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            with httpx.Client(base_url=address.get(timeout=30), timeout=60) as client:
                yield client
        finally:
            server.stop()
            thread.join()
            assert app.state.workers.close(10)


@contextmanager
def two_tables(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    """A lake with a table of each kind: events, and people by their key."""
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        yield lake


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with two_tables(new_place) as lake:
        yield lake


@pytest.fixture
def client(lake: fm.Lake) -> Iterator[httpx.Client]:
    with served(lake) as client:
        yield client


def lines(data: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in data).encode()


def sender(first: int, last: int, unit: str = "-1..5", epoch: int = 1) -> dict[str, str]:
    return {
        "Floodmark-Sender": "lake/sink/table/rows",
        "Floodmark-Epoch": str(epoch),
        "Floodmark-Unit": unit,
        "Floodmark-Part": f"{first}-{last}",
        "Idempotency-Key": "not what counts",
    }


def post(
    client: httpx.Client, content: Any, table: str = "events", query: str = "?wait=committed", **headers: str
) -> httpx.Response:
    return client.post(f"/api/tables/{table}/rows{query}", content=content, headers=headers)


def told(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error that an answer holds, which is all that it holds."""
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) - {"problems"} == {"kind", "message", "facts", "advice"}
    assert "Traceback" not in answer.text
    return error


# ── taken ──


def test_an_answer_says_what_is_committed_and_by_whom(lake: fm.Lake, client: httpx.Client) -> None:
    answer = post(client, lines(rows(1, 2)), query="?wait=committed", **sender(0, 2))
    version = lake.status()["version"]
    assert answer.json() == {"version": version, "outcome": "committed", "rows": 2}
    head = lake.catalog.history.head("events")
    assert answer.headers["Floodmark-Destination"] == f"{lake.status()['incarnation']}/{head.table_id}"
    again = post(client, lines(rows(1, 2)), **sender(0, 2))
    assert again.json() == {"version": version, "outcome": "already_committed", "rows": 2}
    assert again.headers["Floodmark-Destination"] == answer.headers["Floodmark-Destination"]
    assert ids(lake) == [1, 2]


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("zstd", zstandard.compress),
        ("gzip", lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:])),
        ("zstd", lambda data: zstandard.compress(data[:5]) + zstandard.compress(data[5:])),
        ("zstd", lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data)),
        ("identity", bytes),
    ],
)
def test_packed_bodies_are_unpacked(lake: fm.Lake, client: httpx.Client, encoding: str, pack: Any) -> None:
    data = lines(rows(*range(900)))
    answer = post(client, pack(data), **{"Content-Encoding": encoding})
    assert answer.json()["rows"] == 900
    assert ids(lake) == list(range(900))


def test_a_body_in_chunks_of_no_declared_length_is_taken(lake: fm.Lake, client: httpx.Client) -> None:
    assert post(client, (line for line in (lines(rows(1)), lines(rows(2))))).status_code == 200
    assert ids(lake) == [1, 2]


def test_deletions_arrive_and_one_part_is_one_version(lake: fm.Lake, client: httpx.Client) -> None:
    post(client, lines(rows(1, 2, 3)), "people")
    version = lake.status()["version"]
    mixed = [*rows(2), {"id": 1, "name": None, "_change": "delete", "_seq": 4}]
    mixed[0] |= {"name": "x", "_change": "upsert"}
    answer = post(client, lines(mixed), "people", **sender(0, 2))
    assert answer.json() == {"version": version + 1, "outcome": "committed", "rows": 2}
    assert {row["id"]: row["name"] for row in lake.read_arrow("people").read_all().to_pylist()} == {2: "x", 3: "row 3"}


def test_an_idempotency_key_alone_makes_rows_come_once(lake: fm.Lake, client: httpx.Client) -> None:
    outcomes = [post(client, lines(rows(1)), **{"Idempotency-Key": "k"}).json()["outcome"] for _ in range(2)]
    assert outcomes == ["committed", "already_committed"]
    assert ids(lake) == [1]


def test_new_columns_come_if_the_question_says_so(lake: fm.Lake, client: httpx.Client) -> None:
    data = lines([{"id": 1, "name": "a", "age": 7}])
    assert told(post(client, data), 422)["facts"]["column"] == "age"
    assert post(client, data, query="?wait=committed&evolve=true").status_code == 200
    assert lake.read_arrow("events").read_all().to_pylist() == [{"id": 1, "name": "a", "age": 7}]


@pytest.mark.parametrize("table", ["events", "people"])
def test_parts_and_copies_of_them_at_once_are_each_stored_once(lake: fm.Lake, client: httpx.Client, table: str) -> None:
    def send(number: int) -> str:
        first = number % 4 * 2
        answer = post(client, lines(rows(first, first + 1)), table, **sender(first, first + 2))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["outcome"])

    with ThreadPoolExecutor(12) as pool:
        outcomes = list(pool.map(send, range(12)))
    assert sorted(outcomes) == ["already_committed"] * 8 + ["committed"] * 4
    assert ids(lake, table) == list(range(8))
    check_lake(lake.catalog)


def test_a_server_that_is_started_again_knows_what_came(lake: fm.Lake) -> None:
    for outcome in ("committed", "already_committed"):
        with served(lake) as client:
            assert post(client, lines(rows(1)), **sender(0, 1)).json()["outcome"] == outcome
    assert ids(lake) == [1]


class Outage(DatabaseFaults):
    """From the next call on the catalog is away, for so many calls; the first was done, and only its reply is lost."""

    def __init__(self, lake: fm.Lake, calls: int) -> None:
        self._calls_left = calls
        super().__init__(lake.catalog.database, fail_at=1, mode="after", stay_broken=True)

    def _error(self) -> Exception:
        self._calls_left -= 1
        if self._calls_left == 0:
            self.remove()
        return super()._error()


def fail_for(lake: fm.Lake, calls: int, outages: list[Outage]) -> None:
    outages.append(Outage(lake, calls))


def test_a_catalog_that_goes_away_in_the_commit_is_asked_before_the_answer(lake: fm.Lake, client: httpx.Client) -> None:
    statuses = []
    for number, calls in enumerate((1, 2, 3, 4, 6, 1000)):
        outages: list[Outage] = []
        with at("append.moved", partial(fail_for, lake, calls, outages)):
            answer = post(client, lines(rows(number)), **sender(number, number + 1))
        if calls == 1000:
            outages[0].remove()
        statuses.append(answer.status_code)
        if answer.status_code == 200:
            assert answer.json()["outcome"] == "committed"
            assert ids(lake)[-1] == number
        else:
            # Nobody can tell while the catalog is away; sent again, it is known.
            assert told(answer, 503)["kind"] in ("CommitUnknown", "Unavailable", "Incomplete")
            assert int(answer.headers["Retry-After"]) > 0
            assert post(client, lines(rows(number)), **sender(number, number + 1)).status_code == 200
    assert ids(lake) == list(range(len(statuses)))
    assert (statuses[0], statuses[-1]) == (200, 503)
    assert statuses[1:-1].count(200) > 0


# ── refused ──


@pytest.fixture
def untouched(lake: fm.Lake) -> Iterator[None]:
    """Whatever the test sends, nothing of it is stored, and the server still works."""
    before = lake.status()["version"]
    yield
    assert lake.status()["version"] == before
    check_lake(lake.catalog)
    with served(lake) as client:
        assert post(client, lines(rows(1)), **sender(0, 1)).json()["outcome"] == "committed"


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("table", ["events", "people"])
def test_a_bad_line_is_400_with_its_number(client: httpx.Client, table: str) -> None:
    answer = post(client, lines(rows(1, 2)) + b"\n{'id': 3}\n", table, **sender(0, 3))
    assert told(answer, 400)["facts"]["line"] == "4"


WRONG_HEADERS = [
    ("Floodmark-Epoch", "one"),
    ("Floodmark-Epoch", "-1"),
    ("Floodmark-Epoch", "9" * 30),
    ("Floodmark-Unit", "5"),
    ("Floodmark-Unit", "1-5"),
    ("Floodmark-Unit", "5..5"),
    ("Floodmark-Unit", "9..5"),
    ("Floodmark-Part", "0..1"),
    ("Floodmark-Part", "-1-1"),
    ("Floodmark-Part", "1-1"),
    ("Floodmark-Part", "0-1,0-1"),
    ("Floodmark-Sender", "a" * 201),
    ("Floodmark-Sender", ""),
]


@pytest.mark.usefixtures("untouched")
def test_a_malformed_header_is_400(client: httpx.Client) -> None:
    for header, value in WRONG_HEADERS:
        told(post(client, lines(rows(1)), **{**sender(0, 1), header: value}), 400)


@pytest.mark.usefixtures("untouched")
def test_a_sender_without_one_of_its_headers_is_400(client: httpx.Client) -> None:
    for header in ("Floodmark-Sender", "Floodmark-Epoch", "Floodmark-Unit", "Floodmark-Part"):
        headers = {name: value for name, value in sender(0, 1).items() if name != header}
        assert told(post(client, lines(rows(1)), **headers), 400)["facts"]["missing"] == header


@pytest.mark.usefixtures("untouched")
def test_a_question_that_cannot_be_understood_is_400(client: httpx.Client) -> None:
    for query in ("?wait=spooled", "?evolve=maybe", "?wait="):
        told(post(client, lines(rows(1)), query=query), 400)


NOT_PACKED = [
    ("gzip", b"not gzip"),
    ("gzip", gzip.compress(b"{}\n", mtime=0)[:-4]),
    ("gzip", gzip.compress(b"{}\n", mtime=0) + b"more"),
    ("zstd", b"not zstd"),
    ("zstd", zstandard.compress(b"{}\n" * 100)[:-2]),
]


@pytest.mark.usefixtures("untouched")
def test_a_body_that_cannot_be_unpacked_is_400(client: httpx.Client) -> None:
    for encoding, body in NOT_PACKED:
        told(post(client, body, **{"Content-Encoding": encoding}), 400)


@pytest.mark.usefixtures("untouched")
def test_an_unknown_encoding_is_415(client: httpx.Client) -> None:
    told(post(client, b"{}", **{"Content-Encoding": "br"}), 415)


TOO_LARGE: list[tuple[str, Callable[[], Any]]] = [
    ("identity", lambda: b" " * (SMALL.body_bytes_max + 1)),
    ("identity", lambda: b" " * 8 * 1024 * 1024),
    ("identity", lambda: iter([b" " * 1024] * 80)),
    ("gzip", lambda: gzip.compress(b" " * 30_000_000)),
    ("zstd", lambda: zstandard.compress(b" " * 100_000_000)),
    ("gzip", lambda: gzip.compress(b"") * 1001),
    ("identity", lambda: b"{}\n" * 1001),
]


@pytest.mark.usefixtures("untouched")
def test_what_is_too_large_is_413_also_once_it_is_unpacked(client: httpx.Client) -> None:
    for encoding, body in TOO_LARGE:
        assert told(post(client, body(), **{"Content-Encoding": encoding}), 413)["kind"] == "Invalid"


MISFITS: list[tuple[str, list[dict[str, Any]]]] = [
    ("events", [{"id": "x"}]),
    ("events", [{"id": 1, "nme": "x"}]),
    ("events", [{"id": 1, "name": "\ud800"}]),
    ("events", [{"id": 1, "_change": "delete"}]),
    ("people", [{"id": 1}, {"id": 1, "_change": "delete"}]),
    ("people", [{"id": None}]),
]


@pytest.mark.usefixtures("untouched")
def test_rows_that_do_not_fit_are_422(client: httpx.Client) -> None:
    for table, data in MISFITS:
        told(post(client, lines(data), table, **sender(0, len(data))), 422)


@pytest.mark.usefixtures("untouched")
def test_a_part_of_another_size_is_422(client: httpx.Client) -> None:
    told(post(client, lines(rows(1)), **sender(0, 2)), 422)


@pytest.mark.usefixtures("untouched")
def test_a_table_or_an_address_that_is_not_there_is_404(client: httpx.Client) -> None:
    assert told(post(client, lines(rows(1)), "nothing"), 404)["facts"]["table"] == "nothing"
    told(client.get("/nothing"), 404)
    told(client.get("/api/tables/events/rows"), 405)


def test_an_old_epoch_is_409(lake: fm.Lake, client: httpx.Client) -> None:
    post(client, lines(rows(1)), **sender(0, 1, epoch=2))
    assert told(post(client, lines(rows(2)), **sender(0, 1, epoch=1)), 409)["kind"] == "Conflict"
    assert told(post(client, lines(rows(2, 3)), **sender(0, 2, epoch=2)), 409)["kind"] == "Conflict"
    assert ids(lake) == [1]


@pytest.mark.usefixtures("untouched")
def test_a_sender_that_means_another_lake_or_table_is_412_and_told_who_this_is(
    lake: fm.Lake, client: httpx.Client
) -> None:
    incarnation = lake.status()["incarnation"]
    me, sibling = (f"{incarnation}/{lake.catalog.history.head(table).table_id}" for table in ("events", "people"))
    for other in ("", "x", me.upper(), sibling):
        answer = post(client, lines(rows(1)), **sender(0, 1), **{"Floodmark-Expect": other})
        assert told(answer, 412)["kind"] == "Conflict"
        assert answer.headers["Floodmark-Destination"] == me


def test_a_sender_that_means_this_table_is_heard(lake: fm.Lake, client: httpx.Client) -> None:
    me = post(client, lines(rows(1)), **sender(0, 1)).headers["Floodmark-Destination"]
    assert post(client, lines(rows(2)), **sender(1, 2), **{"Floodmark-Expect": me}).status_code == 200
    assert ids(lake) == [1, 2]


def test_a_token_is_asked_for_before_anything_else(lake: fm.Lake) -> None:
    token = new_token()
    with served(lake, token_sha256=token_hash(token).upper()) as client:
        for wrong in ("", "Bearer", "Bearer x", f"Basic {token}", f"Bearer {token}x", f"Bearer {token_hash(token)}"):
            for table in ("events", "nothing"):
                answer = post(client, lines(rows(1)), table, Authorization=wrong)
                assert told(answer, 401)["kind"] == "Unauthorized"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert token not in answer.text
        assert post(client, b" " * 8 * 1024 * 1024).status_code == 401
        assert client.get("/healthz").json() == {"status": "ok"}
        assert ids(lake) == []
        assert post(client, lines(rows(1)), Authorization=f"bearer {token}").status_code == 200
    assert ids(lake) == [1]


@pytest.mark.usefixtures("untouched")
def test_a_page_in_a_browser_cannot_write_where_no_token_is_asked_for(client: httpx.Client) -> None:
    told(post(client, lines(rows(1)), Origin="https://elsewhere.example"), 403)


@pytest.mark.usefixtures("untouched")
def test_more_requests_than_may_be_under_way_are_429_and_come_later(lake: fm.Lake) -> None:
    with served(lake, limits=RequestLimits(requests_max=1)) as client, raw_connection(client) as slow:
        slow.sendall(b"POST /api/tables/events/rows HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        answer = client.get("/healthz")
        for _ in range(100):
            answer = post(client, b"x")
            if answer.status_code == 429:
                break
        assert told(answer, 429)["kind"] == "Busy"
        assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.usefixtures("untouched")
def test_a_body_that_does_not_come_is_408(lake: fm.Lake) -> None:
    with served(lake, limits=RequestLimits(body_s_max=0.2)) as client, raw_connection(client) as slow:
        slow.sendall(b"POST /api/tables/events/rows HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


@pytest.mark.usefixtures("untouched")
def test_a_sender_that_goes_away_in_the_middle_leaves_nothing(client: httpx.Client) -> None:
    with raw_connection(client) as torn:
        torn.sendall(
            b'POST /api/tables/events/rows HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"id": 1}\n'
        )
    assert client.get("/healthz").status_code == 200


@contextmanager
def raw_connection(client: httpx.Client) -> Iterator[socket.socket]:
    with socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=30) as connection:
        yield connection


def test_a_lake_that_is_damaged_is_500_without_a_trace(lake: fm.Lake) -> None:
    os.remove(local_path(lake.catalog.history.head("events").metadata_location) or "")
    # Nothing is remembered from before.
    with fm.open(local_path(lake.location) or "") as damaged, served(damaged) as client:
        assert told(post(client, lines(rows(1))), 500)["kind"] == "Corrupt"
        assert post(client, lines(rows(1)), "people").status_code == 200


def test_what_nobody_thought_of_is_500_without_a_trace(lake: fm.Lake, client: httpx.Client) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a secret of ours")

    with at("append.staged", fail):
        error = told(post(client, lines(rows(1)), **sender(0, 1)), 500)
    assert (error["kind"], "secret" in str(error)) == ("Internal", False)
    assert post(client, lines(rows(1)), **sender(0, 1)).json()["outcome"] == "committed"
    assert ids(lake) == [1]
