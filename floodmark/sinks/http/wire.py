"""The requests of a sink over HTTP: an event loop in a thread of its own, retries with waits, and the token.

A part is sent until its fate is known: accepted, refused, or failed for this run. Every try sends the same key and
bytes. The result goes to the thread that ships; nothing here writes to the catalog. When the wire ends, every request
is over: answered, or cancelled; whether a cancelled one was accepted is unknown (I13).
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt

from floodmark.catalog.unit import Unit
from floodmark.errors import Invalid
from floodmark.sinks.http import policy
from floodmark.sinks.http.policy import Parcel, Reply
from floodmark.sinks.settings import HttpSettings, WrongSetting
from floodmark.version import __version__

DESTINATION_HEADER = "Floodmark-Destination"
NEWEST_HEADER = "Floodmark-Newest"
# What a thread may still need when its result is not needed any more: a read that cannot be interrupted, a name lookup.
CLOSE_S_MAX = 1.0
# Below the time after which common servers close an idle connection.
IDLE_S_MAX = 4.0
# Much more than is kept of an answer, so that short ones are read whole and their connections reused.
ANSWER_BYTES_MAX = 64 * 1024


@dataclass(frozen=True)
class Arrived:
    """The end of a part on the wire: the last answer, or none."""

    parcel: Parcel
    reply: Reply
    tries: int
    size_bytes: int


# From the cutter: a parcel, or None at the end. From the wire: the result of one. From both: an error.
News = Parcel | Arrived | BaseException | None


class SinkToken:
    """The token that authorizes a request; read again when it is rejected. Never shown (I18)."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self.value = self._read()
        self.seen = {self.value} if self.value else set()

    def renew(self, used: str | None) -> bool:
        """Whether another token than the rejected one exists now."""
        if self.value == used:
            try:
                self.value = self._read()
            except Invalid:
                return False  # it is being replaced, or gone: the answer that rejected it says what to do
            if self.value:
                self.seen.add(self.value)
        return self.value != used

    def _read(self) -> str | None:
        variable, file = self._settings.token_env, self._settings.token_file
        if variable:
            text = os.environ.get(variable)
            if text is None:
                raise WrongSetting(
                    "the variable that holds the sink's token is not set",
                    option="--token-env VARIABLE",
                    variable=variable,
                    advice="Export it where the run starts, or name another one.",
                )
        elif file:
            try:
                text = Path(file).expanduser().read_text()
            except (OSError, ValueError) as error:
                raise WrongSetting(
                    "the file that holds the sink's token cannot be read",
                    option="--token-file FILE",
                    file=file,
                    cause=error,
                    advice="Put it there, or name another one.",
                ) from error
        else:
            return None
        text = text.strip()
        if not text or not text.isascii() or not text.isprintable():
            raise Invalid("the sink's token is empty, or not printable ASCII", variable=variable, file=file)
        return text


class Wire:
    """The requests of one try, in an event loop in a thread of its own; when it ends, none is in flight."""

    def __init__(self, settings: HttpSettings, unit: Unit, expected: str | None, news: queue.SimpleQueue[News]) -> None:
        self._settings = settings
        self._unit = unit
        self._expected = expected
        self._news = news
        self._token = SinkToken(settings)
        self.url = policy.address(settings.url, unit.table)
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        # By the loop's clock: when the destination may be contacted again.
        self._quiet_until = 0.0
        self._thread = threading.Thread(target=self._run, name="floodmark-wire", daemon=True)

    def __enter__(self) -> Wire:
        self._loop = asyncio.new_event_loop()
        try:
            self._thread.start()
            error = self._started.get()
        except BaseException:
            # Interrupted while the thread starts: without this it would stay for as long as the process lives.
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._ended.set)
            raise
        if error is not None:
            raise WrongSetting(
                "the sink's address cannot be used", option="--url URL", url=policy.place(self.url), cause=error
            ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(CLOSE_S_MAX)

    def send(self, parcel: Parcel) -> None:
        self._loop.call_soon_threadsafe(self._begin, parcel)

    def _run(self) -> None:
        # Not asyncio.run: at its end, that waits for a name lookup whose result is not needed any more.
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits for the wire
            self._started.put(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        # Two halves of a part are sent at once, whatever `parallel` is: one shows whether the other is to blame.
        parallel = max(2, self._settings.parallel)
        limits = httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel, keepalive_expiry=IDLE_S_MAX)
        # Loading certificates takes a while; without TLS they are not needed.
        verify = httpx.URL(self.url).scheme == "https"
        # No limits for the steps of a request: one limit covers the whole.
        async with httpx.AsyncClient(verify=verify, limits=limits, timeout=None, follow_redirects=False) as client:
            self._client = client
            self._started.put(None)
            await self._ended.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, parcel: Parcel) -> None:
        if not self._ended.is_set():
            task = self._loop.create_task(self._deliver(parcel))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver(self, parcel: Parcel) -> None:
        try:
            self._news.put(await self._try_until_known(parcel))
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits for the answer
            self._news.put(error)

    async def _try_until_known(self, parcel: Parcel) -> Arrived:
        limits, tries = self._settings, 0
        skip = parcel.skip is not None
        data = b"" if skip else parcel.data
        payload = await asyncio.to_thread(policy.compress, data, self._unit.rules.compression)
        headers = policy.headers(self._unit, parcel.part, __version__, self._expected, skip=skip)

        async def attempt() -> Reply:
            nonlocal tries
            tries += 1
            # If a destination asked for a pause for one part, the others wait too.
            await asyncio.sleep(self._quiet_until - self._loop.time())
            reply = await self._post(headers, payload)
            if 0 < (reply.retry_after_s or 0.0) <= limits.retry_after_s_max:
                self._quiet_until = max(self._quiet_until, self._loop.time() + (reply.retry_after_s or 0.0))
            return reply

        def wait(state: RetryCallState) -> float:
            return policy.wait_s(_result(state), state.attempt_number, limits.backoff_s_max, random.random())

        retrying = AsyncRetrying(
            stop=stop_after_attempt(limits.tries),
            retry=retry_if_result(lambda reply: policy.asks_again(reply, limits.retry_after_s_max)),
            wait=wait,
            retry_error_callback=_result,
        )
        return Arrived(parcel, await retrying(attempt), tries, len(payload))

    async def _post(self, headers: dict[str, str], payload: bytes) -> Reply:
        used = self._token.value
        reply = await self._post_with(used, headers, payload)
        if policy.judge(reply.status) == policy.UNAUTHORIZED and self._token.renew(used):
            reply = await self._post_with(self._token.value, headers, payload)
        return replace(reply, text=policy.hide(reply.text, self._token.seen))

    async def _post_with(self, token: str | None, headers: dict[str, str], payload: bytes) -> Reply:
        if token:
            headers = {**headers, "Authorization": f"Bearer {token}"}
        try:
            async with (
                asyncio.timeout(self._settings.timeout_s),
                self._client.stream("POST", self.url, content=payload, headers=headers) as answer,
            ):
                return _reply(answer, await _beginning(answer))
        except (httpx.HTTPError, TimeoutError) as error:
            # Whether the destination stored the part is unknown: send it again under the same key (I13).
            return Reply(None, f"{type(error).__name__} {error}".strip())


def _result(state: RetryCallState) -> Reply:
    if state.outcome is None:
        raise ValueError("a try without an outcome")
    reply: Reply = state.outcome.result()
    return reply


async def _beginning(answer: httpx.Response) -> bytes:
    found = bytearray()
    async for chunk in answer.aiter_raw():
        found += chunk
        if len(found) >= ANSWER_BYTES_MAX:
            break
    return bytes(found[:ANSWER_BYTES_MAX])


def _reply(answer: httpx.Response, text: bytes) -> Reply:
    after = policy.retry_after_s(answer.headers.get("Retry-After"), answer.headers.get("Date"), datetime.now(UTC))
    newest = policy.newest_unit(answer.headers.get(NEWEST_HEADER))
    return Reply(
        answer.status_code, text.decode(errors="replace"), after, answer.headers.get(DESTINATION_HEADER), newest
    )
