"""Rows over HTTP into the spool, at a real socket: durable before 202, and nothing stored with any other answer.

Bad input of every kind gets the right status and a message with line and column. That a request left nothing is seen at
the next good one: it is the first record of the spool, and its rows alone are in the table.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

import floodmark as fm
from floodmark.ingest.intake import Intake, IntakeLimits
from floodmark.serve.http.access import AccessToken, new_token, token_hash
from floodmark.serve.http.body import RequestLimits
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, ids, rows
from tests.contract.test_receive_http import SMALL, lines, sender, served, told, two_tables
from tests.intake_world import intake_of

QUICK = IntakeLimits(group_wait_ms=10)
SLOW = IntakeLimits(group_wait_ms=600_000)


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with two_tables(new_place) as lake:
        yield lake


@contextmanager
def door(lake: fm.Lake, spool: Path, within: IntakeLimits = QUICK, **options: Any) -> Iterator[httpx.Client]:
    intake = Intake(lake.engine, spool, within)
    intake.start()
    try:
        with served(lake, intake=intake, **options) as client:
            yield client
    finally:
        intake.close()


@pytest.fixture
def client(lake: fm.Lake, tmp_path: Path) -> Iterator[httpx.Client]:
    with door(lake, tmp_path / "spool") as client:
        yield client


def post(client: httpx.Client, content: Any, table: str = "events", query: str = "", **headers: str) -> httpx.Response:
    return client.post(f"/api/tables/{table}/rows{query}", content=content, headers=headers)


def landed(client: httpx.Client, content: Any, table: str = "events", **headers: str) -> dict[str, Any]:
    answer = post(client, content, table, "?wait=committed", **headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@contextmanager
def nothing_stored(lake: fm.Lake, client: httpx.Client) -> Iterator[None]:
    """Whatever is sent meanwhile, nothing of it is stored, and the server still works."""
    before = lake.status()["version"]
    yield
    assert lake.status()["version"] == before
    assert [landed(client, lines(rows(7)), table)["record"] for table in ("events", "people")] == [0, 0]
    assert (ids(lake), ids(lake, "people")) == ([7], [7])
    check_lake(lake.catalog)


@pytest.fixture
def untouched(lake: fm.Lake, client: httpx.Client) -> Iterator[None]:
    with nothing_stored(lake, client):
        yield


# ── taken ──


def test_rows_are_taken_first_and_committed_then(lake: fm.Lake, client: httpx.Client) -> None:
    answer = post(client, lines(rows(1, 2)))
    assert (answer.status_code, answer.json()) == (202, {"outcome": "taken", "rows": 2, "record": 0})
    found = landed(client, gzip.compress(lines(rows(3))), **{"Content-Encoding": "gzip"})
    version = lake.status()["version"]
    assert found == {"outcome": "committed", "rows": 1, "record": 1, "version": version, "quarantined": 0}
    assert ids(lake) == [1, 2, 3]
    check_lake(lake.catalog)


def test_a_key_makes_rows_come_once_and_is_for_these_rows_only(lake: fm.Lake, client: httpx.Client) -> None:
    key = {"Idempotency-Key": "k"}
    first = [post(client, lines(rows(1)), **key).json()["outcome"] for _ in range(2)]
    assert first == ["taken", "already_taken"]
    assert landed(client, lines(rows(1)), **key)["outcome"] == "already_committed"
    error = told(post(client, lines(rows(2)), **key), 422)
    assert error["kind"] == "Invalid"
    assert post(client, lines(rows(2)), "people", **key).json()["outcome"] == "taken", "each table has its own"
    assert ids(lake) == [1]


def test_on_a_keyed_table_the_last_arrival_wins(lake: fm.Lake, client: httpx.Client) -> None:
    landed(client, lines([{"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 1, "name": "c"}]), "people")
    landed(client, lines([{"id": 2, "_change": "delete"}, {"id": 3, "name": "d"}]), "people")
    found = {row["id"]: row["name"] for row in lake.read_arrow("people").read_all().to_pylist()}
    assert found == {1: "c", 3: "d"}


def test_new_columns_come_if_the_question_says_so(lake: fm.Lake, client: httpx.Client) -> None:
    data = lines([{"id": 1, "name": "a", "age": 7}])
    assert told(post(client, data), 422)["facts"]["column"] == "age"
    assert post(client, data, query="?evolve=true&wait=committed").status_code == 200
    assert lake.read_arrow("events").read_all().to_pylist() == [{"id": 1, "name": "a", "age": 7}]


def test_a_sink_of_another_lake_is_committed_before_its_answer(lake: fm.Lake, client: httpx.Client) -> None:
    answer = post(client, lines(rows(1)), **sender(0, 1))
    assert (answer.status_code, answer.json()["outcome"]) == (200, "committed")
    assert ids(lake) == [1]


def test_what_is_not_committed_in_time_is_taken_all_the_same(lake: fm.Lake, tmp_path: Path) -> None:
    with door(lake, tmp_path / "spool", SLOW, limits=RequestLimits(wait_s_max=0.05)) as client:
        answer = post(client, lines(rows(1)), query="?wait=committed")
        assert (answer.status_code, answer.json()["outcome"]) == (202, "taken")
        assert "not yet committed" in answer.json()["note"]
        assert ids(lake) == []
    with door(lake, tmp_path / "spool") as client:
        assert landed(client, lines(rows(2)))["record"] == 1
    assert ids(lake) == [1, 2]


def test_a_server_that_is_to_end_does_not_let_who_waits_keep_it(lake: fm.Lake, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with door(lake, tmp_path / "spool", SLOW, limits=RequestLimits(wait_s_max=600.0)) as client:
            asked = pool.submit(
                httpx.post,
                f"{client.base_url}/api/tables/events/rows?wait=committed",
                content=lines(rows(1)),
                timeout=60,
            )
            for _ in range(1000):
                if client.get("/api/spools").json()["spools"]:
                    break
        answer = asked.result()
    assert (answer.status_code, answer.json()["outcome"]) == (202, "taken")


def test_too_much_at_once_is_429_with_a_time(lake: fm.Lake, tmp_path: Path) -> None:
    full = IntakeLimits(group_wait_ms=600_000, waiting_bytes_max=2_000)
    with door(lake, tmp_path / "spool", full) as client:
        answers = [post(client, lines(rows(number))) for number in range(100)]
        refused = [answer for answer in answers if answer.status_code != 202]
        assert 0 < len(refused) < 100
        assert {told(answer, 429)["kind"] for answer in refused} == {"Busy"}
        assert all(int(answer.headers["Retry-After"]) > 0 for answer in refused)
    with door(lake, tmp_path / "spool") as client:
        landed(client, lines(rows(1000)))
    assert ids(lake) == [*range(100 - len(refused)), 1000]


def test_bodies_that_are_too_large_together_are_429(lake: fm.Lake, tmp_path: Path) -> None:
    with door(lake, tmp_path / "spool", limits=RequestLimits(bytes_max=1_000)) as client:
        for body, encoding in ((b" " * 2_000, "identity"), (gzip.compress(b" " * 2_000), "gzip")):
            answer = post(client, body, **{"Content-Encoding": encoding})
            assert told(answer, 429)["kind"] == "Busy"
        assert [landed(client, lines(rows(one)))["record"] for one in range(30)] == list(range(30)), "it is given back"


def test_who_waits_is_counted_too(lake: fm.Lake, tmp_path: Path) -> None:
    with door(lake, tmp_path / "spool", SLOW, limits=RequestLimits(waiters_max=2, wait_s_max=2.0)) as client:
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(post, client, lines(rows(one)), query="?wait=committed") for one in range(3)]
            answers = [one.result() for one in asked]
        assert sorted(answer.status_code for answer in answers) == [202, 202, 429]
        # Others are not kept from being taken.
        assert post(client, lines(rows(9))).json()["record"] == 2


def test_where_there_is_no_spool_only_who_waits_is_served(lake: fm.Lake) -> None:
    with served(lake) as client:
        error = told(post(client, lines(rows(1))), 409)
        assert "wait=committed" in error["advice"]
        error = told(post(client, lines(rows(1)) + lines([{"id": "x"}]), query="?wait=committed"), 422)
        assert (error["problems"][0]["line"], error["problems"][0]["column"]) == (2, "id")
        told(post(client, b"", query="?wait=committed"), 422)
        assert ids(lake) == []
        assert post(client, lines(rows(1)), query="?wait=committed").json()["outcome"] == "committed"
    assert ids(lake) == [1]


@pytest.mark.usefixtures("untouched")
def test_who_means_another_lake_or_key_is_412_also_without_being_a_sink(client: httpx.Client) -> None:
    assert told(post(client, lines(rows(1)), **{"Floodmark-Expect": "another/one"}), 412)["kind"] == "Conflict"
    assert told(post(client, lines(rows(1)), **{"Floodmark-Key": "name"}), 412)["kind"] == "Conflict"


# ── bad rows ──


BAD_LINES = [
    ("events", '{"id": 1}\n\n{"id": 2', 400, 3, 9),
    ("events", "[1]", 400, 1, None),
    ("events", '{"id": 1}\n{"id": "two"}', 422, 2, "id"),
    ("events", '{"id": 1.5}', 422, 1, "id"),
    ("events", '{"id": 9223372036854775808}', 422, 1, "id"),
    ("events", '{"id": 1}\n{"name": "a"}', 422, 2, "id"),
    ("events", '{"id": 1, "nmae": "a"}', 422, 1, "nmae"),
    ("events", '{"id": 1, "name": "\\ud800"}', 422, 1, "name"),
    ("events", '{"id": 1, "_change": "delete"}', 422, 1, "_change"),
    ("people", '{"id": 1}\n{"_change": "delete"}', 422, 2, "id"),
]


@pytest.mark.usefixtures("untouched")
def test_a_bad_line_is_told_with_line_and_column(client: httpx.Client) -> None:
    for table, text, status, line, place in BAD_LINES:
        error = told(post(client, text.encode(), table), status)
        first = error["problems"][0]
        assert (first["line"], first["character" if status == 400 else "column"]) == (line, place), text
        assert error["facts"]["line"] == str(line)


@pytest.mark.usefixtures("untouched")
def test_all_bad_lines_are_counted_and_the_good_ones_are_not_taken(client: httpx.Client) -> None:
    error = told(post(client, lines(rows(1)) + lines([{"id": "x"}] * 50) + lines(rows(2))), 422)
    assert (error["facts"]["count"], len(error["problems"])) == ("50", 20)


BAD_BODIES: list[tuple[int, str, Callable[[], Any]]] = [
    (422, "identity", lambda: b""),
    (422, "identity", lambda: b" \n\n"),
    (400, "identity", lambda: b'{"name": "\xff"}'),
    (400, "gzip", lambda: b"not gzip"),
    (400, "gzip", lambda: gzip.compress(lines(rows(1)))[:-4]),
    (400, "zstd", lambda: zstandard.compress(lines(rows(1)))[:-2]),
    (413, "identity", lambda: b" " * (SMALL.body_bytes_max + 1)),
    (413, "identity", lambda: iter([b" " * 1024] * 80)),
    (413, "identity", lambda: lines(rows(1)) * (SMALL.rows_max + 1)),
    (413, "gzip", lambda: gzip.compress(b" " * 30_000_000)),
    (413, "zstd", lambda: zstandard.compress(b" " * 100_000_000)),
    (415, "br", lambda: b"{}"),
    (415, "gzip, gzip", lambda: b"{}"),
]


@pytest.mark.usefixtures("untouched")
def test_a_bad_body_is_refused(client: httpx.Client) -> None:
    for status, encoding, body in BAD_BODIES:
        assert told(post(client, body(), **{"Content-Encoding": encoding}), status)["kind"] == "Invalid"


@pytest.mark.usefixtures("untouched")
def test_a_bad_question_is_refused(client: httpx.Client) -> None:
    for query in ("?wait=spooled", "?wait=", "?evolve=maybe", "?wait=committed&wait=never"):
        told(post(client, lines(rows(1)), query=query), 400)
    error = told(post(client, lines(rows(1)), query="?wiat=committed"), 400)
    assert (error["message"], error["advice"]) == ("unknown parameter 'wiat'", "Known here: evolve, wait.")
    assert "Known here: none." in client.get("/api/status?x=1").text
    for key in ("", "x" * 5_000, "a\tb"):
        told(post(client, lines(rows(1)), **{"Idempotency-Key": key}), 400)


# ── who may ──


def test_roles_are_kept_apart(lake: fm.Lake, tmp_path: Path) -> None:
    given = {role: new_token() for role in ("read", "write", "admin")}
    tokens = [AccessToken(role, token_hash(token), role) for role, token in given.items()]  # type: ignore[arg-type]
    with door(lake, tmp_path / "spool", tokens=tokens) as client:

        def statuses(method: str, path: str, content: bytes = b"") -> list[int]:
            known = [{"Authorization": f"Bearer {token}"} for token in given.values()]
            return [client.request(method, path, content=content, headers=one).status_code for one in [{}, *known]]

        assert statuses("POST", "/api/tables/events/rows", lines(rows(1))) == [401, 403, 202, 202]
        assert statuses("GET", "/api/jobs") == [401, 200, 200, 200]
        assert statuses("POST", "/api/jobs/none/cancel") == [401, 403, 403, 404]
        assert statuses("GET", "/healthz") == [200] * 4
        wrong = client.get("/api/jobs", headers={"Authorization": "Bearer wrong"})
        assert told(wrong, 401)["kind"] == "Unauthorized"
        assert wrong.headers["WWW-Authenticate"] == "Bearer"
        # Unknown tables are nobody's matter without a token.
        assert post(client, lines(rows(1)), "nothing").status_code == 401


@pytest.mark.usefixtures("untouched")
def test_pages_of_others_and_names_of_others_are_not_heard(client: httpx.Client) -> None:
    assert told(post(client, lines(rows(1)), Origin="https://elsewhere.example"), 403)["kind"] == "Forbidden"
    for path in ("/healthz", "/api/jobs", "/openapi.json", "/"):
        told(client.get(path, headers={"Host": "elsewhere.example"}), 421)
    told(post(client, lines(rows(1)), Host="elsewhere.example:8787"), 421)


def test_a_page_of_this_server_may_write(lake: fm.Lake, client: httpx.Client) -> None:
    landed(client, lines(rows(1)), Origin=str(client.base_url).rstrip("/"))
    assert ids(lake) == [1]


def test_every_answer_says_how_it_is_to_be_taken(client: httpx.Client) -> None:
    answers = [client.get("/healthz"), client.get("/nothing"), post(client, b"x"), client.put("/healthz")]
    answers.append(client.get("/healthz", headers={"Host": "elsewhere.example"}))
    for answer in answers:
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "same-origin"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert "server" not in answer.headers
        assert "Traceback" not in answer.text


@pytest.mark.usefixtures("untouched")
def test_other_methods_are_405_and_a_head_is_an_answer_without_its_body(client: httpx.Client) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD"):
        answer = client.request(method, "/api/tables/events/rows")
        assert (answer.status_code, answer.headers["Allow"]) == (405, "POST"), method
    for path in ("/healthz", "/api/events"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
    assert client.head("/nothing").status_code == 404
    told(client.get("/healthz/"), 404)


def test_a_request_says_who_it_is_once_and_in_few_words(lake: fm.Lake) -> None:
    """Two keys, or headers beyond bounds: refused, whatever else is right, and nothing is stored."""
    with intake_of(lake) as intake, served(lake, intake=intake) as client:
        twice = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
        answer = client.post("/api/tables/events/rows", content=lines(rows(1)), headers=twice)
        assert (answer.status_code, answer.json()["error"]["facts"]["header"]) == (400, "Idempotency-Key")
        answer = client.post("/api/tables/events/rows", content=lines(rows(1)), headers={"X-Long": "x" * 40_000})
        assert answer.status_code == 431
        assert not any(state["waiting_records"] or state["fed_records"] for state in intake.states())


def test_rows_add_only_so_many_columns_by_themselves(lake: fm.Lake) -> None:
    wide = [{"id": 1, **{f"c{number}": number for number in range(201)}}]
    deep = [{"id": 1, "deep": {f"c{number}": number for number in range(2_000)}}]
    with intake_of(lake) as intake, served(lake, intake=intake) as client:
        for wrong in (wide, deep, [{"id": 1, "c" * 256: 1}]):
            answer = client.post("/api/tables/events/rows?evolve=true", content=lines(wrong))
            assert (answer.status_code, answer.json()["error"]["kind"]) == (422, "Invalid")
            assert len(answer.content) < 1_000
        assert not any(state["waiting_records"] or state["fed_records"] for state in intake.states())
