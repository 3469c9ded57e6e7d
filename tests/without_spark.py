"""Sessions that fail a test which starts Spark, and the engine of a lake that has them."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import floodmark as fm
from floodmark.engine import Engine
from floodmark.rows.session import Sessions


class NoSpark(Sessions):
    def get(self) -> NoReturn:
        raise AssertionError("rows in memory need no Spark")


NO_SPARK = NoSpark()


def without_spark(lake: fm.Lake) -> Engine:
    return replace(lake.engine, sessions=NO_SPARK)
