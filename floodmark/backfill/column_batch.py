"""One batch of a column backfill: some files of a table, rewritten with the new column and published.

One operation, through the same door as every write: begin, rewrite, seal, publish. Rows and their sequences stay (I6),
unless they are announced: then they come with the commit's sequence. As many rows come out as went in, and as many
nulls in every other column, or it is `Corrupt`. An append or a write to other files meanwhile: the new list is built on
it. A file gone meanwhile is lost to this batch, with those that were rewritten together with it; the others are
published. A run that was taken over publishes nothing. Crash anywhere: the old files or the new, never both, never
neither; a healer undoes what was not published, and no row was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from floodmark import clock, log
from floodmark.backfill.column_plan import Batch
from floodmark.backfill.run import Room
from floodmark.catalog.chunks import FillRider
from floodmark.catalog.fills import Fill, absent_fields, fills_of
from floodmark.catalog.jobs import Held
from floodmark.catalog.journal import Operation
from floodmark.catalog.live import LiveFile, live_files
from floodmark.catalog.metadata import new_snapshot_id, schema_of
from floodmark.catalog.riders import PlanAgain
from floodmark.catalog.seal import WRITE, Edit, RemovedFile, Seal
from floodmark.errors import Conflict, Corrupt
from floodmark.failpoints import hit
from floodmark.model import Commit, FileRecord, Head
from floodmark.reading import Moment
from floodmark.rows.arrow_reader import read_rows
from floodmark.rows.expression import parse_plain
from floodmark.rows.fill import run_fill
from floodmark.rows.rewrite import Source
from floodmark.rows.runner import IN_PROCESS_BYTES_MAX, IN_PROCESS_ROWS_MAX
from floodmark.rows.stage import StageTarget, stage_batches
from floodmark.write.intent import Intent
from floodmark.write.undo import delete_files, undo
from floodmark.write.working import check_records

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema

KIND = "fill"
# A turn is held while files are read and written, as by a change that plans again (write/change.py).
TURN_MS = 60_000
_ADVICE = "Nothing was changed. Run `floodmark doctor`."


@dataclass(frozen=True)
class Work:
    """What is filled, and by which run of which job. `announce`: the rows get new sequences."""

    table: str
    table_id: str
    fill: Fill
    announce: bool
    held: Held
    intent: Intent


@dataclass(frozen=True)
class Done:
    """What became of a batch: rows that were filled, files that somebody else replaced meanwhile, the commit if any."""

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

    def source(self, file: LiveFile) -> Source:
        return Source.of(file, absent=absent_fields(file, self.fills, self.schema))


class FillBatch:
    """Runs one batch. `check` is called between two files and may raise: then nothing has happened."""

    def __init__(self, room: Room, work: Work, check: Callable[[], None]) -> None:
        self._room = room
        self._catalog = room.catalog
        self._work = work
        self._check = check
        self._used_spark = False
        # Files were staged that will not be published.
        self._leftovers = False
        self._lost = 0
        # What was sealed last: what a publish whose reply was lost has brought.
        self._sealed: Sequence[_Rewritten] = ()

    def run(self, batch: Batch, parts: int, *, take_turn: bool = False) -> Done:
        """`parts`: what Spark fills comes in so many parts, lost or published each. `take_turn`: writers let it by."""
        read = self._catalog.files.metadata
        location = self._catalog.at_head(self._work.table, lambda head: read(head.metadata_location).location)
        intent = self._work.intent
        operation = self._catalog.journal.begin(
            KIND, branch=intent.branch, actor=intent.actor, message=intent.message, table_locations=[location]
        )
        # Crash here: a row in the journal, no file; healing rolls it back.
        hit("fill.begun")
        try:
            if take_turn:
                self._catalog.door.turns.take(operation.id, [self._work.table_id], TURN_MS)
            # Read after begin: from there on the operation holds what it reads.
            state = self._read(operation)
            rewritten = self._rewrite(operation, state, batch, parts)
            # Crash here: files in the operation's own folder; healing deletes them (I3, I10).
            hit("fill.rewritten")
            commit = self._publish(operation, state, rewritten)
            if commit is None:
                self._give_up(operation)
                return Done(lost=self._lost)
        except BaseException as error:  # noqa: BLE001 - undo raises it again, or knows better
            # It returns if reading tells that the batch is published after all.
            commit = undo(self._catalog, operation, error, certain=not self._used_spark)
        finally:
            self._catalog.journal.active.discard(operation.id)
        return Done(sum(one.filled for one in self._sealed), self._lost, commit)

    # ── read ──

    def _head(self) -> Head:
        head = self._catalog.history.head(self._work.table, self._work.intent.branch)
        if head.table_id != self._work.table_id:
            raise Conflict("the table was made again meanwhile", table=self._work.table)
        return head

    def _read(self, operation: Operation) -> _State:
        head = self._head()
        metadata = self._catalog.files.metadata(head.metadata_location)
        schema = schema_of(metadata, head)
        target = StageTarget(
            folder=operation.folder(metadata.location, "data"),
            schema_json=schema.model_dump_json(),
            spec_json=metadata.specs()[head.spec_id].model_dump_json(),
            sort_json=metadata.sort_order().model_dump_json(),
            properties=dict(metadata.properties),
            storage_options=self._catalog.storage.options,
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
        if _is_little(batch) and parse_plain(self._work.fill.expression, state.schema) is not None:
            parts = len(live)
        rewritten = []
        for files in batch.units(parts):
            self._check()
            rewritten.append(self._fill(operation, state, files))
        return rewritten

    def _fill(self, operation: Operation, state: _State, files: tuple[LiveFile, ...]) -> _Rewritten:
        fill, sources = self._work.fill, [state.source(file) for file in files]
        before, self._used_spark = self._used_spark, True  # until it is known: an error must not say that it was not
        filled, used_spark = run_fill(
            self._catalog.storage,
            self._room.get_spark,
            f"floodmark-{operation.id}",
            state.target,
            sources,
            [fill],
            table=self._work.table,
            source_schema=state.schema,
            # At the version that this operation holds: no file of it can go while it is read.
            tables=lambda name: self._room.reader.read(name, Moment(version=operation.base_version), with_seq=False),
        )
        self._used_spark = before or used_spark
        _check_same(state, sources, files, filled.records)
        rows = sum(file.rows for file in files)
        return _Rewritten(files, filled.records, rows, filled.unfilled.get(fill.field_id, 0))

    def _cut(self, state: _State, file: LiveFile, piece_rows: int) -> _Rewritten:
        """The file's rows as they are, without the column, in files of so many rows."""
        source = state.source(file)
        target = replace(state.target, settled=True).without(source.absent)
        rows = _Rows(read_rows(self._catalog.storage, file.path, target.shape().schema, True, file.sequence))
        records: list[FileRecord] = []
        for _ in range(0, file.rows, piece_rows):
            self._check()
            piece = rows.take(piece_rows)
            staged = stage_batches(target, piece, clock.new_id(), storage=self._catalog.storage)
            if staged.problems:
                raise Corrupt("a data file holds rows that its table cannot", file=file.path, cause=staged.problems[0])
            records += staged.records
        if rows.ended is False:
            raise _other_rows([file], file.rows + 1)
        _check_same(state, [source], (file,), records)
        return _Rewritten((file,), tuple(records))

    # ── seal and publish ──

    def _publish(self, operation: Operation, state: _State, rewritten: Sequence[_Rewritten]) -> Commit | None:
        """Publish what was rewritten; without files that went meanwhile. None if there is nothing left of it."""
        snapshot, head = new_snapshot_id(), state.head
        check_records([record for one in rewritten for record in one.records], state.target.folder)
        while rewritten:
            self._sealed = rewritten
            seal = self._seal(state, head, rewritten, snapshot)
            sealed_apart = self._catalog.journal.seal(operation, seal)
            # Crash here: undone by a healer; the next round fills these files.
            hit("fill.sealed")
            leftovers = self._used_spark or self._leftovers or sealed_apart
            try:
                return self._catalog.door.publish(
                    operation, seal, points=KIND, leftovers=leftovers, recheck=_rows_do_not_matter
                )
            except PlanAgain as again:
                log.get(operation.id, kind=KIND).info("planning again", table=self._work.table, reason=again.reason)
                rewritten, head = self._still_live(head, rewritten)
                # Crash here: the old seal, whose files are not all live; no healer publishes it.
                hit("fill.planned_again")
        return None

    def _still_live(self, before: Head, rewritten: Sequence[_Rewritten]) -> tuple[list[_Rewritten], Head]:
        """What can be published yet, on the table's new head. Of another shape, the staged files are not right."""
        head = self._head()
        same = (head.schema_id, head.spec_id) == (before.schema_id, before.spec_id)
        files = set(self._catalog.files.data_files(head)) if same else set()
        live = [one for one in rewritten if one.paths <= files]
        if len(live) == len(rewritten):
            live = []  # refused for a reason that is not seen here: it is not tried blindly
        self._lost += sum(len(one.files) for one in rewritten) - sum(len(one.files) for one in live)
        self._leftovers = True
        return live, head

    def _seal(self, state: _State, head: Head, rewritten: Sequence[_Rewritten], snapshot: int) -> Seal:
        filled, unfilled = sum(one.filled for one in rewritten), sum(one.unfilled for one in rewritten)
        announced = self._work.announce and filled > 0
        edit = Edit(
            WRITE,
            self._work.table,
            self._work.table_id,
            state.location,
            head.schema_id,
            head.spec_id,
            snapshot=snapshot,
            added=tuple(record for one in rewritten for record in one.records),
            removed=tuple(
                RemovedFile(file.path, file.rows, file.size_bytes) for one in rewritten for file in one.files
            ),
            rows_updated=filled if announced else 0,
            checked=True,
            same_rows=not announced,
            base_snapshot=head.snapshot,
        )
        # Not repeatable: what a dead run sealed is undone, and its rows are filled by the next run.
        return Seal((edit,), (FillRider(self._work.held.id, self._work.held.run, filled, unfilled),))

    def _give_up(self, operation: Operation) -> None:
        """Nothing to publish: the staged files go at once, and the turn."""
        fenced, _ = self._catalog.journal.abandon(operation.id)
        if fenced is not None:
            delete_files(self._catalog, fenced, certain=not self._used_spark)


class _Rows:
    """A stream of rows, taken so many at a time."""

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


def _is_little(batch: Batch) -> bool:
    """Arrow fills it in this process, file by file, as quickly in one part as in many."""
    return batch.rows <= IN_PROCESS_ROWS_MAX and batch.size_bytes <= IN_PROCESS_BYTES_MAX


def _check_same(
    state: _State, sources: Sequence[Source], files: Sequence[LiveFile], records: Sequence[FileRecord]
) -> None:
    """As many rows as before, and as many nulls in every plain column that all the files had, by their counts.

    To read everything back, as compaction does, would take half as long again as filling it.
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
        "data files do not hold as many rows as the catalog says",
        file=files[0].path,
        files=len(files),
        rows=rows,
        rows_expected=sum(file.rows for file in files),
        advice=_ADVICE,
    )


def _rows_do_not_matter(edit: Edit, head: Head) -> None:
    """Whatever rows came meanwhile: the files that are replaced are live, and each row gets its own value."""
