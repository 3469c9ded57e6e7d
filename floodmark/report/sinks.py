"""The state of the lake's sinks, in short; `floodmark sink status` has the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from floodmark import clock
from floodmark.catalog.maintenance_state import Maintenance
from floodmark.commit.catalog import Catalog
from floodmark.errors import BelowRetention, Corrupt
from floodmark.json_form import Reported, StoredError, stored_error
from floodmark.maintenance.record import SINK_VERBS
from floodmark.runs import FAILED, REFUSED


@dataclass(frozen=True)
class DestinationMaintenance(Reported):
    """The last run of one kind of maintenance on a table that a sink ships to."""

    verb: str
    table: str
    outcome: str
    at: str


@dataclass(frozen=True)
class SinkLine(Reported):
    """A sink in short; `lag_rows` are changes of all its tables, `lag_ms` is the age of the oldest of them."""

    sink: str
    kind: str
    state: str
    tables: tuple[str, ...]
    lag_rows: int
    lag_ms: int
    quarantined: int
    error: StoredError | None
    error_at: str | None
    maintenance: tuple[DestinationMaintenance, ...]


def read_sinks(catalog: Catalog, records: Sequence[Maintenance]) -> list[SinkLine]:
    """Each sink in short. `lag_ms` is that of the table furthest behind; `maintenance`: the last run of each."""
    found = []
    maintained = [record for record in records if record.verb in SINK_VERBS]
    for sink in catalog.sinks.all():
        lags = [catalog.units.lag(one.table_id, one.mark, sink.branch) for one in sink.tables]
        found.append(
            SinkLine(
                sink=sink.name,
                kind=sink.kind,
                state=sink.state,
                tables=tuple(one.table for one in sink.tables),
                lag_rows=sum(lag.rows for lag in lags),
                lag_ms=max((lag.age_ms for lag in lags), default=0),
                quarantined=sum(catalog.units.count_quarantined(sink.id).values()),
                error=None if sink.error is None else stored_error(json.loads(sink.error)),
                error_at=None if sink.error_ms is None else clock.format_time(sink.error_ms),
                maintenance=tuple(
                    DestinationMaintenance(one.verb, one.table, one.outcome, clock.format_time(one.ended_ms))
                    for one in maintained
                    if one.detail.get("sink") == sink.name
                ),
            )
        )
    return found


def sink_failure(sink: str, error: StoredError) -> str:
    asks = error.kind in (Corrupt.__name__, BelowRetention.__name__)
    return f"sink {sink} {REFUSED if asks else FAILED} ({error.kind})"
