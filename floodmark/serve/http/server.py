"""The server's lifecycle: it binds, announces itself, serves, and ends by a signal, in bounded time for open requests.

Connections are bounded in number, and each by itself (I14, serve/http/connection.py). Cutting off a request at the end
is like a crash: its sender got no answer, and sends again what recovery did not finish.
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

import uvicorn
from fastapi import FastAPI

from floodmark.errors import Invalid, Unavailable
from floodmark.serve.http.connection import Connection

KEEP_ALIVE_S = 30
CUT_OFF_CODE = 1


def parse_bind(bind: str) -> tuple[str, int]:
    """Host and port of a text like 127.0.0.1:8787 or [::1]:8787; port 0 is any that is free."""
    host, separator, port = bind.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise Invalid("invalid address", bind=bind, advice="Use host:port, like 127.0.0.1:8787.")
    return host, int(port)


def check_bind(bind: str, has_tokens: bool) -> None:
    """Every client that reaches the address may write: beyond this machine a token is required."""
    host, _ = parse_bind(bind)
    if not has_tokens and not _is_loopback(host):
        raise Invalid(
            "other machines could write to the lake without a token",
            bind=bind,
            advice="Create a token with `floodmark run --new-token`, or serve at 127.0.0.1.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound(bind: str) -> socket.socket:
    """A socket bound to the address, before the address is announced."""
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
        raise Unavailable("cannot listen on this address", bind=bind, cause=error) from error
    return found


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# Our answers already report single requests; its lines would stand between ours, in another form.
logging.getLogger("uvicorn").addHandler(logging.NullHandler())
logging.getLogger("uvicorn").propagate = False


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
            )
        )
        self._app = app
        self._listening = listening
        self._announce = announce
        self._sampling: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._sampling = asyncio.create_task(self._app.state.figures.run(self._app.state.workers))
        # From here on requests are answered.
        self._announce(url_of(self._listening))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Only the main thread receives signals; `stop` ends a server in another thread.
        in_main = threading.current_thread() is threading.main_thread()
        taken = (signal.SIGTERM, signal.SIGINT) if in_main else ()
        before = {one: signal.signal(one, lambda *_: self.stop()) for one in taken}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def stop(self) -> None:
        self._app.state.stopping.set()  # ends streams, which would not end by themselves
        self.force_exit = self.should_exit
        self.should_exit = True
