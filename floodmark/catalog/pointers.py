"""Pointers and heads: how the publisher changes the rows that record where a table is.

Called inside the publish transaction and under fm_lake's lock; deleting a branch also deletes the pointers that only it
had, creating one from before a drop restores the dropped table's pointer. No other module imports this (I1). Each
change is conditional on the pointer that the builder found: False means that the pointer has changed, and nothing was
written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    CursorResult,
    Update,
    and_,
    bindparam,
    delete,
    insert,
    select,
    update,
)

from floodmark.catalog import tables
from floodmark.model import BEGINNING, MAIN, Head, Scalar


def head_values(new: Head, version: int) -> dict[str, Scalar]:
    """A head as columns of fm_heads, except its keys."""
    return {
        "table_name": new.table,
        "snapshot": new.snapshot,
        "sequence": new.sequence,
        "schema_id": new.schema_id,
        "spec_id": new.spec_id,
        "manifest_list": new.manifest_list,
        "metadata_location": new.metadata_location,
        "version": version,
        "rows_total": new.rows,
        "files_total": new.files,
        "bytes_total": new.size_bytes,
    }


def insert_table(tx: Connection, new: Head, version: int, small_files: int | None) -> None:
    """A new table: pointer, head and maintenance row. Small files are counted on main only."""
    _insert_pointer(tx, new)
    tx.execute(insert(tables.heads).values(branch=new.branch, table_id=new.table_id, **head_values(new, version)))
    small = small_files if new.branch == MAIN else None
    tx.execute(insert(tables.upkeep).values(table_id=new.table_id, small_files=small, deletions_floor=BEGINNING))


@dataclass(frozen=True)
class TableMove:
    """An existing table's next state.

    `old_pointer`: where Iceberg's pointer is; "" if another writer dropped it, None if it already is at the metadata of
    this state.
    """

    new: Head
    version: int
    old_pointer: str | None
    small_files_change: int


def move_tables(tx: Connection, moves: Sequence[TableMove]) -> bool:
    """Iceberg's pointers, old to new, only if each still is old, and our heads: a statement each for all tables."""
    for move in moves:
        if move.old_pointer == "" and not _move_pointer(tx, move.new, ""):
            return False
    pointers = [
        {"name": move.new.table, "old": move.old_pointer, "new": move.new.metadata_location}
        for move in moves
        if move.old_pointer
    ]
    if pointers and _execute(tx, _MOVE_POINTER, pointers).rowcount != len(pointers):
        return False
    heads: list[dict[str, Scalar]] = [
        {"own_branch": move.new.branch, "own_table_id": move.new.table_id, **head_values(move.new, move.version)}
        for move in moves
    ]
    if heads:
        _execute(tx, _MOVE_HEAD, heads)
    small: list[dict[str, Scalar]] = [
        {"own_table_id": move.new.table_id, "more": move.small_files_change}
        for move in moves
        if move.small_files_change and move.new.branch == MAIN
    ]
    if small:
        _execute(tx, _COUNT_SMALL, small)
    return True


def _execute(
    tx: Connection, statement: Update, rows: Sequence[Mapping[str, Scalar]]
) -> CursorResult[*tuple[Scalar, ...]]:
    # A list of one takes SQLAlchemy longer than the one.
    return tx.execute(statement, rows if len(rows) > 1 else rows[0])


def take_table(tx: Connection, new: Head, version: int, old_pointer: str) -> bool:
    """A table that another branch has: a head of its own on this one. On main its small files are not counted yet."""
    if not _move_pointer(tx, new, old_pointer):
        return False
    tx.execute(insert(tables.heads).values(branch=new.branch, table_id=new.table_id, **head_values(new, version)))
    if new.branch == MAIN:
        tx.execute(update(tables.upkeep).where(tables.upkeep.c.table_id == new.table_id).values(small_files=None))
    return True


def rename_table(tx: Connection, old_name: str, new: Head, version: int, old_pointer: str) -> bool:
    """The table's pointer and its head under a new name, which is free; no other branch has the table."""
    table, head = tables.iceberg_tables, tables.heads
    values = {
        "table_name": new.table,
        "metadata_location": new.metadata_location,
        "previous_metadata_location": old_pointer,
    }
    named = update(table).where(_named(old_name), table.c.metadata_location == old_pointer)
    if tx.execute(named.values(**values)).rowcount != 1:
        return False
    own = update(head).where(head.c.branch == new.branch, head.c.table_id == new.table_id)
    return tx.execute(own.values(**head_values(new, version))).rowcount == 1


def drop_table(tx: Connection, dropped: Head, old_pointer: str) -> bool:
    """The head goes from its branch, and the pointer with it unless another branch has the table."""
    head, table = tables.heads, tables.iceberg_tables
    tx.execute(delete(head).where(head.c.branch == dropped.branch, head.c.table_id == dropped.table_id))
    left = tx.execute(select(head.c.branch).where(head.c.table_id == dropped.table_id).limit(1)).scalar()
    if left is not None:
        return True
    gone = delete(table).where(_named(dropped.table), table.c.metadata_location == old_pointer)
    return tx.execute(gone).rowcount == 1


def put_pointer(tx: Connection, name: str, metadata_location: str) -> None:
    """The pointer of a table that a branch has again, after none had it: where it was last."""
    tx.execute(insert(tables.iceberg_tables).values(**_pointer(name, metadata_location)))


def forget_pointers(tx: Connection, names: Sequence[str]) -> None:
    """The pointers of tables that no branch has any more."""
    for name in names:
        tx.execute(delete(tables.iceberg_tables).where(_named(name)))


def _move_pointer(tx: Connection, new: Head, old_pointer: str) -> bool:
    table = tables.iceberg_tables
    if not old_pointer:
        there = tx.execute(select(table.c.table_name).where(_named(new.table))).scalar()
        if there is not None:
            return False
        _insert_pointer(tx, new)
        return True
    moved = tx.execute(_MOVE_POINTER, {"name": new.table, "old": old_pointer, "new": new.metadata_location})
    return moved.rowcount == 1


def _insert_pointer(tx: Connection, new: Head) -> None:
    put_pointer(tx, new.table, new.metadata_location)


def _pointer(name: str, metadata_location: str) -> dict[str, str]:
    return {
        "catalog_name": tables.CATALOG_NAME,
        "table_namespace": tables.NAMESPACE,
        "table_name": name,
        "metadata_location": metadata_location,
        "iceberg_type": "TABLE",
    }


def _named(name: str | BindParameter[str]) -> ColumnElement[bool]:
    table = tables.iceberg_tables
    return and_(
        table.c.catalog_name == tables.CATALOG_NAME,
        table.c.table_namespace == tables.NAMESPACE,
        table.c.table_name == name,
    )


# Statements of every publish, made once.
_MOVE_HEAD = update(tables.heads).where(
    tables.heads.c.branch == bindparam("own_branch"), tables.heads.c.table_id == bindparam("own_table_id")
)
_COUNT_SMALL = (
    update(tables.upkeep)
    .where(tables.upkeep.c.table_id == bindparam("own_table_id"))
    .values(small_files=tables.upkeep.c.small_files + bindparam("more"))
)
_MOVE_POINTER = (
    update(tables.iceberg_tables)
    .where(_named(bindparam("name")), tables.iceberg_tables.c.metadata_location == bindparam("old"))
    .values(metadata_location=bindparam("new"), previous_metadata_location=bindparam("old"))
)
