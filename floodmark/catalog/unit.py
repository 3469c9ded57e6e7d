"""A unit: what a sink ships at once, sealed before its first effect outside (I8).

This record holds everything that decides the unit's rows, their order, its parts, their names and bytes, and is written
before anything is sent: a retry reproduces it, whatever was appended, compacted, expired or configured otherwise
meanwhile. Names are made of ids, not of names: the lake's incarnation, the sink's id, the epoch, the table's id and the
range. So a sink that is removed and created again, a table that is created again, a lake that is restored from a
backup: none of them can be taken for the earlier one. A catalog that was rolled back by a copy or a snapshot assigns
the same epochs and ranges again, for other rows: so the unit's random id is its identity, for keys and for destinations
that keep what was sent.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Protocol

from floodmark.errors import Corrupt, FloodmarkError

# How rows become bytes. A change of the text or order of rows raises it, and units of the older number are refused.
ENCODER = 1
# The lanes of a sink: new rows of a table, and rows of its quarantine that are sent again.
ROWS, RETRY = "rows", "retry"
SEALED, ACKNOWLEDGED, QUARANTINED = "sealed", "acknowledged", "quarantined"


@dataclass(frozen=True)
class Rules:
    """How a unit's rows are selected, split into parts and written: the sink's settings when the unit was opened."""

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

    `id` distinguishes it from every other unit, also from one of a catalog that was rolled back. `table` is the name
    under which it is shipped, whatever the table is called by now: its destination continues under that one.
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
    # The columns of the table's key: the receiver must identify rows by the same columns.
    key: tuple[str, ...] = ()
    # The last unit of this epoch before this one that delivered rows: the destination must end with it.
    after: str | None = None

    @property
    def sender(self) -> str:
        """The sender, for a receiver that keeps marks: the same in every epoch and unit of one sink, table and lane."""
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
            values = json.loads(text)
            rules = dict(values.pop("rules"))
            columns = rules.pop("columns")
            key = tuple(values.pop("key"))
            unit = cls(**values, key=key, rules=Rules(columns=None if columns is None else tuple(columns), **rules))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Corrupt("the record of a unit cannot be understood", cause=error) from error
        if unit.rules.encoder != ENCODER:
            raise Corrupt(
                "a unit was opened by another version of Floodmark, which formats rows differently",
                unit=unit.id,
                encoder=unit.rules.encoder,
                encoder_known=ENCODER,
                advice="Finish it with that version, or open a new epoch with `floodmark sink replay`.",
            )
        return unit


@dataclass(frozen=True)
class Part:
    """A part of a unit in the catalog: [first, last) counts rows (HTTP) or groups of source files (files).

    `digest` is of the bytes before compression; a part that is built again and differs is never sent.
    """

    first: int
    last: int
    digest: str = ""
    state: str = SEALED
    # What the destination wrote for it, as JSON; for readers of the unit's end only.
    detail: str = ""


@dataclass(frozen=True)
class Shipped:
    """What one try of a unit delivered; the unit's parts record what earlier tries delivered."""

    rows: int = 0
    deletions: int = 0
    size_bytes: int = 0
    parts: int = 0
    quarantined: int = 0
    # Rows that were sent again are back in quarantine without an answer: the unit is settled, and the run failed.
    error: FloodmarkError | None = None


@dataclass(frozen=True)
class Settled:
    """A unit that is at its destination, according to the catalog."""

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
        """The destination's identity until now, as it reported it; None if it has not yet."""

    def settled_until(self) -> int | None:
        """The end of the last settled unit of this epoch; ranges without rows may have been passed since."""

    def settled_units(self) -> list[Settled]:
        """The newest units of this epoch that were settled and delivered rows, newest first."""

    def knows(self, unit: str, epoch: int) -> bool:
        """Whether this catalog has a record of a unit that the destination reports to have.

        If not, its epoch is recorded: a replay opens a newer one.
        """

    def seal(self, parts: list[Part]) -> None:
        """Record boundaries and digests, before a part is sent."""

    def acknowledge(self, parts: list[Part], destination: str | None = None) -> None:
        """The destination has these (same first and last as sealed; `detail` is stored). `destination`: its identity.

        If that is not the identity of the last acknowledgement, this raises Corrupt, and nothing is recorded.
        """

    def quarantined(self) -> int:
        """How many rows of the sink are in quarantine, over all its tables and units."""

    def body_bytes_max(self) -> int | None:
        """The largest body that the destination accepts, as far as it reported one; before compression."""

    def remember_bytes_max(self, size_bytes: int) -> None:
        """The destination refused a larger body than this: for later parts, in this run and in others."""

    def note(self, part: Part) -> None:
        """Store the detail of a part that is sealed and not done."""

    def split(self, whole: Part, halves: list[Part], *, doubtful: int = 0) -> None:
        """Split a part in two, both sealed, in one transaction. `doubtful`: rows of it that may arrive twice now."""

    def quarantine(
        self, part: Part, data: bytes, reason: str | None, *, doubtful: int = 0, passed: bool = False
    ) -> None:
        """Quarantine a part for good: each of its rows is kept with the reason.

        `passed`: a receiving lake was asked to pass them, and has recorded the unit. Rows that were sent again keep
        their earlier reason if it is None.
        """


class Watch(Protocol):
    """The run that ships a unit: it may stop the unit, and receives its progress."""

    def progress(self, rows: int, size_bytes: int) -> None:
        """Add this to the progress."""

    def check(self) -> None:
        """Raise Stopped if this run should end now."""

    def wait(self, seconds: float) -> bool:
        """Sleep; returns True at once if this run should end."""
