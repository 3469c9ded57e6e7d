"""What an operation will do, as one durable record: written to the journal before anything is built.

From the seal alone a healer can build and publish a repeatable operation, without Spark and without the caller.
The text is hashed; one that does not match its hash, or that this version does not know, is Corrupt and is kept.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from floodmark.catalog.riders import Rider, rider_from_dict
from floodmark.errors import Corrupt
from floodmark.model import FileRecord

SEAL_FORMAT = 1
INLINE_BYTES_MAX = 64 * 1024

APPEND = "append"
CREATE = "create"


@dataclass(frozen=True)
class Edit:
    """The change of one table: `append` adds files, `create` makes the table with `metadata`.

    schema_id and spec_id are those that the files were staged for. `snapshot` is chosen here, once, so that every
    attempt of every process to publish this edit makes the same snapshot.
    """

    action: str
    table: str
    table_id: str
    location: str
    schema_id: int
    spec_id: int
    snapshot: int | None = None
    added: tuple[FileRecord, ...] = ()
    metadata: str | None = None

    @property
    def rows_added(self) -> int:
        return sum(record.rows for record in self.added)

    def as_dict(self) -> dict[str, Any]:
        return {
            "action": self.action,
            "table": self.table,
            "table_id": self.table_id,
            "location": self.location,
            "schema_id": self.schema_id,
            "spec_id": self.spec_id,
            "snapshot": self.snapshot,
            "added": [record.as_dict() for record in self.added],
            "metadata": self.metadata,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Edit:
        if data["action"] not in (APPEND, CREATE):
            raise ValueError(f"unknown action {data['action']!r}")
        return cls(**{**data, "added": tuple(FileRecord.from_dict(record) for record in data["added"])})


@dataclass(frozen=True)
class Seal:
    """`repeatable`: the operation has an identity (a batch id), so its caller's retry is known to be the same."""

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
