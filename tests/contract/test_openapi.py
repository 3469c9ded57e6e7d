"""The server keeps what its OpenAPI document says, whatever it is sent: schemathesis makes up the requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

import floodmark as fm
from floodmark.serve.http.access import AccessToken, new_token, token_hash
from tests.conftest import EVENTS, Place, ids, rows
from tests.contract.test_http_rows import door

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


@schemathesis.serializer("application/x-ndjson")
def as_it_is(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")


# A stream that does not end is tested by itself.
ENDLESS = "/api/events"


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1))
        yield lake


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_whatever_is_sent_answers_are_as_described(lake: fm.Lake, tmp_path: Path, mode: GenerationMode) -> None:
    token = new_token()
    known = {"Authorization": f"Bearer {token}"}
    with door(lake, tmp_path / "spool", tokens=[AccessToken("all", token_hash(token), "admin")]) as client:
        schema = schemathesis.openapi.from_url(str(client.base_url.join("/openapi.json")))
        operations = [one.ok() for one in schema.exclude(path=ENDLESS).get_all_operations()]
        tried = [run(one, mode, known) for one in operations if mode == GenerationMode.POSITIVE or has_input(one)]
        assert len(tried) > 3
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz", headers=known).json()["ready"]
    assert ids(lake) == [1], "nothing that was made up is a row of the table"


def has_input(operation: Any) -> bool:
    """Whether something about it can be wrong."""
    return bool(operation.query or operation.path_parameters or operation.body)


def run(operation: Any, mode: GenerationMode, headers: dict[str, str]) -> str:
    @settings(
        max_examples=8,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        case.call_and_validate(headers=headers, checks=CHECKS, timeout=30)

    send()
    return str(operation.label)


def test_every_operation_describes_its_errors(lake: fm.Lake, tmp_path: Path) -> None:
    with door(lake, tmp_path / "spool") as client:
        document = client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert {"/api/tables/{table}/rows", "/healthz", "/readyz", "/api/jobs/{id}/cancel"} <= set(document["paths"])
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            assert operation.get("summary") or operation.get("description"), (method, path)
            errors = [answer for status, answer in answers.items() if int(status) >= 400]
            assert errors, (method, path)
            assert "HTTPValidationError" not in str(answers), (method, path)
    taken = document["paths"]["/api/tables/{table}/rows"]["post"]["responses"]
    assert {"200", "202", "400", "401", "403", "404", "408", "409", "413", "415", "422", "429", "503"} <= set(taken)


def test_the_names_of_what_is_answered_stay(lake: fm.Lake, tmp_path: Path) -> None:
    """Clients that are made from the document have classes of these names."""
    with door(lake, tmp_path / "spool") as client:
        document = client.get("/openapi.json").json()
        assert client.get("/openapi.json").json() == document, "the same, however often it is asked for"
    schemas = document["components"]["schemas"]
    assert list(schemas) == sorted(schemas)
    assert set(schemas) == {
        *("Alive", "Ready", "Overview", "Status", "Figures", "Error", "Failed", "RowProblem", "CommittedRows"),
        *("TakenRows", "Tables", "TableLine", "TableDetails", "ColumnLine", "ConsumerLine", "Outcome", "LastRun"),
        *("Commits", "CommitLine", "TouchedTable", "Audit", "AuditLine", "Sinks", "Sink", "SinkLine", "SinkTable"),
        *("LastUnit", "DestinationMaintenance", "Jobs", "Job", "JobLine", "ChangedJob", "Spools", "Spool"),
        *("Daemon", "Task", "WaitingLine", "FoundRows", "IndexStatus", "IndexTotals"),
    }
    assert {schema["title"] for schema in schemas.values()} == set(schemas)
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert refs <= set(schemas)
    assert schemas["CommitLine"]["required"] == list(schemas["CommitLine"]["properties"])
