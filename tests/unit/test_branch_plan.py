"""What a merge does to a table, by what the catalog says of both sides: every cell of the table of cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from floodmark.branches.plan import MergeFacts, TableMerge, plan_table
from floodmark.catalog.merge_base import OwnChanges
from floodmark.model import Head

ADDED = OwnChanges(3, 0, 0, 1, False)
DELETED = OwnChanges(0, 0, 2, 1, False)
UPDATED = OwnChanges(0, 2, 0, 1, False)
SHAPED = OwnChanges(0, 0, 0, 1, True)


def head(rows: int = 10, schema: int = 0, spec: int = 0) -> Head:
    return Head("b", "t", "id", 1, 5, schema, spec, None, "m", 3, rows, 1, 100)


def facts(**changed: Any) -> MergeFacts:
    """A table without a key that is everywhere, and that only the source touched: it appended rows."""
    there = MergeFacts("t", head(), head(), head(), ADDED, None, target_still=True)
    return replace(there, **changed)


def keyed(**changed: Any) -> MergeFacts:
    return facts(**{"source_key": (1,), "target_key": (1,), **changed})


def shapes(common: int, source: int, target: int) -> dict[str, Head]:
    return {"common": head(schema=common), "source": head(schema=source), "target": head(schema=target)}


# facts, what is done, and what is done when a side is preferred.
CASES: dict[str, tuple[MergeFacts, str, str, str]] = {
    # Where it is.
    "source did nothing": (facts(own_source=None), "nothing", "nothing", "nothing"),
    "source did nothing, target did": (facts(own_source=None, own_target=DELETED), "nothing", "nothing", "nothing"),
    "made on the source": (facts(common=None, target=None), "take", "take", "take"),
    "keyed, made on the source": (keyed(common=None, target=None), "take", "take", "take"),
    "gone on both": (facts(source=None, target=None), "nothing", "nothing", "nothing"),
    "gone on the source": (facts(source=None, own_source=None), "dropped", "keep", "dropped"),
    "made and gone on the source": (facts(source=None, common=None), "nothing", "nothing", "nothing"),
    "gone on the target": (facts(target=None), "dropped", "keep", "dropped"),
    "gone on the target, source did nothing": (facts(target=None, own_source=None), "nothing", "nothing", "nothing"),
    # Rows by key: judged one by one, whatever both sides did.
    "keyed, source only": (keyed(), "by_key", "by_key", "by_key"),
    "keyed, both": (keyed(own_source=DELETED, own_target=UPDATED), "by_key", "by_key", "by_key"),
    "keyed, batch on both": (keyed(own_target=ADDED, batch_twice=True), "by_key", "by_key", "by_key"),
    # Rows without a key.
    "appended": (facts(), "append", "append", "append"),
    "appended on both": (facts(own_target=ADDED), "append", "append", "append"),
    "appended, merged before": (facts(own_target=ADDED, target_still=False), "append", "append", "append"),
    "appended, target deleted": (facts(own_target=DELETED), "overwritten", "keep", "overwrite"),
    "appended, target overwrote": (facts(own_target=UPDATED), "overwritten", "keep", "overwrite"),
    "appended, target only shaped": (facts(own_target=SHAPED), "append", "append", "append"),
    "deleted": (facts(own_source=DELETED), "replace", "replace", "replace"),
    "updated": (facts(own_source=UPDATED), "replace", "replace", "replace"),
    "deleted, target appended": (
        facts(own_source=DELETED, own_target=ADDED, target_still=False),
        *("overwritten", "keep", "overwrite"),
    ),
    "deleted, target deleted": (
        facts(own_source=DELETED, own_target=DELETED, target_still=False),
        *("overwritten", "keep", "overwrite"),
    ),
    "deleted, target changed before the last merge": (
        facts(own_source=DELETED, target_still=False),
        *("overwritten", "keep", "overwrite"),
    ),
    "deleted, rows went by age on the target": (
        facts(own_source=DELETED, target=head(rows=9)),
        *("overwritten", "keep", "overwrite"),
    ),
    "deleted, no common state": (facts(own_source=DELETED, common=None), "overwritten", "keep", "overwrite"),
    "batch on both": (facts(own_target=ADDED, batch_twice=True), "batch", "keep", "overwrite"),
    "batch on both, settled before": (facts(batch_twice=True), "batch", "keep", "overwrite"),
    "batch on both, source shaped only": (facts(own_source=SHAPED, batch_twice=True), "nothing", "nothing", "nothing"),
    # What was chosen on the source against the target.
    "kept on the source": (facts(travels=True), "overwrite", "overwrite", "overwrite"),
    "kept on the source, which did nothing": (facts(own_source=None, travels=True), *["overwrite"] * 3),
    "kept on the source, target went on": (
        facts(travels=True, own_target=ADDED),
        "overwritten",
        "keep",
        "overwrite",
    ),
    "touched without a change of rows": (facts(own_source=SHAPED), "nothing", "nothing", "nothing"),
    # Shapes.
    "both shaped": (facts(**shapes(0, 1, 2)), "schema", "append", "append"),
    "keyed, both shaped": (keyed(**shapes(0, 1, 2)), "schema", "by_key", "by_key"),
    "another key": (keyed(target_key=(2,)), "key", "key", "key"),
    "a key on the source": (facts(source_key=(1,)), "key", "key", "key"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_table_is_planned_by_what_both_sides_did(case: str) -> None:
    given, plain, ours, theirs = CASES[case]
    found = [plan_table(given, prefer) for prefer in (None, "ours", "theirs")]
    assert [plan.reason or plan.kind for plan in found] == [plain, ours, theirs]
    assert all(plan.kind == "conflict" for plan in found if plan.reason)


@pytest.mark.parametrize(
    ("common", "source", "target", "taken"),
    [
        (0, 0, 0, {None: False}),
        (0, 1, 0, {None: True}),
        (0, 0, 1, {None: False}),
        (0, 1, 1, {None: False}),
        (0, 1, 2, {"ours": False, "theirs": True}),
    ],
    ids=["none", "source", "target", "the same", "both"],
)
def test_the_shape_is_that_of_the_side_that_changed_it(
    common: int, source: int, target: int, taken: dict[str | None, bool]
) -> None:
    for make in (facts, keyed):
        given = make(**shapes(common, source, target))
        assert {prefer: plan_table(given, prefer).theirs_shape for prefer in taken} == taken


def test_partitions_are_part_of_the_shape() -> None:
    assert plan_table(facts(source=head(spec=1))).theirs_shape
    assert plan_table(facts(source=head(spec=1), target=head(spec=2))) == TableMerge("t", "conflict", "schema")


def test_a_shape_comes_without_rows() -> None:
    given = facts(own_source=SHAPED, **shapes(0, 1, 0))
    assert plan_table(given) == TableMerge("t", "reshape", theirs_shape=True)


def test_rows_that_stay_by_ours_still_get_the_other_shape() -> None:
    given = facts(own_source=DELETED, own_target=DELETED, target_still=False, **shapes(0, 1, 0))
    assert plan_table(given, "ours") == TableMerge("t", "reshape", theirs_shape=True, settled="kept")


def test_a_choice_is_told_to_whoever_remembers_it() -> None:
    given = facts(own_target=DELETED)
    assert [plan_table(given, prefer).settled for prefer in (None, "ours", "theirs")] == ["", "kept", "replaced"]
    assert plan_table(facts(), "theirs").settled == ""
    assert plan_table(facts(travels=True)).settled == "replaced"
