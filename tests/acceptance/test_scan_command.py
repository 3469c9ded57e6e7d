"""`scan` and `head`: what they print and write, and that they start no JVM where Arrow is enough."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import floodmark as fm
from tests.acceptance.test_sink_commands import on_a_terminal

ROWS = [{"id": number, "name": None if number == 3 else f"name, {number}", "x": number / 4} for number in range(250)]
# A command in a process of its own, in which importing Spark is an error.
WITHOUT_SPARK = "import sys; sys.modules['pyspark'] = None; from floodmark.cli.main import main; main()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scan")
    with fm.open(folder / "lake", create=True) as lake:
        lake.create_table("events", "id long not null, name string, x double", sort=["id"])
        lake.append("events", ROWS[:100])
        lake.append("events", ROWS[100:])
    return folder


def run(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    command = [sys.executable, "-c", WITHOUT_SPARK, "--lake", str(folder / "lake"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout, done.stderr


def test_a_scan_prints_matching_rows_as_a_table_as_json_as_lines_and_as_csv(folder: Path) -> None:
    asked = ("scan", "events", "--where", "id between 2 and 4", "--columns", "name,id")
    shown, _ = run(folder, *asked)
    assert [line.split() for line in shown.splitlines()] == [
        ["name", "id"],
        ["name,", "2", "2"],
        ["-", "3"],
        ["name,", "4", "4"],
    ]
    expected = [{"name": row["name"], "id": row["id"]} for row in ROWS[2:5]]
    assert json.loads(run(folder, *asked, "--json")[0]) == {"rows": expected}
    assert json.loads(run(folder, *asked, "--format", "json")[0]) == {"rows": expected}
    assert [json.loads(line) for line in run(folder, *asked, "--format", "jsonl")[0].splitlines()] == expected
    lines = list(csv.reader(io.StringIO(run(folder, *asked, "--format", "csv")[0])))
    assert lines == [["name", "id"], ["name, 2", "2"], ["", "3"], ["name, 4", "4"]]


def test_all_rows_come_where_stdout_is_no_terminal(folder: Path) -> None:
    assert len(json.loads(run(folder, "scan", "events", "--json")[0])["rows"]) == len(ROWS)
    assert len(run(folder, "scan", "events")[0].splitlines()) == len(ROWS) + 1
    limited = json.loads(run(folder, "scan", "events", "--limit", "7", "--json")[0])
    assert (len(limited["rows"]), limited["truncated"]) == (7, True)
    assert (
        json.loads(run(folder, "scan", "events", "--where", "id < 3", "--limit", "7", "--json")[0])["truncated"]
        is False
    )
    assert len(run(folder, "head", "events")[0].splitlines()) == 21
    assert len(run(folder, "head", "events", "-n", "3")[0].splitlines()) == 4
    assert run(folder, "scan", "events", "--where", "false")[0] == "no rows\n"


@pytest.mark.parametrize("ending", ["parquet", "arrow", "csv", "jsonl"])
def test_a_scan_is_written_to_a_file_whole(folder: Path, ending: str) -> None:
    file = folder / f"out.{ending}"
    done = json.loads(run(folder, "scan", "events", "--where", "id >= 100", "--output", str(file), "--json")[0])
    assert (done["rows"], done["format"], done["version"]) == (150, ending, 3)
    readers: dict[str, Any] = {
        "parquet": lambda: pq.read_table(file).to_pylist(),
        "arrow": lambda: pa.ipc.open_file(file).read_all().to_pylist(),
        "csv": lambda: list(csv.DictReader(file.open())),
        "jsonl": lambda: [json.loads(line) for line in file.read_text().splitlines()],
    }
    found = sorted(readers[ending](), key=lambda row: int(row["id"]))
    assert [str(row["name"]) for row in found] == [row["name"] for row in ROWS[100:]]
    before = file.read_bytes()
    _, refused = run(folder, "scan", "events", "--output", str(file), code=2)
    assert "--overwrite" in refused
    assert file.read_bytes() == before
    run(folder, "scan", "events", "--limit", "1", "--output", str(file), "--overwrite")
    assert file.read_bytes() != before


def test_a_scan_explains_what_it_would_read(folder: Path) -> None:
    asked = ("scan", "events", "--where", "id = 120", "--explain")
    data = json.loads(run(folder, *asked, "--json")[0])
    assert (data["files"], data["files_total"], data["pruned_by"]) == (1, 2, "id = 120")
    assert "1 of 2" in run(folder, *asked)[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["scan", "event"], "floodmark tables"),
        (["scan", "events", "--where", "idd = 1"], "Did you mean id"),
        (["scan", "events", "--columns", "id,nam"], "Did you mean name"),
        (["scan", "events", "--format", "parquet"], "--output FILE"),
        (["scan", "events", "--format", "xml", "--output", "out.xml"], "Use jsonl, csv, parquet or arrow."),
        (["scan", "events", "--output", "out"], "Name it .jsonl"),
        (["scan", "events", "--output", "lake/out.csv"], "outside of it"),
        (["scan", "events", "--limit", "0"], "--limit"),
        (["scan", "events", "--version", "99"], "version"),
    ],
)
def test_wrong_input_is_named_and_writes_nothing(folder: Path, arguments: list[str], text: str) -> None:
    there = sorted(folder.rglob("*"))
    assert text in run(folder, *arguments, code=2)[1]
    assert sorted(folder.rglob("*")) == there


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("scan", "events"), 141),
        (("scan", "events", "--json"), 141),
        (("scan", "events", "--format", "csv"), 141),
        (("changes", "events", "--limit", "1000", "--json"), 141),
        (("tables",), 141),
        (("scan", "nothing", "--json"), 2),
    ],
    ids=str,
)
def test_a_reader_that_has_enough_ends_the_command_without_a_word(
    folder: Path, arguments: tuple[str, ...], code: int
) -> None:
    command = [sys.executable, "-c", WITHOUT_SPARK, "--lake", str(folder / "lake"), *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        said = child.stderr.read()
    assert child.returncode == code, said
    assert (said == "") is (code == 141)


@pytest.mark.parametrize("shown", ["csv", "jsonl", "json", "table"])
def test_a_scan_shows_on_a_terminal_that_it_runs_and_mixes_nothing_into_its_rows(folder: Path, shown: str) -> None:
    out, screen = on_a_terminal(folder, "scan", "events", "--where", "id < 3", "--columns", "id", "--format", shown)
    assert re.findall(r"\d", out) == ["0", "1", "2"]
    assert "scan" in screen
    assert "scan" not in out


def test_a_query_shows_on_a_terminal_that_it_runs_and_mixes_nothing_into_its_rows(folder: Path) -> None:
    out, screen = on_a_terminal(folder, "query", "select id from events where id < 3 order by id", "--json")
    assert json.loads(out) == {"rows": [{"id": 0}, {"id": 1}, {"id": 2}]}
    assert "query" in screen
    assert "query" not in out
