"""One connection: its bytes become requests, one at a time, within bounds of size and time (I14).

The parser is httptools', in C. It leaves some checks to its user, and they are here: it does not bound a head or a
trailer, it does not parse the body of a request that offers another protocol, and requests that come before the answer
to the one before them would wait in memory. Such requests are not parsed: the connection ends with the answer, and
their sender sends them again. So an answer always belongs to the one request under way, and a request without an answer
was not begun.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from dataclasses import dataclass
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from floodmark.serve.http.answers import HEADERS, RAW_HEADERS, answer, error_text, plain_error

# Below the usual limit of open files. The first TOLD_MAX connections above it get 503; others are closed.
CONNECTIONS_MAX, TOLD_MAX = 512, 64
# How long a connection may have no request under way (a head that comes byte by byte is none), how long a client that
# reads nothing of its answer is waited for, and how often both are checked.
IDLE_S_MAX, LOOKS = 30, 3
# How many checks the rest of an unwanted body may take: its request was answered before it came.
REST_LOOKS_MAX = 6
# Of the first line and the headers of a request.
HEAD_BYTES_MAX = 32 * 1024
_TOO_MANY = answer(
    503,
    error_text(plain_error("Busy", "too many connections are open", "Send it again later.")),
    {**HEADERS, "Connection": "close"},
)
_GONE: Message = {"type": "http.disconnect"}


@dataclass(frozen=True)
class _Seen:
    """What a connection is at, how far, and with which request: the same twice means that nothing happened."""

    state: str
    figure: float
    cycle: RequestResponseCycle | None = None


class Connection(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_beyond = len(self.connections) > CONNECTIONS_MAX
        self._last: _Seen | None = None  # what the last check saw, and how often already
        self._times = 0
        self._rest_looks = 0
        self._fruitless_bytes = 0
        self._bore_fruit = False
        self._in_head = self._in_body = False
        # Later bytes are not parsed any more; the body under way will not be complete.
        self._is_deaf = self._is_broken = False
        self._look_again()
        if len(self.connections) > CONNECTIONS_MAX + TOLD_MAX:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    @property
    def _is_under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # ── time ──

    def _look_again(self) -> None:
        self._next_look = self.loop.call_later(IDLE_S_MAX / LOOKS, self._look)

    def _look(self) -> None:
        """Abort the connection if nothing happened since the last checks."""
        seen = self._seen()
        self._times = self._times + 1 if seen == self._last else 0
        self._last = seen
        if self._times == LOOKS:
            self.transport.abort()
        else:
            self._look_again()

    def _seen(self) -> _Seen:
        """What a check sees. Equal to the last: no request was begun, or the client read nothing of its answer."""
        if (unsent := self._unsent_bytes()) or self.transport.is_closing():
            return _Seen("unsent", unsent)
        if self._is_under_way:
            return _Seen("busy", self.loop.time())
        self._rest_looks = min(self._rest_looks + 1, REST_LOOKS_MAX) if self._in_body else 0
        return _Seen("idle", self._rest_looks, self.cycle)

    def _unsent_bytes(self) -> int:
        """The bytes that the client has not read, in our buffer and in the system's."""
        buffered: int = self.transport.get_write_buffer_size()
        try:
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return buffered
        return buffered + int.from_bytes(queued, sys.byteorder)

    # ── in ──

    def data_received(self, data: bytes) -> None:
        if self._is_deaf or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._bore_fruit = False
        self._parse(data)
        # A complete head that is too large goes on, and is refused there (serve/app.py).
        self._fruitless_bytes = 0 if self._bore_fruit else self._fruitless_bytes + len(data)
        if self._fruitless_bytes > HEAD_BYTES_MAX and not self._is_deaf:
            self.send_400_response("")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._is_deaf:
                self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            if not self._is_deaf:
                self.send_400_response("")

    def _decline(self, rest: bytes) -> None:
        """Another protocol was offered (Java's client does so at first). The parser gets the same request again,
        without the offer, and then the bytes after its head."""
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        if len(kept) == len(self.headers):
            self.send_400_response("")  # CONNECT, which is for proxies
            return
        version = self.parser.get_http_version().encode()
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"\r\n".join([first, *map(b": ".join, kept), b"", b""]) + rest)

    def on_message_begin(self) -> None:
        if self._is_under_way:
            self._end_with_this_answer()
        if not self._is_deaf:
            self._in_head = True
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer is no header: the caller was checked before.
        if self._in_head and not self._is_deaf:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_deaf:
            return
        self._in_head, self._bore_fruit = False, True
        if b"#" in self.url:
            raise ValueError("a URL with a fragment")
        if not self.parser.should_upgrade():
            self._in_body = True
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf:
            self._bore_fruit = True
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_deaf:
            self._bore_fruit = True
            if not self.parser.should_upgrade():
                self._in_body = False
                super().on_message_complete()

    # ── out ──

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, self._guarded(cycle, _TOO_MANY if self._is_beyond else app))

    def _guarded(self, cycle: RequestResponseCycle, app: Any) -> Any:
        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            async def receive_good() -> Message:
                message = _GONE if self._is_broken else await receive()
                return _GONE if self._is_broken else message

            async def send_once(message: Message) -> None:
                if cycle.waiting_for_100_continue and cycle.more_body:
                    cycle.keep_alive = False  # it is unknown whether its body still comes
                await send(message)

            try:
                await app(scope, receive_good, send_once)
            except asyncio.CancelledError:
                # The end of the server cut it off. No answer: one that reports a failure may be wrong (I4).
                cycle.disconnected = True
                cycle.transport.abort()
                raise

        return run

    def _end_with_this_answer(self) -> None:
        """Only the request under way gets its own answer; nothing else is read. A handler that waits for the body gets
        a disconnect; one that has begun without it continues."""
        self.cycle.keep_alive = False
        self._is_deaf = True
        if self.cycle.more_body:
            self._is_broken = True
            self.cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """In our words: these bytes are not a request."""
        if self._is_under_way:
            self._end_with_this_answer()
            return
        self._is_deaf = True
        if not self._in_body:  # else its request has its answer already
            advice = f"The limit is {HEAD_BYTES_MAX} bytes."
            text = error_text(plain_error("Invalid", "not a valid HTTP/1.1 request", advice))
            own = [b"content-type: application/json", b"content-length: %d" % len(text), b"connection: close"]
            head = b"\r\n".join([b"HTTP/1.1 400 Bad Request", *own, *map(b": ".join, RAW_HEADERS), b"", b""])
            self.transport.write(head + text)
        self.transport.close()
