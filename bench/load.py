"""The daemon under load: rows in over HTTP at a steady rate, with kills, and then without.

First a minute in which the daemon is killed by SIGKILL at random moments and started again at the same address; every
row that was acknowledged is then looked for in the table. Then as long again without kills in a new lake: what memory
does in one life, and what a request costs. Clients, daemon and whatever else the machine does share its cores.
A 202 is timed from sending to the answer; "from when it was due" also has what the clients themselves were late.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import floodmark
from bench.measure import Goal, Line
from bench.workshop import Workshop
from tests.load.check import Tally, tally
from tests.load.clients import APPENDED, COLUMNS, Load, Sent, finish
from tests.load.daemon import (
    NO_KILLS,
    Kills,
    LoadDaemon,
    between_kills,
    memory_of,
    run_load,
    share_of,
)

TABLE = "load"
PER_S, ROWS, CLIENTS, CONNECTIONS = 300, 100, 4, 7
SECONDS, QUICK_SECONDS = 60, 6
KILLS, SEED = 6, 8
# The clients have started by then; and so long after the start of a load memory is not looked at yet.
LEAD_S, WARM_S = 1.5, 10.0
MB = 1_000_000


def run(shop: Workshop) -> Iterator[Line]:
    quick = shop.sizes.bulk_rows < 1_000_000
    seconds = QUICK_SECONDS if quick else SECONDS
    yield from _killed(shop, seconds, 2 if quick else KILLS)
    yield from _left_alone(shop, seconds, 1.0 if quick else WARM_S)


def _killed(shop: Workshop, seconds: int, count: int) -> Iterator[Line]:
    shop.say(f"{PER_S} requests/s of {ROWS} rows for {seconds} s, {count} kills")
    path = _made(shop)
    with LoadDaemon(shop.folder, ["--lake", str(path)]) as daemon:
        load = _load(daemon, seconds)
        kills = Kills(count, SEED, 0.1 * seconds, 0.9 * seconds)
        sent = run_load(daemon, [load], kills, shop.folder)[TABLE]
        sent.append(finish(daemon.url, load))
        daemon.stop()
        downs, peak = daemon.downs, max(one.rss_bytes for one in daemon.samples)
    yield from _counts(_tally(path, load, sent), sent)
    yield Line("kills of the daemon", "", count, note="moments by chance; some hit it while it starts")
    yield Line("the daemon was down", " s", sum(up_s - down_s for down_s, up_s in downs), note=f"{len(downs)} times")
    yield from _latencies("between kills", between_kills(sent, downs), Goal(150))
    yield Line("highest resident size of all lives", " MB", peak / MB)


def _left_alone(shop: Workshop, seconds: int, warm_s: float) -> Iterator[Line]:
    shop.say(f"the same for {seconds} s without kills")
    path = _made(shop)
    with LoadDaemon(shop.folder, ["--lake", str(path)]) as daemon:
        load = _load(daemon, seconds)
        sent = run_load(daemon, [load], NO_KILLS, shop.folder)[TABLE]
        begin_s, end_s = load.start_s + warm_s, load.due_s(load.requests)
        memory = memory_of(daemon.samples, begin_s, (begin_s + end_s) / 2, end_s)
        during = [one for one in daemon.samples if load.start_s <= one.at_s]
        sent.append(finish(daemon.url, load))
        daemon.stop()
    found = _tally(path, load, sent)
    yield Line("lost or doubled without kills", " rows", found.lost + found.doubled + found.strange, goal=Goal(0))
    yield Line(
        "requests acknowledged in a second", "", len(sent) / (max(one.answered_s for one in sent) - load.start_s)
    )
    yield from _latencies("without kills", between_kills(sent, []), None)
    yield Line("resident size, first half", " MB", memory.first_bytes / MB, note=f"highest, after {warm_s:g} s")
    yield Line("resident size, second half", " MB", memory.second_bytes / MB)
    yield Line("resident size, second half against first", "x", memory.ratio, goal=Goal(1.15))
    cpu_s = during[-1].cpu_s - during[0].cpu_s
    yield Line("processor time of the daemon for a request", " ms", cpu_s / len(sent) * 1000, note="from 202 to table")


def _made(shop: Workshop) -> Path:
    path = shop.new_path("load")
    with floodmark.open(path, create=True, actor="bench") as lake:
        lake.create_table(TABLE, COLUMNS[APPENDED])
    return path


def _load(daemon: LoadDaemon, seconds: int) -> Load:
    return Load(
        "127.0.0.1",
        daemon.port,
        TABLE,
        APPENDED,
        requests=PER_S * seconds,
        per_s=PER_S,
        rows=ROWS,
        start_s=time.monotonic() + LEAD_S,
        clients=CLIENTS,
        connections=CONNECTIONS,
    )


def _tally(path: Path, load: Load, sent: Sequence[Sent]) -> Tally:
    with floodmark.open(path, read_only=True) as lake:
        return tally(lake, load, sent)


def _counts(found: Tally, sent: Sequence[Sent]) -> Iterator[Line]:
    acknowledged = [one for one in sent if one.state == "acknowledged"]
    took_s = max(one.answered_s for one in acknowledged) - min(one.due_s for one in acknowledged)
    yield Line("requests acknowledged in a second, with kills", "", len(acknowledged) / took_s, note=f"{PER_S} due")
    yield Line("rows acknowledged", "", found.acknowledged)
    yield Line("acknowledged rows that are lost", "", found.lost, goal=Goal(0), note="; ".join(found.odd))
    yield Line("rows that are there twice", "", found.doubled, goal=Goal(0))
    yield Line("rows that are unknown or incomplete", "", found.strange, goal=Goal(0))
    yield Line("requests sent more than once", "", sum(one.tries > 1 for one in sent))
    unknown = sum(one.state == "forsaken" for one in sent)
    yield Line("requests given up after a broken connection", "", unknown, note=f"{found.unknown_in} of them are in")
    yield Line("answers 429 or 503", "", sum(one.busy for one in sent))


def _latencies(when: str, sent: Sequence[Sent], goal: Goal | None) -> Iterator[Line]:
    served = [(one.answered_s - one.sent_s) * 1000 for one in sent]
    due = [(one.answered_s - one.due_s) * 1000 for one in sent]
    span = {"low": min(served), "high": max(served), "repeats": len(served)}
    yield Line(f"p50 of the 202 {when}", " ms", share_of(served, 0.5), **span)
    yield Line(f"p99 of the 202 {when}", " ms", share_of(served, 0.99), **span, goal=goal)
    yield Line(f"p99 of the 202 {when}, from when it was due", " ms", share_of(due, 0.99), 0, max(due), len(due))
