"""The identity headers of a request: the sender, its part, and the client's own key. Pure, strict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from floodmark.commit.intent import BATCH_CHARACTERS_MAX
from floodmark.errors import Conflict, Invalid
from floodmark.ingest.receive import Sender

SENDER, EPOCH, UNIT, PART = "Floodmark-Sender", "Floodmark-Epoch", "Floodmark-Unit", "Floodmark-Part"
# The identities of the unit and of the unit before it; in an answer, the newest unit here: epoch, until, identity.
UNIT_ID, AFTER, NEWEST = "Floodmark-Unit-Id", "Floodmark-After", "Floodmark-Newest"
# The sender gives the rows of this part up; the body is empty.
SKIP = "Floodmark-Skip"
KEY = "Idempotency-Key"
# The lake and table that answer, and those that the sender expects, as an earlier answer reported them.
DESTINATION, EXPECT = "Floodmark-Destination", "Floodmark-Expect"
TABLE_KEY = "Floodmark-Key"
_EPOCH = re.compile(r"(\d{1,19})", re.ASCII)
_UNIT = re.compile(r"(-?\d{1,19})\.\.(-?\d{1,19})", re.ASCII)
_ID = re.compile(r"[0-9A-Z]{26}", re.ASCII)
_PART = re.compile(r"(\d{1,19})-(\d{1,19})", re.ASCII)


class WrongHeader(Invalid):
    @property
    def kind(self) -> str:
        return Invalid.__name__  # the name that callers know


class OtherKey(Conflict):
    """Not to be halved or sent again: no row of the table fits."""

    @property
    def kind(self) -> str:
        return Conflict.__name__


class Stranger(Conflict):
    """The sender means another lake or table; its marks are kept there, if anywhere. Nothing was taken."""

    def __init__(self, expected: str, destination: str) -> None:
        self.destination = destination
        super().__init__(
            "the sender expects another lake or table than this one",
            expected=expected[:200],
            destination=destination,
            advice="This one was created again, or restored from a backup. Decide at the sender what to send.",
        )

    @property
    def kind(self) -> str:
        return Conflict.__name__


@dataclass(frozen=True)
class Claim:
    """The identity of what comes: a sender's part, else a client's key, else none."""

    sender: Sender | None = None
    key: str | None = None


def check_once(names: Sequence[str]) -> None:
    """Refuse two identities: it would be unknown which one counts. `names`: of all headers, as often as they occur."""
    given = [name.lower() for name in names]
    for one in (SENDER, EPOCH, UNIT, PART, UNIT_ID, AFTER, SKIP, KEY, EXPECT, TABLE_KEY):
        if given.count(one.lower()) > 1:
            raise WrongHeader("duplicate header", header=one)


def read_claim(headers: Mapping[str, str]) -> Claim:
    """The claim of these headers, whose names are compared without case; a sender's part overrides a key."""
    found = {name: headers[name] for name in (SENDER, EPOCH, UNIT, PART) if name in headers}
    if not found:
        return Claim(key=_key(headers.get(KEY)))
    missing = [name for name in (SENDER, EPOCH, UNIT, PART) if name not in found]
    if missing:
        raise WrongHeader("a sender must send all of its headers together", missing=", ".join(missing))
    (epoch,) = _numbers(EPOCH, found[EPOCH], _EPOCH)
    since, until = _numbers(UNIT, found[UNIT], _UNIT)
    first, last = _numbers(PART, found[PART], _PART)
    try:
        ids = (_id(UNIT_ID, headers), _id(AFTER, headers))
        return Claim(Sender(found[SENDER], epoch, since, until, first, last, *ids, skip=SKIP in headers))
    except Invalid as error:
        raise WrongHeader(error.message, **error.facts) from error


def check_expected(headers: Mapping[str, str], destination: str, key: Sequence[str]) -> None:
    """Check that a sink's rows are for this lake and table, and that both define a row in the same way."""
    if headers.get(EXPECT, destination) != destination:
        raise Stranger(headers[EXPECT], destination)
    if TABLE_KEY not in headers:
        return
    columns = [unquote(name) for name in headers[TABLE_KEY].split(",") if name]
    if sorted(columns) != sorted(key):
        raise OtherKey(
            "the table has another key than the table that the rows come from",
            key=",".join(key) or "none",
            sender_key=",".join(columns) or "none",
            advice="Use a table with the same key; with another key, rows would wrongly replace each other.",
        )


def _numbers(name: str, text: str, form: re.Pattern[str]) -> tuple[int, ...]:
    match = form.fullmatch(text)
    if match is None:
        examples = {EPOCH: "3", UNIT: "17..42", PART: "0-5000"}
        raise WrongHeader("invalid header", header=name, value=text[:80], example=examples[name])
    return tuple(int(number) for number in match.groups())


def _id(name: str, headers: Mapping[str, str]) -> str | None:
    text = headers.get(name)
    if text is not None and _ID.fullmatch(text) is None:
        raise WrongHeader("invalid header", header=name, value=text[:80])
    return text


def _key(key: str | None) -> str | None:
    if key is not None and not (0 < len(key) <= BATCH_CHARACTERS_MAX and key.isascii() and key.isprintable()):
        raise WrongHeader("invalid header", header=KEY, value=repr(key)[:80])
    return key
