"""The API for people, as the page at /docs shows it. Built from the OpenAPI document. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

# The parts of an OpenAPI document that the page shows.
Schema = TypedDict(
    "Schema",
    {
        "$ref": str,
        "type": str,
        "description": str,
        "anyOf": "list[Schema]",
        "enum": list[str],
        "const": str,
        "items": "Schema",
        "additionalProperties": "Schema | bool",
        "properties": "dict[str, Schema]",
    },
    total=False,
)
Parameter = TypedDict("Parameter", {"name": str, "in": str, "schema": Schema, "description": str}, total=False)


class Content(TypedDict, total=False):
    schema: Schema


class Answer(TypedDict, total=False):
    description: str
    content: dict[str, Content]


class Method(TypedDict, total=False):
    summary: str
    description: str
    parameters: list[Parameter]
    requestBody: Answer
    responses: dict[str, Answer]


@dataclass(frozen=True)
class ApiOperation:
    """One request, as the page at /docs shows it. `answers`: status, what it means, and the name of its form."""

    method: str
    path: str
    text: str
    parameters: tuple[tuple[str, str, str, str], ...]
    body: str
    answers: tuple[tuple[str, str, str], ...]

    @property
    def anchor(self) -> str:
        return f"{self.method}-{self.path.strip('/')}".lower().translate(str.maketrans("/{}", "---"))


@dataclass(frozen=True)
class Form:
    """An object in a body: its name, what it is, and its fields with their types."""

    name: str
    text: str
    fields: tuple[tuple[str, str, str], ...]


def operations_of(paths: Mapping[str, Mapping[str, Method]]) -> list[ApiOperation]:
    """Every request of the paths of an OpenAPI document, in its order. Pure."""
    return [
        ApiOperation(
            method.upper(),
            path,
            one.get("description") or one.get("summary", ""),
            tuple(
                (part["name"], part["in"], _type_text(part["schema"]), part.get("description", ""))
                for part in one.get("parameters", ())
            ),
            one.get("requestBody", {}).get("description", ""),
            tuple(
                (status, answer.get("description", ""), _form_name(answer))
                for status, answer in sorted(one["responses"].items())
            ),
        )
        for path, methods in paths.items()
        for method, one in methods.items()
    ]


def forms_of(schemas: Mapping[str, Schema]) -> list[Form]:
    """The objects that request and response bodies consist of, by name. Pure."""
    return [
        Form(
            name,
            form.get("description", ""),
            tuple(
                (field, _type_text(schema), schema.get("description", ""))
                for field, schema in form.get("properties", {}).items()
            ),
        )
        for name, form in sorted(schemas.items())
    ]


def _form_name(answer: Answer) -> str:
    for content in answer.get("content", {}).values():
        return str(content.get("schema", {}).get("$ref", "")).rpartition("/")[2]
    return ""


def _type_text(schema: Schema) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(map(_type_text, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(f'"{one}"' for one in schema.get("enum", [schema.get("const", "")]))
    if schema.get("type") == "array":
        return f"list of {_type_text(schema.get('items', {}))}"
    if isinstance(inner := schema.get("additionalProperties"), Mapping):
        return f"map of {_type_text(inner)}"
    return str(schema.get("type", "any"))
