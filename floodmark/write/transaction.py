"""A transaction: several changes that become one version, at the end of a `with` block, or never."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from floodmark.catalog.catalog import Catalog
from floodmark.catalog.riders import AlreadyCommitted
from floodmark.errors import Invalid
from floodmark.model import Commit
from floodmark.write.change import Change
from floodmark.write.intent import Intent
from floodmark.write.shape import plan_table
from floodmark.write.step import APPEND, DELETE, DELETE_KEYS, MERGE, OVERWRITE
from floodmark.write.verbs import check_order

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress = Callable[[int, int], None]


class Transaction:
    """Its result is `commit`, after the `with` block. An error in the block undoes all of it."""

    def __init__(
        self, catalog: Catalog, intent: Intent, get_ready: Callable[[], None], get_spark: Callable[[], SparkSession]
    ) -> None:
        self._catalog = catalog
        self._get_spark = get_spark
        self._intent = intent
        self._get_ready = get_ready
        self._change: Change | None = None
        self.commit: Commit | None = None

    def __enter__(self) -> Transaction:
        if self._change is not None or self.commit is not None:
            raise Invalid("a transaction is used once", advice="Ask the lake for another one.")
        self._get_ready()
        try:
            self._change = Change.begin(self._catalog, self._intent, self._get_spark)
        except AlreadyCommitted as already:
            # The block still runs; what it hands over is not needed and not written.
            self.commit = self._catalog.history.commit(already.version, outcome="already_committed")
        return self

    def append(self, table: str, data: Any, *, evolve: bool = False, progress: Progress | None = None) -> int:
        """Stage rows for a table; returns how many. Visible with everything else, at the end."""
        return self._write(APPEND, table, data, evolve=evolve, progress=progress)

    def merge(
        self,
        table: str,
        data: Any,
        *,
        on_duplicate: str | None = None,
        order: str | None = None,
        skip_unchanged: bool = True,
        evolve: bool = False,
        partial: bool = False,
        progress: Progress | None = None,
    ) -> int:
        """Upsert rows by the table's key; returns how many came. Later steps see them.

        With `partial`, only the columns that the rows have are updated, also in rows of earlier steps.
        """
        order = check_order(on_duplicate, order)
        options: dict[str, Any] = {"skip_unchanged": skip_unchanged, "evolve": evolve, "partial": partial}
        return self._write(MERGE, table, data, order=order, progress=progress, **options)

    def delete(self, table: str, where: str, *, progress: Progress | None = None) -> None:
        """Delete the rows that a condition matches, also those of earlier steps."""
        self._write(DELETE, table, None, where=where, progress=progress)

    def delete_keys(self, table: str, keys: Any, *, progress: Progress | None = None) -> int:
        """Delete the rows that have one of these keys (rows of the key's columns); returns how many keys came.

        A key that no row has changes nothing. Rows of earlier steps go too.
        """
        return self._write(DELETE_KEYS, table, keys, progress=progress)

    def overwrite(
        self,
        table: str,
        data: Any,
        *,
        where: str | None = None,
        evolve: bool = False,
        progress: Progress | None = None,
    ) -> int:
        """Put these rows in the place of all rows, or of those that a condition matches; returns how many came."""
        return self._write(OVERWRITE, table, data, where=where, evolve=evolve, progress=progress)

    def _write(self, verb: str, table: str, data: Any, **options: Any) -> int:
        if self._change is not None:
            return self._change.write(verb, table, data, **options)
        if self.commit is not None and self.commit.outcome == "already_committed":
            return 0
        raise Invalid("a transaction is used inside its `with` block")

    def create_table(
        self,
        name: str,
        schema: Any,
        *,
        key: Sequence[str] = (),
        partition: Sequence[str] = (),
        sort: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Make a table in the same version; rows can be appended to it at once. One that is there is Invalid."""
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
        try:
            self.commit = change.publish()
        except BaseException as failure:  # noqa: BLE001 - undo raises it again, or knows better
            self.commit = change.undo(failure)
