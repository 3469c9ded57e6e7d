"""Send refused rows again: the row that a key has now, not the row that was refused.

The row of a refused line is looked up in the changes since its own sequence. If its key changed since, the sink has
shipped or will ship that newer state, and the refused row is not needed any more. Rows of tables without a key are sent
as they were. A row that cannot be written as JSON stays in quarantine until a newer row replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from floodmark.catalog.units import Bad
from floodmark.errors import BelowRetention, Corrupt
from floodmark.model import BEGINNING, SEQ_COLUMN
from floodmark.reading import Moment, Reader
from floodmark.rows.reading.changes import CHANGE_COLUMN, DELETE
from floodmark.rows.reading.shipment import Shipment, plan_shipment
from floodmark.rows.reading.texts import UNENCODABLE, bodies
from floodmark.sinks.settings import AnySettings
from floodmark.storage import Storage

Lines = list[tuple[str, str]]
# How much of a table is turned into text at once while keys are searched.
LINES_AT_ONCE, LINES_BYTES = 10_000, 4 * 1024 * 1024


@dataclass(frozen=True)
class Again:
    """The refused rows to send (id and text each), and the ids of those that a newer row replaced."""

    lines: Lines
    replaced: list[str]
    key: tuple[str, ...]


def current_lines(
    reader: Reader, storage: Storage, table: str, settings: AnySettings, entries: Sequence[Bad], branch: str
) -> Again:
    """The rows of a table's quarantine as they are now on a branch."""
    refused = {entry.id: _parsed(entry) for entry in entries}
    lowest = min((row[SEQ_COLUMN] for row in refused.values()), default=0)
    shipment = _changes_since(reader, table, settings, lowest - 1, Moment(branch=branch))
    if not shipment.key:
        return Again([(entry.id, entry.line) for entry in entries if UNENCODABLE not in refused[entry.id]], [], ())
    keys = {entry: _key(row, shipment.key) for entry, row in refused.items()}
    newest = _newest(shipment, storage, set(keys.values()))
    send: Lines = []
    replaced: list[str] = []
    for entry in entries:
        sequence, line = newest.get(keys[entry.id], (None, None))
        if sequence is None or line is None:
            # The key is not in the table any more, and since when is unknown: ship it as deleted.
            send.append((entry.id, _deletion(refused[entry.id], shipment.key)))
        elif sequence > refused[entry.id][SEQ_COLUMN]:
            replaced.append(entry.id)
        elif UNENCODABLE in json.loads(line):
            continue
        else:
            send.append((entry.id, line))
    return Again(send, replaced, shipment.key)


def _changes_since(reader: Reader, table: str, settings: AnySettings, since: int, moment: Moment) -> Shipment:
    try:
        found = reader.changes(table, None if since <= BEGINNING else since, None, moment)
    except BelowRetention:
        found = reader.changes(table, None, None, moment)
    return plan_shipment(found.plan, settings.columns, settings.where)


def _newest(shipment: Shipment, storage: Storage, keys: set[str]) -> dict[str, tuple[int, str]]:
    """The newest change of each of these keys: its sequence and its text."""
    found: dict[str, tuple[int, str]] = {}
    for line, row in _lines(shipment, storage):
        key = _key(row, shipment.key)
        if key in keys and (key not in found or row[SEQ_COLUMN] > found[key][0]):
            found[key] = row[SEQ_COLUMN], line
    return found


def _lines(shipment: Shipment, storage: Storage) -> Iterator[tuple[str, dict[str, Any]]]:
    for body in bodies(shipment, storage, LINES_AT_ONCE, LINES_BYTES):
        for line in body.data.splitlines(keepends=True):
            yield line.decode(), json.loads(line)


def _parsed(entry: Bad) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(entry.line)
        row[SEQ_COLUMN] = int(row[SEQ_COLUMN])
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt("a row in quarantine cannot be understood", id=entry.id, cause=error) from error
    return row


def _key(row: dict[str, Any], key: Sequence[str]) -> str:
    return json.dumps([row.get(name) for name in key])


def _deletion(row: dict[str, Any], key: Sequence[str]) -> str:
    kept = {name: value if name in key else None for name, value in row.items()}
    return json.dumps({**kept, CHANGE_COLUMN: DELETE, SEQ_COLUMN: row[SEQ_COLUMN]}, ensure_ascii=False) + "\n"
