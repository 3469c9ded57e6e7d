"""Maintenance: many small commits, then few large files, old rows gone, old versions and their files gone too.

Run it with `python examples/maintain.py [FOLDER]`; without a folder it works in a temporary one. Nothing here starts
Spark, because little is rewritten. A real lake runs `floodmark maintain` from cron, with the defaults: versions can be
read for 7 days, and files of expired ones stay for another 24 hours. Here both are nothing, to see the files go.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import UTC, datetime, timedelta

import floodmark as fm

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="floodmark-maintain-") + "/lake"
start = datetime(2026, 1, 1, tzinfo=UTC)

with fm.open(folder, create=True, actor="example") as lake:
    lake.create_table("readings", "sensor long not null, value double, ts timestamp")
    for day in range(40):
        lake.append("readings", [{"sensor": n, "value": day / 7, "ts": start + timedelta(days=day)} for n in range(3)])

    status = lake.status()
    print(f"{status['small_files']} small files of {status['files']}; due: {', '.join(status['due'])}")

    before = sorted(map(str, lake.read_arrow("readings", with_seq=True).read_all().to_pylist()))
    (done,) = lake.maintain.compact("readings").records
    print(f"{done.outcome}: {done.detail['files_in']} files into {done.detail['files_out']}")
    assert before == sorted(map(str, lake.read_arrow("readings", with_seq=True).read_all().to_pylist()))
    # Nothing is rewritten for the sake of it.
    print(lake.maintain.compact("readings").outcome)

    lake.maintain.set_policy("readings", "30d")  # by its only time column; also "1000000 rows", "10 GB"
    as_if = (start + timedelta(days=40)).isoformat()
    (done,) = lake.maintain.retain("readings", now=as_if).records
    print(f"{done.outcome}: {done.detail['rows_removed']} rows older than 30 days")

    print(f"{lake.show('readings')['snapshots']} snapshots can be read")
    lake.maintain.expire(keep="0s")
    details = lake.show("readings")
    print(f"{details['snapshots']} can be read, {details['orphan_files']} files are named by nothing that can be read")
    print(lake.maintain.sweep(grace="0s").outcome)
    print(f"{lake.show('readings')['orphan_files']} orphan files; health: {lake.status()['health']}")
