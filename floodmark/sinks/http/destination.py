"""A sink over HTTP: a unit's parts as NDJSON by POST, several in flight at once, each under its own key (I8, I9).

Three threads: the caller's thread decides and writes to the catalog, one thread cuts rows into bodies, one runs an
event loop with the requests. So a stop is seen while an answer is awaited. Boundaries and digests of a part are
recorded before it is sent; a recorded part whose bytes differ now is never sent. Memory is bounded by `parallel` bodies
and one (I14).

A part that fails at every try without an answer about its rows (5xx, a timeout) is suspect: http/suspects.py decides
whether it is halved, set aside or tried again; this module gathers the facts and carries the decisions out.

Crash model: a crash leaves parts that are sealed and not acknowledged. They may have arrived; they are sent again under
the same keys. Parts that arrived while another one ended the run are acknowledged before the error is raised.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType

from floodmark.catalog.unit import (
    ACKNOWLEDGED,
    QUARANTINED,
    RETRY,
    ROWS,
    SEALED,
    Part,
    Shipped,
    Unit,
    UnitLog,
    Watch,
)
from floodmark.catalog.units import refill, rolled_back, stranger
from floodmark.errors import Corrupt
from floodmark.failpoints import hit
from floodmark.rows.reading.shipment import Body, Shipment, bodies
from floodmark.rows.session import Sessions
from floodmark.runs import Stopped
from floodmark.sinks.http import policy, suspects
from floodmark.sinks.http.policy import Parcel, Reply
from floodmark.sinks.http.suspects import Decision, Divide, EndRun, GiveBack, Probe, SendControl, Situation, Suspect
from floodmark.sinks.http.wire import CLOSE_S_MAX, Arrived, News, Wire
from floodmark.sinks.settings import HttpSettings
from floodmark.storage import Storage

# How long a stop may go unnoticed while nothing else happens.
LOOK_S = 0.05
# A body that is refused as too large sets the known limit no lower than this.
BODY_BYTES_LEAST = 1024
# A lake's answer for rows that it has already: no proof that it accepts others now.
_ALREADY = "already_committed"
# In the detail of an unfinished part: how often it was halved to compare, and why its rows are given up.
_PROBES, _GIVEN_UP = "probes", "given_up"


class HttpDestination:
    def __init__(self, settings: HttpSettings, storage: Storage, sessions: Sessions) -> None:
        self._settings = settings
        self._storage = storage

    def ship(self, unit: Unit, shipment: Shipment, log: UnitLog, watch: Watch) -> Shipped:
        """Send the parts of a unit that are not acknowledged; returns when every part is acknowledged or set aside."""
        parts = log.parts()
        known = [(part.first, part.last) for part in parts]
        control = self._control(parts, log)
        done = [(part.first, part.last) for part in parts if part.state != SEALED and part != control]
        rules = unit.rules
        cut = bodies(shipment, self._storage, rules.part_rows, rules.part_bytes, known, done)
        return self._ship(unit, cut, parts, log, watch)

    def _control(self, parts: list[Part], log: UnitLog) -> Part | None:
        """The smallest accepted part, if an earlier run failed on others at a foreign endpoint: `Try._send_control`."""
        suspect = any(part.state == SEALED and (part.detail or part.last - part.first == 1) for part in parts)
        if not suspect or not self._settings.split_unanswered or log.destination() is not None:
            return None
        accepted = [part for part in parts if part.state == ACKNOWLEDGED]
        return min(accepted, key=lambda part: part.last - part.first, default=None)

    def set_aside(self, unit: Unit, part: Part, data: bytes, reason: str, log: UnitLog, watch: Watch) -> int:
        """Set the rows of a part aside by hand; a lake is first asked to skip them. 0 if that lake has them."""
        if log.destination() is None:
            log.quarantine(part, data, reason, doubtful=0 if _PROBES in part.detail else part.last - part.first)
        else:
            log.note(replace(part, detail=json.dumps({_GIVEN_UP: reason})))
            # Crash here: the next run asks the lake to skip these rows, and sets them aside.
            hit("unit.sealed")
            if not self._ask_to_skip(unit, part, reason, log, watch):
                return 0
            log.quarantine(part, data, reason, passed=True)
        return part.last - part.first

    def _ask_to_skip(self, unit: Unit, part: Part, reason: str, log: UnitLog, watch: Watch) -> bool:
        """Ask a lake to skip the rows of a part. False if it has them: the part is acknowledged then."""
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        wire = Wire(self._settings, unit, log.destination(), news)
        one = Try(self._settings, unit, [part], log, watch, wire, Cutter((), 1, news), news)
        return one.ask_to_skip(Parcel(part, b"", 0, part.first, skip=reason))

    def ship_bodies(self, unit: Unit, found: Iterable[Body], log: UnitLog, watch: Watch) -> Shipped:
        """The same for bodies in ascending order; those in the log have its boundaries, or it is Corrupt."""
        return self._ship(unit, found, log.parts(), log, watch)

    def _ship(self, unit: Unit, found: Iterable[Body], parts: list[Part], log: UnitLog, watch: Watch) -> Shipped:
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        wire = Wire(self._settings, unit, log.destination(), news)
        cutter = Cutter(found, self._settings.parallel + 1, news)
        return Try(self._settings, unit, parts, log, watch, wire, cutter, news).run()


class Try:
    """One try of a unit, in the caller's thread: the only thread that writes to the log and checks the watch."""

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
        # Parts in the log, until the cutter delivers them.
        self._known = {(part.first, part.last): part for part in parts}
        self._end = max((part.last for part in parts), default=0)
        self._quarantined = sum(part.last - part.first for part in parts if part.state == QUARANTINED)
        self._ready: deque[Parcel] = deque()
        self._under_way = 0
        self._cutting = True
        # The number of unfinished parts of a body, by its first row.
        self._open: Counter[int] = Counter()
        self._failure: BaseException | None = None
        self._shipped = Shipped()
        self._resumed = bool(parts)
        # Parts that the destination accepted in this run, and how many there were when a part was first sent, by its
        # row.
        self._accepted = 0
        self._accepted_before: dict[int, int] = {}
        self._suspects: list[Arrived] = []
        # How many there were when a part was cut or halved, and the notes on unfinished parts.
        self._accepted_when_made: dict[int, int] = {}
        self._details = {part.first: json.loads(part.detail) for part in parts if part.state == SEALED and part.detail}
        self._probed = False
        # The smallest part that the endpoint accepted, of this run or an earlier one.
        self._control: Parcel | None = None
        self._control_under_way = False
        self._bytes_max = log.body_bytes_max()
        # For resent rows: whether the endpoint answered about one (it accepted or refused it), how many came back
        # without such an answer since the last one, what the endpoint answered instead, and how long to wait.
        self._heard = False
        self._silent = 0
        self._unheard: list[tuple[str, float | None]] = []
        self._gave_back = False

    def run(self) -> Shipped:
        # The wire ends first: a part that is cut after that is not sent.
        with self._cutter, self._wire:
            try:
                while self._goes_on:
                    self._send()
                    if self._under_way or (self._cutting and not self._holds_back):
                        self._take(self._wait())
                    else:
                        self._decide_without_witness()
            except Stopped as stop:
                self._failure = stop
        if self._failure is not None:
            # The wire is closed. What arrived until then is recorded; the next run sends the rest again. It also asks
            # the lake again about a row to skip.
            arrived = [one for one in self._drain() if isinstance(one, Arrived)]
            late = [one for one in arrived if one.parcel.skip is None and not one.parcel.is_control]
            self._acknowledge([one for one in late if _delivered(one)])
            raise self._failure
        if self._gave_back or (self._unheard and not self._heard):
            url = policy.place(self._wire.url)
            facts = {"sink": self._unit.sink, "table": self._unit.table, "url": url}
            said, wait_s = self._unheard[0]
            return replace(self._shipped, error=policy.no_answer(said, len(self._unheard), wait_s, facts))
        return self._shipped

    @property
    def _goes_on(self) -> bool:
        ended = self._failure is not None or self._gave_back
        return not ended and bool(self._cutting or self._ready or self._under_way or self._suspects)

    def _send(self) -> None:
        # The halves of a suspect are sent together, so that the good one is a witness against the other.
        parallel = max(self._settings.parallel, 2 if self._details else 1)
        while self._ready and self._under_way < parallel and not self._holds_back:
            parcel = self._ready.popleft()
            self._accepted_before.setdefault(parcel.part.first, self._accepted)
            self._wire.send(parcel)
            self._under_way += 1

    def _wait(self) -> list[News]:
        """Every event since the last call; at least one."""
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
        controls = [one for one in arrived if one.parcel.is_control]
        arrived = [one for one in arrived if not one.parcel.is_control]
        passed = [one for one in arrived if one.parcel.skip is not None and _delivered(one)]
        arrived = [one for one in arrived if one.parcel.skip is None or not _delivered(one)]
        # Ready parts fill the free places before the catalog is written to.
        if all(_delivered(one) for one in arrived):
            self._send()
        self._acknowledge([one for one in arrived if _delivered(one)])
        for one in controls:
            self._take_control(one)
        for one in passed:
            self._set_aside_skipped(one)
        for one in arrived:
            if not _delivered(one):
                self._refuse(one)
        self._judge_suspects()
        for error in (one for one in news if isinstance(one, BaseException)):
            self._failure = self._failure or error
        if self._failure is None:
            self._seal([one for one in news if isinstance(one, Parcel)])
        if None in news:
            self._check_complete()
            self._cutting = False

    def _seal(self, cut: list[Parcel]) -> None:
        """Record the new parts, and make them ready together with those that an earlier try recorded."""
        new: list[Part] = []
        ready: list[Parcel] = []
        for parcel in self._small_enough(cut):
            part = parcel.part
            known = self._known.pop((part.first, part.last), None)
            if known is None and part.first != self._end:
                raise self._corrupt("the rows of a unit do not fit its recorded parts", parcel)
            if known is not None and known.state != SEALED:
                if known.state == ACKNOWLEDGED and known.digest == part.digest:
                    self._keep_control(parcel)
                self._cutter.release()
                continue
            if known is not None and known.digest != part.digest:
                raise self._corrupt("a part of a unit has other bytes than were recorded", parcel)
            if known is None:
                new.append(part)
                self._end = part.last
            self._open[parcel.body] += 1
            given_up = self._details.get(part.first, {}).get(_GIVEN_UP)
            if given_up is not None:
                parcel = replace(parcel, **{"skip" if self._is_lake else "problem": given_up})
            ready.append(parcel)
        if new:
            self._log.seal(new)
            hit("unit.sealed")
        for parcel in ready:
            if parcel.problem is not None:
                # It is never sent: its row cannot be written as JSON, or an earlier run found it to blame.
                doubtful = self._doubtful(parcel) if parcel.part.first in self._details else 0
                self._quarantine(parcel, parcel.problem, Reply(None, parcel.problem), doubtful=doubtful)
            else:
                self._ready.append(parcel)

    def _small_enough(self, cut: list[Parcel]) -> list[Parcel]:
        """Halve new parts until they have a size that the destination accepts, if it reported one."""
        found: deque[Parcel] = deque(cut)
        done: list[Parcel] = []
        while found:
            parcel = found.popleft()
            bounds = parcel.part.first, parcel.part.last
            too_large = self._bytes_max is not None and len(parcel.data) > self._bytes_max
            if too_large and parcel.rows > 1 and bounds not in self._known:
                found.extendleft(reversed(policy.halve(parcel)))
            else:
                done.append(parcel)
        return done

    def _check_complete(self) -> None:
        missing = [bounds for bounds, part in self._known.items() if part.state == SEALED]
        if missing and self._failure is None:
            first, last = min(missing)
            raise Corrupt("a unit has fewer rows than its recorded parts", part=f"{first}-{last}")

    def _acknowledge(self, delivered: list[Arrived]) -> None:
        """Record what the destination has: all waiting parts, in one transaction per identified destination."""
        by_destination: dict[str | None, list[Arrived]] = {}
        for one in delivered:
            by_destination.setdefault(one.reply.destination, []).append(one)
        for destination, group in by_destination.items():
            for _ in group:
                # Crash here: the part arrived, the catalog has no record of it; it is sent again under the same key
                # (I9).
                hit("unit.sent")
            self._log.acknowledge([_with_detail(one) for one in group], destination)
            hit("unit.acknowledged")
            self._hear()
            for one in group:
                self._accepted += _ALREADY not in one.reply.text
                self._count(one)
                self._keep_control(one.parcel)
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
        """Halve a part that was refused for its contents; a single row is set aside. Anything else ends the run."""
        parcel, reply = one.parcel, one.reply
        if reply.status == policy.STRANGER and reply.destination is not None:
            self._failure = self._failure or stranger(self._unit, self._log.destination(), reply.destination)
        elif reply.status == policy.STRANGER and reply.newest is not None:
            self._failure = self._failure or self._other_unit(reply.newest)
        elif parcel.skip is None and policy.unanswered(reply.status) and self._is_suspect(reply):
            self._suspect(one)
        elif parcel.skip is not None or policy.judge(reply.status) != policy.REFUSED:
            self._fail(one)
        elif parcel.rows > 1:
            if reply.status == policy.TOO_LARGE:
                self._remember_size(parcel)
            self._halve(parcel)
        else:
            self._hear()
            self._quarantine(parcel, policy.reason(reply), reply)

    def _hear(self) -> None:
        self._heard, self._silent = True, 0

    def _fail(self, one: Arrived) -> None:
        """End the run because of this part."""
        facts = self._facts(one.parcel)
        if one.parcel.skip is not None and policy.judge(one.reply.status) == policy.REFUSED:
            self._failure = self._failure or policy.cannot_skip(one.reply, facts)
            return
        out = policy.part_advice(self._unit.sink, one.parcel.name, may_split=self._may_split)
        advice = out if policy.unanswered(one.reply.status) else ""
        error = policy.failure(one.reply, one.tries, self._settings.retry_after_s_max, facts, advice)
        self._failure = self._failure or error

    def _halve(self, parcel: Parcel, *, probes: int | None = None, doubtful: int = 0) -> None:
        halves = policy.halve(parcel)
        detail = {} if probes is None else {_PROBES: probes}
        text = json.dumps(detail) if detail else ""
        self._log.split(parcel.part, [replace(half.part, detail=text) for half in halves], doubtful=doubtful)
        hit("unit.sealed")
        if probes is not None:
            self._details |= {half.part.first: detail for half in halves}
        self._open[parcel.body] += 1
        # They are new: an accepted part before them proves nothing about them.
        self._accepted_before.pop(parcel.part.first, None)
        self._accepted_when_made |= {half.part.first: self._accepted for half in halves}
        self._ready.extendleft(reversed(halves))

    def _remember_size(self, parcel: Parcel) -> None:
        size_bytes = max(BODY_BYTES_LEAST, len(parcel.data) // 2)
        if self._bytes_max is None or size_bytes < self._bytes_max:
            self._bytes_max = size_bytes
            self._log.remember_bytes_max(size_bytes)

    def _quarantine(
        self, parcel: Parcel, reason: str | None, reply: Reply, *, doubtful: int = 0, passed: bool = False
    ) -> None:
        """Set a row aside, unless that exceeds the limit."""
        if self._is_full(parcel, reply):
            return
        self._log.quarantine(parcel.part, parcel.data, reason, doubtful=doubtful, passed=passed)
        self._quarantined += parcel.rows
        self._shipped = replace(self._shipped, quarantined=self._shipped.quarantined + parcel.rows)
        self._close(parcel)

    def _is_full(self, parcel: Parcel, reply: Reply) -> bool:
        """Whether one more row set aside exceeds the limit: the run ends then. Resent rows are counted already."""
        limits = self._settings
        if self._unit.lane == RETRY:
            return False
        if self._quarantined >= limits.quarantine_max:
            error = policy.too_many_refused(reply, limits.quarantine_max, self._facts(parcel))
        elif (in_all := self._log.quarantined()) >= limits.quarantine_total_max:
            error = policy.too_many_in_all(in_all, limits.quarantine_total_max, self._facts(parcel))
        else:
            return False
        self._failure = self._failure or error
        return True

    # ── parts without an answer about their rows ──

    @property
    def _is_lake(self) -> bool:
        return self._log.destination() is not None

    @property
    def _may_split(self) -> bool:
        return self._settings.split_unanswered or self._is_lake

    @property
    def _now(self) -> Situation:
        is_lake = self._is_lake
        return Situation(
            accepted=self._accepted,
            suspects_max=max(2, self._settings.parallel),
            is_lake=is_lake,
            may_split=self._settings.split_unanswered or is_lake,
            is_retry=self._unit.lane == RETRY,
            is_resumed=self._resumed,
            is_idle=not (self._cutting or self._ready or self._under_way),
            has_control=self._control is not None,
            is_probed=self._probed,
            is_heard=self._heard,
            silent=self._silent,
        )

    @property
    def _holds_back(self) -> bool:
        return bool(self._suspects) and self._now.holds_back(len(self._suspects))

    def _is_suspect(self, reply: Reply) -> bool:
        """Whether it is worth sending others to find the cause; not if the endpoint asked for a pause."""
        patient = policy.asks_again(reply, self._settings.retry_after_s_max)
        return patient and (self._may_split or self._now.may_be_lake)

    def _suspect(self, one: Arrived) -> None:
        """Let a part wait for a witness: another part that is accepted from now on.

        For a half that is halved again, or that a lake is asked to skip, a witness since it was sent is enough: halves
        are sent together, and a wrong guess sets no row aside.
        """
        first = one.parcel.part.first
        if first not in self._details or (one.parcel.rows == 1 and not self._is_lake):
            self._accepted_before[first] = self._accepted
        self._suspects.append(one)

    def _judge_suspects(self) -> None:
        """Halve or set aside those that failed while another part was accepted."""
        if self._failure is not None or not self._suspects:
            return
        self._carry_out(suspects.judge(self._now, self._described()))
        if suspects.must_decide(self._now, len(self._suspects)):
            self._decide_without_witness()

    def _decide_without_witness(self) -> None:
        self._carry_out(suspects.decide_without_witness(self._now, self._described()))

    def _described(self) -> list[Suspect]:
        """The suspects, as far as a decision about them needs it."""
        return [self._describe(one.parcel) for one in self._suspects]

    def _describe(self, parcel: Parcel) -> Suspect:
        first = parcel.part.first
        return Suspect(
            first,
            parcel.rows,
            self._accepted_before[first],
            self._accepted_when_made.get(first, 0),
            first in self._details,
            self._details.get(first, {}).get(_PROBES, 0),
        )

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case EndRun(suspect):
                (one,) = self._found((suspect,))
                self._fail(one)
            case Divide(to_blame):
                for one in self._taken_out(to_blame):
                    self._divide(one)
            case Probe(suspect):
                self._probed = True
                (one,) = self._taken_out((suspect,))
                self._halve(one.parcel, probes=suspect.probes + 1, doubtful=self._doubtful(one.parcel))
            case GiveBack(to_blame=is_to_blame):
                self._give_back(is_to_blame)
            case SendControl():
                self._send_control()

    def _found(self, chosen: Sequence[Suspect]) -> list[Arrived]:
        firsts = {one.first for one in chosen}
        return [one for one in self._suspects if one.parcel.part.first in firsts]

    def _taken_out(self, chosen: Sequence[Suspect]) -> list[Arrived]:
        found = self._found(chosen)
        self._suspects = [one for one in self._suspects if one not in found]
        return found

    def _doubtful(self, parcel: Parcel) -> int:
        """How many more rows may arrive twice now: those of a half were counted when its part was halved."""
        counted = _PROBES in self._details.get(parcel.part.first, {})
        return 0 if counted or self._is_lake else parcel.rows

    def _divide(self, one: Arrived) -> None:
        parcel, reply = one.parcel, one.reply
        doubtful = self._doubtful(parcel)
        if parcel.rows > 1:
            self._halve(parcel, probes=0, doubtful=doubtful)
            return
        # A row to blame is never sent again under this number: record it even if the run ends here.
        reason = policy.reason(reply)
        detail = {**self._details.get(parcel.part.first, {}), _GIVEN_UP: reason}
        self._log.note(replace(parcel.part, detail=json.dumps(detail)))
        # Crash here: the next try sets it aside; a lake is asked to skip it first.
        hit("unit.sealed")
        if self._is_lake:
            self._ready.appendleft(replace(parcel, skip=reason))
        else:
            self._quarantine(parcel, reason, reply, doubtful=doubtful)

    def _set_aside_skipped(self, one: Arrived) -> None:
        """The lake answered: it has the row already, or it will never accept it under this number."""
        if _ALREADY in one.reply.text:
            self._acknowledge([one])
            return
        why = one.parcel.skip or ""
        if self._unit.lane == RETRY:
            self._unheard.append((why, None))
        keeps_reason = self._unit.lane == RETRY and not self._heard
        self._quarantine(one.parcel, None if keeps_reason else why, one.reply, passed=True)

    def _give_back(self, to_blame: bool) -> None:
        """Rows that were sent again without an answer are in quarantine, and stay there. Nothing is in flight.

        If the endpoint answered about other rows since, these rows are to blame, and their reason is the answer they
        got now. Else the endpoint may be down: they keep their reason, the remaining rows are not sent, and the try
        ends. Crash here: rows that are not back yet are sent again under the same keys.
        """
        waiting, self._suspects = self._suspects, []
        self._silent += len(waiting)
        if to_blame:
            for one in waiting:
                self._divide(one)
            return
        for one in waiting:
            self._unheard.append((policy.reason(one.reply), one.reply.retry_after_s))
            self._quarantine(one.parcel, None, one.reply, doubtful=self._doubtful(one.parcel))
        self._gave_back = True

    def _keep_control(self, parcel: Parcel) -> None:
        """Keep the smallest accepted part; a retry sends rows one by one and needs none."""
        if not self._settings.split_unanswered or self._is_lake or self._unit.lane == RETRY:
            return
        if self._control is None or parcel.rows < self._control.rows:
            self._control = replace(parcel, is_control=True)

    def _send_control(self) -> None:
        """Send an accepted part again, under its key.

        An endpoint that accepts it works now, so the parts that failed before are to blame. Without it, bad rows that
        are the last of their unit would block the sink for ever.
        """
        if self._control is not None and not self._control_under_way:
            self._wire.send(self._control)
            self._under_way += 1
            self._control_under_way = True

    def _take_control(self, one: Arrived) -> None:
        """Accepted: the suspects are to blame. Not accepted: the endpoint is, and the run ends."""
        self._control_under_way = False
        if _delivered(one):
            self._accepted += 1
        elif self._suspects:
            self._fail(self._suspects[0])

    def ask_to_skip(self, parcel: Parcel) -> bool:
        self._open[parcel.body] = 1
        self._under_way = 1
        with self._wire:
            self._wire.send(parcel)
            (one,) = (one for one in self._wait() if isinstance(one, Arrived | BaseException))
        if isinstance(one, BaseException):
            raise one
        if not _delivered(one):
            self._refuse(one)
            raise self._failure or Corrupt("the lake sent an unknown answer", **self._facts(parcel))
        if _ALREADY in one.reply.text:
            self._log.acknowledge([_with_detail(one)], one.reply.destination)
            return False
        return True

    def _other_unit(self, newest: policy.ReportedUnit) -> Corrupt:
        """A lake accepted nothing: its newest unit is not the one before this, so one of the two was rolled back."""
        unit, facts = self._unit, {"has_epoch": newest.epoch, "has_until": newest.until}
        if newest.unit is not None and not self._log.knows(newest.unit, newest.epoch):
            return rolled_back(unit, newest.unit, **facts)
        # For rows that are sent again, `until` is the number of the try, not a sequence.
        same = newest.unit is not None and newest.epoch == unit.epoch and unit.lane == ROWS
        return Corrupt(
            "the destination does not have what this sink sent to it: its catalog was rolled back",
            sink=unit.sink,
            table=unit.table,
            unit=unit.id,
            **facts,
            advice=refill(unit.sink, unit.table, newest.until if same else None),
        )

    def _close(self, parcel: Parcel) -> None:
        """A part is done. With the last part of its body, another body has room."""
        self._open[parcel.body] -= 1
        if not self._open[parcel.body]:
            del self._open[parcel.body]
            self._cutter.release()

    def _facts(self, parcel: Parcel) -> dict[str, str]:
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
    """Makes bodies in a thread of its own, at most as many at once as have room."""

    def __init__(self, found: Iterable[Body], room: int, news: queue.SimpleQueue[News]) -> None:
        self._found = found
        self._news = news
        self._room = threading.Semaphore(room)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="floodmark-cutter", daemon=True)

    def release(self) -> None:
        self._room.release()

    def __enter__(self) -> Cutter:
        try:
            self._thread.start()
        except BaseException:
            # Interrupted while the thread starts: without this it would stay for as long as the process lives.
            self._end()
            raise
        return self

    def _end(self) -> None:
        self._ended.set()
        self._room.release()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        # The thread may be in the middle of a read. It only reads, so wait for it, but not for ever.
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
                self._news.put(Parcel(part, body.data, body.deletions, body.first, body.problem))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for the bodies
            self._news.put(error)
