"""Clients that send rows to a running lake at a steady rate, and keep going while it is killed.

Each client is a process of its own with a few kept-alive connections, by hand over asyncio so that the load costs
little beside what is measured. Every request has a number, rows that follow from it and an Idempotency-Key; after a
broken connection, a 429 or a 5xx the same key is sent again. Some broken ones are given up on purpose (their rows may
be in or not, but whole), some acknowledged ones are sent again (they must change nothing). What became of each request
is a line in the client's file: the only thing that is believed about what was acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
APPENDED, KEYED = "appended", "keyed"
COLUMNS = {
    APPENDED: "id long not null, request long, ts timestamp, k string, n int",
    KEYED: "id long not null, request long, place int, k string",
}
# So many keys do all requests to a keyed table share; they meet all the time.
KEYS = 1_999
ANSWER_S_MAX = 20.0
PAUSE_S = (0.03, 0.12)
BUSY_S_MAX = 1.0


@dataclass(frozen=True)
class Load:
    """What the clients of one table send: requests `first` to `first + requests`, each due at its time."""

    host: str
    port: int
    table: str
    kind: str
    requests: int
    per_s: float
    rows: int
    start_s: float
    first: int = 0
    clients: int = 2
    connections: int = 8
    # Of the requests whose connection broke each Nth is given up; of the acknowledged ones each Nth is sent again.
    forsake_each: int = 5
    repeat_each: int = 25
    # So long after the last one was due every client ends.
    patience_s: float = 240.0
    token: str = ""
    # So much longer is the text of an appended row: many bytes for little work.
    wide: int = 0

    def headers(self, number: int) -> dict[str, str]:
        allowed = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {"Idempotency-Key": f"{self.table}-{number}", "Content-Type": "application/x-ndjson", **allowed}

    def starting_in(self, wait_s: float) -> Load:
        return replace(self, start_s=time.monotonic() + wait_s)

    @property
    def end_s(self) -> float:
        return self.start_s + self.requests / self.per_s + self.patience_s

    def due_s(self, number: int) -> float:
        return self.start_s + (number - self.first) / self.per_s


@dataclass(frozen=True)
class Sent:
    """What became of a request. Times are monotonic seconds, the same clock in all processes of a machine."""

    number: int
    # acknowledged, forsaken (nobody knows) or refused (it never will be, `told` says why)
    state: str
    record: int = -1
    told: str = ""
    tries: int = 0
    busy: int = 0
    due_s: float = 0.0
    sent_s: float = 0.0
    answered_s: float = 0.0
    # What was said when it was sent once more, and the record named then; empty if it was not.
    told_again: str = ""
    record_again: int = -1


# ── rows that follow from a request's number ──


def body_of(load: Load, number: int) -> bytes:
    lines = _keyed_lines(load, number) if load.kind == KEYED else _appended_lines(load, number)
    return "".join(lines).encode()


def _appended_lines(load: Load, number: int) -> Iterator[str]:
    first, more = number * load.rows, "x" * load.wide
    for row in range(first, first + load.rows):
        moment = f"2026-11-15T{row // 3_600_000 % 24:02}:{row // 60_000 % 60:02}:{row // 1000 % 60:02}.{row % 1000:03}Z"
        yield f'{{"id":{row},"request":{number},"ts":"{moment}","k":"key-{row % 1000}{more}","n":{row % 97}}}\n'


def keyed_rows(rows: int, number: int) -> Iterator[tuple[int, bool]]:
    """Keys in the order of the lines, and whether the line deletes; a key may come twice in a request."""
    chance = random.Random(number)
    for place in range(rows):
        yield chance.randrange(KEYS), (number + place) % 11 == 0


def _keyed_lines(load: Load, number: int) -> Iterator[str]:
    for place, (key, deletes) in enumerate(keyed_rows(load.rows, number)):
        if deletes:
            yield f'{{"id":{key},"_change":"delete"}}\n'
        else:
            yield f'{{"id":{key},"request":{number},"place":{place},"k":"key-{key}"}}\n'


# ── a client ──


class Broken(Exception):
    """The connection ended before the answer was whole."""


class Connection:
    """One kept-alive connection, made anew when it broke."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, number: int, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer."""
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                if self._ends is None:
                    self._ends = await asyncio.open_connection(self._load.host, self._load.port)
                return await self._exchange(*self._ends, number, body)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self.close()
            raise Broken from error

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        headers = {"Host": self._load.host, "Content-Length": str(len(body)), **self._load.headers(number)}
        lines = [f"POST /api/tables/{self._load.table}/rows HTTP/1.1", *map(": ".join, headers.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in head[1:] if line)
        told = {name.lower(): value.strip() for name, _, value in pairs}
        answer = await reader.readexactly(int(told.get("content-length", "0")))
        if told.get("connection", "").lower() == "close":
            self.close()
        return int(head[0].split(" ")[1]), told, answer

    def close(self) -> None:
        if self._ends is not None:
            self._ends[1].close()
            self._ends = None


class Client:
    """Every `clients`-th request, over its connections; what became of them is written to a file as it comes."""

    def __init__(self, load: Load, client: int, out: Path) -> None:
        self._load = load
        self._numbers = iter(range(load.first + client, load.first + load.requests, load.clients))
        self._chance = random.Random(client)
        self._broken = 0
        self._out = out

    async def run(self) -> None:
        with self._out.open("w") as file:

            async def work() -> None:
                connection = Connection(self._load)
                for number in self._numbers:
                    sent = await self._send(connection, number)
                    file.write(json.dumps(astuple(sent)) + "\n")
                connection.close()

            await asyncio.gather(*(work() for _ in range(self._load.connections)))

    async def _send(self, connection: Connection, number: int) -> Sent:
        load, body, tries, busy = self._load, body_of(self._load, number), 0, 0
        due_s = load.due_s(number)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        while time.monotonic() < load.end_s:
            tries, sent_s = tries + 1, time.monotonic()
            try:
                status, headers, answer = await connection.post(number, body)
            except Broken:
                self._broken += tries == 1
                if tries == 1 and self._broken % load.forsake_each == 0:
                    return Sent(number, "forsaken", told="broken", tries=tries, busy=busy, due_s=due_s, sent_s=sent_s)
                await asyncio.sleep(self._chance.uniform(*PAUSE_S))
                continue
            if status == 202:
                told = json.loads(answer)
                done = (tries, busy, due_s, sent_s, time.monotonic())
                found = (told["record"], told["outcome"], *done)
                return Sent(number, "acknowledged", *found, *await self._again(connection, number, body))
            if status != 429 and status < 500:
                return Sent(number, "refused", told=f"{status} {answer.decode()}", tries=tries, due_s=due_s)
            busy += 1
            asked_s = float(headers.get("retry-after", "1"))
            await asyncio.sleep(min(asked_s, BUSY_S_MAX) * self._chance.uniform(0.5, 1.0))
        return Sent(number, "forsaken", told="no more time", tries=tries, busy=busy, due_s=due_s)

    async def _again(self, connection: Connection, number: int, body: bytes) -> tuple[str, int]:
        """What is said to a request that comes once more."""
        if number % self._load.repeat_each:
            return "", -1
        try:
            status, _, answer = await connection.post(number, body)
        except Broken:
            return "", -1
        if status == 429 or status >= 500:
            return "", -1
        told = json.loads(answer)
        return str(told.get("outcome", status)), int(told.get("record", -1))


# ── clients as processes ──


def start_clients(load: Load, folder: Path) -> list[tuple[subprocess.Popen[bytes], Path]]:
    """A process for each client, with the file that it writes."""
    found = []
    for client in range(load.clients):
        out = folder.absolute() / f"{load.table}-{load.first}-{client}.jsonl"
        command = [sys.executable, "-m", "tests.load.clients", json.dumps(asdict(load)), str(client), str(out)]
        found.append((subprocess.Popen(command, cwd=ROOT), out))
    return found


def read_sent(out: Path) -> list[Sent]:
    return [Sent(*json.loads(line)) for line in out.read_text().splitlines()]


def wait_for_clients(load: Load, started: Sequence[tuple[subprocess.Popen[bytes], Path]]) -> list[Sent]:
    """What became of every request, by number; every one of them has to be told of."""
    found: list[Sent] = []
    for process, out in started:
        if process.wait(max(1.0, load.end_s - time.monotonic()) + ANSWER_S_MAX) != 0:
            raise RuntimeError(f"a client failed: exit code {process.returncode}")
        found += read_sent(out)
    if sorted(one.number for one in found) != list(range(load.first, load.first + load.requests)):
        raise RuntimeError("the clients did not tell of every request once")
    return sorted(found, key=lambda one: one.number)


def finish(url: str, load: Load) -> Sent:
    """One request more, answered when it is in the table; so is then every one that was acknowledged before it."""
    import httpx

    number = load.first + load.requests
    begin_s = time.monotonic()
    while True:
        answer = httpx.post(
            f"{url}/api/tables/{load.table}/rows?wait=committed",
            content=body_of(load, number),
            headers=load.headers(number),
            timeout=ANSWER_S_MAX + load.patience_s,
        )
        if answer.status_code == 200 or time.monotonic() > begin_s + load.patience_s:
            break
        time.sleep(PAUSE_S[1])  # not in time, or too much is under way: the same key again
    if answer.status_code != 200:
        raise RuntimeError(f"what was taken is not in the table: {answer.status_code} {answer.text}")
    told = answer.json()
    moments = (begin_s, begin_s, time.monotonic())
    return Sent(number, "acknowledged", int(told["record"]), str(told["outcome"]), 1, 0, *moments)


if __name__ == "__main__":
    asyncio.run(Client(Load(**json.loads(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])).run())
