"""What a failed Spark job means for the caller: rows that cannot be computed are Invalid, the rest may be retried.

Spark says what happened in its SQL states (21, 22: the data, 42: the query), also deep in a chain of causes, and in two
kinds of exceptions; people get one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from floodmark.errors import FloodmarkError, Invalid, Unavailable

_STATE = re.compile(r"SQLSTATE: (\w{5})")
_CAUSED = re.compile(r"Caused by: ([^\n]+)")
_RAISED = re.compile(r"[A-Za-z_][\w.]*: .")
_NOISE = ("at ", "File ", "... ", "JVM stacktrace", "Traceback")


@contextmanager
def spark_failures(message: str) -> Iterator[None]:
    """Errors of Spark inside the block become ours, with `message`."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise spark_error(error, message) from error


def spark_error(error: Exception, message: str) -> FloodmarkError:
    text = str(error)
    if any(state.startswith(("21", "22", "42")) for state in _STATE.findall(text)):
        return Invalid(message, cause=_cause(text), advice="Correct it: Spark cannot compute its rows.")
    return Unavailable(
        message, cause=_cause(text), advice="Look at the cause; nothing was written, so it can be repeated."
    )


def _cause(text: str) -> str:
    """The line that tells most: the innermost cause, else a task's Python error, else the first line."""
    caused: list[str] = _CAUSED.findall(text)
    if caused:
        return caused[-1].partition(": ")[2] or caused[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith(_NOISE)]
    # A task's Python error says what happened in its last line, Spark's own errors in their first.
    raised = [line for line in lines if _RAISED.match(line)] if "Traceback (most recent call last)" in text else []
    return (raised[-1:] or lines[:1] or ["unknown"])[0]
