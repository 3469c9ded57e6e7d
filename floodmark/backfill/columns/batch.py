"""One batch of a column backfill: some files of a table, rewritten with the new column and published.

One publication. Rows and their sequences stay (I6), unless they are announced: then they get the commit's sequence. The
batch writes as many rows as it read, and as many nulls in every other column, or it is `Corrupt`. After an append or a
write to other files meanwhile, the new list is built on it. A file removed meanwhile is lost to this batch, with those
that were rewritten together with it; the others are published. A run that was taken over publishes nothing. Crash
anywhere: the old files or the new, never both, never neither; recovery undoes what was not published, and no row was
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from floodmark import clock
from floodmark.backfill.columns.plan import Batch
from floodmark.catalog.chunks import FillRider
from floodmark.catalog.jobs import HeldJob
from floodmark.catalog.riders import PlanAgain
from floodmark.commit.fills import Fill, absent_fields, fills_of
from floodmark.commit.intent import Intent
from floodmark.commit.journal import Operation
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import new_snapshot_id, schema_of
from floodmark.commit.publication import Planned, Publication, PublishPlan, Start, publish
from floodmark.commit.seal import Edit
from floodmark.errors import Conflict, Corrupt
from floodmark.failpoints import hit
from floodmark.jobs.run import JobContext
from floodmark.model import Commit, FileRecord, Head
from floodmark.reading import ReadMoment
from floodmark.rows.reading.arrow_reader import read_rows
from floodmark.rows.rewriting.fill import run_fill
from floodmark.rows.rewriting.rewrite import InputFile
from floodmark.rows.sql.expression import parse_plain
from floodmark.rows.staging.stage import StageTarget, stage_batches
from floodmark.rows.tasks import is_little
from floodmark.write.table import check_records

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema

KIND = "fill"
_ADVICE = "Nothing was changed. Run `floodmark doctor`."


@dataclass(frozen=True)
class FillWork:
    """What is filled, and by which run of which job. `announce`: the rows get new sequences."""

    table: str
    table_id: str
    fill: Fill
    announce: bool
    held: HeldJob
    intent: Intent


@dataclass(frozen=True)
class FillResult:
    """The result of a batch: filled rows, files that another writer replaced meanwhile, the commit if any."""

    rows: int = 0
    lost: int = 0
    commit: Commit | None = None


@dataclass(frozen=True)
class _Rewritten:
    """Files that are replaced together, and by what; `filled` of the rows are counted, `unfilled` of those are null."""

    files: tuple[LiveFile, ...]
    records: tuple[FileRecord, ...]
    filled: int = 0
    unfilled: int = 0

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(file.path for file in self.files)


@dataclass(frozen=True)
class _State:
    """The table as this batch reads it."""

    head: Head
    location: str
    schema: Schema
    fills: tuple[Fill, ...]
    files: dict[str, LiveFile]
    target: StageTarget

    def source(self, file: LiveFile) -> InputFile:
        return InputFile.of(file, absent=absent_fields(file, self.fills, self.schema))


class FillBatch(PublishPlan):
    """One batch. `parts`: how many parts Spark fills; each is lost or published as a whole. `take_turn`: writers wait
    for it. `check` is called between two files and may raise: then nothing has happened.
    """

    # Its caller asks for the turn, for a batch that fills nothing again and again.
    takes_turn = False

    def __init__(
        self,
        context: JobContext,
        work: FillWork,
        batch: Batch,
        parts: int,
        check: Callable[[], None],
        *,
        take_turn: bool = False,
    ) -> None:
        self._context = context
        self._catalog = context.catalog
        self._work = work
        self._batch = batch
        self._parts = parts
        self._check = check
        self._take_turn = take_turn
        self._snapshot = new_snapshot_id()
        self._state: _State
        self._head: Head
        # What is left to publish: the last seal, if the reply of its publish was lost.
        self._rewritten: Sequence[_Rewritten] = ()
        self._used_spark = False
        self._lost = 0

    def run(self) -> FillResult:
        commit = publish(self._catalog, self._work.intent, self)
        if commit.operation is None:
            return FillResult(lost=self._lost)
        return FillResult(sum(one.filled for one in self._rewritten), self._lost, commit)

    def start(self) -> Start:
        read = self._catalog.files.metadata
        return Start([self._catalog.at_head(self._work.table, lambda head: read(head.metadata_location).location)])

    def stage(self, work: Publication) -> None:
        if self._take_turn:
            work.take_turn([self._work.table_id])
        # Read after begin: from then on the operation holds what it reads.
        self._state = self._read(work.operation)
        self._head = self._state.head
        self._rewritten = self._rewrite(work.operation, self._state, self._batch, self._parts)
        # Crash here: files in the operation's own folder; recovery deletes them (I3, I10).
        hit("fill.rewritten")
        check_records([record for one in self._rewritten for record in one.records], self._state.target.folder)

    @property
    def used_spark(self) -> bool:
        return self._used_spark

    # ── read ──

    def _look(self) -> Head:
        head = self._catalog.history.head(self._work.table, self._work.intent.branch)
        if head.table_id != self._work.table_id:
            raise Conflict("the table was dropped and created again meanwhile", table=self._work.table)
        return head

    def _read(self, operation: Operation) -> _State:
        head = self._look()
        metadata = self._catalog.files.metadata(head.metadata_location)
        schema = schema_of(metadata, head)
        target = StageTarget.of(
            metadata,
            operation.folder(metadata.location, "data"),
            self._catalog.storage,
            schema=schema,
            spec=metadata.specs()[head.spec_id],
            settled=not self._work.announce,
        )
        files = {file.path: file for file in live_files(self._catalog.files, head, schema)}
        return _State(head, metadata.location, schema, fills_of(metadata.properties, schema), files, target)

    # ── rewrite ──

    def _rewrite(self, operation: Operation, state: _State, batch: Batch, parts: int) -> list[_Rewritten]:
        live = [state.files[file.path] for file in batch.files if file.path in state.files]
        self._lost = len(batch.files) - len(live)
        batch = replace(batch, files=tuple(live))
        if not live:
            return []
        if batch.piece_rows is not None:
            return [self._cut(state, live[0], batch.piece_rows)]
        if (
            is_little(batch.rows, batch.size_bytes)
            and parse_plain(self._work.fill.expression, state.schema) is not None
        ):
            parts = len(live)
        rewritten = []
        for files in batch.units(parts):
            self._check()
            rewritten.append(self._fill(operation, state, files))
        return rewritten

    def _fill(self, operation: Operation, state: _State, files: tuple[LiveFile, ...]) -> _Rewritten:
        fill, sources = self._work.fill, [state.source(file) for file in files]
        before, self._used_spark = self._used_spark, True  # until known: an error must not report that it was unused
        filled, used_spark = run_fill(
            self._catalog.storage,
            self._context.engine.sessions,
            f"floodmark-{operation.id}",
            state.target,
            sources,
            [fill],
            table=self._work.table,
            source_schema=state.schema,
            # At the version that this operation holds: none of its files can be deleted while they are read.
            tables=lambda name: self._context.engine.reader.scan(name, ReadMoment(version=operation.base_version)).df,
        )
        self._used_spark = before or used_spark
        _check_same(state, sources, files, filled.records)
        rows = sum(file.rows for file in files)
        return _Rewritten(files, filled.records, rows, filled.unfilled.get(fill.field_id, 0))

    def _cut(self, state: _State, file: LiveFile, piece_rows: int) -> _Rewritten:
        """The file's rows unchanged, without the column, in files of so many rows."""
        source = state.source(file)
        target = replace(state.target, settled=True).without(source.absent)
        rows = _Rows(read_rows(self._catalog.storage, file.path, target.shape().schema, True, file.sequence))
        records: list[FileRecord] = []
        for _ in range(0, file.rows, piece_rows):
            self._check()
            piece = rows.take(piece_rows)
            staged = stage_batches(target, piece, clock.new_id(), storage=self._catalog.storage)
            if staged.problems:
                raise Corrupt(
                    "a data file has rows that do not fit its table", file=file.path, cause=staged.problems[0]
                )
            records += staged.records
        if rows.ended is False:
            raise _other_rows([file], file.rows + 1)
        _check_same(state, [source], (file,), records)
        return _Rewritten((file,), tuple(records))

    # ── plan ──

    def plan(self) -> Planned:
        rewritten, head = self._rewritten, self._head
        if not rewritten:
            return Planned()
        filled, unfilled = sum(one.filled for one in rewritten), sum(one.unfilled for one in rewritten)
        announced = self._work.announce and filled > 0
        edit = Edit.at(head, self._state.location, self._snapshot, checked=True).exchange(
            (record for one in rewritten for record in one.records),
            (file for one in rewritten for file in one.files),
            same_rows=not announced,
        )
        edit = replace(edit, rows_updated=filled if announced else 0)
        # Not repeatable: recovery undoes what a dead run sealed, and the next run fills its rows.
        return Planned((edit,), (FillRider(self._work.held.id, self._work.held.run, filled, unfilled),))

    def recheck(self, edit: Edit, head: Head) -> None:
        """Any rows may have been added meanwhile: the replaced files are live, and each row gets its own value."""

    def plan_again(self, lost: PlanAgain) -> None:
        """Publish the rest on the new head. After a schema change, the staged files do not fit: nothing is left."""
        before, self._head = self._head, self._look()
        same = (self._head.schema_id, self._head.spec_id) == (before.schema_id, before.spec_id)
        files = set(self._catalog.files.data_files(self._head)) if same else set()
        live = [one for one in self._rewritten if one.paths <= files]
        if len(live) == len(self._rewritten):
            live = []  # refused for a reason that is not visible here: do not retry blindly
        self._lost += sum(len(one.files) for one in self._rewritten) - sum(len(one.files) for one in live)
        self._rewritten = live


class _Rows:
    """A stream of rows, read so many at a time."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    @property
    def ended(self) -> bool:
        if self._rest is None:
            self._rest = next(self._batches, None)
        return self._rest is None

    def take(self, rows: int) -> Iterator[pa.RecordBatch]:
        while rows and not self.ended:
            assert self._rest is not None
            some, rest = self._rest.slice(0, rows), self._rest.slice(rows)
            self._rest = rest if len(rest) else None
            rows -= len(some)
            yield some


def _check_same(
    state: _State, sources: Sequence[InputFile], files: Sequence[LiveFile], records: Sequence[FileRecord]
) -> None:
    """As many rows as before, and as many nulls in every plain column that all the files had, by their counts.

    Reading everything back, as compaction does, would take half as long again as filling it.
    """
    rows = sum(record.rows for record in records)
    if rows != sum(file.rows for file in files):
        raise _other_rows(files, rows)
    absent = {field_id for source in sources for field_id in source.absent}
    for column in state.schema.fields:
        if not column.field_type.is_primitive or column.field_id in absent or column.field_id == files[0].seq_id:
            continue
        before = [(file.data_file.null_value_counts or {}).get(column.field_id) for file in files]
        after = [record.null_counts.get(column.field_id) for record in records]
        if None in before or None in after:
            continue
        if sum(one or 0 for one in before) != sum(one or 0 for one in after):
            raise Corrupt(
                "filled files do not have the values of the files they replace",
                file=files[0].path,
                files=len(files),
                column=column.name,
                nulls=sum(one or 0 for one in after),
                nulls_expected=sum(one or 0 for one in before),
                advice=_ADVICE,
            )


def _other_rows(files: Sequence[LiveFile], rows: int) -> Corrupt:
    return Corrupt(
        "data files do not have the number of rows in the catalog",
        file=files[0].path,
        files=len(files),
        rows=rows,
        rows_expected=sum(file.rows for file in files),
        advice=_ADVICE,
    )
