"""The one query behind every picture of the lake: the page, /api, /metrics and `floodmark status` show what it found.

Its shape is `Overview` in shapes.py. It reads the catalog alone, in a few short reads one after the other: what is
committed meanwhile may be in one part and not yet in another, never the other way round (tables and status are read
before commits). `digest_of` says whether two of them differ for somebody who looks at them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from floodmark import clock
from floodmark.config import MaintainSettings
from floodmark.lake import Lake
from floodmark.report.maintenance import DEFAULTS
from floodmark.report.status import audit_line, lake_status, lake_tables, look

# What is counted through all versions (what a sweep would do) is not counted again before that.
COUNT_AGE_S_MAX = 60.0
COMMITS_SHOWN = 50
AUDIT_SHOWN = 50
JOBS_SHOWN = 100
# Ages grow while nothing happens: they count as changed when they pass into the next step of this length.
AGE_STEP_MS = 10_000
_AGES = frozenset({"lag_ms", "oldest_ms"})
# Times at which somebody looked, not at which something happened.
_LOOKS = frozenset({"at", "told", "next_at"})


def overview(lake: Lake, keeping: MaintainSettings = DEFAULTS) -> dict[str, Any]:
    catalog = lake.catalog
    seen = look(catalog)
    status = lake_status(catalog, keeping, seen, COUNT_AGE_S_MAX)
    return {
        "at": clock.format_time(clock.now_ms()),
        "status": status,
        "tables": lake_tables(catalog, keeping, seen=seen),
        "sinks": lake.sinks.status(),
        # None if they cannot be read: status says why.
        "jobs": None if status["jobs"] is None else [job.as_dict() for job in seen.jobs.every[:JOBS_SHOWN]],
        "commits": [commit.as_dict() for commit in lake.history(limit=COMMITS_SHOWN)],
        "audit": [audit_line(row) for row in lake.audit(AUDIT_SHOWN)],
    }


def digest_of(found: dict[str, Any]) -> str:
    """The same for two overviews that show the same, whenever they were made."""
    text = json.dumps(_settled(found), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: one // AGE_STEP_MS if name in _AGES and isinstance(one, int) else _settled(one)
            for name, one in value.items()
            if name not in _LOOKS
        }
    return [_settled(one) for one in value] if isinstance(value, list | tuple) else value
