"""History: every version of the lake, what it did to which table, and what holds it.

A commit's row names the tables it touched; a table's state at a version is that of its newest commit in the branch's
lineage up to there (lineage.py). A state without metadata means that the table was dropped there. Taking a pin takes
fm_lake's lock, as expiry does (expiry.py): a version is either held or gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    union_all,
)

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import NOW_MS, Database, SqlRow
from floodmark.catalog.lineage import LineagePart, Lineages, on_parts
from floodmark.errors import BelowRetention, Corrupt, Invalid, NotFound
from floodmark.model import MAIN, AuditRow, Commit, CurrentTable, DeletionsFile, Head, TableCommit

LIVE, EXPIRED = "live", "expired"
# SQLite allows 500 selects in one.
VERSIONS_PER_STATEMENT = 100


def newest_metadata_of(table_id: ColumnElement[str]) -> Select[str]:
    """Where we put the pointer of a table last. Not a drop on a branch: another one may have the table."""
    commit = tables.commit_tables
    return (
        select(commit.c.metadata_location)
        .where(commit.c.table_id == table_id, commit.c.metadata_location != "")
        .order_by(commit.c.version.desc())
        .limit(1)
    )


# What a reader needs of a deletions file.
DELETIONS_FILE = (
    tables.deletions.c.location,
    tables.deletions.c.sequence,
    tables.deletions.c.rows_total,
    tables.deletions.c.size_bytes,
)


# Statements of every commit, made once.
_HEAD = select(tables.heads).where(
    tables.heads.c.branch == bindparam("branch"), tables.heads.c.table_name == bindparam("table")
)
# A table's head and the branch's newest version, which are of one moment: one query.
_HEAD_NOW = (
    select(tables.heads, tables.branches.c.head_version)
    .join(tables.branches, tables.branches.c.name == tables.heads.c.branch)
    .where(tables.heads.c.branch == bindparam("branch"), tables.heads.c.table_name == bindparam("table"))
)
_HEAD_VERSION = select(tables.branches.c.head_version).where(tables.branches.c.name == bindparam("branch"))
# Of one table apart: SQLAlchemy makes the text of a list anew each time, which takes longer than the query.
_HEADS = select(tables.heads.c.table_id, tables.heads.c.branch, tables.heads.c.snapshot)
_HEADS_OF_ONE = _HEADS.where(tables.heads.c.table_id == bindparam("own_table_id"))
_HEADS_OF = _HEADS.where(tables.heads.c.table_id.in_(bindparam("table_ids", expanding=True)))
# The branch's head, the time of the lake's newest version, and the database's time: one round trip.
_FACTS = {
    dialect: select(
        select(tables.branches.c.head_version)
        .where(tables.branches.c.name == bindparam("branch"))
        .scalar_subquery()
        .label("head_version"),
        select(tables.commits.c.committed_ms)
        .where(tables.commits.c.version == bindparam("version"))
        .scalar_subquery()
        .label("committed_ms"),
        literal_column(now).label("now_ms"),
    )
    for dialect, now in NOW_MS.items()
}
_NEWEST_METADATA = newest_metadata_of(bindparam("table_id"))
# Iceberg's pointer of a head's table.
_POINTER = and_(
    tables.iceberg_tables.c.table_name == tables.heads.c.table_name,
    tables.iceberg_tables.c.catalog_name == tables.CATALOG_NAME,
    tables.iceberg_tables.c.table_namespace == tables.NAMESPACE,
)
_KNOWN = newest_metadata_of(tables.heads.c.table_id).scalar_subquery()
_HEAD_AND_NEWEST = _HEAD.add_columns(_KNOWN.label("newest"))
_CURRENT_ON = (
    select(
        tables.heads,
        tables.iceberg_tables.c.metadata_location.label("pointer"),
        _KNOWN.label("pointer_known"),
    )
    .join(tables.iceberg_tables, _POINTER, isouter=True)
    .where(tables.heads.c.branch == bindparam("branch"))
)
_CURRENT_ONE = _CURRENT_ON.where(tables.heads.c.table_name == bindparam("name"))
_CURRENT = _CURRENT_ON.where(tables.heads.c.table_name.in_(bindparam("names", expanding=True)))


@dataclass(frozen=True)
class PublishFacts:
    """A branch's newest version (None: no such branch), the time of the lake's newest one, and the database's time."""

    head_version: int | None
    committed_ms: int
    now_ms: int


def publish_facts(tx: Connection, branch: str, version: int) -> PublishFacts:
    """What an operation needs to know when it begins and when it is published; `version` is the lake's newest."""
    row = tx.execute(_FACTS[tx.dialect.name], {"branch": branch, "version": version}).one()
    return PublishFacts(row.head_version, row.committed_ms or 0, row.now_ms)


class History:
    def __init__(self, database: Database) -> None:
        self._database = database

    # ── the present ──

    def heads(self, branch: str = MAIN) -> list[Head]:
        with self._database.read() as tx:
            rows = tx.execute(
                select(tables.heads).where(tables.heads.c.branch == branch).order_by(tables.heads.c.table_name)
            ).all()
            _check_branch(tx, branch, rows)
        return [to_head(row, branch) for row in rows]

    def all_heads(self) -> list[Head]:
        """The heads of every branch, main's first."""
        with self._database.read() as tx:
            rows = list(tx.execute(select(tables.heads).order_by(tables.heads.c.table_name, tables.heads.c.branch)))
        return [to_head(row, row.branch) for row in sorted(rows, key=lambda row: row.branch != MAIN)]

    def head(self, table: str, branch: str = MAIN) -> Head:
        for row in self._database.ask(_HEAD, {"branch": branch, "table": table}):
            return to_head(row, branch)
        with self._database.read() as tx:
            names = tx.execute(select(tables.heads.c.table_name).where(tables.heads.c.branch == branch)).all()
            _check_branch(tx, branch, names)
        raise no_table(table, [name for (name,) in names])

    def head_now(self, table: str, branch: str = MAIN) -> tuple[int, Head]:
        """The newest version of a branch, and a table's head there: one query."""
        for row in self._database.ask(_HEAD_NOW, {"branch": branch, "table": table}):
            return int(row.head_version), to_head(row, branch)
        # Raises what is wrong, or the table was made a moment ago.
        head = self.head(table, branch)
        return head.version, head

    def head_and_newest(self, table: str, branch: str = MAIN) -> tuple[Head, str]:
        """A table's head, and where we put its pointer last, for whichever branch: one query."""
        for row in self._database.ask(_HEAD_AND_NEWEST, {"branch": branch, "table": table}):
            return to_head(row, branch), str(row.newest)
        head = self.head(table, branch)
        return head, self.newest_metadata(head.table_id)

    def current_tables(self, branch: str, names: Sequence[str]) -> dict[str, CurrentTable]:
        """These tables as they are now: head, Iceberg's pointer, and where we put the pointer last."""
        with self._database.read() as tx:
            return self.current_in(tx, branch, names)

    def current_in(self, tx: Connection, branch: str, names: Sequence[str]) -> dict[str, CurrentTable]:
        if len(names) == 1:
            rows = tx.execute(_CURRENT_ONE, {"branch": branch, "name": names[0]}).all()
        else:
            rows = tx.execute(_CURRENT, {"branch": branch, "names": names}).all()
        ids = [row.table_id for row in rows]
        if len(ids) == 1:
            found = tx.execute(_HEADS_OF_ONE, {"own_table_id": ids[0]}).all()
        else:
            found = tx.execute(_HEADS_OF, {"table_ids": ids}).all()
        kept = {(one.table_id, one.snapshot) for one in found}
        if any(one.branch != MAIN for one in found):
            kept |= compared_snapshots(tx, ids)
        return {
            row.table_name: CurrentTable(
                head=to_head(row, branch),
                pointer=row.pointer,
                pointer_known=row.pointer_known,
                kept_snapshots=frozenset(
                    snapshot for table_id, snapshot in kept if table_id == row.table_id and snapshot is not None
                ),
                refs={
                    one.branch: one.snapshot
                    for one in found
                    if one.table_id == row.table_id and one.snapshot is not None
                },
            )
            for row in rows
        }

    def current_table(self, table: str, branch: str) -> tuple[int, CurrentTable | None]:
        """The newest version of a branch, and a table as it is there; None if there is no such table."""
        with self._database.read() as tx:
            version = tx.execute(_HEAD_VERSION, {"branch": branch}).scalar()
            if version is None:
                raise NotFound("there is no such branch", branch=branch)
            return int(version), self.current_in(tx, branch, [table]).get(table)

    def newest_metadata(self, table_id: str) -> str:
        """Where we put a table's pointer last, for whichever branch: it names all ids that the table ever assigned."""
        for row in self._database.ask(_NEWEST_METADATA, {"table_id": table_id}):
            return str(row.metadata_location)
        raise NotFound("the lake has no such table", table_id=table_id)

    # ── the past ──

    def resolve(self, *, version: int | None = None, at_ms: int | None = None, branch: str = MAIN) -> int:
        """The version that a reader requests: a number, a moment, or the branch's head. Refused if expired."""
        with self._database.read() as tx:
            if version is None and at_ms is None:
                head = tx.execute(
                    select(tables.branches.c.head_version).where(tables.branches.c.name == branch)
                ).scalar()
                if head is None:
                    raise NotFound("there is no such branch", branch=branch)
                return int(head)
            commit = tables.commits
            if version is not None:
                row = tx.execute(select(commit).where(commit.c.version == version)).first()
                facts: dict[str, str | int] = {"version": version}
                if row is not None:
                    _check_on_line(tx, row, branch)
            else:
                lineages = Lineages.read(tx)
                on_line = on_parts(lineages.parts(lineages.live(branch)))
                row = tx.execute(
                    select(commit)
                    .where(commit.c.committed_ms <= at_ms, on_line)
                    .order_by(commit.c.version.desc())
                    .limit(1)
                ).first()
                facts = {"at": clock.format_time(at_ms or 0)}
            newest = tx.execute(select(tables.lake.c.version)).scalar_one()
        if row is None:
            raise NotFound("the lake has no such version", **facts, newest=newest, advice="")
        if row.state != LIVE:
            raise BelowRetention("this version's window has ended", **facts, advice="Read a newer version.")
        return int(row.version)

    def is_expired(self, version: int) -> bool:
        state = select(tables.commits.c.state).where(tables.commits.c.version == version)
        with self._database.read() as tx:
            return bool(tx.execute(state).scalar() == EXPIRED)

    def tables_at(self, version: int) -> dict[str, Head]:
        """Every table of the lake as it was at this version."""
        with self._database.read() as tx:
            return {head.table: head for head in tables_at_in(tx, version)}

    def commits(
        self, *, limit: int = 20, table: str | None = None, branch: str | None = None, before: int | None = None
    ) -> list[Commit]:
        """Newest first; of a branch, those in its lineage; with `before`, those of lower versions.

        `table`: those that touched a table of this name then, or the one that has it now, whatever its name was then.
        """
        commit, touched = tables.commits, tables.commit_tables
        query = select(commit).order_by(commit.c.version.desc()).limit(limit)
        if table is not None:
            query = query.where(commit.c.version.in_(select(touched.c.version).where(of_name(table))))
        if before is not None:
            query = query.where(commit.c.version < before)
        with self._database.read() as tx:
            if branch is not None:
                lineages = Lineages.read(tx)
                query = query.where(on_parts(lineages.parts(lineages.live(branch))))
            rows = list(tx.execute(query))
            parts = list(tx.execute(select(touched).where(touched.c.version.in_([row.version for row in rows]))))
        return [_commit(row, [part for part in parts if part.version == row.version]) for row in rows]

    def commit(self, version: int, outcome: str = "committed") -> Commit:
        with self._database.read() as tx:
            row = tx.execute(select(tables.commits).where(tables.commits.c.version == version)).first()
            if row is None:
                raise NotFound("the lake has no such version", version=version)
            parts = list(tx.execute(select(tables.commit_tables).where(tables.commit_tables.c.version == version)))
        return _commit(row, parts, outcome)

    def touched(self, version: int) -> list[Head]:
        """The tables that a commit touched, as it left them."""
        with self._database.read() as tx:
            rows = list(tx.execute(select(tables.commit_tables).where(tables.commit_tables.c.version == version)))
        return [to_head(row, MAIN) for row in rows]

    def deletions_of(self, version: int) -> list[DeletionsFile]:
        """The deletions files that a commit added."""
        with self._database.read() as tx:
            return to_deletions(tx.execute(select(*DELETIONS_FILE).where(tables.deletions.c.version == version)))

    def all_deletions(self) -> set[str]:
        """Every deletions file that the catalog has, whether it can still be requested or not."""
        with self._database.read() as tx:
            return set(tx.execute(select(tables.deletions.c.location)).scalars())

    def deletions(self, head: Head, since: int, until: int) -> list[DeletionsFile]:
        """The deletions files of a table with a sequence in (since, until], committed in the lineage of this head."""
        file, commit = tables.deletions, tables.commits
        with self._database.read() as tx:
            # Those below the floor count as gone: a sweep may have begun to delete them.
            there = file.c.below_ms.is_(None)
            # By the commit that left this state, not by the branch that shows it: a name may be used again.
            parts = line_of(tx, head.version)
            if not parts:
                raise Corrupt("the history has no row of a version that it names", version=head.version)
            rows = tx.execute(
                select(*DELETIONS_FILE)
                .join(commit, commit.c.version == file.c.version)
                .where(file.c.table_id == head.table_id, file.c.sequence > since, file.c.sequence <= until)
                .where(on_parts(parts), there)
                .order_by(file.c.sequence, file.c.location)
            )
            return to_deletions(rows)

    # ── holding and letting go ──

    def pin(self, version: int, *, holder: str, reason: str) -> str:
        """Hold a version: it cannot be expired until unpinned. Refused if it already is."""
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            state = tx.execute(select(tables.commits.c.state).where(tables.commits.c.version == version)).scalar()
            if state is None:
                raise NotFound("the lake has no such version", version=version)
            if state != LIVE:
                raise BelowRetention("this version's window has ended", version=version)
            pin = clock.new_id()
            tx.execute(
                insert(tables.pins).values(
                    id=pin, version=version, holder=holder, reason=reason, taken_ms=self._database.now_ms(tx)
                )
            )
        return pin

    def unpin(self, pin: str) -> None:
        with self._database.write() as tx:
            tx.execute(delete(tables.pins).where(tables.pins.c.id == pin))

    # ── what recovery did ──

    def audit(self, limit: int = 1000) -> list[AuditRow]:
        """Newest first."""
        with self._database.read() as tx:
            rows = list(tx.execute(select(tables.audit).order_by(tables.audit.c.at_ms.desc()).limit(limit)))
        return [
            AuditRow(row.operation, row.kind, row.found, row.outcome, row.detail, row.at_ms, row.version)
            for row in rows
        ]


def drifted_tables(database: Database) -> dict[str, list[str]]:
    """The tables whose pointer is not where the publisher left it, each with the branches that have it; main first."""
    head, pointer = tables.heads, tables.iceberg_tables
    query = (
        select(head.c.table_name, head.c.branch, pointer.c.metadata_location, _KNOWN.label("known"))
        .join(pointer, _POINTER, isouter=True)
        .order_by(head.c.table_name)
    )
    found: dict[str, list[str]] = {}
    with database.read() as tx:
        for row in tx.execute(query):
            if row.metadata_location != row.known:
                found.setdefault(row.table_name, []).append(row.branch)
    return {table: sorted(branches, key=lambda name: (name != MAIN, name)) for table, branches in found.items()}


def of_name(table: str) -> ColumnElement[bool]:
    """The rows of a table in the history: of any that had this name then, and of the one that has it now."""
    head, touched = tables.heads, tables.commit_tables
    ids = select(head.c.table_id).where(head.c.table_name == table)
    return or_(touched.c.table_name == table, touched.c.table_id.in_(ids))


def tables_at_in(tx: Connection, version: int) -> list[Head]:
    """Every table of the lake as it was at this version; none before the first commit."""
    parts = line_of(tx, version)
    return states_on(tx, parts, parts[0].lineage.name) if parts else []


def states_on(
    tx: Connection, parts: Sequence[LineagePart], branch: str, table_ids: Sequence[str] | None = None
) -> list[Head]:
    """The newest state of every table (of these ids) in a lineage, without those that were dropped there."""
    commit, touched = tables.commits, tables.commit_tables
    newest = (
        select(touched.c.table_id, func.max(touched.c.version).label("version"))
        .join(commit, commit.c.version == touched.c.version)
        .where(on_parts(parts), *(() if table_ids is None else (touched.c.table_id.in_(table_ids),)))
        .group_by(touched.c.table_id)
        .subquery()
    )
    same = and_(newest.c.table_id == touched.c.table_id, newest.c.version == touched.c.version)
    # Of two tables of one name, the one that was created again is the newer.
    rows = tx.execute(select(touched).join(newest, same).order_by(touched.c.version))
    return [to_head(row, branch) for row in rows if row.metadata_location]


def line_of(tx: Connection, version: int) -> list[LineagePart]:
    """The lineage of a commit, up to it; empty if the commit does not exist."""
    branch = tx.execute(select(tables.commits.c.branch).where(tables.commits.c.version == version)).scalar()
    if branch is None:
        return []
    lineages = Lineages.read(tx)
    return lineages.parts(lineages.owner(branch, version), version)


def compared_snapshots(tx: Connection, table_ids: Sequence[str]) -> set[tuple[str, int | None]]:
    """The snapshots of these tables that existing branches left, or compare with at their next merge."""
    lineages, commit, touched = Lineages.read(tx), tables.commits, tables.commit_tables
    versions = {one for lineage in lineages.living() for one in (lineage.base_version, lineage.common_version)}
    made = tx.execute(select(commit.c.version, commit.c.branch).where(commit.c.version.in_(versions))).all()
    newest = [
        select(touched.c.table_id, func.max(touched.c.version).label("version"))
        .join(commit, commit.c.version == touched.c.version)
        .where(on_parts(lineages.parts(lineages.owner(one.branch, one.version), one.version)))
        .where(touched.c.table_id.in_(table_ids))
        .group_by(touched.c.table_id)
        for one in made
    ]
    found: set[tuple[str, int | None]] = set()
    for start in range(0, len(newest), VERSIONS_PER_STATEMENT):
        states = union_all(*newest[start : start + VERSIONS_PER_STATEMENT]).subquery()
        same = and_(states.c.table_id == touched.c.table_id, states.c.version == touched.c.version)
        query = select(touched.c.table_id, touched.c.snapshot).distinct().join(states, same)
        found.update((table_id, snapshot) for table_id, snapshot in tx.execute(query))
    return found


def _check_on_line(tx: Connection, row: SqlRow, branch: str) -> None:
    """A version that is requested of a branch must be in its lineage. Main is the default: then no branch was given."""
    if branch == MAIN:
        return
    lineages = Lineages.read(tx)
    if not lineages.holds(lineages.live(branch), row.branch, row.version):
        raise Invalid(
            "this version is not one of the branch",
            version=row.version,
            branch=branch,
            made_on=row.branch,
            advice="Leave the branch out: a version's number is the lake's.",
        )


def _check_branch(tx: Connection, branch: str, found: Sequence[SqlRow]) -> None:
    """A branch without rows: check that it exists at all."""
    if not found and branch != MAIN:
        Lineages.read(tx).live(branch)


def no_table(table: str, known: Sequence[str]) -> NotFound:
    return NotFound(
        "there is no such table",
        table=table,
        tables=",".join(sorted(known)) or "none",
        advice="`floodmark tables` lists them; `floodmark load --create` makes one.",
    )


def to_deletions(rows: Iterable[SqlRow]) -> list[DeletionsFile]:
    return [DeletionsFile(row.location, row.sequence, row.rows_total, row.size_bytes) for row in rows]


def to_head(row: SqlRow, branch: str) -> Head:
    return Head(
        branch=branch,
        table=row.table_name,
        table_id=row.table_id,
        snapshot=row.snapshot,
        sequence=row.sequence,
        schema_id=row.schema_id,
        spec_id=row.spec_id,
        manifest_list=row.manifest_list,
        metadata_location=row.metadata_location,
        version=row.version,
        rows=row.rows_total,
        files=row.files_total,
        size_bytes=row.bytes_total,
    )


def _commit(row: SqlRow, parts: Sequence[SqlRow], outcome: str = "committed") -> Commit:
    return Commit(
        version=row.version,
        outcome=outcome,
        operation=row.operation,
        kind=row.kind,
        branch=row.branch,
        actor=row.actor,
        message=row.message,
        committed_ms=row.committed_ms,
        tables=tuple(
            TableCommit(
                table=part.table_name,
                table_id=part.table_id,
                snapshot=part.snapshot,
                sequence=part.sequence,
                rows_added=part.rows_added,
                rows_updated=part.rows_updated,
                rows_deleted=part.rows_deleted,
                rows_total=part.rows_total,
                files_total=part.files_total,
            )
            for part in sorted(parts, key=lambda part: part.table_name)
        ),
    )
