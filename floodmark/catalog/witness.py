"""Witnesses: files beside the tables that record opened units. A rollback of the catalog does not remove them.

After a restored copy of the catalog, a snapshot of its machine or a point-in-time recovery, the catalog has the same
incarnation and assigns the same sequences again, for other rows. A destination that keeps no units cannot detect that,
so the lake does. Before a unit's first effect outside, one small file with its id is durable in the lake's storage:

    <lake>/witnesses/<incarnation>/<sink id>/<table id>/<lane>-<epoch>-<until>-<unit id>.json

A witness beyond the sink's mark whose unit the catalog does not have is from a time that the catalog has lost: nothing
is sent until an operator chooses. The rule needs no order of deletes: a witness at or below the mark is outdated, so
old ones may be deleted at any time, and one that returns after a power loss does no harm. The newest one stays.
A replay opens an epoch above all of them; a restore is a new incarnation, with a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from sqlalchemy import and_, select

from floodmark import log
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.sink_state import CONSUMER, Sink
from floodmark.catalog.unit import RETRY, ROWS, Unit
from floodmark.catalog.units import after_rollback
from floodmark.errors import Corrupt, FloodmarkError
from floodmark.json_form import Json
from floodmark.storage import Storage, join

FOLDER = "witnesses"
# So many outdated witnesses of a sink are kept: one request deletes them together.
STALE_MAX = 8


@dataclass(frozen=True)
class Witness:
    """What the name of a witness records."""

    location: str
    sink: str
    table_id: str
    lane: str
    epoch: int
    until: int
    unit: str
    # The file's content; empty if it was not read.
    place: str = ""
    name: str = ""
    since: int | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.until


def place_digest(*place: Json) -> str:
    """Distinguishes destinations without their address: that may hold a secret (I18)."""
    return hashlib.sha256(json.dumps(place, sort_keys=True).encode()).hexdigest()


class Witnesses:
    def __init__(self, database: Database, storage: Storage, location: str) -> None:
        self._database = database
        self._storage = storage
        self._location = location
        # Where this process saw a sink last, by sink and table: no need to compare again while it has not moved.
        self._seen: dict[tuple[str, str], tuple[str, int, int]] = {}

    # ── writing ──

    def put(self, unit: Unit, place: str) -> None:
        """Make the witness of a unit durable; one of an earlier try is as good."""
        name = f"{unit.lane}-{unit.epoch}-{unit.until}-{unit.id}.json"
        about = {"unit": unit.id, "sink": unit.sink, "table": unit.table, "since": unit.since, "until": unit.until}
        folder = join(self._location, FOLDER, unit.lake, unit.sink_id, unit.table_id)
        self._storage.put_if_absent(join(folder, name), json.dumps({**about, "place": place}).encode())

    def saw(self, sink: Sink | Unit, table_id: str, epoch: int, mark: int) -> None:
        """This process moved the mark there itself, or compared the witnesses there."""
        sink_id = sink.sink_id if isinstance(sink, Unit) else sink.id
        self._seen[sink_id, table_id] = sink.lake, epoch, mark

    def has_seen(self, sink: Sink) -> bool:
        """Whether the sink is exactly where this process left it or compared it."""
        return all(self._seen.get((sink.id, one.table_id)) == (sink.lake, one.epoch, one.mark) for one in sink.tables)

    # ── looking ──

    def compare(self, sink: Sink, *, trim: bool = False) -> dict[str, Corrupt]:
        """By table id, the error of every table of which storage has a unit that the catalog does not have.

        `trim`: delete outdated witnesses. Unavailable if storage does not answer.
        """
        # Tables that were created again are not compared: their sink needs an operator's choice anyway.
        followed = {one.table_id: one for one in sink.tables}
        found = [one for one in self._below(sink.lake, sink.id) if one.table_id in followed]
        lost, beyond = self._judge(sink, found)
        if trim and not lost:
            self._trim(found, beyond)
        return lost

    def compare_all(self, sinks: Iterable[Sink]) -> list[tuple[Sink, Corrupt]]:
        """The same for every sink, with one listing: the first error of each that has one."""
        by_sink: dict[str, list[Witness]] = {}
        known = list(sinks)
        for one in self._below(known[0].lake) if known else ():
            by_sink.setdefault(one.sink, []).append(one)
        found = [(sink, self._judge(sink, by_sink.get(sink.id, []))[0]) for sink in known]
        return [(sink, next(iter(lost.values()))) for sink, lost in found if lost]

    def _judge(self, sink: Sink, found: list[Witness]) -> tuple[dict[str, Corrupt], list[Witness]]:
        """The units that the catalog does not have, and which witnesses still count."""
        # After the listing: a unit is in the catalog before its witness exists.
        marks, known = self._state(sink) if found else ({}, set())
        beyond = [one for one in found if one.order > marks.get((one.table_id, one.lane), one.order)]
        lost = {one.table_id: _unknown(sink, one) for one in beyond if one.unit not in known}
        for one in sink.tables:
            if one.table_id not in lost and one.mark is not None and one.epoch is not None:
                self.saw(sink, one.table_id, one.epoch, one.mark)
        return lost, beyond

    def newest_epoch(self, sink: Sink) -> int:
        """The newest epoch of a sink that storage has."""
        return max((one.epoch for one in self._below(sink.lake, sink.id)), default=0)

    def left(self, place: str, table_ids: Iterable[str]) -> list[Witness]:
        """What removed sinks sent to a destination of these tables: the newest unit of each."""
        wanted = set(table_ids)
        with self._database.read() as tx:
            live = set(tx.execute(select(tables.sinks.c.id)).scalars())
        newest: dict[tuple[str, str], Witness] = {}
        for one in self._below():
            group = one.sink, one.table_id
            if one.table_id not in wanted or one.sink in live or one.lane != ROWS:
                continue
            if group not in newest or newest[group].order < one.order:
                newest[group] = one
        return [one for one in map(self._read, newest.values()) if one.place == place]

    # ── inside ──

    def _below(self, *parts: str) -> list[Witness]:
        root = join(self._location, FOLDER)
        listed = self._storage.list(join(root, *parts) if parts else root)
        found = (_parse(entry.location, entry.location.removeprefix(f"{root}/")) for entry in listed)
        return [one for one in found if one is not None]

    def _read(self, witness: Witness) -> Witness:
        with suppress(FloodmarkError, ValueError, KeyError, TypeError):
            about = json.loads(self._storage.read(witness.location))
            return replace(witness, place=str(about["place"]), name=str(about["sink"]), since=int(about["since"]))
        return witness

    def _state(self, sink: Sink) -> tuple[dict[tuple[str, str], tuple[int, int]], set[str]]:
        """How far each lane of each table is, and the units on record."""
        consumer, followed, unit = tables.consumers, tables.sink_tables, tables.units
        same = and_(consumer.c.table_id == followed.c.table_id, consumer.c.name == CONSUMER + sink.name)
        query = select(followed.c.table_id, followed.c.retries, consumer.c.epoch, consumer.c.mark)
        marks: dict[tuple[str, str], tuple[int, int]] = {}
        with self._database.read() as tx:
            for row in tx.execute(query.join(consumer, same).where(followed.c.sink == sink.id)):
                marks[row.table_id, ROWS] = row.epoch, row.mark
                marks[row.table_id, RETRY] = row.epoch, row.retries
            return marks, set(tx.execute(select(unit.c.id).where(unit.c.sink == sink.id)).scalars())

    def _trim(self, found: list[Witness], beyond: list[Witness]) -> None:
        newest: dict[tuple[str, str], Witness] = {}
        for one in found:
            group = one.table_id, one.lane
            newest[group] = max(one, newest.get(group, one), key=lambda each: each.order)
        kept = {one.location for one in (*newest.values(), *beyond)}
        stale = [one.location for one in found if one.location not in kept]
        if len(stale) > STALE_MAX:
            try:
                # Files of crashed writes are deleted too; a run that was overtaken finds its own gone, and fails.
                folders = {one.location.rpartition("/")[0] for one in found}
                broken = [entry.location for folder in folders for entry in self._storage.list(folder, temporary=True)]
                self._storage.delete_many([*stale, *broken])
            except FloodmarkError as error:
                log.get().warning("old witnesses of a sink stay", cause=str(error))


def _parse(location: str, path: str) -> Witness | None:
    """The witness of a name; None if it is none of ours."""
    parts = path.split("/")
    if len(parts) != 4 or not parts[3].endswith(".json"):
        return None
    lane, *numbers = parts[3].removesuffix(".json").split("-")
    if len(numbers) != 3 or not (numbers[0].isdecimal() and numbers[1].isdecimal()):
        return None
    return Witness(location, parts[1], parts[2], lane, int(numbers[0]), int(numbers[1]), numbers[2])


def _unknown(sink: Sink, witness: Witness) -> Corrupt:
    followed = next((one for one in sink.tables if one.table_id == witness.table_id), None)
    table = witness.table_id if followed is None else followed.table
    return Corrupt(
        "storage has the witness of a unit that this catalog does not know: the catalog was rolled back, or is a copy",
        sink=sink.name,
        table=table,
        mark=None if followed is None else followed.mark,
        unit=witness.unit,
        until=witness.until,
        epoch=witness.epoch,
        witness=witness.location,
        advice=after_rollback(sink.name, table),
    )
