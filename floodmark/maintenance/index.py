"""`maintain index`: segments cover the data files that branches have, and are few.

    build     files of a branch's head that no segment in use covers get segments, a batch at a time
    fold      many small segments become one, without the files that no branch has
    retire    segments of whose files no branch has one; damaged ones, once their files are covered anew

Every batch and every fold is a publication that makes no version and moves no head (decision 0047): it never refuses
another commit. What is to be done is a difference between live files and segments, so a run that is killed loses at
most one batch, and the next run does the rest. A fold publishes only while all that it replaces is still in use.
Segments are hints: nothing here can change an answer (I11). A retired segment serves older versions until a sweep.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyiceberg.schema import Schema

from floodmark import clock, log
from floodmark.catalog.indexes import KEY, FoldRider, IndexRider, IndexRow, SealedSegment, SegmentRow
from floodmark.catalog.riders import Rider
from floodmark.commit.catalog import READS_MAX, Catalog
from floodmark.commit.intent import Intent
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import schema_of
from floodmark.commit.publication import Planned, Publication, PublishPlan, Start, publish
from floodmark.engine import Engine
from floodmark.errors import Conflict, Corrupt, NotFound
from floodmark.failpoints import hit
from floodmark.index.covering import form_of
from floodmark.index.verification import problem_of
from floodmark.index.writing import SUFFIX, columns_on, ensure_key, holds, write_segments
from floodmark.json_form import Json
from floodmark.maintenance.folds import next_fold
from floodmark.maintenance.record import INDEX
from floodmark.model import Commit, Head
from floodmark.rows.index.fold import fold
from floodmark.rows.index.segment import Section, write_segment
from floodmark.runs import CONFLICT, INDEXED, NOTHING_TO_DO, PARTIAL, PLANNED, Progress, Report
from floodmark.storage import join

# One publish: a run that is killed loses as much as this.
BATCH_ROWS_MAX = 8_000_000
BATCH_BYTES_MAX = 2 * 1024 * 1024 * 1024
BATCH_FILES_MAX = 4_096
# A fold makes a segment of many: so many follow each other in one run.
FOLDS_MAX = 1_000


@dataclass
class Indexed:
    """What was done for one table."""

    files: int = 0
    rows: int = 0
    segments: int = 0
    folds: int = 0
    folded: int = 0
    retired: int = 0
    conflicts: int = 0
    # Segments that a comparison with the rows found to be wrong.
    damaged: int = 0
    # By index: files of which it can say nothing, since they lack a column of it.
    not_coverable: dict[str, int] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        done = bool(self.files or self.folds or self.retired)
        if self.conflicts:
            return PARTIAL if done else CONFLICT
        return INDEXED if done else NOTHING_TO_DO

    def as_dict(self) -> dict[str, Json]:
        return {**vars(self), "not_coverable": dict(self.not_coverable)}


# ── what there is ──


@dataclass(frozen=True)
class IndexedFile:
    """A data file that some branch has, and the schema of the first branch that has it."""

    file: LiveFile
    schema: Schema


@dataclass(frozen=True)
class LiveTable:
    """The data files of a table that the heads of branches have; main's come first."""

    head: Head
    location: str
    files: Mapping[str, IndexedFile]
    schemas: tuple[Schema, ...]


def look(catalog: Catalog, table_id: str) -> LiveTable | None:
    """None: no branch has the table. A head that moved and was swept meanwhile is read anew."""
    for _ in range(READS_MAX):
        heads = _heads(catalog, table_id)
        try:
            return _read(catalog, heads) if heads else None
        except (Corrupt, NotFound, FileNotFoundError):
            if _heads(catalog, table_id) == heads:
                raise
    raise Conflict("the table kept changing while it was read", table=table_id, advice="Run it again.")


def _heads(catalog: Catalog, table_id: str) -> list[Head]:
    return [head for head in catalog.history.all_heads() if head.table_id == table_id]


def _read(catalog: Catalog, heads: Sequence[Head]) -> LiveTable:
    files: dict[str, IndexedFile] = {}
    schemas: dict[int, Schema] = {}
    # Branches that did not write to the table share its state.
    distinct: dict[tuple[int | None, int], Head] = {}
    for head in heads:
        distinct.setdefault((head.snapshot, head.schema_id), head)
    for head in distinct.values():
        schema = schemas.setdefault(head.schema_id, schema_of(catalog.files.metadata(head.metadata_location), head))
        for file in live_files(catalog.files, head, schema):
            files.setdefault(file.path, IndexedFile(file, schema))
    location = catalog.files.metadata(heads[0].metadata_location).location
    return LiveTable(heads[0], location, files, tuple(schemas.values()))


@dataclass(frozen=True)
class FileBatch:
    """Files that one publish covers, by the indexes that miss them."""

    indexes: tuple[IndexRow, ...]
    schema: Schema
    files: tuple[LiveFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


@dataclass
class IndexPlan:
    """What is to be done for one table."""

    live: LiveTable
    indexes: tuple[IndexRow, ...] = ()
    batches: list[FileBatch] = field(default_factory=list)
    # By index: segments in use; of whose files no branch has one; that are damaged and may be of live files.
    used: dict[str, list[SegmentRow]] = field(default_factory=dict)
    dead: dict[str, list[str]] = field(default_factory=dict)
    broken: dict[str, list[str]] = field(default_factory=dict)
    not_coverable: dict[str, int] = field(default_factory=dict)

    @property
    def files(self) -> int:
        return sum(len(batch.files) for batch in self.batches)

    @property
    def folding(self) -> int:
        return sum(len(next_fold(rows)) for rows in self.used.values())

    @property
    def outcome(self) -> str:
        due = self.batches or self.folding or any(self.dead.values()) or any(self.broken.values())
        return PLANNED if due else NOTHING_TO_DO

    def as_dict(self) -> dict[str, Json]:
        retiring = [*self.dead.values(), *self.broken.values()]
        return {
            "indexes": len(self.indexes),
            "files": self.files,
            "rows": sum(batch.rows for batch in self.batches),
            "folding": self.folding,
            "retiring": sum(map(len, retiring)),
            "not_coverable": dict(self.not_coverable),
        }


def find_damaged(engine: Engine, table_id: str) -> dict[str, str]:
    """Segments in use that do not say what the rows of their files say, and why."""
    catalog, found = engine.catalog, dict[str, str]()
    indexes = {one.id: one for one in catalog.indexes.of_table(table_id)}
    for row in catalog.indexes.segments(table_id):
        if row.retired_ms is None and not row.broken and row.location not in found:
            problem = problem_of(catalog, indexes.get(row.index_id), row, deep=True)
            if problem is not None:
                log.get().warning("a segment of an index is wrong", file=row.location, cause=problem)
                found[row.location] = problem
    return found


def plan_index(engine: Engine, table_id: str, *, without: Container[str] = ()) -> IndexPlan | None:
    """What to do for a table; None: no branch has it. `without`: segments that count as damaged.

    Segments are read before heads and after them: one that comes in between is neither dead, nor are its files missing.
    """
    indexes = [one for one in engine.catalog.indexes.of_table(table_id) if one.is_live and form_of(one) is not None]
    before = _in_use(engine, indexes)
    live = look(engine.catalog, table_id)
    if live is None:
        return None
    plan = IndexPlan(live, tuple(indexes))
    missing: dict[str, list[IndexRow]] = {}
    for index, now in zip(indexes, _in_use(engine, indexes).values(), strict=True):
        covered = {file.path for place, section in now.items() if place not in without for file in section.files}
        coverable = {path for path, one in live.files.items() if _can_cover(index, one)}
        if len(coverable) < len(live.files):
            plan.not_coverable[index.id] = len(live.files) - len(coverable)
        for path in sorted(coverable - covered):
            missing.setdefault(path, []).append(index)
        earlier = before[index.id]
        plan.dead[index.id] = [
            location
            for location, section in earlier.items()
            if not any(file.path in live.files for file in section.files)
        ]
        rows = [row for row in engine.catalog.indexes.segments_of(index.id) if row.retired_ms is None]
        gone = set(plan.dead[index.id])
        plan.broken[index.id] = [row.location for row in rows if row.broken or row.location in without]
        gone |= set(plan.broken[index.id])
        plan.used[index.id] = [row for row in rows if row.location in now and row.location not in gone]
    plan.batches = list(_batches(missing, live))
    return plan


def _in_use(engine: Engine, indexes: Sequence[IndexRow]) -> dict[str, dict[str, Section]]:
    """By index and location: the sections of segments in use. What is damaged is marked as broken on the way."""
    found = {}
    for index in indexes:
        rows = [row for row in engine.catalog.indexes.segments_of(index.id) if row.retired_ms is None]
        found[index.id] = engine.coverings.open_sections(index, [row for row in rows if not row.broken])
    return found


def _can_cover(index: IndexRow, one: IndexedFile) -> bool:
    columns = columns_on(one.schema, index.field_ids)
    return columns is not None and holds(one.file, columns)


def _batches(missing: Mapping[str, Sequence[IndexRow]], live: LiveTable) -> Iterator[FileBatch]:
    alike: dict[tuple[tuple[str, ...], int], FileBatch] = {}
    for path, indexes in missing.items():
        one = live.files[path]
        place = tuple(index.id for index in indexes), one.schema.schema_id
        batch = alike.get(place) or FileBatch(tuple(indexes), one.schema, ())
        if batch.files and _is_full(batch, one.file):
            yield batch
            batch = replace(batch, files=())
        alike[place] = replace(batch, files=(*batch.files, one.file))
    yield from alike.values()


def _is_full(batch: FileBatch, file: LiveFile) -> bool:
    size_bytes = sum(one.size_bytes for one in batch.files)
    return (
        len(batch.files) >= BATCH_FILES_MAX
        or batch.rows + file.rows > BATCH_ROWS_MAX
        or size_bytes + file.size_bytes > BATCH_BYTES_MAX
    )


# ── effects ──


def maintain_index(engine: Engine, intent: Intent, table_id: str, done: Indexed, report: Report | None = None) -> None:
    """Build, fold and retire; what was done is counted in `done`."""
    plan = plan_index(engine, table_id)
    if plan is None:
        raise Conflict("the table was dropped meanwhile", table=table_id, advice="Run it again.")
    if _ensure_keys(engine, plan):
        plan = plan_index(engine, table_id) or plan
    done.not_coverable = plan.not_coverable
    for index_id, locations in plan.dead.items():
        done.retired += engine.catalog.indexes.retire(index_id, locations)
        # Crash here: the segments are retired, their files exist; a sweep deletes them.
        hit("index.retired")
    for batch in plan.batches:
        _build(engine, intent, plan.live, batch, done)
        if report is not None:
            report(Progress(done.files, plan.files, INDEX, plan.live.head.table))
    for index in plan.indexes:
        _fold_all(engine, intent, plan.live, index, done)
    for index_id, locations in plan.broken.items():
        if not done.conflicts:
            # All that they may have covered is covered by others.
            done.retired += engine.catalog.indexes.retire(index_id, locations)


def _ensure_keys(engine: Engine, plan: IndexPlan) -> bool:
    """A key index for each key that a branch has, unless it exists or was dropped; whether there are new ones."""
    catalog, table_id = engine.catalog, plan.live.head.table_id
    known = {one.id for one in catalog.indexes.of_table(table_id)}
    found = [ensure_key(catalog.indexes, table_id, schema) for schema in plan.live.schemas]
    return bool({one.id for one in found if one is not None} - known)


def _build(engine: Engine, intent: Intent, live: LiveTable, batch: FileBatch, done: Indexed) -> None:
    work = _Build(engine, live, batch)
    try:
        commit = publish(engine.catalog, intent, work)
    except Conflict:
        done.conflicts += 1
        return
    if commit.operation is not None:
        done.files += len(batch.files)
        done.rows += batch.rows
        done.segments += len(work.segments)


def _fold_all(engine: Engine, intent: Intent, live: LiveTable, index: IndexRow, done: Indexed) -> None:
    """Fold until few segments are left. A fold that is lost ends this index's turn: the next run plans anew."""
    for _ in range(FOLDS_MAX):
        rows = [row for row in engine.catalog.indexes.segments_of(index.id) if row.retired_ms is None]
        wanted = next_fold([row for row in rows if not row.broken])
        if not wanted:
            return
        work = _Fold(engine, live, index, wanted)
        try:
            commit: Commit = publish(engine.catalog, intent, work)
        except Conflict:
            done.conflicts += 1
            return
        if commit.operation is None:
            return
        done.folds += 1
        done.folded += len(wanted)


class _IndexPlan(PublishPlan):
    """Segments, published by themselves."""

    takes_turn = False
    # It says the same at any time; a fold checks again that no other process replaced its segments.
    repeatable = True

    def __init__(self, engine: Engine, live: LiveTable) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        self._live = live
        self._riders: tuple[Rider, ...] = ()
        self._used_spark = False
        self.segments: tuple[SealedSegment, ...] = ()

    def start(self) -> Start:
        return Start([self._live.location])

    def plan(self) -> Planned:
        return Planned(riders=self._riders)

    @property
    def used_spark(self) -> bool:
        return self._used_spark

    def _folder(self, work: Publication) -> str:
        return work.operation.folder(self._live.location, "data")

    def _made(self, segments: Sequence[SealedSegment]) -> None:
        self.segments = tuple(segments)
        # Crash here: segments in the operation's own folder, which nothing refers to; recovery deletes them (I3, I10).
        hit("index.written")
        self._riders = (IndexRider(self._live.head.table_id, self.segments),) if segments else ()


class _Build(_IndexPlan):
    """One batch of files gets segments."""

    def __init__(self, engine: Engine, live: LiveTable, batch: FileBatch) -> None:
        super().__init__(engine, live)
        self._batch = batch

    def stage(self, work: Publication) -> None:
        batch = self._batch
        self._used_spark = True  # until known: an error in the middle must not report that it was unused
        try:
            made, self._used_spark = write_segments(
                self._catalog.storage,
                self._engine.sessions,
                self._folder(work),
                batch.schema,
                batch.indexes,
                batch.files,
                tag=f"floodmark-{work.operation.id}",
            )
        except (Corrupt, NotFound, FileNotFoundError) as error:
            # A branch may have moved on, and a sweep may have deleted what only its old head named.
            live = look(self._catalog, self._live.head.table_id)
            if live is not None and all(file.path in live.files for file in batch.files):
                raise
            raise Conflict("data files went while they were indexed", advice="Run it again.") from error
        self._made(made)


class _Fold(_IndexPlan):
    """Several segments of an index become one."""

    def __init__(self, engine: Engine, live: LiveTable, index: IndexRow, rows: Sequence[SegmentRow]) -> None:
        super().__init__(engine, live)
        self._index = index
        self._rows = rows

    def stage(self, work: Publication) -> None:
        index, coverings = self._index, self._engine.coverings
        form, live = form_of(index), look(self._catalog, index.table_id)
        sections = coverings.open_sections(index, self._rows)
        if form is None or live is None or len(sections) < len(self._rows):
            raise _gone(index)
        plan = fold(form, [sections[row.location] for row in self._rows], live.files.__contains__)
        made = []
        if plan.files:
            try:
                location = join(self._folder(work), f"{clock.new_id()}{SUFFIX}")
                record = write_segment(self._catalog.storage, location, [plan])
            except (Corrupt, NotFound, FileNotFoundError) as error:
                if not coverings.mark_damaged(index, sections, error):
                    raise
                raise _gone(index) from error
            if index.kind == KEY and record.entries != sum(file.rows for file in plan.files):
                raise Corrupt("a fold does not have the rows of its files", index=index.id, entries=record.entries)
            made = [SealedSegment(**vars(record), files=len(plan.files), indexes=(index.id,))]
        self._made(made)
        self._riders = (*self._riders, FoldRider(index.id, tuple(row.location for row in self._rows)))


def _gone(index: IndexRow) -> Conflict:
    return Conflict("segments that were to be folded are gone or damaged", index=index.id, advice="Run it again.")
