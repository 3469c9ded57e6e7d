"""A plan: the steps from the present lake to the one that a file wants, and the state that they were computed on.

Making one reads the catalog and tables' metadata, no rows and no Spark. It is stale as soon as one of the tables that
it read moved, even by an append: applying it then is a Conflict. Appends to other tables do not matter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from floodmark.commit.catalog import READS_MAX, Catalog
from floodmark.commit.metadata import schema_of
from floodmark.commit.references import references_of, referrers_of
from floodmark.errors import Conflict, Corrupt, NotFound
from floodmark.json_form import Json
from floodmark.model import MAIN, Head
from floodmark.schema.diff import diff
from floodmark.schema.file import WantedTable
from floodmark.schema.step import ADD_INDEX, DESTRUCTIVE, DROP_INDEX, REFUSED, Step
from floodmark.schema.table_plan import TablePlan
from floodmark.write.current import Current, CurrentTables

# The origin of tables that no file declares.
GIVEN = "the tables given"

# Of one table: name, table id, snapshot, schema id, spec id. Without an id the table does not exist.
Seen = tuple[str, str | None, int | None, int, int]


@dataclass(frozen=True)
class Plan:
    """`heads` are the states of every table that the file names or that its references touch.

    `id` covers them, the steps, and all that will be done; `contents` only the last.
    """

    origin: str
    version: int
    heads: tuple[Seen, ...]
    steps: tuple[Step, ...]
    tables: tuple[TablePlan, ...] = field(repr=False)
    branch: str = MAIN

    @property
    def id(self) -> str:
        on = [] if self.branch == MAIN else [self.branch]
        return _digest([[step.as_dict() for step in self.steps], self.heads, self.contents, *on])

    @property
    def file(self) -> str | None:
        """The file that declares the tables; None if they were given otherwise."""
        return None if self.origin == GIVEN else self.origin

    @property
    def contents(self) -> str:
        return _digest([table.contents() for table in self.tables if table.changes])

    @property
    def outcome(self) -> str:
        if any(step.kind == REFUSED for step in self.steps):
            return "refused"
        return "planned" if self.steps else "nothing_to_do"

    @property
    def only_indexes(self) -> bool:
        """Whether it changes indexes and nothing else: that makes no version."""
        return bool(self.steps) and all(step.action in (ADD_INDEX, DROP_INDEX) for step in self.steps)

    @property
    def refused(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.kind == REFUSED)

    @property
    def destructive(self) -> tuple[Step, ...]:
        """The steps that lose data: they are done only if allowed."""
        return tuple(step for step in self.steps if step.kind == DESTRUCTIVE)

    def with_refused(self, problems: Sequence[Step]) -> Plan:
        """The plan after a check of the rows: these steps cannot be done."""
        found = {(step.table, step.action, step.column): step for step in problems}
        return replace(
            self, steps=tuple(found.get((step.table, step.action, step.column), step) for step in self.steps)
        )

    def as_dict(self) -> dict[str, Json]:
        return {
            "outcome": self.outcome,
            "plan": self.id,
            "branch": self.branch,
            "version": self.version,
            "origin": self.origin,
            "steps": [step.as_dict() for step in self.steps],
        }


def make_plan(catalog: Catalog, wanted: Sequence[WantedTable], origin: str, branch: str = MAIN) -> Plan:
    """The plan for a branch as it is now."""
    for _ in range(READS_MAX):
        version = catalog.history.resolve(branch=branch)
        heads = {head.table: head for head in catalog.history.heads(branch)}
        try:
            current = _current(catalog, wanted, heads)
        except (Corrupt, NotFound, FileNotFoundError):
            # A file of a table may be missing because the table moved and was swept meanwhile: then it is read again.
            if {head.table: head for head in catalog.history.heads(branch)} == heads:
                raise
            continue
        plans = diff(wanted, current)
        names = sorted({*current, *(table.name for table in wanted)})
        steps = tuple(step for plan in plans for step in plan.steps)
        states = tuple(seen(name, heads.get(name)) for name in names)
        return Plan(origin, version, states, steps, plans, branch)
    raise Conflict("the tables kept changing while they were read", advice="Run it again.")


def _digest(parts: Sequence[Json]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def seen(name: str, head: Head | None) -> Seen:
    if head is None:
        return name, None, None, -1, -1
    return name, head.table_id, head.snapshot, head.schema_id, head.spec_id


# ── reading the present state ──


def _current(catalog: Catalog, wanted: Sequence[WantedTable], heads: Mapping[str, Head]) -> dict[str, Current]:
    """The relevant tables: the named ones, in any case, and those on the other side of a reference."""
    named = {table.name.lower() for table in wanted} | {(table.rename_to or table.name).lower() for table in wanted}
    parents = {parent.lower() for table in wanted for parent, _ in table.parents.values()}
    by_id = {head.table_id: head for head in heads.values()}
    first = [head for head in heads.values() if head.table.lower() in named | parents]
    others: set[str] = set()
    for head in first:
        metadata = catalog.files.metadata(head.metadata_location)
        others |= {one.table_id for one in referrers_of(metadata.properties)}
        schema = schema_of(metadata, head)
        others |= {one.parent_id for one in references_of(metadata.properties, schema, head.table_id)}
    chosen = {head.table: head for head in (*first, *(by_id[one] for one in others if one in by_id))}
    defaults = {table.name: _with_default(table) for table in wanted}
    reads = CurrentTables(catalog)
    return {name: reads.read(head, defaults.get(name, ())) for name, head in sorted(chosen.items())}


def _with_default(table: WantedTable) -> set[str]:
    """The columns that are to have a default, under every name that they may have today."""
    columns = [column for column in table.columns if column.default is not None]
    return {name for column in columns for name in (column.name, column.renamed_from) if name is not None}
