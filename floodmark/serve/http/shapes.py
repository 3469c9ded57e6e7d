"""The shapes of answers, for OpenAPI and for whoever writes a client: the same JSON that the commands print (--json).

Answers are not made of these models: they are sent as the report made them, so nothing can be left out on the way. A
test holds every answer against its model, strictly. Times are ISO 8601 texts in UTC; names that end in _ms are numbers
of milliseconds; None is "not known", never zero.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


# ── alive and ready ──


class Alive(Shape):
    status: Literal["ok"]


class Ready(Shape):
    """Without a token, where tokens are set: `ready` alone."""

    ready: bool
    health: str | None = None
    reasons: list[str] = []


# ── the parts of a status ──


class DestinationMaintenance(Shape):
    """The last run of one kind of maintenance on a table that a sink ships to."""

    verb: str
    table: str
    outcome: str
    at: str


class SinkLine(Shape):
    """A sink in short; `lag_rows` are changes of all its tables, `lag_ms` is the age of the oldest of them."""

    sink: str
    kind: str
    state: str
    tables: list[str]
    lag_rows: int
    lag_ms: int
    quarantined: int
    error: dict[str, Any] | None
    error_at: str | None
    maintenance: list[DestinationMaintenance]


class Spool(Shape):
    """Rows that were taken and are on their way into a table; `oldest_ms` is the age of the oldest that waits."""

    table: str
    # None: the next rows make a new one.
    spool: str | None
    host: str
    folder: str
    state: Literal["ok", "waiting", "refused", "elsewhere"]
    waiting_records: int | None
    waiting_rows: int | None
    waiting_bytes: int | None
    oldest_ms: int | None
    fed_records: int
    fed_rows: int
    quarantined: int
    version: int | None
    error: dict[str, Any] | None


class Task(BaseModel):
    """Something that the daemon does again and again; `set_aside`: bad files that lie there, `bad_files` the newest."""

    model_config = ConfigDict(extra="allow")

    name: str
    kind: str
    state: str
    every_s: float | None = None
    last_started: str | None = None
    last_ended: str | None = None
    last_outcome: str | None = None
    last_error: dict[str, Any] | None = None
    failures: int = 0
    set_aside: int = 0
    bad_files: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    next_at: str | None = None


class Daemon(Shape):
    """The process that runs the lake's tasks; not `alive`: it died, and these are its last words."""

    host: str
    pid: int
    since: str
    address: str | None
    alive: bool
    told: str
    tasks: list[Task]


class LastRun(Shape):
    at: str
    outcome: str
    table: str | None
    failed: list[str]


class JobLine(Shape):
    """A job in short: `processed` of `total` `unit`s."""

    job: str
    id: str
    kind: str
    tables: list[str]
    status: str
    processed: int
    total: int | None
    unit: str
    percent: float | None
    rate: float | None
    eta_s: float | None
    rows: int
    unfilled: int
    error: dict[str, Any] | None
    holder: str | None
    cancel_asked: bool
    started: str | None
    updated: str
    stalled_since: str | None
    ended: str | None


class Status(Shape):
    """The lake on one screen, as `floodmark status --json`. `health` is "fine", or what is wrong and where to look."""

    lake: str
    catalog: str
    format: int
    incarnation: str
    version: int
    branches: int
    tables: int
    rows: int
    files: int
    bytes: int
    small_files: int | None
    small_file_ratio: float | None
    versions: int
    expired_states: int
    last_commit: str | None
    running: list[str]
    pending: list[str]
    unknown: list[str]
    drifted: list[str]
    pins: int
    healed: dict[str, int]
    last_maintenance: dict[str, LastRun | None]
    due: list[str]
    sinks: list[SinkLine]
    spools: list[Spool]
    # Rows that sinks and spools put aside and nobody has settled yet.
    quarantined: int
    daemon: Daemon | None
    # None: they cannot be read, and jobs_error says why.
    jobs: list[JobLine] | None
    jobs_error: str | None
    # The parts of `health` that make the lake not ready.
    blocking: list[str]
    health: str


# ── tables ──


class TableLine(Shape):
    """A table in one line; `changed` is when its last commit was, `due` what maintenance would do to it."""

    table: str
    rows: int
    files: int
    bytes: int
    sequence: int
    version: int
    changed: str | None
    small_files: int | None
    small_file_ratio: float | None
    waiting_rows: int | None
    quarantined: int
    due: list[str]
    health: str


class Tables(Shape):
    tables: list[TableLine]


class ColumnLine(Shape):
    name: str
    type: str
    required: bool
    refers_to: str | None
    filled: str | None
    comment: str


class ConsumerLine(Shape):
    name: str
    mark: int
    lag: int
    protected: bool


class Outcome(Shape):
    at: str
    outcome: str


class TableDetails(Shape):
    """One table, as `floodmark show TABLE --json`."""

    table: str
    table_id: str
    location: str
    rows: int
    files: int
    bytes: int
    sequence: int
    version: int
    snapshot: int | None
    columns: list[ColumnLine]
    key: list[str]
    partition: list[str]
    sort: list[str]
    comment: str
    metadata_location: str
    small_files: int | None
    small_file_ratio: float | None
    snapshots: int
    orphan_files: int | None
    orphan_bytes: int | None
    retention: str | None
    retention_column: str | None
    consumers: list[ConsumerLine]
    last_maintenance: dict[str, Outcome]
    due: list[str]


# ── commits and audit ──


class TouchedTable(Shape):
    table: str
    table_id: str
    snapshot: int | None
    sequence: int
    rows_added: int
    rows_updated: int
    rows_deleted: int
    rows_total: int
    files_total: int


class CommitLine(Shape):
    version: int
    outcome: str
    operation: str | None
    kind: str
    branch: str
    actor: str
    message: str
    committed_ms: int
    tables: list[TouchedTable]


class Commits(Shape):
    """Newest first, as `floodmark history --json`; the next page is the one before the last version."""

    commits: list[CommitLine]


class AuditLine(Shape):
    time: str
    operation: str
    kind: str
    found: str
    outcome: str
    version: int | None
    detail: str


class Audit(Shape):
    """What healing and repairs did, newest first, as `floodmark audit --json`."""

    audit: list[AuditLine]


# ── sinks, jobs, spools ──


class LastUnit(BaseModel):
    model_config = ConfigDict(extra="allow")

    unit: str
    since: int
    until: int
    rows: int
    settled: str


class SinkTable(Shape):
    table: str
    mark: int | None
    head: int | None
    epoch: int
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
    # Rows that may be at the destination twice, and rows that retention took before the sink had them.
    rows_doubtful: int
    rows_lost: int
    refused: dict[str, Any] | None


class Sink(Shape):
    """Where a sink is, as `floodmark sink status --json`. Settings never hold a secret."""

    sink: str
    kind: str
    state: str
    branch: str | None
    running: str | None
    settings: dict[str, Any]
    error: dict[str, Any] | None
    error_at: str | None
    quarantined: int
    # How many rows may be set aside in all; None where a kind has no quarantine.
    quarantine_total_max: int | None
    # Until when the destination asked to be left alone, and the largest body that it takes, as far as it said so.
    waits_until: str | None
    body_bytes_max: int | None
    lost: list[str]
    tables: list[SinkTable]


class Sinks(Shape):
    sinks: list[Sink]


class Job(JobLine):
    """A job with all that is known of it, as `floodmark backfill show --json`."""

    publishes: int
    actor: str
    created: str
    acknowledged: str | None
    settings: dict[str, Any]


class Jobs(Shape):
    """Newest first, as `floodmark backfill list --all --json`."""

    jobs: list[Job]


class ChangedJob(Job):
    """What came of the wish: asked, cancelled, acknowledged or nothing_to_do; and the job as it is now."""

    outcome: str


class Spools(Shape):
    spools: list[Spool]


# ── figures and the whole ──


class Figures(Shape):
    """The last ten minutes, by the name of a table or sink: a figure for each of the moments `at_ms`, None if unknown.

    A moment is the end of a step of `step_s` seconds.
    """

    step_s: int
    at_ms: list[int]
    rows_per_s: dict[str, list[float | None]]
    lag_rows: dict[str, list[float | None]]
    lag_s: dict[str, list[float | None]]
    waiting_rows: dict[str, list[float | None]]


class Overview(Shape):
    """All that the page shows; `jobs` None: they cannot be read."""

    at: str
    status: Status
    tables: list[TableLine]
    sinks: list[Sink]
    jobs: list[Job] | None
    commits: list[CommitLine]
    audit: list[AuditLine]
