"""S3 servers for tests, on free ports of the loopback interface.

`s3_stand_in` is moto in this process. It is not S3: conditional puts and multipart uploads behave, permissions and
latency do not. A real endpoint is used beside it when FLOODMARK_TEST_S3_ENDPOINT and FLOODMARK_TEST_S3_BUCKET are set
(see tests/contract). `S3Process` is a server that can be killed and started again, and keeps its data: Versity's S3
gateway over a folder, if it is installed (`go install github.com/versity/versitygw/cmd/versitygw@v1.8.0`), else the
stand-in behind a process that forwards bytes; then that process is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from floodmark.clock import new_id

if TYPE_CHECKING:
    from moto.core.responses import TYPE_RESPONSE

# The stand-in accepts any key. The rest is unset so that nothing of a real account is used by accident.
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "stand-in", "AWS_SECRET_ACCESS_KEY": "stand-in", "AWS_REGION": "us-east-1"}
_START_S_MAX = 60
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


def gateway() -> str | None:
    """The real server's program, if it is installed."""
    return shutil.which("versitygw") or shutil.which("versitygw", path=str(Path.home() / "go" / "bin"))


@dataclass
class S3Process:
    """A server as a process of its own, at one address. `kill` is SIGKILL; `start` finds what was acknowledged."""

    folder: Path
    behind: S3Server | None = None
    port: int = field(default=0, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        with closing(socket.socket()) as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]

    @property
    def is_real(self) -> bool:
        return self.behind is None

    @property
    def options(self) -> dict[str, str]:
        return S3Server(f"http://127.0.0.1:{self.port}").options

    def make_bucket(self) -> str:
        if self.behind is not None:
            return self.behind.make_bucket()
        bucket = f"bucket-{new_id().lower()}"
        (self.folder / "data" / bucket).mkdir()
        return bucket

    def start(self) -> None:
        """Returns when it answers."""
        with open(self.folder / "s3.log", "ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, env=self._environment())
        until_s = time.monotonic() + _START_S_MAX
        while self._process.poll() is None and time.monotonic() < until_s:
            with closing(socket.socket()) as one:
                if one.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"the S3 server did not start: {(self.folder / 's3.log').read_text()[-2000:]}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _command(self) -> list[str]:
        address = f"127.0.0.1:{self.port}"
        if self.behind is not None:
            return [sys.executable, "-m", "floodmark.testing.s3", address, self.behind.endpoint.removeprefix("http://")]
        for name in ("data", "about"):
            (self.folder / name).mkdir(exist_ok=True)
        # Not every file system supports attributes: they are kept in files beside.
        about = ["posix", "--sidecar", str(self.folder / "about"), str(self.folder / "data")]
        return [str(gateway()), "--quiet", "--port", address, "--region", ENVIRONMENT["AWS_REGION"], *about]

    def _environment(self) -> dict[str, str]:
        keys = {"ROOT_ACCESS_KEY": "AWS_ACCESS_KEY_ID", "ROOT_SECRET_KEY": "AWS_SECRET_ACCESS_KEY"}
        return {**os.environ, **{name: ENVIRONMENT[known] for name, known in keys.items()}}


@contextmanager
def s3_process(folder: Path) -> Iterator[S3Process]:
    """A server that can be killed, started; stopped at the end. Clients need `s3_environment` around them."""
    if gateway() is None:
        with s3_stand_in() as behind:
            yield from _running(S3Process(folder, behind))
    else:
        yield from _running(S3Process(folder))


def _running(server: S3Process) -> Iterator[S3Process]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def _pass_on(address: str, behind: str) -> None:
    """Forward bytes, both ways, until this process is killed."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = behind.partition(":")
        other_reader, other_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, other_writer), copy(other_reader, writer))

    host, _, port = address.partition(":")
    async with await asyncio.start_server(connected, host, int(port)) as server:
        await server.serve_forever()


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
    """S3 decides a conditional PUT at one moment; moto checks first and writes later, and threads interleave."""
    from moto.s3.responses import S3Response

    if getattr(S3Response, "floodmark_lock", None) is None:
        put, lock = S3Response.put_object, threading.Lock()

        def put_alone(self: S3Response) -> TYPE_RESPONSE:
            with lock:
                return put(self)

        S3Response.put_object, S3Response.floodmark_lock = put_alone, lock


@contextmanager
def s3_environment() -> Iterator[None]:
    """Dummy credentials in the environment of this process; the previous values are restored at the end."""
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


if __name__ == "__main__":
    asyncio.run(_pass_on(*sys.argv[1:3]))
