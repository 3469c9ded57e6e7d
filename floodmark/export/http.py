"""A sink over HTTP: a unit's parts as NDJSON by POST, several under way at once, each under its own key (I8, I9).

Three threads: the caller's decides and writes to the catalog, one cuts bodies out of rows, one has an event loop with
the requests. So nothing is written down after `ship` ended, a stop is seen while an answer is awaited, and it works
where a loop runs already. Boundaries and digests of a part are written down before it is sent; a known part whose bytes
are others now is never sent. Memory is bounded by `parallel` bodies and one more (I14).

Crash model: a crash leaves parts that are sealed and not acknowledged. They may have arrived; they are sent again under
the same keys. Parts that arrived while another one ended the run are acknowledged before the error is raised.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from floodmark.catalog.unit import QUARANTINED, RETRY, SEALED, Part, Shipped, Stopped, Unit, UnitLog, Watch
from floodmark.catalog.unit_log import stranger
from floodmark.errors import Corrupt
from floodmark.export import http_policy as policy
from floodmark.export.http_policy import Parcel
from floodmark.export.http_wire import CLOSE_S_MAX, Arrived, News, Wire
from floodmark.export.settings import HttpSettings
from floodmark.failpoints import hit
from floodmark.rows.shipment import Body, Shipment, bodies
from floodmark.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How long a stop may go unseen while nothing else happens.
LOOK_S = 0.05


class HttpDestination:
    def __init__(self, settings: HttpSettings, storage: Storage, get_spark: Callable[[], SparkSession]) -> None:
        self._settings = settings
        self._storage = storage

    def ship(self, unit: Unit, shipment: Shipment, log: UnitLog, watch: Watch) -> Shipped:
        """Send what is not acknowledged of a unit; returns when everything is, or set aside."""
        parts = log.parts()
        known = [(part.first, part.last) for part in parts]
        done = [(part.first, part.last) for part in parts if part.state != SEALED]
        rules = unit.rules
        cut = bodies(shipment, self._storage, rules.part_rows, rules.part_bytes, known, done)
        return self._ship(unit, cut, parts, log, watch)

    def ship_bodies(self, unit: Unit, found: Iterable[Body], log: UnitLog, watch: Watch) -> Shipped:
        """The same for bodies in ascending order; those that the log knows have its boundaries, or it is Corrupt."""
        return self._ship(unit, found, log.parts(), log, watch)

    def _ship(self, unit: Unit, found: Iterable[Body], parts: list[Part], log: UnitLog, watch: Watch) -> Shipped:
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        wire = Wire(self._settings, unit, log.destination(), news)
        cutter = Cutter(found, self._settings.parallel + 1, news)
        return Try(self._settings, unit, parts, log, watch, wire, cutter, news).run()


class Try:
    """One try of a unit, in the caller's thread: the only one that writes to the log and asks the watch."""

    def __init__(
        self, settings: HttpSettings, unit: Unit, parts: list[Part], log: UnitLog, watch: Watch,
        wire: Wire, cutter: Cutter, news: queue.SimpleQueue[News],
    ) -> None:  # fmt: skip
        self._settings = settings
        self._unit = unit
        self._log = log
        self._watch = watch
        self._wire = wire
        self._cutter = cutter
        self._news = news
        # Parts that the log knows, until the cutter gives them.
        self._known = {(part.first, part.last): part for part in parts}
        self._end = max((part.last for part in parts), default=0)
        self._quarantined = sum(part.state == QUARANTINED for part in parts)
        self._ready: deque[Parcel] = deque()
        self._under_way = 0
        self._cutting = True
        # How many parts of a body are not done, by its first row.
        self._open: Counter[int] = Counter()
        self._failure: BaseException | None = None
        self._shipped = Shipped()

    def run(self) -> Shipped:
        # The wire ends first: what is cut after that is sent by nobody.
        with self._cutter, self._wire:
            try:
                while self._failure is None and (self._cutting or self._ready or self._under_way):
                    self._send()
                    self._take(self._wait())
            except Stopped as stop:
                self._failure = stop
        if self._failure is not None:
            # The wire is closed. What arrived until then is written down; the rest is sent again by the next run.
            self._acknowledge([one for one in self._drain() if isinstance(one, Arrived) and _delivered(one)])
            raise self._failure
        return self._shipped

    def _send(self) -> None:
        while self._ready and self._under_way < self._settings.parallel:
            self._wire.send(self._ready.popleft())
            self._under_way += 1

    def _wait(self) -> list[News]:
        """Everything that happened since the last time; at least one thing."""
        while True:
            self._watch.check()
            try:
                first = self._news.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            return [first, *self._drain()]

    def _drain(self) -> Iterator[News]:
        while True:
            try:
                yield self._news.get_nowait()
            except queue.Empty:
                return

    def _take(self, news: list[News]) -> None:
        arrived = [one for one in news if isinstance(one, Arrived)]
        self._under_way -= len(arrived)
        # What was ready takes the places that are free now, before the catalog is written to.
        if all(_delivered(one) for one in arrived):
            self._send()
        self._acknowledge([one for one in arrived if _delivered(one)])
        for one in arrived:
            if not _delivered(one):
                self._refuse(one)
        for error in (one for one in news if isinstance(one, BaseException)):
            self._failure = self._failure or error
        if self._failure is None:
            self._seal([one for one in news if isinstance(one, Parcel)])
        if None in news:
            self._check_complete()
            self._cutting = False

    def _seal(self, cut: list[Parcel]) -> None:
        """Write the new ones down, and make them ready with those that were written down by an earlier try."""
        new: list[Part] = []
        for parcel in cut:
            part = parcel.part
            known = self._known.pop((part.first, part.last), None)
            if known is None and part.first != self._end:
                raise self._corrupt("a unit's rows do not fit to the parts that were written down", parcel)
            if known is not None and known.state != SEALED:
                self._cutter.release()
                continue
            if known is not None and known.digest != part.digest:
                raise self._corrupt("a part of a unit has other bytes than when it was written down", parcel)
            if known is None:
                new.append(part)
                self._end = part.last
            self._open[parcel.body] = 1
            self._ready.append(parcel)
        if new:
            self._log.seal(new)
            hit("unit.sealed")

    def _check_complete(self) -> None:
        missing = [bounds for bounds, part in self._known.items() if part.state == SEALED]
        if missing and self._failure is None:
            first, last = min(missing)
            raise Corrupt("a unit has fewer rows than parts that were written down", part=f"{first}-{last}")

    def _acknowledge(self, delivered: list[Arrived]) -> None:
        """Write down what is at the destination: all that waits, in one go for each that says who it is."""
        by_destination: dict[str | None, list[Arrived]] = {}
        for one in delivered:
            by_destination.setdefault(one.reply.destination, []).append(one)
        for destination, group in by_destination.items():
            for _ in group:
                # Crash here: the part is there, the catalog does not know; it is sent again under the same key (I9).
                hit("unit.sent")
            self._log.acknowledge([_with_detail(one) for one in group], destination)
            hit("unit.acknowledged")
            for one in group:
                self._count(one)
                self._close(one.parcel)

    def _count(self, one: Arrived) -> None:
        shipped = self._shipped
        self._shipped = replace(
            shipped,
            rows=shipped.rows + one.parcel.rows,
            deletions=shipped.deletions + one.parcel.deletions,
            size_bytes=shipped.size_bytes + one.size_bytes,
            parts=shipped.parts + 1,
        )
        self._watch.progress(one.parcel.rows, one.size_bytes)

    def _refuse(self, one: Arrived) -> None:
        """Halve a part that was refused for what is in it; a single row is set aside. Anything else ends the run."""
        parcel, reply, limits = one.parcel, one.reply, self._settings
        if reply.status == policy.STRANGER and reply.destination is not None:
            self._failure = self._failure or stranger(self._unit, self._log.destination(), reply.destination)
        elif policy.judge(reply.status) != policy.REFUSED:
            error = policy.failure(reply, one.tries, limits.retry_after_s_max, self._facts(parcel))
            self._failure = self._failure or error
        elif parcel.rows > 1:
            halves = policy.halve(parcel)
            self._log.split(parcel.part, [half.part for half in halves])
            hit("unit.sealed")
            self._open[parcel.body] += 1
            self._ready.extendleft(reversed(halves))
        elif self._unit.lane != RETRY and self._quarantined >= limits.quarantine_max:
            self._failure = self._failure or policy.too_many_refused(reply, limits.quarantine_max, self._facts(parcel))
        else:
            self._log.quarantine(parcel.part, parcel.data, policy.reason(reply))
            self._quarantined += 1
            self._shipped = replace(self._shipped, quarantined=self._shipped.quarantined + 1)
            self._close(parcel)

    def _close(self, parcel: Parcel) -> None:
        """A part is done; with the last one of its body there is room for another body."""
        self._open[parcel.body] -= 1
        if not self._open[parcel.body]:
            del self._open[parcel.body]
            self._cutter.release()

    def _facts(self, parcel: Parcel) -> dict[str, Any]:
        url = policy.place(self._wire.url)
        return {"sink": self._unit.sink, "table": self._unit.table, "url": url, "part": parcel.name}

    def _corrupt(self, message: str, parcel: Parcel) -> Corrupt:
        return Corrupt(
            message,
            advice="It was not sent. Run `floodmark doctor`: a file that the unit's version names was changed.",
            **self._facts(parcel),
        )


def _delivered(one: Arrived) -> bool:
    return policy.judge(one.reply.status) == policy.DELIVERED


def _with_detail(one: Arrived) -> Part:
    detail = {"rows": one.parcel.rows, "deletions": one.parcel.deletions, "bytes": one.size_bytes}
    return replace(one.parcel.part, detail=json.dumps(detail))


class Cutter:
    """Makes bodies in a thread of its own, never more at once than there is room for."""

    def __init__(self, found: Iterable[Body], room: int, news: queue.SimpleQueue[News]) -> None:
        self._found = found
        self._news = news
        self._room = threading.Semaphore(room)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="floodmark-cutter", daemon=True)

    def release(self) -> None:
        self._room.release()

    def __enter__(self) -> Cutter:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._room.release()
        # It may be in the middle of a read. It only reads, so what is left of it is waited for, but not for ever.
        self._thread.join(CLOSE_S_MAX)

    def _run(self) -> None:
        found = iter(self._found)
        try:
            while True:
                self._room.acquire()
                if self._ended.is_set():
                    return
                body = next(found, None)
                if body is None:
                    self._news.put(None)
                    return
                part = Part(body.first, body.last, body.digest)
                self._news.put(Parcel(part, body.data, body.deletions, body.first))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for the bodies
            self._news.put(error)
