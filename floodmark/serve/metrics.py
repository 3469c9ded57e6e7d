"""/metrics for Prometheus: the figures of the one overview, made at the scrape, and what this process counted itself.

Nothing of the process's memory says how the lake is: a restart forgets only its own counts. If the state cannot be read
the answer is still 200, with `floodmark_state_readable 0` and `floodmark_ready 0` and without any figure of the lake:
an old figure would look well, and an answer that failed would take the counts of this process away too. A registry of
its own, so that nothing else of this process gets in.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from floodmark import log
from floodmark.serve.described import errors
from floodmark.serve.events import Events
from floodmark.serve.families import LABELS_MAX, OTHERS, gauge, lake_families
from floodmark.serve.figures import Figures
from floodmark.serve.overview import overview
from floodmark.serve.ready import judge_ready
from floodmark.serve.serving import Serving
from floodmark.serve.shared import Shared

# What is asked at an address that nobody knows has one name together.
NO_ROUTE = "(none)"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER_METHOD = "(other)"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/plain": {"schema": {"type": "string"}}},
        "description": "Prometheus's text format, or OpenMetrics if it is asked for; docs/observing.md lists them.",
    },
    **errors(401, 403),
}


class Metrics:
    """What this process counts; the lake counts for itself."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._requests = Counter(
            "floodmark_http_requests",
            "Requests that were answered, by route, method and status.",
            ["route", "method", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "floodmark_http_request_seconds",
            "Seconds until an answer began, by route and method.",
            ["route", "method"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._accepted = Counter(
            "floodmark_http_rows_accepted",
            "Rows that were answered with 200 or 202, by table.",
            ["table"],
            registry=self._registry,
        )
        self._tables: set[str] = set()

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else OTHER_METHOD
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route, method).observe(seconds)

    def accepted(self, table: str, rows: int) -> None:
        """Rows of a table that is there were taken."""
        if table not in self._tables and len(self._tables) >= LABELS_MAX:
            table = OTHERS
        self._tables.add(table)
        self._accepted.labels(table).inc(rows)

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()


class _Scrape(Collector):
    """One answer; `found` is None if the state cannot be read."""

    def __init__(self, found: Mapping[str, Any] | None, metrics: Metrics, listeners: int) -> None:
        self._found = found
        self._metrics = metrics
        self._listeners = listeners

    def collect(self) -> Iterator[Metric]:
        readable = "Whether the lake's state could be read at this scrape."
        yield gauge("floodmark_state_readable", readable, self._found is not None)
        if self._found is None:
            yield gauge("floodmark_ready", "Whether the lake is fit for work, as /readyz says.", 0)
        else:
            yield from lake_families(self._found["overview"], self._found["ready"])
            yield _rows_committed(self._found["committed"])
        yield gauge("floodmark_event_listeners", "Open streams of /api/events.", self._listeners)
        yield from self._metrics.collect()


def _rows_committed(totals: Mapping[tuple[str, str], int]) -> Metric:
    family = CounterMetricFamily(
        "floodmark_rows_committed",
        "Rows committed to main since this process looks, by table and change.",
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


def add_metrics(app: FastAPI, serving: Serving) -> None:
    app.state.metrics = metrics = Metrics()
    figures: Figures = app.state.figures
    events: Events = app.state.events

    def see() -> dict[str, Any]:
        found = overview(serving.lake, serving.keeping)
        status = found["status"]
        ready = judge_ready(status["health"], status["blocking"], serving.intake, serving.store)["ready"]
        return {"overview": found, "ready": ready, "committed": figures.totals()}

    shared = Shared(serving.work, see)
    app.add_middleware(Timed, metrics=metrics)

    @app.get("/metrics", response_class=Response, responses=_DESCRIBED)
    async def get_metrics(request: Request) -> Response:
        """The lake and this process in figures."""
        serving.doors.check(request, "read")
        found = None
        try:
            found = await shared.ask()
        except Exception as error:  # noqa: BLE001 - told by floodmark_state_readable
            log.get().warning("the lake's state cannot be read", cause=repr(error))
        registry = CollectorRegistry()
        registry.register(_Scrape(found, metrics, events.clients))
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), 200, media_type=media_type)
