"""Branches of the whole lake: created, listed and deleted in one transaction each, without a file.

A branch is a name, a lineage of commits (lineage.py) and a copy of the heads that its base version had: every query for
heads works on it as on main, and a table is forked when its head there differs. All of it happens under fm_lake's lock,
as publishing and expiry do, so a base is held or gone, and an operation finds its branch or does not. Crash before
COMMIT: nothing; after it: done. A lost reply is resolved by reading the lineage's row (I13). Interleaving that is
designed out: `dev` is deleted while a writer W of it is suspended, and `dev` is created again; W would publish into a
branch that it never saw. So a name is free only once no operation of that name is unfinished.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, func, insert, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.history import LIVE, tables_at_in
from floodmark.catalog.lineage import MAIN_LINEAGE, Lineage, Lineages, on_parts
from floodmark.catalog.merge_base import (
    MergeBase,
    find_merge_base,
    merge_versions,
    merged_sequences,
    own_changes,
    since_sequence,
)
from floodmark.catalog.merge_base import OwnChanges as OwnChanges
from floodmark.catalog.pointers import forget_pointers, head_values, put_pointer
from floodmark.commit.dropped import copy_parked, last_state, newest_metadata, taken_by
from floodmark.errors import BelowRetention, Busy, CommitUnknown, Conflict, Invalid, NotFound, Unavailable
from floodmark.failpoints import hit
from floodmark.json_form import Json
from floodmark.model import MAIN, Head

__all__ = [
    "Branch",
    "Branches",
    "MergeBase",
    "OwnChanges",
    "merged_sequences",
    "own_changes",
    "since_sequence",
]

BRANCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TRIES_MAX = 6


@dataclass(frozen=True)
class Branch:
    """A branch for people. `commits` are its own; `tables_changed` how many tables those touched."""

    name: str
    id: str
    parent: str | None
    base_version: int
    head_version: int
    created_ms: int
    tables_changed: int
    commits: int

    def as_dict(self) -> dict[str, Json]:
        return asdict(self)


class Branches:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        name: str,
        *,
        source: str | None = None,
        version: int | None = None,
        at_ms: int | None = None,
        actor: str,
    ) -> Branch:
        """A branch from the head of `source` (main), from a version, or from a moment in `source`'s lineage."""
        check_branch_name(name)
        if version is not None and at_ms is not None:
            raise Invalid("give a version or a time, not both", branch=name)
        lineage = clock.new_id()

        def make(tx: Connection) -> Branch:
            version_now, lineages = self._database.lock_lake(tx).version, Lineages.read(tx)
            _check_free(tx, lineages, name)
            parent, base = _find_base(tx, lineages, source, version, at_ms)
            now = self._database.now_ms(tx)
            _insert(tx, Lineage(lineage, name, parent.id, base, version_now, base, base, base, now, actor, None, None))
            _copy_positions(tx, parent, lineage, base)
            # Crash here: COMMIT was not sent, so the branch does not exist.
            hit("branch.creating")
            return Branch(name, lineage, parent.name, base, base, now, 0, 0)

        made = self._once(lineage, make, lambda tx: _has_row(tx, lineage))
        # Crash here: the branch exists.
        hit("branch.created")
        return made

    def delete(self, name: str) -> Branch:
        """End a branch; nothing of it is read or copied. Its versions lose their hold, and expire by the window.

        Its unfinished operations find no branch when they publish; recovery discards dead ones.
        """
        with self._database.read() as tx:
            lineage = _to_delete(Lineages.read(tx), name)

        def end(tx: Connection) -> Branch:
            version_now, lineages = self._database.lock_lake(tx).version, Lineages.read(tx)
            if lineages.live(name).id != lineage.id:
                raise Conflict("the branch was deleted and created again meanwhile", branch=name)
            _to_delete(lineages, name)
            ended = _describe(tx, lineages, lineage)
            _end(tx, lineage, version_now, self._database.now_ms(tx))
            # Crash here: COMMIT was not sent, so the branch exists as it was.
            hit("branch.deleting")
            return ended

        ended = self._once(lineage.id, end, lambda tx: _has_ended(tx, lineage.id))
        # Crash here: the branch is gone.
        hit("branch.deleted")
        return ended

    def check_delete(self, name: str) -> Branch:
        """The branch as `delete` would end it now; refused as `delete` would be. Changes nothing."""
        with self._database.read() as tx:
            lineages = Lineages.read(tx)
            return _describe(tx, lineages, _to_delete(lineages, name))

    def list(self) -> list[Branch]:
        """Every existing branch; main first, then by creation."""
        with self._database.read() as tx:
            lineages = Lineages.read(tx)
            return [_describe(tx, lineages, lineages.live(lineage.name)) for lineage in lineages.living()]

    def get(self, name: str) -> Branch:
        with self._database.read() as tx:
            lineages = Lineages.read(tx)
            return _describe(tx, lineages, lineages.live(name))

    def taken_versions(self, base: MergeBase) -> frozenset[int]:
        """The versions of a merge base's source that brought the target's news to it, and nothing of its own."""
        with self._database.read() as tx:
            return merge_versions(tx, base.target, base.source)

    def merge_base(self, source: str, target: str) -> MergeBase:
        """The merge base of a merge of `source` into `target`. Invalid unless one was created from the other."""
        with self._database.read() as tx:
            return find_merge_base(tx, source, target)

    def _once(
        self, line_id: str, change: Callable[[Connection], Branch], is_done: Callable[[Connection], bool]
    ) -> Branch:
        """Make the change in one transaction; if COMMIT's reply is lost, check whether it is done, then go on."""
        made: Branch | None = None
        for tries in range(TRIES_MAX):
            try:
                with self._database.write() as tx:
                    # Under the lake's lock: this waits for a server that is still committing.
                    self._database.lock_lake(tx)
                    if made is None or not is_done(tx):
                        made = change(tx)
            except Unavailable:
                if made is None:
                    raise  # COMMIT was not sent
                time.sleep(min(2, 0.05 * 2**tries))
                continue
            return made
        raise CommitUnknown(
            "the catalog did not confirm whether the branch was changed",
            operation=line_id,
            advice="`floodmark branch list` shows it as soon as the catalog answers.",
        )


def check_branch_name(name: str) -> None:
    if not isinstance(name, str) or not BRANCH_NAME.fullmatch(name) or name == MAIN:
        raise Invalid(
            "a branch cannot have this name",
            branch=repr(name)[:120],
            advice="Use up to 100 letters, digits, dots, dashes and underscores, not `main`.",
        )


def _to_delete(lineages: Lineages, name: str) -> Lineage:
    """The lineage of a branch that may be deleted."""
    if name == MAIN:
        raise Invalid("main cannot be deleted", branch=name)
    lineage = lineages.live(name)
    children = lineages.children(lineage)
    if children:
        names = ",".join(child.name for child in children)
        advice = "Delete those first, or merge them."
        raise Invalid("other branches were made from this one", branch=name, branches=names, advice=advice)
    return lineage


def _check_free(tx: Connection, lineages: Lineages, name: str) -> None:
    if any(lineage.name == name for lineage in lineages.living()):
        raise Invalid("there is a branch of this name", branch=name)
    operation = tables.operations
    query = select(operation.c.id).where(
        tables.unfinished, operation.c.branch == name, operation.c.state.in_(("staging", "staged"))
    )
    at_work = tx.execute(query.limit(1)).scalar()
    if at_work is not None:
        raise Busy(
            "an operation of a deleted branch of this name is unfinished",
            branch=name,
            operation=at_work,
            advice="Try again when it has ended; `floodmark recover --apply` ends a dead one.",
        )


def _find_base(
    tx: Connection, lineages: Lineages, source: str | None, version: int | None, at_ms: int | None
) -> tuple[Lineage, int]:
    """The lineage that a new branch is created from, and its base version. Called under the lake's lock."""
    if version is None and at_ms is None:
        lineage = lineages.live(source or MAIN)
        query = select(tables.branches.c.head_version).where(tables.branches.c.name == lineage.name)
        return lineage, int(tx.execute(query).scalar_one())
    commit = tables.commits
    if at_ms is not None:
        lineage = lineages.live(source or MAIN)
        row = tx.execute(
            select(commit)
            .where(commit.c.committed_ms <= at_ms, on_parts(lineages.parts(lineage)))
            .order_by(commit.c.version.desc())
            .limit(1)
        ).first()
        facts: dict[str, str | int | None] = {"branch": lineage.name, "at": clock.format_time(at_ms)}
    else:
        if version == 0:
            return (MAIN_LINEAGE if source is None else lineages.live(source)), 0  # the empty lake
        row = tx.execute(select(commit).where(commit.c.version == version)).first()
        facts = {"version": version}
    if row is None:
        raise NotFound("the lake has no such version", **facts, advice="")
    if row.state != LIVE:
        raise BelowRetention("this version's window has ended", **facts, advice="Use a newer version.")
    if at_ms is None:
        lineage = lineages.owner(row.branch, row.version) if source is None else lineages.live(source)
    if lineage.ended_version is not None:
        raise Invalid("the branch of this version was deleted", **facts, branch=lineage.name, advice="")
    if not lineages.holds(lineage, row.branch, row.version):
        facts |= {"branch": lineage.name, "made_on": row.branch}
        raise Invalid("this version is not one of the branch", **facts, advice="")
    return lineage, int(row.version)


def _insert(tx: Connection, lineage: Lineage) -> None:
    """The rows of a new branch: its lineage, its name, and the heads of its base."""
    heads = tables_at_in(tx, lineage.base_version)
    _check_names(tx, lineage, heads)
    _bring_back(tx, lineage, heads)
    tx.execute(insert(tables.lines).values(asdict(lineage)))
    parent = Lineages.read(tx).get(lineage.parent or MAIN)
    tx.execute(
        insert(tables.branches).values(
            name=lineage.name,
            parent=parent.name,
            base_version=lineage.base_version,
            head_version=lineage.base_version,
            created_ms=lineage.created_ms,
        )
    )
    if heads:
        rows = [
            {"branch": lineage.name, "table_id": head.table_id, **head_values(head, head.version)} for head in heads
        ]
        tx.execute(insert(tables.heads), rows)


def _check_names(tx: Connection, lineage: Lineage, heads: Sequence[Head]) -> None:
    """Refuse a base in which a table has another name than now, or than it had when it was dropped.

    A table has one name, on every branch: the versions of this one would be read by the old name and written by the
    new one, which may be another table's there.
    """
    head, touched = tables.heads, tables.commit_tables
    names = dict(tx.execute(select(head.c.table_id, head.c.table_name).distinct()).all())
    renamed = []
    for one in heads:
        if one.table_id not in names and (dropped := last_state(tx, one.table_id)) is not None:
            names[one.table_id] = dropped.state.table
        if (now := names.get(one.table_id, one.table)) != one.table:
            own = select(func.min(touched.c.version)).where(touched.c.table_id == one.table_id)
            other = select(func.max(touched.c.version)).where(
                touched.c.table_id == one.table_id, touched.c.table_name != now
            )
            version = tx.execute(own.where(touched.c.version > other.scalar_subquery())).scalar_one()
            renamed.append((int(version), one.table, now))
    if renamed:
        # The newest one: from there on all tables have their present names.
        version, table, now = max(renamed)
        raise Invalid(
            "a table was renamed after this version, and cannot be on a branch under its old name",
            table=table,
            name_now=now,
            version=lineage.base_version,
            renamed_version=version,
            advice=f"Create the branch from version {version} or later. Older versions can be read without a branch.",
        )


def _bring_back(tx: Connection, lineage: Lineage, heads: Sequence[Head]) -> None:
    """Bring back tables of the base that main has dropped since: on this branch, with their batch ids.

    Their files exist, because the base can be read, and so does the newest metadata of each (table_states.py).
    """
    here = set(tx.execute(select(tables.heads.c.table_id).where(tables.heads.c.branch == MAIN)).scalars())
    there = set(tx.execute(select(tables.heads.c.table_id).distinct()).scalars())
    lost = []
    for head in (one for one in heads if one.table_id not in here):
        found, newest = last_state(tx, head.table_id), newest_metadata(tx, head.table_id)
        kept = found is not None and found.batches_kept and not taken_by(tx, head.table, head.table_id)
        if kept and newest is not None:
            if lineage.parent == MAIN:
                # A branch of a branch finds them with its parent, up to where that one left main.
                copy_parked(tx, head, lineage.id, lineage.base_version)
            if head.table_id not in there:
                put_pointer(tx, head.table, newest)
        elif head.table_id not in there:
            lost.append(head.table)
    if lost:
        raise Invalid(
            "the version has tables that were dropped since, and cannot be on a branch any more",
            tables=",".join(sorted(lost)),
            version=lineage.base_version,
            advice="If a table of the same name was created since, drop it first. Else use a newer version.",
        )


def _copy_positions(tx: Connection, parent: Lineage, line_id: str, base: int) -> None:
    """A stream has one row, which moves on: a branch copies the positions that its base had."""
    row = tables.sources
    scope = row.c.scope.not_like("%/%") if parent.id == MAIN else row.c.scope.like(f"{parent.id}/%")
    query = select(row).where(scope, row.c.position.is_not(None), row.c.version <= base)
    found = [dict(one) for one in tx.execute(query).mappings()]
    if found:
        renamed = [{**one, "scope": f"{line_id}/{one['scope'].rpartition('/')[2]}"} for one in found]
        tx.execute(insert(row), renamed)


def _end(tx: Connection, lineage: Lineage, version: int, now_ms: int) -> None:
    """Delete a branch's name and heads, and the pointers of tables that no other branch has."""
    row, head = tables.lines, tables.heads
    tx.execute(update(row).where(row.c.id == lineage.id).values(ended_version=version, ended_ms=now_ms))
    tx.execute(delete(tables.branches).where(tables.branches.c.name == lineage.name))
    own = dict(tx.execute(select(head.c.table_id, head.c.table_name).where(head.c.branch == lineage.name)).all())
    tx.execute(delete(head).where(head.c.branch == lineage.name))
    left = set(tx.execute(select(head.c.table_id).where(head.c.table_id.in_(list(own)))).scalars())
    forget_pointers(tx, [name for table_id, name in own.items() if table_id not in left])
    tx.execute(delete(tables.sources).where(tables.sources.c.scope.like(f"{lineage.id}/%")))


def _has_row(tx: Connection, line_id: str) -> bool:
    return tx.execute(select(tables.lines.c.id).where(tables.lines.c.id == line_id)).first() is not None


def _has_ended(tx: Connection, line_id: str) -> bool:
    query = select(tables.lines.c.ended_version).where(tables.lines.c.id == line_id)
    return tx.execute(query).scalar_one() is not None


def _describe(tx: Connection, lineages: Lineages, lineage: Lineage) -> Branch:
    commit, touched, branch = tables.commits, tables.commit_tables, tables.branches
    own = on_parts(lineages.parts(lineage)[:1])
    row = tx.execute(select(branch).where(branch.c.name == lineage.name)).one()
    commits = tx.execute(select(func.count()).select_from(commit).where(own)).scalar_one()
    changed = tx.execute(
        select(func.count(touched.c.table_id.distinct())).join(commit, commit.c.version == touched.c.version).where(own)
    ).scalar_one()
    parent = None if lineage.parent is None else lineages.get(lineage.parent).name
    return Branch(
        lineage.name,
        lineage.id,
        parent,
        lineage.base_version,
        row.head_version,
        row.created_ms,
        int(changed),
        int(commits),
    )
