"""Planning a read: from lake.read to a DataFrame, before any row moves. Spark is warm.

First: a lake just opened, with nothing remembered of the table's manifests. Again: the same lake asked once more.
Spark's own listing of the same folder, with the schema given, is measured in turns with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pyiceberg.manifest import clear_manifest_cache

import floodmark
from bench.measure import Line, in_turns, ratio, timed, times_in_turns, took
from bench.workshop import SCHEMA, TABLE, Workshop, arrow_rows
from floodmark.commit.file_columns import REMEMBERED
from floodmark.lake import Lake

MANY = "many"


def run(shop: Workshop) -> Iterator[Line]:
    yield from _many_files(shop)
    yield from _old_version(shop)


def _many_files(shop: Workshop) -> Iterator[Line]:
    files = shop.sizes.files
    shop.say(f"making a table of {files} files")
    with shop.new_lake("reading") as made:
        made.create_table(MANY, SCHEMA, partition=["k"])
        made.append(MANY, arrow_rows(files * 5, keys=files))
        path = made.location
        data = f"{made.catalog.files.metadata(made.catalog.history.head(MANY).metadata_location).location}/data"
        if made.catalog.history.head(MANY).files != files:
            raise RuntimeError(f"the table has {made.catalog.history.head(MANY).files} files, not {files}")
    measure = _first(shop, path, lambda lake: lake.read(MANY))
    measure()
    first, listing = times_in_turns(
        shop.sizes.read_repeats,
        measure,
        lambda: timed(lambda: shop.spark.read.schema(SCHEMA).option("recursiveFileLookup", "true").parquet(data)),
    )
    with _open(shop, path) as lake:
        lake.read(MANY)
        (again,) = in_turns(shop.sizes.read_repeats, lambda: lake.read(MANY))
    yield took(f"{files:,} files, first", first)
    yield took(f"{files:,} files, again", again)
    yield took(f"{files:,} files, spark.read.parquet(folder)", listing)
    yield ratio("first, lake against folder", first, listing)


def _old_version(shop: Workshop) -> Iterator[Line]:
    aged = shop.aged
    version = aged.first_version + shop.sizes.early_at - 1
    path = aged.lake.location
    head, old, catalog_only = times_in_turns(
        shop.sizes.read_repeats,
        _first(shop, path, lambda lake: lake.read(TABLE)),
        _first(shop, path, lambda lake: lake.read(TABLE, version=version)),
        _first(shop, path, lambda lake: lake.catalog.history.tables_at(version)),
    )
    commits = shop.sizes.late.stop
    yield took(f"head after {commits} commits, first", head, note=f"{commits} files")
    yield took(f"version of commit {shop.sizes.early_at} after {commits}, first", old, note="read by its manifest list")
    yield took("  the catalog's part of it", catalog_only)


def _first(shop: Workshop, path: str, ask: Callable[[Lake], object]) -> Callable[[], float]:
    """Seconds of one question to a lake that was just opened."""

    def measure() -> float:
        clear_manifest_cache()
        REMEMBERED.clear()
        with _open(shop, path) as lake:
            return timed(lambda: ask(lake))

    return measure


def _open(shop: Workshop, path: str) -> Lake:
    return floodmark.open(path, read_only=True, spark=shop.spark)
