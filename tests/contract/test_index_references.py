"""Checks of references with indexes: the same verdicts as without, and files without a hit are not opened."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.rows import keys
from floodmark.testing.invariants import check_lake
from tests.conftest import Place

FILES = 6


def user(number: int) -> str:
    """Names in no order, so that bounds of files leave out nothing."""
    return f"{number * 7919 % 10007:05}-{number}"


@pytest.fixture(params=["indexed", "plain"])
def shop(place: Place, request: pytest.FixtureRequest) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.apply(
            {
                "users": {"columns": {"id": "string", "n": "int"}, "key": ["id"]},
                "orders": {"columns": {"id": "long", "user": "string"}, "references": {"user": "users.id"}},
            }
        )
        if request.param == "plain":
            lake.indexes.drop("users", on="id")
            lake.indexes.drop("orders", on="user")
        for part in range(FILES):
            lake.append("users", [{"id": user(n), "n": n} for n in range(part * 50, part * 50 + 50)])
        for part in range(FILES):
            some = [part * 50 + n for n in range(40)]
            lake.append("orders", [{"id": n, "user": user(n)} for n in some] + [{"id": -1, "user": None}])
        yield lake
        check_lake(lake.catalog)


def opened(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data files whose columns are read to compare values, from now on."""
    found: list[str] = []
    read = keys.read_keys

    def noted(storage: Any, location: str, fields: Any) -> Any:
        found.append(Path(location).name)
        return read(storage, location, fields)

    monkeypatch.setattr("floodmark.rows.reading.references.read_keys", noted)
    return found


def is_indexed(lake: fm.Lake) -> bool:
    return all(one.state == "live" for one in lake.indexes.list()) and len(lake.indexes.list()) == 2


def test_rows_that_refer_to_keys_look_into_the_files_that_hold_them(
    shop: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened(shop, monkeypatch)
    shop.append("orders", [{"id": 1000, "user": user(7)}])
    assert len(found) == 1 if is_indexed(shop) else len(found) >= 1
    found.clear()
    with pytest.raises(fm.Invalid, match="nobody"):
        shop.append("orders", [{"id": 1001, "user": "nobody"}, {"id": 1002, "user": user(8)}])
    assert len(found) == 1 if is_indexed(shop) else len(found) > 1


def test_a_key_that_is_deleted_looks_into_the_files_of_rows_that_may_refer_to_it(
    shop: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened(shop, monkeypatch)
    # No order refers to users 40 to 49 of each file.
    assert shop.delete("users", f"id = '{user(45)}'").rows_deleted == 1
    # The file that is written without it is not covered yet.
    assert len(found) == 1 if is_indexed(shop) else len(found) > 1
    with pytest.raises(fm.Invalid, match=user(7)):
        shop.delete("users", f"id = '{user(7)}'")
    assert shop.delete("orders", f"user = '{user(7)}'").rows_deleted == 1
    assert shop.delete("users", f"id = '{user(7)}'").rows_deleted == 1


def test_random_writes_have_the_verdict_of_a_model(shop: fm.Lake) -> None:
    random.seed(5)
    users = set(range(FILES * 50))
    orders = {n for part in range(FILES) for n in range(part * 50, part * 50 + 40)}
    for step in range(24):
        number = random.randrange(FILES * 50 + 10)
        if step == 12 and is_indexed(shop):
            # Half of the files are not covered from here on.
            shop.indexes.drop("orders", on="user")
            shop.indexes.create("orders", on="user")
        if random.random() < 0.5:
            if number in users:
                shop.append("orders", [{"id": number, "user": user(number)}])
                orders.add(number)
            else:
                with pytest.raises(fm.Invalid):
                    shop.append("orders", [{"id": number, "user": user(number)}])
        elif number in orders and number in users:
            with pytest.raises(fm.Invalid):
                shop.delete("users", f"id = '{user(number)}'")
        else:
            assert shop.delete("users", f"id = '{user(number)}'").rows_deleted == (number in users)
            users.discard(number)
