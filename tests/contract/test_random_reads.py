"""Reads by random conditions equal brute force: over random histories of own and adopted tables, at every version of
every branch.

Each history is some steps on a table: rows that come, go and are gathered into other files, a column that is renamed,
partitions and row groups of any layout, branches. An adopted table begins with files of another writer: without
sequences, in partitions of changing specs, with cut bounds or without any statistics. A list of dicts is the model.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg import transforms as by
from pyiceberg import types as it
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table

import floodmark as fm
from floodmark.model import MAIN
from floodmark.write import table as write_table
from tests.conftest import Place
from tests.unit.test_where import CHECKED, PARTITIONS, VALUES, Model, random_condition, random_rows

STEPS = 9
CONDITIONS_A_STATE = 12
Row = dict[str, Any]
FOREIGN = Schema(
    it.NestedField(1, "id", it.IntegerType(), required=False),
    it.NestedField(2, "n", it.LongType(), required=False),
    it.NestedField(3, "s", it.StringType(), required=False),
    it.NestedField(4, "ok", it.BooleanType(), required=False),
    it.NestedField(5, "day", it.DateType(), required=False),
)
SPECS: list[tuple[tuple[int, by.Transform[Any, Any], str], ...]] = [
    (),
    ((3, by.IdentityTransform(), "s"),),
    ((1, by.BucketTransform(3), "id_bucket"), (5, by.MonthTransform(), "day_month")),
    ((3, by.TruncateTransform(2), "s_truncated"),),
    ((5, by.DayTransform(), "day_day"), (4, by.IdentityTransform(), "ok")),
    ((5, by.YearTransform(), "day_year"),),
]
METRICS = ("none", "counts", "truncate(1)", "truncate(4)", "full")


def counted(rows: Iterable[Row], names: Mapping[str, str]) -> Counter[tuple[Any, ...]]:
    """The rows as a bag; `names` are those that the columns have there."""
    return Counter(tuple(row[names.get(name, name)] for name in VALUES) for row in rows)


@dataclass
class State:
    """What a version of a branch must show: rows by the first names of their columns, and the names of now."""

    rows: list[Row] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)


class History:
    """A lake whose table t goes through random steps, and what every version of it holds."""

    def __init__(self, lake: fm.Lake, chance: random.Random, folder: Path) -> None:
        self.lake, self.chance, self.folder = lake, chance, folder
        self.heads = {MAIN: State()}
        self.states: list[tuple[str, int, State]] = []
        if chance.random() < 0.5:
            self._adopt()
        else:
            lake.create_table(
                "t",
                CHECKED,
                partition=chance.choice(PARTITIONS),
                sort=chance.choice([[], ["id"], ["s", "n"]]),
                properties={"write.parquet.row-group-limit": str(chance.choice([1, 2, 5, 10_000]))},
            )
        for _ in range(STEPS):
            self._step()

    def _adopt(self) -> None:
        """Rows in files that PyIceberg wrote, to specs that change from file to file."""
        chance = self.chance
        catalog = SqlCatalog(
            "theirs", uri=f"sqlite:///{self.folder}/theirs.db", warehouse=f"file://{self.folder}/theirs"
        )
        catalog.create_namespace("n")
        first = chance.choice(SPECS)
        fields = [PartitionField(source, 1000 + at, how, name) for at, (source, how, name) in enumerate(first)]
        properties = {
            "write.metadata.metrics.default": chance.choice(METRICS),
            f"write.metadata.metrics.column.{chance.choice(list(VALUES))}": chance.choice(METRICS),
            "write.parquet.row-group-limit": str(chance.choice([1, 3, 10_000])),
        }
        table = catalog.create_table("n.t", FOREIGN, partition_spec=PartitionSpec(*fields), properties=properties)
        for number in range(chance.randint(1, 4)):
            if number and chance.random() < 0.4:
                self._change_spec(table)
            rows = random_rows(chance, chance.randint(1, 6))
            table.append(pa.Table.from_pylist(rows, FOREIGN.as_arrow()))
            self.heads[MAIN].rows += rows
        commit = self.lake.adopt("t", table.metadata_location)
        catalog.engine.dispose()
        self._made(MAIN, commit.version)

    def _change_spec(self, table: Table) -> None:
        present = {one.name for one in table.spec().fields}
        with table.update_spec() as update:
            for name in present:
                update.remove_field(name)
            for source, how, name in self.chance.choice(SPECS):
                if name not in present:
                    update.add_field(FOREIGN.find_column_name(source), how, name)

    def _made(self, branch: str, version: int) -> None:
        head = self.heads[branch]
        self.states.append((branch, version, State([*head.rows], {**head.names})))

    def _step(self) -> None:
        chance, lake = self.chance, self.lake
        branch = chance.choice(list(self.heads))
        head = self.heads[branch]
        match chance.choice(["append", "append", "append", "delete", "compact", "rename", "branch"]):
            case "delete":
                text, model = condition(chance, head)
                commit = lake.delete("t", text, branch=branch)
                head.rows = [row for row in head.rows if model(row) is not True]
                self._made(branch, commit.version)
            case "compact" if branch == MAIN:
                lake.maintain.compact("t", files_min=2)
                self._made(MAIN, lake.catalog.history.resolve())
            case "rename" if len(self.heads) == 1:
                name = chance.choice(list(VALUES))
                old, new = head.names.get(name, name), f"{name}{len(self.states)}"
                commit = lake.rename_column("t", old, new)
                head.names[name] = new
                self._made(MAIN, commit.version)
            case "branch" if len(self.heads) < 3:
                other = f"dev{len(self.heads)}"
                lake.branches.create(other, source=branch)
                self.heads[other] = State([*head.rows], {**head.names})
            case _:
                rows = random_rows(chance, chance.randint(1, 6), chance.choice([0.0, 0.3, 1.0]))
                named = [{head.names.get(name, name): value for name, value in row.items()} for row in rows]
                commit = lake.append("t", named, branch=branch)
                head.rows += rows
                self._made(branch, commit.version)


def condition(chance: random.Random, state: State) -> tuple[str, Model]:
    """A condition in the names that the columns have in this state. No literal has one of them in it."""
    text, model = random_condition(chance)
    for name, now in state.names.items():
        text = re.sub(rf"\b{name}\b", now, text)
    return text, model


@pytest.mark.whole
@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(24))
def test_reads_by_random_conditions_equal_brute_force(
    new_place: Callable[[str], Place], tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A write tests few files one by one, and many all at once.
    monkeypatch.setattr(write_table, "ONE_BY_ONE_MAX", seed % 2 * 64)
    chance = random.Random(seed)
    with new_place("sqlite").open(create=True) as lake:
        history = History(lake, chance, tmp_path)
        left_out = 0
        for branch, version, state in history.states:
            newest = version == lake.catalog.history.resolve(branch=branch)
            place: dict[str, Any] = {"branch": branch} if newest else {"version": version}
            found = lake.scan("t", **place).to_arrow().to_pylist()
            assert counted(found, state.names) == counted(state.rows, {}), (branch, version)
            for _ in range(CONDITIONS_A_STATE):
                text, model = condition(chance, state)
                expected = [row for row in state.rows if model(row) is True]
                scan = lake.scan("t", where=text, **place)
                assert counted(scan.to_arrow().to_pylist(), state.names) == counted(expected, {}), (text, place)
                assert scan.count() == len(expected), (text, place)
                explained = scan.explain()
                left_out += explained.files_total - explained.files
                if newest:
                    assert lake.plan_delete("t", text, branch=branch)["rows"] == len(expected), text
    # The check would be blind if every file were opened.
    assert left_out > 10
