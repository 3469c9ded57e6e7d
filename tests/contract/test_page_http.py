"""The page as bytes: the same figures as every other answer, escaped, under a strict policy, behind its door."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

import floodmark as fm
from floodmark.serve.http.access import COOKIE, AccessToken, new_token, token_hash
from floodmark.serve.http.body import RequestLimits
from floodmark.testing.database_faults import DatabaseFaults
from tests.conftest import EVENTS, Place, rows
from tests.contract.test_receive_http import served, told


@pytest.fixture
def lake(new_place: Callable[[str], Place], tmp_path: Any) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        lake.append("events", rows(*range(1234)))
        lake.sinks.add("out", "files", tables=["events", "people"], path=str(tmp_path / "out"))
        lake.sinks.run("out")
        lake.append("events", rows(*range(77)))
        yield lake


class Seen(HTMLParser):
    """The figures of a page by what they are and of what, and whatever a policy would not let run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[tuple[str, str], str] = {}
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if "data-figure" in found:
            of = next((found[name] for name in ("data-table", "data-sink", "data-job") if name in found), "")
            self.figures[found["data-figure"] or "", of or ""] = found["data-value"] or ""
        inline = [name for name in found if name == "style" or name.startswith("on")]
        if inline or tag == "style" or (tag == "script" and "src" not in found):
            self.inside.append(f"{tag} {found}")


def test_the_page_has_the_figures_of_every_other_answer(lake: fm.Lake) -> None:
    with served(lake) as client:
        figures = Seen(client.get("/").text).figures
        assert Seen(client.get("/?fragment=1").text).figures == figures
        status, tables = client.get("/api/status").json(), client.get("/api/tables").json()["tables"]
        (sink,) = client.get("/api/sinks").json()["sinks"]
    for name in ("rows", "tables", "files", "bytes", "version", "quarantined", "small_files"):
        assert figures[name, ""] == str(status[name])
    for table in tables:
        for name in ("rows", "files", "small_files", "bytes", "waiting_rows"):
            assert figures[name, table["table"]] == str(table[name])
    assert figures["rows", "events"] == "1311"
    assert figures["lag_rows", "out"] == str(sum(one["lag_rows"] for one in sink["tables"])) == "77"
    assert figures["units", "out"] == str(sum(one["units"] for one in sink["tables"]))


def test_nothing_stands_inside_of_the_page_and_nothing_comes_from_elsewhere(lake: fm.Lake) -> None:
    with served(lake) as client:
        page = client.get("/")
        policy = page.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert page.headers["Cache-Control"] == "no-store"
        assert Seen(page.text).inside == []
        script = page.text.split('<script src="')[1].split('"')[0]
        kept = client.get(script)
        assert (kept.status_code, kept.headers["Content-Type"].split(";")[0]) == (200, "text/javascript")
        assert "immutable" in kept.headers["Cache-Control"]
        plain = client.get("/static/floodmark.js")
        assert plain.headers["Cache-Control"] == "no-cache"
        assert client.get("/static/floodmark.js", headers={"If-None-Match": plain.headers["ETag"]}).status_code == 304
        for name in ("nothing.js", "..%2Fpage.py", "%2e%2e%2fpage.py"):
            assert client.get(f"/static/{name}").status_code == 404


def test_what_comes_from_the_lake_is_escaped(lake: fm.Lake) -> None:
    bad = "</script><script>alert(1)</script><b onclick=x>\"'"
    lake.append("events", rows(1), actor=bad, message=bad)
    with served(lake) as client:
        text = client.get("/").text
    assert Seen(text).inside == []
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_a_state_that_cannot_be_read_is_503_and_says_why(lake: fm.Lake) -> None:
    with served(lake) as client:
        faults = DatabaseFaults(lake.catalog.database, fail_at=1, mode="before", stay_broken=True)
        try:
            for address in ("/", "/?fragment=1"):
                answer = client.get(address)
                assert answer.status_code == 503
                assert "State unknown" in answer.text
                assert Seen(answer.text).figures == {}
                assert "Traceback" not in answer.text
        finally:
            faults.remove()
        assert client.get("/").status_code == 200


# ── the door ──


@pytest.fixture
def tokens() -> dict[str, str]:
    return {"read": new_token(), "admin": new_token()}


@pytest.fixture
def client(lake: fm.Lake, tokens: dict[str, str]) -> Iterator[httpx.Client]:
    known = [AccessToken(role, token_hash(text), role) for role, text in tokens.items()]  # type: ignore[arg-type]
    with served(lake, tokens=known) as client:
        yield client


def test_without_a_token_there_is_a_form_and_no_figure(client: httpx.Client) -> None:
    answer = client.get("/")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/login")
    assert client.get("/?fragment=1").status_code == 401
    form = client.get("/login")
    assert form.status_code == 200
    assert Seen(form.text).figures == {}


def test_a_token_becomes_a_cookie_that_neither_scripts_nor_other_sites_can_use(
    client: httpx.Client, tokens: dict[str, str]
) -> None:
    answer = client.post("/login", data={"token": tokens["read"]})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/").status_code == 200, "the client keeps the cookie"
    assert client.post("/logout").status_code == 303
    assert client.get("/").status_code == 303


@pytest.mark.parametrize("content", ["token=wrong", "token=", "", "token=%00%ff", "token=" + "x" * 10_000, "\xff="])
@pytest.mark.whole
def test_a_wrong_token_is_told_and_opens_nothing(client: httpx.Client, content: str) -> None:
    answer = client.post("/login", content=content.encode("latin-1"))
    assert answer.status_code == 401
    assert "Invalid token." in answer.text
    assert "Set-Cookie" not in answer.headers
    assert COOKIE not in client.cookies


def test_a_form_that_does_not_come_is_not_waited_for(lake: fm.Lake, tokens: dict[str, str]) -> None:
    known = [AccessToken("one", token_hash(tokens["read"]), "read")]
    with served(lake, tokens=known, limits=RequestLimits(body_s_max=0.2)) as client:
        place = (client.base_url.host, client.base_url.port or 80)
        with socket.create_connection(place, timeout=30) as slow:
            slow.sendall(b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\ntoken=")
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert told(client.get("/static/nothing"), 404)["kind"] == "NotFound"


def test_forms_of_other_sites_are_refused(client: httpx.Client, tokens: dict[str, str]) -> None:
    headers = {"Origin": "http://elsewhere.example"}
    assert client.post("/login", data={"token": tokens["admin"]}, headers=headers).status_code == 403
    assert client.post("/logout", headers=headers).status_code == 403


def test_who_may_only_read_has_no_buttons(lake: fm.Lake, client: httpx.Client, tokens: dict[str, str]) -> None:
    lake.catalog.jobs.start("years", "history", ["events"], {"first": 0}, {}, "chunks", "test")
    for role, there in (("read", False), ("admin", True)):
        text = client.get("/", headers={"Authorization": f"Bearer {tokens[role]}"}).text
        assert ('data-act="cancel"' in text) is there


def test_the_page_of_a_table_says_what_its_indexes_cover(lake: fm.Lake) -> None:
    with served(lake) as client:
        assert "None. <code>floodmark index create events --on COLUMN</code>" in client.get("/tables/events").text
        lake.indexes.create("events", on="id")
        lake.append("events", rows(9999))
        page = client.get("/tables/events").text
    assert '<th scope="row">id</th><td>value</td><td>live</td><td>1 of 3</td><td>1 of 1,312</td>' in page
    assert "<code>floodmark maintain index events</code>" in page
