"""Units that a files sink has written, for their consumers: which are complete, in order, and their rows.

A unit is a folder with objects and, last of all, `_unit.json`: the manifest that names every object with its size and
digest. Without it the unit is not complete, and nothing in its folder counts. A folder's name identifies its contents
and stays the same at every try, so a consumer that records the folders it has read reads every row once:

    <path>/<table>/<table id>/<lake id>-<sink id>-e<epoch>/<first sequence>-<last sequence>/

Units of one table, sink and epoch are applied in the order of their names; a range without rows has no folder. A new
epoch sends again from its chosen start. Reading changes nothing; a unit that differs from its manifest is Corrupt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from floodmark.errors import Corrupt, NotFound, TooNew
from floodmark.storage import Storage, join, root_location

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema

    from floodmark.rows.reading.parts import PartObject

MANIFEST = "_unit.json"
MANIFEST_FORMAT = 1
_BATCH_ROWS = 64 * 1024


@dataclass(frozen=True)
class FileUnit:
    """A complete unit: the contents of `_unit.json`, and its folder."""

    folder: str
    lake: str
    sink: str
    sink_id: str
    epoch: int
    table: str
    table_id: str
    version: int
    since: int
    until: int
    format: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    # Iceberg's JSON of the table's columns among them, with field ids.
    schema_json: str
    objects: tuple[PartObject, ...]
    # The unit's identity; empty if an older Floodmark opened it.
    unit: str = ""

    @property
    def rows(self) -> int:
        """Deletions count too."""
        return sum(one.rows for one in self.objects)

    @property
    def deletions(self) -> int:
        return sum(one.deletions for one in self.objects)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.objects)

    @property
    def locations(self) -> list[str]:
        """Locations of the objects, in the order of their rows."""
        return [join(self.folder, one.name) for one in self.objects]

    @property
    def order(self) -> tuple[str, str, str, str, int, int]:
        """Units are applied in this order."""
        return self.table, self.table_id, self.lake, self.sink_id, self.epoch, self.since

    def to_json(self) -> str:
        values = {
            "floodmark_unit": MANIFEST_FORMAT,
            **({"unit": self.unit} if self.unit else {}),
            "lake": self.lake,
            "sink": self.sink,
            "sink_id": self.sink_id,
            "epoch": self.epoch,
            "table": self.table,
            "table_id": self.table_id,
            "version": self.version,
            "since": self.since,
            "until": self.until,
            "format": self.format,
            "columns": list(self.columns),
            "key": list(self.key),
            "schema": json.loads(self.schema_json),
            "rows": self.rows,
            "deletions": self.deletions,
            "bytes": self.size_bytes,
            "objects": [
                {
                    "name": one.name,
                    "rows": one.rows,
                    "deletions": one.deletions,
                    "bytes": one.size_bytes,
                    "sha256": one.sha256,
                }
                for one in self.objects
            ],
        }
        return json.dumps(values, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, folder: str, text: bytes) -> FileUnit:
        from floodmark.rows.reading.parts import PartObject

        location = join(folder, MANIFEST)
        try:
            values = json.loads(text)
            number = int(values["floodmark_unit"])
            if number > MANIFEST_FORMAT:
                raise TooNew("a unit was written by a newer Floodmark", manifest=location, format=number)
            objects = tuple(
                PartObject(one["name"], one["rows"], one["deletions"], one["bytes"], one["sha256"])
                for one in values["objects"]
            )
            return cls(
                folder,
                **{
                    name: values[name]
                    for name in ("lake", "sink", "sink_id", "epoch", "table", "table_id", "version", "since", "until")
                },
                format=values["format"],
                columns=tuple(values["columns"]),
                key=tuple(values["key"]),
                schema_json=json.dumps(values["schema"]),
                objects=objects,
                unit=str(values.get("unit", "")),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise Corrupt("the manifest of a unit cannot be parsed", manifest=location, cause=error) from error


def read_units(path: str, storage: Storage | None = None, table: str | None = None) -> list[FileUnit]:
    """The complete units below a files sink's path, of one table or of all, in the order to apply them.

    Units that are being written or were left incomplete are not included. `storage` is needed for a bucket with an
    endpoint of its own.
    """
    storage = storage or Storage()
    folders = [
        entry.location.removesuffix(f"/{MANIFEST}")
        for entry in storage.list(root_location(path))
        if entry.location.endswith(f"/{MANIFEST}")
    ]
    units = [FileUnit.from_json(folder, storage.read(join(folder, MANIFEST))) for folder in folders]
    return sorted((unit for unit in units if table in (None, unit.table)), key=lambda unit: unit.order)


def read_rows(unit: FileUnit, storage: Storage | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of one unit in order, `_change` and `_seq` last. Each object is compared with its digest first.

    Memory is bounded by one object.
    """
    storage = storage or Storage()
    for one, location in zip(unit.objects, unit.locations, strict=True):
        data = _read_object(storage, location, one)
        rows = 0
        for batch in _parquet(data) if unit.format == "parquet" else _jsonl(data, unit):
            rows += len(batch)
            yield batch
        if rows != one.rows:
            raise Corrupt("an object of a unit has other rows", object=location, rows=rows, rows_expected=one.rows)


def _read_object(storage: Storage, location: str, expected: PartObject) -> bytes:
    try:
        data = storage.read(location)
    except NotFound as error:
        raise Corrupt("an object of a complete unit is gone", object=location) from error
    if hashlib.sha256(data).hexdigest() != expected.sha256:
        raise Corrupt(
            "an object of a unit is not what was written", object=location, size_bytes=len(data), sha256=expected.sha256
        )
    return data


def _parquet(data: bytes) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(pa.BufferReader(data)) as parquet:
        yield from parquet.iter_batches(batch_size=_BATCH_ROWS)


# ── JSON lines, with the types that the manifest names ──


def _jsonl(data: bytes, unit: FileUnit) -> Iterator[pa.RecordBatch]:
    from floodmark.rows.convert import table_shape
    from floodmark.rows.json.json_lines import python_values
    from floodmark.rows.staging.dicts import rows_to_table

    shape = table_shape(_all_columns(unit).model_dump_json(), True)
    lines = data.splitlines()
    for start in range(0, len(lines), _BATCH_ROWS):
        rows = [json.loads(line) for line in lines[start : start + _BATCH_ROWS]]
        python_values(rows, shape.columns)
        yield from rows_to_table(rows, shape).combine_chunks().to_batches()


def _all_columns(unit: FileUnit) -> Schema:
    """The unit's columns as a table. All of them may be null, since a deletion has only its key."""
    from pyiceberg.schema import Schema
    from pyiceberg.types import NestedField, StringType

    table = Schema.model_validate_json(unit.schema_json)
    by_name = {one.name: one.model_copy(update={"required": False}) for one in table.fields}
    extra = NestedField(table.highest_field_id + 1, "_change", StringType(), required=False)
    return Schema(*(by_name.get(name, extra) for name in unit.columns))
