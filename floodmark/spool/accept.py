"""An operator accepts a refused spool: continues with the spool in the folder, or without its damaged records, begins a
new one, or gives it up.

`plan` reports what may be lost and what may come twice, and changes nothing. `accept` applies the plan in two steps: it
stamps the folder with the lake's incarnation if it had another one, then updates the catalog. After a crash between the
two the next plan starts from the folder and the catalog as they are.
"""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from floodmark.catalog.spools import SpoolRow
from floodmark.commit.catalog import Catalog
from floodmark.errors import Conflict, Corrupt, FloodmarkError, Invalid, NotFound
from floodmark.failpoints import hit
from floodmark.json_form import Json
from floodmark.spool.folder import read_about, take_lock, write_about
from floodmark.spool.salvage import Damage, find_damage, mend
from floodmark.spool.state import SpoolLook, look, missing, why_refused

NOTHING, GO_ON, MEND, BEGIN_ANEW, GIVE_UP = "nothing_to_do", "go_on", "mend", "begin_anew", "give_up"


@dataclass(frozen=True)
class Acceptance:
    """What would be done with a table's spool, and what that costs. `rows`: in the spool, and not fed, if known."""

    table: str
    table_id: str
    action: str
    row: SpoolRow | None
    folder: Path
    spool_id: str = ""
    position: int = 0
    stamp: bool = False
    rows: int | None = None
    why: str = ""
    lost: str = "nothing"
    twice: str = "nothing"
    damage: Damage | None = None

    def as_dict(self) -> dict[str, Json]:
        shown = {name: getattr(self, name) for name in ("table", "table_id", "action", "position", "rows")}
        return {
            **shown,
            "spool": self.spool_id or None,
            "folder": str(self.folder),
            "why": self.why,
            "lost": self.lost,
            "twice": self.twice,
        }


def plan(catalog: Catalog, name: str, root: Path | None) -> Acceptance:
    """What accepting the spool of a table would do: the table's name, or its id if it is gone. Changes nothing."""
    names = {head.table_id: head.table for head in catalog.history.heads()}
    row, table_id = _find(catalog, name, names)
    if row is None and root is None:
        raise NotFound("this table has no spool", table=name, advice="`floodmark spool list` lists the existing ones.")
    host = socket.gethostname()
    folder = Path(row.folder) if row is not None else (root or Path()) / table_id
    if row is not None and root is not None and not folder.is_dir():
        folder = root / table_id
    table = names.get(table_id, row.table if row is not None else table_id)
    found = look(folder, row.position if row is not None else 0)
    there = found.id is not None or (folder.is_dir() and (folder / "spool.json").exists())
    if row is None and not there:
        raise NotFound("this table has no spool", table=name, advice="`floodmark spool list` lists the existing ones.")
    if table_id not in names:
        return _give_up(table, table_id, row, folder, found)
    plain = Acceptance(table, table_id, NOTHING, row, folder, found.id or "", 0 if row is None else row.position)
    if row is not None and not row.spool_id and not there:
        return plain
    if not there:
        assert row is not None
        return _begin_anew(plain, row, missing(row, folder, host))
    known = row or SpoolRow(table_id, table, "", host, str(folder), 0, None, 0, 0, 0, 0)
    problem = why_refused(known, found, catalog.lake_row().incarnation, table_exists=True)
    # The process that has it open has read all of it.
    if problem is None and found.pid is not None:
        return plain
    if problem is None or isinstance(problem, Corrupt):
        damage = find_damage(folder, known.position)
        if damage is not None:
            return _mend(plain, found, damage)
    if problem is None:
        return plain
    return _go_on(plain, known, found, problem, catalog.lake_row().incarnation)


def _find(catalog: Catalog, name: str, names: dict[str, str]) -> tuple[SpoolRow | None, str]:
    """The spool's row, if the catalog has one, and the table's id. A name means the table that has it now."""
    rows = [row for row in catalog.spools.all() if name in (row.table, row.table_id)]
    live = [table_id for table_id, table in names.items() if name in (table, table_id)]
    rows = [row for row in rows if row.table_id in live] or rows
    if len(rows) > 1:
        raise Invalid(
            "several tables that are gone had this name",
            table=name,
            ids=", ".join(row.table_id for row in rows),
            advice="Name one by its id.",
        )
    if rows:
        return rows[0], rows[0].table_id
    return None, live[0] if live else name


def _begin_anew(plain: Acceptance, row: SpoolRow, problem: FloodmarkError) -> Acceptance:
    return replace(
        plain,
        action=BEGIN_ANEW,
        spool_id="",
        position=0,
        why=problem.message,
        lost=f"rows of spool {row.spool_id} from record {row.position} on, if it has any; later it is refused",
    )


def _give_up(table: str, table_id: str, row: SpoolRow | None, folder: Path, found: SpoolLook) -> Acceptance:
    rows = None if found.waiting is None else found.waiting.rows
    return Acceptance(
        table,
        table_id,
        GIVE_UP,
        row,
        folder,
        found.id or "",
        rows=rows,
        why="the table of this spool is gone",
        lost="rows that were not fed, if it has any" if rows is None else f"{rows} rows that were not fed",
    )


def _go_on(plain: Acceptance, row: SpoolRow, found: SpoolLook, problem: FloodmarkError, incarnation: str) -> Acceptance:
    if found.id is None or found.table_id != row.table_id:
        raise _cannot(problem, plain)
    if found.problem is not None and not isinstance(found.problem, Conflict):
        raise _cannot(found.problem, plain)
    lost, twice = [], []
    if row.spool_id and found.id != row.spool_id:
        position = found.first
        lost.append(f"rows of spool {row.spool_id} from record {row.position} on, if it has any")
        twice.append("rows of this spool that came into the table before")
    else:
        position = min(max(row.position, found.first), found.end)
        if found.first > row.position:
            lost.append(f"records {row.position} to {found.first - 1}, which are not in the spool any more")
        if found.end < row.position:
            twice.append(f"rows of clients who repeat what was taken in records {found.end} to {row.position - 1}")
    if found.incarnation != incarnation and row.position > position:
        lost.append("rows that were fed after the backup that the catalog was restored from")
    waiting = look(plain.folder, position).waiting
    return replace(
        plain,
        action=GO_ON,
        spool_id=found.id,
        position=position,
        stamp=found.incarnation != incarnation,
        rows=None if waiting is None else waiting.rows,
        why=problem.message,
        lost="; ".join(lost) or "nothing",
        twice="; ".join(twice) or "nothing",
    )


def _mend(plain: Acceptance, found: SpoolLook, damage: Damage) -> Acceptance:
    """The damaged files stay beside the spool under another name; every readable record of them is fed."""
    file = Path(str(damage.error.facts.get("file", ""))).name
    return replace(
        plain,
        action=MEND,
        rows=None if found.waiting is None else found.waiting.rows,
        why=f"{damage.error.message} ({file})",
        lost=damage.lost,
        twice=damage.twice,
        damage=damage,
    )


def _cannot(problem: FloodmarkError, plain: Acceptance) -> FloodmarkError:
    return Conflict(
        f"this spool cannot be accepted: {problem.message}",
        table=plain.table,
        folder=plain.folder,
        advice="Move its folder away and keep it; then accept that the table has none.",
    )


def accept(catalog: Catalog, planned: Acceptance) -> None:
    """Apply the plan. Conflict if the spool changed meanwhile; Busy if a process has it open."""
    if planned.action == NOTHING:
        return
    row = planned.row
    if planned.action == GIVE_UP:
        _delete(catalog, planned)
        return
    if planned.damage is not None:
        mend(planned.folder, planned.damage)
        return
    if planned.stamp:
        lock = take_lock(planned.folder)
        try:
            about = read_about(planned.folder)
            if about is None or about.spool != planned.spool_id:
                raise Conflict("the folder has another spool now", table=planned.table, advice="Look again.")
            write_about(planned.folder, replace(about, incarnation=catalog.lake_row().incarnation))
            # Crash here: the spool is this lake's; the next plan checks again whether its records fit the position.
            hit("accept.stamped")
        finally:
            os.close(lock)
    if row is None:
        host = socket.gethostname()
        row = catalog.spools.register(planned.table_id, planned.table, planned.spool_id, host, str(planned.folder))
    catalog.spools.accept(row, planned.spool_id, planned.position)
    hit("accept.accepted")


def _delete(catalog: Catalog, planned: Acceptance) -> None:
    lock = take_lock(planned.folder) if planned.folder.is_dir() else None
    try:
        if planned.row is not None:
            catalog.spools.forget(planned.row)
        # Crash here: a folder of a deleted table; accepting it again, by the table's id, deletes it.
        hit("accept.accepted")
        if lock is not None:
            shutil.rmtree(planned.folder)
    finally:
        if lock is not None:
            os.close(lock)
