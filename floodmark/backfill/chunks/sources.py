"""Sources of history: `tip()`, how far it has come, and `read(chunk)`, the chunk's rows; nothing else.

Built in: files by a path template, another table of the lake, a function. A tip is exclusive: everything before it is
complete, and None means that it is unknown. Reading changes nothing, and gives the same rows for the same chunk as long
as the files or tables behind it stay the same; so a chunk may be read again after any failure. Wrong settings are
Invalid when a source is made or bound, before a job is created. A missing file is NotFound, a record that does not fit
Invalid; errors of a function pass unchanged.

A tip is given by a value, by the clock ("now", "now-10m"), by a small file ("@path") or by a function; it is checked
against the history before a job is created. A file of it that is missing or empty is being written: Unavailable, so a
later try reads it again.

`bind` gives a source what it needs of the lake. Settings are stored as JSON, so that another process can resume a job;
a function that cannot be imported, or an object of a foreign class, cannot be stored.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

from floodmark import clock
from floodmark.backfill.chunks.geometry import NUMBER, TIME, Chunk, Geometry, GivenSize, GivenValue, RangeValue, span_us
from floodmark.backfill.chunks.paths import Template, absolute_path
from floodmark.backfill.chunks.ranges import TableRange
from floodmark.commit.catalog import Catalog
from floodmark.errors import Corrupt, FloodmarkError, Invalid, NotFound, Unavailable
from floodmark.json_form import Json
from floodmark.model import Row
from floodmark.rows.session import Sessions
from floodmark.storage import local_path

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema

    from floodmark.rows.frames import DataFrame, SparkSession, StructType

TIP_BYTES_MAX = 1024
_FILE_ADVICE = "Write it under another name, then rename it: then no reader sees half of it."
_NOW = re.compile(r"now(?: *- *(.+))?")
# A tip as callers pass it.
GivenTip: TypeAlias = GivenValue | Callable[[], GivenValue | None] | None

ERROR, EMPTY, ACCEPT = "error", "empty", "accept"
DIGEST_BYTES = 8 * 1024 * 1024
_PATTERN = re.compile(r"[*?\[\]{}\\]")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# Spark's message for an address without a connector.
_NO_CONNECTOR = re.compile(r"No FileSystem for scheme|FileSystem not found")
P = ParamSpec("P")
T = TypeVar("T")
# The rows of a chunk: a Spark DataFrame, or rows in any form that `lake.append` accepts.
ChunkRows: TypeAlias = "DataFrame | pa.Table | pa.RecordBatch | pa.RecordBatchReader | Sequence[Row]"


@dataclass(frozen=True)
class SourceContext:
    """What a source needs of the lake: `schema` gives the columns of the chunk's rows, if a table defines them.

    `filled` names those that rows may omit, because the table fills them.
    """

    catalog: Catalog
    sessions: Sessions
    geometry: Geometry
    schema: Callable[[], Schema | None]
    filled: Callable[[], Sequence[str]] = tuple


@runtime_checkable
class HistorySource(Protocol):
    def tip(self) -> GivenValue | None:
        """How far the source has come, exclusive: a number or a time; None if unknown."""

    def read(self, chunk: Chunk) -> ChunkRows:
        """The chunk's rows: a Spark DataFrame, or rows in any form that `lake.append` accepts."""


def bind(source: HistorySource, context: SourceContext) -> HistorySource:
    """The source bound to this lake and history. `Invalid` if its settings do not fit them."""
    return source.bind(context) if isinstance(source, PathSource | TableSource | CallSource) else source


def explain(source: HistorySource, chunk: Chunk) -> FloodmarkError | None:
    """After rows of a chunk were refused: which records do not fit, if the source can find them."""
    return source.explain(chunk) if isinstance(source, PathSource) else None


# ── stored form ──


def to_source(given: HistorySource | Callable[[Chunk], ChunkRows] | str) -> HistorySource:
    """A source unchanged, a path template as text, or a function (also as text, like package.module:function)."""
    if isinstance(given, HistorySource) and not isinstance(given, type):
        return given
    if isinstance(given, str):
        return CallSource(given) if _FUNCTION.fullmatch(given) else PathSource(given)
    if callable(given) and not isinstance(given, type):
        return CallSource(given)
    raise Invalid(
        "unsupported source",
        given=repr(given),
        advice="Give a path template, a function of a chunk, or an object with tip() and read(chunk).",
    )


def source_as_dict(source: HistorySource) -> dict[str, Json]:
    """A source's settings for JSON."""
    if isinstance(source, PathSource | TableSource | CallSource):
        return source.as_dict()
    return {"kind": "object", "type": f"{type(source).__module__}.{type(source).__qualname__}"}


def source_from_dict(values: Json) -> HistorySource:
    """The source with these stored settings. `Invalid` if they do not make one, `Corrupt` if they are not settings."""
    known: dict[str, Callable[..., HistorySource]] = {"path": PathSource, "table": TableSource, "call": CallSource}
    settings = dict(values) if isinstance(values, Mapping) else {}
    kind = settings.pop("kind", None)
    if kind == "object":
        raise _not_kept(str(settings.get("type")))
    try:
        return known[str(kind)](**settings)
    except (KeyError, TypeError) as error:
        raise Corrupt("the stored settings of a source are invalid", found=repr(values)[:200]) from error


def _not_kept(what: str) -> Invalid:
    return Invalid(
        "this source cannot be restored from the catalog",
        source=what,
        advice="Start the job again with the same call and name: it continues.",
    )


# ── tips and steps ──


def kept_tip(given: GivenValue | None) -> str | int | None:
    """A tip that is not a function, in the form that JSON can store."""
    if isinstance(given, str):
        _delay_ms(given)
        return "@" + absolute_path(given[1:]) if given.startswith("@") else given
    if given is None or isinstance(given, date):
        return given.isoformat() if given else None
    try:
        return operator.index(given)
    except TypeError as error:
        raise Invalid("invalid tip", tip=repr(given), advice="Give a number, a time, now-10m or @path.") from error


def _delay_ms(text: str) -> int | None:
    """How long before now a tip is; None if the clock does not determine it."""
    found = _NOW.fullmatch(text.strip())
    return None if found is None else clock.parse_duration_ms(found[1] or "0s")


def check_tip(given: GivenTip, geometry: Geometry) -> None:
    if given is None or callable(given) or (isinstance(given, str) and given.startswith("@")):
        return
    if isinstance(given, str) and _delay_ms(given) is not None:
        if geometry.unit != TIME:
            raise Invalid("a range of numbers has no tip by the clock", tip=given, advice="Give a number, or @path.")
        return
    geometry.value(given)


def tip_value(given: GivenTip, context: SourceContext) -> RangeValue | None:
    found = given() if callable(given) else given
    if found is None:
        return None
    geometry = context.geometry
    if isinstance(found, str):
        delay_ms = _delay_ms(found)
        if delay_ms is not None and geometry.unit == TIME:
            return geometry.shown_within((clock.now_ms() - delay_ms) * 1000)
        if found.startswith("@"):
            return _in_file(found[1:], context)
    return geometry.shown(geometry.value(found))


def _in_file(path: str, context: SourceContext) -> RangeValue:
    try:
        data = context.catalog.storage.read_range(path, 0, TIP_BYTES_MAX + 1)
    except NotFound as error:
        raise Unavailable("the tip file does not exist", path=path, advice=_FILE_ADVICE) from error
    if not data.strip():
        raise Unavailable("the tip file is empty", path=path, advice=_FILE_ADVICE)
    try:
        return context.geometry.shown(context.geometry.value(data.decode().strip()))
    except (Invalid, UnicodeDecodeError) as error:
        raise Invalid("this file contains no valid tip", path=path, found=repr(data[:40]), cause=str(error)) from error


def kept_step(given: GivenSize | None) -> int | str | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    if isinstance(given, str) and given.strip().isdecimal():
        return int(given)
    span = span_us(given)
    if span % 1000:
        raise Invalid("a step must be a whole number of milliseconds", step=repr(given))
    return given if isinstance(given, str) else f"{span // 1000}ms"


def in_context(context: SourceContext | None) -> SourceContext:
    if context is None:
        raise Invalid("the source is not bound to a lake", advice="A backfill does that: lake.backfill.history(...).")
    return context


# ── files ──


class PathSource:
    """Files whose names follow from the chunk: JSONL, CSV or Parquet, any path that Spark reads, read strictly.

    `template`: see paths.py; with `step`, a part of the chunk like 1h or 1000, it names a file for every step. It may
    contain wildcards; they must not match files of another chunk (write {number:05d}*, not {number}*). missing:
    "error", or "empty" for files that may be absent. `columns`: the columns of the files, like "id long, ts timestamp",
    if they differ from the table's. `tip`: how far the files go: a value, "now", "now-10m", or "@path" of a small file
    that holds it; by default now for times, and unknown for numbers. On S3, Spark needs its connector. unfinished: for
    a CSV file whose last line has no end, which may be cut there: "error", or "accept".
    """

    def __init__(
        self,
        template: str,
        *,
        step: GivenSize | None = None,
        format: str | None = None,
        missing: str = ERROR,
        tip: GivenValue | None = None,
        columns: str | None = None,
        unfinished: str = ERROR,
    ) -> None:
        from floodmark.ingest.files import Footers, format_of
        from floodmark.rows.schema import table_schema

        if columns is not None:
            table_schema(columns)
        self.template = Template(template)
        self.step = kept_step(step)
        self.format = format_of([self.template.text], format)
        if missing not in (ERROR, EMPTY):
            raise Invalid("missing files are an error or empty", missing=repr(missing), advice="Use error or empty.")
        if unfinished not in (ERROR, ACCEPT):
            raise Invalid("an unfinished last line is an error or accepted", unfinished=repr(unfinished))
        self.missing = missing
        self.unfinished = unfinished
        self.tip_given = kept_tip(tip)
        self.columns = columns
        self._footers = Footers()
        self._context: SourceContext | None = None

    def as_dict(self) -> dict[str, Json]:
        return {
            "kind": "path",
            "template": self.template.text,
            "step": self.step,
            "format": self.format,
            "missing": self.missing,
            "unfinished": self.unfinished,
            "tip": self.tip_given,
            "columns": self.columns,
        }

    def bind(self, context: SourceContext) -> PathSource:
        self.template.check(context.geometry, self._inner_step(context.geometry))
        check_tip(self.tip_given, context.geometry)
        bound = copy.copy(self)
        bound._context = context
        return bound

    def tip(self) -> RangeValue | None:
        context = in_context(self._context)
        default = "now" if context.geometry.unit == TIME else None
        return tip_value(default if self.tip_given is None else self.tip_given, context)

    def paths(self, chunk: Chunk) -> list[str]:
        geometry = in_context(self._context).geometry
        return self.template.paths(chunk, geometry, self._inner_step(geometry))

    def digest(self, chunk: Chunk) -> str:
        """The SHA-256 of the chunk's files, one after the other. Invalid if they are not named one by one."""
        found, storage = hashlib.sha256(), in_context(self._context).catalog.storage
        for path in self.paths(chunk):
            location = re.sub(r"^s3[an]:", "s3:", path)
            if _PATTERN.search(location):
                raise Invalid("files of a pattern have no digest", path=path, advice="List the files one by one.")
            try:
                size = storage.size(location)
            except NotFound:
                if self.missing == EMPTY:
                    continue
                raise
            for start in range(0, size, DIGEST_BYTES):
                found.update(storage.read_range(location, start, min(DIGEST_BYTES, size - start)))
        return found.hexdigest()

    def _check_finished(self, chunk: Chunk, paths: list[str]) -> None:
        """A CSV file that is cut inside its last line reads like a complete one: the rest of the line is a value."""
        from floodmark.ingest.files import unfinished_csv

        if self.format != "csv" or self.unfinished == ACCEPT:
            return
        cut = unfinished_csv(in_context(self._context).sessions, paths)
        if cut is not None:
            raise Invalid(
                "the last line of a CSV file has no end: the file may be cut there",
                chunk=chunk.name,
                path=cut,
                advice="Provide the whole file. If it is complete, end its last line, or use --unfinished accept "
                '(unfinished="accept").',
            )

    def read(self, chunk: Chunk) -> DataFrame:
        from floodmark.rows.reading.scan import empty

        spark, columns, paths = in_context(self._context).sessions.get(), self._columns(), self.paths(chunk)
        self._check_finished(chunk, paths)
        try:
            return self._load(spark, paths, columns)
        except NotFound as error:
            existing = _existing(spark, paths)
            if self.missing == ERROR:
                lost = [path for path in paths if path not in existing] or paths
                raise NotFound(
                    "files of a chunk do not exist",
                    chunk=chunk.name,
                    path=",".join(lost[:3]),
                    files=len(lost),
                    advice='Add them, or treat missing files as empty: --missing empty (missing="empty").',
                ) from error
        if existing:
            return self._load(spark, existing, columns)
        if columns is None:
            raise _columns_unknown(self.template.text)
        return empty(spark, columns)

    def explain(self, chunk: Chunk) -> Invalid | None:
        from floodmark.ingest.files import explain

        spark, columns = in_context(self._context).sessions.get(), self._columns()
        existing = _existing(spark, self.paths(chunk))
        return explain(spark, existing, self.format, columns) if existing and columns is not None else None

    def _load(self, spark: SparkSession, paths: list[str], columns: StructType | None) -> DataFrame:
        from floodmark.ingest.files import read_files

        if columns is None and self.format != "parquet":
            raise _columns_unknown(self.template.text)
        with _file_errors(paths):
            filled = in_context(self._context).filled()
            common, found = self._footers.columns(paths) if self.format == "parquet" else (None, None)
            frame = read_files(spark, paths, self.format, columns, filled=filled, found=found)
            # Over Spark Connect, only this call looks for the files.
            self._footers.learn(common, frame.schema)
            return frame

    def _columns(self) -> StructType | None:
        from floodmark.rows.schema import spark_schema, table_schema

        schema = table_schema(self.columns) if self.columns is not None else in_context(self._context).schema()
        return None if schema is None else spark_schema(schema)

    def _inner_step(self, geometry: Geometry) -> int | None:
        if self.step is None:
            return None
        if (geometry.unit == NUMBER) != isinstance(self.step, int):
            raise Invalid("the step does not fit the range of the history", step=self.step, history_is_of=geometry.unit)
        return self.step if isinstance(self.step, int) else span_us(self.step)


def _existing(spark: SparkSession, paths: list[str]) -> list[str]:
    """The paths that exist; found by halving, so that many existing ones cost one call."""
    try:
        with _file_errors(paths):
            # This format reads nothing before rows are requested, and its columns are always the same.
            _ = spark.read.format("binaryFile").load([_plain(path) for path in paths]).schema
    except NotFound:
        middle = len(paths) // 2
        return _existing(spark, paths[:middle]) + _existing(spark, paths[middle:]) if middle else []
    return paths


def _plain(path: str) -> str:
    return local_path(path) or path if path.startswith("file:") else path


@contextmanager
def _file_errors(paths: list[str]) -> Iterator[None]:
    """Turn Spark's errors about files into ours: a file that does not exist, a kind that Spark has no connector for."""
    from floodmark.rows.failures import spark_failures

    try:
        with spark_failures("these files cannot be read"):
            yield
    except Invalid as error:
        if "PATH_NOT_FOUND" in str(error):
            raise NotFound("there is no such file", cause=error.facts.get("cause")) from error
        raise
    except Unavailable as error:
        if _NO_CONNECTOR.search(f"{error} {error.__cause__}"):
            raise Invalid(
                "Spark has no connector for this kind of path",
                path=paths[0],
                advice="Put Hadoop's connector on Spark's classpath (for s3a://: hadoop-aws), or read by a function.",
            ) from error
        raise


def _columns_unknown(template: str) -> Invalid:
    return Invalid(
        "the columns of these files are unknown: no table stores the rows unchanged",
        template=template,
        advice='Declare them: --columns "id long, ts timestamp" (in Python columns="…").',
    )


# ── another table ──


class TableSource:
    """Rows of another table of the lake by a column: a whole number, a date or a timestamp.

    Each chunk is read at the lake's head of that moment. Rows that are added to the range of a chunk after it was
    loaded are not copied, nor are rows where the column is null. So `tip` should be late enough: by default it is
    directly after the highest number or timestamp in the table; for a date, its midnight, since that day may go on. For
    a history whose last rows are before its end, set how far the table goes: a value, "now-10m", or "@path".
    """

    def __init__(self, table: str, column: str, *, tip: GivenValue | None = None) -> None:
        self.table = table
        self.column = column
        self.tip_given = kept_tip(tip)
        self._context: SourceContext | None = None

    def as_dict(self) -> dict[str, Json]:
        return {"kind": "table", "table": self.table, "column": self.column, "tip": self.tip_given}

    def bind(self, context: SourceContext) -> TableSource:
        check_tip(self.tip_given, context.geometry)
        bound = copy.copy(self)
        bound._context = context
        bound._now()
        return bound

    def tip(self) -> RangeValue | None:
        context = in_context(self._context)
        if self.tip_given is not None:
            return tip_value(self.tip_given, context)
        now = self._now()
        highest = now.highest()
        if highest is None:
            return None
        return context.geometry.shown_within(highest if now.by_day else highest + 1)

    def read(self, chunk: Chunk) -> DataFrame:
        geometry = in_context(self._context).geometry
        return self._now().rows(geometry.value(chunk.start), geometry.value(chunk.end))

    def _now(self) -> TableRange:
        context = in_context(self._context)
        return TableRange.at_head(context.catalog, context.sessions, context.geometry, self.table, self.column)


# ── a function ──


class CallSource:
    """Rows that a function returns for a chunk. Functions may be given as text, package.module:function.

    `tip`: a function without arguments, a value, "now", "now-10m", "@path" of a small file that holds it, or None: then
    a range with an end counts as complete.
    """

    def __init__(self, read: Callable[[Chunk], ChunkRows] | str | None, tip: GivenTip = None) -> None:
        if read is None:
            raise _not_kept("a function that cannot be imported")
        self._read = _function(read)
        self.tip_given: Callable[[], GivenValue | None] | str | int | None = (
            _function(tip) if callable(tip) or _is_function_name(tip) else kept_tip(tip)
        )
        self._context: SourceContext | None = None

    def as_dict(self) -> dict[str, Json]:
        read = _function_name(self._read)
        if not callable(self.tip_given):
            return {"kind": "call", "read": read, "tip": self.tip_given}
        tip = _function_name(self.tip_given)
        return {"kind": "call", "read": read if tip else None, "tip": tip}

    def bind(self, context: SourceContext) -> CallSource:
        check_tip(self.tip_given, context.geometry)
        bound = copy.copy(self)
        bound._context = context
        return bound

    def tip(self) -> RangeValue | None:
        return tip_value(self.tip_given, in_context(self._context))

    def read(self, chunk: Chunk) -> ChunkRows:
        return self._read(chunk)


def _is_function_name(given: GivenTip) -> TypeGuard[str]:
    return isinstance(given, str) and _FUNCTION.fullmatch(given) is not None


def _function(given: Callable[P, T] | str) -> Callable[P, T]:
    function = given
    if isinstance(given, str):
        function = _imported(given) if _is_function_name(given) else given
    if not callable(function):
        raise Invalid("not a function", given=repr(given), advice="Write it like package.module:function.")
    return function


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise Invalid(
            "this function cannot be imported",
            function=name,
            cause=error,
            advice="Write it like package.module:function, and have the package on Python's path.",
        ) from error
    return found


def _function_name(function: Callable[P, T]) -> str | None:
    """The name by which another process finds the function; None if it cannot."""
    name = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
    if name.startswith("__main__:") or not _FUNCTION.fullmatch(name):
        return None
    try:
        return name if _imported(name) is function else None
    except Invalid:
        return None
