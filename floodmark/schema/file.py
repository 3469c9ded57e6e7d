"""The schema file: tables as their owners want them, in TOML; the same under `[tables.X]` of the settings.

Read as a whole: every table is checked before one is returned, and an unknown key names the nearest known one. What a
table's entry omits stays as it is in the lake (key, partition, sort, retention, references, indexes, comment); `[]`,
`{}`, "none" and "" remove it. Columns are listed completely or not at all: a column that is not listed is dropped.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path

from pyiceberg.schema import Schema
from pyiceberg.types import BooleanType, IcebergType, IntegerType, LongType, NestedField, StringType

from floodmark.errors import FloodmarkError, Invalid, NotFound
from floodmark.index.wanted import wanted_index
from floodmark.json_form import Json
from floodmark.maintenance.policy import check_policy
from floodmark.rows.ddl import parse_ddl
from floodmark.rows.schema import fresh_field
from floodmark.rows.sql.expression import parse_plain
from floodmark.schema.column_types import type_text
from floodmark.settings.settings import Settings, unknown_key
from floodmark.write.shape import TableShape, check_name, plan_table

TABLE_KEYS = (
    *("columns", "schema", "key", "partition", "sort", "retention", "retention_column", "references"),
    *("index", "comment", "dropped", "drop"),
)
COLUMN_KEYS = ("type", "required", "default", "comment", "renamed_from")
NO_RETENTION = "none"
_LISTS = ("key", "partition", "sort", "dropped")
_TEXTS = ("retention", "retention_column", "comment", "schema")
_REFERENCE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\.(.+)")

Default = str | int | bool


@dataclass(frozen=True)
class WantedColumn:
    """`kind` has placeholder ids. comment None: unchanged. renamed_from: the former name of the column."""

    name: str
    kind: IcebergType
    required: bool = False
    default: Default | None = None
    comment: str | None = None
    renamed_from: str | None = None

    @property
    def literal(self) -> str:
        """The default as an expression that fills the column."""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"'{self.default}'" if isinstance(self.default, str) else str(self.default)

    def to_field(self) -> NestedField:
        doc = self.comment or None
        return NestedField(field_id=-1, name=self.name, field_type=self.kind, required=self.required, doc=doc)


@dataclass(frozen=True)
class ColumnChange:
    """One column is added, or gets another name, or goes; the others stay as they are when it is planned."""

    add: WantedColumn | None = None
    rename: tuple[str, str] | None = None
    drop: str | None = None


@dataclass(frozen=True)
class WantedTable:
    """A table as the file declares it. None, or no columns: unchanged."""

    name: str
    columns: tuple[WantedColumn, ...] = ()
    key: tuple[str, ...] | None = None
    partition: tuple[str, ...] | None = None
    sort: tuple[str, ...] | None = None
    retention: str | None = None
    retention_column: str | None = None
    references: Mapping[str, str] | None = None
    # The columns of each index.
    indexes: tuple[tuple[str, ...], ...] | None = None
    comment: str | None = None
    dropped: frozenset[str] = field(default_factory=frozenset)
    drop: bool = False
    # What no file says, but a verb of the lake: the table's new name, or the change of one column.
    rename_to: str | None = None
    change: ColumnChange | None = None

    @property
    def parents(self) -> dict[str, tuple[str, str]]:
        """By column, the table and the column that it refers to."""
        return {column: split_reference(target) for column, target in (self.references or {}).items()}

    def shape(self) -> TableShape:
        """The table as it would be created now; `Invalid` if such a table cannot exist."""
        ids = count(1)
        schema = Schema(*(fresh_field(column.to_field(), ids) for column in self.columns))
        properties = {"comment": self.comment} if self.comment else {}
        return plan_table(
            self.name,
            schema,
            key=self.key or (),
            partition=self.partition or (),
            sort=self.sort or (),
            properties=properties,
        )


def added_column(table: str, name: str, entry: Mapping[str, Json], origin: str) -> WantedTable:
    """The table with one column more; `entry` is as in a file."""
    return WantedTable(table, change=ColumnChange(add=_column(name, entry, f"tables.{table}.columns.{name}", origin)))


def read_wanted(path: str | os.PathLike[str]) -> tuple[WantedTable, ...]:
    """The tables that a file declares."""
    place = Path(path)
    if not place.is_file():
        raise NotFound("there is no such file", path=place, advice="Give the path of a file that declares tables.")
    try:
        data = tomllib.loads(place.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid("the file is not TOML", path=place, cause=error) from error
    return wanted_tables(_declared(data, str(place)), str(place))


def tables_of(data: Mapping[str, Json], origin: str) -> Json:
    """The tables of what `tomllib` read from such a file, or of `{name: entry}`; one of those may be named `tables`."""
    inner = data.get("tables")
    if not isinstance(inner, Mapping):
        return data
    is_entry = bool(inner) and set(inner) <= set(TABLE_KEYS) and not all(map(_is_entry, inner.values()))
    return data if is_entry else _declared(data, origin)


def _is_entry(value: Json) -> bool:
    return isinstance(value, Mapping) and set(value) <= set(TABLE_KEYS)


def _declared(data: Mapping[str, Json], origin: str) -> Json:
    """The tables of a file. It may be the settings file, whose other sections this module ignores."""
    sections = [one.name for one in fields(Settings)]
    for key in data:
        if key not in sections:
            raise unknown_key(key, sections, origin)
    return data.get("tables", {})


def wanted_tables(data: Json, origin: str) -> tuple[WantedTable, ...]:
    """The tables of `{name: entry}`; all of them are checked before any is returned. Pure."""
    if not isinstance(data, Mapping):
        raise _wrong("tables", "write tables as [tables.NAME]", origin)
    found: list[WantedTable] = []
    names: dict[str, str] = {}
    for name, entry in data.items():
        if not isinstance(entry, Mapping):
            raise _wrong(f"tables.{name}", "write the table as [tables.NAME]", origin)
        other = names.setdefault(str(name).lower(), str(name))
        if other != name:
            raise _wrong(f"tables.{name}", f"{other} is declared too; names must differ by more than case", origin)
        try:
            found.append(_table(str(name), entry, origin))
        except FloodmarkError as error:
            if "file" in error.facts:
                raise
            # Errors of the packages below do not name the place in the file: add it.
            raise Invalid(
                error.message, advice=error.advice, **{"table": name, **error.facts, "file": origin}
            ) from error
    return tuple(found)


def _table(name: str, entry: Mapping[str, Json], origin: str) -> WantedTable:
    where = f"tables.{name}"
    check_name(name)
    for key in entry:
        if key == "renamed_from":
            raise _wrong(
                f"{where}.{key}", "rename it with `floodmark rename`, then declare it under its new name", origin
            )
        if key not in TABLE_KEYS:
            raise unknown_key(f"{where}.{key}", list(TABLE_KEYS), origin)
    if "drop" in entry:
        if entry["drop"] is not True or len(entry) > 1:
            raise _wrong(f"{where}.drop", "`drop = true`, alone in its table", origin)
        return WantedTable(name, drop=True)
    texts = {key: _text(entry[key], f"{where}.{key}", origin) for key in _TEXTS if key in entry}
    lists = {key: _names(entry[key], f"{where}.{key}", origin) for key in _LISTS if key in entry}
    wanted = WantedTable(
        name,
        _columns(entry, texts.get("schema"), where, origin),
        lists.get("key"),
        lists.get("partition"),
        lists.get("sort"),
        texts.get("retention"),
        texts.get("retention_column"),
        _references(entry.get("references"), where, origin),
        _indexes(entry.get("index"), f"{where}.index", origin),
        texts.get("comment"),
        frozenset(lists.get("dropped", ())),
    )
    _check(wanted, where, origin)
    return wanted


def _check(wanted: WantedTable, where: str, origin: str) -> None:
    """Errors that can be found without a lake."""
    if wanted.retention_column is not None and wanted.retention in (None, NO_RETENTION):
        raise _wrong(f"{where}.retention_column", "it goes with `retention`", origin)
    if not wanted.columns:
        return
    shape = wanted.shape()
    names = {column.name for column in wanted.columns}
    if wanted.retention not in (None, NO_RETENTION):
        check_policy(str(wanted.retention), wanted.retention_column, shape.schema, shape.spec)
    for name in wanted.references or {}:
        if name not in names:
            raise _wrong(f"{where}.references.{name}", f"no such column, only {', '.join(sorted(names))}", origin)
    if both := sorted(wanted.dropped & names):
        raise _wrong(f"{where}.dropped", f"{', '.join(both)} is a column, too", origin)
    for on in wanted.indexes or ():
        wanted_index(wanted.name, shape.schema, on)
    olds = [column.renamed_from for column in wanted.columns if column.renamed_from is not None]
    if twice := sorted({old for old in olds if olds.count(old) > 1}):
        raise _wrong(f"{where}.columns", f"two columns have renamed_from = {', '.join(twice)}", origin)
    if circle := _circle({column.name: column.renamed_from for column in wanted.columns}):
        problem = f"{', '.join(circle)} take each other's names; rename in several applies, over a name that is free"
        raise _wrong(f"{where}.columns", problem, origin)
    for column in wanted.columns:
        if column.default is not None and column.name in (wanted.references or {}):
            raise _wrong(f"{where}.references.{column.name}", "a column with a default cannot refer", origin)


def _circle(olds: Mapping[str, str | None]) -> list[str]:
    """Columns that each declare the name of another one as their former name: whether that was done is unknown."""
    for first in olds:
        names: list[str] = []
        name: str | None = first
        while name is not None and name not in names:
            names.append(name)
            name = olds.get(name)
        if name == first:
            return names
    return []


# ── columns ──


def _columns(entry: Mapping[str, Json], schema: str | None, where: str, origin: str) -> tuple[WantedColumn, ...]:
    if schema is not None and "columns" in entry:
        raise _wrong(f"{where}.schema", "one of `schema` and `columns`", origin)
    if schema is not None:
        return tuple(
            WantedColumn(one.name, one.field_type, one.required, comment=one.doc) for one in parse_ddl(schema).fields
        )
    columns = entry.get("columns", {})
    if not isinstance(columns, Mapping) or ("columns" in entry and not columns):
        raise _wrong(f"{where}.columns", 'columns as name = "type"', origin)
    return tuple(_column(str(name), value, f"{where}.columns.{name}", origin) for name, value in columns.items())


def _column(name: str, value: Json, where: str, origin: str) -> WantedColumn:
    given = {"type": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise _wrong(where, 'a type, or { type = "…", required = true }', origin)
    for key in given:
        if key not in COLUMN_KEYS:
            raise unknown_key(f"{where}.{key}", list(COLUMN_KEYS), origin)
    if not isinstance(given.get("type"), str):
        raise _wrong(f"{where}.type", "a type in Spark's words, like decimal(10,2)", origin)
    required = given.get("required", False)
    if not isinstance(required, bool):
        raise _wrong(f"{where}.required", "true or false", origin)
    texts = {key: _text(given[key], f"{where}.{key}", origin) for key in ("comment", "renamed_from") if key in given}
    read = parse_ddl(f"`{name.replace('`', '``')}` {given['type']}").fields
    if len(read) != 1:
        raise _wrong(f"{where}.type", "one type", origin)
    if texts.get("renamed_from") == name:
        raise _wrong(f"{where}.renamed_from", "the name that the column had before", origin)
    column = WantedColumn(
        name,
        read[0].field_type,
        required if "required" in given else read[0].required,
        _default(given.get("default"), read[0].field_type, f"{where}.default", origin),
        texts.get("comment", read[0].doc),
        texts.get("renamed_from"),
    )
    if column.default is not None:
        _check_default(column, f"{where}.default", origin)
    return column


def _default(value: Json, kind: IcebergType, where: str, origin: str) -> Default | None:
    """The value, if a column of this type may have it as its default."""
    if value is None:
        return None
    kinds = {bool: (BooleanType,), int: (IntegerType, LongType), str: (StringType,)}.get(type(value))
    if not isinstance(value, Default) or kinds is None or not isinstance(kind, kinds):
        raise Invalid(
            "a column of this type cannot have this default",
            setting=where,
            type=type_text(kind),
            default=repr(value),
            file=origin,
            advice="Defaults are whole numbers, texts, true and false; `floodmark backfill column` fills any other.",
        )
    return value


def _check_default(column: WantedColumn, where: str, origin: str) -> None:
    """A default is a literal that every writer fills in by itself, without Spark."""
    plain = parse_plain(column.literal, Schema())
    too_long = plain is not None and isinstance(column.kind, IntegerType) and isinstance(plain.kind, LongType)
    if plain is None or plain.column is not None or too_long:
        raise Invalid(
            "this default cannot be written down",
            setting=where,
            default=repr(column.default),
            file=origin,
            advice="No quotes, backslashes, dollars or control characters; numbers that fit the type.",
        )


# ── parsing ──


def _text(value: Json, where: str, origin: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "a text", origin)
    return value


def _names(value: Json, where: str, origin: str) -> tuple[str, ...]:
    found = [] if not isinstance(value, Sequence) else [one for one in value if isinstance(one, str)]
    if not isinstance(value, Sequence) or isinstance(value, str) or len(found) != len(value):
        raise _wrong(where, 'a list of texts, like ["id"]', origin)
    return tuple(found)


def _indexes(value: Json, where: str, origin: str) -> tuple[tuple[str, ...], ...] | None:
    """The columns of each index: one name, or a list of names."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong(where, 'a list of columns, like ["customer", ["country", "city"]]', origin)
    found = [(one,) if isinstance(one, str) else _names(one, where, origin) for one in value]
    if twice := sorted({", ".join(one) for one in found if sum(set(one) == set(other) for other in found) > 1}):
        raise _wrong(where, f"two indexes on {'; '.join(twice)}", origin)
    return tuple(found)


def _references(value: Json, where: str, origin: str) -> Mapping[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong(f"{where}.references", '{ column = "table.column" }', origin)
    found: dict[str, str] = {}
    for column, target in value.items():
        if not isinstance(target, str) or _REFERENCE.fullmatch(target) is None:
            raise _wrong(f"{where}.references.{column}", 'a column of a table, like "customers.id"', origin)
        found[column] = target
    return found


def split_reference(text: str) -> tuple[str, str]:
    """Table and column of `customers.id`."""
    table, _, column = text.partition(".")
    return table, column


def _wrong(name: str, problem: str, origin: str) -> Invalid:
    return Invalid("a table is declared in the wrong form", setting=name, problem=problem, file=origin)
