"""A deterministic explorer of interleavings: every order of the steps of a few actors, up to a bound.

Actors are real code on real threads against the real database, but only one runs at a time: each stops at its next
failpoint (outside transactions) until the scheduler releases it. A schedule is the list of choices; replaying a prefix
and then running straight on gives the same run again, so changing one choice after another finds all schedules with at
most `preemptions` switches away from an actor that could have continued.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from floodmark import failpoints

# Inside a transaction an actor holds locks: stopping there would only block the others, as the database does.
NOT_A_STOP = ("locked", "moved", "branch.creating", "branch.deleting")
# An actor that stops here waits for another one: running it would only repeat its question, until one has ended or
# passed a point at which an operation ends.
WAITS, WAKES = "turn.waiting", ("published", "fenced")
WAIT_S = 60


T = TypeVar("T")


@dataclass
class Actor(Generic[T]):
    name: str
    function: Callable[[], T]
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    stopped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    done: bool = False
    waits: bool = False
    result: T | None = None
    error: BaseException | None = None
    trail: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExploredRun(Generic[T]):
    """One explored order: the choices made, the alternatives, and how every actor ended."""

    choices: tuple[str, ...]
    enabled: tuple[tuple[str, ...], ...]
    actors: Mapping[str, Actor[T]]


def run_schedule(functions: Mapping[str, Callable[[], T]], prefix: tuple[str, ...]) -> ExploredRun[T]:
    """Follow `prefix`, then let each actor run to its end before the next."""
    actors = {name: Actor(name, function) for name, function in functions.items()}
    by_thread: dict[int, Actor[T]] = {}

    def observe(point: str) -> None:
        actor = by_thread.get(threading.get_ident())
        if actor is None or point.endswith(NOT_A_STOP):
            return
        actor.trail.append(point)
        actor.waits = point == WAITS
        actor.stopped.release()
        actor.go.acquire()

    def live(actor: Actor[T]) -> None:
        by_thread[threading.get_ident()] = actor
        actor.go.acquire()
        try:
            actor.result = actor.function()
        except Exception as error:  # noqa: BLE001 - how an actor ends is the result
            actor.error = error
        actor.done = True
        actor.stopped.release()

    threads = [threading.Thread(target=live, args=(actor,), daemon=True) for actor in actors.values()]
    for thread in threads:
        thread.start()
    choices: list[str] = []
    enabled: list[tuple[str, ...]] = []
    failpoints.observer = observe
    try:
        while left := tuple(name for name, actor in actors.items() if not actor.done):
            # If all of them wait, time must pass: a lease ends.
            ready = tuple(name for name in left if not actors[name].waits) or left
            chosen = _choose(prefix, choices, ready)
            enabled.append(ready)
            choices.append(chosen)
            actors[chosen].go.release()
            if not actors[chosen].stopped.acquire(timeout=WAIT_S):
                raise AssertionError(f"{chosen} is stuck after {choices}")
            made_a_step = actors[chosen]
            if made_a_step.done or made_a_step.trail[-1].endswith(WAKES):
                for actor in actors.values():
                    actor.waits = False
    finally:
        failpoints.observer = None
    return ExploredRun(tuple(choices), tuple(enabled), actors)


def _choose(prefix: tuple[str, ...], choices: list[str], ready: tuple[str, ...]) -> str:
    if len(choices) < len(prefix):
        wanted = prefix[len(choices)]
        return wanted if wanted in ready else ready[0]
    if choices and choices[-1] in ready:
        return choices[-1]
    return ready[0]


def explore(
    make: Callable[[], Mapping[str, Callable[[], T]]], *, preemptions: int, check: Callable[[ExploredRun[T]], None]
) -> int:
    """ExploredRun every schedule within the bound, each on what `make` prepares; returns how many there were."""
    waiting: list[tuple[str, ...]] = [()]
    seen: set[tuple[str, ...]] = set()
    count = 0
    while waiting:
        prefix = waiting.pop()
        run = run_schedule(make(), prefix)
        if run.choices in seen:
            continue
        seen.add(run.choices)
        count += 1
        try:
            check(run)
        except AssertionError as error:
            trails = {name: actor.trail for name, actor in run.actors.items()}
            raise AssertionError(f"order {run.choices}\ntrails {trails}\n{error}") from error
        waiting.extend(_others(run, len(prefix), preemptions))
    return count


def _others(run: ExploredRun[T], start: int, preemptions: int) -> Iterator[tuple[str, ...]]:
    """Prefixes that differ from this run in one choice after `start`, within the bound."""
    for place in range(start, len(run.choices)):
        for other in run.enabled[place]:
            prefix = (*run.choices[:place], other)
            if other != run.choices[place] and _count(prefix, run.enabled) <= preemptions:
                yield prefix


def _count(choices: tuple[str, ...], enabled: tuple[tuple[str, ...], ...]) -> int:
    """Switches away from an actor that could have continued."""
    return sum(
        1
        for place in range(1, len(choices))
        if choices[place] != choices[place - 1] and choices[place - 1] in enabled[place]
    )
