"""The definition of a history backfill: what never changes (the geometry, the range column), and the settings of a run.

Everything is checked before a job is created. Settings are kept with the job as JSON, so that another process can
continue it; a definition that is a Python function cannot be kept, and the error says so. A function is recognised by
its name and a fingerprint of its code and the constants in it, computed from what Python runs: a comment, its docstring
or its place in a file makes no difference. Functions that it calls, and values from outside of it, are not included.
Another version of Python compiles the same text to other code, so fingerprints of two versions cannot be compared.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypedDict, TypeVar

from floodmark.backfill.chunks.geometry import NUMBER, TIME, Geometry, span_us
from floodmark.backfill.chunks.ranges import TableRange
from floodmark.backfill.chunks.sources import (
    CallSource,
    HistorySource,
    PathSource,
    TableSource,
    source_as_dict,
    source_from_dict,
)
from floodmark.catalog.jobs import Job
from floodmark.errors import Corrupt, Invalid, NotFound
from floodmark.jobs.run import JobContext
from floodmark.json_form import Json
from floodmark.rows.session import Sessions
from floodmark.rows.sql.query import named_tables, query_body
from floodmark.rows.sql.table_names import relations

if TYPE_CHECKING:
    from floodmark.rows.frames import DataFrame

P = ParamSpec("P")
T = TypeVar("T")
_CHARACTERS = 16


def fingerprint(function: Callable[P, T]) -> dict[str, str]:
    """In a form that JSON can store. A callable without code of its own is identified by its name alone."""
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return {"function": name}
    if function.__doc__ is not None and code.co_consts[:1] == (function.__doc__,):
        code = code.replace(co_consts=(None, *code.co_consts[1:]))  # as it is without one
    digest = hashlib.sha256(_code_text(code).encode()).hexdigest()
    return {"function": name, "code": digest[:_CHARACTERS], "python": f"{sys.version_info[0]}.{sys.version_info[1]}"}


def is_same_function(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two fingerprints may be of one function."""
    if one.get("function") != other.get("function"):
        return False
    comparable = {"code", "python"} <= one.keys() & other.keys() and one["python"] == other["python"]
    return not comparable or one["code"] == other["code"]


def _code_text(code: CodeType) -> str:
    return f"({code.co_code.hex()} {code.co_names} {' '.join(map(_constant_text, code.co_consts))})"


def _constant_text(constant: Hashable) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, tuple):
        return f"({' '.join(map(_constant_text, constant))})"
    if isinstance(constant, frozenset):
        # In another process they may have another order.
        return f"{{{' '.join(sorted(map(_constant_text, constant)))}}}"
    return repr(constant)


# The view under which a definition reads the chunk's rows.
CHUNK = "chunk"
NEWEST, OLDEST = "newest", "oldest"

# The rows of a table: the chunk's rows unchanged, Spark SQL over `chunk`, or a function of its DataFrame.
Definition: TypeAlias = "str | Callable[[DataFrame], DataFrame] | None"
# As the catalog stores it: a function by its fingerprint.
StoredDefinition: TypeAlias = str | Mapping[str, str] | None


class StoredOptions(TypedDict):
    """The options of a run that the catalog stores with its job."""

    order: str
    workers: int
    rows_min: int | None
    rows_max: int | None
    rows_exact: bool
    manifest: str | None
    keep: str | int | None
    follow: bool
    tip_wait_s: float
    call_deadline_s: float
    retries: int


@dataclass(frozen=True)
class HistorySpec:
    """`column`: the position of a row in the range. `keep`: how much below the tip, or before now, is kept (see
    prune.py).

    `manifest`: a file that describes each chunk (chunk_checks.py). `retries`: how often a chunk is tried; between two
    tries retry_s, doubled each time. poll_s: how often a waiting run asks for the tip. `forget_tip`: this start ignores
    how far the history came before (frontier.py).
    """

    name: str
    source: HistorySource
    tables: Mapping[str, Definition]
    geometry: Geometry
    column: str | None = None
    order: str = NEWEST
    workers: int = 2
    rows_min: int | None = None
    rows_max: int | None = None
    rows_exact: bool = False
    manifest: str | None = None
    keep: str | int | None = None
    follow: bool = False
    tip_wait_s: float = 0.0
    call_deadline_s: float = 60.0
    retries: int = 5
    poll_s: float = 1.0
    retry_s: float = 1.0
    forget_tip: bool = False

    @property
    def plain_tables(self) -> list[str]:
        """The tables that store the chunk's rows unchanged."""
        return [table for table, definition in self.tables.items() if definition is None]

    @property
    def newest_first(self) -> bool:
        return self.order == NEWEST

    def pinned(self) -> dict[str, Json]:
        return {**self.geometry.as_dict(), "column": self.column}

    def settings(self) -> dict[str, Json]:
        tables = {table: stored_definition(definition) for table, definition in self.tables.items()}
        options = {name: getattr(self, name) for name in StoredOptions.__annotations__}
        return {"source": source_as_dict(self.source), "tables": tables, **options}


@dataclass(frozen=True)
class StoredHistory:
    """What the catalog stores of a history: known without its source."""

    geometry: Geometry
    column: str | None
    tables: Mapping[str, StoredDefinition]
    keep: str | int | None
    settings: Mapping[str, Json]


def kept_units(geometry: Geometry, keep: str | int | None) -> int | None:
    """`keep` as an inner value."""
    if keep is None:
        return None
    return geometry.value(keep) if geometry.unit == NUMBER else span_us(keep)


def spec_from_job(job: Job, source: HistorySource | None = None) -> HistorySpec:
    """The spec that a job was last started with; `source`: one that the catalog cannot store.

    `Invalid` if it cannot be made from what the catalog stores.
    """
    stored = stored_history(job)
    tables = {table: _definition(job.name, table, one) for table, one in stored.tables.items()}
    return HistorySpec(
        name=job.name,
        source=source_from_dict(stored.settings["source"]) if source is None else source,
        tables=tables,
        geometry=stored.geometry,
        column=stored.column,
        **_stored_options(job),
    )


def _stored_options(job: Job) -> StoredOptions:
    settings = json.loads(job.spec)["settings"]
    try:
        return StoredOptions(
            order=settings["order"],
            workers=settings["workers"],
            rows_min=settings["rows_min"],
            rows_max=settings["rows_max"],
            rows_exact=settings["rows_exact"],
            manifest=settings["manifest"],
            keep=settings["keep"],
            follow=settings["follow"],
            tip_wait_s=settings["tip_wait_s"],
            call_deadline_s=settings["call_deadline_s"],
            retries=settings["retries"],
        )
    except KeyError as error:
        raise Corrupt("the stored settings of a job are invalid", job=job.name, missing=error) from error


def stored_history(job: Job) -> StoredHistory:
    """`Corrupt` if the catalog stores something else with the job."""
    try:
        stored = json.loads(job.spec)
        pinned, settings = dict(stored["pinned"]), stored["settings"]
        column = pinned.pop("column")
        if not isinstance(settings["tables"], dict) or "source" not in settings:
            raise ValueError("its tables or its source are missing")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corrupt("the stored settings of a job are invalid", job=job.name, cause=error) from error
    geometry = Geometry.from_dict(pinned)
    return StoredHistory(geometry, column, settings["tables"], settings.get("keep"), settings)


def stored_definition(definition: Definition) -> StoredDefinition:
    """A definition as the catalog stores it."""
    if definition is None or isinstance(definition, str):
        return definition
    return fingerprint(definition)


def is_same_definition(stored: StoredDefinition, definition: Definition) -> bool:
    """Whether a definition is the one that the catalog stores, as far as functions can be compared."""
    given = stored_definition(definition)
    if isinstance(stored, Mapping) and isinstance(given, Mapping):
        return is_same_function(stored, given)
    return stored == given


def _definition(job: str, table: str, stored: StoredDefinition) -> Definition:
    if stored is None or isinstance(stored, str):
        return stored
    raise Invalid(
        "the definition of a table was a function, which the catalog cannot store",
        job=job,
        table=table,
        advice="Start the job again with the same call and name: it continues.",
    )


# ── checks ──


def check_spec(context: JobContext, spec: HistorySpec) -> None:
    """Refuse what cannot be loaded, before a job exists. Does not ask the source.

    Spark is asked only which tables a new definition reads, if its text does not show it.
    """
    _check_numbers(spec)
    if not spec.tables:
        raise Invalid("a history needs at least one table", job=spec.name)
    if isinstance(spec.source, TableSource) and spec.source.table in spec.tables:
        raise Invalid("a table cannot be its own source", table=spec.source.table, job=spec.name)
    for table, definition in spec.tables.items():
        context.catalog.history.head(table)
        if table.lower() == CHUNK:
            raise Invalid("definitions use this name for the rows of the chunk", table=table)
        if definition is not None and not callable(definition):
            query_body(definition)
    _check_column(context, spec)
    _check_end(spec)
    kept = kept_units(spec.geometry, spec.keep)
    if kept is not None and kept <= 0:
        raise Invalid("keep must be above zero", keep=spec.keep)
    if not _are_known(context, spec):
        _check_references(context, spec)


def _check_numbers(spec: HistorySpec) -> None:
    if spec.order not in (NEWEST, OLDEST):
        raise Invalid("the order of chunks must be newest or oldest", order=spec.order, advice="Use newest or oldest.")
    for name in ("workers", "retries"):
        if getattr(spec, name) < 1:
            raise Invalid(f"{name} must be a whole number above 0", given=getattr(spec, name))
    if spec.tip_wait_s < 0 or spec.call_deadline_s <= 0:
        raise Invalid("these times must be above 0", tip_wait_s=spec.tip_wait_s, call_deadline_s=spec.call_deadline_s)
    low, high = spec.rows_min or 0, spec.rows_max
    if low < 0 or (high is not None and high < low):
        raise Invalid("no chunk can have so many rows", rows_min=spec.rows_min, rows_max=high)
    if spec.rows_exact and spec.geometry.unit != NUMBER:
        raise Invalid(
            "only a range of numbers has one row for every number",
            advice="Use --rows-min and --rows-max (rows_min, rows_max).",
        )


def references(table: str, definition: str, tables: Mapping[str, Definition], sessions: Sessions) -> list[str]:
    """The other tables of the job that a definition reads; their names stand for their rows of the chunk.

    A column may have the name of a table: using it does not read the table.
    """
    named = named_tables(definition, {name: None for name in tables if name != table})
    if not named:
        return []
    read = {name.lower() for name in relations(query_body(definition), [CHUNK, *tables], sessions)}
    return [name for name in named if name.lower() in read]


def _are_known(context: JobContext, spec: HistorySpec) -> bool:
    """Whether an earlier start of the job had the same definitions: they were checked then."""
    try:
        stored = stored_history(context.catalog.jobs.find(spec.name)).tables
    except (NotFound, Corrupt):
        return False  # the code that needs its settings reports that they cannot be read
    return stored.keys() == spec.tables.keys() and all(
        is_same_definition(stored[table], definition) for table, definition in spec.tables.items()
    )


def _check_references(context: JobContext, spec: HistorySpec) -> None:
    """A definition reads the chunk and the job's other tables. It must not depend on itself, even through others."""
    names = {name.lower(): name for name in (CHUNK, *spec.tables)}
    needed: dict[str, list[str]] = {table: [] for table in spec.tables}
    for table, definition in spec.tables.items():
        if not isinstance(definition, str):
            continue
        read = relations(query_body(definition), names, context.engine.sessions)
        if strange := [name for name in read if name.lower() not in names]:
            raise Invalid(
                "a definition reads something other than the chunk and the job's tables",
                table=table,
                reads=", ".join(strange),
                advice="Views of a session and other tables may not exist in another run: read from `chunk`.",
            )
        needed[table] = [names[name.lower()] for name in read if name.lower() != CHUNK]
    for start in spec.tables:
        seen: set[str] = set()
        waiting = list(needed[start])
        while waiting:
            table = waiting.pop()
            if table == start:
                raise Invalid("this definition refers to itself, directly or through others", table=start)
            if table not in seen:
                seen.add(table)
                waiting += needed[table]


def _check_column(context: JobContext, spec: HistorySpec) -> None:
    if spec.column is None:
        if spec.keep is not None:
            raise Invalid(
                "keep needs the range column",
                keep=spec.keep,
                advice="Name it: --column NAME (in Python column=…).",
            )
        return
    for table in spec.plain_tables or list(spec.tables):
        # A computed table may lack it, unless no other table has it.
        if spec.tables[table] is None or not any(has_column(context, one, spec) for one in spec.tables):
            table_range(context, spec.geometry, table, spec.column)


def _check_end(spec: HistorySpec) -> None:
    """A range without an end needs a source that knows how far it has come."""
    source, geometry = spec.source, spec.geometry
    if geometry.last is not None or not isinstance(source, CallSource | PathSource):
        return
    # Files named by the time of their rows go up to now.
    if source.tip_given is None and not (isinstance(source, PathSource) and geometry.unit == TIME):
        raise no_tip(spec.name)


def no_tip(job: str) -> Invalid:
    return Invalid(
        "the source has no tip, and the range has no end",
        job=job,
        advice="Give the range an end (--last), or the source a tip (--tip; in Python last=…, tip=…).",
    )


def table_range(context: JobContext, geometry: Geometry, table: str, column: str) -> TableRange:
    return TableRange.at_head(context.catalog, context.engine.sessions, geometry, table, column)


def has_column(context: JobContext, table: str, spec: HistorySpec) -> bool:
    """Whether the table has the job's range column, of the history's kind."""
    if spec.column is None:
        return False
    try:
        table_range(context, spec.geometry, table, spec.column)
    except Invalid:
        return False
    return True
