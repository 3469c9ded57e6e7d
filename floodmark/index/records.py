"""What is reported of indexes. No record has the secret of an index."""

from __future__ import annotations

from dataclasses import dataclass

from floodmark.json_form import Reported

# Of an index: writers make its segments; it was dropped (a key index keeps its row); nothing can use it.
LIVE, DROPPED, UNUSABLE = "live", "dropped", "unusable"


@dataclass(frozen=True)
class IndexLine(Reported):
    """An index of a table: what it is on, its state (`reason`: why it is unusable), and its segments in use.

    `bytes` are those of the files that it has a section in: indexes of one table share files.
    """

    table: str
    on: tuple[str, ...]
    kind: str
    state: str
    reason: str | None
    segments: int
    broken: int
    bytes: int


@dataclass(frozen=True)
class IndexStatus(IndexLine):
    """The same, and how much of the table's newest state the index covers. `advice`: what to do, if anything."""

    files: int
    files_covered: int
    rows: int
    rows_covered: int
    advice: str


@dataclass(frozen=True)
class IndexChange(Reported):
    """What a call did to an index. outcome: created, dropped, planned (a drop would do it), or nothing_to_do."""

    table: str
    on: tuple[str, ...]
    kind: str
    outcome: str
