"""The lake over HTTP: rows come in, each once, and are committed before they are answered (I4, I9); jobs are watched.

A request is checked before it is read, read within limits, and done by a few worker threads (I14). Merges into one
keyed table go one after the other: side by side they would plan each other's work again. What a lost answer or a killed
server leaves is known by the sender's identity when it is sent again, to this process or to the next one. Questions
of state have threads of their own and a deadline: writers that are slow do not make them wait.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent import futures
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import floodmark
from floodmark import log
from floodmark.errors import Busy, CommitUnknown, FloodmarkError, Unavailable
from floodmark.lake import Lake
from floodmark.model import Commit
from floodmark.report_jobs import cancel_outcome
from floodmark.rows.json_lines import parse_lines
from floodmark.serve.answers import error_text, headers_of, json_text, plain_error, status_of
from floodmark.serve.body import Limits, read_body, unpack
from floodmark.serve.claims import DESTINATION, Claim, check_expected, read_claim
from floodmark.serve.ready import ANSWER_S_MAX, readiness, unready
from floodmark.serve.tokens import is_authorized
from floodmark.write.prune import key_fields

T = TypeVar("T")
TRACE_CHARACTERS_MAX = 8_000
# Threads for questions of state.
ASKERS = 2


class Work:
    """The threads that touch the lake, and who may use them when."""

    def __init__(self, limits: Limits) -> None:
        self._pool = futures.ThreadPoolExecutor(limits.workers, thread_name_prefix="floodmark-serve")
        self._askers = futures.ThreadPoolExecutor(ASKERS, thread_name_prefix="floodmark-ask")
        self._requests_max = limits.requests_max
        self._under_way = 0
        self._running: set[futures.Future[Any]] = set()
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """A place for one request, with the memory that it may take."""
        if self._under_way >= self._requests_max:
            raise Busy("too many requests are under way", requests_max=self._requests_max, advice="Send it again.")
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    @asynccontextmanager
    async def turn(self, table_id: str) -> AsyncIterator[None]:
        async with self._turns[table_id]:
            yield

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._begun(self._pool, function, *arguments)

    async def ask(self, function: Callable[..., T], *arguments: Any) -> T:
        """A question that changes nothing; `Unavailable` if there is no answer in time."""
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await self._begun(self._askers, function, *arguments)
        except TimeoutError as error:
            raise Unavailable("there was no answer in time", seconds=ANSWER_S_MAX, advice="Ask again.") from error

    async def _begun(self, pool: futures.Executor, function: Callable[..., T], *arguments: Any) -> T:
        future = pool.submit(function, *arguments)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(future)

    def close(self, wait_s: float) -> bool:
        """Whether all that was begun came to its end in this time."""
        for pool in (self._pool, self._askers):
            pool.shutdown(wait=False, cancel_futures=True)
        return not futures.wait(list(self._running), timeout=wait_s).not_done


@dataclass(frozen=True)
class Place:
    """A table of this lake, as senders know it again: by ids, not by its name."""

    table: str
    table_id: str
    incarnation: str
    key: tuple[str, ...]

    @property
    def destination(self) -> str:
        return f"{self.incarnation}/{self.table_id}"


class Rows:
    """Takes rows into one lake; every call is made by a worker."""

    def __init__(self, lake: Lake, limits: Limits) -> None:
        self._lake = lake
        self._limits = limits

    def find(self, table: str) -> Place:
        head = self._lake.catalog.history.head(table)
        key = tuple(field.name for field in key_fields(self._lake.schema(table)))
        return Place(table, head.table_id, self._lake.catalog.lake_row().incarnation, key)

    def take(self, place: Place, body: bytes, encoding: str | None, claim: Claim, evolve: bool) -> bytes:
        text = unpack(body, encoding, self._limits.text_bytes_max)
        rows = parse_lines(text, self._limits.rows_max)
        identity = {"sender": claim.sender, "key": claim.key}
        commit = self._receive(place.table, rows, **identity, table_id=place.table_id, evolve=evolve, from_json=True)
        return json_text({"version": commit.version, "outcome": commit.outcome, "rows": len(rows)})

    def _receive(self, table: str, rows: list[dict[str, Any]], **options: Any) -> Commit:
        try:
            return self._lake.receive(table, rows, **options)
        except CommitUnknown as unknown:
            commit = self._lake.resolve(unknown.operation)
            if commit is None:
                raise Unavailable("the rows did not come in", cause=unknown, advice="Send them again.") from unknown
            return commit


def create_app(lake: Lake, *, token_sha256: str | None = None, limits: Limits | None = None) -> FastAPI:
    """The app of one lake that is open for writing. `token_sha256`: the hash of the token that requests must have."""
    limits = limits or Limits()
    app = FastAPI(title="Floodmark", version=floodmark.__version__, docs_url=None, redoc_url=None)
    app.router.route_class = _Guarded
    work, rows = Work(limits), Rows(lake, limits)
    app.state.work = work

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """This process is alive; nothing is said of the catalog."""
        return {"status": "ok"}

    @app.post("/api/tables/{table}/rows", openapi_extra=_DESCRIBED)
    async def post_rows(
        request: Request,
        table: str,
        wait: Annotated[Literal["committed"] | None, Query(description="Rows are committed before the answer.")] = None,
        evolve: Annotated[bool, Query(description="Add columns that the table does not have.")] = False,
    ) -> Response:
        """Take rows, one JSON object in each line, once by their sender's headers or by Idempotency-Key."""
        _check_caller(request, token_sha256)
        async with work.admitted():
            claim = read_claim(request.headers)
            place = await work.run(rows.find, table)
            body = await read_body(request.stream(), request.headers.get("content-length"), limits)
            # Not before the body is read: who is still sending may never see an answer.
            check_expected(request.headers, place.destination, place.key)
            async with work.turn(place.table_id) if place.key else nullcontext():
                encoding = request.headers.get("content-encoding")
                answer = await work.run(rows.take, place, body, encoding, claim, evolve)
        return _answer(200, answer, {DESTINATION: place.destination})

    _answer_questions(app, lake, work, token_sha256)
    _change_jobs(app, lake, work, token_sha256)
    _handle_errors(app)
    return app


def _answer_questions(app: FastAPI, lake: Lake, work: Work, token_sha256: str | None) -> None:
    @app.get("/readyz")
    async def readyz() -> Response:
        """Whether the lake is fit for work: 200, or 503 with reasons; `health` is what `floodmark status` says."""
        try:
            found = await work.ask(readiness, lake)
        except Unavailable as error:
            found = unready(str(error))
        return _answer(200 if found["ready"] else 503, json_text(found))

    @app.get("/api/jobs")
    async def jobs(request: Request) -> Response:
        """Every job, newest first, with the figures of `floodmark backfill list --all --json`."""
        # Settings tell paths, tables and expressions: not to everybody who can reach the port.
        if token_sha256 is not None:
            _check_caller(request, token_sha256)
        return _answer(200, json_text({"jobs": await work.ask(lambda: lake.backfill.list())}))


def _change_jobs(app: FastAPI, lake: Lake, work: Work, token_sha256: str | None) -> None:
    def cancel(job: str) -> dict[str, Any]:
        before = lake.backfill.show(job)
        after = lake.backfill.cancel(before["id"])
        return {"outcome": cancel_outcome(before, after), **after}

    @app.post("/api/jobs/{id}/cancel")
    async def cancel_job(request: Request, id: str) -> Response:
        """Ask a job, by id or name, to stop after its batch or chunk; what is done stays."""
        _check_caller(request, token_sha256)
        async with work.admitted():
            return _answer(200, json_text(await work.run(cancel, id)))


_DESCRIBED = {
    "requestBody": {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}, "required": True},
}


class _Refused(Exception):
    def __init__(self, status: int, message: str, advice: str) -> None:
        self.status = status
        self.error = plain_error("Unauthorized" if status == 401 else "Forbidden", message, advice)


def _check_caller(request: Request, token_sha256: str | None) -> None:
    if token_sha256 is not None:
        if not is_authorized(request.headers.get("authorization"), token_sha256):
            raise _Refused(401, "this needs the lake's token", "Send it as `Authorization: Bearer TOKEN`.")
    elif "origin" in request.headers:
        # A page that a browser on this machine shows could write here in its user's name.
        raise _Refused(403, "pages of a browser cannot write to a lake without a token", "Serve it with a token.")


class _Guarded(APIRoute):
    """The edge: what nobody thought of is a sentence for the caller, and a trace for the log; the connection stays."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handle(request)
            except (FloodmarkError, _Refused, HTTPException, RequestValidationError, ClientDisconnect):
                raise
            except Exception as error:  # noqa: BLE001 - the edge
                trace = "".join(traceback.format_exception(error))[-TRACE_CHARACTERS_MAX:]
                log.get(path=request.url.path).error("request failed", cause=repr(error), trace=trace)
                advice = "The server's log says what."
                return _answer(500, error_text(plain_error("Internal", "something failed here", advice)))

        return guarded


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(FloodmarkError)
    async def known(request: Request, error: FloodmarkError) -> Response:
        status = status_of(error)
        if status >= 500:
            log.get(path=request.url.path).warning("request failed", status=status, kind=error.kind, cause=str(error))
        return _answer(status, error_text(error.as_dict()), headers_of(status, error))

    @app.exception_handler(_Refused)
    async def refused(_request: Request, refusal: _Refused) -> Response:
        return _answer(refusal.status, error_text(refusal.error))

    @app.exception_handler(RequestValidationError)
    async def wrong_question(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        return _answer(400, error_text(plain_error("Invalid", message)))

    @app.exception_handler(HTTPException)
    async def no_such_thing(_request: Request, error: HTTPException) -> Response:
        kind = "NotFound" if error.status_code == 404 else "Invalid"
        return _answer(error.status_code, error_text(plain_error(kind, str(error.detail))), error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(_request: Request, _error: ClientDisconnect) -> Response:
        return _answer(400, error_text(plain_error("Invalid", "the body did not come to its end")))


def _answer(status: int, text: bytes, more: Any = None) -> Response:
    return Response(text, status, {**headers_of(status), **(more or {})}, "application/json")
