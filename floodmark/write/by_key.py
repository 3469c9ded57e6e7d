"""Deleting by keys: the keys to delete arrive as files of key columns, and are matched like those of a merge.

The key files are staged in the operation's own folder and never named by its commit: a commit records as deleted only
keys that existed. A crash leaves them to recovery, like everything that was staged (I3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import VoidTransform

from floodmark.rows.keys import KeySet
from floodmark.rows.rewriting.position_text import pack_positions
from floodmark.rows.rewriting.rewrite import Source
from floodmark.rows.staging.stage import StageTarget
from floodmark.storage import Storage
from floodmark.write.prune import key_fields


def keys_target(target: StageTarget, metadata: TableMetadata, schema: Schema, spec_id: int) -> StageTarget:
    """Where keys of a table are staged: its key columns alone, in its partitions if a key alone decides its own."""
    fields = key_fields(schema)
    keys = Schema(*fields, identifier_field_ids=[field.field_id for field in fields])
    return replace(
        target,
        schema_json=keys.model_dump_json(),
        spec_json=_keys_spec(metadata.specs()[spec_id], schema).model_dump_json(),
        sort_json=None,
        fill_missing=False,
    )


def _keys_spec(spec: PartitionSpec, schema: Schema) -> PartitionSpec:
    key = set(schema.identifier_field_ids)
    sources = {field.source_id for field in spec.fields if not isinstance(field.transform, VoidTransform)}
    if not sources or not sources.issubset(key):
        return UNPARTITIONED_PARTITION_SPEC
    # A void field is null whatever its column is, which is not among the keys.
    fields = [
        field if field.source_id in key else field.model_copy(update={"source_id": min(key)}) for field in spec.fields
    ]
    return PartitionSpec(*fields, spec_id=spec.spec_id)


def rows_of_keys(storage: Storage, files: Sequence[Source], keys: Sequence[str], schema: Schema) -> list[Source]:
    """Those of `files` that hold one of the keys, with the positions of these rows: no more of them than keys."""
    known = KeySet(storage, keys, key_fields(schema))
    found = ((file, known.match(storage, file.path).positions) for file in files)
    return [replace(file, packed=(pack_positions(positions),)) for file, positions in found if len(positions)]
