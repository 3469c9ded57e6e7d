"""The edge of every route: what nobody thought of is a sentence for the caller, and a trace for the log."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from floodmark import log
from floodmark.errors import FloodmarkError
from floodmark.serve.answers import answer, error_text, plain_error
from floodmark.serve.doors import Refused

TRACE_CHARACTERS_MAX = 8_000
# What the app has answers for.
_KNOWN = (FloodmarkError, Refused, HTTPException, RequestValidationError, ClientDisconnect)


class Guarded(APIRoute):
    """The connection stays, whatever happens."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
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
    advice = "The server's log says what."
    return answer(500, error_text(plain_error("Internal", "something failed here", advice)), headers)
