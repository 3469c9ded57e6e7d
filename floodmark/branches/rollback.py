"""Rollback: tables get the contents that they had at an earlier version, as a change by rows and a new version.

    look       the version and the heads; nothing differs: no operation
    begin      on the branch; the earlier version is held from here on, then looked up again
    stage      table by table: rows that return are staged fresh, rows that go are taken out of their files
    publish    strict: no table has moved, also none that stays as it is

An earlier file never comes back under its path: its rows would carry sequences below marks that followers have passed
already (I5). Rows that return get the commit's sequence, rows that are still there keep theirs, keys that go are in a
deletions file. If a table moved, all of it is undone, begun and staged again. Crash before the publish: recovery rolls
it back, or with a batch id publishes what is sealed if no head has moved; after it: a commit like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from floodmark.branches.fit import may_lack, required_since
from floodmark.branches.records import CHANGED, RollbackPlan, RolledBack, TableDiff
from floodmark.branches.versions import Moment, check_on_line, compare_states, readable, resolve, row_samples
from floodmark.branches.view import schema_at
from floodmark.catalog.history import no_table
from floodmark.catalog.riders import PlanAgain
from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import Fill, fills_of
from floodmark.commit.intent import Intent
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.publication import Planned, Publication, PublishPlan, Start, check_expected, publish
from floodmark.engine import Engine
from floodmark.errors import Conflict, Invalid, NotFound
from floodmark.failpoints import hit
from floodmark.model import Commit, Head, TableCommit
from floodmark.rows.arrays import Numbers
from floodmark.rows.project import read_file
from floodmark.rows.rewriting.two_way import RowSet, TwoStates, compare
from floodmark.storage import Storage
from floodmark.write.change import Change
from floodmark.write.prune import key_fields
from floodmark.write.table import TableChange

KIND = "rollback"
TRIES_MAX = 5


@dataclass(frozen=True)
class RollbackRequest:
    """What gets its earlier contents: one table, or with None every table of the branch; and those of which version."""

    table: str | None
    to_version: int
    branch: str


@dataclass(frozen=True)
class _View:
    """A branch and the version that it returns to: the tables that both have, by their ids, and the others."""

    pairs: tuple[tuple[Head, Head], ...]
    created: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        """No table has changed since."""
        return all(head.snapshot == then.snapshot for head, then in self.pairs)


def request_of(catalog: Catalog, table: str | None, to: Moment, branch: str) -> RollbackRequest:
    """The request for a version or a time; refused if the branch never was there, or it has expired."""
    version = resolve(catalog, to, branch)
    check_on_line(catalog, version, branch)
    return RollbackRequest(table, version, branch)


def rollback(engine: Engine, request: RollbackRequest, intent: Intent) -> RolledBack:
    plan = _Rollback(engine, request, intent)
    commit = publish(engine.catalog, intent, plan)
    return plan.result(commit)


def plan_rollback(catalog: Catalog, request: RollbackRequest, limit: int) -> RollbackPlan:
    """What a rollback would do now: counted, not done. Writes nothing (I17)."""
    version = catalog.history.resolve(branch=request.branch)
    view = _look(catalog, request, catalog.history.tables_at(version).values())
    found, unreported = [], {}
    with readable(catalog, (version, request.to_version)):
        for head, then in view.pairs:
            shape = _Shape.of(catalog, head, then)
            states = _difference(catalog, head, then, shape, limit)
            if not (states.added or states.updated or states.deleted):
                continue
            samples = tuple(row_samples(catalog.storage, states, shape.schema, limit))
            counts = states.added, states.updated, states.deleted
            found.append(TableDiff(head.table, CHANGED, *counts, samples))
            if states.deleted and not key_fields(shape.schema):
                unreported[head.table] = states.deleted
    return RollbackPlan(
        request.branch, request.to_version, version, tuple(found), unreported, view.created, view.dropped
    )


# ── which tables ──


def _look(catalog: Catalog, request: RollbackRequest, now: Iterable[Head]) -> _View:
    heads = {head.table_id: head for head in now}
    then = {head.table_id: head for head in catalog.history.tables_at(request.to_version).values()}
    if request.table is not None:
        return _View((_one(catalog, request, heads, then),))
    both = [(heads[table_id], then[table_id]) for table_id in heads.keys() & then.keys()]
    return _View(
        tuple(sorted(both, key=lambda pair: pair[0].table)),
        created=tuple(sorted(head.table for table_id, head in heads.items() if table_id not in then)),
        dropped=tuple(sorted(head.table for table_id, head in then.items() if table_id not in heads)),
    )


def _one(
    catalog: Catalog, request: RollbackRequest, heads: Mapping[str, Head], then: Mapping[str, Head]
) -> tuple[Head, Head]:
    table, version = request.table or "", request.to_version
    names = {head.table for head in then.values()}
    head = next((head for head in heads.values() if head.table == table), None)
    if head is None and table in names:
        advice = f"`floodmark undrop {table}` restores it as it was last; then roll it back."
        raise NotFound("the table was dropped since", table=table, version=version, advice=advice)
    if head is None:
        raise no_table(table, [head.table for head in heads.values()])
    if head.table_id in then:
        return head, then[head.table_id]
    if table in names:
        raise Invalid(
            "the table was dropped and created again since",
            table=table,
            version=version,
            advice=f"That was another table: read it with lake.read_arrow({table!r}, version={version}).",
        )
    raise NotFound(
        "the table did not exist at this version",
        table=table,
        version=version,
        advice=f"`floodmark history --table {table}` lists its versions; `floodmark drop {table}` drops it.",
    )


# ── rows ──


@dataclass(frozen=True)
class _Shape:
    """The table's present shape, in which the earlier rows return; `then` is their own."""

    schema: Schema
    fills: tuple[Fill, ...]
    then: Schema

    @classmethod
    def of(cls, catalog: Catalog, head: Head, then: Head) -> _Shape:
        schema = schema_at(catalog, head)
        properties = catalog.files.metadata(head.metadata_location).properties
        return cls(schema, fills_of(properties, schema), schema_at(catalog, then))


def _difference(catalog: Catalog, head: Head, then: Head, shape: _Shape, first: int = 0) -> TwoStates:
    """The rows that go, as the only ones of the head, and those that return. Refused if these do not fit the table."""
    key = tuple(shape.schema.identifier_field_ids)
    if not key or set(key) == set(shape.then.identifier_field_ids):
        states = compare_states(catalog, head, then, shape.schema, shape.fills, first)
    else:
        # The key is newer than that state, and may not have been one then: all of its rows are looked at.
        ours, theirs = (live_files(catalog.files, one, shape.schema) for one in (head, then))
        states = compare(
            catalog.storage,
            ours,
            theirs,
            shape.schema,
            shape.fills,
            table=head.table,
            keyed=True,
            first=first,
            look_for_shared=True,
        )
    if states.shared_after:
        raise Invalid(
            "rows of that version have the same key",
            table=head.table,
            rows=states.shared_after,
            advice="The table got its key later. Read that version, and merge the rows that fit.",
        )
    _check_required(catalog, head, shape, states.only_after)
    return states


def _check_required(catalog: Catalog, head: Head, shape: _Shape, returning: RowSet) -> None:
    """`Invalid` if a row that returns has no value of a column that is required now."""
    filled = {fill.field_id for fill in shape.fills}
    columns = required_since(shape.then, shape.schema, filled)
    for file, positions in returning.by_file() if columns else ():
        for column in columns:
            nulls = _nulls(catalog.storage, file, positions, column) if may_lack(file, column) else 0
            if nulls:
                raise Invalid(
                    "rows that return have no value of a column that is required now",
                    table=head.table,
                    column=column.name,
                    rows=nulls,
                    advice="Make the column optional first, or merge these rows with values of it.",
                )


def _nulls(storage: Storage, file: LiveFile, positions: Numbers, column: NestedField) -> int:
    """How many of the rows at these positions have no value of the column."""
    start = nulls = 0
    for batch in read_file(storage, file.path, [column]):
        first, last = np.searchsorted(positions, [start, start + len(batch)])
        nulls += batch.column(0).take(pa.array(positions[first:last] - start)).null_count
        start += len(batch)
    return nulls


def _state(head: Head) -> tuple[str, int | None, int, int]:
    return head.table_id, head.snapshot, head.schema_id, head.spec_id


# ── one try ──


class _Rollback(PublishPlan):
    stages_again = True
    plans_max = TRIES_MAX

    def __init__(self, engine: Engine, request: RollbackRequest, intent: Intent) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        self._request = request
        self._intent = intent
        self._change: Change | None = None
        self._view = _View(())
        # By table id, whether the table has a key.
        self._keyed: dict[str, bool] = {}

    def start(self) -> Start | None:
        catalog, branch = self._catalog, self._request.branch
        self._view = view = _look(catalog, self._request, catalog.history.heads(branch))
        if view.quiet and self._intent.batch is None:
            check_expected(catalog, self._intent, [(head.table_id, head.table) for head, _ in view.pairs])
            return None
        return Start(
            list(self._locations(view)),
            held_version=self._request.to_version,
            turn=[head.table_id for head, _ in view.pairs],
        )

    def _locations(self, view: _View) -> Iterator[str]:
        """Where the tables are. Nothing holds their heads yet: one that moved is read again, one that went is none."""
        catalog = self._catalog
        for head, _ in view.pairs:
            with suppress(NotFound):
                yield catalog.at_head(
                    head.table, lambda now: catalog.files.metadata(now.metadata_location).location, head.branch
                )

    def stage(self, work: Publication) -> None:
        # From begin on the version cannot expire; it may have expired before.
        resolve(self._catalog, self._request.to_version, self._request.branch)
        self._change = change = Change(self._engine, self._intent)
        change.stage(work)
        for head, then in self._view.pairs:
            self._stage_table(self._planned_on(change, head), head, then)

    def _planned_on(self, change: Change, head: Head) -> TableChange:
        """The working state of the table, which must be at the head that was looked at, and stay there."""
        try:
            table = change.table(head.table)
        except NotFound as error:
            raise PlanAgain(head.table, "the table was dropped before anything was staged") from error
        if table.head is None or _state(table.head) != _state(head):
            raise PlanAgain(head.table, "the table moved before anything was staged")
        table.strict = True
        return table

    def _stage_table(self, table: TableChange, head: Head, then: Head) -> None:
        shape = _Shape.of(self._catalog, head, then)
        self._keyed[head.table_id] = bool(key_fields(shape.schema))
        states = _difference(self._catalog, head, then, shape)
        records = table.stage_again(states.only_after)
        # Crash here: rows that return, in the operation's own folder; recovery deletes them.
        hit(f"{KIND}.staged")
        table.exchange(states.only_before, records)
        # Crash here: what stays of files that rows leave, and deleted keys, are there too; recovery deletes them.
        hit(f"{KIND}.rewritten")

    def plan(self) -> Planned:
        return Planned() if self._change is None else self._change.plan()

    def kept_changing(self) -> Conflict:
        return Conflict(
            "the tables kept changing during this rollback",
            branch=self._request.branch,
            tries=TRIES_MAX,
            advice="Run it again when there are fewer writers.",
        )

    @property
    def used_spark(self) -> bool:
        return self._change is not None and self._change.used_spark

    @property
    def leftovers(self) -> bool:
        return self._change is not None and self._change.leftovers

    def result(self, commit: Commit) -> RolledBack:
        """The commit, with what followers do not learn from it, and the tables that it left as they are."""
        gone = {one.table: one.rows_deleted for one in commit.tables if one.rows_deleted and not self._has_key(one)}
        parts = {part.name: getattr(commit, part.name) for part in fields(commit)}
        version, created, dropped = self._request.to_version, self._view.created, self._view.dropped
        return RolledBack(**parts, to_version=version, unreported=gone, created=created, dropped=dropped)

    def _has_key(self, table: TableCommit) -> bool:
        """As it was when this rollback was staged. One that an earlier call made is judged by the table as it is."""
        if table.table_id not in self._keyed:
            catalog = self._catalog
            with suppress(NotFound):
                schema = catalog.at_head(table.table, lambda head: schema_at(catalog, head), self._request.branch)
                return bool(key_fields(schema))
        return self._keyed.get(table.table_id, False)
