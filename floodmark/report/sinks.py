"""What the lake says of its ways out: each sink in short; `floodmark sink status` has the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from floodmark import clock
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.upkeep import Maintenance
from floodmark.errors import BelowRetention, Corrupt
from floodmark.export import record as sink_record
from floodmark.maintain.record import SINK_VERBS


def see_sinks(catalog: Catalog, records: Sequence[Maintenance]) -> list[dict[str, Any]]:
    """Each sink in short. `lag_ms` is that of the table furthest behind; `maintenance`: the last of each."""
    found = []
    maintained = [record for record in records if record.verb in SINK_VERBS]
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
                "maintenance": [
                    {
                        "verb": one.verb,
                        "table": one.table,
                        "outcome": one.outcome,
                        "at": clock.format_time(one.ended_ms),
                    }
                    for one in maintained
                    if one.detail.get("sink") == sink.name
                ],
            }
        )
    return found


def sink_failure(sink: Mapping[str, Any]) -> str:
    kind = sink["error"]["kind"]
    asks = kind in (Corrupt.__name__, BelowRetention.__name__)
    return f"sink {sink['sink']} {sink_record.REFUSED if asks else sink_record.FAILED} ({kind})"
