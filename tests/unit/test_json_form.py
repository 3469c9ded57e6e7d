"""Records as JSON: their fields in their order, plain all the way down; and errors as the catalog keeps them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from floodmark.json_form import JsonObject, Reported, StoredError, as_json, stored_error


@dataclass(frozen=True)
class Part(Reported):
    name: str
    size: int | None


@dataclass(frozen=True)
class Whole(Reported):
    parts: tuple[Part, ...]
    by_name: dict[str, Part | None]
    settings: JsonObject
    ratio: float = 0.5
    done: bool = False


def test_a_record_is_an_object_of_its_fields_in_their_order() -> None:
    whole = Whole((Part("b", None), Part("a", 2)), {"a": Part("a", 2), "c": None}, JsonObject(x=[1, {"y": "z"}]))
    found = as_json(whole)
    assert json.dumps(found) == (
        '{"parts": [{"name": "b", "size": null}, {"name": "a", "size": 2}], '
        '"by_name": {"a": {"name": "a", "size": 2}, "c": null}, '
        '"settings": {"x": [1, {"y": "z"}]}, "ratio": 0.5, "done": false}'
    )
    assert type(found["settings"]) is dict, "a user gets plain dicts and lists"
    assert type(found["parts"]) is list


def test_what_is_no_json_is_an_error_and_not_a_text() -> None:
    with pytest.raises(TypeError):
        as_json(Whole((), {}, JsonObject(at=datetime(2026, 11, 16, tzinfo=UTC))))


def test_a_stored_error_keeps_what_its_kind_adds() -> None:
    told = {"kind": "Invalid", "message": "wrong", "facts": {"line": "3"}, "advice": "Mend it.", "problems": [1]}
    error = stored_error(told)
    assert error == told
    assert (error.kind, error.message, error.facts, error.advice) == ("Invalid", "wrong", {"line": "3"}, "Mend it.")
    short = StoredError({"kind": "Busy"})
    assert (short.message, short.facts, short.advice) == ("", {}, "")
    assert stored_error(None) is None
