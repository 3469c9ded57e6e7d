"""`sink check`: checks that a destination can be reached and written to, before the first run. It sends no row.

files: puts an object, checks that its name is taken, reads it and deletes it. http: sends OPTIONS with the token; an
address of a lake also gets a body without rows, which the lake rejects only after it has accepted token and table.
iceberg: opens the catalog, loads the table if it exists, and puts and deletes an object where the table's files go.

A crash leaves at most one object whose name begins with `_floodmark-check`. No reader of units or tables reads it.
"""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Any, TypedDict
from urllib.parse import urlsplit

from floodmark import clock
from floodmark.errors import FloodmarkError, Invalid, Unavailable
from floodmark.failpoints import hit
from floodmark.json_form import Json
from floodmark.sinks.settings import AnySettings, FilesSettings, HttpSettings, IcebergSettings, WrongSetting
from floodmark.storage import Storage, join, root_location
from floodmark.storage.failures import TRY_AGAIN
from floodmark.version import __version__

PROBE_NAME = "_floodmark-check"
READY, FAILED = "ready", "failed"


class TableCheck(TypedDict):
    """The check of one table's destination: what it found, or the error that a run would meet."""

    table: str
    outcome: str
    found: dict[str, Json] | None
    # With its exit code.
    error: dict[str, Any] | None


class SinkCheck(TypedDict):
    sink: str
    kind: str
    outcome: str
    tables: list[TableCheck]


def check_destination(settings: AnySettings, storage: Storage, table: str) -> dict[str, Json]:
    """What the check found at the destination of a table. The error says why rows cannot be shipped there."""
    if isinstance(settings, HttpSettings):
        return _check_http(settings, table)
    if isinstance(settings, FilesSettings):
        own = Storage(settings.storage) if settings.storage else storage
        return _probe(own, root_location(settings.path))
    return _check_iceberg(settings, storage, table)


# ── storage ──


def _probe(storage: Storage, folder: str) -> dict[str, Json]:
    """Put an object under an unused name, check that the name is taken then, read it, and delete it."""
    location = join(folder, f"{PROBE_NAME}-{clock.new_id()}")
    data = b"no rows"
    try:
        _put(storage, location, data)
        # Crash here: an object exists that no reader reads.
        hit("check.put")
        if storage.read(location) != data:
            raise Unavailable("the destination's storage returned other bytes than were written", location=location)
        if storage.put_if_absent(location, data):
            raise Invalid(
                "the destination's storage overwrites existing objects",
                location=location,
                advice="A sink needs a store that refuses a name that is taken (conditional puts).",
            )
    finally:
        with suppress(FloodmarkError):
            storage.delete(location)
    return {"place": folder, "written": True}


def _put(storage: Storage, location: str, data: bytes) -> None:
    """The destination is empty so far: a wrong path is more likely than a disk that needs another try."""
    try:
        storage.put_if_absent(location, data)
    except Unavailable as error:
        if error.advice == TRY_AGAIN:
            error.advice = "Check the path of the sink, and whether this user may create folders and files there."
        raise


# ── HTTP ──


def _check_http(settings: HttpSettings, table: str) -> dict[str, Json]:
    # Imported late: a caller that only reads state does not wait for the code that sends rows.
    import httpx

    from floodmark.sinks.http import policy
    from floodmark.sinks.http.wire import SinkToken

    url = policy.address(settings.url, table)
    token = SinkToken(settings)
    headers = {"User-Agent": f"floodmark/{__version__}"}
    if token.value:
        headers["Authorization"] = f"Bearer {token.value}"
    is_lake = urlsplit(url).path.endswith(f"/api/tables/{table}/rows")
    try:
        with httpx.Client(timeout=settings.timeout_s, follow_redirects=False) as client:
            if is_lake:
                answer = client.post(url, content=b"", headers={**headers, "Content-Type": "application/x-ndjson"})
            else:
                answer = client.options(url, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        cause = policy.hide(f"{type(error).__name__} {error}".strip(), token.seen)
        raise Unavailable(
            "the endpoint does not answer",
            url=policy.place(url),
            cause=cause,
            advice="Check the sink's url, and whether the endpoint is up.",
        ) from error
    text = policy.hide(answer.text[: policy.ANSWER_CHARACTERS_MAX], token.seen)
    _judge_answer(answer.status_code, text, policy.place(url), is_lake=is_lake)
    return {"url": policy.place(url), "status": answer.status_code, "lake": is_lake, "token": token.value is not None}


def _judge_answer(status: int, text: str, url: str, *, is_lake: bool) -> None:
    """A foreign endpoint may refuse OPTIONS in many ways. Only an answer that would also refuse rows is a problem."""
    answer = text or None
    if status in (401, 403):
        advice = "Correct the token that token_env or token_file of the sink names."
        raise Unavailable(
            "the endpoint does not accept the token", advice=advice, url=url, status=status, answer=answer
        )
    if status in (404, 410) or 300 <= status <= 399:
        problem = "the endpoint does not take rows at this address"
        raise WrongSetting(problem, option="--url …", url=url, status=status, answer=answer)
    # A server that does not support OPTIONS answers 501.
    if status == 429 or (status >= 500 and (is_lake or status != 501)):
        problem = "the endpoint cannot take rows now"
        raise Unavailable(problem, advice="Check it again later.", url=url, status=status, answer=answer)


# ── Iceberg ──


def _check_iceberg(settings: IcebergSettings, storage: Storage, table: str) -> dict[str, Json]:
    from floodmark.sinks.iceberg.table import IcebergPlace, answering

    place = IcebergPlace(settings, storage)
    name = ".".join(place.identifier(table))
    with closing(place):
        state = place.load(table)
        if state is not None:
            return {"table": name, "exists": True, **_probe(place.storage, state.data_folder)}
        with answering("the destination's catalog"):
            namespaces = [".".join(one) for one in place.catalog.list_namespaces()]
        found: dict[str, Json] = {"table": name, "exists": False, "namespace_exists": settings.namespace in namespaces}
        warehouse = settings.catalog_properties().get("warehouse")
        # A REST catalog's warehouse may be a name, not a place.
        is_place = warehouse is not None and ("://" in warehouse or warehouse.startswith("/"))
        return {**found, **_probe(place.storage, root_location(warehouse))} if warehouse and is_place else found
