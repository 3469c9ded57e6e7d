"""`lake.indexes`: declare, drop and list indexes.

Declaring is intent: one transaction of the catalog, no version, no wait. From then on writers make segments for the
files that they add; files of before are not covered until maintenance builds them, and lookups scan those (I11). Crash
anywhere: the index is declared, or it is not; the same call again does the rest.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import replace

from pyiceberg.schema import Schema

from floodmark.catalog.indexes import KEY
from floodmark.commit.metadata import schema_of
from floodmark.engine import Engine
from floodmark.errors import Invalid, NotFound
from floodmark.failpoints import hit
from floodmark.index.records import DROPPED, IndexChange, IndexLine, IndexStatus
from floodmark.index.status import TableIndex, index_status, table_indexes
from floodmark.index.wanted import names_of, wanted_index
from floodmark.model import Head
from floodmark.runs import NOTHING_TO_DO, PLANNED
from floodmark.shown import Listing

CREATED = "created"


class LakeIndexes:
    """Indexes are found by their table's name on main; they are of the table on every branch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._catalog = engine.catalog

    def __repr__(self) -> str:
        return f"<lake.indexes of {self._catalog.location}: create, drop, list, status>"

    def create(self, table: str, *, on: str | Sequence[str] | None = None, kind: str | None = None) -> IndexChange:
        """Declare an index on one or several columns; a no-op that says so if it exists.

        The key of a table has an index by itself: naming its columns, or kind="key", creates one that was dropped.
        Other columns get a value index: values need not be unique, and null is a value. A column that is a list of
        plain values is indexed by what the lists contain. Rows are not read: files of before are covered by
        maintenance.
        """
        self._engine.get_ready()
        head = self._catalog.history.head(table)
        schema = schema_of(self._catalog.files.metadata(head.metadata_location), head)
        wanted = wanted_index(table, schema, _columns(schema, on, kind), kind)
        change = IndexChange(table, names_of(schema, wanted.field_ids), wanted.kind, NOTHING_TO_DO)
        if any(one.row is None and one.wanted == wanted for one in self._of(head)):
            return change  # the key's: the first write makes it
        _, made = self._catalog.indexes.declare(head.table_id, wanted)
        # Crash here: the index is declared; other processes follow within seconds, this one at once.
        hit("index.declared")
        self._engine.segments.forget(head.table_id)
        return replace(change, outcome=CREATED) if made else change

    def drop(
        self, table: str, *, on: str | Sequence[str], kind: str | None = None, dry_run: bool = False
    ) -> IndexChange:
        """Drop an index: lookups and keyed writes find rows without it, with the same results. No row is lost.

        A sweep deletes its files. The key's index stays dropped until it is created again. `dry_run`: what a drop
        would do.
        """
        if not dry_run:
            self._engine.get_ready()
        head = self._catalog.history.head(table)
        index = self._find(head, _names(on), kind)
        line = index.line
        if dry_run:
            outcome = NOTHING_TO_DO if line.state == DROPPED else PLANNED
            return IndexChange(table, line.on, line.kind, outcome)
        done = self._catalog.indexes.drop(head.table_id, index.wanted)
        # Crash here: it is dropped; this process would have made segments that are retired at once.
        hit("index.dropped")
        self._engine.segments.forget(head.table_id)
        return IndexChange(table, line.on, line.kind, DROPPED if done else NOTHING_TO_DO)

    def list(self, table: str | None = None) -> builtins.list[IndexLine]:
        """The indexes of a table, or of all tables of main: what they are on, and their segments."""
        return Listing(one.line for head in self._heads(table) for one in self._of(head))

    def status(self, table: str | None = None) -> builtins.list[IndexStatus]:
        """The same, and how many of the data files and rows of main's head each index covers."""
        catalog, coverings = self._catalog, self._engine.coverings
        found: builtins.list[IndexStatus] = Listing()
        for one in self._heads(table):
            found += catalog.at_head(one.table, lambda head: index_status(catalog, coverings, head))
        return found

    # ── inside ──

    def _heads(self, table: str | None) -> builtins.list[Head]:
        history = self._catalog.history
        return history.heads() if table is None else [history.head(table)]

    def _of(self, head: Head) -> builtins.list[TableIndex]:
        return self._catalog.at_head(head.table, lambda now: table_indexes(self._catalog, now))

    def _find(self, head: Head, on: Sequence[str], kind: str | None) -> TableIndex:
        """The index on these columns, in any order; one that can be used before one on columns that are gone."""
        known = self._of(head)
        found = [one for one in known if set(one.line.on) == set(on) and kind in (None, one.line.kind)]
        if not found:
            names = "; ".join(", ".join(one.line.on) for one in known)
            advice = f"The indexes are on: {names}." if known else "`floodmark index create` creates one."
            raise NotFound("there is no such index", table=head.table, columns=", ".join(on), advice=advice)
        if len({one.line.kind for one in found if one.columns is not None}) > 1:
            advice = 'Say which one: kind="key" or kind="value".'
            raise Invalid(
                "there are two indexes on these columns", table=head.table, columns=", ".join(on), advice=advice
            )
        return min(found, key=lambda one: one.columns is None)


def _columns(schema: Schema, on: str | Sequence[str] | None, kind: str | None) -> Sequence[str]:
    """The names that were given; for a key index, by default those of the key."""
    if on is None and kind == KEY:
        return names_of(schema, schema.identifier_field_ids)
    return _names(on or ())


def _names(on: str | Sequence[str]) -> Sequence[str]:
    return (on,) if isinstance(on, str) else tuple(on)
