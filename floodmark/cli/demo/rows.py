"""What goes into the demo's lake: made by number, so that what should be there is known without asking the lake. Pure.

Orders have ids of their own, whichever way they come; customers are written again and again, and the last word counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from floodmark.json_form import Json

if TYPE_CHECKING:
    from floodmark.backfill.chunks.geometry import Chunk

ORDERS = "id long not null, customer long, ts timestamp not null, amount decimal(10,2)"
CUSTOMERS = "id long not null, name string, visits long"
REQUESTS = 40
ORDERS_PER_REQUEST = 100
CUSTOMER_COUNT = 50
FILES = 6
ORDERS_PER_FILE = 200
# History: so many days, of which the oldest are beyond what the table is to keep.
DAYS = 20
DAYS_RETIRED = 5
ORDERS_PER_DAY = 300
KEEP_DAYS = 90
FILES_FROM, HISTORY_FROM = 1_000_000, 2_000_000
_FILE_KINDS = ("jsonl", "csv", "jsonl.gz")


@dataclass(frozen=True)
class Wanted:
    """What must be there in the end."""

    by_http: frozenset[int]
    by_files: frozenset[int]
    by_history: frozenset[int]
    retired: frozenset[int]
    customers: dict[int, int]

    @property
    def orders(self) -> frozenset[int]:
        return self.by_http | self.by_files | self.by_history


def wanted(today: datetime) -> Wanted:
    history = range(*(_history_id(day) for day in history_range(today)))
    return Wanted(
        by_http=frozenset(range(REQUESTS * ORDERS_PER_REQUEST)),
        by_files=frozenset(range(FILES_FROM, FILES_FROM + FILES * ORDERS_PER_FILE)),
        by_history=frozenset(history),
        retired=frozenset(history[: DAYS_RETIRED * ORDERS_PER_DAY]),
        customers={number: request for request in range(REQUESTS) for number in _visitors(request)},
    )


def orders(request: int) -> list[dict[str, Json]]:
    return _orders(request * ORDERS_PER_REQUEST, ORDERS_PER_REQUEST, today())


def customers(request: int) -> list[dict[str, Json]]:
    """Some customers, as they are at the time of a request: each comes in many requests, with one more visit."""
    return [{"id": number, "name": f"customer {number}", "visits": request} for number in _visitors(request)]


def _visitors(request: int) -> list[int]:
    return [number for number in range(CUSTOMER_COUNT) if (number + request) % 3]


def lines(rows: list[dict[str, Json]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def file_kind(number: int) -> str:
    return _FILE_KINDS[number % len(_FILE_KINDS)]


def file_text(number: int) -> str:
    """A file of orders, in the text of its kind before it is packed."""
    rows = _orders(FILES_FROM + number * ORDERS_PER_FILE, ORDERS_PER_FILE, today())
    if file_kind(number) != "csv":
        return lines(rows)
    return "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n"


def history_range(today: datetime) -> tuple[datetime, datetime]:
    """Days around the age at which rows go: the oldest are beyond it, the rest within."""
    first = today - timedelta(days=KEEP_DAYS + DAYS_RETIRED - 1)
    return first, first + timedelta(days=DAYS)


def retention_time(today: datetime) -> str:
    """When retention looks at the rows: orders of a day come at its beginning, and this is at noon."""
    return (today + timedelta(hours=12)).strftime("%Y-%m-%dT%H:%M:%SZ")


def history(chunk: Chunk) -> list[dict[str, Json]]:
    """The orders of one day: the source of the history backfill."""
    assert isinstance(chunk.start, datetime)
    return _orders(_history_id(chunk.start), ORDERS_PER_DAY, chunk.start)


def _history_id(day: datetime) -> int:
    return HISTORY_FROM + day.toordinal() * ORDERS_PER_DAY


def _orders(first: int, count: int, day: datetime) -> list[dict[str, Json]]:
    return [
        {
            "id": first + n,
            "customer": (first + n) % CUSTOMER_COUNT,
            "ts": (day + timedelta(seconds=n)).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "amount": f"{n}.50",
        }
        for n in range(count)
    ]


def today() -> datetime:
    return datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
