"""How far the source has come: asked with a deadline for each call, waited for with a limit for all of them.

Waiting leaves nothing behind. During a wait, a source that does not answer counts as one that has not come further; a
caller that does not wait gets an error after so many tries.

A source may go back: its files were lost, its clock was set back. The frontier of a history does not: it is the highest
of the tip, the tips before it and the end of what is loaded. The floor is counted from the frontier, so it only rises
too, and a chunk below the frontier that is not loaded is a gap, even while the source does not reach it: no run is done
before it is loaded. A run stores the frontier with its job, and the time that a floor was counted from: other processes
read both without asking the source. Only a start with `forget_tip` discards them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from floodmark import log
from floodmark.backfill.chunks.geometry import NUMBER, TIME, Geometry, GivenValue, RangeValue, value_text
from floodmark.backfill.chunks.retries import WorkerStop, call_source, is_worth_a_retry, retrying
from floodmark.backfill.chunks.sources import HistorySource
from floodmark.backfill.chunks.spec import HistorySpec, no_tip
from floodmark.errors import Unavailable
from floodmark.jobs.run import TimedOut
from floodmark.json_form import Json

# Keys of a job's settings.
SEEN, _CLOCK = "tip", "clock_ms"


@dataclass(frozen=True)
class Reached:
    """How far the last run found a history, as its job stores it.

    `frontier`: None if the source had no tip then; `is_known`: whether a run stored one. `clock_ms`: the time that the
    floor of a range of time was counted from.
    """

    frontier: int | str | None = None
    is_known: bool = False
    clock_ms: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Json]) -> Reached:
        frontier, clock_ms = settings.get(SEEN), settings.get(_CLOCK)
        return cls(
            frontier if isinstance(frontier, int | str) else None,
            SEEN in settings,
            clock_ms if isinstance(clock_ms, int) else None,
        )

    @classmethod
    def at(cls, frontier: RangeValue | None, clock_ms: int) -> Reached:
        stored = frontier if frontier is None or isinstance(frontier, int) else value_text(frontier)
        return cls(stored, True, clock_ms)


def settings_with_tip(spec: HistorySpec, reached: Reached) -> dict[str, Json]:
    """The settings of a run, with the known frontier and the time that its floor is counted from."""
    geometry, kept = spec.geometry, dict[str, Json]()
    if reached.is_known and (geometry.last is None or (spec.keep is not None and geometry.unit == NUMBER)):
        kept[SEEN] = reached.frontier
    if reached.clock_ms is not None and spec.keep is not None and geometry.unit == TIME:
        kept[_CLOCK] = reached.clock_ms
    return {**spec.settings(), **kept}


def frontier_of(geometry: Geometry, tip: GivenValue | None, before: Reached, loaded: int | None) -> RangeValue | None:
    """How far a history has come, whatever its source reports now; `loaded` is the highest loaded chunk.

    None: a range with an end counts as complete, of other ranges nothing is known.
    """
    if geometry.last is not None and (tip is None or (before.is_known and before.frontier is None)):
        return None
    known = [geometry.value(one) for one in (tip, before.frontier) if one is not None]
    known += [] if loaded is None else [geometry.ends(loaded)[1]]
    return geometry.shown(max(known)) if known else None


def clock_of(before: Reached, now_ms: int) -> int:
    """The time that a floor is counted from: a clock that was set back does not lower it."""
    return max(now_ms, before.clock_ms or 0)


class Tip:
    def __init__(self, source: HistorySource, spec: HistorySpec, worker_stop: WorkerStop) -> None:
        self._source = source
        self._spec = spec
        self._worker_stop = worker_stop
        self._left_s = spec.tip_wait_s
        self._seen: RangeValue | None = None

    def ask(self) -> RangeValue | None:
        """The tip now. None if the source has none: then a range with an end is complete, and no other range."""
        spec = self._spec
        for attempt in retrying(self._worker_stop, spec.retries, spec.retry_s, "the source's tip"):
            with attempt:
                return self._ask(spec.call_deadline_s)
        raise Unavailable("the source's tip is not known")  # pragma: no cover - the last try raises

    def wait(self, stop: int, is_due: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> RangeValue | None:
        """Wait until chunks with this number and above are complete, or something else is due; returns the tip then.

        TimedOut if that takes too long; it names what is `missing`.
        """
        spec, problem = self._spec, None
        while True:
            began_s = time.monotonic()
            if not spec.follow and self._left_s <= 0:
                raise self._timed_out(missing(), problem)
            self._worker_stop.wait(spec.poll_s if spec.follow else min(spec.poll_s, self._left_s))
            try:
                # A follower has no limit: a source that does not answer for long is an error of its own then.
                tip = self.ask() if spec.follow else self._ask(self._limited_s(began_s))
            except Exception as error:
                if spec.follow or not is_worth_a_retry(error):
                    raise
                log.get().warning("the source's tip is not known", cause=str(error))
                problem = error
            else:
                if is_due() or (tip is not None and spec.geometry.wanted(tip).stop > stop):
                    return tip
            self._left_s -= time.monotonic() - began_s

    def _limited_s(self, began_s: float) -> float:
        """The time limit of a call: its deadline, or the rest of the whole wait; a moment at least."""
        left_s = self._left_s - (time.monotonic() - began_s)
        return min(self._spec.call_deadline_s, max(left_s, 0.05))

    def _ask(self, deadline_s: float) -> RangeValue | None:
        given = call_source("tip", deadline_s, self._worker_stop, self._source.tip)
        geometry = self._spec.geometry
        if given is None:
            # A follower waits for the first row.
            if geometry.last is None and not self._spec.follow:
                raise no_tip(self._spec.name)
            return None
        self._seen = geometry.shown(geometry.value(given))
        return self._seen

    def _timed_out(self, missing: Sequence[int], problem: Exception | None) -> TimedOut:
        geometry = self._spec.geometry
        waiting = geometry.chunk(missing[0]).name
        went_back = " An earlier run had a later tip: if that was wrong, --forget-tip (forget_tip=True) ignores it."
        return TimedOut(
            "the source is not complete up to the end of the range",
            job=self._spec.name,
            waiting_for=waiting if len(missing) == 1 else f"{waiting} and {len(missing) - 1} more",
            last=value_text(geometry.shown(geometry.last)) if geometry.last is not None else None,
            waited_s=round(self._spec.tip_wait_s, 3),
            cause=problem,
            tip=None if self._seen is None else value_text(self._seen),
            advice="What is complete was loaded. Run it again later, or wait longer: --tip-wait (in Python tip_wait). "
            "If the source goes further than this tip, say so: --tip (in Python the source's tip)."
            + (went_back if geometry.last is None else ""),
        )
