"""The verbs of a lake, one operation each: begin, stage, publish; an error is undone before it is raised."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from floodmark.catalog.adopt import read_foreign
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.riders import AlreadyCommitted
from floodmark.errors import Invalid
from floodmark.model import Commit
from floodmark.rows.duplicates import find_duplicates
from floodmark.rows.schema import check_columns
from floodmark.write.change import Change
from floodmark.write.intent import Intent
from floodmark.write.prune import key_fields
from floodmark.write.shape import TableShape, check_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GetSpark = Callable[[], "SparkSession"]


def write(catalog: Catalog, intent: Intent, get_spark: GetSpark, table: str, data: Any, **options: Any) -> Commit:
    """One step on one table: append, merge, delete or overwrite, by the intent's kind."""
    try:
        change = Change.begin(catalog, intent, get_spark, [table])
    except AlreadyCommitted as already:
        return catalog.history.commit(already.version, outcome="already_committed")
    try:
        change.write(intent.kind, table, data, **options)
        return change.publish()
    except BaseException as error:  # noqa: BLE001 - undo raises it again, or knows better
        return change.undo(error)


def create(catalog: Catalog, intent: Intent, get_spark: GetSpark, shape: TableShape) -> Commit:
    change = Change.begin(catalog, intent, get_spark)
    try:
        change.create_table(shape)
        return change.publish()
    except BaseException as error:  # noqa: BLE001 - undo raises it again, or knows better
        return change.undo(error)


def adopt(
    catalog: Catalog, intent: Intent, get_spark: GetSpark, name: str, location: str, key: Sequence[str]
) -> Commit:
    """Take a foreign Iceberg table over. What the lake could not hold is refused before anything exists."""
    check_name(name)
    adopted = read_foreign(catalog.files, location, key, table_id=str(uuid.uuid4()))
    schema = adopted.metadata.schema()
    check_columns(schema)
    if key:
        head_files = [
            entry.data_file.file_path
            for manifest in catalog.files.manifests(adopted.manifest_list)
            for entry in catalog.files.entries(manifest)
        ]
        twice = find_duplicates(catalog.storage, head_files, key_fields(schema))
        if twice:
            raise Invalid(
                "the table's rows hold a key more than once",
                table=name,
                examples="; ".join(twice),
                advice="Adopt it without a key, or with columns that are unique.",
            )
    change = Change.begin(catalog, intent, get_spark)
    try:
        change.adopt(name, adopted)
        return change.publish()
    except BaseException as error:  # noqa: BLE001 - undo raises it again, or knows better
        return change.undo(error)


def check_order(on_duplicate: str | None, order: str | None) -> str | None:
    """The column that decides between rows of one key, if the caller wants that."""
    if on_duplicate not in (None, "last"):
        raise Invalid("on_duplicate is not known", on_duplicate=on_duplicate, advice='Use "last", or leave it out.')
    if (on_duplicate is None) != (order is None):
        raise Invalid(
            'on_duplicate="last" and order go together', advice="Name the column that tells which row is the last."
        )
    return order
