"""A scan: the rows of one table, at one version, that match a condition; planned when they are needed.

The version is chosen when the scan is made, so every use of it reads the same state. Planning leaves out files by
partitions and statistics, reading leaves out row groups, and the whole condition is applied to the rows that are read.
Arrow reads in this process; a condition that Arrow cannot evaluate with Spark's exact meaning, Spark evaluates, and
Arrow reads the rows that it found: so types, order and bytes are the same in both cases. Readers take no pin:
one that outlasts the grace of expired versions gets BelowRetention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from floodmark.commit.catalog import Catalog
from floodmark.errors import BelowRetention, Corrupt, Invalid, NotFound
from floodmark.json_form import Json
from floodmark.model import Head
from floodmark.rows.session import Sessions

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars
    import pyarrow as pa
    from pyiceberg.schema import Schema

    from floodmark.commit.live_files import LiveFile
    from floodmark.rows.arrays import Numbers
    from floodmark.rows.frames import DataFrame
    from floodmark.rows.reading.arrow_reader import RowsWanted
    from floodmark.rows.reading.selection import Selection
    from floodmark.rows.sql.where import Searched, Where

# Positions of rows that one Spark job finds are in memory together.
FOUND_ROWS_MAX = 4_000_000
FOOTERS_AT_ONCE = 8


@dataclass(frozen=True)
class Explanation:
    """What a scan would read, of how much, and why."""

    table: str
    version: int
    where: str | None
    columns: tuple[str, ...]
    limit: int | None
    evaluated_by: str
    pruned_by: str
    files: int
    files_total: int
    row_groups: int
    # Of the files that it opens: footers of others are not read.
    row_groups_total: int
    bytes: int
    bytes_total: int

    def as_dict(self) -> dict[str, Json]:
        return {**asdict(self), "columns": list(self.columns)}

    def __str__(self) -> str:
        return "\n".join(
            [
                f"scan of {self.table} at version {self.version}: {', '.join(self.columns)}",
                f"  condition   {self.where or 'none'}, evaluated by {self.evaluated_by}",
                f"  pruned by   {self.pruned_by}",
                f"  files       {self.files:,} of {self.files_total:,}",
                f"  row groups  {self.row_groups:,} of {self.row_groups_total:,} in these files",
                f"  bytes       {self.bytes:,} of {self.bytes_total:,}",
            ]
        )


class Scan:
    """Rows of a table at one version. Nothing is read before one of its methods needs it.

    to_arrow, to_batches, to_pandas, to_polars, to_duckdb   the rows, in this process
    df                                                      the rows as a Spark DataFrame
    count                                                   how many rows, from metadata where that is enough
    explain                                                 the files and bytes that it would read, and why
    """

    def __init__(
        self,
        catalog: Catalog,
        sessions: Sessions,
        head: Head,
        version: int,
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        with_seq: bool = False,
    ) -> None:
        self._catalog, self._sessions, self._head = catalog, sessions, head
        self.table, self.version, self.where, self.limit, self.with_seq = head.table, version, where, limit, with_seq
        self.columns = None if columns is None else self._known(columns)
        if limit is not None and limit < 0:
            raise Invalid("a limit cannot be negative", limit=limit)
        self._condition  # noqa: B018  a condition that cannot be right is refused now

    def __repr__(self) -> str:
        facts = {"where": self.where, "columns": self.columns, "limit": self.limit}
        given = "".join(f" {name}={value!r}" for name, value in facts.items() if value is not None)
        return f"<Scan of {self.table} at version {self.version}{given}>"

    @property
    def schema(self) -> pa.Schema:
        """The columns of the rows, as Arrow has them."""
        from floodmark.rows.reading.arrow_reader import arrow_read_schema

        return arrow_read_schema(self._schema, self.with_seq, self.columns)

    def to_batches(self) -> pa.RecordBatchReader:
        """The rows as a stream of Arrow batches; memory does not grow with the table."""
        import pyarrow as pa

        batches = _cut(self._matching(self._wanted()), self.limit)
        return pa.RecordBatchReader.from_batches(self.schema, in_time(self._catalog, self.version, batches))

    def to_arrow(self) -> pa.Table:
        with self.to_batches() as reader:
            return reader.read_all()

    def to_pandas(self) -> pandas.DataFrame:
        return self.to_arrow().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        try:
            import polars
        except ImportError as error:
            raise _not_installed("polars", "to_polars") from error
        found = polars.from_arrow(self.to_arrow())
        assert isinstance(found, polars.DataFrame)
        return found

    def to_duckdb(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """The rows as a relation of DuckDB, of this connection or of its default one."""
        try:
            import duckdb
        except ImportError as error:
            raise _not_installed("duckdb", "to_duckdb") from error
        return duckdb.from_arrow(self.to_arrow(), connection=connection or duckdb.default_connection())

    @property
    def df(self) -> DataFrame:
        """The rows as a Spark DataFrame, which reads them when an action runs."""
        from floodmark.rows.reading.scan import quoted
        from floodmark.rows.sql.where import check_where

        where = self._condition
        with readable(self._catalog, self.version):
            if where is not None:
                check_where(self._sessions.get(), where, self._schema)
            rows = dataframe(self._catalog, self._sessions, self._head, self._wanted_of_spark(), self._selection)
            rows = rows if where is None else rows.where(f"({where.text}\n)")
            rows = rows.select(*map(quoted, self.schema.names))
            return rows if self.limit is None else rows.limit(self.limit)

    def count(self) -> int:
        """How many rows match. Files whose statistics prove the answer are not opened."""
        with readable(self._catalog, self.version):
            found = self._count()
        return found if self.limit is None else min(found, self.limit)

    def explain(self) -> Explanation:
        """What the scan would read. Opens the footers of the files that it would open, and no rows."""
        from floodmark.rows.project import kept_groups
        from floodmark.rows.reading.arrow_reader import group_tests, read_fields

        with readable(self._catalog, self.version):
            chosen, wanted = self._selection, self._wanted()
            fields, tests = read_fields(self._schema, wanted), group_tests(self._schema, wanted)
            with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
                groups = list(
                    pool.map(
                        lambda file: kept_groups(self._catalog.storage, file.path, fields, tests, file.size_bytes),
                        chosen.files,
                    )
                )
        where = self._condition
        return Explanation(
            table=self.table,
            version=self.version,
            where=self.where,
            columns=tuple(self.schema.names),
            limit=self.limit,
            evaluated_by="Arrow" if where is None or where.plain else "Spark",
            pruned_by=_nothing(self.where) if where is None or where.prunes is None else where.prunes,
            files=len(chosen.files),
            files_total=chosen.all_files,
            row_groups=sum(one.kept for one in groups),
            row_groups_total=sum(one.all for one in groups),
            bytes=sum(one.size_bytes for one in groups),
            bytes_total=chosen.all_bytes,
        )

    # ── inside ──

    @cached_property
    def _schema(self) -> Schema:
        from floodmark.commit.metadata import schema_of

        with readable(self._catalog, self.version):
            return schema_of(self._catalog.files.metadata(self._head.metadata_location), self._head)

    @cached_property
    def _condition(self) -> Where | None:
        from floodmark.rows.sql.where import Where

        return None if self.where is None else Where.parse(self.where, self._schema)

    @cached_property
    def _selection(self) -> Selection:
        from floodmark.rows.reading.selection import select_files

        return select_files(self._catalog.files, self._head, self._schema, self._condition)

    def _known(self, columns: Sequence[str]) -> tuple[str, ...]:
        """The columns by their exact names; `Invalid` for others, and for none."""
        from floodmark.rows.schema import nearest, user_fields

        names = [field.name for field in user_fields(self._schema)]
        if isinstance(columns, str) or not columns or len(set(columns)) < len(columns):
            raise Invalid(
                "invalid list of columns",
                columns=repr(columns),
                advice='Give at least one name, each once, like columns=["id"].',
            )
        for name in columns:
            if name not in names:
                raise Invalid("there is no such column", column=name, table=self.table, advice=nearest(name, names))
        return tuple(columns)

    def _wanted(self) -> RowsWanted:
        from floodmark.rows.reading.arrow_reader import RowsWanted

        return RowsWanted(self.columns, self.with_seq, self._condition)

    def _wanted_of_spark(self) -> RowsWanted:
        """With the columns that the condition needs too: Spark applies it to what is read."""
        from floodmark.rows.reading.arrow_reader import RowsWanted
        from floodmark.rows.sql.where import mentioned

        columns = self.columns
        if columns is not None and self._condition is not None:
            named = [field.name for field in mentioned(self._condition.text, self._schema)]
            columns = tuple(dict.fromkeys([*columns, *named]))
        return RowsWanted(columns, self.with_seq, self._condition)

    def _matching(self, wanted: RowsWanted) -> Iterator[pa.RecordBatch]:
        from floodmark.rows.reading.arrow_reader import read_wanted

        storage = self._catalog.storage
        if wanted.where is None or wanted.where.plain:
            for file in self._selection.files:
                yield from read_wanted(
                    storage, file.path, self._schema, wanted, file.sequence, size_bytes=file.size_bytes
                )
            return
        for files, positions in self._found_by_spark(wanted.where):
            for file in files:
                if file.path in positions:
                    found = positions[file.path]
                    yield from read_wanted(
                        storage, file.path, self._schema, wanted, file.sequence, found, size_bytes=file.size_bytes
                    )

    def _found_by_spark(self, where: Where) -> Iterator[tuple[list[LiveFile], dict[str, Numbers]]]:
        """Some files at a time, and where in them the rows are that match."""
        from floodmark.rows.sql.where import collect_positions

        files = self._selection.files
        before = accumulate(file.rows for file in files)
        for _, some in groupby(zip(before, files, strict=True), lambda one: one[0] // FOUND_ROWS_MAX):
            chunk = [file for _, file in some]
            yield chunk, collect_positions(self._sessions.get(), where, self._searched(chunk))

    def _searched(self, files: Sequence[LiveFile]) -> Searched:
        from floodmark.rows.sql.where import Searched

        arrow = by_arrow(self._catalog, self._head)
        return Searched([file.path for file in files], self._schema, self._catalog.storage.options, arrow)

    def _count(self) -> int:
        from floodmark.rows.reading.arrow_reader import RowsWanted, read_wanted
        from floodmark.rows.sql.where import count_positions

        where, files = self._condition, self._selection.files
        if where is None:
            return sum(file.rows for file in files)
        if not where.plain:
            found = count_positions(self._sessions.get(), where, self._searched(files))
            return sum(found.values())
        metadata = self._catalog.files.metadata(self._head.metadata_location)
        certain = [file for file in files if where.must_match(file, metadata)]
        known = {file.path for file in certain}
        wanted = RowsWanted(columns=(where.fields[0].name,), where=where)
        return sum(file.rows for file in certain) + sum(
            len(batch)
            for file in files
            if file.path not in known
            for batch in read_wanted(self._catalog.storage, file.path, self._schema, wanted, size_bytes=file.size_bytes)
        )


def dataframe(catalog: Catalog, sessions: Sessions, head: Head, wanted: RowsWanted, selection: Selection) -> DataFrame:
    """The rows of the selected files as a DataFrame; what `wanted` leaves out, tasks do not read where they can."""
    from floodmark.commit.metadata import schema_of
    from floodmark.rows.reading.scan import scan, scan_with_seq

    schema, files = schema_of(catalog.files.metadata(head.metadata_location), head), selection.files
    options, arrow = catalog.storage.options, by_arrow(catalog, head)
    if wanted.with_seq:
        return scan_with_seq(sessions.get(), files, schema, wanted=wanted, storage_options=options, arrow=arrow)
    sizes = {file.path: file.size_bytes for file in files}
    return scan(sessions.get(), list(sizes), schema, wanted=wanted, sizes=sizes, storage_options=options, arrow=arrow)


def by_arrow(catalog: Catalog, head: Head) -> bool | None:
    """True for a table with renamed columns: Spark matches columns by id, but pushes filters down by name."""
    from floodmark.commit.metadata import has_renamed_columns

    return True if has_renamed_columns(catalog.files.metadata(head.metadata_location)) else None


@contextmanager
def readable(catalog: Catalog, version: int) -> Iterator[None]:
    """A missing file means damage, unless the version has expired meanwhile: then the reader was too slow."""
    try:
        yield
    except (Corrupt, NotFound, FileNotFoundError) as error:
        if catalog.history.is_expired(version):
            raise BelowRetention(
                "this version's window ended while it was read",
                version=version,
                advice="Read a newer version; `floodmark maintain --grace` gives slow readers more time.",
            ) from error
        raise


def in_time(catalog: Catalog, version: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with readable(catalog, version):
        yield from batches


def _cut(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """The first rows, so many; what follows is not read."""
    if limit is None:
        yield from batches
        return
    left = limit
    while left > 0 and (batch := next(batches, None)) is not None:
        yield batch.slice(0, left)
        left -= min(left, len(batch))


def _nothing(where: str | None) -> str:
    return "nothing: no condition" if where is None else "nothing: no part of the condition can be compared with files"


def _not_installed(package: str, method: str) -> Invalid:
    return Invalid(
        "an optional package is not installed", package=package, advice=f"{method} needs it: pip install {package}"
    )
