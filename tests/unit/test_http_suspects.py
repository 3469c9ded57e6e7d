"""Parts that fail without an answer about their rows: what is decided about them, without an endpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodmark.sinks.http.suspects import (
    PROBES_MAX,
    SILENT_MAX,
    Divide,
    EndRun,
    GiveBack,
    Probe,
    SendControl,
    Situation,
    Suspect,
    decide_without_witness,
    judge,
    must_decide,
)

# A foreign endpoint that may get halves; nothing was accepted yet.
NOW = Situation(
    accepted=0,
    suspects_max=2,
    is_lake=False,
    may_split=True,
    is_retry=False,
    is_resumed=False,
    is_idle=True,
    has_control=False,
    is_probed=False,
    is_heard=False,
    silent=0,
)
LAKE = replace(NOW, is_lake=True)
ROW = Suspect(0, 1, 0, 0)
PART = Suspect(5, 8, 0, 0)


def test_only_a_part_that_waited_while_another_was_accepted_is_to_blame() -> None:
    assert judge(NOW, [ROW, PART]) == Divide(())
    assert judge(replace(NOW, accepted=1), [ROW, replace(PART, accepted_before=1)]) == Divide((ROW,))


def test_an_endpoint_that_must_not_get_halves_ends_the_run_once_it_is_known() -> None:
    foreign = replace(NOW, may_split=False, accepted=1)
    assert judge(foreign, [ROW, PART]) == EndRun(ROW)
    assert judge(replace(foreign, accepted=0), [ROW]) == Divide(()), "it may be a lake: the first answer shows it"
    assert decide_without_witness(replace(foreign, accepted=0), [ROW, PART]) == EndRun(ROW)


def test_without_a_witness_no_row_of_a_foreign_endpoint_is_to_blame() -> None:
    assert decide_without_witness(replace(NOW, accepted=1), [ROW]) == EndRun(ROW)
    assert decide_without_witness(replace(NOW, accepted=1, has_control=True), [ROW]) == SendControl()


def test_a_part_of_several_rows_is_halved_if_others_were_accepted_since_it_was_made() -> None:
    assert decide_without_witness(replace(NOW, accepted=1), [ROW, PART]) == Divide((PART,))
    assert decide_without_witness(replace(NOW, accepted=1), [replace(PART, accepted_when_made=1)]) == EndRun(
        replace(PART, accepted_when_made=1)
    )


@pytest.mark.parametrize(
    ("now", "suspects", "divided"),
    [
        (replace(LAKE, accepted=1), [ROW], True),
        (LAKE, [replace(ROW, is_noted=True)], True),
        (LAKE, [ROW], False),
        (replace(LAKE, accepted=1, is_idle=False), [ROW], False),
        (replace(LAKE, accepted=1), [ROW, replace(ROW, first=1)], False),
    ],
)
def test_a_lake_is_asked_to_skip_the_last_row_that_waits(
    now: Situation, suspects: list[Suspect], divided: bool
) -> None:
    assert decide_without_witness(now, suspects) == (Divide(tuple(suspects)) if divided else EndRun(suspects[0]))


def test_a_resumed_run_halves_one_part_to_compare_and_not_for_ever() -> None:
    resumed = replace(NOW, is_resumed=True)
    assert decide_without_witness(resumed, [replace(PART, first=9), PART]) == Probe(PART), "the first of them"
    for now, part in (
        (replace(resumed, is_probed=True), PART),
        (resumed, replace(PART, probes=PROBES_MAX)),
        (resumed, ROW),
    ):
        assert decide_without_witness(now, [part]) == EndRun(part)


def test_resent_rows_go_back_and_are_to_blame_only_if_the_endpoint_spoke_about_others() -> None:
    retry = replace(NOW, is_retry=True)
    assert decide_without_witness(retry, [ROW]) == GiveBack(to_blame=False)
    assert decide_without_witness(replace(retry, is_heard=True), [ROW]) == GiveBack(to_blame=True)
    silent = replace(retry, is_heard=True, silent=SILENT_MAX)
    assert decide_without_witness(silent, [ROW]) == GiveBack(to_blame=False)


def test_resent_rows_for_a_lake_are_skipped_one_by_one() -> None:
    retry = replace(LAKE, is_retry=True)
    assert decide_without_witness(retry, [ROW]) == Divide((ROW,))
    assert decide_without_witness(retry, [ROW, PART]) == EndRun(ROW), "so many failures are the lake's fault"


def test_only_so_many_wait_and_resent_rows_hold_the_others_back() -> None:
    assert not must_decide(NOW, 1)
    assert must_decide(NOW, 2)
    retry = replace(NOW, is_retry=True)
    assert not must_decide(retry, 2), "those in flight may show that the endpoint works"
    assert [retry.holds_back(count) for count in (0, 1, 2)] == [False, False, True]


def test_a_first_run_sends_nothing_more_until_it_knows_whether_it_may_halve() -> None:
    first = replace(NOW, may_split=False)
    assert [first.holds_back(count) for count in (0, 1)] == [False, True]
    assert not replace(first, is_resumed=True).holds_back(1)
    assert not NOW.holds_back(1)
