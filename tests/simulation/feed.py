"""A model of a keyed table and its change feed: a dict of key to (value, part, sequence), made again from the history.

Every commit's message says what it was meant to do. Doing that to a dict, in the order of the versions, must give
exactly the rows and sequences of every version, whoever wrote it and whatever ran beside it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

import floodmark as fm
from floodmark.commit.expiry import deletions_floor
from floodmark.maintenance.record import MaintenanceRun
from floodmark.model import MAIN

TABLE = "people"
SCHEMA = "id long not null, value int, part string"
Rows = dict[int, tuple[int | None, str | None, int]]
KEYS = 40


def make(lake: fm.Lake, partition: list[str]) -> None:
    lake.create_table(TABLE, SCHEMA, key=["id"], partition=partition)
    lake.indexes.create(TABLE, on="part")


# ── what a writer may do ──


def random_operation(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    """One change: a verb, or several of them in a transaction."""
    verbs = ["append", "merge", "merge", "partial", "delete", "delete", "overwrite", "update", "transaction"]
    verb = dice.choice([*verbs, "rollback"] if depth == 0 else verbs)
    if verb == "rollback":
        return {"verb": verb, "back": dice.randint(1, 6)}
    if verb == "transaction" and depth == 0:
        return {"verb": verb, "steps": [random_operation(dice, 1) for _ in range(dice.randint(2, 3))]}
    if verb == "delete":
        return {"verb": verb, "where": random_condition(dice)}
    if verb == "update":
        return {"verb": verb, "set": random_values(dice), "where": random_condition(dice)}
    if verb == "partial":
        return {"verb": verb, "rows": [random_part(dice, row) for row in as_dicts(random_rows(dice))]}
    if verb == "overwrite" and dice.random() < 0.7:
        part = dice.choice("abc")
        return {"verb": verb, "where": ["part", "=", part], "rows": random_rows(dice, part)}
    if verb == "overwrite":
        return {"verb": verb, "where": None, "rows": random_rows(dice)}
    return {"verb": "merge" if verb == "transaction" else verb, "rows": random_rows(dice)}


def random_rows(dice: random.Random, part: str | None = None) -> list[list[Any]]:
    keys = dice.sample(range(KEYS), dice.randint(1, 4))
    return [[key, dice.randint(0, 3), part or "abc"[key % 3]] for key in keys]


def random_part(dice: random.Random, row: dict[str, Any]) -> dict[str, Any]:
    """The row without some columns, never its key."""
    left_out = dice.choice([("value",), ("part",), ("value", "part"), ()])
    return {name: value for name, value in row.items() if name not in left_out}


def random_values(dice: random.Random) -> dict[str, Any]:
    """New values of one column, or of both."""
    values: dict[str, Any] = {"value": dice.choice([0, 1, 2, 3, None]), "part": dice.choice("abc")}
    return values if dice.random() < 0.3 else dict([dice.choice(list(values.items()))])


def random_condition(dice: random.Random) -> list[Any]:
    return dice.choice(
        [
            ["id", "=", dice.randrange(KEYS)],
            ["value", "=", dice.randint(0, 3)],
            ["id", "<", dice.randrange(KEYS)],
            ["part", "=", dice.choice("abc")],
        ]
    )


def condition_text(condition: list[Any]) -> str:
    column, sign, value = condition
    return f"{column} {sign} '{value}'" if isinstance(value, str) else f"{column} {sign} {value}"


def expression(value: Any) -> str:
    return "null" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


def as_dicts(rows: list[list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(("id", "value", "part"), row, strict=True)) for row in rows]


def perform(lake: fm.Lake, operation: Mapping[str, Any], batch: str | None = None) -> fm.Commit:
    """Do it; the commit's message says what it was."""
    if operation["verb"] == "rollback":
        return roll_back(lake, operation["back"], batch)
    message, expected = json.dumps(operation), operation.get("if_version")
    if operation["verb"] == "transaction":
        with lake.transaction(message, batch=batch, batch_table=TABLE, if_version=expected) as tx:
            for step in operation["steps"]:
                _do(tx, step)
        assert tx.commit is not None
        return tx.commit
    commit = _do(lake, operation, message=message, batch=batch, if_version=expected)
    assert isinstance(commit, fm.Commit)
    return commit


def roll_back(lake: fm.Lake, back: int, batch: str | None = None) -> fm.Commit:
    """Return to the state of so many versions of the table ago; the message says which rows it had."""
    history = lake.history(table=TABLE, branch=MAIN, limit=back + 1)
    live = [one.version for one in history if not is_expired(lake, one.version)]
    if not live:
        raise fm.Conflict("a later version of other tables is all that is left")
    try:
        rows = [[key, *row[:2]] for key, row in read_rows(lake, live[-1]).items()]
        message = json.dumps({"verb": "rollback", "to": live[-1], "rows": rows})
        return lake.rollback(TABLE, to=live[-1], batch=batch, message=message)
    except fm.BelowRetention as error:
        raise fm.Conflict("the version expired while it was looked at", cause=error) from error


def is_expired(lake: fm.Lake, version: int) -> bool:
    return bool(lake.catalog.history.is_expired(version))


def _do(target: Any, step: Mapping[str, Any], **options: Any) -> Any:
    if step["verb"] == "delete":
        return target.delete(TABLE, condition_text(step["where"]), **options)
    if step["verb"] == "update":
        values = {column: expression(value) for column, value in step["set"].items()}
        return target.update(TABLE, values, condition_text(step["where"]), **options)
    if step["verb"] == "overwrite":
        where = None if step["where"] is None else condition_text(step["where"])
        return target.overwrite(TABLE, as_dicts(step["rows"]), where=where, **options)
    if step["verb"] == "partial":
        return target.merge(TABLE, [dict(row) for row in step["rows"]], partial=True, **options)
    return getattr(target, step["verb"])(TABLE, as_dicts(step["rows"]), **options)


def compact(lake: fm.Lake) -> int:
    """Put the table's small files together; how many versions that made."""
    (record,) = lake.maintain.compact(TABLE, files_min=2).records
    assert record.outcome in ("compacted", "partial", "conflict", "nothing_to_do", "below_threshold"), record.as_dict()
    return len(record.detail["versions"])


def forget(lake: fm.Lake, *, deep: bool = False) -> MaintenanceRun:
    """Let everything expire that nothing holds, and delete it at once."""
    assert lake.maintain.expire(keep="0s").outcome in ("expired", "nothing_to_do")
    done = lake.maintain.sweep(grace="0s", deep=deep)
    assert done.outcome in ("swept", "nothing_to_do"), done.as_dict()
    return done


# ── what it must have done ──


def apply(rows: Rows, operation: Mapping[str, Any], sequence: int) -> Rows:
    """The rows after a commit with this sequence. Raises KeyError where the commit should never have been."""
    if operation["verb"] == "transaction":
        for step in operation["steps"]:
            rows = apply(rows, step, sequence)
        return rows
    if operation["verb"] == "append":
        if there := [row[0] for row in operation["rows"] if row[0] in rows]:
            raise KeyError(f"inserted although there: {there}")
        return {**rows, **{key: (value, part, sequence) for key, value, part in operation["rows"]}}
    if operation["verb"] == "rollback":
        then = {key: (value, part, sequence) for key, value, part in operation["rows"]}
        return {key: rows[key] if key in rows and rows[key][:2] == row[:2] else row for key, row in then.items()}
    if operation["verb"] == "merge":
        came = {
            key: (value, part, sequence)
            for key, value, part in operation["rows"]
            if key not in rows or rows[key][:2] != (value, part)
        }
        return {**rows, **came}
    if operation["verb"] == "partial":
        changed: Rows = {}
        for part in operation["rows"]:
            had = rows.get(part["id"], (None, None, 0))[:2]
            has = (part.get("value", had[0]), part.get("part", had[1]))
            if part["id"] not in rows or has != had:
                changed[part["id"]] = (*has, sequence)
        return {**rows, **changed}
    if operation["verb"] == "update":
        return {**rows, **updated(rows, operation["set"], operation["where"], sequence)}
    kept = {key: row for key, row in rows.items() if not matches(operation["where"], key, row)}
    if operation["verb"] == "overwrite":
        if there := [row[0] for row in operation["rows"] if row[0] in kept]:
            raise KeyError(f"overwritten although there: {there}")
        kept |= {key: (value, part, sequence) for key, value, part in operation["rows"]}
    return kept


def updated(rows: Rows, values: Mapping[str, Any], condition: list[Any], sequence: int) -> Rows:
    """The rows that match and do not have these values yet, with them."""
    found = {}
    for key, row in rows.items():
        new = (values.get("value", row[0]), values.get("part", row[1]))
        if matches(condition, key, row) and new != row[:2]:
            found[key] = (*new, sequence)
    return found


def matches(condition: list[Any] | None, key: int, row: tuple[int | None, str | None, int]) -> bool:
    if condition is None:
        return True
    column, sign, value = condition
    found: Any = {"id": key, "value": row[0], "part": row[1]}[column]
    if found is None:
        return False
    return bool(found == value if sign == "=" else found < value)


def check_history(lake: fm.Lake, dice: random.Random, *, from_version: int = 0, rows: Rows | None = None) -> Rows:
    """Every version since `from_version` holds exactly what its commits were meant to do. Returns the newest rows.

    Versions that have expired cannot be read any more: of them only the figures are looked at.
    """
    rows, moved = dict(rows or {}), from_version
    for commit in sorted(lake.history(limit=100_000), key=lambda commit: commit.version):
        if commit.version <= from_version or commit.kind == "create_table" or commit.branch != MAIN:
            continue
        if commit.kind not in ("compact", "retain"):
            expected = json.loads(commit.message).get("if_version")
            assert expected is None or moved <= max(expected, from_version), f"version {commit.version}: {moved}"
        moved = commit.version if commit.tables else moved
        if not commit.tables:
            # A batch that changed nothing is remembered all the same.
            assert {key: row[:2] for key, row in apply(rows, json.loads(commit.message), -1).items()} == {
                key: row[:2] for key, row in rows.items()
            }
            continue
        (touched,) = commit.tables
        found = None if lake.catalog.history.is_expired(commit.version) else read_rows(lake, commit.version)
        before, rows = rows, _after(rows, commit, touched.sequence, found)
        assert found in (None, rows), f"version {commit.version}: {commit.message}: {found} is not {rows}"
        if found is not None:
            check_lookups(lake, rows, dice, commit.version)
        gone = len(set(before) - set(rows))
        assert touched.rows_total == len(rows)
        assert touched.rows_added - touched.rows_deleted == len(rows) - len(before)
        assert touched.rows_deleted >= gone
    check_feed(lake, rows, dice)
    return rows


def _after(rows: Rows, commit: fm.Commit, sequence: int, found: Rows | None) -> Rows:
    if commit.kind == "compact":
        return rows
    if commit.kind == "retain":
        assert found is not None, "retention can only be checked by reading"
        return retained(rows, found, int(re.findall(r"retain (\d+) rows", commit.message)[0]))
    return apply(rows, json.loads(commit.message), sequence)


def retained(rows: Rows, found: Rows, count: int) -> Rows:
    """Only rows that are older than the newest `count` may go; due ones that came in meanwhile may stay."""
    newest = sorted((sequence for _, _, sequence in rows.values()), reverse=True)
    first = newest[count - 1] if len(rows) > count else 0
    assert {key: row for key, row in rows.items() if key in found or row[2] >= first} == found
    assert len(found) < len(rows), "nothing went, so there should be no version"
    return found


def read_rows(lake: fm.Lake, version: int | None = None) -> Rows:
    found = lake.read_arrow(TABLE, version=version, with_seq=True).read_all().to_pylist()
    rows = {row["id"]: (row["value"], row["part"], row["_seq"]) for row in found}
    assert len(rows) == len(found), "a key is there twice"
    return rows


def check_lookups(lake: fm.Lake, rows: Rows, dice: random.Random, version: int) -> None:
    """Every key that may ever have been used, and the rows of a value, are found at a version as the dict has them."""
    wanted = {key: {"id": key, "value": row[0], "part": row[1]} for key, row in rows.items()}
    keys = list(range(KEYS + 1))
    dice.shuffle(keys)
    found = lake.get_many(TABLE, keys, version=version).to_pylist()
    assert found == [wanted[key] for key in keys if key in wanted], f"version {version}"
    assert lake.get(TABLE, keys[0], version=version) == wanted.get(keys[0]), f"version {version}"
    part = dice.choice([None, *"abcx"])
    page = lake.lookup(TABLE, part=part, limit=KEYS + 1, version=version)
    assert page.rows == [wanted[key] for key in sorted(wanted) if wanted[key]["part"] == part], f"version {version}"


def check_feed(lake: fm.Lake, rows: Rows, dice: random.Random, splits: int = 3) -> None:
    """The changes, folded by key over any split of the sequences, are the rows; what is not known is refused."""
    head = lake.changes(TABLE).until
    floor = deletions_floor(lake.catalog.database, lake.catalog.history.head(TABLE).table_id)
    for _ in range(splits):
        low, high = sorted(dice.randint(max(floor, 0), head) for _ in range(2))
        folded: Rows = {}
        for since, until in ((None, low), (low, high), (high, head)):
            fold(folded, changes(lake, since, until), -1 if since is None else since, until)
        assert folded == rows, f"split at {low} and {high} of {head}, deletions are known from {floor} on"
    if floor > 0:
        with pytest.raises(fm.BelowRetention):
            lake.changes(TABLE, dice.randrange(floor))


def changes(lake: fm.Lake, since: int | None, until: int | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = lake.changes(TABLE, since, until).arrow().read_all().to_pylist()
    return found


def fold(folded: Rows, found: list[dict[str, Any]], since: int, until: int) -> None:
    seen = [row["id"] for row in found]
    assert len(set(seen)) == len(seen), "a key comes more than once"
    for row in found:
        assert since < row["_seq"] <= until
        if row["_change"] == "upsert":
            folded[row["id"]] = (row["value"], row["part"], row["_seq"])
        else:
            assert row["_change"] == "delete"
            assert row["value"] is None
            folded.pop(row["id"], None)
