"""`floodmark demo`: the whole story once, with real kills, and a verdict.

Rows come in by HTTP, from a folder and from history, get a new column, go out to files and to a second lake, and are
compacted and retained; processes are killed with SIGKILL all the way. In the end the lake is read with Spark, the sinks
are read by themselves, and both are compared with what was sent. The exit code is 1 if anything is lost or doubled.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from floodmark.cli.demo import rows as demo_rows
from floodmark.cli.demo.rows import Wanted
from floodmark.cli.output import Output
from floodmark.errors import Invalid
from floodmark.json_form import Json
from floodmark.lake import Lake
from floodmark.opening import open as open_lake


def demo(
    context: typer.Context,
    path: Annotated[str | None, typer.Option(help="Empty folder to use (default: a new temporary folder).")] = None,
) -> None:
    """Run everything once, with kill -9 throughout, and count the rows in, out, lost and duplicated."""
    from floodmark.cli.demo.story import tell
    from floodmark.cli.demo.world import new_world

    output: Output = context.obj.output
    folder, begun = _folder(path), time.monotonic()

    def report(text: str) -> None:
        output.note(f"{time.monotonic() - begun:5.1f} s  {text}")

    with new_world(folder, report) as world:
        tell(world)
        report("reading everything back")
        wanted = demo_rows.wanted(world.today)
        with open_lake(world.first_lake, actor="demo", settings=context.obj.settings.spark) as lake:
            ends = [_lake_end(lake, wanted), _archive_end(world.archive, wanted)]
            recovered = len(lake.audit())
            versions = lake.status()["version"]
        with open_lake(world.second_lake, read_only=True) as lake:
            ends.append(_copy_end(lake, wanted))
        report(f"{world.kills} kills, {recovered} operations recovered, {versions} versions")
        _say(output, folder, wanted, ends, {"kills": world.kills, "recovered": recovered, "versions": versions})
    raise typer.Exit(exit_code(ends))


def _folder(path: str | None) -> Path:
    folder = Path(path).absolute() if path else Path(tempfile.mkdtemp(prefix="floodmark-demo-"))
    if folder.exists() and any(folder.iterdir()):
        raise Invalid("the demo needs an empty folder", path=folder, advice="Choose another folder, or none.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ── stored rows, against the sent ones ──


def _lake_end(lake: Lake, wanted: Wanted) -> dict[str, Json]:
    rows = lake.sql(
        "SELECT 'orders' AS of, id, 0 AS visits FROM orders UNION ALL SELECT 'customers', id, visits FROM customers"
    )
    found = rows.collect()
    orders = [row["id"] for row in found if row["of"] == "orders"]
    customers = [(row["id"], row["visits"]) for row in found if row["of"] == "customers"]
    return count_end("the lake", orders, customers, wanted.orders - wanted.retired, wanted.customers)


def _copy_end(lake: Lake, wanted: Wanted) -> dict[str, Json]:
    orders = lake.read_arrow("orders").read_all()["id"].to_pylist()
    customers = [(row["id"], row["visits"]) for row in lake.read_arrow("customers").read_all().to_pylist()]
    return count_end("the second lake", orders, customers, wanted.orders, wanted.customers)


def _archive_end(archive: Path, wanted: Wanted) -> dict[str, Json]:
    """The files, taken as their reader would: orders as they come, of each customer the last word."""
    from floodmark.sinks.files.units import read_rows, read_units

    orders: list[int] = []
    customers: dict[int, int] = {}
    for unit in read_units(str(archive)):
        for row in (row for batch in read_rows(unit) for row in batch.to_pylist()):
            if unit.table == "orders":
                orders.append(row["id"])
            else:
                customers[row["id"]] = row["visits"]
    return count_end("the files", orders, list(customers.items()), wanted.orders, wanted.customers)


def count_end(
    name: str, orders: Iterable[int], customers: list[tuple[int, int]], ids: frozenset[int], visits: Mapping[int, int]
) -> dict[str, Json]:
    """Rows that are there, and against those that should be: lost (not there, or not with the last word), doubled."""
    found = Counter(orders)
    strange = [one for one in found if one not in ids]
    stale = [one for one, count in visits.items() if (one, count) not in customers]
    twice = sum(count - 1 for count in found.values()) + len(customers) - len({one for one, _ in customers})
    return {
        "where": name,
        "rows_out": sum(found.values()) + len(customers),
        "lost": len(ids - found.keys()) + len(stale),
        "doubled": twice + len(strange),
    }


def exit_code(ends: list[dict[str, Json]]) -> int:
    return 1 if any(end["lost"] or end["doubled"] for end in ends) else 0


def _say(
    output: Output, folder: Path, wanted: Wanted, ends: list[dict[str, Json]], figures: Mapping[str, Json]
) -> None:
    came = {
        "http": len(wanted.by_http) + len(wanted.customers),
        "files": len(wanted.by_files),
        "history": len(wanted.by_history),
    }
    data: dict[str, Json] = {
        "rows_in": sum(came.values()),
        "came": came,
        "retired": len(wanted.retired),
        "ends": ends,
        **figures,
    }
    if output.as_json:
        output.result({**data, "folder": str(folder)})
        return
    ways = ", ".join(f"{count} by {way}" for way, count in came.items())
    output.result(data, text=f"\nrows in: {data['rows_in']} ({ways}); {data['retired']} retired from the lake by age")
    output.rows(ends, ["where", "rows_out", "lost", "doubled"], name="ends", empty="")
    look = f"{program()} --config {folder}/floodmark.toml"
    output.result(data, text=f"\nlook around:  {look} status\n              {look} run    # then open the page")


def program() -> str:
    """How to start it again: by its name, or as it was started where a shell would not find that."""
    started = sys.argv[0]
    is_script = os.path.basename(started) == "floodmark"
    return shlex.quote(started) if is_script and shutil.which("floodmark") is None else "floodmark"
