"""What loses data is `destructive`, and done only if that is allowed; `drop_table` is a verb of its own."""

from __future__ import annotations

from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, at, ids, rows

pytestmark = pytest.mark.mostly_sqlite

ONE_COLUMN = {"events": {"columns": {"id": {"type": "long", "required": True}}}}
DESTRUCTIVE: dict[str, tuple[dict[str, Any], str]] = {
    "a column goes": (ONE_COLUMN, "drop_column"),
    "a table goes": ({"events": {"drop": True}}, "drop_table"),
    "rows will go": ({"events": {"retention": "2 rows"}}, "set_retention"),
}


@pytest.fixture
def filled(lake: fm.Lake) -> fm.Lake:
    lake.append("events", rows(1, 2, 3))
    return lake


@pytest.mark.parametrize("case", DESTRUCTIVE)
def test_what_loses_data_is_destructive_and_refused_unless_allowed(filled: fm.Lake, case: str) -> None:
    wanted, action = DESTRUCTIVE[case]
    plan = filled.plan(wanted)
    assert [(step.action, step.kind) for step in plan.steps] == [(action, "destructive")]
    assert plan.destructive == plan.steps
    assert plan.outcome == "planned"
    before = filled.status()["version"]
    for source in (wanted, plan):
        with pytest.raises(fm.Invalid, match="loses data") as caught:
            filled.apply(source)
        assert "events" in caught.value.facts["steps"]
        assert "allow_destructive=True" in caught.value.advice
        assert "--allow-destructive" in caught.value.advice
    with pytest.raises(fm.Invalid, match="loses data"):
        filled.apply(wanted, expect=plan.id)
    assert (filled.status()["version"], ids(filled)) == (before, [1, 2, 3])
    assert filled.apply(plan, allow_destructive=True).outcome == "committed"
    check_lake(filled.catalog)


def test_a_plan_that_loses_data_does_none_of_its_other_steps(filled: fm.Lake) -> None:
    with pytest.raises(fm.Invalid):
        filled.apply({**ONE_COLUMN, "more": {"schema": EVENTS}})
    assert [head.table for head in filled.heads()] == ["events", "notes"]


def test_a_retention_that_keeps_more_or_everything_is_safe(filled: fm.Lake) -> None:
    def kinds(retention: str) -> list[str]:
        return [step.kind for step in filled.plan({"events": {"retention": retention}}).steps]

    filled.apply({"events": {"retention": "10 rows"}}, allow_destructive=True)
    assert (kinds("11 rows"), kinds("none"), kinds("10 rows")) == (["safe"], ["safe"], [])
    assert (kinds("9 rows"), kinds("10 GB")) == (["destructive"], ["destructive"])
    # A table without rows has nothing to lose.
    assert [step.kind for step in filled.plan({"notes": {"retention": "9 rows"}}).steps] == ["safe"]


def test_a_step_that_becomes_destructive_while_it_is_applied_is_refused(lake: fm.Lake) -> None:
    """The table was empty when the plan was made: a retention was safe then."""
    wanted = {"events": {"retention": "2 rows"}}
    with at("apply.begun", lambda: lake.append("events", rows(1, 2, 3))), pytest.raises(fm.Invalid, match="loses data"):
        lake.apply(wanted)
    assert lake.catalog.maintenance.policy(lake.catalog.history.head("events").table_id).retention is None
    check_lake(lake.catalog)


def test_drop_table_drops_and_names_what_there_is_if_there_is_no_such_table(filled: fm.Lake) -> None:
    assert [step.action for step in filled.plan_drop("events").steps] == ["drop_table"]
    commit = filled.drop_table("events", actor="me")
    assert (commit.outcome, commit.actor, commit.message) == ("committed", "me", "drop events")
    assert [head.table for head in filled.heads()] == ["notes"]
    for ask in (filled.plan_drop, filled.drop_table):
        with pytest.raises(fm.NotFound) as caught:
            ask("events")
        assert caught.value.facts["tables"] == "notes"
    check_lake(filled.catalog)


def test_drop_table_is_refused_while_something_needs_the_table(filled: fm.Lake) -> None:
    filled.branches.create("dev")
    with pytest.raises(fm.Invalid, match="cannot be done"):
        filled.drop_table("events")
    assert ids(filled) == [1, 2, 3]
