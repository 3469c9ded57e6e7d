"""When tasks are due: on time, never beside themselves, later after each failure, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.settings.schedule import (
    BACKOFF_S,
    BACKOFF_S_MAX,
    JITTER,
    Schedule,
    Turn,
    backoff_s,
    begin,
    end,
    first_turn,
)

TIMES = st.floats(0, 1e6)
PACES = st.builds(Schedule, st.none() | st.floats(0.01, 1e5), st.floats(0, 1e3))


def test_a_task_comes_round_from_when_it_began_and_makes_up_for_nothing() -> None:
    pace = Schedule(10)
    turn = begin(first_turn(pace, 100), 100)
    assert end(turn, pace, 103, failed=False) == Turn(110)
    # It took longer than its round: at once, and once.
    assert end(turn, pace, 157, failed=False) == Turn(157)


def test_the_first_run_waits_as_it_is_told() -> None:
    turn = first_turn(Schedule(600, first_s=30), 5)
    assert not turn.is_due(34.9)
    assert turn.is_due(35)


def test_what_was_seen_may_be_worth_an_earlier_look_but_never_a_later_one() -> None:
    pace = Schedule(10)
    turn = begin(first_turn(pace, 0), 0)
    assert end(turn, pace, 1, failed=False, again_s=2) == Turn(3)
    assert end(turn, pace, 1, failed=False, again_s=60) == Turn(10)


def test_what_is_to_be_done_once_is_over_when_it_is_done() -> None:
    pace = Schedule(None)
    done = end(begin(first_turn(pace, 0), 0), pace, 1, failed=False)
    assert done.due_s is None
    assert not done.is_due(1e9)
    failed = end(begin(first_turn(pace, 0), 0), pace, 1, failed=True)
    assert failed == Turn(1 + BACKOFF_S, failures=1)


def test_waits_double_up_to_the_bound_and_one_success_ends_that() -> None:
    pace, turn, now, waits = Schedule(2), first_turn(Schedule(2), 0), 0.0, []
    for _ in range(12):
        turn = end(begin(turn, now), pace, now, failed=True)
        assert turn.due_s is not None
        waits.append(turn.due_s - now)
        now = turn.due_s
    assert waits[:4] == [2, 4, 8, 16]
    assert waits[-1] == BACKOFF_S_MAX
    turn = end(begin(turn, now), pace, now, failed=False)
    assert (turn.failures, turn.due_s) == (0, now + 2)


@given(PACES, st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_wait_after_a_failure_is_never_longer_than_the_bound_nor_shortened_by_much(
    pace: Schedule, failures: int, chance: float
) -> None:
    longest = backoff_s(pace, failures, 0.0)
    assert 0 < longest <= pace.backoff_s_max
    assert longest * (1 - JITTER) <= backoff_s(pace, failures, chance) <= longest
    assert backoff_s(pace, failures + 1, 0.0) >= longest


@given(PACES, TIMES, st.lists(st.tuples(st.booleans(), st.floats(0, 100), st.floats(0, 0.999)), max_size=20))
def test_a_task_is_never_due_while_it_runs_nor_before_it_ended(
    pace: Schedule, now: float, runs: list[tuple[bool, float, float]]
) -> None:
    turn = first_turn(pace, now)
    for failed, took_s, chance in runs:
        if turn.due_s is None:
            break
        now = max(now, turn.due_s)
        turn = begin(turn, now)
        assert not turn.is_due(now + 1e9)
        with pytest.raises(ValueError, match="not running"):
            begin(turn, now + 1e9)
        now += took_s
        turn = end(turn, pace, now, failed=failed, chance=chance)
        assert turn.due_s is None or turn.due_s >= now
        assert (turn.failures > 0) == failed
