"""One connection: its bytes become requests, one at a time, within bounds of size and time (I14).

The parser is httptools', in C. It leaves to its user what is done here: a head or a trailer has no bound, the body of a
request that offers another protocol is not looked at, and requests that come before the answer to the one before them
would wait in memory. Those are not looked at: the connection ends with the answer, and who sent them sends them again.
So an answer on it always belongs to the one request under way, and what was not answered was not begun.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from floodmark.serve.answers import HEADERS, RAW_HEADERS, answer, error_text, plain_error

# How long a connection may have no request under way (a head that comes byte by byte is none), and how long one that
# takes nothing of its answer is waited for.
IDLE_S_MAX = 30
# Of the first line and the headers of a request.
HEAD_BYTES_MAX = 32 * 1024
_TOO_MANY = answer(
    503, error_text(plain_error("Busy", "too many connections are open", "Send it again later.")), HEADERS
)


class Connection(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._last: Any = self  # of the last look: none yet
        self._fruitless_bytes = 0
        self._bore_fruit = False
        self._in_head = False
        # What comes is not looked at any more.
        self._is_deaf = False
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    @property
    def _is_under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # ── time ──

    def _look_again(self) -> None:
        self._next_look = self.loop.call_later(IDLE_S_MAX / 2, self._look)

    def _look(self) -> None:
        """Whether something came of the time since the last look."""
        seen = self._seen()
        if seen == self._last:
            self.transport.abort()
            return
        self._last = seen
        self._look_again()

    def _seen(self) -> Any:
        """The same twice: nothing was begun, or nothing of an answer was taken."""
        if self.transport.is_closing() or self.flow.write_paused:
            return ("unsent", self.transport.get_write_buffer_size())
        return ("busy", self.loop.time()) if self._is_under_way else ("idle", self.cycle)

    # ── in ──

    def data_received(self, data: bytes) -> None:
        if self._is_deaf or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._bore_fruit = False
        self._parse(data)
        # A whole head that is too large comes further, and is refused there (serve/app.py).
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
        """Another protocol was offered (Java's client does so first thing). The parser is given the same request again,
        without the offer, and what comes after its head."""
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
        # What comes after a body is no header: who asks was checked before.
        if self._in_head and not self._is_deaf:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_deaf:
            return
        self._in_head, self._bore_fruit = False, True
        if b"#" in self.url:
            raise ValueError("what is after it would be lost without a word")
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf:
            self._bore_fruit = True
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_deaf:
            self._bore_fruit = True
            if not self.parser.should_upgrade():
                super().on_message_complete()

    # ── out ──

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # Another app than ours is the server's word that there are too many connections.
        super()._start_asgi_task(cycle, _cut_off_in_silence(cycle, app if app is self.app else _TOO_MANY))

    def _end_with_this_answer(self) -> None:
        """What comes behind a request that is whole: only that one is answered, and nothing else is heard."""
        self.cycle.keep_alive = False
        self._is_deaf = True

    def send_400_response(self, msg: str) -> None:
        """In our words: this cannot be read as a request at all."""
        if self._is_under_way and (self.cycle.response_started or not self.cycle.more_body):
            self._end_with_this_answer()
            return
        self._is_deaf = True
        advice = f"Headers may have {HEAD_BYTES_MAX} bytes."
        text = error_text(plain_error("Invalid", "this is no request of HTTP/1.1 that can be read", advice))
        own = [b"content-type: application/json", b"content-length: %d" % len(text), b"connection: close"]
        head = b"\r\n".join([b"HTTP/1.1 400 Bad Request", *own, *map(b": ".join, RAW_HEADERS), b"", b""])
        self.transport.write(head + text)
        self.transport.close()


def _cut_off_in_silence(cycle: RequestResponseCycle, app: Any) -> Any:
    """A request that is cut off by the server's end gets no answer: one that says it failed may be a lie (I4)."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            cycle.disconnected = True
            cycle.transport.abort()
            raise

    return run
