"""The one query behind every view of the lake: the page, /api, /metrics and `floodmark status` show its result.

It reads the catalog alone, in a few short reads one after the other: what is committed meanwhile may be in one part and
not yet in another, never the other way round (tables and status are read before commits). `digest_of` tells whether two
overviews differ for a reader.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from floodmark import clock
from floodmark.commit.catalog import Catalog
from floodmark.json_form import Json, Reported, as_json
from floodmark.model import Commit
from floodmark.report.jobs import JobReport, job_report
from floodmark.report.maintenance import DEFAULTS
from floodmark.report.status import AuditLine, Status, audit_line, lake_status, lake_tables, read_state
from floodmark.report.tables import TableLine
from floodmark.settings.settings import MaintainSettings
from floodmark.sinks.status import SinkReport, sink_reports

# What is counted over all versions (what a sweep would do) is not counted again before that.
COUNT_AGE_S_MAX = 60.0
COMMITS_SHOWN = 50
AUDIT_SHOWN = 50
JOBS_SHOWN = 100
# Ages grow while nothing happens: they count as changed when they reach the next step of this length.
AGE_STEP_MS = 10_000
_AGES = frozenset({"lag_ms", "oldest_ms"})
# Times at which a process looked, not at which something happened.
_LOOKS = frozenset({"at", "told", "next_at"})


@dataclass(frozen=True)
class Overview(Reported):
    """All that the page shows; `jobs` None: they cannot be read."""

    at: str
    status: Status
    tables: tuple[TableLine, ...]
    sinks: tuple[SinkReport, ...]
    jobs: tuple[JobReport, ...] | None
    commits: tuple[Commit, ...]
    audit: tuple[AuditLine, ...]


def overview(catalog: Catalog, keeping: MaintainSettings = DEFAULTS) -> Overview:
    seen = read_state(catalog)
    status = lake_status(catalog, keeping, seen, COUNT_AGE_S_MAX)
    return Overview(
        at=clock.format_time(clock.now_ms()),
        status=status,
        tables=tuple(lake_tables(catalog, keeping, seen=seen)),
        sinks=tuple(sink_reports(catalog)),
        # None if they cannot be read: status says why.
        jobs=None if status.jobs is None else tuple(map(job_report, seen.jobs.every[:JOBS_SHOWN])),
        commits=tuple(catalog.history.commits(limit=COMMITS_SHOWN)),
        audit=tuple(map(audit_line, catalog.history.audit(AUDIT_SHOWN))),
    )


def digest_of(found: Overview) -> str:
    """Equal for two overviews that show the same, whenever they were made."""
    text = json.dumps(_settled(as_json(found)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _settled(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {
            name: one // AGE_STEP_MS if name in _AGES and isinstance(one, int) else _settled(one)
            for name, one in value.items()
            if name not in _LOOKS
        }
    return [_settled(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
