"""The order of a lookup's rows, the best of them, and the cursor that continues after the last one.

Rows are ordered by the columns that were asked for, as Spark orders them: null below all values, NaN above. Ties are
broken by the key, of a table without one by file and position, so every row has a place of its own and a page begins
exactly after the last row of the page before. A cursor is text that holds everything: nothing is kept for it. Its
version is the one that the first page read, and rows of a version never change.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyiceberg.types import NestedField, PrimitiveType

from floodmark.errors import Invalid
from floodmark.json_form import Json
from floodmark.model import Scalar
from floodmark.rows.arrays import Mask, Numbers
from floodmark.rows.project import read_schema
from floodmark.rows.schema import nearest

Order: TypeAlias = str | Sequence[str]
_FORM = 1
CURSOR_CHARACTERS_MAX = 16_384


@dataclass(frozen=True)
class Ranking:
    """How rows are ordered: by some columns, each ascending or not, then by the key or by file and position."""

    columns: tuple[tuple[NestedField, bool], ...]
    key: tuple[NestedField, ...]

    @classmethod
    def of(cls, order: Order | None, fields: Sequence[NestedField], key: Sequence[NestedField]) -> Ranking:
        asked = [] if order is None else [order] if isinstance(order, str) else list(order)
        return cls(tuple(_ordered(one, fields) for one in asked), tuple(key))

    @property
    def fields(self) -> list[NestedField]:
        """The columns that decide."""
        return list({field.field_id: field for field in (*(one for one, _ in self.columns), *self.key)}.values())

    @property
    def text(self) -> str:
        return ", ".join(f"{field.name}{'' if ascends else ' desc'}" for field, ascends in self.columns)

    @property
    def by_place(self) -> bool:
        """Whether rows come as they lie in the files."""
        return not self.columns and not self.key

    def ranks(self, rows: pa.RecordBatch, path: str, positions: Numbers) -> pa.Table:
        """What rows of one file are compared by."""
        parts: list[pa.Array] = []
        for field, _ in self.columns:
            parts += _comparable(rows.column(field.name))
        if self.key:
            parts += [rows.column(field.name) for field in self.key]
        else:
            parts += [pa.repeat(path, len(positions)), pa.array(positions)]
        return pa.table(parts, names=[str(at) for at in range(len(parts))])

    @property
    def directions(self) -> list[bool]:
        """Whether each column of the ranks ascends."""
        found: list[bool] = []
        for field, ascends in self.columns:
            found += [ascends] * len(_comparable(pa.array([], read_schema([field]).field(0).type)))
        return found + [True] * (len(self.key) or 2)

    @property
    def kinds(self) -> list[pa.DataType]:
        none = pa.RecordBatch.from_pylist([], read_schema(self.fields))
        return [field.type for field in self.ranks(none, "", np.empty(0, np.int64)).schema]


def _comparable(column: pa.Array) -> list[pa.Array]:
    """A column as several without nulls and NaN that matter: whether there is a value, whether it is NaN, the value."""
    if not types.is_floating(column.type):
        return [column.is_valid(), column]
    doubles = pc.add(column.cast(pa.float64()), 0.0)
    nan = pc.is_nan(doubles).fill_null(False)
    return [column.is_valid(), nan, pc.if_else(nan, None, doubles)]


def _ordered(text: str, fields: Sequence[NestedField]) -> tuple[NestedField, bool]:
    by_name = {field.name: field for field in fields}
    name, ascends = text, True
    if name not in by_name:
        name, _, word = text.strip().rpartition(" ")
        ascends = word.lower() != "desc"
        name = name.strip() if word.lower() in ("asc", "desc") else text.strip()
    field = by_name.get(name)
    if field is None:
        advice = f'{nearest(name, list(by_name))} Write order="column" or order="column desc".'
        raise Invalid("there is no such column to order by", column=name, advice=advice)
    if not isinstance(field.field_type, PrimitiveType):
        raise Invalid("rows cannot be ordered by this column", column=name, type=field.field_type)
    return field, ascends


class Best:
    """The first rows by a ranking, of all that are added; memory follows their number (I14)."""

    def __init__(self, ranking: Ranking, limit: int, after: Sequence[pa.Scalar] | None) -> None:
        self._directions = ranking.directions
        self._limit = limit
        self._after = after
        self._ranks: list[pa.Table] = []
        self._rows: list[pa.RecordBatch] = []
        self.count = 0

    def add(self, ranks: pa.Table, rows: pa.RecordBatch) -> None:
        if self._after is not None:
            later = pa.array(_later(ranks, self._after, self._directions))
            ranks, rows = ranks.filter(later), rows.filter(later)
        self._ranks.append(ranks)
        self._rows.append(rows)
        self.count += len(rows)
        if self.count > 2 * self._limit:
            self._cut()

    def sorted(self) -> tuple[pa.Table, pa.Table] | None:
        """Ranks and rows, in order; None if there are none."""
        if not self.count:
            return None
        self._cut()
        return self._ranks[0], pa.Table.from_batches(self._rows)

    def _cut(self) -> None:
        ranks, rows = pa.concat_tables(self._ranks), pa.Table.from_batches(self._rows)
        keys = [
            (name, "ascending" if ascends else "descending")
            for name, ascends in zip(ranks.schema.names, self._directions, strict=True)
        ]
        chosen = pc.sort_indices(ranks, sort_keys=keys)[: self._limit]
        self._ranks = [ranks.take(chosen)]
        self._rows = rows.take(chosen).combine_chunks().to_batches()
        self.count = len(chosen)


def _later(ranks: pa.Table, after: Sequence[pa.Scalar], directions: Sequence[bool]) -> Mask:
    """Which rows come after a place."""
    later: Mask = np.zeros(len(ranks), np.bool_)
    same: Mask = np.ones(len(ranks), np.bool_)
    for column, value, ascends in zip(ranks.columns, after, directions, strict=True):
        if not value.is_valid:
            # Whether a value is there was compared before: now it is null in all rows that are still the same.
            continue
        beyond = pc.greater(column, value) if ascends else pc.less(column, value)
        later |= same & _mask(beyond)
        same &= _mask(pc.equal(column, value))
    return later


def _mask(found: pa.ChunkedArray) -> Mask:
    mask: Mask = found.combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)
    return mask


# ── cursors ──


@dataclass(frozen=True)
class Cursor:
    """Where a page ended: the version that it read, which lookup it was, and the ranks of its last row."""

    version: int
    query: str
    after: tuple[Json, ...]

    @property
    def text(self) -> str:
        body = json.dumps([_FORM, self.version, self.query, list(self.after)], separators=(",", ":"))
        return base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")

    @classmethod
    def of(cls, version: int, query: str, last: pa.Table) -> Cursor:
        return cls(version, query, tuple(_shown(column[0].as_py()) for column in _exact(last)))

    @classmethod
    def parse(cls, text: str) -> Cursor:
        try:
            if len(text) > CURSOR_CHARACTERS_MAX:
                raise ValueError("too long")
            body = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            form, version, query, after = body
        except (ValueError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
            raise _not_a_cursor(error) from error
        right = isinstance(version, int) and not isinstance(version, bool) and 0 <= version < 2**63
        if form != _FORM or not right or not isinstance(query, str) or not isinstance(after, list):
            raise _not_a_cursor(None)
        return cls(version, query, tuple(after))

    def scalars(self, kinds: Sequence[pa.DataType], query: str) -> list[pa.Scalar]:
        """The ranks as values of these types. `Invalid` if the cursor is one of another lookup."""
        if query != self.query or len(kinds) != len(self.after):
            raise Invalid(
                "this cursor belongs to another lookup",
                advice="Give the same table, values and order as for the page that returned it.",
            )
        try:
            return [_scalar(value, kind) for value, kind in zip(self.after, kinds, strict=True)]
        except (ValueError, TypeError, OverflowError, InvalidOperation, pa.ArrowException) as error:
            raise _not_a_cursor(error) from error


def query_text(parts: Sequence[str]) -> str:
    """A short name for a lookup, such that two different ones have two."""
    return blake2b(json.dumps(list(parts)).encode(), digest_size=12).hexdigest()


def _not_a_cursor(cause: Exception | None) -> Invalid:
    return Invalid("this is not a cursor", cause=cause, advice="Give `next` of the page before, unchanged.")


def _exact(last: pa.Table) -> Iterator[pa.ChunkedArray]:
    """Times and days as whole numbers."""
    for column in last.columns:
        if types.is_date32(column.type):
            yield column.cast(pa.int32())
        else:
            yield column.cast(pa.int64()) if types.is_timestamp(column.type) else column


def _shown(value: Scalar) -> Json:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, date | datetime):
        raise TypeError("a time is a whole number here")
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _scalar(value: Json, kind: pa.DataType) -> pa.Scalar:
    if value is None:
        return pa.scalar(None, kind)
    if types.is_boolean(kind):
        if not isinstance(value, bool):
            raise TypeError("not a boolean")
        return pa.scalar(value, kind)
    if types.is_string(kind) or types.is_binary(kind) or types.is_floating(kind) or types.is_decimal(kind):
        if not isinstance(value, str):
            raise TypeError("not text")
        if types.is_string(kind):
            return pa.scalar(value, kind)
        if types.is_binary(kind):
            return pa.scalar(base64.b64decode(value), kind)
        return pa.scalar(float.fromhex(value) if types.is_floating(kind) else Decimal(value), kind)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("not a whole number")
    width = pa.int32() if types.is_date32(kind) else pa.int64()
    return pa.scalar(value, width).cast(kind)
