"""A sink: what changes in a table goes out into a folder, each row once, and a follower keeps a copy of the table.

Run it with `python examples/sinks.py [FOLDER]`; without a folder it works in a temporary one. Nothing here starts
Spark, because little is shipped. A real lake runs `floodmark sink run NAME` from cron. The follower knows nothing of
the lake: it looks into the folder for units that are complete, and remembers which of them it has taken.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import floodmark as fm
from floodmark.sinks.files.units import read_rows, read_units

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="floodmark-sinks-") + "/lake"
out = f"{folder}-out"


def follow(copy: dict[int, dict[str, Any]], taken: set[str]) -> int:
    """Take every complete unit that is new. A real follower stores `taken` together with its copy."""
    new = [unit for unit in read_units(out) if unit.folder not in taken]
    for unit in new:
        for row in (row for batch in read_rows(unit) for row in batch.to_pylist()):
            change, _ = row.pop("_change"), row.pop("_seq")
            if change == "delete":
                copy.pop(row["id"], None)  # a deleted row has only its key
            else:
                copy[row["id"]] = row
        taken.add(unit.folder)
    return len(new)


copy: dict[int, dict[str, Any]] = {}
taken: set[str] = set()

with fm.open(folder, create=True, actor="example") as lake:
    lake.create_table("users", "id long not null, name string, country string", key=["id"])
    lake.append("users", [{"id": n, "name": f"user {n}", "country": "NL" if n % 2 else "US"} for n in range(1, 7)])

    # Only these columns (the key goes along), only these rows.
    lake.sinks.add("dutch", "files", tables="users", path=out, columns=["name"], where="country = 'NL'")
    run = lake.sinks.run("dutch")
    print(f"{run.outcome}: {run.rows} rows")
    print(f"{follow(copy, taken)} unit taken: {sorted(copy)}")

    print(lake.sinks.run("dutch").outcome)  # nothing is new: no file, no byte

    lake.merge("users", [{"id": 1, "name": "user 1", "country": "US"}, {"id": 8, "name": "user 8", "country": "NL"}])
    lake.delete("users", "id = 3")
    (table,) = lake.sinks.about("dutch")["tables"]
    print(f"{table['lag_rows']} changes behind")
    (done,) = lake.sinks.run("dutch").tables
    # One moved away and one was deleted: to this follower both are gone.
    print(f"{done.outcome}: {done.rows} rows, {done.deletions} of them deletions")
    print(f"{follow(copy, taken)} unit taken: {sorted(copy)}")

    rows = lake.read_arrow("users").read_all().to_pylist()
    assert copy == {row["id"]: {"id": row["id"], "name": row["name"]} for row in rows if row["country"] == "NL"}
    print("the copy has the rows that the table has")
