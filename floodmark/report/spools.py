"""The state of spools, for any process: the catalog's row, and a look into the folder if it is on this host.

Nothing here changes anything, and nothing needs the process that feeds. What only that process knows (a publish that
fails for now) its tasks report (catalog/daemon.py).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from floodmark import clock
from floodmark.catalog.spools import SpoolRow
from floodmark.commit.catalog import Catalog
from floodmark.errors import FloodmarkError
from floodmark.json_form import Reported, StoredError
from floodmark.spool.salvage import find_damage
from floodmark.spool.segments import Waiting
from floodmark.spool.state import look_here, missing, why_refused

State = Literal["ok", "waiting", "refused", "elsewhere"]
OK: State = "ok"
WAITING: State = "waiting"
REFUSED: State = "refused"
ELSEWHERE: State = "elsewhere"
_NOTHING = Waiting(0, 0, 0, None)


@dataclass(frozen=True)
class SpoolReport(Reported):
    """Rows that were taken and are on their way into a table; `oldest_ms` is the age of the oldest that waits."""

    table: str
    # None: the next rows make a new one.
    spool: str | None
    host: str
    folder: str
    state: State
    waiting_records: int | None
    waiting_rows: int | None
    waiting_bytes: int | None
    oldest_ms: int | None
    fed_records: int
    fed_rows: int
    quarantined: int
    version: int | None
    error: StoredError | None


def read_spools(catalog: Catalog, *, thorough: bool = False) -> list[SpoolReport]:
    """Each spool that the catalog knows, by the name of its table. `thorough`: read files that no process has open as a
    whole, as opening the spool would; else damage inside them stays unseen."""
    rows = catalog.spools.all()
    if not rows:
        return []
    incarnation = catalog.lake_row().incarnation
    names = {head.table_id: head.table for head in catalog.history.heads()}
    return [_see(row, incarnation, names, thorough) for row in rows]


def _see(row: SpoolRow, incarnation: str, names: dict[str, str], thorough: bool) -> SpoolReport:
    folder, host = Path(row.folder), socket.gethostname()
    waiting: Waiting | None = None
    error: FloodmarkError | None = None
    state: State
    if not folder.is_dir() and row.host != host:
        state = ELSEWHERE
    elif not row.spool_id:
        state, waiting = OK, _NOTHING  # an operator settled it: the next rows make a new one
    else:
        found = look_here(folder, row.position)
        if found.id is None and not (folder / "spool.json").exists():
            error = missing(row, folder, host)
        else:
            error = why_refused(row, found, incarnation, table_exists=row.table_id in names)
        if error is None and thorough and found.pid is None:
            damage = find_damage(folder, row.position)
            error = None if damage is None else damage.error
        waiting = found.waiting
        state = REFUSED if error is not None else WAITING if waiting is not None and waiting.records else OK
    oldest = None if waiting is None or waiting.oldest_ms is None else max(0, clock.now_ms() - waiting.oldest_ms)
    return SpoolReport(
        table=names.get(row.table_id, row.table),
        spool=row.spool_id or None,
        host=row.host,
        folder=row.folder,
        state=state,
        waiting_records=None if waiting is None else waiting.records,
        waiting_rows=None if waiting is None else waiting.rows,
        waiting_bytes=None if waiting is None else waiting.bytes,
        oldest_ms=oldest,
        fed_records=row.position,
        fed_rows=row.rows,
        quarantined=row.quarantined,
        version=row.version,
        error=None if error is None else StoredError(error.as_dict()),
    )
