"""When a task is due next. Pure: times in, times out; the caller supplies the clock and the random numbers.

A task runs at an interval, counted from when it began, and never twice at once: runs that it missed while it ran, or
while no daemon was running, are not made up for. After a failure it waits longer each time, from a few seconds up to a
bound, and a little less by chance, so that many tasks that failed together do not retry together. The first success
ends that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# The first wait after a failure, unless the task's interval is shorter; each further one is twice as long.
BACKOFF_S = 5.0
BACKOFF_S_MAX = 300.0
# This part of a wait after a failure is random.
JITTER = 0.25
_DOUBLINGS_MAX = 30


@dataclass(frozen=True)
class Schedule:
    """How often a task runs, in seconds, and how long its first run waits. None: once."""

    every_s: float | None
    first_s: float = 0.0

    @property
    def backoff_s_max(self) -> float:
        """The longest wait: a rare task does not wait longer because it failed, nor a frequent one for ever."""
        return max(BACKOFF_S_MAX, self.every_s or 0.0)


@dataclass(frozen=True)
class Turn:
    """The state of a task: when it is due (None: never again), since when it runs, and its failures in a row."""

    due_s: float | None
    started_s: float | None = None
    failures: int = 0

    def is_due(self, now_s: float) -> bool:
        return self.started_s is None and self.due_s is not None and now_s >= self.due_s


def first_turn(pace: Schedule, now_s: float) -> Turn:
    return Turn(now_s + pace.first_s)


def begin(turn: Turn, now_s: float) -> Turn:
    """The task starts now."""
    if not turn.is_due(now_s):
        raise ValueError("a task starts only when it is due and not running")
    return replace(turn, started_s=now_s)


def end(
    turn: Turn, pace: Schedule, now_s: float, *, failed: bool, chance: float = 0.0, again_s: float | None = None
) -> Turn:
    """The task has ended. `chance` is from [0, 1); `again_s`: the run asks for another one after this time already."""
    if turn.started_s is None:
        raise ValueError("only a started task can end")
    if failed:
        failures = turn.failures + 1
        return Turn(now_s + backoff_s(pace, failures, chance), failures=failures)
    if pace.every_s is None:
        return Turn(None)
    due_s = max(now_s, turn.started_s + pace.every_s)
    return Turn(due_s if again_s is None else min(due_s, now_s + again_s))


def backoff_s(pace: Schedule, failures: int, chance: float) -> float:
    """How long to wait after so many failures in a row: never longer than the bound."""
    least_s = BACKOFF_S if pace.every_s is None else min(BACKOFF_S, pace.every_s)
    wait_s = least_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX)
    return min(wait_s, pace.backoff_s_max) * (1 - JITTER * chance)
