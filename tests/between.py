"""A proxy between a sink and a lake: passes requests on, and fails for some, before or after the lake took them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Rows = list[dict[str, Any]]


@dataclass
class Between:
    """`fails`: requests with these rows are answered with 502; `passes_on`: after the lake took them."""

    target: str
    url: str = ""
    fails: Callable[[Rows], bool] = lambda rows: False
    passes_on: bool = False
    # Part, whether it was given up, and the answer, in the order of the answers.
    seen: list[tuple[str, bool, int]] = field(default_factory=list)


@contextmanager
def between(target: str) -> Iterator[Between]:
    """A proxy in front of this address; its rows are not compressed."""
    proxy = Between(target.rstrip("/"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            rows = [json.loads(line) for line in body.splitlines()]
            fails = proxy.fails(rows)
            status, answer, headers = 502, b"bad gateway", {}
            if not fails or proxy.passes_on:
                sent = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                reply = httpx.post(proxy.target + self.path, content=body, headers=sent, timeout=60)
                if not fails:
                    status, answer = reply.status_code, reply.content
                    headers = {name: value for name, value in reply.headers.items() if name.startswith("floodmark")}
            proxy.seen.append((self.headers["Floodmark-Part"], "Floodmark-Skip" in self.headers, status))
            with suppress(ConnectionError):  # who asked went away
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(answer))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
