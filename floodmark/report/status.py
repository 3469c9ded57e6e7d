"""What the lake says about itself: from the catalog alone, without Spark. The command, HTTP and the page share it.

Nothing here changes anything. `look` reads once what several answers are made of; `lake_status` and `lake_tables` are
such answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.drifted import drifted_tables
from floodmark.catalog.journal import ABANDONED, PUBLISHED, STAGED, STATES, to_operation
from floodmark.catalog.processes import is_dead
from floodmark.config import MaintainSettings
from floodmark.errors import Corrupt
from floodmark.model import MAIN, AuditRow, Head
from floodmark.report.health import Health, Troubles, judge
from floodmark.report.jobs import JobsSeen, see_jobs
from floodmark.report.maintenance import (
    DEFAULTS,
    UpkeepSeen,
    due_now,
    last_of_each_verb,
    ratio,
    see_upkeep,
    sum_known,
    unanswered,
)
from floodmark.report.sinks import see_sinks
from floodmark.report.spools import see_spools
from floodmark.report.tables import table_lines


@dataclass(frozen=True)
class Look:
    """What one look at the catalog found, of main."""

    row: Any
    heads: Sequence[Head]
    upkeep: UpkeepSeen
    sinks: list[dict[str, Any]]
    spools: list[dict[str, Any]]
    daemon: dict[str, Any] | None
    jobs: JobsSeen
    drifted: list[str]


def look(catalog: Catalog) -> Look:
    row = catalog.lake_row()
    upkeep = see_upkeep(catalog)
    return Look(
        row,
        catalog.history.heads(),
        upkeep,
        see_sinks(catalog, upkeep.newest),
        see_spools(catalog),
        catalog.daemon.seen(),
        see_jobs(catalog),
        sorted(drifted_tables(catalog.database)),
    )


def lake_health(catalog: Catalog, seen: Look | None = None) -> Health:
    """Is it fine? Quick: nothing is counted that is not asked for."""
    return _judged(seen or look(catalog), _unfinished(catalog))


def lake_status(
    catalog: Catalog, keeping: MaintainSettings = DEFAULTS, seen: Look | None = None, age_s_max: float = 0.0
) -> dict[str, Any]:
    """The lake on one screen. `keeping`: from when on maintenance is due.

    `age_s_max`: what has to be counted through all versions (what a sweep would do) may be so old.
    """
    seen = seen or look(catalog)
    row, heads, upkeep = seen.row, seen.heads, seen.upkeep
    commits = catalog.history.commits(limit=1)
    unfinished = running, pending, unknown = _unfinished(catalog)
    health = _judged(seen, unfinished)
    files, small = sum(head.files for head in heads), sum_known(upkeep.small_files.get(head.table_id) for head in heads)
    with catalog.database.read() as tx:
        query = select(tables.audit.c.outcome, func.count()).group_by(tables.audit.c.outcome)
        branches = tx.execute(select(func.count()).select_from(tables.branches)).scalar_one()
        healed = {outcome: count for outcome, count in tx.execute(query)}  # noqa: C416 - rows are not pairs to mypy
    return {
        "lake": row.location,
        "catalog": catalog.database.shown_url,
        "format": row.format,
        "incarnation": row.incarnation,
        "version": row.version,
        "branches": branches,
        "tables": len(heads),
        "rows": sum(head.rows for head in heads),
        "files": files,
        "bytes": sum(head.size_bytes for head in heads),
        "small_files": small,
        "small_file_ratio": ratio(small, files),
        "versions": catalog.expiry.count_live(),
        "expired_states": catalog.expiry.count_dead(0, age_s_max=age_s_max),
        "last_commit": clock.format_time(commits[0].committed_ms) if commits else None,
        "running": running,
        "pending": pending,
        "unknown": unknown,
        "drifted": seen.drifted,
        "pins": catalog.pin_count(),
        "healed": healed,
        "last_maintenance": last_of_each_verb(upkeep, heads),
        "due": due_now(catalog, heads, upkeep, keeping, age_s_max),
        "sinks": seen.sinks,
        "spools": seen.spools,
        "quarantined": sum(one["quarantined"] for one in (*seen.sinks, *seen.spools)),
        "daemon": seen.daemon,
        "jobs": seen.jobs.shown,
        "jobs_error": seen.jobs.error,
        "blocking": list(health.blocking),
        "health": health.text,
    }


def lake_tables(
    catalog: Catalog, keeping: MaintainSettings = DEFAULTS, branch: str = MAIN, seen: Look | None = None
) -> list[dict[str, Any]]:
    """Every table of a branch in one line, by name."""
    if branch != MAIN:
        return table_lines(catalog, catalog.history.heads(branch), UpkeepSeen(), (), (), keeping)
    seen = seen or look(catalog)
    return table_lines(catalog, seen.heads, seen.upkeep, seen.spools, seen.drifted, keeping)


def audit_line(row: AuditRow) -> dict[str, Any]:
    """What healing or a repair did, once, in one line."""
    return {
        "time": clock.format_time(row.at_ms),
        "operation": row.operation,
        "kind": row.kind,
        "found": row.found,
        "outcome": row.outcome,
        "version": row.version,
        "detail": row.detail,
    }


def _judged(seen: Look, unfinished: tuple[list[str], list[str], list[str]]) -> Health:
    _, pending, unknown = unfinished
    failed = unanswered(seen.upkeep, seen.heads)
    return judge(Troubles(unknown, pending, seen.drifted, failed, seen.sinks, seen.spools, seen.daemon, seen.jobs))


def _unfinished(catalog: Catalog) -> tuple[list[str], list[str], list[str]]:
    """Operations at work, dead ones that healing will settle, and ones that it cannot understand."""
    rows, now = catalog.journal.unfinished()
    running, pending, unknown = [], [], []
    for row in rows:
        if row.state in (ABANDONED, PUBLISHED):
            continue
        if row.state not in STATES:
            unknown.append(row.id)
        elif catalog.journal.is_own(row) or not is_dead(row, now):
            running.append(row.id)
        elif _is_understood(catalog, row):
            pending.append(row.id)
        else:
            unknown.append(row.id)
    return running, pending, unknown


def _is_understood(catalog: Catalog, row: Any) -> bool:
    """Can a healer settle this dead operation?"""
    try:
        to_operation(row)
        if row.state == STAGED:
            catalog.journal.read_seal(row.id)
    except Corrupt:
        return False
    return True
