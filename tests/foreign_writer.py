"""Another writer: plain PyIceberg on the same catalog, which commits past the door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from floodmark.catalog.database import SQLITE_NAME
from tests.conftest import Place

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


@contextmanager
def foreign_catalog(place: Place) -> Iterator[SqlCatalog]:
    uri = place.catalog or f"sqlite:///{place.path}/{SQLITE_NAME}"
    catalog = SqlCatalog("floodmark", uri=uri, warehouse=f"file://{place.path}")
    try:
        yield catalog
    finally:
        catalog.engine.dispose()


def by_another(place: Place, table: str, act: Callable[[Table], object]) -> None:
    """Let another writer change a table."""
    with foreign_catalog(place) as catalog:
        act(catalog.load_table(f"default.{table}"))


def theirs(**named: str) -> pa.Table:
    """theirs(k1="a") is a row with id 1, as PyIceberg wants it."""
    return pa.table({"id": [int(key[1:]) for key in named], "name": list(named.values())}, schema=SCHEMA)
