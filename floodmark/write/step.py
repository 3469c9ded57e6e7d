"""One step of a change: a verb of the caller, with the rows that came in as staged files."""

from __future__ import annotations

from dataclasses import dataclass

from pyiceberg.schema import Schema

from floodmark.model import FileRecord

APPEND, MERGE, DELETE, OVERWRITE = "append", "merge", "delete", "overwrite"


@dataclass(frozen=True)
class Step:
    """One verb of the caller: its rows as they were staged, for which schema, and what it is to do with them."""

    verb: str
    incoming: tuple[FileRecord, ...] = ()
    schema: Schema | None = None
    where: str | None = None
    skip_unchanged: bool = True
    evolve: bool = False

    @property
    def rows(self) -> int:
        return sum(record.rows for record in self.incoming)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(record.path for record in self.incoming)
