"""What comes out of a spool: records, and how much waits in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """Rows that came in with one request. Numbers count from 0, without gaps."""

    number: int
    rows: int
    text: bytes
    evolve: bool
    received_ms: int
    actor: str = ""  # the name of the client's token, if the lake has tokens


@dataclass(frozen=True)
class Waiting:
    """What is durable and not fed; `bytes` on disk, `oldest_ms`: when the first of them came in."""

    records: int
    rows: int
    bytes: int
    oldest_ms: int | None
