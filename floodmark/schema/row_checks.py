"""Checks of rows before a plan is published: duplicate keys, nulls, values that refer to nothing.

Reads only, one column or the key of each file, in bounded memory (I14). The result holds for the given files; the
publish ensures that no other file was added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pyiceberg.types import NestedField, PrimitiveType

from floodmark.commit.catalog import Catalog
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.rows.project import read_file
from floodmark.rows.reading.references import missing_values
from floodmark.rows.staging.duplicates import find_duplicates
from floodmark.schema.plan import Plan
from floodmark.schema.step import ADD_KEY, ADD_REFERENCE, REFUSED, Step
from floodmark.schema.table_plan import TablePlan
from floodmark.storage import Storage

Files = Mapping[str, Sequence[LiveFile]]


def checked_plan(catalog: Catalog, plan: Plan) -> Plan:
    """The plan after a check of the current rows: steps that they do not allow are refused."""
    if not any(table.looks for table in plan.tables):
        return plan
    files = {
        table.name: live_files(catalog.files, table.current.head, table.current.schema)
        for table in plan.tables
        if table.current is not None
    }
    return plan.with_refused(refused_by_rows(catalog.storage, plan, files))


def refused_by_rows(storage: Storage, plan: Plan, files: Files) -> list[Step]:
    """The steps that the rows in these files do not allow, with examples."""
    found: list[Step] = []
    for table in plan.tables:
        mine = files.get(table.name, ())
        if table.current is None or not mine:
            continue
        with_nulls = _with_nulls(storage, table, mine)
        found += with_nulls
        if table.unique and not with_nulls:
            found += _repeated(storage, table, mine)
        found += _dangling(storage, plan, table, files)
    return found


def _with_nulls(storage: Storage, table: TablePlan, files: Sequence[LiveFile]) -> list[Step]:
    found = []
    for field_id in dict.fromkeys(table.no_nulls):
        column = table.final_schema.find_field(field_id)
        rows = sum(_nulls(storage, file, column) for file in files)
        if rows:
            reason, way = f"{column.name} is null in {rows} rows", "Fill them or delete them first."
            is_key = field_id in table.final_schema.identifier_field_ids
            found += [
                replace(step, kind=REFUSED, reason=reason, way=way)
                for step in table.steps
                if (step.action == ADD_KEY if is_key and table.unique else step.column == column.name)
            ]
    return found


def _nulls(storage: Storage, file: LiveFile, column: NestedField) -> int:
    """How many rows of the file have no value; from its counts, else by reading."""
    if isinstance(column.field_type, PrimitiveType):
        values = (file.data_file.value_counts or {}).get(column.field_id)
        nulls = (file.data_file.null_value_counts or {}).get(column.field_id)
        if values == file.rows and nulls is not None:
            return int(nulls)
    optional = NestedField(column.field_id, column.name, column.field_type, required=False)
    return sum(batch.column(0).null_count for batch in read_file(storage, file.path, [optional]))


def _repeated(storage: Storage, table: TablePlan, files: Sequence[LiveFile]) -> list[Step]:
    schema = table.final_schema
    keys = [schema.find_field(field_id) for field_id in schema.identifier_field_ids]
    examples = find_duplicates(storage, [file.path for file in files], keys)
    if not examples:
        return []
    reason = f"keys exist more than once: {'; '.join(examples)}"
    way = "Delete the duplicate rows, or choose another key."
    return [replace(step, kind=REFUSED, reason=reason, way=way) for step in table.steps if step.action == ADD_KEY]


def _dangling(storage: Storage, plan: Plan, table: TablePlan, files: Files) -> list[Step]:
    """Columns with values that do not exist in the table which they are to refer to."""
    found: list[Step] = []
    known = {field.field_id for field in table.current.schema.fields} if table.current is not None else set()
    for link in table.links:
        if link.field_id not in known:
            continue  # a new column: it has no values yet
        column = table.final_schema.find_field(link.field_id)
        parent = next(one for one in plan.tables if one.name == link.parent)
        missing = missing_values(
            storage,
            [file.path for file in files.get(table.name, ())],
            column,
            files.get(link.parent, ()),
            parent.final_schema.find_field(link.parent_field_id),
        )
        if missing.count:
            reason = f"{missing.count} values are not in {link.parent}: {', '.join(missing.examples)}"
            way = f"Add them to {link.parent}, or delete the rows that refer to them."
            found += [
                replace(step, kind=REFUSED, reason=reason, way=way)
                for step in table.steps
                if step.action == ADD_REFERENCE and step.column == column.name
            ]
    return found
