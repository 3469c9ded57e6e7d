"""What callers pass as rows and as schemas, by type; and Spark's types by name, for packages that only pass them on.

Only `rows` and `ingest` work with Spark's types.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard

from floodmark.model import Row

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema
    from pyspark.sql import DataFrame as DataFrame
    from pyspark.sql import SparkSession as SparkSession
    from pyspark.sql.types import StructType as StructType


class PandasFrame(Protocol):
    """A pandas DataFrame, as far as it is used here: columns with their names."""

    def items(self) -> Iterable[tuple[Hashable, pa.Array]]: ...


class ArrowStream(Protocol):
    """Rows of another library that Arrow can read."""

    def __arrow_c_stream__(self) -> pa.RecordBatchReader: ...


RowsLike: TypeAlias = (
    "DataFrame | pa.Table | pa.RecordBatch | pa.RecordBatchReader | PandasFrame | ArrowStream | Sequence[Row]"
)
# Spark DDL text, a Spark StructType, an Arrow schema or a PyIceberg schema.
SchemaLike: TypeAlias = "str | StructType | pa.Schema | Schema"


def is_dataframe(data: RowsLike) -> TypeGuard[DataFrame]:
    """Whether it is a Spark DataFrame, classic or Connect; does not import Spark."""
    return hasattr(data, "mapInArrow")
