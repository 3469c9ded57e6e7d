"""DuckDB with its Iceberg reader, and official Iceberg Java, for the tests that let them read our tables."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tests.interop.iceberg_java import iceberg_java

__all__ = ["duck", "iceberg_java"]


def extension(name: str) -> str:
    """The file of a DuckDB extension, from the PyPI package that ships it: nothing is downloaded."""
    package = importlib.util.find_spec(f"duckdb_extension_{name}")
    assert package is not None, f"the package duckdb-extension-{name} is not installed"
    assert package.origin is not None
    return str(Path(package.origin).parent / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension")


@pytest.fixture(scope="module")
def duck() -> Iterator[duckdb.DuckDBPyConnection]:
    offline = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    with duckdb.connect(config=offline) as connection:
        # The iceberg extension reads manifests with the avro extension, so that one comes first.
        for name in ("avro", "iceberg"):
            connection.execute(f"LOAD '{extension(name)}'")
        connection.execute("SET TimeZone = 'UTC'")
        yield connection
