"""A receiver for sinks over HTTP: keeps every part once by its idempotency key, and fails by script.

The script is a list of faults: a status, a lost reply, a late one, for the n-th request or for those that a predicate
picks. Storing and answering are decided separately, so every kind of lost reply can be simulated. With a ledger file,
keys and rows outlive the process (`python -m floodmark.testing.receiver --ledger FILE`).
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import TypedDict

import zstandard

from floodmark.json_form import Json

# The maximum of a request's body.
BODY_BYTES_MAX = 256 * 1024 * 1024
# How much a connection reads ahead; large bodies come in few pieces.
BUFFER_BYTES = 1024 * 1024
START_S_MAX = 30


@dataclass(frozen=True)
class _Answer:
    status: int
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """A request, numbered from 1; header names in lowercase."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    size_bytes: int
    digest: str = ""
    rows: tuple[dict[str, Json], ...] = ()

    @property
    def key(self) -> str:
        return self.headers.get("idempotency-key", "")

    @property
    def part(self) -> tuple[int, int]:
        first, _, last = self.headers.get("floodmark-part", "0-0").partition("-")
        return int(first), int(last)


class ScriptedFault(TypedDict, total=False):
    """A fault in a script file."""

    status: int
    nth: list[int]
    column: str
    values: list[Json]
    times: int
    stores: bool
    drops: bool
    delay_s: float
    text: str
    headers: dict[str, str]


@dataclass(frozen=True)
class Fault:
    """What to do instead of a plain answer, to requests of these numbers or that `when` picks, at most `times` times.

    `status`: the answer; nothing is stored, unless it `stores` first: then only the reply is wrong. `drops`: the
    connection is closed instead, and again nothing is stored unless it `stores`. Neither: the usual answer, but late by
    `delay_s`.
    """

    status: int | None = None
    nth: tuple[int, ...] | None = None
    when: Callable[[Received], bool] | None = None
    times: int | None = None
    stores: bool = False
    drops: bool = False
    delay_s: float = 0.0
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def meets(self, request: Received) -> bool:
        by_number = self.nth is None or request.number in self.nth
        return by_number and (self.when is None or self.when(request))

    @classmethod
    def from_dict(cls, values: ScriptedFault) -> Fault:
        """From a script file: `column` and `values` pick requests by their rows."""
        unknown = sorted(values.keys() - ScriptedFault.__annotations__.keys())
        if unknown:
            raise ValueError(f"a fault has no {', '.join(unknown)}")
        nth = values.get("nth")
        return cls(
            status=values.get("status"),
            nth=None if nth is None else tuple(nth),
            when=holds(values["column"], *values.get("values", [])) if "column" in values else None,
            times=values.get("times"),
            stores=values.get("stores", False),
            drops=values.get("drops", False),
            delay_s=values.get("delay_s", 0.0),
            text=values.get("text", ""),
            headers=values.get("headers", {}),
        )


def holds(column: str, *values: Json) -> Callable[[Received], bool]:
    """Picks requests with a row that has one of these values."""
    return lambda request: any(row.get(column) in values for row in request.rows)


def answers(status: int, *, nth: tuple[int, ...] | None = None, text: str = "", **headers: str) -> Fault:
    """_Answer with this status, and store nothing; header names are written with _ for -."""
    return Fault(status, nth, text=text, headers={name.replace("_", "-"): value for name, value in headers.items()})


def stores_then(status: int = 500, *, nth: tuple[int, ...] | None = None) -> Fault:
    """Store, and answer as if it had failed."""
    return Fault(status, nth, stores=True)


def stores_then_drops(*, nth: tuple[int, ...] | None = None) -> Fault:
    return Fault(None, nth, stores=True, drops=True)


def stores_then_is_late(delay_s: float, *, nth: tuple[int, ...] | None = None) -> Fault:
    return Fault(None, nth, stores=True, delay_s=delay_s)


class ReceiverLedger:
    """Keys with what came under them, and the rows; with a file, durable before the answer."""

    def __init__(self, path: Path | None = None) -> None:
        self.rows: list[dict[str, Json]] = []
        self.digests: dict[str, str] = {}
        # Keys under which other bytes came again: a sender must never do that (I8).
        self.mismatched: list[str] = []
        self._path = path
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        text = path.read_bytes()
        # The process died in the middle of the last line: that part was never acknowledged.
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) != len(text):
            os.truncate(path, len(whole))
        for line in whole.splitlines():
            entry = json.loads(line)
            self.digests[entry["key"]] = entry["digest"]
            self.rows += entry["rows"]

    def store(self, request: Received) -> bool:
        """False if the key is known: nothing is stored again."""
        known = self.digests.get(request.key)
        if known is not None:
            if known != request.digest:
                self.mismatched.append(request.key)
            return False
        if self._path is not None:
            entry = {"key": request.key, "digest": request.digest, "rows": request.rows}
            with open(self._path, "a") as file:
                file.write(json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.digests[request.key] = request.digest
        self.rows += request.rows
        return True


class Receiver:
    """The server: in a thread of this process, as `with Receiver() as receiver`. Its settings may change while it runs.

    `token`: 401 unless the request has it. `body_bytes_max`: 413 above. `refuses`: 422 for a part with such a row.
    `discard`: read, count and throw away. `destination`: how it identifies itself.
    """

    def __init__(self, ledger: Path | None = None, *, discard: bool = False, port: int = 0) -> None:
        self.ledger = ReceiverLedger(ledger)
        self.discard = discard
        self.token: str | None = None
        self.body_bytes_max = BODY_BYTES_MAX
        self.refuses: Callable[[dict[str, Json]], bool] | None = None
        self.destination: str | None = None
        self.requests: list[Received] = []
        # What was answered, by the request's number; None if the connection was dropped.
        self.statuses: dict[int, int | None] = {}
        self.request_count = 0
        self.row_count = 0
        self.size_bytes = 0
        # The maximum number of requests in flight at once.
        self.at_once_max = 0
        self._at_once = 0
        self._faults: list[Fault] = []
        self._met: Counter[int] = Counter()
        self._port = port
        self._connections: set[asyncio.Task[None]] = set()

    # ── for tests ──

    def script(self, *faults: Fault) -> None:
        """Replace the script; the first fault that matches a request applies. Requests are numbered from 1 again."""
        self._faults, self._met = list(faults), Counter()
        self.requests, self.statuses, self.request_count = [], {}, 0

    @property
    def rows(self) -> list[dict[str, Json]]:
        return self.ledger.rows

    @property
    def tries(self) -> Counter[str]:
        """How often each key came."""
        return Counter(request.key for request in self.requests)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    # ── the server ──

    def __enter__(self) -> Receiver:
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.serve(started.set)), name="floodmark-receiver", daemon=True
        )
        self._thread.start()
        if not started.wait(START_S_MAX):
            raise RuntimeError("the receiver did not start")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(START_S_MAX)

    async def serve(self, started: Callable[[], object]) -> None:
        """_Answer requests until it is ended; `started` is called when the address is known."""
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, limit=BUFFER_BYTES)
        self._port = server.sockets[0].getsockname()[1]
        started()
        await self._ended.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._converse(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await _read_head(reader)) is not None:
                body = await _read_body(reader, head[2])
                self._at_once += 1
                self.at_once_max = max(self.at_once_max, self._at_once)
                try:
                    goes_on = await self._answer(writer, *head, body)
                finally:
                    self._at_once -= 1
                if not goes_on:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the other side went away, in the middle of a request or of an answer
        finally:
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> bool:
        """False if the connection is dropped."""
        if method == "GET":
            await _write_answer(writer, self._tell(path))
            return True
        self.request_count += 1
        self.size_bytes += len(body)
        request = Received(self.request_count, method, path, headers, len(body))
        if self.discard:
            first, last = request.part
            self.row_count += last - first
            await _write_answer(writer, self._plain(200))
            return True
        request, problem = _decoded(request, body)
        fault = self._fault(request)
        answer = problem or self._decide(request, fault)
        self.requests.append(request)
        if fault is not None and fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        self.statuses[request.number] = None if fault is not None and fault.drops else answer.status
        if fault is not None and fault.drops:
            writer.transport.abort()
            return False
        await _write_answer(writer, answer)
        return True

    def _fault(self, request: Received) -> Fault | None:
        for number, fault in enumerate(self._faults):
            if (fault.times is None or self._met[number] < fault.times) and fault.meets(request):
                self._met[number] += 1
                return fault
        return None

    def _decide(self, request: Received, fault: Fault | None) -> _Answer:
        """Store or not, and the answer."""
        if fault is not None and not fault.stores and (fault.drops or fault.status is not None):
            return _Answer(fault.status or 0, fault.text, fault.headers)
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return self._plain(401, "who are you?")
        if request.size_bytes > self.body_bytes_max:
            return self._plain(413, "too large")
        refuses = self.refuses
        if refuses is not None and any(refuses(row) for row in request.rows):
            return self._plain(422, "a row is refused")
        if self.ledger.store(request):
            self.row_count += len(request.rows)
        if fault is not None and fault.status is not None:
            return _Answer(fault.status, fault.text, fault.headers)
        if request.key in self.ledger.mismatched:
            return self._plain(409, "other bytes came under this key before")
        return self._plain(200)

    def _plain(self, status: int, text: str = "") -> _Answer:
        return _Answer(status, text, {} if self.destination is None else {"Floodmark-Destination": self.destination})

    def _tell(self, path: str) -> _Answer:
        """For callers in another process: /stats and /rows."""
        if path == "/rows":
            return _Answer(200, "".join(json.dumps(row) + "\n" for row in self.rows))
        stats = {
            "requests": self.request_count,
            "rows": self.row_count,
            "bytes": self.size_bytes,
            "keys": len(self.ledger.digests),
            "mismatched": len(self.ledger.mismatched),
        }
        return _Answer(200, json.dumps(stats))


def _decoded(request: Received, body: bytes) -> tuple[Received, _Answer | None]:
    """The request with its rows, or what is wrong with it."""
    try:
        text = _decode(body, request.headers.get("content-encoding", ""))
        rows = tuple(json.loads(line) for line in text.split(b"\n") if line)
    except (ValueError, OSError, EOFError, zstandard.ZstdError) as error:
        return request, _Answer(400, f"not NDJSON: {error}")
    digest = hashlib.sha256(text).hexdigest()
    found = Received(request.number, request.method, request.path, request.headers, len(body), digest, rows)
    return found, None


# ── the part of HTTP/1.1 that a receiver needs ──
#
# Hand-written, because a server that can drop a connection between two bytes, and does not slow down a benchmark, is
# little code. A request that is not HTTP ends in a ValueError, one that stops in the middle in an IncompleteReadError.


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]] | None:
    """Method, path and headers; None if the other side closed the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines)
    return method, path, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    found = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        found += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return bytes(found)


async def _write_answer(writer: asyncio.StreamWriter, answer: _Answer) -> None:
    body = answer.text.encode()
    phrase = HTTPStatus(answer.status).phrase if answer.status in HTTPStatus._value2member_map_ else "Unknown"
    lines = [f"HTTP/1.1 {answer.status} {phrase}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    await writer.drain()


def _decode(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(body)
    if encoding == "zstd":
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=BODY_BYTES_MAX)
    if encoding in ("", "identity"):
        return body
    raise ValueError(f"unknown encoding {encoding}")


# ── a process of its own ──


@contextmanager
def receiver_process(*arguments: str) -> Iterator[str]:
    """The receiver in another process, with the arguments of its command line; gives its address."""
    command = [sys.executable, "-m", "floodmark.testing.receiver", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise RuntimeError(f"the receiver did not start: exit code {process.wait(START_S_MAX)}")
            yield line.strip()
        finally:
            process.kill()


def stats_of(url: str) -> dict[str, int]:
    """What a receiver in another process counted."""
    with urllib.request.urlopen(f"{url}/stats", timeout=START_S_MAX) as reply:
        found: dict[str, int] = json.load(reply)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="A receiver for sinks over HTTP; prints its address when it is up.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ledger", type=Path, help="a file that keeps keys and rows")
    parser.add_argument("--script", type=Path, help="a JSON list of faults")
    parser.add_argument("--discard", action="store_true", help="read, count and throw away")
    arguments = parser.parse_args()
    receiver = Receiver(arguments.ledger, discard=arguments.discard, port=arguments.port)
    if arguments.script:
        receiver.script(*(Fault.from_dict(values) for values in json.loads(arguments.script.read_text())))

    def say_where() -> None:
        sys.stdout.write(receiver.url + "\n")
        sys.stdout.flush()

    asyncio.run(receiver.serve(say_where))


if __name__ == "__main__":
    main()
