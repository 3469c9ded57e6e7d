"""Schema as code: tables from a file, a change of it as a plan, and its one publish.

Run it with `python examples/schema.py [FOLDER]`; without a folder it works in a temporary one. Nothing here starts
Spark. The second shape is written here as a dictionary; in a project it is the next state of the file.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import floodmark as fm

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="floodmark-schema-") + "/lake"
file = Path(__file__).with_name("schema.toml")

with fm.open(folder, create=True) as lake:
    print(lake.apply(file).outcome)
    print(lake.apply(file).outcome)
    lake.append("customers", [{"id": 1, "name": "Ada", "country": "UK"}])
    before = lake.append("orders", [{"id": 10, "customer": 1, "ts": datetime.now(UTC), "amount": 12}])
    try:
        lake.append("orders", [{"id": 11, "customer": 2, "ts": datetime.now(UTC), "amount": 1}])
    except fm.Invalid as error:
        print(f"refused: {error.message}")

    wanted = {
        "customers": {
            "columns": {
                "id": "long",
                "name": "string",
                "land": {"type": "string", "renamed_from": "country"},
                "vip": {"type": "boolean", "default": False},
            }
        },
        "orders": {"key": ["id"], "sort": ["ts desc"]},
    }
    plan = lake.plan(wanted)
    for step in plan.steps:
        print(f"  {step.table}: {step.action} ({step.kind})")
    commit = lake.apply(plan)
    print(f"{commit.outcome}: {len(commit.tables)} tables in one version")
    print(lake.read_arrow("customers").read_all().to_pylist())
    print(lake.read_arrow("customers", version=before.version).read_all().to_pylist())
    try:
        lake.apply(plan)
    except fm.Conflict as error:
        print(f"stale: {error.message}")
