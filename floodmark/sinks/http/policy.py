"""What to do about an answer over HTTP, and how a part looks on the wire: decisions and texts without I/O.

A destination that refuses what is in a part (400, 413, 422) is believed: the part is halved, down to the bad rows. One
that cannot just now (408, 409, 425, 429, 5xx, no answer) is asked again under the same key: nobody knows whether
it took the part (I13). A part that gets no word about its rows at every try (408, 5xx, no answer) while others are
accepted is suspect; http.py says when it is halved. Any other answer is about the address or the caller, not about
rows: the run ends, and no row is set aside. What a destination says may hold what it was sent, so texts pass `hide`
before anybody sees them (I18).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

import zstandard

from floodmark.catalog.unit import Part, Unit
from floodmark.errors import Corrupt, FloodmarkError, Invalid, Unavailable
from floodmark.rows.reading.changes import CHANGE_COLUMN, DELETE

DELIVERED, AGAIN, REFUSED, UNAUTHORIZED, WRONG = "delivered", "again", "refused", "unauthorized", "wrong"
_AGAIN = frozenset({408, 409, 425, 429})
_REFUSED = frozenset({400, 413, 422})
# No word about the rows: they may be there, or the destination may fail on one of them each time.
_UNANSWERED = frozenset({408})
TOO_LARGE = 413
# A lake that is not the one that the sender expects took nothing.
STRANGER = 412

BACKOFF_S_FIRST = 0.25
# How much of an answer is kept: enough to see what is wrong, little enough for an error and a row of the quarantine.
ANSWER_CHARACTERS_MAX = 500
GZIP_LEVEL = 6
ZSTD_LEVEL = 3
_SECONDS = re.compile(r"\d+(\.\d+)?", re.ASCII)


@dataclass(frozen=True)
class Reply:
    """What came back for one request; without a status nothing did, and `text` says why."""

    status: int | None
    text: str = ""
    # How long the destination wants to be left alone; None if it does not say so in a way that can be understood.
    retry_after_s: float | None = None
    # Who answered, if it says so.
    destination: str | None = None
    # The newest unit that a lake has of this sender, if that is why it took nothing.
    newest: Newest | None = None


@dataclass(frozen=True)
class Newest:
    """The newest unit of a sender at a lake; without a unit it has none, or does not know which."""

    epoch: int = 0
    until: int | None = None
    unit: str | None = None


def newest_unit(text: str | None) -> Newest | None:
    """What an answer says of the newest unit; None if it says nothing."""
    if text is None:
        return None
    parts = text.split()
    if len(parts) == 3 and parts[0].isdecimal() and parts[1].isdecimal():
        return Newest(int(parts[0]), int(parts[1]), None if parts[2] == "-" else parts[2])
    return Newest()


def judge(status: int | None) -> str:
    """What an answer means; None: there was none."""
    if status is None or status in _AGAIN or 500 <= status <= 599:
        return AGAIN
    if 200 <= status <= 299:
        return DELIVERED
    if status in _REFUSED:
        return REFUSED
    return UNAUTHORIZED if status == 401 else WRONG


def unanswered(status: int | None) -> bool:
    """Whether nobody can tell what became of the part: a failure of the destination's own, or no answer."""
    return status is None or status in _UNANSWERED or 500 <= status <= 599


def asks_again(reply: Reply, retry_after_s_max: float) -> bool:
    """Whether the same part is worth another try in this run."""
    return judge(reply.status) == AGAIN and (reply.retry_after_s or 0.0) <= retry_after_s_max


def wait_s(reply: Reply, tries: int, backoff_s_max: float, chance: float) -> float:
    """How long to wait after so many tries: twice as long each time, and never less than the destination asked for.

    `chance` is in [0, 1): parts that failed together do not come back together.
    """
    # The exponent is bounded so that any number of tries can be counted.
    longest = min(backoff_s_max, BACKOFF_S_FIRST * 2.0 ** min(tries - 1, 60))
    return max(reply.retry_after_s or 0.0, longest * (0.5 + chance / 2))


def retry_after_s(value: str | None, date: str | None, now: datetime) -> float | None:
    """Seconds that Retry-After asks for, at least 0; None if it is not there or cannot be understood.

    A time is compared with the answer's own Date, if it has one: clocks differ between machines.
    """
    if value is None:
        return None
    if _SECONDS.fullmatch(value.strip()):
        return float(value)
    until = _moment(value)
    if until is None:
        return None
    return max(0.0, (until - (_moment(date) or now)).total_seconds())


def _moment(value: str | None) -> datetime | None:
    try:
        moment = parsedate_to_datetime(value or "")
        # A date without a zone is UTC, like every date of HTTP.
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


# ── the wire ──


def address(url: str, table: str) -> str:
    return url.replace("{table}", quote(table, safe=""))


def place(url: str) -> str:
    """An address for errors: without what follows the path, where some endpoints want a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def headers(unit: Unit, part: Part, version: str, expected: str | None = None, *, skip: bool = False) -> dict[str, str]:
    """Everything but the token; the same at every try. `expected`: who took the parts before this one.

    `skip`: the rows of the part are given up, and the body is empty.
    """
    compression = unit.rules.compression
    return {
        "Content-Type": "application/x-ndjson",
        **({} if compression == "none" else {"Content-Encoding": compression}),
        # The answer is looked at as it comes: only its beginning is wanted.
        "Accept-Encoding": "identity",
        "Idempotency-Key": unit.part_key(part.first, part.last),
        "Floodmark-Sender": unit.sender,
        "Floodmark-Epoch": str(unit.epoch),
        "Floodmark-Unit": unit.range,
        "Floodmark-Part": f"{part.first}-{part.last}",
        "Floodmark-Unit-Id": unit.id,
        **({} if unit.after is None else {"Floodmark-After": unit.after}),
        "Floodmark-Key": ",".join(quote(column, safe="") for column in unit.key),
        **({} if expected is None else {"Floodmark-Expect": expected}),
        **({"Floodmark-Skip": "true"} if skip else {}),
        "User-Agent": f"floodmark/{version}",
    }


def compress(data: bytes, compression: str) -> bytes:
    """The same bytes for the same bytes: no time, no name, a fixed level."""
    if compression == "gzip":
        return gzip.compress(data, GZIP_LEVEL, mtime=0)
    if compression == "zstd":
        return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)
    if compression == "none":
        return data
    raise Corrupt("a unit's compression is unknown", compression=compression)


def hide(text: str, secrets: Iterable[str]) -> str:
    """An answer's beginning, without the secrets that it may repeat."""
    for secret in secrets:
        # As it is, in a JSON text that escapes slashes, in an address.
        for form in (secret, secret.replace("/", "\\/"), quote(secret, safe="")):
            text = text.replace(form, "…")
    # Signs that a screen or a database cannot take are shown as one that says so.
    shown = "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)
    return shown[:ANSWER_CHARACTERS_MAX]


# ── parts ──


@dataclass(frozen=True)
class Parcel:
    """A part and its text, one line per row; `body` is the first row of the body that it was cut from."""

    part: Part
    data: bytes
    deletions: int
    body: int
    # Its only row has no form as JSON, and why: it is set aside, never sent.
    problem: str | None = None
    # Why its rows are given up: a lake is asked to pass them, and no row is sent.
    skip: str | None = None
    # It was accepted before, and is sent again to see whether the endpoint works.
    is_control: bool = False

    @property
    def rows(self) -> int:
        return self.part.last - self.part.first

    @property
    def name(self) -> str:
        return f"{self.part.first}-{self.part.last}"


def halve(parcel: Parcel) -> list[Parcel]:
    """A part of several rows as two: rows, order and bytes are the same."""
    lines = parcel.data.split(b"\n")
    if lines.pop() or len(lines) != parcel.rows or parcel.rows < 2:
        raise Corrupt("a part's text does not have one line per row", part=parcel.name, lines=len(lines))
    middle = parcel.rows // 2
    return [
        _parcel(parcel.part.first, lines[:middle], parcel.body),
        _parcel(parcel.part.first + middle, lines[middle:], parcel.body),
    ]


def _parcel(first: int, lines: list[bytes], body: int) -> Parcel:
    data = b"".join(line + b"\n" for line in lines)
    deletions = sum(json.loads(line).get(CHANGE_COLUMN) == DELETE for line in lines)
    return Parcel(Part(first, first + len(lines), hashlib.sha256(data).hexdigest()), data, deletions, body)


def reason(reply: Reply) -> str:
    """Why a row is in quarantine."""
    status = "no answer" if reply.status is None else str(reply.status)
    return f"{status}: {reply.text}" if reply.text else status


# ── the end of a run ──


def failure(
    reply: Reply, tries: int, retry_after_s_max: float, facts: dict[str, Any], advice: str = ""
) -> FloodmarkError:
    """The error that a part ends the run with; what is acknowledged stays so, the next run sends the rest.

    `advice`: what to do if it is the part, not the endpoint.
    """
    verdict = judge(reply.status)
    next_run = f"{_NEXT_RUN} {advice}".strip()
    if reply.status is None:
        facts = {**facts, "tries": tries, "cause": reply.text}
        return Unavailable("the endpoint does not answer", advice=next_run, **facts)
    facts = {**facts, "status": reply.status, "tries": tries, "answer": reply.text or None}
    if verdict == UNAUTHORIZED:
        advice = (
            "Put one that it accepts where token_env or token_file of the sink says; the next run goes on from here."
        )
        return Unavailable("the endpoint does not accept the token", advice=advice, **facts)
    if verdict == WRONG:
        advice = "Check the sink's url, and what the token may do; no row was set aside."
        return Invalid("the endpoint does not take rows like this", advice=advice, **facts)
    if not asks_again(reply, retry_after_s_max):
        facts |= {"retry_after_s": reply.retry_after_s, "retry_after_s_max": retry_after_s_max}
        advice = "Run the sink again after that time; it goes on from here."
        return Unavailable("the endpoint asks for more patience than a run has", advice=advice, **facts)
    if reply.retry_after_s:
        facts |= {"retry_after_s": reply.retry_after_s}
    return Unavailable("the endpoint did not take a part", advice=next_run, **facts)


def way_out(sink: str, part: str, *, may_split: bool) -> str:
    """What an operator can do about a part that fails at every try although the endpoint is well."""
    by_hand = f"`floodmark sink quarantine add {sink!r} --part {part}` sets its rows aside"
    if may_split:
        return f"If the endpoint is well and only this part fails: {by_hand}."
    return (
        f"If the endpoint is well and only this part fails: `floodmark sink set {sink!r} --set split_unanswered=true`"
        f" lets the sink find the row by halving (its rows may then arrive twice), or {by_hand}."
    )


def no_word(said: str, rows: int, wait_s: float | None, facts: dict[str, Any]) -> Unavailable:
    """Rows that were sent again got no word about them, and are back in quarantine: their unit is over."""
    if wait_s:
        facts = {**facts, "retry_after_s": wait_s}
    return Unavailable(
        "the endpoint gave no answer about the rows that were sent again",
        advice=(
            "They are in quarantine as before, with the reason that they had;"
            f" `floodmark sink quarantine retry {facts['sink']!r}` sends them again once the endpoint works."
        ),
        rows=rows,
        answer=said,
        **facts,
    )


def cannot_pass(reply: Reply, facts: dict[str, Any]) -> Unavailable:
    return Unavailable(
        "the lake at the other end does not know how to pass a row by",
        advice="Upgrade Floodmark there; the next run asks again. Nothing was set aside.",
        status=reply.status,
        answer=reply.text or None,
        **facts,
    )


def too_many_in_all(quarantined: int, quarantine_total_max: int, facts: dict[str, Any]) -> Invalid:
    """The quarantine is full: nothing more is set aside until an operator empties it or raises the limit."""
    return Invalid(
        "the quarantine of this sink is full",
        advice=(
            f"`floodmark sink quarantine list {facts['sink']!r}` shows the rows; send them again with `retry`, let them"
            " go with `drop`, or raise quarantine_total_max. The unit stays open; the next run goes on from here."
        ),
        quarantined=quarantined,
        quarantine_total_max=quarantine_total_max,
        **facts,
    )


def too_many_refused(reply: Reply, quarantine_max: int, facts: dict[str, Any]) -> Invalid:
    """So many bad rows are not bad rows."""
    return Invalid(
        "the endpoint refuses more rows of this unit than a sink sets aside",
        advice=(
            "This looks like a wrong address or shape, not like bad rows: check the sink's url and columns, or raise"
            " quarantine_max. The unit stays open; the next run goes on from here."
        ),
        quarantine_max=quarantine_max,
        status=reply.status,
        answer=reply.text or None,
        **facts,
    )


_NEXT_RUN = "Nothing is lost: the next run sends the parts that are not acknowledged, under the same keys."
