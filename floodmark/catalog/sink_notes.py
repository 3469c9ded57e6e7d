"""What a sink learned or lost, as numbers beside its row.

How long to leave its destination alone, how large a body that takes, how many rows may have arrived twice, how many
retention took before they were sent.

A number is written in the transaction of what it tells of, so a crash cannot part the two (I15).
"""

from __future__ import annotations

from sqlalchemy import Connection, and_, delete, insert, select, update

from floodmark.catalog import tables

# Of the whole sink.
NOT_BEFORE_MS, BODY_BYTES_MAX = "not_before_ms", "body_bytes_max"
# Of one table.
ROWS_DOUBTFUL, ROWS_LOST, ROWS_LOST_SAID = "rows_doubtful", "rows_lost", "rows_lost_said"


def read_notes(tx: Connection, sink: str) -> dict[tuple[str, str], int]:
    row = tables.sink_notes
    return {(one.table_id, one.note): int(one.value) for one in tx.execute(select(row).where(row.c.sink == sink))}


def put_note(tx: Connection, sink: str, table_id: str, note: str, value: int, now_ms: int) -> None:
    row = tables.sink_notes
    mine = and_(row.c.sink == sink, row.c.table_id == table_id, row.c.note == note)
    if not tx.execute(update(row).where(mine).values(value=value, updated_ms=now_ms)).rowcount:
        tx.execute(insert(row).values(sink=sink, table_id=table_id, note=note, value=value, updated_ms=now_ms))


def add_to_note(tx: Connection, sink: str, table_id: str, note: str, more: int, now_ms: int) -> None:
    """Raise a count; the caller holds a lock of the sink or of the lake."""
    if more:
        known = read_notes(tx, sink).get((table_id, note), 0)
        put_note(tx, sink, table_id, note, known + more, now_ms)


def forget_notes(tx: Connection, sink: str, *notes: str) -> None:
    row = tables.sink_notes
    tx.execute(delete(row).where(row.c.sink == sink, row.c.note.in_(notes)))
