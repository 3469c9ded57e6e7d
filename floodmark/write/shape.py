"""The shape of a table that is about to be created: checked as a whole before anything is begun."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortOrder

from floodmark.commit.fills import FILL_PREFIX
from floodmark.commit.metadata import GC_BEFORE, GC_ENABLED, GC_OFF
from floodmark.commit.references import REFERENCE_PREFIX, REFERRER_PREFIX
from floodmark.errors import Invalid
from floodmark.rows.layout import partition_spec, sort_order
from floodmark.rows.schema import table_schema
from floodmark.rows.staging.file_options import FileOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from floodmark.rows.frames import StructType

# The columns of a new table, as callers give them; a text is Spark DDL.
SchemaLike: TypeAlias = "StructType | pa.Schema | Schema | str"

RESERVED_PREFIXES = (FILL_PREFIX, REFERENCE_PREFIX, REFERRER_PREFIX, GC_BEFORE)
TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


@dataclass(frozen=True)
class TableShape:
    name: str
    schema: Schema
    spec: PartitionSpec
    sort: SortOrder
    properties: Mapping[str, str]


def plan_table(
    name: str,
    schema: SchemaLike,
    *,
    key: Sequence[str] = (),
    partition: Sequence[str] = (),
    sort: Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
) -> TableShape:
    """`schema`: Spark StructType, Arrow schema, PyIceberg schema, or Spark DDL text."""
    check_name(name)
    _check_properties(name, properties or {})
    iceberg = table_schema(schema, key)
    return TableShape(name, iceberg, partition_spec(iceberg, partition), sort_order(iceberg, sort), properties or {})


def check_name(name: str) -> None:
    if not TABLE_NAME.fullmatch(name):
        raise Invalid(
            "invalid table name",
            table=repr(name),
            advice="Use letters, digits and underscores, not starting with a digit.",
        )


def _check_properties(name: str, properties: Mapping[str, str]) -> None:
    """Refuse properties that only Floodmark sets, clean-up by other engines, and what no writer understands."""
    if reserved := sorted(key for key in properties if key.startswith(RESERVED_PREFIXES)):
        raise Invalid(
            "these properties are Floodmark's own",
            table=name,
            properties=", ".join(reserved),
            advice="Leave them out; `floodmark backfill column` fills a column, `floodmark apply` makes a reference.",
        )
    if properties.get(GC_ENABLED, GC_OFF) != GC_OFF:
        raise Invalid(
            "other engines must not clean up a table of the lake",
            table=name,
            property=f"{GC_ENABLED}={properties[GC_ENABLED]}",
            advice=f"Leave {GC_ENABLED} out: the lake's own history needs files that the table's metadata does not "
            "name. `floodmark maintain` cleans up.",
        )
    FileOptions.of(properties)
