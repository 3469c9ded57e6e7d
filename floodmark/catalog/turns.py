"""Turns: which operation publishes to a table next, and which operations wait for that.

A turn (fm_turns) is a lease on a table for one operation: while it lasts, no other operation publishes to the table. It
is for fairness and never a lock: the publish checks the heads in any case. An operation that needs tables whose turn
another one has waits in fm_waiting, oldest first. The holder of a turn may publish operations that wait for the same
tables together with its own (commit/publisher.py), and hands the turn to the one that waits longest.

A holder that dies keeps others waiting until its lease ends, or not at all where its death can be seen. One that waits
and dies keeps no other one waiting, nor does one that was given a turn and let it run out: both are passed over.

Interleaving that the order by age excludes: X waits for the tables A and B. Appends to A, and others to B, come all the
time; whenever A is free, B is not. So a younger operation does not take A while X could take both, or has waited long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Select,
    bindparam,
    delete,
    func,
    literal_column,
    or_,
    select,
    text,
    update,
)

from floodmark.catalog import tables
from floodmark.catalog.database import NOW_MS, Database
from floodmark.catalog.leases import OPERATION, Holder, to_holder
from floodmark.model import Scalar

TURN_MS = 5_000
# An older operation that has waited for this long is let pass, also if only some of its tables are free.
LONG_MS = 1_000
# `joins`: another operation's process may publish it.
JOINS, ALONE = 1, 0

# Whether a holder still works, by the database's time.
IsHeld = Callable[[Holder, int], bool]


class NotYourTurn(Exception):
    """Another operation has the turn of a table."""


@dataclass(frozen=True)
class WaitingOperation:
    """A row of fm_waiting: an operation that is sealed and waits for the turn of its tables.

    `leftovers`: its folders may hold files that its seal does not name.
    """

    operation: str
    table_ids: frozenset[str]
    since_ms: int
    joins: bool
    asks: bool
    leftovers: bool
    holder: Holder


@dataclass(frozen=True)
class Standing:
    """Where a waiting operation stands. `free`: no other operation has the turn of one of its tables.

    `ahead`: how many older operations wait for the same tables, also dead ones.
    """

    state: str | None
    version: int | None
    has_turn: bool
    free: bool
    ahead: int = 0


class Turns:
    def __init__(self, database: Database, is_held: IsHeld) -> None:
        self._database = database
        self._is_held = is_held

    # ── taking a turn ──

    def take(self, operation: str, table_ids: Iterable[str], lease_ms: int = TURN_MS) -> None:
        """Take the turns of all these tables, or none: two operations with a turn each would wait for each other."""
        turn, wanted = tables.turns, sorted(table_ids)
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            if _has_ended(tx, operation):
                return
            now = self._database.now_ms(tx)
            free = or_(turn.c.until_ms <= now, turn.c.operation == operation)
            tx.execute(delete(turn).where(free))
            self._give(tx, operation, wanted, now + lease_ms)

    def take_if_free(self, tx: Connection, operation: str, table_ids: Collection[str]) -> bool:
        """Take the turns of these tables in a transaction that is written anyway, if no operation has or awaits one."""
        statement = _TAKE_IF_FREE[self._database.dialect]
        took = [tx.execute(statement, {"table": one, "operation": operation}).rowcount for one in sorted(table_ids)]
        if any(took) and not all(took):
            end_turns(tx, [operation])
        return all(took)

    def is_anothers(self, tx: Connection, operation: str, table_ids: Collection[str]) -> bool:
        """Whether another operation has the turn of one of these tables, and its lease has not ended."""
        values = {"operation": operation, "tables": sorted(table_ids)}
        return tx.execute(_ANOTHERS[self._database.dialect], values).first() is not None

    def is_next(self, operation: str, table_ids: Collection[str]) -> bool:
        """Whether `take_next` would take the turns now; reads only."""
        with self._database.read() as tx:
            return self._is_next(tx, operation, table_ids, self._database.now_ms(tx))

    def take_next(self, operation: str, table_ids: Collection[str], lease_ms: int = TURN_MS) -> bool:
        """Take the turns of these tables if they are free, or held by the dead, and no older operation goes first.

        1. This operation asks: it waits, and the turn is free. 2. A leader, or recovery, publishes it. 3. It takes the
        turn, which nothing would end. So one that has ended gets none, as in `take`; the lake's lock orders 2 and 3.
        """
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            now = self._database.now_ms(tx)
            if _has_ended(tx, operation) or not self._is_next(tx, operation, table_ids, now):
                return False
            tx.execute(delete(tables.turns).where(tables.turns.c.table_id.in_(sorted(table_ids))))
            return self._give(tx, operation, table_ids, now + lease_ms)

    def _is_next(self, tx: Connection, operation: str, table_ids: Collection[str], now_ms: int) -> bool:
        turns = tx.execute(select(tables.turns).where(tables.turns.c.until_ms > now_ms)).all()
        holders = {row.operation for row in turns} - {operation}
        dead = self._dead_holders(tx, holders, now_ms)
        held = {row.table_id for row in turns if row.operation in holders - dead}
        if not held.isdisjoint(table_ids):
            return False
        return self._goes_first(waiting(tx), operation, table_ids, held, now_ms) is None

    def _give(self, tx: Connection, operation: str, table_ids: Collection[str], until_ms: int) -> bool:
        """Give the operation the turns of all these tables, or none. What it builds may stay if its lease ends.

        A seal that runs at this moment may take one without the lake's lock: then it has it.
        """
        took = [
            tx.execute(_TAKE, {"table": one, "operation": operation, "until_ms": until_ms}).rowcount
            for one in sorted(table_ids)
        ]
        if all(took):
            tx.execute(_HAD_TURN, {"operations": [operation]})
        elif any(took):
            end_turns(tx, [operation])
        return all(took)

    def _dead_holders(self, tx: Connection, operations: Collection[str], now_ms: int) -> set[str]:
        """Those of these operations that no living process works on."""
        if not operations:
            return set()
        found = {row.id: row for row in tx.execute(_HOLDERS, {"operations": sorted(operations)})}
        return {one for one in operations if one not in found or not self._is_held(to_holder(found[one]), now_ms)}

    def _goes_first(
        self,
        found: Sequence[WaitingOperation],
        operation: str,
        table_ids: Collection[str],
        held: Collection[str],
        now_ms: int,
    ) -> WaitingOperation | None:
        """The oldest living operation that waits for one of these tables, if it is older than `operation`."""
        for one in found:
            if one.operation == operation:
                return None
            if not one.asks or one.table_ids.isdisjoint(table_ids) or not self._is_held(one.holder, now_ms):
                continue
            if one.table_ids.isdisjoint(held) or now_ms - one.since_ms > LONG_MS:
                return one
        return None

    # ── waiting ──

    def wait_in_line(
        self, tx: Connection, operation: str, table_ids: Collection[str], *, joins: bool, leftovers: bool
    ) -> None:
        """From this COMMIT on the operation waits. One that waits already keeps its place in line.

        The caller has the lock of the operation's row, and found it staged: nothing would end the row of another.
        """
        row = {
            "operation": operation,
            "table_ids": json.dumps(sorted(table_ids)),
            "joins": JOINS if joins else ALONE,
            "leftovers": int(leftovers),
        }
        tx.execute(_WAIT[self._database.dialect], row)

    def ask(self, operation: str, table_ids: Collection[str]) -> Standing:
        """One query: has another process ended the operation, and whose turn is it?"""
        one, many = _STANDING[self._database.dialect]
        if len(table_ids) == 1:
            rows = self._database.ask(one, {"operation": operation, "table": next(iter(table_ids))})
        else:
            rows = self._database.ask(many, {"operation": operation, "tables": sorted(table_ids)})
        if not rows:
            return Standing(None, None, has_turn=False, free=False)
        holders = [row.holder for row in rows if row.holder is not None and row.until_ms > row.now_ms]
        mine = sum(one == operation for one in holders)
        first = rows[0]
        return Standing(
            first.state, first.version, mine == len(table_ids), free=mine == len(holders), ahead=first.ahead
        )

    # ── inside a publish ──

    def check(self, tx: Connection, operation: str, table_ids: Sequence[str], now_ms: int) -> None:
        """Raise NotYourTurn if another operation has the turn of one of these tables."""
        if len(table_ids) == 1:
            found = tx.execute(_OTHERS_TURN_ONE, {"table": table_ids[0], "operation": operation, "now_ms": now_ms})
        else:
            found = tx.execute(_OTHERS_TURN, {"tables": table_ids, "operation": operation, "now_ms": now_ms})
        if found.first() is not None:
            raise NotYourTurn()

    def hand_over(self, tx: Connection, table_ids: Collection[str], now_ms: int) -> None:
        """Give the turns of these tables, which have ended, to the operation that waits longest for them.

        If that one waits for other tables too, the turns stay free, and younger operations let it pass.
        """
        left = waiting(tx)
        first = self._goes_first(left, "", table_ids, (), now_ms)
        if first is not None and first.table_ids <= set(table_ids):
            self._give(tx, first.operation, first.table_ids, now_ms + TURN_MS)


def _has_ended(tx: Connection, operation: str) -> bool:
    ended = tables.operations.c.state.in_(("published", "abandoned"))
    return (
        tx.execute(select(tables.operations.c.id).where(tables.operations.c.id == operation, ended)).first() is not None
    )


def waiting(tx: Connection) -> list[WaitingOperation]:
    """Every operation that waits for a turn, the one that waits longest first."""
    return [
        WaitingOperation(
            row.operation,
            frozenset(json.loads(row.table_ids)),
            row.since_ms,
            row.joins == JOINS,
            bool(row.asks),
            bool(row.leftovers),
            to_holder(row),
        )
        for row in tx.execute(_WAITING)
    ]


def end_turns(tx: Connection, operations: Sequence[str]) -> None:
    """These operations have ended: their turns are free."""
    tx.execute(_END_TURNS, [{"ended": one} for one in operations])


def end_waiting(tx: Connection, operations: Sequence[str]) -> None:
    """These operations do not wait any more."""
    tx.execute(_END_WAITING, [{"ended": one} for one in operations])


def refuse_join(tx: Connection, operations: Collection[str]) -> None:
    """These operations go on waiting, and publish themselves: their own processes raise what is wrong with them."""
    tx.execute(_REFUSE_JOIN, {"operations": sorted(operations)})


# Statements of every commit, made once.
_OPERATIONS: BindParameter[str] = bindparam("operations", expanding=True)
_ANOTHERS = {
    dialect: select(tables.turns.c.operation).where(
        tables.turns.c.operation != bindparam("operation"),
        tables.turns.c.table_id.in_(bindparam("tables", expanding=True)),
        tables.turns.c.until_ms > literal_column(now),
    )
    for dialect, now in NOW_MS.items()
}
_TURNS_OF_OTHERS = select(tables.turns.c.operation).where(
    tables.turns.c.operation != bindparam("operation"), tables.turns.c.until_ms > bindparam("now_ms")
)
_OTHERS_TURN_ONE = _TURNS_OF_OTHERS.where(tables.turns.c.table_id == bindparam("table"))
_OTHERS_TURN = _TURNS_OF_OTHERS.where(tables.turns.c.table_id.in_(bindparam("tables", expanding=True)))
_END_TURNS = delete(tables.turns).where(tables.turns.c.operation == bindparam("ended"))
_END_WAITING = delete(tables.waiting).where(tables.waiting.c.operation == bindparam("ended"))
_REFUSE_JOIN = update(tables.waiting).where(tables.waiting.c.operation.in_(_OPERATIONS)).values(joins=ALONE)
_HAD_TURN = update(tables.waiting).where(tables.waiting.c.operation.in_(_OPERATIONS)).values(asks=0, leftovers=1)
# Of an operation that has ended, no process works on it any more.
_HOLDERS = OPERATION.select(tables.operations.c.id).where(
    tables.operations.c.id.in_(_OPERATIONS), tables.operations.c.state.in_(("staging", "staged"))
)
_WAITING = (
    OPERATION.select(*tables.waiting.c)
    .join(tables.waiting, tables.waiting.c.operation == tables.operations.c.id)
    .where(tables.operations.c.state == "staged")
    .order_by(tables.waiting.c.since_ms, tables.waiting.c.operation)
)


_OLDER, _OWN, _SEALED = tables.waiting.alias("older"), tables.waiting.alias("own"), tables.operations.alias("ended")
_AHEAD = (
    select(func.count())
    .select_from(_OLDER.join(_OWN, _OLDER.c.table_ids == _OWN.c.table_ids))
    .join(_SEALED, _SEALED.c.id == _OLDER.c.operation)
    .where(_OWN.c.operation == bindparam("operation"), _OLDER.c.since_ms < _OWN.c.since_ms)
    .where(_OLDER.c.asks == 1, _SEALED.c.state == "staged")
    .scalar_subquery()
)


def _standing(now: str, of_tables: ColumnElement[bool]) -> Select[*tuple[Scalar, ...]]:
    return (
        select(
            tables.operations.c.state,
            tables.operations.c.version,
            tables.turns.c.operation.label("holder"),
            tables.turns.c.until_ms,
            literal_column(now).label("now_ms"),
            _AHEAD.label("ahead"),
        )
        .join_from(tables.operations, tables.turns, of_tables, isouter=True)
        .where(tables.operations.c.id == bindparam("operation"))
    )


# Of one table, and of several.
_STANDING = {
    dialect: (
        _standing(now, tables.turns.c.table_id == bindparam("table")),
        _standing(now, tables.turns.c.table_id.in_(bindparam("tables", expanding=True))),
    )
    for dialect, now in NOW_MS.items()
}
_TAKE = text(
    "INSERT INTO fm_turns (table_id, operation, until_ms) VALUES (:table, :operation, :until_ms) ON CONFLICT DO NOTHING"
)
# An expired turn counts as taken here: the next operation ends it (`take_next`).
_TAKE_IF_FREE = {
    dialect: text(
        "INSERT INTO fm_turns (table_id, operation, until_ms)"
        f" SELECT :table, :operation, {now} + {TURN_MS} WHERE NOT EXISTS (SELECT 1 FROM fm_waiting)"
        " ON CONFLICT DO NOTHING"
    )
    for dialect, now in NOW_MS.items()
}
_WAIT = {
    dialect: text(
        "INSERT INTO fm_waiting (operation, table_ids, since_ms, joins, asks, leftovers)"
        f" VALUES (:operation, :table_ids, {now}, :joins, 1, :leftovers) ON CONFLICT (operation) DO UPDATE"
        " SET table_ids = excluded.table_ids, joins = excluded.joins, asks = 1, leftovers = excluded.leftovers"
    )
    for dialect, now in NOW_MS.items()
}
