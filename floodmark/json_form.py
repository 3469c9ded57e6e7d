"""Records as JSON, made once, at the edge where something outside reads them: `--json`, HTTP, a dict for a user. Pure.

A record that is reported is a frozen dataclass of `Reported`: its fields, in their order, are the keys of its JSON, and
the OpenAPI document describes it from the same definition (pydantic finds the hooks below; nothing here imports it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar, TypeAlias

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"
_Value: TypeAlias = "Json | DataclassInstance | Sequence[_Value] | Mapping[str, _Value]"


class Reported:
    """Something that the lake says of itself: these fields, and no others."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}


class JsonObject(dict[str, Json]):
    """An object whose keys its record does not name: settings, facts, what a later version may add."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[JsonObject], handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(dict)


class StoredError(JsonObject):
    """An error as the catalog keeps it, with whatever its kind adds."""

    @property
    def kind(self) -> str:
        return str(self.get("kind", "unknown"))

    @property
    def message(self) -> str:
        return str(self.get("message", ""))

    @property
    def advice(self) -> str:
        return str(self.get("advice", ""))

    @property
    def facts(self) -> Mapping[str, Json]:
        found = self.get("facts")
        return found if isinstance(found, Mapping) else {}


def stored_error(error: Mapping[str, Json] | None) -> StoredError | None:
    return None if error is None else StoredError(error)


def as_json(record: DataclassInstance) -> dict[str, Json]:
    """The record as an object of plain dicts and lists."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: _Value) -> Json:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [_plain(one) for one in value]
    return as_json(value)
