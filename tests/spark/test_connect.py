"""The same rows over Spark Connect, where there is no JVM in the process to lean on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONNECTED = """
import sys
from pyspark.sql import SparkSession
from floodmark.errors import Invalid
from floodmark.rows.layout import partition_spec
from floodmark.rows.reading.scan import scan
from floodmark.rows.schema import table_schema
from floodmark.rows.session import Sessions
from floodmark.rows.staging.stage import StageTarget, stage_dataframe
from floodmark.rows.sql.where import Searched, Where, check_where, spark_positions

remote = SparkSession.builder.remote("local[2]").getOrCreate()
spark = Sessions({}).get()
assert spark is remote and "connect" in type(spark).__module__
schema = table_schema("id long not null, k string, l array<int>")
df = spark.range(1000).selectExpr("id", "concat('k', id % 3) k", "array(cast(id as int), null) l")
spec = partition_spec(schema, ["k"])
target = StageTarget(sys.argv[1], schema.model_dump_json(), spec.model_dump_json())
records = stage_dataframe(target, df, "op")
files = [record.path for record in records]
for arrow in (False, True):
    found = scan(spark, files, schema, arrow=arrow)
    assert found.count() == 1000 and found.exceptAll(df).count() == 0
assert scan(spark, [], schema).count() == 0
where = Where.parse("sqrt(id) > 31.5", schema)
for arrow in (False, True):
    found = spark_positions(spark, where, Searched(files, schema, arrow=arrow))
    rows = {(row.file, row.pos) for row in found.collect()}
    assert len(rows) == 7 and {file for file, _ in rows} <= set(files), rows
for text in ("id in (select 1)", "nope + 1 = 1", "id > 1 y", "id", "id > 1) or (id > 1", "count(*) > 1"):
    try:
        check_where(spark, Where.parse(text, schema), schema)
        print("taken for a condition", text)
    except Invalid as error:
        pass
try:
    stage_dataframe(target, df.selectExpr("if(id % 2 = 0, null, id) id", "k", "l"), "op2")
except Invalid as error:
    print("refused", error.facts)
"""


def test_stage_scan_and_conditions_work_over_connect(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYSPARK_PYTHON": sys.executable}
    # A classic session of this process would otherwise be taken for the mode of the new one.
    for name in ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "PYSPARK_GATEWAY_PORT"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", CONNECTED, f"file://{tmp_path}/a é"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert "refused {'column': 'id', 'count': 500}" in done.stdout, done.stderr[-2000:]
    assert "taken for a condition" not in done.stdout
