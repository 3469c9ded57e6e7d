"""Rows staged for a table's shape of then, in its shape of now: by field id, and never by a name that moved."""

from __future__ import annotations

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, ListType, LongType, NestedField, StringType, StructType

from floodmark.errors import Invalid
from floodmark.model import FileRecord
from floodmark.write.reshape import check_condition, check_required, present_name, translated


def column(field_id: int, name: str, kind: object = None, *, required: bool = False) -> NestedField:
    return NestedField(field_id, name, kind or LongType(), required=required)


def schema(*fields: NestedField, key: tuple[int, ...] = ()) -> Schema:
    return Schema(*fields, identifier_field_ids=list(key))


THEN = schema(column(1, "id", required=True), column(2, "a"), column(3, "b", StringType()), key=(1,))


def names(shape: Schema) -> list[tuple[int, str]]:
    return [(field.field_id, field.name) for field in shape.fields]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (THEN, [(1, "id"), (2, "a"), (3, "b")]),
        (schema(column(1, "id"), column(2, "x"), column(3, "b")), [(1, "id"), (2, "x"), (3, "b")]),
        (schema(column(1, "id"), column(2, "b"), column(3, "a")), [(1, "id"), (2, "b"), (3, "a")]),
        (schema(column(1, "id"), column(3, "b")), [(1, "id"), (3, "b")]),
        (schema(column(1, "id"), column(4, "a"), column(3, "b")), [(1, "id"), (3, "b")]),
        (schema(column(1, "id"), column(3, "a")), [(1, "id"), (3, "a")]),
    ],
    ids=["as it was", "renamed", "names changed places", "dropped", "made anew under its name", "took a dropped name"],
)
def test_columns_are_known_by_their_ids(now: Schema, expected: list[tuple[int, str]]) -> None:
    assert names(translated(THEN, THEN, now)) == expected


def test_types_are_those_of_the_files() -> None:
    staged = schema(column(1, "n", IntegerType()))
    assert translated(staged, staged, schema(column(1, "m", LongType()))).fields[0].field_type == IntegerType()


def test_columns_that_the_rows_brought_are_known_by_name_whatever_has_their_ids_now() -> None:
    staged = schema(*THEN.fields, column(4, "city", StringType()))
    now = schema(*THEN.fields, column(4, "age"), column(5, "city", StringType()))
    assert names(translated(staged, THEN, now)) == [(1, "id"), (2, "a"), (3, "b"), (4, "city")]


def test_a_brought_column_that_another_was_renamed_to_is_refused() -> None:
    staged = schema(*THEN.fields, column(4, "x"))
    with pytest.raises(Invalid) as caught:
        translated(staged, THEN, schema(column(1, "id"), column(2, "x"), column(3, "b")))
    assert caught.value.facts["columns"] == "x"


def test_fields_inside_structs_and_lists_are_followed() -> None:
    def nested(*fields: NestedField) -> Schema:
        return schema(column(1, "at", StructType(*fields)), column(2, "all", ListType(9, StructType(*fields), False)))

    then, now = nested(column(3, "lat"), column(4, "lon")), nested(column(3, "north"))
    found = translated(then, then, now)
    for kind in (found.fields[0].field_type, found.fields[1].field_type.element_type):
        assert [(field.field_id, field.name) for field in kind.fields] == [(3, "north")]
    gone = nested(column(5, "z"))
    assert names(translated(schema(then.fields[0]), then, gone)) == []


@pytest.mark.parametrize(
    ("where", "fits"),
    [
        ("id = 1", True),
        ("a = 1", False),
        ("A = 1", False),
        ("id = 1 and upper(b) = 'X'", True),
        ("id = 1 or `a` > 5", False),
        ("banana = 1", True),
    ],
)
def test_a_condition_holds_only_while_its_names_mean_the_same_columns(where: str, fits: bool) -> None:
    for now in (schema(THEN.fields[0], THEN.fields[2]), schema(THEN.fields[0], column(9, "a"), THEN.fields[2])):
        if fits:
            check_condition(where, THEN, now)
        else:
            with pytest.raises(Invalid):
                check_condition(where, THEN, now)


def test_a_column_that_an_option_names_is_followed_or_gone() -> None:
    assert present_name("a", THEN, schema(column(2, "renamed"))) == "renamed"
    assert present_name("brought", THEN, THEN) == "brought"
    with pytest.raises(Invalid):
        present_name("a", THEN, schema(column(1, "id")))


def test_rows_without_a_value_do_not_pass_into_a_column_that_is_required_now() -> None:
    now = schema(column(1, "id", required=True), column(2, "a", required=True))
    full, empty = (FileRecord("f", 2, 10, null_counts={1: 0, 2: nulls}) for nulls in (0, 1))
    check_required([full], THEN, now)
    with pytest.raises(Invalid) as caught:
        check_required([full, empty], THEN, now)
    assert (caught.value.facts["column"], caught.value.facts["rows"]) == ("a", 1)
    # What is inside a struct does not tell whether the struct is there.
    struct = schema(column(5, "s", StructType(column(6, "x"))))
    with pytest.raises(Invalid):
        check_required([full], struct, schema(column(5, "s", StructType(column(6, "x")), required=True)))
