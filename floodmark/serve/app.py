"""The lake over HTTP: rows come in, each once; its state is told and watched. What was answered is durable (I4).

Here is only what holds for every request: who is not heard at all, the headers of every answer, and errors as answers,
in our words and without a trace. What is asked and answered is in the modules that are added below.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import floodmark
from floodmark import log
from floodmark.errors import FloodmarkError
from floodmark.serve.answers import HEADERS, RAW_HEADERS, answer, error_text, headers_of, plain_error, status_of
from floodmark.serve.api import add_questions
from floodmark.serve.connection import HEAD_BYTES_MAX
from floodmark.serve.described import describe
from floodmark.serve.doors import Doors, Refused
from floodmark.serve.events import add_events
from floodmark.serve.metrics import add_metrics
from floodmark.serve.page import add_page
from floodmark.serve.routes import Guarded, internal
from floodmark.serve.rows import add_rows
from floodmark.serve.serving import Serving

ONCE = (b"host", b"origin", b"authorization", b"transfer-encoding")


def create_app(serving: Serving) -> FastAPI:
    """The app of one lake that is open for writing."""
    app = FastAPI(
        title="Floodmark", version=floodmark.__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.router.route_class = Guarded
    app.state.work = serving.work
    add_rows(app, serving)
    add_questions(app, serving)
    add_events(app, serving)
    add_metrics(app, serving)
    add_page(app, serving)
    _handle_errors(app)
    app.add_middleware(Edge, doors=serving.doors)
    describe(app)
    return app


class Edge:
    """Around every request: names that are not this machine's (see doors.py), HEAD, and headers of every answer."""

    def __init__(self, app: ASGIApp, doors: Doors) -> None:
        self._app = app
        self._doors = doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headed = _Headed(send, bodiless=scope["method"] == "HEAD")
        try:
            _check_head(scope)
            self._doors.check_host(_header(scope, b"host"))
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
            # A stream that never ends would hold the connection: its listener is told that nobody listens.
            message, self._ended = {"type": "http.response.body", "body": b"", "more_body": False}, True
        await self._send(message)


def _check_head(scope: Scope) -> None:
    """What the parser lets pass, and nobody should: of two that differ nobody could say which one counts."""
    address = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if address + sum(len(name) + len(value) for name, value in scope["headers"]) > HEAD_BYTES_MAX:
        raise Refused(431, "the headers are too large", f"They may have {HEAD_BYTES_MAX} bytes.")
    if scope["http_version"] not in ("1.0", "1.1"):
        raise Refused(400, "this is no request of HTTP/1.1")
    names = [name for name, _ in scope["headers"]]
    for name in ONCE:
        if names.count(name) > 1:
            raise Refused(400, f"a header came more than once: {name.decode()}")
    is_new = scope["http_version"] == "1.1"
    if is_new and b"host" not in names:
        raise Refused(400, "a request says which host it is for", "Send a Host header.")
    coding = _header(scope, b"transfer-encoding")
    if coding is not None and not (is_new and coding.strip().lower() == "chunked"):
        raise Refused(400, "a body comes in chunks, or at once", "Say in Content-Encoding how it is packed.")


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _refusal(refusal: Refused) -> Response:
    error = plain_error(refusal.kind, refusal.message, refusal.advice)
    return answer(refusal.status, error_text(error))


def _handle_errors(app: FastAPI) -> None:
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
        return answer(400, error_text(plain_error("Invalid", "the body did not come to its end")))
