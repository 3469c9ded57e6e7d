"""How far the source has come: asked with a deadline for each call, waited for with a limit for all of them.

Waiting leaves nothing behind. While it waits, a source that does not answer is one that has not come further; who asks
without waiting is told after so many tries that it does not answer.

The floor of numbers is counted from the tip, so a run keeps that with its job: others can tell the floor without asking
the source. It is what the last plan was made by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from floodmark import log
from floodmark.backfill.brake import Brake, call_source, is_worth_a_retry, retrying
from floodmark.backfill.geometry import NUMBER, Value, value_text
from floodmark.backfill.run import TimedOut
from floodmark.backfill.sources import Source
from floodmark.backfill.spec import HistorySpec, no_tip
from floodmark.errors import Unavailable

# Where a job's settings have the tip of its last plan; None if the source knew none then.
SEEN = "tip"


def settings_with_tip(spec: HistorySpec, known: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, and the tip that is known, if a floor is counted from it."""
    counts = SEEN in known and spec.keep is not None and spec.geometry.unit == NUMBER
    return {**spec.settings(), **({SEEN: known[SEEN]} if counts else {})}


class Tip:
    def __init__(self, source: Source, spec: HistorySpec, brake: Brake) -> None:
        self._source = source
        self._spec = spec
        self._brake = brake
        self._left_s = spec.tip_wait_s
        self._seen: Value | None = None

    def ask(self) -> Value | None:
        """The tip now. None if the source knows none: then a range with an end is all there, of others nothing is."""
        spec = self._spec
        for attempt in retrying(self._brake, spec.retries, spec.retry_s, "the source's tip"):
            with attempt:
                return self._ask(spec.call_deadline_s)
        raise Unavailable("the source's tip is not known")  # pragma: no cover - the last try raises

    def wait(self, stop: int, is_due: Callable[[], bool]) -> Value | None:
        """Wait until chunks with this number and above are complete, or something else is due; the tip then.

        TimedOut if that takes too long.
        """
        spec, problem = self._spec, None
        while True:
            began_s = time.monotonic()
            if not spec.follow and self._left_s <= 0:
                raise self._timed_out(stop, problem)
            self._brake.wait(spec.poll_s if spec.follow else min(spec.poll_s, self._left_s))
            try:
                # Whoever follows has no limit: a source that is away for long is then an error of its own.
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
        """A call may take its deadline, or what is left of the whole wait; a moment at least."""
        left_s = self._left_s - (time.monotonic() - began_s)
        return min(self._spec.call_deadline_s, max(left_s, 0.05))

    def _ask(self, deadline_s: float) -> Value | None:
        given: Any = call_source("tip", deadline_s, self._brake, self._source.tip)
        geometry = self._spec.geometry
        if given is None:
            # Whoever follows waits for the first row.
            if geometry.last is None and not self._spec.follow:
                raise no_tip(self._spec.name)
            return None
        self._seen = geometry.shown(geometry.value(given))
        return self._seen

    def _timed_out(self, stop: int, problem: Exception | None) -> TimedOut:
        geometry = self._spec.geometry
        end = geometry.wanted(None).stop
        waiting = geometry.chunk(stop).name
        return TimedOut(
            "the source has not come as far as the range goes",
            job=self._spec.name,
            waiting_for=waiting if end - stop == 1 else f"{waiting} and {end - stop - 1} more",
            last=value_text(geometry.shown(geometry.last)) if geometry.last is not None else None,
            waited_s=round(self._spec.tip_wait_s, 3),
            cause=problem,
            tip=None if self._seen is None else value_text(self._seen),
            advice="What is complete was loaded. Run it again later, or wait longer: --tip-wait (in Python tip_wait). "
            "If the source goes further than this tip, say so: --tip (in Python the source's tip).",
        )
