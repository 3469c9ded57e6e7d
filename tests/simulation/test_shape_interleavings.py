"""A writer beside one who changes the shape of its table, or the other end of a reference: all orders of their steps.

Whatever the order was: who was told that it happened finds its rows, in the table's shape as it is; who was told
otherwise finds nothing of it; and no row refers to what is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.explorer import ExploredRun, explore
from floodmark.testing.invariants import check_lake
from tests.conftest import Place

LAKES_LAST = 15
KEY = {"type": "long", "required": True}
PLAIN = {"id": KEY, "ref": "int", "name": "string"}


def rows(*numbers: int) -> list[dict[str, Any]]:
    """Row 7 refers to the parent 7."""
    return [{"id": number, "ref": number, "name": f"row {number}"} for number in numbers]


Act = Callable[[fm.Lake, str, str], Any]
ACTS: dict[str, Act] = {
    "append": lambda lake, child, parent: lake.append(child, rows(3)),
    "delete parent": lambda lake, child, parent: lake.delete(parent, "id = 3"),
    "overwrite parent": lambda lake, child, parent: lake.overwrite(parent, [{"id": 1}, {"id": 2}]),
    "refer": lambda lake, child, parent: lake.apply(
        {child: {"columns": {**PLAIN, "ref": "long"}, "references": {"ref": f"{parent}.id"}}}
    ),
    "append dangling": lambda lake, child, parent: lake.append(child, rows(8)),
    "reshape": lambda lake, child, parent: lake.apply(
        {
            child: {
                "columns": {"id": KEY, "ref": "long", "title": {"type": "string", "renamed_from": "name"}},
                "partition": ["bucket(4, id)"],
            }
        }
    ),
    "key": lambda lake, child, parent: lake.apply({child: {"columns": PLAIN, "key": ["id"]}}),
    "append twice": lambda lake, child, parent: lake.append(child, rows(2)),
    "rename": lambda lake, child, parent: lake.rename_table(child, f"{child}x"),
    "rename parent": lambda lake, child, parent: lake.rename_table(parent, f"{parent}x"),
    "update dangling": lambda lake, child, parent: lake.update(child, {"ref": "3"}, "id = 2"),
}
# Whether the reference is there from the start, and who acts.
PAIRS: dict[str, tuple[bool, str, str]] = {
    "rows come, and what they refer to goes": (True, "append", "delete parent"),
    "rows come, and what they refer to is overwritten": (True, "append", "overwrite parent"),
    "rows come, and a reference that they break": (False, "append dangling", "refer"),
    "what is referred to goes, and a reference comes": (False, "delete parent", "refer"),
    "rows come, and another shape": (False, "append", "reshape"),
    "a row comes twice, and a key": (False, "append twice", "key"),
    "rows come, and their table gets another name": (False, "append", "rename"),
    "rows come, and what they refer to gets another name": (True, "append", "rename parent"),
    "what is referred to goes, and its table gets another name": (True, "delete parent", "rename parent"),
    "a row refers to what goes": (True, "update dangling", "delete parent"),
}


class World:
    def __init__(self, new_place: Callable[[], Place], pair: tuple[bool, str, str]) -> None:
        self._new_place = new_place
        self._refers, *self._acts = pair
        self._runs = 0
        self._lakes: list[fm.Lake] = []
        self.child = self.parent = ""

    def make(self) -> Mapping[str, Callable[[], Any]]:
        if self._runs % LAKES_LAST == 0:
            self.close()
            place = self._new_place()
            with place.open(create=True):
                pass
            self._lakes = [place.open(recover=False) for _ in range(3)]
        self._runs += 1
        self.child, self.parent = f"child{self._runs}", f"parent{self._runs}"
        judge = self._lakes[-1]
        wide = {**PLAIN, "ref": "long"} if self._refers else PLAIN
        told = {"references": {"ref": f"{self.parent}.id"}} if self._refers else {}
        judge.apply({self.parent: {"columns": {"id": KEY}, "key": ["id"]}, self.child: {"columns": wide, **told}})
        judge.append(self.parent, [{"id": number} for number in (1, 2, 3)])
        judge.append(self.child, rows(1, 2) if self._acts[0] != "delete parent" else rows(1, 3))
        return {
            act: lambda lake=lake, act=act: ACTS[act](lake, self.child, self.parent)
            for lake, act in zip(self._lakes, self._acts, strict=False)
        }

    def close(self) -> None:
        for lake in self._lakes:
            lake.close()
        self._lakes = []

    def check(self, run: ExploredRun) -> None:
        judge = self._lakes[-1]
        if self._runs % 5 == 0:
            check_lake(judge.catalog)
        done = {act for act in self._acts if run.actors[act].error is None}
        renames = any(act.startswith("rename") for act in self._acts)
        allowed = (fm.Invalid, fm.Conflict, *((fm.NotFound,) if renames else ()))
        for act in set(self._acts) - done:
            assert isinstance(run.actors[act].error, allowed), repr(run.actors[act].error)
        assert done, "somebody is first"
        child, parent = (
            f"{name}x" if act in done else name
            for name, act in ((self.child, "rename"), (self.parent, "rename parent"))
        )
        found = judge.read_arrow(child).read_all().to_pylist()
        there = {row["id"] for row in judge.read_arrow(parent).read_all().to_pylist()}
        ids = sorted(row["id"] for row in found)
        expected = [1, 2] if self._acts[0] != "delete parent" else [1, 3]
        brought = {"append": 3, "append dangling": 8, "append twice": 2}
        assert ids == sorted([*expected, *(brought[act] for act in done if act in brought)])
        assert {row.get("name", row.get("title")) for row in found} == {f"row {number}" for number in ids}
        assert ("title" in found[0]) == ("reshape" in done)
        if self._refers or "refer" in done:
            assert there.issuperset(row["ref"] for row in found)
        if "key" in done:
            assert len(set(ids)) == len(ids)


# The same race as the first, by another verb.
SOAK = ("rows come, and what they refer to is overwritten",)


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=[pytest.mark.soak] if pair in SOAK else []) for pair in PAIRS]
)
def test_every_order_leaves_rows_of_one_shape_that_refer_to_what_is_there(
    new_place: Callable[[str], Place], pair: str
) -> None:
    world = World(lambda: new_place("sqlite"), PAIRS[pair])
    count = explore(world.make, preemptions=1, check=world.check)
    world.close()
    assert count > 10
