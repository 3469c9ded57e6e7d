"""Keys that occur twice in one input: found in the staged files, or resolved before that by an order column.

Finding reads the key columns of the staged files and keeps one hash of each key. Hashes that do not fit into memory are
processed in passes over parts of them, split further for as long as a part is too large (I14). Equal hashes are only a
suspicion: those keys are read again and compared, so the answer never depends on a hash.

With an order column the highest row of a key stays. Rows of a key that tie for it are one if they are the same row;
else they all stay, because it is unknown which is the last, and finding refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyiceberg.types import NestedField

from floodmark.errors import Invalid
from floodmark.rows.arrays import Mask, Numbers
from floodmark.rows.compare import same_rows
from floodmark.rows.keys import KEY_BATCH_ROWS, KEY_BYTES_PER_CHUNK, KEYS_PER_CHUNK, render_keys
from floodmark.rows.project import read_file, read_schema
from floodmark.rows.schema import require_name
from floodmark.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

EXAMPLES_MAX = 3
# A hash takes 8 bytes, much less than a key with what a join keeps beside it.
HASHES_PER_PASS = 8 * KEYS_PER_CHUNK
_SUSPECTS_MAX = 1000

Hashes = npt.NDArray[np.uint64]


def find_duplicates(
    storage: Storage, files: Sequence[str], fields: Sequence[NestedField], pass_rows: int = HASHES_PER_PASS
) -> list[str]:
    """Examples of keys that occur more than once in these files; none if every key occurs once."""
    # Parts of the hashes as (remainder, divisor).
    parts = [(0, 1)]
    while parts:
        remainder, divisor = parts.pop()
        hashes, whole = _hashes_of_part(storage, files, fields, remainder, divisor, max(2, pass_rows))
        suspects = _repeated_hashes(hashes)
        for start in range(0, len(suspects), _SUSPECTS_MAX):
            found = _confirmed(storage, files, fields, suspects[start : start + _SUSPECTS_MAX])
            if found:
                return found
        if not whole:
            parts += [(remainder + divisor, 2 * divisor), (remainder, 2 * divisor)]
    return []


def _hashed(
    storage: Storage, files: Sequence[str], fields: Sequence[NestedField]
) -> Iterator[tuple[pa.RecordBatch, Hashes]]:
    for location in files:
        for batch in read_file(storage, location, fields, KEY_BATCH_ROWS):
            if len(batch):
                yield batch, _hashes(batch)


def _hashes_of_part(
    storage: Storage, files: Sequence[str], fields: Sequence[NestedField], remainder: int, divisor: int, limit: int
) -> tuple[Hashes, bool]:
    """The hashes of one part, at most `limit` of them, and whether these are all."""
    # Memory is allocated when it is written to: a small input takes little.
    held = np.empty(limit, np.uint64)
    count = 0
    for _, hashes in _hashed(storage, files, fields):
        here = hashes[hashes & np.uint64(divisor - 1) == np.uint64(remainder)]
        fitting = here[: limit - count]
        held[count : count + len(fitting)] = fitting
        count += len(fitting)
        if len(fitting) < len(here):
            return held, False
    return held[:count], True


def _repeated_hashes(hashes: Hashes) -> Hashes:
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])


def _confirmed(storage: Storage, files: Sequence[str], fields: Sequence[NestedField], suspects: Hashes) -> list[str]:
    """Examples of keys with one of these hashes that really occur more than once."""
    held: list[pa.RecordBatch] = []
    size_bytes, look_bytes = 0, KEY_BYTES_PER_CHUNK
    for batch, hashes in _hashed(storage, files, fields):
        suspected = np.isin(hashes, suspects)
        if suspected.any():
            held.append(batch.filter(pa.array(suspected)))
            size_bytes += held[-1].nbytes
        # A key that occurs a million times need not be held a million times to be found.
        if size_bytes >= look_bytes:
            found = _repeated_keys(pa.Table.from_batches(held))
            if found:
                return found
            look_bytes *= 2
    return _repeated_keys(pa.Table.from_batches(held, schema=read_schema(fields)))


def _repeated_keys(keys: pa.Table) -> list[str]:
    names = [f"k{at}" for at in range(keys.num_columns)]
    numbered = keys.rename_columns(names).append_column("row", pa.array(np.arange(keys.num_rows)))
    groups = numbered.group_by(names, use_threads=False).aggregate([("row", "min"), ("row", "count")])
    rows = groups.filter(pc.greater(groups["row_count"], 1))["row_min"].to_numpy()
    return render_keys(keys.take(pa.array(np.sort(rows)[:EXAMPLES_MAX])))


def _hashes(batch: pa.RecordBatch) -> Hashes:
    """A hash of each key, good for this process only: the hash of bytes differs from one to the next."""
    hashes = np.zeros(len(batch), np.uint64)
    for column in batch.columns:
        for word in _words(column):
            hashes = _mixed(hashes ^ word)
    return hashes


def _words(column: pa.Array) -> list[Hashes]:
    """The column as numbers, equal where its values are. Nulls are some number: no key holds one."""
    kind = column.type
    if types.is_string(kind) or types.is_binary(kind):
        values = column.cast(pa.binary()).to_numpy(zero_copy_only=False)
        return [np.fromiter(map(hash, values), np.int64, len(values)).view(np.uint64)]
    if types.is_decimal(kind):
        halves = np.frombuffer(column.buffers()[1], np.uint64).reshape(-1, 2)
        halves = halves[column.offset : column.offset + len(column)]
        return [halves[:, 0], halves[:, 1]]
    if types.is_date(kind):
        column = column.cast(pa.int32())
    numbers: Numbers = column.cast(pa.int64()).fill_null(0).to_numpy()
    return [numbers.view(np.uint64)]


def _mixed(words: Hashes) -> Hashes:
    """Every bit of a word made to depend on all of its bits (the last step of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def last_of_table(table: pa.Table, key: Sequence[str], order: str) -> pa.Table:
    """Per key the row with the highest value in `order`; null is lower than any value."""
    given, names = table.schema, table.schema.names
    # Arrow cannot filter views, in which some libraries store their text.
    table = table.cast(pa.schema([field.with_type(_without_views(field.type)) for field in given]))
    positions = [names.index(require_name(name, names, "key")) for name in key]
    ranks = _ranks(table.column(names.index(require_name(order, names, "order"))), order)
    groups = _group_numbers([(names[at], table.column(at)) for at in positions], table.num_rows)
    highest = np.zeros(table.num_rows, np.int64)
    np.maximum.at(highest, groups, ranks)
    last = ranks == highest[groups]
    last[last] = ~_copies(table.filter(pa.array(last)), groups[last])
    return table.filter(pa.array(last)).cast(given)


def _without_views(kind: pa.DataType) -> pa.DataType:
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        value = kind.value_field.with_type(_without_views(kind.value_type))
        return pa.list_(value) if types.is_list(kind) else pa.large_list(value)
    if types.is_map(kind):
        return pa.map_(_without_views(kind.key_type), kind.item_field.with_type(_without_views(kind.item_type)))
    return kind


def _copies(table: pa.Table, groups: Numbers) -> Mask:
    """Whether a row is the same as the first row of its group, and is not that one."""
    tied = np.bincount(groups)[groups] > 1
    if tied.any():
        _, first, group = np.unique(groups[tied], return_index=True, return_inverse=True)
        firsts = first[group]
        # Filtered before rows are taken: from a column of more than 2 GiB of text none can be.
        ties = table.filter(pa.array(tied))
        tied[tied] = same_rows(ties, ties.take(pa.array(firsts))) & (firsts != np.arange(len(firsts)))
    return np.asarray(tied, np.bool_)


def _ranks(column: pa.ChunkedArray, name: str) -> Numbers:
    """A number for each value that orders like it, from 1; null is 0. NaN is the highest, as it is for Spark."""
    try:
        ranks = pc.rank(_plain(column), sort_keys="ascending", tiebreaker="dense").to_numpy().astype(np.int64)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise _not_comparable(name, column.type, "order") from error
    ranks[column.is_null().to_numpy()] = 0
    return np.asarray(ranks, np.int64)


def _group_numbers(columns: Sequence[tuple[str, pa.ChunkedArray]], rows: int) -> Numbers:
    """A number for each row, below `rows`, which is the same for the same key."""
    groups: Numbers | None = None
    for name, column in columns:
        try:
            coded = pc.dictionary_encode(_plain(column), null_encoding="encode")
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _not_comparable(name, column.type, "key") from error
        codes = np.concatenate([np.empty(0, np.int64), *(chunk.indices.to_numpy() for chunk in coded.chunks)])
        if groups is None:
            groups = codes
        else:
            # Both are below the number of rows, so that the product fits; then dense again.
            _, groups = np.unique(groups * rows + codes, return_inverse=True)
    return np.zeros(rows, np.int64) if groups is None else groups


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same values in a type that can be ranked and encoded, however much text there is."""
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if types.is_string(kind):
        return column.cast(pa.large_string())
    return column.cast(pa.large_binary()) if types.is_binary(kind) else column


def last_of_dataframe(df: DataFrame, key: Sequence[str], order: str) -> DataFrame:
    """Per key the row with the highest value in `order`; null is lower than any value.

    Rows that tie and hold a map all stay, also if they are the same: Spark does not compare maps.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    fields = df.schema.fields
    names = [field.name for field in fields]
    keys = [names.index(require_name(name, names, "key")) for name in key]
    by = names.index(require_name(order, names, "order"))
    for at, role in [*((at, "key") for at in keys), (by, "order")]:
        if _holds_map(fields[at].dataType):
            raise _not_comparable(names[at], fields[at].dataType.simpleString(), role)
    # By position from here on: a name may hold a dot or a backtick, or differ from another only in its case.
    columns = [f"c{at}" for at in range(len(names))]
    window = Window.partitionBy(*(F.col(columns[at]) for at in keys)).orderBy(F.col(columns[by]).desc_nulls_last())
    last = df.toDF(*columns).withColumn("rank", F.rank().over(window)).where("rank = 1").select(*columns)
    if not any(_holds_map(field.dataType) for field in fields):
        last = last.dropDuplicates()
    return last.toDF(*names)


def _holds_map(kind: DataType) -> bool:
    from pyspark.sql import types as spark

    match kind:
        case spark.MapType():
            return True
        case spark.ArrayType():
            return _holds_map(kind.elementType)
        case spark.StructType():
            return any(_holds_map(field.dataType) for field in kind.fields)
    return False


def _not_comparable(column: str, kind: object, role: str) -> Invalid:
    advice = "Name a plain column." if role == "order" else "A key is made of plain columns."
    return Invalid(f"this column cannot be compared, as the {role} needs", column=column, type=kind, advice=advice)
