"""A unit: what a sink takes in one go, sealed before its first effect outside (I8).

Everything that decides its rows, their order, its parts, their names and bytes is in this record, written down before
anything is sent: a retry reproduces it, whatever was appended, compacted, expired or set otherwise meanwhile. Names
are made of ids, not of names: the lake's incarnation, the sink's id, the epoch, the table's id and the range. So a sink
that is removed and made again, a table that is made again, a lake that is restored from a backup: none of them can be
taken for the one that was there before. A catalog that was rolled back by a copy or a snapshot gives the same epochs
and ranges again, for other rows: so the unit's random id is its identity, for keys and for who keeps what was sent.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from floodmark.errors import Corrupt, FloodmarkError

# How rows become bytes. A change of the text or order of rows raises it, and units of the older number are refused.
ENCODER = 1
# The lanes of a sink: what is new in a table, and rows of its quarantine that are sent again.
ROWS, RETRY = "rows", "retry"
SEALED, ACKNOWLEDGED, QUARANTINED = "sealed", "acknowledged", "quarantined"


@dataclass(frozen=True)
class Rules:
    """How a unit's rows are chosen, put into parts and written: the sink's settings when the unit was opened."""

    columns: tuple[str, ...] | None = None
    where: str | None = None
    format: str = "ndjson"
    compression: str = "none"
    part_rows: int = 5_000
    part_bytes: int = 4 * 1024 * 1024
    encoder: int = ENCODER


@dataclass(frozen=True)
class Unit:
    """The rows of one table with a sequence in (since, until], as they are at `version`, for one sink.

    `id` tells it from every other unit, also from one of a catalog that was rolled back.
    """

    id: str
    lake: str
    sink: str
    sink_id: str
    epoch: int
    table: str
    table_id: str
    version: int
    since: int
    until: int
    rules: Rules
    lane: str = ROWS
    # The columns of the table's key: whoever takes the rows must mean the same by a row.
    key: tuple[str, ...] = ()
    # The last unit of this epoch before this one that brought rows: what the destination has to end with.
    after: str | None = None

    @property
    def sender(self) -> str:
        """Who sends, for a receiver that keeps marks: the same in every epoch and unit of one sink, table and lane."""
        return f"{self.lake}/{self.sink_id}/{self.table_id}/{self.lane}"

    @property
    def range(self) -> str:
        return f"{self.since}..{self.until}"

    def part_key(self, first: int, last: int) -> str:
        """The idempotency key of the part that holds the rows [first, last): the same at every try."""
        return f"fm-{hashlib.sha256(f'{self.id}/{first}-{last}'.encode()).hexdigest()}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Unit:
        try:
            values: dict[str, Any] = json.loads(text)
            rules = dict(values.pop("rules"))
            columns = rules.pop("columns")
            key = tuple(values.pop("key"))
            unit = cls(**values, key=key, rules=Rules(columns=None if columns is None else tuple(columns), **rules))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Corrupt("the record of a unit cannot be understood", cause=error) from error
        if unit.rules.encoder != ENCODER:
            raise Corrupt(
                "a unit was opened by another Floodmark, whose rows have another form",
                unit=unit.id,
                encoder=unit.rules.encoder,
                encoder_known=ENCODER,
                advice="Finish it with that version, or open a new epoch with `floodmark sink replay`.",
            )
        return unit


@dataclass(frozen=True)
class Part:
    """A part of a unit in the catalog: [first, last) counts rows (HTTP) or groups of source files (files).

    `digest` is of the bytes before compression; a part that is made again and differs is never sent.
    """

    first: int
    last: int
    digest: str = ""
    state: str = SEALED
    # What the destination wrote for it, as JSON; for readers of the unit's end only.
    detail: str = ""


@dataclass(frozen=True)
class Shipped:
    """What one try of a unit brought to its destination; what earlier tries brought is in the unit's parts."""

    rows: int = 0
    deletions: int = 0
    size_bytes: int = 0
    parts: int = 0
    quarantined: int = 0
    # Rows that were sent again are back in quarantine without an answer: the unit is settled, and the run failed.
    error: FloodmarkError | None = None


@dataclass(frozen=True)
class Settled:
    """A unit that is at its destination, by the catalog."""

    id: str
    since: int
    until: int


class UnitLog(Protocol):
    """A unit's parts in the catalog, durable before this returns.

    Every call raises Fenced if the run does not hold the sink any more, and Stopped if the sink was paused.
    """

    def parts(self) -> list[Part]:
        """All parts so far, by `first`."""

    def destination(self) -> str | None:
        """Who was at the other end until now, in its own words; None if nobody said so yet."""

    def settled_until(self) -> int | None:
        """The end of the unit that was settled last in this epoch; ranges without rows may have been passed since."""

    def settled_units(self) -> list[Settled]:
        """The newest units of this epoch that were settled and brought rows, newest first."""

    def knows(self, unit: str, epoch: int) -> bool:
        """Whether this catalog has a unit on record that the destination says it has.

        If not, its epoch is remembered: a replay opens a newer one.
        """

    def seal(self, parts: list[Part]) -> None:
        """Write boundaries and digests down, before a part is sent."""

    def acknowledge(self, parts: list[Part], destination: str | None = None) -> None:
        """The destination has these (same first and last as sealed; `detail` is stored). `destination`: who it is.

        If it is somebody else than at the last acknowledgement, this raises Corrupt, and nothing is recorded.
        """

    def quarantined(self) -> int:
        """How many rows of the sink are set aside, of all its tables and units."""

    def body_bytes_max(self) -> int | None:
        """The largest body that the destination takes, as far as it said so; before compression."""

    def remember_bytes_max(self, size_bytes: int) -> None:
        """The destination refused a larger body than this: for later parts, in this run and in others."""

    def note(self, part: Part) -> None:
        """Store the detail of a part that is sealed and not done."""

    def split(self, whole: Part, halves: list[Part], *, doubtful: int = 0) -> None:
        """A part becomes two, both sealed, in one transaction. `doubtful`: rows of it that may arrive twice now."""

    def quarantine(
        self, part: Part, data: bytes, reason: str | None, *, doubtful: int = 0, passed: bool = False
    ) -> None:
        """A part is set aside for good: its rows are kept with the reason, one by one. `passed`: a lake was asked to
        pass them, and has recorded the unit. Rows that were sent again keep the reason that they had if it is None."""


class Watch(Protocol):
    """The run that a unit is shipped by: who may stop it, and who wants to know how far it is."""

    def progress(self, rows: int, size_bytes: int) -> None:
        """So much more is done."""

    def check(self) -> None:
        """Raise Stopped if somebody wants this run to end now."""

    def wait(self, seconds: float) -> bool:
        """Sleep; True at once if somebody wants this run to end."""


class Stopped(Exception):
    """Somebody stopped the run or paused the sink. Not an error: the unit is resumed at its first open part."""
