"""What a history has and lacks, and reading a range of it: all of it, or an error that says why not.

A range of which a part is pruned, below the floor or before the history is BelowRetention; one of which a chunk is not
loaded yet is Incomplete. Neither looks like "no rows". The catalog answers; the source is never asked, so the floor of
a range of numbers is counted from how far the last run found the history (frontier.py); for a job without such a
record, from the highest loaded chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict

from floodmark.backfill.chunks.done_chunks import joined
from floodmark.backfill.chunks.frontier import Reached, clock_of, frontier_of
from floodmark.backfill.chunks.geometry import TIME, Geometry, GivenValue, gaps, range_text, value_text
from floodmark.backfill.chunks.prune import DAY_US, database_now_ms, floor_of, floor_start
from floodmark.backfill.chunks.spec import StoredHistory, kept_units, stored_history, table_range
from floodmark.catalog.chunks import DONE, PRUNED, ChunkState
from floodmark.catalog.jobs import Job
from floodmark.commit.metadata import schema_of
from floodmark.errors import BelowRetention, Conflict, Incomplete, Invalid
from floodmark.index.status import uncovered_files
from floodmark.jobs.run import JobContext
from floodmark.maintenance.policy import read_rule

if TYPE_CHECKING:
    from floodmark.rows.frames import DataFrame

LOOKS_MAX = 5


class TableCoverage(TypedDict):
    """The ranges of one table, each as its two ends. `indexed`, if asked for: the loaded ones whose rows all of the
    table's indexes cover; None: it has no index.
    """

    chunks: int
    rows: int
    loaded: list[list[str]]
    gaps: list[list[str]]
    pruned: list[list[str]]
    indexed: NotRequired[list[list[str]] | None]


class Coverage(TypedDict):
    """What a history has and lacks."""

    job: str
    first: str
    last: str | None
    column: str | None
    floor: str | None
    tables: dict[str, TableCoverage]


def coverage(context: JobContext, job: Job, *, index: bool = False) -> Coverage:
    """The ranges that are loaded, missing and pruned, per table, above the floor and up to the newest chunk.

    `index`: also those that indexes cover.
    """
    known = _Known.of(context, job)
    geometry = known.geometry
    wanted = known.wanted
    tables: dict[str, TableCoverage] = {}
    for table in known.tables:
        done = {state.chunk: state.rows for state in known.states(table) if state.state == DONE}
        pruned = [state.chunk for state in known.states(table) if state.state == PRUNED]
        settled = {*done, *(number for number in pruned if number < known.pruned_below)}
        missing = gaps(wanted, known.floor, {table: settled}, [table], geometry)
        tables[table] = {
            "chunks": len(done),
            "rows": sum(done.values()),
            "loaded": _ranges(geometry, done),
            "gaps": [list(range_text(start, end)) for start, end in missing],
            "pruned": _ranges(geometry, pruned),
        }
        if index:
            found = _indexed(context, table, [state for state in known.states(table) if state.state == DONE])
            tables[table]["indexed"] = None if found is None else _ranges(geometry, found)
    return {
        "job": job.name,
        "first": value_text(geometry.shown(geometry.first)),
        "last": None if geometry.last is None else value_text(geometry.shown(geometry.last)),
        "column": known.column,
        "floor": known.floor_text,
        "tables": tables,
    }


def _indexed(context: JobContext, table: str, states: Sequence[ChunkState]) -> list[int] | None:
    """The chunks whose rows are all in files that every index of the table covers; None: it has none.

    A chunk's rows lie in the folder of the operation that loaded it, until a rewrite moves them. Where they are then is
    not recorded: if any file of a rewrite is not covered, no chunk that was rewritten counts.
    """
    head = context.catalog.history.head(table)
    found = uncovered_files(context.catalog, context.engine.coverings, head)
    if found is None:
        return None
    loaded: Counter[str] = Counter()
    for state in states:
        loaded[state.operation] += state.rows
    files, uncovered = found
    held: Counter[str] = Counter()
    for file in files:
        held[_operation_of(file.path)] += file.rows
    left = {_operation_of(file.path) for file in uncovered}
    unsure = bool(left - set(loaded))
    return [
        state.chunk
        for state in states
        if state.operation not in left and not (unsure and held[state.operation] < loaded[state.operation])
    ]


def _operation_of(path: str) -> str:
    """The operation that wrote a data file: the folder that it lies in, at whatever depth."""
    return path.partition("/data/")[2].partition("/")[0]


def read_range(
    context: JobContext, job: Job, first: GivenValue, last: GivenValue, table: str | None = None
) -> DataFrame:
    """The rows of [first, last) of a table. BelowRetention or Incomplete if a part of it is missing."""
    known = _Known.of(context, job)
    geometry = known.geometry
    name = known.table(table)
    low, high = known.check_ends(first, last)
    for _ in range(LOOKS_MAX):
        version = context.catalog.history.resolve()
        found = table_range(context, geometry, name, str(known.column))
        newest = known.check_chunks(context, name, low, high)
        # In this order: a chunk that is loaded and not pruned now was present then, unless it was loaded since; if so,
        # look again.
        if newest <= version:
            return found.rows(low, high)
    raise Conflict("the table kept changing while it was read", table=name, advice="Run it again.")


def check_range(context: JobContext, job: Job, first: GivenValue, last: GivenValue, table: str | None = None) -> None:
    """BelowRetention or Incomplete if a part of [first, last) is missing, for a table or for all of the job's."""
    known = _Known.of(context, job)
    low, high = known.check_ends(first, last)
    for name in known.tables if table is None else [known.named(table)]:
        known.check_chunks(context, name, low, high)


@dataclass(frozen=True)
class Reach:
    """How far a history has come, by what the catalog stores: the chunks below its tip, and the floor.

    `knows_end`: whether anything is known of the tip of a range without an end.
    """

    wanted: range
    floor: int | None
    is_tip_known: bool
    knows_end: bool

    @classmethod
    def of(cls, stored: StoredHistory, newest: int | None, now_ms: int) -> Reach:
        """`newest` is the highest number of a chunk that was loaded."""
        geometry, reached = stored.geometry, Reached.of(stored.settings)
        is_tip_known = geometry.unit == TIME or reached.is_known
        if is_tip_known:
            frontier = frontier_of(geometry, reached.frontier, reached, newest)
        else:
            frontier = None if newest is None else geometry.shown(geometry.ends(newest)[1])
        wanted = geometry.wanted(None if geometry.last is not None else frontier)
        floor = None
        if is_tip_known or newest is not None:
            floor = floor_of(geometry, kept_units(geometry, stored.keep), frontier, clock_of(reached, now_ms))
        return cls(wanted, floor, is_tip_known, frontier is not None or geometry.last is not None)


class _Known:
    """What the catalog records of a job, without its source."""

    def __init__(self, context: JobContext, job: Job, stored: StoredHistory) -> None:
        self.job = job
        self.geometry = stored.geometry
        self.column = stored.column
        self.tables = stored.tables
        self._catalog = context.catalog
        known = (context.catalog.chunks.newest(job.id, table, self._table_id(table)) for table in self.tables)
        newest = max((number for number in known if number is not None), default=None)
        self._now_ms = database_now_ms(context.catalog)
        reach = Reach.of(stored, newest, self._now_ms)
        self._is_tip_known, self.wanted, self.floor = reach.is_tip_known, reach.wanted, reach.floor

    @classmethod
    def of(cls, context: JobContext, job: Job) -> _Known:
        return cls(context, job, stored_history(job))

    def states(self, table: str, within: range | None = None) -> list[ChunkState]:
        """The chunks of a table as it is now."""
        mine = (table, self._table_id(table))
        return [one for one in self._catalog.chunks.of(self.job.id, within) if (one.table, one.table_id) == mine]

    def _table_id(self, table: str) -> str:
        return self._catalog.history.head(table).table_id

    @property
    def pruned_below(self) -> int:
        """Chunks pruned below this are no gap. An unknown tip may be less than a chunk beyond what is loaded."""
        if self.floor is None:
            return self.wanted.start
        return self.geometry.below(self.floor + (0 if self._is_tip_known else self.geometry.size - 1))

    @property
    def floor_text(self) -> str | None:
        geometry = self.geometry
        return None if self.floor is None else value_text(geometry.shown(floor_start(geometry, self.floor)))

    def table(self, name: str | None) -> str:
        """The table to read: the named one, or the first that stores the chunks' rows unchanged."""
        if self.column is None:
            raise Invalid(
                "this history has no range column, so its rows cannot be selected by range",
                job=self.job.name,
                advice="Read the whole table.",
            )
        if name is None:
            plain = [table for table, definition in self.tables.items() if definition is None]
            return (plain or list(self.tables))[0]
        return self.named(name)

    def named(self, name: str) -> str:
        if name not in self.tables:
            raise Invalid(
                "this table is not part of the history", table=name, advice=f"Its tables: {', '.join(self.tables)}."
            )
        return name

    def check_ends(self, first: GivenValue, last: GivenValue) -> tuple[int, int]:
        """The range [first, last) as inner values, if the history covers it."""
        geometry = self.geometry
        low, high = geometry.value(first), geometry.value(last)
        if low >= high:
            raise Invalid("the range is empty: its end is not after its start", first=first, last=last)
        if low < geometry.first:
            raise BelowRetention(
                "the range starts before the history",
                job=self.job.name,
                oldest=value_text(geometry.shown(geometry.first)),
            )
        if self.floor is not None and low < floor_start(geometry, self.floor):
            raise BelowRetention(
                "a part of this range is below the history's floor", job=self.job.name, oldest=self.floor_text
            )
        if geometry.last is not None and high > geometry.last:
            raise Invalid(
                "the range ends after the history",
                job=self.job.name,
                last=value_text(geometry.shown(geometry.last)),
                advice="Use a range that ends there or earlier.",
            )
        return low, high

    def check_chunks(self, context: JobContext, table: str, low: int, high: int) -> int:
        """Check that every chunk of the range is loaded; returns the newest version that loaded one of them."""
        geometry = self.geometry
        self._check_policy(context, table, low)
        wanted = geometry.covering(geometry.shown(low), geometry.shown(high))
        chunks = {state.chunk: state for state in self.states(table, wanted)}
        versions = []
        for number in wanted:
            state = chunks.get(number)
            if state is None:
                raise Incomplete(
                    "a part of this range is not loaded yet",
                    job=self.job.name,
                    table=table,
                    chunk=geometry.chunk(number).name,
                    advice="Run the backfill, or use a loaded range: `floodmark backfill show` lists them.",
                )
            if state.state != DONE:
                raise BelowRetention(
                    "a part of this range was pruned",
                    job=self.job.name,
                    table=table,
                    chunk=geometry.chunk(number).name,
                )
            versions.append(state.version)
        return max(versions)

    def _check_policy(self, context: JobContext, table: str, low: int) -> None:
        """The table's own retention may remove rows of the range, if it uses the same column."""
        policy = context.catalog.maintenance.policy(self._table_id(table))
        if policy.retention is None or policy.column != self.column or self.geometry.unit != TIME:
            return
        head = context.catalog.history.head(table)
        metadata = context.catalog.files.metadata(head.metadata_location)
        rule = read_rule(policy, schema_of(metadata, head), metadata.spec())
        before = rule.before(self._now_ms) * (DAY_US if str(rule.column and rule.column.field_type) == "date" else 1)
        if low < before:
            raise BelowRetention(
                "a part of this range is below the table's own retention",
                job=self.job.name,
                table=table,
                retention=rule.text,
                oldest=rule.before_text(self._now_ms),
            )


def _ranges(geometry: Geometry, numbers: Iterable[int]) -> list[list[str]]:
    """Chunks as ranges, neighbours joined."""
    ends = ((geometry.ends(low)[0], geometry.ends(high - 1)[1]) for low, high in joined(numbers))
    return [list(range_text(geometry.shown(start), geometry.shown(end))) for start, end in ends]
