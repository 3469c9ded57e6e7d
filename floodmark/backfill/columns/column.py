"""A new column for old rows: added in one publish, then filled batch by batch while others read and write.

The files say what is done: one that lacks the column is not filled (decision 0019). New writes fill the column
themselves, so unfilled rows only get fewer, and the job ends. Each round reads the table as it is, so a run that was
cancelled or killed anywhere continues from the truth; rows are counted in the publishes that fill them, each once. A
batch that lost all its files to other writers is planned again, after several in a row with the table's turn; too many
in a row are a Conflict. What does not answer is asked again for a while. An expression that cannot be computed must not
keep writers out: if it filled no row, the column is unbound from it, and anyone can unbind it later.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypedDict, TypeVar

import pyarrow as pa
from pyiceberg.schema import Schema

from floodmark import log, runs
from floodmark.backfill.columns.batch import FillBatch, FillWork
from floodmark.backfill.columns.plan import BatchLimits, plan_batches
from floodmark.catalog.chunks import FillRider
from floodmark.catalog.jobs import COLUMN, DONE, ROWS, HeldJob, Job, vanished
from floodmark.commit.fills import Fill, absent_fields, fills_of, is_unbound
from floodmark.commit.intent import Intent
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import schema_of
from floodmark.errors import CommitUnknown, Conflict, Corrupt, Fenced, FloodmarkError, Invalid, NotFound, Unavailable
from floodmark.jobs.progress import Cancelled, JobProgress
from floodmark.jobs.record import BackfillRun
from floodmark.jobs.run import JobContext, run_job
from floodmark.json_form import Json
from floodmark.model import MAIN, Head
from floodmark.reading import ReadMoment
from floodmark.rows.evolve import evolve_schema
from floodmark.rows.rewriting.fill import expression_type
from floodmark.rows.schema import arrow_schema, arrow_type
from floodmark.runs import JobCallback
from floodmark.write.add_column import add_column, can_bind_anew, find_column, unbind_column

if TYPE_CHECKING:
    from pyiceberg.types import IcebergType

    from floodmark.rows.frames import DataFrame


@dataclass(frozen=True)
class ColumnSpec:
    """The specification of a column backfill. `announce`: filled rows get new sequences, so that consumers see them."""

    table: str
    column: str
    expression: str
    announce: bool
    batch_rows: int
    batch_bytes: int
    pause_s: float

    @property
    def name(self) -> str:
        return f"{self.table}.{self.column}"

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(self.batch_rows, self.batch_bytes)

    def pinned(self, table_id: str) -> dict[str, Json]:
        """The part of the job that never changes."""
        return {
            "table": self.table,
            "table_id": table_id,
            "column": self.column,
            "expression": self.expression,
            "announce": self.announce,
        }

    def settings(self) -> dict[str, Json]:
        return {"batch_rows": self.batch_rows, "batch_bytes": self.batch_bytes, "pause_s": self.pause_s}


def fold(expression: str, join: str | None, on: str | None) -> str:
    """The expression over the row alone: with a join, it becomes a query over the matching rows of the other table."""
    if (join is None) != (on is None):
        raise Invalid(
            "join and on must be used together", advice='Like: --join "orders o" --on "o.user_id = users.id".'
        )
    if join is None or on is None:
        return expression.strip()
    parts = {"expression": expression, "join": join, "on": on}
    if empty := [name for name, text in parts.items() if not text.strip()]:
        raise Invalid("this text is empty", role=", ".join(empty))
    return f"(select {expression.strip()} from {join.strip()} where {on.strip()})"


def spec_from_job(job: Job) -> ColumnSpec:
    """The spec that a job was last started with."""
    if job.kind != COLUMN:
        raise Invalid("not a column backfill", job=job.name, kind=job.kind)
    match job.settings:
        case {
            "table": str(table),
            "column": str(column),
            "expression": str(expression),
            "announce": bool(announce),
            "batch_rows": int(batch_rows),
            "batch_bytes": int(batch_bytes),
            "pause_s": int() | float() as pause_s,
        }:
            return ColumnSpec(table, column, expression, announce, batch_rows, batch_bytes, pause_s)
    missing = [field.name for field in fields(ColumnSpec) if field.name not in job.settings]
    raise Corrupt("the record of a job cannot be parsed", job=job.name, cause=KeyError(missing[0]) if missing else None)


__all__ = ["ColumnSpec", "fold", "plan", "run_column", "spec_from_job"]

TRIES_MAX = 5
BACKOFF_S, BACKOFF_S_MAX = 1.0, 30.0
# Rounds in a row that filled nothing: after the first number writers are asked to wait; after the second the run gives
# up.
LOST_BEFORE_TURN = 3
LOST_MAX = 20
# Among the settings of a job: its column existed when its newest run began.
HAS_COLUMN = "has_column"

T = TypeVar("T")


def run_column(
    context: JobContext, spec: ColumnSpec, actor: str, callback: JobCallback | None, *, resumes: Job | None = None
) -> BackfillRun:
    """Add the column if it does not exist, and fill all rows that lack it. Wrong input changes nothing.

    `resumes`: the job to go on with. It adds no column if it had one: that one has another name now, or was dropped.
    """
    context.engine.get_ready()
    found, job = _look_and_find(context, spec)
    if resumes is not None:
        _check_resumed(spec, found, resumes)
    pinned = spec.pinned(found.head.table_id)
    kind = found.kind or _type_of(context, spec, found)
    done = job is not None and job.state == DONE and json.loads(job.spec)["pinned"] == pinned
    if job is not None and done and found.fill is not None and not found.unfilled:
        return BackfillRun(runs.NOTHING_TO_DO, job.as_dict())
    settings = {**spec.settings(), HAS_COLUMN: found.fill is not None}
    held = context.catalog.jobs.start(
        spec.name, COLUMN, [spec.table], pinned, settings, ROWS, actor, anew=found.unbound
    )
    return run_job(context, held, callback, _ColumnRun(context, spec, actor, held, kind, resumes).work)


class ColumnPlan(TypedDict):
    """What a run would do now. Of the `batches`, `cuts` cut a file that is too large for one."""

    job: str
    kind: str
    table: str
    column: str
    type: str
    expression: str
    adds_column: bool
    announce: bool
    rows: int
    files: int
    bytes: int
    batches: int
    cuts: int


def plan(context: JobContext, spec: ColumnSpec) -> ColumnPlan:
    """What a backfill would do now; changes nothing."""
    found, _ = _look_and_find(context, spec)
    kind = found.kind or _type_of(context, spec, found)
    batches = list(plan_batches(found.unfilled, spec.limits))
    return {
        "job": spec.name,
        "kind": COLUMN,
        "table": spec.table,
        "column": spec.column,
        "type": str(kind),
        "expression": spec.expression,
        "adds_column": found.fill is None,
        "announce": spec.announce,
        "rows": found.rows,
        "files": len(found.unfilled),
        "bytes": sum(file.size_bytes for file in found.unfilled),
        # Files that are too large for a batch are cut first.
        "batches": sum(batch.pieces or 1 for batch in batches),
        "cuts": sum(batch.piece_rows is not None for batch in batches),
    }


# ── looking ──


@dataclass(frozen=True)
class _Found:
    """The table as it is: its column, if it has it, and the files that lack it."""

    head: Head
    schema: Schema
    fill: Fill | None
    kind: IcebergType | None
    unfilled: tuple[LiveFile, ...]
    # The column exists, was unbound from its expression, and may be bound again.
    unbound: bool = False

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.unfilled)


def _look_and_find(context: JobContext, spec: ColumnSpec) -> tuple[_Found, Job | None]:
    """The table, then the job: another process may be starting it, and a job exists before its column.

    Only a column with a default has no job: it came with its table's schema, and its older rows wait for one.
    """
    found, job = _look(context, spec), _find_job(context, spec)
    if job is None and found.fill is not None and not found.unfilled:
        raise _taken(spec, found.fill.column, found.fill.expression)
    return found, job


def _look(context: JobContext, spec: ColumnSpec) -> _Found:
    """Refuses an existing column that this expression does not fill. Reads metadata only."""
    files = context.catalog.files

    def read(head: Head) -> _Found:
        metadata = files.metadata(head.metadata_location)
        schema = schema_of(metadata, head)
        field = next((field for field in schema.fields if field.name.lower() == spec.column.lower()), None)
        live = live_files(files, head, schema)
        if field is None:
            return _Found(head, schema, None, None, tuple(live))
        fills = (fill for fill in fills_of(metadata.properties, schema) if fill.field_id == field.field_id)
        fill = next(fills, None)
        if fill is None and field.name == spec.column and can_bind_anew(context.catalog, metadata, head, field):
            return _Found(head, schema, None, None, tuple(live), unbound=True)
        if fill is None and is_unbound(metadata.properties, field.field_id):
            raise _unbound(spec, field.name)
        if fill is None or (fill.column, fill.expression) != (spec.column, spec.expression):
            raise _taken(spec, field.name, None if fill is None else fill.expression)
        unfilled = (file for file in live if absent_fields(file, [fill], schema))
        return _Found(head, schema, fill, field.field_type, tuple(unfilled))

    return context.catalog.at_head(spec.table, read)


def _check_resumed(spec: ColumnSpec, found: _Found, job: Job) -> None:
    """Refuse to go on with a job in another table, or in another column, than it began with."""
    if found.head.table_id != job.settings.get("table_id"):
        raise Invalid(
            "the table of this job was renamed or dropped, and another one has its name now",
            job=job.name,
            table=spec.table,
            advice="If it was renamed, `floodmark backfill column` fills the rest of the column under the new name.",
        )
    had_column = job.publishes > 0 or job.settings.get(HAS_COLUMN) is True
    if had_column and found.fill is None and not found.unbound:
        raise Invalid(
            "the column of this job was renamed or dropped",
            job=job.name,
            table=spec.table,
            column=spec.column,
            advice=(
                "`floodmark backfill column` with the same expression fills the rest of a renamed column by its new"
                " name, or adds a dropped one again."
            ),
        )


def _taken(spec: ColumnSpec, column: str, expression: str | None) -> Invalid:
    return Invalid(
        "the table has a column of this name",
        table=spec.table,
        column=column,
        filled_by=expression,
        advice="Choose another name, or change the values of this column with merge.",
    )


def _unbound(spec: ColumnSpec, column: str) -> Invalid:
    return Invalid(
        "the column was unbound from its expression, and data files hold it: it cannot be filled again",
        table=spec.table,
        column=column,
        advice="Filled values stay. Fill another column, or change its rows with merge.",
    )


def _find_job(context: JobContext, spec: ColumnSpec) -> Job | None:
    try:
        job = context.catalog.jobs.find(spec.name)
    except NotFound:
        return None
    if job.kind != COLUMN:
        raise Invalid(
            f"the job of this column would be called {spec.name}, and a {job.kind} backfill has that name",
            table=spec.table,
            column=spec.column,
            advice="Choose another name for the column.",
        )
    return job


def _type_of(context: JobContext, spec: ColumnSpec, found: _Found) -> IcebergType:
    """The type of the new column; Invalid if such a column cannot exist."""

    def read(name: str) -> DataFrame:
        return context.engine.reader.scan(name, ReadMoment()).df

    known = find_column(found.schema, spec.column)
    schema = Schema(*(field for field in found.schema.fields if field is not known))
    kind = expression_type(context.engine.sessions, schema, spec.table, spec.expression, read)
    if known is not None and not arrow_type(kind).equals(arrow_type(known.field_type)):
        raise Invalid(
            "the table has a column of this name and of another type",
            table=spec.table,
            column=spec.column,
            type=str(known.field_type),
            given=str(kind),
            advice=f"Choose another name, or make it a {known.field_type}.",
        )
    columns = arrow_schema(schema).append(pa.field(spec.column, arrow_type(kind)))
    # Before a job exists: a name or a type that a table cannot have is refused as the table would refuse it.
    if evolve_schema(schema, columns, found.schema.highest_field_id, 0) is None:
        raise Invalid("a column needs a name", table=spec.table, column=repr(spec.column))
    return kind


# ── one run ──


class _ColumnRun:
    """One run of the job, which holds it."""

    def __init__(
        self, context: JobContext, spec: ColumnSpec, actor: str, held: HeldJob, kind: IcebergType, resumes: Job | None
    ) -> None:
        self._context = context
        self._spec = spec
        self._held = held
        self._kind = kind
        self._resumes = resumes
        self._intent = Intent("fill", MAIN, actor, f"fill {spec.name}")
        # Rounds in a row that filled nothing, and the number of parts of a batch: more if some were lost.
        self._lost = 0
        self._parts = 1

    def work(self, progress: JobProgress) -> bool:
        """Fill until no file lacks the column; False if there was nothing to do."""
        try:
            return self._work(progress)
        except Invalid as error:
            raise self._let_writers_by(error) from error

    def _let_writers_by(self, error: Invalid) -> Invalid:
        """An expression that cannot be computed would fail every write too: unbind it, unless it filled rows."""
        undo = f"`floodmark backfill unbind {self._spec.table} {self._spec.column}` lets writers leave it out."
        advice = f"{error.advice} {undo}"
        with suppress(FloodmarkError):  # then an operator has to
            job = _find_job(self._context, self._spec)
            if self._look().fill is None or job is None:
                return error
            if job.rows == 0:
                intent = replace(self._intent, kind="add_column", message=f"unbind {self._spec.name}")
                rider = FillRider(self._held.id, self._held.run, 0, 0)
                unbind_column(self._context.catalog, intent, self._spec.table, self._spec.column, (rider,))
                advice = f"{error.advice} No row was filled, and writes leave the column out. Start with a correct one."
            return Invalid(error.message, advice=advice.strip(), **error.facts)
        return error

    def _work(self, progress: JobProgress) -> bool:
        busy = _patiently(self._context, self._held, progress, self._add_column)
        while True:
            found = _patiently(self._context, self._held, progress, partial(self._tell, progress))
            if not found.unfilled:
                return busy
            if busy:
                _wait(progress, self._spec.pause_s)
            _patiently(self._context, self._held, progress, partial(self._fill, found, progress))
            busy = True

    def _add_column(self) -> bool:
        """Add the column if it does not exist; returns whether this call added it."""
        found = self._look()
        if found.fill is not None:
            return False
        if self._resumes is not None:
            # Renamed since this run looked at the table, and before it held the job.
            _check_resumed(self._spec, found, self._resumes)
        intent = replace(self._intent, kind="add_column", message=f"add {self._spec.name}")
        # A run that was taken over adds nothing.
        rider = FillRider(self._held.id, self._held.run, 0, 0)
        add_column(
            self._context.catalog,
            intent,
            self._spec.table,
            self._spec.column,
            self._kind,
            self._spec.expression,
            (rider,),
        )
        return True

    def _look(self) -> _Found:
        found = _look(self._context, self._spec)
        if found.head.table_id != self._held.pinned["table_id"]:
            raise Conflict("the table was dropped and created again meanwhile", table=self._spec.table)
        return found

    def _tell(self, progress: JobProgress) -> _Found:
        """Report progress: rows that publishes counted, and those in files that lack the column."""
        found = self._look()
        if found.fill is None:
            raise Corrupt("the column vanished from the table", table=self._spec.table, column=self._spec.column)
        job = _find_job(self._context, self._spec)
        if job is None:
            raise vanished(self._held.name)
        progress.step(job.rows, job.rows + found.rows)
        if found.unfilled and job.cancel_ms is not None and job.run == self._held.run:
            raise Cancelled  # after this batch, however quick they are
        return found

    def _fill(self, found: _Found, progress: JobProgress) -> None:
        """One batch. If it filled nothing, the next one is smaller, and after a few it takes a turn."""
        assert found.fill is not None
        turn = self._lost >= LOST_BEFORE_TURN
        limits = replace(self._spec.limits, files_max=1) if turn else self._spec.limits
        batch = next(plan_batches(found.unfilled, limits))
        work = FillWork(
            self._spec.table, found.head.table_id, found.fill, self._spec.announce, self._held, self._intent
        )
        try:
            done = FillBatch(self._context, work, batch, self._parts, progress.check, take_turn=turn).run()
        except Conflict as conflict:
            self._count_lost(conflict)
            return
        if done.lost:
            self._parts = min(2 * self._parts, len(batch.files))
        else:
            self._parts = max(1, self._parts // 2)
        if done.commit is None or batch.piece_rows is not None:
            # A cut fills nothing yet; another process may merge the pieces again.
            self._count_lost()
        else:
            self._lost = 0
        log.get(job=self._spec.name).info("batch", rows=done.rows, files=len(batch.files), lost=done.lost)

    def _count_lost(self, cause: Conflict | None = None) -> None:
        self._lost += 1
        if self._lost >= LOST_MAX:
            raise Conflict(
                "the table kept changing during this backfill",
                table=self._spec.table,
                rounds=self._lost,
                advice="Filled values stay. Resume it when there are fewer writers.",
            ) from cause


def _patiently(context: JobContext, held: HeldJob, progress: JobProgress, work: Callable[[], T]) -> T:
    """Run it; again, after recovery, if something did not answer or a recovering process took this
    operation for dead.
    """
    wait_s = BACKOFF_S
    for tries in range(1, TRIES_MAX + 1):
        try:
            if tries > 1:
                context.engine.get_ready()
            return work()
        except (Unavailable, CommitUnknown, Fenced) as error:
            if tries == TRIES_MAX:
                raise
            log.get(job=held.name).warning("trying again", cause=str(error), tries=tries, wait_s=wait_s)
            if isinstance(error, Fenced):
                with suppress(Unavailable):
                    context.catalog.jobs.wants_cancel(held)  # Fenced if it is the job that was taken over
        _wait(progress, wait_s)
        wait_s = min(BACKOFF_S_MAX, 2 * wait_s)
    raise AssertionError("it returns or raises")


def _wait(progress: JobProgress, wait_s: float) -> None:
    """Wait the whole time, even while a request to cancel cannot be checked."""
    end_s = monotonic() + wait_s
    while (left_s := end_s - monotonic()) > 0:
        with suppress(Unavailable):
            progress.wait(left_s)
