"""POST rows: checked line by line, then durable before the answer (I4), in the spool or in the table.

Rows of ordinary clients are checked against the table, put into its spool, and answered 202: from there each gets into
the table once (floodmark/ingest). Rows of another lake's sink have their own identity, and are committed before the
answer, 200. A request is taken as a whole or not at all. Its caller and headers are checked before it is read; it is
read within limits, and a few worker threads check its rows (I14). After a lost answer or a killed server, the identity
of a request that is sent again shows what was taken.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cachetools import TTLCache
from fastapi import FastAPI, Query, Request, Response

from floodmark.errors import CommitUnknown, Conflict, FloodmarkError, Invalid, NotFound, Unavailable
from floodmark.ingest.judge import Judge, Judges
from floodmark.json_form import Json, as_json
from floodmark.model import Commit
from floodmark.rows.json.json_lines import parse_lines
from floodmark.serve.http.answers import answer, json_text
from floodmark.serve.http.body import HeldMemory, RequestLimits, read_body, unpack
from floodmark.serve.http.edge import Direct
from floodmark.serve.http.headers import DESTINATION, EXPECT, TABLE_KEY, Claim, check_expected, check_once, read_claim
from floodmark.serve.http.openapi import NDJSON, CommittedRows, TakenRows, errors
from floodmark.serve.http.service import Service
from floodmark.write.shape import TABLE_NAME

if TYPE_CHECKING:
    from floodmark.ingest.intake import Landed, Taken

# A table is looked up again after this time: a query of the catalog for each of hundreds of requests a second would
# make them wait for each other. Rows that the cached table refuses are checked against the current one.
REMEMBERED_S = 0.1
TABLES_MAX = 1_000
# Bodies up to this size are checked in the thread that reads them.
AT_ONCE_BYTES_MAX = 32 * 1024
# How soon a caller that waits for a commit notices that the server is shutting down.
LOOK_S = 1.0
_ERRORS = errors(401, 403, 404, 408, 409, 412, 413, 415, 422, 429, 503)


@dataclass(frozen=True)
class KnownTable:
    """A table of this lake, and the judge of its rows."""

    table: str
    table_id: str
    judge: Judge


@dataclass(frozen=True)
class Underway:
    """Rows on their way into a table's spool."""

    table_id: str
    taken: futures.Future[Taken]


@dataclass(frozen=True)
class SentRows:
    """What came: the headers, the body with the room that it takes, and who sent it (empty: the lake's own actor)."""

    headers: Mapping[str, str]
    body: bytes
    held: HeldMemory
    actor: str

    def text(self, limits: RequestLimits) -> bytes:
        return unpack(self.body, self.headers.get("content-encoding"), limits.text_bytes_max, self.held)


@dataclass(frozen=True)
class Committed:
    """What became of rows that were committed before the answer."""

    version: int
    outcome: str
    rows: int


def _answered(taken: Taken) -> futures.Future[Taken]:
    future: futures.Future[Taken] = futures.Future()
    future.set_result(taken)
    return future


def _no_rows() -> Invalid:
    return Invalid("the body has no rows", advice="Send one JSON object per line.")


class RowReceiver:
    """Takes rows into one lake; every call is made by a worker."""

    def __init__(self, service: Service) -> None:
        self._lake = service.lake
        self._intake = service.intake
        self._limits = service.limits
        self._judges = Judges(service.lake.catalog)
        self._recent: TTLCache[str, KnownTable] = TTLCache(TABLES_MAX, REMEMBERED_S)
        self._lock = threading.Lock()

    def find(self, table: str) -> KnownTable:
        # A text that cannot be a name is not looked up: no database has to parse it.
        if not TABLE_NAME.fullmatch(table):
            raise NotFound("there is no such table", table=repr(table)[:80])
        head, judge = self._judges.of(table)
        place = KnownTable(table, head.table_id, judge)
        with self._lock:
            self._recent[table] = place
        return place

    def _remembered(self, table: str) -> KnownTable | None:
        with self._lock:
            return self._recent.get(table)

    def destination(self, place: KnownTable) -> str:
        """The table as senders identify it: by ids, not by its name."""
        return f"{self._lake.catalog.lake_row().incarnation}/{place.table_id}"

    def take(self, table: str, sent: SentRows, key: str | None, evolve: bool) -> Underway:
        """Put rows into the table's spool; the future completes when they are durable."""
        headers = sent.headers
        names_table = EXPECT in headers or TABLE_KEY in headers
        recent = None if names_table else self._remembered(table)
        place = recent or self.find(table)
        if self._intake is None:
            raise Conflict(
                "rows cannot be stored before they are committed: the server has no spool",
                advice="Send them with ?wait=committed, or set a folder in [serve] spool.",
            )
        if names_table:
            check_expected(headers, self.destination(place), place.judge.key)
        text = sent.text(self._limits)
        try:
            judged = place.judge.read(text, self._limits.rows_max, evolve=evolve)
        except Invalid:
            if key is not None and (known := self._intake.known(place.table_id, text, key)) is not None:
                return Underway(place.table_id, _answered(known))  # they fitted when they came
            if recent is None:
                raise
            # The table may have another shape by now.
            place = self.find(table)
            judged = place.judge.read(text, self._limits.rows_max, evolve=evolve)
        if not judged.rows:
            raise _no_rows()
        # Rows that may add columns are read from the spool, by the shape that the table has then.
        kept = None if evolve else judged
        taken = self._intake.take(
            table, place.table_id, text, judged.rows, key=key, evolve=evolve, judged=kept, actor=sent.actor
        )
        return Underway(place.table_id, taken)

    def take_at_once(self, table: str, sent: SentRows, key: str | None, evolve: bool) -> Underway | None:
        """The same without a worker: for few rows of a cached table, when nothing has to be waited for.

        Handing them to a worker costs more than checking them. None: a worker has to do it, also if the rows have an
        error.
        """
        place, headers = self._remembered(table), sent.headers
        plain = not (evolve or EXPECT in headers or TABLE_KEY in headers or "content-encoding" in headers)
        if place is None or self._intake is None or not plain or len(sent.body) > AT_ONCE_BYTES_MAX:
            return None
        if not self._intake.is_open(place.table_id):
            return None
        try:
            judged = place.judge.read(sent.body, self._limits.rows_max)
        except Invalid:
            return None
        if not judged.rows:
            return None
        taken = self._intake.take(
            table, place.table_id, sent.body, judged.rows, key=key, judged=judged, actor=sent.actor
        )
        return Underway(place.table_id, taken)

    def landed(self, table_id: str, record: int, stopping: threading.Event) -> Landed:
        """What became of taken rows, within bounds; it does not delay the end of the server for long."""
        if self._intake is None:
            raise Unavailable("there is no spool")
        end_s = time.monotonic() + self._limits.wait_s_max
        while True:
            until_s = min(end_s, time.monotonic() + LOOK_S)
            try:
                return self._intake.wait(table_id, record, max(0.0, until_s - time.monotonic()))
            except Unavailable:
                # Earlier than the caller asked for: this error says more than a timeout.
                if stopping.is_set() or time.monotonic() < until_s or time.monotonic() >= end_s:
                    raise

    def commit(self, place: KnownTable, sent: SentRows, claim: Claim, evolve: bool) -> Committed:
        """Put rows into the table, at once."""
        text = sent.text(self._limits)
        rows = parse_lines(text, self._limits.rows_max)
        count = len(rows)
        if not count and claim.sender is None:
            raise _no_rows()
        try:
            commit = self._received(
                lambda: self._lake.receive(
                    place.table,
                    rows,
                    actor=sent.actor,
                    sender=claim.sender,
                    key=claim.key,
                    table_id=place.table_id,
                    evolve=evolve,
                    from_json=True,
                )
            )
        except Invalid:
            # The lines with errors, if the rows themselves are wrong.
            place.judge.read(text, self._limits.rows_max, evolve=evolve)
            raise
        return Committed(commit.version, commit.outcome, count)

    def _received(self, receive: Callable[[], Commit]) -> Commit:
        try:
            return receive()
        except CommitUnknown as unknown:
            commit = self._lake.resolve(unknown.operation)
            if commit is None:
                raise Unavailable("the rows were not committed", cause=unknown, advice="Send them again.") from unknown
            return commit


class RowRequests:
    """What a request to take rows goes through."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self._state = app.state
        self._workers = service.workers
        self._limits = service.limits
        self._rows = RowReceiver(service)

    async def take(
        self, request: Request, table: str, key: str | None, wait: bool, evolve: bool, actor: str
    ) -> Response:
        """Put the rows into the spool."""
        workers = self._workers
        async with workers.patient() if wait else nullcontext():
            async with workers.admitted() as held:
                sent = await self._read(request, held, actor)
                underway = self._rows.take_at_once(table, sent, key, evolve)
                if underway is None:
                    underway = await workers.run(self._rows.take, table, sent, key, evolve)
                del sent
                # Shielded: a request that is cut off must not cancel what others wait for too.
                taken = await asyncio.shield(asyncio.wrap_future(underway.taken))
            if taken.outcome == "taken":
                self._state.metrics.accepted(table, taken.rows)
            body: dict[str, Json] = {"outcome": taken.outcome, "rows": taken.rows, "record": taken.record}
            if not wait:
                return answer(202, json_text(body))
            try:
                landed = await workers.wait(self._rows.landed, underway.table_id, taken.record, self._state.stopping)
            except FloodmarkError as error:
                # The rows are durable all the same: an error would mean that nothing was taken.
                return answer(202, json_text({**body, "note": f"taken, but not yet committed: {error}"}))
        body["outcome"] = "committed" if taken.outcome == "taken" else "already_committed"
        return answer(200, json_text({**body, "version": landed.version, "quarantined": landed.quarantined}))

    async def commit(self, request: Request, table: str, claim: Claim, evolve: bool, actor: str) -> Response:
        """Commit the rows before the answer."""
        workers = self._workers
        async with workers.admitted() as held:
            place = await workers.run(self._rows.find, table)
            destination = await workers.run(self._rows.destination, place)
            sent = await self._read(request, held, actor)
            # Not before the body is read: a client that is still sending may never see an answer.
            check_expected(request.headers, destination, place.judge.key)
            async with workers.turn(place.table_id) if place.judge.key else nullcontext():
                done = await workers.run(self._rows.commit, place, sent, claim, evolve)
        if done.outcome == "committed":
            self._state.metrics.accepted(table, done.rows)
        return answer(200, json_text(as_json(done)), {DESTINATION: destination})

    async def _read(self, request: Request, held: HeldMemory, actor: str) -> SentRows:
        body = await read_body(request.stream(), request.headers.get("content-length"), self._limits, held)
        return SentRows(request.headers, body, held, actor)


def add_rows(app: FastAPI, service: Service) -> None:
    requests = RowRequests(app, service)

    async def post_rows(
        request: Request,
        table: str,
        wait: Annotated[Literal["committed"] | None, Query(description="Wait until the rows are in the table.")] = None,
        evolve: Annotated[bool, Query(description="Add columns that the table does not have.")] = False,
    ) -> Response:
        """Receive rows, one JSON object per line: all or none, and once per Idempotency-Key if given."""
        actor = service.access.check(request, "write").actor
        check_once(request.headers.keys())
        claim = read_claim(request.headers)
        if claim.sender is not None or (service.intake is None and wait is not None):
            return await requests.commit(request, table, claim, evolve, actor)
        return await requests.take(request, table, claim.key, wait is not None, evolve, actor)

    app.router.add_api_route(
        "/api/tables/{table}/rows",
        post_rows,
        methods=["POST"],
        status_code=202,
        responses={202: {"model": TakenRows}, 200: {"model": CommittedRows}, **_ERRORS},
        openapi_extra=NDJSON,
        route_class_override=Direct,
    )
