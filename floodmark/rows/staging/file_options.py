"""How data files are written: what a table's properties say, our defaults, and how many rows a row group has.

A row group is what a reader can skip, and so what a condition, a key or a sequence costs at least; each one takes room
in the footer, which every reader loads. So groups go by rows, large rows and very short ones by bytes, and their number
in a file is limited by its columns (I14). Buffers, sorting and the ends of files go by bytes. A property that cannot be
understood is `Invalid`: when a table is created, and at a write if another engine has set it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from floodmark.errors import Invalid
from floodmark.model import TARGET_FILE_BYTES

FILE_BYTES = "write.target-file-size-bytes"
GROUP_BYTES = "write.parquet.row-group-size-bytes"
GROUP_ROWS = "write.parquet.row-group-limit"
CODEC = "write.parquet.compression-codec"
LEVEL = "write.parquet.compression-level"

ROW_GROUP_BYTES = 64 * 1024 * 1024
# With a key, one row at a time is looked for; without one, mostly what changed last, in files of many more rows.
KEYED_GROUP_ROWS_MAX = 16_384
GROUP_ROWS_MAX = 32_768
# In memory: of large rows fewer are a group; of rows so short that a group's columns have less than this, more.
GROUP_BYTES_MAX = 8 * 1024 * 1024
CHUNK_BYTES_MIN = 32 * 1024
# Column chunks of a file: each takes 100 to 150 bytes of a footer, which is read and parsed before the first row.
CHUNKS_MAX = 20_000
_CODECS = ("zstd", "snappy", "gzip", "lz4", "none")


@dataclass(frozen=True)
class FileOptions:
    """Without `row_group_rows`, what waits in a buffer becomes one group; `exact`: its bytes do not matter."""

    target_file_bytes: int
    row_group_bytes: int = ROW_GROUP_BYTES
    codec: str = "zstd"
    level: int | None = 1
    sort: tuple[tuple[str, str], ...] = ()
    row_group_rows: int | None = None
    exact: bool = False
    # Columns whose values are known to be unique.
    unique: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        properties: Mapping[str, str],
        *,
        target_file_bytes: int = TARGET_FILE_BYTES,
        sort: tuple[tuple[str, str], ...] = (),
        key: Collection[str] = (),
    ) -> FileOptions:
        """The table properties that Iceberg's writers know; our default for each that is not set."""
        codec = properties.get(CODEC, "zstd").lower()
        codec = "none" if codec == "uncompressed" else codec
        if codec not in _CODECS:
            raise Invalid("unknown Parquet codec", codec=codec, advice=f"Use one of: {', '.join(_CODECS)}.")
        level = properties.get(LEVEL, "1" if codec == "zstd" else None)
        target = _whole_number(properties, FILE_BYTES, target_file_bytes)
        return cls(
            target_file_bytes=target,
            # A buffer is the grain at which files can end: small files need small buffers.
            row_group_bytes=min(_whole_number(properties, GROUP_BYTES, ROW_GROUP_BYTES), target),
            codec=codec,
            level=_level(level) if level else None,
            sort=sort,
            row_group_rows=_whole_number(properties, GROUP_ROWS, KEYED_GROUP_ROWS_MAX if key else GROUP_ROWS_MAX),
            exact=GROUP_ROWS in properties,
            unique=frozenset(key) if len(key) == 1 else frozenset(),
        )

    def rows_per_group(self, rows: int, size_bytes: int, columns: int, groups_left: int) -> int:
        """How many rows a group has if so many are written now, and the file has room for so many more groups.

        At most half of that room is used: the file's later rows need some too. So it never runs out, and groups of a
        very long file become larger. Groups have about the same number of rows, none is a small rest.
        """
        if not rows or self.row_group_rows is None:
            return max(1, rows)
        groups = -(-rows // self.row_group_rows)
        if not self.exact:
            groups = max(groups, -(-size_bytes // GROUP_BYTES_MAX))
            groups = min(groups, size_bytes // (CHUNK_BYTES_MIN * columns))
        return -(-rows // max(1, min(groups, groups_left // 2)))


def groups_max(columns: int) -> int:
    """How many row groups a file of so many Parquet columns may have, about."""
    return max(1, CHUNKS_MAX // max(1, columns))


def _whole_number(properties: Mapping[str, str], name: str, default: int) -> int:
    text = properties.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise Invalid(
            "this table property must be a whole number above 0",
            property=f"{name}={text}",
            advice=f"Leave it out for the default, {default}.",
        )
    return int(text)


def _level(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise Invalid(
            "the compression level must be a whole number", property=f"{LEVEL}={text}", advice="Leave it out, or use 1."
        ) from error
