"""Server-sent events: clients get an event when the overview has changed, or when the state cannot be read.

One poller serves all listeners, and runs only while there are any. There are no queues: a listener gets the newest
event when it can take it, so a slow one costs no memory and misses nothing that is still true. The number of listeners
is bounded, and so is the time to send an event. A server that shuts down disconnects its listeners; they connect
again to the next one.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from floodmark import clock, log
from floodmark.errors import Busy, FloodmarkError, Unavailable
from floodmark.json_form import Json, as_json
from floodmark.report.overview import digest_of, overview
from floodmark.serve.http.openapi import Described, errors
from floodmark.serve.http.readiness import unreadable
from floodmark.serve.http.service import Service
from floodmark.serve.http.workers import Workers

CLIENTS_MAX = 50
POLL_S = 1.0
KEEP_ALIVE_S = 15.0
# How soon a listener notices that the server is shutting down.
LOOK_S = 0.5
SEND_S_MAX = 15.0
RETRY_MS = 2_000
_DESCRIBED: Described = {
    200: {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "`change`: version, health, at and digest, at once and after every change; `trouble`: "
        "kind and message, when the state cannot be read. The stream does not end.",
    },
    **errors(401, 403, 429),
}


@dataclass(frozen=True)
class StateChange:
    """The event after a change; the digest shows whether the state is the same as before."""

    version: int
    health: str
    at: str
    digest: str


class Events:
    """The newest event, and the listeners."""

    def __init__(self, workers: Workers, see: Callable[[], StateChange], stopping: threading.Event) -> None:
        self._workers = workers
        self._see = see
        self._stopping = stopping
        self._poller: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._number = 0
        self._said: tuple[str, str] | None = None
        self._text = b""
        self.clients = 0

    def admit(self) -> None:
        """Reserve a place for one more listener; `leave` returns it."""
        if self._stopping.is_set():
            raise Unavailable("the server is shutting down", advice="Connect again.")
        if self.clients >= CLIENTS_MAX:
            raise Busy("too many listeners", clients_max=CLIENTS_MAX, advice="Ask again later.")
        self.clients += 1
        if self._poller is None:
            self._poller = asyncio.get_running_loop().create_task(self._poll())

    def leave(self) -> None:
        self.clients -= 1
        if not self.clients and self._poller is not None:
            self._poller.cancel()
            self._poller, self._said, self._number, self._text = None, None, 0, b""

    async def listen(self) -> AsyncIterator[bytes]:
        """The newest event, each once, until the server is shutting down."""
        yield f"retry: {RETRY_MS}\n\n".encode()
        heard, spoke_s = 0, time.monotonic()
        while not self._stopping.is_set():
            if self._number != heard:
                heard, spoke_s = self._number, time.monotonic()
                yield self._text
            elif time.monotonic() - spoke_s >= KEEP_ALIVE_S:
                spoke_s = time.monotonic()
                yield b": still here\n\n"
            else:
                await self._wait()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _poll(self) -> None:
        while True:
            try:
                found = await self._workers.ask(self._see)
                self._say("change", found.digest, as_json(found))
            except Exception as error:  # noqa: BLE001 - any error: a listener must not take silence for health
                log.get().warning("the lake's state cannot be read", cause=repr(error))
                kind = error.kind if isinstance(error, FloodmarkError) else "Internal"
                self._say("trouble", unreadable(error), {"kind": kind, "message": unreadable(error), "at": _now()})
            await asyncio.sleep(POLL_S)

    def _say(self, event: str, mark: str, data: dict[str, Json]) -> None:
        if (event, mark) == self._said:
            return
        self._said = (event, mark)
        self._number += 1
        self._text = f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()
        woken, self._changed = self._changed, asyncio.Event()
        woken.set()


class _Stream(StreamingResponse):
    """A stream that gives its place back however it ends, and is cut off if a word of it cannot be sent in time."""

    def __init__(self, events: Events) -> None:
        super().__init__(events.listen(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._events.admit()
        # Both are watched: a client's disconnect is noticed even if nothing is being sent.
        both = [
            asyncio.create_task(self.listen_for_disconnect(receive)),
            asyncio.create_task(self.stream_response(send)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._events.leave()
            for one in both:
                one.cancel()
            ends = await asyncio.gather(*both, return_exceptions=True)
        for end in ends:
            if isinstance(end, OSError):  # the client left, or read nothing for too long (TimeoutError)
                log.get().info("a listener was disconnected", cause=repr(end))
            elif isinstance(end, Exception):
                raise end

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_S_MAX):
                await send(message)

        await super().stream_response(send_in_time)


def add_events(app: FastAPI, service: Service) -> None:
    # The server sets it when it is to end (serve/http/server.py): it waits for requests, and these would not end.
    app.state.stopping = threading.Event()

    def see() -> StateChange:
        found = overview(service.lake.catalog, service.keeping)
        return StateChange(found.status.version, found.status.health, found.at, digest_of(found))

    app.state.events = events = Events(service.workers, see, app.state.stopping)

    @app.get("/api/events", response_class=StreamingResponse, responses=_DESCRIBED)
    async def get_events(request: Request) -> Response:
        """A stream of server-sent events that says when to ask again."""
        service.access.check(request, "read")
        return _Stream(events)


def _now() -> str:
    return clock.format_time(clock.now_ms())
