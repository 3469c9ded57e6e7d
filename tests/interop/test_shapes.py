"""After every kind of change of a table's shape: the lake, its older versions, PyIceberg and DuckDB agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyiceberg.catalog.sql import SqlCatalog

import floodmark as fm
from floodmark.catalog.database import SQLITE_NAME
from floodmark.testing.invariants import check_lake
from tests.conftest import Place

pytestmark = pytest.mark.whole

WHEN = datetime(2026, 11, 15, 12, 30, tzinfo=UTC)
BEFORE: dict[str, Any] = {
    "columns": {
        "id": "long",
        "n": "int",
        "f": "float",
        "amount": "decimal(8,2)",
        "ts": "timestamp",
        "name": "string",
        "who": "struct<city:string,zip:int>",
    },
    "partition": ["day(ts)"],
}
ROWS: list[dict[str, Any]] = [
    {
        "id": number,
        "n": number * 10,
        "f": number / 4,
        "amount": Decimal(number),
        "ts": WHEN.replace(day=number),
        "name": f"row {number}",
        "who": {"city": "Ulm", "zip": number},
    }
    for number in (1, 2, 3)
]
LATER: dict[str, Any] = {**ROWS[0], "id": 4, "ts": WHEN.replace(day=4)}


def columns(**changed: Any) -> dict[str, Any]:
    whole = {**BEFORE["columns"], **changed}
    return {"columns": {name: kind for name, kind in whole.items() if kind is not None}}


def row(before: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A row with these columns changed; ...: without it."""
    return {name: value for name, value in {**before, **changed}.items() if value is not ...}


def same(before: dict[str, Any]) -> dict[str, Any]:
    return before


@dataclass(frozen=True)
class Kind:
    """A change of the table's entry; what becomes of a row, and what a row that comes later is."""

    wanted: dict[str, Any]
    now: Callable[[dict[str, Any]], dict[str, Any]] = same
    later: dict[str, Any] = field(default_factory=lambda: LATER)


def named(before: dict[str, Any]) -> dict[str, Any]:
    return row(before, name=..., title=before["name"])


KINDS = {
    "add column": Kind(columns(more="string"), lambda one: row(one, more=None), row(LATER, more="m")),
    "add column with a default": Kind(
        columns(more={"type": "string", "default": "XX", "required": True}),
        lambda one: row(one, more="XX"),
        row(LATER, more="m"),
    ),
    "rename column": Kind(columns(name=None, title={"type": "string", "renamed_from": "name"}), named, named(LATER)),
    "rename a partition's source": Kind(
        columns(ts=None, at={"type": "timestamp", "renamed_from": "ts"}),
        lambda one: row(one, ts=..., at=one["ts"]),
        row(LATER, ts=..., at=LATER["ts"]),
    ),
    "widen int": Kind(columns(n="long"), same, row(LATER, n=2**40)),
    "widen float": Kind(columns(f="double"), same, row(LATER, f=0.1)),
    "widen decimal": Kind(columns(amount="decimal(20,2)"), same, row(LATER, amount=Decimal("12345678901.25"))),
    "widen struct": Kind(
        columns(who="struct<city:string,zip:long,land:string>"),
        lambda one: row(one, who={**one["who"], "land": None}),
        row(LATER, who={"city": "Ulm", "zip": 2**40, "land": "DE"}),
    ),
    "require": Kind(columns(n="int not null")),
    "comment": Kind({"columns": {**BEFORE["columns"], "n": {"type": "int", "comment": "c"}}, "comment": "why"}),
    "drop column": Kind(columns(name=None), lambda one: row(one, name=...), row(LATER, name=...)),
    "drop column and add one of its name": Kind(
        {**columns(name=None), "dropped": ["name"]}, lambda one: row(one, name=...), row(LATER, name=...)
    ),
    "change partition": Kind({"partition": ["month(ts)", "bucket(4, id)"]}),
    "take partition away": Kind({"partition": []}),
    "change sort": Kind({"sort": ["id desc"]}),
    "add key": Kind({"key": ["id"]}),
    "retention": Kind({"retention": "100000d"}),
    "all at once": Kind(
        {
            **columns(
                name=None,
                title={"type": "string", "renamed_from": "name"},
                n="long",
                f=None,
                vip={"type": "boolean", "default": False},
            ),
            "dropped": ["f"],
            "partition": ["bucket(2, id)"],
            "sort": ["title"],
            "key": ["id"],
        },
        lambda one: row(named(one), f=..., vip=False),
        row(named(LATER), f=..., vip=True, n=2**40),
    ),
}


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(
        ({name: value for name, value in one.items() if name != "_seq"} for one in rows), key=lambda one: one["id"]
    )


def arrow(lake: fm.Lake, version: int | None = None, branch: str = "main") -> list[dict[str, Any]]:
    return by_id(lake.read_arrow("events", version=version, branch=branch).read_all().to_pylist())


def pyiceberg(place: Place, branch: str | None = None) -> list[dict[str, Any]]:
    uri = place.catalog or f"sqlite:///{Path(place.path, SQLITE_NAME)}"
    catalog = SqlCatalog("floodmark", uri=uri, warehouse=f"file://{place.path}")
    table = catalog.load_table("default.events")
    snapshot = None if branch is None else table.refs()[branch].snapshot_id
    found = table.scan(snapshot_id=snapshot).to_arrow().to_pylist()
    catalog.engine.dispose()
    return by_id(found)


def everybody(lake: fm.Lake, place: Place, duck: duckdb.DuckDBPyConnection) -> list[list[dict[str, Any]]]:
    """The table's rows as each reader finds them."""
    theirs = pyiceberg(place)
    location = lake.show("events")["metadata_location"]
    ducks = duck.execute(f"SELECT * FROM iceberg_scan('{location}')").to_arrow_table().to_pylist()
    return [arrow(lake), theirs, by_id(ducks)]


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("name", KINDS)
def test_all_readers_agree(place: Place, duck: duckdb.DuckDBPyConnection, name: str) -> None:
    kind = KINDS[name]
    with place.open(create=True, actor="test") as lake:
        lake.apply({"events": BEFORE}, allow_destructive=True)
        lake.append("events", ROWS[:2])
        before = lake.append("events", ROWS[2:]).version
        for branch in ("still", "forked"):
            lake.branches.create(branch)
        before += 1
        lake.append("events", [LATER], branch="forked")
        mark = lake.catalog.history.head("events").sequence
        applied = lake.apply({"events": kind.wanted}, allow_destructive=True)
        assert (applied.outcome, applied.version) == ("committed", before + 1)
        now = [kind.now(one) for one in ROWS]
        assert everybody(lake, place, duck) == [now, now, now]
        # No row is new to those who follow the table.
        assert _changed(lake, mark) == []
        lake.append("events", [kind.later])
        now.append(kind.later)
        assert everybody(lake, place, duck) == [now, now, now]
        assert _changed(lake, mark) == [4]
        lake.delete("events", "id = 2")
        del now[1]
        assert everybody(lake, place, duck) == [now, now, now]
        assert lake.apply({"events": kind.wanted}, allow_destructive=True).outcome == "nothing_to_do"
        # Older versions are what they were.
        assert arrow(lake, before - 1) == ROWS
        assert arrow(lake, before - 2) == ROWS[:2]
        # So are branches, which keep their shape.
        assert arrow(lake, branch="still") == ROWS
        assert arrow(lake, branch="forked") == pyiceberg(place, "forked") == [*ROWS, LATER]
        lake.append("events", [{**LATER, "id": 5}], branch="forked")
        assert arrow(lake, branch="forked") == pyiceberg(place, "forked") == [*ROWS, LATER, {**LATER, "id": 5}]
        assert everybody(lake, place, duck) == [now, now, now]
        check_lake(lake.catalog)


def _changed(lake: fm.Lake, mark: int) -> list[int]:
    """The ids of rows above a mark: of files that readers of what is new would open."""
    rows = lake.read_arrow("events", with_seq=True).read_all().to_pylist()
    return sorted(one["id"] for one in rows if one["_seq"] > mark)


def test_a_name_that_was_another_columns_before(place: Place, duck: duckdb.DuckDBPyConnection) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.apply({"events": BEFORE}, allow_destructive=True)
        before = lake.append("events", ROWS).version
        lake.apply({"events": columns(name=None)}, allow_destructive=True)
        lake.apply({"events": columns(name="long")}, allow_destructive=True)
        lake.append("events", [row(LATER, name=7)])
        now = [*(row(one, name=None) for one in ROWS), row(LATER, name=7)]
        assert everybody(lake, place, duck) == [now, now, now]
        assert arrow(lake, before) == ROWS
