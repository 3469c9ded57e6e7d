"""The engine: one record with everything that code on an open lake needs, passed down once.

A lower package takes the engine, or the part of it that it needs (the catalog, the storage, the sessions), as a value.
No lower package calls a higher one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from floodmark.commit.catalog import Catalog
from floodmark.commit.recovery import Recovery
from floodmark.errors import Invalid
from floodmark.reading import Reader
from floodmark.rows.session import Sessions
from floodmark.storage import Storage

if TYPE_CHECKING:
    from floodmark.index.covering import Coverings
    from floodmark.index.lookup import Lookups
    from floodmark.index.writing import SegmentWriter


@dataclass(frozen=True)
class Engine:
    """An open lake's parts. `actor` commits, unless a verb names another actor."""

    catalog: Catalog
    sessions: Sessions
    actor: str
    read_only: bool = False

    def __post_init__(self) -> None:
        self.catalog.segment_maker = lambda: self.segments

    @property
    def storage(self) -> Storage:
        return self.catalog.storage

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.catalog, self.sessions, lambda: self.lookups)

    @cached_property
    def segments(self) -> SegmentWriter:
        # Late: a lake that is only asked about needs no Arrow.
        from floodmark.index.writing import SegmentWriter

        return SegmentWriter(self.catalog, self.sessions)

    @cached_property
    def coverings(self) -> Coverings:
        from floodmark.index.covering import Coverings

        return Coverings(self.catalog)

    @cached_property
    def lookups(self) -> Lookups:
        from floodmark.index.lookup import Lookups

        return Lookups(self.catalog, self.coverings)

    @cached_property
    def recovery(self) -> Recovery:
        return Recovery(self.catalog)

    def check_writable(self) -> None:
        if self.read_only:
            location = self.catalog.location
            raise Invalid("this lake was opened read-only", location=location, advice="Open it for writing.")

    def get_ready(self) -> None:
        """What every write does first: recover what dead processes left (I13, I16)."""
        self.check_writable()
        self.recovery.recover()
