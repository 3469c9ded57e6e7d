"""The state of the lake, from the catalog alone, without Spark. The command, HTTP and the page share it.

Nothing here changes anything. `read_state` reads once what several answers need; `lake_status` and `lake_tables` are
such answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import func, select

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.history import drifted_tables
from floodmark.catalog.leases import is_dead
from floodmark.catalog.turns import waiting
from floodmark.commit.catalog import Catalog
from floodmark.commit.journal import ABANDONED, PUBLISHED, STAGED, STATES, UnfinishedOperation, to_operation
from floodmark.errors import Corrupt
from floodmark.json_form import Reported
from floodmark.model import MAIN, AuditRow, Head
from floodmark.report.daemon import DaemonReport, read_daemon
from floodmark.report.health import Health, Troubles, judge
from floodmark.report.indexes import IndexTotals, sum_totals
from floodmark.report.jobs import JobLine, JobsState, read_jobs
from floodmark.report.maintenance import (
    DEFAULTS,
    LastRun,
    MaintenanceOverview,
    due_now,
    last_of_each_verb,
    ratio,
    read_maintenance,
    sum_known,
    unanswered,
)
from floodmark.report.sinks import SinkLine, read_sinks
from floodmark.report.spools import SpoolReport, read_spools
from floodmark.report.tables import TableLine, table_lines
from floodmark.settings.settings import MaintainSettings


@dataclass(frozen=True)
class Status(Reported):
    """The lake on one screen, as `floodmark status --json`. `health` is "fine", or what is wrong and where to look."""

    lake: str
    catalog: str
    format: int
    incarnation: str
    version: int
    branches: int
    tables: int
    rows: int
    files: int
    bytes: int
    small_files: int | None
    small_file_ratio: float | None
    versions: int
    expired_states: int
    last_commit: str | None
    running: tuple[str, ...]
    # Of those that run: sealed, and waiting for others that publish to the same tables; the longest first.
    waiting: tuple[WaitingLine, ...]
    pending: tuple[str, ...]
    unknown: tuple[str, ...]
    drifted: tuple[str, ...]
    pins: int
    recovered: Mapping[str, int]
    last_maintenance: Mapping[str, LastRun | None]
    due: tuple[str, ...]
    sinks: tuple[SinkLine, ...]
    spools: tuple[SpoolReport, ...]
    # Of the tables of main. What they cover, `floodmark index list` says.
    indexes: IndexTotals
    # Rows that sinks and spools set aside and no operator has settled yet.
    quarantined: int
    daemon: DaemonReport | None
    # None: they cannot be read, and jobs_error says why.
    jobs: tuple[JobLine, ...] | None
    jobs_error: str | None
    # The parts of `health` that make the lake not ready.
    blocking: tuple[str, ...]
    health: str


@dataclass(frozen=True)
class WaitingLine(Reported):
    """An operation that waits for its turn to publish to tables, since when, and which operations go first."""

    operation: str
    kind: str
    actor: str
    tables: tuple[str, ...]
    since: str
    behind: tuple[str, ...]


@dataclass(frozen=True)
class AuditLine(Reported):
    time: str
    operation: str
    kind: str
    found: str
    outcome: str
    version: int | None
    detail: str


@dataclass(frozen=True)
class Unfinished:
    """Operations at work, dead ones that recovery will settle, and ones that it cannot understand."""

    running: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LakeIdentity:
    location: str
    format: int
    incarnation: str
    version: int


@dataclass(frozen=True)
class LakeState:
    """What one look at the catalog found, of main."""

    lake: LakeIdentity
    heads: Sequence[Head]
    upkeep: MaintenanceOverview
    sinks: tuple[SinkLine, ...]
    spools: tuple[SpoolReport, ...]
    daemon: DaemonReport | None
    jobs: JobsState
    drifted: tuple[str, ...]


def read_state(catalog: Catalog) -> LakeState:
    row = catalog.lake_row()
    upkeep = read_maintenance(catalog)
    return LakeState(
        LakeIdentity(row.location, row.format, row.incarnation, row.version),
        catalog.history.heads(),
        upkeep,
        tuple(read_sinks(catalog, upkeep.newest)),
        tuple(read_spools(catalog)),
        read_daemon(catalog),
        read_jobs(catalog),
        tuple(sorted(drifted_tables(catalog.database))),
    )


def lake_health(catalog: Catalog, seen: LakeState | None = None) -> Health:
    """The health of the lake. Quick: it counts only what is asked for."""
    return _judged(seen or read_state(catalog), _unfinished(catalog))


def lake_status(
    catalog: Catalog, keeping: MaintainSettings = DEFAULTS, seen: LakeState | None = None, age_s_max: float = 0.0
) -> Status:
    """The lake on one screen. `keeping`: the thresholds from which maintenance is due.

    `age_s_max`: the maximum age of counts over all versions (what a sweep would do).
    """
    seen = seen or read_state(catalog)
    lake, heads, upkeep = seen.lake, seen.heads, seen.upkeep
    commits = catalog.history.commits(limit=1)
    unfinished = _unfinished(catalog)
    health = _judged(seen, unfinished)
    files, small = sum(head.files for head in heads), sum_known(upkeep.small_files.get(head.table_id) for head in heads)
    with catalog.database.read() as tx:
        query = select(tables.audit.c.outcome, func.count()).group_by(tables.audit.c.outcome)
        branches = tx.execute(select(func.count()).select_from(tables.branches)).scalar_one()
        recovered = {outcome: count for outcome, count in tx.execute(query)}  # noqa: C416 - rows are not pairs to mypy
    return Status(
        lake=lake.location,
        catalog=catalog.database.shown_url,
        format=lake.format,
        incarnation=lake.incarnation,
        version=lake.version,
        branches=branches,
        tables=len(heads),
        rows=sum(head.rows for head in heads),
        files=files,
        bytes=sum(head.size_bytes for head in heads),
        small_files=small,
        small_file_ratio=ratio(small, files),
        versions=catalog.expiry.count_live(),
        expired_states=catalog.expiry.count_dead(0, age_s_max=age_s_max),
        last_commit=clock.format_time(commits[0].committed_ms) if commits else None,
        running=tuple(unfinished.running),
        waiting=_waiting(catalog, lake.format),
        pending=tuple(unfinished.pending),
        unknown=tuple(unfinished.unknown),
        drifted=seen.drifted,
        pins=catalog.pin_count(),
        recovered=recovered,
        last_maintenance=last_of_each_verb(upkeep, heads),
        due=tuple(due_now(catalog, heads, upkeep, keeping, age_s_max)),
        sinks=seen.sinks,
        spools=seen.spools,
        indexes=sum_totals(catalog.indexes.totals(), {head.table_id for head in heads}),
        quarantined=sum(one.quarantined for one in seen.sinks) + sum(one.quarantined for one in seen.spools),
        daemon=seen.daemon,
        jobs=seen.jobs.shown,
        jobs_error=seen.jobs.error,
        blocking=health.blocking,
        health=health.text,
    )


def lake_tables(
    catalog: Catalog, keeping: MaintainSettings = DEFAULTS, branch: str = MAIN, seen: LakeState | None = None
) -> list[TableLine]:
    """Every table of a branch in one line, by name."""
    if branch != MAIN:
        return table_lines(catalog, catalog.history.heads(branch), MaintenanceOverview(), (), (), keeping)
    seen = seen or read_state(catalog)
    return table_lines(catalog, seen.heads, seen.upkeep, seen.spools, seen.drifted, keeping)


def audit_line(row: AuditRow) -> AuditLine:
    """One action of recovery or a repair, in one line."""
    return AuditLine(
        time=clock.format_time(row.at_ms),
        operation=row.operation,
        kind=row.kind,
        found=row.found,
        outcome=row.outcome,
        version=row.version,
        detail=row.detail,
    )


def _waiting(catalog: Catalog, lake_format: int) -> tuple[WaitingLine, ...]:
    if lake_format < tables.TOGETHER_FORMAT:
        return ()  # read-only: no process has migrated it
    head, operation, turn = tables.heads, tables.operations, tables.turns
    with catalog.database.read() as tx:
        found = waiting(tx)
        if not found:
            return ()
        known = operation.c.id.in_([one.operation for one in found])
        rows = {
            row.id: row for row in tx.execute(select(operation.c.id, operation.c.kind, operation.c.actor).where(known))
        }
        names = {row.table_id: row.table_name for row in tx.execute(select(head.c.table_id, head.c.table_name))}
        turns = {row.table_id: row.operation for row in tx.execute(select(turn.c.table_id, turn.c.operation))}
    return tuple(
        WaitingLine(
            operation=one.operation,
            kind=rows[one.operation].kind,
            actor=rows[one.operation].actor,
            tables=tuple(sorted(names.get(table, table) for table in one.table_ids)),
            since=clock.format_time(one.since_ms),
            behind=tuple(sorted({turns[table] for table in one.table_ids if table in turns} - {one.operation})),
        )
        for one in found
        if one.operation in rows
    )


def _judged(seen: LakeState, found: Unfinished) -> Health:
    failed = unanswered(seen.upkeep, seen.heads)
    return judge(
        Troubles(found.unknown, found.pending, seen.drifted, failed, seen.sinks, seen.spools, seen.daemon, seen.jobs)
    )


def _unfinished(catalog: Catalog) -> Unfinished:
    rows, now = catalog.journal.unfinished()
    found = Unfinished()
    for row in rows:
        if row.state in (ABANDONED, PUBLISHED):
            continue
        if row.state not in STATES:
            found.unknown.append(row.id)
        elif catalog.journal.is_own(row) or not is_dead(row.holder.row, now):
            found.running.append(row.id)
        elif _is_understood(catalog, row):
            found.pending.append(row.id)
        else:
            found.unknown.append(row.id)
    return found


def _is_understood(catalog: Catalog, row: UnfinishedOperation) -> bool:
    """Whether recovery can settle this dead operation."""
    try:
        to_operation(row)
        if row.state == STAGED:
            catalog.journal.read_seal(row.id)
    except Corrupt:
        return False
    return True
