"""Rows land in the partition that Iceberg's own transforms give them."""

from __future__ import annotations

import base64
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from pyiceberg.conversions import to_bytes

from floodmark.rows.layout import partition_spec
from floodmark.rows.project import read_file
from floodmark.rows.schema import table_schema, user_fields
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage

TIMES = [datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), datetime(2026, 11, 15, 10, tzinfo=UTC)]
VALUES: dict[str, list[Any]] = {
    "int": [0, -1, 7, 2**31 - 1],
    "long": [0, -1, 17, -(2**63), 2**63 - 1],
    "decimal(9,2)": [Decimal("10.65"), Decimal("-0.05"), Decimal("0.00")],
    "decimal(38,4)": [Decimal("1234567890123456789.1234"), Decimal("-1.0000")],
    "string": ["", "iceberg", "éàü東京", "a"],
    "binary": [b"", b"\x00\xff\x01\x02\x03", b"ab"],
    "date": [date(1969, 12, 31), date(2026, 11, 15), date(1, 1, 1)],
    "timestamp": TIMES,
    "timestamp_ntz": [time.replace(tzinfo=None) for time in TIMES],
    "boolean": [True, False],
}
ALL = [
    *((f"bucket({n}, c)", kind) for n in (1, 16) for kind in VALUES if kind != "boolean"),
    *(("truncate(3, c)", kind) for kind in ("int", "decimal(9,2)", "decimal(38,4)", "string", "binary")),
    *((f"{unit}(c)", kind) for unit in ("year", "month", "day") for kind in ("date", "timestamp", "timestamp_ntz")),
    *(("hour(c)", kind) for kind in ("timestamp", "timestamp_ntz")),
    *(("c", kind) for kind in VALUES),
    *(("void(c)", kind) for kind in VALUES),
]


def stage_rows(text: str, partition: list[str], rows: list[dict[str, Any]], **extra: Any) -> Any:
    schema = table_schema(text)
    spec = partition_spec(schema, partition)
    storage = Storage({})
    target = StageTarget("memory://lake/t/data/op", schema.model_dump_json(), spec.model_dump_json(), **extra)
    return schema, spec, storage, stage_in_process(target, rows, storage)


def read_rows(storage: Storage, schema: Any, path: str) -> list[dict[str, Any]]:
    return [row for batch in read_file(storage, path, user_fields(schema)) for row in batch.to_pylist()]


@pytest.mark.parametrize(("partition", "kind"), ALL)
def test_every_row_is_in_the_partition_of_its_value(partition: str, kind: str) -> None:
    values = [*VALUES[kind], None, VALUES[kind][0]]
    schema, spec, storage, records = stage_rows(f"c {kind}", [partition], [{"c": value} for value in values])
    field, source = spec.fields[0], schema.find_field("c").field_type
    transform, result = field.transform.transform(source), field.transform.result_type(source)

    def expected(value: Any) -> str | None:
        moved = None if value is None else transform(value)
        return None if moved is None else base64.b64encode(to_bytes(result, moved)).decode()

    assert sorted(str(record.partition[0]) for record in records) == sorted({str(expected(value)) for value in values})
    found: Counter[Any] = Counter()
    for record in records:
        rows = read_rows(storage, schema, record.path)
        assert {expected(row["c"]) for row in rows} == {record.partition[0]}
        assert len(rows) == record.rows
        found.update(row["c"] for row in rows)
    assert found == Counter(values)


def test_several_partition_fields_combine() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [{"id": i, "ts": start + timedelta(hours=i), "k": "ab"[i % 2]} for i in range(96)]
    schema, _, storage, records = stage_rows("id long, ts timestamp, k string", ["day(ts)", "k"], rows)
    assert len(records) == len({record.partition for record in records}) == 8
    assert all(record.rows == 12 for record in records)
    for record in records:
        found = read_rows(storage, schema, record.path)
        assert len({(row["ts"].date(), row["k"]) for row in found}) == 1


def test_many_partitions_stay_within_the_open_files_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.rows.staging.writer.OPEN_FILES_MAX", 3)
    monkeypatch.setattr("floodmark.rows.staging.writer.BUFFER_BYTES_MAX", 2000)
    monkeypatch.setattr("floodmark.rows.staging.stage._BATCH_ROWS_MAX", 50)
    opened, most = set(), 0
    rows = [{"id": i, "k": i * 7 % 40} for i in range(2000)]

    class Watching(Storage):
        def writer(self, location: str, held: Any = None) -> Any:
            nonlocal most
            inner = super().writer(location, held)

            class Watched:
                def __enter__(self) -> Any:
                    nonlocal most
                    opened.add(location)
                    most = max(most, len(opened))
                    return inner.__enter__()

                def __exit__(self, *error: Any) -> Any:
                    opened.discard(location)
                    return inner.__exit__(*error)

            return Watched()

    schema = table_schema("id long, k long")
    spec = partition_spec(schema, ["k"])
    storage = Watching({})
    target = StageTarget("memory://lake/t/data/op", schema.model_dump_json(), spec.model_dump_json())
    records = stage_in_process(target, rows, storage)
    assert 1 < most <= 3
    assert sorted(row["id"] for record in records for row in read_rows(storage, schema, record.path)) == list(
        range(2000)
    )
    assert len({record.path for record in records}) == len(records)
