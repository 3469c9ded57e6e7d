"""The status of a sink, from the catalog alone: mark, head, lag in rows and time, last unit, errors, quarantine, per
table; and whether the sink and its tables still match. Where they do not, an operator must choose.

Settings never hold a secret, so all of them are shown (I18). Nothing here imports the code that moves rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from floodmark import clock
from floodmark.catalog.sink_state import BODY_BYTES_MAX, NOT_BEFORE_MS, ROWS_DOUBTFUL, ROWS_LOST, Followed, Sink
from floodmark.catalog.units import choices
from floodmark.commit.catalog import Catalog
from floodmark.errors import Corrupt, FloodmarkError, NotFound
from floodmark.json_form import JsonObject, Reported, StoredError, stored_error
from floodmark.model import BEGINNING
from floodmark.runs import REFUSED
from floodmark.sinks.outcome import TableRun


@dataclass(frozen=True)
class LastUnit(Reported):
    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "allow"}

    unit: str
    since: int
    until: int
    version: int
    rows: int
    deletions: int
    bytes: int
    quarantined: int
    settled: str


@dataclass(frozen=True)
class SinkTable(Reported):
    table: str
    mark: int | None
    head: int | None
    epoch: int | None
    lag_rows: int
    lag_ms: int
    units: int
    rows: int
    deletions: int
    bytes: int
    replays: int
    open_unit: str | None
    last_unit: LastUnit | None
    quarantined: int
    # Rows that may have arrived twice: their part was halved without an answer.
    rows_doubtful: int
    # The maximum of rows that retention removed before they were sent: the sink is not protected, or retention was
    # forced.
    rows_lost: int
    refused: StoredError | None
    # The name that it has at the destination, if it was renamed since the sink was added.
    shipped_as: str | None


@dataclass(frozen=True)
class SinkReport(Reported):
    """The status of a sink, as `floodmark sink status --json`. Settings never hold a secret."""

    sink: str
    kind: str
    state: str
    branch: str | None
    running: str | None
    settings: JsonObject
    error: StoredError | None
    error_at: str | None
    quarantined: int
    # Maximum rows in quarantine over all tables; None if the kind has no quarantine.
    quarantine_total_max: int | None
    # The end of the pause that the destination asked for, and the largest body that it accepts, if it reported them.
    waits_until: str | None
    body_bytes_max: int | None
    lost: tuple[str, ...]
    tables: tuple[SinkTable, ...]


def sink_reports(catalog: Catalog) -> list[SinkReport]:
    return [sink_report(catalog, sink) for sink in catalog.sinks.all()]


def sink_report(catalog: Catalog, sink: Sink) -> SinkReport:
    bad = catalog.units.count_quarantined(sink.id)
    notes = catalog.sinks.notes(sink.id)
    waits_until = notes.get(("", NOT_BEFORE_MS))
    settings = json.loads(sink.settings)
    return SinkReport(
        sink=sink.name,
        kind=sink.kind,
        state=sink.state,
        branch=sink.branch,
        running=catalog.sinks.holder(sink.name),
        settings=JsonObject(settings),
        error=None if sink.error is None else stored_error(json.loads(sink.error)),
        error_at=None if sink.error_ms is None else clock.format_time(sink.error_ms),
        quarantined=sum(bad.values()),
        quarantine_total_max=settings.get("quarantine_total_max"),
        waits_until=None if waits_until is None else clock.format_time(waits_until),
        body_bytes_max=notes.get(("", BODY_BYTES_MAX)),
        lost=tuple(sink.lost),
        tables=tuple(_table(catalog, sink, one, bad.get(one.table_id, 0), notes) for one in sink.tables),
    )


def _table(
    catalog: Catalog, sink: Sink, followed: Followed, bad: int, notes: Mapping[tuple[str, str], int]
) -> SinkTable:
    lag = catalog.units.lag(followed.table_id, followed.mark, sink.branch)
    try:
        check_followed(sink, followed)
        refused = None
    except FloodmarkError as error:
        refused = StoredError(error.as_dict())
    return SinkTable(
        table=followed.table,
        mark=followed.mark,
        head=followed.head_sequence,
        epoch=followed.epoch,
        lag_rows=lag.rows,
        lag_ms=lag.age_ms,
        units=followed.units,
        rows=followed.rows,
        deletions=followed.deletions,
        bytes=followed.size_bytes,
        replays=followed.replays,
        open_unit=followed.open_unit or followed.retry_unit,
        last_unit=None if followed.last_unit is None else _last_unit(followed.last_unit),
        quarantined=bad,
        rows_doubtful=notes.get((followed.table_id, ROWS_DOUBTFUL), 0),
        rows_lost=notes.get((followed.table_id, ROWS_LOST), 0),
        refused=refused,
        shipped_as=None if followed.shipped_as == followed.table else followed.shipped_as,
    )


def _last_unit(text: str) -> LastUnit:
    last = json.loads(text)
    settled = clock.format_time(last.pop("settled_ms"))
    return LastUnit(**last, settled=settled)


# ── whether a sink and its tables still match ──


def is_current(sink: Sink) -> bool:
    return all(one.current and one.incarnation == sink.lake for one in sink.tables) and not sink.lost


def lost_tables(sink: Sink) -> list[TableRun]:
    return [TableRun(table, REFUSED, error=_lost_mark(sink.name, table)) for table in sink.lost]


def _lost_mark(sink: str, table: str) -> Corrupt:
    return Corrupt("the sink's mark is lost", sink=sink, table=table, advice=choices(sink, table))


def check_followed(sink: Sink, followed: Followed) -> None:
    """Refuse to go on where marks and table do not match: an operator must choose."""
    facts = {"sink": sink.name, "table": followed.table}
    advice = choices(sink.name, followed.table)
    if sink.branch is None:
        raise NotFound("the branch that the sink follows was deleted", **facts, advice="Remove the sink.")
    if followed.head_id is None:
        raise NotFound("the table of the sink does not exist", **facts, advice="Create it again, or remove the sink.")
    if followed.head_id != followed.table_id:
        raise Corrupt(
            "the table was dropped and created again: the sink's mark is of the old one", **facts, advice=advice
        )
    if followed.incarnation != sink.lake:
        raise Corrupt(
            "the catalog was restored from a backup: the sink may have sent rows that it does not know of",
            **facts,
            mark=followed.mark,
            advice=advice,
        )
    if followed.mark is None or followed.epoch is None:
        raise _lost_mark(sink.name, followed.table)
    if followed.head_sequence is None or not BEGINNING <= followed.mark <= followed.head_sequence:
        raise Corrupt(
            "the sink's mark is not a sequence of the table",
            **facts,
            mark=followed.mark,
            newest=followed.head_sequence,
            advice=advice,
        )
