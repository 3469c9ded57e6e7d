"""`query`: its text from the command line, a file or stdin; its rows as a table, JSON, lines, CSV or in a file."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import floodmark as fm
from floodmark.cli.main import main
from floodmark.testing.children import Child

ROWS = [{"id": number, "name": None if number == 3 else f"name, {number}"} for number in range(250)]
# All of it, in order, over several tasks; and types that JSON does not have.
WIDE = (
    "select id, name, cast(id / 4 as decimal(10,2)) as d, timestamp '2026-01-02 03:04:05.678901Z' as ts, "
    "date '2026-01-02' as day, cast(name as binary) as b, array(id, null) as xs from events order by id desc"
)


@dataclass(frozen=True)
class Done:
    code: int
    stdout: bytes
    stderr: str


COMMANDS: dict[str, tuple[list[str], str]] = {
    "text": (["query", "select id from events where id < 2 order by id"], ""),
    "file": (["query", "--file", "asked.sql", "--json"], ""),
    "short": (["query", "-f", "asked.sql", "--format", "jsonl"], ""),
    "stdin": (["query", "-", "--json"], "-- which?\nselect max(id) as n\nfrom events;\n"),
    "stdin as file": (["query", "-f", "-", "--json"], "select min(id) as n from events"),
    "csv": (["query", "select id, name from events where id in (2, 3) order by id", "--format", "csv"], ""),
    "table": (["query", "select id from events order by id", "--format", "table"], ""),
    "limited": (["query", "select id from events order by id", "--limit", "2", "--format", "jsonl"], ""),
    "no rows": (["query", "select id from events where id < 0", "--output", "none.parquet", "--json"], ""),
    "parquet": (["query", WIDE, "--output", "wide.parquet", "--json"], ""),
    "arrow": (["query", WIDE, "-o", "wide.arrow"], ""),
    "lines": (["query", WIDE, "--output", "wide.txt", "--format", "jsonl", "--limit", "7"], ""),
    "again": (["query", WIDE, "--output", "wide.parquet"], ""),
    "replaced": (["query", "select 1 as one", "--output", "wide.arrow", "--overwrite"], ""),
    "neither": (["query"], ""),
    "both": (["query", "select 1", "-f", "asked.sql"], ""),
    "no file": (["query", "-f", "missing.sql"], ""),
    "no text": (["query", "-f", "binary.sql"], ""),
    "no query": (["query", "-"], "drop table events"),
    "needs a file": (["query", "select 1", "--format", "parquet"], ""),
    "unknown format": (["query", "select 1", "--output", "out.xml"], ""),
    "in the lake": (["query", "select 1", "--output", "lake/out.csv"], ""),
    "two of a name": (["query", "select id, id from events", "--format", "jsonl"], ""),
    "fails late": (["query", "select raise_error('late') as x from events", "--output", "late.jsonl"], ""),
}


def run_commands(folder: str) -> dict[str, Done]:
    """Every command after the other, in this process: Spark starts once."""
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("FLOODMARK_", "SPARK_", "PYSPARK_"))]:
        del os.environ[name]
    Path("floodmark.toml").write_text('[lake]\npath = "lake"\n[spark]\nmaster = "local[2]"\n')
    with fm.open("lake", create=True) as lake:
        lake.create_table("events", "id long not null, name string")
        lake.append("events", ROWS[:100])
        lake.append("events", ROWS[100:])
    Path("asked.sql").write_text(
        "\ufeff/* the first three */\nselect id, name from events\nwhere id < 3 order by id;\n"
    )
    Path("binary.sql").write_bytes(b"select \xff")
    return {name: run_main(*command) for name, command in COMMANDS.items()}


def run_main(arguments: list[str], typed: str) -> Done:
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(typed.encode()), "utf-8")
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code or 0
    return Done(code, out.buffer.getvalue(), err.getvalue())  # type: ignore[attr-defined]  # it is a BytesIO


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("queries")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Done]:
    answers: dict[str, Done] = Child(run_commands, str(folder)).wait(240)
    return answers


def lines(text: bytes) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_query_is_a_text_a_file_or_stdin(done: dict[str, Done]) -> None:
    assert done["text"].stdout.split() == [b"id", b"0", b"1"]
    assert json.loads(done["file"].stdout) == {"rows": ROWS[:3]}
    assert lines(done["short"].stdout) == ROWS[:3]
    assert json.loads(done["stdin"].stdout) == {"rows": [{"n": 249}]}
    assert json.loads(done["stdin as file"].stdout) == {"rows": [{"n": 0}]}


def test_rows_are_shown_in_every_format_and_all_of_them(done: dict[str, Done]) -> None:
    found = list(csv.reader(io.StringIO(done["csv"].stdout.decode())))
    assert found == [["id", "name"], ["2", "name, 2"], ["3", ""]]
    assert len(done["table"].stdout.splitlines()) == len(ROWS) + 1
    assert lines(done["limited"].stdout) == [{"id": 0}, {"id": 1}]


def test_rows_are_written_to_a_file_whole_in_order_and_with_their_types(folder: Path, done: dict[str, Done]) -> None:
    report = json.loads(done["parquet"].stdout)
    assert (report["rows"], report["format"], report["file"]) == (250, "parquet", "wide.parquet")
    found = pq.read_table(folder / "wide.parquet")
    assert found["id"].to_pylist() == list(reversed(range(250)))
    assert found.schema.field("d").type == pa.decimal128(10, 2)
    assert found.schema.field("day").type == pa.date32()
    assert found["d"][0].as_py() == Decimal("62.25")
    assert found["ts"][0].as_py().isoformat() == "2026-01-02T03:04:05.678901+00:00"
    assert found["b"][0].as_py() == b"name, 249"
    assert found["xs"][0].as_py() == [249, None]
    assert found["name"].to_pylist()[-4] is None
    assert b"250 rows into wide.arrow" in done["arrow"].stdout
    assert [row["id"] for row in lines((folder / "wide.txt").read_bytes())] == list(range(249, 242, -1))
    assert pa.ipc.open_file(folder / "wide.arrow").read_all().to_pylist() == [{"one": 1}]
    assert pq.read_table(folder / "none.parquet").schema.names == ["id"]


REFUSED = {
    "again": "--overwrite",
    "neither": "--file FILE",
    "both": "one query",
    "no file": "missing.sql",
    "no text": "binary.sql",
    "no query": "only a query",
    "needs a file": "--output FILE",
    "unknown format": "Name it .jsonl",
    "in the lake": "outside of it",
    "two of a name": "AS name",
}


def test_wrong_input_is_named_and_writes_nothing(folder: Path, done: dict[str, Done]) -> None:
    for name, words in REFUSED.items():
        assert (done[name].code, done[name].stdout) == (2, b""), name
        assert words in done[name].stderr, name
    assert not (folder / "out.xml").exists()


def test_a_query_that_fails_late_leaves_no_file(folder: Path, done: dict[str, Done]) -> None:
    assert done["fails late"].code != 0
    assert "Spark could not compute this query" in done["fails late"].stderr
    assert not (folder / "late.jsonl").exists()
