"""/metrics for Prometheus: the figures of the one overview, read at the scrape, and the counts of this process.

No figure of the lake comes from the process's memory: a restart loses only its own counts. If the state cannot be read,
the answer is still 200, with `floodmark_state_readable 0` and `floodmark_ready 0` and without any figure of the lake:
an old figure would look well, and a failed answer would lose the counts of this process too. It has a registry of its
own, so that no other metric of this process gets in.

Every figure of the lake is one that `floodmark status --json` or a list of the API has under a similar name: only sums
are computed here. Unknown figures are left out, never zero. Labels are bounded: the first tables, sinks and jobs have
series of their own, the rest is one series named `(others)`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from floodmark import clock, log
from floodmark.catalog.jobs import FAILED, INTERRUPTED, PENDING, RUNNING, UNKNOWN
from floodmark.report.daemon import DaemonReport, TaskReport
from floodmark.report.health import FINE
from floodmark.report.jobs import JobLine
from floodmark.report.overview import Overview, overview
from floodmark.report.sinks import SinkLine
from floodmark.report.spools import REFUSED, SpoolReport
from floodmark.report.tables import TableLine
from floodmark.serve.http.events import Events
from floodmark.serve.http.openapi import Described, errors
from floodmark.serve.http.readiness import judge_ready
from floodmark.serve.http.service import Service
from floodmark.serve.http.timeseries import Figures
from floodmark.serve.http.workers import SharedAnswer
from floodmark.sinks.status import SinkReport

LABELS_MAX = 200
OTHERS = "(others)"
# The states of jobs that matter now, without those that have ended.
JOB_STATES = (PENDING, RUNNING, FAILED, INTERRUPTED, UNKNOWN)
# Requests for unknown addresses share one name.
NO_ROUTE = "(none)"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER_METHOD = "(other)"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_DESCRIBED: Described = {
    200: {
        "content": {"text/plain": {"schema": {"type": "string"}}},
        "description": "Prometheus's text format, or OpenMetrics if requested; docs/observing.md lists the metrics.",
    },
    **errors(401, 403),
}


class Metrics:
    """What this process counts; the lake counts for itself."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._requests = Counter(
            "floodmark_http_requests",
            "Answered requests, by route, method and status.",
            ["route", "method", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "floodmark_http_request_seconds",
            "Seconds until the answer started, by route and method.",
            ["route", "method"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._accepted = Counter(
            "floodmark_http_rows_accepted",
            "Rows accepted with 200 or 202, by table.",
            ["table"],
            registry=self._registry,
        )
        self._tables: set[str] = set()

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else OTHER_METHOD
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route, method).observe(seconds)

    def accepted(self, table: str, rows: int) -> None:
        """Count rows that were taken for an existing table."""
        if table not in self._tables and len(self._tables) >= LABELS_MAX:
            table = OTHERS
        self._tables.add(table)
        self._accepted.labels(table).inc(rows)

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()


@dataclass(frozen=True)
class ScrapeState:
    """What one scrape saw of the lake; `committed`: rows by table and change."""

    overview: Overview
    ready: bool
    committed: Mapping[tuple[str, str], int]


class _Scrape(Collector):
    """One answer; `found` is None if the state cannot be read."""

    def __init__(self, found: ScrapeState | None, metrics: Metrics, listeners: int) -> None:
        self._found = found
        self._metrics = metrics
        self._listeners = listeners

    def collect(self) -> Iterator[Metric]:
        readable = "Whether the lake's state could be read at this scrape."
        yield gauge("floodmark_state_readable", readable, self._found is not None)
        if self._found is None:
            yield gauge("floodmark_ready", "Whether the lake is ready, as reported by /readyz.", 0)
        else:
            yield from lake_families(self._found.overview, self._found.ready)
            yield _rows_committed(self._found.committed)
        yield gauge("floodmark_event_listeners", "Open streams of /api/events.", self._listeners)
        yield from self._metrics.collect()


def _rows_committed(totals: Mapping[tuple[str, str], int]) -> Metric:
    family = CounterMetricFamily(
        "floodmark_rows_committed",
        "Rows committed to main since this process started, by table and change.",
        labels=["table", "change"],
    )
    own = set(sorted({table for table, _ in totals})[:LABELS_MAX])
    folded: dict[tuple[str, str], int] = {}
    for (table, change), rows in totals.items():
        name = (table if table in own else OTHERS, change)
        folded[name] = folded.get(name, 0) + rows
    for name, rows in sorted(folded.items()):
        family.add_metric(list(name), float(rows))
    return family


class Timed:
    """Around every request: how long until its answer began, under the template of its route, never its path."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()

        async def send_timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", None) or NO_ROUTE
                self._metrics.answered(route, scope["method"], message["status"], time.monotonic() - began_s)
            await send(message)

        await self._app(scope, receive, send_timed)


def add_metrics(app: FastAPI, service: Service) -> None:
    app.state.metrics = metrics = Metrics()
    figures: Figures = app.state.figures
    events: Events = app.state.events

    def see() -> ScrapeState:
        found = overview(service.lake.catalog, service.keeping)
        ready = judge_ready(found.status.health, found.status.blocking, service.intake, service.store).ready
        return ScrapeState(found, ready, figures.totals())

    shared = SharedAnswer(service.workers, see)
    app.add_middleware(Timed, metrics=metrics)

    @app.get("/metrics", response_class=Response, responses=_DESCRIBED)
    async def get_metrics(request: Request) -> Response:
        """The lake and this process in figures."""
        service.access.check(request, "read")
        found = None
        try:
            found = await shared.ask()
        except Exception as error:  # noqa: BLE001 - floodmark_state_readable reports it
            log.get().warning("the lake's state cannot be read", cause=repr(error))
        registry = CollectorRegistry()
        registry.register(_Scrape(found, metrics, events.clients))
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), 200, media_type=media_type)


# ── the lake ──


def lake_families(found: Overview, ready: bool) -> Iterator[Metric]:
    """All families of an overview."""
    status = found.status
    yield gauge("floodmark_ready", "Whether the lake is ready, as reported by /readyz.", ready)
    fine = status.health == FINE
    yield gauge("floodmark_healthy", "Whether the lake's health is fine; if not, it needs attention.", fine)
    yield gauge("floodmark_lake_version", "The newest version of the lake.", status.version)
    yield counter("floodmark_commits", "Publishes of the lake, of all branches.", status.version)
    yield gauge("floodmark_lake_versions", "Readable versions.", status.versions)
    yield gauge("floodmark_lake_tables", "Tables of main.", status.tables)
    yield gauge("floodmark_maintenance_due", "Due maintenance tasks.", len(status.due))
    yield gauge("floodmark_quarantined_rows", "Rows in quarantine of sinks and spools.", status.quarantined)
    operations = {"running": len(status.running), "pending": len(status.pending), "unknown": len(status.unknown)}
    yield by_label("floodmark_operations", "Open operations, by state.", "state", operations)
    waiting = "Sealed operations that wait for others to publish to the same tables."
    yield gauge("floodmark_operations_waiting", waiting, len(status.waiting))
    yield by_label("floodmark_recovered", "Actions of recovery and repairs.", "outcome", status.recovered, counted=True)
    # Its earlier name, for dashboards of before; gone with the next version.
    yield by_label("floodmark_healed", "Same as floodmark_recovered.", "outcome", status.recovered, counted=True)
    yield from _tables(found.tables)
    yield from _sinks(status.sinks)
    yield from _shipped(found.sinks)
    yield from _spools(status.spools)
    yield from _jobs(status.jobs)
    yield from _daemon(status.daemon)


def _tables(tables: Sequence[TableLine]) -> Iterator[Metric]:
    family = _Families("table", tables, lambda one: one.table, largest=lambda one: one.rows)
    yield family.gauge("floodmark_table_rows", "Rows of a table.", lambda one: one.rows)
    yield family.gauge("floodmark_table_files", "Data files of a table.", lambda one: one.files)
    yield family.gauge("floodmark_table_bytes", "Bytes of a table's data files.", lambda one: one.bytes)
    yield family.gauge(
        "floodmark_table_small_files", "Small data files that a compaction would merge.", lambda one: one.small_files
    )
    segments = "Segments of a table's indexes that are in use."
    yield family.gauge("floodmark_table_index_segments", segments, lambda one: one.indexes.segments)
    broken = "Segments of a table's indexes that are damaged: lookups scan what they covered."
    yield family.gauge("floodmark_table_index_broken_segments", broken, lambda one: one.indexes.broken)
    size = "Bytes of a table's index segments."
    yield family.gauge("floodmark_table_index_bytes", size, lambda one: one.indexes.bytes)


def _sinks(sinks: Sequence[SinkLine]) -> Iterator[Metric]:
    family = _Families("sink", sinks, lambda one: one.sink, largest=lambda one: one.lag_rows)
    lag = "Changes that a sink has not shipped yet."
    yield family.gauge("floodmark_sink_lag_rows", lag, lambda one: one.lag_rows)
    oldest = "The age of the oldest of them."
    yield family.gauge("floodmark_sink_lag_seconds", oldest, lambda one: one.lag_ms / 1000, fold=max)
    refused = "Rows that a destination refused."
    yield family.gauge("floodmark_sink_quarantined_rows", refused, lambda one: one.quarantined)
    failed = "Whether a sink's last run failed or was refused."
    yield family.gauge("floodmark_sink_failed", failed, lambda one: one.error is not None)
    maintenance = "Maintenance tasks of a sink's destination tables whose last run failed."
    yield family.gauge("floodmark_sink_maintenance_failed", maintenance, _maintenance_failed)
    paused = "Whether a sink is paused."
    yield family.gauge("floodmark_sink_paused", paused, lambda one: one.state == "paused")


def _maintenance_failed(sink: SinkLine) -> int:
    return sum(one.outcome == "failed" for one in sink.maintenance)


def _shipped(sinks: Sequence[SinkReport]) -> Iterator[Metric]:
    family = _Families("sink", sinks, lambda one: one.sink)
    units = "Units that a sink has settled."
    yield family.counter("floodmark_sink_units", units, lambda one: sum(table.units for table in one.tables))
    rows = "Rows that a sink has shipped."
    yield family.counter("floodmark_sink_rows", rows, lambda one: sum(table.rows for table in one.tables))
    size = "Bytes that a sink has shipped."
    yield family.counter("floodmark_sink_bytes", size, lambda one: sum(table.bytes for table in one.tables))


def _spools(spools: Sequence[SpoolReport]) -> Iterator[Metric]:
    family = _Families("table", spools, lambda one: one.table, largest=lambda one: one.waiting_bytes)
    records = "Requests not yet in their table."
    yield family.gauge("floodmark_spool_waiting_records", records, lambda one: one.waiting_records)
    rows = "Rows not yet in their table."
    yield family.gauge("floodmark_spool_waiting_rows", rows, lambda one: one.waiting_rows)
    size = "Bytes of them on disk."
    yield family.gauge("floodmark_spool_waiting_bytes", size, lambda one: one.waiting_bytes)
    oldest = "The age of the oldest of them."
    yield family.gauge("floodmark_spool_oldest_seconds", oldest, _oldest_s, fold=max)
    unfit = "Received rows that did not fit."
    yield family.gauge("floodmark_spool_quarantined_rows", unfit, lambda one: one.quarantined)
    refused = "Whether a spool is refused."
    yield family.gauge("floodmark_spool_refused", refused, lambda one: one.state == REFUSED)
    fed = "Requests loaded into their table."
    yield family.counter("floodmark_spool_fed_records", fed, lambda one: one.fed_records)
    yield family.counter("floodmark_spool_fed_rows", "Rows loaded into their table.", lambda one: one.fed_rows)


def _oldest_s(spool: SpoolReport) -> float | None:
    return None if spool.oldest_ms is None else spool.oldest_ms / 1000


def _jobs(jobs: Sequence[JobLine] | None) -> Iterator[Metric]:
    """None: the jobs cannot be read, and the lake is not ready."""
    if jobs is None:
        return
    states = {state: sum(job.status == state for job in jobs) for state in JOB_STATES}
    yield by_label("floodmark_jobs", "Current jobs, by state.", "state", states)
    family = _Families("job", jobs, lambda one: one.job)
    yield family.gauge("floodmark_job_processed", "Chunks or rows finished by a job.", lambda one: one.processed)
    yield family.gauge("floodmark_job_wanted", "Chunks or rows of the job in total.", lambda one: one.total)


def _daemon(daemon: DaemonReport | None) -> Iterator[Metric]:
    alive = daemon is not None and daemon.alive
    yield gauge("floodmark_daemon_alive", "Whether a daemon runs the lake's tasks.", alive)
    family = _Families("task", () if daemon is None else daemon.tasks, lambda one: one.name)
    yield family.gauge("floodmark_task_failures", "Consecutive failures of a task.", lambda one: one.failures)
    aside = "Bad files of a drop folder that were set aside."
    yield family.gauge("floodmark_task_files_set_aside", aside, lambda one: one.set_aside)
    ended = "When the last successful run of a task ended."
    yield family.gauge("floodmark_task_last_success_timestamp_seconds", ended, _last_success, fold=max)


def _last_success(task: TaskReport) -> float | None:
    if task.failures or task.last_error or not task.last_ended:
        return None
    return clock.parse_time_ms(task.last_ended) / 1000


# ── families ──


def gauge(name: str, help: str, value: float | None) -> Metric:
    return GaugeMetricFamily(name, help, value=None if value is None else float(value))


def counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(name, help, value=float(value))


def by_label(name: str, help: str, label: str, values: Mapping[str, float], *, counted: bool = False) -> Metric:
    family = (CounterMetricFamily if counted else GaugeMetricFamily)(name, help, labels=[label])
    for value, number in sorted(values.items()):
        family.add_metric([value], float(number))
    return family


F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)
T = TypeVar("T")


class _Families(Generic[T]):
    """Families of one label over the same records: the first so many by name, or those with the most of something."""

    def __init__(
        self,
        label: str,
        records: Sequence[T],
        name: Callable[[T], str],
        *,
        largest: Callable[[T], float | None] | None = None,
    ) -> None:
        ordered = records if largest is None else sorted(records, key=lambda one: -(largest(one) or 0))
        self._label = label
        self._name = name
        self._own = sorted(ordered[:LABELS_MAX], key=name)
        self._others = ordered[LABELS_MAX:]

    def gauge(
        self,
        name: str,
        help: str,
        figure: Callable[[T], float | None],
        fold: Callable[[Iterable[float]], float] = sum,
    ) -> GaugeMetricFamily:
        return self._filled(GaugeMetricFamily(name, help, labels=[self._label]), figure, fold)

    def counter(self, name: str, help: str, figure: Callable[[T], float | None]) -> CounterMetricFamily:
        return self._filled(CounterMetricFamily(name, help, labels=[self._label]), figure, sum)

    def _filled(self, family: F, figure: Callable[[T], float | None], fold: Callable[[Iterable[float]], float]) -> F:
        for one in self._own:
            if (value := figure(one)) is not None:
                family.add_metric([self._name(one)], float(value))
        others = [float(value) for one in self._others if (value := figure(one)) is not None]
        if others:
            family.add_metric([OTHERS], fold(others))
        return family
