"""The layout of new rows: partition specs and sort orders, wanted against existing. Pure.

Compared by their meaning (source and transform, source and direction), never by names or ids. A spec or order that the
table had before is used again; a partition field that it had keeps its id and its name.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import SortDirection, SortOrder

from floodmark.rows.layout import partition_spec, sort_order


def changed_spec(
    metadata: TableMetadata, current: PartitionSpec, schema: Schema, wanted: Sequence[str]
) -> PartitionSpec | None:
    """The spec with its ids, if it differs from the present one; `Invalid` if such a spec cannot exist."""
    spec = partition_spec(schema, wanted)
    if _parts(spec) == _parts(current):
        return None
    for known in metadata.specs().values():
        if _parts(known) == _parts(spec):
            return known
    fields = [part for known in metadata.specs().values() for part in known.fields]
    known_fields = {(part.source_id, str(part.transform)): part for part in reversed(fields)}
    next_id = max([PARTITION_FIELD_ID_START - 1, metadata.last_partition_id or 0, *(one.field_id for one in fields)])
    taken = {part.name: (part.source_id, str(part.transform)) for part in fields}
    made: list[PartitionField] = []
    for part in spec.fields:
        same = known_fields.get((part.source_id, str(part.transform)))
        if same is not None and all(same.name != one.name for one in made):
            made.append(same)
            continue
        next_id += 1
        name, mine = part.name, (part.source_id, str(part.transform))
        number = 2
        while taken.get(name, mine) != mine or any(one.name == name for one in made):
            name, number = f"{part.name}_{number}", number + 1
        made.append(PartitionField(part.source_id, next_id, part.transform, name))
    return PartitionSpec(*made, spec_id=max(metadata.specs()) + 1)


def _parts(spec: PartitionSpec) -> list[tuple[int, str]]:
    return [(part.source_id, str(part.transform)) for part in spec.fields]


def changed_sort(
    metadata: TableMetadata, current: SortOrder, schema: Schema, wanted: Sequence[str]
) -> SortOrder | None:
    """The order with its id, if it differs from the present one."""
    order = sort_order(schema, wanted)
    if _keys(order) == _keys(current):
        return None
    for known in metadata.sort_orders:
        if _keys(known) == _keys(order):
            return known
    if not order.fields:
        return SortOrder(order_id=0)
    return SortOrder(*order.fields, order_id=max(1, *(known.order_id + 1 for known in metadata.sort_orders)))


def _keys(order: SortOrder) -> list[tuple[int, SortDirection, str]]:
    return [(part.source_id, part.direction, str(part.transform)) for part in order.fields]
