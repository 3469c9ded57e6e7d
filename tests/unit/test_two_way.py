"""Two states by their rows: the answer of a slow comparison of Python values, however small the memory is."""

from __future__ import annotations

import random
import tracemalloc
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

from floodmark import clock
from floodmark.commit.fills import Fill
from floodmark.commit.live_files import LiveFile
from floodmark.commit.metadata import new_metadata
from floodmark.errors import Corrupt, Invalid
from floodmark.rows.project import take_rows
from floodmark.rows.rewriting.two_way import RowSet, TwoStates, compare
from floodmark.rows.schema import arrow_schema, table_schema, user_fields
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage
from floodmark.write.table import staged_files
from tests.unit.test_compare import EVERY_TYPE, plain, some_value

KEYED = "id long not null, name string, extra int"
# Less than a few rows take: they are sorted in many runs on disk.
SORT_BYTES = 256

Row = tuple[Any, ...]


class Table:
    """Files of one table in memory, each with the sequence of its commit."""

    def __init__(self, schema: str, key: Sequence[str] = ()) -> None:
        self.schema = table_schema(schema, key)
        self.storage = Storage({})
        folder = f"memory://table/{clock.new_id()}"
        sort, spec = UNSORTED_SORT_ORDER, UNPARTITIONED_PARTITION_SPEC
        self.metadata = new_metadata(folder, str(uuid.uuid4()), self.schema, spec, sort, {})
        self.target = StageTarget.of(self.metadata, folder, self.storage)

    def file(
        self, rows: list[Row], sequence: int, without: tuple[int, ...] = (), claimed: int | None = None
    ) -> LiveFile:
        """`claimed`: the number of rows in the catalog."""
        target = self.target.without(without)
        fields = [field for field in user_fields(self.schema) if field.field_id not in without]
        columns = list(zip(*rows, strict=True)) or [()] * len(fields)
        types = arrow_schema(self.schema)
        arrays = [pa.array(column, types.field(field.name).type) for field, column in zip(fields, columns, strict=True)]
        records = stage_in_process(target, pa.table(arrays, [field.name for field in fields]), self.storage)
        records = [replace(record, rows=claimed or record.rows) for record in records]
        (file,) = staged_files(records, self.metadata, self.schema, 0)
        return replace(file, sequence=sequence)

    def rows(self, some: RowSet) -> list[Row]:
        found: list[Row] = []
        for file, positions in some.by_file():
            taken = take_rows(self.storage, file.path, user_fields(self.schema), positions)
            found += [tuple(row.values()) for row in taken.to_pylist()]
        return found

    def compared(self, before: Sequence[LiveFile], after: Sequence[LiveFile], **more: Any) -> TwoStates:
        keyed = bool(self.schema.identifier_field_ids)
        return compare(self.storage, before, after, self.schema, table="t", keyed=keyed, sort_bytes=SORT_BYTES, **more)


def split(dice: random.Random, table: Table, rows: list[Row]) -> list[LiveFile]:
    dice.shuffle(rows)
    cuts = sorted(dice.sample(range(1, len(rows)), min(3, max(0, len(rows) - 1)))) if len(rows) > 1 else []
    parts = [rows[start:end] for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    return [table.file(part, number + 1) for number, part in enumerate(parts) if part]


@pytest.mark.parametrize("seed", range(6))
def test_rows_without_a_key_differ_as_multisets(seed: int) -> None:
    dice, table = random.Random(seed), Table("id long, name string")
    before, after = (
        [(dice.randrange(12), dice.choice([None, "a", "b"])) for _ in range(dice.randrange(80))] for _ in range(2)
    )
    found = table.compared(split(dice, table, before), split(dice, table, after))
    assert Counter(table.rows(found.only_before)) == Counter(before) - Counter(after)
    assert Counter(table.rows(found.only_after)) == Counter(after) - Counter(before)
    assert (found.added, found.updated) == (sum((Counter(after) - Counter(before)).values()), 0)


@pytest.mark.parametrize("seed", range(6))
def test_rows_with_a_key_come_go_or_change(seed: int) -> None:
    dice, table = random.Random(seed), Table(KEYED, ["id"])
    before, after = (
        {key: (key, dice.choice("ab"), dice.choice([None, 1])) for key in dice.sample(range(90), dice.randrange(70))}
        for _ in range(2)
    )
    sides = [split(dice, table, list(rows.values())) for rows in (before, after)]
    found = table.compared(*sides, first=1000)
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    assert {row[0] for row in table.rows(found.only_before)} == changed | (before.keys() - after.keys())
    assert sorted(table.rows(found.only_after)) == sorted(
        after[key] for key in changed | (after.keys() - before.keys())
    )
    counts = (len(after.keys() - before.keys()), len(changed), len(before.keys() - after.keys()))
    assert (found.added, found.updated, found.deleted) == counts
    assert (len(found.came), len(found.changed), len(found.went)) == counts
    for old, new in found.changed.tolist():
        one, other = found.only_before.place(old), found.only_after.place(new)
        rows = [
            take_rows(table.storage, file.path, user_fields(table.schema), np.array([at])) for file, at in (one, other)
        ]
        assert rows[0]["id"].to_pylist() == rows[1]["id"].to_pylist()


def test_values_of_every_type_are_the_same_only_if_a_reader_sees_no_difference() -> None:
    dice, table = random.Random("two-way"), Table(EVERY_TYPE)
    types = arrow_schema(table.schema)
    names = [field.name for field in user_fields(table.schema)]
    rows = [tuple(some_value(types.field(name).type, dice) for name in names) for _ in range(60)]
    after = [*rows[:40], *([*row[:4], 2.5, *row[5:]] for row in rows[40:])]
    found = table.compared([table.file(rows, 1)], [table.file([tuple(row) for row in after], 2)])
    one, other = (Counter(repr(plain(row)) for row in some) for some in (rows, map(tuple, after)))
    assert found.deleted == sum((one - other).values()) > 10
    assert found.added == sum((other - one).values())


def test_of_equal_rows_the_newest_are_too_many() -> None:
    table = Table("id long, name string")
    before = [table.file([(1, "a")] * 2, 9), table.file([(1, "a")], 3), table.file([(1, "a")], 7)]
    found = table.compared(before, [table.file([(1, "a")] * 2, 4)])
    assert [(file.sequence, len(positions)) for file, positions in found.only_before.by_file()] == [(9, 2)]
    assert found.added == 0


def test_many_equal_rows_are_paired_across_batches() -> None:
    table = Table("id long, name string")
    found = table.compared([table.file([(1, "a")] * 300, 1)], [table.file([(1, "a")] * 280 + [(2, "a")] * 5, 2)])
    assert (found.deleted, found.added) == (20, 5)


def test_without_the_other_side_nothing_is_read() -> None:
    table = Table(KEYED, ["id"])
    file = table.file([(1, "a", None), (2, "b", None)], 1)
    gone = replace(file, data_file=file.data_file)
    table.storage.delete(file.path)
    found = table.compared([gone], [], first=1)
    assert (found.deleted, found.added, found.went.tolist(), found.came.tolist()) == (2, 0, [0], [])
    with pytest.raises(Corrupt, match="is gone"):
        table.compared([gone], [table.file([(3, "c", None)], 2)])


def test_a_file_without_a_filled_column_has_the_values_of_its_expression() -> None:
    table = Table(KEYED, ["id"])
    extra = table.schema.find_field("extra")
    fills = [Fill(extra.field_id, "extra", "1")]
    lacks = table.file([(1, "a"), (2, "b"), (3, "c")], 1, without=(extra.field_id,))
    holds = table.file([(4, "d", 1), (5, "e", 1)], 1)
    after = [
        table.file([(1, "a", 1), (2, "b", 7), (4, "d", 1), (5, "e", 2)], 2),
        # The value of an older expression, under the row's own sequence.
        table.file([(3, "c", 9)], 1),
    ]
    assert {row[0] for row in table.rows(table.compared([lacks, holds], after, fills=fills).only_after)} == {2, 5}
    assert {row[0] for row in table.rows(table.compared(after, [lacks, holds], fills=fills).only_before)} == {2, 5}
    assert table.compared([lacks, holds], after).updated == 4
    assert table.compared([lacks], [replace(lacks, sequence=5)], fills=fills).updated == 0


@pytest.mark.parametrize("key", [["id"], []], ids=["keyed", "unkeyed"])
def test_what_only_spark_computes_was_filled_if_the_row_has_its_sequence(key: list[str]) -> None:
    table = Table(KEYED, key)
    name, extra = (table.schema.find_field(one) for one in ("name", "extra"))
    # The second follows from the first: without it Arrow cannot compute it.
    fills = [Fill(name.field_id, "name", "upper(id)"), Fill(extra.field_id, "extra", "name")]
    lacks = table.file([(1,), (2,), (3,)], 1, without=(name.field_id, extra.field_id))
    after = [table.file([(1, "a", 7), (2, None, None)], 1), table.file([(3, None, None)], 2)]
    assert [row[0] for row in table.rows(table.compared([lacks], after, fills=fills).only_after)] == [3]
    assert table.compared([lacks], [replace(lacks, sequence=5)], fills=fills).only_after.count == 0


def test_a_column_of_the_key_that_a_file_lacks_is_computed_or_refused() -> None:
    table = Table(KEYED.replace("extra int", "extra int not null"), ["id", "extra"])
    extra = table.schema.find_field("extra")
    lacks = table.file([(1, "a"), (2, "b")], 1, without=(extra.field_id,))
    after = table.file([(1, "a", 5), (1, "a", 6), (2, "c", 5)], 2)
    found = table.compared([lacks], [after], fills=[Fill(extra.field_id, "extra", "5")])
    assert sorted(table.rows(found.only_after)) == [(1, "a", 6), (2, "c", 5)]
    assert (found.added, found.updated, found.deleted) == (1, 1, 0)
    with pytest.raises(Invalid, match="only Spark can compute it") as error:
        table.compared([lacks], [after], fills=[Fill(extra.field_id, "extra", "length(name)")])
    assert error.value.facts["column"] == "extra"


def test_rows_that_share_a_key_are_counted() -> None:
    table = Table(KEYED, ["id"])
    twice = table.file([(1, "a", None), (1, "b", None), (2, "c", None)], 1)
    assert table.compared([table.file([(1, "a", None)], 1)], [twice]).shared_after == 1
    assert table.compared([], [twice]).shared_after == 0
    assert table.compared([], [twice], look_for_shared=True).shared_after == 1


def test_a_file_with_another_number_of_rows_than_in_the_catalog_is_corrupt() -> None:
    table = Table(KEYED, ["id"])
    one, other = table.file([(1, "a", None), (2, "a", None)], 1), table.file([(1, "b", None)], 2, claimed=3)
    with pytest.raises(Corrupt, match="number of rows in the catalog"):
        table.compared([one], [other])


def test_a_set_of_rows_knows_its_files_and_positions() -> None:
    table = Table("id long, name string")
    files = [table.file([(n, "") for n in range(count)], 1) for count in (9, 1, 16)]
    rows = RowSet(files)
    rows.add(np.array([rows.starts[0] + 8, rows.starts[1], rows.starts[2] + 3, rows.starts[2]]))
    rows.add(np.array([rows.starts[2] + 3]))
    assert rows.count == 4
    assert [(file.path, positions.tolist()) for file, positions in rows.by_file()] == [
        (files[0].path, [8]),
        (files[1].path, [0]),
        (files[2].path, [0, 3]),
    ]
    assert rows.place(int(rows.lowest(2)[1])) == (files[1], 0)
    rows.add_all()
    assert rows.count == 26


def test_memory_does_not_follow_the_number_of_rows() -> None:
    """Four times as many rows, in as many files of one size: about the same memory (I14). Sorting has its own test."""
    peaks = [peak_bytes(files) for files in (4, 16)]
    assert peaks[1] < 1.3 * peaks[0], peaks


def peak_bytes(count: int) -> int:
    """What Python and numpy hold at most; the files themselves are in the store's memory, and not counted."""
    table, rows = Table("id long not null, name string", ["id"]), 20_000
    sides = [
        [table.file([(at * rows + n, name) for n in range(rows)], 1) for at in range(count)] for name in ("old", "new")
    ]
    tracemalloc.start()
    try:
        found = compare(table.storage, *sides, table.schema, table="t", keyed=True, sort_bytes=1024 * 1024)
        assert found.updated == count * rows
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
