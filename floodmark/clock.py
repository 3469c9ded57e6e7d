"""Time and identities, in one place so that transforms never ask for them by themselves.

Leases never use this clock: they use the database's (see catalog/database.py).
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

from ulid import ULID

from floodmark.errors import Invalid


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def new_id() -> str:
    """A ULID: unique, and sorted by the time it was made."""
    return str(ULID())


def parse_time_ms(text: str | datetime) -> int:
    """Milliseconds since the epoch of an ISO 8601 time; a time without a zone is UTC."""
    if isinstance(text, datetime):
        moment = text
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError as error:
            raise Invalid(
                "this is not a time", value=repr(text), advice="Write it like 2026-11-15T10:00:00Z."
            ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def format_time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
