"""The app in OpenAPI: the schemas of answers and errors, as they are sent. A test checks the server against them."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field

WHY = {
    400: "Invalid request: a line is not a JSON object, or a header or parameter is invalid.",
    401: "A valid token is required.",
    403: "The token's role is not sufficient, or a page of another origin tried to write.",
    404: "Not found.",
    405: "The method is not allowed for this address.",
    408: "Timeout while reading the body.",
    409: "Not possible now, or not in this order.",
    410: "The version has expired: read a newer one.",
    412: "The sender expects another lake, table, key or unit.",
    413: "The body is too large, as sent or decompressed.",
    415: "Unknown Content-Encoding.",
    421: "A lake without tokens accepts only local host names.",
    422: "The rows do not fit the table, or the Idempotency-Key was used for other rows. `problems` names lines.",
    429: "Too many requests or waiting rows: send again after Retry-After.",
    500: "Internal error; see the server's log.",
    503: "A required service did not answer: send again after Retry-After.",
}


# What FastAPI takes for the answers of an operation, by status.
Described = dict[int | str, dict[str, Any]]


class RowProblem(BaseModel):
    """What is wrong with one line."""

    line: int = Field(description="Line number from 1; blank lines count.")
    column: str | None = Field(description="The table's column, or the field inside it.")
    character: int | None = Field(description="Position in the line, from 1, if the line is not JSON.")
    problem: str


class Error(BaseModel):
    """Message, facts and advice."""

    kind: str
    message: str
    facts: dict[str, str]
    advice: str
    problems: list[RowProblem] | None = Field(None, description="The first invalid lines; facts.count is their number.")


class Failed(BaseModel):
    error: Error


class TakenRows(BaseModel):
    """The rows are durable and will be in the table exactly once. The client has nothing else to do."""

    outcome: Literal["taken", "already_taken"]
    rows: int
    record: int = Field(description="The number of the request in the table's spool.")
    note: str | None = Field(None, description="With wait=committed: why there is no version yet.")


class CommittedRows(BaseModel):
    """The rows are in the table."""

    outcome: Literal["committed", "already_committed", "nothing_to_do", "skipped"]
    rows: int
    version: int | None
    quarantined: int | None = Field(None, description="Rows that did not fit the table; they are kept in quarantine.")


def errors(*statuses: int) -> Described:
    """The error answers of an operation; those that any operation may give are added."""
    return {status: {"model": Failed, "description": WHY[status]} for status in sorted({*statuses, 400, 421, 500})}


NDJSON = {
    "requestBody": {
        "description": "One JSON object per line, plain or compressed with gzip or zstd (Content-Encoding).",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
        "required": True,
    }
}

_FASTAPI_ERROR = "HTTPValidationError"
# Names in the document for records whose own names have more detail than a reader of the API needs.
_NAMES = {
    "AuditList": "Audit",
    "Commit": "CommitLine",
    "CommitList": "Commits",
    "TableCommit": "TouchedTable",
    "DaemonReport": "Daemon",
    "JobList": "Jobs",
    "JobReport": "Job",
    "RecentFigures": "Figures",
    "SinkList": "Sinks",
    "SinkReport": "Sink",
    "SpoolList": "Spools",
    "SpoolReport": "Spool",
    "TableList": "Tables",
    "TaskReport": "Task",
}
_REF = "#/components/schemas/"


def describe(app: FastAPI) -> None:
    """The document of the app: tokens are bearer tokens, if settings require any. FastAPI's own answer to invalid
    parameters is replaced: here they are 400, as any other error."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        parts = document.setdefault("components", {})
        parts.setdefault("securitySchemes", {})["token"] = {"type": "http", "scheme": "bearer"}
        document["security"] = [{"token": []}, {}]
        for operation in (one for methods in document["paths"].values() for one in methods.values()):
            if _FASTAPI_ERROR in str(operation["responses"].get("422", "")):
                del operation["responses"]["422"]
        for name in (_FASTAPI_ERROR, "ValidationError"):
            parts.get("schemas", {}).pop(name, None)
        _rename(document, parts.setdefault("schemas", {}))
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _rename(document: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> None:
    """The document's own names; every field of a commit is sent, also one that has a default."""
    for name in ("Commit", "TableCommit"):
        if name in schemas:
            schemas[name].pop("description", None)
            schemas[name]["required"] = list(schemas[name]["properties"])
            for one in schemas[name]["properties"].values():
                one.pop("default", None)
    named = {_NAMES.get(name, name): {**one, "title": _NAMES.get(name, name)} for name, one in schemas.items()}
    schemas.clear()
    schemas.update(sorted(named.items()))
    _point(document)


def _point(part: Any) -> None:
    """Every reference to a schema, by its new name."""
    if isinstance(part, dict):
        name = str(part.get("$ref", "")).removeprefix(_REF)
        if name in _NAMES:
            part["$ref"] = _REF + _NAMES[name]
    for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _point(one)
