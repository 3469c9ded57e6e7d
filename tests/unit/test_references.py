"""Values looked for among the keys of other files: every type, chunks of any size, and files passed by rightly."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest
from pyiceberg.schema import Schema

from floodmark import clock
from floodmark.commit.live_files import LiveFile
from floodmark.commit.manifests import data_file
from floodmark.commit.metadata import new_metadata
from floodmark.commit.references import (
    Reference,
    Referrer,
    no_reference,
    reference_property,
    references_of,
    referrer_property,
    referrers_of,
)
from floodmark.errors import Corrupt
from floodmark.rows.layout import partition_spec, sort_order
from floodmark.rows.reading.references import held_values, missing_values
from floodmark.rows.schema import table_schema
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage
from tests.unit.test_keys import EACH_TYPE


class Column:
    """Data files of a table with one column that counts, in memory; it knows which of them were opened."""

    def __init__(self, kind: str, storage: Storage) -> None:
        self.storage = storage
        self.schema: Schema = table_schema(f"other int, v {kind}")
        self.field = self.schema.find_field("v")
        spec, sort = partition_spec(self.schema, []), sort_order(self.schema, [])
        self._metadata = new_metadata("memory://lake/t", str(uuid.uuid4()), self.schema, spec, sort, {})

    def write(self, *values: Any) -> LiveFile:
        spec = partition_spec(self.schema, []).model_dump_json()
        target = StageTarget(f"memory://lake/{clock.new_id()}", self.schema.model_dump_json(), spec)
        (record,) = stage_in_process(target, [{"other": 1, "v": value} for value in values], self.storage)
        return LiveFile(data_file(record, self._metadata, 0), 1, None)


def paths(*files: LiveFile) -> list[str]:
    return [file.path for file in files]


@pytest.mark.parametrize(("kind", "values"), EACH_TYPE, ids=[kind for kind, _ in EACH_TYPE])
@pytest.mark.parametrize("chunk_rows", [1, 100])
def test_values_of_every_type_are_found_or_missing(kind: str, values: list[Any], chunk_rows: int) -> None:
    column = Column(kind, Storage({}))
    children = column.write(*values, None, *values)
    first, *rest = values
    all_there = missing_values(
        column.storage, paths(children), column.field, [column.write(first), column.write(*rest)], column.field
    )
    assert (all_there.count, all_there.examples, len(all_there.found_in)) == (0, (), 2)
    parent = column.write(*rest)
    found = missing_values(column.storage, paths(children), column.field, [parent], column.field, chunk_rows=chunk_rows)
    assert found.count >= 1
    assert {text.partition("=")[0] for text in found.examples} == {"v"}
    assert found.found_in == {parent.path}
    held = held_values(column.storage, paths(column.write(first)), column.field, [children], column.field)
    assert (held.count, held.found_in) == (1, {children.path})
    gone = held_values(column.storage, paths(column.write(first)), column.field, [parent], column.field)
    assert (gone.count, gone.found_in) == (0, frozenset())


@pytest.mark.parametrize("chunk_rows", [1, 3, 1000])
def test_random_values_in_many_files(chunk_rows: int) -> None:
    chance, column = random.Random(chunk_rows), Column("long", Storage({}))
    there = chance.sample(range(200), 120)
    parents = [column.write(*sorted(there)[at : at + 20]) for at in range(0, 120, 20)]
    sent = [chance.choice(range(200)) for _ in range(90)]
    children = [column.write(*sent[:40], None), column.write(*sent[40:])]
    found = missing_values(column.storage, paths(*children), column.field, parents, column.field, chunk_rows=chunk_rows)
    missing = set(sent) - set(there)
    # A value that comes again in another chunk is counted again; never one that is there.
    assert bool(found.count) == bool(missing)
    assert found.count == len(missing) or chunk_rows < 1000
    assert {int(text.removeprefix("v=")) for text in found.examples} <= missing
    keys = column.write(*range(0, 200, 2))
    held = held_values(column.storage, paths(keys), column.field, children, column.field, stay=parents)
    assert held.count == len({value for value in sent if value % 2 == 0} - set(there))


def test_columns_of_which_one_is_wider_by_now_are_compared_in_the_wider_type() -> None:
    storage = Storage({})
    narrow, wide = Column("int", storage), Column("long", storage)
    parent, child = narrow.write(1, 2), wide.write(2, 2**40)
    found = missing_values(storage, paths(child), wide.field, [parent], narrow.field)
    assert (found.count, found.examples) == (1, (f"v={2**40}",))
    # A bound of four bytes says nothing about a column of eight.
    found = missing_values(storage, paths(child), wide.field, [parent], wide.field)
    assert found.count == 1


def test_files_that_cannot_hold_a_value_are_not_opened() -> None:
    column = Column("string", Storage({}))
    near, far = column.write("a", "c"), column.write("x", "z")
    column.storage.delete(far.path)
    child = column.write("b", "c", None)
    found = missing_values(column.storage, paths(child), column.field, [far, near], column.field)
    assert (found.count, found.examples, found.found_in) == (1, ("v=b",), {near.path})
    with pytest.raises(Corrupt):
        missing_values(column.storage, paths(column.write("y")), column.field, [far, near], column.field)


def test_null_refers_to_nothing() -> None:
    column = Column("long", Storage({}))
    assert missing_values(column.storage, paths(column.write(None)), column.field, [], column.field).count == 0


def test_a_reference_is_said_in_both_tables_by_ids_and_taken_back() -> None:
    schema = table_schema("id long, customer long, boss long")
    ids = {field.name: field.field_id for field in schema.fields}
    one = Reference("child", ids["customer"], "customers", "parent", 1)
    two = Reference("child", ids["boss"], "staff", "other", 7)
    said = dict([reference_property(two), reference_property(one)])
    assert references_of({**said, "comment": "x"}, schema, "child") == (one, two)
    assert references_of(said, Schema(*schema.fields[:2]), "child") == (one,)
    heard = dict([referrer_property(one, "orders")])
    assert referrers_of(heard) == (Referrer("orders", "child", ids["customer"]),)
    mine, theirs = no_reference(one)
    assert references_of({**said, **dict([mine])}, schema, "child") == (two,)
    assert referrers_of({**heard, **dict([theirs])}) == ()
    for broken in ("{", '{"table": "t"}', "5"):
        with pytest.raises(Corrupt):
            references_of({reference_property(one)[0]: broken}, schema, "child")
        with pytest.raises(Corrupt):
            referrers_of({"floodmark.referrer.child.x": broken})
