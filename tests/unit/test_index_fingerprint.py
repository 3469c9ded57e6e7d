"""Fingerprints of rows: equal for what compares as the same, different for all else, the same while schemas change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.types import NestedField

from floodmark.rows.index.fingerprint import fingerprints
from floodmark.rows.index.hashing import Secret
from floodmark.rows.schema import table_schema, user_fields
from tests.unit.test_compare import EVERY_TYPE, kinds, laid_out, plain, some_value

SECRET = Secret("00112233445566778899aabbccddeeff")
FIELDS = {field.name: field for field in user_fields(table_schema(EVERY_TYPE))}


def field(text: str, **ids: int) -> list[NestedField]:
    """The fields of a schema, with other ids where they are given."""
    return [
        one.model_copy(update={"field_id": ids.get(one.name, one.field_id)}) for one in user_fields(table_schema(text))
    ]


def of(columns: dict[str, pa.Array | pa.ChunkedArray], fields: list[NestedField]) -> list[int]:
    return [int(one) for one in fingerprints(pa.table(columns), fields, SECRET)]


@pytest.mark.parametrize(("name", "kind"), kinds())
def test_random_values_have_equal_fingerprints_if_and_only_if_they_are_the_same(name: str, kind: pa.DataType) -> None:
    chance = random.Random(f"fingerprint {name}")
    equal = 0
    for _ in range(30):
        left = [some_value(kind, chance) for _ in range(chance.randrange(1, 50))]
        right = [value if chance.random() < 0.6 else some_value(kind, chance) for value in left]
        one, other = (of({name: laid_out(values, kind, chance)}, [FIELDS[name]]) for values in (left, right))
        same = [repr(plain(a)) == repr(plain(b)) for a, b in zip(left, right, strict=True)]
        assert [a == b for a, b in zip(one, other, strict=True)] == same
        equal += sum(same)
    assert equal > 50


def test_a_row_has_the_fingerprint_of_all_its_columns_together() -> None:
    chance = random.Random("rows")
    rows = 200
    columns = {name: [some_value(kind, chance) for _ in range(rows)] for name, kind in kinds()}
    arrays = {name: pa.array(columns[name], kind) for name, kind in kinds()}
    found = of(arrays, list(FIELDS.values()))
    assert len(set(found)) == rows
    for name, kind in kinds():
        other = columns[name][1:] + columns[name][:1]
        moved = of({**arrays, name: pa.array(other, kind)}, list(FIELDS.values()))
        same = [repr(plain(a)) == repr(plain(b)) for a, b in zip(columns[name], other, strict=True)]
        assert [a == b for a, b in zip(found, moved, strict=True)] == same, name


def test_blocks_and_batches_do_not_show() -> None:
    table = pa.table({"id": np.arange(100_000), "k": [f"{n:x}" * 5 for n in range(100_000)]})
    fields = field("id long, k string")
    whole = fingerprints(table, fields, SECRET)
    parts = [fingerprints(batch, fields, SECRET) for batch in table.to_batches(max_chunksize=777)]
    assert (np.concatenate(parts) == whole).all()
    assert len(np.unique(whole)) == 100_000
    assert len(fingerprints(table.slice(0, 0), fields, SECRET)) == 0


def test_a_wider_type_another_name_and_another_order_of_columns_change_nothing() -> None:
    before = of(
        {
            "a": pa.array([1, -5, None], pa.int32()),
            "b": pa.array([1.5, None, 0.0], pa.float32()),
            "c": pa.array(["x"] * 3),
        },
        field("a int, b float, c string", a=1, b=2, c=3),
    )
    after = of(
        {"z": pa.array(["x"] * 3), "b": pa.array([1.5, None, 0.0]), "y": pa.array([1, -5, None])},
        field("z string, b double, y long", z=3, b=2, y=1),
    )
    assert before == after
    small, large = (pa.array([125, None], pa.int32()).cast(pa.decimal128(p, 0)) for p in (12, 38))
    assert of({"d": small}, field("d decimal(12,0)")) == of({"d": large}, field("d decimal(38,0)"))


def test_a_column_that_is_added_later_changes_nothing_while_it_is_null() -> None:
    old = of({"a": pa.array([1, 2])}, field("a long", a=1))
    fields = field("a long, b string", a=1, b=2)
    assert of({"a": pa.array([1, 2]), "b": pa.nulls(2, pa.string())}, fields) == old
    filled = of({"a": pa.array([1, 2]), "b": pa.array(["", None])}, fields)
    assert filled[0] != old[0]
    assert filled[1] == old[1]


def test_a_field_that_is_added_inside_a_struct_changes_nothing_while_it_is_null() -> None:
    shape: Any = field("s struct<a:long,b:string>")[0]
    inner = shape.field_type.fields
    narrow = shape.model_copy(update={"field_type": shape.field_type.model_copy(update={"fields": inner[:1]})})
    old = of({"s": pa.array([{"a": 1}, None])}, [narrow])
    kind = pa.struct([("a", pa.int64()), ("b", pa.string())])
    assert of({"s": pa.array([{"a": 1, "b": None}, None], kind)}, [shape]) == old
    assert of({"s": pa.array([{"a": 1, "b": ""}, None], kind)}, [shape])[0] != old[0]


def test_a_value_in_another_column_is_another_row() -> None:
    fields = field("a long, b long")
    found = of({"a": pa.array([1, 2, None, 1]), "b": pa.array([2, 1, 1, None])}, fields)
    assert len(set(found)) == 4


def test_the_sequence_is_left_out() -> None:
    fields = field("a long")
    sequence = NestedField(99, "_seq", fields[0].field_type)
    table = pa.table({"_seq": pa.array([5, None]), "a": pa.array([1, 2])})
    assert fingerprints(table, [sequence, *fields], SECRET).tolist() == of({"a": pa.array([1, 2])}, fields)


def test_another_secret_gives_other_fingerprints() -> None:
    table = pa.table({"a": pa.array(["x", "y" * 2000])})
    other = fingerprints(table, field("a string"), Secret("00" * 16))
    assert not set(other.tolist()) & set(of({"a": table["a"]}, field("a string")))


def test_encoded_text_counts_as_what_it_stands_for() -> None:
    values = ["a", None, "b" * 3000, "a"]
    expected = of({"a": pa.array(values)}, field("a string"))
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        assert of({"a": pa.array(values, kind)}, field("a string")) == expected


def test_columns_that_do_not_fit_the_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="1 columns are not 2 fields"):
        of({"a": pa.array([1])}, field("a long, b long"))
    with pytest.raises(TypeError, match="not indexed"):
        of({"a": pa.array([1], pa.time32("s"))}, field("a long"))
