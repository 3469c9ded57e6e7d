"""What to do about an HTTP answer, and how a part looks on the wire: decisions and texts without I/O.

If a destination refuses the contents of a part (400, 413, 422), the part is halved, down to the bad rows. If it cannot
accept now (408, 409, 425, 429, 5xx, no answer), the part is sent again under the same key, because it is unknown
whether the destination stored it (I13). A part that gets no answer about its rows at every try (408, 5xx, no answer)
while others are accepted is suspect; http/suspects.py decides when to halve it. Any other answer is about the
address or the caller, not about rows: the run ends, and no row is set aside. An answer may repeat what was sent, so
texts pass `hide` before they are shown (I18).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeAlias
from urllib.parse import quote, urlsplit

import zstandard

from floodmark.catalog.unit import Part, Unit
from floodmark.errors import Corrupt, FloodmarkError, Invalid, Unavailable
from floodmark.rows.reading.changes import CHANGE_COLUMN, DELETE

DELIVERED, AGAIN, REFUSED, UNAUTHORIZED, WRONG = "delivered", "again", "refused", "unauthorized", "wrong"
_AGAIN = frozenset({408, 409, 425, 429})
_REFUSED = frozenset({400, 413, 422})
# No answer about the rows: they may have arrived, or the destination may fail on one of them each time.
_UNANSWERED = frozenset({408})
TOO_LARGE = 413
# The destination is another lake than the sender expects, and accepted nothing.
STRANGER = 412

BACKOFF_S_FIRST = 0.25
# How much of an answer is kept: enough to see the problem, little enough for an error and a row of the quarantine.
ANSWER_CHARACTERS_MAX = 500
GZIP_LEVEL = 6
ZSTD_LEVEL = 3
# The names and values that an error shows.
Facts: TypeAlias = Mapping[str, str | float | None]
_SECONDS = re.compile(r"\d+(\.\d+)?", re.ASCII)


@dataclass(frozen=True)
class Reply:
    """The answer to one request; without a status there was none, and `text` has the reason."""

    status: int | None
    text: str = ""
    # The pause that the destination asked for; None if it asked for none, or in a form that cannot be parsed.
    retry_after_s: float | None = None
    # Who answered, if the destination identified itself.
    destination: str | None = None
    # The newest unit that a lake has of this sender, if that is the reason why it accepted nothing.
    newest: ReportedUnit | None = None


@dataclass(frozen=True)
class ReportedUnit:
    """The newest unit of a sender at a lake; without a unit the lake has none, or cannot identify it."""

    epoch: int = 0
    until: int | None = None
    unit: str | None = None


def newest_unit(text: str | None) -> ReportedUnit | None:
    """The newest unit that an answer reports; None if it reports none."""
    if text is None:
        return None
    parts = text.split()
    if len(parts) == 3 and parts[0].isdecimal() and parts[1].isdecimal():
        return ReportedUnit(int(parts[0]), int(parts[1]), None if parts[2] == "-" else parts[2])
    return ReportedUnit()


def judge(status: int | None) -> str:
    """What an answer means; None: there was no answer."""
    if status is None or status in _AGAIN or 500 <= status <= 599:
        return AGAIN
    if 200 <= status <= 299:
        return DELIVERED
    if status in _REFUSED:
        return REFUSED
    return UNAUTHORIZED if status == 401 else WRONG


def unanswered(status: int | None) -> bool:
    """Whether the fate of the part is unknown: the destination failed, or did not answer."""
    return status is None or status in _UNANSWERED or 500 <= status <= 599


def asks_again(reply: Reply, retry_after_s_max: float) -> bool:
    """Whether the same part is worth another try in this run."""
    return judge(reply.status) == AGAIN and (reply.retry_after_s or 0.0) <= retry_after_s_max


def wait_s(reply: Reply, tries: int, backoff_s_max: float, chance: float) -> float:
    """How long to wait after so many tries: doubled each time, and never less than the destination asked for.

    `chance` is in [0, 1): parts that failed together are not sent again together.
    """
    # The exponent is bounded, so any number of tries is safe.
    longest = min(backoff_s_max, BACKOFF_S_FIRST * 2.0 ** min(tries - 1, 60))
    return max(reply.retry_after_s or 0.0, longest * (0.5 + chance / 2))


def retry_after_s(value: str | None, date: str | None, now: datetime) -> float | None:
    """Seconds that Retry-After asks for, at least 0; None if it is absent or cannot be parsed.

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
    """An address for errors: without the part after the path, where some endpoints expect a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def headers(unit: Unit, part: Part, version: str, expected: str | None = None, *, skip: bool = False) -> dict[str, str]:
    """All headers except the token; the same at every try. `expected`: the destination that accepted the earlier parts.

    `skip`: the rows of the part are given up, and the body is empty.
    """
    compression = unit.rules.compression
    return {
        "Content-Type": "application/x-ndjson",
        **({} if compression == "none" else {"Content-Encoding": compression}),
        # The answer is read uncompressed: only its beginning is needed.
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
    """The same output for the same input: no time, no name, a fixed level."""
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
        # In plain form, in a JSON text that escapes slashes, and in an address.
        for form in (secret, secret.replace("/", "\\/"), quote(secret, safe="")):
            text = text.replace(form, "…")
    # Characters that a screen or a database cannot show become a replacement character.
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
    # Why its only row cannot be written as JSON: it is set aside, never sent.
    problem: str | None = None
    # Why its rows are given up: a lake is asked to skip them, and no row is sent.
    skip: str | None = None
    # It was accepted before, and is sent again to test whether the endpoint works.
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


def failure(reply: Reply, tries: int, retry_after_s_max: float, facts: Facts, advice: str = "") -> FloodmarkError:
    """The error with which a part ends the run; acknowledged parts stay so, the next run sends the rest.

    `advice`: what to do if the part is to blame, not the endpoint.
    """
    verdict = judge(reply.status)
    next_run = f"{_NEXT_RUN} {advice}".strip()
    if reply.status is None:
        facts = {**facts, "tries": tries, "cause": reply.text}
        return Unavailable("the endpoint does not answer", advice=next_run, **facts)
    facts = {**facts, "status": reply.status, "tries": tries, "answer": reply.text or None}
    if verdict == UNAUTHORIZED:
        advice = "Correct the token that token_env or token_file of the sink names; the next run continues from here."
        return Unavailable("the endpoint does not accept the token", advice=advice, **facts)
    if verdict == WRONG:
        advice = "Check the sink's url, and what the token may do; no row was set aside."
        return Invalid("the endpoint does not take rows like this", advice=advice, **facts)
    if not asks_again(reply, retry_after_s_max):
        facts = {**facts, "retry_after_s": reply.retry_after_s, "retry_after_s_max": retry_after_s_max}
        advice = "Run the sink again after that time; it continues from here."
        return Unavailable("the endpoint asks for a longer pause than a run waits", advice=advice, **facts)
    if reply.retry_after_s:
        facts = {**facts, "retry_after_s": reply.retry_after_s}
    return Unavailable("the endpoint did not take a part", advice=next_run, **facts)


def part_advice(sink: str, part: str, *, may_split: bool) -> str:
    """What an operator can do about a part that fails at every try although the endpoint works."""
    by_hand = f"`floodmark sink quarantine add {sink!r} --part {part}` sets its rows aside"
    if may_split:
        return f"If the endpoint is well and only this part fails: {by_hand}."
    return (
        f"If the endpoint is well and only this part fails: `floodmark sink set {sink!r} --set split_unanswered=true`"
        f" lets the sink find the row by halving (its rows may then arrive twice), or {by_hand}."
    )


def no_answer(said: str, rows: int, wait_s: float | None, facts: Facts) -> Unavailable:
    """Rows that were sent again got no answer about them, and are back in quarantine: their unit is settled."""
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


def cannot_skip(reply: Reply, facts: Facts) -> Unavailable:
    return Unavailable(
        "the lake at the other end cannot skip a row",
        advice="Upgrade Floodmark there; the next run asks again. Nothing was set aside.",
        status=reply.status,
        answer=reply.text or None,
        **facts,
    )


def too_many_in_all(quarantined: int, quarantine_total_max: int, facts: Facts) -> Invalid:
    """The quarantine is full: nothing more is set aside until an operator empties it or raises the limit."""
    return Invalid(
        "the quarantine of this sink is full",
        advice=(
            f"`floodmark sink quarantine list {facts['sink']!r}` shows the rows; send them again with `retry`, let them"
            " go with `drop`, or raise quarantine_total_max. The unit stays open; the next run continues from here."
        ),
        quarantined=quarantined,
        quarantine_total_max=quarantine_total_max,
        **facts,
    )


def too_many_refused(reply: Reply, quarantine_max: int, facts: Facts) -> Invalid:
    """With so many refused rows, the cause is not the rows."""
    return Invalid(
        "the endpoint refuses more rows of this unit than a sink sets aside",
        advice=(
            "This looks like a wrong address or shape, not like bad rows: check the sink's url and columns, or raise"
            " quarantine_max. The unit stays open; the next run continues from here."
        ),
        quarantine_max=quarantine_max,
        status=reply.status,
        answer=reply.text or None,
        **facts,
    )


_NEXT_RUN = "Nothing is lost: the next run sends the parts that are not acknowledged, under the same keys."
