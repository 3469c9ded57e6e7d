"""A stand-in S3 server in this process, for tests: moto on a free port of the loopback interface.

It is not S3: conditional puts and multipart uploads behave, permissions and latency do not. A real endpoint is used
beside it when FLOODMARK_TEST_S3_ENDPOINT and FLOODMARK_TEST_S3_BUCKET are set (see tests/contract).
"""

from __future__ import annotations

import logging
import os
import re
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from floodmark.clock import new_id

# Any key opens the stand-in. The rest is unset so that nothing of a real account is used by accident.
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "stand-in", "AWS_SECRET_ACCESS_KEY": "stand-in", "AWS_REGION": "us-east-1"}
_UNSET = ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")


@dataclass(frozen=True)
class S3Server:
    """A running stand-in."""

    endpoint: str

    @property
    def options(self) -> dict[str, str]:
        """What a Storage needs to reach it; the credentials are in the environment."""
        return {"endpoint": self.endpoint, "region": "us-east-1", "allow_http": "true"}

    def make_bucket(self, name: str | None = None) -> str:
        """Make a bucket, of a fresh name unless one is given."""
        bucket = name or f"bucket-{new_id().lower()}"
        self._request("PUT", bucket)
        return bucket

    def open_uploads(self, bucket: str) -> list[str]:
        """The keys of multipart uploads that were begun and neither completed nor aborted."""
        return re.findall(r"<Key>(.*?)</Key>", self._request("GET", f"{bucket}?uploads").decode())

    def _request(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(f"{self.endpoint}/{path}", method=method)
        with urllib.request.urlopen(request, timeout=30) as reply:
            body: bytes = reply.read()
        return body


@contextmanager
def s3_stand_in() -> Iterator[S3Server]:
    """Start the server; stop it at the end. Clients need `s3_environment` around them."""
    with warnings.catch_warnings():
        # moto and what it imports warn about themselves while they are imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        from moto.server import ThreadedMotoServer

    log = logging.getLogger("werkzeug")
    level = log.level
    log.setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    _one_put_at_a_time()
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}")
    finally:
        server.stop()
        log.setLevel(level)


def _one_put_at_a_time() -> None:
    """S3 decides a conditional PUT at one moment; moto looks first and writes later, and threads come in between."""
    from moto.s3.responses import S3Response

    if getattr(S3Response, "floodmark_lock", None) is None:
        put, lock = S3Response.put_object, threading.Lock()

        def put_alone(self: Any) -> Any:
            with lock:
                return put(self)

        S3Response.put_object, S3Response.floodmark_lock = put_alone, lock


@contextmanager
def s3_environment() -> Iterator[None]:
    """Dummy credentials in the environment of this process, and what was there put back at the end."""
    names = (*ENVIRONMENT, *_UNSET)
    before = {name: os.environ.get(name) for name in names}
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
