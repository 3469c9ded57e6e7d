"""What an answer over HTTP means, and how a part looks on the wire: no I/O."""

from __future__ import annotations

import gzip
import hashlib
import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from floodmark.catalog.unit import Part, Rules, Unit
from floodmark.errors import Corrupt, Invalid, Unavailable
from floodmark.sinks.http import policy
from floodmark.sinks.http.policy import AGAIN, DELIVERED, REFUSED, UNAUTHORIZED, WRONG, Parcel, Reply

NOW = datetime(2026, 11, 15, 10, 0, tzinfo=UTC)
FACTS = {"sink": "web", "part": "0-5"}


def unit(compression: str = "gzip") -> Unit:
    rules = Rules(compression=compression)
    return Unit("u", "lake", "web", "sink", 3, "my table", "table", 7, -1, 9, rules, key=("id", "a,b"))


def parcel(*rows: dict[str, object], first: int = 0) -> Parcel:
    data = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    deletions = sum(row.get("_change") == "delete" for row in rows)
    digest = hashlib.sha256(data).hexdigest()
    return Parcel(Part(first, first + len(rows), digest), data, deletions, first)


@pytest.mark.parametrize(
    ("verdict", "statuses"),
    [
        (DELIVERED, [200, 201, 202, 204, 207, 299]),
        (AGAIN, [None, 408, 409, 425, 429, 500, 501, 502, 503, 504, 599]),
        (REFUSED, [400, 413, 422]),
        (UNAUTHORIZED, [401]),
        (WRONG, [300, 301, 302, 303, 307, 308, 402, 403, 404, 405, 406, 410, 411, 415, 417, 421, 451, 499, 600, 999]),
    ],
)
def test_every_status_has_one_meaning(verdict: str, statuses: list[int | None]) -> None:
    assert {status: policy.judge(status) for status in statuses} == dict.fromkeys(statuses, verdict)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("0", 0.0),
        (" 7 ", 7.0),
        ("1.5", 1.5),
        ("9" * 5000, float("inf")),
        ("-1", None),
        ("1e3", None),
        ("٣", None),
        ("soon", None),
        ("", None),
        ("Sun, 99 Nov 2026 10:00:00 GMT", None),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(NOW - timedelta(days=400), usegmt=True), 0.0),
        ("Sun, 15 Nov 2026 10:00:30 -0000", 30.0),
        ("Sun, 15 Nov 2026 12:00:30 +0200", 30.0),
    ],
)
def test_patience_is_asked_for_in_seconds_or_as_a_time(value: str | None, seconds: float | None) -> None:
    assert policy.retry_after_s(value, None, NOW) == seconds


def test_a_time_is_compared_with_the_clock_of_who_named_it() -> None:
    theirs = NOW + timedelta(hours=3)
    until = format_datetime(theirs + timedelta(seconds=20), usegmt=True)
    assert policy.retry_after_s(until, format_datetime(theirs, usegmt=True), NOW) == 20
    assert policy.retry_after_s(until, "a date", NOW) == 3 * 3600 + 20


def test_waits_double_up_to_a_limit_and_are_spread() -> None:
    waits = [policy.wait_s(Reply(500), tries, 10, 0.999999) for tries in range(1, 12)]
    assert waits[:4] == pytest.approx([0.25, 0.5, 1.0, 2.0], rel=1e-4)
    assert max(waits) == pytest.approx(10, rel=1e-4)
    assert policy.wait_s(Reply(500), 3, 10, 0.0) == pytest.approx(0.5)
    assert policy.wait_s(Reply(500), 100_000, 10, 0.5) <= 10
    assert policy.wait_s(Reply(500), 1, 0, 0.5) == 0


def test_asked_for_patience_is_had_and_never_less_than_the_own() -> None:
    assert policy.wait_s(Reply(503, retry_after_s=0), 8, 10, 0.9) == 9.5
    assert policy.wait_s(Reply(429, retry_after_s=77), 1, 10, 0.9) == 77


def test_a_part_is_sent_again_unless_that_takes_too_long() -> None:
    assert policy.asks_again(Reply(None), 300)
    assert policy.asks_again(Reply(503, retry_after_s=300), 300)
    assert not policy.asks_again(Reply(503, retry_after_s=300.5), 300)
    assert policy.asks_again(Reply(503, retry_after_s=0), 0)
    assert not any(policy.asks_again(Reply(status), 300) for status in (200, 400, 401, 404))


def test_halves_have_the_rows_the_order_and_the_bytes_of_the_whole() -> None:
    rows: list[dict[str, object]] = [{"id": n, "text": "a\u2028\u0085\r\n", "_change": "upsert"} for n in range(5)]
    rows[3]["_change"] = "delete"
    whole = parcel(*rows, first=10)
    one, two = policy.halve(whole)
    assert (one.part.first, one.part.last, two.part.first, two.part.last) == (10, 12, 12, 15)
    assert one.data + two.data == whole.data
    assert one == parcel(*rows[:2], first=10)
    assert (two.part, two.deletions, two.body) == (parcel(*rows[2:], first=12).part, 1, 10)


def test_text_that_is_not_one_line_per_row_is_not_cut() -> None:
    whole = parcel({"id": 1}, {"id": 2})
    for broken in (whole.data[:-1], whole.data + b"{}\n", b""):
        with pytest.raises(Corrupt):
            policy.halve(Parcel(whole.part, broken, 0, 0))
    with pytest.raises(Corrupt):
        policy.halve(parcel({"id": 1}))


def test_the_same_text_is_the_same_bytes_whenever_it_is_compressed() -> None:
    data = b'{"id": 1}\n' * 1000
    assert gzip.decompress(policy.compress(data, "gzip")) == data
    # Bytes 4 to 8 are the time.
    assert policy.compress(data, "gzip")[4:8] == bytes(4)
    for compression in ("gzip", "zstd"):
        assert policy.compress(data, compression) == policy.compress(data, compression) != data
    assert policy.compress(data, "none") == data
    with pytest.raises(Corrupt):
        policy.compress(data, "brotli")


def test_headers_name_the_part_and_say_how_it_is_packed() -> None:
    part = Part(0, 5)
    assert policy.headers(unit(), part, "1.2") == {
        "Content-Type": "application/x-ndjson",
        "Content-Encoding": "gzip",
        "Accept-Encoding": "identity",
        "Idempotency-Key": unit().part_key(0, 5),
        "Floodmark-Sender": "lake/sink/table/rows",
        "Floodmark-Epoch": "3",
        "Floodmark-Unit": "-1..9",
        "Floodmark-Part": "0-5",
        "Floodmark-Unit-Id": "u",
        "Floodmark-Key": "id,a%2Cb",
        "User-Agent": "floodmark/1.2",
    }
    assert "Content-Encoding" not in policy.headers(unit("none"), part, "1.2")
    assert policy.headers(unit("zstd"), part, "1.2")["Content-Encoding"] == "zstd"


def test_a_table_s_name_stays_one_piece_of_the_address() -> None:
    assert policy.address("http://h/{table}/rows?t={table}", "a/b?c ü") == (
        "http://h/a%2Fb%3Fc%20%C3%BC/rows?t=a%2Fb%3Fc%20%C3%BC"
    )
    assert policy.place("https://h:8/p/q?key=secret#x") == "https://h:8/p/q"


def test_secrets_are_hidden_in_every_common_form_before_a_text_is_cut() -> None:
    token = "abc/def+ghi"
    text = f"{'x' * 495} {token} {token.replace('/', chr(92) + '/')} abc%2Fdef%2Bghi"
    shown = policy.hide(text, [token, "other"])
    assert "abc" not in shown
    assert len(shown) <= policy.ANSWER_CHARACTERS_MAX
    assert policy.hide("abc%2Fdef%2Bghi abc\\/def+ghi", [token]) == "… …"


def test_a_reason_has_the_status_and_what_was_said() -> None:
    assert policy.reason(Reply(422, "no such colour")) == "422: no such colour"
    assert policy.reason(Reply(413)) == "413"


@pytest.mark.parametrize(
    ("reply", "kind", "facts"),
    [
        (Reply(None, "ConnectError refused"), Unavailable, {"tries": 4, "cause": "ConnectError refused"}),
        (Reply(503, "busy"), Unavailable, {"status": 503, "tries": 4, "answer": "busy"}),
        (Reply(429, retry_after_s=900), Unavailable, {"status": 429, "retry_after_s": 900, "retry_after_s_max": 300}),
        (Reply(401, "who?"), Unavailable, {"status": 401, "answer": "who?"}),
        (Reply(404, "nothing here"), Invalid, {"status": 404, "answer": "nothing here"}),
        (Reply(302), Invalid, {"status": 302}),
    ],
)
def test_a_run_ends_with_the_facts_and_what_to_do(reply: Reply, kind: type, facts: dict[str, object]) -> None:
    error = policy.failure(reply, 4, 300, FACTS)
    assert type(error) is kind
    assert error.facts.items() >= {**FACTS, **facts}.items()
    assert error.advice


def test_too_many_bad_rows_point_to_the_address() -> None:
    error = policy.too_many_refused(Reply(400, "what?"), 10, FACTS)
    assert error.facts == {**FACTS, "quarantine_max": 10, "status": 400, "answer": "what?"}
    assert "url" in error.advice
