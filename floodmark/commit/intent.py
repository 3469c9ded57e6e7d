"""The actor and reason of a change: what the journal and the history will record. Checked before anything is begun."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from floodmark.catalog.riders import TABLE_SCOPE, BatchRider, Rider, StreamRider, VersionRider
from floodmark.errors import Invalid
from floodmark.model import MAIN

BATCH_CHARACTERS_MAX = 512


@dataclass(frozen=True)
class Intent:
    kind: str
    branch: str
    actor: str
    message: str
    batch: Rider | None = None
    # Publish only if the tables that it touches are as they were at this version of the branch.
    if_version: int | None = None

    def __post_init__(self) -> None:
        _check_text(self.actor, "actor")
        _check_text(self.message, "message")
        wanted = self.if_version
        if wanted is not None and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0):
            advice = "`floodmark history` lists the versions; a Commit has its own."
            raise Invalid("if_version is the number of a version", if_version=repr(wanted)[:80], advice=advice)

    def expecting(
        self,
        touched: Iterable[tuple[str, str]],
        *,
        dropped: Iterable[tuple[str, str]] = (),
        free: Iterable[str] = (),
        branch: str | None = None,
    ) -> tuple[VersionRider, ...]:
        """What must hold for these tables (id and name) in the publish; nothing if the caller expects nothing.

        `dropped`: tables that were dropped at that version already. `free`: names of tables to create. `branch`: if it
        is not the one written to.
        """
        if self.if_version is None:
            return ()
        found, gone = (tuple(dict.fromkeys(some)) for some in (touched, dropped))
        return (VersionRider(branch or self.branch, self.if_version, found, gone, tuple(free)),)


def batch_rider(scope: str, batch: str | None, branch: str = MAIN) -> BatchRider | None:
    """The identity of a batch on a branch; the scope is a table's name, or empty for a transaction."""
    if batch is None:
        return None
    if not isinstance(batch, str) or not 0 < len(batch) <= BATCH_CHARACTERS_MAX:
        raise Invalid(f"a batch id is a text of 1 to {BATCH_CHARACTERS_MAX} characters", batch=repr(batch)[:80])
    _check_text(batch, "batch")
    return BatchRider(f"{TABLE_SCOPE}{scope}" if scope else "transaction", batch, branch)


def stream_rider(table: str, query: str, batch_id: int, branch: str = MAIN) -> StreamRider:
    """The identity of a stream's micro-batch: the query's own id, and the number that Spark gave the batch."""
    _check_text(query, "query")
    if not 0 < len(query) <= BATCH_CHARACTERS_MAX:
        raise Invalid(f"a query id is a text of 1 to {BATCH_CHARACTERS_MAX} characters", query=repr(query)[:80])
    return StreamRider(f"stream:{table}", query, int(batch_id), branch)


def _check_text(text: str, role: str) -> None:
    """Every database must be able to store it: no NUL, no half of a character."""
    if "\x00" in text or any("\ud800" <= sign <= "\udfff" for sign in text):
        raise Invalid("this text has signs that cannot be stored", role=role, text=repr(text)[:80])
