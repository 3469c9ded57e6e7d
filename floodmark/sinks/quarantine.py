"""Send refused rows again: the row that a key has now, not the row that was refused.

The row of a refused line is looked up in the changes since its own sequence. If its key changed since, the sink has
shipped or will ship that newer state, and the refused row is not needed any more. Rows of tables without a key are sent
as they were. A row that cannot be written as JSON stays in quarantine until a newer row replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from floodmark.catalog.sink_state import Followed
from floodmark.catalog.units import RefusedRow
from floodmark.errors import BelowRetention, Conflict, Corrupt
from floodmark.json_form import Json
from floodmark.model import BEGINNING, SEQ_COLUMN
from floodmark.reading import Reader, ReadMoment
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


@dataclass(frozen=True)
class _Line:
    """A row as the sink sends it: its text, its values, and its sequence."""

    text: str
    values: dict[str, Json]
    sequence: int

    @classmethod
    def parse(cls, text: str) -> _Line:
        values = json.loads(text)
        return cls(text, values, int(values[SEQ_COLUMN]))

    def key(self, columns: Sequence[str]) -> str:
        return json.dumps([self.values.get(name) for name in columns])


def current_lines(
    reader: Reader,
    storage: Storage,
    followed: Followed,
    settings: AnySettings,
    entries: Sequence[RefusedRow],
    branch: str,
) -> Again:
    """The rows of a table's quarantine as they are now on a branch."""
    refused = {entry.id: _parsed(entry) for entry in entries}
    lowest = min((line.sequence for line in refused.values()), default=0)
    shipment = _changes_since(reader, followed, settings, lowest - 1, ReadMoment(branch=branch))
    if not shipment.key:
        sent = [(entry.id, entry.line) for entry in entries if UNENCODABLE not in refused[entry.id].values]
        return Again(sent, [], ())
    keys = {entry: line.key(shipment.key) for entry, line in refused.items()}
    newest = _newest(shipment, storage, set(keys.values()))
    send: Lines = []
    replaced: list[str] = []
    for entry in entries:
        found = newest.get(keys[entry.id])
        if found is None:
            # The key is not in the table any more, and since when is unknown: ship it as deleted.
            send.append((entry.id, _deletion(refused[entry.id], shipment.key)))
        elif found.sequence > refused[entry.id].sequence:
            replaced.append(entry.id)
        elif UNENCODABLE in found.values:
            continue
        else:
            send.append((entry.id, found.text))
    return Again(send, replaced, shipment.key)


def _changes_since(
    reader: Reader, followed: Followed, settings: AnySettings, since: int, moment: ReadMoment
) -> Shipment:
    try:
        found = reader.changes(followed.table, None if since <= BEGINNING else since, None, moment)
    except BelowRetention:
        found = reader.changes(followed.table, None, None, moment)
    if found.table_id != followed.table_id:
        raise Conflict("another table got this name a moment ago", table=followed.table, advice="Run it again.")
    return plan_shipment(found.plan, settings.columns, settings.where)


def _newest(shipment: Shipment, storage: Storage, keys: set[str]) -> dict[str, _Line]:
    """The newest change of each of these keys."""
    found: dict[str, _Line] = {}
    for line in _lines(shipment, storage):
        key = line.key(shipment.key)
        if key in keys and (key not in found or line.sequence > found[key].sequence):
            found[key] = line
    return found


def _lines(shipment: Shipment, storage: Storage) -> Iterator[_Line]:
    for body in bodies(shipment, storage, LINES_AT_ONCE, LINES_BYTES):
        for line in body.data.splitlines(keepends=True):
            yield _Line.parse(line.decode())


def _parsed(entry: RefusedRow) -> _Line:
    try:
        return _Line.parse(entry.line)
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt("a row in quarantine cannot be parsed", id=entry.id, cause=error) from error


def _deletion(line: _Line, key: Sequence[str]) -> str:
    kept = {name: value if name in key else None for name, value in line.values.items()}
    return json.dumps({**kept, CHANGE_COLUMN: DELETE, SEQ_COLUMN: line.sequence}, ensure_ascii=False) + "\n"
