"""One table as a plan wants it: the records between reading, planning and applying."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortOrder
from pyiceberg.typedef import IcebergBaseModel

from floodmark.catalog.indexes import WantedIndex
from floodmark.catalog.maintenance_state import Policy
from floodmark.commit.fills import Fill
from floodmark.json_form import Json
from floodmark.schema.file import WantedTable
from floodmark.schema.step import DROP_COLUMN, RENAME_COLUMN, Step
from floodmark.write.current import Current
from floodmark.write.shape import TableShape


@dataclass(frozen=True)
class Link:
    """A reference to be created: a column of one table, and the key of another. By ids, once both have them."""

    field_id: int
    parent: str
    parent_field_id: int


@dataclass(frozen=True)
class TablePlan:
    """The plan of one table. None: unchanged.

    wanted: None if only another table's reference touches it. shape: of a table to be created. fills: defaults that
    older files get in the same publish. unique, no_nulls and links are checked in the rows before it. declared and
    undeclared: indexes to be created and dropped, which no version shows.
    """

    name: str
    wanted: WantedTable | None
    current: Current | None
    steps: tuple[Step, ...] = ()
    shape: TableShape | None = None
    schema: Schema | None = None
    spec: PartitionSpec | None = None
    sort: SortOrder | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    policy: Policy | None = None
    fills: tuple[Fill, ...] = ()
    unique: bool = False
    no_nulls: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    declared: tuple[WantedIndex, ...] = ()
    undeclared: tuple[WantedIndex, ...] = ()
    drop: bool = False
    rename_to: str | None = None

    @property
    def final_schema(self) -> Schema:
        """The table's schema once the plan is done."""
        if self.shape is not None:
            return self.shape.schema
        if self.schema is not None:
            return self.schema
        if self.current is None:
            raise ValueError(f"the table {self.name} does not exist and is not to be created")
        return self.current.schema

    @property
    def changes(self) -> bool:
        """Whether the plan changes the table, or what the catalog stores about it."""
        parts = (self.shape, self.schema, self.spec, self.sort, self.policy)
        gone = self.drop or self.rename_to is not None
        return gone or bool(self.properties or self.links) or any(part is not None for part in parts)

    @property
    def moves_names(self) -> bool:
        """Whether an existing column is dropped or renamed."""
        return any(step.action in (RENAME_COLUMN, DROP_COLUMN) for step in self.steps)

    def contents(self) -> list[Json]:
        """All that will be done to the table, as JSON: two plans that differ in this are two plans."""
        shape = self.shape
        made = None if shape is None else [*map(_text, (shape.schema, shape.spec, shape.sort)), dict(shape.properties)]
        policy = None if self.policy is None else [self.policy.retention, self.policy.column]
        return [
            self.name,
            made,
            *map(_text, (self.schema, self.spec, self.sort)),
            dict(self.properties),
            policy,
            [[fill.field_id, fill.column, fill.expression] for fill in self.fills],
            [self.unique, list(self.no_nulls)],
            [[link.field_id, link.parent, link.parent_field_id] for link in self.links],
            self.drop,
            self.rename_to,
        ]

    @property
    def looks(self) -> bool:
        """Whether its rows must be checked, or rewritten."""
        return self.current is not None and bool(self.unique or self.no_nulls or self.fills or self.links)


def _text(part: IcebergBaseModel | None) -> str | None:
    return None if part is None else part.model_dump_json()
