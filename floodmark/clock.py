"""Time and identities, in one place so that transforms never ask for them by themselves.

Leases never use this clock: they use the database's (see catalog/database.py).
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from ulid import ULID

from floodmark.errors import Invalid


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def new_id(after: str | None = None) -> str:
    """A ULID: unique, and sorted by the time it was made; it sorts behind `after`, also if the clock went back.

    Its random part is always new: two copies of a catalog that go on from the same id must not give the same one.
    """
    made = ULID.from_timestamp(now_ms())
    if after is not None and str(made) <= after:
        made = ULID.from_timestamp(ULID.from_str(after).milliseconds + 1)
    return str(made)


def parse_time_ms(text: str | datetime) -> int:
    """Milliseconds since the epoch of an ISO 8601 time; a time without a zone is UTC."""
    if isinstance(text, datetime):
        moment = text
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError as error:
            raise Invalid(
                "invalid timestamp", value=repr(text), advice="Write it like 2026-11-15T10:00:00Z."
            ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|h|d|w)")


def parse_duration_ms(text: str) -> int:
    """Milliseconds of a span of time like 90d, 24h, 30m, 10s; w is a week."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise Invalid("invalid duration", value=repr(text), advice="Write it like 90d, 24h, 30m or 10s.")
    return int(found[1]) * _UNIT_MS[found[2]]


def format_time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
