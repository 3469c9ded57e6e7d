"""Columns that change on a branch beside writers, main's own columns, merges and recovery: all orders, up to a bound.

Whatever the order was: rows are there once and have their values under the name that their branch has, main's columns
are its own until a merge brings others, and no id is given to two columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.explorer import ExploredRun, explore
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, rows

LAKES_LAST = 10

ACTS: dict[str, Callable[[fm.Lake, str, str], Any]] = {
    "rename": lambda lake, table, dev: lake.rename_column(table, "name", "title", branch=dev),
    "add": lambda lake, table, dev: lake.add_column(table, "level", "int", default=7, branch=dev),
    "drop": lambda lake, table, dev: lake.drop_column(table, "extra", branch=dev),
    "append": lambda lake, table, dev: lake.append(table, rows(3), branch=dev),
    "main appends": lambda lake, table, dev: lake.append(table, rows(4)),
    "main adds": lambda lake, table, dev: lake.add_column(table, "own", "string"),
    "merge": lambda lake, table, dev: lake.branches.merge(dev, on_conflict="return"),
    "heal": lambda lake, table, dev: lake.recover(),
}
PAIRS = {
    "rows come to the branch, and a column gets another name": ("append", "rename"),
    "rows come to the branch, and a column with a default": ("append", "add"),
    "a column on each side": ("add", "main adds"),
    "two changes of one branch": ("rename", "drop"),
    "a merge, and a column gets another name": ("add first", "merge", "rename"),
    "a merge, and main gets a column": ("rename first", "merge", "main adds"),
    "a merge of a new name, and rows come to main": ("rename first", "merge", "main appends"),
    "a merge of a default, and rows come to main": ("add first", "merge", "main appends"),
    "a change of columns is recovered while it is made": ("add", "heal"),
}
SOAK = ("a column on each side", "two changes of one branch", "a merge, and main gets a column")


class World:
    """A new table and a new branch for every run."""

    def __init__(self, new_place: Callable[[], Place], acts: tuple[str, ...]) -> None:
        self._new_place = new_place
        self._first = [act.removesuffix(" first") for act in acts if act.endswith(" first")]
        self._acts = [act for act in acts if not act.endswith(" first")]
        self._runs = 0
        self._lakes: list[fm.Lake] = []
        self.table = self.dev = ""

    def make(self) -> Mapping[str, Callable[[], Any]]:
        if self._runs % LAKES_LAST == 0:
            self.close()
            place = self._new_place()
            with place.open(create=True):
                pass
            options = {"lease_ms": -60_000} if "heal" in self._acts else {}
            self._lakes = [place.open(recover=False, **options) for _ in range(3)]
        self._runs += 1
        self.table, self.dev = f"events{self._runs}", f"dev{self._runs}"
        judge = self._lakes[-1]
        judge.create_table(self.table, f"{EVENTS}, extra long")
        judge.append(self.table, rows(1, 2))
        judge.branches.create(self.dev)
        for act in self._first:
            ACTS[act](judge, self.table, self.dev)
        return {
            act: lambda lake=lake, act=act: ACTS[act](lake, self.table, self.dev)
            for lake, act in zip(self._lakes, self._acts, strict=False)
        }

    def close(self) -> None:
        for lake in self._lakes:
            lake.close()
        self._lakes = []

    def check(self, run: ExploredRun) -> None:
        judge = self._lakes[-1]
        judge.recover()
        check_lake(judge.catalog)
        done = {act for act in self._acts if run.actors[act].error is None}
        for act in set(self._acts) - done:
            # Rows by the old name come too late if the new one is there first.
            allowed = {"append": fm.Invalid, "main appends": fm.Invalid, "add": fm.Fenced}.get(act, fm.Conflict)
            assert isinstance(run.actors[act].error, (fm.Conflict, allowed)), repr(run.actors[act].error)
        changed = (done | set(self._first)) & {"rename", "add", "drop"}
        self._check_rows(self.dev, changed, {1, 2} | ({3} if "append" in done else set()))
        merged = run.actors["merge"].result.outcome if "merge" in done else ""
        names = set(self._columns("main"))
        taken = {act for act, name in (("rename", "title"), ("add", "level")) if name in names}
        # What came to the branch beside the merge may be part of it.
        assert set(self._first) <= taken <= changed if merged == "merged" else not taken
        assert merged != "conflict" or "main adds" in done
        own = {"main adds"} & done
        self._check_rows("main", taken | own, {1, 2} | ({4} if "main appends" in done else set()))
        self._check_ids()
        judge.branches.delete(self.dev)

    def _columns(self, branch: str) -> list[str]:
        names = self._lakes[-1].schema(self.table, branch=branch).column_names
        return [name for name in names if name != "_seq"]

    def _check_rows(self, branch: str, changes: set[str], expected: set[int]) -> None:
        columns = {"id", "name", "extra"}
        columns ^= {"name", "title"} if "rename" in changes else set()
        columns ^= {"level"} if "add" in changes else set()
        columns ^= {"extra"} if "drop" in changes else set()
        columns ^= {"own"} if "main adds" in changes else set()
        assert set(self._columns(branch)) == columns
        found = self._lakes[-1].read_arrow(self.table, branch=branch).read_all().to_pylist()
        assert sorted(row["id"] for row in found) == sorted(expected)
        for row in found:
            assert row.get("name", row.get("title")) == f"row {row['id']}"
            assert row.get("level", 7) == 7

    def _check_ids(self) -> None:
        """A column of both branches is one column; those that each made are two."""
        judge = self._lakes[-1]
        mine, theirs = (judge.schema(self.table, branch=branch) for branch in ("main", self.dev))
        if "own" in mine.column_names:
            assert mine.find_field("own").field_id not in theirs.field_ids


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=[pytest.mark.soak] if pair in SOAK else []) for pair in PAIRS]
)
def test_every_order_keeps_rows_under_their_branchs_names(new_place: Callable[[str], Place], pair: str) -> None:
    world = World(lambda: new_place("sqlite"), PAIRS[pair])
    count = explore(world.make, preemptions=1, check=world.check)
    world.close()
    assert count > 5
