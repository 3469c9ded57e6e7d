"""What other lakes sent: per sender and destination table the newest epoch, its mark, and which parts are in.

Written in the publish of the rows, so that a part is in exactly when this says so. A sender opens a unit (since, until]
only after every part of the one before was acknowledged or given up, and its epochs only rise: so the newest unit's
ranges and the mark below it are enough to know every duplicate for ever, however late it comes (I9).

1. the sender sends part P of unit 1, hears nothing, sends it again, hears that it is in, and goes on with unit 2
2. the first copy of P, long on its way, arrives now
A ledger of keys with a window may have forgotten P; here unit 1 ends at or below the mark, so P is known.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from floodmark.catalog import tables
from floodmark.catalog.riders import AlreadyCommitted
from floodmark.errors import Conflict

Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class SenderRider:
    """One part, the rows [first, last) of the unit (since, until], comes into a table once."""

    sender: str
    table_id: str
    epoch: int
    since: int
    until: int
    first: int
    last: int

    def check(self, tx: Connection) -> None:
        row = self._row(tx)
        if row is None or self.epoch > row.epoch:
            return
        if self.epoch < row.epoch:
            raise self._refused("this sender has begun a newer epoch", epoch_newest=row.epoch)
        if self.until <= row.mark:
            raise AlreadyCommitted(row.version)
        if (self.since, self.until) == (row.since, row.until):
            self._check_part(_ranges(row), row.version)
        elif self.since < row.until:
            raise self._refused("this sender is at another unit", unit_newest=f"{row.since}..{row.until}")

    def _check_part(self, there: Ranges, version: int) -> None:
        if any(first <= self.first and self.last <= last for first, last in there):
            raise AlreadyCommitted(version)
        if any(self.first < last and first < self.last for first, last in there):
            raise self._refused("some rows of this part are here, and others are not", part=f"{self.first}-{self.last}")

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row, part = self._row(tx), (self.first, self.last)
        same = row is not None and (row.epoch, row.since, row.until) == (self.epoch, self.since, self.until)
        key = (tables.senders.c.sender == self.sender, tables.senders.c.table_id == self.table_id)
        tx.execute(delete(tables.senders).where(*key))
        tx.execute(
            insert(tables.senders).values(
                sender=self.sender,
                table_id=self.table_id,
                epoch=self.epoch,
                # Every part of what came before in this epoch was acknowledged, or this unit would not be open.
                mark=self.since,
                since=self.since,
                until=self.until,
                ranges=json.dumps(_joined([*_ranges(row), part] if same else [part])),
                version=version,
                updated_ms=now_ms,
            )
        )

    def _row(self, tx: Connection) -> Any:
        table = tables.senders
        query = select(table).where(table.c.sender == self.sender, table.c.table_id == self.table_id)
        return tx.execute(query).first()

    def _refused(self, message: str, **facts: Any) -> Conflict:
        return Conflict(
            message,
            sender=self.sender,
            epoch=self.epoch,
            unit=f"{self.since}..{self.until}",
            **facts,
            advice="Only the newest unit of the newest epoch is taken. Is a copy of the sending lake at work?",
        )

    def as_dict(self) -> dict[str, Any]:
        return {"type": "sender", **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SenderRider:
        return cls(**{name: value for name, value in data.items() if name != "type"})


def _ranges(row: Any) -> Ranges:
    return [(int(first), int(last)) for first, last in json.loads(row.ranges)]


def _joined(ranges: Ranges) -> Ranges:
    """The same rows in as few ranges as there can be, ascending; they do not overlap."""
    ordered = sorted(ranges)
    starts = [ordered[0][0], *(here[0] for before, here in pairwise(ordered) if before[1] != here[0])]
    ends = [*(before[1] for before, here in pairwise(ordered) if before[1] != here[0]), ordered[-1][1]]
    return list(zip(starts, ends, strict=True))
