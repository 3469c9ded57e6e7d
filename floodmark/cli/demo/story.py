"""The steps of the demo, in their order. Every part of it is killed in the middle, by SIGKILL.

The daemon dies at failpoints of the spool, the feed, commits, sinks and the drop folder; jobs and maintenance die in
processes of their own, and are gone on with: jobs by the daemon, which finds them, maintenance by a second run.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path

from floodmark.cli.demo import rows as demo_rows
from floodmark.cli.demo.killable import HISTORY
from floodmark.cli.demo.world import World
from floodmark.errors import Unavailable
from floodmark.opening import open as open_lake

BROKEN = "broken.jsonl"
# Where the first lake's daemon dies, one start after the other.
WHILE_SENDING = ("spool.written:6", "spool.synced:8", "append.staged:2", "merge.moved:1", "feed.fed:2", "unit.sent:1")
WHILE_FILES_COME = ("drop.loaded:2", "drop.moved:2")


def tell(world: World) -> None:
    make_lakes(world)
    send_rows(world)
    drop_files(world)
    run_jobs(world)
    ship(world)
    keep_house(world)


def make_lakes(world: World) -> None:
    for path in (world.first_lake, world.second_lake):
        with open_lake(path, create=True, actor="demo") as lake:
            lake.create_table("orders", demo_rows.ORDERS, partition=["month(ts)"])
            lake.create_table("customers", demo_rows.CUSTOMERS, key=["id"])
    world.write_second_settings()
    world.second.start()
    world.write_first_settings()
    world.report(f"two lakes, a daemon each; the first ships to {world.archive} and to the second")


def send_rows(world: World) -> None:
    """Orders and customers over HTTP, while the daemon is killed again and again."""
    points: Iterator[str] = iter(WHILE_SENDING)
    world.first.start(next(points))
    for request in range(demo_rows.REQUESTS):
        for table, rows in (("orders", demo_rows.orders(request)), ("customers", demo_rows.customers(request))):
            world.send(table, demo_rows.lines(rows), f"{table}-{request}", lambda: next(points, None))
    # Points that are passed only when the rows are fed and shipped.
    while world.first.is_armed:
        world.wait_until("the daemon, set to die,", lambda: not world.first.is_alive, mend=False)
        world.first.mend(world.report, next(points, None))
    world.report(f"{2 * demo_rows.REQUESTS} requests are answered")


def drop_files(world: World) -> None:
    """Files into the folder, one of them bad; as careful writers do it: under another name first."""
    for number in range(demo_rows.FILES):
        _put(world.drop / f"orders-{number}.{demo_rows.file_kind(number)}", demo_rows.file_text(number))
    _put(world.drop / BROKEN, '{"id": 1, "customer": "nobody", "ts": "yesterday"}\n')
    world.first.kill()
    for point in WHILE_FILES_COME:
        world.first.mend(world.report, point)
        world.wait_until(f"the daemon, set to die at {point},", lambda: not world.first.is_alive, mend=False)
    world.wait_until("the drop folder", lambda: not [one for one in world.drop.iterdir() if one.is_file()])
    if not (world.drop / ".failed" / BROKEN).exists():
        raise Unavailable("a bad file was not set aside", file=BROKEN)
    world.report(f"{demo_rows.FILES} files are loaded, and a bad one is set aside with the reason")


def _put(path: Path, text: str) -> None:
    hidden = path.with_name(f".{path.name}")
    data = text.encode()
    hidden.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    os.rename(hidden, path)


def run_jobs(world: World) -> None:
    """A history and a column, each killed in the middle; the daemon goes on with them by itself."""
    world.work(HISTORY, failpoint="chunk.published:2")
    world.wait_until("the history", lambda: _is_done(world, "history"))
    world.work("column", failpoint="fill.published:2")
    world.wait_until("the column", lambda: _is_done(world, "column"))
    world.report("the daemon has continued and finished both jobs")


def _is_done(world: World, kind: str) -> bool:
    jobs = world.ask("/api/jobs").json()["jobs"]
    return any(job["kind"] == kind for job in jobs) and all(job["status"] == "done" for job in jobs)


def ship(world: World) -> None:
    """The second lake's daemon is killed too; then everything goes out, and both are asked to end."""
    world.second.kill()
    world.wait_until("shipping", lambda: _all_shipped(world))
    for daemon in (world.first, world.second):
        code = daemon.stop()
        world.report(f"the daemon of the {daemon.name} lake ended, exit code {code}")


def _all_shipped(world: World) -> bool:
    status = world.ask("/api/status").json()
    fed = all(not spool["waiting_records"] for spool in status["spools"])
    return fed and all(not sink["lag_rows"] and sink["error"] is None for sink in status["sinks"])


def keep_house(world: World) -> None:
    for part, point in (("compaction", "compact.built"), ("retention", "retain.moved")):
        world.work(part, failpoint=point)
        world.work(part)
    world.report("small files are compacted, and orders beyond their age are deleted")
