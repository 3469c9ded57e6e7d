"""Quickstart: make a lake, put rows in, change some, ask what changed, read two versions.

Run it with `python examples/quickstart.py [FOLDER]`; without a folder it works in a temporary one. Only the last step,
which reads rows, starts Spark.
"""

from __future__ import annotations

import sys
import tempfile

import floodmark as fm

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="floodmark-quickstart-") + "/lake"

with fm.open(folder, create=True, actor="quickstart") as lake:
    lake.create_table("orders", "id long not null, customer long, amount decimal(10,2)")
    lake.create_table("customers", "id long not null, name string", key=["id"])

    with lake.transaction("first import", batch="import-1") as tx:  # both tables, one version
        tx.append("customers", [{"id": 1, "name": "Ada"}])
        tx.append("orders", [{"id": 10, "customer": 1, "amount": "9.50"}])
    first = lake.status()["version"]

    more = [{"id": 11, "customer": 1, "amount": "3.25"}]
    print(lake.append("orders", more, batch="monday").outcome)  # committed
    print(lake.append("orders", more, batch="monday").outcome)  # already_committed

    mark = lake.changes("customers").until  # how far this reader has come
    lake.merge("customers", [{"id": 1, "name": "Ada L."}, {"id": 2, "name": "Bo"}])  # upsert by key
    lake.delete("customers", "name = 'Bo'")
    print(lake.changes("customers", since=mark).arrow().read_all().to_pylist())  # id 1: upsert, id 2: delete

    for commit in lake.history():
        print(commit.version, commit.kind, commit.message, commit.rows_added)

    total = "select c.name, sum(o.amount) as total from orders o join customers c on o.customer = c.id group by c.name"
    lake.sql(total).show()
    lake.sql(total, version=first).show()
