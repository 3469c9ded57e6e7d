"""Keyed changes: upsert and delete rows of a table with a key, and follow it from elsewhere.

Run it with `python examples/keyed_changes.py [FOLDER]`; without a folder it works in a temporary one. Nothing here
starts Spark. The follower keeps two things: a copy of the rows, and the sequence up to which it has followed. It may
ask as often or as seldom as it likes, and pays only for what is new.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import floodmark as fm

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="floodmark-keyed-changes-") + "/lake"


def follow(lake: fm.Lake, copy: dict[int, dict[str, Any]], since: int | None) -> int:
    """Bring the copy up to date. Returns where it is now: a real follower stores this together with its copy."""
    changes = lake.changes("users", since)
    for row in changes.arrow().read_all().to_pylist():
        change, sequence = row.pop("_change"), row.pop("_seq")
        print(f"  {change} {row['id']} at {sequence}")
        if change == "delete":
            copy.pop(row["id"], None)  # a deleted row has only its key
        else:
            copy[row["id"]] = row
    return changes.until


copy: dict[int, dict[str, Any]] = {}

with fm.open(folder, create=True, actor="example") as lake:
    lake.create_table("users", "id long not null, name string, country string", key=["id"])

    lake.append(
        "users",
        [
            {"id": 1, "name": "Ada", "country": "GB"},
            {"id": 2, "name": "Grace", "country": "US"},
            {"id": 3, "name": "Edsger", "country": "NL"},
        ],
    )
    print("three rows came:")
    mark = follow(lake, copy, None)

    merged = lake.merge(
        "users",
        [
            {"id": 1, "name": "Ada", "country": "GB"},  # the same values: not a change
            {"id": 2, "name": "Grace Hopper", "country": "US"},
            {"id": 4, "name": "Barbara", "country": "US"},
        ],
    ).table("users")
    print(f"{merged.rows_added} added and {merged.rows_updated} updated:")
    mark = follow(lake, copy, mark)

    deleted = lake.delete("users", "country = 'US' and id > 2").table("users")
    lake.merge("users", [{"id": 3, "name": "Edsger", "country": "US"}])
    print(f"{deleted.rows_deleted} deleted, then one updated:")
    mark = follow(lake, copy, mark)

    print("nothing happened:")
    mark = follow(lake, copy, mark)

    rows = lake.read_arrow("users").read_all().to_pylist()
    assert copy == {row["id"]: row for row in rows}
    print(f"the copy has the {len(copy)} rows of the table, up to sequence {mark}")
