"""The rider of a branch merge: its ground has not moved, and from its publish on both sides know what was merged.

Checked under fm_lake's lock. Interleaving that it excludes: a merge M has staged what `dev` brought; `dev` is written
to, or merged by another, or deleted; M publishes. M would say of `dev` that all of it is in the target, and the rows
that came meanwhile would never be merged.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection, insert, select, update

from floodmark.catalog import tables
from floodmark.catalog.batches import copy_batches
from floodmark.catalog.edges import KEPT
from floodmark.catalog.lines import Lines
from floodmark.catalog.riders import PlanAgain
from floodmark.errors import Conflict


@dataclass(frozen=True)
class MergeRider:
    """source, target and child are ids of lines; the versions are those of the edge that the merge was planned on.

    settled: by table id, how a conflict of the table as a whole was settled (kept, replaced).
    """

    source: str
    source_name: str
    source_version: int
    target: str
    child: str
    common_version: int
    source_since: int
    settled: dict[str, str] = field(default_factory=dict)

    def check(self, tx: Connection) -> None:
        lines = Lines.read(tx)
        gone = [line for line in (self.source, self.target) if lines.get(line).ended_version is not None]
        if gone:
            raise Conflict("the branch was deleted meanwhile", branch=lines.get(gone[0]).name)
        branch = tables.branches
        head = tx.execute(select(branch.c.head_version).where(branch.c.name == self.source_name)).scalar_one()
        if head != self.source_version:
            raise PlanAgain(self.source_name, "the branch that is merged moved meanwhile")
        if lines.get(self.child).common_version != self.common_version:
            raise PlanAgain(self.source_name, "the branches were merged by another meanwhile")

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row, lines = tables.lines, Lines.read(tx)
        tx.execute(
            insert(tables.merges).values(
                version=version,
                source=self.source,
                source_version=self.source_version,
                target=self.target,
                settled=json.dumps(self.settled, sort_keys=True) if self.settled else "",
            )
        )
        known = "sent_version" if self.child == self.source else "taken_version"
        values = {known: self.source_version, "common_version": self.source_version}
        tx.execute(update(row).where(row.c.id == self.child).values(**values))
        copy_batches(
            tx,
            lines,
            lines.get(self.source),
            lines.get(self.target),
            self.source_since,
            kept=[table_id for table_id, choice in self.settled.items() if choice == KEPT],
            operation=operation,
            version=version,
        )

    def as_dict(self) -> dict[str, Any]:
        return {"type": "branch_merge", **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MergeRider:
        return cls(**{name: value for name, value in data.items() if name != "type"})
