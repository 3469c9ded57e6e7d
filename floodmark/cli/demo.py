"""`floodmark demo`: the pipeline once, with real kills, and a verdict.

A writer process loads orders and customers in one transaction per batch and is killed with SIGKILL at a different
step each time; what a retry script would do, runs the same batch again. In the end the lake is read with Spark and
compared with what was sent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Annotated, Any

import typer

from floodmark.failpoints import VARIABLE, WRITE_STEPS
from floodmark.lake import Lake
from floodmark.opening import open as open_lake

BATCHES = 12
ORDERS_PER_BATCH = 500


def run(
    context: typer.Context,
    path: Annotated[str | None, typer.Option(help="Where to make the lake (default: a new temporary folder).")] = None,
) -> None:
    """Load, crash at every step, recover, and count: rows in, rows out, lost, doubled."""
    output = context.obj.output
    folder = path or os.path.join(tempfile.mkdtemp(prefix="floodmark-demo-"), "lake")
    with open_lake(folder, create=True, settings=context.obj.settings.spark, actor="demo") as lake:
        lake.create_table(
            "orders",
            "id long not null, customer long, ts timestamp, amount decimal(10,2)",
            partition=["day(ts)"],
            if_not_exists=True,
        )
        lake.create_table("customers", "id long not null, name string", key=["id"], if_not_exists=True)
        kills = _load(folder, output)
        report = lake.recover()
        verdict = _verdict(lake, kills)
    output.note(f"the last healing: {report.outcome}")
    text = "\n".join(f"{name.replace('_', ' '):<14} {value}" for name, value in verdict.items())
    output.result(verdict, text=f"{text}\n\nlook around:    floodmark --lake {folder} history")
    if verdict["lost"] or verdict["doubled"] or verdict["half_seen"]:
        raise typer.Exit(1)


def _load(folder: str, output: Any) -> int:
    """Run every batch in a process of its own, killed at a step that changes, then again until it is in."""
    kills = 0
    # One writer alone is never planned again.
    steps = [f"transaction.{step}" for step in WRITE_STEPS if step != "planned_again"]
    for batch in range(BATCHES):
        point = steps[batch % len(steps)]
        for environment in ({VARIABLE: point}, {}):
            done = subprocess.run(
                [sys.executable, "-m", "floodmark.cli.demo", folder, str(batch)],
                env={**os.environ, **environment, "FLOODMARK_LOG": "error"},
                check=False,
            )
            if done.returncode == 0:
                break
            kills += 1
            output.note(f"batch {batch:>2}: killed at {point}, running it again")
    return kills


def _verdict(lake: Lake, kills: int) -> dict[str, Any]:
    wanted = BATCHES * ORDERS_PER_BATCH
    found = lake.sql(
        """
        SELECT (SELECT count(*) FROM orders) AS orders_out,
               (SELECT count(DISTINCT id) FROM orders) AS orders_distinct,
               (SELECT count(*) FROM customers) AS customers_out,
               (SELECT count(*) FROM orders o LEFT ANTI JOIN customers c ON o.customer = c.id) AS half_seen
        """
    ).collect()[0]
    return {
        "rows_in": wanted + BATCHES,
        "rows_out": found.orders_out + found.customers_out,
        "lost": wanted - found.orders_distinct,
        "doubled": found.orders_out - found.orders_distinct + found.customers_out - BATCHES,
        "half_seen": found.half_seen,
        "kills": kills,
        "healed": len(lake.audit()),
        "versions": lake.status()["version"],
    }


def write_batch(folder: str, batch: int) -> None:
    """One batch: a new customer and their orders, in one transaction, known by its id."""
    with open_lake(folder, actor="demo-writer") as lake, lake.transaction(f"batch {batch}", batch=str(batch)) as tx:
        tx.merge("customers", [{"id": batch, "name": f"customer {batch}"}])
        first = batch * ORDERS_PER_BATCH
        tx.append(
            "orders",
            [
                {"id": first + n, "customer": batch, "ts": f"2026-11-{1 + n % 3:02d}T10:00:00Z", "amount": f"{n}.50"}
                for n in range(ORDERS_PER_BATCH)
            ],
        )


if __name__ == "__main__":
    write_batch(sys.argv[1], int(sys.argv[2]))
