"""What the page shows, built from the one overview behind all answers of the lake. Pure: a record in, records out.

Figures are passed on unchanged, so that the page, the command, the API and the metrics agree. The page adds judgement:
the level of each thing, the order of things, and the next command to run. What the overview lacks, because it could not
be read, is shown as unknown, never as none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from floodmark import clock
from floodmark.catalog.jobs import DONE, FAILED, INTERRUPTED, PENDING, RUNNING, UNKNOWN
from floodmark.model import Commit, TableCommit
from floodmark.report.daemon import DaemonReport, TaskReport
from floodmark.report.health import FINE
from floodmark.report.jobs import JobLine, JobReport, progress_of
from floodmark.report.maintenance import sum_known
from floodmark.report.overview import Overview
from floodmark.report.spools import ELSEWHERE, OK, REFUSED, WAITING, SpoolReport
from floodmark.report.status import AuditLine, Status
from floodmark.report.tables import TableLine
from floodmark.serve.http.timeseries import NAMES_MAX, RecentFigures
from floodmark.serve.page import charts, wording
from floodmark.serve.page.wording import BAD, BUSY, GOOD, QUIET, WARN
from floodmark.sinks.status import SinkReport, SinkTable

T = TypeVar("T")
# At least this many similar commits in a row are shown as one line that opens.
ALIKE_MIN = 3
# A page of a thousand tables is unreadable: tables that are not well come first, then at most this many others.
LINES_MAX = 200


@dataclass(frozen=True)
class ShownState:
    """How one thing is: a level, and a word or two."""

    level: str
    text: str


@dataclass(frozen=True)
class Notice:
    """A line of the banner: work under way, or a failure that is not acknowledged yet."""

    key: str
    level: str
    text: str
    detail: str = ""
    percent: float | None = None
    command: str = ""
    # The job's id and name, if this line is about a job.
    job: str = ""
    name: str = ""
    # Which buttons the line has: cancel, dismiss.
    action: str = ""


@dataclass(frozen=True)
class ShownTable:
    row: TableLine
    state: ShownState
    rate: float | None
    spark: str


@dataclass(frozen=True)
class ShownSink:
    row: SinkReport
    state: ShownState
    tables: tuple[SinkTable, ...]
    lag_rows: int
    lag_ms: int
    units: int
    rows: int
    size_bytes: int
    problem: str


@dataclass(frozen=True)
class ShownJob:
    row: JobReport
    state: ShownState
    progress: str
    pace: str
    problem: str
    command: str
    can_cancel: bool
    can_dismiss: bool


@dataclass(frozen=True)
class CommitGroup:
    """Commits of one kind by one actor to the same tables, one after the other, newest first."""

    key: str
    verb: str
    newest: Commit
    oldest: Commit
    commits: tuple[Commit, ...]
    # The rows of all commits of the group.
    tables: tuple[TableCommit, ...]

    @property
    def is_folded(self) -> bool:
        return len(self.commits) >= ALIKE_MIN


@dataclass(frozen=True)
class View:
    now_ms: int
    status: Status
    health: wording.ShownHealth
    sentence: str
    notices: tuple[Notice, ...]
    tables: tuple[ShownTable, ...]
    # How many lines of tables, spools and sinks the page leaves out.
    left_out: Mapping[str, int]
    spools: tuple[tuple[SpoolReport, ShownState], ...]
    # Drop folders, as tasks of the daemon.
    folders: tuple[tuple[TaskReport, ShownState], ...]
    sinks: tuple[ShownSink, ...]
    jobs: tuple[ShownJob, ...]
    jobs_over: tuple[ShownJob, ...]
    jobs_error: str | None
    commits: tuple[CommitGroup, ...]
    audit: tuple[AuditLine, ...]
    daemon: DaemonReport | None
    tasks: tuple[tuple[TaskReport, ShownState], ...]
    # A new column and its expression, which uses columns of the first table.
    example: tuple[str, str]
    throughput: charts.Chart
    sink_lag: charts.Chart
    waiting_rows: int | None
    quarantined: int


@dataclass(frozen=True)
class ExampleColumn:
    name: str
    type: str


def view_of(found: Overview, figures: RecentFigures | None = None, columns: Sequence[ExampleColumn] = ()) -> View:
    """`figures`: those of the last minutes (timeseries.py), if they are collected; `columns`: of the first table."""
    status = found.status
    now_ms = clock.parse_time_ms(found.at)
    rates, lags = rates_of(figures), lags_of(figures)
    health = wording.health_of(status.health)
    jobs = [_job(job) for job in found.jobs or ()]
    shown = {job.id for job in status.jobs or ()}
    tasks = () if status.daemon is None else status.daemon.tasks
    tables, tables_left = shown_first([_table(table, rates) for table in found.tables], lambda one: one.state)
    spools, spools_left = shown_first([(spool, spool_state(spool)) for spool in status.spools], lambda one: one[1])
    sinks, sinks_left = shown_first(list(map(_sink, found.sinks)), lambda one: one.state)
    return View(
        now_ms=now_ms,
        status=status,
        health=health,
        sentence=_sentence(status, health, now_ms),
        notices=_notices(status),
        tables=tables,
        left_out={"tables": tables_left, "spools": spools_left, "sinks": sinks_left},
        spools=spools,
        folders=tuple((task, folder_state(task)) for task in tasks if task.kind == "files"),
        sinks=sinks,
        jobs=tuple(job for job in jobs if job.row.id in shown),
        jobs_over=tuple(job for job in jobs if job.row.id not in shown),
        jobs_error=status.jobs_error,
        commits=tuple(_groups(found.commits)),
        audit=found.audit,
        daemon=status.daemon,
        tasks=tuple((task, task_state(task)) for task in tasks),
        example=example_of(columns),
        throughput=charts.throughput(charts.Series(rates.times_ms, _total(rates))),
        sink_lag=charts.sink_lag(lags, bool(sinks)),
        waiting_rows=sum_known(spool.waiting_rows for spool in status.spools),
        quarantined=status.quarantined,
    )


def shown_first(lines: Sequence[T], state_of: Callable[[T], ShownState]) -> tuple[tuple[T, ...], int]:
    """The lines to show, in their order, and how many are left out. No line that is not well is left out."""
    if len(lines) <= LINES_MAX:
        return tuple(lines), 0
    ill = [line for line in lines if state_of(line).level in (BAD, WARN)]
    well = [line for line in lines if state_of(line).level not in (BAD, WARN)][:LINES_MAX]
    return (*ill, *well), len(lines) - len(ill) - len(well)


def _sentence(status: Status, health: wording.ShownHealth, now_ms: int) -> str:
    """The text after the word of health: what is wrong, else a summary of the lake."""
    if health.sentence:
        return health.sentence
    if not status.tables:
        return "an empty lake, ready for its first table"
    newest = wording.moment(status.last_commit, now_ms)
    return wording.count_of(status.tables, "table") + (f", newest commit {newest.text}" if newest else "")


# ── the banner ──


def _notices(status: Status) -> tuple[Notice, ...]:
    """The jobs that matter now are those of `floodmark status`: the catalog records when a failure no longer shows."""
    if status.jobs is None:
        reason = status.jobs_error or "no reason is known"
        return (Notice("jobs", BAD, "Jobs cannot be read", reason, command="floodmark doctor"),)
    failed_first = sorted(status.jobs, key=lambda job: job.status in (RUNNING, PENDING))
    return tuple(map(_notice, failed_first))


def _notice(job: JobLine) -> Notice:
    name, state = job.job, job_state(job)
    empty = Notice(f"job-{job.id}", state.level, "", job=job.id, name=name)
    resume = wording.backfill_command("resume", name)
    if job.status == FAILED:
        detail = wording.error_line(job.error)
        return replace(empty, text=f"{name} failed", detail=detail, command=resume, action="dismiss")
    far = " · ".join(part for part in (progress_of(job), wording.pace_text(job)) if part)
    if job.status == RUNNING:
        since = f" · no progress since {job.stalled_since}" if job.stalled_since else ""
        action = "" if job.cancel_asked else "cancel"
        said = f"{name} is {state.text}"
        return replace(empty, text=said, detail=far + since, percent=job.percent, action=action)
    if job.status == UNKNOWN:
        return replace(
            empty,
            text=f"{name} is in an unknown state",
            detail="Upgrade Floodmark; this version does not touch the job.",
        )
    text = f"{name} was interrupted" if job.status == INTERRUPTED else f"{name} waits to start"
    return replace(empty, text=text, detail=far, command=resume, action="cancel")


# ── jobs ──


def job_state(job: JobLine) -> ShownState:
    if job.stalled_since:
        return ShownState(WARN, "stalled")
    if job.cancel_asked:
        return ShownState(BUSY, "stopping")
    if job.status == RUNNING and job.error:
        return ShownState(WARN, "waiting")  # it retries by itself
    levels = {RUNNING: BUSY, PENDING: BUSY, DONE: GOOD, FAILED: BAD, INTERRUPTED: WARN, UNKNOWN: BAD}
    return ShownState(levels.get(job.status, QUIET), job.status)


def _job(job: JobReport) -> ShownJob:
    goes_on = job.status in (RUNNING, PENDING, INTERRUPTED)
    resumed = job.status in (FAILED, INTERRUPTED, PENDING, "cancelled")
    return ShownJob(
        row=job,
        state=job_state(job),
        progress=progress_of(job),
        pace=wording.pace_text(job) if job.status == RUNNING else "",
        problem=wording.error_line(job.error),
        command=wording.backfill_command("resume", job.job) if resumed else "",
        can_cancel=goes_on and not job.cancel_asked,
        can_dismiss=job.status == FAILED and not job.acknowledged,
    )


# ── tables ──


def _table(table: TableLine, rates: charts.Series) -> ShownTable:
    # A table without figures had no commits, unless only the busiest tables have figures.
    silent = 0.0 if rates.times_ms and len(rates.values) < NAMES_MAX else None
    mine = rates.values.get(table.table) or (silent,)
    return ShownTable(table, table_state(table), mine[-1], charts.spark(rates, table.table))


def table_state(table: TableLine) -> ShownState:
    """The worst known state of a table, in the words of `floodmark tables`."""
    if table.health != FINE:
        said = wording.health_of(table.health)
        return ShownState(said.level, said.sentence)
    if table.waiting_rows:
        return ShownState(BUSY, "receiving rows")
    verbs = [due.split(" ", 1)[0] for due in table.due]
    return ShownState(QUIET, f"{' and '.join(verbs)} due") if verbs else ShownState(GOOD, "fine")


# ── sources and sinks ──


def spool_state(spool: SpoolReport) -> ShownState:
    if spool.state == REFUSED:
        return ShownState(BAD, "refused")
    if spool.state == ELSEWHERE:
        return ShownState(QUIET, "on another machine")
    if spool.error:
        return ShownState(WARN, "failing, tries again")
    if spool.state not in (OK, WAITING):
        return ShownState(BAD, spool.state)
    return ShownState(GOOD, "empty") if spool.waiting_records == 0 else ShownState(BUSY, "feeding")


def folder_state(task: TaskReport) -> ShownState:
    """A drop folder: bad files are shown until an operator removes them."""
    if task.failures:
        return ShownState(BAD, "failing")
    if task.set_aside:
        return ShownState(WARN, wording.count_of(task.set_aside, "bad file"))
    return task_state(task)


def example_of(columns: Sequence[ExampleColumn]) -> tuple[str, str]:
    """A column that a backfill could add to a table with these columns, and the expression that would fill it."""
    names = {column.name.lower() for column in columns}

    def found(name: str, text: str, kinds: tuple[str, ...]) -> tuple[str, str] | None:
        of = next((one.name for one in columns if one.type.startswith(kinds)), None)
        if of is None:
            return None
        new = next(one for one in (name, *(f"{name}_{n}" for n in range(2, 1000))) if one.lower() not in names)
        return new, text.format(of if of.isidentifier() else f"`{of}`")

    return (
        found("day", "date({})", ("timestamp", "date"))
        or found("short", "substring({}, 1, 3)", ("string",))
        or found("double", "{} * 2", ("long", "int", "decimal", "double", "float"))
        or ("loaded", "current_date()")
    )


def _sink(sink: SinkReport) -> ShownSink:
    tables = sink.tables
    refused = next((one.refused for one in tables if one.refused), None)
    problem = wording.error_line(refused or sink.error)
    if sink.lost and not problem:
        problem = f"the mark is lost: {wording.join_text(sink.lost)}"
    if problem:
        state = ShownState(BAD, "refused" if refused else "failing")
    elif sink.state != "active":
        state = ShownState(QUIET, sink.state)
    elif sink.running:
        state = ShownState(BUSY, "sending")
    elif sink.quarantined:
        state = ShownState(WARN, "rows in quarantine")
    else:
        state = ShownState(GOOD, "active")
    return ShownSink(
        row=sink,
        state=state,
        tables=tables,
        lag_rows=sum(one.lag_rows for one in tables),
        lag_ms=max((one.lag_ms for one in tables), default=0),
        units=sum(one.units for one in tables),
        rows=sum(one.rows for one in tables),
        size_bytes=sum(one.bytes for one in tables),
        problem=problem,
    )


def task_state(task: TaskReport) -> ShownState:
    levels = {"waiting": GOOD, "running": BUSY, "failed": BAD, "paused": QUIET, "stopped": QUIET}
    level = levels.get(task.state, BAD)
    return ShownState(WARN if task.failures and level == GOOD else level, task.state)


# ── commits ──


def _groups(commits: Sequence[Commit]) -> list[CommitGroup]:
    """Group similar commits in a row; a key distinguishes a group from others of its kind on the page."""
    found: list[list[Commit]] = []
    for commit in commits:
        if found and _likeness(found[-1][0]) == _likeness(commit):
            found[-1].append(commit)
        else:
            found.append([commit])
    groups = []
    for some in found:
        if len(some) >= ALIKE_MIN:
            groups.append(_group(some))
        else:
            groups += [_group([one]) for one in some]
    return groups


def _likeness(commit: Commit) -> tuple[str, str, str, tuple[str, ...]]:
    return commit.kind, commit.actor, commit.branch, tuple(part.table for part in commit.tables)


def _group(commits: Sequence[Commit]) -> CommitGroup:
    newest, oldest = commits[0], commits[-1]
    tables = tuple(
        replace(
            part,
            rows_added=sum(one.tables[place].rows_added for one in commits),
            rows_updated=sum(one.tables[place].rows_updated for one in commits),
            rows_deleted=sum(one.tables[place].rows_deleted for one in commits),
        )
        for place, part in enumerate(newest.tables)
    )
    return CommitGroup(f"v{oldest.version}", wording.commit_verb(newest.kind), newest, oldest, tuple(commits), tables)


# ── figures of the last minutes ──


def rates_of(figures: RecentFigures | None) -> charts.Series:
    """Rows a second, by table."""
    return charts.Series((), {}) if figures is None else charts.Series(figures.at_ms, figures.rows_per_s)


def lags_of(figures: RecentFigures | None) -> charts.Series:
    """Milliseconds behind, by sink."""
    if figures is None:
        return charts.Series((), {})
    behind = {sink: [None if one is None else one * 1000 for one in some] for sink, some in figures.lag_s.items()}
    return charts.Series(figures.at_ms, behind)


def _total(rates: charts.Series) -> dict[str, list[float | None]]:
    """All tables together: a moment without any figure stays without one."""
    moments = zip(*rates.values.values(), strict=True) if rates.values else ((0.0,) for _ in rates.times_ms)
    known = [[one for one in moment if one is not None] for moment in moments]
    return {"all tables": [sum(some) if some else None for some in known]}
