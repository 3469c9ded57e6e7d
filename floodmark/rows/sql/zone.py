"""The time zone in which expressions are computed: UTC, whatever a session has set, so that all writers agree.

It is a setting of the session, which jobs of several threads share: the first job sets it, the last one restores it.
Meanwhile other queries of the same session see UTC too. A crash takes the session with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ZONE = "spark.sql.session.timeZone"
_lock = threading.Lock()
# By session: the session, the value before, and how many jobs run.
_held: dict[int, tuple[Any, str, int]] = {}


@contextmanager
def in_utc(spark: Any) -> Iterator[None]:
    key = id(spark)
    with _lock:
        _, before, count = _held.get(key) or (spark, str(spark.conf.get(_ZONE)), 0)
        if count == 0 and before != "UTC":
            spark.conf.set(_ZONE, "UTC")
        _held[key] = (spark, before, count + 1)
    try:
        yield
    finally:
        with _lock:
            _, before, count = _held.pop(key)
            if count > 1:
                _held[key] = (spark, before, count - 1)
            elif before != "UTC":
                spark.conf.set(_ZONE, before)
