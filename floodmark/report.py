"""What the lake says about itself: from the catalog alone, without Spark. The command, HTTP and the page share it.

Nothing here changes anything. What is due is a hint, by the figures that commits keep: maintenance itself looks closer,
and may find nothing to do. A lake of an older format, which is served as it is, has no such figures: they are None.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.drifted import drifted_tables
from floodmark.catalog.journal import ABANDONED, PUBLISHED, STAGED, STATES, to_operation
from floodmark.catalog.processes import is_dead
from floodmark.catalog.upkeep import LAKE, Maintenance, Policy
from floodmark.config import MaintainSettings
from floodmark.errors import BelowRetention, Corrupt
from floodmark.export import record as sink_record
from floodmark.maintain.record import COMPACT, FAILED, REFUSED, RETAIN, VERBS
from floodmark.model import Head
from floodmark.report_jobs import JobsSeen, not_ready, see_jobs, trouble_text

# The format since which a catalog knows of maintenance.
MAINTAINED_FORMAT = 4
# And of sinks.
SINKS_FORMAT = 5
# Time goes on and rows grow old: a policy is looked after this often.
RETAIN_EVERY_MS = 24 * 3_600_000
DEFAULTS = MaintainSettings()


def lake_status(catalog: Catalog, keeping: MaintainSettings = DEFAULTS) -> dict[str, Any]:
    """The lake on one screen. `keeping`: from when on maintenance is due."""
    row = catalog.lake_row()
    heads = catalog.history.heads()
    commits = catalog.history.commits(limit=1)
    running, pending, unknown = _unfinished(catalog)
    upkeep = _upkeep(catalog, row.format)
    sinks, jobs = _sinks(catalog), see_jobs(catalog)
    drifted = sorted(drifted_tables(catalog.database))
    files, small = sum(head.files for head in heads), _sum(upkeep.small_files.get(head.table_id) for head in heads)
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
        "small_file_ratio": _ratio(small, files),
        "versions": catalog.expiry.count_live(),
        "expired_states": catalog.expiry.count_dead(0) if upkeep.known else None,
        "last_commit": clock.format_time(commits[0].committed_ms) if commits else None,
        "running": running,
        "pending": pending,
        "unknown": unknown,
        "drifted": drifted,
        "pins": catalog.pin_count(),
        "healed": healed,
        "last_maintenance": _last_of_each_verb(upkeep, heads) if upkeep.known else None,
        "due": _due(catalog, heads, upkeep, keeping) if upkeep.known else [],
        "sinks": sinks,
        "jobs": jobs.shown,
        "jobs_error": jobs.error,
        "health": _health(unknown, pending, drifted, _unanswered(upkeep, heads), sinks, jobs),
    }


def _health(
    unknown: Sequence[str],
    pending: Sequence[str],
    drifted: Sequence[str],
    failed: Sequence[Maintenance],
    sinks: Sequence[Mapping[str, Any]],
    jobs: JobsSeen,
) -> str:
    found = [not_ready(jobs.error)] if jobs.error is not None else []
    ways_out = [_sink_failure(sink) for sink in sinks if sink["error"] is not None]
    if drifted:
        found.append(f"refused: {', '.join(drifted)} changed by another writer; see `floodmark repair`")
    if unknown:
        found.append(f"refused: {len(unknown)} operation(s) cannot be understood; see `floodmark doctor`")
    elif pending:
        settled = "the next write or `floodmark recover` settles them"
        found.append(f"recovery pending: {len(pending)} dead operation(s); {settled}")
    elif failed or ways_out or jobs.troubles:
        where = ["`floodmark maintain history`"] * bool(failed) + ["`floodmark sink status`"] * bool(ways_out)
        where += ["`floodmark backfill list`"] * bool(jobs.troubles)
        troubles = [*map(_failure, failed), *ways_out, *trouble_text(jobs.troubles)]
        found.append(f"attention: {', '.join(troubles)}; see {' and '.join(where)}")
    return "; ".join(found) or "fine"


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


# ── ways out ──


def _sinks(catalog: Catalog) -> list[dict[str, Any]]:
    """Each sink in short; `floodmark sink status` has the rest. `lag_ms` is that of the table furthest behind."""
    found = []
    for sink in catalog.sinks.all():
        lags = [catalog.units.lag(one.table_id, one.mark, sink.branch) for one in sink.tables]
        found.append(
            {
                "sink": sink.name,
                "kind": sink.kind,
                "state": sink.state,
                "tables": [one.table for one in sink.tables],
                "lag_rows": sum(lag.rows for lag in lags),
                "lag_ms": max((lag.age_ms for lag in lags), default=0),
                "quarantined": sum(catalog.units.count_quarantined(sink.id).values()),
                "error": None if sink.error is None else json.loads(sink.error),
                "error_at": None if sink.error_ms is None else clock.format_time(sink.error_ms),
            }
        )
    return found


def _sink_failure(sink: Mapping[str, Any]) -> str:
    kind = sink["error"]["kind"]
    asks = kind in (Corrupt.__name__, BelowRetention.__name__)
    return f"sink {sink['sink']} {sink_record.REFUSED if asks else sink_record.FAILED} ({kind})"


# ── maintenance ──


@dataclass(frozen=True)
class _Upkeep:
    """What the catalog knows of maintenance, by table id; `newest` has the last record of each verb and table."""

    known: bool
    newest: Sequence[Maintenance] = ()
    small_files: Mapping[str, int | None] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)

    def last(self, verb: str, table_id: str) -> Maintenance | None:
        return next((one for one in self.newest if (one.verb, one.table_id) == (verb, table_id)), None)


def _upkeep(catalog: Catalog, stored_format: int) -> _Upkeep:
    if stored_format < MAINTAINED_FORMAT:
        return _Upkeep(known=False)
    upkeep = catalog.upkeep
    return _Upkeep(True, upkeep.newest(), upkeep.small_files(), upkeep.policies())


def _unanswered(upkeep: _Upkeep, heads: Sequence[Head]) -> list[Maintenance]:
    """Runs that failed or were refused, and nothing newer has made up for it."""
    tables_there = {LAKE, *(head.table_id for head in heads)}
    found = []
    for place, record in enumerate(upkeep.newest):
        if record.outcome == REFUSED:
            # Healing refused, for all tables and verbs: any later run that was let through shows that it is over.
            stands = all(later.outcome == REFUSED for later in upkeep.newest[place + 1 :])
        else:
            stands = record.outcome == FAILED and record.table_id in tables_there
        if record.verb == RETAIN and record.table_id not in (LAKE, *upkeep.policies):
            stands = False  # its policy is gone, and with it what failed
        if stands:
            found.append(record)
    return found


def _failure(record: Maintenance) -> str:
    name = f"{record.verb} {record.table}" if record.table else record.verb
    return f"{name} {record.outcome} ({record.detail.get('error', 'unknown')})"


def _last_of_each_verb(upkeep: _Upkeep, heads: Sequence[Head]) -> dict[str, dict[str, Any] | None]:
    """When each verb ran last and how it ended, and what failed of it."""
    last = {record.verb: record for record in upkeep.newest}
    failed = _unanswered(upkeep, heads)
    return {
        verb: {
            **_summary(last[verb]),
            "table": last[verb].table or None,
            "failed": [_failure(one) for one in failed if one.verb == verb],
        }
        if verb in last
        else None
        for verb in VERBS
    }


def _summary(record: Maintenance) -> dict[str, Any]:
    return {"at": clock.format_time(record.ended_ms), "outcome": record.outcome}


def _due(catalog: Catalog, heads: Sequence[Head], upkeep: _Upkeep, keeping: MaintainSettings) -> list[str]:
    """What a run of maintenance would probably have to do now."""
    now_ms = _now_ms(catalog)
    found = [text for head in heads for text in _due_of_table(head, upkeep, keeping, now_ms)]
    old = len(catalog.expiry.expirable(now_ms - clock.parse_duration_ms(keeping.keep_versions)))
    if old:
        found.append(f"expire: {count_of(old, 'version')} older than {keeping.keep_versions}")
    grace_ms = clock.parse_duration_ms(keeping.grace)
    states, ended = catalog.expiry.count_dead(grace_ms), len(catalog.journal.to_look_at(grace_ms))
    parts = [count_of(states, "state")] if states else []
    parts += [f"{count_of(ended, 'ended operation')} to look at once more"] if ended else []
    return [*found, *([f"sweep: {', '.join(parts)}"] if parts else [])]


def _due_of_table(head: Head, upkeep: _Upkeep, keeping: MaintainSettings, now_ms: int) -> list[str]:
    found = []
    policy, last = upkeep.policies.get(head.table_id), upkeep.last(RETAIN, head.table_id)
    if policy is not None and (last is None or last.outcome == FAILED or now_ms - last.ended_ms >= RETAIN_EVERY_MS):
        when = "never" if last is None else f"{last.outcome} at {clock.format_time(last.ended_ms)}"
        found.append(f"retain {head.table}: policy {policy.retention}, last run {when}")
    small = upkeep.small_files.get(head.table_id)
    if small is not None and small > _left_alone(upkeep.last(COMPACT, head.table_id), keeping):
        found.append(f"compact {head.table}: {small} small files")
    return found


def _left_alone(last: Maintenance | None, keeping: MaintainSettings) -> int:
    """So many small files are no reason for a compaction: too few, or as many as the last one found not worth it."""
    too_few = keeping.compact_files - 1
    if last is None or last.outcome not in ("nothing_to_do", "below_threshold"):
        return too_few
    if last.detail.get("files_min", keeping.compact_files) > keeping.compact_files:
        return too_few  # it was asked to leave more of them alone
    return max(too_few, int(last.detail.get("small_files", 0)))


def _now_ms(catalog: Catalog) -> int:
    with catalog.database.read() as tx:
        return catalog.database.now_ms(tx)


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def _ratio(part: int | None, whole: int) -> float | None:
    return None if part is None else round(part / whole, 3) if whole else 0.0


# ── one table ──


def table_details(catalog: Catalog, head: Head, keeping: MaintainSettings = DEFAULTS) -> dict[str, Any]:
    """A table: its columns, layout, size and place, and how it is kept."""
    from floodmark.catalog.fills import fills_of
    from floodmark.catalog.metadata import schema_of
    from floodmark.catalog.references import references_of

    metadata = catalog.files.metadata(head.metadata_location)
    schema, spec = schema_of(metadata, head), metadata.specs()[head.spec_id]
    refers = {one.field_id: one.parent for one in references_of(metadata.properties, schema, head.table_id)}
    filled = {one.field_id: one.expression for one in fills_of(metadata.properties, schema)}
    return {
        "table": head.table,
        "table_id": head.table_id,
        "location": metadata.location,
        "rows": head.rows,
        "files": head.files,
        "bytes": head.size_bytes,
        "sequence": head.sequence,
        "version": head.version,
        "snapshot": head.snapshot,
        "columns": [
            {
                "name": field.name,
                "type": str(field.field_type),
                "required": field.required,
                "refers_to": refers.get(field.field_id),
                # The default of rows that do not bring it, or an expression.
                "filled": filled.get(field.field_id),
                "comment": field.doc or "",
            }
            for field in schema.fields
            if not field.name.startswith("_")
        ],
        "key": [schema.find_column_name(field_id) for field_id in schema.identifier_field_ids],
        "partition": [_partition_text(schema, field) for field in spec.fields],
        "sort": [
            f"{schema.find_column_name(field.source_id)} {field.direction.name.lower()}"
            for field in metadata.sort_order().fields
        ],
        "comment": metadata.properties.get("comment", ""),
        "metadata_location": head.metadata_location,
        **_table_upkeep(catalog, head, keeping),
    }


def _table_upkeep(catalog: Catalog, head: Head, keeping: MaintainSettings) -> dict[str, Any]:
    upkeep = _upkeep(catalog, catalog.lake_row().format)
    small = upkeep.small_files.get(head.table_id)
    policy = upkeep.policies.get(head.table_id, Policy())
    mine = [record for record in upkeep.newest if record.table_id == head.table_id]
    orphans = _orphans(catalog, head) if upkeep.known else None
    return {
        "small_files": small,
        "small_file_ratio": _ratio(small, head.files),
        "snapshots": catalog.expiry.count_readable(head.table_id),
        "orphan_files": None if orphans is None else orphans[0],
        "orphan_bytes": None if orphans is None else orphans[1],
        "retention": policy.retention,
        "retention_column": policy.column,
        "consumers": [
            {
                "name": one.name,
                "mark": one.mark,
                "lag": max(0, head.sequence - one.mark),
                "protected": one.protected,
            }
            for one in (catalog.upkeep.consumers(head.table_id) if upkeep.known else ())
        ],
        "last_maintenance": {record.verb: _summary(record) for record in mine},
        "due": _due_of_table(head, upkeep, keeping, _now_ms(catalog)),
    }


def _orphans(catalog: Catalog, head: Head) -> tuple[int, int] | None:
    """Files and bytes that only expired versions of the table name, whether their grace is over or not.

    None if nobody can tell, because a file that versions need is gone: `floodmark doctor` says which.
    """
    from floodmark.maintain.sweep import plan_sweep, with_sizes

    try:
        mine = [states for states in catalog.expiry.states(0, head.table) if states.table_id == head.table_id]
        files = [file for states in mine for file in with_sizes(catalog, plan_sweep(catalog, states).doomed)]
    except Corrupt:
        return None
    return len(files), sum(file.size_bytes or 0 for file in files)


def _partition_text(schema: Any, field: Any) -> str:
    column = schema.find_column_name(field.source_id)
    transform = str(field.transform)
    if transform == "identity":
        return str(column)
    name, _, rest = transform.partition("[")
    return f"{name}({rest.rstrip(']') + ', ' if rest else ''}{column})"
