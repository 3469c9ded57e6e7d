"""`sink check`: whether a destination can be reached and written to, before the first run. No row is sent.

files: an object is put, read, found to be taken and deleted. http: the address is asked with OPTIONS and the token; one
that is a lake's also gets a body without rows, which it answers as wrong only after it knows token and table. iceberg:
the catalog is opened, the table looked at if there is one, and an object put and deleted where its files go.

A crash leaves at most one object whose name begins with `_floodmark-check`: no reader of units or tables takes it.
"""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from floodmark import clock
from floodmark.errors import FloodmarkError, Invalid, Unavailable
from floodmark.failpoints import hit
from floodmark.sinks.settings import AnySettings, FilesSettings, HttpSettings, IcebergSettings, WrongSetting
from floodmark.storage import Storage, join, root_location
from floodmark.storage.failures import TRY_AGAIN
from floodmark.version import __version__

PROBE_NAME = "_floodmark-check"
READY, FAILED = "ready", "failed"


def check_destination(settings: AnySettings, storage: Storage, table: str) -> dict[str, Any]:
    """What was found at the destination of a table; an error says what keeps rows from going there."""
    if isinstance(settings, HttpSettings):
        return _check_http(settings, table)
    if isinstance(settings, FilesSettings):
        own = Storage(settings.storage) if settings.storage else storage
        return _probe(own, root_location(settings.path))
    return _check_iceberg(settings, storage, table)


# ── storage ──


def _probe(storage: Storage, folder: str) -> dict[str, Any]:
    """Put an object that nobody has, see that its name is taken then, read it, and delete it."""
    location = join(folder, f"{PROBE_NAME}-{clock.new_id()}")
    data = b"no rows"
    try:
        _put(storage, location, data)
        # Crash here: an object that no reader takes.
        hit("check.put")
        if storage.read(location) != data:
            raise Unavailable("the destination's storage gave other bytes than were put", location=location)
        if storage.put_if_absent(location, data):
            raise Invalid(
                "the destination's storage overwrites what is there",
                location=location,
                advice="A sink needs a store that refuses a name that is taken (conditional puts).",
            )
    finally:
        with suppress(FloodmarkError):
            storage.delete(location)
    return {"place": folder, "written": True}


def _put(storage: Storage, location: str, data: bytes) -> None:
    """Nothing was written there yet, so a path that is wrong is likelier than a disk that needs another try."""
    try:
        storage.put_if_absent(location, data)
    except Unavailable as error:
        if error.advice == TRY_AGAIN:
            error.advice = "Check the path of the sink, and that this user may make folders and files there."
        raise


# ── HTTP ──


def _check_http(settings: HttpSettings, table: str) -> dict[str, Any]:
    # Late: whoever only asks for state does not wait for what sends rows.
    import httpx

    from floodmark.sinks.http import policy
    from floodmark.sinks.http.wire import Token

    url = policy.address(settings.url, table)
    token = Token(settings)
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
    """A foreign endpoint may refuse OPTIONS in many ways; only what also keeps rows out is a problem."""
    facts: dict[str, Any] = {"url": url, "status": status, "answer": text or None}
    if status in (401, 403):
        advice = "Put a token that it accepts where token_env or token_file of the sink says."
        raise Unavailable("the endpoint does not accept the token", advice=advice, **facts)
    if status in (404, 410) or 300 <= status <= 399:
        raise WrongSetting("the endpoint does not take rows at this address", option="--url …", **facts)
    # A server that does not know OPTIONS says 501.
    if status == 429 or (status >= 500 and (is_lake or status != 501)):
        raise Unavailable("the endpoint cannot take rows now", advice="Check it again later.", **facts)


# ── Iceberg ──


def _check_iceberg(settings: IcebergSettings, storage: Storage, table: str) -> dict[str, Any]:
    from floodmark.sinks.iceberg.table import Place, answering

    place = Place(settings, storage)
    name = ".".join(place.identifier(table))
    with closing(place):
        state = place.load(table)
        if state is not None:
            return {"table": name, "exists": True, **_probe(place.storage, state.data_folder)}
        with answering("the destination's catalog"):
            namespaces = [".".join(one) for one in place.catalog.list_namespaces()]
        found = {"table": name, "exists": False, "namespace_exists": settings.namespace in namespaces}
        warehouse = settings.catalog_properties().get("warehouse")
        # A REST catalog's warehouse may be a name, not a place.
        is_place = warehouse is not None and ("://" in warehouse or warehouse.startswith("/"))
        return {**found, **_probe(place.storage, root_location(warehouse))} if warehouse and is_place else found
