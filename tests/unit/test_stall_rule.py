"""What counts as progress of a Spark job, and the setting that bounds the wait for it."""

from __future__ import annotations

import pytest

from floodmark.errors import Invalid, Unavailable
from floodmark.rows.session import CONNECT_PORT, Sessions, _server_of, stall_of
from floodmark.rows.stall import STALL_S, what_waits
from floodmark.settings.settings import check_settings
from floodmark.testing.children import preload, run_child

preload("tests.unit.test_stall_rule")


def test_a_running_task_is_progress() -> None:
    assert what_waits([(1, 10, 1, 3)]) is None
    assert what_waits([(1, 10, 0, 3), (2, 4, 1, 0)]) is None


def test_planning_is_progress() -> None:
    assert what_waits([]) is None
    assert what_waits([(1, 10, 0, 10)]) is None


def test_tasks_that_are_wanted_while_none_runs_wait() -> None:
    waiting = what_waits([(1, 10, 0, 3)])
    assert waiting is not None
    assert what_waits([(1, 10, 0, 3)]) == waiting
    # One more ended in between: that was progress.
    assert what_waits([(1, 10, 0, 4)]) != waiting


def test_the_stall_is_seconds_or_a_span() -> None:
    assert stall_of({}) == STALL_S
    assert stall_of({"stall": "90"}) == 90
    assert stall_of({"stall": "2m"}) == 120
    assert check_settings({"spark": {"stall": 90, "master": "local[2]"}}, "x").spark["stall"] == "90"


@pytest.mark.parametrize("text", ["0", "soon", "0s"])
def test_a_stall_that_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        Sessions({"stall": text})
    with pytest.raises(Invalid, match=r"spark\.stall"):
        check_settings({"spark": {"stall": text}}, "x")


def test_the_server_of_a_connect_address_is_known() -> None:
    assert _server_of("sc://host:15003/;token=secret") == ("host", 15003)
    assert _server_of("sc://host") == ("host", CONNECT_PORT)
    assert _server_of("sc://[::1]:7/;x=y") == ("::1", 7)


def ask_nobody() -> str:
    try:
        Sessions({"master": "sc://127.0.0.1:9/;token=secret", "stall": "1"}).get()
    except Unavailable as error:
        return str(error)
    return "it answered"


def test_a_connect_server_that_does_not_answer_is_unavailable_within_the_stall() -> None:
    """In a process of its own: a session that is active here would be taken instead."""
    said = run_child(ask_nobody)
    assert "Connect server does not answer" in said
    assert "secret" not in said
