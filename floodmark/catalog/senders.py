"""What other lakes sent: per sender and destination table the newest epoch, its mark, and the parts received.

Written in the publish of the rows, so that the table has a part exactly when this records it. A sender opens a unit
(since, until] only after every part of the one before was acknowledged or given up, and its epochs only rise: so the
newest unit's ranges and the mark below it are enough to detect every duplicate for ever, however late it arrives (I9).
A sender names its unit, and the one before it. So a sender whose catalog was rolled back, which assigns the same ranges
again for other rows, and a record here that was rolled back, are refused instead of taken for known.

1. the sender sends part P of unit 1, gets no reply, sends it again, gets an acknowledgement, and goes on with unit 2
2. the first copy of P, delayed in the network, arrives now
A ledger of keys with a window may have forgotten P; here unit 1 ends at or below the mark, so P is known.

A sender that never gets a reply for a row gives it up: it asks that the row's range counts as skipped. Either the table
has the row already, and the reply reports it, or the range is closed: a copy that arrives late is refused. So a row
that a sender quarantines and sends again later, in another lane, is in the table once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise

from sqlalchemy import Connection, and_, delete, insert, select

from floodmark.catalog import tables
from floodmark.catalog.database import SqlRow
from floodmark.catalog.riders import AlreadyCommitted
from floodmark.errors import Conflict
from floodmark.json_form import Json

Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class NewestUnit:
    """The newest unit of a sender that this lake has."""

    epoch: int
    until: int
    unit: str


class OtherUnit(Conflict):
    """The sender's units and those of this lake do not follow each other. Nothing was taken."""

    newest: NewestUnit | None = None

    @property
    def kind(self) -> str:
        return Conflict.__name__


@dataclass(frozen=True)
class SenderRider:
    """One part, the rows [first, last) of the unit (since, until], is published into a table once."""

    sender: str
    table_id: str
    epoch: int
    since: int
    until: int
    first: int
    last: int
    # The unit's identity, and that of the one before it that delivered rows; an older sender does not send them.
    unit: str | None = None
    after: str | None = None
    # The sender gives these rows up: none of them is accepted, now or later.
    skip: bool = False

    def check(self, tx: Connection) -> None:
        row = self._row(tx)
        if self.unit is not None and (row is None or row.unit is not None or row.epoch < self.epoch):
            self._check_unit(row)
            return
        if row is None or self.epoch > row.epoch:
            return
        if self.epoch < row.epoch:
            raise self._refused("this sender has begun a newer epoch", epoch_newest=row.epoch)
        if self.until <= row.mark:
            raise AlreadyCommitted(row.version)
        if (self.since, self.until) == (row.since, row.until):
            self._check_skipped(_ranges(row.skipped))
            self._check_part(_ranges(row.ranges), row.version)
        elif self.since < row.until:
            raise self._refused("this sender is at another unit", unit_newest=f"{row.since}..{row.until}")

    def _check_unit(self, row: SqlRow | None) -> None:
        """Accept this lake's newest unit, or the one that follows it, or the first of a newer epoch."""
        newest = None if row is None or row.epoch < self.epoch else row
        if newest is not None and newest.epoch == self.epoch and newest.unit == self.unit:
            self._check_skipped(_ranges(newest.skipped))
            self._check_part(_ranges(newest.ranges), newest.version)
        elif newest is None and self.after is not None:
            raise self._other_unit("this sender's last unit is not in this lake any more", row)
        elif newest is not None and (newest.epoch > self.epoch or newest.unit != self.after):
            raise self._other_unit("this lake has another unit of this sender than the one before this unit", row)

    def _check_skipped(self, skipped: Ranges) -> None:
        if not self.skip and any(self.first < last and first < self.last for first, last in skipped):
            raise self._refused("the sender gave up some rows of this part", part=f"{self.first}-{self.last}")

    def _check_part(self, there: Ranges, version: int) -> None:
        if any(first <= self.first and self.last <= last for first, last in there):
            raise AlreadyCommitted(version)
        if any(self.first < last and first < self.last for first, last in there):
            raise self._refused("this lake has only some rows of this part", part=f"{self.first}-{self.last}")

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row, part = self._row(tx), (self.first, self.last)
        if row is not None and (row.epoch, row.since, row.until) != (self.epoch, self.since, self.until):
            row = None
        if row is not None and row.unit not in (None, self.unit):
            row = None
        received, skipped = ([], []) if row is None else (_ranges(row.ranges), _ranges(row.skipped))
        key = (tables.senders.c.sender == self.sender, tables.senders.c.table_id == self.table_id)
        tx.execute(delete(tables.senders).where(*key))
        tx.execute(
            insert(tables.senders).values(
                sender=self.sender,
                table_id=self.table_id,
                epoch=self.epoch,
                # Every earlier part of this epoch was acknowledged, or this unit would not be open.
                mark=self.since,
                since=self.since,
                until=self.until,
                ranges=json.dumps(_joined([*received, part])),
                unit=self.unit,
                skipped=json.dumps(_joined([*skipped, *([part] if self.skip else [])])),
                version=version,
                updated_ms=now_ms,
            )
        )

    def _row(self, tx: Connection) -> SqlRow | None:
        table = tables.senders
        query = select(table).where(table.c.sender == self.sender, table.c.table_id == self.table_id)
        return tx.execute(query).first()

    def _other_unit(self, message: str, row: SqlRow | None) -> OtherUnit:
        error = OtherUnit(
            message,
            sender=self.sender,
            epoch=self.epoch,
            unit=self.unit,
            after=self.after,
            advice="The catalog of the sender or of this lake was rolled back: decide at the sender what to send.",
        )
        error.newest = None if row is None else NewestUnit(row.epoch, row.until, row.unit or "")
        return error

    def _refused(self, message: str, **facts: str | int) -> Conflict:
        return Conflict(
            message,
            sender=self.sender,
            epoch=self.epoch,
            unit=f"{self.since}..{self.until}",
            **facts,
            advice="Only the newest unit of the newest epoch is accepted. Does a copy of the sending lake run?",
        )

    def as_dict(self) -> dict[str, Json]:
        return {"type": "sender", **asdict(self)}


def is_skipped(tx: Connection, part: SenderRider) -> bool:
    """Whether the sender gave up these rows of its newest unit."""
    table = tables.senders
    mine = and_(table.c.sender == part.sender, table.c.table_id == part.table_id)
    unit = and_(table.c.epoch == part.epoch, table.c.since == part.since, table.c.until == part.until)
    found = tx.execute(select(table.c.skipped).where(mine, unit)).scalar()
    return any(first <= part.first and part.last <= last for first, last in _ranges(found))


def _ranges(text: str | None) -> Ranges:
    return [(int(first), int(last)) for first, last in json.loads(text or "[]")]


def _joined(ranges: Ranges) -> Ranges:
    """The same rows in the fewest ranges, ascending; they do not overlap."""
    ordered = sorted(ranges)
    if not ordered:
        return []
    starts = [ordered[0][0], *(here[0] for before, here in pairwise(ordered) if before[1] != here[0])]
    ends = [*(before[1] for before, here in pairwise(ordered) if before[1] != here[0]), ordered[-1][1]]
    return list(zip(starts, ends, strict=True))
