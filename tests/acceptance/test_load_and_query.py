"""`load` and `query`: files in, rows out, through Spark. All of them in one process with one session, because starting
Spark takes seconds; one more is started as a shell would."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import select, update

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.cli.main import main
from floodmark.testing.children import Child
from floodmark.testing.invariants import check_lake
from tests.conftest import ids

SCHEMA = "id long not null, name string, amount decimal(8,2)"


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str
    version: int

    @property
    def data(self) -> Any:
        assert self.stdout.count("\n") == 1, self.stdout
        return json.loads(self.stdout)

    @property
    def error(self) -> Any:
        assert "Traceback" not in self.stderr, self.stderr
        return self.data["error"]


def write_files(folder: Path) -> None:
    def rows(first: int, count: int) -> list[dict[str, Any]]:
        return [{"id": n, "name": f"row {n}", "amount": f"{n}.25"} for n in range(first, first + count)]

    def jsonl(name: str, records: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    def comma(name: str, records: list[dict[str, Any]]) -> None:
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)

    jsonl("first.jsonl", rows(0, 10))
    jsonl("part1.jsonl", rows(40, 1))
    jsonl("part2.jsonl", [{"name": "amount and order do not matter", "id": 41}])
    comma("second.csv", rows(10, 10))
    records = [{**record, "amount": Decimal(record["amount"])} for record in rows(20, 10)]
    third = pa.table(
        {name: [record[name] for record in records] for name in ("id", "name", "amount")},
        schema=pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.decimal128(8, 2))]),
    )
    pq.write_table(third, folder / "third.parquet")
    pq.write_table(third.append_column("extra", pa.array(range(10))), folder / "extra.parquet")
    jsonl("extra.jsonl", [{"id": 50, "nmae": "misspelt"}])
    comma("extra.csv", [{"id": 50, "nmae": "misspelt", "amount": "1.00"}])
    comma("lacking.csv", [{"id": 50, "name": "no amount"}])
    jsonl("type.jsonl", [*rows(50, 3), {"id": "fifty", "name": "not a number"}])
    comma("type.csv", [*rows(50, 3), {"id": 53, "name": "not a number", "amount": "much"}])
    jsonl("null.jsonl", [*rows(50, 2), {"name": "no id"}])
    (folder / "broken.jsonl").write_text('{"id": 1, "name": "a"}\n{"id": 2, "na')
    (folder / "empty.jsonl").write_text("")


def load(file: str, *more: str) -> list[str]:
    return ["load", "events", file, "--json", *more]


COMMANDS: dict[str, list[str]] = {
    "create": load("first.jsonl", "--create", "--schema", SCHEMA, "--partition", "bucket(2, id)", "--batch", "one"),
    "same batch": load("first.jsonl", "--batch", "one"),
    "same batch as text": ["load", "events", "first.jsonl", "--batch", "one"],
    "csv": load("second.csv", "--message", "by csv"),
    "parquet as text": ["load", "events", "third.parquet"],
    "several": load("part1.jsonl", "part2.jsonl", "--create"),
    "nothing": load("empty.jsonl"),
    "nothing as text": ["load", "events", "empty.jsonl"],
    "extra column, jsonl": load("extra.jsonl"),
    "extra column, csv": load("extra.csv"),
    "extra column, parquet": load("extra.parquet"),
    "lacking column, csv": load("lacking.csv"),
    "wrong type, jsonl": load("type.jsonl"),
    "wrong type, csv": load("type.csv"),
    "required null": load("null.jsonl"),
    "broken line": load("broken.jsonl"),
    "missing file": load("missing.jsonl"),
    "missing table": ["load", "nowhere", "first.jsonl", "--json"],
    "schema without create": load("first.jsonl", "--schema", SCHEMA),
    "unknown mode": load("first.jsonl", "--mode", "merge"),
    "unknown format": load("first.jsonl", "--format", "xml"),
    "unknown ending": load("first.txt"),
    "several formats": load("first.jsonl", "second.csv"),
    "create from wrong files": ["load", "fresh", "type.jsonl", "--create", "--schema", SCHEMA, "--json"],
    "create from missing files": ["load", "fresh", "missing.csv", "--create", "--schema", SCHEMA, "--json"],
    "inferred": ["load", "inferred", "second.csv", "--create", "--json"],
    "count": ["query", "select count(*) as n, sum(amount) as total from events", "--json"],
    "as text": ["query", "select id, name from events where id < 2 order by id"],
    "old version": ["query", "select count(*) as n from events", "--version", "1", "--json"],
    "joined": [
        *("query", "with a as (select id from events) select count(*) as n from a join inferred using (id)"),
        *("--json",),
    ],
    "limited": ["query", "select id from events order by id", "--limit", "3"],
    "no rows": ["query", "select id from events where id = -1"],
    "not a query": ["query", "delete from events", "--json"],
    "no such table": ["query", "select * from nowhere", "--json"],
    "no such column": ["query", "select nmae from events", "--json"],
    "no such version": ["query", "select 1", "--version", "99", "--json"],
    "no such time": ["query", "select * from events", "--at", "2001-01-01", "--json"],
    "version and time": ["query", "select 1", "--version", "2", "--at", "2026-01-01T00:00:00Z", "--json"],
}


def run_commands(folder: str) -> dict[str, Done]:
    """Every command after the other, in this process."""
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("FLOODMARK_", "SPARK_", "PYSPARK_"))]:
        del os.environ[name]
    Path("floodmark.toml").write_text('[lake]\npath = "lake"\n[spark]\nmaster = "local[2]"\n')
    fm.open("lake", create=True).close()
    done = {name: run_main(arguments) for name, arguments in COMMANDS.items()}
    failpoints.observer = make_again
    done["conflict"] = run_main(load("first.jsonl"))
    return done


def run_main(arguments: list[str]) -> Done:
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code or 0
    with fm.open("lake", read_only=True) as lake:
        return Done(code, out.getvalue(), err.getvalue(), lake.status()["version"])


def make_again(point: str) -> None:
    """As if the table was dropped and made again while rows were staged; and back, when the command has ended."""
    if point in ("append.sealed", "abandon.fenced"):
        with fm.open("lake", recover=False) as lake, lake.catalog.database.write() as tx:
            head = tables.heads
            known = tx.execute(select(head.c.table_id).where(head.c.table_name == "events")).scalar_one()
            new = f"other-{known}" if point == "append.sealed" else known.removeprefix("other-")
            tx.execute(update(head).where(head.c.table_name == "events").values(table_id=new))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loads")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Done]:
    answers: dict[str, Done] = Child(run_commands, str(folder)).wait(240)
    return answers


# ── load ──


def test_a_load_makes_the_table_and_says_what_it_did(done: dict[str, Done]) -> None:
    data = done["create"].data
    assert (done["create"].code, data["outcome"], data["rows"], data["version"]) == (0, "committed", 10, 1)
    assert {"version", "outcome", "operation", "kind", "actor", "message", "tables", "rows", "seconds"} <= set(data)
    assert data["tables"][0]["files_total"] == 2, "two buckets"


def test_the_same_batch_again_is_a_no_op_that_says_so(done: dict[str, Done]) -> None:
    again = done["same batch"]
    assert (again.code, again.data["outcome"], again.data["rows"], again.data["version"]) == (
        0,
        "already_committed",
        0,
        1,
    )
    assert (
        done["same batch as text"].stdout == "nothing to do: batch one was already committed to events in version 1\n"
    )
    assert done["same batch as text"].version == 1


def test_every_format_is_loaded(done: dict[str, Done]) -> None:
    assert (done["csv"].code, done["csv"].data["rows"], done["csv"].data["message"]) == (0, 10, "by csv")
    assert done["parquet as text"].stdout == "10 rows into events, version 3\n"
    assert (done["several"].data["rows"], done["several"].version) == (2, 4)


def test_files_without_rows_are_nothing_to_do(done: dict[str, Done]) -> None:
    assert (done["nothing"].code, done["nothing"].data["outcome"], done["nothing"].data["rows"]) == (
        0,
        "nothing_to_do",
        0,
    )
    assert done["nothing as text"].stdout == "nothing to do: the files have no rows\n"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("extra column, jsonl", "Invalid", ("nmae", "name")),
        ("extra column, csv", "Invalid", ("nmae", "name")),
        ("extra column, parquet", "Invalid", ("extra",)),
        ("lacking column, csv", "Invalid", ("amount",)),
        ("wrong type, jsonl", "Invalid", ("id",)),
        ("wrong type, csv", "Invalid", ("amount",)),
        ("required null", "Invalid", ("id", "1")),
        ("broken line", "Invalid", ()),
        ("missing file", "NotFound", ("missing.jsonl",)),
        ("missing table", "NotFound", ("nowhere",)),
        ("schema without create", "Invalid", ("--create",)),
        ("unknown mode", "Invalid", ("merge",)),
        ("unknown format", "Invalid", ("xml", "jsonl")),
        ("unknown ending", "Invalid", ("first.txt", "--format")),
        ("several formats", "Invalid", ("csv", "json")),
    ],
)
def test_wrong_input_is_named_and_changes_nothing(
    done: dict[str, Done], name: str, kind: str, words: tuple[str, ...]
) -> None:
    answer = done[name]
    assert answer.code == 2, answer.stderr
    assert answer.error["kind"] == kind
    said = " ".join([answer.error["message"], *answer.error["facts"].values(), answer.error["advice"]])
    assert [word for word in words if word not in said] == [], said
    assert answer.version == 4, "a wrong load changed the lake"
    assert answer.stderr.startswith(f"floodmark: {kind}: ")


@pytest.mark.parametrize("name", ["create from wrong files", "create from missing files"])
def test_a_load_that_fails_makes_no_table(done: dict[str, Done], name: str) -> None:
    assert done[name].code == 2
    assert done[name].version == 4, "a table was made for rows that never came"


def test_columns_are_inferred_when_a_table_is_made_without_a_schema(done: dict[str, Done], folder: Path) -> None:
    assert (done["inferred"].code, done["inferred"].data["rows"]) == (0, 10)
    with fm.open(folder / "lake", read_only=True) as lake:
        columns = {column["name"]: column["type"] for column in lake.show("inferred")["columns"]}
    assert columns == {"id": "int", "name": "string", "amount": "double"}


def test_a_table_that_changed_under_the_load_is_a_conflict(done: dict[str, Done]) -> None:
    answer = done["conflict"]
    assert answer.code == 3, answer.stderr
    assert answer.error["kind"] == "Conflict"
    assert "Run it again" in answer.error["advice"]
    assert answer.version == done["version and time"].version


def test_the_lake_is_whole_after_all_of_it(done: dict[str, Done], folder: Path) -> None:
    assert done
    with fm.open(folder / "lake") as lake:
        check_lake(lake.catalog)
        assert ids(lake) == [*range(30), 40, 41]
        assert lake.audit() == []


# ── query ──


def test_a_query_is_answered_as_json_and_as_text(done: dict[str, Done]) -> None:
    total = sum(Decimal(f"{n}.25") for n in (*range(30), 40))
    assert done["count"].data == {"rows": [{"n": 32, "total": str(total)}]}
    assert [line.split() for line in done["as text"].stdout.splitlines()] == [
        ["id", "name"],
        ["0", "row", "0"],
        ["1", "row", "1"],
    ]
    assert done["old version"].data == {"rows": [{"n": 10}]}
    assert done["joined"].data == {"rows": [{"n": 10}]}


def test_more_rows_than_the_limit_are_told_on_stderr(done: dict[str, Done]) -> None:
    assert done["limited"].stdout.split() == ["id", "0", "1", "2"]
    assert "more than 3 rows" in done["limited"].stderr
    assert done["no rows"].stdout == "no rows\n"


@pytest.mark.parametrize(
    ("name", "kind", "word"),
    [
        ("not a query", "Invalid", "delete"),
        ("no such table", "Invalid", "nowhere"),
        ("no such column", "Invalid", "nmae"),
        ("no such version", "NotFound", "99"),
        ("no such time", "NotFound", "2001-01-01"),
        ("version and time", "Invalid", "not both"),
    ],
)
def test_a_wrong_query_is_wrong_input(done: dict[str, Done], name: str, kind: str, word: str) -> None:
    answer = done[name]
    assert answer.code == 2, answer.stderr
    assert answer.error["kind"] == kind
    assert word in answer.stderr
    assert "Traceback" not in answer.stderr


# ── as a shell starts it ──


def shell(*arguments: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("FLOODMARK_", "SPARK_", "PYSPARK_"))
    }
    return subprocess.run(
        [sys.executable, "-m", "floodmark.cli.main", *arguments],
        cwd=cwd,
        env={**kept, **changes},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_load_in_a_process_of_its_own_prints_its_result_and_nothing_else(tmp_path: Path) -> None:
    write_files(tmp_path)
    fm.open(tmp_path / "lake", create=True).close()
    done = shell("load", "events", "first.jsonl", "--create", "--schema", SCHEMA, "--lake", "lake", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "10 rows into events, version 1\n"), done.stderr
    assert done.stderr == "", "neither Java nor Spark writes to the user's terminal"
    with fm.open(tmp_path / "lake") as lake:
        assert ids(lake) == list(range(10))
        check_lake(lake.catalog)


# ── Java ──


def java(folder: Path, answer: str) -> str:
    """A fake Java that writes down how it was called."""
    program = folder / "java" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/called\n{answer}\n')
    program.chmod(0o755)
    return str(folder / "java")


JAVAS: dict[str, Callable[[Path], dict[str, str]]] = {
    "none on the PATH": lambda folder: {"JAVA_HOME": "", "PATH": str(folder / "empty")},
    "none at JAVA_HOME": lambda folder: {"JAVA_HOME": str(folder / "empty")},
    "too old": lambda folder: {"JAVA_HOME": java(folder, "echo 'openjdk version \"11.0.2\" 2019-01-15' >&2")},
    "much too old": lambda folder: {"JAVA_HOME": java(folder, "echo 'java version \"1.8.0_292\"' >&2")},
    "does not start": lambda folder: {"JAVA_HOME": java(folder, "exit 1")},
}


@pytest.mark.parametrize("name", JAVAS)
def test_without_a_fitting_java_the_command_says_so_before_spark_is_touched(tmp_path: Path, name: str) -> None:
    with fm.open(tmp_path / "lake", create=True) as lake:
        lake.create_table("events", SCHEMA)
    write_files(tmp_path)
    (tmp_path / "empty").mkdir()
    settings = JAVAS[name](tmp_path)
    failed = shell("load", "events", "first.jsonl", "--lake", "lake", cwd=tmp_path, **settings)
    assert failed.returncode == 4, failed.stderr
    assert failed.stdout == ""
    assert failed.stderr.startswith("floodmark: Unavailable: Spark needs Java 17 or 21, but ")
    assert "apt install" in failed.stderr
    assert "Traceback" not in failed.stderr
    called = tmp_path / "called"
    assert not called.exists() or set(called.read_text().splitlines()) == {"-version"}
    with fm.open(tmp_path / "lake") as lake:
        assert lake.status()["version"] == 1
        check_lake(lake.catalog)


def test_questions_of_state_need_no_java(tmp_path: Path) -> None:
    fm.open(tmp_path / "lake", create=True).close()
    nothing = {"JAVA_HOME": "", "PATH": str(tmp_path / "empty")}
    assert shell("status", "--lake", "lake", cwd=tmp_path, **nothing).returncode == 0
    doctor = shell("doctor", "--json", "--lake", "lake", cwd=tmp_path, **nothing)
    assert doctor.returncode == 1
    failed = [check["check"] for check in json.loads(doctor.stdout)["checks"] if check["result"] != "ok"]
    assert failed == ["java"]
