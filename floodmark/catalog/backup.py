"""Backup and restore of the catalog: the only truth, in one portable file.

A backup is one consistent view, taken while writers run: a line with its description, a line per row, and a last line
with the count and a hash, so that a torn file is detected. It fits SQLite and PostgreSQL alike. A restore is a new
incarnation: operations that ran when the backup was taken are given up (their files are kept: the catalog that is
replaced may have published them), and consumers can distinguish the two timelines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypedDict

from sqlalchemy import Connection, MetaData, Table, insert, inspect, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.lifecycle import stored_format, upgrade
from floodmark.catalog.riders import AuditRider
from floodmark.errors import Corrupt, Invalid, TooNew, TooOld
from floodmark.failpoints import hit
from floodmark.json_form import Json
from floodmark.model import Scalar
from floodmark.storage import Storage

BACKUP_FORMAT = 1
# Only true while a process lives.
NOT_KEPT = frozenset({"fm_processes", "fm_turns", "fm_waiting", "fm_daemon", "fm_migrations"})
ROWS_PER_INSERT = 500


class Header(TypedDict):
    """The first line of a backup: which lake it is of, and when it was taken."""

    floodmark_backup: int
    format: int
    version: int
    incarnation: str
    location: str
    taken: str


def backup(database: Database, storage: Storage, location: str) -> dict[str, Json]:
    """Write the whole catalog to `location`, whole or not at all."""
    digest = hashlib.sha256()
    rows = 0
    with database.read() as tx, storage.writer(location) as stream:
        lake = tx.execute(select(tables.lake)).one()
        header: dict[str, Json] = {
            "floodmark_backup": BACKUP_FORMAT,
            "format": lake.format,
            "version": lake.version,
            "incarnation": lake.incarnation,
            "location": lake.location,
            "taken": clock.format_time(database.now_ms(tx)),
        }
        for line in _lines(tx, header):
            digest.update(line)
            stream.write(line)
            rows += 1
        hit("backup.copied")
        stream.write(json.dumps({"rows": rows - 1, "sha256": digest.hexdigest()}).encode() + b"\n")
    hit("backup.written")
    return {**header, "rows": rows - 1}


def _lines(tx: Connection, header: Mapping[str, Json]) -> Iterator[bytes]:
    yield json.dumps(header).encode() + b"\n"
    for name in sorted(inspect(tx).get_table_names()):
        if name in NOT_KEPT or not name.startswith(("fm_", "iceberg_")):
            continue
        table = Table(name, MetaData(), autoload_with=tx)
        for row in tx.execution_options(yield_per=ROWS_PER_INSERT).execute(select(table)).mappings():
            yield json.dumps({"table": name, "row": dict(row)}).encode() + b"\n"


@dataclass(frozen=True)
class Backup:
    """A whole backup that this code can restore: its first line, and a line of JSON for each row."""

    header: Header
    rows: list[bytes]


def read_backup(storage: Storage, source: str, location: str) -> Backup:
    """The backup of the lake at `location`. One that is damaged, of another lake or of an unknown format is refused."""
    lines = storage.read(source).splitlines(keepends=True)
    header = _check(lines, source)
    if header["location"] != location:
        raise Invalid(
            "this backup belongs to a lake at another location",
            location=location,
            backup_location=header["location"],
            advice="A lake's paths are absolute: restore it at its original location.",
        )
    return Backup(header, lines[1:-1])


def restore(database: Database, backup: Backup) -> dict[str, Json]:
    """Create the catalog of the lake from its backup. One transaction: all of it or nothing."""
    header = backup.header
    if stored_format(database) is not None:
        raise Invalid(
            "a catalog exists already",
            database=database.shown_url,
            advice="A restore never replaces a catalog. Move it away first if it is damaged.",
        )
    incarnation = clock.new_id()
    with database.write() as tx:
        upgrade(tx, f"f{header['format']:04d}")
        hit("restore.tables_made")
        _insert(tx, backup.rows)
        hit("restore.copied")
        now = database.now_ms(tx)
        tx.execute(update(tables.lake).values(incarnation=incarnation))
        _give_up_unfinished(tx, now)
        # Crash here: the transaction is undone; run the restore again.
        hit("restore.stamped")
    return {
        "floodmark_backup": header["floodmark_backup"],
        "format": header["format"],
        "version": header["version"],
        "incarnation": incarnation,
        "location": header["location"],
        "taken": header["taken"],
        "backup_incarnation": header["incarnation"],
        "rows": len(backup.rows),
    }


def _check(lines: list[bytes], source: str) -> Header:
    try:
        header: Header = json.loads(lines[0])
        trailer = json.loads(lines[-1])
        known = header["floodmark_backup"]
        whole = hashlib.sha256(b"".join(lines[:-1])).hexdigest() == trailer["sha256"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Corrupt("this backup is incomplete", source=source, cause=error) from error
    if not whole or trailer["rows"] != len(lines) - 2:
        raise Corrupt("this backup is damaged", source=source, advice="Use another one.")
    if known > BACKUP_FORMAT or header["format"] > tables.FORMAT:
        raise TooNew("this backup was made by a newer Floodmark", source=source, advice="Upgrade Floodmark.")
    if header["format"] < tables.OLDEST_FORMAT:
        raise TooOld(
            "this backup was made by a Floodmark from before the first release",
            source=source,
            format=header["format"],
            format_known=tables.FORMAT,
            advice="Restore it with the Floodmark that made it, export the rows, and load them into a new lake; "
            "nothing was changed.",
        )
    return header


def _insert(tx: Connection, lines: list[bytes]) -> None:
    known: dict[str, Table] = {}
    waiting: dict[str, list[dict[str, Scalar]]] = {}
    for line in lines:
        record = json.loads(line)
        name = record["table"]
        if name not in known:
            known[name] = Table(name, MetaData(), autoload_with=tx)
        waiting.setdefault(name, []).append(record["row"])
        if len(waiting[name]) >= ROWS_PER_INSERT:
            tx.execute(insert(known[name]), waiting.pop(name))
    for name, rows in waiting.items():
        tx.execute(insert(known[name]), rows)


def _give_up_unfinished(tx: Connection, now_ms: int) -> None:
    rows = list(
        tx.execute(
            select(tables.operations.c.id, tables.operations.c.kind, tables.operations.c.state).where(
                tables.operations.c.state.in_(("staging", "staged"))
            )
        )
    )
    for row in rows:
        AuditRider(row.kind, row.state, "discarded", "unfinished when the backup was taken").apply(
            tx, row.id, None, now_ms
        )
    tx.execute(
        update(tables.operations)
        .where(tables.operations.c.state.in_(("staging", "staged", "abandoned")))
        .values(state="abandoned", cleaned=1, ended_ms=now_ms)
    )
