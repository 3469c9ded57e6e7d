"""Who may do what: tokens and their roles, cookies, origins, and the names that a server without tokens answers to."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from floodmark.serve.http.access import (
    COOKIE,
    ROLES,
    Access,
    AccessToken,
    Refused,
    Role,
    is_own_name,
    new_token,
    token_hash,
)

TOKENS: dict[Role, str] = {role: new_token() for role in ROLES}
GUARDED = Access([AccessToken(f"the {role} one", token_hash(token).upper(), role) for role, token in TOKENS.items()])
OPEN = Access()


def request(**headers: str) -> Request:
    given = {"host": "lake.example:8787", **headers}
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in given.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": raw})


def bearer(token: str, **headers: str) -> Request:
    return request(authorization=f"Bearer {token}", **headers)


def status(doors: Access, asked: Request, role: Role) -> int:
    try:
        doors.check(asked, role)
    except Refused as refused:
        return refused.status
    return 200


def test_a_role_may_do_what_the_ones_before_it_may() -> None:
    found = {role: [status(GUARDED, bearer(TOKENS[role]), wanted) for wanted in ROLES] for role in ROLES}
    assert found == {"read": [200, 403, 403], "write": [200, 200, 403], "admin": [200, 200, 200]}
    assert GUARDED.check(bearer(TOKENS["write"]), "read").name == "the write one"


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer x", f"Basic {TOKENS['admin']}", TOKENS["admin"], "Bearer \xff"],
    ids=["none", "no token", "blank", "unknown", "basic", "no scheme", "not ascii"],
)
def test_what_is_no_token_is_unknown(authorization: str) -> None:
    assert status(GUARDED, request(authorization=authorization), "read") == 401
    # A wrong header is not made good by a cookie.
    cookie = f"{COOKIE}={TOKENS['admin']}"
    assert status(GUARDED, request(authorization=authorization, cookie=cookie), "read") == 401


def test_the_hash_of_a_token_is_no_token_and_nothing_is_none_either() -> None:
    assert status(GUARDED, bearer(token_hash(TOKENS["admin"])), "read") == 401
    assert status(GUARDED, request(), "read") == 401
    assert Access([AccessToken("empty", token_hash(""), "admin")]).caller(bearer("")) is None
    assert status(GUARDED, bearer(TOKENS["admin"] + "x" * 100_000), "read") == 401


def test_a_cookie_reads_and_writes_only_for_pages_of_this_server() -> None:
    cookie = f"{COOKIE}={TOKENS['admin']}"
    assert status(GUARDED, request(cookie=cookie), "read") == 200
    own = ("http://lake.example:8787", "https://LAKE.example:8787")
    other = ("http://lake.example", "http://lake.example:8788", "https://elsewhere.example", "null", "", "http://[")
    assert [status(GUARDED, request(cookie=cookie, origin=one), "admin") for one in own] == [200, 200]
    assert {status(GUARDED, request(cookie=cookie, origin=one), "admin") for one in other} == {403}
    assert status(GUARDED, request(cookie=cookie), "write") == 403, "browsers say where a write comes from"


def test_a_token_in_a_header_was_given_to_who_sends_it_from_wherever() -> None:
    assert status(GUARDED, bearer(TOKENS["write"], origin="https://elsewhere.example"), "write") == 200


def test_without_tokens_everybody_may_but_pages_of_others_may_not_write() -> None:
    assert [status(OPEN, request(), role) for role in ROLES] == [200, 200, 200]
    assert status(OPEN, request(origin="https://elsewhere.example"), "read") == 200
    assert status(OPEN, request(origin="https://elsewhere.example"), "write") == 403
    assert status(OPEN, request(origin="http://lake.example:8787"), "admin") == 200
    assert (OPEN.has_tokens, GUARDED.has_tokens) == (False, True)


@pytest.mark.parametrize("host", ["localhost", "localhost:8787", "127.0.0.1:1", "127.8.8.8", "[::1]:80", "LOCALHOST."])
def test_names_of_this_machine_are_answered_to(host: str) -> None:
    assert is_own_name(host)
    OPEN.check_host(host)


@pytest.mark.parametrize("host", [None, "", "elsewhere.example", "localhost.x.example", "10.0.0.1", "[::", "a b"])
def test_other_names_are_not_unless_tokens_are_asked_for(host: str | None) -> None:
    with pytest.raises(Refused) as refused:
        OPEN.check_host(host)
    assert refused.value.status == 421
    GUARDED.check_host(host)
