"""References between tables, checked on the result of a change: all of its tables as they would be after its publish.

Rows added to a child must refer to keys that its parent then has; rows that children then have must not refer to keys
removed from their parent. Checked after the last step, so the order of steps does not matter. The other table becomes
a part of the change that is only read: the publisher compares its head in the publish, so that of these two neither
order breaks a reference:

    1. orders: append (customer 7), sees customer 7     1. customers: delete 7, sees no order of 7
    2. customers: delete 7, sees no order of 7          2. orders: append (customer 7), sees customer 7
    3. both publish: one of them finds that the other's table moved, checks again, and is refused

Indexes leave out files: of the parent the key's, of the child the value index that comes with a reference.
A table that moved is checked again only where it matters: whether the files that held the keys are live, or whether
added rows refer to removed keys. What is refused here was staged, and is deleted with its operation (publication.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import pyarrow as pa
from pyiceberg.types import NestedField

from floodmark.catalog.riders import PlanAgain
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import MetadataFiles, schema_of
from floodmark.commit.references import Reference, Referrer, references_of, referrers_of
from floodmark.errors import Corrupt, NotFound
from floodmark.model import MAIN, Head
from floodmark.rows.reading.references import FilesHolding, Missing, held_values, missing_values
from floodmark.storage import Storage
from floodmark.write import refusals
from floodmark.write.prune import key_fields
from floodmark.write.refusals import Offence, Offends
from floodmark.write.table import TableChange


class _Taken:
    """A table that is taken as it is on another branch: all of its rows are new here."""

    def __init__(self, files: MetadataFiles, head: Head) -> None:
        self._files = files
        self.name = head.table
        self.head = head
        self.metadata = files.metadata(head.metadata_location)
        self.schema = schema_of(self.metadata, head)
        # The publisher checks the edit that takes it in any case.
        self.depended = True

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(column.name for column in key_fields(self.schema))

    def working_files(self) -> list[LiveFile]:
        return live_files(self._files, self.head, self.schema)

    came_files = working_files


_Table = TableChange | _Taken


@dataclass(frozen=True)
class _Going:
    """Keys that are removed from a parent, and a child's column that must not hold them."""

    parent: TableChange
    key: NestedField
    column: NestedField
    child_id: str | None


# Those of a table's files that may hold one of these values in a column: by table id, column, files and values.
Holding: TypeAlias = Callable[[str, NestedField, Sequence[LiveFile], pa.Array], Sequence[LiveFile]]


class ReferenceChecks:
    """The checks of one change. `open_table` returns the working state of a table of its branch, or raises NotFound."""

    def __init__(
        self, open_table: Callable[[str], TableChange], files: MetadataFiles, storage: Storage, holding: Holding
    ) -> None:
        self._open_table = open_table
        self._holding = holding
        self._files = files
        self._storage = storage
        self._taken: dict[str, _Taken] = {}
        # By the name of the checked table: files that must stay live, and keys that no row may refer to.
        self._held_in: dict[str, set[str]] = {}
        self._going: dict[str, list[_Going]] = {}

    def take(self, head: Head) -> None:
        """The change takes this table from another branch."""
        self._taken[head.table] = _Taken(self._files, head)

    def check(self, tables: Mapping[str, TableChange]) -> None:
        """`Invalid` with the offending values; otherwise the change depends on the tables that were checked."""
        self._held_in, self._going = {}, {}
        changed = list(tables.values())
        for change in changed:
            change.depended = False
        violations = [error for change in changed for error in (*self._children(change), *self._parents(change))]
        violations += [error for taken in self._taken.values() for error in self._children(taken)]
        if violations:
            raise _together(violations)

    def _children(self, child: _Table) -> list[Offends]:
        """Check that added rows refer to existing keys."""
        found: list[Offends] = []
        for reference in _references(child):
            column = child.schema.find_field(reference.field_id)
            paths = [file.path for file in child.came_files() if _has_values(file, column)]
            parent = self._opened(reference.parent, reference.parent_id) if paths else None
            key = None if parent is None else _key_of(parent, reference)
            if parent is None or key is None:
                continue
            holding = self._files_holding(_id_of(parent), key)
            missing = missing_values(self._storage, paths, column, parent.working_files(), key, holding=holding)
            if missing.count:
                offence = Offence(child.name, column.name, parent.name, missing.values)
                found.append(refusals.keys_missing(offence, f"{parent.name}.{key.name}", missing))
            parent.depended = True
            self._held_in.setdefault(parent.name, set()).update(missing.found_in - set(paths))
        return found

    def _parents(self, parent: TableChange) -> list[Offends]:
        """Check that no row refers to a removed key."""
        found: list[Offends] = []
        if not parent.deleted_keys():
            return found
        for referrer in referrers_of(parent.metadata.properties):
            child = self._opened(referrer.table, referrer.table_id)
            reference = None if child is None else _reference(child, referrer)
            key = None if reference is None else _key_of(parent, reference)
            if child is None or key is None:
                continue
            going = _Going(parent, key, child.schema.find_field(referrer.field_id), _id_of(child))
            held = self._held(going, child.working_files())
            if held.count:
                offence = Offence(parent.name, key.name, child.name, held.values, go=True)
                found.append(refusals.still_referred_to(offence, going.column.name, held))
            child.depended = True
            self._going.setdefault(child.name, []).append(going)
        return found

    def recheck(self, table: TableChange, head: Head) -> None:
        """A table that the checks depend on is at another head than planned: PlanAgain if that matters."""
        held_in = self._held_in.get(table.name, set()) & table.base_paths()
        if held_in and not held_in.issubset(self._files.data_files(head)):
            raise PlanAgain(table.name, "a file with keys that rows refer to is not live any more")
        going = self._going.get(table.name, ())
        came = table.came_meanwhile(head) if going else []
        if any(self._held(one, came).count for one in going):
            raise PlanAgain(table.name, "a row that refers to a deleted key was added meanwhile")

    def _held(self, going: _Going, children: Sequence[LiveFile]) -> Missing:
        keys, stay = going.parent.deleted_keys(), going.parent.working_files()
        return held_values(
            self._storage,
            keys,
            going.key,
            children,
            going.column,
            stay=stay,
            holding=self._files_holding(going.child_id, going.column),
            stay_holding=self._files_holding(_id_of(going.parent), going.key),
        )

    def _files_holding(self, table_id: str | None, column: NestedField) -> FilesHolding | None:
        """Which files of a table may hold values of a column; None: it is new, and has no index yet."""
        return None if table_id is None else partial(self._holding, table_id, column)

    def _opened(self, name: str, table_id: str) -> _Table | None:
        """The other table; None if it is not on this branch, which then does not have the reference either."""
        other: _Table
        try:
            other = self._taken.get(name) or self._open_table(name)
        except NotFound:
            return None
        if other.head is None or other.head.table_id != table_id:
            raise Corrupt("a table that is referred to was dropped and created again", table=name, table_id=table_id)
        return other


def _id_of(table: _Table) -> str | None:
    return None if table.head is None else table.head.table_id


def _references(child: _Table) -> tuple[Reference, ...]:
    table_id = str(child.metadata.table_uuid) if child.head is None else child.head.table_id
    return references_of(child.metadata.properties, child.schema, table_id)


def _reference(child: _Table, referrer: Referrer) -> Reference | None:
    """The reference as the child declares it; None if this branch does not have the column."""
    return next((reference for reference in _references(child) if reference.field_id == referrer.field_id), None)


def _key_of(parent: _Table, reference: Reference) -> NestedField | None:
    """The key that is referred to; None on a branch that is older than this key, and so than the reference."""
    key = key_fields(parent.schema)
    if [field.field_id for field in key] == [reference.parent_field_id]:
        return key[0]
    if parent.head is not None and parent.head.branch != MAIN:
        return None
    raise Corrupt("a table that is referred to has another key", table=parent.name, key=", ".join(parent.key))


def _has_values(file: LiveFile, column: NestedField) -> bool:
    """Whether the file may hold a value of the column that is not null, by its counts."""
    values = (file.data_file.value_counts or {}).get(column.field_id)
    nulls = (file.data_file.null_value_counts or {}).get(column.field_id)
    return values is None or nulls is None or values > nulls


def _together(violations: Sequence[Offends]) -> Offends:
    """One error for all: the facts of the first, and the others as text."""
    first, *others = violations
    if not others:
        return first
    offences = [offence for violation in violations for offence in violation.offences]
    also = " | ".join(str(other) for other in others)
    return Offends(first.message, offences, advice=first.advice, **first.facts, also=also)
