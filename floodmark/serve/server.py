"""The server's life: bound, announced, served, and ended by a signal, with requests under way finished in bounded time.

Connections are bounded in number, in the size of what a request begins with, and in the time until it has begun (I14).
Whatever is cut off at the end is like a crash: senders were not answered, and send again what healing did not finish.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httptools
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from floodmark.errors import Invalid, Unavailable
from floodmark.serve.answers import error_text, plain_error

KEEP_ALIVE_S = 30
# How long a connection may have no request under way; a head that comes byte by byte is none.
IDLE_S_MAX = 30
# Of the first line and the headers of a request.
HEAD_BYTES_MAX = 32 * 1024
# Below what a process may usually have open; whoever comes then is told 503.
CONNECTIONS_MAX = 512
CUT_OFF_CODE = 1


def parse_bind(bind: str) -> tuple[str, int]:
    """Host and port of a text like 127.0.0.1:8787 or [::1]:8787; port 0 is any that is free."""
    host, separator, port = bind.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise Invalid("this is no address to serve at", bind=bind, advice="Use host:port, like 127.0.0.1:8787.")
    return host, int(port)


def check_bind(bind: str, has_tokens: bool) -> None:
    """Whoever reaches the address may write: beyond this machine that takes a token."""
    host, _ = parse_bind(bind)
    if not has_tokens and not _is_loopback(host):
        raise Invalid(
            "other machines could write to the lake without a token",
            bind=bind,
            advice="Make a token with `floodmark run --new-token`, or serve at 127.0.0.1.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound(bind: str) -> socket.socket:
    """A socket at the address, before anything is said of it."""
    host, port = parse_bind(bind)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise Unavailable("this address cannot be served at", bind=bind, cause=error) from error
    return found


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# What it says of single requests is said in our answers; its lines would stand between ours, in another form.
logging.getLogger("uvicorn").addHandler(logging.NullHandler())
logging.getLogger("uvicorn").propagate = False


class Connection(HttpToolsProtocol):
    """One connection, closed when no request of it is under way for too long, or when too much comes that is none."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._last: Any = self  # of the last look: none yet
        self._fruitless_bytes = 0
        self._bore_fruit = False
        self._in_head = False
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._next_look = self.loop.call_later(IDLE_S_MAX / 2, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        under_way = self._is_under_way
        if not under_way and self._last is self.cycle:
            self.transport.close()  # nothing was begun since the last look
            return
        self._last = self if under_way else self.cycle
        self._look_again()

    @property
    def _is_under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._bore_fruit = False
        self._parse(data)
        # The parser keeps what has no end yet, a head or a trailer, without any bound. A whole head that is too large
        # comes further, and is refused there (serve/app.py).
        self._fruitless_bytes = 0 if self._bore_fruit else self._fruitless_bytes + len(data)
        if self._fruitless_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response("")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _decline(self, rest: bytes) -> None:
        """Another protocol was offered (Java's client does so first thing): the parser then looks at no body. So it is
        given the same request again, without the offer, and what comes after its head."""
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        if len(kept) == len(self.headers):
            self.send_400_response("")  # CONNECT, which is for proxies
            return
        version = self.parser.get_http_version().encode()
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"\r\n".join([first, *map(b": ".join, kept), b"", b""]) + rest)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes after a body is no header: who asks was checked before
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._bore_fruit = False, True
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bore_fruit = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bore_fruit = True
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """In our words: this cannot be read as a request at all."""
        cycle = self.cycle
        if self._is_under_way and (cycle.response_started or not cycle.more_body):
            # It came after a request that is whole: that one gets its own answer, which this would be taken for.
            cycle.keep_alive = False
            return
        advice = f"Headers may have {HEAD_BYTES_MAX} bytes."
        text = error_text(plain_error("Invalid", "this is no request of HTTP/1.1 that can be read", advice))
        head = f"content-type: application/json\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + text)
        self.transport.close()


class Server(uvicorn.Server):
    """Ends by SIGTERM or SIGINT without dying of it: the caller still closes the lake. A second signal hurries it."""

    def __init__(self, app: FastAPI, listening: socket.socket, announce: Callable[[str], None], grace_s: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=grace_s,
                limit_concurrency=CONNECTIONS_MAX,
            )
        )
        self._app = app
        self._listening = listening
        self._announce = announce
        self._sampling: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._sampling = asyncio.create_task(self._app.state.figures.run(self._app.state.work))
        # From here on a request that comes is answered.
        self._announce(url_of(self._listening))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals come to the main thread only; a server in another one is ended by `stop`.
        in_main = threading.current_thread() is threading.main_thread()
        taken = (signal.SIGTERM, signal.SIGINT) if in_main else ()
        before = {one: signal.signal(one, lambda *_: self.stop()) for one in taken}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def stop(self) -> None:
        self._app.state.stopping.set()  # streams that would not end by themselves
        self.force_exit = self.should_exit
        self.should_exit = True
