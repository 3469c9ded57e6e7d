"""A job as the catalog has it: long work, how far it is, who is at it, and what people are told about it.

Pure: rate and time left are computed from what was written down, by the database's clock. A state that this version
does not know is shown as unknown, never as done. A failed job stays in sight until somebody acknowledges it or ten
minutes after its end; one without a time of its end stays for ever: what cannot be told is not over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from floodmark import clock
from floodmark.errors import Invalid

PENDING, RUNNING, DONE, FAILED, CANCELLED = "pending", "running", "done", "failed", "cancelled"
STATES = frozenset({PENDING, RUNNING, DONE, FAILED, CANCELLED})
INTERRUPTED, UNKNOWN = "interrupted", "unknown"
HISTORY, COLUMN = "history", "column"
CHUNKS, ROWS = "chunks", "rows"
SHOWN_MS = 10 * 60_000
# Kinds of errors whose reason may pass: whoever tries again may get through.
PASSING = frozenset({"Unavailable", "Conflict", "Busy", "CommitUnknown"})
# Among the facts of an error: since when a job failed, or waits, for such a reason, without any progress.
FAILING_SINCE = "failing_since"
# A run that works or waits says so more often than this, unless one chunk or batch takes so long.
STALLED_MS = 15 * 60_000


@dataclass(frozen=True)
class Job:
    """`processed` of `total` is for people; `rows`, `unfilled` and `publishes` are exact: publishes wrote them.

    `resumed_from` is what was processed when the present run began, so that its rate is its own. `looked_ms` is when
    the job was looked at, by the clock that wrote the other times.
    """

    id: str
    name: str
    kind: str
    table_names: tuple[str, ...]
    spec: str
    state: str
    processed: int
    total: int | None
    unit: str
    resumed_from: int
    rows: int
    unfilled: int
    publishes: int
    error: Mapping[str, Any] | None
    actor: str
    created_ms: int
    updated_ms: int
    started_ms: int | None = None
    ended_ms: int | None = None
    acknowledged_ms: int | None = None
    cancel_ms: int | None = None
    run: str | None = None
    alive: bool = False
    holder: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Two looks at the same job find the same.
    looked_ms: int | None = field(default=None, compare=False)

    @property
    def status(self) -> str:
        if self.state not in STATES:
            return UNKNOWN
        return INTERRUPTED if self.state == RUNNING and not self.alive else self.state

    @property
    def is_over(self) -> bool:
        return self.state in (DONE, FAILED, CANCELLED)

    @property
    def failed_passing(self) -> bool:
        """Whether it failed for a reason that may pass."""
        return self.state == FAILED and (self.error or {}).get("kind") in PASSING

    @property
    def failing_since_ms(self) -> int | None:
        """Since when it fails, or its run waits, for a reason that may pass; None if it does neither."""
        if self.error is None or self.error.get("kind") not in PASSING:
            return None
        try:
            return clock.parse_time_ms(str(self.error["facts"][FAILING_SINCE]))
        except (KeyError, TypeError, Invalid):
            return self.ended_ms

    @property
    def stalled_since_ms(self) -> int | None:
        """Since when nothing was heard of a run whose process lives, if that is too long ago; it may hang."""
        if self.status != RUNNING or self.looked_ms is None or self.looked_ms - self.updated_ms < STALLED_MS:
            return None
        return self.updated_ms

    @property
    def is_caught_up(self) -> bool:
        """Whether it has all there is now of a range without an end, and follows it: it is not done, and never is."""
        follows = self.settings.get("follow") is True and self.settings.get("last") is None
        return follows and self.status == RUNNING and self.total is not None and self.processed >= self.total

    def rate(self) -> float | None:
        """Units a second in the present or last run; None before anything can be said."""
        done, ms = self.processed - self.resumed_from, self._run_ms()
        return None if done <= 0 or ms <= 0 else done * 1000 / ms

    def eta_ms(self) -> int | None:
        """The time that is left, if it goes on like this; None for work that is not at work or has no known end."""
        rate = self.rate()
        if self.status != RUNNING or rate is None or self.total is None or self.is_caught_up:
            return None
        return round(max(0, self.total - self.processed) / rate * 1000)

    def is_shown(self, now_ms: int) -> bool:
        """Whether a failure is still to be seen. Work that goes on, or cannot be understood, always is."""
        if self.status in (PENDING, RUNNING, INTERRUPTED, UNKNOWN):
            return True
        if self.state != FAILED or self.acknowledged_ms is not None:
            return False
        return self.ended_ms is None or now_ms < self.ended_ms + SHOWN_MS

    def as_dict(self) -> dict[str, Any]:
        """The same figures for --json, HTTP and the page."""
        rate, eta_ms = self.rate(), self.eta_ms()
        return {
            "job": self.name,
            "id": self.id,
            "kind": self.kind,
            "tables": list(self.table_names),
            "status": self.status,
            "processed": self.processed,
            "total": self.total,
            "unit": self.unit,
            "percent": None if self.is_caught_up else _percent(self.processed, self.total),
            "rate": None if rate is None else round(rate, 3),
            "eta_s": None if eta_ms is None else round(eta_ms / 1000, 1),
            "rows": self.rows,
            "unfilled": self.unfilled,
            "publishes": self.publishes,
            "error": None if self.error is None else dict(self.error),
            "actor": self.actor,
            "holder": self.holder if self.alive else None,
            "cancel_asked": self.cancel_ms is not None and self.state == RUNNING,
            "created": clock.format_time(self.created_ms),
            "started": _time(self.started_ms),
            "updated": clock.format_time(self.updated_ms),
            "stalled_since": _time(self.stalled_since_ms),
            "ended": _time(self.ended_ms),
            "acknowledged": _time(self.acknowledged_ms),
            "settings": dict(self.settings),
        }

    def _run_ms(self) -> int:
        """How long the run took until its figures were written: between two writes no time has passed for them."""
        return 0 if self.started_ms is None else (self.ended_ms or self.updated_ms) - self.started_ms


def _percent(processed: int, total: int | None) -> float | None:
    """Below 100 until all of it is done."""
    if total is None:
        return None
    if processed >= total:
        return 100.0
    return min(99.9, round(100 * processed / total, 1))


def _time(time_ms: int | None) -> str | None:
    return None if time_ms is None else clock.format_time(time_ms)
