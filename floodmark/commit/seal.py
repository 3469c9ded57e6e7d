"""What an operation will do, as one durable record: written to the journal before anything is built.

From the seal alone recovery can build and publish a repeatable operation, without Spark and without the caller. The
text is hashed; one that does not match its hash, or that this version does not know, is Corrupt and is kept.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from floodmark.catalog.chunks import job_rider_from_dict
from floodmark.catalog.jobs import EndRider
from floodmark.catalog.merge_base import MergeRider
from floodmark.catalog.riders import BatchRider, MarksRider, Rider, StreamRider
from floodmark.catalog.senders import SenderRider
from floodmark.catalog.spools import spool_rider_from_dict
from floodmark.commit.shape_riders import shape_rider_from_dict
from floodmark.errors import Corrupt
from floodmark.model import MAIN, FileRecord

SEAL_FORMAT = 1
INLINE_BYTES_MAX = 64 * 1024

WRITE = "write"
CREATE = "create"
# The table goes from the branch; its older states can be read until they expire.
DROP = "drop"
# The branch gets the table as `source_branch` has it: one snapshot over that one's manifests.
TAKE = "take"
# The table comes back as the branch had it last: one snapshot over those manifests.
UNDROP = "undrop"
ACTIONS = frozenset({WRITE, CREATE, DROP, TAKE, UNDROP})


@dataclass(frozen=True)
class RemovedFile:
    """A data file that an edit removes from its table; other versions may still name it."""

    path: str
    rows: int
    size_bytes: int


@dataclass(frozen=True)
class Edit:
    """The change of one table: `write` adds and removes files, `create` creates the table with `metadata`.

    schema_id and spec_id are those that the files were staged for; base_schema_id and base_spec_id are the table's own
    when `schema` or `spec` (JSON, with their ids) change them; `sort` (JSON) is a new default order, and `properties`
    are added to the table's, where an empty one means none. `snapshot` is chosen here, once, so that every attempt of
    every process to publish this edit makes the same snapshot. `checked`: it is right only beside the rows of
    base_snapshot (keys, conditions), so a process that publishes it on another snapshot checks first; `needed` names
    files that it read and did not replace, which must still be live then. `same_rows`: the files added hold the rows of
    the files removed.
    """

    action: str
    table: str
    table_id: str
    location: str
    schema_id: int
    spec_id: int
    snapshot: int | None = None
    added: tuple[FileRecord, ...] = ()
    removed: tuple[RemovedFile, ...] = ()
    needed: tuple[str, ...] = ()
    deletions: tuple[FileRecord, ...] = ()
    rows_added: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    checked: bool = False
    same_rows: bool = False
    base_snapshot: int | None = None
    schema: str | None = None
    base_schema_id: int | None = None
    metadata: str | None = None
    properties: dict[str, str] = field(default_factory=dict)
    # Of a table that is adopted with its existing rows: its files and bytes; rows_added are its rows.
    adopted_files: int = 0
    adopted_bytes: int = 0
    spec: str | None = None
    base_spec_id: int | None = None
    sort: str | None = None
    # Of a repair: the foreign pointer that this edit replaces ("": it does not exist any more), and the sequence that
    # the foreign writer reached, or of an undrop any branch: the new one is above it.
    pointer_found: str | None = None
    sequence_above: int = 0
    # Of a take: the branch that has the table; base_snapshot is that branch's head.
    source_branch: str | None = None

    @property
    def shape_before(self) -> tuple[int, int]:
        """The table's schema and partition spec that this edit was made for."""
        return (
            self.schema_id if self.base_schema_id is None else self.base_schema_id,
            self.spec_id if self.base_spec_id is None else self.base_spec_id,
        )

    @property
    def changes_rows(self) -> bool:
        return bool(self.added or self.removed)

    @property
    def changes_table(self) -> bool:
        """Whether the table gets a new state; otherwise the operation only depends on the existing one."""
        shaped = any(one is not None for one in (self.schema, self.spec, self.sort, self.pointer_found))
        return self.action != WRITE or self.changes_rows or shaped or bool(self.deletions or self.properties)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Edit:
        values = dict(data)
        if values["action"] not in ACTIONS:
            raise ValueError(f"unknown action {data['action']!r}")
        for name in ("added", "deletions"):
            values[name] = tuple(FileRecord.from_dict(record) for record in data[name])
        values["removed"] = tuple(RemovedFile(**file) for file in data["removed"])
        values["needed"] = tuple(data["needed"])
        return cls(**values)


@dataclass(frozen=True)
class Seal:
    """`repeatable`: the operation has an identity (a batch id), so its caller's retry is recognized as the same."""

    edits: tuple[Edit, ...]
    riders: tuple[Rider, ...] = ()
    repeatable: bool = False

    def to_text(self) -> str:
        return json.dumps(
            {
                "format": SEAL_FORMAT,
                "edits": [edit.as_dict() for edit in self.edits],
                "riders": [rider.as_dict() for rider in self.riders],
                "repeatable": self.repeatable,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_text(cls, operation: str, text: str, expected_hash: str) -> Seal:
        try:
            if seal_hash(text) != expected_hash:
                raise ValueError("the text does not match its hash")
            data = json.loads(text)
            if data["format"] != SEAL_FORMAT:
                raise ValueError(f"unknown format {data['format']!r}")
            return cls(
                edits=tuple(Edit.from_dict(edit) for edit in data["edits"]),
                riders=tuple(rider_from_dict(rider) for rider in data["riders"]),
                repeatable=bool(data["repeatable"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corrupt(
                "the journal's record of this operation cannot be understood",
                operation=operation,
                cause=error,
                advice="It is kept. `floodmark recover --discard OPERATION --apply` gives it up, with its files.",
            ) from error


def seal_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def rider_from_dict(data: dict[str, Any]) -> Rider:
    if data["type"] == "batch":
        return BatchRider(scope=data["scope"], id=data["id"], branch=data.get("branch", MAIN))
    if data["type"] == "stream":
        return StreamRider(data["scope"], data["id"], data["position"], data.get("branch", MAIN))
    if data["type"] == "marks":
        counted, lost = (
            tuple(sorted((str(one), int(data[part][one])) for one in data[part])) for part in ("counted", "lost")
        )
        return MarksRider(data["table_id"], data["seq_max"], data["forced"], counted, lost)
    if data["type"] == "sender":
        return SenderRider.from_dict(data)
    if data["type"] in ("chunk", "prune", "redo", "fill"):
        return job_rider_from_dict(data)
    if data["type"] == "branch_merge":
        return MergeRider.from_dict(data)
    if data["type"] in ("policy", "names", "drop", "undrop"):
        return shape_rider_from_dict(data)
    if data["type"] == "job_end":
        return EndRider.from_dict(data)
    if data["type"] in ("spool", "spool_retry"):
        return spool_rider_from_dict(data)
    raise ValueError(f"unknown rider {data['type']!r}")
