"""Queries about the lake over HTTP: the same answers as the commands give with --json, from the same functions.

Threads of their own answer all of them from the catalog, within a time limit: slow writers do not delay them, and they
do not delay writers. Reading needs the role `read`, since settings contain paths and expressions. Any caller may ask
whether the lake is alive and ready, but only readers get the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import FastAPI, Path, Query, Request, Response

from floodmark.errors import NotFound, Unavailable
from floodmark.json_form import Json, Reported, as_json
from floodmark.lake import Lake
from floodmark.model import Commit
from floodmark.report.jobs import JobReport, ack_outcome, cancel_outcome, job_report, report_of
from floodmark.report.overview import COUNT_AGE_S_MAX, Overview, overview
from floodmark.report.spools import SpoolReport, read_spools
from floodmark.report.status import AuditLine, Status, audit_line, lake_status, lake_tables
from floodmark.report.tables import TableDetails, TableLine, table_details
from floodmark.serve.http.answers import answer, json_text
from floodmark.serve.http.openapi import errors
from floodmark.serve.http.readiness import Ready, readiness, unready
from floodmark.serve.http.service import Service
from floodmark.serve.http.timeseries import Figures, RecentFigures
from floodmark.serve.http.workers import SharedAnswer
from floodmark.sinks.status import SinkReport, sink_reports
from floodmark.write.shape import TABLE_NAME

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

COMMITS_MAX = 500
AUDIT_MAX = 1_000
# The highest number that every database takes.
VERSION_MAX = 2**63 - 1
NAME_CHARACTERS_MAX = 255

_READ = errors(401, 403, 503)
_READ_ONE = errors(401, 403, 404, 503)
_CHANGE = errors(401, 403, 404, 409, 429, 503)
JobName = Annotated[str, Path(description="A job's id or name.", max_length=NAME_CHARACTERS_MAX)]
TableName = Annotated[str, Path(description="A table's name.", max_length=NAME_CHARACTERS_MAX)]


# ── answers that are lists ──


@dataclass(frozen=True)
class Alive(Reported):
    status: Literal["ok"]


@dataclass(frozen=True)
class TableList(Reported):
    tables: tuple[TableLine, ...]


@dataclass(frozen=True)
class CommitList(Reported):
    """Newest first, as `floodmark history --json`; for the next page, ask for commits before the last version."""

    commits: tuple[Commit, ...]


@dataclass(frozen=True)
class AuditList(Reported):
    """What recovery and repairs did, newest first, as `floodmark audit --json`."""

    audit: tuple[AuditLine, ...]


@dataclass(frozen=True)
class SinkList(Reported):
    sinks: tuple[SinkReport, ...]


@dataclass(frozen=True)
class JobList(Reported):
    """Newest first, as `floodmark backfill list --all --json`."""

    jobs: tuple[JobReport, ...]


@dataclass(frozen=True)
class SpoolList(Reported):
    spools: tuple[SpoolReport, ...]


@dataclass(frozen=True)
class ChangedJob(JobReport):
    """The outcome (asked, cancelled, acknowledged or nothing_to_do), and the job as it is now."""

    outcome: str


# ── questions ──


def add_questions(app: FastAPI, service: Service) -> None:
    app.state.figures = Figures(service.lake.catalog)
    _readiness(app, service)
    _state(app, service)
    _past(app, service)
    _jobs(app, service)


def _readiness(app: FastAPI, service: Service) -> None:
    # Any caller may ask: however many do, only one thread works on it.
    shared = SharedAnswer(service.workers, partial(readiness, service.lake, service.intake, service.store))

    @app.get("/healthz", response_model=Alive, responses=errors())
    async def healthz() -> Response:
        """This process is alive; the catalog is not checked."""
        return answer(200, json_text(as_json(Alive("ok"))))

    @app.get("/readyz", response_model=Ready, responses={**errors(), 503: {"model": Ready}})
    async def readyz(request: Request) -> Response:
        """Whether the lake is ready: 200, or 503 with reasons; `health` as in `floodmark status`.

        If tokens are set, a request without one gets only the status.
        """
        try:
            found = await shared.ask()
        except Unavailable as error:
            found = unready(str(error))
        report = found.as_dict(known=service.access.caller(request) is not None)
        return answer(200 if found.ready else 503, json_text(report))


def _state(app: FastAPI, service: Service) -> None:
    catalog, keeping = service.lake.catalog, service.keeping
    figures: Figures = app.state.figures
    ask = partial(_ask, service)

    def details(table: str) -> TableDetails:
        return table_details(service.lake.engine, catalog.history.head(known_form(table)), keeping)

    @app.get("/api/overview", response_model=Overview, responses=_READ)
    async def get_overview(request: Request) -> Response:
        """Everything that the page shows, in one answer."""
        return await ask(request, partial(overview, catalog, keeping))

    @app.get("/api/status", response_model=Status, responses=_READ)
    async def get_status(request: Request) -> Response:
        """The lake on one screen: `floodmark status --json`."""
        return await ask(request, partial(lake_status, catalog, keeping, age_s_max=COUNT_AGE_S_MAX))

    @app.get("/api/tables", response_model=TableList, responses=_READ)
    async def get_tables(request: Request) -> Response:
        """Every table in one line: `floodmark tables --json`."""
        return await ask(request, lambda: TableList(tuple(lake_tables(catalog, keeping))))

    @app.get("/api/tables/{table}", response_model=TableDetails, responses=_READ_ONE)
    async def get_table(request: Request, table: TableName) -> Response:
        """One table: `floodmark show TABLE --json`."""
        return await ask(request, partial(details, table))

    @app.get("/api/sinks", response_model=SinkList, responses=_READ)
    async def get_sinks(request: Request) -> Response:
        """The state of every sink: `floodmark sink status --json`."""
        return await ask(request, lambda: SinkList(tuple(sink_reports(catalog))))

    @app.get("/api/spools", response_model=SpoolList, responses=_READ)
    async def get_spools(request: Request) -> Response:
        """Received rows that wait for their tables: `floodmark spool list --json`."""
        return await ask(request, lambda: SpoolList(tuple(read_spools(catalog))))

    @app.get("/api/figures", response_model=RecentFigures, responses=_READ)
    async def get_figures(request: Request) -> Response:
        """The last ten minutes: rows per second, lag of sinks, waiting rows."""
        return await ask(request, figures.series)


async def _ask(service: Service, request: Request, question: Callable[[], DataclassInstance]) -> Response:
    service.access.check(request, "read")
    return answer(200, json_text(as_json(await service.workers.ask(question))))


def _past(app: FastAPI, service: Service) -> None:
    lake, ask = service.lake, partial(_ask, service)

    def commits_of(table: str | None, limit: int, before: int | None) -> CommitList:
        known = None if table is None else known_form(table)
        return CommitList(tuple(lake.history(limit=limit, table=known, before=before)))

    @app.get("/api/commits", response_model=CommitList, responses=_READ_ONE)
    async def get_commits(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=COMMITS_MAX, description="Maximum number of results, newest first.")] = 50,
        before: Annotated[int | None, Query(ge=1, le=VERSION_MAX, description="Only versions below this one.")] = None,
        table: Annotated[
            str | None, Query(max_length=NAME_CHARACTERS_MAX, description="Only commits that touched this table.")
        ] = None,
    ) -> Response:
        """Commits: `floodmark history --json`. For the next page, set `before` to the last version of this one."""
        return await ask(request, partial(commits_of, table, limit, before))

    @app.get("/api/audit", response_model=AuditList, responses=_READ)
    async def get_audit(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=AUDIT_MAX, description="Maximum number of results, newest first.")] = 50,
    ) -> Response:
        """What recovery and repairs did: `floodmark audit --json`."""
        return await ask(request, lambda: AuditList(tuple(map(audit_line, lake.audit(limit)))))


def _jobs(app: FastAPI, service: Service) -> None:
    lake, workers, ask = service.lake, service.workers, partial(_ask, service)

    async def change(request: Request, function: Callable[[Lake, str], dict[str, Json]], job: str) -> Response:
        service.access.check(request, "admin")
        async with workers.admitted():
            return answer(200, json_text(await workers.run(function, lake, job)))

    @app.get("/api/jobs", response_model=JobList, responses=_READ)
    async def get_jobs(request: Request) -> Response:
        """Every job, newest first: `floodmark backfill list --all --json`."""
        return await ask(request, lambda: JobList(tuple(map(job_report, lake.catalog.jobs.all()))))

    @app.get("/api/jobs/{id}", response_model=JobReport, responses=_READ_ONE)
    async def get_job(request: Request, id: JobName) -> Response:
        """One job: progress, rate and result."""
        return await ask(request, lambda: job_report(lake.catalog.jobs.find(_plain(id))))

    @app.post("/api/jobs/{id}/cancel", response_model=ChangedJob, responses=_CHANGE)
    async def cancel_job(request: Request, id: JobName) -> Response:
        """Stop a job after its current batch or chunk; finished work is kept."""
        return await change(request, _cancel, id)

    @app.post("/api/jobs/{id}/acknowledge", response_model=ChangedJob, responses=_CHANGE)
    async def acknowledge_job(request: Request, id: JobName) -> Response:
        """Acknowledge a failed job: it needs no attention any more."""
        return await change(request, _acknowledge, id)


def _cancel(lake: Lake, job: str) -> dict[str, Json]:
    before = job_report(lake.catalog.jobs.find(_plain(job)))
    after = report_of(lake.backfill.cancel(before.id))
    return {"outcome": cancel_outcome(before, after), **as_json(after)}


def _acknowledge(lake: Lake, job: str) -> dict[str, Json]:
    before = job_report(lake.catalog.jobs.find(_plain(job)))
    after = report_of(lake.backfill.ack(before.id))
    return {"outcome": ack_outcome(before, after), **as_json(after)}


def known_form(table: str) -> str:
    """A text that cannot be a name is not looked up: no database has to parse it."""
    if not TABLE_NAME.fullmatch(table):
        raise NotFound("there is no such table", table=repr(table)[:80])
    return table


def _plain(job: str) -> str:
    if not job.isprintable():
        raise NotFound("there is no such job", job=repr(job)[:80])
    return job
