"""Checks of a chunk's rows before they are published: the expected number, and inside the chunk's range.

The records of the staged files answer everything, so rows are not read again; only the check that each number occurs
once reads one column. A violation is Invalid, and names the chunk.

A manifest is a JSON file that the source's owner writes: {"2024-01-01..2024-01-02": {"rows": 10, "sha256": "…"}}, by
the chunk's name or its start; a number alone means rows. The digest is of the chunk's files and is compared before they
are read. A chunk that the manifest does not name is not published: it may not be complete yet.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import TypedDict

import numpy as np

from floodmark.backfill.chunks.geometry import Chunk, value_text
from floodmark.backfill.chunks.paths import absolute_path
from floodmark.backfill.chunks.ranges import TableRange
from floodmark.backfill.chunks.sources import HistorySource, PathSource
from floodmark.backfill.chunks.spec import HistorySpec, table_range
from floodmark.errors import Invalid, NotFound, Unavailable
from floodmark.jobs.run import JobContext
from floodmark.json_form import Json
from floodmark.model import FileRecord
from floodmark.rows.project import read_file

_DAY_US = 86_400_000_000
MANIFEST_BYTES_MAX = 64 * 1024 * 1024
_EXPECTED = ("rows", "min_rows", "every_number", "manifest")


class ExpectedRows(TypedDict):
    """The declaration about a chunk, as a spec has it."""

    rows_min: int | None
    rows_max: int | None
    rows_exact: bool
    manifest: str | None


def expected_rows(
    expect: Mapping[str, Json], column: str | None, rows_min: int | None, rows_max: int | None, rows_exact: bool
) -> ExpectedRows:
    """The declaration about a chunk, as a spec has it."""
    for name in expect:
        if name not in _EXPECTED:
            raise Invalid("unknown expectation", name=name, advice=f"Use one of {', '.join(_EXPECTED)}.")
    if expect.get("every_number") and column is None:
        raise Invalid("every_number needs the range column", advice="Name it: --column NAME (in Python column=…).")
    rows, least_rows = _expected_count(expect, "rows"), _expected_count(expect, "min_rows")
    manifest = expect.get("manifest")
    if manifest is not None and not (isinstance(manifest, str) and manifest):
        raise Invalid("the manifest must be a path", manifest=repr(manifest)[:80])
    least = [one for one in (rows_min, least_rows, rows) if one is not None]
    most = [one for one in (rows_max, rows) if one is not None]
    return {
        "rows_min": max(least, default=None),
        "rows_max": min(most, default=None),
        "rows_exact": rows_exact or bool(expect.get("every_number")),
        "manifest": None if manifest is None else absolute_path(manifest),
    }


def _expected_count(expect: Mapping[str, Json], name: str) -> int | None:
    given = expect.get(name)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise Invalid("an expected number of rows must be a whole number", name=name, given=repr(given))
    return given


def read_manifest(context: JobContext, path: str) -> Mapping[str, Json]:
    """The entries of a manifest. Unavailable if the file is missing or half written: a later try reads it again."""
    storage = context.catalog.storage
    try:
        data = storage.read_range(path, 0, MANIFEST_BYTES_MAX + 1)
    except NotFound as error:
        raise Unavailable("the manifest does not exist", manifest=path) from error
    if len(data) > MANIFEST_BYTES_MAX:
        raise Invalid("the manifest is too large", manifest=path, bytes_max=MANIFEST_BYTES_MAX)
    try:
        found = json.loads(data)
    except ValueError as error:
        advice = "Write it under another name, then rename it: then no reader sees half of it."
        raise Unavailable("the manifest is not JSON", manifest=path, cause=error, advice=advice) from error
    if not isinstance(found, dict):
        raise Invalid("a manifest must be a JSON object with the names of chunks as keys", manifest=path)
    return found


class ChunkChecks:
    """The checks for the chunks of one job."""

    def __init__(self, context: JobContext, spec: HistorySpec) -> None:
        self._context = context
        self._spec = spec
        self._manifest: Mapping[str, Json] = {}

    @property
    def are_counted(self) -> bool:
        """Whether the number of rows of a chunk was declared."""
        spec = self._spec
        return any((spec.rows_exact, spec.manifest)) or spec.rows_min is not None or spec.rows_max is not None

    def digest(self, chunk: Chunk, source: HistorySource) -> None:
        """Before a chunk is read: its files are those that the manifest means."""
        wanted = None if self._spec.manifest is None else self._entry(chunk).get("sha256")
        if wanted is None:
            return
        if not isinstance(source, PathSource):
            raise Invalid(
                "the manifest has digests of files, but this source has no files",
                chunk=chunk.name,
                advice="Declare rows in it instead.",
            )
        found = source.digest(chunk)
        if found != str(wanted).lower():
            raise Invalid(
                "the files of a chunk differ from the manifest", chunk=chunk.name, sha256=found, wanted=wanted
            )

    def _entry(self, chunk: Chunk) -> Mapping[str, Json]:
        """The manifest's entry of a chunk; read again if it has none: it may have grown since."""
        names = (chunk.name, chunk.name.partition("..")[0])
        if not any(name in self._manifest for name in names):
            self._manifest = read_manifest(self._context, str(self._spec.manifest))
        found = next((self._manifest[name] for name in names if name in self._manifest), None)
        if found is None:
            raise NotFound(
                "the manifest does not list this chunk",
                chunk=chunk.name,
                manifest=self._spec.manifest,
                advice="Add it under this name, then resume the job.",
            )
        found = {"rows": found} if isinstance(found, int) else found
        if not isinstance(found, Mapping) or not found.keys() & {"rows", "sha256"}:
            raise Invalid(
                "the manifest has neither rows nor sha256 for this chunk", chunk=chunk.name, found=repr(found)[:80]
            )
        return found

    def rows(self, chunk: Chunk, rows: int) -> None:
        spec = self._spec
        low, high = spec.rows_min, spec.rows_max
        if spec.rows_exact:
            start, end = spec.geometry.ends(chunk.number)
            low = high = end - start
        named = None if spec.manifest is None else self._entry(chunk).get("rows")
        if named is not None and rows != named:
            raise Invalid(
                "a chunk has a different number of rows than the manifest declares",
                chunk=chunk.name,
                rows=rows,
                wanted=named,
            )
        if low is not None and rows < low:
            raise Invalid("a chunk has too few rows", chunk=chunk.name, rows=rows, rows_min=low)
        if high is not None and rows > high:
            raise Invalid("a chunk has too many rows", chunk=chunk.name, rows=rows, rows_max=high)

    def every(self, chunk: Chunk, numbers: int) -> None:
        """One row for every number: the rows must have as many different numbers as the chunk."""
        start, end = self._spec.geometry.ends(chunk.number)
        if numbers != end - start:
            column = self._spec.column
            raise Invalid("a chunk lacks numbers", chunk=chunk.name, column=column, numbers=numbers, wanted=end - start)

    def distinct(self, chunk: Chunk, table: str, records: Iterable[FileRecord]) -> None:
        """One row for every number means each number once: this reads the one column of the staged files again."""
        spec = self._spec
        if not spec.rows_exact or spec.column is None:
            return
        column = table_range(self._context, spec.geometry, table, spec.column).column
        storage = self._context.catalog.storage
        batches = (batch for record in records for batch in read_file(storage, record.path, [column]))
        values = np.concatenate([np.empty(0, np.int64), *(batch.column(0).to_numpy() for batch in batches)])
        numbers = len(np.unique(values))
        if numbers != len(values):
            raise Invalid(
                "a chunk has several rows for one number",
                chunk=chunk.name,
                column=spec.column,
                rows=len(values),
                numbers=numbers,
            )

    def within(self, chunk: Chunk, table: str, records: Iterable[FileRecord]) -> None:
        """Check that rows belong to their chunk, by the statistics of their files; no row is read again."""
        spec = self._spec
        if spec.column is None:
            return
        start, end = spec.geometry.ends(chunk.number)
        column = table_range(self._context, spec.geometry, table, spec.column)
        for record in records:
            span = staged_span(column, record)
            if span is None:
                raise Invalid(
                    "rows of a chunk have no value in the range column",
                    chunk=chunk.name,
                    table=table,
                    column=spec.column,
                    advice=_advice(spec, table),
                    rows=record.null_counts.get(column.column.field_id),
                )
            if span[0] < start or span[1] >= end:
                raise Invalid(
                    "rows of a chunk are outside of its range",
                    chunk=chunk.name,
                    table=table,
                    column=spec.column,
                    lowest=value_text(spec.geometry.shown_within(span[0])),
                    highest=value_text(spec.geometry.shown_within(span[1])),
                    advice=_advice(spec, table),
                )


def _advice(spec: HistorySpec, table: str) -> str:
    if spec.tables[table] is None:
        return ""
    return "Pruning deletes rows by this column: in a computed table, give this value another column name."


def staged_span(column: TableRange, record: FileRecord) -> tuple[int, int] | None:
    """The lowest and the highest inner value in a staged file; None if some row has none, or it is unknown."""
    field = column.column.field_id
    low, high = record.lower_bounds.get(field), record.upper_bounds.get(field)
    if record.value_counts.get(field) != record.rows or record.null_counts.get(field) != 0 or not (low and high):
        return None
    unit = _DAY_US if column.by_day else 1
    found = [int.from_bytes(base64.b64decode(bound), "little", signed=True) * unit for bound in (low, high)]
    return found[0], found[1]
