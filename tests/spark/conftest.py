"""One small Spark session for all Spark tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from floodmark.rows.session import Sessions
from floodmark.testing.s3 import s3_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # Spark's workers get their environment when the JVM starts: the stand-in's credentials must be there by then.
    with s3_environment():
        yield from _session()


def _session() -> Iterator[SparkSession]:
    sessions = Sessions({"master": "local[2]", "spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g"})
    yield sessions.get()
    sessions.stop()
