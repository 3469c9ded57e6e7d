"""The edge of every route: what nobody thought of is a sentence for the caller, and a trace for the log."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
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
        known = frozenset(field.alias for field in self.dependant.query_params)

        async def guarded(request: Request) -> Response:
            if self.path.startswith("/api/"):
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


def _check_query(given: Collection[str], known: Collection[str]) -> None:
    """A slip in a name would be passed over without a word, and another question be answered."""
    for name in given:
        if name not in known:
            raise Refused(
                400, f"there is no parameter {name[:80]!r}", f"Known here: {', '.join(sorted(known)) or 'none'}."
            )


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
