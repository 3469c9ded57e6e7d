"""Invariants of the sinks of every lake at rest, checked from the rows of the catalog alone (I7, I8, I15).

Called by `check_lake`. Every broken rule is reported, not only the first.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from sqlalchemy import Connection, select

from floodmark.catalog import tables
from floodmark.catalog.history import LIVE
from floodmark.catalog.sink_state import CONSUMER, OPEN
from floodmark.catalog.unit import RETRY, ROWS, Unit
from floodmark.catalog.witness import FOLDER
from floodmark.commit.catalog import Catalog
from floodmark.errors import FloodmarkError
from floodmark.model import BEGINNING, MAIN
from floodmark.testing.catalog_rows import FollowedRow, MarkRow, PartRow, RefusedRow, SinkRow, UnitRow, read_rows


def check_sinks(tx: Connection, broken: list[str]) -> None:
    """Check marks, units, pins, parts and quarantine against each other and against the tables."""
    sinks = {row.id: row for row in read_rows(tx, tables.sinks, SinkRow)}
    units = {row.id: row for row in read_rows(tx, tables.units, UnitRow)}
    consumers = {(row.name, row.table_id): row for row in read_rows(tx, tables.consumers, MarkRow)}
    _check_marks(tx, sinks, consumers, broken)
    for unit in units.values():
        if unit.sink not in sinks:
            broken.append(f"unit {unit.id} belongs to a sink that does not exist")
        elif unit.state == OPEN:
            _check_open(tx, unit, consumers.get((CONSUMER + sinks[unit.sink].name, unit.table_id)), broken)
        elif unit.pin is not None:
            broken.append(f"unit {unit.id} has ended and names a pin")
    _check_pins(tx, units, broken)
    _check_parts(tx, units, broken)
    _check_quarantine(tx, sinks, units, broken)


def check_witnesses(catalog: Catalog, broken: list[str]) -> None:
    """Storage has no unit that the catalog lacks, and has every unit of which anything was sent."""
    for sink, error in catalog.witnesses.compare_all(catalog.sinks.all()):
        broken.append(f"sink {sink.name}: {error}")
    witnesses = {entry.location for entry in catalog.storage.list(f"{catalog.location}/{FOLDER}")}
    with catalog.database.read() as tx:
        sent = select(tables.units).where(tables.units.c.id.in_(select(tables.parts.c.unit)))
        for row in tx.execute(sent):
            if not any(f"-{row.id}.json" in location for location in witnesses):
                broken.append(f"unit {row.id} has parts and no witness")


def _check_marks(
    tx: Connection, sinks: dict[str, SinkRow], consumers: dict[tuple[str, str], MarkRow], broken: list[str]
) -> None:
    lines = {row.sink: row.line for row in tx.execute(select(tables.sink_lines))}
    live = {MAIN: MAIN, **{row.id: row.name for row in tx.execute(select(tables.lines)) if row.ended_version is None}}
    newest = {(row.branch, row.table_id): row.sequence for row in tx.execute(select(tables.heads))}
    followed = {
        (CONSUMER + sinks[row.sink].name if row.sink in sinks else "", row.table_id): row
        for row in read_rows(tx, tables.sink_tables, FollowedRow)
    }
    for (name, table_id), row in followed.items():
        mark = consumers.get((name, table_id))
        # A deleted branch has nothing newer to compare with.
        head = newest.get((live.get(lines.get(row.sink, MAIN), ""), table_id))
        if not name:
            broken.append(f"{row.table_name} is followed by a sink that does not exist")
        elif mark is None:
            broken.append(f"{name} follows {row.table_name} and has no mark")
        elif not BEGINNING <= mark.mark <= (mark.mark if head is None else head):
            broken.append(f"{name} is at {mark.mark} of {row.table_name}, whose newest is {head}")
    for name, table_id in consumers:
        if name.startswith(CONSUMER) and (name, table_id) not in followed:
            broken.append(f"the mark of {name} on {table_id} is of no sink that follows that table")


def _check_open(tx: Connection, unit: UnitRow, mark: MarkRow | None, broken: list[str]) -> None:
    try:
        record = Unit.from_json(unit.record)
    except FloodmarkError as error:
        broken.append(f"open unit {unit.id}: {error}")
        return
    recorded = (record.id, record.sink_id, record.table_id, record.lane, record.epoch, record.since, record.until)
    if recorded != (unit.id, unit.sink, unit.table_id, unit.lane, unit.epoch, unit.since, unit.until):
        broken.append(f"open unit {unit.id} is another by its record: {recorded}")
    if unit.lane == RETRY:
        return
    if mark is None or (mark.epoch, mark.mark) != (unit.epoch, unit.since):
        broken.append(f"open unit {unit.id} does not begin at its sink's mark: {mark}")
    pin = tx.execute(select(tables.pins).where(tables.pins.c.id == unit.pin)).first()
    if pin is None:
        broken.append(f"open unit {unit.id} has no pin")
        return
    state = tx.execute(select(tables.commits.c.state).where(tables.commits.c.version == pin.version)).scalar()
    if pin.version != record.version or state != LIVE:
        broken.append(f"open unit {unit.id} reads version {record.version}, its pin holds {pin.version} ({state})")


def _check_pins(tx: Connection, units: dict[str, UnitRow], broken: list[str]) -> None:
    held = {unit.pin for unit in units.values() if unit.state == OPEN and unit.lane == ROWS}
    for pin in tx.execute(select(tables.pins).where(tables.pins.c.holder.startswith(CONSUMER))):
        if pin.id not in held:
            broken.append(f"pin of version {pin.version} ({pin.holder}, {pin.reason}) is of no open unit")


def _check_parts(tx: Connection, units: dict[str, UnitRow], broken: list[str]) -> None:
    parts: dict[str, list[PartRow]] = defaultdict(list)
    for part in read_rows(tx, tables.parts, PartRow, tables.parts.c.unit, tables.parts.c.first):
        parts[part.unit].append(part)
    for unit, found in parts.items():
        if unit not in units or units[unit].state != OPEN:
            broken.append(f"{len(found)} parts of unit {unit}, which is not open")
        if any(part.first >= part.last for part in found) or any(
            before.last > after.first for before, after in pairwise(found)
        ):
            broken.append(f"parts of unit {unit} overlap: {[(part.first, part.last) for part in found]}")


def _check_quarantine(tx: Connection, sinks: dict[str, SinkRow], units: dict[str, UnitRow], broken: list[str]) -> None:
    for row in read_rows(tx, tables.quarantine, RefusedRow):
        if row.sink not in sinks:
            broken.append(f"row {row.id} in quarantine belongs to a sink that does not exist")
        if row.retry_unit is None:
            continue
        unit = units.get(row.retry_unit)
        if unit is None or (unit.state, unit.lane) != (OPEN, RETRY) or row.retry_position is None:
            broken.append(f"row {row.id} in quarantine is sent again by unit {row.retry_unit}, which is no open retry")
