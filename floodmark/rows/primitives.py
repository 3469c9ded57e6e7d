"""The plain types of a table's columns, in one table: each with its names in Spark DDL, its Arrow and its Spark type.

A table holds these types and decimals, and structs, lists and maps of them. Arrow and Spark are imported when one of
their types is asked for, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    LongType,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType as SparkType

DECIMAL_DIGITS_MAX = 38
DECIMAL_ADVICE = f"1 to {DECIMAL_DIGITS_MAX} digits, scale within them."
KEY_ADVICE = "A key is made of plain columns that are not float or double."
TIMES = (DateType, TimestampType, TimestamptzType)


@dataclass(frozen=True)
class Primitive:
    """One type. `names`: in DDL and in Spark's JSON form, first the one that is shown. `arrow`: the function and its
    arguments that make it; `spark`: its class."""

    kind: PrimitiveType
    names: tuple[str, ...]
    arrow: tuple[str, ...]
    spark: str


PRIMITIVES = (
    Primitive(BooleanType(), ("boolean",), ("bool_",), "BooleanType"),
    Primitive(IntegerType(), ("int", "integer", "tinyint", "byte", "smallint", "short"), ("int32",), "IntegerType"),
    Primitive(LongType(), ("long", "bigint"), ("int64",), "LongType"),
    Primitive(FloatType(), ("float", "real"), ("float32",), "FloatType"),
    Primitive(DoubleType(), ("double",), ("float64",), "DoubleType"),
    Primitive(StringType(), ("string",), ("string",), "StringType"),
    Primitive(BinaryType(), ("binary",), ("binary",), "BinaryType"),
    Primitive(DateType(), ("date",), ("date32",), "DateType"),
    Primitive(TimestampType(), ("timestamp_ntz",), ("timestamp", "us"), "TimestampNTZType"),
    Primitive(TimestamptzType(), ("timestamp", "timestamp_ltz"), ("timestamp", "us", "UTC"), "TimestampType"),
)
BY_NAME: Mapping[str, IcebergType] = {name: one.kind for one in PRIMITIVES for name in one.names}
SHOWN: Mapping[type[IcebergType], str] = {type(one.kind): one.names[0] for one in PRIMITIVES}


def is_held(kind: IcebergType) -> bool:
    """Whether a table can hold this plain type."""
    return type(kind) in SHOWN or isinstance(kind, DecimalType)


def can_identify(kind: IcebergType) -> bool:
    """Whether equal values of this type are certainly the same value, so that it can be part of a key or partition."""
    return isinstance(kind, PrimitiveType) and not isinstance(kind, FloatType | DoubleType)


def is_decimal(precision: int, scale: int) -> bool:
    """Whether a table can hold decimals of so many digits."""
    return 1 <= precision <= DECIMAL_DIGITS_MAX and 0 <= scale <= precision


def widens(have: IcebergType, want: IcebergType) -> bool:
    """Whether every value of a number's type `have` is one of `want`, by Iceberg's rules for a column that changes."""
    match have, want:
        case (IntegerType(), LongType()) | (FloatType(), DoubleType()):
            return True
        case DecimalType(), DecimalType():
            return have.scale == want.scale and have.precision <= want.precision <= DECIMAL_DIGITS_MAX
    return False


@cache
def arrow_primitives() -> Mapping[type[IcebergType], pa.DataType]:
    import pyarrow as pa

    return {type(one.kind): getattr(pa, one.arrow[0])(*one.arrow[1:]) for one in PRIMITIVES}


@cache
def spark_primitives() -> Mapping[type[IcebergType], SparkType]:
    from pyspark.sql import types

    return {type(one.kind): getattr(types, one.spark)() for one in PRIMITIVES}
