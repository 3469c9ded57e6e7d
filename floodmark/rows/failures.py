"""What a failed Spark job means for the caller: rows that cannot be computed are Invalid, a data file of the lake that
is missing or damaged is Corrupt, the rest may be retried.

Spark reports the cause in its SQL states (21, 22: the data, 42: the query), also deep in a chain of causes, and in two
kinds of exceptions; the user gets one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from floodmark.errors import Corrupt, FloodmarkError, Invalid, Unavailable
from floodmark.rows.stall import watched

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STATE = re.compile(r"SQLSTATE: (\w{5})")
_CAUSED = re.compile(r"Caused by: ([^\n]+)")
_RAISED = re.compile(r"[A-Za-z_][\w.]*: .")
# A file that Spark, or Arrow in a task, could not find or read: by Spark's conditions, else by the readers' messages.
_DAMAGE = re.compile(
    r"\[(?:PATH_NOT_FOUND|FAILED_READ_FILE[.\w]*)\]|FileNotFoundException|floodmark\.errors\.(?:NotFound|Corrupt)"
    r"|is not a Parquet file|Could not read footer|Parquet magic bytes|Couldn't deserialize thrift"
    r"|Parquet file size is|ParquetDecodingException|Unexpected end of stream"
)
# A data file that an operation of a lake wrote, and any Parquet file.
_OWN_FILE = re.compile(r"[\w+.-]+:/[^\s\]\[\"']*?/data/[0-9A-HJKMNP-TV-Z]{26}/[\w.-]+?\.parquet")
_ANY_FILE = re.compile(r"[\w+.-]+:/[^\s\]\[\"']*?\.parquet")
# How the check of a reader names a value that would be rounded: its column and the value follow.
INEXACT = "FLOODMARK_INEXACT "
_INEXACT = re.compile(INEXACT + r"(?P<column>.+?): (?P<value>\{[^\n]*?)(?: SQLSTATE|\n|$)")
DIGITS_ADVICE = "Round it yourself, or give the column more digits. Nothing was loaded."
_NOISE = ("at ", "File ", "... ", "JVM stacktrace", "Traceback")


@contextmanager
def spark_job(spark: SparkSession, message: str, *, lake_files: bool = False) -> Iterator[None]:
    """Around everything that runs a Spark job: bounds its wait for executors, and turns Spark's errors into ours."""
    with watched(spark), spark_failures(message, lake_files=lake_files):
        yield


@contextmanager
def spark_failures(message: str, *, lake_files: bool = False) -> Iterator[None]:
    """Errors of Spark inside the block become ours, with `message`. `lake_files`: it reads only files of a lake."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise spark_error(error, message, lake_files=lake_files) from error


def spark_error(error: Exception, message: str, *, lake_files: bool = False) -> FloodmarkError:
    text = str(error)
    if _DAMAGE.search(text) and (file := _OWN_FILE.search(text) or (lake_files and _ANY_FILE.search(text))):
        return Corrupt(
            "a data file of the lake is missing or damaged",
            file=file[0],
            cause=_cause(text),
            advice="Run `floodmark doctor --deep`; restore the file from a copy.",
        )
    if inexact := _INEXACT.search(text):
        return Invalid(
            "a value has more digits than its column",
            column=inexact["column"],
            value=inexact["value"],
            advice=DIGITS_ADVICE,
        )
    if any(state.startswith(("21", "22", "42")) for state in _STATE.findall(text)):
        return Invalid(message, cause=_cause(text), advice="Correct it: Spark cannot compute its rows.")
    return Unavailable(message, cause=_cause(text), advice="See the cause; nothing was written, so you can retry.")


def _cause(text: str) -> str:
    """The most useful line: the innermost cause, else a task's Python error, else the first line."""
    caused: list[str] = _CAUSED.findall(text)
    if caused:
        return caused[-1].partition(": ")[2] or caused[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith(_NOISE)]
    # A task's Python error has its message in its last line, Spark's own errors in their first.
    raised = [line for line in lines if _RAISED.match(line)] if "Traceback (most recent call last)" in text else []
    return (raised[-1:] or lines[:1] or ["unknown"])[0]
