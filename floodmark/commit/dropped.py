"""Tables that main dropped: which of them can come back, and what is kept so that they continue as they were.

A dropped table's states can be read by older versions. As long as one of those can be read, the table can come back: by
an undrop, as main had it last, or on a branch created from before the drop. Its marks stay where they are, by its id;
its batch ids are **parked** under a scope of its own, so that a table that is created again under its name does not
find them. Both are deleted in the transaction that expires the last version which has it.

All of it is read and changed under fm_lake's lock, by the riders of a drop and an undrop, by the creation of a branch
and by expiry. Schedule that the lock and the hold exclude:
    1. an undrop finds that version 7 still has the table   2. version 7 expires, a sweep deletes its files
    3. the undrop publishes a state whose files are gone
An undrop holds the version from its begin on, and checks again after that; an expired version is never held again.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, and_, delete, exists, func, insert, literal, select, update

from floodmark.catalog import tables
from floodmark.catalog.history import LIVE, compared_snapshots, tables_at_in, to_head
from floodmark.catalog.lineage import Lineages
from floodmark.catalog.riders import own_scope
from floodmark.commit.table_states import CONDEMNED_MS, HeldVersions, by_lineage, place_of
from floodmark.errors import BelowRetention, Conflict, Invalid, NotFound
from floodmark.model import MAIN, CurrentTable, Head

# A row of fm_sources under the parked scope of this name records that a drop kept the table's batch ids.
MARKER = "dropped"
_SCOPES = ("table", "stream")
# A parked scope begins with the id of its table.
_PARKED = f"{'_' * 8}-____-____-____-{'_' * 12}/%"


@dataclass(frozen=True)
class DroppedTable:
    """A table that main does not have any more. `state`: its last one there; `dropped_version`: the one that ended it.

    held_version: the newest readable version that has this state. metadata_location: the newest metadata of the table,
    whichever branch wrote it, or that of its state. sequence_max: the highest sequence of all its commits.
    batches_kept: the drop parked its batch ids.
    """

    state: Head
    dropped_version: int
    held_version: int | None
    metadata_location: str
    sequence_max: int
    batches_kept: bool


# ── looking ──


def find_dropped(tx: Connection, table: str, version: int | None = None) -> DroppedTable:
    """The table of this name that was dropped last, or the one that a version had; as it was when it was dropped."""
    ids = _dropped_ids(tx, table)
    if version is not None:
        ids = [_id_at(tx, table, version)]
    found = last_state(tx, ids[0]) if ids else None
    if found is None:
        raise _not_dropped(tx, table)
    check_one_name(tx, found.state.table, found.state.table_id)
    _check_free(tx, found)
    if version is not None:
        _check_last(tx, found, table, version)
    if found.held_version is None or _is_condemned(tx, found.state):
        raise BelowRetention(
            "the versions that had this table have expired",
            table=table,
            dropped_version=found.dropped_version,
            advice="It cannot be restored. `keep_versions` sets how long a dropped table can be restored.",
        )
    if not found.batches_kept:
        raise Invalid(
            "an older Floodmark dropped this table, and did not keep its batch ids",
            table=table,
            advice=f"Create a table and fill it with lake.read_arrow({table!r}, version={found.held_version}).",
        )
    check_chunks(tx, table, found.state.table_id)
    return found


def check_one_name(tx: Connection, table: str, table_id: str) -> None:
    """Refuse if a branch from before the drop gave the table another name.

    A table has one name and one pointer in the lake: with two pointers, a commit under one leaves the other behind.
    """
    head = tables.heads
    other = select(head.c.branch, head.c.table_name).where(head.c.table_id == table_id, head.c.table_name != table)
    found = tx.execute(other.order_by(head.c.branch).limit(1)).first()
    if found is not None:
        raise Invalid(
            "the dropped table has another name on a branch",
            table=table,
            branch=found.branch,
            name_now=found.table_name,
            advice=f"Rename it to {table} on that branch, or delete the branch; then undrop it.",
        )


def check_chunks(tx: Connection, table: str, table_id: str) -> None:
    """Refuse if another table of this name has replaced its record of chunks.

    Chunks of a history are recorded by the table's name: the history would be loaded into this one again.
    """
    chunk, job = tables.chunks, tables.jobs
    other = (
        select(job.c.name)
        .join(chunk, chunk.c.job == job.c.id)
        .where(chunk.c.table_name == table, chunk.c.table_id != table_id)
    )
    found = tx.execute(other.limit(1)).scalar()
    if found is not None:
        raise Invalid(
            "a history was loaded into another table of this name since: its progress here is not known any more",
            table=table,
            job=found,
            advice=f"Read its rows with lake.read_arrow({table!r}, version=…) into a table of another name.",
        )


def last_state(tx: Connection, table_id: str) -> DroppedTable | None:
    """A table as main had it last; None if main has it, or never dropped it."""
    head, commit, touched = tables.heads, tables.commits, tables.commit_tables
    if tx.execute(select(head.c.version).where(head.c.branch == MAIN, head.c.table_id == table_id)).first():
        return None
    on_main = (
        select(touched)
        .join(commit, commit.c.version == touched.c.version)
        .where(commit.c.branch == MAIN, touched.c.table_id == table_id)
        .order_by(touched.c.version.desc())
        .limit(1)
    )
    tombstone = tx.execute(on_main).first()
    row = tx.execute(on_main.where(touched.c.metadata_location != "")).first()
    if tombstone is None or tombstone.metadata_location or row is None:
        return None
    held = select(func.max(commit.c.version)).where(
        commit.c.branch == MAIN,
        commit.c.state == LIVE,
        commit.c.version >= row.version,
        commit.c.version < tombstone.version,
    )
    marker = select(tables.sources.c.version).where(tables.sources.c.scope == _parked(table_id, MARKER))
    return DroppedTable(
        state=to_head(row, MAIN),
        dropped_version=tombstone.version,
        held_version=tx.execute(held).scalar(),
        metadata_location=newest_metadata(tx, table_id) or row.metadata_location,
        sequence_max=int(
            tx.execute(select(func.max(touched.c.sequence)).where(touched.c.table_id == table_id)).scalar_one()
        ),
        batches_kept=tx.execute(marker).first() is not None,
    )


def current_dropped(tx: Connection, table_id: str) -> CurrentTable:
    """A dropped table as the builder of an undrop finds it. It has a pointer if a branch has the table."""
    found = last_state(tx, table_id)
    if found is None:
        raise Conflict("the table was restored meanwhile", table_id=table_id)
    head, pointer = tables.heads, tables.iceberg_tables
    others = tx.execute(select(head.c.branch, head.c.snapshot).where(head.c.table_id == table_id)).all()
    named = and_(
        pointer.c.catalog_name == tables.CATALOG_NAME,
        pointer.c.table_namespace == tables.NAMESPACE,
        pointer.c.table_name == found.state.table,
    )
    states = [(MAIN, found.state.snapshot), *((one.branch, one.snapshot) for one in others)]
    refs = {branch: snapshot for branch, snapshot in states if snapshot is not None}
    kept = {snapshot for _, snapshot in compared_snapshots(tx, [table_id]) if snapshot is not None} if others else set()
    return CurrentTable(
        head=found.state,
        pointer=tx.execute(select(pointer.c.metadata_location).where(named)).scalar() if others else None,
        pointer_known=found.metadata_location,
        kept_snapshots=frozenset(kept | set(refs.values())),
        refs=refs,
    )


def taken_by(tx: Connection, name: str, table_id: str) -> str | None:
    """The table that has this name, in any case, on any branch, and is not the one of this id."""
    table, head = tables.iceberg_tables, tables.heads
    own = exists().where(head.c.table_name == table.c.table_name, head.c.table_id == table_id)
    query = select(table.c.table_name).where(func.lower(table.c.table_name) == name.lower(), ~own)
    return tx.execute(query).scalar()


def _dropped_ids(tx: Connection, table: str | None = None) -> list[str]:
    """The ids of tables (of this name) that main dropped and does not have; those dropped last come first."""
    head, commit, touched = tables.heads, tables.commits, tables.commit_tables
    last = func.max(touched.c.version)
    query = (
        select(touched.c.table_id, last)
        .join(commit, commit.c.version == touched.c.version)
        .where(commit.c.branch == MAIN, touched.c.metadata_location == "")
        .where(touched.c.table_id.not_in(select(head.c.table_id).where(head.c.branch == MAIN)))
        .group_by(touched.c.table_id)
        .order_by(last.desc())
    )
    query = query if table is None else query.where(touched.c.table_name == table)
    return [row.table_id for row in tx.execute(query)]


def _id_at(tx: Connection, table: str, version: int) -> str:
    commit = tables.commits
    state = tx.execute(select(commit.c.state).where(commit.c.version == version)).scalar()
    if state is None:
        raise NotFound("the lake has no such version", version=version)
    if state != LIVE:
        raise BelowRetention("this version's window has ended", version=version, advice="Use a newer version.")
    there = {head.table: head for head in tables_at_in(tx, version)}
    if table not in there:
        raise NotFound(
            "the version has no such table", table=table, version=version, tables=",".join(sorted(there)) or "none"
        )
    return there[table].table_id


def _check_last(tx: Connection, found: DroppedTable, table: str, version: int) -> None:
    """A version selects the table; it comes back as it was when it was dropped, or its marks would be wrong."""
    at = next(head for head in tables_at_in(tx, version) if head.table == table)
    if at.version != found.state.version:
        raise Invalid(
            "the table changed after this version, and can be restored only as it was when it was dropped",
            table=table,
            version=version,
            last=found.state.version,
            advice=(
                f"Undrop it without a version; then lake.overwrite({table!r}, "
                f"lake.read_arrow({table!r}, version={version})) gives it these rows."
            ),
        )


def _check_free(tx: Connection, found: DroppedTable) -> None:
    name = found.state.table
    if (taken := taken_by(tx, name, found.state.table_id)) is not None:
        raise Invalid(
            "the name of the dropped table is taken",
            table=name,
            taken_by=taken,
            dropped_version=found.dropped_version,
            advice=f"Drop the other one first, or read the old one with version={found.dropped_version - 1}.",
        )


def _not_dropped(tx: Connection, table: str) -> NotFound | Invalid:
    head = tables.heads
    if tx.execute(select(head.c.version).where(head.c.branch == MAIN, head.c.table_name == table)).first():
        return Invalid("the table is not dropped", table=table)
    states = [last_state(tx, table_id) for table_id in _dropped_ids(tx)]
    names = sorted({one.state.table for one in states if one is not None and one.held_version is not None})
    return NotFound("no table of this name was dropped", table=table, dropped=",".join(names) or "none")


def _is_condemned(tx: Connection, state: Head) -> bool:
    row = tables.expired
    query = select(row.c.expired_ms).where(row.c.version == state.version, row.c.table_id == state.table_id)
    return tx.execute(query).scalar() == CONDEMNED_MS


def newest_metadata(tx: Connection, table_id: str) -> str | None:
    """The newest metadata of the table; None if a sweep of an older Floodmark deleted it, with what a branch wrote."""
    commit, touched, row = tables.commits, tables.commit_tables, tables.expired
    query = (
        select(touched.c.metadata_location, commit.c.state, row.c.expired_ms)
        .join(commit, commit.c.version == touched.c.version)
        .join(row, and_(row.c.version == touched.c.version, row.c.table_id == touched.c.table_id), isouter=True)
        .where(touched.c.table_id == table_id, touched.c.metadata_location != "")
        .order_by(touched.c.version.desc())
        .limit(1)
    )
    found = tx.execute(query).one()
    intact = found.state == LIVE or found.expired_ms not in (None, CONDEMNED_MS)
    return str(found.metadata_location) if intact else None


# ── batch ids ──


def park_batches(tx: Connection, table_id: str, table: str, operation: str, version: int) -> None:
    """Main drops the table: from now on its name means another one, or none."""
    row = tables.sources
    for scope in _scopes(table):
        tx.execute(update(row).where(row.c.scope == scope).values(scope=_parked(table_id, scope)))
    tx.execute(
        insert(row).values(scope=_parked(table_id, MARKER), id=str(version), version=version, operation=operation)
    )


def unpark_batches(tx: Connection, table_id: str, table: str) -> None:
    """The table is back: batches published before it was dropped are known again."""
    row = tables.sources
    tx.execute(delete(row).where(row.c.scope == _parked(table_id, MARKER)))
    for scope in _scopes(table):
        known = select(row.c.id).where(row.c.scope == scope)
        # A transaction may have been named for a table that did not exist.
        tx.execute(delete(row).where(row.c.scope == _parked(table_id, scope), row.c.id.in_(known)))
        tx.execute(update(row).where(row.c.scope == _parked(table_id, scope)).values(scope=scope))


def rename_batches(tx: Connection, table: str, new_name: str, branch: str) -> None:
    """The batches of a table that gets another name are known under that one."""
    row = tables.sources
    for kind in _SCOPES:
        old, new = (own_scope(tx, f"{kind}:{name}", branch) for name in (table, new_name))
        known = select(row.c.id).where(row.c.scope == new)
        # A transaction may have been named for a table that did not exist.
        tx.execute(delete(row).where(row.c.scope == old, row.c.id.in_(known)))
        tx.execute(update(row).where(row.c.scope == old).values(scope=new))


def copy_parked(tx: Connection, state: Head, line_id: str, base: int) -> None:
    """A branch from before the drop has the batches published up to its base."""
    row, columns = tables.sources, ["scope", "id", "version", "operation", "position"]
    for scope in _scopes(state.table):
        copied = select(literal(f"{line_id}/{scope}"), row.c.id, row.c.version, row.c.operation, row.c.position)
        came = copied.where(row.c.scope == _parked(state.table_id, scope), row.c.version <= base)
        tx.execute(insert(row).from_select(columns, came))


def forget_dropped(tx: Connection) -> None:
    """Delete marks and batch ids of tables that no branch and no readable version has: they never come back."""
    row, commit, touched = tables.sources, tables.commits, tables.commit_tables
    parked = tx.execute(select(row.c.scope).distinct().where(row.c.scope.like(_PARKED))).scalars()
    known = {scope.partition("/")[0] for scope in parked}
    for table in (tables.consumers, tables.senders):
        known.update(tx.execute(select(table.c.table_id).distinct()).scalars())
    known -= set(tx.execute(select(tables.heads.c.table_id).distinct()).scalars())
    if not known:
        return
    lineages = Lineages.read(tx)
    live = tx.execute(select(commit.c.version, commit.c.branch).where(commit.c.state == LIVE))
    held = HeldVersions(lineages.all(), [place_of(lineages, one.branch, one.version) for one in live])
    for table_id in sorted(known):
        states = list(
            tx.execute(
                select(touched.c.version, touched.c.metadata_location, commit.c.branch)
                .join(commit, commit.c.version == touched.c.version)
                .where(touched.c.table_id == table_id)
                .order_by(touched.c.version)
            )
        )
        seen = held.seen(by_lineage([place_of(lineages, one.branch, one.version) for one in states]))
        if any(one.version in seen and one.metadata_location for one in states):
            continue
        tx.execute(delete(row).where(row.c.scope.like(f"{table_id}/%")))
        for table in (tables.consumers, tables.senders):
            tx.execute(delete(table).where(table.c.table_id == table_id))


def _scopes(table: str) -> list[str]:
    return [f"{kind}:{table}" for kind in _SCOPES]


def _parked(table_id: str, scope: str) -> str:
    return f"{table_id}/{scope}"
