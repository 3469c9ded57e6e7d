"""What an operation will do, as one durable record: written to the journal before anything is built.

From the seal alone recovery can build and publish a repeatable operation, without Spark and without the caller. The
text is hashed; one that does not match its hash, or that this version does not know, is Corrupt and is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict

from floodmark.catalog.chunks import ChunkRider, FillRider, PruneRider, RedoRider
from floodmark.catalog.indexes import DeclareRider, FoldRider, IndexRider
from floodmark.catalog.jobs import EndRider
from floodmark.catalog.merge_base import MergeRider
from floodmark.catalog.riders import BatchRider, MarksRider, Rider, StreamRider, VersionRider
from floodmark.catalog.senders import SenderRider
from floodmark.catalog.spools import RetryRider, SpoolRider
from floodmark.commit.shape_riders import DropRider, NamesRider, PolicyRider, RenameRider, UndropRider
from floodmark.errors import Corrupt
from floodmark.json_form import Json
from floodmark.model import FileRecord, Head

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.sorting import SortOrder

    from floodmark.commit.live_files import LiveFile

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
# The table gets another name, and nothing else of it changes: one snapshot over its manifests.
RENAME = "rename"
ACTIONS = frozenset({WRITE, CREATE, DROP, TAKE, UNDROP, RENAME})


@dataclass(frozen=True)
class RemovedFile:
    """A data file that an edit removes from its table; other versions may still name it."""

    path: str
    rows: int
    size_bytes: int


class SealedFile(TypedDict):
    """`RemovedFile` in a seal."""

    path: str
    rows: int
    size_bytes: int


class SealedEdit(TypedDict):
    """`Edit` in a seal: what is not a plain value. Its other keys are the other fields of Edit, as they are."""

    action: str
    added: list[dict[str, Json]]
    removed: list[SealedFile]
    needed: list[str]
    deletions: list[dict[str, Json]]


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
    # Of a rename: the name that the table gets. `table` is the one that it has.
    renamed_to: str | None = None

    @classmethod
    def create(cls, table: str, metadata: TableMetadata) -> Edit:
        """Create the table as its first metadata describes it."""
        return cls(
            CREATE,
            table,
            str(metadata.table_uuid),
            metadata.location,
            metadata.current_schema_id,
            metadata.default_spec_id,
            metadata=metadata.model_dump_json(exclude_none=True),
        )

    @classmethod
    def at(
        cls, head: Head, location: str, snapshot: int | None = None, *, action: str = WRITE, checked: bool = False
    ) -> Edit:
        """An edit of the table at this head, in the shape that it has there.

        As it is, it only depends on the table: the methods below, and `dataclasses.replace`, say what it does.
        """
        return cls(
            action,
            head.table,
            head.table_id,
            location,
            head.schema_id,
            head.spec_id,
            snapshot=snapshot,
            checked=checked,
            base_snapshot=head.snapshot,
        )

    def exchange(self, added: Iterable[FileRecord], removed: Iterable[LiveFile], *, same_rows: bool = False) -> Edit:
        """The edit with these files added and removed; `same_rows`: the same rows are in both."""
        gone = tuple(RemovedFile(file.path, file.rows, file.size_bytes) for file in removed)
        return replace(self, added=tuple(added), removed=gone, same_rows=same_rows)

    def reshape(
        self,
        schema: Schema | None = None,
        *,
        spec: PartitionSpec | None = None,
        sort: SortOrder | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> Edit:
        """The edit with a new shape of the table, whose parts have their ids. None: that part stays as it is."""
        return replace(
            self,
            schema_id=self.schema_id if schema is None else schema.schema_id,
            schema=None if schema is None else schema.model_dump_json(),
            base_schema_id=None if schema is None else self.schema_id,
            spec_id=self.spec_id if spec is None else spec.spec_id,
            spec=None if spec is None else spec.model_dump_json(),
            base_spec_id=None if spec is None else self.spec_id,
            sort=None if sort is None else sort.model_dump_json(),
            properties=dict(properties or {}),
        )

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

    @property
    def is_plain(self) -> bool:
        """Whether it only adds files to a table of this shape: right on any head of the shape."""
        shaped = any(one is not None for one in (self.schema, self.spec, self.sort, self.pointer_found))
        changed = self.checked or self.removed or self.needed or self.deletions or self.properties
        return self.action == WRITE and not shaped and not changed

    def as_dict(self) -> dict[str, Json]:
        # Not by `asdict`: it copies every value of every file, which takes longer than writing them as JSON.
        records = {name: [vars(one) for one in getattr(self, name)] for name in ("added", "removed", "deletions")}
        return {**vars(self), **records}

    @classmethod
    def from_dict(cls, data: SealedEdit) -> Edit:
        if data["action"] not in ACTIONS:
            raise ValueError(f"unknown action {data['action']!r}")
        parts = {
            "added": tuple(FileRecord.from_dict(record) for record in data["added"]),
            "removed": tuple(RemovedFile(**file) for file in data["removed"]),
            "needed": tuple(data["needed"]),
            "deletions": tuple(FileRecord.from_dict(record) for record in data["deletions"]),
        }
        made: Callable[..., Edit] = cls
        return made(**{**data, **parts})


@dataclass(frozen=True)
class Seal:
    """`repeatable`: the operation has an identity (a batch id), so its caller's retry is recognized as the same."""

    edits: tuple[Edit, ...]
    riders: tuple[Rider, ...] = ()
    repeatable: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it only appends: no other operation makes it wrong, and any process can publish it from its seal."""
        return bool(self.edits) and all(edit.is_plain for edit in self.edits)

    @property
    def makes_version(self) -> bool:
        """Whether the lake is another one afterwards. Segments alone are hints: no reader sees a change."""
        hints = all(isinstance(rider, IndexRider | FoldRider) for rider in self.riders)
        return bool(self.edits) or not self.riders or not hints

    @property
    def table_ids(self) -> frozenset[str]:
        """The tables that it changes or depends on."""
        return frozenset(edit.table_id for edit in self.edits)

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


# How each rider is made from the keys that it is sealed with, by its type.
_RIDERS: Mapping[str, Callable[..., Rider]] = {
    "batch": BatchRider,
    "stream": StreamRider,
    "version": VersionRider.sealed,
    "marks": MarksRider.sealed,
    "sender": SenderRider,
    "chunk": ChunkRider.sealed,
    "prune": PruneRider.sealed,
    "redo": RedoRider.sealed,
    "fill": FillRider,
    "branch_merge": MergeRider,
    "policy": PolicyRider.sealed,
    "names": NamesRider.sealed,
    "drop": DropRider,
    "undrop": UndropRider,
    "rename": RenameRider,
    "job_end": EndRider,
    "spool": SpoolRider.sealed,
    "spool_retry": RetryRider,
    "index": IndexRider.sealed,
    "declare": DeclareRider.sealed,
    "fold": FoldRider.sealed,
}


def rider_from_dict(data: Mapping[str, Json]) -> Rider:
    kind = str(data["type"])
    if kind not in _RIDERS:
        raise ValueError(f"unknown rider {kind!r}")
    return _RIDERS[kind](**{name: value for name, value in data.items() if name != "type"})
