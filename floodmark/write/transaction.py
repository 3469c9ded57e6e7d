"""A transaction: several changes that become one version, at the end of a `with` block, or never."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from floodmark.catalog.riders import AlreadyCommitted, BatchRider
from floodmark.commit.intent import Intent
from floodmark.engine import Engine
from floodmark.errors import Invalid
from floodmark.model import Commit
from floodmark.runs import WriteCallback
from floodmark.write.change import Change
from floodmark.write.options import WriteOptions
from floodmark.write.shape import SchemaLike, plan_table
from floodmark.write.step import APPEND, DELETE, DELETE_KEYS, MERGE, OVERWRITE, UPDATE, IncomingRows
from floodmark.write.verbs import check_order

# How many tables of the transaction before are expected again: undoing one looks into the folders of all of them.
EXPECTED_MAX = 16


class Transaction:
    """Its result is `commit`, after the `with` block. An error in the block undoes all of it.

    `expected`: where the tables are that the caller's last transaction wrote, often those of the next one. The journal
    gets their folders when this one begins, instead of in a transaction of its own for each. Replaced at the end.
    """

    def __init__(self, engine: Engine, intent: Intent, expected: list[str] | None = None) -> None:
        self._engine = engine
        self._intent = intent
        self._expected = [] if expected is None else expected
        self._change: Change | None = None
        self.commit: Commit | None = None

    def __enter__(self) -> Transaction:
        if self._change is not None or self.commit is not None:
            raise Invalid("a transaction can be used only once", advice="Start another one with lake.transaction().")
        self._engine.get_ready()
        try:
            self._change = Change.begin(self._engine, self._bound_intent(), self._expected)
        except AlreadyCommitted as already:
            # The block still runs; its rows are not needed and not written.
            self.commit = self._engine.catalog.history.commit(already.version, outcome="already_committed")
        return self

    def _bound_intent(self) -> Intent:
        """With the id of the table that its batch is named for: it may write to other tables only."""
        batch = self._intent.batch
        if not isinstance(batch, BatchRider) or not batch.names_table:
            return self._intent
        with self._engine.catalog.database.read() as tx:
            return replace(self._intent, batch=batch.bound(tx))

    def append(
        self, table: str, data: IncomingRows, *, evolve: bool = False, progress: WriteCallback | None = None
    ) -> int:
        """Stage rows for a table; returns how many. Visible with everything else, at the end."""
        return self._write(APPEND, table, data, WriteOptions(evolve=evolve, progress=progress))

    def merge(
        self,
        table: str,
        data: IncomingRows,
        *,
        on_duplicate: str | None = None,
        order: str | None = None,
        skip_unchanged: bool = True,
        evolve: bool = False,
        partial: bool = False,
        progress: WriteCallback | None = None,
    ) -> int:
        """Upsert rows by the table's key; returns how many came. Later steps see them.

        With `partial`, only the columns that the rows have are updated, also in rows of earlier steps.
        """
        options = WriteOptions(
            order=check_order(on_duplicate, order),
            skip_unchanged=skip_unchanged,
            evolve=evolve,
            partial=partial,
            progress=progress,
        )
        return self._write(MERGE, table, data, options)

    def delete(self, table: str, where: str, *, progress: WriteCallback | None = None) -> None:
        """Delete the rows that a condition matches, also those of earlier steps."""
        self._write(DELETE, table, None, WriteOptions(where=where, progress=progress))

    def update(
        self, table: str, set: Mapping[str, str], where: str | None = None, *, progress: WriteCallback | None = None
    ) -> None:
        """Give the rows that a condition matches new values, also those of earlier steps; see `Lake.update`."""
        self._write(UPDATE, table, None, WriteOptions.of_update(table, set, where, progress))

    def delete_keys(self, table: str, keys: IncomingRows, *, progress: WriteCallback | None = None) -> int:
        """Delete the rows that have one of these keys (rows of the key's columns); returns how many keys were given.

        A key that no row has changes nothing. Rows of earlier steps are deleted too.
        """
        return self._write(DELETE_KEYS, table, keys, WriteOptions(progress=progress))

    def overwrite(
        self,
        table: str,
        data: IncomingRows,
        *,
        where: str | None = None,
        evolve: bool = False,
        progress: WriteCallback | None = None,
    ) -> int:
        """Replace all rows, or those that a condition matches, by these; returns how many came."""
        return self._write(OVERWRITE, table, data, WriteOptions(where=where, evolve=evolve, progress=progress))

    def _write(self, verb: str, table: str, data: IncomingRows | None, options: WriteOptions) -> int:
        if self._change is not None:
            return self._change.write(verb, table, data, options)
        if self.commit is not None and self.commit.outcome == "already_committed":
            return 0
        raise Invalid("a transaction can be used only inside its `with` block")

    def create_table(
        self,
        name: str,
        schema: SchemaLike,
        *,
        key: Sequence[str] = (),
        partition: Sequence[str] = (),
        sort: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Create a table in the same version; rows can be appended to it at once. Invalid if the table exists."""
        shape = plan_table(name, schema, key=key, partition=partition, sort=sort, properties=properties)
        if self._change is not None:
            self._change.create_table(shape)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        change, self._change = self._change, None
        if change is None:
            return
        if error is not None:
            change.undo(error)
            return
        self.commit = change.publish()
        # Those below the lake's own root: an adopted table may be in a store that does not answer.
        root = self._engine.catalog.location
        self._expected[:] = [one for one in change.locations if one.startswith(f"{root}/")][:EXPECTED_MAX]
