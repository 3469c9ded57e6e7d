"""A table of the lake as a history: its rows by a column that is their position in the range.

The column is a whole number, a date (its midnight, UTC) or a timestamp (without a zone: UTC). Everything is answered at
one head: files whose statistics prove that they hold nothing of a range are not opened, and what statistics prove is
not read. Rows without a value in the column are in no range. Reading changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from floodmark.backfill.chunks.geometry import NUMBER, TIME, Geometry
from floodmark.commit.catalog import Catalog
from floodmark.errors import Invalid
from floodmark.model import SEQ_COLUMN, Head
from floodmark.rows.session import Sessions

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.types import NestedField

    from floodmark.commit.live_files import LiveFile
    from floodmark.rows.frames import DataFrame

_UNITS = {"int": NUMBER, "long": NUMBER, "date": TIME, "timestamp": TIME, "timestamptz": TIME}
_DAY_US = 86_400_000_000


@dataclass(frozen=True)
class TableRange:
    """One table at one head, by its range column. All ends are inner values, the upper one exclusive."""

    catalog: Catalog = field(repr=False)
    sessions: Sessions = field(repr=False)
    geometry: Geometry
    head: Head
    schema: Schema = field(repr=False)
    column: NestedField

    @classmethod
    def at_head(cls, catalog: Catalog, sessions: Sessions, geometry: Geometry, table: str, column: str) -> TableRange:
        """The table as it is now. `Invalid` if the column does not exist, or is not of the history's kind."""
        from floodmark.commit.metadata import schema_of
        from floodmark.rows.schema import require_name, user_fields

        head = catalog.history.head(table)
        schema = schema_of(catalog.files.metadata(head.metadata_location), head)
        columns = {one.name: one for one in user_fields(schema)}
        found = columns[require_name(column, columns, "range")]
        unit = _UNITS.get(str(found.field_type))
        if unit != geometry.unit:
            fitting = [one.name for one in columns.values() if _UNITS.get(str(one.field_type)) == geometry.unit]
            raise Invalid(
                "the type of this column does not fit the range",
                table=table,
                column=column,
                type=found.field_type,
                range_of=geometry.unit,
                advice=f"Columns that can: {', '.join(fitting) or 'none'}.",
            )
        return cls(catalog, sessions, geometry, head, schema, found)

    @property
    def by_day(self) -> bool:
        return str(self.column.field_type) == "date"

    def condition(self, low: int, high: int) -> str:
        """The range [low, high) as a condition for Spark, whatever the session's time zone is."""
        from floodmark.rows.reading.scan import quoted

        name = quoted(self.column.name)
        return f"{name} >= {self._literal(low)} and {name} < {self._literal(high)}"

    def rows(self, low: int, high: int) -> DataFrame:
        """The rows of the range, with the table's columns."""
        files = [file for file in self._files() if self._share(file, low, high) is not False]
        return self._scan(files).where(self.condition(low, high))

    def count(self, low: int, high: int) -> int:
        """How many rows the range has; only files across its ends are read, and only they need Spark."""
        from floodmark.rows.failures import spark_job

        shares = [(file, self._share(file, low, high)) for file in self._files()]
        across = [file for file, share in shares if share is None]
        found = sum(file.rows for file, share in shares if share)
        if across:
            with spark_job(self.sessions.get(), "the rows of a range cannot be counted"):
                found += self._scan(across).where(self.condition(low, high)).count()
        return found

    def has_others(self, low: int, high: int, sequence: int) -> bool:
        """Whether a row of the range has another sequence; only files whose statistics do not answer are read."""
        from floodmark.rows.failures import spark_job
        from floodmark.rows.reading.scan import scan_with_seq

        inside = [(file, share) for file in self._files() if (share := self._share(file, low, high)) is not False]
        others = [(file, share) for file, share in inside if file.seq_bounds() != (sequence, sequence)]
        for file, share in others:
            bounds = file.seq_bounds()
            if share and bounds is not None and not bounds[0] <= sequence <= bounds[1]:
                return True
        if not others:
            return False
        condition = f"{self.condition(low, high)} and {SEQ_COLUMN} <> {sequence}"
        with spark_job(self.sessions.get(), "the rows of a range cannot be counted"):
            rows = scan_with_seq(
                self.sessions.get(),
                [file for file, _ in others],
                self.schema,
                storage_options=self.catalog.storage.options,
                arrow=self._arrow,
            )
            return bool(rows.where(condition).limit(1).count())

    def highest(self) -> int | None:
        """The highest value in the table, None if it has none; read only from files whose statistics lack it."""
        bounds = [(file, self._bounds(file)) for file in self._files() if not self._all_null(file)]
        unknown = [file for file, found in bounds if found is None]
        known = [found[1] for _, found in bounds if found is not None]
        return max([*known, *self._highest_read(unknown)], default=None)

    # ── inside ──

    def _files(self) -> list[LiveFile]:
        from floodmark.commit.live_files import live_files

        return live_files(self.catalog.files, self.head, self.schema)

    def _scan(self, files: Sequence[LiveFile]) -> DataFrame:
        from floodmark.rows.reading.scan import scan

        return scan(
            self.sessions.get(),
            [file.path for file in files],
            self.schema,
            storage_options=self.catalog.storage.options,
            arrow=self._arrow,
        )

    @property
    def _arrow(self) -> bool | None:
        """Spark matches columns by id, but pushes conditions down by name."""
        from floodmark.commit.metadata import has_renamed_columns

        return True if has_renamed_columns(self.catalog.files.metadata(self.head.metadata_location)) else None

    def _highest_read(self, files: Sequence[LiveFile]) -> list[int]:
        from floodmark.rows.failures import spark_job
        from floodmark.rows.reading.scan import quoted

        if not files:
            return []
        name = quoted(self.column.name)
        # A timestamp with a zone would be returned in the zone of this process.
        value = f"unix_micros({name})" if str(self.column.field_type) == "timestamptz" else name
        with spark_job(self.sessions.get(), "the highest value of a column cannot be read"):
            found = self._scan(files).selectExpr(f"max({value})").collect()[0][0]
        if found is None:
            return []
        return [found if isinstance(found, int) else self.geometry.value(found)]

    def _literal(self, inner: int) -> str:
        match str(self.column.field_type):
            case "timestamptz":
                return f"timestamp_micros({inner})"
            case "date":
                # A date is at or after a timestamp if it is not before the first midnight from there.
                return f"date_from_unix_date({-(-inner // _DAY_US)})"
            case "timestamp":
                moment = self.geometry.shown(inner)
                return f"timestamp_ntz'{moment.replace(tzinfo=None) if isinstance(moment, datetime) else moment}'"
        return str(inner)

    def _share(self, file: LiveFile, low: int, high: int) -> bool | None:
        """Whether all rows of the file are in the range (True) or none (False), as far as statistics prove it."""
        if self._all_null(file):
            return False
        bounds = self._bounds(file)
        if bounds is None:
            return None
        if bounds[1] < low or bounds[0] >= high:
            return False
        nulls = (file.data_file.null_value_counts or {}).get(self.column.field_id)
        return True if low <= bounds[0] and bounds[1] < high and nulls == 0 else None

    def _all_null(self, file: LiveFile) -> bool:
        return (file.data_file.null_value_counts or {}).get(self.column.field_id) == file.rows

    def _bounds(self, file: LiveFile) -> tuple[int, int] | None:
        """Bounds of all values in the file; None if unknown."""
        low = (file.data_file.lower_bounds or {}).get(self.column.field_id)
        high = (file.data_file.upper_bounds or {}).get(self.column.field_id)
        if low is None or high is None:
            return None
        unit = _DAY_US if self.by_day else 1
        # A column that was widened since has narrower bounds in older files.
        return int.from_bytes(low, "little", signed=True) * unit, int.from_bytes(high, "little", signed=True) * unit
