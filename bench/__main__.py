"""Run the benchmark: a table as it goes, JSON in bench/out at the end.

Exits with 0 also when goals are missed: figures are to be read, and a busy machine is no error.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
from rich.console import Console

from bench import (
    backfills,
    bulk,
    cold,
    compaction,
    feed,
    files_sink,
    groups,
    index,
    keyed,
    load,
    lookups,
    machine,
    publish,
    reading,
    report,
    requests,
    sinks,
    small,
    spool,
    upkeep,
    writers,
)
from bench.measure import Line
from bench.workshop import QUICK, Sizes, Workshop
from floodmark import clock

# In this order: what needs no Spark comes before the JVM shares the cores.
SECTIONS: dict[str, Callable[[Workshop], Iterator[Line]]] = {
    "cold": cold.run,
    "publish": publish.run,
    "requests": requests.run,
    "writers": writers.run,
    "planning": upkeep.planning,
    "sweep": upkeep.sweep,
    "upkeep": upkeep.run,
    "index": index.run,
    "lookups": lookups.run,
    "spool": spool.run,
    "load": load.run,
    "memory": compaction.memory,
    "sinks": sinks.run,
    "small": small.run,
    "bulk": bulk.run,
    "reading": reading.run,
    "keyed": keyed.run,
    "feed": feed.run,
    "groups": groups.run,
    "compaction": compaction.run,
    "files_sink": files_sink.run,
    "backfills": backfills.run,
}
OUT = Path(__file__).parent / "out"


def main() -> None:
    given = _arguments()
    console = Console(width=None if Console().is_terminal else 160)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    started, started_s = clock.format_time(clock.now_ms()), time.monotonic()
    sections: report.Sections = {}
    busy: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="floodmark-bench-", dir=given.folder) as folder:
        facts = machine.facts(Path(folder))
        if given.quick:
            console.print("[bold]--quick: small sizes, to see that it works. These are no figures.[/bold]")
        console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
        shop = Workshop(Path(folder), QUICK if given.quick else Sizes(), lambda text: console.print(f"  … {text}"))
        others = machine.Others()
        try:
            for name in given.only or SECTIONS:
                sections[name] = list(SECTIONS[name](shop))
                busy[name] = others.busy_cores()
                report.show(console, name, sections[name])
                if not machine.is_quiet(busy[name]):
                    console.print(f"[yellow]others kept {busy[name]} cores busy: these times are too long[/yellow]")
        finally:
            shop.close()
    run = {
        "started": started,
        "seconds": round(time.monotonic() - started_s),
        "quick": given.quick,
        "quiet": all(map(machine.is_quiet, busy.values())),
        "others_busy_cores": busy,
        "machine": facts,
    }
    path = report.write(OUT, started, run, sections)
    goals = [line for lines in sections.values() for line in lines if line.goal is not None]
    console.print(f"{sum(line.met is True for line in goals)} of {len(goals)} goals met", end="")
    console.print("" if run["quiet"] else ", on a busy machine", end="")
    console.print(f"{' (--quick: no figures)' if given.quick else ''}, {run['seconds']} s, {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Floodmark on this machine.")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="this section; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--folder", type=Path, help="where to put the data (default: the system's temporary folder)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
