"""Spark's types by name, for packages that pass on DataFrames and sessions. Only `rows` and `ingest` work with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame as DataFrame
    from pyspark.sql import SparkSession as SparkSession
    from pyspark.sql.types import StructType as StructType
