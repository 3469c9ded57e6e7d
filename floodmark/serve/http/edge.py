"""What applies to every request: which requests are refused, the headers of every answer, and errors as answers.

Errors have our words and no trace: for an unforeseen error the caller gets a sentence, and the log gets the trace.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from floodmark import log
from floodmark.errors import FloodmarkError
from floodmark.serve.http.access import Access, Refused
from floodmark.serve.http.answers import HEADERS, RAW_HEADERS, answer, error_text, headers_of, plain_error, status_of
from floodmark.serve.http.connection import HEAD_BYTES_MAX

TRACE_CHARACTERS_MAX = 8_000
# Headers that may occur once.
ONCE = (b"host", b"origin", b"authorization", b"transfer-encoding")
# The errors that the app has answers for.
_KNOWN = (FloodmarkError, Refused, HTTPException, RequestValidationError, ClientDisconnect)


class Guarded(APIRoute):
    """The connection stays, whatever happens."""

    # Whether any other parameter names a column of a table: the endpoint refuses those that do not.
    names_columns = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
        handle = super().get_route_handler()
        known = frozenset(field.alias for field in self.dependant.query_params)

        async def guarded(request: Request) -> Response:
            if self.path.startswith("/api/") and not self.names_columns:
                _check_query(request.query_params.keys(), known)
            return await _guarded(request, handle(request))

        return guarded


class Direct(Guarded):
    """A request without a query goes straight to the endpoint, which is given the request and what its path names.

    For rows the framework's own way there, which finds no parameters, takes a quarter as long as reading them.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["query_string"] or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive, send)
        response = await _guarded(request, self.endpoint(request, **scope["path_params"]))
        await response(scope, receive, send)


class ByColumns(Guarded):
    names_columns = True


def _check_query(given: Collection[str], known: Collection[str]) -> None:
    """A misspelt parameter would be ignored silently, and another question be answered."""
    for name in given:
        if name not in known:
            raise Refused(400, f"unknown parameter {name[:80]!r}", f"Known here: {', '.join(sorted(known)) or 'none'}.")


async def _guarded(request: Request, answered: Awaitable[Response]) -> Response:
    try:
        return await answered
    except _KNOWN:
        raise
    except Exception as error:  # noqa: BLE001 - the edge
        trace = "".join(traceback.format_exception(error))[-TRACE_CHARACTERS_MAX:]
        log.get(path=request.url.path).error("request failed", cause=repr(error), trace=trace)
        return internal()


def internal(headers: Mapping[str, str] | None = None) -> Response:
    advice = "See the server's log."
    return answer(500, error_text(plain_error("Internal", "internal error", advice)), headers)


# ── around every request ──


class HttpEdge:
    """Around every request: names that are not this machine's (see access.py), HEAD, and headers of every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headed = _Headed(send, bodiless=scope["method"] == "HEAD")
        try:
            _check_head(scope)
            self._access.check_host(_header(scope, b"host"))
        except Refused as refusal:
            await _refusal(refusal)(scope, receive, headed.send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the same answer, without its body
        await self._app(scope, receive, headed.send)


class _Headed:
    """The way out of one answer."""

    def __init__(self, send: Send, bodiless: bool) -> None:
        self._send = send
        self._bodiless = bodiless
        self._ended = False

    async def send(self, message: Message) -> None:
        if self._ended:
            return
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(one for one in RAW_HEADERS if one[0] not in given)]
        elif message["type"] == "http.response.body" and self._bodiless:
            # An endless stream would hold the connection: the answer ends here, and the stream gets a disconnect.
            message, self._ended = {"type": "http.response.body", "body": b"", "more_body": False}, True
        await self._send(message)


def _check_head(scope: Scope) -> None:
    """Refuse what the parser accepts and should not: of two headers that differ, it is unknown which one counts."""
    address = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if address + sum(len(name) + len(value) for name, value in scope["headers"]) > HEAD_BYTES_MAX:
        raise Refused(431, "the headers are too large", f"The limit is {HEAD_BYTES_MAX} bytes.")
    if scope["http_version"] not in ("1.0", "1.1"):
        raise Refused(400, "not a valid HTTP/1.1 request")
    names = [name for name, _ in scope["headers"]]
    for name in ONCE:
        if names.count(name) > 1:
            raise Refused(400, f"duplicate header: {name.decode()}")
    is_new = scope["http_version"] == "1.1"
    if is_new and b"host" not in names:
        raise Refused(400, "the Host header is missing", "Send a Host header.")
    coding = _header(scope, b"transfer-encoding")
    if coding is not None and not (is_new and coding.strip().lower() == "chunked"):
        raise Refused(
            400, "unsupported Transfer-Encoding", "Use chunked or Content-Length; name compression in Content-Encoding."
        )


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _refusal(refusal: Refused) -> Response:
    error = plain_error(refusal.kind, refusal.message, refusal.advice)
    return answer(refusal.status, error_text(error))


def handle_errors(app: FastAPI) -> None:
    @app.exception_handler(FloodmarkError)
    async def known(request: Request, error: FloodmarkError) -> Response:
        status = status_of(error)
        if status >= 500:
            log.get(path=request.url.path).warning("request failed", status=status, kind=error.kind, cause=str(error))
        return answer(status, error_text(error.as_dict()), headers_of(status, error))

    @app.exception_handler(Refused)
    async def refused(_request: Request, refusal: Refused) -> Response:
        return _refusal(refusal)

    @app.exception_handler(RequestValidationError)
    async def wrong_question(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        return answer(400, error_text(plain_error("Invalid", message)))

    @app.exception_handler(HTTPException)
    async def no_such_thing(_request: Request, error: HTTPException) -> Response:
        kind = "NotFound" if error.status_code == 404 else "Invalid"
        return answer(error.status_code, error_text(plain_error(kind, str(error.detail))), error.headers)

    @app.exception_handler(Exception)
    async def unknown(_request: Request, _error: Exception) -> Response:
        return internal(HEADERS)  # outside of all routes and of the edge; the server logs it

    @app.exception_handler(ClientDisconnect)
    async def gone(_request: Request, _error: ClientDisconnect) -> Response:
        return answer(400, error_text(plain_error("Invalid", "the body is incomplete")))
