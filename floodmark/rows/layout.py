"""How a table's rows are laid out in files: `day(ts)`, `bucket(16, id)`, `ts desc` as Iceberg's specs.

Text in, Iceberg's partition spec or sort order out, or `Invalid` with the column and the nearest name that exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    VoidTransform,
    YearTransform,
)
from pyiceberg.types import NestedField, PrimitiveType

from floodmark.errors import Invalid
from floodmark.rows.primitives import can_identify
from floodmark.rows.schema import require_name, user_fields

_PLAIN: dict[str, Callable[[], Transform[Any, Any]]] = {
    "identity": IdentityTransform,
    "year": YearTransform,
    "month": MonthTransform,
    "day": DayTransform,
    "hour": HourTransform,
    "void": VoidTransform,
}
_SIZED: dict[str, Callable[[int], Transform[Any, Any]]] = {"bucket": BucketTransform, "truncate": TruncateTransform}
_SUFFIX = {"identity": "", "void": "_null", "truncate": "_trunc"}
_CALL = re.compile(r"\s*(\w+)\s*\(\s*(?:(\d+)\s*,\s*)?(.+?)\s*\)\s*")
_ADVICE = "Write a column, year(c), month(c), day(c), hour(c), bucket(16, c), truncate(4, c) or void(c)."


def partition_spec(schema: Schema, partition: Sequence[str]) -> PartitionSpec:
    """Iceberg's partition spec for texts like `day(ts)`, in their order."""
    fields: list[PartitionField] = []
    for text in _texts(partition, "partition"):
        word, transform, source = _transform(schema, text)
        suffix = _SUFFIX.get(word, f"_{word}")
        name = f"{source.name}{suffix}"
        if any(name == field.name for field in fields):
            raise Invalid("a partition is given twice", partition=text, advice="Give each partition once.")
        if suffix and name in schema.column_names:
            raise Invalid(
                "the partition's name is the name of a column",
                partition=text,
                column=name,
                advice="Rename that column.",
            )
        fields.append(PartitionField(source.field_id, PARTITION_FIELD_ID_START + len(fields), transform, name))
    return PartitionSpec(*fields, spec_id=0)


def _texts(given: Sequence[str], role: str) -> list[str]:
    if isinstance(given, str):
        raise Invalid(f"{role} is a list", given=given, advice=f'Write {role}=["{given}"].')
    return list(given)


def _transform(schema: Schema, text: str) -> tuple[str, Transform[Any, Any], NestedField]:
    names = [field.name for field in user_fields(schema)]
    word, size, name = "identity", None, text.strip()
    if name not in names and (call := _CALL.fullmatch(text)):
        word, size, name = call[1].lower(), call[2], call[3]
    name = name[1:-1] if name.startswith("`") and name.endswith("`") else name
    if word not in _PLAIN and word not in _SIZED:
        raise Invalid("there is no such partition transform", partition=text, transform=word, advice=_ADVICE)
    if (word in _SIZED) != (size is not None and int(size) > 0):
        raise Invalid("this partition transform has the wrong arguments", partition=text, advice=_ADVICE)
    source = schema.find_field(require_name(name, names, "partition"))
    transform = _SIZED[word](int(size)) if size is not None else _PLAIN[word]()
    kind = source.field_type
    if not can_identify(kind) or not transform.can_transform(kind):
        raise Invalid(
            "this partition transform does not fit the type of its column",
            column=name,
            type=kind,
            transform=word,
            advice="Times support year, month, day and hour; whole numbers, decimals, text and binary truncate.",
        )
    return word, transform, source


def sort_order(schema: Schema, sort: Sequence[str]) -> SortOrder:
    """Iceberg's sort order for texts like `ts` and `id desc`."""
    fields: list[SortField] = []
    names = [field.name for field in user_fields(schema)]
    for text in _texts(sort, "sort"):
        name, direction = text.strip(), "asc"
        if name not in names and (match := re.fullmatch(r"(.+?)\s+(asc|desc)", name, re.IGNORECASE)):
            name, direction = match[1], match[2].lower()
        name = name[1:-1] if name.startswith("`") and name.endswith("`") else name
        source = schema.find_field(require_name(name, names, "sort"))
        if not isinstance(source.field_type, PrimitiveType):
            raise Invalid(
                "rows cannot be sorted by this column",
                column=name,
                type=source.field_type,
                advice="Use a plain column.",
            )
        descending = direction == "desc"
        fields.append(
            SortField(
                source_id=source.field_id,
                transform=IdentityTransform(),
                direction=SortDirection.DESC if descending else SortDirection.ASC,
                null_order=NullOrder.NULLS_LAST if descending else NullOrder.NULLS_FIRST,
            )
        )
    return SortOrder(*fields, order_id=1 if fields else 0)
