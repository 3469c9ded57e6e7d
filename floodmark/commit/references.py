"""References between tables: a column whose values are keys of another table, recorded in both tables' properties.

By table and field ids, so that a rename changes nothing. The child's property records where its column points; the
parent's records which columns point at it, so that a writer of either table has both without reading the others. A
property with an empty text: the reference existed, and does not any more. Names are kept for messages only. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pyiceberg.schema import Schema

from floodmark.errors import Corrupt

REFERENCE_PREFIX = "floodmark.reference."
REFERRER_PREFIX = "floodmark.referrer."


@dataclass(frozen=True)
class Reference:
    """The column `field_id` of the table `table_id` holds keys of the table `parent`: its column `parent_field_id`."""

    table_id: str
    field_id: int
    parent: str
    parent_id: str
    parent_field_id: int


@dataclass(frozen=True)
class Referrer:
    """A column of another table (or of the same one) that holds keys of this table."""

    table: str
    table_id: str
    field_id: int


def reference_property(reference: Reference) -> tuple[str, str]:
    """The property of the child: key and value."""
    parent = {"table": reference.parent, "table_id": reference.parent_id, "field_id": reference.parent_field_id}
    return f"{REFERENCE_PREFIX}{reference.field_id}", json.dumps(parent)


def referrer_property(reference: Reference, table: str) -> tuple[str, str]:
    """The property of the parent: key and value. `table` is the child's name."""
    return f"{REFERRER_PREFIX}{reference.table_id}.{reference.field_id}", json.dumps({"table": table})


def no_reference(reference: Reference) -> tuple[tuple[str, str], tuple[str, str]]:
    """The properties of a child and of its parent once the column refers to nothing any more."""
    return (
        (f"{REFERENCE_PREFIX}{reference.field_id}", ""),
        (f"{REFERRER_PREFIX}{reference.table_id}.{reference.field_id}", ""),
    )


def references_of(properties: Mapping[str, str], schema: Schema, table_id: str) -> tuple[Reference, ...]:
    """Where the columns of a table with this schema point, by the order of their ids."""
    there = {column.field_id for column in schema.fields}
    found = []
    for key, text in properties.items():
        if key.startswith(REFERENCE_PREFIX) and text:
            try:
                field_id, parent = int(key.removeprefix(REFERENCE_PREFIX)), json.loads(text)
                reference = Reference(
                    table_id, field_id, str(parent["table"]), str(parent["table_id"]), int(parent["field_id"])
                )
            except (ValueError, KeyError, TypeError) as error:
                raise _unreadable(key, error) from error
            if field_id in there:
                found.append(reference)
    return tuple(sorted(found, key=lambda one: one.field_id))


def referrers_of(properties: Mapping[str, str]) -> tuple[Referrer, ...]:
    """The columns that point at a table, by the names of their tables and their ids."""
    found = []
    for key, text in properties.items():
        if key.startswith(REFERRER_PREFIX) and text:
            try:
                table_id, _, field_id = key.removeprefix(REFERRER_PREFIX).rpartition(".")
                found.append(Referrer(str(json.loads(text)["table"]), table_id, int(field_id)))
            except (ValueError, KeyError, TypeError) as error:
                raise _unreadable(key, error) from error
    return tuple(sorted(found, key=lambda one: (one.table, one.field_id)))


def _unreadable(key: str, error: Exception) -> Corrupt:
    return Corrupt("a table's property about a reference cannot be read", property=key, cause=error)
