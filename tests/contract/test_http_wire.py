"""What comes over the wire and is no request, or only half of one, or hides one: refused in our words, nothing stored.

Bytes by hand at a real socket, into the event loop and the parser that the daemon has.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import httpx
import psutil
import pytest

import floodmark as fm
from floodmark.serve.http.access import AccessToken, new_token, token_hash
from floodmark.serve.http.body import RequestLimits
from floodmark.serve.http.connection import HEAD_BYTES_MAX
from tests.conftest import Place, ids, rows
from tests.contract.test_http_rows import door, landed, nothing_stored, post
from tests.contract.test_receive_http import SMALL, lines, served, told, two_tables


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with two_tables(new_place) as lake:
        yield lake


@pytest.fixture
def client(lake: fm.Lake, tmp_path: Path) -> Iterator[httpx.Client]:
    with door(lake, tmp_path / "spool") as client:
        yield client


@pytest.fixture
def untouched(lake: fm.Lake, client: httpx.Client) -> Iterator[None]:
    with nothing_stored(lake, client):
        yield


def raw(client: httpx.Client, *parts: bytes, end: bool = False) -> bytes:
    """What a server says to these bytes; `end`: nothing follows them."""
    place = (client.base_url.host, client.base_url.port or 80)
    with socket.create_connection(place, timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
        if end:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        while b"\r\n\r\n" not in found and (more := connection.recv(65536)):
            found += more
        return found


def head(target: bytes = b"/api/tables/events/rows", *headers: bytes) -> bytes:
    given = [b"POST " + target + b" HTTP/1.1", b"Host: localhost", *headers]
    return b"\r\n".join(given) + b"\r\n\r\n"


GOOD = lines(rows(1))


NO_TABLES = [
    b"..",
    b"%2e%2e",
    b"..%2f..%2fevents",
    b"%2fevents",
    b"events%00",
    b"%00",
    b"events%0a",
    b"%ff%fe",
    "événements".encode().hex(" ").replace(" ", "%").encode().join([b"%", b""]),
    b"x" * 5000,
    b"EVENTS",
    b"events;drop",
    b"events%27--",
    b"*",
    b"%25s",
]


@pytest.mark.usefixtures("untouched")
def test_a_name_that_is_no_table_is_404_whatever_it_is(client: httpx.Client) -> None:
    for name in NO_TABLES:
        answer = raw(client, head(b"/api/tables/" + name + b"/rows", b"Content-Length: %d" % len(GOOD)), GOOD)
        assert answer.startswith(b"HTTP/1.1 404 "), (name, answer)


NO_REQUESTS = [
    ([head(b"/api/tables/events/rows", b"X: " + b"x" * 600_000)], b"400"),
    ([b"not HTTP at all\r\n\r\n"], b"400"),
    ([head(b"/api/tables/events/rows", b"Content-Length: x"), GOOD], b"400"),
    ([head(b"/api/tables/events/rows", b"Content-Length: -1"), GOOD], b"400"),
    ([head(b"/api/tables/events/rows", b"Content-Length: 5", b"Content-Length: 6"), GOOD], b"400"),
    ([head(b"/api/tables/events/rows", b"Transfer-Encoding: gzip"), GOOD], b"400"),
    ([head(b"/api/tables/events/rows", b"Transfer-Encoding: chunked"), b"zz\r\n"], b"400"),
    ([head(b"/api/tables/events/rows", b"Content-Length: 9999999999999"), GOOD], b"413"),
    ([head(b"/api/tables/events/rows", b"Content-Length: 99999999999999999999"), GOOD], b"400"),
    ([head(b"/api/tables/events/rows", b"Content-Length: 4", b"Transfer-Encoding: chunked"), b"0\r\n\r\n"], b"400"),
    ([head(b"/api/tables/events/rows", b"Host: localhost", b"Content-Length: 4"), GOOD], b"400"),
    ([head(b"/api/tables/events/rows", b"Transfer-Encoding: gzip, chunked"), b"0\r\n\r\n"], b"400"),
    ([head(b"/api/tables/events/rows#?wait=committed", b"Content-Length: %d" % len(GOOD)), GOOD], b"400"),
    ([head().replace(b"HTTP/1.1", b"HTTP/2.0")], b"400"),
    ([head().replace(b"HTTP/1.1", b"HTTP/0.9")], b"400"),
    ([head(b"/api/tables/events/rows", b"Origin: http://localhost", b"Origin: http://a.example")], b"400"),
    ([head(b"/" + b"x" * 40_000, b"Content-Length: %d" % len(GOOD)), GOOD], b"431"),
    ([head(b"/api/tables/events/rows", b"Content-Length: 4"), GOOD], b"400"),
    ([b"POST /api/tables/events/rows HTTP/1.1\r\nContent-Length: 1\r\n\r\n{"], b"400"),
]


@pytest.mark.usefixtures("untouched")
def test_what_is_no_request_is_refused(client: httpx.Client) -> None:
    for parts, status in NO_REQUESTS:
        answer = raw(client, *parts)
        assert answer.startswith(b"HTTP/1.1 " + status), (parts, answer)
        assert b"content-type: application/json" in answer
        assert b"x-content-type-options: nosniff" in answer


HALVES = [
    [head(b"/api/tables/events/rows", b"Content-Length: 99"), GOOD],
    [head(b"/api/tables/events/rows", b"Transfer-Encoding: chunked"), b"%x\r\n" % len(GOOD), GOOD, b"\r\n"],
    [head(b"/api/tables/events/rows", b"Content-Length: 99")[:-2]],
]


@pytest.mark.usefixtures("untouched")
def test_a_request_that_does_not_come_to_its_end_leaves_nothing(client: httpx.Client) -> None:
    for parts in HALVES:
        assert not raw(client, *parts, end=True).startswith(b"HTTP/1.1 2")  # and nothing is there: `untouched`


def test_a_body_that_does_not_come_is_408(lake: fm.Lake, tmp_path: Path) -> None:
    with door(lake, tmp_path / "spool", limits=RequestLimits(body_s_max=0.2)) as client:
        for header in (b"Content-Length: 99", b"Transfer-Encoding: chunked"):
            assert raw(client, head(b"/api/tables/events/rows", header), b"1").startswith(b"HTTP/1.1 408 ")
        assert landed(client, lines(rows(1)))["record"] == 0


def test_a_head_that_comes_byte_by_byte_is_cut_off(
    lake: fm.Lake, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.serve.http.connection.IDLE_S_MAX", 0.2)
    place = (client.base_url.host, client.base_url.port or 80)
    with socket.create_connection(place, timeout=30) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHo")
        assert slow.recv(100) == b""
    # A request that is under way is not.
    with socket.create_connection(place, timeout=30) as busy:
        busy.sendall(head(b"/api/tables/events/rows", b"Content-Length: %d" % len(GOOD)))
        for byte in GOOD:
            busy.sendall(bytes([byte]))
        assert busy.recv(1000).startswith(b"HTTP/1.1 202 ")
    assert json.loads(post(client, GOOD).content)["record"] == 1


def answers(client: httpx.Client, *parts: bytes, pause_s: float = 0.0) -> list[bytes]:
    """All that a server says to these bytes, answer by answer, until it closes."""
    place = (client.base_url.host, client.base_url.port or 80)
    with socket.create_connection(place, timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        found = b""
        while more := connection.recv(65536):
            found += more
    return [b"HTTP/1.1 " + one for one in found.split(b"HTTP/1.1 ")[1:]]


WHOLE = head(b"/api/tables/events/rows", b"Content-Length: %d" % len(GOOD)) + GOOD
LAST = head(b"/api/tables/events/rows", b"Connection: close", b"Content-Length: %d" % len(GOOD)) + GOOD


def test_what_cannot_be_read_is_no_answer_to_the_request_before_it(lake: fm.Lake, client: httpx.Client) -> None:
    """It comes in one piece with a request that is whole, whose rows are taken: so is said, and nothing else."""
    for number in range(5):
        (answer,) = answers(client, WHOLE + b"this is not HTTP\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 202 "), answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["record"] == number
    landed(client, lines(rows(2)))
    assert ids(lake) == [1, 1, 1, 1, 1, 2]


def test_more_connections_than_may_be_are_told_so_and_the_others_are_served(
    lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.serve.http.connection.CONNECTIONS_MAX", 4)
    monkeypatch.setattr("floodmark.serve.http.connection.TOLD_MAX", 2)
    with served(lake) as first, contextlib.ExitStack() as stack:
        assert first.get("/healthz").status_code == 200
        place = (first.base_url.host, first.base_url.port or 80)
        for _ in range(3):
            stack.enter_context(socket.create_connection(place, timeout=30))
        with httpx.Client(base_url=first.base_url) as beyond:
            for _ in range(3):
                found = beyond.get("/healthz")
                assert (told(found, 503)["kind"], found.headers["Retry-After"]) == ("Busy", "1")
                assert first.get("/healthz").status_code == 200
        others = [stack.enter_context(socket.create_connection(place, timeout=30)) for _ in range(10)]
        for one in others[2:]:
            with contextlib.suppress(ConnectionError):
                assert one.recv(100) == b""
        assert first.get("/healthz").status_code == 200


@pytest.mark.whole
@pytest.mark.parametrize("pause_s", [0.0, 0.2])
def test_a_broken_body_is_no_answer_to_what_was_done_without_it(
    lake: fm.Lake, client: httpx.Client, pause_s: float
) -> None:
    """Whoever waits for its body is refused; whoever did its work before tells how that ended."""
    lake.catalog.jobs.start("years", "history", ["events"], {"first": 0}, {}, "chunks", "test")
    for target, status in ((b"/api/jobs/years/cancel", b"200"), (b"/api/tables/events/rows", b"400")):
        (answer,) = answers(client, head(target, b"Transfer-Encoding: chunked"), b"zz\r\n", pause_s=pause_s)
        assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert lake.backfill.show("years")["cancel_asked"]
    # Answered before its body came, which is broken then: one answer, and not a second that belongs to nothing.
    with served(lake, tokens=[AccessToken("one", token_hash(new_token()), "write")]) as closed:
        begin = head(b"/api/tables/events/rows", b"Transfer-Encoding: chunked")
        (answer,) = answers(closed, begin, b"zz\r\n", pause_s=pause_s)
        assert answer.startswith(b"HTTP/1.1 401 "), answer


def test_the_rest_of_a_body_that_was_refused_may_still_come(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a connection may be idle, and not for ever."""
    monkeypatch.setattr("floodmark.serve.http.connection.IDLE_S_MAX", 1.5)
    place, size, pieces = (client.base_url.host, client.base_url.port or 80), SMALL.body_bytes_max + 20, 20
    question = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(place, timeout=30) as connection:
        connection.sendall(head(b"/api/tables/events/rows", b"Content-Length: %d" % size))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        for piece in range(pieces):
            connection.sendall(b" " * (size // pieces if piece else size - size // pieces * (pieces - 1)))
            time.sleep(2.5 / pieces)
        connection.sendall(question)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(head(b"/api/tables/events/rows", b"Content-Length: %d" % size) + b" ")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        with contextlib.suppress(ConnectionError):
            assert connection.recv(65536) == b"", "it is let go"


def test_an_answer_before_the_body_that_was_to_be_asked_for_ends_the_connection(client: httpx.Client) -> None:
    """Whether the body still comes nobody can tell: what follows would be taken for it."""
    for wanted, closes in ((b"Expect: 100-continue", True), (b"X-Nothing: 1", False)):
        begin = head(b"/api/tables/events/rows", wanted, b"Content-Length: 9999999999999")
        answer = raw(client, begin)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert (b"connection: close" in answer.lower()) == closes


BEHIND = {
    "a whole request": WHOLE,
    "many of them": WHOLE * 50,
    "a request whose body is broken": head(b"/api/tables/events/rows", b"Transfer-Encoding: chunked") + b"zz\r\n",
    "half a request": WHOLE[:-3],
    "a request that offers another protocol": head(b"/healthz", b"Connection: upgrade", b"Upgrade: h2c") * 700,
    "a proxy's request": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.whole
@pytest.mark.parametrize("behind", BEHIND)
def test_what_comes_before_an_answer_is_not_begun(lake: fm.Lake, client: httpx.Client, behind: str) -> None:
    """The answer is the one to the first request, and the last; so who sent more knows that it has to send it again."""
    for query in (b"", b"?wait=committed"):
        first = head(b"/api/tables/events/rows" + query, b"Content-Length: %d" % len(GOOD)) + GOOD
        (answer,) = answers(client, first + BEHIND[behind])
        assert answer[:11] in (b"HTTP/1.1 20"), answer
        assert b"connection: close" in answer
    landed(client, lines(rows(2)))
    assert ids(lake) == [1, 1, 2]


def test_requests_one_after_the_other_are_answered_on_one_connection(client: httpx.Client) -> None:
    place = (client.base_url.host, client.base_url.port or 80)
    with socket.create_connection(place, timeout=30) as connection:
        for number in range(5):
            # Blank lines between requests are let pass.
            connection.sendall(WHOLE + b"\r\n")
            found = b""
            while not found.endswith(b"}"):
                found += connection.recv(65536)
            assert json.loads(found.partition(b"\r\n\r\n")[2])["record"] == number


def test_a_flood_of_requests_on_one_connection_takes_no_memory(client: httpx.Client) -> None:
    """Ten thousand bodies that nobody waits for: not one of them is kept."""
    place = (client.base_url.host, client.base_url.port or 80)
    body = b"x" * 60_000
    one = head(b"/api/tables/nothing/rows", b"Content-Length: %d" % len(body)) + body
    before = psutil.Process().memory_info().rss
    with socket.create_connection(place, timeout=30) as connection, contextlib.suppress(ConnectionError):
        for _ in range(10_000):
            connection.sendall(one)
    assert psutil.Process().memory_info().rss - before < 100_000_000


# More than the sockets of both ends hold.
SENT_AWAY = 8_000_000


def test_who_takes_nothing_of_an_answer_is_let_go(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.serve.http.connection.IDLE_S_MAX", 0.4)
    place = (client.base_url.host, client.base_url.port or 80)
    question = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    whole = client.get("/openapi.json").content
    for more in (question, b"\r\n"):  # what comes behind the one that is stuck, or nothing
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            stuck.connect(place)
            end_s, answers_to_send = time.monotonic() + 30, SENT_AWAY // len(whole)
            with contextlib.suppress(ConnectionError):
                for number in count():
                    assert time.monotonic() < end_s, "it is still held"
                    stuck.sendall(question if number < answers_to_send else more)
                    time.sleep(0.02)  # for an answer to be sent away, to where nobody takes it


ENDLESS = [
    b"POST /api/tables/events/rows HTTP/1.1\r\nHost: localhost\r\nX: ",
    b"POST /api/tables/events/rows",
    head(b"/api/tables/events/rows", b"Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\nX: ",
    head(b"/api/tables/events/rows", b"Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\nX: 1\r\nX: ",
]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("begin", range(len(ENDLESS)))
def test_what_never_ends_is_cut_off_before_it_fills_the_memory(client: httpx.Client, begin: int) -> None:
    with pytest.raises(ConnectionError):
        answers(client, ENDLESS[begin], *[b"x" * HEAD_BYTES_MAX] * 1000)


@pytest.mark.usefixtures("untouched")
def test_what_comes_after_a_body_is_no_header(client: httpx.Client) -> None:
    chunked = b"%x\r\n%s\r\n0\r\n" % (len(GOOD), GOOD)
    begin = head(b"/api/tables/nothing/rows", b"Transfer-Encoding: chunked", b"Connection: close")
    for trailer in (b"Idempotency-Key: a\r\nIdempotency-Key: b", b"Host: elsewhere.example", b"Floodmark-Epoch: x"):
        (answer,) = answers(client, begin + chunked + trailer + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 404 "), answer


OFFER = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")


def test_who_offers_another_protocol_is_served_in_this_one(client: httpx.Client) -> None:
    begin = head(b"/api/tables/events/rows", *OFFER, b"Content-Length: %d" % len(GOOD))
    chunked = head(b"/api/tables/events/rows", *OFFER, b"Transfer-Encoding: chunked")
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    ways = [[begin + GOOD], [begin, GOOD], [chunked + body], [chunked, body], [b"%c" % one for one in begin + GOOD]]
    place = (client.base_url.host, client.base_url.port or 80)
    with socket.create_connection(place, timeout=30) as connection:
        for number, parts in enumerate(ways):
            for part in parts:
                connection.sendall(part)
            found = b""
            while not found.endswith(b"}"):
                found += connection.recv(65536)
            assert json.loads(found.partition(b"\r\n\r\n")[2])["record"] == number
    question = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"\r\n".join(OFFER) + b"\r\n\r\n"
    assert raw(client, question).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("untouched")
def test_who_takes_it_for_a_proxy_is_refused(client: httpx.Client) -> None:
    assert raw(client, b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw(client, b"GET http://localhost/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")[:12] == b"HTTP/1.1 200"
