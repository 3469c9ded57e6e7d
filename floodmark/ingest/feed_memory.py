"""Rows as the door has judged them, kept for the feed that comes a moment later: it need not read them again.

Only a saving: what is not here, or was judged by another shape of the table, is read from the spool, as after a crash.
Bounded (I14): beyond so many bytes nothing more is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from floodmark.ingest.judge import Judge
from floodmark.spool.segments import Record

BYTES_MAX = 32 * 1024 * 1024


@dataclass(frozen=True)
class Seen:
    """The rows of a record, and who judged them."""

    judge: Judge
    table: pa.Table


class Memory:
    """Of one table. Records are known by their spool too: another one counts from 0 again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], Seen] = OrderedDict()
        self._bytes = 0

    def put(self, spool: str, record: int, seen: Seen) -> None:
        with self._lock:
            if self._bytes + seen.table.nbytes <= BYTES_MAX and (spool, record) not in self._kept:
                self._kept[spool, record] = seen
                self._bytes += seen.table.nbytes

    def find(self, spool: str, records: Sequence[Record]) -> list[Seen] | None:
        """Of all these records, in their order; None if one of them is not here."""
        with self._lock:
            found = [self._kept.get((spool, record.number)) for record in records]
        return [one for one in found if one is not None] if None not in found else None

    def forget(self, spool: str, position: int) -> None:
        """What is in the table by now, or of a spool that is gone."""
        with self._lock:
            for key in [key for key in self._kept if key[0] != spool or key[1] < position]:
                self._bytes -= self._kept.pop(key).table.nbytes
