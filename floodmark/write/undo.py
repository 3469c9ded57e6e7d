"""An error means undone.

Whatever goes wrong between begin and publish, the operation is abandoned before the error reaches the caller, so a
retry cannot meet a second copy of itself later. If even that cannot be written, the outcome is not known: the error
is CommitUnknown, and asking the catalog (lake.resolve) tells.
"""

from __future__ import annotations

from floodmark import log
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.journal import PUBLISHED, Operation, fenced
from floodmark.catalog.riders import AlreadyCommitted
from floodmark.errors import CommitUnknown, Fenced, Unavailable
from floodmark.failpoints import hit
from floodmark.model import Commit


def undo(catalog: Catalog, operation: Operation, error: BaseException, *, certain: bool) -> Commit:
    """Abandon the operation and raise `error`; return its commit if it turns out to be published.

    `certain`: nobody but this process wrote files for it, so that deleting them now deletes all of them. Otherwise
    (executors may still be writing) healing looks at its folders again until they stay quiet.
    """
    try:
        found, was_us = catalog.journal.abandon(operation.id)
        published = found is not None and found.state == PUBLISHED
        commit = catalog.history.commit(found.version) if published and found and found.version else None
    except Exception as unreachable:
        # Whatever the reason: it was not abandoned, or it is published and cannot be shown.
        catalog.heartbeat.disown(operation.id)
        raise CommitUnknown(
            "the outcome of this operation cannot be told", operation=operation.id, cause=error
        ) from unreachable
    if commit is not None:
        if isinstance(error, Exception):
            return commit
        raise error
    hit("abandon.fenced")
    if found is not None:
        delete_files(catalog, found, certain=certain)
    hit("abandon.files_deleted")
    if isinstance(error, AlreadyCommitted):
        return catalog.history.commit(error.version, outcome="already_committed")
    if found is not None and not was_us and not isinstance(error, Fenced):
        raise fenced(operation.id) from error
    raise error


def delete_files(catalog: Catalog, operation: Operation, *, certain: bool) -> None:
    """Best effort: what cannot be deleted now is found by healing."""
    try:
        catalog.journal.delete_files(operation)
        if certain:
            catalog.journal.mark_cleaned(operation.id)
    except Unavailable as error:
        # Fenced and journalled: the next healing deletes them.
        log.get(operation.id).warning("files of an abandoned operation stay for healing", cause=str(error))
