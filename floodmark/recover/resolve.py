"""After CommitUnknown: what became of an operation, by asking the catalog (I13)."""

from __future__ import annotations

from floodmark.catalog.catalog import Catalog
from floodmark.catalog.journal import ABANDONED, PUBLISHED
from floodmark.errors import Incomplete
from floodmark.model import Commit
from floodmark.recover.heal import Healer


def resolve(catalog: Catalog, healer: Healer | None, operation: str) -> Commit | None:
    """Its commit, or None if it never happened and never will. Without a healer nothing is settled first."""
    found = catalog.journal.find(operation)
    if found is not None and found.state not in (PUBLISHED, ABANDONED) and healer is not None:
        healer.heal()
        found = catalog.journal.find(operation)
    if found is None or found.state == ABANDONED:
        return None
    if found.state == PUBLISHED and found.version is not None:
        return catalog.history.commit(found.version)
    raise Incomplete(
        "the operation is still under way",
        operation=operation,
        state=found.state,
        advice="Ask again when its process has ended.",
    )
