"""The catalog of one lake, with all its parts. Queries of state need no Iceberg library, so it is loaded late."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

from sqlalchemy import func, select

from floodmark import log
from floodmark.catalog import tables
from floodmark.catalog.chunks import Chunks
from floodmark.catalog.daemon import DaemonHold
from floodmark.catalog.database import Database, LakeRow, to_lake
from floodmark.catalog.history import History
from floodmark.catalog.indexes import Indexes
from floodmark.catalog.jobs import Jobs
from floodmark.catalog.leases import LEASE_MS, Heartbeat
from floodmark.catalog.maintenance_state import MaintenanceState
from floodmark.catalog.sinks import Sinks
from floodmark.catalog.spools import Spools
from floodmark.catalog.units import Units
from floodmark.catalog.witness import Witnesses
from floodmark.commit.branches import Branches
from floodmark.commit.expiry import Expiry
from floodmark.commit.journal import Journal
from floodmark.errors import Conflict, Corrupt, NotFound, Unavailable
from floodmark.model import MAIN, Head
from floodmark.storage import Storage

if TYPE_CHECKING:
    from floodmark.catalog.riders import Rider
    from floodmark.commit.journal import Operation
    from floodmark.commit.metadata import MetadataFiles
    from floodmark.commit.publisher import Publisher
    from floodmark.commit.seal import Edit

T = TypeVar("T")
READS_MAX = 10


class SegmentMaker(Protocol):
    """What covers the data files of an operation by its indexes: a room above makes it."""

    def riders(self, operation: Operation, edits: Iterable[Edit], *, spark: bool) -> list[Rider]:
        """Segments for the files that these edits add, as riders. `spark`: its tasks may make them."""


class Catalog:
    def __init__(self, database: Database, storage: Storage, location: str, lease_ms: int = LEASE_MS) -> None:
        self.database = database
        self.storage = storage
        self.location = location
        self.heartbeat = Heartbeat(database, lease_ms)
        self.journal = Journal(database, storage, self.heartbeat, location)
        self.history = History(database)
        self.indexes = Indexes(database)
        # Makes segments for the files that an operation publishes; a lake that is open has one.
        self.segment_maker: Callable[[], SegmentMaker] | None = None
        self.expiry = Expiry(database)
        self.maintenance = MaintenanceState(database)
        self.sinks = Sinks(database, self.heartbeat)
        self.units = Units(database)
        self.witnesses = Witnesses(database, storage, location)
        self.jobs = Jobs(database, self.heartbeat)
        self.chunks = Chunks(database)
        self.branches = Branches(database)
        self.spools = Spools(database)
        self.daemon = DaemonHold(database, self.heartbeat)

    @cached_property
    def files(self) -> MetadataFiles:
        from floodmark.commit.metadata import MetadataFiles

        return MetadataFiles(self.storage)

    @cached_property
    def publisher(self) -> Publisher:
        from floodmark.commit.publisher import Publisher

        return Publisher(self.database, self.journal, self.history, self.indexes, self.files, self.storage)

    def at_head(self, table: str, read: Callable[[Head], T], branch: str = MAIN) -> T:
        """The result of `read` on the table's head, for a caller that holds no version yet.

        A file of it may be gone because the head moved and was swept meanwhile: then the new head is read.
        """
        for _ in range(READS_MAX):
            head = self.history.head(table, branch)
            try:
                return read(head)
            except (Corrupt, NotFound, FileNotFoundError):
                if self.history.head(table, branch) == head:
                    raise
        raise Conflict("the table kept changing while it was read", table=table, advice="Run it again.")

    def lake_row(self) -> LakeRow:
        with self.database.read() as tx:
            return to_lake(tx.execute(select(tables.lake)).one())

    def note_rollback(self) -> None:
        """Compare the units in storage with the catalog; a sink that must not go on shows why.

        Storage that does not answer does not keep a lake from being opened: every run compares again.
        """
        with self.database.read() as tx:
            if tx.execute(select(tables.sinks.c.id).limit(1)).first() is None:
                return
        try:
            found = self.witnesses.compare_all(self.sinks.all())
        except Unavailable as problem:
            log.get().warning("storage does not answer: was the catalog rolled back?", cause=str(problem))
            return
        for sink, error in found:
            log.get().warning("a sink is refused", sink=sink.name, cause=error.message)
            self.sinks.refuse(sink.id, json.dumps(error.as_dict()))

    def pin_count(self) -> int:
        with self.database.read() as tx:
            return int(tx.execute(select(func.count()).select_from(tables.pins)).scalar_one())

    def close(self) -> None:
        self.heartbeat.close()
        self.database.close()
