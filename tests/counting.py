"""A server between a client and S3 that passes every request on and counts it, whichever process it comes from."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from floodmark.testing.s3 import S3Server


class Counting(ThreadingHTTPServer):
    """`seen` are requests by method, `read` those that read an object, by its path; `bytes_read` is what they got."""

    daemon_threads = True

    def __init__(self, behind: S3Server) -> None:
        super().__init__(("127.0.0.1", 0), PassOn)
        self.behind = behind
        self.seen: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.bytes_read = 0

    @property
    def options(self) -> Mapping[str, str]:
        """What a Storage needs to reach S3 through it."""
        return {**self.behind.options, "endpoint": f"http://127.0.0.1:{self.server_port}"}


class PassOn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Counting

    def pass_on(self) -> None:
        self.server.seen[self.command] += 1
        reads = self.command == "GET" and "?" not in self.path
        if reads:
            self.server.read[self.path] += 1
        body = self.rfile.read(int(self.headers.get("content-length", 0))) or None
        connection = http.client.HTTPConnection(self.server.behind.endpoint.removeprefix("http://"), timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        reply = connection.getresponse()
        data = reply.read()
        self.server.bytes_read += len(data) if reads else 0
        connection.close()
        self.send_response_only(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = reply.getheader("content-length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("content-length", length)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on


@contextmanager
def counting(behind: S3Server) -> Iterator[Counting]:
    server = Counting(behind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
