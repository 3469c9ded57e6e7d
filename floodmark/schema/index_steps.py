"""The indexes that a file wants against those of a table, as steps. Pure.

An index is no part of the table's state: these steps lose no data and make no version. A column that begins to refer
to another table gets a value index with its reference, and keeps it whatever the file lists.
"""

from __future__ import annotations

from dataclasses import replace

from pyiceberg.schema import Schema

from floodmark.catalog.indexes import KEY, VALUE, IndexRow, WantedIndex
from floodmark.commit.references import no_reference
from floodmark.errors import Invalid
from floodmark.index.wanted import names_of, value_index, wanted_index, wanted_key
from floodmark.rows.schema import user_fields
from floodmark.schema.step import ADD_INDEX, DROP_INDEX, SAFE, Step, refused
from floodmark.schema.table_plan import TablePlan


def with_indexes(plan: TablePlan) -> TablePlan:
    """The plan with what it does to indexes."""
    if plan.drop or plan.rename_to is not None or (plan.shape is None and plan.current is None):
        return plan
    have = {(one.kind, one.field_ids): one for one in (plan.current.indexes if plan.current is not None else ())}
    plan = _with_references(plan, have)
    names = None if plan.wanted is None else plan.wanted.indexes
    if names is None:
        return plan
    schema = plan.final_schema
    wanted: dict[tuple[str, tuple[int, ...]], WantedIndex] = {}
    for on in names:
        try:
            index = wanted_index(plan.name, schema, on)
        except Invalid as error:
            step = refused(plan.name, ADD_INDEX, ", ".join(on), f"index on {', '.join(on)}", str(error), error.advice)
            plan = replace(plan, steps=(*plan.steps, step))
            continue
        wanted[index.kind, index.field_ids] = index
    referring = _referring(plan)
    for place, index in wanted.items():
        if place not in have and index == wanted_key(schema):
            continue  # the key has one by itself
        if index not in plan.declared and (place not in have or not have[place].is_live):
            plan = _with_step(plan, ADD_INDEX, "index on", index)
            plan = replace(plan, declared=(*plan.declared, index))
    for place, row in have.items():
        if row.kind == VALUE and place not in wanted and row.field_ids not in referring:
            plan = _with_step(plan, DROP_INDEX, "no index on", row.wanted)
            plan = replace(plan, undeclared=(*plan.undeclared, row.wanted))
    return plan


def _with_references(plan: TablePlan, have: dict[tuple[str, tuple[int, ...]], IndexRow]) -> TablePlan:
    """With a value index for each column that begins to refer to a table, unless the column has an index."""
    made = []
    for link in plan.links:
        index = value_index(plan.name, [plan.final_schema.find_field(link.field_id)])
        key = wanted_key(plan.final_schema)
        if (VALUE, index.field_ids) not in have and (key is None or key.field_ids != index.field_ids):
            made.append(index)
    return replace(plan, declared=(*plan.declared, *made)) if made else plan


def _referring(plan: TablePlan) -> set[tuple[int, ...]]:
    """The columns that refer to other tables after the plan, each as the fields of its index."""
    now = () if plan.current is None else plan.current.references
    stay = {one.field_id for one in now if plan.properties.get(no_reference(one)[0][0]) != ""}
    return {(field_id,) for field_id in (*stay, *(link.field_id for link in plan.links))}


def _with_step(plan: TablePlan, action: str, text: str, index: WantedIndex) -> TablePlan:
    name = ", ".join(_names(plan, index))
    return replace(plan, steps=(*plan.steps, Step(plan.name, action, name, SAFE, f"{text} {name}")))


def _names(plan: TablePlan, index: WantedIndex) -> tuple[str, ...]:
    """The columns of an index, which the table may have lost."""
    if index.kind == KEY:
        return names_of(plan.final_schema, index.field_ids)
    schemas: list[Schema] = [] if plan.current is None else list(plan.current.metadata.schemas)
    known = {field.field_id: field.name for schema in schemas for field in user_fields(schema)}
    known |= {field.field_id: field.name for field in plan.final_schema.fields}
    return tuple(known.get(one, f"column {one}") for one in index.field_ids)
