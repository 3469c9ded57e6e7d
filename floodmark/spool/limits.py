"""What a spool may hold and how rows that wait in it are grouped; and what a caller is told of rows that were taken."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024
_DAY_MS = 24 * 3_600_000


@dataclass(frozen=True)
class IntakeLimits:
    """Of one table's intake. Bytes that wait are bytes on disk; those of a group are bytes of text."""

    waiting_bytes_max: int = 256 * MIB
    group_rows_max: int = 50_000
    group_bytes_max: int = 16 * MIB
    group_wait_ms: int = 1_000
    # A client's Idempotency-Key is known for so long, and as one of so many: whichever ends first.
    key_window_ms: int = _DAY_MS
    keys_max: int = 100_000
    # A segment that is this large gets a successor.
    segment_bytes: int = 64 * MIB
    # Rows in memory that are not on disk yet: a disk that is too slow is told to the callers before memory grows.
    queued_bytes_max: int = 32 * MIB


@dataclass(frozen=True)
class Taken:
    """Rows that are durable in the spool."""

    outcome: str  # taken, already_taken
    record: int
    rows: int
