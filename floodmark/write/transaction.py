"""A transaction: several changes that become one version, at the end of a `with` block, or never."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from floodmark.catalog.catalog import Catalog
from floodmark.catalog.riders import AlreadyCommitted
from floodmark.errors import Invalid
from floodmark.model import Commit
from floodmark.write.change import Change
from floodmark.write.intent import Intent
from floodmark.write.shape import plan_table


class Transaction:
    """Its result is `commit`, after the `with` block. An error in the block undoes all of it."""

    def __init__(self, catalog: Catalog, intent: Intent, get_ready: Callable[[], None]) -> None:
        self._catalog = catalog
        self._intent = intent
        self._get_ready = get_ready
        self._change: Change | None = None
        self.commit: Commit | None = None

    def __enter__(self) -> Transaction:
        if self._change is not None or self.commit is not None:
            raise Invalid("a transaction is used once", advice="Ask the lake for another one.")
        self._get_ready()
        try:
            self._change = Change.begin(self._catalog, self._intent)
        except AlreadyCommitted as already:
            # The block still runs; what it hands over is not needed and not written.
            self.commit = self._catalog.history.commit(already.version, outcome="already_committed")
        return self

    def append(self, table: str, data: Any, *, progress: Callable[[int, int], None] | None = None) -> int:
        """Stage rows for a table; returns how many. Visible with everything else, at the end."""
        if self._change is not None:
            return self._change.append(table, data, progress)
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
