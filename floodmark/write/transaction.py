"""A transaction: several changes that become one version, at the end of a `with` block, or never."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from floodmark.catalog.catalog import Catalog
from floodmark.catalog.riders import AlreadyCommitted
from floodmark.errors import Invalid
from floodmark.model import Commit
from floodmark.write.change import Change, Intent


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

    def append(self, table: str, data: Any) -> int:
        """Stage rows for a table; returns how many. Visible with everything else, at the end."""
        if self._change is not None:
            return self._change.append(table, data)
        if self.commit is not None and self.commit.outcome == "already_committed":
            return 0
        raise Invalid("a transaction is used inside its `with` block")

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
