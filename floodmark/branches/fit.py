"""Whether files written in one shape of a table may be named in another: by their counts, without their rows.

A file that a merge adds again, or keeps while the table gets the other side's shape, is not rewritten, except for
columns that are filled. So it must have a value of every other column that is required now; otherwise rows would be
read with nulls that no writer could have written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, PrimitiveType

from floodmark.branches.view import SideFiles, schema_at
from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import fills_of
from floodmark.commit.live_files import LiveFile
from floodmark.errors import Invalid
from floodmark.model import Head
from floodmark.rows.schema import user_fields


def check_comes(catalog: Catalog, files: SideFiles, some: Iterable[LiveFile]) -> None:
    """`Invalid` if files of the source hold nulls of a column that the target requires."""
    column = column_lacked(some, schema_at(catalog, files.head), files.schema)
    if column is not None:
        raise Invalid(
            "rows of the branch lack a column that is required now",
            table=files.head.table,
            column=column,
            advice="Give these rows a value on the branch that is merged, and merge again.",
        )


def misfit(catalog: Catalog, files: SideFiles, target: Head, staying: Iterable[LiveFile]) -> str | None:
    """The first column of the source's shape for which kept files of the target lack required values.

    Files that the source has too satisfy its shape; columns that are filled get their values during the merge.
    """
    fills = fills_of(catalog.files.metadata(files.head.metadata_location).properties, files.schema)
    filled = {fill.field_id for fill in fills}
    return column_lacked(own_files(files, staying), schema_at(catalog, target), files.schema, filled)


def own_files(files: SideFiles, some: Iterable[LiveFile]) -> list[LiveFile]:
    """Those that the source does not have."""
    shared = {file.path for file in files.whole_source}
    return [file for file in some if file.path not in shared]


def column_lacked(some: Iterable[LiveFile], was: Schema, now: Schema, filled: Collection[int] = ()) -> str | None:
    """The first column that is required now, was not before, and for which a file may have no value."""
    wanted = required_since(was, now, filled)
    return next((field.name for file in some for field in wanted if may_lack(file, field)), None)


def required_since(was: Schema, now: Schema, filled: Collection[int] = ()) -> list[NestedField]:
    """The columns that are required now and were not before, without those that are filled."""
    before = {field.field_id: field for field in user_fields(was)}
    wanted = [field for field in user_fields(now) if field.required and not _required(before, field)]
    return [field for field in wanted if field.field_id not in filled]


def _required(fields: dict[int, NestedField], field: NestedField) -> bool:
    there = fields.get(field.field_id)
    return there is not None and there.required


def may_lack(file: LiveFile, field: NestedField) -> bool:
    """Whether a row of the file may have no value of the column, by the file's counts."""
    if not file.rows:
        return False
    # Counts of a struct or list are those of the values inside it, which prove nothing here.
    if not isinstance(field.field_type, PrimitiveType):
        return True
    counts = (file.data_file.value_counts or {}, file.data_file.null_value_counts or {})
    return any(field.field_id not in one for one in counts) or counts[1][field.field_id] > 0
