"""One schema in three forms: the table's (Iceberg), the file's (Arrow) and the session's (Spark).

`table_schema` builds the schema of a new table from any description of columns. A refusal names the column, before
anything exists: reserved names, names that Spark cannot distinguish, types that would be stored as something else. The
hidden column `_seq` is always last; fresh files do not have it (their rows inherit the sequence of their commit).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from pyiceberg.schema import Schema, assign_fresh_schema_ids, sanitize_column_names
from pyiceberg.types import (
    DecimalType,
    IcebergType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StructType,
)

from floodmark.errors import Invalid
from floodmark.model import RESERVED_COLUMNS, SEQ_COLUMN
from floodmark.rows.ddl import UNSUPPORTED, parse_ddl
from floodmark.rows.frames import SchemaLike
from floodmark.rows.primitives import KEY_ADVICE, arrow_primitives, can_identify, is_held, spark_primitives
from floodmark.rows.translate import SparkForm, struct_from_arrow, struct_from_spark, unsupported

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType as SparkType
    from pyspark.sql.types import StructType as SparkStruct

FIELD_ID = b"PARQUET:field_id"
SPARK_FIELD_ID = "parquet.field.id"
# Iceberg's own name of a type, where the advice for it is under Spark's name.
_ICEBERG_NAMES = {"unknown": "null", "timestamp_ns": "timestamp_ns", "timestamptz_ns": "timestamptz_ns"}


def table_schema(schema_like: SchemaLike, key: Sequence[str] = ()) -> Schema:
    """The schema of a new table, from a Spark, Arrow or PyIceberg schema or Spark DDL text, with fresh field ids."""
    struct = _columns(schema_like)
    if not struct.fields:
        raise Invalid("a table needs at least one column", advice="Give a schema like: id long, ts timestamp.")
    _check_names(struct.fields)
    for field in struct.fields:
        if field.name.lower() in RESERVED_COLUMNS:
            raise Invalid("this column name is reserved", column=field.name, advice="Give the column another name.")
        _check_type(field.field_type, field.name)
    _check_key(struct, key)
    fields = [field.model_copy(update={"required": True}) if field.name in key else field for field in struct.fields]
    fields.append(NestedField(field_id=-1, name=SEQ_COLUMN, field_type=LongType(), required=False))
    # With distinct placeholders: an Iceberg schema refuses to be built with equal ids.
    placeholders = count(1)
    fresh = assign_fresh_schema_ids(Schema(*(fresh_field(field, placeholders) for field in fields)))
    identifiers = [field.field_id for field in fresh.fields if field.name in key]
    return Schema(*fresh.fields, schema_id=0, identifier_field_ids=identifiers)


def check_columns(schema: Schema) -> None:
    """Refuse a table that another engine made if it has columns that cannot be held or distinguished."""
    _check_names(user_fields(schema))
    for field in user_fields(schema):
        _check_type(field.field_type, field.name)


def _columns(schema_like: SchemaLike) -> StructType:
    if isinstance(schema_like, str):
        return parse_ddl(schema_like)
    if isinstance(schema_like, Schema):
        return schema_like.as_struct()
    # A Spark StructType is recognised by its JSON form, so that PySpark need not be imported for it.
    if hasattr(schema_like, "jsonValue"):
        value = schema_like.jsonValue()
        if isinstance(value, dict) and value.get("type") == "struct":
            return struct_from_spark(SparkForm(type="struct", fields=value["fields"]))
    if type(schema_like).__module__.startswith("pyarrow") and hasattr(schema_like, "names"):
        return struct_from_arrow(schema_like)
    raise Invalid(
        "unsupported kind of schema",
        given=type(schema_like).__name__,
        advice="Give Spark DDL text, a Spark StructType, an Arrow schema or a PyIceberg schema.",
    )


def fresh_field(field: NestedField, ids: Iterator[int], *, optional: bool = False) -> NestedField:
    """The same field with these ids, here and inside. With `optional`, nothing in it is required."""
    number = next(ids)
    kind = _fresh_type(field.field_type, ids, optional)
    return NestedField(number, field.name, kind, required=field.required and not optional, doc=field.doc)


def _fresh_type(kind: IcebergType, ids: Iterator[int], optional: bool) -> IcebergType:
    if isinstance(kind, StructType):
        return StructType(*(fresh_field(field, ids, optional=optional) for field in kind.fields))
    if isinstance(kind, ListType):
        element_id = next(ids)
        element = _fresh_type(kind.element_type, ids, optional)
        return ListType(element_id, element, kind.element_required and not optional)
    if isinstance(kind, MapType):
        key_id, value_id = next(ids), next(ids)
        key, value = _fresh_type(kind.key_type, ids, optional), _fresh_type(kind.value_type, ids, optional)
        return MapType(key_id, key, value_id, value, kind.value_required and not optional)
    return kind


def _check_names(fields: Sequence[NestedField], path: str = "") -> None:
    seen: dict[str, str] = {}
    for field in fields:
        if not field.name.strip():
            raise Invalid("a column has no name", column=repr(f"{path}{field.name}"), advice="Name every column.")
        if field.name.lower() in seen:
            raise Invalid(
                "two columns have the same name for Spark, which does not tell upper from lower case",
                column=f"{path}{field.name}",
                other=f"{path}{seen[field.name.lower()]}",
                advice="Rename one of them.",
            )
        seen[field.name.lower()] = field.name


def _check_type(kind: IcebergType, column: str) -> None:
    if isinstance(kind, StructType):
        if not kind.fields:
            raise unsupported(column, "struct without fields", "Give the struct a field, or leave the column out.")
        _check_names(kind.fields, f"{column}.")
        for field in kind.fields:
            _check_type(field.field_type, f"{column}.{field.name}")
    elif isinstance(kind, ListType):
        _check_type(kind.element_type, f"{column}.element")
    elif isinstance(kind, MapType):
        _check_type(kind.key_type, f"{column}.key")
        _check_type(kind.value_type, f"{column}.value")
    elif not is_held(kind):
        word = str(kind).split("[")[0].split("(")[0]
        raise unsupported(column, str(kind), UNSUPPORTED.get(_ICEBERG_NAMES.get(word, word), "Use string, or binary."))


def _check_key(struct: StructType, key: Sequence[str]) -> None:
    if isinstance(key, str):
        raise Invalid("a key must be a list of columns", key=key, advice=f'Write key=["{key}"].')
    by_name = {field.name: field for field in struct.fields}
    for name in key:
        kind = by_name[require_name(name, by_name, "key")].field_type
        if not can_identify(kind):
            raise Invalid("this column cannot be part of a key", column=name, type=kind, advice=KEY_ADVICE)
    if len(set(key)) != len(key):
        raise Invalid("a key names a column twice", key=", ".join(key), advice="Name each column once.")


def require_name(name: str, known: Iterable[str], role: str) -> str:
    """`name` if it is known, else `Invalid` with the nearest known one."""
    names = list(known)
    if name in names:
        return name
    raise Invalid(f"there is no such column for the {role}", column=name, advice=nearest(name, names))


def nearest(name: str, names: Sequence[str]) -> str:
    folded = {other.lower(): other for other in reversed(names)}
    close = difflib.get_close_matches(name.lower(), folded, n=1)
    return f"Did you mean {folded[close[0]]}?" if close else f"The columns are: {', '.join(names)}."


def user_fields(schema: Schema) -> list[NestedField]:
    """The columns that users see: all but the hidden one."""
    return [field for field in schema.fields if field.name != SEQ_COLUMN]


def arrow_schema(schema: Schema, *, with_seq: bool = False, file_names: bool = False) -> pa.Schema:
    """The Arrow schema of a data file of this table: field ids at every level, `_seq` only on demand.

    `file_names` writes names the way Iceberg's writers do (readers match by id): letters, digits and underscores only.
    """
    import pyarrow as pa

    ids = {field.field_id for field in (schema.fields if with_seq else user_fields(schema))}
    named = sanitize_column_names(schema) if file_names else schema
    return pa.schema([_arrow_field(field) for field in named.fields if field.field_id in ids])


def _arrow_field(field: NestedField) -> pa.Field:
    import pyarrow as pa

    metadata = {FIELD_ID: str(field.field_id).encode()}
    return pa.field(field.name, arrow_type(field.field_type), nullable=not field.required, metadata=metadata)


def arrow_type(kind: IcebergType) -> pa.DataType:
    import pyarrow as pa

    match kind:
        case StructType():
            return pa.struct([_arrow_field(field) for field in kind.fields])
        case ListType():
            return pa.list_(_arrow_field(kind.element_field))
        case MapType():
            return pa.map_(_arrow_field(kind.key_field), _arrow_field(kind.value_field))
        case DecimalType():
            return pa.decimal128(kind.precision, kind.scale)
    if (found := arrow_primitives().get(type(kind))) is None:
        raise unsupported("?", str(kind), "Read this table with the engine that made it.")
    return found


def spark_schema(schema: Schema, with_seq: bool = False, *, all_nullable: bool = False) -> SparkStruct:
    """The Spark schema of this table, with the field ids by which Spark's Parquet reader matches columns."""
    fields = schema.fields if with_seq else user_fields(schema)
    return _spark_struct(fields, all_nullable)


def _spark_struct(fields: Iterable[NestedField], all_nullable: bool) -> SparkStruct:
    from pyspark.sql import types as spark

    return spark.StructType(
        [
            spark.StructField(
                field.name,
                _spark_type(field.field_type, all_nullable),
                nullable=all_nullable or not field.required,
                metadata={SPARK_FIELD_ID: field.field_id},
            )
            for field in fields
        ]
    )


def _spark_type(kind: IcebergType, all_nullable: bool) -> SparkType:
    from pyspark.sql import types as spark

    match kind:
        case StructType():
            return _spark_struct(kind.fields, all_nullable)
        case ListType():
            element = _spark_type(kind.element_type, all_nullable)
            return spark.ArrayType(element, all_nullable or not kind.element_required)
        case MapType():
            key, value = _spark_type(kind.key_type, all_nullable), _spark_type(kind.value_type, all_nullable)
            return spark.MapType(key, value, all_nullable or not kind.value_required)
        case DecimalType():
            return spark.DecimalType(kind.precision, kind.scale)
    if (found := spark_primitives().get(type(kind))) is None:
        raise unsupported("?", str(kind), "Read this table with the engine that made it.")
    return found
