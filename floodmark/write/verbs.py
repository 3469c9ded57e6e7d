"""The verbs of a lake that write rows or create tables: each a plan, run by one publication."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from floodmark.commit.adopt import read_foreign
from floodmark.commit.intent import Intent
from floodmark.commit.publication import publish
from floodmark.engine import Engine
from floodmark.errors import Invalid
from floodmark.model import Commit
from floodmark.rows.schema import check_columns
from floodmark.rows.staging.duplicates import find_duplicates
from floodmark.write.change import Change
from floodmark.write.options import DEFAULT, WriteOptions
from floodmark.write.prune import key_fields
from floodmark.write.shape import TableShape, check_name


def write(engine: Engine, intent: Intent, table: str, data: Any, options: WriteOptions = DEFAULT) -> Commit:
    """One step on one table: append, merge, delete or overwrite, by the intent's kind."""

    def fill(change: Change) -> None:
        change.write(intent.kind, table, data, options)

    return publish(engine.catalog, intent, Change(engine, intent, fill, [table]))


def create(engine: Engine, intent: Intent, shape: TableShape) -> Commit:
    return publish(engine.catalog, intent, Change(engine, intent, lambda change: change.create_table(shape)))


def adopt(engine: Engine, intent: Intent, name: str, location: str, key: Sequence[str]) -> Commit:
    """Adopt a foreign Iceberg table. A table that the lake cannot hold is refused before anything exists."""
    catalog = engine.catalog
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
    return publish(catalog, intent, Change(engine, intent, lambda change: change.adopt(name, adopted)))


def check_order(on_duplicate: str | None, order: str | None) -> str | None:
    """The column that decides between rows of one key, if the caller gave one."""
    if on_duplicate not in (None, "last"):
        raise Invalid("on_duplicate is not known", on_duplicate=on_duplicate, advice='Use "last", or leave it out.')
    if (on_duplicate is None) != (order is None):
        raise Invalid(
            'on_duplicate="last" and order go together', advice="Name the column that tells which row is the last."
        )
    return order
