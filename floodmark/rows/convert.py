"""Convert Arrow batches to a table's schema, by column name: never a silent null, never a lossy change.

Two steps. `Conformer` compares types once per input schema: a type that can never fit is a problem before any row is
read. `Conformer.conform` then converts each batch; where values decide (ranges, exactness, nulls in required fields)
the bad ones are counted. Misfits are collected, not raised, so that a task can return them to the driver. A column
whose type already is the file's passes through unchanged. Settled rows have their sequence: we wrote them, so a missing
one is no bad input but `Corrupt`, and raised at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from floodmark.errors import Corrupt
from floodmark.model import SEQ_COLUMN
from floodmark.rows.arrays import list_of, map_of, map_parts, struct_of
from floodmark.rows.misfits import Misfits, Problem
from floodmark.rows.schema import arrow_schema, nearest, user_fields
from floodmark.rows.translate import is_list

NULL_IN_REQUIRED = "null in a required column"
MISSING = "the column is missing in the rows"
_ADD_NULLS = "Add the column with nulls if you want nulls."


@dataclass(frozen=True)
class Column:
    """One column of a table, or one field inside it: its full name, and its Arrow field in a data file."""

    name: str
    path: str
    field: pa.Field
    children: tuple[Column, ...] = ()

    @property
    def required(self) -> bool:
        return not self.field.nullable

    @property
    def required_inside(self) -> bool:
        # A map's keys are never null in Arrow, so they need no check.
        children = self.children[1:] if types.is_map(self.field.type) else self.children
        return any(child.required or child.required_inside for child in children)


@dataclass(frozen=True)
class Shape:
    """A table's schema, prepared for converting rows to it.

    `fields` are those of the schema that a data file holds, in its order, and `columns` the same for conversion. Only a
    settled file holds `_seq`.
    """

    schema: Schema
    fields: tuple[NestedField, ...]
    columns: tuple[Column, ...]
    file_schema: pa.Schema
    settled: bool = False


@lru_cache(maxsize=256)
def table_shape(schema_json: str, settled: bool = False) -> Shape:
    """The shape of a table by its schema's JSON; cached, because small writes would spend their time here."""
    schema = Schema.model_validate_json(schema_json)
    file_schema = arrow_schema(schema, with_seq=settled, file_names=True)
    fields = tuple(schema.fields if settled else user_fields(schema))
    if settled and SEQ_COLUMN not in file_schema.names:
        raise Corrupt("the table has no column for the sequences of settled rows", column=SEQ_COLUMN)
    columns = tuple(_column(field, file_schema.field(at), field.name) for at, field in enumerate(fields))
    return Shape(schema, fields, columns, file_schema, settled)


def columns_of(schema: Schema, fields: Sequence[NestedField]) -> tuple[Column, ...]:
    """Some columns of a table, as converting values to them needs them."""
    arrow = arrow_schema(schema)
    return tuple(_column(field, arrow.field(field.name), field.name) for field in fields)


def _column(field: NestedField, arrow: pa.Field, path: str) -> Column:
    return Column(field.name, path, arrow, tuple(_children(field.field_type, arrow.type, path)))


def _children(kind: IcebergType, arrow: pa.DataType, path: str) -> list[Column]:
    match kind:
        case StructType():
            return [_column(f, arrow.field(at), f"{path}.{f.name}") for at, f in enumerate(kind.fields)]
        case ListType():
            return [_column(kind.element_field, arrow.value_field, f"{path}.element")]
        case MapType():
            return [
                _column(kind.key_field, arrow.key_field, f"{path}.key"),
                _column(kind.value_field, arrow.item_field, f"{path}.value"),
            ]
    return []


class Conformer:
    """Converts batches of one input schema to one table's file schema.

    With `fill_missing`, optional columns that the input does not have are null; without, that is a problem.
    """

    def __init__(self, shape: Shape, source: pa.Schema, fill_missing: bool = False) -> None:
        self.shape = shape
        self.source = source
        self.problems = Misfits()
        self._fill_missing = fill_missing
        self._seq = source.get_field_index(SEQ_COLUMN)
        if shape.settled and (self._seq < 0 or not types.is_int64(source.field(self._seq).type)):
            raise Corrupt("settled rows came without a column of sequences", columns=", ".join(source.names))
        self._match_fields(list(source), shape.columns, "", "table")
        self._positions = [source.get_field_index(column.name) for column in shape.columns]

    def conform(self, batch: pa.RecordBatch, problems: Misfits) -> pa.RecordBatch | None:
        """The batch in the table's file schema; None if a value does not fit, which `problems` then has."""
        if self.shape.settled and batch.column(self._seq).null_count:
            raise Corrupt("settled rows came without their sequences", rows=batch.column(self._seq).null_count)
        found = Misfits(self.problems.all())
        arrays = []
        if not found:
            for column, position in zip(self.shape.columns, self._positions, strict=True):
                array = batch.column(position) if position >= 0 else pa.nulls(len(batch))
                arrays.append(_convert(array, column, 0, found))
        if found:
            for problem in found.all():
                problems.add(problem)
            return None
        return pa.RecordBatch.from_arrays(arrays, schema=self.shape.file_schema)

    def _match_fields(self, source: list[pa.Field], columns: tuple[Column, ...], path: str, owner: str) -> None:
        names = [field.name for field in source]
        wanted = [column.name for column in columns]
        for name in dict.fromkeys(names):
            if names.count(name) > 1:
                self._add(path + name, "the rows have the column twice", "Send each column once.")
            elif name not in wanted:
                advice = nearest(name, wanted) + " Leave it out, or add the column to the table first."
                self._add(path + name, f"the {owner} has no such column", advice)
        for column in columns:
            if column.name not in names:
                if column.required or not self._fill_missing:
                    self._add(column.path, MISSING, _ADD_NULLS)
            elif names.count(column.name) == 1:
                self._match_type(source[names.index(column.name)].type, column)

    def _match_type(self, source: pa.DataType, column: Column) -> None:
        target = column.field.type
        if types.is_dictionary(source):
            source = source.value_type
        if types.is_null(source):
            return
        if types.is_struct(target) and types.is_struct(source):
            self._match_fields(list(source), column.children, f"{column.path}.", "struct")
        elif types.is_map(target) and types.is_map(source):
            self._match_type(source.key_type, column.children[0])
            self._match_type(source.item_type, column.children[1])
        elif types.is_list(target) and is_list(source):
            self._match_type(source.value_type, column.children[0])
        elif not _convertible(source, target):
            self._add(column.path, f"the type {source} is not the table's {target}", _type_advice(source, target))

    def _add(self, column: str, problem: str, advice: str) -> None:
        self.problems.add(Problem(column, problem, advice=advice))


def conform(batch: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """The batch in the file schema of the table, or `Invalid` naming column and count."""
    problems = Misfits()
    conformed = Conformer(table_shape(schema.model_dump_json()), batch.schema).conform(batch, problems)
    problems.raise_invalid()
    return conformed


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    plain = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(plain or types.is_fixed_size_binary(kind))


def _convertible(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether values of `source` can be values of `target` without loss, at least some of them."""
    if types.is_timestamp(target):
        # A time with a zone and one without are different facts; guessing a zone would change one into the other.
        return types.is_timestamp(source) and (source.tz is None) == (target.tz is None)
    if types.is_integer(target):
        return bool(types.is_integer(source))
    if types.is_floating(target):
        return bool(types.is_floating(source) or types.is_integer(source))
    if types.is_decimal(target):
        return bool(types.is_decimal(source))
    if types.is_string(target):
        return _is_text(source)
    if types.is_binary(target):
        return _is_bytes(source)
    if types.is_date(target):
        return bool(types.is_date(source))
    return bool(source.equals(target))


def _type_advice(source: pa.DataType, target: pa.DataType) -> str:
    if types.is_timestamp(source) and types.is_timestamp(target):
        if (source.tz is None) == (target.tz is None):
            return "Round the column to microseconds, within the range of 64 bits, before it is written."
        return "Give the column a time zone before it is written." if target.tz else "Remove the zone first."
    return "Cast the column before it is written."


def _convert(array: pa.Array, column: Column, absent: int, problems: Misfits) -> pa.Array:
    """The array as the column's file type. `absent` of its nulls exist only because their parent is null."""
    target = column.field.type
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_null(array.type):
        array = pa.nulls(len(array), target)
    if column.required and array.null_count > absent:
        problem = Problem(column.path, NULL_IN_REQUIRED, array.null_count - absent, "Fill it, or make it optional.")
        problems.add(problem)
        return array
    passes = array.type.equals(target) and not column.required_inside
    if passes and not (column.required and array.null_count):
        return array
    if types.is_struct(target):
        return _convert_struct(array, column, problems)
    if types.is_map(target):
        return _convert_map(array, column, problems)
    if types.is_list(target):
        return _convert_list(array, column, problems)
    array = _convert_leaf(array, column, problems)
    if column.required and array.null_count and array.type.equals(target):
        # Below a null parent a required field gets a value that no reader sees: Parquet's writer accepts no null.
        array = array.fill_null(_some_value(target))
    return array


def _convert_struct(array: pa.Array, column: Column, problems: Misfits) -> pa.Array:
    # flatten() makes a child null where its parent is: values below a null struct are not checked.
    by_name = dict(zip((field.name for field in array.type), array.flatten(), strict=True))
    parts = [by_name.get(child.name, pa.nulls(len(array))) for child in column.children]
    children = [
        _convert(part, child, array.null_count, problems) for part, child in zip(parts, column.children, strict=True)
    ]
    return array if problems else struct_of(array, children, column.field.type, not column.required)


def _convert_list(array: pa.Array, column: Column, problems: Misfits) -> pa.Array:
    values = _convert(array.flatten(), column.children[0], 0, problems)
    return array if problems else list_of(array, values, column.field.type, not column.required)


def _convert_map(array: pa.Array, column: Column, problems: Misfits) -> pa.Array:
    parts = zip(map_parts(array), column.children, strict=True)
    keys, items = (_convert(part, child, 0, problems) for part, child in parts)
    return array if problems else map_of(array, keys, items, column.field.type, not column.required)


def _convert_leaf(array: pa.Array, column: Column, problems: Misfits) -> pa.Array:
    target = column.field.type
    if array.type.equals(target):
        return array
    try:
        return _cast(array, target)
    except pa.ArrowInvalid:
        problem = f"values of {array.type} do not fit the table's {target}"
        problems.add(Problem(column.path, problem, _count_bad(array, target), _type_advice(array.type, target)))
        return array


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Arrow's checked cast; it checks everything but the rounding of a double to a float."""
    cast = array.cast(target)
    if types.is_float64(array.type) and types.is_float32(target):
        same = pc.or_(pc.equal(cast.cast(array.type), array), pc.is_nan(array))
        if pc.all(same, min_count=0).as_py() is False:
            raise pa.ArrowInvalid("the value needs a double")
    return cast


def _count_bad(array: pa.Array, target: pa.DataType) -> int:
    """How many values do not fit, by halving: quick when few of them are bad."""
    try:
        _cast(array, target)
    except pa.ArrowInvalid:
        if len(array) == 1:
            return 1
        half = len(array) // 2
        return _count_bad(array[:half], target) + _count_bad(array[half:], target)
    return 0


def _some_value(kind: pa.DataType) -> pa.Scalar:
    if types.is_string(kind):
        return pa.scalar("", kind)
    if types.is_binary(kind):
        return pa.scalar(b"", kind)
    if types.is_boolean(kind):
        return pa.scalar(False, kind)
    return pa.scalar(0, kind)
