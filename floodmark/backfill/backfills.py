"""`lake.backfill`: long work in small steps, each done once. Any process can watch it, stop it and resume it.

Thin: every verb checks its input and makes one call into the modules beside it. Wrong input creates no job and changes
nothing. Reading state needs no Spark.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Required, TypeAlias, TypedDict, Unpack

from floodmark import clock
from floodmark.catalog.jobs import COLUMN, HISTORY, UNKNOWN, Job
from floodmark.engine import Engine
from floodmark.errors import Invalid
from floodmark.jobs.record import BackfillRun
from floodmark.jobs.run import JobContext
from floodmark.json_form import Json
from floodmark.model import Commit
from floodmark.runs import JobCallback
from floodmark.shown import JobFacts, Listing

if TYPE_CHECKING:
    from floodmark.backfill.chunks.coverage import Coverage
    from floodmark.backfill.chunks.geometry import Chunk, GivenSize, GivenValue
    from floodmark.backfill.chunks.history import HistoryPlan, HistorySpec
    from floodmark.backfill.chunks.sources import ChunkRows, HistorySource
    from floodmark.backfill.chunks.spec import Definition
    from floodmark.backfill.columns.column import ColumnPlan, ColumnSpec
    from floodmark.rows.frames import DataFrame

GIVE_UP = "1d"
BATCH_ROWS = 2_000_000
BATCH_BYTES = 256 * 1024 * 1024
# What callers pass: a source, and the tables of a history with their definitions.
GivenSource: TypeAlias = "HistorySource | Callable[[Chunk], ChunkRows] | str"
GivenTables: TypeAlias = "str | Sequence[str] | Mapping[str, Definition]"


class HistoryOptions(TypedDict, total=False):
    """The options of `history_spec`."""

    chunk: Required[GivenSize]
    first: Required[GivenValue]
    last: GivenValue | None
    align: GivenValue | None
    column: str | None
    order: str
    workers: int
    rows_min: int | None
    rows_max: int | None
    rows_exact: bool
    expect: Mapping[str, Json] | None
    keep: str | int | None
    follow: bool
    tip_wait: str
    call_deadline: str
    retries: int
    forget_tip: bool


class ColumnOptions(TypedDict, total=False):
    """The options of `column_spec`."""

    join: str | None
    on: str | None
    announce: bool
    batch_rows: int
    batch_bytes: int
    pause: str


class LakeBackfills:
    def __init__(self, engine: Engine) -> None:
        self._context = JobContext(engine)
        self._catalog = engine.catalog

    def __repr__(self) -> str:
        return f"<lake.backfill of {self._catalog.location}: history, column, list, show, cancel, resume>"

    # ── history ──

    def history(
        self, name: str, source: GivenSource, tables: GivenTables, *, progress: JobCallback | None = None,
        actor: str | None = None, give_up: str = GIVE_UP, **options: Unpack[HistoryOptions],
    ) -> BackfillRun:  # fmt: skip
        """Load years of history in chunks, each once: every chunk that is wanted and not done, according to the
        catalog.

        `source` has `tip()` and `read(chunk)`; a path template or a function is accepted too. `tables`: a name, names,
        or a mapping from each table to its rows (None: the chunk's rows; Spark SQL over `chunk`). `options`: see
        `history_spec`. `progress(chunks done, chunks in all)` is called after every chunk. `give_up`: with follow=True,
        how long to retry a source that does not answer.
        """
        from floodmark.backfill.chunks.history import run_history

        spec = self.history_spec(name, source, tables, **options)
        return run_history(self._patient(give_up), spec, actor or self._context.engine.actor, progress)

    def history_spec(
        self,
        name: str,
        source: GivenSource,
        tables: GivenTables,
        *,
        chunk: GivenSize,
        first: GivenValue,
        last: GivenValue | None = None,
        align: GivenValue | None = None,
        column: str | None = None,
        order: str = "newest",
        workers: int = 2,
        rows_min: int | None = None,
        rows_max: int | None = None,
        rows_exact: bool = False,
        expect: Mapping[str, Json] | None = None,
        keep: str | int | None = None,
        follow: bool = False,
        tip_wait: str = "0s",
        call_deadline: str = "60s",
        retries: int = 5,
        forget_tip: bool = False,
    ) -> HistorySpec:
        """The specification of a history backfill. `chunk`: the size of a chunk, a number or a span of time like 1d.

        `first` is part of the range, `last` is not; without `last` the range ends at the source's tip. `column`: the
        position of a row in the range; rows outside their chunk are refused. rows_min, rows_max: per chunk; rows_exact:
        as many as a chunk has numbers, and with `column` each number once. `expect` declares the same by one mapping:
        rows (exact count), min_rows, every_number, or manifest (a JSON file with rows or sha256 of each chunk). `keep`:
        chunks further than this below the tip or now are skipped, and pruned. `follow`: continue with new chunks until
        cancelled. `tip_wait`: how long to wait for a tip that the source has not reached yet. `forget_tip`: ignore how
        far the source came before.
        """
        from floodmark.backfill.chunks.chunk_checks import expected_rows
        from floodmark.backfill.chunks.geometry import Geometry
        from floodmark.backfill.chunks.history import HistorySpec
        from floodmark.backfill.chunks.sources import to_source

        if order not in ("newest", "oldest"):
            raise Invalid("the order of chunks must be newest or oldest", order=order, advice="Use newest or oldest.")
        _check_positive(workers=workers, retries=retries)
        expected = expected_rows(expect or {}, column, rows_min, rows_max, rows_exact)
        return HistorySpec(
            name=name,
            source=to_source(source),
            tables=_outputs(tables),
            geometry=Geometry.of(first, last, chunk, align),
            column=column,
            order=order,
            workers=workers,
            **expected,
            keep=keep,
            follow=follow,
            tip_wait_s=clock.parse_duration_ms(tip_wait) / 1000,
            call_deadline_s=clock.parse_duration_ms(call_deadline) / 1000,
            retries=retries,
            forget_tip=forget_tip,
        )

    def redo(
        self,
        name: str,
        first: GivenValue,
        last: GivenValue,
        *,
        force: bool = False,
        all_rows: bool = False,
        source: GivenSource | None = None,
        progress: JobCallback | None = None,
        actor: str | None = None,
    ) -> BackfillRun:
        """Load chunks of a history again: one publish removes their rows, then they are loaded, with an audit row.

        [first, last) are whole chunks. Rows that others merged into the range since stay, and are named in `redone`;
        `all_rows` removes them too. If a consumer has shipped rows of a table without a key, it is Invalid, unless
        `force`. `source`: for a job whose source the catalog cannot store.
        """
        from floodmark.backfill.chunks.redo import redo
        from floodmark.backfill.chunks.sources import to_source

        job, by = self._of_kind(name, HISTORY), actor or self._context.engine.actor
        given = None if source is None else to_source(source)
        return redo(self._context, job, first, last, by, progress, source=given, force=force, all_rows=all_rows)

    def redo_plan(
        self,
        name: str,
        first: GivenValue,
        last: GivenValue,
        *,
        force: bool = False,
        all_rows: bool = False,
        source: GivenSource | None = None,
    ) -> dict[str, Json]:
        """What `redo` would remove and load; refused if a redo would be. Changes nothing."""
        from floodmark.backfill.chunks.redo import plan
        from floodmark.backfill.chunks.sources import to_source

        job, given = self._of_kind(name, HISTORY), None if source is None else to_source(source)
        return plan(self._context, job, first, last, source=given, force=force, all_rows=all_rows)

    def read(self, name: str, first: GivenValue, last: GivenValue, *, table: str | None = None) -> DataFrame:
        """The rows of a range of a history. BelowRetention or Incomplete if not all of it is loaded."""
        from floodmark.backfill.chunks.coverage import read_range

        return read_range(self._context, self._of_kind(name, HISTORY), first, last, table)

    def check_range(self, name: str, first: GivenValue, last: GivenValue, *, table: str | None = None) -> None:
        """BelowRetention or Incomplete if not all of a range is loaded, for a table or for all of the job's."""
        from floodmark.backfill.chunks.coverage import check_range

        check_range(self._context, self._of_kind(name, HISTORY), first, last, table)

    def coverage(self, name: str, *, index: bool = False) -> Coverage:
        """What a history has and lacks, per table: loaded ranges, gaps, and pruned ranges.

        `index`: also the loaded ranges that the table's indexes cover.
        """
        from floodmark.backfill.chunks.coverage import coverage

        return coverage(self._context, self._of_kind(name, HISTORY), index=index)

    # ── a column ──

    def column(
        self, table: str, column: str, expression: str, *, progress: JobCallback | None = None,
        actor: str | None = None, **options: Unpack[ColumnOptions],
    ) -> BackfillRun:  # fmt: skip
        """Add a column and fill it for existing rows, in small batches that block no writer.

        `expression` is Spark SQL over the row; new writes without a value for the column fill it by the same
        expression. `options`: see `column_spec`. `progress(rows done, rows in all)` is called after every batch.
        """
        from floodmark.backfill.columns.column import run_column

        spec = self.column_spec(table, column, expression, **options)
        return run_column(self._context, spec, actor or self._context.engine.actor, progress)

    def column_spec(
        self,
        table: str,
        column: str,
        expression: str,
        *,
        join: str | None = None,
        on: str | None = None,
        announce: bool = False,
        batch_rows: int = BATCH_ROWS,
        batch_bytes: int = BATCH_BYTES,
        pause: str = "100ms",
    ) -> ColumnSpec:
        """A column backfill. `join` ("orders o") and `on` ("o.user_id = users.id"): values from matching rows there.

        Rows keep their sequences, unless `announce` gives them new ones so that consumers see them. A batch has at most
        batch_rows rows and batch_bytes bytes, and is followed by a pause.
        """
        from floodmark.backfill.columns.column import ColumnSpec, fold

        _check_positive(batch_rows=batch_rows, batch_bytes=batch_bytes)
        pause_s = clock.parse_duration_ms(pause) / 1000
        return ColumnSpec(table, column, fold(expression, join, on), announce, batch_rows, batch_bytes, pause_s)

    def unbind(self, table: str, column: str, *, actor: str | None = None) -> Commit:
        """Stop filling a column by its expression: writers compute nothing, unfilled rows stay null."""
        from floodmark.backfill.columns.unbind import unbind

        return unbind(self._context, table, column, actor or self._context.engine.actor)

    # ── jobs ──

    def plan(self, spec: HistorySpec | ColumnSpec) -> HistoryPlan | ColumnPlan:
        """What a backfill would do now; changes nothing."""
        from floodmark.backfill.chunks import history
        from floodmark.backfill.columns import column

        if isinstance(spec, column.ColumnSpec):
            return column.plan(self._context, spec)
        return history.plan(self._context, spec)

    def resume(
        self,
        name: str,
        *,
        progress: JobCallback | None = None,
        actor: str | None = None,
        stop: threading.Event | None = None,
        give_up: str = GIVE_UP,
    ) -> BackfillRun:
        """Resume a job that was cancelled, failed, or whose process died, as it was started.

        `Invalid` for a column that was renamed or dropped since, or whose table was, if another one has its name.
        `stop`, once it is set, ends the run after its current chunk or batch; the job is then interrupted.
        """
        from floodmark.backfill.chunks import history
        from floodmark.backfill.columns import column
        from floodmark.backfill.columns.unbind import end_unbound

        job, actor = self._catalog.jobs.find(name), actor or self._context.engine.actor
        context = replace(self._patient(give_up), stop=stop)
        if job.kind == COLUMN:
            ended = end_unbound(context, job)
            return ended or column.run_column(context, column.spec_from_job(job), actor, progress, resumes=job)
        return history.run_history(context, history.spec_from_job(self._of_kind(name, HISTORY)), actor, progress)

    def list(self) -> Listing[JobFacts]:
        """Every job, newest first."""
        return Listing(JobFacts(job.as_dict()) for job in self._catalog.jobs.all())

    def show(self, name: str) -> JobFacts:
        """One job: its progress, its speed, its owner, and why it failed."""
        return JobFacts(self._catalog.jobs.find(name).as_dict())

    def cancel(self, name: str) -> JobFacts:
        """Ask a job to stop after its current batch or chunk; finished work stays."""
        self._context.engine.get_ready()
        return JobFacts(self._catalog.jobs.cancel(name).as_dict())

    def ack(self, name: str) -> JobFacts:
        """Acknowledge a failure: the job needs no attention any more."""
        self._context.engine.get_ready()
        return JobFacts(self._catalog.jobs.acknowledge(name).as_dict())

    def _patient(self, give_up: str) -> JobContext:
        return replace(self._context, give_up_s=clock.parse_duration_ms(give_up) / 1000)

    def _of_kind(self, name: str, kind: str) -> Job:
        job = self._catalog.jobs.find(name)
        if job.kind != kind or job.status == UNKNOWN:
            raise Invalid(f"not a {kind} backfill", job=name, kind=job.kind, status=job.status)
        return job


def _outputs(tables: GivenTables) -> dict[str, Definition]:
    if isinstance(tables, str):
        return {tables: None}
    found: dict[str, Definition] = dict(tables) if isinstance(tables, Mapping) else dict.fromkeys(tables)
    if not found:
        raise Invalid("a history needs at least one table")
    return found


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise Invalid(f"{name} must be a whole number above 0", given=repr(number))
