"""Errors as answers: the status says what the sender should do, the body says what failed, in our words. Pure.

400, 413, 422: refused for good, as it is. 404: no such table or row. 409: not now, or not in this order. 410: the
version has expired. 412: another lake, table, key or unit is meant. 429: too much at once, send it again later. 503: no
error in the request is known, send it again. After any of them nothing of the request is stored, except after a 503 of
kind CommitUnknown, where that is not known yet. Sent again with the same identity, it is stored once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

from floodmark.catalog.senders import OtherUnit
from floodmark.errors import (
    BelowRetention,
    Busy,
    CommitUnknown,
    Conflict,
    Fenced,
    FloodmarkError,
    Incomplete,
    Invalid,
    NotFound,
    Unavailable,
)
from floodmark.json_form import Json
from floodmark.rows.json.json_lines import NotJson, TooManyRows
from floodmark.serve.http.body import TooLarge, TooSlow, Undecodable, UnknownEncoding
from floodmark.serve.http.headers import DESTINATION, NEWEST, OtherKey, Stranger, WrongHeader

RETRY_AFTER_S = 1
# Of every answer that does not set them itself. Referrers stay with this server, whose own pages write by forms.
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
# How much of one text of an error is sent: some contain what the client sent.
TEXT_CHARACTERS_MAX = 1_000
# The first match counts.
_STATUSES: tuple[tuple[type[FloodmarkError] | tuple[type[FloodmarkError], ...], int], ...] = (
    ((NotJson, WrongHeader, Undecodable), 400),
    (TooSlow, 408),
    ((TooLarge, TooManyRows), 413),
    (UnknownEncoding, 415),
    (Invalid, 422),
    (NotFound, 404),
    (BelowRetention, 410),
    ((Stranger, OtherKey, OtherUnit), 412),
    (Conflict, 409),
    (Busy, 429),
    ((Unavailable, Incomplete, Fenced, CommitUnknown), 503),
)


def status_of(error: FloodmarkError) -> int:
    return next((status for kinds, status in _STATUSES if isinstance(error, kinds)), 500)


def headers_of(status: int, error: Exception | None = None) -> dict[str, str]:
    if isinstance(error, Stranger):
        return {DESTINATION: error.destination}
    if isinstance(error, OtherUnit):
        newest = error.newest
        return {NEWEST: "none" if newest is None else f"{newest.epoch} {newest.until} {newest.unit or '-'}"}
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}


def answer(status: int, text: bytes, more: Mapping[str, str] | None = None) -> Response:
    return Response(text, status, {**headers_of(status), **(more or {})}, "application/json")


def error_text(error: Mapping[str, Json]) -> bytes:
    return json_text({"error": _shortened(error)})


def plain_error(kind: str, message: str, advice: str = "") -> dict[str, Json]:
    """An error that is not one of the lake's."""
    return {"kind": kind, "message": message, "facts": {}, "advice": advice}


def json_text(data: Mapping[str, Json]) -> bytes:
    """Plain ASCII: what the client sent may be no text that could be sent back as it is."""
    return json.dumps(data).encode()


def _shortened(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {name: _shortened(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_shortened(one) for one in value]
    if value is None or isinstance(value, int):
        return value
    text = str(value)
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 1]}…"
