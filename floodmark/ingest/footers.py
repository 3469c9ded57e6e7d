"""What Spark found in Parquet files, for others that are the same: it runs a job to look into the footer of one.

The footer is read here, which takes no time: files whose schema and metadata are those of files that Spark has looked
into have their columns. Only files of this machine that are named one by one; for all others Spark is asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from floodmark.storage import local_path

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# Spark itself looks into one of them only.
FILES_MAX = 32
KNOWN_MAX = 100
_PATTERN = re.compile(r"[*?\[\]{}\\]")


class Footers:
    """Columns as Spark understands them, by what the footers say."""

    def __init__(self) -> None:
        self._known: dict[str, StructType] = {}

    def columns(self, paths: Sequence[str]) -> tuple[str | None, StructType | None]:
        """What these files have in common, None if that cannot be told; and their columns, if they are known."""
        if len(paths) > FILES_MAX:
            return None, None
        found = {_footer(path) for path in paths}
        common = found.pop() if len(found) == 1 else None
        return common, self._known.get(common) if common is not None else None

    def learn(self, common: str | None, columns: StructType) -> None:
        if common is not None and len(self._known) < KNOWN_MAX:
            self._known[common] = columns


def _footer(path: str) -> str | None:
    name = local_path(path) if path.startswith("file:") else path
    # What is a pattern for Spark may be a name here.
    if name is None or _PATTERN.search(name) or not os.path.isfile(name):
        return None
    try:
        footer = pq.read_metadata(name)
    except (OSError, pa.ArrowException):
        return None
    # The first line of a schema's text is the address of the object.
    _, _, schema = str(footer.schema).partition("\n")
    return f"{schema}\n{sorted((footer.metadata or {}).items())!r}"
