"""Files that may hold one of the incoming keys: none that holds one is left out, whatever is known of it."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from floodmark.commit.live_files import LiveFile
from floodmark.model import FileRecord
from floodmark.rows.reading import selection
from floodmark.rows.schema import arrow_schema
from floodmark.write.prune import key_fields, may_hold_keys, may_hold_range
from tests.unit.test_where import Staged, damaged

VALUES: dict[str, list[Any]] = {
    "int": [-(2**31), *range(-3, 12), 2**31 - 1],
    "long": [-(2**63), *range(0, 100, 9), 2**63 - 1],
    "boolean": [False, True],
    "string": ["", "a", "ab", "é", "😀" * 9, "x" * 40, "x" * 39 + "y", *map(str, range(9))],
    "binary": [b"", b"\0", b"\0\0", b"\xff" * 20, b"\xff" * 19 + b"\0", *(bytes([at]) for at in range(9))],
    "date": [date(1, 1, 1), *(date(2024, 1, 28) + timedelta(at) for at in range(9)), date(9999, 12, 31)],
    "timestamp": [datetime(2024, 1, 1, at, tzinfo=UTC) for at in range(9)],
    "decimal(20,2)": [Decimal(at) / 4 for at in range(-4, 9)],
}
# The columns of the key, then the partition.
SHAPES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    *(((kind,), ()) for kind in VALUES),
    (("int",), ("bucket(3, a)",)),
    (("string",), ("truncate(1, a)",)),
    (("date",), ("month(a)",)),
    (("long", "string"), ()),
    (("long", "string"), ("bucket(2, a)", "b")),
    (("int", "date"), ("b",)),
    (("int",), ("v",)),
    (("int",), ("a", "v")),
]


def known(record: FileRecord, kinds: tuple[str, ...]) -> Iterator[FileRecord]:
    """The same file as its writer described it, and as others may: with fewer bounds, and with a text cut inside a
    character."""
    *found, _ = damaged(record)
    for number, one in enumerate(found):
        yield replace(one, path=f"{record.path}#{number}")
    if "string" in kinds:
        cut = {kinds.index("string") + 1: base64.b64encode(b"\xf0\x9f").decode()}
        yield replace(record, path=f"{record.path}#low", lower_bounds=record.lower_bounds | cut)
        yield replace(record, path=f"{record.path}#high", upper_bounds=record.upper_bounds | cut)


@pytest.mark.parametrize(("kinds", "partition"), SHAPES, ids=repr)
def test_no_file_that_holds_an_incoming_key_is_left_out(
    tmp_path: Path, kinds: tuple[str, ...], partition: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(f"{kinds} {partition}")
    key = list("abc"[: len(kinds)])
    columns = ", ".join(f"{name} {kind} not null" for name, kind in zip(key, kinds, strict=True))
    table = Staged(tmp_path, f"{columns}, v int", partition, key=key)

    pool = [tuple(chance.choice(VALUES[kind]) for kind in kinds) for _ in range(10)]

    def stage(count: int) -> list[FileRecord]:
        chosen = [dict(zip(key, chance.choice(pool), strict=True)) for _ in range(count)]
        return table.stage([{**row, "v": chance.randrange(3)} for row in chosen])

    def keys_of(wanted: set[tuple[Any, ...]]) -> pa.Table:
        columns = [arrow_schema(table.schema).field(field.name) for field in key_fields(table.schema)]
        return pa.Table.from_pylist([dict(zip(key, one, strict=True)) for one in wanted], pa.schema(columns))

    def keys(record: FileRecord) -> set[tuple[Any, ...]]:
        return {tuple(row[name] for name in key) for row in table.rows(record)}

    live: list[tuple[LiveFile, set[tuple[Any, ...]]]] = [
        (table.live(one), keys(record))
        for count in (1, 1, 1, 2, 2, 3)
        for record in stage(count)
        for one in known(record, kinds)
    ]
    files, kept, least = [file for file, _ in live], 0, 0
    for number in range(12):
        monkeypatch.setattr(selection, "RANGES_MAX", number % 3)
        incoming = [record for count in (1, 2)[: number % 2 + 1] for record in stage(count)]
        wanted = set[tuple[Any, ...]]().union(*map(keys, incoming))
        given = [chance.choice(list(known(record, kinds))) if number % 4 == 3 else record for record in incoming]
        holding = {file.path for file, held in live if held & wanted}
        found = {file.path for file in may_hold_keys(files, given, table.metadata, table.schema, 0)}
        assert holding <= found
        assert holding <= {file.path for file in may_hold_range(files, keys_of(wanted), table.schema)}
        kept, least = kept + len(found), least + len(holding)
    # The check would be blind if all files were kept; one without bounds and partitions is.
    assert kept < 12 * len(files) or kinds == ("boolean",)
    assert least > 0
    assert may_hold_keys(files, [], table.metadata, table.schema, 0) == []
    assert may_hold_range(files, keys_of(set()), table.schema) == []
    assert may_hold_keys([], given, table.metadata, table.schema, 0) == []


def test_bounds_decide_which_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "RANGES_MAX", 32)
    table = Staged(tmp_path, "a int not null, b string not null", key=["a", "b"])
    files = [
        table.live(one)
        for low in range(0, 100, 10)
        for one in table.stage([{"a": low, "b": "f"}, {"a": low + 9, "b": "m"}])
    ]

    def kept(*rows: dict[str, Any]) -> list[int]:
        found = may_hold_keys(
            files, [one for row in rows for one in table.stage([row])], table.metadata, table.schema, 0
        )
        return [files.index(file) for file in found]

    assert kept({"a": 15, "b": "g"}) == [1]
    assert kept({"a": 15, "b": "n"}) == [], "one column of the key is enough"
    assert kept({"a": 15, "b": "g"}, {"a": 75, "b": "g"}) == [1, 7]
    assert kept(*({"a": at, "b": "g"} for at in (15, 75) * 20)) == [1, 2, 3, 4, 5, 6, 7], "what is around them all"
