"""Whether a spool is the one that the catalog knows, and all of it that was not fed: else it is refused, with a reason.

One judgement for whoever asks: the intake that opens it, the status that only looks, the operator who settles it.
"""

from __future__ import annotations

from pathlib import Path

from floodmark.catalog.spools import SpoolRow, replaced
from floodmark.errors import Conflict, FloodmarkError
from floodmark.spool.spool import Look


def missing(row: SpoolRow, folder: Path, host: str) -> Conflict:
    """The table has a spool, and it is not here."""
    elsewhere = row.host != host
    return Conflict(
        "the spool of this table is on another machine" if elsewhere else "the spool of this table is not there",
        table=row.table,
        spool=row.spool_id,
        host=row.host,
        folder=row.folder if elsewhere else folder,
        position=row.position,
        advice=f"Bring it back, or see `floodmark spool accept {row.table}`: rows in it that were not fed are missed.",
    )


def missing_row(table: str) -> Conflict:
    return Conflict("the catalog does not know the spool of this table", table=table)


def misfit(row: SpoolRow | None, table: str, spool_id: str, first: int, end: int) -> Conflict | None:
    """Why this spool does not go on where the catalog says; None if it does."""
    if row is not None and row.spool_id != spool_id and (row.spool_id or end):
        # Also one that comes back after it was given up: what it holds may be in the table already.
        return replaced(row, spool_id)
    position = row.position if row is not None and row.spool_id else 0
    if first <= position <= end:
        return None
    return Conflict(
        "this spool is older than what was fed from it"
        if end < position
        else "records that were not fed are not in this spool",
        table=table,
        spool=spool_id,
        position=position,
        first=first,
        end=end,
        advice=f"Bring the newer one back, or see `floodmark spool accept {table}`.",
    )


def stranger(row: SpoolRow, found: Look, incarnation: str) -> Conflict | None:
    """Why a spool that was only looked at is not the table's; None if it is."""
    for what, is_it, wanted in (
        ("another table", found.table_id, row.table_id),
        ("another incarnation of the lake", found.incarnation, incarnation),
    ):
        if is_it != wanted:
            return Conflict(
                f"this spool belongs to {what}",
                table=row.table,
                spool=found.id,
                found=is_it,
                wanted=wanted,
                advice=f"See `floodmark spool accept {row.table}`.",
            )
    return None


def is_fed(found: Look) -> bool:
    """Whether nothing waits in it: then it does not matter that its table is gone."""
    return found.problem is None and found.waiting is not None and not found.waiting.records


def why_refused(row: SpoolRow, found: Look, incarnation: str, *, table_there: bool) -> FloodmarkError | None:
    """Of a spool on this machine, by a look from outside; None if it can be fed."""
    if not table_there and is_fed(found):
        return None
    if not table_there:
        return Conflict(
            "the table of this spool is gone",
            table=row.table,
            table_id=row.table_id,
            advice=f"Its rows are kept. See `floodmark spool accept {row.table_id}`.",
        )
    if found.id is None:
        return found.problem if row.spool_id else None
    if (other := stranger(row, found, incarnation)) is not None:
        return other
    if (other := misfit(row, row.table, found.id, found.first, found.end)) is not None and found.end:
        return other
    return found.problem
