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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from floodmark.backfill.chunks.geometry import NUMBER, TIME, Geometry, span_us
from floodmark.backfill.chunks.ranges import TableRange
from floodmark.backfill.chunks.sources import (
    CallSource,
    PathSource,
    Source,
    TableSource,
    source_as_dict,
    source_from_dict,
)
from floodmark.catalog.jobs import Job
from floodmark.errors import Corrupt, Invalid, NotFound
from floodmark.jobs.run import Room
from floodmark.rows.session import Sessions
from floodmark.rows.sql.query import named_tables, query_body
from floodmark.rows.sql.table_names import relations

if TYPE_CHECKING:
    pass


_CHARACTERS = 16


def fingerprint(function: Callable[..., Any]) -> dict[str, str]:
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


def _constant_text(constant: Any) -> str:
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
Definition = str | Callable[[Any], Any] | None

_KEPT = (
    "order",
    "workers",
    "rows_min",
    "rows_max",
    "rows_exact",
    "manifest",
    "keep",
    "follow",
    "tip_wait_s",
    "call_deadline_s",
    "retries",
)


@dataclass(frozen=True)
class HistorySpec:
    """`column`: the position of a row in the range. `keep`: how much below the tip, or before now, is kept (see
    prune.py).

    `manifest`: a file that describes each chunk (checks.py). `retries`: how often a chunk is tried; between two tries
    retry_s, doubled each time. poll_s: how often a waiting run asks for the tip. `forget_tip`: this start ignores how
    far the history came before (tip.py).
    """

    name: str
    source: Source
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

    def pinned(self) -> dict[str, Any]:
        return {**self.geometry.as_dict(), "column": self.column}

    def settings(self) -> dict[str, Any]:
        tables = {table: kept_definition(definition) for table, definition in self.tables.items()}
        kept = {name: getattr(self, name) for name in _KEPT}
        return {"source": source_as_dict(self.source), "tables": tables, **kept}


def kept_units(geometry: Geometry, keep: str | int | None) -> int | None:
    """`keep` as an inner value."""
    if keep is None:
        return None
    return geometry.value(keep) if geometry.unit == NUMBER else span_us(keep)


def spec_from_job(job: Job, source: Source | None = None) -> HistorySpec:
    """The spec that a job was last started with; `source`: one that the catalog cannot store.

    `Invalid` if it cannot be made from what the catalog stores.
    """
    geometry, column, settings = kept_parts(job)
    tables = {table: _definition(job.name, table, kept) for table, kept in settings["tables"].items()}
    try:
        kept = {name: settings[name] for name in _KEPT}
    except KeyError as error:
        raise Corrupt("the kept settings of a job cannot be understood", job=job.name, missing=error) from error
    return HistorySpec(
        name=job.name,
        source=source_from_dict(settings["source"]) if source is None else source,
        tables=tables,
        geometry=geometry,
        column=column,
        **kept,
    )


def kept_parts(job: Job) -> tuple[Geometry, str | None, Mapping[str, Any]]:
    """A job's geometry, range column and settings: what is known without its source."""
    try:
        kept = json.loads(job.spec)
        pinned, settings = dict(kept["pinned"]), kept["settings"]
        column = pinned.pop("column")
        if not isinstance(settings["tables"], dict) or "source" not in settings:
            raise ValueError("its tables or its source are not there")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corrupt("the kept settings of a job cannot be understood", job=job.name, cause=error) from error
    return Geometry.from_dict(pinned), column, settings


def kept_definition(definition: Definition) -> Any:
    """A definition as the catalog stores it."""
    if definition is None or isinstance(definition, str):
        return definition
    return fingerprint(definition)


def is_same_definition(kept: Any, definition: Definition) -> bool:
    """Whether a definition is the one that the catalog stores, as far as functions can be compared."""
    given = kept_definition(definition)
    if isinstance(kept, dict) and isinstance(given, dict):
        return is_same_function(kept, given)
    return bool(kept == given)


def _definition(job: str, table: str, kept: Any) -> Definition:
    if kept is None or isinstance(kept, str):
        return kept
    raise Invalid(
        "what comes into a table was a function, which the catalog cannot keep",
        job=job,
        table=table,
        advice="Start the job again by the same call, with the same name: it goes on from where it is.",
    )


# ── checks ──


def check_spec(room: Room, spec: HistorySpec) -> None:
    """Refuse what cannot be loaded, before a job exists. Does not ask the source.

    Spark is asked only which tables a new definition reads, if its text does not show it.
    """
    _check_numbers(spec)
    if not spec.tables:
        raise Invalid("a history comes into at least one table", job=spec.name)
    if isinstance(spec.source, TableSource) and spec.source.table in spec.tables:
        raise Invalid("a table cannot be its own source", table=spec.source.table, job=spec.name)
    for table, definition in spec.tables.items():
        room.catalog.history.head(table)
        if table.lower() == CHUNK:
            raise Invalid("this name stands for the chunk's rows in definitions", table=table)
        if definition is not None and not callable(definition):
            query_body(definition)
    _check_column(room, spec)
    _check_end(spec)
    kept = kept_units(spec.geometry, spec.keep)
    if kept is not None and kept <= 0:
        raise Invalid("what is kept is above zero", keep=spec.keep)
    if not _are_known(room, spec):
        _check_references(room, spec)


def _check_numbers(spec: HistorySpec) -> None:
    if spec.order not in (NEWEST, OLDEST):
        raise Invalid("chunks come newest or oldest first", order=spec.order, advice="Use newest or oldest.")
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


def _are_known(room: Room, spec: HistorySpec) -> bool:
    """Whether an earlier start of the job had the same definitions: they were checked then."""
    try:
        kept = kept_parts(room.catalog.jobs.find(spec.name))[2]["tables"]
    except (NotFound, Corrupt):
        return False  # the code that needs its settings reports that they cannot be read
    return kept.keys() == spec.tables.keys() and all(
        is_same_definition(kept[table], definition) for table, definition in spec.tables.items()
    )


def _check_references(room: Room, spec: HistorySpec) -> None:
    """A definition reads the chunk and the job's other tables. It must not depend on itself, even through others."""
    names = {name.lower(): name for name in (CHUNK, *spec.tables)}
    needed: dict[str, list[str]] = {table: [] for table in spec.tables}
    for table, definition in spec.tables.items():
        if not isinstance(definition, str):
            continue
        read = relations(query_body(definition), names, room.engine.sessions)
        if strange := [name for name in read if name.lower() not in names]:
            raise Invalid(
                "a definition reads what is neither the chunk nor a table of the job",
                table=table,
                reads=", ".join(strange),
                advice="Views of a session and other tables are not there for every run: take it from `chunk`.",
            )
        needed[table] = [names[name.lower()] for name in read if name.lower() != CHUNK]
    for start in spec.tables:
        seen: set[str] = set()
        waiting = list(needed[start])
        while waiting:
            table = waiting.pop()
            if table == start:
                raise Invalid("this definition names itself, or through others", table=start)
            if table not in seen:
                seen.add(table)
                waiting += needed[table]


def _check_column(room: Room, spec: HistorySpec) -> None:
    if spec.column is None:
        if spec.keep is not None:
            raise Invalid(
                "what is to go below a floor is told by the range column",
                keep=spec.keep,
                advice="Name it: --column NAME (in Python column=…).",
            )
        return
    for table in spec.plain_tables or list(spec.tables):
        # A computed table may lack it, unless no other table has it.
        if spec.tables[table] is None or not any(has_column(room, one, spec) for one in spec.tables):
            table_range(room, spec.geometry, table, spec.column)


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
        "the source does not know how far it has come, and the range has no end",
        job=job,
        advice="Give the range an end (--last), or the source a tip (--tip; in Python last=…, tip=…).",
    )


def table_range(room: Room, geometry: Geometry, table: str, column: str) -> TableRange:
    return TableRange.at_head(room.catalog, room.engine.sessions, geometry, table, column)


def has_column(room: Room, table: str, spec: HistorySpec) -> bool:
    """Whether the table has the job's range column, of the history's kind."""
    if spec.column is None:
        return False
    try:
        table_range(room, spec.geometry, table, spec.column)
    except Invalid:
        return False
    return True
